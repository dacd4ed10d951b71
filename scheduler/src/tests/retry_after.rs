//! Retry-After is accurate: the same request would be admitted not much later and not much earlier.

use alloc::vec::Vec;
use baton_types::{ClassId, Role, SloClass};
use proptest::prelude::*;

use crate::placement::MIN_RETRY_AFTER_US;
use crate::testing::{
    burden, conductor_of, foretold, heavy_decode, linear, offer, plain, rejection, request, run, spec, step,
};
use crate::{
    AdmissionMode, Conductor, Input, InstanceSpec, PolicyName, RejectReason, Rejection, Request,
    SchedulerConfig,
};

/// The load that other routers have placed: (work µs, prompt tokens, output tokens).
type Load = Vec<(u64, u64, u32)>;

/// One prefill instance, one decode instance and that load.
fn stage(load: &[(u64, u64, u32)], capacity_tokens: u64) -> Conductor {
    let decode = InstanceSpec {
        profile: heavy_decode(),
        capacity_tokens,
        net_bytes_per_s: crate::testing::FAST_LINK,
        ..spec(1, Role::Decode)
    };
    let prefill = InstanceSpec {
        capacity_tokens: 1_000_000,
        net_bytes_per_s: crate::testing::FAST_LINK,
        ..spec(0, Role::Prefill)
    };
    let mut config = plain(PolicyName::Baton, AdmissionMode::Slo);
    config.classes.push(SloClass { name: "hurried".into(), ttft_us: 3_000_000, ..SloClass::default() });
    let mut conductor = conductor_of(config, &[prefill, decode]);
    for (id, (work_us, prompt, output)) in (900..).zip(load) {
        burden(&mut conductor, foretold(id, *prompt, *output), (0, 1), *work_us);
    }
    conductor
}

/// Offers the request at `now_us` to an otherwise quiet conductor, waking it whenever it asks.
fn offered_at(
    load: &[(u64, u64, u32)],
    capacity_tokens: u64,
    now_us: u64,
    request: Request,
) -> Option<Rejection> {
    let mut conductor = stage(load, capacity_tokens);
    while let Some(wake_us) = conductor.next_deadline().filter(|wake_us| *wake_us < now_us) {
        step(&mut conductor, wake_us, Input::TimerFired);
    }
    rejection(&offer(&mut conductor, now_us, request))
}

/// Checks the refusal of `request`, if there is one, against the outcome of retries.
fn check(load: &[(u64, u64, u32)], capacity_tokens: u64, request: &Request) -> Option<Rejection> {
    let refused = offered_at(load, capacity_tokens, 0, request.clone())?;
    let after_us = refused.retry_after_us;
    let back = offered_at(load, capacity_tokens, after_us, request.clone());
    assert_eq!(back, None, "told to come back after {after_us} µs ({:?})", refused.reason);
    // The shortest Retry-After is a tenth of a second: predictions are no finer than that.
    assert!(after_us >= MIN_RETRY_AFTER_US, "{refused:?}");
    if after_us > MIN_RETRY_AFTER_US {
        let early = offered_at(load, capacity_tokens, after_us / 5 * 4, request.clone());
        assert!(
            early.is_some(),
            "told to wait {after_us} µs ({:?}), four fifths were enough",
            refused.reason
        );
    }
    Some(refused)
}

#[test]
fn a_late_first_token_is_told_how_late() {
    let refused = check(&[(35_000_000, 100, 10)], 1_000_000, &request(1, 10_000, 0)).expect("35 s of queue");
    assert_eq!(refused.reason, RejectReason::Ttft);
    assert!((5_000_000..9_000_000).contains(&refused.retry_after_us), "{refused:?}");
}

/// One that must begin within three seconds.
fn hurried(id: u64, prompt: u64, output: u32) -> Request {
    Request { class: ClassId(1), ..foretold(id, prompt, output) }
}

#[test]
fn a_full_decode_is_told_when_room_is_predicted() {
    // Two decodes of 40,000 tokens that take about nine and eighteen seconds.
    let load = [(0, 40_000, 100), (0, 40_000, 200)];
    let refused = check(&load, 90_000, &hurried(1, 20_000, 100)).expect("9,700 tokens are free");
    assert_eq!(refused.reason, RejectReason::Room);
    let sooner = [(0, 40_000, 40), (0, 40_000, 200)];
    assert_eq!(
        offered_at(&sooner, 90_000, 0, foretold(1, 20_000, 100)),
        None,
        "it may wait for half a minute"
    );
    assert!(refused.retry_after_us > 1_000_000, "{refused:?}");
}

#[test]
fn a_slow_decode_is_told_when_it_is_predicted_to_be_faster() {
    let refused = check(&[(0, 45_000, 100), (0, 40_000, 300)], 1_000_000, &foretold(1, 5_000, 100))
        .expect("100 ms a step");
    assert_eq!(refused.reason, RejectReason::Tbt);
    assert!(refused.retry_after_us > 1_000_000, "{refused:?}");
}

#[test]
fn where_steps_alone_break_the_objective_nobody_is_told_to_wait_for_ever() {
    // No pass is as short as the objective: neither a chunk beside decodes nor one by itself.
    for tbt_us in [1_000, 2_000] {
        let mut config = plain(PolicyName::Baton, AdmissionMode::Slo);
        config.classes[0].tbt_us = tbt_us;
        let mut conductor = conductor_of(config, &[spec(0, Role::Both), spec(1, Role::Both)]);
        let refused = rejection(&offer(&mut conductor, 0, request(1, 1_000, 0))).expect("never in time");
        assert_eq!((refused.reason, refused.retry_after_us), (RejectReason::Unreachable, 0), "{tbt_us} us");
        assert!(refused.predicted_ttft_us < Some(1_000_000), "the true one: {refused:?}");
    }
}

#[test]
fn refusals_of_the_paper_modes_name_a_time_too() {
    for mode in [AdmissionMode::AtDecode, AdmissionMode::Early, AdmissionMode::EarlyPredict] {
        let mut conductor = crate::testing::conductor(plain(PolicyName::Mooncake, mode), 1, 1);
        burden(&mut conductor, request(900, 1, 0), (0, 1), 50_000_000);
        let refused = rejection(&offer(&mut conductor, 0, request(1, 1000, 0))).expect("50 s of queue");
        assert!((19_000_000..22_000_000).contains(&refused.retry_after_us), "{mode:?} {refused:?}");
        let back = rejection(&offer(&mut conductor, refused.retry_after_us, request(1, 1000, 0)));
        assert_eq!(back, None, "{mode:?}");
    }
}

/// The refusal, if any, of a late request of the urgent class behind waiting work of the other.
fn behind(works: &[u64], tokens: u64, at_us: u64) -> Option<Rejection> {
    let class = |name: &str, ttft_us| SloClass { name: name.into(), ttft_us, ..SloClass::default() };
    let config = SchedulerConfig {
        classes: Vec::from([class("patient", 20_000_000), class("urgent", 8_000_000)]),
        ..plain(PolicyName::Baton, AdmissionMode::Slo)
    };
    let roomy = |id, role| InstanceSpec {
        capacity_tokens: 1 << 40,
        net_bytes_per_s: crate::testing::FAST_LINK,
        ..linear(spec(id, role))
    };
    let mut conductor = conductor_of(config, &[roomy(0, Role::Prefill), roomy(1, Role::Decode)]);
    let mut arrivals: Vec<(u64, Request)> =
        (1..).zip(works).map(|(id, t)| (0, foretold(id, *t, 1))).collect();
    arrivals.push((at_us, Request { class: ClassId(1), ..foretold(1000, tokens, 1) }));
    let run = run(&mut conductor, &arrivals);
    run.refusals.into_iter().find(|r| r.request.0 == 1000)
}

#[test]
fn a_request_that_would_make_others_late_hears_when_they_are_out_of_the_way() {
    // 19 s of work due at 19.2 s, and two seconds more with an objective of eight: in time for
    // itself by its deadline, but some of the others would be late.
    let works = [19_000; 10];
    let refused = behind(&works, 20_000, 1000).expect("it would make others late");
    assert_eq!(refused.reason, RejectReason::Ttft);
    assert!(refused.predicted_ttft_us < Some(8_000_000), "it would be in time itself: {refused:?}");
    assert!(refused.retry_after_us > 5_000_000, "{refused:?}");
    assert_eq!(behind(&works, 20_000, 1000 + refused.retry_after_us), None);
    let early = behind(&works, 20_000, 1000 + refused.retry_after_us / 2);
    assert!(early.is_some(), "half of {} was enough", refused.retry_after_us);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_ttft_refusal_is_true(works in proptest::collection::vec(1u64..20_000_000, 1..6), prompt in 1u64..60_000) {
        let load: Load = works.iter().map(|w| (*w, 10, 1)).collect();
        if let Some(refused) = check(&load, 1_000_000, &foretold(1, prompt, 10)) {
            prop_assert_eq!(refused.reason, RejectReason::Ttft);
        }
    }

    #[test]
    fn a_refusal_for_the_sake_of_others_is_true(
        works in proptest::collection::vec(1_000u64..30_000, 3..20), tokens in 1_000u64..60_000,
    ) {
        if let Some(refused) = behind(&works, tokens, 1000) {
            prop_assert!(refused.retry_after_us >= MIN_RETRY_AFTER_US);
            let back = behind(&works, tokens, 1000 + refused.retry_after_us);
            prop_assert_eq!(back, None, "told to come back after {} µs", refused.retry_after_us);
        }
    }

    #[test]
    fn a_room_refusal_is_true(
        held in proptest::collection::vec((1_000u64..20_000, 10u32..400), 2..8), prompt in 1u64..20_000, output in 1u32..500,
    ) {
        let load: Load = held.iter().map(|(prompt, output)| (0, *prompt, *output)).collect();
        check(&load, 60_000, &hurried(1, prompt, output));
    }

    #[test]
    fn a_tbt_refusal_is_true(
        held in proptest::collection::vec((10_000u64..50_000, 10u32..400), 2..6), prompt in 1u64..20_000, output in 1u32..500,
    ) {
        let load: Load = held.iter().map(|(prompt, output)| (0, *prompt, *output)).collect();
        check(&load, 4_000_000, &foretold(1, prompt, output));
    }
}
