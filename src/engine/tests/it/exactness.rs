//! The promise that all of disaggregation rests on: what an engine answers depends on the sequence
//! alone. Every answer here is compared to the bit with that of one engine that ran it by itself.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use baton_engine::{Builtin, Engine, Event, KvPool, KvSink, PoolSpec, Sequence, SequenceId};
use baton_types::{Rng, Sampling};

use crate::play::{
    NullSink, Outcome, blocks_of, builtin, carry, note, play, pool, sequence, slots, text, tiny,
};

/// Some way of drawing tokens.
fn sampling(rng: &mut Rng) -> Sampling {
    let some = |rng: &mut Rng, value: f32, none: f32| if rng.chance_permille(400) { value } else { none };
    Sampling {
        temperature: some(rng, 0.0, 0.9),
        top_p: some(rng, 0.8, 1.0),
        top_k: u32::from(rng.chance_permille(300)) * 20,
        min_p: some(rng, 0.02, 0.0),
        presence_penalty: some(rng, 0.5, 0.0),
        frequency_penalty: some(rng, 0.3, 0.0),
        repetition_penalty: some(rng, 1.2, 1.0),
        logit_bias: vec![(65, 1.5)],
        seed: rng.next_u64(),
        max_tokens: u32::try_from(1 + rng.below(24)).unwrap(),
        min_tokens: u32::try_from(rng.below(4)).unwrap(),
        ignore_eos: rng.chance_permille(500),
        logprobs: rng.chance_permille(800).then_some(3),
        ..Sampling::default()
    }
}

/// The answer of one engine by itself, in as few passes as possible.
fn alone(tokens: &[u32], sampling: &Sampling) -> Outcome {
    let mut engine = builtin(512);
    let blocks = (0..u32::try_from(blocks_of(tokens.len() + 32)).unwrap()).collect();
    engine.start(sequence(1, tokens.to_vec(), sampling.clone(), blocks)).unwrap();
    play(&mut engine).remove(&1).unwrap()
}

#[test]
fn neighbours_chunks_orders_and_slots_change_nothing() {
    for seed in 0..60 {
        let mut rng = Rng::fork(seed, 1);
        let pass_tokens = u32::try_from(1 + rng.below(40)).unwrap();
        let threads = rng.chance_permille(200).then_some(2);
        let mut engine = Builtin::seeded(&tiny(), PoolSpec { threads, ..pool(pass_tokens) }).unwrap();
        let (mut outcomes, mut events, mut want) = (BTreeMap::new(), Vec::new(), BTreeMap::new());
        for n in 0..6 {
            let len = 1 + rng.below(60);
            let tokens = text(&mut rng, len);
            let mut sampling = sampling(&mut rng);
            sampling.prompt_logprobs = rng.chance_permille(300).then_some(2);
            want.insert(n, alone(&tokens, &sampling));
            let range = u32::try_from(n).unwrap() * 40;
            let blocks = slots(&mut rng, range..range + 40, blocks_of(tokens.len() + 25));
            let order = rng.below(3);
            engine.start(Sequence { order, ..sequence(n, tokens, sampling, blocks) }).unwrap();
            for _ in 0..rng.below(4) {
                engine.step(&mut events, &mut NullSink);
            }
        }
        note(&mut outcomes, events);
        let mut events = Vec::new();
        while engine.step(&mut events, &mut NullSink) {}
        note(&mut outcomes, events);
        assert_eq!(outcomes, want, "seed {seed}");
    }
}

/// Passes each layer on to another engine as soon as it is computed.
struct Relay<'a> {
    to: &'a mut Builtin,
    blocks: &'a [u32],
    seen: Vec<(u32, Range<u32>)>,
}

impl KvSink for Relay<'_> {
    fn layer_computed(&mut self, _: SequenceId, layer: u32, tokens: Range<u32>, at: (&[u32], &KvPool)) {
        let block_tokens = self.to.shape().block_tokens;
        for n in tokens.start / block_tokens..tokens.end.div_ceil(block_tokens) {
            let (source, target) = (at.0[n as usize], self.blocks[n as usize]);
            self.to.kv_mut().layer_mut(target, layer).copy_from_slice(at.1.layer(source, layer));
        }
        self.seen.push((layer, tokens));
    }
}

#[test]
fn a_layerwise_hand_off_after_the_prefill_changes_nothing() {
    for seed in 0..60 {
        let mut rng = Rng::fork(seed, 2);
        let len = 1 + rng.below(80);
        let (tokens, sampling) = (text(&mut rng, len), sampling(&mut rng));
        let want = alone(&tokens, &sampling);
        let count = blocks_of(tokens.len() + 25);
        let (here, there) = (slots(&mut rng, 0..256, count), slots(&mut rng, 0..256, count));
        let (mut prefill, mut decode) = (builtin(1 + u32::try_from(rng.below(30)).unwrap()), builtin(9));
        let first = sequence(1, tokens.clone(), sampling.clone(), here);
        prefill.start(Sequence { leaves: true, ..first.clone() }).unwrap();
        let mut relay = Relay { to: &mut decode, blocks: &there, seen: Vec::new() };
        let mut events = Vec::new();
        while prefill.step(&mut events, &mut relay) {}
        let shown: usize = relay.seen.iter().map(|(_, tokens)| tokens.len()).sum();
        assert_eq!(shown, 2 * tokens.len(), "each layer of each token once");
        let mut outcomes = BTreeMap::new();
        note(&mut outcomes, events);
        let mut got = outcomes.remove(&1).unwrap();
        assert_eq!(got.answer.len(), 1, "it holds after its first token");
        if got.finish.is_none() {
            prefill.stop(SequenceId(1));
            let whole: Vec<u32> = tokens.iter().copied().chain(got.tokens()).collect();
            let computed_tokens = first.prompt_tokens;
            decode.start(Sequence { tokens: whole, computed_tokens, blocks: there, ..first }).unwrap();
            let rest = play(&mut decode).remove(&1).unwrap();
            got.answer.extend(rest.answer);
            got.finish = rest.finish;
        }
        assert_eq!(got, want, "seed {seed}");
    }
}

/// One stay of a sequence on an engine of its own, beside a noisy neighbour: up to `quota` tokens.
fn stay(rng: &mut Rng, engine: &mut Builtin, visit: Sequence, quota: u64) -> Outcome {
    let noise = text(rng, 1 + quota % 30);
    let restless = Sampling { max_tokens: 200, ignore_eos: true, ..Sampling::default() };
    engine.start(sequence(2, noise, restless, (200..256).collect())).unwrap();
    let id = visit.id;
    engine.start(visit).unwrap();
    let mut outcomes = BTreeMap::new();
    let mut events = Vec::new();
    loop {
        engine.step(&mut events, &mut NullSink);
        let tokens = events.iter().filter(|e| matches!(e, Event::Token { id: of, .. } if *of == id)).count();
        let ended = |e: &Event| matches!(e, Event::Token { id: of, finish: Some(_), .. } if *of == id);
        if tokens as u64 >= quota || events.iter().any(ended) {
            break;
        }
    }
    engine.stop(id);
    note(&mut outcomes, events);
    outcomes.remove(&id.0).unwrap()
}

#[test]
fn answers_that_move_again_and_again_go_on_as_if_they_had_stayed() {
    for seed in 0..80 {
        let mut rng = Rng::fork(seed, 3);
        let len = 1 + rng.below(50);
        let (mut tokens, sampling) = (text(&mut rng, len), Arc::new(sampling(&mut rng)));
        let want = alone(&tokens, &sampling);
        let prompt_tokens = u32::try_from(tokens.len()).unwrap();
        let mut got = Outcome::default();
        let mut last: Option<(Builtin, Vec<u32>, usize)> = None;
        while got.finish.is_none() {
            let mut engine = builtin(1 + u32::try_from(rng.below(50)).unwrap());
            let blocks = slots(&mut rng, 0..200, blocks_of(tokens.len() + 25));
            // Any part of what was computed may come along; the rest is computed anew.
            let mut computed = 0;
            if let Some((engine_before, blocks_before, had)) = &last {
                computed = usize::try_from(rng.below(*had as u64 + 1)).unwrap();
                let pairs = blocks_before.iter().copied().zip(blocks.iter().copied());
                carry(engine_before, &mut engine, pairs.take(blocks_of(computed)));
            }
            let visit = Sequence {
                prompt_tokens,
                computed_tokens: u32::try_from(computed).unwrap(),
                ..sequence(1, tokens.clone(), (*sampling).clone(), blocks.clone())
            };
            let quota = 1 + rng.below(6);
            let part = stay(&mut rng, &mut engine, visit, quota);
            tokens.extend(part.tokens());
            got.answer.extend(part.answer);
            got.finish = part.finish;
            last = Some((engine, blocks, tokens.len() - 1));
        }
        got.computed = 1;
        assert_eq!(got, want, "seed {seed}");
    }
}

#[test]
fn kv_of_an_answer_is_that_of_the_same_text_as_a_prompt() {
    let mut rng = Rng::new(5);
    let tokens = text(&mut rng, 13);
    let sampling = Sampling { max_tokens: 30, ignore_eos: true, ..Sampling::default() };
    let mut decoded = builtin(3);
    decoded.start(sequence(1, tokens.clone(), sampling.clone(), (0..20).collect())).unwrap();
    let answer = play(&mut decoded).remove(&1).unwrap().tokens();
    let whole: Vec<u32> = tokens.into_iter().chain(answer).collect();
    let mut prefilled = builtin(512);
    let one = Sampling { max_tokens: 1, ..sampling };
    prefilled.start(sequence(1, whole[..whole.len() - 1].to_vec(), one, (0..20).rev().collect())).unwrap();
    play(&mut prefilled);
    for block in 0..10 {
        for layer in 0..2 {
            let (a, b) = (decoded.kv().layer(block, layer), prefilled.kv().layer(19 - block, layer));
            assert_eq!(a, b, "block {block}, layer {layer}");
            assert!(a.iter().any(|byte| *byte != 0));
        }
    }
}

#[test]
fn broken_kv_is_noticed_so_that_the_other_tests_could_fail() {
    let tokens = text(&mut Rng::new(6), 40);
    let sampling = Sampling { logprobs: Some(0), max_tokens: 4, ..Sampling::default() };
    let want = alone(&tokens, &sampling);
    let mut engine = builtin(512);
    let blocks: Vec<u32> = (0..16).collect();
    let first = sequence(1, tokens, sampling, blocks);
    engine.start(first.clone()).unwrap();
    assert_eq!(play(&mut engine)[&1], want);
    let mut layer = engine.kv().layer(3, 1).to_vec();
    layer[5] ^= 0x40;
    engine.kv_mut().layer_mut(3, 1).copy_from_slice(&layer);
    engine.start(Sequence { computed_tokens: 36, ..first }).unwrap();
    assert_ne!(play(&mut engine)[&1], want);
}
