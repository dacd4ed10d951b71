//! Sequences that an engine refuses to start, and its reasons.

use std::sync::Arc;

use baton_engine::{Engine, Sequence, SequenceId};
use baton_types::Sampling;

use crate::play::{builtin, idle, play, pool, sequence};

fn sound() -> Sequence {
    sequence(1, vec![1, 2, 3, 4, 5], Sampling { max_tokens: 3, ..Sampling::default() }, vec![0, 1, 2])
}

/// Sequences that must not start, each with words of its refusal.
fn broken() -> Vec<(&'static str, Sequence)> {
    let with = |change: fn(&mut Sequence)| {
        let mut sequence = sound();
        change(&mut sequence);
        sequence
    };
    let drawing = |change: fn(&mut Sampling)| {
        let mut sampling = (*sound().sampling).clone();
        change(&mut sampling);
        Sequence { sampling: Arc::new(sampling), ..sound() }
    };
    vec![
        ("prompt_tokens", with(|s| s.tokens.clear())),
        ("prompt_tokens", with(|s| s.prompt_tokens = 0)),
        ("prompt_tokens", with(|s| s.prompt_tokens = 6)),
        ("nothing to compute", with(|s| s.computed_tokens = 5)),
        ("token 300", with(|s| s.tokens[2] = 300)),
        ("it needs 2", with(|s| s.blocks.truncate(1))),
        ("slot 256", with(|s| s.blocks[1] = 256)),
        ("slot 2 is named twice", with(|s| s.blocks[1] = 2)),
        ("no room", with(|s| s.tokens = vec![1; 400])),
        ("max_tokens", with(|s| s.prompt_tokens = 2)),
        ("max_tokens", drawing(|s| s.max_tokens = 0)),
        ("temperature", drawing(|s| s.temperature = -1.0)),
        ("temperature", drawing(|s| s.temperature = f32::NAN)),
        ("top_p", drawing(|s| s.top_p = 1.5)),
        ("min_p", drawing(|s| s.min_p = -0.1)),
        ("presence_penalty", drawing(|s| s.presence_penalty = f32::INFINITY)),
        ("repetition_penalty", drawing(|s| s.repetition_penalty = 0.0)),
        ("logit_bias", drawing(|s| s.logit_bias = vec![(300, 1.0)])),
        ("logit_bias", drawing(|s| s.logit_bias = vec![(3, f32::NAN)])),
        ("prompt_logprobs", {
            let mut sequence = drawing(|s| s.prompt_logprobs = Some(0));
            sequence.computed_tokens = 1;
            sequence
        }),
    ]
}

#[test]
fn what_does_not_fit_is_named_and_leaves_nothing_behind() {
    let mut timed = idle(pool(8));
    let mut transformer = builtin(8);
    for (words, sequence) in broken() {
        // The timed engine's model is larger.
        let fits_timed = ["token 300", "no room", "logit_bias"].contains(&words);
        if !fits_timed {
            let told = timed.start(sequence.clone()).unwrap_err().0;
            assert!(told.contains(words), "{words}: {told}");
        }
        let told = transformer.start(sequence).unwrap_err().0;
        assert!(told.contains(words) && told.starts_with("engine start: "), "{words}: {told}");
    }
    for engine in [&mut timed as &mut dyn Engine, &mut transformer] {
        assert_eq!(engine.load(), (0, 0));
        engine.start(sound()).unwrap();
        assert!(engine.start(sound()).unwrap_err().0.contains("in use"));
        assert_eq!(play(engine)[&1].answer.len(), 3);
    }
}

#[test]
fn there_are_no_more_sequences_than_slots() {
    let mut spec = pool(8);
    spec.blocks = 3;
    let mut engine = idle(spec);
    let one = |id: u64| sequence(id, vec![1], Sampling::default(), vec![u32::try_from(id).unwrap() % 3]);
    for id in 0..3 {
        engine.start(one(id)).unwrap();
    }
    assert!(engine.start(one(3)).unwrap_err().0.contains("wait for one to end"));
    engine.stop(SequenceId(1));
    engine.start(one(4)).unwrap();
}

#[test]
fn unknown_sequences_are_ignored() {
    let mut engine = builtin(8);
    engine.extend(SequenceId(9), &[1]);
    engine.stop(SequenceId(9));
    assert!(play(&mut engine).is_empty());
}
