//! The model of a network: KV bytes move over links that they share.
//!
//! A *flight* is one transfer in progress over a *path* of one to four links. Flights share each
//! link by weighted processor sharing, so congestion shows; a flight that is *paced* follows the
//! prefill that produces its bytes, layer by layer, so transfer and compute overlap.
//!
//! **Rates.** Every link divides its rate among its flights by priority weight. Some flights can use
//! only a limited rate: a paced one that has caught up with its producer, or one with a rate cap.
//! Such a flight takes its limit, and the link divides the rest among its other flights
//! (water-filling). A flight's rate is the least that any link of its path gives it. When *another
//! link* holds a flight back, this link does not divide the unused share again. That keeps every
//! change local, and makes the rates a lower bound of weighted max-min fairness (exact on one link;
//! the floor for the lowest class aside). A change touches only the flights of the links that changed,
//! and those of the paths of paced flights that start to catch up because of it.
//!
//! **Arithmetic.** All integers: time inside is in nanoseconds, bytes in 10⁻¹² byte. So bytes are
//! conserved exactly (I7), and the same inputs give the same effects on every machine (I10).

mod credit;
mod effect;
mod flight;
mod flows;
mod input;
mod invariants;
mod model;
mod share;
#[cfg(test)]
mod snapshot;
mod stats;
#[cfg(test)]
mod testing;
mod timers;
mod topology;
mod units;

pub use baton_transfer::Priority;
pub use baton_types::simulated::NetworkConfig;
pub use effect::{Effect, Failure, Refusal};
pub use input::{Input, ProducerPace, TransferRequest};
pub use model::Network;
#[cfg(test)]
pub use snapshot::{FlightSnapshot, FlightState, LinkSnapshot, NetworkSnapshot};
pub use stats::NetworkStats;
pub use topology::{LinkId, LinkSpec, MAX_PATH_LINKS, PathError, PathLinks, TransferId};
