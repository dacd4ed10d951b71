//! The cache with a slab file on a real file system.

use baton_store::{Eviction, Offload, StoreConfig};
use baton_tiers::{CacheConfig, CacheError, IoChoice, KvCache, Notice, Pool, block_checksum};
use baton_types::{BlockKey, CacheChange, ChainHasher, RequestId};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

const BLOCK_BYTES: usize = 10_000;
const SLOTS: usize = 8;

struct Memory(Vec<Vec<u8>>);

impl Pool for Memory {
    fn read(&self, slot: u32, out: &mut [u8]) {
        out.copy_from_slice(&self.0[slot as usize]);
    }

    fn write(&mut self, slot: u32, bytes: &[u8]) {
        self.0[slot as usize].copy_from_slice(bytes);
    }
}

fn config(dir: &Path) -> CacheConfig {
    let store = StoreConfig {
        hbm_blocks: SLOTS as u64,
        dram_blocks: 0,
        ssd_blocks: 32,
        eviction: Eviction::Lru,
        offload: Offload::WriteThrough,
        ssd_second_touch: false,
    };
    let ssd_dir = Some(dir.to_owned());
    CacheConfig { store, block_bytes: BLOCK_BYTES, ssd_dir, ssd_io: IoChoice::Auto, fingerprint: 3 }
}

struct Node {
    cache: KvCache,
    memory: Memory,
}

fn chain(name: &[u8], blocks: u64) -> Vec<BlockKey> {
    let mut hasher = ChainHasher::new(1, name);
    (0..blocks).map(|id| hasher.push_id(id)).collect()
}

fn content(key: BlockKey) -> Vec<u8> {
    key.0.to_le_bytes().into_iter().cycle().take(BLOCK_BYTES).collect()
}

impl Node {
    fn start(dir: &Path) -> Self {
        let cache = KvCache::new(config(dir)).expect("the directory is free");
        Self { cache, memory: Memory(vec![vec![0; BLOCK_BYTES]; SLOTS]) }
    }

    fn quiet(&mut self) -> Vec<Notice> {
        let deadline = Instant::now() + Duration::from_secs(30);
        let mut notices = self.cache.poll(&mut self.memory);
        while self.cache.is_busy() {
            assert!(Instant::now() < deadline, "the disk never answers");
            std::thread::sleep(Duration::from_micros(100));
            notices.extend(self.cache.poll(&mut self.memory));
        }
        self.cache.check().expect("the audit holds");
        notices
    }

    /// Serves a request and gives how many blocks it found.
    fn serve(&mut self, number: u64, chain: &[BlockKey]) -> usize {
        let owner = RequestId(number);
        let hold = self.cache.open(owner, chain, 0).expect("the pool is at rest");
        let told = self.quiet().into_iter().find_map(|notice| match notice {
            Notice::Ready { readable_blocks, .. } => Some(readable_blocks),
            Notice::Changed(_) => None,
        });
        let found = told.unwrap_or(hold.readable_blocks) as usize;
        for (at, (&key, &slot)) in chain.iter().zip(&hold.slots).enumerate() {
            if at < found {
                assert_eq!(self.memory.0[slot as usize], content(key), "block {at}");
            } else {
                self.memory.write(slot, &content(key));
            }
        }
        self.cache.seal(owner, chain.len() as u32, &mut self.memory).expect("all is filled");
        self.cache.close(owner);
        self.quiet();
        found
    }
}

#[test]
fn flash_serves_four_pools_full_of_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let mut node = Node::start(dir.path());
    let chains: Vec<_> = (0..4u8).map(|name| chain(&[name], 8)).collect();
    for (number, chain) in chains.iter().enumerate() {
        assert_eq!(node.serve(number as u64, chain), 0);
    }
    for (number, chain) in chains.iter().enumerate() {
        assert_eq!(node.serve(10 + number as u64, chain), 8);
    }
    let mut out = vec![0; BLOCK_BYTES];
    let key = chains[0][5];
    assert_eq!(node.cache.read_block(key, &node.memory, &mut out), Ok(block_checksum(key, &content(key))));
    let stats = node.cache.stats();
    assert_eq!(stats.integrity_rejects, 0);
    assert!(stats.store.tiers[2].onboarded_blocks >= 24);
}

#[test]
fn damage_on_the_disk_is_never_served() {
    let dir = tempfile::tempdir().unwrap();
    let mut node = Node::start(dir.path());
    let chains: Vec<_> = (0..4u8).map(|name| chain(&[name], 8)).collect();
    for (number, chain) in chains.iter().enumerate() {
        node.serve(number as u64, chain);
    }
    let file = std::fs::OpenOptions::new().write(true).open(dir.path().join("kv.slab")).unwrap();
    let file_bytes = file.metadata().unwrap().len();
    for offset in (4_096..file_bytes).step_by(4_096) {
        file.write_all_at(&[0x5A; 16], offset + 1_000).unwrap();
    }
    for (number, chain) in chains.iter().enumerate().take(3) {
        assert_eq!(node.serve(10 + number as u64, chain), 0);
    }
    assert!(node.cache.stats().integrity_rejects >= 3);
    assert_eq!(node.serve(20, &chains[2]), 8);
}

#[test]
fn a_node_directory_has_one_user_at_a_time_and_what_it_kept_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let mut node = Node::start(dir.path());
    let a = chain(b"a", 8);
    node.serve(1, &a);
    let second = KvCache::new(config(dir.path())).map(|_| ()).unwrap_err();
    assert!(matches!(&second, CacheError::Flash(_)) && second.to_string().contains("in use"), "{second}");
    drop(node);
    let mut again = Node::start(dir.path());
    assert_eq!((again.cache.flash().recovered_blocks, again.cache.flash().dropped_blocks), (8, 0));
    assert_eq!(again.cache.inventory().len(), 8, "it is announced");
    let told = again.cache.poll(&mut again.memory);
    assert!(matches!(&told[..], [Notice::Changed(CacheChange::Stored { hashes, .. })] if hashes.len() == 8));
    assert_eq!(again.serve(1, &a), 8);
    drop(again);
    let other = CacheConfig { fingerprint: 4, ..config(dir.path()) };
    let other = KvCache::new(other).unwrap();
    assert_eq!(other.flash().recovered_blocks, 0);
    assert!(other.flash().words.contains("another model"), "{:?}", other.flash());
}
