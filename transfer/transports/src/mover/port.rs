//! The port: what a transport does, and what it promises.
//!
//! A transport opens [`Path`]s from one device of this node to one device of a peer and moves *slices* over
//! them, each between a range of local memory and a range of a window of the peer's ([`super::Exposure`]).
//! No call blocks but [`Transport::open`] and [`Transport::revoke`].
//!
//! **Promises.** Every slice taken by [`Path::post`] ends by exactly one completion. `Done` says that all its
//! bytes are where they belong, and verified where the slice asks for it: a write's at the peer, a read's
//! here. `Failed` says nothing about where bytes of it may still land: only the end of its path does, once
//! [`Completion::Closed`] has come with [`PathEnd::Fenced`]: from then on no byte of any slice of that path
//! lands anywhere. `Closed` is the last completion of a path, and every path that was opened gives one, at
//! the latest after its limits of time.

use std::sync::Arc;

use super::completions::CompletionQueue;
use super::exposure::WindowId;
use super::memory::Memory;

/// A peer process: its address, and the number of its life, which changes when it restarts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId {
    /// Where its endpoint listens, `host:port`.
    pub address: String,
    /// Drawn at random when the peer started. A peer refuses a request for another life as [`Fault::Stale`].
    pub epoch: u64,
}

/// A path's name. The opener chooses it and does not use it twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathId(pub u32);

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// From the peer's window to local memory.
    Read,
    /// From local memory to the peer's window.
    Write,
}

/// A range of local memory.
#[derive(Clone, Debug)]
pub struct Region {
    /// The memory, registered with the transport before.
    pub memory: Arc<Memory>,
    /// First byte.
    pub at: u64,
}

/// A window of a peer, as its owner describes it to those who may use it. Travels by any channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteSegment {
    /// Its right.
    pub window: WindowId,
    /// Its length in bytes.
    pub bytes: u64,
    /// Per transport (by [`Transport::name`]), what else is needed to reach it: a device's keys and address,
    /// a segment's number. Opaque to all but that transport.
    pub access: Vec<(String, Vec<u8>)>,
}

/// One piece of a batch, at most [`Capabilities::slice_bytes_max`] long.
#[derive(Clone, Debug)]
pub struct Slice {
    /// Comes back with the completion; unique among the slices outstanding on the path.
    pub ticket: u64,
    /// Read or write.
    pub direction: Direction,
    /// The local range.
    pub local: Region,
    /// The peer's window.
    pub remote: Arc<RemoteSegment>,
    /// First byte, counted from the start of the window.
    pub remote_at: u64,
    /// Number of bytes, at least 1.
    pub bytes: u32,
    /// Whether to compare checksums of both ends before `Done`.
    pub verify: bool,
}

impl Slice {
    /// The fault of the slice for every transport: its size, or a range that is not inside.
    pub fn fault(&self, bytes_max: u32) -> Option<Fault> {
        let bytes = u64::from(self.bytes);
        let text = if self.bytes == 0 || self.bytes > bytes_max {
            format!("a slice of {bytes} bytes; give 1 to {bytes_max}")
        } else if !self.local.memory.holds(self.local.at, bytes) {
            format!("{bytes} bytes at {} of a local memory of {}", self.local.at, self.local.memory.bytes())
        } else if self.remote_at.checked_add(bytes).is_none_or(|end| end > self.remote.bytes) {
            format!("{bytes} bytes at {} of a window of {}", self.remote_at, self.remote.bytes)
        } else {
            return None;
        };
        Some(Fault::Invalid(text))
    }
}

/// The capabilities of a transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The largest slice.
    pub slice_bytes_max: u32,
    /// Slices that one path takes before it answers "full".
    pub outstanding_max: u32,
}

/// Why a slice or a path failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The path is broken: another may do.
    Path(String),
    /// The peer did not show life within the limit: another path to it may do.
    Silent(String),
    /// The window is closed or the epoch is not the peer's: a retry over another path cannot succeed. No byte of such
    /// a slice lands, because the peer refused it at its destination. The path goes on.
    Stale(String),
    /// The range or the right is wrong: a retry over another path cannot succeed. No byte lands, as for `Stale`.
    Invalid(String),
    /// Bytes differ from what was sent: worth one more try.
    Corrupt(String),
}

/// How far a path has come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathEnd {
    /// No byte of it can land, on either side.
    Fenced,
    /// No byte can land here; the peer did not answer. Late bytes may land in its windows until their owner calls
    /// [`super::Exposure::revoke`]. A batch that was writing must fail, not repeat.
    PeerUnknown,
}

/// The outcome of a slice, notice or probe, or a change of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Completion {
    /// A slice is where it belongs.
    Done {
        /// The path.
        path: PathId,
        /// The ticket of the slice, notice or probe.
        ticket: u64,
    },
    /// A slice is not.
    Failed {
        /// The path.
        path: PathId,
        /// The ticket of the slice, notice or probe.
        ticket: u64,
        /// Why it failed.
        fault: Fault,
    },
    /// A path went down by itself; its slices fail, and `Closed` follows.
    Broken {
        /// The path that went down.
        path: PathId,
        /// Why it went down.
        fault: Fault,
    },
    /// The last of a path.
    Closed {
        /// The path that has closed.
        path: PathId,
        /// What is known about late bytes.
        end: PathEnd,
    },
    /// A path that was full takes slices again.
    PathCapacity {
        /// The path that has room again.
        path: PathId,
    },
    /// A notice that this side sent has reached the peer's [`NoticeReceiver`].
    Notified {
        /// The path.
        path: PathId,
        /// The ticket of the slice, notice or probe.
        ticket: u64,
    },
}

/// Where completions go.
pub type Completions = Arc<CompletionQueue>;

/// Bytes of a notice, at most.
pub const NOTICE_BYTES_MAX: usize = 4 << 10;

/// A short message to the peer's program, delivered once, after the data of every slice that was `Done`
/// before it was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// At most 4 KiB.
    pub bytes: Vec<u8>,
}

/// Receives peers' messages for the program behind the transport.
pub trait NoticeReceiver: Send + Sync {
    /// A peer has sent a notice. Called on an I/O thread: must not block.
    fn notice(&self, from: &PeerId, notice: Notice);
}

/// One way to a peer.
pub trait Path: Send + Sync {
    /// Takes slices in order and says how many it took; fewer than offered means that it is full, and
    /// `Room` follows when it is not. A path that is broken takes them all and fails them.
    fn post(&self, slices: &[Slice]) -> usize;

    /// Sends a notice; `Notified` or `Failed` with this ticket follows.
    fn notify(&self, ticket: u64, notice: Notice);

    /// Asks the peer for a sign of life on this path; `Notified` or `Failed` with this ticket follows.
    fn probe(&self, ticket: u64);

    /// Moves the path along on the caller's thread, for callers that poll their queue and cannot wait for an
    /// I/O thread to wake. Transports that gain nothing by it do nothing; without it all goes on as well.
    fn poll(&self) {}

    /// Ends the path: slices outstanding fail, then `Closed` follows. Dropping a path does the same.
    fn close(&self);
}

/// One way of moving bytes.
pub trait Transport: Send + Sync {
    /// `shm`, `tcp`, `rdma`.
    fn name(&self) -> &'static str;

    /// The capabilities of the transport.
    fn capabilities(&self) -> Capabilities;

    /// Registers a memory with the devices, for local ranges and for windows. A second call does nothing.
    ///
    /// # Errors
    /// [`Fault::Invalid`] with the remedy: a limit to raise, a kind of memory that it cannot reach.
    fn register(&self, memory: &Arc<Memory>) -> Result<(), Fault>;

    /// The bytes that a peer needs, besides the window's number, to reach a window over this transport: `bytes` of a
    /// registered `memory` from `at` on.
    ///
    /// # Errors
    /// [`Fault::Invalid`] for memory that is not registered.
    fn access(&self, window: WindowId, memory: &Arc<Memory>, at: u64, bytes: u64) -> Result<Vec<u8>, Fault>;

    /// The window is being closed: returns when this transport lets nothing land through it. Transports whose
    /// I/O threads take a [`super::Permit`] for each copy have nothing to do.
    fn revoke(&self, window: WindowId);

    /// Devices of this node that paths can start from, by name; one that has no choice names one.
    fn devices(&self) -> Vec<String>;

    /// Opens a path from `device` to the peer. Waits for the peer, within the transport's limit.
    ///
    /// # Errors
    /// [`Fault::Silent`] or [`Fault::Path`] where it cannot be reached so, [`Fault::Stale`] where the peer
    /// lives in another epoch, [`Fault::Invalid`] where the two do not fit together.
    fn open(
        &self,
        id: PathId,
        peer: &PeerId,
        device: &str,
        completions: Completions,
    ) -> Result<Box<dyn Path>, Fault>;

    /// Ends every path and refuses more; returns when no I/O thread is left.
    fn shutdown(&self);
}
