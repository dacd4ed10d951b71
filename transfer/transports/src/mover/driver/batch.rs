//! Requests of callers, and their outcomes.

use std::sync::Arc;
use std::time::Duration;

use baton_transfer::Priority;
use baton_transfer::{Failure, Refusal as CoreRefusal};

use crate::mover::{Direction, Notice, PeerId, Region, RemoteSegment};

/// One range to move between local memory and a window of the peer's.
#[derive(Clone, Debug)]
pub struct Op {
    /// Read or write.
    pub direction: Direction,
    /// Where here. Until the batch has ended, the range belongs to it.
    pub local: Region,
    /// The peer's window.
    pub remote: Arc<RemoteSegment>,
    /// First byte, counted from the start of the window.
    pub remote_at: u64,
    /// Number of bytes, at least 1.
    pub bytes: u64,
}

/// Ranges to move, with one peer, that end together. Ranges of one batch must not overlap.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The peer to write to or read from.
    pub peer: PeerId,
    /// Priority of the batch.
    pub priority: Priority,
    /// How long it may take; the core's `batch_limit_us` where none is given, and at most that.
    pub limit: Option<Duration>,
    /// Whether to compare checksums of both ends of every slice.
    pub verify: bool,
    /// Goes to the peer's program when every byte is in place.
    pub notice: Option<Notice>,
    /// The ranges to move. May be empty where there is a notice.
    pub ops: Vec<Op>,
}

/// The outcome of an accepted batch. No byte of the batch lands on this side afterwards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Every byte is in place and the notice delivered. No byte lands at the peer afterwards, either.
    Done {
        /// Number of bytes.
        bytes: u64,
        /// Time from submission to end.
        took: Duration,
    },
    /// It ended short: what is in its ranges is not to be relied on.
    Failed {
        /// At what, and why, with the remedy.
        failure: Failure,
        /// The last fault that the transport reported for this peer.
        cause: String,
        /// Whether the peer is fenced too, so that no byte of the batch can land there. If not, the window's owner
        /// must revoke the window before it reuses the memory.
        remote_fenced: bool,
    },
    /// A caller cancelled it.
    Cancelled {
        /// As in `Failed`.
        remote_fenced: bool,
    },
}

/// How far a batch is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Not at its end.
    Running {
        /// Bytes in place.
        done_bytes: u64,
    },
    /// At its end.
    Ended(Outcome),
    /// Never taken, or ended so long ago that it is forgotten.
    Unknown,
}

/// Why a batch was not taken: nothing of it was or will be done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A bound is met, or the peer has restarted.
    #[error("transfer refused: {0}")]
    Core(CoreRefusal),
    /// The call is wrong.
    #[error("transfer refused: {0}")]
    Invalid(String),
    /// This side is going down.
    #[error("transfer refused: this node is shutting down")]
    ShutDown,
}
