//! Engines that take nothing new for a while: requests wait or go elsewhere, and fail for it no sooner.

use alloc::vec::Vec;
use baton_types::{InstanceId, RequestId, Role};

use crate::testing::{
    assert_idle, conductor, conductor_of, failure, finished, foretold, offer, plain, rejection, releases,
    request, spec, started, starts, step,
};
use crate::{AdmissionMode, Conductor, Effect, Input, PolicyName, RejectReason, Rejection, SchedulerConfig};

fn config() -> SchedulerConfig {
    SchedulerConfig { max_retries: 0, ..plain(PolicyName::Baton, AdmissionMode::Slo) }
}

/// The engine of one leg takes nothing new for so long.
fn refuse(conductor: &mut Conductor, now_us: u64, (id, at): (u64, u32), busy_us: u64) -> Vec<Effect> {
    let (request, instance) = (RequestId(id), InstanceId(at));
    step(conductor, now_us, Input::LegRefused { request, instance, emitted_tokens: 0, busy_us })
}

#[test]
fn where_all_are_busy_a_request_waits_for_the_first_that_is_not() {
    let mut conductor = conductor(config(), 2, 1);
    let first = started(&offer(&mut conductor, 0, request(1, 1000, 0))).prefill;
    let effects = refuse(&mut conductor, 1_000, (1, first), 3_000_000);
    assert_eq!(releases(&effects), [(1, first), (1, 2)]);
    let other = started(&effects).prefill;
    assert_ne!(other, first, "the other takes requests, and one more refusal is no failure");
    let effects = refuse(&mut conductor, 2_000, (1, other), 1_000_000);
    assert_eq!((starts(&effects), failure(&effects)), (Vec::new(), None));
    // New ones wait as well.
    assert_eq!(starts(&offer(&mut conductor, 500_000, request(2, 1000, 0))), []);
    assert_eq!(conductor.next_deadline(), Some(1_002_000));
    assert_eq!(starts(&step(&mut conductor, 1_001_999, Input::TimerFired)), []);
    let effects = step(&mut conductor, 1_002_000, Input::TimerFired);
    let sent: Vec<(u64, u32)> = starts(&effects).iter().map(|s| (s.request, s.prefill)).collect();
    assert_eq!(sent, [(1, other), (2, other)]);
    // It takes the second, and refuses the first once more.
    assert_eq!(starts(&refuse(&mut conductor, 1_003_000, (1, other), 1_000_000)), []);
    assert_eq!(starts(&step(&mut conductor, 1_303_000, finished(2))), []);
    assert_eq!(started(&step(&mut conductor, 2_003_000, Input::TimerFired)).prefill, other);
    assert_eq!(conductor.stats().failed, 0);
}

#[test]
fn what_waits_for_an_engine_that_becomes_busy_goes_elsewhere() {
    let both = [spec(0, Role::Both), spec(1, Role::Both)];
    let mut conductor = conductor_of(config(), &both);
    let sent: Vec<u32> =
        (1..3).map(|id| started(&offer(&mut conductor, 0, request(id, 8000, 0))).prefill).collect();
    assert!(sent == [0, 1] || sent == [1, 0], "{sent:?}");
    for id in 3..7 {
        assert_eq!(starts(&offer(&mut conductor, 0, request(id, 8000, 0))), []);
    }
    assert_eq!(starts(&refuse(&mut conductor, 1_000, (1, sent[0]), 60_000_000)), []);
    let load = conductor.snapshot().instances;
    let waiting = sent.iter().map(|at| load[*at as usize].waiting).collect::<Vec<_>>();
    assert_eq!(waiting, [0, 5], "all are served there within ten seconds");
}

#[test]
fn a_busy_engine_is_chosen_where_the_wait_for_the_other_is_longer() {
    let mut conductor = conductor(config(), 2, 1);
    let first = started(&offer(&mut conductor, 0, request(1, 1000, 0))).prefill;
    let other = started(&offer(&mut conductor, 0, request(2, 80_000, 0))).prefill;
    assert_ne!(first, other);
    assert_eq!(starts(&refuse(&mut conductor, 1_000, (1, first), 1_000_000)), []);
    let back = started(&step(&mut conductor, 1_001_000, Input::TimerFired));
    assert_eq!((back.request, back.prefill), (1, first), "eight seconds are before it at the other");
}

/// The refusal, if any, of a request that comes at `at_us` where the only engine is busy for ten seconds from the start.
fn comes_at(at_us: u64) -> Option<Rejection> {
    let mut config = config();
    config.classes[0].ttft_us = 2_000_000;
    let mut conductor = conductor(config, 1, 1);
    started(&offer(&mut conductor, 0, foretold(1, 1000, 10)));
    assert_eq!(starts(&refuse(&mut conductor, 0, (1, 0), 10_000_000)), []);
    rejection(&offer(&mut conductor, at_us, foretold(2, 1000, 10)))
}

#[test]
fn new_requests_are_refused_by_the_true_wait() {
    let refused = comes_at(0).expect("ten seconds");
    assert_eq!(refused.reason, RejectReason::Ttft);
    assert!((8_000_000..9_500_000).contains(&refused.retry_after_us), "{refused:?}");
    assert!(refused.predicted_ttft_us >= Some(10_100_000), "{refused:?}");
    assert_eq!(comes_at(refused.retry_after_us), None);
    assert!(comes_at(refused.retry_after_us / 10 * 9).is_some());
}

#[test]
fn no_prefill_is_sent_for_a_busy_decode_engine() {
    let mut conductor = conductor(config(), 1, 2);
    let start = started(&offer(&mut conductor, 0, request(1, 1000, 0)));
    step(&mut conductor, 100_000, finished(1));
    step(&mut conductor, 110_000, Input::HandoffFinished { request: RequestId(1) });
    let again = started(&refuse(&mut conductor, 120_000, (1, start.decode), 2_000_000));
    assert_ne!(again.decode, start.decode);
    assert_eq!(starts(&refuse(&mut conductor, 130_000, (1, again.decode), 1_000_000)), []);
    let mut effects = Vec::new();
    while starts(&effects).is_empty() {
        let wake_us = conductor.next_deadline().expect("something wakes it");
        assert!(wake_us <= 1_130_000, "at {wake_us} µs");
        effects = step(&mut conductor, wake_us, Input::TimerFired);
    }
    assert_eq!((conductor.now_us, started(&effects).decode), (1_130_000, again.decode));
}

#[test]
fn policies_that_hold_nothing_avoid_a_busy_engine_while_there_is_another() {
    let others = |p: &PolicyName| !p.orders_queues() && *p != PolicyName::DynamoWspt;
    for policy in PolicyName::ALL.into_iter().filter(others) {
        let config = SchedulerConfig { max_retries: 1, ..plain(policy, AdmissionMode::None) };
        let mut conductor = conductor(config, 2, 1);
        let start = started(&offer(&mut conductor, 0, request(1, 1000, 0)));
        let again = started(&refuse(&mut conductor, 1_000, (1, start.prefill), 1_000_000));
        assert_ne!(again.prefill, start.prefill, "{policy:?}");
        for id in 2..6 {
            let next = started(&offer(&mut conductor, 2_000, request(id, 1000, 0)));
            assert_eq!(next.prefill, again.prefill, "{policy:?}");
        }
        let effects = refuse(&mut conductor, 3_000, (1, again.prefill), 1_000_000);
        assert!(failure(&effects).is_some(), "{policy:?}: it would be sent without end");
    }
}

#[test]
fn a_refusal_that_does_not_fit_is_stale() {
    let mut conductor = conductor(config(), 1, 1);
    started(&offer(&mut conductor, 0, request(1, 1000, 0)));
    for (id, at) in [(7, 0), (1, 9)] {
        assert_eq!(refuse(&mut conductor, 1_000, (id, at), 1_000_000), []);
    }
    assert_eq!(conductor.stats().stale_inputs, 2);
    step(&mut conductor, 2_000, Input::RequestCancelled { request: RequestId(1) });
    assert_idle(&conductor.snapshot());
}
