//! Baton's transfer core: batches of reads and writes between registered memories, over many paths to many peers.
//!
//! It decides how batches are cut into slices, which path each slice takes and when, which slices are
//! repeated when a path breaks, and when a batch has ended. The port in `baton-transports` defines slices,
//! paths and windows, and what a transport promises about them. This core sees sizes and names only.
//!
//! **When a batch ends.** A path that breaks leaves its unfinished slices *in doubt*: bytes of them may land
//! until the path has closed. They are repeated over other paths at once, for they are the same bytes for
//! the same place. But a batch ends only when no slice of it is outstanding and every path that held one in
//! doubt has closed. So after the core reports its end, none of its bytes can land here, and the caller owns
//! the local memory again.
//!
//! **At the peer.** A path that closes `Fenced` vouches for both sides. One that closes `PeerUnknown` vouches
//! for this side only: a copy of a write may still sit in front of the peer's memory. It holds the right
//! bytes, but may land at any later time. If the batch were reported as done, the peer's program could put
//! other bytes into that range within the same window, and lose them to the late copy. So such a batch fails,
//! although all of its bytes arrived by another path, with `remote_fenced` false: the owner revokes the
//! window. A batch that only reads writes nothing at the peer, so this does not concern it.
//!
//! **Notices.** A notice leaves when every byte is in place and no doubt is left, so the peer's program may
//! use the range at once. It is sent at most once: where its path breaks, the batch fails.
#![no_std]
extern crate alloc;

mod batch;
mod config;
mod effect;
mod ending;
mod engine;
mod faults;
mod ids;
mod input;
mod invariants;
mod mix;
mod path;
mod peer;
mod pool;
mod posting;
mod priority;
mod rail;
mod slab;
mod slices;
mod stats;
#[cfg(test)]
mod testing;
mod timers;

pub use config::{MAX_RAILS, MoverConfig, RailSpec};
pub use effect::{BoundKind, Effect, Failure, Reason, Refusal, Stage};
pub use engine::MoverCore;
pub use ids::{BatchId, PathNumber, PeerNumber, RailNumber, SliceTicket};
pub use input::{BatchRequest, Direction, Fault, Input, Op, PathEnd, Route};
pub use priority::Priority;
pub use stats::MoverStats;
