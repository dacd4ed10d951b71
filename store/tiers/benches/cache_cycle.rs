//! Costs of the node's cache beside the engine: checksums, copies to host memory and back, flash and back, and the
//! bookkeeping of a hold. `cargo bench -p baton-tiers`.
//!
//! Each figure is the best of a few rounds, since the machine may be shared.

use baton_store::{Eviction, Offload, StoreConfig};
use baton_tiers::{CacheConfig, IoChoice, KvCache, Notice, Pool, block_checksum};
use baton_types::{BlockKey, ChainHasher, RequestId};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// 16 tokens of a small model: 2 × 12 layers × 4 heads × 64 × 2 bytes each.
const BLOCK_BYTES: usize = 16 * 12 * 2 * 4 * 64 * 2;
const CHAIN_BLOCKS: u64 = 256;
const ROUNDS: u64 = 7;

struct Memory(Vec<u8>);

impl Pool for Memory {
    fn read(&self, slot: u32, out: &mut [u8]) {
        let from = slot as usize * BLOCK_BYTES;
        out.copy_from_slice(&self.0[from..from + BLOCK_BYTES]);
    }

    fn write(&mut self, slot: u32, bytes: &[u8]) {
        let from = slot as usize * BLOCK_BYTES;
        self.0[from..from + BLOCK_BYTES].copy_from_slice(bytes);
    }
}

fn node(dram_blocks: u64, ssd_blocks: u64, offload: Offload) -> (KvCache, Memory) {
    let store = StoreConfig {
        hbm_blocks: 2 * CHAIN_BLOCKS,
        dram_blocks,
        ssd_blocks,
        eviction: Eviction::Lru,
        offload,
        ssd_second_touch: false,
    };
    let ssd_io = IoChoice::Auto;
    let config = CacheConfig { store, block_bytes: BLOCK_BYTES, ssd_dir: None, ssd_io, fingerprint: 0 };
    let cache = KvCache::new(config).expect("the machine has room for the benchmark");
    (cache, Memory(vec![1; 2 * CHAIN_BLOCKS as usize * BLOCK_BYTES]))
}

fn chain(name: u64) -> Vec<BlockKey> {
    let mut hasher = ChainHasher::new(name, b"bench");
    (0..CHAIN_BLOCKS).map(|id| hasher.push_id(id)).collect()
}

fn quiet(cache: &mut KvCache, memory: &mut Memory) -> u32 {
    let mut readable = 0;
    loop {
        for notice in cache.poll(memory) {
            if let Notice::Ready { readable_blocks, .. } = notice {
                readable = readable_blocks;
            }
        }
        if !cache.is_busy() {
            return readable;
        }
        std::thread::yield_now();
    }
}

/// Opens, seals and closes a chain; the time of the seal with all copies down.
fn fill(cache: &mut KvCache, memory: &mut Memory, number: u64, chain: &[BlockKey]) -> Duration {
    let owner = RequestId(number);
    cache.open(owner, chain, 0).expect("the pool is at rest");
    quiet(cache, memory);
    let start = Instant::now();
    cache.seal(owner, chain.len() as u32, memory).expect("it is its only owner");
    quiet(cache, memory);
    let took = start.elapsed();
    cache.close(owner);
    quiet(cache, memory);
    took
}

/// The best times to copy a chain down and up again.
fn down_and_up(dram_blocks: u64, ssd_blocks: u64) -> [Duration; 2] {
    let (mut cache, mut memory) = node(dram_blocks, ssd_blocks, Offload::WriteThrough);
    let mut best = [Duration::MAX; 2];
    for round in 0..ROUNDS {
        let chains = [0, 1, 2].map(|name| chain(3 * round + name));
        for (name, chain) in (0..).zip(&chains) {
            best[0] = best[0].min(fill(&mut cache, &mut memory, 3 * round + name, chain));
        }
        let owner = RequestId(1_000 + round);
        let start = Instant::now();
        let hold = cache.open(owner, &chains[0], 0).expect("the pool is at rest");
        assert!(hold.waiting, "the first chain was evicted by the others");
        assert_eq!(u64::from(quiet(&mut cache, &mut memory)), CHAIN_BLOCKS);
        best[1] = best[1].min(start.elapsed());
        cache.close(owner);
    }
    best
}

fn report(name: &str, took: Duration, blocks: u64) {
    let bytes = blocks as f64 * BLOCK_BYTES as f64;
    let per_block_us = took.as_secs_f64() * 1e6 / blocks as f64;
    println!("{name:<34} {per_block_us:>9.2} us/block {:>8.2} GB/s", bytes / took.as_secs_f64() / 1e9);
}

fn main() {
    println!("blocks of {BLOCK_BYTES} bytes, chains of {CHAIN_BLOCKS}");
    let bytes = vec![7; BLOCK_BYTES];
    let checksum = |_| {
        let start = Instant::now();
        (0..CHAIN_BLOCKS).for_each(|key| _ = black_box(block_checksum(BlockKey(u128::from(key)), &bytes)));
        start.elapsed()
    };
    report("checksum", (0..ROUNDS).map(checksum).min().unwrap_or_default(), CHAIN_BLOCKS);
    let [down, up] = down_and_up(8 * CHAIN_BLOCKS, 0);
    report("copy to host memory", down, CHAIN_BLOCKS);
    report("load from host memory", up, CHAIN_BLOCKS);
    let [down, up] = down_and_up(0, 8 * CHAIN_BLOCKS);
    report("write to flash", down, CHAIN_BLOCKS);
    report("load from flash", up, CHAIN_BLOCKS);
    let (mut cache, mut memory) = node(0, 0, Offload::Off);
    let chain = chain(0);
    fill(&mut cache, &mut memory, 0, &chain);
    let cycle = |round| {
        let start = Instant::now();
        for number in 0..100 {
            let owner = RequestId(1 + 100 * round + number);
            cache.open(owner, &chain, 4).expect("the pool is at rest");
            cache.close(owner);
        }
        start.elapsed() / 100
    };
    let hold = (0..ROUNDS).map(cycle).min().unwrap_or_default();
    println!("{:<34} {:>9.3} us/block", "open and close, all in HBM", hold.as_secs_f64() * 1e6 / 256.0);
}
