//! Baton's conductor: where each request prefills and decodes, when it is refused, and which
//! blocks are fetched or recomputed.
//!
//! A pure core: [`Conductor::step`] takes *(now, input)* and emits [`Effect`]s. The live service and the simulator
//! drive the same code. `ARCHITECTURE.md` shows the way of a request.
#![no_std]
extern crate alloc;

mod admission;
mod busy;
mod change;
mod cold;
mod coming;
mod conductor;
mod config;
mod effect;
mod estimate;
mod expected;
mod explain;
mod failure;
mod fleet;
pub mod index;
mod input;
mod invariants;
mod last_copies;
mod lifecycle;
mod links;
mod peers;
mod placement;
mod policies;
mod prediction;
mod queue;
mod relearn;
mod replicate;
mod request;
mod roles;
mod room;
mod saved;
mod shares;
mod shed;
mod stats;
mod tickets;
mod timers;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use baton_types::FetchPlan;
pub use conductor::Conductor;
pub use config::{AdmissionMode, ConfigError, SchedulerConfig};
pub use effect::{Effect, FailStage, RejectReason, Rejection};
pub use explain::{CandidateTerms, Decision};
pub use fleet::{InstanceSpec, InstanceState};
pub use input::Input;
pub use peers::{PEER_VERSION, PeerPlacement, PeerStage};
pub use policies::PolicyName;
pub use prediction::{
    PathFigures, Prediction, PredictionFigures, PredictionLedger, PredictionOutcome, PredictionPath,
    PredictionTarget, ServedRequest,
};
pub use request::Request;
pub use roles::RoleAdvice;
pub use saved::{RestoreError, SavedConductor};
pub use stats::{InstanceLoad, SchedulerStats, Snapshot};
pub use tickets::Ticket;
