//! The node's KV cache: the store's orders, carried out on bytes.

mod adopt;
mod audit;
mod config;
mod copies;
mod hold;
mod inventory;
mod loads;
#[cfg(test)]
mod model;
mod read;
mod recover;
#[cfg(test)]
mod scenes;
mod settle;
#[cfg(test)]
mod testing;

pub use config::{CacheConfig, CacheError};
pub use hold::{Hold, HoldRefusal, Misuse};
pub use read::BlockReadError;

use crate::dram::Dram;
use crate::file::{FileOptions, FileTier, Speed};
use crate::index::Place;
use crate::short::ShortNameMap;
use crate::slots::Slots;
use crate::tier::TierError;
use baton_store::{Hits, Owner, Store, StoreStats};
use baton_types::{BlockKey, CacheChange};
use copies::CopyOrder;
use hold::HoldRecord;
use loads::Loads;
use std::collections::{BTreeMap, VecDeque};

/// The engine's paged KV memory, one block at a time.
pub trait Pool {
    /// Copies a slot's bytes out; `out` is one block.
    fn read(&self, slot: u32, out: &mut [u8]);
    /// Overwrites a slot; `bytes` is one block.
    fn write(&mut self, slot: u32, bytes: &[u8]);
}

/// A report that the cache makes without a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A `waiting` hold has all its awaited blocks. Its owner computes the blocks from `readable_blocks` on, and
    /// seals them.
    Ready {
        /// The owner of the hold.
        owner: Owner,
        /// Leading blocks of its chain that are readable in HBM.
        readable_blocks: u32,
    },
    /// For the conductor's index, in order.
    Changed(CacheChange),
}

/// Counters of the cache, beside the store's own counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// The store's counters and gauges; what [`KvCache::adopt`] does behind the scenes is not
    /// counted as requests.
    pub store: StoreStats,
    /// Copies and loads that were read and were not what had been stored.
    pub integrity_rejects: u64,
}

/// The state of the flash tier, for an operator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flash {
    /// In a sentence: how it is used and what was found, or why it is off. Empty: not asked for.
    pub words: String,
    /// Whether it failed its trial and is not used.
    pub is_off: bool,
    /// Measured speed at the start.
    pub speed: Option<Speed>,
    /// Blocks of an earlier life that are readable again.
    pub recovered_blocks: u64,
    /// Blocks of an earlier life that continue others which are gone, and so were dropped.
    pub dropped_blocks: u64,
}

/// A block's place in HBM.
#[derive(Clone, Copy, Debug)]
struct Address {
    key: BlockKey,
    slot: u32,
}

/// The purpose of a transfer.
#[derive(Clone, Copy, Debug)]
enum Purpose {
    /// One block of a copy to flash.
    Write { ticket: u64, key: BlockKey, place: Place },
    /// One block of a load from flash, and where in the load it is.
    Read { owner: Owner, load: u64, key: BlockKey, at: u32 },
}

/// The KV blocks of one node: who holds which, in which slot, and their bytes below HBM.
///
/// Contract: used by one thread. The bytes of HBM slots belong to the engine; it writes a slot only while it holds it
/// in a [`Hold`], and only from the position on that the cache named. The thread calls [`KvCache::poll`] whenever it
/// has a moment: copies and loads progress there and in [`KvCache::seal`], nowhere else. Work that arrives in between
/// is queued, at most as much as the store's capacities allow.
#[derive(Debug)]
pub struct KvCache {
    config: CacheConfig,
    store: Store,
    addresses: ShortNameMap<Address>,
    slots: Slots,
    dram: Dram,
    file: Option<FileTier>,
    /// How the flash tier began, for the operator.
    flash: Flash,
    held: BTreeMap<Owner, HoldRecord>,
    /// Owners waiting for a `Ready`, and the position that each was last seen to await.
    waiting: BTreeMap<Owner, u32>,
    notices: Vec<Notice>,
    copies: VecDeque<CopyOrder>,
    loads: BTreeMap<Owner, Loads>,
    next_load: u64,
    purposes: BTreeMap<u64, Purpose>,
    counts: CacheStats,
    /// Counts that adoptions added to the store's counters.
    adopted: AdoptionCounts,
    /// Whether the store has had an input since the last poll.
    has_input: bool,
}

/// Counts that adoptions added to the store's counters.
#[derive(Clone, Copy, Debug, Default)]
struct AdoptionCounts {
    opened: u64,
    missed: u64,
    hits: Hits,
}

impl KvCache {
    /// Makes a cache. With a flash tier in a given folder, the blocks kept from an earlier life of this node are
    /// readable again, and the first [`KvCache::poll`] reports them.
    ///
    /// A flash tier that fails its trial at the start is not used; [`KvCache::flash`] says so.
    ///
    /// # Errors
    /// [`CacheError`] says what in the configuration, or on the machine, stands against it.
    pub fn new(config: CacheConfig) -> Result<Self, CacheError> {
        config.validate()?;
        config.check_memory()?;
        let file = match config.ssd_blocks() {
            0 => None,
            blocks => {
                let options = FileOptions {
                    dir: config.ssd_dir.as_deref(),
                    capacity_blocks: blocks,
                    block_bytes: config.block_bytes,
                    fingerprint: config.fingerprint,
                    io: config.ssd_io,
                };
                Some(FileTier::open(&options).map_err(CacheError::Flash)?)
            }
        };
        Self::with_file(config, file)
    }

    /// A cache on a given flash tier.
    fn with_file(mut config: CacheConfig, file: Option<FileTier>) -> Result<Self, CacheError> {
        let (file, flash) = recover::try_out(file);
        if flash.is_off {
            config.store.ssd_blocks = 0;
        }
        let mut cache = Self::on_tried(config, file, flash)?;
        cache.recover();
        Ok(cache)
    }

    fn on_tried(config: CacheConfig, file: Option<FileTier>, flash: Flash) -> Result<Self, CacheError> {
        Ok(Self {
            store: Store::new(config.store.clone()).map_err(CacheError::Store)?,
            addresses: ShortNameMap::default(),
            slots: Slots::new(config.hbm_blocks()),
            dram: Dram::new(config.dram_blocks(), config.block_bytes),
            file,
            flash,
            held: BTreeMap::new(),
            waiting: BTreeMap::new(),
            notices: Vec::new(),
            copies: VecDeque::new(),
            loads: BTreeMap::new(),
            next_load: 0,
            purposes: BTreeMap::new(),
            counts: CacheStats::default(),
            adopted: AdoptionCounts::default(),
            has_input: false,
            config,
        })
    }

    /// Carries out due work and returns the reports since the last call. Never waits.
    pub fn poll(&mut self, pool: &mut dyn Pool) -> Vec<Notice> {
        self.take_transfers(pool);
        self.run_loads(pool);
        self.run_copies(pool);
        self.report_ready();
        self.has_input = false;
        std::mem::take(&mut self.notices)
    }

    /// Whether the next `poll` may have something to do even if nothing else is asked before it.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        // Copies and loads that are left over after a poll wait for transfers, or for owners.
        self.has_input || self.file.as_ref().is_some_and(|file| file.under_way() > 0)
    }

    /// Leading blocks of `chain` that are readable, by the fastest tier of each.
    #[must_use]
    pub fn lookup(&self, chain: &[BlockKey]) -> Hits {
        self.store.lookup(chain)
    }

    /// The state of the flash tier after the start.
    #[must_use]
    pub const fn flash(&self) -> &Flash {
        &self.flash
    }

    /// The configuration in force.
    #[must_use]
    pub const fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// The counters, and the gauges as they are now.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        let mut stats = self.counts;
        stats.store = self.store.stats();
        stats.store.opened -= self.adopted.opened;
        stats.store.missed_blocks -= self.adopted.missed;
        let Hits { hbm, dram, ssd, .. } = self.adopted.hits;
        for (tier, hits) in stats.store.tiers.iter_mut().zip([hbm, dram, ssd]) {
            tier.hit_blocks -= u64::from(hits);
        }
        stats
    }

    /// Counts bytes below HBM that were not what had been stored.
    fn count_error(&mut self, error: &TierError) {
        match error {
            TierError::Corrupt { .. } => self.counts.integrity_rejects += 1,
            TierError::Io(_)
            | TierError::Absent
            | TierError::Full
            | TierError::WrongLength { .. }
            | TierError::SameShortName => {}
        }
    }

    /// Reports `Ready` to the owners that have all awaited blocks.
    fn report_ready(&mut self) {
        let (store, notices) = (&self.store, &mut self.notices);
        self.waiting.retain(|&owner, position| {
            let awaited = store.next_awaited(owner, *position);
            match awaited {
                Some(next) => *position = next,
                None => notices.push(Notice::Ready { owner, readable_blocks: store.readable_blocks(owner) }),
            }
            awaited.is_some()
        });
    }
}
