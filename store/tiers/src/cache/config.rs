//! Settings of a cache.

use crate::file::IoChoice;
use crate::recover::FlashError;
use baton_store::{ConfigError, StoreConfig};
use std::path::PathBuf;

/// One node's cache.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// Sizes of the tiers in blocks, and policies. `hbm_blocks` is the engine's pool.
    pub store: StoreConfig,
    /// The size of one block, at least 1.
    pub block_bytes: usize,
    /// Where the slab file goes if `ssd_blocks` is not 0; each node needs its own folder. Blocks
    /// there outlive the process. `None`: a temporary file, which goes with the cache.
    pub ssd_dir: Option<PathBuf>,
    /// How the disk is read and written.
    pub ssd_io: IoChoice,
    /// Stands for all that gives a block's bytes their meaning: model, precision, layout.
    pub fingerprint: u64,
}

impl CacheConfig {
    /// Checks sizes.
    ///
    /// # Errors
    /// The first that cannot be.
    pub fn validate(&self) -> Result<(), CacheError> {
        self.store.validate().map_err(CacheError::Store)?;
        if self.block_bytes == 0 {
            return Err(CacheError::BlockBytes);
        }
        for blocks in [self.store.hbm_blocks, self.store.dram_blocks, self.store.ssd_blocks] {
            let bytes = u128::from(blocks) * self.block_bytes as u128;
            if u32::try_from(blocks).is_err() || isize::try_from(bytes).is_err() {
                return Err(CacheError::TooLarge { blocks, block_bytes: self.block_bytes });
            }
        }
        Ok(())
    }

    /// Asks for the host memory, which the system would otherwise end the process for.
    pub(crate) fn check_memory(&self) -> Result<(), CacheError> {
        let dram_bytes = self.dram_blocks() as usize * self.block_bytes;
        let mut probe: Vec<u8> = Vec::new();
        probe.try_reserve_exact(dram_bytes).map_err(|_| CacheError::NoMemory { dram_bytes })
    }

    pub(crate) fn hbm_blocks(&self) -> u32 {
        count(self.store.hbm_blocks)
    }

    pub(crate) fn dram_blocks(&self) -> u32 {
        count(self.store.dram_blocks)
    }

    pub(crate) fn ssd_blocks(&self) -> u32 {
        count(self.store.ssd_blocks)
    }
}

fn count(blocks: u64) -> u32 {
    u32::try_from(blocks).expect("validated: a tier has fewer than 2^32 blocks")
}

/// Why there is no cache.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The store's configuration.
    #[error("cache: {0}")]
    Store(ConfigError),
    /// A block of no bytes.
    #[error("cache: block_bytes is 0; give the size of one KV block")]
    BlockBytes,
    /// A tier that no machine can address.
    #[error("cache: {blocks} blocks of {block_bytes} bytes cannot be addressed; take fewer")]
    TooLarge {
        /// Its blocks.
        blocks: u64,
        /// Their size.
        block_bytes: usize,
    },
    /// The machine does not give that much memory.
    #[error("cache: no {dram_bytes} bytes of host memory to be had; lower dram_blocks")]
    NoMemory {
        /// The bytes that were requested.
        dram_bytes: usize,
    },
    /// The slab file or its thread.
    #[error("cache: flash tier: {0}; check ssd_dir, or set ssd_blocks = 0")]
    Flash(FlashError),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(store: StoreConfig, block_bytes: usize) -> CacheConfig {
        CacheConfig { store, block_bytes, ssd_dir: None, ssd_io: IoChoice::Auto, fingerprint: 0 }
    }

    #[test]
    fn impossible_sizes_are_named() {
        let store = StoreConfig { hbm_blocks: 0, ..StoreConfig::default() };
        assert!(matches!(config(store, 1).validate(), Err(CacheError::Store(_))));
        assert!(matches!(config(StoreConfig::default(), 0).validate(), Err(CacheError::BlockBytes)));
        let store = StoreConfig { dram_blocks: 1 << 30, ..StoreConfig::default() };
        let error = config(store, 1 << 40).validate().unwrap_err();
        assert!(error.to_string().contains("take fewer"), "{error}");
        assert!(config(StoreConfig::default(), 1 << 10).validate().is_ok());
        let store = StoreConfig { dram_blocks: 1 << 30, ..StoreConfig::default() };
        let error = config(store, 1 << 31).check_memory().unwrap_err();
        assert!(error.to_string().contains("lower dram_blocks"), "{error}");
    }
}
