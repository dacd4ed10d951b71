//! A large fleet: a few instances are looked at, and among them are those that matter.

use alloc::sync::Arc;
use alloc::vec::Vec;
use baton_types::{InstanceId, Role, SloClass, Tier};
use proptest::prelude::*;

use crate::index::{Match, MatchScratch, PrefixIndex, WideMatch};
use crate::placement::{Hit, Hits};
use crate::testing::{
    burden, conductor, conductor_of, hold, offer, plain, profile, rejection, request, shared_chain, spec,
    started, starts,
};
use crate::{AdmissionMode, Conductor, Effect, InstanceSpec, PolicyName, SchedulerConfig};

const MOST: usize = 24;

fn config() -> SchedulerConfig {
    SchedulerConfig { candidates: MOST, explain_every: 1, ..plain(PolicyName::Baton, AdmissionMode::Auto) }
}

/// Instances whose terms were computed for the one decision.
fn looked_at(effects: &[Effect]) -> Vec<InstanceId> {
    let seen = effects.iter().find_map(|e| if let Effect::Explain(d) = e { Some(d) } else { None });
    seen.expect("each decision is recorded").candidates.iter().map(|c| c.instance).collect()
}

/// So many prefill instances and as many decode instances; each of the first has work of a second and more.
fn busy(config: SchedulerConfig, each: u32) -> Conductor {
    let mut conductor = conductor(config, each, each);
    for at in 0..each {
        burden(
            &mut conductor,
            request(1_000 + u64::from(at), 1, 0),
            (at, each + at),
            1_000_000 + u64::from(at),
        );
    }
    conductor
}

#[test]
fn a_fleet_with_no_more_instances_than_the_bound_is_looked_at_as_a_whole() {
    for (each, whole) in [(24, true), (25, false), (60, false)] {
        let seen = looked_at(&offer(&mut busy(config(), each), 0, request(1, 5_000, 0)));
        assert_eq!(seen.len() == each as usize, whole, "{each}: {seen:?}");
        assert!(seen.len() <= MOST + MOST / 4, "{each}: {seen:?}");
    }
}

#[test]
fn the_soonest_ready_and_the_holder_of_the_prefix_are_among_the_few() {
    for soonest in [0, 31, 59] {
        let mut conductor = conductor(config(), 60, 60);
        for at in (0..60).filter(|at| *at != soonest) {
            burden(
                &mut conductor,
                request(1_000 + u64::from(at), 1, 0),
                (at, 60 + at),
                3_000_000 + u64::from(at),
            );
        }
        assert_eq!(started(&offer(&mut conductor, 0, request(1, 5_000, 0))).prefill, soonest);
        let holder = (soonest + 17) % 60;
        hold(&mut conductor, holder, &shared_chain(150), Tier::Hbm);
        let seen = looked_at(&offer(&mut conductor, 0, request(2, 150 * 512 + 10, 150)));
        assert!(seen.contains(&InstanceId(holder)), "{holder} of {seen:?}");
    }
}

#[test]
fn a_long_prompt_finds_the_fast_instances_that_have_work() {
    let mut fast = (*profile()).clone();
    fast.prefill.knots_us = Vec::from([1_000.0, 51_000.0]);
    let fast = Arc::new(fast);
    let of = |id: u32| match id {
        0..20 => spec(id, Role::Prefill),
        20..28 => InstanceSpec { profile: Arc::clone(&fast), ..spec(id, Role::Prefill) },
        _ => spec(id, Role::Decode),
    };
    let mut conductor = conductor_of(config(), &(0..56).map(of).collect::<Vec<_>>());
    for at in 20..28 {
        burden(&mut conductor, request(1_000 + u64::from(at), 1, 0), (at, 28 + at), 600_000);
    }
    // A usual prompt is done sooner where there is nothing to do: 0.8 s beside 0.6 and 0.4 s.
    let usual = started(&offer(&mut conductor, 0, request(1, 8_192, 0))).prefill;
    // A long one takes 4 s there, and 0.6 and 2 s on a fast one.
    let long = offer(&mut conductor, 0, request(2, 40_000, 0));
    let chosen = long.iter().find_map(|e| if let Effect::Explain(d) = e { d.chosen } else { None });
    assert!(usual < 20 && chosen.is_some_and(|at| (20..28).contains(&at.0)), "{usual} {chosen:?}");
}

#[test]
fn of_many_holders_the_soonest_ready_are_looked_at() {
    let mut conductor = busy(config(), 60);
    for at in 30..60 {
        hold(&mut conductor, at, &shared_chain(20), Tier::Hbm);
    }
    let seen = looked_at(&offer(&mut conductor, 0, request(1, 20 * 512 + 10, 20)));
    assert!((30..30 + 12).all(|at| seen.contains(&InstanceId(at))), "{seen:?}");
    assert!(seen.len() < 40, "{seen:?}");
}

/// The index reports its holders one by one, or all that hold no more than the beginning at once.
#[test]
fn very_many_holders_are_known_as_few_are() {
    for holders in [3u32, 256, 257, 700] {
        let mut index = PrefixIndex::new();
        for id in 0..holders {
            // One in fifty holds more than the others, one in seventy less.
            let blocks = if id % 50 == 7 {
                12
            } else if id % 70 == 9 {
                2
            } else {
                8
            };
            let tier = if id % 3 == 0 { Tier::Hbm } else { Tier::Dram };
            index.insert(None, &shared_chain(blocks), InstanceId(2 * id), tier);
        }
        let chain = shared_chain(15);
        let (mut expected, mut hits) = (Hits::default(), Hits::default());
        let hit = |m: Match| Hit { blocks: m.blocks, by_tier: m.by_tier, coming: 0 };
        let bound = 2 * holders as usize;
        expected.reset(bound);
        index.matches(&chain, &mut MatchScratch::default(), |m| expected.record(m.instance, hit(m)));
        hits.reset(bound);
        let mut wide = WideMatch::default();
        index.narrow_matches(&chain, &mut MatchScratch::default(), &mut wide, |m| {
            hits.record(m.instance, hit(m))
        });
        assert_eq!(wide.matches().len() > 0, holders > 256);
        hits.wide = wide;
        hits.will_hold(InstanceId(1), 3);
        expected.will_hold(InstanceId(1), 3);
        for id in (0..=2 * holders).map(InstanceId) {
            assert_eq!(hits.of(id), expected.of(id), "{id} of {holders}");
        }
        let some: Vec<_> = hits.some_holders(64).collect();
        assert!(some.len() >= 4.min(holders as usize) && some.len() <= 128, "{some:?}");
        assert!(some.iter().all(|id| hits.of(*id).by_its_turn() > 0), "{some:?}");
        hits.reset(bound);
        assert_eq!(hits.of(InstanceId(0)), Hit::default());
    }
}

#[test]
fn the_only_instance_that_can_hold_a_prompt_is_found() {
    let role = |id: u32| if id < 60 { Role::Prefill } else { Role::Decode };
    let room = |id: u32| if id == 58 || id >= 119 { 200_000 } else { 50_000 };
    let specs: Vec<InstanceSpec> =
        (0..120).map(|id| InstanceSpec { capacity_tokens: room(id), ..spec(id, role(id)) }).collect();
    let mut conductor = conductor_of(config(), &specs);
    burden(&mut conductor, request(900, 1, 0), (58, 60), 1_000_000);
    let effects = offer(&mut conductor, 0, request(1, 100_000, 0));
    assert_eq!((rejection(&effects), looked_at(&effects)), (None, Vec::from([InstanceId(58)])));
    assert_eq!(started(&offer(&mut conductor, 0, request(2, 1_000, 0))).prefill, 0);
}

#[test]
fn the_decode_instance_with_the_most_room_is_found() {
    for roomy in [60, 77, 119] {
        let mut conductor = conductor(config(), 60, 60);
        for at in (60..120).filter(|at| *at != roomy) {
            burden(&mut conductor, request(1_000 + u64::from(at), 20_000, 0), (0, at), 0);
        }
        assert_eq!(started(&offer(&mut conductor, 0, request(1, 5_000, 0))).decode, roomy);
    }
}

#[test]
fn those_by_lot_follow_from_the_seed_and_the_request() {
    let seen = |seed, id| {
        let config = SchedulerConfig { seed, candidates: 48, ..config() };
        looked_at(&offer(&mut busy(config, 200), 0, request(id, 5_000, 0)))
    };
    assert_eq!(seen(1, 1), seen(1, 1));
    assert_ne!(seen(1, 1), seen(1, 2));
    assert_ne!(seen(1, 1), seen(2, 1));
}

proptest! {
    /// Without caches to consider, as many are let in and sent at once: the soonest ready are the best, but for the order
    /// of those that are nearly equal.
    #[test]
    fn without_caches_the_first_of_the_order_are_as_good_as_all(
        lengths in proptest::collection::vec(100u64..60_000, 1..120),
    ) {
        // What waits would be displaced on those that are looked at only.
        let classes = Vec::from([SloClass { sheddable: false, ..SloClass::default() }]);
        let few = SchedulerConfig { explain_every: 0, classes, ..config() };
        let all = SchedulerConfig { candidates: usize::MAX, ..few.clone() };
        let play = |config| {
            let mut conductor = conductor(config, 40, 40);
            let (mut sent, mut refused) = (0, 0);
            for (id, tokens) in (1..).zip(&lengths) {
                let effects = offer(&mut conductor, id, request(id, *tokens, 0));
                sent += starts(&effects).len();
                refused += usize::from(rejection(&effects).is_some());
            }
            (sent, refused)
        };
        prop_assert_eq!(play(few), play(all));
    }
}
