//! Starvation, sequences whose KV leaves, and the ends of answers.

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_engine::{Builtin, Engine, Event, Sequence, SequenceId, TimedEngine, TimedSpec};
use baton_types::{Finish, Sampling};

use crate::play::{NullSink, builtin, idle, note, play, pool, sequence, tiny};

fn long(max_tokens: u32) -> Sampling {
    Sampling { max_tokens, ignore_eos: true, ..Sampling::default() }
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
fn a_sequence_whose_kv_leaves_draws_one_token() {
    let mut engine = builtin(8);
    let one = sequence(1, vec![1; 9], long(5), (0..9).collect());
    engine.start(one.clone()).unwrap();
    let want = play(&mut engine).remove(&1).unwrap();
    engine.start(Sequence { leaves: true, ..one }).unwrap();
    assert_eq!(play(&mut engine)[&1].answer, want.answer[..1]);
    assert_eq!(engine.load(), (0, 0), "it rests");
    engine.stop(SequenceId(1));
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
