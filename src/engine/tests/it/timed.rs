//! The engine that only keeps time.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_engine::{Engine, Event, KvPool, KvSink, Sequence, SequenceId, StepTarget, TimedEngine, TimedSpec};
use baton_types::{CostProfile, Finish, Rng, Sampling};

use crate::play::{NullSink, Outcome, blocks_of, carry, idle, note, play, pool, sequence, slots, text};

/// 1 ms and 10 µs a token for a prefill, 2 ms for a decode step, whatever the batch; 4 layers.
fn profile() -> CostProfile {
    let mut profile = TimedSpec::zero_work().profile;
    profile.layers = 4;
    profile.prefill.knots_us = vec![1000.0, 1010.0];
    profile.decode.base_us = vec![2000.0];
    profile
}

fn timed(time_scale: f64) -> TimedEngine {
    let spec = TimedSpec { time_scale, block_bytes: 1000, ..TimedSpec::new(profile()) };
    TimedEngine::new(spec, pool(100)).unwrap()
}

fn sampling(seed: u64) -> Sampling {
    Sampling { seed, max_tokens: 20, logprobs: Some(2), ..Sampling::default() }
}

#[test]
fn passes_take_as_long_as_the_profile_says() {
    let mut engine = timed(2.0);
    engine.start(sequence(1, vec![1; 200], sampling(1), (0..60).collect())).unwrap();
    let from = Instant::now();
    let outcome = play(&mut engine).remove(&1).unwrap();
    let took = from.elapsed();
    assert_eq!((outcome.answer.len(), outcome.finish), (20, Some(Finish::Length)));
    // Two prefill passes of 100 tokens (2 ms each) and 19 decode steps (2 ms each), twice as slow.
    let want = Duration::from_millis(2 * (2 * 2 + 19 * 2));
    assert!(took >= want, "{took:?} for {want:?}");
    // A busy machine may be late, but what is late is made up for.
    assert!(took < want * 5, "{took:?} for {want:?}");
    let mut quick = timed(0.0);
    quick.start(sequence(1, vec![1; 200], sampling(1), (0..60).collect())).unwrap();
    assert_eq!(play(&mut quick)[&1], outcome, "speed changes no answer");
}

/// Notes when layers are shown.
struct Watch(Vec<(u32, Range<u32>, Instant)>);

impl KvSink for Watch {
    fn layer_computed(&mut self, _: SequenceId, layer: u32, tokens: Range<u32>, at: (&[u32], &KvPool)) {
        assert_eq!(at.1.layer(at.0[0], layer).len(), 256);
        self.0.push((layer, tokens, Instant::now()));
    }
}

#[test]
fn layers_are_shown_one_after_another_as_the_pass_goes() {
    // A busy machine may wake late, so that one try in a few must do.
    let spread = (0..20).any(|_| first_layer_took() < Duration::from_millis(8));
    assert!(spread, "the first of four layers is shown well before the pass of 10 ms is over");
}

/// Runs one layerwise prefill of 10 ms; gives the time until its first layer was shown.
fn first_layer_took() -> Duration {
    let mut engine = timed(5.0);
    assert_eq!((engine.shape().layer_bytes, engine.shape().block_bytes()), (256, 1024));
    let one = sequence(1, vec![1; 100], sampling(1), (0..60).collect());
    engine.start(Sequence { leaves: true, ..one }).unwrap();
    let mut watch = Watch(Vec::new());
    let mut events = Vec::new();
    let from = Instant::now();
    while engine.step(&mut events, &mut watch) {}
    let layers: Vec<_> = watch.0.iter().map(|(layer, tokens, _)| (*layer, tokens.clone())).collect();
    assert_eq!(layers, (0..4).map(|layer| (layer, 0..100)).collect::<Vec<_>>());
    for (layer, _, at) in &watch.0 {
        let due = Duration::from_micros(2490) * (layer + 1);
        assert!(*at - from >= due, "layer {layer} after {:?}", *at - from);
    }
    let Some(Event::Computed { compute_us, .. }) = events.first() else { panic!("{events:?}") };
    assert!(*compute_us >= 9_900);
    watch.0[0].2 - from
}

/// Steps until a sequence is computed; gives the chunks that it was cut into.
fn chunks_of(engine: &mut TimedEngine, id: u64) -> Vec<u32> {
    let (mut watch, mut events) = (Watch(Vec::new()), Vec::new());
    while !events.iter().any(|event| matches!(event, Event::Computed { id: of, .. } if of.0 == id)) {
        assert!(engine.step(&mut events, &mut watch));
    }
    let firsts = watch.0.iter().filter(|(layer, ..)| *layer == 0);
    firsts.map(|(_, tokens, _)| tokens.end - tokens.start).collect()
}

#[test]
fn a_long_prompt_beside_decodes_keeps_every_pass_within_the_target() {
    let mut engine = timed(0.0);
    let long = |id, first| {
        let blocks = (first..first + 70).collect();
        Sequence { leaves: true, ..sequence(id, vec![1; 250], sampling(1), blocks) }
    };
    let decode = sequence(1, vec![1], Sampling { max_tokens: 100, ..sampling(1) }, (0..26).collect());
    engine.start(decode).unwrap();
    assert!(engine.step(&mut Vec::new(), &mut NullSink));
    let target = |time_us| StepTarget { profile: Arc::new(profile()), time_us };
    // The step takes 2 ms, a pass with prompts 1 ms and 10 µs a token.
    for (time_us, want) in [(3_500, 50), (3_900, 90), (3_999, 99)] {
        engine.set_step_target(Some(target(time_us)));
        engine.start(long(2, 30)).unwrap();
        let chunks = chunks_of(&mut engine, 2);
        assert_eq!(chunks.iter().sum::<u32>(), 250);
        assert!(
            chunks[..chunks.len() - 1].iter().all(|tokens| *tokens == want),
            "{chunks:?} in {time_us} µs"
        );
        engine.stop(SequenceId(2));
    }
    // Where a step is too long by itself the prompt goes on, and the engine may do as it likes without a target.
    engine.set_step_target(Some(target(1_000)));
    engine.start(long(3, 30)).unwrap();
    let mut watch = Watch(Vec::new());
    assert!(engine.step(&mut Vec::new(), &mut watch));
    assert_eq!(watch.0[0].1, 0..16);
    engine.set_step_target(None);
    assert_eq!(chunks_of(&mut engine, 3), [100, 100, 34]);
    // Alone it gets whole passes.
    engine.stop(SequenceId(3));
    engine.stop(SequenceId(1));
    engine.set_step_target(Some(target(3_500)));
    engine.start(long(4, 30)).unwrap();
    assert_eq!(chunks_of(&mut engine, 4), [100, 100, 50]);
}

#[test]
fn answers_are_equal_wherever_they_run_and_kv_proves_its_origin() {
    for seed in 0..40 {
        let mut rng = Rng::fork(seed, 4);
        let len = 1 + rng.below(60);
        let tokens = text(&mut rng, len);
        let count = blocks_of(tokens.len() + 20);
        let (here, there) = (slots(&mut rng, 0..256, count), slots(&mut rng, 0..256, count));
        let first = sequence(1, tokens.clone(), sampling(seed), here.clone());
        let mut alone = idle(pool(7));
        alone.start(first.clone()).unwrap();
        let want = play(&mut alone).remove(&1).unwrap();
        let (mut prefill, mut decode) = (idle(pool(7)), idle(pool(64)));
        prefill.start(Sequence { leaves: true, ..first.clone() }).unwrap();
        let mut got = play(&mut prefill).remove(&1).unwrap();
        let moved = Sequence {
            computed_tokens: first.prompt_tokens,
            tokens: tokens.iter().copied().chain(got.tokens()).collect(),
            blocks: there.clone(),
            ..first.clone()
        };
        if tokens.len() >= 4 {
            let told = decode.start(moved.clone()).unwrap_err().0;
            assert!(told.contains("does not hold the KV of tokens 0..4"), "{told}");
        }
        carry(&prefill, &mut decode, here.into_iter().zip(there));
        decode.start(moved).unwrap();
        let rest = play(&mut decode).remove(&1).unwrap();
        got.answer.extend(rest.answer);
        got.finish = rest.finish;
        assert_eq!(got, want, "seed {seed}");
    }
}

#[test]
fn another_seed_or_another_text_is_another_answer() {
    let answer = |tokens: &[u32], seed| -> Outcome {
        let mut engine = idle(pool(50));
        engine.start(sequence(1, tokens.to_vec(), sampling(seed), (0..20).collect())).unwrap();
        play(&mut engine).remove(&1).unwrap()
    };
    let one = answer(&[1, 2, 3], 1);
    assert_eq!(one, answer(&[1, 2, 3], 1));
    assert_ne!(one.tokens(), answer(&[1, 2, 3], 2).tokens());
    assert_ne!(one.tokens(), answer(&[1, 2, 4], 1).tokens());
    assert!(one.tokens().iter().all(|token| (32..127).contains(token)));
    let mut seen: Vec<u32> = one.tokens();
    seen.sort_unstable();
    seen.dedup();
    assert!(seen.len() > 10, "{seen:?}");
}

#[test]
fn logprobs_are_even_and_as_many_as_asked_for() {
    let mut engine = idle(pool(50));
    let asked = Sampling { prompt_logprobs: Some(1), ..sampling(1) };
    engine.start(sequence(1, vec![1; 9], asked, (0..20).collect())).unwrap();
    let mut events = Vec::new();
    while engine.step(&mut events, &mut NullSink) {}
    let Some(Event::PromptLogprobs { logprobs, .. }) = events.first() else { panic!("{events:?}") };
    assert_eq!(logprobs.len(), 8);
    assert_eq!(logprobs[0].top.len(), 1);
    assert!((logprobs[0].logprob + 512f32.ln()).abs() < 1e-6);
    let mut outcomes = BTreeMap::new();
    note(&mut outcomes, events);
    assert!(outcomes[&1].answer.iter().all(|(.., bits)| bits.len() == 5));
}
