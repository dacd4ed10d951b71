//! Interchange with Mooncake, of one release of it ([`RELEASE`]): what its engines, its storage nodes, its master and
//! its clients say to each other, spoken by Baton.
//!
//! - [`serve_directory`] is a metadata server for Mooncake's engines.
//! - [`OpenSegment`] reads and writes the segment of an engine.
//! - [`StorageNode`] lends memory to a master, and serves it to the master's clients.
//! - [`Objects`] puts and gets objects that a master places.
//!
//! Every message is bounded, every wait has an end, and every status is looked at. Versions of the protocols that lose
//! bytes in silence are refused.

mod checksum;
pub mod data;
mod directory;
mod error;
pub mod handshake;
mod master;
mod node;
mod objects;
pub mod pack;
mod reach;
mod region;
mod release;
pub mod rpc;
mod segment;

pub use data::{DataClient, DataSettings, DataTimes, serve_data};
pub use directory::{Directory, DirectorySettings, PutError, lookup, serve_directory};
pub use error::{Kind, MooncakeError, Result};
pub use master::{Code, Located, Master, MountedSegment, Place, PlacementOptions, Replica, Standing, Uuid};
pub use node::{NodeSettings, StorageNode};
pub use objects::{KEY_BYTES_MAX, OBJECT_BYTES_MAX, Objects, ObjectsSettings};
pub use reach::{OpenSegment, Way};
pub use region::Region;
pub use release::{PACKAGE, RELEASE};
pub use rpc::CallTimes;
pub use segment::{Buffer, SegmentMeta};
