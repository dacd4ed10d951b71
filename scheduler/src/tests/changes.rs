//! Changes by an operator while the conductor serves: roles of instances, and settings.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use baton_types::{ClassId, Epoch, InstanceId, RequestId, Role, SloClass, Tier};
use proptest::prelude::*;

use super::scripts::{PAIR, configs};
use crate::testing::{
    Act, Play, burden, conductor, failure, finished, hold, offer, plain, rejection, releases, request,
    scripts, shared_chain, started, starts, step,
};
use crate::{
    AdmissionMode, Conductor, Effect, FailStage, Input, PolicyName, RejectReason, Request, SchedulerConfig,
};

fn config() -> SchedulerConfig {
    plain(PolicyName::Baton, AdmissionMode::Slo)
}

fn role(conductor: &mut Conductor, instance: u32, role: Role) -> Vec<Effect> {
    step(conductor, 0, Input::RoleChanged { instance: InstanceId(instance), role })
}

fn drain(conductor: &mut Conductor, instance: u32) {
    assert!(step(conductor, 0, Input::InstanceDrained { instance: InstanceId(instance) }).is_empty());
}

fn change(conductor: &mut Conductor, new: &SchedulerConfig) -> Vec<Effect> {
    step(conductor, 0, Input::PolicyChanged(Box::new(new.clone())))
}

#[test]
fn a_resumed_instance_takes_work_again_and_still_has_its_cache() {
    let mut conductor = conductor(config(), 2, 1);
    hold(&mut conductor, 1, &shared_chain(4), Tier::Hbm);
    drain(&mut conductor, 1);
    assert_eq!(started(&offer(&mut conductor, 0, request(1, 5 * 512, 4))).prefill, 0);
    step(&mut conductor, 0, Input::InstanceResumed { instance: InstanceId(1) });
    assert_eq!(started(&offer(&mut conductor, 0, request(2, 5 * 512, 4))).prefill, 1);
    let stale = conductor.stats().stale_inputs;
    step(&mut conductor, 0, Input::InstanceResumed { instance: InstanceId(1) });
    assert_eq!(conductor.stats().stale_inputs, stale, "to resume what serves is no error");
}

#[test]
fn the_dead_and_the_unknown_are_not_resumed() {
    let mut conductor = conductor(config(), 2, 1);
    step(&mut conductor, 0, Input::InstanceLost { instance: InstanceId(1), epoch: Epoch(1) });
    for id in [1, 77] {
        step(&mut conductor, 0, Input::InstanceResumed { instance: InstanceId(id) });
        role(&mut conductor, id, Role::Decode);
    }
    assert_eq!(conductor.stats().stale_inputs, 4);
    assert_eq!(started(&offer(&mut conductor, 0, request(1, 100, 0))).prefill, 0);
}

#[test]
fn what_waits_for_a_decode_goes_on_when_one_is_resumed() {
    let mut conductor = conductor(config(), 2, 1);
    burden(&mut conductor, request(900, 1, 0), (0, 2), 5_000_000);
    burden(&mut conductor, request(901, 1, 0), (1, 2), 5_000_000);
    assert!(offer(&mut conductor, 0, request(1, 100, 0)).is_empty(), "it waits for the engine");
    drain(&mut conductor, 2);
    role(&mut conductor, 2, Role::Store);
    assert!(starts(&step(&mut conductor, 1, finished(900))).is_empty(), "nobody decodes");
    assert!(starts(&step(&mut conductor, 1, finished(901))).is_empty(), "nobody decodes");
    role(&mut conductor, 2, Role::Decode);
    let effects = step(&mut conductor, 2, Input::InstanceResumed { instance: InstanceId(2) });
    assert_eq!(started(&effects).decode, 2);
}

#[test]
fn new_work_goes_by_the_new_role() {
    let mut conductor = conductor(config(), 2, 2);
    role(&mut conductor, 0, Role::Decode);
    for id in 0..6 {
        let start = started(&offer(&mut conductor, 0, request(id, 100, 0)));
        assert_eq!(start.prefill, 1, "the only one left that prefills");
    }
    role(&mut conductor, 2, Role::Both);
    let start = started(&offer(&mut conductor, 0, request(10, 2000, 0)));
    assert_eq!((start.prefill, start.decode), (2, 2), "idle, so it does both");
}

#[test]
fn what_was_sent_goes_on_and_what_waited_is_placed_anew() {
    let mut conductor = conductor(config(), 2, 2);
    burden(&mut conductor, request(900, 1, 0), (1, 2), 3_000_000);
    let sent = started(&offer(&mut conductor, 0, request(1, 20_000, 0)));
    assert_eq!(sent.prefill, 0);
    assert!(offer(&mut conductor, 0, request(2, 20_000, 0)).is_empty());
    assert_eq!(conductor.snapshot().instances[0].waiting, 1);
    let effects = role(&mut conductor, 0, Role::Decode);
    assert!(releases(&effects).is_empty() && failure(&effects).is_none(), "{effects:?}");
    let loads = conductor.snapshot().instances;
    assert_eq!((loads[0].waiting, loads[0].dispatched, loads[1].waiting), (0, 1, 1));
    step(&mut conductor, 10, finished(1));
    let effects = step(&mut conductor, 20, Input::HandoffFinished { request: RequestId(1) });
    assert!(
        effects.contains(&Effect::StartDecode { request: RequestId(1), instance: InstanceId(sent.decode) })
    );
}

#[test]
fn with_no_role_left_for_it_what_waited_fails_by_name() {
    let mut conductor = conductor(config(), 1, 1);
    burden(&mut conductor, request(900, 1, 0), (0, 1), 3_000_000);
    assert!(offer(&mut conductor, 0, request(1, 2000, 0)).is_empty());
    let effects = role(&mut conductor, 0, Role::Store);
    assert_eq!(failure(&effects), Some((1, FailStage::NoPlacement)));
    let refused = rejection(&offer(&mut conductor, 0, request(2, 100, 0))).expect("nobody prefills");
    assert_eq!(refused.reason, RejectReason::NoInstance);
}

#[test]
fn a_holder_that_became_a_decode_instance_is_never_handed_its_own_kv() {
    let mut conductor = conductor(config(), 1, 1);
    assert_eq!(started(&offer(&mut conductor, 0, request(1, 1000, 0))).prefill, 0);
    step(&mut conductor, 10, finished(1));
    role(&mut conductor, 0, Role::Both);
    let effects = step(&mut conductor, 20, Input::HandoffFailed { request: RequestId(1) });
    let to = effects.iter().find_map(|e| if let Effect::Handoff { to, .. } = e { Some(to.0) } else { None });
    assert_eq!(to, Some(1), "{effects:?}");
}

#[test]
fn settings_take_hold_between_two_decisions() {
    let mut conductor = conductor(config(), 1, 1);
    burden(&mut conductor, request(900, 1, 0), (0, 1), 2_000_000);
    assert_eq!(rejection(&offer(&mut conductor, 0, request(1, 1000, 0))), None);
    let mut new = config();
    new.classes[0].ttft_us = 1_000_000;
    assert_eq!(conductor.can_change(&new), Ok(()));
    assert!(change(&mut conductor, &new).is_empty());
    let refused = rejection(&offer(&mut conductor, 0, request(2, 1000, 0))).expect("two seconds of queue");
    assert_eq!(refused.reason, RejectReason::Ttft);
    assert!(conductor.knows(RequestId(1)), "a promise that was given is kept");
}

fn class(name: &str) -> SloClass {
    SloClass { name: String::from(name), ..SloClass::default() }
}

fn with_classes(names: &[&str]) -> SchedulerConfig {
    SchedulerConfig { classes: names.iter().map(|n| class(n)).collect(), ..config() }
}

#[test]
fn a_live_request_keeps_the_class_that_it_came_with() {
    let mut conductor = conductor(with_classes(&["a", "b", "c"]), 1, 1);
    offer(&mut conductor, 0, Request { class: ClassId(1), ..request(1, 100, 0) });
    let allowed = [&["a", "b"][..], &["z", "b"], &["a", "renamed", "c"], &["c", "b", "a", "d"]];
    let refused = [&["a"][..], &["b", "a", "c"], &["a", "c", "b"]];
    for names in allowed {
        assert_eq!(conductor.can_change(&with_classes(names)), Ok(()), "{names:?}");
    }
    for names in refused {
        let error = conductor.can_change(&with_classes(names)).expect_err("a live request is a b");
        assert!(error.0.contains("classes") && error.0.contains("\"b\""), "{error}");
        let stale = conductor.stats().stale_inputs;
        assert!(change(&mut conductor, &with_classes(names)).is_empty());
        assert_eq!(conductor.config(), &with_classes(&["a", "b", "c"]));
        assert_eq!(conductor.stats().stale_inputs, stale + 1);
    }
    step(&mut conductor, 0, Input::RequestCancelled { request: RequestId(1) });
    for names in refused {
        assert_eq!(conductor.can_change(&with_classes(names)), Ok(()), "{names:?}: nobody is a b now");
    }
}

#[test]
fn an_unknown_class_was_the_first_and_stays_the_first() {
    let mut conductor = conductor(with_classes(&["a"]), 1, 1);
    offer(&mut conductor, 0, Request { class: ClassId(3), ..request(1, 100, 0) });
    assert_eq!(conductor.can_change(&with_classes(&["a", "b", "c", "d"])), Ok(()));
    assert!(conductor.can_change(&with_classes(&["b", "a"])).is_err());
}

#[test]
fn what_takes_a_restart_or_a_drain_is_named() {
    let mut conductor = conductor(config(), 1, 1);
    for id in 0..3 {
        offer(&mut conductor, 0, request(id, 100, 0));
    }
    let spoilt = [
        ("block_tokens", SchedulerConfig { block_tokens: 16, ..config() }),
        ("seed", SchedulerConfig { seed: 7, ..config() }),
        ("policy", SchedulerConfig { policy: PolicyName::Random, ..config() }),
        ("policy", SchedulerConfig { policy: PolicyName::DynamoWspt, ..config() }),
        ("max_waiting_requests", SchedulerConfig { max_waiting_requests: 2, ..config() }),
        ("max_retries", SchedulerConfig { max_retries: 17, ..config() }),
        ("classes (count)", SchedulerConfig { classes: Vec::new(), ..config() }),
    ];
    for (named, new) in spoilt {
        let error = conductor.can_change(&new).expect_err(named);
        assert!(error.0.contains(named), "{error}");
        assert!(change(&mut conductor, &new).is_empty());
        assert_eq!(conductor.config(), &config(), "{named}");
    }
    assert_eq!(conductor.stats().stale_inputs, 7);
}

#[test]
fn what_was_learnt_of_a_class_follows_its_name() {
    let mut conductor = conductor(with_classes(&["short", "long"]), 1, 1);
    for (id, at, tokens) in [(0, 0, 10), (1, 1, 1000)] {
        for turn in 0..20 {
            let id = id + 10 * turn;
            offer(&mut conductor, 0, Request { class: ClassId(at), ..request(id, 100, 0) });
            step(&mut conductor, 0, finished(id));
            step(&mut conductor, 0, Input::HandoffFinished { request: RequestId(id) });
            step(
                &mut conductor,
                0,
                Input::DecodeFinished {
                    request: RequestId(id),
                    output_tokens: tokens,
                    first_us: 0,
                    tbt_us: 0,
                },
            );
        }
    }
    let expected =
        |c: &Conductor, at| c.expected_tokens(&Request { class: ClassId(at), ..request(1, 100, 0) });
    let (short, long) = (expected(&conductor, 0), expected(&conductor, 1));
    assert!(short < 200 && long > 600, "{short} {long}");
    change(&mut conductor, &with_classes(&["long", "new", "short"]));
    assert_eq!((expected(&conductor, 0), expected(&conductor, 2)), (long, short));
    let fresh = expected(&conductor, 1);
    assert!(fresh > short && fresh < long, "the mean of all: {fresh}");
    change(&mut conductor, &with_classes(&["renamed", "new", "short"]));
    assert_eq!(expected(&conductor, 0), long);
}

/// Pairs of settings of which the second may replace the first while serving, for every kind of policy.
fn pairs() -> impl Strategy<Value = (SchedulerConfig, SchedulerConfig)> {
    let chain_position = |policy: PolicyName, at: usize| {
        let chain_position: Vec<PolicyName> = PolicyName::ALL
            .into_iter()
            .filter(|p| {
                let to = SchedulerConfig { policy: *p, ..SchedulerConfig::default() };
                SchedulerConfig { policy, ..SchedulerConfig::default() }.can_become(&to).is_ok()
            })
            .collect();
        chain_position[at % chain_position.len()]
    };
    (configs(), configs(), any::<usize>()).prop_map(move |(old, mut new, at)| {
        new.policy = chain_position(old.policy, at);
        (old, new)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn after_a_change_decisions_are_those_of_the_new_settings(
        (old, new) in pairs(), script in scripts(80),
    ) {
        let fresh = Play::new(new.clone(), &PAIR);
        let mut changed = Play::new(old, &PAIR);
        changed.feed(Input::PolicyChanged(Box::new(new.clone())));
        prop_assert_eq!(changed.conductor.config(), &new);
        let mut both = [fresh, changed];
        for play in &mut both {
            script.iter().for_each(|act: &Act| play.act(*act));
            play.finish();
        }
        prop_assert_eq!(&both[0].effects, &both[1].effects);
        prop_assert_eq!(both[0].conductor.stats(), both[1].conductor.stats());
    }
}
