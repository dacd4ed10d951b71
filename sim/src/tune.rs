//! The search behind `baton tune`: which settings serve a trace best, found on one part of it and judged on another.
//!
//! This part is arithmetic: it says which runs it wants, its caller does them, on as many threads as there are and
//! without repeating those that it knows. Equal answers lead to equal questions, so a search is repeatable.

mod search;
mod tally;

pub use search::{Candidate, LOADS, SearchResult, SearchTrial, TuningKnob, fewest, largest_load, search};
pub use tally::{RunTally, gain, is_better, merit, share, total};
