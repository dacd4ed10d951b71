//! How long a block costs from open to close, and whether a long churn slows the store down or
//! makes it grow. `cargo bench -p baton-store` runs all cases, `-- week` only the long one,
//! `-- TEXT` those with TEXT in their name.
//!
//! The figure is processor time per block of a request's chain for `Open` + `Seal` + `Close` together
//! (with all evictions and copies that they cause), making of keys excluded: the best and the median of ten parts, since the machine may be shared.

use baton_store::{Effect, Eviction, Input, Offload, Store, StoreConfig};
use baton_types::{BlockKey, ChainHasher, RequestId, Rng};
use std::time::Instant;

/// A load: chains of `chain_blocks`, of which the first `shared` come from one of `families`.
struct Case {
    name: &'static str,
    config: StoreConfig,
    chain_blocks: usize,
    shared: usize,
    families: u64,
    requests: u64,
}

fn config(eviction: Eviction, offload: Offload, hbm_blocks: u64, dram_blocks: u64) -> StoreConfig {
    StoreConfig { hbm_blocks, dram_blocks, eviction, offload, ..StoreConfig::default() }
}

/// The chain of a request: shared blocks of a family, then blocks of its own.
fn make_chain(case: &Case, rng: &mut Rng, request: u64, chain: &mut Vec<BlockKey>) {
    let family = rng.below(case.families);
    let mut hasher = ChainHasher::new(7, b"bench");
    chain.clear();
    for block in 0..case.chain_blocks {
        let id = if block < case.shared { family << 32 } else { (1 << 63) | request };
        chain.push(hasher.push_id(id | block as u64));
    }
}

/// Serves a batch of requests; a driver that copies at once answers every order.
fn serve(store: &mut Store, first: u64, chains: &[Vec<BlockKey>], effects: &mut Vec<Effect>) -> u64 {
    let mut tickets = Vec::new();
    let mut told = 0;
    for (request, chain) in (first..).zip(chains) {
        let owner = RequestId(request);
        store.step(request, Input::Open { owner, chain, room_blocks: 1 }, effects);
        if matches!(effects.get(1), Some(Effect::Onboard { .. })) {
            store.step(request, Input::OnboardDone { owner, ok: true }, effects);
        }
        store.step(request, Input::Seal { owner, upto_blocks: chain.len() as u32 }, effects);
        store.step(request, Input::Close { owner }, effects);
        told += effects.len() as u64;
        tickets.extend(effects.drain(..).filter_map(|effect| match effect {
            Effect::Offload { ticket, .. } => Some(ticket),
            _ => None,
        }));
        for ticket in tickets.drain(..) {
            store.step(request, Input::OffloadDone { ticket, ok: true }, effects);
        }
    }
    told
}

/// Resident memory of this process, bytes; 0 where there is no such file.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}

/// Processor time that this process has used, ns; wall time where the kernel does not report it.
fn spent_ns(start: Instant) -> u64 {
    let told = std::fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
    let told = told.split(' ').next().and_then(|ns| ns.parse().ok());
    told.unwrap_or_else(|| u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX))
}

/// Runs a case in ten parts; time per block and memory after each.
fn run(case: &Case) -> Vec<(f64, u64)> {
    let mut store = Store::new(case.config.clone()).expect("the cases' sizes are valid");
    let mut rng = Rng::new(1);
    let start = Instant::now();
    let (mut effects, mut parts, mut request) = (Vec::new(), Vec::new(), 0);
    for _ in 0..10 {
        let (mut spent, mut blocks) = (0, 0);
        while blocks < case.requests / 10 * case.chain_blocks as u64 {
            let mut chains = vec![Vec::new(); (case.requests / 10).min(40_000) as usize];
            for (chain, request) in chains.iter_mut().zip(request..) {
                make_chain(case, &mut rng, request, chain);
            }
            let before = spent_ns(start);
            std::hint::black_box(serve(&mut store, request, &chains, &mut effects));
            spent += spent_ns(start) - before;
            request += chains.len() as u64;
            blocks += (chains.len() * case.chain_blocks) as u64;
        }
        parts.push((spent as f64 / blocks as f64, resident_bytes()));
    }
    store.check().expect("invariants hold after the churn");
    assert_eq!(store.pinned_total(), 0);
    let stats = store.stats();
    let asked = request * case.chain_blocks as u64;
    let hits: u64 = stats.tiers.iter().map(|tier| tier.hit_blocks).sum();
    let mut times: Vec<f64> = parts.iter().map(|part| part.0).collect();
    times.sort_by(f64::total_cmp);
    println!(
        "{:<34} {:>6.1} ns/block (median {:>6.1})   hits {:>5.1} %   evicted {:>9}   offloaded {:>9}",
        case.name,
        times[0],
        times[5],
        hits as f64 * 100.0 / asked as f64,
        stats.tiers[0].evicted_blocks,
        stats.tiers[1].offloaded_blocks,
    );
    parts
}

/// About a week of a node at 40 requests a second, in which nothing may get slower or larger.
fn week() {
    let case = Case {
        name: "week of churn, 24 M requests",
        config: config(Eviction::Lru, Offload::Off, 20_000, 0),
        chain_blocks: 4,
        shared: 2,
        families: 10_000,
        requests: 24_000_000,
    };
    let parts = run(&case);
    let (first, last) = (parts[1], parts[9]);
    println!(
        "    second tenth {:.1} ns, {} KiB; last tenth {:.1} ns, {} KiB",
        first.0,
        first.1 >> 10,
        last.0,
        last.1 >> 10
    );
    assert!(last.1 <= first.1 + first.1 / 20, "memory grew");
    assert!(last.0 <= first.0 * 1.5, "it became slower");
}

fn main() {
    let wanted = std::env::args().skip(1).find(|arg| !arg.starts_with('-')).unwrap_or_default();
    if wanted == "week" {
        return week();
    }
    use Eviction::{LengthAware, Lfu, Lru, Reuse, S3Fifo};
    use Offload::{Off, OnEvict, WriteThrough};
    let case = |name, config, chain_blocks, shared| {
        let requests = 9_600_000 / chain_blocks as u64;
        Case { name, config, chain_blocks, shared, families: 2_000, requests }
    };
    let cases = [
        case("all hits, lru", config(Lru, Off, 60_000, 0), 24, 24),
        case("half shared, lru", config(Lru, Off, 60_000, 0), 24, 12),
        case("nothing shared, lru", config(Lru, Off, 60_000, 0), 24, 0),
        case("half shared, lru, small node", config(Lru, Off, 6_000, 0), 24, 12),
        case("nothing shared, lru, small node", config(Lru, Off, 6_000, 0), 24, 0),
        case("half shared, lfu", config(Lfu, Off, 60_000, 0), 24, 12),
        case("half shared, s3fifo", config(S3Fifo, Off, 60_000, 0), 24, 12),
        case("half shared, length-aware", config(LengthAware, Off, 60_000, 0), 24, 12),
        case("half shared, reuse", config(Reuse, Off, 60_000, 0), 24, 12),
        case("nothing shared, reuse", config(Reuse, Off, 60_000, 0), 24, 0),
        case("half shared, reuse, dram on evict", config(Reuse, OnEvict, 15_000, 60_000), 24, 12),
        case("half shared, dram on evict", config(Lru, OnEvict, 15_000, 60_000), 24, 12),
        case("half shared, dram write-through", config(Lru, WriteThrough, 15_000, 60_000), 24, 12),
        case("chains of 8192, half shared", config(Lru, Off, 60_000, 0), 8192, 4096),
    ];
    cases.iter().filter(|case| case.name.contains(&wanted)).for_each(|case| _ = run(case));
    if wanted.is_empty() {
        week();
    }
}
