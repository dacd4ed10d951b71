//! The inputs of the core: facts about what has happened.

use alloc::vec::Vec;

use crate::Priority;
use crate::{BatchId, PathNumber, PeerNumber, RailNumber, SliceTicket};

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// From the peer to this node.
    Read,
    /// From this node to the peer.
    Write,
}

/// One range to move. Where it is, here and there, stays with the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    /// Read or write.
    pub direction: Direction,
    /// Number of bytes, at least 1.
    pub bytes: u64,
    /// Where the local memory is: the row of [`crate::MoverConfig::ranks`].
    pub location: u16,
}

/// Ranges that end together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchRequest {
    /// The number of the batch, unique among those that live.
    pub batch: BatchId,
    /// The other side of every op.
    pub peer: PeerNumber,
    /// Decides whose slices go first on a shared rail.
    pub priority: Priority,
    /// When it fails at the latest; never later than [`crate::MoverConfig::batch_limit_us`] from now.
    pub deadline_us: Option<u64>,
    /// Whether a notice goes to the peer's program when all bytes are in place.
    pub notice: bool,
    /// The ranges to move. May be empty where there is a notice.
    pub ops: Vec<Op>,
}

/// A rail over which a peer may be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Index of the rail; a route over a rail that is not configured is dropped.
    pub rail: RailNumber,
    /// 0 is preferred. A rail of a higher tier is used only while none of a lower one works.
    pub tier: u8,
}

/// Why a slice, a notice, a probe or a path failed; what each means for the others is the port's promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// The path is broken: another may do.
    Path,
    /// No sign of life within the limit: another path may do.
    Silent,
    /// The window is closed or the peer's process has ended. No path will work; none of the bytes can land.
    Stale,
    /// The range or the access right is wrong. No path will work; none of the bytes can land.
    Invalid,
    /// Bytes are not those that were sent: worth one more try.
    Corrupt,
}

/// How certain the end of a path is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathEnd {
    /// No byte of the path can land later, on either side.
    Fenced,
    /// Nothing of it can land here; the peer could not be asked.
    PeerUnknown,
}

/// One fact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A peer can be reached over these routes. Sent once per peer, before its first batch.
    PeerKnown {
        /// A number not used before.
        peer: PeerNumber,
        /// Routes to the peer, at most one for each rail.
        routes: Vec<Route>,
    },
    /// A peer's process has ended. Its batches fail, and new ones are refused.
    PeerEnded {
        /// The number of the process that ended.
        peer: PeerNumber,
    },
    /// A caller submits a batch.
    Submit(BatchRequest),
    /// The caller cancels a batch. It still ends only when none of its bytes can land.
    Cancel {
        /// The batch to cancel.
        batch: BatchId,
    },
    /// A path is open.
    PathOpened {
        /// As in [`crate::Effect::OpenPath`].
        path: PathNumber,
    },
    /// A path could not be opened; it is gone.
    PathOpenFailed {
        /// As in [`crate::Effect::OpenPath`].
        path: PathNumber,
        /// The fault that stopped it; decides how long the route rests.
        fault: Fault,
    },
    /// A path broke without an order to close it. Never sent before `PathOpened`.
    PathBroken {
        /// The path that broke.
        path: PathNumber,
        /// The fault that its slices report if their retries run out.
        fault: Fault,
    },
    /// A path has closed. This is the last input about it.
    PathClosed {
        /// The path that closed.
        path: PathNumber,
        /// Whether late bytes can still land at the peer.
        end: PathEnd,
    },
    /// A path that refused a slice takes some again.
    PathRoom {
        /// The path with room.
        path: PathNumber,
    },
    /// A path was full: the slice has not left.
    PathRefused {
        /// The full path.
        path: PathNumber,
        /// The slice to post again.
        ticket: SliceTicket,
    },
    /// All bytes of a slice are where they belong.
    SliceDone {
        /// The path that the slice was posted on; a ticket of another path is ignored.
        path: PathNumber,
        /// As in [`crate::Effect::Post`].
        ticket: SliceTicket,
    },
    /// A notice was delivered, or a probe answered.
    Notified {
        /// The path that the notice or probe was sent on.
        path: PathNumber,
        /// As in [`crate::Effect::Notify`] or [`crate::Effect::Probe`].
        ticket: SliceTicket,
    },
    /// A slice, a notice or a probe failed.
    Failed {
        /// The path that it was posted on.
        path: PathNumber,
        /// As in the effect that posted it.
        ticket: SliceTicket,
        /// Decides whether another path is tried.
        fault: Fault,
    },
    /// Time has passed.
    TimerFired,
}
