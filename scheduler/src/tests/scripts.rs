//! Any script of inputs, sensible or not: no panic, the ledgers agree after every step, nothing is left over at the end
//! (I5, I8, I13), and the same script gives the same effects (I10).

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec;
use alloc::vec::Vec;
use baton_types::{CostProfile, Role, SloClass};
use proptest::prelude::*;
use proptest::strategy::ValueTree;

use crate::testing::{Act, Play, profile, scripts};
use crate::{AdmissionMode, Effect, PolicyName, SchedulerConfig};

/// Two bands, the lower one with room kept free of it.
pub(super) fn classes() -> Vec<SloClass> {
    let urgent =
        SloClass { priority: 1, ttft_us: 3_000_000, weight: 3, sheddable: false, ..SloClass::default() };
    vec![SloClass { headroom_permille: 200, ttft_us: 4_000_000, ..SloClass::default() }, urgent]
}

pub(super) fn configs() -> impl Strategy<Value = SchedulerConfig> {
    let policy = prop_oneof![
        4 => Just(PolicyName::Baton),
        3 => (0..PolicyName::ALL.len()).prop_map(|at| PolicyName::ALL[at]),
    ];
    let modes = [
        AdmissionMode::Auto,
        AdmissionMode::None,
        AdmissionMode::AtDecode,
        AdmissionMode::Early,
        AdmissionMode::EarlyPredict,
        AdmissionMode::Slo,
    ];
    (policy, 0..modes.len(), 1u32..30, 0u32..3, any::<bool>()).prop_map(
        move |(policy, mode, most, retries, local)| SchedulerConfig {
            policy,
            admission: modes[mode],
            shadow: modes.to_vec(),
            max_waiting_requests: most,
            max_retries: retries,
            local_prefill: local,
            explain_every: retries,
            classes: classes(),
            ..SchedulerConfig::default()
        },
    )
}

pub(super) const PAIR: [Role; 5] = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode, Role::Prefill];
const MIXED: [Role; 4] = [Role::Both, Role::Prefill, Role::Store, Role::Both];

pub(super) fn play(config: &SchedulerConfig, roles: &[Role], script: &[Act]) -> Play {
    let mut play = Play::new(config.clone(), roles);
    script.iter().for_each(|act| play.act(*act));
    play
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_script_keeps_the_books_and_leaves_nothing_behind(
        config in configs(), script in scripts(120), mixed in any::<bool>(),
    ) {
        let roles: &[Role] = if mixed { &MIXED } else { &PAIR };
        play(&config, roles, &script).finish();
    }

    #[test]
    fn whatever_happens_kv_goes_between_instances_of_one_kind(
        config in configs(), script in scripts(120), mixed in any::<bool>(),
    ) {
        let roles: &[Role] = if mixed { &MIXED } else { &PAIR };
        let mut play = Play::of_kinds(config, roles, true);
        script.iter().for_each(|act| play.act(*act));
        play.finish();
    }

    #[test]
    fn the_same_script_gives_the_same_effects(config in configs(), script in scripts(80)) {
        let (mut one, mut two) = (play(&config, &PAIR, &script), play(&config, &PAIR, &script));
        prop_assert_eq!(&one.effects, &two.effects);
        prop_assert_eq!(one.conductor.snapshot(), two.conductor.snapshot());
        prop_assert_eq!(one.conductor.stats(), two.conductor.stats());
        prop_assert_eq!(one.conductor.next_deadline(), two.conductor.next_deadline());
    }
}

/// The kinds of orders that a play gave.
fn kinds(effects: &[Effect]) -> BTreeSet<&'static str> {
    let kind = |effect: &Effect| match effect {
        Effect::StartPrefill { fetch: Some(_), .. } => "fetch",
        Effect::StartPrefill { instance, decode, .. } if instance == decode => "local",
        Effect::StartPrefill { .. } => "prefill",
        Effect::StartDecode { .. } => "decode",
        Effect::Handoff { .. } => "handoff",
        Effect::Replicate { .. } => "replicate",
        Effect::Release { .. } => "release",
        Effect::Reject(rejection) => rejection.reason.name(),
        Effect::Fail { stage, .. } => stage.name(),
        Effect::Explain(_) => "explain",
        Effect::Share(_) => "share",
        Effect::ChangeRole { .. } => "change_role",
    };
    effects.iter().map(kind).collect()
}

#[test]
fn the_scripts_reach_every_kind_of_order() {
    // Otherwise the properties above would prove little.
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut seen = BTreeMap::<&'static str, u32>::new();
    for _ in 0..400 {
        let draw = (configs(), scripts(120)).new_tree(&mut runner).expect("no filters").current();
        for kind in kinds(&play(&draw.0, &PAIR, &draw.1).effects) {
            *seen.entry(kind).or_default() += 1;
        }
    }
    let expected = [
        "prefill",
        "fetch",
        "local",
        "decode",
        "handoff",
        "release",
        "explain",
        "no_placement",
        "prefill_lost",
        "decode_lost",
        "prefill_failed",
        "decode_failed",
        "handoff_failed",
        "ttft",
        "room",
        "no_instance",
        "queue_full",
    ];
    assert!(seen.contains_key("costly"), "nobody was shed: {seen:?}");
    for kind in expected {
        assert!(seen.get(kind).is_some_and(|plays| *plays >= 10), "{kind} is rare: {seen:?}");
    }
}

/// A profile of valid form in which some work takes for ever.
fn absurd() -> impl Strategy<Value = CostProfile> {
    let cost = || prop_oneof![Just(0.0), Just(100.0), Just(1e15), Just(1e18), Just(1e30), Just(f64::MAX)];
    (cost(), cost(), cost(), cost(), cost()).prop_map(|(token, pair, step, context, shared)| {
        let mut profile = (*profile()).clone();
        profile.prefill.knots_us = vec![0.0, token];
        profile.prefill.attention_ps_per_pair = pair;
        profile.decode.base_us = vec![step.min(1e300), step];
        profile.decode.context_ps_per_token = vec![context, context];
        profile.shared_us = shared;
        profile
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    /// A node may announce any costs: huge estimates overflow nowhere, and every step ends.
    #[test]
    fn absurd_costs_keep_the_books_too(
        config in configs(), script in scripts(60), mixed in any::<bool>(), costs in absurd(),
    ) {
        prop_assert!(costs.validate().is_ok());
        let roles: &[Role] = if mixed { &MIXED } else { &PAIR };
        let mut play = Play::at_cost(config, roles, costs);
        script.iter().for_each(|act| play.act(*act));
        play.finish();
    }
}
