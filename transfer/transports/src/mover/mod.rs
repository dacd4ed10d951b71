//! The transfer engine: batches of reads and writes between registered memories, over many paths.
//!
//! [`Transport`] is the port: one implementation each for the inside of a process, shared memory, TCP and
//! RDMA. The pure core in `baton-transfer` decides which slice goes over which path, and when a batch has
//! ended; the driver here carries that out.

mod completions;
mod exposure;
mod memory;
mod port;
#[cfg(any(feature = "rdma", feature = "rdma-dlopen"))]
pub mod rdma;
pub mod topology_gids;

pub use completions::CompletionQueue;
pub use exposure::{Exposure, Grant, Permit, WindowId};
pub use memory::{Location, Memory, Pages};
pub use port::{
    Capabilities, Completion, Completions, Direction, Fault, Inbound, Notice, Path, PathEnd, PathId, PeerId,
    Region, RemoteSegment, Slice, Transport,
};
