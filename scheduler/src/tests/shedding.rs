//! A request that is not sheddable takes the place of sheddable ones that only wait. No other request is touched, and
//! none in vain.

use alloc::vec::Vec;
use baton_types::{ClassId, Epoch, InstanceId, RequestId, Role, SloClass, TenantId};
use proptest::prelude::*;

use crate::testing::{
    burden, conductor_of, finished, foretold, linear, offer, peer_sent, plain, rejection, request, run, spec,
    started, starts, step,
};
use crate::{
    AdmissionMode, Conductor, Effect, Input, InstanceSpec, PeerPlacement, PolicyName, RejectReason, Request,
    SchedulerConfig,
};

const CHEAP: u16 = 0;
const DEAR: u16 = 1;

fn config(dear: SloClass) -> SchedulerConfig {
    let cheap = SloClass { ttft_us: 10_000_000, ..SloClass::default() };
    SchedulerConfig {
        classes: Vec::from([cheap.clone(), SloClass { sheddable: false, ttft_us: 10_000_000, ..dear }]),
        ..plain(PolicyName::Baton, AdmissionMode::Slo)
    }
}

fn fleet(config: SchedulerConfig, prefills: u32) -> Conductor {
    fleet_of(config, prefills, |s| s)
}

fn fleet_of(config: SchedulerConfig, prefills: u32, kind: fn(InstanceSpec) -> InstanceSpec) -> Conductor {
    let roomy = |id, role| kind(InstanceSpec { capacity_tokens: 1 << 40, ..spec(id, role) });
    let mut specs: Vec<InstanceSpec> = (0..prefills).map(|id| roomy(id, Role::Prefill)).collect();
    specs.push(roomy(prefills, Role::Decode));
    conductor_of(config, &specs)
}

fn of(class: u16, id: u64, tokens: u64) -> Request {
    Request { class: ClassId(class), ..request(id, tokens, 0) }
}

/// The refused requests, and why.
fn refused(effects: &[Effect]) -> Vec<(u64, RejectReason)> {
    let one = |e: &Effect| if let Effect::Reject(r) = e { Some((r.request.0, r.reason)) } else { None };
    effects.iter().filter_map(one).collect()
}

/// One prefill instance whose 9.6 s are filled by 2 s of sent and 3 × 2 s of waiting work.
fn full(dear: SloClass) -> Conductor {
    let mut conductor = fleet(config(dear), 1);
    for id in 1..=4 {
        assert_eq!(refused(&offer(&mut conductor, id, of(CHEAP, id, 19_900))), []);
    }
    assert_eq!(conductor.snapshot().instances[0].waiting, 3);
    conductor
}

#[test]
fn the_newest_sheddable_makes_room_and_no_more_of_them_than_needed() {
    let mut conductor = full(SloClass::default());
    let effects = offer(&mut conductor, 10, of(DEAR, 10, 19_900));
    assert_eq!(refused(&effects), [(4, RejectReason::Costly)]);
    assert!(
        conductor.knows(RequestId(10)) && conductor.knows(RequestId(3)) && !conductor.knows(RequestId(4))
    );
    let rejected = rejection(&effects).expect("just seen");
    assert!(rejected.retry_after_us > 290_000 && rejected.wasted_tokens == 0, "{rejected:?}");
}

#[test]
fn a_sheddable_arrival_displaces_no_equal() {
    let mut conductor = full(SloClass::default());
    assert_eq!(refused(&offer(&mut conductor, 10, of(CHEAP, 10, 19_900))), [(10, RejectReason::Ttft)]);
}

/// Two seconds are sent; 2, 3, and 2 s wait. The tenant of the 3 s is the second, that of the others the first.
fn full_with_a_large_one() -> Conductor {
    let mut conductor = fleet(config(SloClass::default()), 1);
    for (id, tokens) in [(1, 19_900), (2, 19_900), (3, 29_000), (4, 19_900)] {
        let request = Request { tenant: TenantId(u32::from(id == 3)), ..of(CHEAP, id, tokens) };
        assert_eq!(refused(&offer(&mut conductor, id, request)), []);
    }
    conductor
}

#[test]
fn the_largest_makes_way_for_a_smaller_one_unless_its_tenant_had_less() {
    for (tenant, leaves) in [(0, 4), (1, 3), (2, 3)] {
        let mut conductor = full_with_a_large_one();
        let request = Request { tenant: TenantId(tenant), ..of(CHEAP, 10, 18_000) };
        let gone = refused(&offer(&mut conductor, 10, request));
        assert_eq!(gone, [(leaves, RejectReason::Costly)], "for tenant {tenant}");
        assert!(conductor.knows(RequestId(10)));
    }
}

#[test]
fn a_client_that_came_back_for_its_place_keeps_it() {
    let mut conductor = full_with_a_large_one();
    // Refused as it is no smaller than any, it comes back when it was asked to.
    let refusal = rejection(&offer(&mut conductor, 10, of(CHEAP, 10, 30_000))).expect("the queue is full");
    let mut now_us = 10;
    for id in 1..=4 {
        now_us += 2_000_000;
        step(&mut conductor, now_us, crate::testing::finished(id));
    }
    let back_us = now_us.max(10 + refusal.retry_after_us);
    assert_eq!(refused(&offer(&mut conductor, back_us, of(CHEAP, 10, 30_000))), []);
    assert!(conductor.requests.get(RequestId(10)).expect("it was let in").returned);
    for id in 11..=20 {
        offer(&mut conductor, back_us, of(CHEAP, id, 25_000));
    }
    let gone = refused(&offer(&mut conductor, back_us, of(CHEAP, 30, 18_000)));
    assert!(conductor.knows(RequestId(10)) && gone.iter().all(|(id, _)| *id != 10), "{gone:?}");
}

#[test]
fn the_account_of_a_tenant_is_not_charged_for_what_is_refused() {
    let mut conductor = full_with_a_large_one();
    let before_us = conductor.fair.tag_us(TenantId(1));
    let request = Request { tenant: TenantId(2), ..of(CHEAP, 10, 18_000) };
    assert_eq!(refused(&offer(&mut conductor, 10, request)).len(), 1);
    assert!(before_us > 2_900_000 && conductor.fair.tag_us(TenantId(1)) < 100_000, "{before_us}");
}

#[test]
fn what_is_displaced_displaces_something_larger_elsewhere() {
    let mut conductor = fleet(config(SloClass::default()), 2);
    for id in 1..=10 {
        let tokens = if id % 2 == 0 { 29_000 } else { 24_000 };
        offer(&mut conductor, id, of(CHEAP, id, tokens));
    }
    let kept: Vec<u64> = (1..=10).filter(|id| conductor.knows(RequestId(*id))).collect();
    let gone = refused(&offer(&mut conductor, 20, of(CHEAP, 20, 18_000)));
    assert_eq!(gone.len(), 1, "of {kept:?}");
    assert_eq!(gone[0].0 % 2, 0, "the larger kind left: {gone:?} of {kept:?}");
}

#[test]
fn nobody_is_refused_in_vain() {
    let mut conductor = full(SloClass::default());
    let before = conductor.snapshot();
    // It would be late even if it were alone behind the sent work.
    assert_eq!(refused(&offer(&mut conductor, 10, of(DEAR, 10, 90_000))), [(10, RejectReason::Ttft)]);
    let mut after = conductor.snapshot();
    after.instances[0].backlog_us = before.instances[0].backlog_us;
    assert_eq!(after, before);
    let order: Vec<u64> = (1..4)
        .flat_map(|id| starts(&step(&mut conductor, id * 2_000_000, crate::testing::finished(id))))
        .map(|s| s.request)
        .collect();
    assert_eq!(order, [2, 3, 4], "and those that stayed are served as before");
}

#[test]
fn who_is_displaced_goes_elsewhere_where_that_keeps_every_promise() {
    let mut conductor = full(SloClass::default());
    step(
        &mut conductor,
        10,
        Input::InstanceJoined(InstanceSpec { capacity_tokens: 1 << 40, ..spec(2, Role::Prefill) }),
    );
    // Room for one of two seconds, not for one of four.
    burden(&mut conductor, request(900, 1, 0), (2, 1), 7_000_000);
    let effects = offer(&mut conductor, 20, of(DEAR, 10, 38_000));
    let gone = refused(&effects);
    assert!(gone.len() <= 1 && conductor.knows(RequestId(10)), "{gone:?}");
    assert!(conductor.snapshot().instances[2].waiting > 0, "one of them moved");
}

#[test]
fn a_higher_band_is_never_displaced_by_a_lower() {
    let mut conductor = full(SloClass { priority: -1, ..SloClass::default() });
    assert_eq!(refused(&offer(&mut conductor, 10, of(DEAR, 10, 19_900))), [(10, RejectReason::Ttft)]);
}

#[test]
fn who_was_placed_twice_is_not_displaced() {
    let mut conductor = fleet(config(SloClass::default()), 2);
    for id in 1..=2 {
        offer(&mut conductor, 0, of(CHEAP, id, 39_000));
    }
    // The lost instance's work waits on the other one now.
    step(&mut conductor, 10, Input::InstanceLost { instance: InstanceId(0), epoch: Epoch(1) });
    assert_eq!(conductor.snapshot().instances[1].waiting, 1);
    let effects = offer(&mut conductor, 20, of(DEAR, 10, 39_000));
    assert_eq!(refused(&effects), [(10, RejectReason::Ttft)]);
}

#[test]
fn other_modes_shed_nobody() {
    let config = SchedulerConfig { admission: AdmissionMode::EarlyPredict, ..config(SloClass::default()) };
    let mut conductor = fleet(config, 1);
    for id in 1..=4 {
        offer(&mut conductor, id, of(CHEAP, id, 19_900));
    }
    assert_eq!(refused(&offer(&mut conductor, 10, of(DEAR, 10, 29_000))), [(10, RejectReason::Ttft)]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() })]

    /// A request that stays is in time, displaced or not; only sheddable ones are refused as costly.
    #[test]
    fn shedding_breaks_no_promise_to_those_who_stay(
        arrivals in proptest::collection::vec((0u64..300_000, 1u64..9_000, 0u16..2), 1..60), prefills in 1u32..4,
    ) {
        let mut now_us = 0;
        let mut all = Vec::new();
        for (id, (gap_us, tokens, class)) in (0..).zip(&arrivals) {
            now_us += gap_us;
            all.push((now_us, Request { class: ClassId(*class), ..foretold(id, *tokens, 1) }));
        }
        let mut settings = config(SloClass::default());
        settings.classes.iter_mut().for_each(|c| c.ttft_us = 2_000_000);
        let played = run(&mut fleet_of(settings, prefills, linear), &all);
        prop_assert_eq!(played.prefilled.len() + played.rejected.len(), all.len());
        for refusal in played.refusals.iter().filter(|r| r.reason == RejectReason::Costly) {
            prop_assert_eq!(arrivals[usize::try_from(refusal.request.0).expect("small")].2, CHEAP);
        }
        for (arrived_us, request) in all.iter().filter(|(_, r)| !played.rejected.contains(&r.id.0)) {
            let took_us = played.prefilled[&request.id.0] - arrived_us;
            prop_assert!(took_us <= 2_000_000, "request {} took {took_us} µs", request.id);
        }
    }
}

/// A regression: it was sent all the same. Agents on 13+3 at twelve times their pace had 2,702 of 13,586 in SLO, and three
/// quarters of those that were let in had steps that were too long.
#[test]
fn what_would_make_the_steps_of_all_too_long_is_refused_at_its_turn() {
    // Who came back for its place has it until the objective itself is in danger.
    let cases = [(10, false, false), (36, false, true), (36, true, false), (60, true, true)];
    for (beside, returned, costly) in cases {
        let classes = alloc::vec![SloClass { tbt_us: 16_000, ..SloClass::default() }];
        let config = SchedulerConfig { classes, ..plain(PolicyName::Baton, AdmissionMode::Slo) };
        let decode = InstanceSpec { mixed_chunk_tokens: Some(0), ..spec(1, Role::Decode) };
        let mut conductor = conductor_of(config, &[spec(0, Role::Prefill), decode]);
        started(&offer(&mut conductor, 0, request(1, 9_000, 0)));
        assert_eq!(rejection(&offer(&mut conductor, 0, request(2, 9_000, 0))), None, "it waits for its turn");
        conductor.requests.get_mut(RequestId(2)).expect("it waits").returned = returned;
        // Others decode there by then, for longer than predicted.
        for id in 0..beside {
            burden(&mut conductor, request(900 + id, 100, 0), (0, 1), 0);
        }
        let effects = step(&mut conductor, 1_000_000, finished(1));
        let refused = rejection(&effects).map(|refusal| (refusal.request.0, refusal.reason));
        assert_eq!(refused, costly.then_some((2, RejectReason::Costly)), "{beside} beside it: {effects:?}");
    }
}

/// A regression: it was sent all the same, waited at the decode instance until it was late, and its prefill was for nothing.
/// So were those that came back with a ticket: with engines that run 64 at a time, one in ten of them was late.
#[test]
fn what_finds_no_room_in_time_is_refused_at_its_turn() {
    // One that is prefilled first takes the room at once, one that comes later finds it taken.
    let cases = [(20, 0, false), (60, 0, true), (60, 10, false)];
    for ((decodes_s, begins_s, costly), returned) in
        cases.into_iter().flat_map(|of| [(of, false), (of, true)])
    {
        let config = plain(PolicyName::Baton, AdmissionMode::Slo);
        let decode =
            InstanceSpec { capacity_tokens: 30_000, mixed_chunk_tokens: Some(0), ..spec(1, Role::Decode) };
        let mut conductor = conductor_of(config, &[spec(0, Role::Prefill), decode]);
        started(&offer(&mut conductor, 0, foretold(1, 9_000, 10)));
        assert_eq!(
            rejection(&offer(&mut conductor, 0, foretold(2, 9_000, 10))),
            None,
            "it waits for its turn"
        );
        conductor.requests.get_mut(RequestId(2)).expect("it waits").returned = returned;
        // Another router's request takes the room then, for so many seconds of at least ten steps each.
        let at = (InstanceId(0), InstanceId(1));
        let other = PeerPlacement {
            decode_at_us: begins_s * 1_000_000,
            ..peer_sent(foretold(900, 15_000, decodes_s * 100), at, 0)
        };
        step(&mut conductor, 0, Input::PeerPlaced(alloc::boxed::Box::new(other)));
        let effects = step(&mut conductor, 1_000_000, finished(1));
        let refused = rejection(&effects).map(|refusal| (refusal.request.0, refusal.reason));
        let expected = costly.then_some((2, RejectReason::Costly));
        assert_eq!(refused, expected, "{decodes_s} s from {begins_s} s on: {effects:?}");
        assert_eq!(starts(&effects).len(), usize::from(!costly), "{effects:?}");
    }
}

/// A regression: the record was that of the last attempt to displace others.
#[test]
fn the_refusal_of_a_displaced_request_is_explained_by_what_it_was_decided_by() {
    let higher = SloClass { priority: 1, sheddable: true, ..SloClass::default() };
    let mut config = SchedulerConfig { explain_every: 1, ..config(higher) };
    config.classes[usize::from(DEAR)].sheddable = true;
    let mut conductor = fleet(config, 1);
    for (id, class) in [(1, CHEAP), (2, CHEAP), (3, CHEAP), (4, DEAR)] {
        assert_eq!(refused(&offer(&mut conductor, id, of(class, id, 19_900))), []);
    }
    burden(&mut conductor, request(900, 1, 0), (0, 1), 2_000_000);
    // It could take another's place, but would be too much work there.
    conductor.requests.get_mut(RequestId(4)).expect("it waits").request.known_work_bound_us = Some(1);
    let effects = step(&mut conductor, 5, Input::PeerDisplaced { request: RequestId(4) });
    assert_eq!(refused(&effects), [(4, RejectReason::Costly)], "{effects:?}");
    let records = effects.iter().filter_map(|e| if let Effect::Explain(d) = e { Some(d) } else { None });
    let chosen: Vec<_> = records.map(|record| (record.request, record.chosen)).collect();
    assert_eq!(chosen, [(RequestId(4), None)]);
}

/// A regression: one that waited was late by a little. Without those that made way it was in time, so the newcomer, with
/// which it was late again, seemed to break a promise. Under overload nearly all are late by a little after a stall, and a
/// whole run of the higher class was refused while the lower one waited.
#[test]
fn what_was_late_before_bars_no_higher_class() {
    let lower = SloClass { ttft_us: 10_000_000, ..SloClass::default() };
    let higher = SloClass { priority: 1, ttft_us: 5_000_000, ..lower.clone() };
    let config = SchedulerConfig {
        classes: Vec::from([lower, higher]),
        ..plain(PolicyName::Baton, AdmissionMode::Slo)
    };
    let mut conductor = fleet(config, 1);
    for id in 1..=4 {
        assert_eq!(refused(&offer(&mut conductor, id, of(CHEAP, id, 19_900))), []);
    }
    // The engine stalls: three waiting ones of two seconds each end at half past ten.
    let effects = offer(&mut conductor, 4_500_000, of(DEAR, 10, 19_900));
    assert_eq!(refused(&effects), [(3, RejectReason::Costly)]);
    assert!(conductor.knows(RequestId(10)), "the lower class makes way");
}
