//! Arguments of a put, and facts about a value.

use baton_types::TenantId;

/// The effect of a put on a present value, and its relation to another writer of the key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OverwriteRule {
    /// Equal bytes are fine, others are refused. Waits for a writer that came before: it may bring the same.
    #[default]
    Same,
    /// Any value is left as it is and the put refused. Waits for a writer that came before.
    Keep,
    /// Equal bytes stay, others are replaced under a new generation. Does not wait for other writers; the last seal
    /// wins.
    Replace,
}

/// How a value is put.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PutOptions {
    /// The treatment of a present value.
    pub existing: OverwriteRule,
    /// Refuse when there is none.
    pub only_if_present: bool,
    /// Time to live from the seal on, µs; none is for ever.
    pub ttl_us: Option<u64>,
    /// CRC-32C of the value, if known beforehand: a put that would be refused ends before it begins.
    pub checksum: Option<u32>,
}

impl PutOptions {
    /// Replaces what is there, and stays for as long as there is room.
    pub const REPLACE: Self =
        Self { existing: OverwriteRule::Replace, only_if_present: false, ttl_us: None, checksum: None };
}

/// The result of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreOutcome {
    /// The value can be read.
    New {
        /// Its generation.
        generation: u64,
    },
    /// Equal bytes were present already.
    Unchanged {
        /// Their generation.
        generation: u64,
    },
}

/// The facts about a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectStat {
    /// Its length.
    pub bytes: u32,
    /// Its number in its shard; another value of the same key has another.
    pub generation: u64,
    /// Its CRC-32C, if known.
    pub checksum: Option<u32>,
    /// The rest of its time to live, µs.
    pub ttl_us: Option<u64>,
    /// Number of hard pins.
    pub hard_pins: u32,
    /// Readers with a lease.
    pub readers: u32,
    /// Whether it is on the SSD too, and so outlives the process.
    pub lasts: bool,
    /// Whether it is in the bucket too.
    pub cold: bool,
}

/// One key of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedKey {
    /// The tenant that owns it.
    pub tenant: TenantId,
    /// The key.
    pub key: Vec<u8>,
    /// The facts about its value.
    pub stat: ObjectStat,
}
