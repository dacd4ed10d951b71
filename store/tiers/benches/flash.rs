//! The flash tier against the disk itself: blocks put in order and got at random, with as many
//! under way, beside a plain loop of direct reads and writes over the same file size in the same
//! run, and beside `fio` where that is installed; then the start of a tier that holds a million blocks.
//! `cargo bench -p baton-tiers --bench flash`.
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
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// 16 tokens of a small model, as in `cache_cycle`; a whole number of pages.
const BLOCK_BYTES: usize = 196_608;
const BLOCKS: usize = 2_048;
const ROUNDS: usize = 4;
/// Reads and writes that a tier has in flight at most.
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

/// Fills a block with incompressible bytes and a mark of the key, as cheaply as a copy out of the engine's memory.
fn fill(key: BlockKey, bytes: &mut [u8]) {
    static NOISE: OnceLock<Vec<u8>> = OnceLock::new();
    let noise = NOISE.get_or_init(|| {
        let mut rng = Rng::new(9);
        (0..BLOCK_BYTES / 8).flat_map(|_| rng.next_u64().to_le_bytes()).collect()
    });
    bytes.copy_from_slice(&noise[..bytes.len()]);
    bytes[..16].copy_from_slice(&key.0.to_le_bytes());
}

struct RawFile {
    file: File,
}

impl RawFile {
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
    fn run(&self, slots: &[usize], depth: usize, is_write: bool) -> RoundTime {
        timed(|| self.visit(slots, depth, is_write))
    }

    fn visit(&self, slots: &[usize], depth: usize, is_write: bool) {
        let next = AtomicUsize::new(0);
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
    }
}

/// Time of one round: wall clock and processor.
#[derive(Clone, Copy, Debug)]
struct RoundTime {
    clock: Duration,
    processor: Duration,
}

/// Processor time of all threads of the process so far, to 10 ms.
fn processor() -> Duration {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    Duration::from_millis((ticks(11) + ticks(12)) * 10)
}

fn timed(work: impl FnOnce()) -> RoundTime {
    let (clock, had) = (Instant::now(), processor());
    work();
    RoundTime { clock: clock.elapsed(), processor: processor().saturating_sub(had) }
}

/// `fio` over a file of the same size, with blocks as large and as many under way.
struct Fio {
    path: std::path::PathBuf,
}

impl Fio {
    /// Nothing where it is not installed.
    fn found(dir: &Path) -> Option<Self> {
        let there = Command::new("fio").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        there.is_ok_and(|status| status.success()).then(|| Self { path: dir.join("fio") })
    }

    /// Its own figures: it counts from its first request to its last, and a flush at the end.
    fn run(&self, is_write: bool) -> RoundTime {
        let name = format!("--filename={}", self.path.display());
        let size = format!("--size={}", BLOCKS * BLOCK_BYTES);
        let (bytes, depth) = (format!("--bs={BLOCK_BYTES}"), format!("--iodepth={DEPTH}"));
        let kind =
            if is_write { ["--rw=write", "--end_fsync=1"] } else { ["--rw=randread", "--end_fsync=0"] };
        let fixed = ["--name=flash", "--ioengine=io_uring", "--direct=1", "--refill_buffers", "--minimal"];
        let given = [&name, &size, &bytes, &depth].map(String::as_str);
        let ran = Command::new("fio").args(fixed).args(kind).args(given).output().expect("it was there");
        let said = String::from_utf8_lossy(&ran.stdout).into_owned();
        let fields: Vec<&str> = said.trim().split(';').collect();
        // The third form of its terse output: runtime of reads, of writes (ms), then user and system time (%).
        let number = |at: usize| {
            let text = fields
                .get(at)
                .unwrap_or_else(|| panic!("fio: {said} {}", String::from_utf8_lossy(&ran.stderr)));
            text.trim_end_matches('%').parse::<f64>().unwrap_or_else(|_| panic!("fio: {text}"))
        };
        let clock = Duration::from_secs_f64(number(if is_write { 49 } else { 8 }) / 1e3);
        RoundTime { clock, processor: clock.mul_f64((number(87) + number(88)) / 100.0) }
    }
}

fn tier(dir: Option<&Path>, io: IoChoice) -> FileTier {
    let options =
        FileOptions { dir, capacity_blocks: BLOCKS as u32, block_bytes: BLOCK_BYTES, fingerprint: 1, io };
    FileTier::open(&options).expect("there is room")
}

/// One round of puts and gets; the tier is empty afterwards.
fn put_and_get(tier: &mut FileTier) -> [RoundTime; 2] {
    use baton_tiers::Tier as _;
    let blocks = keys(BLOCKS);
    let put = timed(|| tier.put_all(blocks.iter().copied(), fill).expect("the disk answers"));
    let order: Vec<BlockKey> = shuffled(&blocks).into_iter().map(|(key, _)| key).collect();
    let mut read = 0;
    let got = timed(|| tier.get_all(&order, |_, bytes| read += bytes.len()).expect("the disk answers"));
    assert_eq!(read, BLOCKS * BLOCK_BYTES);
    // So that the next round's slots are in order again.
    for (key, _) in blocks.into_iter().rev() {
        tier.remove(key.short());
    }
    [put, got]
}

/// GB/s, and processor seconds a GiB.
fn figures(took: RoundTime, bytes: usize) -> (f64, f64) {
    let gib = bytes as f64 / f64::from(1 << 30);
    (bytes as f64 / took.clock.as_secs_f64() / 1e9, took.processor.as_secs_f64() / gib)
}

fn throughput(dir: &Path) {
    println!(
        "{BLOCKS} blocks of {BLOCK_BYTES} bytes, best and (worst) of {ROUNDS} rounds in turn, GB/s; processor s/GiB"
    );
    let bytes = BLOCKS * BLOCK_BYTES;
    let raw = RawFile::new(dir);
    let mut ring = tier(Some(&dir.join("ring")), IoChoice::Auto);
    let mut threads = tier(Some(&dir.join("threads")), IoChoice::Threads);
    let mut temporary = tier(None, IoChoice::Auto);
    let in_order: Vec<usize> = (0..BLOCKS).collect();
    let at_random = shuffled(&in_order);
    let fio = Fio::found(dir);
    let mut seen = vec![Vec::new(); 10];
    // The first round writes extents that were never written: it is left out for all.
    for round in 0..=ROUNDS {
        let raw_times = [raw.run(&in_order, DEPTH, true), raw.run(&at_random, DEPTH, false)];
        let tiers = [put_and_get(&mut ring), put_and_get(&mut threads), put_and_get(&mut temporary)].concat();
        let fio = fio.iter().flat_map(|fio| [fio.run(true), fio.run(false)]);
        let times = raw_times.into_iter().chain(tiers).chain(fio);
        if round > 0 {
            seen.iter_mut().zip(times).for_each(|(seen, time)| seen.push(figures(time, bytes)));
        }
    }
    let others = ["raw direct loop", ring.device(), threads.device(), "io_uring, temporary: no flush"];
    let names = others.into_iter().chain(fio.iter().map(|_| "fio, io_uring"));
    for (at, name) in names.enumerate() {
        let show = |figures: &[(f64, f64)]| {
            let best = figures.iter().map(|one| one.0).fold(0.0, f64::max);
            let worst = figures.iter().map(|one| one.0).fold(f64::MAX, f64::min);
            let processor = figures.iter().map(|one| one.1).sum::<f64>() / figures.len() as f64;
            format!("{best:>6.3} ({worst:.3}), {processor:.3}")
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
