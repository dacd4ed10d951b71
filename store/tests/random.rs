//! Random histories under all policies. The tests check every invariant after every step. The events for the index
//! describe exactly the readable blocks. Equal inputs give equal effects. At rest nothing is pinned or reserved.

mod history;

use baton_store::{Effect, Eviction, Input, Offload, Owner, Store, StoreConfig};
use baton_types::{BlockHash, RequestId, Tier};
use history::{Op, chain, config, ops};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// Carries out effects as a driver would: remembers what is unanswered and what was announced.
#[derive(Default)]
struct Driver {
    open: BTreeSet<Owner>,
    onboards: Vec<Owner>,
    offloads: Vec<u64>,
    announced: [BTreeSet<BlockHash>; 3],
    log: Vec<Effect>,
}

impl Driver {
    fn apply(&mut self, store: &mut Store, now_us: u64, input: Input<'_>) {
        let mut effects = Vec::new();
        store.step(now_us, input, &mut effects);
        for effect in &effects {
            match effect {
                Effect::Opened { owner, .. } => _ = self.open.insert(*owner),
                Effect::Onboard { owner, dram_blocks, ssd_blocks } => {
                    assert!(dram_blocks + ssd_blocks > 0, "an order to copy nothing");
                    self.onboards.push(*owner);
                }
                Effect::Offload { ticket, blocks, .. } => {
                    assert!(*blocks > 0, "an order to copy nothing");
                    self.offloads.push(*ticket);
                }
                Effect::Stored { hashes, tier, .. } => {
                    for hash in hashes {
                        assert!(self.announced[tier.index()].insert(*hash), "stored twice");
                    }
                }
                Effect::Removed { hashes, tier } => {
                    for hash in hashes {
                        assert!(self.announced[tier.index()].remove(hash), "removed what was not there");
                    }
                }
                Effect::Cleared => *self = Self { log: std::mem::take(&mut self.log), ..Self::default() },
                _ => {}
            }
        }
        self.log.extend(effects);
    }

    fn run(&mut self, store: &mut Store, now_us: u64, op: &Op) {
        match op {
            Op::Serve { owner, path, patient } => {
                let (owner, chain) = (RequestId(*owner), chain(path));
                self.close(store, now_us, owner);
                self.apply(store, now_us, Input::Open { owner, chain: &chain, room_blocks: 1 });
                if *patient && self.onboards.contains(&owner) {
                    self.onboards.retain(|&other| other != owner);
                    self.apply(store, now_us, Input::OnboardDone { owner, ok: true });
                }
                self.apply(store, now_us, Input::Seal { owner, upto_blocks: 9 });
                self.close(store, now_us, owner);
            }
            Op::Open { owner, path, room } => {
                let (owner, chain) = (RequestId(*owner), chain(path));
                self.apply(store, now_us, Input::Open { owner, chain: &chain, room_blocks: *room });
            }
            Op::Read { owner, path } => {
                self.apply(store, now_us, Input::Read { owner: RequestId(*owner), chain: &chain(path) });
            }
            Op::Seal { owner, upto } => {
                self.apply(store, now_us, Input::Seal { owner: RequestId(*owner), upto_blocks: *upto });
            }
            Op::Grow { owner, room } => {
                self.apply(store, now_us, Input::GrowRoom { owner: RequestId(*owner), room_blocks: *room });
            }
            Op::Close { owner } => self.close(store, now_us, RequestId(*owner)),
            Op::Onboarded { pick, ok } if !self.onboards.is_empty() => {
                let owner = self.onboards.remove(pick % self.onboards.len());
                let good_blocks = *pick as u32 % 3;
                let input = match *ok || *pick > 5 {
                    true => Input::OnboardDone { owner, ok: *ok },
                    false => Input::OnboardCutShort { owner, good_blocks, next_is_lost: pick % 2 == 0 },
                };
                self.apply(store, now_us, input);
            }
            Op::Offloaded { pick, ok } if !self.offloads.is_empty() => {
                let ticket = self.offloads.remove(pick % self.offloads.len());
                self.apply(store, now_us, Input::OffloadDone { ticket, ok: *ok });
            }
            Op::Onboarded { pick, ok } | Op::Offloaded { pick, ok } => {
                self.apply(store, now_us, Input::OffloadDone { ticket: 1_000_000 + *pick as u64, ok: *ok });
            }
            Op::Clear => self.apply(store, now_us, Input::Clear),
        }
    }

    fn close(&mut self, store: &mut Store, now_us: u64, owner: Owner) {
        self.open.remove(&owner);
        self.onboards.retain(|&other| other != owner);
        self.apply(store, now_us, Input::Close { owner });
    }

    fn settle(&mut self, store: &mut Store, now_us: u64) {
        while let Some(owner) = self.open.first().copied() {
            self.close(store, now_us, owner);
        }
        while let Some(ticket) = self.offloads.pop() {
            self.apply(store, now_us, Input::OffloadDone { ticket, ok: true });
        }
    }

    fn check_announced(&self, store: &Store) {
        let mut readable: [BTreeSet<BlockHash>; 3] = Default::default();
        for block in store.snapshot().blocks {
            for tier in block.readable_in {
                readable[tier.index()].insert(block.key.short());
            }
        }
        assert_eq!(readable, self.announced, "the index would believe something else");
    }
}

/// Time between two steps: long enough for blocks to grow old in the order of `Reuse`.
const STEP_US: u64 = 7_000_000;

fn play(config: &StoreConfig, ops: &[Op]) -> (Store, Driver) {
    let mut store = Store::new(config.clone()).expect("the tests' sizes are valid");
    let mut driver = Driver::default();
    for (step, op) in ops.iter().enumerate() {
        driver.run(&mut store, step as u64 * STEP_US, op);
        if let Err(sentence) = store.check() {
            panic!("after step {step} {op:?}: {sentence}");
        }
        driver.check_announced(&store);
    }
    (store, driver)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_invariant_holds_after_every_step(config in config(), ops in ops(120)) {
        let (mut store, mut driver) = play(&config, &ops);
        driver.settle(&mut store, 1_000 * STEP_US);
        store.check().map_err(TestCaseError::fail)?;
        driver.check_announced(&store);
        prop_assert_eq!(store.pinned_total(), 0, "I3: at rest all pins are zero");
        let stats = store.stats();
        prop_assert_eq!(stats.owners, 0);
        for tier in stats.tiers {
            prop_assert_eq!((tier.pinned_blocks, tier.reserved_blocks), (0, 0));
        }
    }

    #[test]
    fn equal_inputs_give_equal_effects(config in config(), ops in ops(120)) {
        let (first, second) = (play(&config, &ops), play(&config, &ops));
        prop_assert_eq!(first.1.log, second.1.log);
        prop_assert_eq!(first.0.snapshot(), second.0.snapshot());
    }

    /// No parent goes before its children under `Reuse`: each eviction frees one slot, so a tier
    /// that was full once stays full however the chains branch.
    #[test]
    fn under_reuse_nothing_is_lost_with_its_parent(
        paths in proptest::collection::vec((proptest::collection::vec(0u64..3, 1..9), 0u64..200), 1..120),
    ) {
        let config = StoreConfig {
            hbm_blocks: 12, dram_blocks: 0, ssd_blocks: 0,
            eviction: Eviction::Reuse, offload: Offload::Off, ssd_second_touch: false,
        };
        let (mut store, mut effects) = (Store::new(config).expect("valid"), Vec::new());
        let (mut now_us, mut full) = (0, false);
        for (number, (path, wait_s)) in paths.into_iter().enumerate() {
            now_us += wait_s * 1_000_000;
            let owner = RequestId(number as u64);
            store.step(now_us, Input::Open { owner, chain: &chain(&path), room_blocks: 0 }, &mut effects);
            store.step(now_us, Input::Seal { owner, upto_blocks: u32::MAX }, &mut effects);
            store.step(now_us, Input::Close { owner }, &mut effects);
            store.check().map_err(TestCaseError::fail)?;
            let used = store.stats().tiers[0].used_blocks;
            prop_assert!(!full || used == 12, "more went than there was need for: {} are left", used);
            full |= used == 12;
        }
    }

    /// The answer of an open equals a look-up a moment earlier, and the promised slots suffice.
    #[test]
    fn an_open_counts_every_block_of_its_chain_once(
        config in config(), ops in ops(40), path in proptest::collection::vec(0u64..3, 1..9), room in 0u32..4,
    ) {
        let (mut store, mut driver) = play(&config, &ops);
        let (owner, chain) = (RequestId(999), chain(&path));
        let before = store.lookup(&chain);
        let free = store.stats();
        driver.log.clear();
        driver.apply(&mut store, 1_000 * STEP_US, Input::Open { owner, chain: &chain, room_blocks: room });
        match driver.log[0] {
            Effect::Opened { hbm, dram, ssd, pending, reserved, .. } => {
                let fresh = reserved - room;
                prop_assert_eq!(hbm + dram + ssd + pending + fresh, chain.len() as u32);
                prop_assert!(hbm <= before.hbm);
                prop_assert!(hbm + dram + ssd + pending >= before.total);
            }
            Effect::Refused { needed_blocks, free_or_evictable_blocks, .. } => {
                prop_assert!(needed_blocks > free_or_evictable_blocks);
                prop_assert_eq!(store.lookup(&chain), before, "a refusal changes nothing");
                prop_assert_eq!(store.stats().tiers, free.tiers);
            }
            ref other => prop_assert!(false, "answered by {:?}", other),
        }
    }
}

/// The histories above reach what they are meant to reach.
#[test]
fn random_histories_visit_every_corner() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut seen: BTreeMap<&str, u64> = BTreeMap::new();
    for _ in 0..2_000 {
        let (config, ops) =
            (config(), ops(120)).new_tree(&mut runner).expect("generation never fails").current();
        let (store, driver) = play(&config, &ops);
        let stats = store.stats();
        let tiers = stats.tiers;
        let mut add = |name, count: u64| *seen.entry(name).or_default() += count;
        add("refused", stats.refused);
        add("lost", stats.lost_blocks);
        add("shared fill", stats.shared_fill_blocks);
        add("onboard failed", stats.onboard_failed_blocks);
        add("double open", stats.double_opens);
        add("dram hit", tiers[1].hit_blocks);
        add("ssd hit", tiers[2].hit_blocks);
        add("ssd onboarded", tiers[2].onboarded_blocks);
        add("called off", tiers[1].offload_failed_blocks);
        for effect in driver.log {
            match effect {
                Effect::Inherited { .. } => add("inherited", 1),
                Effect::Grown { .. } => add("grown", 1),
                Effect::GrowRefused { .. } => add("grow refused", 1),
                Effect::Offload { from: Tier::Dram, .. } => add("dram to ssd", 1),
                _ => {}
            }
        }
    }
    assert_eq!(seen.len(), 13, "{seen:?}");
    assert!(seen.values().all(|&count| count > 20), "{seen:?}");
}

/// A fixed churn over every pair of policies, so that no pair depends on chance.
#[test]
fn every_pair_of_policies_survives_a_fixed_churn() {
    for eviction in Eviction::ALL {
        for offload in [Offload::Off, Offload::WriteThrough, Offload::OnEvict] {
            let config = StoreConfig {
                hbm_blocks: 12,
                dram_blocks: 20,
                ssd_blocks: 30,
                eviction,
                offload,
                ssd_second_touch: true,
            };
            let mut store = Store::new(config).expect("valid");
            let mut driver = Driver::default();
            let mut rng = baton_types::Rng::new(5);
            for step in 0..3_000 {
                let owner = RequestId(step);
                let path: Vec<u64> = (0..1 + rng.below(8)).map(|_| rng.below(3)).collect();
                let chain = chain(&path);
                driver.apply(
                    &mut store,
                    step * STEP_US,
                    Input::Open { owner, chain: &chain, room_blocks: 1 },
                );
                driver.apply(&mut store, step * STEP_US, Input::Seal { owner, upto_blocks: 9 });
                driver.settle(&mut store, step * STEP_US);
                if let Err(sentence) = store.check() {
                    panic!(
                        "{eviction:?} {offload:?}, step {step}: {sentence} {:#?} {:?}",
                        store.snapshot().blocks,
                        driver.log.iter().rev().take(12).collect::<Vec<_>>()
                    );
                }
            }
            driver.check_announced(&store);
            let stats = store.stats();
            assert_eq!(stats.refused, 0);
            assert!(
                stats.tiers[0].hit_blocks > 1_000 && stats.lost_blocks > 1_000,
                "{eviction:?} {offload:?} {stats:?}"
            );
            assert_eq!(offload == Offload::Off, stats.tiers[1].offloaded_blocks == 0);
        }
    }
}
