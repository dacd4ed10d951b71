//! Chains that an instance is about to lose go to a store instance, and are fetched from there.

use alloc::vec;
use alloc::vec::Vec;
use baton_types::{BlockHash, CacheChange, CacheEvent, Epoch, InstanceId, RequestId, Role, Tier};

use crate::testing::{
    BLOCK, conductor_of, finished, foretold, hold, offer, plain, request, spec, started, step,
};
use crate::{AdmissionMode, Conductor, Effect, Input, InstanceSpec, PolicyName, SchedulerConfig};

/// Instance 0 prefills, 1 decodes, those after lend room.
fn lent(stores: u32, change: impl Fn(&mut InstanceSpec)) -> Conductor {
    let config = SchedulerConfig { replicate: true, ..plain(PolicyName::Baton, AdmissionMode::Slo) };
    let mut specs = vec![spec(0, Role::Prefill), spec(1, Role::Decode)];
    specs.extend((2..2 + stores).map(|id| InstanceSpec { pass_tokens: 0, ..spec(id, Role::Store) }));
    specs.iter_mut().for_each(change);
    conductor_of(config, &specs)
}

fn cache(conductor: &mut Conductor, at: u32, change: CacheChange) -> Vec<Effect> {
    let now_us = conductor.now_us;
    step(conductor, now_us, Input::Cache(CacheEvent { instance: InstanceId(at), epoch: Epoch(1), change }))
}

fn stored(conductor: &mut Conductor, at: u32, hashes: Vec<BlockHash>) -> Vec<Effect> {
    cache(conductor, at, CacheChange::Stored { parent: None, hashes, tier: Tier::Hbm })
}

/// A block is stored and removed: from now on the instance is known to lose blocks.
fn loses(conductor: &mut Conductor, at: u32) {
    let hashes = vec![BlockHash(u64::MAX - u64::from(at))];
    stored(conductor, at, hashes.clone());
    cache(conductor, at, CacheChange::Removed { hashes, tier: Tier::Hbm });
}

/// Stores so many blocks that belong to no request.
fn fill(conductor: &mut Conductor, at: u32, blocks: u64) -> Vec<(u32, u32, usize)> {
    let first =
        (conductor.stats().stale_inputs + 1) << 40 | u64::from(at) << 32 | conductor.index().len() as u64;
    copies(&stored(conductor, at, (first..first + blocks).map(BlockHash).collect()))
}

fn copies(effects: &[Effect]) -> Vec<(u32, u32, usize)> {
    let copy = |e: &Effect| match e {
        Effect::Replicate { from, to, chain } => Some((from.0, to.0, chain.len())),
        _ => None,
    };
    effects.iter().filter_map(copy).collect()
}

/// Serves a request of so many blocks; both of its instances hold them then.
fn serve(conductor: &mut Conductor, id: u64, blocks: u64) -> Vec<BlockHash> {
    let request = foretold(id, blocks * BLOCK, 4);
    let chain = request.chain.clone();
    let now_us = conductor.now_us + 2_000_000;
    started(&offer(conductor, now_us, request));
    [0, 1].into_iter().for_each(|at| hold(conductor, at, &chain, Tier::Hbm));
    step(conductor, now_us, finished(id));
    step(conductor, now_us, Input::HandoffFinished { request: RequestId(id) });
    step(
        conductor,
        now_us,
        Input::DecodeFinished { request: RequestId(id), output_tokens: 4, first_us: 0, tbt_us: 0 },
    );
    chain
}

fn copied(conductor: &mut Conductor, to: u32) -> Vec<(u32, u32, usize)> {
    let now_us = conductor.now_us;
    copies(&step(conductor, now_us, Input::ReplicateFinished { to: InstanceId(to) }))
}

#[test]
fn a_chain_is_saved_when_its_last_holder_is_about_to_lose_it() {
    let mut conductor = lent(1, |_| {});
    fill(&mut conductor, 1, 100);
    serve(&mut conductor, 1, 10);
    assert_eq!(fill(&mut conductor, 0, 100), [], "who never lost a block is not about to");
    loses(&mut conductor, 0);
    assert_eq!(fill(&mut conductor, 0, 100), [], "the decode instance holds it, too");
    loses(&mut conductor, 1);
    assert_eq!(fill(&mut conductor, 1, 1), [], "not yet");
    assert_eq!(fill(&mut conductor, 1, 100), [(0, 2, 10)]);
    assert_eq!(conductor.stats().saves, 1);
}

#[test]
fn one_chain_at_a_time_is_saved_and_then_the_lender_rests() {
    let mut conductor = lent(1, |_| {});
    serve(&mut conductor, 1, 10);
    serve(&mut conductor, 2, 1);
    [0, 1].into_iter().for_each(|at| loses(&mut conductor, at));
    let all = [fill(&mut conductor, 0, 40), fill(&mut conductor, 1, 40)].concat();
    assert_eq!(all, [(0, 2, 10)], "the oldest first, and one at a time");
    assert_eq!(copied(&mut conductor, 2), [], "the lender rests as long as that took");
    let wake_us = conductor.next_deadline().expect("it goes on by itself");
    assert!(wake_us > conductor.now_us);
    assert_eq!(copies(&step(&mut conductor, wake_us, Input::TimerFired)), [(0, 2, 1)]);
}

#[test]
fn what_leaves_with_its_instance_is_saved_at_once() {
    let mut conductor = lent(2, |_| {});
    (1..4).for_each(|id| _ = serve(&mut conductor, id, 8));
    let now_us = conductor.now_us;
    let drained = |conductor: &mut Conductor, at| {
        copies(&step(conductor, now_us, Input::InstanceDrained { instance: InstanceId(at) }))
    };
    assert_eq!(drained(&mut conductor, 1), [], "the other one stays");
    assert_eq!(drained(&mut conductor, 0), [(0, 2, 8), (0, 3, 8)], "one to each that lends");
    let wake_us = now_us + 10_000_000;
    step(&mut conductor, wake_us, Input::TimerFired);
    assert_eq!(copied(&mut conductor, 3), [(0, 3, 8)]);
    assert_eq!(copied(&mut conductor, 2), [], "that was all");
}

#[test]
fn nothing_is_saved_twice_or_where_that_does_not_pay() {
    let mut held = lent(1, |_| {});
    let chain = serve(&mut held, 1, 8);
    hold(&mut held, 2, &chain, Tier::Dram);
    let mut slow =
        lent(1, |spec| spec.net_bytes_per_s = if spec.id.0 == 2 { 1_000_000 } else { 1_000_000_000 });
    serve(&mut slow, 1, 8);
    let mut alone = lent(0, |_| {});
    serve(&mut alone, 1, 8);
    let mut gone = lent(1, |_| {});
    serve(&mut gone, 1, 8);
    step(&mut gone, 0, Input::InstanceLost { instance: InstanceId(0), epoch: Epoch(1) });
    step(&mut gone, 0, Input::InstanceLost { instance: InstanceId(1), epoch: Epoch(1) });
    for conductor in [&mut held, &mut slow, &mut alone, &mut gone] {
        for instance in [0, 1].map(InstanceId) {
            assert_eq!(copies(&step(conductor, 0, Input::InstanceDrained { instance })), []);
        }
        assert_eq!(conductor.stats().saves, 0);
    }
}

#[test]
fn a_prefix_is_fetched_from_who_lends_if_its_memory_is_quick_enough() {
    let chain = request(1, 10 * BLOCK, 0).chain;
    let fetches = |tier, ssd_bytes_per_s| {
        let mut conductor = lent(1, |spec| spec.ssd_bytes_per_s = ssd_bytes_per_s);
        hold(&mut conductor, 2, &chain[..9], tier);
        let start = started(&offer(&mut conductor, 0, request(1, 10 * BLOCK, 0)));
        assert_eq!((start.prefill, start.decode), (0, 1), "who lends computes nothing");
        start.fetch.map(|fetch| (fetch.from.0, fetch.blocks))
    };
    assert_eq!(fetches(Tier::Dram, 1), Some((2, 9)), "its disk has no part in it");
    assert_eq!(fetches(Tier::Ssd, 1_000_000_000), Some((2, 9)));
    assert_eq!(fetches(Tier::Ssd, 1_000_000), None, "4.6 s from flash, 0.5 s of computing");
}

#[test]
fn who_has_no_engine_stores_whatever_role_it_is_given() {
    let mut conductor = lent(1, |_| {});
    let stale = conductor.stats().stale_inputs;
    for role in [Role::Prefill, Role::Decode, Role::Both] {
        step(&mut conductor, 0, Input::RoleChanged { instance: InstanceId(2), role });
    }
    assert_eq!(conductor.stats().stale_inputs, stale + 3);
    assert_eq!((conductor.fleet.prefills.len(), conductor.fleet.decodes.len()), (1, 1));
}
