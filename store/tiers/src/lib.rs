//! The bytes of one node's KV blocks: the driver around Baton's pure store.
//!
//! [`KvCache`] owns a [`baton_store::Store`], which decides, and carries its orders out: it gives
//! every block its HBM slot, copies blocks to host memory and to a slab file on flash, and brings
//! them up again. Its rules, beside those of the store:
//!
//! - an HBM slot has one tenant at a time, and is free again exactly when the store says so;
//! - every byte that comes back from host memory or flash is verified against a checksum over its
//!   key and its content; what cannot be vouched for is reported as a failed load, never served;
//! - a slow or failing disk costs cached blocks, never an answer.
//!
//! [`BlobLog`] keeps values of any length in the same slab file, cut into its blocks: the object store's SSD tier.
//!
//! One thread uses the cache; flash is written and read on a second one, with bounded queues.

mod aligned;
mod blob_log;
mod cache;
mod checksum;
mod disk;
mod dram;
#[cfg(feature = "faults")]
pub mod faults;
mod file;
mod index;
mod io;
mod io_sequencer;
mod layout;
mod queue;
mod recover;
mod ring;
mod short;
mod slot_table;
mod slots;
mod tier;

pub use blob_log::{
    BlobLog, BlobLogEvent, BlobLogOptions, BlobLogStats, BlobReadError, HEADER_MAX_BYTES, Listing, PutError,
    Record, Source,
};
pub use cache::{
    BlockReadError, CacheConfig, CacheError, CacheStats, Flash, Hold, HoldRefusal, KvCache, Misuse, Notice,
    Pool,
};
pub use checksum::block_checksum;
pub use dram::Dram;
pub use file::{FileOptions, FileTier, IoChoice, Speed};
pub use recover::{Beginning, FlashError};
pub use tier::{Tier, TierError};
