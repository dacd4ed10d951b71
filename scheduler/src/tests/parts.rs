//! The conductor's parts against naive ones.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::cmp::Reverse;

use baton_types::{ClassId, InstanceId, RequestId, TenantId};
use proptest::prelude::*;

use crate::estimate::LengthEstimator;
use crate::placement::Plan;
use crate::placement::{Hit, Hits};
use crate::queue::{DispatchedPrefill, NewWork, PrefillLedger, WaitingPrefill};
use crate::shares::FairShares;
use crate::tickets::KeptPrefill;
use crate::timers::Timers;

/// Work as a test draws it: (work µs, deadline µs, arrived µs, priority, tenant).
type WorkDraw = (u64, u64, u64, i32, u32);

fn works() -> impl Strategy<Value = Vec<WorkDraw>> {
    proptest::collection::vec((1u64..500, 1u64..4_000, 1u64..300, 0i32..2, 0u32..3), 1..14)
}

fn waiting(id: u64, drawn: WorkDraw) -> WaitingPrefill {
    let (work_us, deadline_us, arrived_us, priority, tenant) = drawn;
    WaitingPrefill {
        request: RequestId(id),
        work_us,
        alone_us: work_us,
        new_tokens: work_us,
        arrived_us,
        deadline_us,
        order_us: deadline_us,
        priority,
        tenant: TenantId(tenant),
        held_until_us: 0,
        tag_us: 0,
        weight: 1,
        since_us: 0,
        peer: None,
        after: None,
    }
}

/// A queue of these works. Of four, the second and the third follow the first, right behind it.
fn ledger(works: &[WorkDraw], ahead_us: u64) -> PrefillLedger {
    let mut ledger = by_own_deadline(&[], ahead_us);
    let mut first_us = 0;
    for (id, drawn) in (0u64..).zip(works) {
        let own = waiting(id, *drawn);
        let follows = [1, 2].contains(&(id % 4));
        ledger.enqueue(WaitingPrefill {
            order_us: if follows { own.order_us.min(first_us) } else { own.order_us },
            after: follows.then_some(RequestId(id / 4 * 4)),
            ..own
        });
        if !follows {
            first_us = own.order_us;
        }
    }
    ledger
}

/// A queue of these works where none follows another.
fn by_own_deadline(works: &[WorkDraw], ahead_us: u64) -> PrefillLedger {
    let mut ledger = PrefillLedger::default();
    for (id, drawn) in (0u64..).zip(works) {
        ledger.enqueue(waiting(id, *drawn));
    }
    let work = DispatchedPrefill {
        request: RequestId(999),
        work_us: ahead_us,
        new_tokens: 1,
        deadline_us: u64::MAX,
        sent_us: 0,
        beside_tokens: 0,
    };
    ledger.dispatch(work);
    ledger
}

/// The end of each if all are served in turn from `start_us` on, in that order.
fn in_turn(all: &[WaitingPrefill], start_us: u64) -> Vec<(WaitingPrefill, u64)> {
    let mut sorted = all.to_vec();
    sorted.sort_by_key(|w| (w.order_us, w.arrived_us, w.request));
    let mut clock_us = start_us;
    let end = |w: WaitingPrefill| {
        clock_us += w.work_us;
        (w, clock_us)
    };
    sorted.into_iter().map(end).collect()
}

/// The requests that meet their deadline when served in turn.
fn kept(all: &[WaitingPrefill], start_us: u64) -> Vec<RequestId> {
    in_turn(all, start_us)
        .iter()
        .filter(|(w, end_us)| *end_us <= w.deadline_us)
        .map(|(w, _)| w.request)
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// What new work would meet in a queue, by simulating the queue.
    #[test]
    fn an_outlook_is_what_serving_would_show(
        works in works(), ahead_us in 0u64..400, new in (1u64..500, 1u64..4_000),
        earlier_us in 0u64..400, more_us in 0u64..200,
        made_way in proptest::collection::vec((1u64..500, 1u64..4_000), 0..3),
    ) {
        let ledger = ledger(&works, ahead_us);
        let left = |(id, (work_us, due_us))| waiting(id, (work_us, due_us, 0, 0, 0));
        let made_way: Vec<WaitingPrefill> = (600..).zip(made_way).map(left).collect();
        let (work_us, deadline_us) = new;
        let (order_us, rank_us) = (deadline_us.saturating_sub(earlier_us), work_us + more_us);
        let new_work = NewWork { work_us, deadline_us, order_us, priority: 0, rank_us };
        let outlook = ledger.outlook(0, new_work, &[], &made_way);
        let all = ledger.waiting();
        let first = |w: &&WaitingPrefill| w.priority > 0 || w.work_us <= rank_us;
        let shorter: u64 = all.iter().filter(first).map(|w| w.work_us).sum();
        prop_assert_eq!(outlook.expected_wait_us, ahead_us + shorter);
        prop_assert_eq!(outlook.behind as usize, all.iter().filter(|w| !first(w)).count());
        // It joins behind equals.
        let newcomer = WaitingPrefill { order_us, ..waiting(500, (work_us, deadline_us, 1_000, 0, 0)) };
        let mut with_it = all.to_vec();
        with_it.push(newcomer);
        let end_us = in_turn(&with_it, ahead_us).iter().find(|(w, _)| w.request.0 == 500).map(|(_, end_us)| *end_us);
        prop_assert_eq!(Some(outlook.deadline_wait_us + work_us), end_us);
        // What was late before others made way has no deadline to keep.
        let mut as_it_was = all.to_vec();
        as_it_was.extend(&made_way);
        let before = kept(&as_it_was, ahead_us);
        let before: Vec<RequestId> = before.into_iter().filter(|id| id.0 < 600).collect();
        let after = kept(&with_it, ahead_us);
        prop_assert_eq!(outlook.keeps_promises, before.iter().all(|id| after.contains(id)));
    }

    /// The next request, by the rules at the top of `queue.rs`.
    #[test]
    fn the_next_is_who_the_rules_name(works in works(), ahead_us in 0u64..400, now_us in 300u64..2_000) {
        let ledger = ledger(&works, ahead_us);
        let mut fair = FairShares::default();
        fair.charge(TenantId(1), 1, 50);
        let next = ledger.waiting()[ledger.next(now_us, &fair, |_| true).expect("something waits")];
        prop_assert_eq!(next.after, None, "what it follows has not gone");
        let free: Vec<WaitingPrefill> = ledger.waiting().iter().copied().filter(|w| w.after.is_none()).collect();
        let aged = |w: &&WaitingPrefill| {
            now_us - w.arrived_us > 2 * w.deadline_us.saturating_sub(w.arrived_us)
        };
        if let Some(oldest_us) = free.iter().filter(aged).map(|w| w.arrived_us).min() {
            prop_assert_eq!(next.arrived_us, oldest_us);
            return Ok(());
        }
        // The highest band's least served tenant's shortest, unless serving it first breaks a promise.
        let band = free.iter().map(|w| w.priority).max().expect("not empty");
        let in_band = || free.iter().filter(|w| w.priority == band);
        let tenant = in_band().map(|w| (fair.served(w.tenant), w.tenant)).min().expect("not empty").1;
        let preferred = in_band().filter(|w| w.tenant == tenant).min_by_key(|w| w.work_us).expect("not empty");
        let start_us = now_us + ledger.dispatched_left_us(now_us);
        let rest: Vec<WaitingPrefill> =
            ledger.waiting().iter().copied().filter(|w| w.request != preferred.request).collect();
        let before = kept(ledger.waiting(), start_us);
        let after = kept(&rest, start_us + preferred.work_us);
        let alone_in_time = start_us + preferred.work_us <= preferred.deadline_us;
        let urgent = alone_in_time && !before.contains(&preferred.request);
        let counts = |w: &&WaitingPrefill| !urgent || w.priority >= preferred.priority;
        let broken = rest.iter().filter(counts).any(|w| before.contains(&w.request) && !after.contains(&w.request));
        if broken {
            // Then the first in turn goes.
            prop_assert_eq!(Some(next.order_us), free.iter().map(|w| w.order_us).min());
        } else {
            prop_assert_eq!((next.work_us, next.tenant, next.priority), (preferred.work_us, tenant, band));
        }
    }

    /// The requests that have to leave for new work, against a search through all subsets.
    #[test]
    fn the_fewest_leave_for_new_work(
        works in proptest::collection::vec((1u64..500, 1u64..2_000, 1u64..300, 0i32..2, 0u32..3), 1..9),
        ahead_us in 0u64..400, new in (1u64..500, 1u64..2_000),
        mut places in proptest::collection::vec((1u64..500, 1u64..2_000), 0..3),
    ) {
        let ledger = by_own_deadline(&works, ahead_us);
        places.sort_by_key(|(_, due_us)| *due_us);
        let place = |(work_us, due_us)| KeptPrefill { instance: InstanceId(0), due_us, work_us, whole_us: work_us };
        let places: Vec<KeptPrefill> = places.into_iter().map(place).collect();
        let new_work = NewWork { work_us: new.0, deadline_us: new.1, order_us: new.1, priority: 1, rank_us: new.0 };
        let claim = |w: &WaitingPrefill| (w.priority == 0).then_some((0, Reverse(0)));
        let found = ledger.in_the_way(0, new_work, &places, claim);
        // What is kept leaves as little as what may not.
        let mut all = ledger.waiting().to_vec();
        all.extend((600..).zip(&places).map(|(id, kept)| waiting(id, (kept.work_us, kept.due_us, 0, 1, 0))));
        let all = &all[..];
        let in_time = kept(all, ahead_us);
        let enough = |gone: &[RequestId]| {
            let mut stay: Vec<WaitingPrefill> = all.iter().copied().filter(|w| !gone.contains(&w.request)).collect();
            stay.push(waiting(500, (new.0, new.1, 1_000, 1, 0)));
            let after = kept(&stay, ahead_us);
            let asked = in_time.iter().filter(|id| !gone.contains(id));
            after.contains(&RequestId(500)) && asked.into_iter().all(|id| after.contains(id))
        };
        let lesser: Vec<RequestId> = all.iter().filter(|w| w.priority == 0).map(|w| w.request).collect();
        let subset = |bits: u32| -> Vec<RequestId> {
            lesser.iter().enumerate().filter(|(at, _)| bits >> at & 1 == 1).map(|(_, id)| *id).collect()
        };
        let fewest = (0..1u32 << lesser.len()).map(subset).filter(|gone| enough(gone)).map(|gone| gone.len()).min();
        prop_assert_eq!(found.as_ref().map(Vec::len), fewest, "{:?}", found);
        prop_assert!(found.is_none_or(|gone| enough(&gone)));
    }

    /// Whatever leaves a queue, and in whatever order: each follows one that waits before it or nobody, nobody waits for
    /// ever, and what grows keeps its turn if others follow it.
    #[test]
    fn followers_wait_for_one_that_waits_before_them(
        works in works(), ops in proptest::collection::vec((any::<proptest::sample::Index>(), 0u8..3), 0..20),
    ) {
        let mut ledger = ledger(&works, 0);
        for (at, op) in ops {
            let Some(count) = core::num::NonZeroUsize::new(ledger.waiting().len()) else { break };
            let at = at.index(count.get());
            let chosen = ledger.waiting()[at];
            let followed = ledger.waiting().iter().any(|w| w.after == Some(chosen.request));
            let before: Vec<WaitingPrefill> = ledger.waiting().to_vec();
            if op == 0 && chosen.after.is_none() {
                let work_us = chosen.work_us + 100;
                let plan = Plan {
                    cached_tokens: 0,
                    new_tokens: chosen.new_tokens + 10,
                    load_us: 0,
                    work_us,
                    alone_us: work_us,
                    breaks_decodes: false,
                    fetch: None,
                    after: None,
                };
                ledger.grow(at, &plan);
                let grown = ledger.waiting().iter().find(|w| w.request == chosen.request).expect("it waits on");
                prop_assert_eq!(grown.order_us, if followed { chosen.order_us } else { chosen.deadline_us });
                prop_assert_eq!(grown.work_us, chosen.work_us + 100);
                let others = |all: &[WaitingPrefill]| -> Vec<WaitingPrefill> {
                    all.iter().copied().filter(|w| w.request != chosen.request).collect()
                };
                prop_assert_eq!(others(ledger.waiting()), others(&before));
            } else {
                let served = op == 1 && chosen.after.is_none();
                if served {
                    ledger.take_served(at);
                } else {
                    ledger.take_waiting(at);
                }
                // What followed it is free, or one of them leads the others.
                let orphans: Vec<WaitingPrefill> =
                    before.iter().copied().filter(|w| w.after == Some(chosen.request)).collect();
                let now = |w: &WaitingPrefill| ledger.waiting().iter().find(|o| o.request == w.request).map(|o| o.after);
                for (nth, orphan) in orphans.iter().enumerate() {
                    prop_assert_eq!(now(orphan), Some((nth > 0 && !served).then_some(orphans[0].request)));
                }
            }
            prop_assert_eq!(ledger.check(), Ok(()));
        }
        while let Some(at) = ledger.next(0, &FairShares::default(), |_| true) {
            ledger.take_served(at);
        }
        prop_assert!(ledger.waiting().is_empty());
    }

    /// Wake-ups against a sorted map.
    #[test]
    fn timers_are_a_map_of_the_latest_wish(ops in proptest::collection::vec((0u8..4, 0u32..6, 0u64..50), 1..80)) {
        let (mut timers, mut naive) = (Timers::default(), BTreeMap::<u32, u64>::new());
        for (op, instance, at_us) in ops {
            match op {
                0 | 1 => {
                    timers.set(InstanceId(instance), at_us);
                    naive.insert(instance, at_us);
                }
                2 => {
                    timers.unset(InstanceId(instance));
                    naive.remove(&instance);
                }
                _ => {
                    let due = naive.iter().map(|(id, at)| (*at, *id)).min().filter(|(at, _)| *at <= at_us);
                    prop_assert_eq!(timers.pop_due(at_us), due.map(|(_, id)| InstanceId(id)));
                    due.map(|(_, id)| naive.remove(&id));
                }
            }
            prop_assert_eq!(timers.next(), naive.values().min().copied());
        }
    }

    /// A look-up's result is cleared before the next one, and its sources are the longest.
    #[test]
    fn hits_keep_the_longest_sources_of_the_last_look_up(
        looks in proptest::collection::vec(proptest::collection::btree_map(0u32..40, 1u32..30, 0..40), 1..5),
    ) {
        let mut hits = Hits::default();
        for held in looks {
            hits.reset(40);
            for (id, blocks) in &held {
                hits.record(InstanceId(*id), Hit { blocks: *blocks, by_tier: [*blocks, 0, 0], coming: 0 });
                hits.offer_source(InstanceId(*id), *blocks);
            }
            for id in 0..40 {
                prop_assert_eq!(hits.of(InstanceId(id)).blocks, held.get(&id).copied().unwrap_or(0));
            }
            let mut longest: Vec<u32> = held.values().copied().collect();
            longest.sort_unstable_by(|a, b| b.cmp(a));
            longest.truncate(8);
            let sources: Vec<u32> = hits.sources().iter().map(|(blocks, _)| *blocks).collect();
            prop_assert_eq!(sources, longest);
            prop_assert!(hits.sources().iter().all(|(blocks, id)| held[&id.0] == *blocks));
        }
    }

    /// Fairness over any order of charges: no account decreases, and a new tenant starts with the least service of the
    /// others.
    #[test]
    fn accounts_only_grow_and_newcomers_get_no_credit(
        charges in proptest::collection::vec((0u32..5, 1u32..4, 1u64..1000), 1..60),
    ) {
        let mut fair = FairShares::default();
        let mut before = [0u64; 6];
        for (_, weight, work_us) in charges.iter().copied() {
            // As the conductor does: the least served of those that wait is charged.
            let tenant = (0..5).map(|t| (fair.served(TenantId(t)), t)).min().expect("five").1;
            fair.charge(TenantId(tenant), weight, work_us);
            let now: Vec<u64> = (0..6).map(|t| fair.served(TenantId(t))).collect();
            prop_assert!(now.iter().zip(&before).all(|(now, before)| now >= before));
            let least = now[..5].iter().min().expect("five");
            prop_assert!(now[5] <= *least && *least - now[5] <= 1000, "{now:?}");
            before.copy_from_slice(&now);
        }
    }
}

#[test]
fn an_unknown_class_learns_with_the_first() {
    let mut lengths = LengthEstimator::new(2, 100);
    for _ in 0..50 {
        lengths.observe(ClassId(9), 500, 1_000, 1);
        lengths.observe(ClassId(1), 500, 10, 1);
    }
    assert_eq!(lengths.mean_tokens(ClassId(0), 500), lengths.mean_tokens(ClassId(9), 500));
    assert!(lengths.mean_tokens(ClassId(0), 500) > 500 && lengths.mean_tokens(ClassId(1), 500) < 100);
}

#[test]
fn very_many_tenants_share_the_last_account() {
    let mut fair = FairShares::default();
    fair.charge(TenantId(4_000_000_000), 1, 700);
    assert_eq!(fair.served(TenantId(u32::MAX)), 700, "no account for each of four billion");
    assert_eq!(fair.served(TenantId(3)), 0);
}
