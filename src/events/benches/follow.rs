//! Measures the cost of following an engine: one core, per block, batches of 64 events as a busy engine sends them.
//!
//! Time is the CPU time of this thread, where the kernel reports it: the machine may be busy with other work.

use baton_events::{
    Batch, Change, EngineHash, Event, Form, Limits, Medium, Mirror, MirrorConfig, RemovedBlocks, Speaker,
    StoredBlocks, decode, encode,
};
use baton_types::{ChainHasher, Rng};
use criterion::{Bencher, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use std::time::{Duration, Instant};

const BATCHES: u64 = 64;
const EVENTS: u64 = 64;
const BLOCKS: u64 = 4;

/// Batches as vLLM writes them: prompts of four blocks, of tokens below 128k.
fn batches(block_tokens: u32, digests: bool) -> Vec<Vec<u8>> {
    let mut rng = Rng::new(7);
    let mut name = move || {
        let word = rng.next_u64();
        let mut digest = [1; 32];
        digest[16..24].copy_from_slice(&word.rotate_left(20).to_be_bytes());
        digest[24..].copy_from_slice(&word.to_be_bytes());
        if digests { EngineHash::Full(digest) } else { EngineHash::Word(word) }
    };
    let mut rng = Rng::new(8);
    let mut stored = move || {
        let tokens = (0..BLOCKS * u64::from(block_tokens)).map(|_| rng.below(128_000) as u32).collect();
        Event::from(Change::Stored(StoredBlocks {
            hashes: (0..BLOCKS).map(|_| name()).collect(),
            tokens,
            block_tokens,
            medium: Some(Medium::Gpu),
            ..StoredBlocks::default()
        }))
    };
    let batch = |sequence| Batch {
        sequence,
        time_us: sequence,
        dp_rank: Some(0),
        events: (0..EVENTS).map(|_| stored()).collect(),
    };
    (0..BATCHES).map(batch).map(|batch| encode(&batch, Form::Vllm, &Speaker::default())).collect()
}

fn mirror(block_tokens: u32) -> Mirror {
    let config = MirrorConfig { block_tokens, ..MirrorConfig::default() };
    Mirror::plain(config, ChainHasher::new(0, b"bench").parent())
}

/// Time that this thread has spent on a core.
fn on_core() -> Option<Duration> {
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    told.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}

/// Times `work` alone, not what `prepare` does before each.
fn timed<P, R>(b: &mut Bencher<'_>, mut prepare: impl FnMut() -> P, mut work: impl FnMut(P) -> R) {
    b.iter_custom(|iterations| {
        let prepared: Vec<P> = (0..iterations).map(|_| prepare()).collect();
        let (wall, core) = (Instant::now(), on_core());
        for one in prepared {
            black_box(work(one));
        }
        let core = on_core().zip(core).map(|(after, before)| after - before);
        core.filter(|core| !core.is_zero()).unwrap_or_else(|| wall.elapsed())
    });
}

fn follow(c: &mut Criterion) {
    let cases =
        [("16 tokens, words", 16, false), ("16 tokens, digests", 16, true), ("64 tokens, words", 64, false)];
    for (label, block_tokens, digests) in cases {
        let payloads = batches(block_tokens, digests);
        let limits = Limits::default();
        let read = |payload: &Vec<u8>| decode(0, payload, &limits).expect("it was written here");
        let decoded: Vec<Batch> = payloads.iter().map(read).collect();
        let mut group = c.benchmark_group(format!("follow/{label}"));
        group.throughput(Throughput::Elements(BATCHES * EVENTS * BLOCKS)).sample_size(10);
        group.bench_function("decode", |b| {
            timed(b, || (), |()| payloads.iter().map(|p| black_box(read(p)).events.len()).sum::<usize>());
        });
        group.bench_function("mirror", |b| {
            timed(
                b,
                || mirror(block_tokens),
                |mut mirror| {
                    let mut changes = Vec::new();
                    decoded.iter().for_each(|batch| mirror.apply(batch, &mut changes));
                    changes.len()
                },
            );
        });
        // In a steady state as much goes as comes, and the map has its size.
        let mut steady = mirror(block_tokens);
        group.bench_function("decode and mirror, then remove", |b| {
            timed(
                b,
                || (),
                |()| {
                    let mut changes = Vec::new();
                    for batch in payloads.iter().map(read) {
                        steady.apply(&batch, &mut changes);
                    }
                    decoded.iter().for_each(|batch| remove(&mut steady, batch));
                    changes.len()
                },
            );
        });
    }
}

fn remove(mirror: &mut Mirror, batch: &Batch) {
    let mut changes = Vec::new();
    for event in &batch.events {
        if let Change::Stored(stored) = &event.change {
            let (hashes, medium) = (stored.hashes.clone(), stored.medium.clone());
            mirror.apply_event(
                &Change::Removed(RemovedBlocks { hashes, medium, group: None }).into(),
                &mut changes,
            );
        }
    }
}

criterion_group!(benches, follow);
criterion_main!(benches);
