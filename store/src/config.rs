//! Settings of one node's store, for an operator to choose.

use alloc::format;
use alloc::string::String;
use serde::{Deserialize, Serialize};

use crate::Eviction;

/// The most blocks that all tiers together may hold: blocks are numbered with 32 bits.
const MAX_BLOCKS: u64 = 1 << 31;

/// Sizes and policies of one node's store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StoreConfig {
    /// Slots in HBM, at least 1. On a node without a GPU: the area that transfers land in.
    pub hbm_blocks: u64,
    /// Slots in host memory; 0 for none.
    pub dram_blocks: u64,
    /// Slots on local flash; 0 for none.
    pub ssd_blocks: u64,
    /// Which unpinned block goes first when a tier is full.
    pub eviction: Eviction,
    /// When a block is copied to the next slower tier.
    pub offload: Offload,
    /// Whether flash only takes blocks that were asked for twice, which spares writes of blocks
    /// that nobody reads again.
    pub ssd_second_touch: bool,
}

/// When a block is copied to the next slower tier that has any slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// Never.
    Off,
    /// As soon as it is readable in the faster tier, and again whenever it comes to rest without
    /// that copy.
    WriteThrough,
    /// When it is among the next to be evicted: a tier keeps its oldest eighth copied ahead, so
    /// that an eviction need not wait.
    #[default]
    OnEvict,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            hbm_blocks: 1024,
            dram_blocks: 8192,
            ssd_blocks: 0,
            eviction: Eviction::default(),
            offload: Offload::OnEvict,
            ssd_second_touch: true,
        }
    }
}

/// Why a configuration cannot be used, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("store config: {0}")]
pub struct ConfigError(pub String);

impl StoreConfig {
    /// Checks that the sizes can be worked with.
    ///
    /// # Errors
    /// Names the setting and the remedy.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.hbm_blocks == 0 {
            return Err(ConfigError(String::from(
                "hbm_blocks is 0; give at least 1 (without a GPU: the area that transfers land in)",
            )));
        }
        let total = self.capacities().iter().fold(0u64, |sum, &n| sum.saturating_add(n));
        if total > MAX_BLOCKS {
            return Err(ConfigError(format!(
                "hbm_blocks + dram_blocks + ssd_blocks is {total}; at most {MAX_BLOCKS} fit, use larger blocks"
            )));
        }
        Ok(())
    }

    /// The slots of each local tier, fastest first.
    pub(crate) const fn capacities(&self) -> [u64; 3] {
        [self.hbm_blocks, self.dram_blocks, self.ssd_blocks]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_cannot_work_are_named() {
        assert_eq!(StoreConfig::default().validate(), Ok(()));
        let none = StoreConfig { hbm_blocks: 0, ..StoreConfig::default() };
        assert!(none.validate().is_err_and(|e| e.0.contains("hbm_blocks is 0")));
        let huge = StoreConfig { ssd_blocks: u64::MAX, ..StoreConfig::default() };
        assert!(huge.validate().is_err_and(|e| e.0.contains("larger blocks")));
    }
}
