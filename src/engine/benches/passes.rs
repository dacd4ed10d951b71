//! Prefill and decode passes of the built-in engine against two ceilings: the textbook triple loop
//! over the same matrix shape (what not to be as slow as), and reading the weights from memory
//! (what a single decode cannot be quicker than).

use std::hint::black_box;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_engine::{
    Builtin, Engine, Event, KvPool, KvSink, PoolSpec, SeededSpec, Sequence, SequenceId, TimedEngine,
    TimedSpec,
};
use baton_types::Sampling;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

/// Shows nothing to anyone.
struct NullSink;

impl KvSink for NullSink {
    fn layer_computed(&mut self, _: SequenceId, _: u32, _: Range<u32>, _: (&[u32], &KvPool)) {}
}

/// Weights that every token is multiplied by: two operations each.
fn dense_weights(spec: &SeededSpec) -> u64 {
    let [dim, layers, ffn, vocab] = [spec.dim, spec.layers, spec.ffn_dim, spec.vocab_tokens].map(u64::from);
    let kv = dim / u64::from(spec.heads) * u64::from(spec.kv_heads);
    layers * (2 * dim * dim + 2 * dim * kv + 3 * dim * ffn) + dim * vocab
}

fn sequence(id: u64, tokens: usize, first_block: u32) -> Sequence {
    Sequence {
        id: SequenceId(id),
        tokens: (0..tokens).map(|n| 32 + u32::try_from(n * 7 % 90).expect("small")).collect(),
        prompt_tokens: u32::try_from(tokens).expect("small"),
        computed_tokens: 0,
        blocks: (first_block..first_block + 128).collect(),
        sampling: Arc::new(Sampling { max_tokens: 1_000_000, ignore_eos: true, ..Sampling::default() }),
        leaves: false,
        order: 0,
    }
}

fn engine(spec: &SeededSpec) -> Builtin {
    Builtin::seeded(spec, PoolSpec { blocks: 4096, ..PoolSpec::default() }).expect("a sound spec")
}

fn prefill(c: &mut Criterion) {
    let spec = SeededSpec::default();
    let mut engine = engine(&spec);
    let mut group = c.benchmark_group("prefill");
    group.sample_size(20);
    for tokens in [64, 512] {
        // An element is a floating-point operation of the matrix products.
        group.throughput(Throughput::Elements(2 * tokens as u64 * dense_weights(&spec)));
        group.bench_function(format!("{tokens} tokens, in operations"), |b| {
            let mut events: Vec<Event> = Vec::new();
            b.iter(|| {
                engine.start(sequence(1, tokens, 0)).expect("it fits");
                engine.step(&mut events, &mut NullSink);
                engine.stop(SequenceId(1));
                black_box(events.drain(..).count())
            });
        });
    }
    group.finish();
}

/// Starts a batch anew and prefills it.
fn restart(engine: &mut dyn Engine, batch: u32, events: &mut Vec<Event>) {
    for n in 0..batch {
        engine.stop(SequenceId(n.into()));
        engine.start(sequence(n.into(), 256, 128 * n)).expect("it fits");
    }
    for _ in 0..batch {
        engine.step(events, &mut NullSink);
    }
    events.clear();
}

fn decode(c: &mut Criterion) {
    let spec = SeededSpec::default();
    let mut group = c.benchmark_group("decode");
    group.sample_size(20);
    for batch in [1u32, 16] {
        let mut events: Vec<Event> = Vec::new();
        let mut engine = engine(&spec);
        group.throughput(Throughput::Bytes(4 * dense_weights(&spec)));
        group.bench_function(format!("batch {batch} from 256 tokens, in bytes of weights"), |b| {
            b.iter_custom(|steps| {
                let mut time = Duration::ZERO;
                for step in 0..steps {
                    if step % 512 == 0 {
                        restart(&mut engine, batch, &mut events);
                    }
                    let from = Instant::now();
                    engine.step(&mut events, &mut NullSink);
                    time += from.elapsed();
                    events.clear();
                }
                time
            });
        });
    }
    group.finish();
}

fn ceilings(c: &mut Criterion) {
    let (rows, inputs, outputs) = (64, 256, 688);
    let (x, w) = (vec![0.5f32; rows * inputs], vec![0.25f32; inputs * outputs]);
    let mut group = c.benchmark_group("ceilings");
    group.sample_size(20);
    group.throughput(Throughput::Elements(2 * (rows * inputs * outputs) as u64));
    group.bench_function("triple loop of 64 x 256 x 688, in operations", |b| {
        let mut y = vec![0.0f32; rows * outputs];
        b.iter(|| {
            for row in 0..rows {
                for output in 0..outputs {
                    let mut sum = 0.0;
                    for k in 0..inputs {
                        sum += x[row * inputs + k] * w[output * inputs + k];
                    }
                    y[row * outputs + output] = sum;
                }
            }
            black_box(&y);
        });
    });
    let weights = vec![1u8; 4 * usize::try_from(dense_weights(&SeededSpec::default())).expect("fits")];
    let mut copy = vec![0u8; weights.len()];
    group.throughput(Throughput::Bytes(weights.len() as u64));
    group.bench_function("copy the weights", |b| {
        b.iter(|| {
            copy.copy_from_slice(black_box(&weights));
            black_box(&copy);
        });
    });
    group.finish();
}

/// Measures the overhead of an engine without work: one token each for 256 sequences.
fn idle(c: &mut Criterion) {
    let pool = PoolSpec { blocks: 256 * 128, max_running: 256, ..PoolSpec::default() };
    let mut engine = TimedEngine::new(TimedSpec::zero_work(), pool).expect("a sound spec");
    let mut events: Vec<Event> = Vec::new();
    let mut group = c.benchmark_group("timed");
    group.throughput(Throughput::Elements(256));
    group.bench_function("zero-work step of 256 decodes, in tokens", |b| {
        let mut left = 0;
        b.iter_custom(|steps| {
            let mut time = Duration::ZERO;
            for _ in 0..steps {
                if left == 0 {
                    restart(&mut engine, 256, &mut events);
                    left = 1500;
                }
                left -= 1;
                let from = Instant::now();
                engine.step(&mut events, &mut NullSink);
                time += from.elapsed();
                events.clear();
            }
            time
        });
    });
    group.finish();
}

criterion_group!(passes, prefill, decode, ceilings, idle);
criterion_main!(passes);
