//! What following an engine costs: one core, per block, batches of 64 events as a busy engine sends them.

use baton_events::{
    Batch, Change, EngineHash, Event, Form, Limits, Medium, Mirror, MirrorConfig, Removed, Speaker, Stored,
    decode, encode,
};
use baton_types::{ChainHasher, Rng};
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;

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
        Event::from(Change::Stored(Stored {
            hashes: (0..BLOCKS).map(|_| name()).collect(),
            tokens,
            block_tokens,
            medium: Some(Medium::Gpu),
            ..Stored::default()
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

fn follow(c: &mut Criterion) {
    for (label, block_tokens, digests) in
        [("16 tokens, words", 16, false), ("16 tokens, digests", 16, true), ("64 tokens, words", 64, false)]
    {
        let payloads = batches(block_tokens, digests);
        let limits = Limits::default();
        let read = |payload: &Vec<u8>| decode(0, payload, &limits).expect("it was written here");
        let mut group = c.benchmark_group(format!("follow/{label}"));
        group.throughput(Throughput::Elements(BATCHES * EVENTS * BLOCKS)).sample_size(20);
        group.bench_function("decode", |b| {
            b.iter(|| payloads.iter().map(|payload| black_box(read(payload)).events.len()).sum::<usize>());
        });
        let decoded: Vec<Batch> = payloads.iter().map(read).collect();
        let mut gone = decoded.clone();
        for event in gone.iter_mut().flat_map(|batch| &mut batch.events) {
            if let Change::Stored(stored) = &event.change {
                let (hashes, medium) = (stored.hashes.clone(), stored.medium.clone());
                event.change = Change::Removed(Removed { hashes, medium, group: None });
            }
        }
        // In a steady state as much goes as comes: the map has its size, and only the coming is timed.
        let emptied = |mirror: &mut Mirror| {
            let mut changes = Vec::new();
            gone.iter().for_each(|batch| mirror.apply(batch, &mut changes));
        };
        let mut known = mirror(block_tokens);
        group.bench_function("mirror, stored and removed", |b| {
            b.iter(|| {
                let mut changes = Vec::new();
                decoded.iter().for_each(|batch| known.apply(batch, &mut changes));
                emptied(&mut known);
                changes.len()
            });
        });
        group.bench_function("decode and mirror, from empty", |b| {
            b.iter_batched(
                || mirror(block_tokens),
                |mut mirror| {
                    let mut changes = Vec::new();
                    for payload in &payloads {
                        mirror.apply(&read(payload), &mut changes);
                    }
                    (mirror, changes)
                },
                BatchSize::LargeInput,
            );
        });
    }
}

criterion_group!(benches, follow);
criterion_main!(benches);
