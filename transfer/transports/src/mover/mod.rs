//! The transfer engine: batches of reads and writes between registered memories, over many paths.
//!
//! [`Transport`] is the port: one implementation each for shared memory, TCP and RDMA. The pure core in
//! `baton-transfer` decides which slice goes over which path, and when a batch has ended; the driver here
//! carries that out.

mod completions;
mod damage;
mod driver;
mod exposure;
mod gate;
mod greeting;
mod memory;
mod port;
pub mod published;
#[cfg(any(feature = "rdma", feature = "rdma-dlopen"))]
pub mod rdma;
mod reactor;
mod registry;
mod shm;
mod sockets;
mod tcp;
pub mod topology;
pub mod topology_gids;
mod topology_scan;

pub use baton_transfer::{BatchId, Failure, MoverConfig, MoverStats, RailSpec, Reason, Stage};
pub use completions::CompletionQueue;
pub use damage::Damage;
pub use driver::{Batch, BatchFuture, Mover, MoverSettings, Op, Outcome, Progress, Refusal};
pub use exposure::{Exposure, Grant, Permit, WindowId};
pub use memory::{Location, Memory, OwnedMemory, Pages};
pub use port::{
    Capabilities, Completion, Completions, Direction, Fault, NOTICE_BYTES_MAX, Notice, NoticeReceiver, Path,
    PathEnd, PathId, PeerId, Region, RemoteSegment, Slice, Transport,
};
pub use shm::{ShmConfig, ShmTransport};
pub use tcp::{TcpConfig, TcpTls, TcpTransport, TlsPem};
