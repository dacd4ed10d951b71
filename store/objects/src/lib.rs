//! KV objects by key: immutable values in one arena of DRAM, with leases, pins, quotas and O(1) eviction.
//!
//! [`ObjectStore`] is shared by threads. A value is reserved, filled and sealed; only then can it be read. A read
//! holds a lease with an end; memory is never reused under somebody who touches it. A file on an SSD may lie below
//! ([`LowerConfig`]): what is touched twice outlives eviction and the process there; and a bucket below that, for what is
//! asked for again and again. The feature `resp` serves the
//! same store over Redis' protocol, so that engines' own connectors use it as it is.

mod arena;
#[cfg(feature = "resp")]
pub mod client;
mod clock;
mod config;
mod entry;
mod key;
mod lower;
#[cfg(feature = "resp")]
pub mod measure;
mod parts;
mod reading;
mod refusal;
#[cfg(feature = "resp")]
pub mod resp;
mod shard;
mod sieve;
mod stats;
mod store;
mod tenant;
mod ticket;

pub use clock::Clock;
pub use config::StoreConfig;
pub use key::{KEY_MAX_BYTES, Key};
pub use lower::{
    AdmissionRule, BlobLogStats, BroughtValue, ColdBucket, ColdConfig, ColdStats, LowerConfig, LowerStats,
    OperatorLog, SsdConfig,
};
pub use parts::{PARTS_MAX, Parts, stem};
pub use reading::Reading;
pub use refusal::Refusal;
pub use stats::StoreStats;
pub use store::{ListedKey, ObjectStat, ObjectStore, OverwriteRule, PutOptions, StoreOutcome};
pub use tenant::TENANTS_MAX;
pub use ticket::PutTicket;

/// CRC-32C of bytes: what vouches for a value.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}
