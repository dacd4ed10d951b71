//! Laws of the conductor's public face, from the outside: the index as another crate drives it,
//! and whole conversations with a conductor through its inputs and effects alone.

use baton_scheduler::index::{MatchScratch, PrefixIndex};
use baton_scheduler::{
    AdmissionMode, Conductor, Effect, Input, InstanceSpec, PolicyName, Request, SchedulerConfig,
};
use baton_types::{
    BlockHash, CacheChange, CacheEvent, CostProfile, DecodeCost, Epoch, FitReport, InstanceId, PrefillCost,
    RequestId, Rng, Role, Tier, ValidRange,
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The index written the obvious way: who holds which block in which tiers.
#[derive(Default)]
struct Naive {
    held: BTreeMap<(u32, u64), BTreeSet<usize>>,
}

impl Naive {
    fn insert(&mut self, hashes: &[BlockHash], instance: u32, tier: Tier) {
        for hash in hashes {
            self.held.entry((instance, hash.0)).or_default().insert(tier.index());
        }
    }

    fn remove(&mut self, hashes: &[BlockHash], instance: u32, tier: Tier) {
        for hash in hashes {
            if let Some(tiers) = self.held.get_mut(&(instance, hash.0)) {
                tiers.remove(&tier.index());
                if tiers.is_empty() {
                    self.held.remove(&(instance, hash.0));
                }
            }
        }
    }

    fn clear(&mut self, instance: u32) {
        self.held.retain(|(i, _), _| *i != instance);
    }

    /// Leading blocks held, and of those how many have each tier as their fastest.
    fn matches(&self, chain: &[BlockHash], instances: u32) -> Vec<(u32, u32, [u32; 3])> {
        let mut found = Vec::new();
        for instance in 0..instances {
            let mut by_tier = [0; 3];
            for hash in chain {
                let Some(fastest) = self.held.get(&(instance, hash.0)).and_then(|t| t.first()) else { break };
                by_tier[*fastest] += 1;
            }
            let blocks = by_tier.iter().sum();
            if blocks > 0 {
                found.push((instance, blocks, by_tier));
            }
        }
        found
    }
}

fn matches(index: &PrefixIndex, chain: &[BlockHash]) -> Vec<(u32, u32, [u32; 3])> {
    let mut found = Vec::new();
    let mut scratch = MatchScratch::default();
    index.matches(chain, &mut scratch, |m| found.push((m.instance.0, m.blocks, m.by_tier)));
    found
}

/// Conversations that branch: chain `c` shares its first blocks with chain `c / 2`.
fn chain(c: u64, length: u64) -> Vec<BlockHash> {
    let name = |position: u64| {
        let owner = if position < 3 {
            0
        } else if position < 6 {
            c / 2
        } else {
            c
        };
        BlockHash((owner + 1) * 1_000 + position)
    };
    (0..length).map(name).collect()
}

fn parent(chain: &[BlockHash], from: usize) -> Option<BlockHash> {
    from.checked_sub(1).map(|at| chain[at])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn the_index_answers_as_a_plain_map_would(seed in any::<u64>()) {
        let mut rng = Rng::new(seed);
        let (mut index, mut naive) = (PrefixIndex::new(), Naive::default());
        let mut draw = |below: u64| usize::try_from(rng.below(below)).expect("small");
        for _ in 0..120 {
            let whole = chain(draw(8) as u64, 4 + draw(12) as u64);
            let (from, instance) = (draw(whole.len() as u64), u32::try_from(draw(5)).expect("small"));
            let to = from + 1 + draw((whole.len() - from) as u64);
            let (part, tier) = (&whole[from..to], Tier::LOCAL[draw(3)]);
            match draw(10) {
                0..6 => {
                    index.insert(parent(&whole, from), part, InstanceId(instance), tier);
                    naive.insert(part, instance, tier);
                }
                6..9 => {
                    index.remove(part, InstanceId(instance), tier);
                    naive.remove(part, instance, tier);
                }
                _ => {
                    index.clear(InstanceId(instance));
                    naive.clear(instance);
                }
            }
            prop_assert_eq!(index.check(), Ok(()));
            let asked = chain(draw(8) as u64, 16);
            prop_assert_eq!(matches(&index, &asked), naive.matches(&asked, 5));
        }
        let blocks = naive.held.keys().map(|(_, hash)| *hash).collect::<BTreeSet<_>>();
        for hash in blocks {
            let holders = naive.held.keys().filter(|(_, h)| *h == hash).count();
            prop_assert_eq!(index.holders(BlockHash(hash)), holders);
        }
    }
}

#[test]
fn a_hole_ends_a_match_until_it_is_filled_again() {
    let mut index = PrefixIndex::new();
    let blocks = chain(1, 10);
    let holder = InstanceId(3);
    index.insert(None, &blocks, holder, Tier::Hbm);
    assert_eq!(matches(&index, &blocks), [(3, 10, [10, 0, 0])]);
    index.remove(&blocks[4..5], holder, Tier::Hbm);
    assert_eq!(matches(&index, &blocks), [(3, 4, [4, 0, 0])]);
    index.insert(Some(blocks[3]), &blocks[4..5], holder, Tier::Dram);
    assert_eq!(matches(&index, &blocks), [(3, 10, [9, 1, 0])], "the blocks behind the hole count again");
}

#[test]
fn a_tail_that_came_first_counts_once_its_head_is_there() {
    let mut index = PrefixIndex::new();
    let blocks = chain(2, 8);
    index.insert(parent(&blocks, 5), &blocks[5..], InstanceId(0), Tier::Hbm);
    assert_eq!(matches(&index, &blocks), []);
    index.insert(None, &blocks[..5], InstanceId(0), Tier::Hbm);
    assert_eq!(matches(&index, &blocks), [(0, 8, [8, 0, 0])]);
}

#[test]
fn every_instance_is_named_once_in_ascending_order() {
    let mut index = PrefixIndex::new();
    let blocks = chain(0, 5);
    for instance in (0..100).rev() {
        let held = 1 + (instance as usize * 7) % 5;
        index.insert(None, &blocks[..held], InstanceId(instance), Tier::Hbm);
    }
    let found = matches(&index, &blocks);
    assert!(found.iter().map(|(i, ..)| *i).eq(0..100));
    assert!(found.iter().all(|(i, blocks, _)| *blocks == 1 + (i * 7) % 5));
}

/// A profile with round numbers.
fn profile() -> Arc<CostProfile> {
    Arc::new(CostProfile {
        name: "round".into(),
        source: "made up for tests".into(),
        kv_bytes_per_token: 1000,
        kv_capacity_tokens: 200_000,
        layers: 10,
        shared_us: 1000.0,
        fit: FitReport::default(),
        valid: ValidRange::default(),
        prefill: PrefillCost {
            knots_tokens: vec![0, 1000],
            knots_us: vec![1000.0, 101_000.0],
            attention_ps_per_pair: 0.0,
        },
        decode: DecodeCost {
            batches: vec![1, 64],
            base_us: vec![10_000.0, 20_000.0],
            context_ps_per_token: vec![100.0; 2],
        },
    })
}

fn spec(id: u32, role: Role) -> InstanceSpec {
    InstanceSpec {
        id: InstanceId(id),
        epoch: Epoch(1),
        role,
        profile: profile(),
        capacity_tokens: 200_000,
        pass_tokens: 8192,
        pipeline_nodes: 1,
        mixed_chunk_tokens: None,
        max_running: None,
        net_bytes_per_s: 1_000_000_000,
        host_bytes_per_s: 1_000_000_000,
        ssd_bytes_per_s: 100_000_000,
        may_change_role: false,
        engine_moves_kv: false,
        kind: 0,
    }
}

/// A cluster whose engines finish whatever they are sent, in order, a fixed time later.
struct ScriptedCluster {
    conductor: Conductor,
    now_us: u64,
    effects: Vec<Effect>,
    log: Vec<String>,
}

impl ScriptedCluster {
    fn new(policy: PolicyName, admission: AdmissionMode) -> Self {
        let config = SchedulerConfig { policy, admission, ..SchedulerConfig::default() };
        let mut cluster = Self {
            conductor: Conductor::new(config).expect("a valid config"),
            now_us: 0,
            effects: vec![],
            log: vec![],
        };
        for id in 0..4 {
            cluster.feed(Input::InstanceJoined(spec(id, if id < 2 { Role::Prefill } else { Role::Decode })));
        }
        cluster
    }

    fn feed(&mut self, input: Input) {
        self.conductor.step(self.now_us, input, &mut self.effects);
        assert_eq!(self.conductor.check(), Ok(()));
    }

    /// Carries every order out to its end, in order.
    fn obey(&mut self) {
        while let Some(effect) = (!self.effects.is_empty()).then(|| self.effects.remove(0)) {
            self.log.push(format!("{} {effect:?}", self.now_us));
            self.now_us += 1000;
            match effect {
                Effect::StartPrefill { request, fetch, instance, decode, .. } => {
                    if fetch.is_some() {
                        self.feed(Input::FetchFinished { request, ok: true });
                    }
                    self.feed(Input::PrefillFinished { request, compute_us: 900, cached_tokens: 0 });
                    if instance != decode {
                        self.feed(Input::HandoffFinished { request });
                    }
                }
                Effect::StartDecode { request, .. } => {
                    self.feed(Input::DecodeFinished { request, output_tokens: 9, first_us: 0, tbt_us: 0 })
                }
                Effect::Replicate { to, .. } => self.feed(Input::ReplicateFinished { to }),
                _ => {}
            }
            if self.effects.is_empty()
                && let Some(at_us) = self.conductor.next_deadline()
            {
                self.now_us = self.now_us.max(at_us);
                self.feed(Input::TimerFired);
            }
        }
    }
}

/// Requests over a few shared prefixes, drawn from a seed.
fn talk(cluster: &mut ScriptedCluster, seed: u64, requests: u64) {
    let mut rng = Rng::new(seed);
    for id in 0..requests {
        let blocks = chain(rng.below(6), 3 + rng.below(20));
        let prompt_tokens = blocks.len() as u64 * 512 - rng.below(500);
        if rng.chance_permille(300) {
            let change = CacheChange::Stored { parent: None, hashes: blocks.clone(), tier: Tier::Hbm };
            let instance = InstanceId(u32::try_from(rng.below(4)).expect("small"));
            cluster.feed(Input::Cache(CacheEvent { instance, epoch: Epoch(1), change }));
        }
        cluster.now_us += rng.below(30_000);
        cluster.feed(Input::RequestArrived(Request {
            id: RequestId(id),
            prompt_tokens,
            chain: blocks,
            ..Request::default()
        }));
        if rng.chance_permille(500) {
            cluster.obey();
        }
    }
    cluster.obey();
}

#[test]
fn under_every_policy_and_mode_everybody_is_answered_and_nothing_is_left() {
    use AdmissionMode::{AtDecode, Early, EarlyPredict, None, Slo};
    for policy in PolicyName::ALL {
        for mode in [None, AtDecode, Early, EarlyPredict, Slo] {
            let mut cluster = ScriptedCluster::new(policy, mode);
            talk(&mut cluster, 11, 60);
            let stats = cluster.conductor.stats();
            assert_eq!(stats.arrived, 60);
            assert_eq!(
                stats.finished + stats.rejected_total() + stats.failed,
                60,
                "{policy:?} {mode:?}: {stats:?}"
            );
            let snapshot = cluster.conductor.snapshot();
            assert_eq!(snapshot.requests, 0, "{policy:?} {mode:?}");
            let idle = |i: &baton_scheduler::InstanceLoad| {
                i.backlog_us + u64::from(i.decodes) + i.reserved_tokens == 0
            };
            assert!(snapshot.instances.iter().all(idle), "{policy:?} {mode:?}: {snapshot:?}");
        }
    }
}

#[test]
fn the_same_talk_gives_the_same_orders_to_the_letter() {
    for policy in PolicyName::ALL {
        let log = |seed| {
            let mut cluster = ScriptedCluster::new(policy, AdmissionMode::Auto);
            talk(&mut cluster, seed, 40);
            cluster.log
        };
        assert_eq!(log(5), log(5), "{policy:?}");
        assert_ne!(log(5), log(6), "{policy:?}");
    }
}

#[test]
fn a_conductor_without_instances_refuses_and_says_when_to_come_back() {
    let mut conductor = Conductor::new(SchedulerConfig::default()).expect("a valid config");
    let mut effects = Vec::new();
    let request = Request { id: RequestId(1), prompt_tokens: 100, chain: chain(0, 1), ..Request::default() };
    conductor.step(5, Input::RequestArrived(request), &mut effects);
    let [Effect::Reject(rejection)] = &effects[..] else { panic!("{effects:?}") };
    assert_eq!(rejection.reason.name(), "no_instance");
    assert!(rejection.retry_after_us > 0 && rejection.wasted_tokens == 0);
}
