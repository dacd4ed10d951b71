//! Settings of the store, checked before any memory is mapped.

use crate::arena::PAGE_BYTES;
use crate::parts::Parts;

/// Settings of [`crate::ObjectStore`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreConfig {
    /// Memory for values, bytes; rounded down to whole pages of 1 MiB.
    pub capacity_bytes: u64,
    /// Largest value, bytes; at most half of the memory, and below 4 GiB.
    pub value_max_bytes: u64,
    /// Most keys; 0 is one for each KiB of memory.
    pub keys_max: u64,
    /// Shards, a power of two; 0 is one for each 256 MiB, at most 64. Each keeps its own
    /// partly filled pages, so more than that waste memory.
    pub shards: usize,
    /// How long a writer has from its reservation to its seal before another may take over, µs.
    pub write_lease_us: u64,
    /// How long a reader holds what it reads at most, µs.
    pub read_lease_us: u64,
    /// How long a put waits for room at most before it is refused, µs; 0 does not wait.
    pub room_wait_us: u64,
    /// From this part of the memory on, puts evict more than they need, per cent.
    pub high_percent: u8,
    /// Whether reads check the checksum of what was stored with one.
    pub verify_reads: bool,
    /// Keys that are parts of one object, found only when all are there; none: each key is one by itself.
    pub parts: Option<Parts>,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            capacity_bytes: 1 << 30,
            value_max_bytes: 64 << 20,
            keys_max: 0,
            shards: 0,
            write_lease_us: 2_000_000,
            read_lease_us: 30_000_000,
            room_wait_us: 50_000,
            high_percent: 97,
            verify_reads: false,
            parts: None,
        }
    }
}

/// Settings made whole.
#[derive(Clone, Debug)]
pub(crate) struct EffectiveConfig {
    pub(crate) set: StoreConfig,
    pub(crate) pages: u32,
    pub(crate) shards: usize,
    pub(crate) keys_by_shard: usize,
    pub(crate) high_bytes: u64,
}

impl StoreConfig {
    /// Checks every setting.
    ///
    /// # Errors
    /// The setting that is wrong, and what it may be.
    pub(crate) fn check(&self) -> Result<EffectiveConfig, String> {
        let page = PAGE_BYTES as u64;
        let pages = u32::try_from(self.capacity_bytes / page).unwrap_or(0);
        if !(2..=1 << 20).contains(&pages) {
            return Err("capacity_bytes: give from 2 MiB to 1 TiB".into());
        }
        let value_top = (self.capacity_bytes / 2).min(u64::from(u32::MAX) - page);
        if self.value_max_bytes == 0 || self.value_max_bytes > value_top {
            return Err(format!("value_max_bytes: give from 1 to {value_top}, half of the memory"));
        }
        let shards = match self.shards {
            0 => (pages as usize / 256).clamp(1, 64).next_power_of_two(),
            given => given,
        };
        if !shards.is_power_of_two() || shards > 1024 {
            return Err("shards: give a power of two up to 1024, or 0".into());
        }
        let leases = [self.write_lease_us, self.read_lease_us];
        if leases.iter().any(|lease| !(1_000..=600_000_000).contains(lease)) {
            return Err("write_lease_us, read_lease_us: give from 1000 to 600000000".into());
        }
        if self.room_wait_us > 60_000_000 || !(10..=100).contains(&self.high_percent) {
            return Err("room_wait_us: at most 60000000; high_percent: from 10 to 100".into());
        }
        let keys_max = if self.keys_max == 0 { self.capacity_bytes / 1024 } else { self.keys_max };
        // Hashing is even, not equal: a tenth more, and some for a small share.
        let share = usize::try_from(keys_max).unwrap_or(usize::MAX).div_ceil(shards);
        let keys_by_shard = if shards == 1 { share } else { share + share / 10 + 16 };
        Ok(EffectiveConfig {
            set: self.clone(),
            pages,
            shards,
            keys_by_shard: keys_by_shard.min(1 << 30),
            high_bytes: u64::from(pages) * page * u64::from(self.high_percent) / 100,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_hold_and_each_wrong_setting_is_named() {
        let good = StoreConfig::default();
        let effective = good.check().unwrap();
        assert_eq!((effective.pages, effective.shards), (1024, 4));
        let wrong = [
            (StoreConfig { capacity_bytes: 1 << 20, ..good.clone() }, "capacity_bytes"),
            (StoreConfig { value_max_bytes: 1 << 30, ..good.clone() }, "value_max_bytes"),
            (StoreConfig { shards: 3, ..good.clone() }, "shards"),
            (StoreConfig { write_lease_us: 1, ..good.clone() }, "write_lease_us"),
            (StoreConfig { room_wait_us: u64::MAX, ..good.clone() }, "room_wait_us"),
            (StoreConfig { high_percent: 101, ..good }, "high_percent"),
        ];
        for (config, name) in wrong {
            assert!(config.check().unwrap_err().contains(name), "{name}");
        }
    }
}
