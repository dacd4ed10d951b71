//! A bench for tests inside the crate: a pool of plain memory, blocks whose bytes follow from their keys, a disk that
//! fails on request.

use super::{CacheConfig, Hold, KvCache, Notice, Pool};
use crate::disk::testing::FailingDisk;
use crate::file::IoChoice;
use crate::file::testing::on_disk;
use crate::layout::Layout;
use baton_store::{CopyState, Eviction, Offload, Owner, StoreConfig};
use baton_types::{BlockKey, ChainHasher, RequestId, Rng, Tier};
use std::sync::Arc;

pub(crate) const BLOCK_BYTES: usize = 48;

/// The engine's memory.
#[derive(Debug)]
pub(crate) struct Memory(Vec<[u8; BLOCK_BYTES]>);

impl Pool for Memory {
    fn read(&self, slot: u32, out: &mut [u8]) {
        out.copy_from_slice(&self.0[slot as usize]);
    }

    fn write(&mut self, slot: u32, bytes: &[u8]) {
        self.0[slot as usize].copy_from_slice(bytes);
    }
}

/// The expected bytes of a block.
pub(crate) fn content(key: BlockKey) -> [u8; BLOCK_BYTES] {
    let mut rng = Rng::new(key.short().0);
    std::array::from_fn(|_| rng.below(256) as u8)
}

/// The chain that a path through a tree stands for.
pub(crate) fn chain(path: &[u64]) -> Vec<BlockKey> {
    let mut hasher = ChainHasher::new(1, b"cache");
    path.iter().map(|&branch| hasher.push_id(branch)).collect()
}

pub(crate) fn owner(number: u64) -> Owner {
    RequestId(number)
}

/// A cache on the bench.
pub(crate) struct Bench {
    pub(crate) cache: KvCache,
    pub(crate) memory: Memory,
    pub(crate) disk: Arc<FailingDisk>,
}

impl Bench {
    pub(crate) fn new(capacities: [u64; 3], offload: Offload) -> Self {
        let [hbm_blocks, dram_blocks, ssd_blocks] = capacities;
        Self::with(StoreConfig {
            hbm_blocks,
            dram_blocks,
            ssd_blocks,
            eviction: Eviction::Lru,
            offload,
            ssd_second_touch: false,
        })
    }

    pub(crate) fn with(store: StoreConfig) -> Self {
        Self::over(store, Arc::new(FailingDisk::default()))
    }

    /// On a disk that an earlier life may have used.
    pub(crate) fn over(store: StoreConfig, disk: Arc<FailingDisk>) -> Self {
        let layout = Layout { block_bytes: BLOCK_BYTES, capacity: store.ssd_blocks as u32, fingerprint: 0 };
        let file = (store.ssd_blocks > 0).then(|| on_disk(&disk, layout).expect("the disk is well"));
        let memory = Memory(vec![[0; BLOCK_BYTES]; store.hbm_blocks as usize]);
        let config = CacheConfig {
            store,
            block_bytes: BLOCK_BYTES,
            ssd_dir: None,
            ssd_io: IoChoice::Auto,
            fingerprint: 0,
        };
        let cache = KvCache::with_file(config, file).expect("the tests' sizes are valid");
        Self { cache, memory, disk }
    }

    /// Ends the cache and starts it again on what its disk has.
    pub(crate) fn restart(&mut self) {
        let store = self.cache.config.store.clone();
        let none = StoreConfig { ssd_blocks: 0, ..store.clone() };
        // The old cache first carries out its pending orders.
        self.cache = Self::with(none).cache;
        *self = Self::over(store, Arc::clone(&self.disk));
        self.audit();
    }

    /// Polls until nothing is under way; gives all notices.
    pub(crate) fn quiet(&mut self) -> Vec<Notice> {
        let mut notices = Vec::new();
        for round in 0.. {
            notices.extend(self.cache.poll(&mut self.memory));
            if !self.cache.is_busy() {
                break;
            }
            assert!(round < 100_000, "the cache never comes to rest: {:?}", self.cache);
            std::thread::sleep(std::time::Duration::from_micros(20));
        }
        self.audit();
        notices
    }

    /// The cache's own audit, and: every block readable in HBM holds its bytes.
    pub(crate) fn audit(&self) {
        if let Err(sentence) = self.cache.check() {
            panic!("{sentence}: {:#?}", self.cache);
        }
        for block in self.cache.store.snapshot().blocks {
            if block.readable_in.contains(&Tier::Hbm) {
                let slot = self.cache.address(block.key).expect("the audit found it");
                assert_eq!(self.memory.0[slot as usize], content(block.key), "{:?}", block.key);
            }
        }
    }

    /// Writes the bytes of a block where it is to be.
    pub(crate) fn fill(&mut self, slot: u32, key: BlockKey) {
        self.memory.write(slot, &content(key));
    }

    /// Writes what no block holds.
    pub(crate) fn scribble(&mut self, slot: u32) {
        self.memory.write(slot, &[0xEE; BLOCK_BYTES]);
    }

    pub(crate) fn open(&mut self, number: u64, path: &[u64], room: u32) -> Hold {
        let hold = self.cache.open(owner(number), &chain(path), room).expect("there is room");
        self.audit();
        hold
    }

    /// A whole request, polled until it may compute; what it must compute it fills.
    pub(crate) fn serve(&mut self, number: u64, path: &[u64]) -> u32 {
        let hold = self.open(number, path, 0);
        let notices = self.quiet();
        let ready = notices.iter().find_map(|notice| match notice {
            Notice::Ready { owner: of, readable_blocks } if *of == owner(number) => Some(*readable_blocks),
            _ => None,
        });
        assert_eq!(hold.waiting, ready.is_some());
        let readable = ready.unwrap_or(hold.readable_blocks);
        for (&key, &slot) in chain(path).iter().zip(&hold.slots).skip(readable as usize) {
            self.fill(slot, key);
        }
        self.cache.seal(owner(number), path.len() as u32, &mut self.memory).expect("it holds all");
        assert!(self.cache.close(owner(number)));
        self.quiet();
        readable
    }

    /// Leading readable blocks, by tier.
    pub(crate) fn hits(&self, path: &[u64]) -> (u32, u32, u32) {
        let hits = self.cache.lookup(&chain(path));
        (hits.hbm, hits.dram, hits.ssd)
    }

    /// Pushes everything unpinned out of HBM.
    pub(crate) fn displace(&mut self) {
        let blocks = self.cache.config.hbm_blocks();
        self.open(9_999, &[], blocks);
        assert!(self.cache.close(owner(9_999)));
        self.quiet();
    }

    /// Flips a bit of the copy in host memory of one of the blocks there.
    pub(crate) fn damage_dram(&mut self, pick: usize) -> bool {
        let blocks = self.cache.store.snapshot().blocks;
        let there: Vec<_> = blocks.iter().filter(|block| block.readable_in.contains(&Tier::Dram)).collect();
        let picked = there.get(pick % there.len().max(1)).map(|block| block.key);
        if let Some(key) = picked {
            self.cache.dram.damage(key);
        }
        picked.is_some()
    }

    pub(crate) fn is_ready(&self, key: BlockKey, tier: Tier) -> bool {
        self.cache.store.copy_state(key, tier) == CopyState::Ready
    }
}
