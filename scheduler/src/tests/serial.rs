//! Inputs and effects survive serialisation: a journal or a wire carries them unchanged.

use alloc::collections::BTreeSet;
use alloc::string::{String, ToString};
use core::fmt::Debug;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::scripts::{PAIR, configs, play};
use crate::testing::{scripts, spec};
use crate::{Effect, FailStage, Input, InstanceSpec, RejectReason};
use baton_types::Role;

fn round<T: Serialize + DeserializeOwned + PartialEq + Debug>(value: &T) -> String {
    let text = serde_json::to_string(value).expect("it has a serial form");
    let back: T = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert_eq!(&back, value, "{text}");
    text
}

/// The name of an enum's variant in its JSON form.
fn variant(text: &str) -> String {
    text.split('"').nth(1).unwrap_or_default().to_string()
}

#[test]
fn every_kind_of_input_and_effect_survives_being_written() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let (mut inputs, mut effects) = (BTreeSet::new(), BTreeSet::new());
    for _ in 0..120 {
        let draw = (configs(), scripts(120)).new_tree(&mut runner).expect("no filters").current();
        let play = play(&draw.0, &PAIR, &draw.1);
        inputs.extend(play.inputs.iter().map(|(_, input)| variant(&round::<Input>(input))));
        effects.extend(play.effects.iter().map(|effect| variant(&round::<Effect>(effect))));
    }
    assert_eq!(inputs.len(), 23, "{inputs:?}");
    for kind in ["start_prefill", "start_decode", "handoff", "release", "reject", "fail", "explain"] {
        assert!(effects.contains(kind), "{kind} is missing: {effects:?}");
    }
}

#[test]
fn a_profile_travels_by_value_and_strangers_are_refused() {
    let text = round(&spec(3, Role::Both));
    assert!(text.contains("knots_tokens"), "{text}");
    let odd = text.replacen("\"epoch\"", "\"epoque\"", 1);
    assert!(serde_json::from_str::<InstanceSpec>(&odd).is_err());
}

#[test]
fn words_in_reports_are_the_words_on_the_wire() {
    for reason in RejectReason::ALL {
        assert_eq!(serde_json::to_value(reason).expect("a word"), reason.name());
    }
    for stage in FailStage::ALL {
        assert_eq!(serde_json::to_value(stage).expect("a word"), stage.to_string().as_str());
    }
}

proptest! {
    #[test]
    fn any_request_survives_being_written(id in any::<u64>(), tokens in any::<u64>(), shared in 0u64..5, known in any::<Option<u32>>()) {
        let request = crate::Request { known_output_tokens: known, ..crate::testing::request(id % (1 << 40), tokens % 10_000, shared) };
        round(&request);
    }
}

#[test]
fn a_request_shows_the_length_that_its_client_names_only_where_there_is_one() {
    let shown = |asked_output_tokens| {
        alloc::format!("{:?}", crate::Request { asked_output_tokens, ..crate::Request::default() })
    };
    assert!(!shown(None).contains("asked") && shown(None).ends_with("known_work_bound_us: None }"));
    assert!(shown(Some(7)).ends_with("asked_output_tokens: Some(7) }"));
    let let_in = alloc::format!("{:?}", crate::Request { let_in: true, ..crate::Request::default() });
    assert!(let_in.ends_with("let_in: true }") && !shown(None).contains("let_in"));
}
