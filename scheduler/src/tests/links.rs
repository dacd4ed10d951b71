//! Links that carry less KV than engines compute: they set the pace, and promises count with them.

use baton_types::{Epoch, RequestId, Role, Tier};

use crate::testing::{
    BLOCK, conductor_of, finished, hold, offer, plain, rejection, request, shared_chain, spec, started, step,
};
use crate::{
    AdmissionMode, Conductor, Decision, Effect, Input, InstanceSpec, PolicyName, RejectReason,
    SchedulerConfig,
};

/// Time that the KV of a token takes over a slow link, µs: four times as long as computing it.
const SENDS_US: u64 = 400;

/// Instance 0 prefills, the others decode and prefill nothing, so that all KV goes over the links.
fn slow_spec(id: u32) -> InstanceSpec {
    let net_bytes_per_s = 1_000 * 1_000_000 / SENDS_US;
    let role = if id == 0 { Role::Prefill } else { Role::Decode };
    InstanceSpec { net_bytes_per_s, mixed_chunk_tokens: Some(0), ..spec(id, role) }
}

/// Prefill instance 0 and decode instances on slow links.
fn slow(decodes: u32) -> Conductor {
    let specs: alloc::vec::Vec<InstanceSpec> = (0..=decodes).map(slow_spec).collect();
    let config = SchedulerConfig { explain_every: 1, ..plain(PolicyName::Baton, AdmissionMode::Slo) };
    conductor_of(config, &specs)
}

/// The predicted wait and work on the prefill instance, µs.
fn predicted(effects: &[Effect]) -> (u64, u64) {
    let found = effects.iter().find_map(|e| if let Effect::Explain(d) = e { Some(d.clone()) } else { None });
    let Decision { candidates, .. } = found.expect("every decision is explained");
    (candidates[0].queue_us, candidates[0].compute_us.expect("within reach"))
}

#[test]
fn the_slower_of_engine_and_link_sets_the_pace() {
    let mut conductor = slow(1);
    let takes_us = 10_000 * SENDS_US;
    let first = offer(&mut conductor, 0, request(1, 10_000, 0));
    assert_eq!(predicted(&first), (0, takes_us));
    started(&first);
    // The engine is done after a quarter of it, and the link is not.
    step(&mut conductor, takes_us / 4, finished(1));
    let second = offer(&mut conductor, takes_us / 4, request(2, 10_000, 0));
    assert_eq!(predicted(&second).0, takes_us * 3 / 4);
    assert!(!second.iter().any(|effect| matches!(effect, Effect::StartPrefill { .. })), "it would only wait");
    let landed = Input::HandoffFinished { request: RequestId(1) };
    assert_eq!(started(&step(&mut conductor, takes_us, landed)).request, 2);
}

/// Ten requests one after another, each of whose KV lands so long after it was sent. Returns the predicted work of the
/// next, µs.
fn predicted_after(lands_us: u64, engine_moves_kv: bool) -> u64 {
    let mut conductor = slow(1);
    if engine_moves_kv {
        let spec = InstanceSpec { epoch: Epoch(2), engine_moves_kv, ..slow_spec(1) };
        step(&mut conductor, 0, Input::InstanceJoined(spec));
    }
    let mut now_us = 0;
    for id in 1..=10 {
        started(&offer(&mut conductor, now_us, request(id, 10_000, 0)));
        step(&mut conductor, now_us + 1_000_000, finished(id));
        now_us += lands_us;
        step(&mut conductor, now_us, Input::HandoffFinished { request: RequestId(id) });
        let done = Input::DecodeFinished { request: RequestId(id), output_tokens: 1, first_us: 0, tbt_us: 0 };
        step(&mut conductor, now_us, done);
    }
    let rates = conductor.snapshot().instances[0].link_bytes_per_s;
    assert_eq!(rates[1], 2_500_000, "nothing came to the prefill instance");
    let effects = offer(&mut conductor, now_us, request(11, 10_000, 0));
    let work_us = predicted(&effects).1;
    let sent_us = 10_000_000 * 1_000_000 / rates[0];
    assert!(work_us.abs_diff(sent_us) <= 10, "{work_us} µs of work, {sent_us} µs to send it");
    work_us
}

#[test]
fn the_rate_of_a_link_is_learnt_from_what_lands() {
    let stated_us = 10_000 * SENDS_US;
    assert_eq!(predicted_after(stated_us, false), stated_us);
    let slower_us = predicted_after(stated_us * 2, false);
    assert!((stated_us * 13 / 10..stated_us * 2).contains(&slower_us), "{slower_us} µs");
    let faster_us = predicted_after(stated_us / 2, false);
    assert!((stated_us / 2..stated_us * 8 / 10).contains(&faster_us), "{faster_us} µs");
    assert_eq!(predicted_after(stated_us / 2, true), stated_us, "nobody knows when it landed");
}

#[test]
fn kv_goes_where_most_of_it_lies() {
    for holder in [1, 2] {
        let mut conductor = slow(2);
        hold(&mut conductor, holder, &shared_chain(16), Tier::Hbm);
        let effects = offer(&mut conductor, 0, request(1, 20 * BLOCK, 16));
        assert_eq!(started(&effects).decode, holder);
        // The engine computes all of it, in more time than the rest takes over the link.
        assert!(predicted(&effects).1 < 20 * BLOCK * SENDS_US, "{effects:?}");
    }
}

#[test]
fn what_no_link_can_bring_in_time_is_refused() {
    let mut conductor = slow(1);
    let tokens = 30_000_000 / SENDS_US / 10;
    started(&offer(&mut conductor, 0, request(1, tokens, 0)));
    let slower = InstanceSpec { net_bytes_per_s: 100_000, ..spec(1, Role::Decode) };
    let mut conductor = conductor_of(
        plain(PolicyName::Baton, AdmissionMode::Slo),
        &[spec(0, Role::Prefill), InstanceSpec { mixed_chunk_tokens: Some(0), ..slower }],
    );
    let refused = rejection(&offer(&mut conductor, 0, request(1, tokens, 0))).expect("its KV takes 75 s");
    assert!(matches!(refused.reason, RejectReason::Ttft | RejectReason::Unreachable), "{refused:?}");
}
