//! The flash tier against the disk itself: blocks put in order and got at random, with as many
//! under way, beside a plain loop of direct reads and writes over the same file size in the same
//! run; then the start of a tier that holds a million blocks. `cargo bench -p baton-tiers --bench
//! flash`.
//!
//! `BATON_BENCH_DIR` names the folder, which decides the disk; `BATON_BENCH_BLOCKS` how many
//! blocks come back at the start.

use baton_store::{Eviction, Offload, StoreConfig};
use baton_tiers::{CacheConfig, FileOptions, FileTier, IoChoice, KvCache};
use baton_types::{BlockKey, ChainHasher, Rng};
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// 16 tokens of a small model, as in `cache_cycle`; a whole number of pages.
const BLOCK_BYTES: usize = 196_608;
const BLOCKS: usize = 2_048;
const ROUNDS: usize = 4;
/// What a tier has under way at most, reading or writing.
const DEPTH: usize = 64;

fn keys(blocks: usize) -> Vec<(BlockKey, Option<BlockKey>)> {
    let mut hasher = ChainHasher::new(1, b"flash");
    (0..blocks as u64).map(|id| hasher.push_id(id)).scan(None, link).collect()
}

/// Each block continues the one before.
fn link(before: &mut Option<BlockKey>, key: BlockKey) -> Option<(BlockKey, Option<BlockKey>)> {
    Some((key, before.replace(key)))
}

fn shuffled<T: Clone>(items: &[T]) -> Vec<T> {
    let mut items = items.to_vec();
    let mut rng = Rng::new(7);
    for at in (1..items.len()).rev() {
        items.swap(at, rng.below(at as u64 + 1) as usize);
    }
    items
}

/// What no disk packs, and a mark of the key: as cheap as a copy out of the engine's memory.
fn fill(key: BlockKey, bytes: &mut [u8]) {
    static NOISE: OnceLock<Vec<u8>> = OnceLock::new();
    let noise = NOISE.get_or_init(|| {
        let mut rng = Rng::new(9);
        (0..BLOCK_BYTES / 8).flat_map(|_| rng.next_u64().to_le_bytes()).collect()
    });
    bytes.copy_from_slice(&noise[..bytes.len()]);
    bytes[..16].copy_from_slice(&key.0.to_le_bytes());
}

struct Raw {
    file: File,
}

impl Raw {
    fn new(dir: &Path) -> Self {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true).custom_flags(OFlags::DIRECT.bits() as i32);
        let file = options.open(dir.join("raw")).expect("the folder takes direct I/O");
        file.set_len(0).expect("it is ours");
        let bytes = (BLOCKS * BLOCK_BYTES) as u64;
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes).expect("there is room");
        Self { file }
    }

    /// Visits all slots in this order with `depth` operations under way.
    fn run(&self, slots: &[usize], depth: usize, is_write: bool) -> Duration {
        let next = AtomicUsize::new(0);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..depth {
                scope.spawn(|| {
                    let mut memory = vec![5; BLOCK_BYTES + 4096];
                    let from = memory.as_ptr().align_offset(4096);
                    let block = &mut memory[from..from + BLOCK_BYTES];
                    while let Some(&slot) = slots.get(next.fetch_add(1, Ordering::Relaxed)) {
                        if is_write {
                            fill(BlockKey(slot as u128), block);
                        }
                        let offset = (slot * BLOCK_BYTES) as u64;
                        let done = match is_write {
                            true => self.file.write_all_at(block, offset),
                            false => self.file.read_exact_at(block, offset),
                        };
                        done.expect("the disk answers");
                    }
                });
            }
        });
        if is_write {
            self.file.sync_data().expect("the disk answers");
        }
        begun.elapsed()
    }
}

fn tier(dir: Option<&Path>, io: IoChoice) -> FileTier {
    let options =
        FileOptions { dir, capacity_blocks: BLOCKS as u32, block_bytes: BLOCK_BYTES, fingerprint: 1, io };
    FileTier::open(&options).expect("there is room")
}

/// One round of puts and gets; the tier is empty afterwards.
fn put_and_get(tier: &mut FileTier) -> [Duration; 2] {
    use baton_tiers::Tier as _;
    let blocks = keys(BLOCKS);
    let begun = Instant::now();
    tier.put_all(blocks.iter().copied(), fill).expect("the disk answers");
    let put = begun.elapsed();
    let order: Vec<BlockKey> = shuffled(&blocks).into_iter().map(|(key, _)| key).collect();
    let begun = Instant::now();
    let mut read = 0;
    tier.get_all(&order, |_, bytes| read += bytes.len()).expect("the disk answers");
    assert_eq!(read, BLOCKS * BLOCK_BYTES);
    let got = begun.elapsed();
    // So that the next round's slots are in order again.
    for (key, _) in blocks.into_iter().rev() {
        tier.remove(key.short());
    }
    [put, got]
}

fn rate(took: Duration, bytes: usize) -> f64 {
    bytes as f64 / took.as_secs_f64() / 1e9
}

fn throughput(dir: &Path) {
    println!("{BLOCKS} blocks of {BLOCK_BYTES} bytes, best and (worst) of {ROUNDS} rounds in turn, GB/s");
    let bytes = BLOCKS * BLOCK_BYTES;
    let raw = Raw::new(dir);
    let mut ring = tier(Some(&dir.join("ring")), IoChoice::Auto);
    let mut threads = tier(Some(&dir.join("threads")), IoChoice::Threads);
    let mut temporary = tier(None, IoChoice::Auto);
    let in_order: Vec<usize> = (0..BLOCKS).collect();
    let at_random = shuffled(&in_order);
    let mut seen = vec![Vec::new(); 8];
    // The first round writes extents that were never written: it is left out for all.
    for round in 0..=ROUNDS {
        let raw_times = [raw.run(&in_order, DEPTH, true), raw.run(&at_random, DEPTH, false)];
        let times =
            [raw_times, put_and_get(&mut ring), put_and_get(&mut threads), put_and_get(&mut temporary)]
                .concat();
        if round > 0 {
            seen.iter_mut().zip(times).for_each(|(seen, time)| seen.push(rate(time, bytes)));
        }
    }
    let names = ["raw direct loop", ring.device(), threads.device(), "io_uring, temporary: no flush"];
    for (at, name) in names.iter().enumerate() {
        let show = |rates: &[f64]| {
            let best = rates.iter().copied().fold(0.0, f64::max);
            let worst = rates.iter().copied().fold(f64::MAX, f64::min);
            format!("{best:>6.3} ({worst:.3})")
        };
        let (put, get) = (show(&seen[2 * at]), show(&seen[2 * at + 1]));
        println!("{name:<32} put in order {put}   get at random {get}");
    }
}

/// Seconds by the clock; of those, seconds that this thread had a processor, and seconds that it
/// waited for one because others had them. The rest is the disk's.
struct Timer(Instant, [f64; 2]);

impl Timer {
    fn start() -> Self {
        Self(Instant::now(), scheduled_s())
    }

    fn words(&self) -> String {
        let [had, waited] = scheduled_s();
        let ([had, waited], all) = ([had - self.1[0], waited - self.1[1]], self.0.elapsed().as_secs_f64());
        format!("{all:.3} s ({had:.3} s on a processor, {waited:.3} s waiting for one)")
    }
}

/// As the kernel counts it for this thread.
fn scheduled_s() -> [f64; 2] {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let mut numbers = text.split(' ').map(|ns| ns.parse::<f64>().unwrap_or_default() / 1e9);
    [numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default()]
}

/// How long a tier of small blocks takes to start, all of them being there.
fn recovery(dir: &Path, blocks: usize) {
    let options = FileOptions {
        dir: Some(dir),
        capacity_blocks: blocks as u32 + 100,
        block_bytes: 64,
        fingerprint: 1,
        io: IoChoice::Auto,
    };
    let mut tier = FileTier::open(&options).expect("there is room");
    // Chains of a thousand blocks.
    let chains = (0..blocks as u64).step_by(1_000).flat_map(|chain| {
        let mut hasher = ChainHasher::new(chain, b"many");
        let count = (blocks as u64 - chain).min(1_000);
        (0..count).map(move |id| hasher.push_id(id)).scan(None, link)
    });
    let timer = Timer::start();
    tier.put_all(chains, fill).expect("the disk answers");
    println!("{blocks} blocks written in {}", timer.words());
    drop(tier);
    let timer = Timer::start();
    let tier = FileTier::open(&options).expect("it is ours");
    println!("{blocks} blocks: the tier alone starts in {}: {}", timer.words(), tier.beginning());
    drop(tier);
    let store = StoreConfig {
        hbm_blocks: 64,
        dram_blocks: 0,
        ssd_blocks: blocks as u64 + 100,
        eviction: Eviction::Lru,
        offload: Offload::WriteThrough,
        ssd_second_touch: false,
    };
    let ssd_dir = Some(dir.to_owned());
    let config = CacheConfig { store, block_bytes: 64, ssd_dir, ssd_io: IoChoice::Auto, fingerprint: 1 };
    let timer = Timer::start();
    let cache = KvCache::new(config).expect("it is ours");
    let took = timer.words();
    let flash = cache.flash();
    println!("{} blocks readable after {took}, trial included: {}", flash.recovered_blocks, flash.words);
}

fn main() {
    let begun = Timer::start();
    let parent = std::env::var_os("BATON_BENCH_DIR").map_or_else(std::env::temp_dir, Into::into);
    let dir = tempfile::tempdir_in(parent).expect("the folder can be written to");
    throughput(dir.path());
    let blocks = std::env::var("BATON_BENCH_BLOCKS").ok().and_then(|text| text.parse().ok());
    recovery(&dir.path().join("many"), blocks.unwrap_or(1_000_000));
    println!("all of it: {}", begun.words());
}
