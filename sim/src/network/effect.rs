//! The effects of the network: the ends of transfers.

use crate::network::{LinkId, TransferId};

/// The end of a transfer. Each accepted one ends exactly once; each refused `Start` is answered once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// All bytes landed.
    Finished {
        /// The transfer whose bytes landed.
        transfer: TransferId,
        /// How many bytes landed: all that were asked for.
        bytes: u64,
        /// When it was started.
        started_us: u64,
    },
    /// It ended short, or never started.
    Failed {
        /// The transfer that failed.
        transfer: TransferId,
        /// The reason.
        reason: Failure,
        /// Whole bytes that had left before.
        delivered_bytes: u64,
    },
}

/// Why a transfer failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// A link of its path is down: take another path or wait.
    LinkDown(LinkId),
    /// Its deadline passed.
    Deadline,
    /// It was cancelled.
    Cancelled,
    /// It was not accepted; nothing moved.
    Refused(Refusal),
}

/// Why a `Start` was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// A flight of that name is in progress, and goes on: this answers the second `Start` only.
    Duplicate,
    /// As many flights as configured are in progress: retry when one has ended.
    TooManyFlights,
    /// This link has as many flights as configured: retry when one has ended.
    LinkFull(LinkId),
    /// No such link: the driver's topology is not the engine's.
    UnknownLink(LinkId),
}
