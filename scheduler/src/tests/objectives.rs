//! Objectives that a request names itself: they decide for it wherever its class's would.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use baton_types::{ClassId, InstanceId, RequestId, RequestObjectives, Role, SloClass, TenantId};
use proptest::prelude::*;

use crate::testing::{
    burden, conductor, conductor_of, finished, foretold, offer, plain, rejection, request, run, spec, starts,
    step,
};
use crate::{
    AdmissionMode, Conductor, Effect, Input, InstanceSpec, PolicyName, RejectReason, Request, SchedulerConfig,
};

const MODES: [AdmissionMode; 4] =
    [AdmissionMode::AtDecode, AdmissionMode::Early, AdmissionMode::EarlyPredict, AdmissionMode::Slo];

fn of_ttft(ttft_us: u64) -> SloClass {
    SloClass { ttft_us, ..SloClass::default() }
}

fn within(ttft_us: u64, request: Request) -> Request {
    let objectives = RequestObjectives { ttft_us: Some(ttft_us), tbt_us: None };
    Request { objectives, ..request }
}

fn at_most(tbt_us: u64, request: Request) -> Request {
    let objectives = RequestObjectives { ttft_us: None, tbt_us: Some(tbt_us) };
    Request { objectives, ..request }
}

fn config(classes: &[SloClass], admission: AdmissionMode) -> SchedulerConfig {
    let policy = if admission == AdmissionMode::Slo { PolicyName::Baton } else { PolicyName::Mooncake };
    SchedulerConfig { classes: classes.to_vec(), ..plain(policy, admission) }
}

/// Why a request is refused, or none, with `ahead_us` of work before it.
fn behind(class: SloClass, ahead_us: u64, request: Request, mode: AdmissionMode) -> Option<RejectReason> {
    let mut conductor = conductor(config(&[class], mode), 1, 1);
    burden(&mut conductor, foretold(900, 1, 1), (0, 1), ahead_us);
    rejection(&offer(&mut conductor, 0, request)).map(|r| r.reason)
}

#[test]
fn a_tighter_ttft_is_refused_where_its_classs_is_kept_and_a_looser_one_admitted_where_it_is_not() {
    for mode in MODES {
        let asked = || foretold(1, 1_000, 1);
        let long = || of_ttft(10_000_000);
        assert_eq!(behind(long(), 6_000_000, asked(), mode), None, "{mode:?}");
        let tight = within(5_000_000, asked());
        assert_eq!(behind(long(), 6_000_000, tight, mode), Some(RejectReason::Ttft), "{mode:?}");
        assert_eq!(behind(long(), 12_000_000, asked(), mode), Some(RejectReason::Ttft), "{mode:?}");
        assert_eq!(behind(long(), 12_000_000, within(15_000_000, asked()), mode), None, "{mode:?}");
    }
    let none = AdmissionMode::None;
    assert_eq!(behind(of_ttft(10_000_000), 6_000_000, within(1_000, foretold(1, 1_000, 1)), none), None);
}

#[test]
fn headroom_of_its_class_is_taken_from_an_own_ttft_too() {
    let class = SloClass { headroom_permille: 500, ..of_ttft(60_000_000) };
    let mode = AdmissionMode::Slo;
    let asked = || within(10_000_000, foretold(1, 1_000, 1));
    assert_eq!(behind(class.clone(), 6_000_000, asked(), mode), Some(RejectReason::Ttft));
    assert_eq!(behind(class, 4_000_000, asked(), mode), None);
}

#[test]
fn a_ttft_that_no_idle_instance_keeps_is_unreachable_and_says_what_would_be_predicted() {
    let mut conductor = conductor(config(&[of_ttft(10_000_000)], AdmissionMode::Slo), 1, 1);
    let asked = within(1_000, foretold(1, 10_000, 1));
    let refused = rejection(&offer(&mut conductor, 0, asked)).expect("a prefill of a second");
    assert_eq!((refused.reason, refused.retry_after_us), (RejectReason::Unreachable, 0));
    assert!(refused.predicted_ttft_us > Some(1_000_000), "{refused:?}");
    let step_us = conductor.idle_step_us(10_000).expect("a decode instance");
    assert_eq!(step_us, 10_001, "10 ms, and 100 ps for each token of context");
    assert_eq!(Conductor::new(SchedulerConfig::default()).map(|none| none.idle_step_us(1)), Ok(None));
}

/// A regression: it was judged as if it came anew, and refused for ever where its objective could no longer be kept.
#[test]
fn who_was_let_in_before_its_instances_died_is_placed_whatever_its_objective() {
    for mode in MODES {
        let mut conductor = conductor(config(&[of_ttft(10_000_000)], mode), 1, 1);
        let asked = |id, let_in| {
            let objectives = RequestObjectives { ttft_us: Some(1_000), tbt_us: Some(1_000) };
            Request { objectives, let_in, ..foretold(id, 10_000, 2) }
        };
        assert!(rejection(&offer(&mut conductor, 0, asked(1, false))).is_some(), "{mode:?}");
        let effects = offer(&mut conductor, 0, asked(2, true));
        assert_eq!((rejection(&effects), starts(&effects).len()), (None, 1), "{mode:?}: {effects:?}");
        let effects = step(&mut conductor, 1_100_000, finished(2));
        assert_eq!(rejection(&effects), None, "{mode:?}: nor is it refused after its prefill");
    }
}

/// Two bands, of which the higher one has the shorter steps, and a third with still shorter ones below both.
fn bands() -> Vec<SloClass> {
    let class = |priority, tbt_us| SloClass { priority, tbt_us, ..of_ttft(60_000_000) };
    Vec::from([class(0, 200_000), class(1, 100_000), class(-1, 80_000)])
}

#[test]
fn a_tbt_below_that_of_the_steps_it_shares_is_refused_before_any_work() {
    for (class, least_us) in [(0, 100_000), (1, 100_000), (2, 80_000), (7, 100_000)] {
        let config = config(&bands(), AdmissionMode::Slo);
        assert_eq!(config.least_tbt_us(ClassId(class)), least_us, "class {class}");
        let mut conductor = conductor(config, 1, 1);
        let asked = |id, tbt_us| Request { class: ClassId(class), ..at_most(tbt_us, foretold(id, 100, 2)) };
        let effects = offer(&mut conductor, 0, asked(1, least_us - 1));
        let refused = rejection(&effects).expect("nobody can be promised that");
        assert_eq!((refused.reason, refused.retry_after_us), (RejectReason::Unreachable, 0));
        assert_eq!((effects.len(), conductor.live_requests()), (1, 0), "{effects:?}");
        for (id, tbt_us) in [(2, least_us), (3, 86_400_000_000)] {
            assert_eq!(rejection(&offer(&mut conductor, 0, asked(id, tbt_us))), None, "{tbt_us} µs");
        }
    }
    let wanted = |mode| behind(SloClass::default(), 0, at_most(1_000, foretold(1, 100, 2)), mode);
    assert!(MODES.iter().all(|mode| wanted(*mode) == Some(RejectReason::Unreachable)));
    assert_eq!(wanted(AdmissionMode::None), None, "nothing is promised");
}

#[test]
fn a_longer_tbt_does_not_make_the_steps_of_others_longer() {
    let started = |tbt_us: Option<u64>| {
        let mut config = config(&[SloClass { tbt_us: 12_000, ..of_ttft(60_000_000) }], AdmissionMode::Slo);
        config.decode_duration_us = 1_000_000;
        let mut conductor = conductor(config, 1, 1);
        let asked = |id| Request {
            objectives: RequestObjectives { ttft_us: None, tbt_us },
            ..foretold(id, 5_000, 1_000)
        };
        (1..=40).filter(|id| rejection(&offer(&mut conductor, 0, asked(*id))).is_none()).count()
    };
    let by_class = started(None);
    assert!((1..40).contains(&by_class), "steps decide: {by_class}");
    assert_eq!(started(Some(500_000)), by_class);
}

/// One prefill whose queue holds a waiting request of a tenant that has had more than its share by 5 s of work, and
/// what becomes of another tenant's request that would be late behind it.
fn displaces(asked: Request) -> bool {
    let mut conductor = fleet(config(&[of_ttft(10_000_000)], AdmissionMode::Slo), 1);
    for id in 1..=4 {
        assert_eq!(rejection(&offer(&mut conductor, id, request(id, 19_900, 0))), None);
    }
    let effects = offer(&mut conductor, 10, Request { tenant: TenantId(1), ..asked });
    let costly = |e: &Effect| matches!(e, Effect::Reject(r) if r.reason == RejectReason::Costly);
    effects.iter().any(costly)
}

#[test]
fn a_tighter_ttft_gains_no_share_of_another_tenant() {
    let asked = || request(10, 19_900, 0);
    assert!(!displaces(asked()), "the other tenant is ahead by less than an objective's worth");
    assert!(!displaces(within(9_000_000, asked())));
    assert!(!displaces(within(4_100_000, asked())));
}

fn fleet(config: SchedulerConfig, prefills: u32) -> Conductor {
    let roomy = |id, role| InstanceSpec { capacity_tokens: 1 << 40, ..spec(id, role) };
    let mut specs: Vec<InstanceSpec> = (0..prefills).map(|id| roomy(id, Role::Prefill)).collect();
    specs.push(roomy(prefills, Role::Decode));
    let mut conductor = conductor_of(config, &specs);
    conductor.ahead_for_test_us = Some(10_000);
    conductor
}

#[test]
fn margins_are_learnt_against_the_slack_of_the_own_objective() {
    // First tokens come 2 s after they were promised: a fifth of what one objective leaves, and a fiftieth of another.
    let margin_us = |class_us, own_us: Option<u64>| {
        let mut conductor = fleet(config(&[of_ttft(class_us)], AdmissionMode::Slo), 1);
        for id in 0..300 {
            let now_us = id * 1_000_000_000;
            let asked = foretold(id, 100, 1);
            let asked = own_us.map_or_else(|| asked.clone(), |own_us| within(own_us, asked.clone()));
            offer(&mut conductor, now_us, asked);
            let promised_us = conductor.requests.get(RequestId(id)).expect("it is sent").promised_us;
            let late_us = promised_us + 2_000_000;
            step(&mut conductor, late_us, finished(id));
            step(&mut conductor, late_us, Input::HandoffFinished { request: RequestId(id) });
            let over =
                Input::DecodeFinished { request: RequestId(id), output_tokens: 1, first_us: 0, tbt_us: 0 };
            step(&mut conductor, late_us, over);
        }
        conductor.margins.of_slack_us(ClassId(0), Role::Prefill, 10_000_000)
    };
    let (tight, loose) = (margin_us(10_000_000, None), margin_us(100_000_000, None));
    assert!(tight > loose + 500_000, "{tight} and {loose}");
    assert_eq!(margin_us(100_000_000, Some(10_000_000)), tight);
    assert_eq!(margin_us(10_000_000, Some(100_000_000)), loose);
}

#[test]
fn other_routers_learn_the_objectives_with_the_placement() {
    let mut one = fleet(config(&[of_ttft(10_000_000)], AdmissionMode::Slo), 1);
    one.share_as(1);
    let asked = within(30_000_000, foretold(1, 100, 1));
    let effects = offer(&mut one, 0, asked.clone());
    let shared = effects.iter().find_map(|e| match e {
        Effect::Share(input) => Some((**input).clone()),
        _ => None,
    });
    let text = serde_json::to_string(&shared.expect("a placement")).expect("JSON");
    let mut other = fleet(config(&[of_ttft(10_000_000)], AdmissionMode::Slo), 1);
    step(&mut other, 0, serde_json::from_str(&text).expect("its own text"));
    let entry = other.requests.get(RequestId(1)).expect("it counts");
    assert_eq!((entry.request.objectives, entry.deadline_us), (asked.objectives, 30_000_000));
    // A router that sends nonsense does no harm.
    let absurd = within(u64::MAX, at_most(u64::MAX, foretold(2, 100, 1)));
    burden(&mut other, Request { objectives: absurd.objectives, ..within(u64::MAX, absurd) }, (0, 1), 10);
    assert_eq!(other.check(), Ok(()));
}

#[test]
fn a_request_without_objectives_reads_and_writes_as_before_there_were_any() {
    let text = |request: &Request| serde_json::to_string(request).expect("JSON");
    let plain = request(1, 5, 0);
    assert!(!text(&plain).contains("objectives"), "{}", text(&plain));
    assert_eq!(serde_json::from_str::<Request>(&text(&plain)).expect("its own text"), plain);
    let own = within(7_000, plain);
    assert!(text(&own).contains("\"objectives\":{\"ttft_us\":7000}"), "{}", text(&own));
    assert_eq!(serde_json::from_str::<Request>(&text(&own)).expect("its own text"), own);
}

/// A run of requests with a TTFT of 4 s, which is their class's, or their own in a class of another.
fn played(class_us: u64, own: bool, load: &[(u64, u64, u32)], mode: AdmissionMode) -> String {
    let mut conductor = fleet(config(&[of_ttft(class_us)], mode), 2);
    let mut at_us = 0;
    let asked = (0..).zip(load).map(|(id, (gap_us, tokens, output))| {
        at_us += gap_us;
        let asked = foretold(id, *tokens, *output);
        (at_us, if own { within(4_000_000, asked) } else { asked })
    });
    let arrivals: Vec<(u64, Request)> = asked.collect();
    let played = run(&mut conductor, &arrivals);
    let room = conductor.snapshot().instances.iter().map(|i| i.reserved_tokens).sum::<u64>();
    format!(
        "{played:?} {room} {:?}",
        conductor.fleet.get(InstanceId(0)).map(|i| i.backlog_us(conductor.now_us))
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn an_own_ttft_is_served_as_if_it_were_the_classs(
        load in proptest::collection::vec((0u64..1_500_000, 1u64..30_000, 1u32..60), 1..25),
        class_us in 1_000u64..60_000_000,
        mode in 0usize..MODES.len(),
    ) {
        let mode = MODES[mode];
        prop_assert_eq!(played(class_us, true, &load, mode), played(4_000_000, false, &load, mode));
    }
}
