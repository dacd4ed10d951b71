//! The order of service: strict bands, fair shares between tenants, short work before long within the promises, and no
//! starvation.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use baton_types::{ClassId, Role, SloClass, TenantId};
use proptest::prelude::*;

use crate::testing::{
    Run, burden, conductor_of, finished, linear, naive_prefill_us, offer, plain, rejection, request, run,
    run_in_passes, spec, starts, step,
};
use crate::{AdmissionMode, Conductor, InstanceSpec, PolicyName, RejectReason, Request, SchedulerConfig};

/// Everything in order of service, nothing refused for time, one prefill at a time on the engine.
fn patient(classes: Vec<SloClass>) -> SchedulerConfig {
    SchedulerConfig { classes, ..plain(PolicyName::Baton, AdmissionMode::Slo) }
}

/// A class with an objective of a day.
fn lax() -> SloClass {
    SloClass { ttft_us: 86_400_000_000, ..SloClass::default() }
}

fn fleet(config: SchedulerConfig, prefills: u32) -> Conductor {
    fleet_of(config, prefills, |s| s)
}

fn fleet_of(config: SchedulerConfig, prefills: u32, kind: fn(InstanceSpec) -> InstanceSpec) -> Conductor {
    let roomy =
        |s| kind(InstanceSpec { capacity_tokens: 1 << 40, net_bytes_per_s: crate::testing::FAST_LINK, ..s });
    let mut specs: Vec<InstanceSpec> = (0..prefills).map(|id| roomy(spec(id, Role::Prefill))).collect();
    specs.push(roomy(spec(prefills, Role::Decode)));
    let mut conductor = conductor_of(config, &specs);
    conductor.ahead_for_test_us = Some(0);
    conductor
}

fn of_class(class: u16, request: Request) -> Request {
    Request { class: ClassId(class), ..request }
}

fn of_tenant(tenant: u32, request: Request) -> Request {
    Request { tenant: TenantId(tenant), ..request }
}

/// Ends the running prefills one after the other; returns the requests that started, in order.
fn order_of_service(conductor: &mut Conductor, first: u64) -> Vec<u64> {
    let mut order = Vec::from([first]);
    let mut at = 0;
    while let Some(id) = order.get(at).copied() {
        at += 1;
        let now_us = conductor.now_us + 10_000;
        order.extend(starts(&step(conductor, now_us, finished(id))).iter().map(|s| s.request));
    }
    order
}

#[test]
fn a_higher_band_goes_first_however_late_and_long() {
    let urgent = SloClass { priority: 5, ..lax() };
    let mut conductor = fleet(patient(Vec::from([lax(), urgent])), 1);
    for id in 0..4 {
        offer(&mut conductor, 0, of_class(0, request(id, 100, 0)));
    }
    for id in 4..6 {
        offer(&mut conductor, 0, of_class(1, request(id, 9_000, 0)));
    }
    assert_eq!(order_of_service(&mut conductor, 0), [0, 4, 5, 1, 2, 3]);
}

#[test]
fn a_lower_band_leaves_headroom_and_is_refused_first() {
    let plain_class = SloClass { ttft_us: 10_000_000, ..SloClass::default() };
    let background = SloClass { headroom_permille: 500, priority: -1, ..plain_class.clone() };
    let classes = Vec::from([plain_class, background]);
    let mut conductor = fleet(SchedulerConfig { classes, ..patient(Vec::new()) }, 1);
    burden(&mut conductor, request(900, 1, 0), (0, 1), 6_000_000);
    let refused =
        rejection(&offer(&mut conductor, 0, of_class(1, request(1, 1000, 0)))).expect("half is not for it");
    assert_eq!(refused.reason, RejectReason::Ttft);
    assert_eq!(rejection(&offer(&mut conductor, 0, of_class(0, request(2, 1000, 0)))), None);
    let mut calm =
        fleet(SchedulerConfig { classes: conductor.config().classes.clone(), ..patient(Vec::new()) }, 1);
    assert_eq!(
        rejection(&offer(&mut calm, 0, of_class(1, request(1, 1000, 0)))),
        None,
        "below half it is welcome"
    );
}

#[test]
fn a_flood_of_one_tenant_does_not_hold_up_another() {
    let mut conductor = fleet(patient(Vec::from([lax()])), 1);
    for id in 0..20 {
        offer(&mut conductor, 0, of_tenant(0, request(id, 1_000, 0)));
    }
    offer(&mut conductor, 0, of_tenant(1, request(20, 1_000, 0)));
    let order = order_of_service(&mut conductor, 0);
    let at = order.iter().position(|id| *id == 20).expect("served");
    assert!(at <= 2, "{order:?}");
    assert_eq!(order.len(), 21);
}

#[test]
fn shorter_work_goes_first_and_work_is_what_is_left_after_the_cache() {
    let mut conductor = fleet(patient(Vec::from([lax()])), 1);
    crate::testing::hold(&mut conductor, 0, &crate::testing::shared_chain(40), baton_types::Tier::Hbm);
    offer(&mut conductor, 0, request(0, 5_000, 0));
    offer(&mut conductor, 0, request(1, 4_000, 0));
    offer(&mut conductor, 0, request(2, 2_000, 0));
    // This prompt is the longest, but nearly all of it is cached.
    offer(&mut conductor, 0, request(3, 40 * 512 + 100, 40));
    assert_eq!(order_of_service(&mut conductor, 0), [0, 3, 2, 1]);
}

#[test]
fn a_short_request_does_not_overtake_where_that_breaks_a_promise() {
    let tight = SloClass { ttft_us: 2_000_000, ..SloClass::default() };
    let classes = Vec::from([tight, lax()]);
    let mut conductor = fleet(SchedulerConfig { classes, ..patient(Vec::new()) }, 1);
    // On the engine: 0.8 s. Promised within 1.92 s: 1 s of work. So 0.1 s of slack.
    let all = [(1, 8_000), (0, 10_000), (1, 5_000), (1, 500)];
    let all: Vec<(u64, Request)> =
        (0..).zip(all).map(|(id, (class, tokens))| (0, of_class(class, request(id, tokens, 0)))).collect();
    let played = run(&mut conductor, &all);
    let order: Vec<u64> = played.started.iter().map(|(_, id, _)| *id).collect();
    assert_eq!(order, [0, 3, 1, 2], "50 ms ahead of it are harmless, half a second is not");
    assert!(played.prefilled[&1] <= 1_920_000, "{played:?}");
}

#[test]
fn a_request_that_would_break_a_promise_is_refused() {
    let tight = SloClass { ttft_us: 1_000_000, ..SloClass::default() };
    let later = SloClass { ttft_us: 1_200_000, sheddable: false, ..SloClass::default() };
    let config = SchedulerConfig { classes: Vec::from([tight, later]), ..patient(Vec::new()) };
    let mut conductor = fleet(config, 1);
    burden(&mut conductor, request(900, 1, 0), (0, 1), 100_000);
    // Due by 1.15 s, needs 1 s behind 0.1 s: the last 50 ms are spare.
    assert!(rejection(&offer(&mut conductor, 0, of_class(1, request(1, 9_900, 0)))).is_none());
    // Due earlier, others would go first.
    assert!(
        rejection(&offer(&mut conductor, 0, of_class(0, request(2, 100, 0)))).is_none(),
        "11 ms are spare"
    );
    let refused = rejection(&offer(&mut conductor, 0, of_class(0, request(3, 4_000, 0)))).expect("400 ms");
    assert_eq!(refused.reason, RejectReason::Ttft, "it would make that one late");
}

/// Arrivals at random moments: (gap µs, tokens, tenant, class).
type Arrivals = Vec<(u64, u64, u32, u16)>;

fn arrivals(most: usize, tokens: u64, tenants: u32) -> impl Strategy<Value = Arrivals> {
    proptest::collection::vec((0u64..400_000, 1..tokens, 0..tenants, 0u16..2), 1..most)
}

fn timed(arrivals: &[(u64, u64, u32, u16)]) -> Vec<(u64, Request)> {
    let mut now_us = 0;
    let mut all = Vec::new();
    for (id, (gap_us, tokens, tenant, class)) in (0u64..).zip(arrivals) {
        now_us += gap_us;
        all.push((now_us, of_tenant(*tenant, of_class(*class, request(id, *tokens, 0)))));
    }
    all
}

/// Two classes with that objective.
fn twice(seconds: u64) -> SchedulerConfig {
    let class = SloClass { ttft_us: seconds * 1_000_000, ..SloClass::default() };
    SchedulerConfig { classes: Vec::from([class.clone(), class]), ..patient(Vec::new()) }
}

/// By how much the latest of those that were let in missed its objective, µs.
fn latest_us(played: &Run, all: &[(u64, Request)], seconds: u64) -> u64 {
    assert_eq!(played.prefilled.len() + played.rejected.len(), all.len());
    let served = all.iter().filter_map(|(at_us, r)| Some(played.prefilled.get(&r.id.0)? - at_us));
    served.max().unwrap_or(0).saturating_sub(seconds * 1_000_000)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_500, failure_persistence: None, ..ProptestConfig::default() })]

    /// An admitted request is in time, if the predictions are true.
    #[test]
    fn every_promise_is_kept_by_engines_that_keep_to_the_predictions(
        arrivals in arrivals(60, 9_000, 3), prefills in 1u32..4, ahead_us in 0u64..800_000, seconds in 1u64..6,
    ) {
        let mut conductor = fleet_of(twice(seconds), prefills, linear);
        conductor.ahead_for_test_us = Some(ahead_us);
        let all = timed(&arrivals);
        let late_us = latest_us(&run(&mut conductor, &all), &all, seconds);
        // Each prefill before it is rounded to a microsecond.
        prop_assert!(late_us <= all.len() as u64, "{late_us} µs late");
    }

    /// A prompt waits for the pass under way and ends with its own, and others join both. Nothing else makes it late before
    /// margins are learnt.
    #[test]
    fn engines_that_fill_passes_are_late_by_a_few_at_most(
        arrivals in arrivals(60, 9_000, 3), prefills in 1u32..4, ahead_permille in 0u64..50, seconds in 1u64..6,
    ) {
        let mut conductor = fleet(twice(seconds), prefills);
        conductor.ahead_for_test_us = Some(ahead_permille * seconds * 1_000);
        let all = timed(&arrivals);
        let late_us = latest_us(&run_in_passes(&mut conductor, &all), &all, seconds);
        prop_assert!(late_us <= 3 * naive_prefill_us(8_192), "{late_us} µs late");
    }

    /// Without promises and tenants, the shortest work is served first.
    #[test]
    fn with_nothing_else_to_mind_the_shortest_goes_first(arrivals in arrivals(40, 9_000, 1)) {
        let all: Vec<(u64, Request)> = timed(&arrivals).into_iter().map(|(at, r)| (at, of_class(0, r))).collect();
        let about: BTreeMap<u64, (u64, u64)> = all.iter().map(|(at, r)| (r.id.0, (*at, r.prompt_tokens))).collect();
        let played = run(&mut fleet(patient(Vec::from([lax()])), 1), &all);
        for (at, (now_us, id, _)) in played.started.iter().enumerate() {
            for (_, later, _) in &played.started[at + 1..] {
                let (arrived_us, tokens) = about[later];
                let waits = arrived_us < *now_us;
                prop_assert!(!waits || about[id].1 <= tokens, "{id} goes before the shorter {later}");
            }
        }
    }

    /// While two tenants both wait, their weighted service never differs by more than a job of each.
    #[test]
    fn tenants_share_by_weight(
        works in proptest::collection::vec((100u64..5_000, 0u32..2), 20..60), weights in (1u32..6, 1u32..6),
    ) {
        let weights = [weights.0, weights.1];
        let classes = weights.iter().map(|&weight| SloClass { weight, ..lax() }).collect();
        let mut conductor = fleet(patient(classes), 1);
        burden(&mut conductor, of_tenant(2, request(900, 1, 0)), (0, 1), 1_000_000);
        let mut left = [0u32; 2];
        for (id, (tokens, tenant)) in (0u64..).zip(&works) {
            let class = u16::try_from(*tenant).expect("0 or 1");
            offer(&mut conductor, 0, of_tenant(*tenant, of_class(class, request(id, *tokens, 0))));
            left[*tenant as usize] += 1;
        }
        let order = order_of_service(&mut conductor, 900);
        prop_assert_eq!(order.len(), works.len() + 1);
        let longest_us = works.iter().map(|(tokens, _)| naive_prefill_us(*tokens) + 1).max().expect("not empty");
        let mut served = [0u64; 2];
        for id in &order[1..] {
            let (tokens, tenant) = works[usize::try_from(*id).expect("small")];
            if left.iter().all(|l| *l > 0) {
                served[tenant as usize] += (naive_prefill_us(tokens) + 1) / u64::from(weights[tenant as usize]);
                let apart_us = served[0].abs_diff(served[1]);
                prop_assert!(apart_us <= longest_us + 2 * works.len() as u64, "{served:?}");
            }
            left[tenant as usize] -= 1;
        }
    }
}
