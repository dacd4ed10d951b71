//! Popular prefixes are copied ahead of demand, and no further.

use alloc::vec::Vec;
use baton_types::{BlockHash, CacheChange, CacheEvent, Epoch, InstanceId, RequestId, Role, Tier};

use crate::testing::{
    BLOCK, Play, conductor, finished, foretold, hold, offer, plain, shared_chain, starts, step,
};
use crate::{AdmissionMode, Conductor, Effect, Input, PolicyName, SchedulerConfig};

fn config(replicate: bool) -> SchedulerConfig {
    SchedulerConfig { replicate, ..plain(PolicyName::Baton, AdmissionMode::Slo) }
}

/// One copy that was ordered.
type Copy = (u32, u32, Vec<BlockHash>);

fn copies(effects: &[Effect]) -> Vec<Copy> {
    let copy = |e: &Effect| match e {
        Effect::Replicate { from, to, chain } => Some((from.0, to.0, chain.clone())),
        _ => None,
    };
    effects.iter().filter_map(copy).collect()
}

/// Offers `count` requests that share 10 blocks, each served at once; returns the copies ordered.
fn popular(conductor: &mut Conductor, ids: core::ops::Range<u64>) -> Vec<Copy> {
    let mut all = Vec::new();
    for id in ids {
        let now_us = conductor.now_us + 500_000;
        let request = crate::Request { chain: shared_chain(11), ..foretold(id, 10 * BLOCK + 20, 4) };
        let effects = offer(conductor, now_us, request);
        all.extend(copies(&effects));
        for start in starts(&effects) {
            step(conductor, now_us, finished(start.request));
            step(conductor, now_us, Input::HandoffFinished { request: RequestId(start.request) });
            step(
                conductor,
                now_us,
                Input::DecodeFinished {
                    request: RequestId(start.request),
                    output_tokens: 4,
                    first_us: 0,
                    tbt_us: 0,
                },
            );
        }
    }
    all
}

#[test]
fn a_prefix_asked_for_often_is_copied_to_an_idle_instance() {
    let mut conductor = conductor(config(true), 3, 1);
    hold(&mut conductor, 0, &shared_chain(10), Tier::Hbm);
    let all = popular(&mut conductor, 0..60);
    let (from, to, chain) = all.first().expect("sixty requests are popular");
    assert_eq!((*from, chain.clone()), (0, shared_chain(10)));
    assert!(*to == 1 || *to == 2);
    assert_eq!(conductor.stats().replications, all.len() as u64);
}

#[test]
fn while_a_copy_is_on_its_way_no_other_is_sent_there() {
    let mut conductor = conductor(config(true), 3, 1);
    hold(&mut conductor, 0, &shared_chain(10), Tier::Hbm);
    let mut to: Vec<u32> = popular(&mut conductor, 0..200).iter().map(|(_, to, _)| *to).collect();
    to.sort_unstable();
    assert_eq!(to, [1, 2], "one to each that lacks it, however popular");
    let now_us = conductor.now_us;
    step(&mut conductor, now_us, Input::ReplicateFinished { to: InstanceId(1) });
    let again = popular(&mut conductor, 200..300);
    assert_eq!(again.len(), 1, "the copy did not show in the index, so it is ordered once more: {again:?}");
    assert_eq!(again[0].1, 1);
}

#[test]
fn an_instance_that_has_it_is_not_sent_it_again() {
    let mut conductor = conductor(config(true), 2, 1);
    hold(&mut conductor, 0, &shared_chain(10), Tier::Hbm);
    hold(&mut conductor, 1, &shared_chain(10), Tier::Dram);
    assert_eq!(popular(&mut conductor, 0..100), []);
}

#[test]
fn nothing_is_copied_where_that_is_switched_off_or_to_who_is_busy_or_away() {
    let mut off = conductor(config(false), 3, 1);
    let mut busy = conductor(config(true), 2, 1);
    let mut away = conductor(config(true), 2, 1);
    crate::testing::burden(&mut busy, crate::testing::request(90_000, 1, 0), (1, 2), 86_400_000_000);
    step(&mut away, 0, Input::InstanceDrained { instance: InstanceId(1) });
    for conductor in [&mut off, &mut busy, &mut away] {
        hold(conductor, 0, &shared_chain(10), Tier::Hbm);
        assert_eq!(popular(conductor, 0..60), []);
    }
}

#[test]
fn a_copy_that_never_arrives_does_not_block_the_next_life_of_its_target() {
    let mut play = Play::new(config(true), &[Role::Prefill, Role::Prefill, Role::Decode]);
    let change = CacheChange::Stored { parent: None, hashes: shared_chain(10), tier: Tier::Hbm };
    play.feed(Input::Cache(CacheEvent { instance: InstanceId(0), epoch: Epoch(1), change }));
    let mut seen = 0;
    for _ in 0..80 {
        play.now_us += 2_000_000;
        let copied = copies(&play.arrive(10 * BLOCK + 20, 10, 0)).len();
        seen += copied;
        if copied > 0 {
            play.lose(1);
            play.feed(Input::ReplicateFinished { to: InstanceId(1) });
            play.join(1);
        }
        play.finish();
    }
    assert!(seen > 1, "each life of the target is copied to");
}
