//! The prefix index under the conversation workload: what a lookup costs with 16, 64 and 256
//! instances, how fast blocks go in and out, and what a held block weighs at ten million.
//!
//! Workload: the chain of each request of the trace is looked up, the request goes to the instance
//! with the longest match (the least loaded of equals), and the blocks that are missing there are
//! inserted. All requests share their first block, so every answer names every instance.
//!
//! The trace is `conversation_trace.jsonl` in `$BATON_TRACES`, else in `shared/traces` beside or
//! above the working directory; else a seeded look-alike is made, and the output says so.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cmp::Reverse;
use std::hint::black_box;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use baton_scheduler::index::{Match, MatchScratch, PrefixIndex};
use baton_types::{BlockHash, ChainHasher, InstanceId, Rng, Tier};
use criterion::{BatchSize, BenchmarkId, Criterion, Throughput};

const TRACE: &str = "conversation_trace.jsonl";
const INSTANCES: [u32; 3] = [16, 64, 256];
const HELD_BLOCKS: usize = 10_000_000;
/// How long a loop of look-ups runs at least: a hundred times what its clock is good to.
const LOOP: Duration = Duration::from_millis(400);

/// The system allocator with a count of live bytes.
struct HeapCounter;

static LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on unchanged to the system allocator, which keeps the contract;
// the counter is only read for reports.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for HeapCounter {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE_BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LIVE_BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LIVE_BYTES.fetch_add(size, Ordering::Relaxed);
        LIVE_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: HeapCounter = HeapCounter;

/// The requests' block ids, as the trace numbers them.
struct Workload {
    source: String,
    ids: Vec<Vec<u64>>,
}

impl Workload {
    fn load() -> Self {
        let file = candidates().into_iter().find(|path| path.is_file());
        match file {
            Some(path) => {
                let text = std::fs::read_to_string(&path).expect("the trace is readable text");
                let ids = text.lines().map(ids_of).collect();
                Self { source: path.display().to_string(), ids }
            }
            None => Self { source: "a seeded look-alike: no trace found".into(), ids: look_alike() },
        }
    }

    /// Chains in a namespace of their own: equal ids of different copies are different blocks.
    fn chains(&self, copy: u64) -> Vec<Vec<BlockHash>> {
        let root = ChainHasher::new(1, &copy.to_le_bytes());
        let chain = |ids: &Vec<u64>| {
            let mut hasher = root.clone();
            ids.iter().map(|&id| hasher.push_id(id).short()).collect()
        };
        self.ids.iter().map(chain).collect()
    }
}

fn candidates() -> Vec<PathBuf> {
    let mut places: Vec<PathBuf> = std::env::var_os("BATON_TRACES").map(PathBuf::from).into_iter().collect();
    let here = std::env::current_dir().expect("a bench has a working directory");
    places.extend(here.ancestors().map(|above| above.join("shared/traces")));
    places.iter().map(|place| place.join(TRACE)).collect()
}

fn ids_of(line: &str) -> Vec<u64> {
    let record: serde_json::Value = serde_json::from_str(line).expect("each line is a JSON object");
    let ids = record["hash_ids"].as_array().expect("each request lists hash_ids");
    ids.iter().map(|id| id.as_u64().expect("ids are whole numbers")).collect()
}

/// Conversations over one shared first block: a third of the requests continue an earlier one,
/// replacing its partial last block, as in the published trace.
fn look_alike() -> Vec<Vec<u64>> {
    let (mut rng, mut next, mut requests) = (Rng::new(12_031), 1, Vec::<Vec<u64>>::new());
    for at in 0..12_031u64 {
        let mut ids = vec![0];
        if at > 100 && rng.chance_permille(330) {
            ids = requests[(at - 1 - rng.below(100)) as usize].clone();
            ids.pop();
        }
        let scale = if rng.chance_permille(100) { 80 } else { 24 };
        let fresh = 1 + rng.below(scale);
        ids.extend(next..next + fresh);
        next += fresh;
        requests.push(ids);
    }
    requests
}

/// An index being filled by requests, and what it took.
struct IndexRun {
    index: PrefixIndex,
    scratch: MatchScratch,
    load: Vec<u64>,
    blocks: Vec<u32>,
    held: usize,
    prompt_blocks: usize,
    hit_blocks: usize,
}

impl IndexRun {
    fn new(instances: u32) -> Self {
        Self {
            index: PrefixIndex::new(),
            scratch: MatchScratch::default(),
            load: vec![0; instances as usize],
            blocks: vec![0; instances as usize],
            held: 0,
            prompt_blocks: 0,
            hit_blocks: 0,
        }
    }

    /// Who gets a chain, and how much of it is there already. The block that all chains share
    /// draws nobody: else the first instance would get everything.
    fn place(&mut self, chain: &[BlockHash]) -> Event {
        self.blocks.fill(0);
        let blocks = &mut self.blocks;
        self.index.matches(chain, &mut self.scratch, |found| blocks[found.instance.index()] = found.blocks);
        let worth =
            |id: usize| (if self.blocks[id] > 1 { self.blocks[id] } else { 0 }, Reverse(self.load[id]));
        let best =
            (0..self.load.len()).max_by_key(|&id| (worth(id), Reverse(id))).expect("there are instances");
        Event { hit: self.blocks[best] as usize, instance: InstanceId(best as u32) }
    }

    fn serve(&mut self, chain: &[BlockHash]) -> Event {
        let event = self.place(chain);
        let missing = chain.len() - event.hit;
        self.load[event.instance.index()] += missing as u64 + 1;
        self.prompt_blocks += chain.len();
        self.hit_blocks += event.hit;
        let added = event.insert_into(&mut self.index, chain);
        assert_eq!(added, missing, "a lookup and the insert after it agree");
        self.held += added;
        event
    }
}

/// What one request adds where.
#[derive(Clone, Copy)]
struct Event {
    hit: usize,
    instance: InstanceId,
}

impl Event {
    fn insert_into(self, index: &mut PrefixIndex, chain: &[BlockHash]) -> usize {
        let parent = self.hit.checked_sub(1).map(|before| chain[before]);
        let outcome = index.insert(parent, &chain[self.hit..], self.instance, Tier::Hbm);
        assert_eq!(outcome.refused, 0, "the bench fits the default bound");
        outcome.added
    }
}

fn serve_all(chains: &[Vec<BlockHash>], instances: u32) -> (IndexRun, Vec<Event>) {
    let mut filling = IndexRun::new(instances);
    let events = chains.iter().map(|chain| filling.serve(chain)).collect();
    (filling, events)
}

fn quantile_ns(times: &mut [u64], permille: usize) -> u64 {
    times.sort_unstable();
    times[(times.len() - 1) * permille / 1000]
}

/// What a conductor does with a match: one score for each instance, from blocks and tiers.
fn score(scores: &mut [u32], found: Match) {
    let [hbm, dram, ssd] = found.by_tier;
    scores[found.instance.index()] = 4 * hbm + 3 * dram + ssd + found.blocks;
}

struct Lookups {
    p50_ns: u64,
    p99_ns: u64,
    thousands_per_s: f64,
}

/// Times each lookup by itself (the clock's own cost is part of p50 and p99), then all together.
fn time_lookups(index: &PrefixIndex, chains: &[Vec<BlockHash>], instances: u32, rounds: usize) -> Lookups {
    let mut scratch = MatchScratch::default();
    let mut scores = vec![0; instances as usize];
    let mut times = Vec::with_capacity(chains.len() * rounds);
    for _ in 0..rounds {
        for chain in chains {
            let start = Instant::now();
            index.matches(chain, &mut scratch, |found| score(&mut scores, found));
            black_box(&mut scores);
            times.push(start.elapsed().as_nanos() as u64);
        }
    }
    let (start, mut served) = (on_core(), 0);
    while on_core() - start < LOOP {
        for chain in chains {
            index.matches(chain, &mut scratch, |found| score(&mut scores, found));
            black_box(&mut scores);
        }
        served += chains.len();
    }
    let thousands_per_s = millions_per_s(served, on_core() - start) * 1e3;
    let (p50_ns, p99_ns) = (quantile_ns(&mut times, 500), quantile_ns(&mut times, 990));
    Lookups { p50_ns, p99_ns, thousands_per_s }
}

/// Time that this thread has spent on a core, from the kernel's books (good to a few
/// milliseconds), so that a busy machine does not make the index look slow; else wall time.
fn on_core() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    let wall = START.get_or_init(Instant::now).elapsed();
    let books = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let spent_ns = books.and_then(|text| text.split_whitespace().next()?.parse().ok());
    spent_ns.map_or(wall, Duration::from_nanos)
}

fn millions_per_s(blocks: usize, spent: Duration) -> f64 {
    blocks as f64 / spent.as_secs_f64() / 1e6
}

/// Builds the index again and again from nothing.
fn time_inserts(chains: &[Vec<BlockHash>], events: &[Event]) -> f64 {
    let (mut blocks, mut spent) = (0, Duration::ZERO);
    for _ in 0..40 {
        let mut index = PrefixIndex::new();
        let start = on_core();
        for (chain, event) in chains.iter().zip(events) {
            blocks += event.insert_into(&mut index, chain);
        }
        spent += on_core() - start;
    }
    millions_per_s(blocks, spent)
}

fn clock_ns() -> u64 {
    let mut times: Vec<u64> = (0..20_000).map(|_| Instant::now().elapsed().as_nanos() as u64).collect();
    quantile_ns(&mut times, 500)
}

fn live_bytes() -> usize {
    LIVE_BYTES.load(Ordering::Relaxed)
}

fn print_small(workload: &Workload) {
    println!("workload: {} ({} requests)", workload.source, workload.ids.len());
    println!("rates are per second of time on a core; p50 and p99 are wall time");
    println!("reading the clock twice takes {} ns, which every p50 and p99 includes", clock_ns());
    println!(
        "instances    held   runs    hit | full p50   p99 ns    k/s | fresh p50   p99 ns    k/s | insert M/s"
    );
    let chains = workload.chains(0);
    for instances in INSTANCES {
        let mut half = IndexRun::new(instances);
        let (first, second) = chains.split_at(chains.len() / 2);
        for chain in first {
            half.serve(chain);
        }
        let fresh = time_lookups(&half.index, second, instances, 9);
        let (filling, events) = serve_all(&chains, instances);
        let full = time_lookups(&filling.index, &chains, instances, 9);
        let hit = filling.hit_blocks as f64 / filling.prompt_blocks as f64;
        print!("{instances:9} {:7} {:6} {hit:6.3}", filling.held, filling.index.runs());
        for Lookups { p50_ns, p99_ns, thousands_per_s } in [full, fresh] {
            print!(" | {p50_ns:8} {p99_ns:8} {thousands_per_s:6.0}");
        }
        println!(" | {:9.1}", time_inserts(&chains, &events));
    }
}

/// An index filled with copies of the trace, each in a namespace of its own.
struct LargeIndex {
    filling: IndexRun,
    /// What each request of each copy added where.
    events: Vec<Vec<Event>>,
    heap_bytes: usize,
}

impl LargeIndex {
    fn fill(workload: &Workload, instances: u32) -> Self {
        let mut filling = IndexRun::new(instances);
        let mut events = Vec::with_capacity(HELD_BLOCKS / workload.ids.len());
        let (before, mut other) = (live_bytes(), 0);
        while filling.held < HELD_BLOCKS {
            let chains = workload.chains(events.len() as u64);
            let mut served = Vec::with_capacity(chains.len());
            served.extend(chains.iter().map(|chain| filling.serve(chain)));
            other += served.capacity() * size_of::<Event>();
            events.push(served);
        }
        let heap_bytes = live_bytes() - before - other;
        Self { filling, events, heap_bytes }
    }

    /// Builds the same index anew; gives the rate and each event's time in nanoseconds.
    fn time_inserts(&self, workload: &Workload) -> (f64, Vec<u64>) {
        let mut index = PrefixIndex::new();
        let (mut blocks, mut spent, mut each_ns) = (0, Duration::ZERO, Vec::new());
        for (copy, events) in (0..).zip(&self.events) {
            let chains = workload.chains(copy);
            each_ns.reserve(chains.len());
            let start = on_core();
            for (chain, event) in chains.iter().zip(events) {
                let start = Instant::now();
                blocks += event.insert_into(&mut index, chain);
                each_ns.push(start.elapsed().as_nanos() as u64);
            }
            spent += on_core() - start;
        }
        (millions_per_s(blocks, spent), each_ns)
    }
}

/// Fills one index until it holds ten million blocks, asks for some chains from all over its
/// life, then empties it.
fn print_large(workload: &Workload, instances: u32) {
    let large = LargeIndex::fill(workload, instances);
    let (rate, mut each_ns) = large.time_inserts(workload);
    let LargeIndex { mut filling, events, heap_bytes } = large;
    let (held, counted_bytes) = (filling.held, filling.index.memory_bytes());
    let (distinct, runs) = (filling.index.len(), filling.index.runs());
    println!("ten million blocks, {instances} instances: {held} held, {distinct} distinct, {runs} runs");
    let per_held = |bytes: usize| bytes as f64 / held as f64;
    println!("  memory: {:.1} B of live heap for each held block", per_held(heap_bytes));
    println!("          {:.1} B by memory_bytes()", per_held(counted_bytes));
    let [p50, p99, longest] =
        [500, 990, 1000].map(|permille| quantile_ns(&mut each_ns, permille) as f64 / 1e3);
    println!("  insert: {rate:.1} M blocks/s; one event p50 {p50:.1} us, p99 {p99:.1}, longest {longest:.0}");
    let copies = || (0..events.len()).step_by(8);
    let asked: Vec<Vec<BlockHash>> = copies().flat_map(|copy| workload.chains(copy as u64)).collect();
    let found = time_lookups(&filling.index, &asked, instances, 2);
    let Lookups { p50_ns, p99_ns, thousands_per_s } = found;
    println!("  lookup: p50 {p50_ns} ns, p99 {p99_ns} ns, {thousands_per_s:.0} k/s");
    let start = on_core();
    let gone = filling.index.clear(InstanceId(0));
    println!("  clear:  one instance's {gone} blocks in {:.1} ms", (on_core() - start).as_secs_f64() * 1e3);
    let (start, mut removed) = (on_core(), 0);
    for (chain, event) in asked.iter().zip(copies().flat_map(|copy| &events[copy])) {
        removed += filling.index.remove(&chain[event.hit..], event.instance, Tier::Hbm);
    }
    println!("  remove: {:.1} M blocks/s", millions_per_s(removed, on_core() - start));
    let slack_bytes = counted_bytes / 100 + 65_536;
    assert!(heap_bytes.abs_diff(counted_bytes) < slack_bytes, "memory_bytes() tells the heap in use");
}

fn standard_groups(criterion: &mut Criterion, workload: &Workload) {
    let chains = workload.chains(0);
    let mut group = criterion.benchmark_group("index");
    group.sample_size(20).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    for instances in INSTANCES {
        let (filling, events) = serve_all(&chains, instances);
        let (mut scratch, mut scores) = (MatchScratch::default(), vec![0; instances as usize]);
        let mut next = 0;
        group.throughput(Throughput::Elements(1));
        group.bench_function(BenchmarkId::new("matches", instances), |bench| {
            bench.iter(|| {
                next = if next + 1 == chains.len() { 0 } else { next + 1 };
                filling.index.matches(&chains[next], &mut scratch, |found| score(&mut scores, found));
                black_box(&mut scores);
            });
        });
        group.throughput(Throughput::Elements(filling.held as u64));
        group.bench_function(BenchmarkId::new("insert_trace", instances), |bench| {
            let fill = |mut index: PrefixIndex| {
                for (chain, event) in chains.iter().zip(&events) {
                    event.insert_into(&mut index, chain);
                }
                index
            };
            bench.iter_batched(PrefixIndex::new, fill, BatchSize::PerIteration);
        });
    }
    group.finish();
}

fn main() {
    let workload = Workload::load();
    // `cargo test --benches` runs each bench once, unoptimised: show that it works and stop.
    if !std::env::args().any(|arg| arg == "--bench") {
        let (filling, _) = serve_all(&workload.chains(0)[..200], 16);
        filling.index.check().expect("the index is sound");
        return;
    }
    print_small(&workload);
    for instances in [INSTANCES[0], INSTANCES[2]] {
        print_large(&workload, instances);
    }
    let mut criterion = Criterion::default().configure_from_args();
    standard_groups(&mut criterion, &workload);
    criterion.final_summary();
}
