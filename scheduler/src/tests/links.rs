//! Links that carry less KV than engines compute: they set the pace, and promises count with them.

use baton_types::{RequestId, Role, Tier};

use crate::testing::{
    BLOCK, conductor_of, finished, hold, offer, plain, rejection, request, shared_chain, spec, started, step,
};
use crate::{
    AdmissionMode, Conductor, Decision, Effect, Input, InstanceSpec, PolicyName, RejectReason,
    SchedulerConfig,
};

/// Time that the KV of a token takes over a slow link, µs: four times as long as computing it.
const SENDS_US: u64 = 400;

/// Prefill instance 0 and decode instances on slow links.
fn slow(decodes: u32) -> Conductor {
    let net_bytes_per_s = 1_000 * 1_000_000 / SENDS_US;
    let role = |id| if id == 0 { Role::Prefill } else { Role::Decode };
    // Decode instances that prefill nothing, so that all KV goes over the links.
    let of = |id| InstanceSpec { net_bytes_per_s, mixed_chunk_tokens: Some(0), ..spec(id, role(id)) };
    let specs: alloc::vec::Vec<InstanceSpec> = (0..=decodes).map(of).collect();
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

#[test]
fn a_flight_that_is_late_holds_up_what_follows_for_a_while() {
    let mut conductor = slow(1);
    let takes_us = 10_000 * SENDS_US;
    started(&offer(&mut conductor, 0, request(1, 10_000, 0)));
    step(&mut conductor, takes_us / 4, finished(1));
    // The link should be free by now. Half of what is on its way is taken to be left.
    let late = offer(&mut conductor, takes_us + takes_us / 8, request(2, 1_000, 0));
    assert_eq!(predicted(&late).0, takes_us / 2);
    // It is something else than the link that holds the flight up.
    let later = offer(&mut conductor, takes_us * 3, request(3, 1_000, 0));
    assert!(predicted(&later).0 < takes_us / 4, "{later:?}");
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
