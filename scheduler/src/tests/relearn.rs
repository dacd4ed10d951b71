//! Engines that were slow once are measured again.

use alloc::vec::Vec;
use baton_types::{InstanceId, RequestId, Role, SloClass};
use proptest::prelude::*;

use crate::testing::{
    conductor, conductor_of, foretold, offer, plain, rejection, request, spec, started, step,
};
use crate::{
    AdmissionMode, Conductor, Effect, Input, InstanceSpec, PolicyName, RejectReason, SchedulerConfig,
};

const S: u64 = 1_000_000;

/// First tokens within a second, steps within 50 ms; a prompt token takes 100 µs, a step 10 ms.
fn pair() -> Conductor {
    let classes = Vec::from([SloClass { ttft_us: S, tbt_us: 50_000, ..SloClass::default() }]);
    conductor(SchedulerConfig { classes, ..plain(PolicyName::Baton, AdmissionMode::Slo) }, 1, 1)
}

/// Plays a prefill of so much time, from when the request came.
fn prefill(conductor: &mut Conductor, now_us: u64, id: u64, compute_us: u64) {
    let request = RequestId(id);
    step(conductor, now_us, Input::PrefillFinished { request, compute_us, cached_tokens: 0 });
    step(conductor, now_us, Input::HandoffFinished { request });
}

/// Ends its decode of a hundred tokens.
fn end(conductor: &mut Conductor, now_us: u64, id: u64, first_us: u64) {
    let ended = Input::DecodeFinished { request: RequestId(id), output_tokens: 100, first_us, tbt_us: 0 };
    step(conductor, now_us, ended);
}

fn reason(conductor: &mut Conductor, now_us: u64, id: u64) -> Option<RejectReason> {
    rejection(&offer(conductor, now_us, foretold(id, 4_990, 100))).map(|refused| refused.reason)
}

/// A regression: after one stall of an engine everything was refused, for ever.
#[test]
fn a_prefill_that_stalled_is_measured_again() {
    let mut conductor = pair();
    started(&offer(&mut conductor, 0, foretold(1, 4_990, 100)));
    prefill(&mut conductor, 30 * S, 1, 30 * S);
    end(&mut conductor, 31 * S, 1, 30 * S);
    assert_eq!(
        reason(&mut conductor, 31 * S, 2),
        Some(RejectReason::Ttft),
        "half a second, they say, is two now"
    );
    assert_eq!(reason(&mut conductor, 40 * S, 3), None, "nobody used it for so long");
    assert_eq!(reason(&mut conductor, 40 * S, 4), Some(RejectReason::Ttft), "one at a time");
    prefill(&mut conductor, 40 * S + 500_000, 3, 500_000);
    end(&mut conductor, 41 * S + 500_000, 3, 40 * S + 500_000);
    assert_eq!(reason(&mut conductor, 42 * S, 5), None, "it is as fast as ever");
    let instance = conductor.fleet.known(InstanceId(0));
    assert!((instance.prefill_residual.ratio() - 1.0).abs() < 0.01, "{:?}", instance.prefill_residual);
}

/// A regression: where steps had taken ten times their time for a while, no answer was ever begun again.
#[test]
fn an_engine_whose_steps_were_slow_is_measured_again() {
    let mut conductor = pair();
    let mut now_us = 0;
    let mut id = 0;
    // Until they are let in no more.
    while reason(&mut conductor, now_us, id).is_none() {
        prefill(&mut conductor, now_us + 500_000, id, 500_000);
        end(&mut conductor, now_us + 10_500_000, id, now_us + 500_000);
        (now_us, id) = (now_us + 11 * S, id + 1);
        assert!(id < 50, "steps of 100 ms are too slow for anybody");
    }
    assert!((2..50).contains(&id));
    let refused = rejection(&offer(&mut conductor, now_us, request(100, 4_990, 0))).expect("too slow");
    assert_eq!(refused.reason, RejectReason::Tbt, "it may pass");
    assert!(refused.retry_after_us > 0, "{refused:?}");
    // The tickets of the refused are over by then.
    now_us += 70 * S;
    assert_eq!(reason(&mut conductor, now_us, 101), None, "it idled for as long as the answer would take");
    assert!(reason(&mut conductor, now_us, 102).is_some(), "one at a time");
    prefill(&mut conductor, now_us + 500_000, 101, 500_000);
    end(&mut conductor, now_us + 1_500_000, 101, now_us + 500_000);
    now_us += S;
    for id in 103..106 {
        now_us += S;
        assert_eq!(reason(&mut conductor, now_us, id), None, "it is as fast as ever");
        prefill(&mut conductor, now_us + 500_000, id, 500_000);
    }
}

#[test]
fn an_engine_that_stays_slow_takes_one_request_at_a_time_and_rests_between_them() {
    let mut conductor = pair();
    let (mut now_us, mut taken) = (0, Vec::new());
    for id in 0..2_000 {
        if reason(&mut conductor, now_us, id).is_none() {
            prefill(&mut conductor, now_us + 5 * S, id, 5 * S);
            end(&mut conductor, now_us + 6 * S, id, now_us + 5 * S);
            taken.push(now_us);
            now_us += 6 * S;
        }
        now_us += 100_000;
    }
    let late = &taken[1..];
    assert!(late.len() > 10, "{taken:?}");
    assert!(late.windows(2).all(|pair| pair[1] - pair[0] >= 10 * S), "{taken:?}");
}

#[test]
fn a_refusal_is_explained_by_what_was_learnt() {
    let classes = Vec::from([SloClass { ttft_us: S, ..SloClass::default() }]);
    let config =
        SchedulerConfig { classes, explain_every: 1, ..plain(PolicyName::Baton, AdmissionMode::Slo) };
    let mut conductor = conductor(config, 1, 1);
    offer(&mut conductor, 0, foretold(1, 4_990, 100));
    prefill(&mut conductor, 30 * S, 1, 30 * S);
    end(&mut conductor, 31 * S, 1, 30 * S);
    // Two seconds by the profile, which would be too long as well.
    let effects = offer(&mut conductor, 1_000 * S, foretold(2, 19_990, 100));
    assert!(rejection(&effects).is_some());
    let compute_us = effects.iter().find_map(|effect| match effect {
        Effect::Explain(decision) => decision.candidates[0].compute_us,
        _ => None,
    });
    assert!(compute_us > Some(4 * S), "{effects:?}");
}

/// A pair, a server of both roles, two pairs.
const POOLS: [&[Role]; 3] = [
    &[Role::Prefill, Role::Decode],
    &[Role::Both],
    &[Role::Prefill, Role::Prefill, Role::Decode, Role::Decode],
];

/// What was measured of one request: its prompt, its prefill over the profile's time in tenths, how long its KV took to
/// land, ms, the tokens of its answer, and its steps over the profile's in tenths.
type RequestSample = (u64, u64, u64, u32, u64);

/// Plays a request as measured, if it is let in.
fn play(conductor: &mut Conductor, now_us: u64, id: u64, measured: RequestSample) -> u64 {
    let (prompt_tokens, prefill_tenths, landing_ms, output_tokens, step_tenths) = measured;
    let effects = offer(conductor, now_us, request(id, prompt_tokens, 0));
    if rejection(&effects).is_some() {
        return now_us;
    }
    let at = started(&effects);
    let request = RequestId(id);
    let compute_us = prompt_tokens * 10 * prefill_tenths;
    let mut now_us = now_us + compute_us;
    step(conductor, now_us, Input::PrefillFinished { request, compute_us, cached_tokens: 0 });
    if at.prefill != at.decode {
        now_us += landing_ms * 1_000;
        step(conductor, now_us, Input::HandoffFinished { request });
    }
    let first_us = now_us;
    now_us += u64::from(output_tokens) * 1_000 * step_tenths;
    let tbt_us = 1_000 * step_tenths;
    step(conductor, now_us, Input::DecodeFinished { request, output_tokens, first_us, tbt_us });
    now_us
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Whatever was measured: an idle cluster takes what it could do by its profiles.
    #[test]
    fn nothing_that_was_learnt_bars_an_idle_cluster(
        measured in proptest::collection::vec(
            (1u64..9_000, 1u64..1_000, 0u64..60_000, 1u32..50_000, 1u64..1_000), 1..40,
        ),
        alike in proptest::bool::ANY,
        pools in 0usize..3,
        local_prefill in proptest::bool::ANY,
        limited in proptest::bool::ANY,
        (tbt_us, target_permille) in (12_000u64..100_000, 500u32..1_000),
        prompt_tokens in 1u64..9_000,
    ) {
        let classes = Vec::from([SloClass { ttft_us: 2 * S, tbt_us, target_permille, ..SloClass::default() }]);
        let config = SchedulerConfig { classes, local_prefill, ..plain(PolicyName::Baton, AdmissionMode::Slo) };
        let (max_running, mixed_chunk_tokens) = if limited { (Some(4), Some(8_192)) } else { (None, None) };
        let limits = |spec| InstanceSpec { max_running, mixed_chunk_tokens, ..spec };
        let specs: Vec<InstanceSpec> =
            (0..).zip(POOLS[pools]).map(|(id, role)| limits(spec(id, *role))).collect();
        let mut conductor = conductor_of(config, &specs);
        let mut now_us = S;
        for (id, one) in (0..).zip(&measured) {
            now_us = play(&mut conductor, now_us, id, if alike { measured[0] } else { *one }) + S;
        }
        now_us += 100_000 * S;
        let effects = offer(&mut conductor, now_us, request(1_000, prompt_tokens, 0));
        prop_assert!(rejection(&effects).is_none(), "{effects:?}");
    }
}
