//! Damages what parsers read, and sees that they keep to their bounds.
//!
//! A run of [`Fuzz`] reads the inputs of one parser from `corpus/NAME`, tries each as it is, and then goes on with
//! damaged ones. It is seeded: the same seed tries the same inputs in the same order. A usual run has a fixed number of
//! cases; `BATON_FUZZ_SECONDS` makes every parser go on for so long, `BATON_FUZZ_SEED` begins elsewhere. An input that
//! makes a parser panic, take too long or allocate too much is written to `target/fuzz`; with its defect repaired it
//! belongs into the corpus.

mod counting;
mod coverage;
mod damage;
mod run;

pub use counting::AllocationCounter;
pub use damage::Mutator;
pub use run::{Fuzz, Verdict, corpus};
