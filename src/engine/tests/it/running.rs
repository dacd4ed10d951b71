//! The order of computation: holds, starvation, orders and bounds. Also the ends of answers.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use baton_engine::{Builtin, Engine, Event, KvPool, KvSink, Sequence, SequenceId, TimedEngine, TimedSpec};
use baton_types::{Finish, Sampling};

use crate::play::{NullSink, builtin, idle, note, play, pool, sequence, tiny};

fn long(max_tokens: u32) -> Sampling {
    Sampling { max_tokens, ignore_eos: true, ..Sampling::default() }
}

/// Notes the chunks of the pass, by the first layer.
#[derive(Default)]
struct Chunks(Vec<(u64, Range<u32>)>);

impl KvSink for Chunks {
    fn layer_computed(&mut self, id: SequenceId, layer: u32, tokens: Range<u32>, _: (&[u32], &KvPool)) {
        if layer == 0 {
            self.0.push((id.0, tokens));
        }
    }
}

fn pass(engine: &mut dyn Engine) -> Vec<(u64, Range<u32>)> {
    let mut chunks = Chunks::default();
    engine.step(&mut Vec::new(), &mut chunks);
    chunks.0
}

fn prompt(id: u64, len: usize, order: u64) -> Sequence {
    let first = u32::try_from(id * 20).unwrap();
    let blocks = (first..first + 20).collect();
    Sequence { order, layerwise: true, ..sequence(id, vec![1; len], long(9), blocks) }
}

#[test]
fn decodes_come_first_then_prompts_in_order_up_to_the_pass() {
    let mut engine = idle(pool(10));
    engine.start(prompt(1, 4, 5)).unwrap();
    assert_eq!(pass(&mut engine), [(1, 0..4)]);
    engine.start(prompt(2, 25, 7)).unwrap();
    engine.start(prompt(3, 8, 6)).unwrap();
    engine.start(prompt(4, 1, 99)).unwrap();
    assert_eq!(engine.load(), (1, 3));
    assert_eq!(pass(&mut engine), [(1, 4..5), (4, 0..1), (3, 0..8), (2, 0..2)]);
    engine.start(prompt(5, 3, 1)).unwrap();
    // A sequence that has begun is not overtaken, whatever its order.
    assert_eq!(pass(&mut engine), [(1, 5..6), (4, 1..2), (3, 8..9), (2, 2..12)]);
    assert_eq!(engine.load(), (4, 1));
    engine.start(prompt(6, 3, 0)).unwrap();
    let next = pass(&mut engine);
    assert_eq!(next[3..], [(2, 12..22)], "{next:?}");
    assert_eq!(pass(&mut engine)[3..], [(2, 22..25), (6, 0..3), (5, 0..3)]);
}

#[test]
fn no_more_run_than_may_and_held_ones_make_room() {
    let mut spec = pool(100);
    spec.max_running = 2;
    let mut engine = idle(spec);
    for id in 1..=4 {
        engine.start(Sequence { hold: id == 1, ..prompt(id, 5, 0) }).unwrap();
    }
    assert_eq!(pass(&mut engine), [(1, 0..5), (2, 0..5)]);
    assert_eq!(engine.load(), (1, 2), "the held one neither runs nor waits");
    assert_eq!(pass(&mut engine), [(2, 5..6), (3, 0..5)]);
    engine.proceed(SequenceId(1));
    engine.stop(SequenceId(3));
    assert_eq!(
        pass(&mut engine),
        [(1, 5..6), (2, 6..7)],
        "those that have begun come before one that begins"
    );
    assert_eq!(engine.load(), (2, 1));
}

#[test]
fn a_starved_sequence_says_so_once_and_goes_on_as_if_it_had_not() {
    let engines: [&mut dyn Engine; 2] = [&mut builtin(8), &mut idle(pool(8))];
    for engine in engines {
        engine.start(sequence(1, vec![1; 6], long(12), (0..9).collect())).unwrap();
        let want = play(engine).remove(&1).unwrap();
        engine.start(sequence(1, vec![1; 6], long(12), vec![10, 11])).unwrap();
        let mut outcomes = BTreeMap::new();
        let mut events = Vec::new();
        while engine.step(&mut events, &mut NullSink) {}
        assert!(!engine.step(&mut events, &mut NullSink), "nothing runs while it starves");
        assert_eq!(engine.load(), (0, 0));
        assert_eq!(events.last(), Some(&Event::Starved { id: SequenceId(1) }));
        engine.extend(SequenceId(1), &[]);
        assert!(!engine.step(&mut events, &mut NullSink), "no slots, no more to do");
        note(&mut outcomes, events.drain(..));
        assert_eq!((outcomes[&1].answer.len(), outcomes[&1].starved), (3, 1));
        for block in [12, 13, 14] {
            engine.extend(SequenceId(1), &[block]);
            while engine.step(&mut events, &mut NullSink) {}
        }
        note(&mut outcomes, events);
        let mut got = outcomes.remove(&1).unwrap();
        assert_eq!(got.starved, 3, "12 tokens in blocks of 4");
        got.starved = 0;
        assert_eq!(got, want);
    }
}

#[test]
fn a_held_sequence_draws_one_token_until_it_may_go_on() {
    let mut engine = builtin(8);
    engine.start(sequence(1, vec![1; 9], long(5), (0..9).collect())).unwrap();
    let want = play(&mut engine).remove(&1).unwrap();
    let held = Sequence { hold: true, ..sequence(1, vec![1; 9], long(5), (0..9).collect()) };
    engine.start(held.clone()).unwrap();
    let mut outcomes = play(&mut engine);
    assert_eq!(outcomes[&1].answer, want.answer[..1]);
    engine.proceed(SequenceId(1));
    let rest = play_on(&mut engine, &mut outcomes);
    assert_eq!(rest, want);
    engine.start(held).unwrap();
    engine.proceed(SequenceId(1));
    assert_eq!(play(&mut engine)[&1], want, "a word in advance counts");
}

fn play_on(engine: &mut Builtin, outcomes: &mut BTreeMap<u64, crate::play::Outcome>) -> crate::play::Outcome {
    let mut events = Vec::new();
    while engine.step(&mut events, &mut NullSink) {}
    note(outcomes, events);
    outcomes.remove(&1).unwrap()
}

/// The answer to a fixed prompt of 10 tokens, of which `drawn` more were drawn elsewhere.
fn answer(sampling: &Sampling, drawn: u32) -> (Vec<(u32, u32)>, Option<Finish>) {
    let mut engine = builtin(64);
    let tokens = vec![65; 10 + drawn as usize];
    let visit = Sequence {
        prompt_tokens: 10,
        sampling: Arc::new(sampling.clone()),
        ..sequence(1, tokens, Sampling::default(), (0..110).collect())
    };
    engine.start(visit).unwrap();
    let outcome = play(&mut engine).remove(&1).unwrap();
    (outcome.answer.iter().map(|(index, token, _)| (*index, *token)).collect(), outcome.finish)
}

#[test]
fn bounds_count_the_whole_answer_wherever_it_began() {
    let (tokens, finish) = answer(&long(7), 0);
    assert_eq!((tokens.len(), finish), (7, Some(Finish::Length)));
    let (tokens, finish) = answer(&long(7), 4);
    assert_eq!(tokens.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [4, 5, 6]);
    assert_eq!(finish, Some(Finish::Length));
    let (tokens, finish) = answer(&long(100_000), 0);
    let room = tiny().max_model_tokens as usize - 10;
    assert_eq!((tokens.len(), finish), (room, Some(Finish::Length)), "the model's length");
}

#[test]
fn end_and_stop_tokens_end_answers_but_not_before_the_least_length() {
    // A bias makes the model's end token all but certain.
    let ends = Sampling { logit_bias: vec![(257, 1e4)], max_tokens: 9, ..Sampling::default() };
    assert_eq!(answer(&ends, 0), (vec![(0, 257)], Some(Finish::Stop)));
    let later = Sampling { min_tokens: 4, ..ends.clone() };
    let (tokens, finish) = answer(&later, 0);
    assert_eq!((tokens.len(), tokens[4].1, finish), (5, 257, Some(Finish::Stop)));
    assert!(tokens[..4].iter().all(|(_, token)| *token != 257));
    let never = Sampling { ignore_eos: true, ..ends };
    assert_eq!(answer(&never, 0), ((0..9).map(|n| (n, 257)).collect(), Some(Finish::Length)));
    let stops = Sampling { stop_token_ids: vec![9, 70], logit_bias: vec![(70, 1e4)], ..never };
    assert_eq!(answer(&stops, 0), (vec![(0, 70)], Some(Finish::Stop)));
    let last = Sampling { max_tokens: 1, ..stops };
    assert_eq!(answer(&last, 0).1, Some(Finish::Stop), "a stop at the bound is a stop");
}

#[test]
fn seeded_answers_are_printable_and_end_by_themselves() {
    let mut engine = builtin(64);
    let mut ended = 0;
    for seed in 0..20 {
        let sampling = Sampling { seed, max_tokens: 380, ..Sampling::default() };
        engine.start(sequence(1, vec![72, 105], sampling, (0..100).collect())).unwrap();
        let outcome = play(&mut engine).remove(&1).unwrap();
        let printable = |token: &u32| *token == 10 || (32..127).contains(token) || *token == 257;
        let tokens = outcome.tokens();
        let odd = tokens.iter().filter(|token| !printable(token)).count();
        assert!(odd * 50 <= tokens.len() + 49, "{odd} of {} tokens cannot be shown", tokens.len());
        ended += usize::from(outcome.finish == Some(Finish::Stop));
    }
    assert!(ended >= 10, "{ended} of 20 ended by themselves");
}

#[test]
fn equal_seeds_are_equal_models() {
    let revision = |seed| {
        let spec = baton_engine::SeededSpec { seed, ..tiny() };
        Builtin::seeded(&spec, pool(8)).unwrap().model().revision.clone()
    };
    assert_eq!(revision(1), revision(1));
    assert_ne!(revision(1), revision(2));
    let odd = baton_engine::SeededSpec { dim: 42, ..tiny() };
    assert!(Builtin::seeded(&odd, pool(8)).unwrap_err().0.contains("dim 42"));
    let vast = baton_engine::SeededSpec { ffn_dim: u32::MAX, ..tiny() };
    assert!(Builtin::seeded(&vast, pool(8)).unwrap_err().0.contains("make it smaller"));
    let mut endless = pool(8);
    (endless.blocks, endless.block_tokens) = (u32::MAX, u32::MAX);
    assert!(Builtin::seeded(&tiny(), endless.clone()).unwrap_err().0.contains("fewer blocks"));
    assert!(TimedEngine::new(TimedSpec::zero_work(), endless).unwrap_err().0.contains("fewer blocks"));
    let bad = TimedSpec { time_scale: f64::NAN, ..TimedSpec::zero_work() };
    assert!(TimedEngine::new(bad, pool(8)).unwrap_err().0.contains("time_scale"));
}
