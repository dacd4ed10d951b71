//! Admission: the paper's three modes, Baton's own, their shadows, and the bounds.

use alloc::vec::Vec;
use baton_types::{InstanceId, RequestId, Role};
use proptest::prelude::*;

use crate::testing::{
    Play, assert_idle, burden, conductor, conductor_of, decoding, finished, foretold, heavy_decode, offer,
    plain, rejection, releases, request, scripts, spec, started, starts, step,
};
use crate::{
    AdmissionMode, Conductor, Effect, Input, InstanceSpec, PolicyName, RejectReason, Rejection,
    SchedulerConfig,
};

/// Every mode that may refuse.
const REFUSING: [AdmissionMode; 4] =
    [AdmissionMode::AtDecode, AdmissionMode::Early, AdmissionMode::EarlyPredict, AdmissionMode::Slo];

/// One prefill and one decode whose step grows by 1 µs a token; decodes are taken to last
/// `duration_us`, as the paper's prediction does.
fn pair(admission: AdmissionMode, duration_us: u64) -> Conductor {
    let policy = if admission == AdmissionMode::Slo { PolicyName::Baton } else { PolicyName::Mooncake };
    let config = SchedulerConfig { decode_duration_us: duration_us, ..plain(policy, admission) };
    let decode =
        InstanceSpec { profile: heavy_decode(), capacity_tokens: 1_000_000, ..spec(1, Role::Decode) };
    let prefill = InstanceSpec { capacity_tokens: 1_000_000, ..spec(0, Role::Prefill) };
    conductor_of(config, &[prefill, decode])
}

fn reason(effects: &[Effect]) -> Option<RejectReason> {
    rejection(effects).map(|r| r.reason)
}

#[test]
fn only_the_mode_none_accepts_a_queue_longer_than_the_objective() {
    let offered = |mode| {
        let mut conductor = pair(mode, 1_000_000);
        burden(&mut conductor, request(900, 1, 0), (0, 1), 40_000_000);
        offer(&mut conductor, 0, request(1, 1000, 0))
    };
    assert_eq!(reason(&offered(AdmissionMode::None)), None);
    for mode in REFUSING {
        let effects = offered(mode);
        assert_eq!(reason(&effects), Some(RejectReason::Ttft), "{mode:?}");
        assert_eq!(effects.len(), 1, "refused before any work: {effects:?}");
        let refused = rejection(&effects).expect("just seen");
        assert!(refused.predicted_ttft_us > Some(40_000_000) && refused.wasted_tokens == 0);
    }
}

/// A decode that is too full now and, by prediction, empty in a second.
fn full_now(mode: AdmissionMode) -> Conductor {
    let mut conductor = pair(mode, 1_000_000);
    // Ten tokens of about 95 ms each.
    decoding(&mut conductor, foretold(901, 85_000, 10), 1);
    conductor
}

#[test]
fn a_decode_full_now_and_empty_later_is_refused_by_early_alone() {
    // The prefill takes about three seconds.
    let offered = |mode| reason(&offer(&mut full_now(mode), 0, foretold(1, 30_000, 10)));
    assert_eq!(offered(AdmissionMode::Early), Some(RejectReason::Tbt));
    for mode in
        [AdmissionMode::None, AdmissionMode::AtDecode, AdmissionMode::EarlyPredict, AdmissionMode::Slo]
    {
        assert_eq!(offered(mode), None, "{mode:?}");
    }
}

/// A decode that is empty now and, by prediction, full in half a second and for long.
fn full_later(mode: AdmissionMode) -> Conductor {
    let mut conductor = pair(mode, 60_000_000);
    burden(&mut conductor, foretold(901, 85_000, 1_000), (0, 1), 500_000);
    conductor
}

#[test]
fn a_decode_empty_now_and_full_later_is_refused_by_those_who_predict() {
    let offered = |mode| reason(&offer(&mut full_later(mode), 0, foretold(1, 30_000, 10)));
    for mode in [AdmissionMode::EarlyPredict, AdmissionMode::Slo] {
        assert_eq!(offered(mode), Some(RejectReason::Tbt), "{mode:?}");
    }
    for mode in [AdmissionMode::None, AdmissionMode::AtDecode, AdmissionMode::Early] {
        assert_eq!(offered(mode), None, "{mode:?}");
    }
}

#[test]
fn the_baseline_refuses_after_the_prefill_and_counts_the_waste() {
    let mut conductor = full_now(AdmissionMode::AtDecode);
    started(&offer(&mut conductor, 0, foretold(1, 30_000, 10)));
    // The decode overstays: the instance is still as full when the prefill has ended.
    let mut effects = step(&mut conductor, 4_000_000, finished(1));
    effects.extend(step(&mut conductor, 4_000_000, Input::HandoffFinished { request: RequestId(1) }));
    let refused = rejection(&effects).expect("the second look");
    assert_eq!((refused.reason, refused.wasted_tokens), (RejectReason::Tbt, 30_000));
    assert_eq!(conductor.stats().wasted_prefill_tokens, 30_000);
    let mut given_back = releases(&effects);
    given_back.sort_unstable();
    assert_eq!(given_back, [(1, 0), (1, 1)], "both legs, once");
    assert!(!conductor.knows(RequestId(1)));
}

#[test]
fn the_second_look_lets_in_what_fits() {
    let mut conductor = full_now(AdmissionMode::AtDecode);
    started(&offer(&mut conductor, 0, foretold(1, 30_000, 10)));
    step(
        &mut conductor,
        900_000,
        Input::DecodeFinished { request: RequestId(901), output_tokens: 10, first_us: 0, tbt_us: 0 },
    );
    step(&mut conductor, 4_000_000, finished(1));
    let effects = step(&mut conductor, 4_000_000, Input::HandoffFinished { request: RequestId(1) });
    assert_eq!(effects, [Effect::StartDecode { request: RequestId(1), instance: InstanceId(1) }]);
    assert_eq!(conductor.stats().wasted_prefill_tokens, 0);
}

#[test]
fn admission_is_on_by_default_and_off_for_the_baselines() {
    let overloaded = |policy| {
        let config = SchedulerConfig { policy, ..SchedulerConfig::default() };
        let mut conductor = conductor(config, 1, 1);
        burden(&mut conductor, request(900, 90_000, 0), (0, 1), 40_000_000);
        burden(&mut conductor, request(901, 1, 0), (1, 1), 40_000_000);
        reason(&offer(&mut conductor, 0, request(1, 50_000, 0)))
    };
    assert!(overloaded(PolicyName::Baton).is_some(), "whatever the reason");
    assert_eq!(overloaded(PolicyName::Mooncake), None);
    assert_eq!(overloaded(PolicyName::RoundRobin), None);
}

#[test]
fn the_number_of_live_requests_is_bounded_and_frees_up() {
    let config = SchedulerConfig { max_waiting_requests: 3, ..plain(PolicyName::Baton, AdmissionMode::Slo) };
    let mut conductor = conductor(config, 1, 1);
    for id in 0..3 {
        assert_eq!(reason(&offer(&mut conductor, 0, request(id, 1000, 0))), None);
    }
    let refused = rejection(&offer(&mut conductor, 0, request(3, 1000, 0))).expect("full");
    assert_eq!(refused.reason, RejectReason::QueueFull);
    assert!(refused.retry_after_us > 0);
    step(&mut conductor, 0, Input::RequestCancelled { request: RequestId(1) });
    assert_eq!(reason(&offer(&mut conductor, 0, request(4, 1000, 0))), None);
}

#[test]
fn a_prompt_that_fits_nowhere_is_told_so_and_not_to_come_back() {
    for policy in PolicyName::ALL {
        let mut conductor = conductor(plain(policy, AdmissionMode::Auto), 1, 1);
        for tokens in [99_999, 100_000, 5_000_000, u64::MAX] {
            let long = crate::Request { prompt_tokens: tokens, ..request(1, 1, 0) };
            let refused = rejection(&offer(&mut conductor, 0, long)).expect("capacity is 100,000");
            assert_eq!(
                (refused.reason, refused.retry_after_us),
                (RejectReason::TooLong, 0),
                "{policy:?} {tokens}"
            );
        }
    }
}

#[test]
fn an_answer_that_fits_beside_its_prompt_nowhere_is_refused_only_where_its_client_asks_for_it() {
    // 195 whole blocks of 512 tokens; the KV of an answer's last token is never written.
    let most = 195 * 512 - 1000 + 1;
    for policy in PolicyName::ALL {
        for (asked, refused) in [(None, false), (Some(0), false), (Some(most), false), (Some(most + 1), true)]
        {
            let mut conductor = conductor(plain(policy, AdmissionMode::Auto), 1, 1);
            let limits = (Some(200_000), asked);
            let (max_output_tokens, asked_output_tokens) = limits;
            let long = crate::Request { max_output_tokens, asked_output_tokens, ..request(1, 1000, 0) };
            let rejected = rejection(&offer(&mut conductor, 0, long)).map(|r| (r.reason, r.retry_after_us));
            assert_eq!(rejected, refused.then_some((RejectReason::TooLong, 0)), "{policy:?} {asked:?}");
        }
    }
    // A client that has a part of its answer asks for the rest alone.
    let mut conductor = conductor(plain(PolicyName::Baton, AdmissionMode::Auto), 1, 1);
    let moved = |emitted_tokens| crate::Request {
        emitted_tokens,
        asked_output_tokens: Some(90_000),
        ..request(1, 50_000, 0)
    };
    assert_eq!(reason(&offer(&mut conductor, 0, moved(0))), Some(RejectReason::TooLong));
    assert_eq!(reason(&offer(&mut conductor, 0, moved(49_000))), None);
}

#[test]
fn a_prompt_that_leaves_little_room_for_its_answer_is_served_by_an_empty_instance() {
    // The expected answer would not fit beside it; an answer as long as the remaining room does.
    let mut conductor = conductor(plain(PolicyName::Baton, AdmissionMode::Slo), 1, 1);
    let start = started(&offer(&mut conductor, 0, request(1, 99_700, 0)));
    assert!(start.room_tokens > 0 && u64::from(start.room_tokens) <= 300, "{start:?}");
}

#[test]
fn without_both_kinds_of_instance_nothing_is_promised() {
    for (prefills, decodes) in [(0, 0), (2, 0), (0, 2)] {
        for policy in PolicyName::ALL {
            let mut conductor = conductor(plain(policy, AdmissionMode::Auto), prefills, decodes);
            let refused = rejection(&offer(&mut conductor, 0, request(1, 1000, 0))).expect("no pair");
            assert_eq!(refused.reason, RejectReason::NoInstance, "{policy:?}");
            assert!(refused.retry_after_us > 0);
        }
    }
    let mut conductor = conductor(plain(PolicyName::Baton, AdmissionMode::Auto), 1, 1);
    step(&mut conductor, 0, Input::InstanceDrained { instance: InstanceId(1) });
    assert_eq!(reason(&offer(&mut conductor, 0, request(1, 1000, 0))), Some(RejectReason::NoInstance));
}

#[test]
fn an_empty_prompt_or_a_live_id_is_not_a_request() {
    let mut conductor = conductor(plain(PolicyName::Baton, AdmissionMode::Slo), 1, 1);
    started(&offer(&mut conductor, 0, request(1, 1000, 0)));
    let empty = crate::Request { prompt_tokens: 0, ..request(2, 1, 0) };
    for input in [empty, request(1, 50, 0)] {
        assert!(offer(&mut conductor, 0, input).is_empty());
    }
    assert_eq!(conductor.stats().stale_inputs, 2);
    assert_eq!(conductor.snapshot().requests, 1);
}

#[test]
fn an_unknown_class_counts_as_the_first() {
    let mut config = plain(PolicyName::Baton, AdmissionMode::Slo);
    config.classes[0].ttft_us = 150_000;
    config.classes.push(baton_types::SloClass::default());
    let mut conductor = conductor(config, 1, 1);
    let offered =
        |class| crate::Request { class: baton_types::ClassId(class), ..request(u64::from(class), 2_000, 0) };
    assert!(reason(&offer(&mut conductor, 0, offered(0))).is_some(), "200 ms of prefill");
    assert!(reason(&offer(&mut conductor, 0, offered(9))).is_some());
    assert!(reason(&offer(&mut conductor, 0, offered(1))).is_none());
}

/// What the shadow of `mode` decides on one request, and what that mode itself decides.
fn shadow_and_mode(mode: AdmissionMode, state: &[(u64, u64)], prompt: u64) -> (bool, Option<Rejection>) {
    let stage = |config| {
        let decode = |id| InstanceSpec { profile: heavy_decode(), ..spec(id, Role::Decode) };
        let fleet = [spec(0, Role::Prefill), spec(1, Role::Prefill), decode(2), decode(3)];
        let mut conductor = conductor_of(config, &fleet);
        for (id, (work_us, context)) in (900u64..).zip(state) {
            let (prefill, decode) = (u32::from(id % 2 == 0), 2 + u32::from(id % 3 == 0));
            burden(&mut conductor, foretold(id, *context, 50), (prefill, decode), *work_us);
            if work_us % 2 == 0 {
                step(&mut conductor, 0, finished(id));
                step(&mut conductor, 0, Input::HandoffFinished { request: RequestId(id) });
            }
        }
        conductor
    };
    let fixed = |admission, shadow| SchedulerConfig {
        decode_duration_us: 3_000_000,
        shadow,
        ..plain(PolicyName::Mooncake, admission)
    };
    let mut shadowed = stage(fixed(AdmissionMode::None, Vec::from([mode])));
    let mut real = stage(fixed(mode, Vec::new()));
    assert_eq!(reason(&offer(&mut shadowed, 0, request(1, prompt, 0))), None, "a shadow does not act");
    let &[(counted, refused, judged)] = shadowed.stats().shadow.as_slice() else { panic!("one shadow") };
    assert_eq!((counted, judged), (mode, 1));
    (refused == 1, rejection(&offer(&mut real, 0, request(1, prompt, 0))))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_shadow_says_what_its_mode_would_do(
        state in proptest::collection::vec((0u64..30_000_000, 1u64..60_000), 0..6), prompt in 1u64..90_000, at in 0usize..3,
    ) {
        let (shadow, mode) = shadow_and_mode(REFUSING[at], &state, prompt);
        prop_assert_eq!(shadow, mode.is_some(), "{:?}", mode);
    }

    #[test]
    fn shadows_change_nothing(script in scripts(60)) {
        let roles = [Role::Prefill, Role::Prefill, Role::Decode];
        let effects = |shadow: &[AdmissionMode]| {
            let config = SchedulerConfig { shadow: shadow.to_vec(), ..SchedulerConfig::default() };
            let mut play = Play::new(config, &roles);
            script.iter().for_each(|act| play.act(*act));
            play.effects
        };
        prop_assert_eq!(effects(&[]), effects(&REFUSING));
    }

    /// Under `none` every request that can be served at all is admitted, however late.
    #[test]
    fn none_refuses_nobody(prompts in proptest::collection::vec(1u64..90_000, 1..40)) {
        for policy in [PolicyName::Mooncake, PolicyName::Random, PolicyName::Baton, PolicyName::Lmetric] {
            let mut conductor = conductor(plain(policy, AdmissionMode::None), 1, 1);
            let mut open = Vec::new();
            for (id, tokens) in (0u64..).zip(&prompts) {
                let effects = offer(&mut conductor, 0, request(id, *tokens, 0));
                prop_assert_eq!(reason(&effects), None);
                open.extend(starts(&effects).iter().map(|s| s.request));
            }
            while let Some(id) = open.pop() {
                let now_us = conductor.now_us + 10_000_000;
                open.extend(starts(&step(&mut conductor, now_us, finished(id))).iter().map(|s| s.request));
                step(&mut conductor, now_us, Input::HandoffFinished { request: RequestId(id) });
                let end = Input::DecodeFinished { request: RequestId(id), output_tokens: 3, first_us: 0, tbt_us: 0 };
                open.extend(starts(&step(&mut conductor, now_us, end)).iter().map(|s| s.request));
            }
            assert_idle(&conductor.snapshot());
            prop_assert_eq!(conductor.stats().finished, prompts.len() as u64);
        }
    }
}
