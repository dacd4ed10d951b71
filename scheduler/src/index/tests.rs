//! The index against a naive one: a map from (block, instance) to tiers, asked block by block.

use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;

use baton_types::{BlockHash, ChainHasher, InstanceId, Rng, Tier};
use proptest::prelude::*;

use super::arena::{CHUNK_SLOTS, Extent};
use super::*;

mod parts;

/// The naive index.
#[derive(Default)]
struct Reference {
    tiers: BTreeMap<(BlockHash, InstanceId), u8>,
}

impl Reference {
    fn insert(&mut self, hashes: &[BlockHash], instance: InstanceId, tier: Tier) -> usize {
        let mut added = 0;
        for &hash in hashes {
            let mask = self.tiers.entry((hash, instance)).or_default();
            added += usize::from(*mask == 0);
            *mask |= 1 << tier.index();
        }
        added
    }

    fn remove(&mut self, hashes: &[BlockHash], instance: InstanceId, tier: Tier) -> usize {
        let mut removed = 0;
        for &hash in hashes {
            let Some(mask) = self.tiers.get_mut(&(hash, instance)) else { continue };
            removed += usize::from(*mask >> tier.index() & 1);
            *mask &= !(1 << tier.index());
            if *mask == 0 {
                self.tiers.remove(&(hash, instance));
            }
        }
        removed
    }

    fn clear(&mut self, instance: InstanceId) -> usize {
        let before = self.tiers.len();
        self.tiers.retain(|key, _| key.1 != instance);
        before - self.tiers.len()
    }

    fn matches(&self, chain: &[BlockHash], instances: u32) -> Vec<Match> {
        let of = |instance| {
            let mut found = Match { instance, ..Match::default() };
            for &hash in chain {
                let Some(mask) = self.tiers.get(&(hash, instance)) else { break };
                found.blocks += 1;
                found.by_tier[mask.trailing_zeros() as usize] += 1;
            }
            found
        };
        (0..instances).map(|id| of(InstanceId(id))).filter(|found| found.blocks > 0).collect()
    }

    fn held(&self, instance: InstanceId) -> usize {
        self.tiers.keys().filter(|key| key.1 == instance).count()
    }

    fn holders(&self, hash: BlockHash) -> usize {
        self.tiers.keys().filter(|key| key.0 == hash).count()
    }

    fn blocks(&self) -> usize {
        let mut hashes: Vec<BlockHash> = self.tiers.keys().map(|key| key.0).collect();
        hashes.dedup();
        hashes.len()
    }
}

fn chain_of(ids: impl IntoIterator<Item = u64>) -> Vec<BlockHash> {
    let mut hasher = ChainHasher::new(1, b"tests");
    ids.into_iter().map(|id| hasher.push_id(id).short()).collect()
}

/// A family of chains that fork from each other at seeded places.
fn forest(seed: u64, chains: usize, longest: u64) -> Vec<Vec<BlockHash>> {
    let mut rng = Rng::new(seed);
    let mut ids: Vec<Vec<u64>> = vec![vec![0]];
    for fork in 1..chains as u64 {
        let mut new = ids[rng.below(ids.len() as u64) as usize].clone();
        new.truncate(rng.below(new.len() as u64 + 1) as usize);
        let more = 1 + rng.below(longest);
        new.extend((0..more).map(|at| fork << 32 | at));
        ids.push(new);
    }
    ids.into_iter().map(chain_of).collect()
}

fn found(index: &PrefixIndex, chain: &[BlockHash]) -> Vec<Match> {
    let (mut scratch, mut list) = (MatchScratch::default(), Vec::new());
    index.matches(chain, &mut scratch, |m| list.push(m));
    list
}

fn blocks_of(index: &PrefixIndex, chain: &[BlockHash]) -> Vec<(u32, u32)> {
    found(index, chain).iter().map(|m| (m.instance.0, m.blocks)).collect()
}

const A: InstanceId = InstanceId(0);
const B: InstanceId = InstanceId(1);

#[test]
fn an_empty_index_matches_nothing() {
    let mut index = PrefixIndex::new();
    assert_eq!(found(&index, &chain_of(0..5)), vec![]);
    assert_eq!(found(&index, &[]), vec![]);
    assert_eq!((index.clear(A), index.remove(&chain_of(0..2), A, Tier::Hbm)), (0, 0));
    assert!(index.is_empty() && index.check().is_ok());
    assert_eq!(index.insert(None, &[], A, Tier::Hbm), InsertOutcome::default());
}

#[test]
fn a_hole_ends_the_match_and_filling_it_restores_it() {
    let (mut index, chain) = (PrefixIndex::new(), chain_of(0..6));
    assert_eq!(index.insert(None, &chain, A, Tier::Hbm).added, 6);
    assert_eq!(index.remove(&chain[3..4], A, Tier::Hbm), 1);
    assert_eq!(blocks_of(&index, &chain), [(0, 3)]);
    assert_eq!((index.held_blocks(A), index.len()), (5, 5));
    let filled = index.insert(Some(chain[2]), &chain[3..4], A, Tier::Hbm);
    assert_eq!((filled.added, filled.orphan), (1, false));
    assert_eq!(blocks_of(&index, &chain), [(0, 6)]);
    index.check().unwrap();
}

#[test]
fn another_instance_does_not_fill_the_hole_of_the_first() {
    let (mut index, chain) = (PrefixIndex::new(), chain_of(0..6));
    index.insert(None, &chain, A, Tier::Hbm);
    index.insert(None, &chain[..4], B, Tier::Hbm);
    index.remove(&chain[1..2], A, Tier::Hbm);
    assert_eq!(blocks_of(&index, &chain), [(0, 1), (1, 4)]);
    index.check().unwrap();
}

#[test]
fn the_fastest_tier_counts_and_slower_copies_stand_in() {
    let (mut index, chain) = (PrefixIndex::new(), chain_of(0..6));
    index.insert(None, &chain, A, Tier::Ssd);
    index.insert(None, &chain[..4], A, Tier::Dram);
    index.insert(None, &chain[..2], A, Tier::Hbm);
    assert_eq!(found(&index, &chain)[0].by_tier, [2, 2, 2]);
    assert_eq!(index.held_blocks(A), 6, "a block in three tiers is held once");
    assert_eq!(index.remove(&chain[..4], A, Tier::Dram), 4);
    assert_eq!(found(&index, &chain)[0].by_tier, [2, 0, 4]);
    assert_eq!(found(&index, &chain)[0].blocks, 6);
    index.check().unwrap();
}

#[test]
fn orphans_are_kept_and_join_when_their_parent_arrives() {
    let (mut index, chain) = (PrefixIndex::new(), chain_of(0..8));
    assert!(index.insert(Some(chain[4]), &chain[5..], A, Tier::Hbm).orphan);
    assert_eq!(blocks_of(&index, &chain), []);
    assert!(index.insert(Some(chain[1]), &chain[2..5], A, Tier::Hbm).orphan);
    assert!(!index.insert(None, &chain[..2], A, Tier::Hbm).orphan);
    assert_eq!(blocks_of(&index, &chain), [(0, 8)]);
    assert!(index.insert(Some(chain[0]), &chain[1..2], B, Tier::Hbm).orphan, "held, but not by B");
    index.check().unwrap();
}

#[test]
fn runs_follow_holders_and_join_again_when_holders_agree() {
    let (mut index, chain) = (PrefixIndex::new(), chain_of(0..100));
    index.insert(None, &chain, A, Tier::Hbm);
    assert_eq!(index.runs(), 1);
    index.insert(None, &chain[..40], B, Tier::Hbm);
    assert_eq!(index.runs(), 2);
    index.insert(Some(chain[39]), &chain[40..], B, Tier::Hbm);
    assert_eq!(index.runs(), 1);
    index.remove(&chain[10..20], B, Tier::Hbm);
    assert_eq!(index.runs(), 3);
    index.clear(B);
    assert_eq!((index.runs(), index.len(), index.held_blocks(B)), (1, 100, 0));
    index.check().unwrap();
}

#[test]
fn decoding_block_by_block_still_makes_long_runs() {
    let mut index = PrefixIndex::new();
    let chains: Vec<Vec<BlockHash>> = (0..8).map(|at| chain_of(at << 32..(at << 32) + 512)).collect();
    for at in 0..512usize {
        for chain in &chains {
            let parent = at.checked_sub(1).map(|before| chain[before]);
            assert_eq!(index.insert(parent, &chain[at..=at], A, Tier::Hbm).added, 1);
        }
    }
    assert!(index.runs() <= 8 * 16, "{} runs for 8 chains", index.runs());
    assert!(chains.iter().all(|chain| blocks_of(&index, chain) == [(0, 512)]));
    index.check().unwrap();
}

#[test]
fn chains_longer_than_a_chunk_match_whole() {
    let (mut index, chain) = (PrefixIndex::new(), chain_of(0..3 * CHUNK_SLOTS as u64 + 7));
    assert_eq!(index.insert(None, &chain, A, Tier::Dram).added, chain.len());
    index.insert(None, &chain[..CHUNK_SLOTS + 1], B, Tier::Hbm);
    assert_eq!(blocks_of(&index, &chain), [(0, chain.len() as u32), (1, CHUNK_SLOTS as u32 + 1)]);
    index.check().unwrap();
    let reversed: Vec<BlockHash> = chain.iter().rev().copied().collect();
    assert_eq!(index.remove(&reversed, A, Tier::Dram), chain.len());
    assert_eq!(index.len(), CHUNK_SLOTS + 1);
    index.check().unwrap();
}

#[test]
fn every_prefix_of_a_run_agrees_to_the_block() {
    let (mut index, chain) = (PrefixIndex::new(), chain_of(0..70));
    index.insert(None, &chain, A, Tier::Hbm);
    for same in 1..=70u64 {
        assert_eq!(blocks_of(&index, &chain[..same as usize]), [(0, same as u32)]);
        let fork = chain_of((0..same).chain(1000..1040));
        assert_eq!(blocks_of(&index, &fork), [(0, same as u32)], "forks after {same}");
    }
}

#[test]
fn a_hash_said_twice_in_one_event_is_one_block() {
    let (mut index, chain) = (PrefixIndex::new(), chain_of(0..3));
    let twice = [chain[0], chain[1], chain[1], chain[2], chain[0]];
    assert_eq!(index.insert(None, &twice, A, Tier::Hbm).added, 3);
    assert_eq!(blocks_of(&index, &chain), [(0, 3)]);
    index.check().unwrap();
    assert_eq!(index.remove(&twice, A, Tier::Hbm), 3);
    assert!(index.is_empty());
    index.check().unwrap();
}

#[test]
fn a_lie_about_a_chain_leaves_the_honest_exact() {
    let chain = chain_of(0..5);
    let lie = [chain[3], chain[0], BlockHash(77), chain[2], chain[1]];
    let honest = Match { instance: A, blocks: 5, by_tier: [5, 0, 0] };
    let mut index = PrefixIndex::new();
    index.insert(None, &lie, B, Tier::Hbm);
    index.insert(None, &chain, A, Tier::Hbm);
    assert_eq!(found(&index, &chain)[0], honest, "the lie first");
    index.check().unwrap();
    let mut index = PrefixIndex::new();
    index.insert(None, &chain, A, Tier::Hbm);
    index.insert(Some(chain[4]), &lie, B, Tier::Hbm);
    index.clear(B);
    assert_eq!(found(&index, &chain)[0], honest, "the lie last");
    index.check().unwrap();
    let mut index = PrefixIndex::new();
    index.insert(None, &chain[3..4], B, Tier::Hbm);
    index.insert(Some(chain[3]), &chain[..1], B, Tier::Hbm);
    index.insert(None, &chain, A, Tier::Hbm);
    assert_eq!(found(&index, &chain)[0], honest, "the lie in pieces that seem to belong together");
    index.check().unwrap();
}

#[test]
fn runs_do_not_join_across_slots_set_aside() {
    let (mut index, chain) = (PrefixIndex::new(), chain_of(0..5));
    index.insert(None, &chain[..1], A, Tier::Hbm);
    index.insert(Some(chain[0]), &chain[1..2], A, Tier::Hbm);
    index.insert(Some(chain[1]), &chain[2..], B, Tier::Hbm);
    index.insert(Some(chain[1]), &chain[2..], A, Tier::Hbm);
    index.insert(None, &chain[..2], B, Tier::Hbm);
    assert_eq!(blocks_of(&index, &chain), [(0, 5), (1, 5)]);
    index.check().unwrap();
}

#[test]
fn all_instances_up_to_the_limit_are_told_in_order() {
    let (mut index, chain) = (PrefixIndex::new(), chain_of(0..4));
    let ids = [65_535u32, 3, 70, 12, 0, 9, 40_000, 8, 5, 6];
    for (at, &id) in ids.iter().enumerate() {
        assert_eq!(index.insert(None, &chain[..1 + at % 4], InstanceId(id), Tier::Hbm).refusal, None);
    }
    let mut sorted = ids;
    sorted.sort_unstable();
    assert_eq!(found(&index, &chain).iter().map(|m| m.instance.0).collect::<Vec<_>>(), sorted);
    assert_eq!((index.holders(chain[0]), index.holders(chain[3]), index.holders(BlockHash(1))), (10, 2, 0));
    let outcome = index.insert(None, &chain, InstanceId(MAX_INSTANCES), Tier::Hbm);
    assert_eq!((outcome.refused, outcome.refusal), (4, Some(Refusal::InstanceOutOfRange)));
    index.check().unwrap();
    for id in ids {
        assert!(index.clear(InstanceId(id)) > 0);
    }
    assert!(index.is_empty());
    index.check().unwrap();
}

#[test]
fn a_full_index_refuses_the_rest_by_count_and_keeps_its_bound() {
    let mut index = PrefixIndex::with_capacity_bytes(2 << 20);
    let (mut added, mut refused) = (0, 0);
    for seed in 0..4_000u64 {
        let chain = chain_of(seed << 32..(seed << 32) + 1 + seed % 40);
        let outcome = index.insert(None, &chain, InstanceId((seed % 7) as u32), Tier::Hbm);
        assert_eq!(outcome.added + outcome.refused, chain.len());
        assert_eq!(outcome.refusal.is_some(), outcome.refused > 0);
        assert!(index.memory_bytes() <= index.capacity_bytes(), "at chain {seed}");
        (added, refused) = (added + outcome.added, refused + outcome.refused);
    }
    assert!(added > 25_000 && refused > 10_000, "{added} added, {refused} refused");
    assert_eq!(index.len(), added);
    index.check().unwrap();
    assert_eq!(
        index.clear(InstanceId(0)),
        added - (1..7).map(|id| index.held_blocks(InstanceId(id))).sum::<usize>()
    );
    let chain = chain_of(9 << 50..(9 << 50) + 30);
    assert_eq!(index.insert(None, &chain, A, Tier::Hbm).added, 30, "room freed is room to use");
}

#[test]
fn an_instance_that_needs_too_large_a_table_is_refused() {
    let (mut index, chain) = (PrefixIndex::with_capacity_bytes(2 << 20), chain_of(0..3));
    let outcome = index.insert(None, &chain, InstanceId(MAX_INSTANCES - 1), Tier::Hbm);
    assert_eq!((outcome.added, outcome.refused, outcome.refusal), (0, 3, Some(Refusal::Full)));
    assert_eq!(index.insert(None, &chain, InstanceId(500), Tier::Hbm).added, 3);
    assert!(index.memory_bytes() <= index.capacity_bytes());
    index.check().unwrap();
}

#[test]
fn churn_does_not_grow_the_index() {
    let mut index = PrefixIndex::new();
    let chains: Vec<Vec<BlockHash>> =
        (0..3_000u64).map(|at| chain_of(at << 32..(at << 32) + 1 + at * 7 % 30)).collect();
    let mut grown = 0;
    for (at, chain) in chains.iter().enumerate() {
        index.insert(None, chain, A, Tier::Hbm);
        if at >= 500 {
            let old = &chains[at - 500];
            let reversed: Vec<BlockHash> = old.iter().rev().copied().collect();
            assert_eq!(index.remove(if at % 2 == 0 { old } else { &reversed }, A, Tier::Hbm), old.len());
        }
        if at == 1_000 {
            grown = index.memory_bytes();
        }
    }
    assert!(index.memory_bytes() <= grown + grown / 10, "{} bytes, then {grown}", index.memory_bytes());
    index.check().unwrap();
}

#[test]
fn a_slower_second_scratch_use_leaves_no_trace() {
    let (mut index, chain) = (PrefixIndex::new(), chain_of(0..9));
    index.insert(None, &chain, A, Tier::Hbm);
    index.insert(None, &chain[..3], B, Tier::Hbm);
    let (mut scratch, mut seen) = (MatchScratch::default(), Vec::new());
    index.matches(&chain, &mut scratch, |m| seen.push((m.instance.0, m.blocks)));
    index.matches(&chain[..2], &mut scratch, |m| seen.push((m.instance.0, m.blocks)));
    index.matches(&chain_of(50..60), &mut scratch, |m| seen.push((m.instance.0, m.blocks)));
    assert_eq!(seen, [(0, 9), (1, 3), (0, 2), (1, 2)]);
}

#[test]
fn the_audit_sees_damage() {
    let chain = chain_of(0..9);
    let fresh = || {
        let mut index = PrefixIndex::new();
        index.insert(None, &chain, A, Tier::Hbm);
        index.insert(None, &chain[..4], B, Tier::Hbm);
        index
    };
    let mut index = fresh();
    index.arena.set_hash(index.find(chain[6]).unwrap(), 1);
    assert!(index.check().is_err(), "a hash overwritten");
    let mut index = fresh();
    index.blocks.remove(chain[2].0, index.find(chain[2]).unwrap());
    assert!(index.check().is_err(), "a block lost from the table");
    let mut index = fresh();
    index.holdings.add_blocks(B, 1);
    assert!(index.check().is_err(), "a block counted twice");
    let mut index = fresh();
    let id = index.owner(index.find(chain[0]).unwrap());
    index.runs.set_holder(id, Holder::new(B));
    assert!(index.check().is_err(), "a holder lost from a run");
    let mut index = fresh();
    let id = index.owner(index.find(chain[0]).unwrap());
    index.arena.own(Extent { start: index.find(chain[8]).unwrap(), len: 1 }, id);
    assert!(index.check().is_err(), "a slot with the wrong owner");
    let mut index = fresh();
    assert!(index.arena.take(3, false).is_some());
    assert!(index.check().is_err(), "a slot lost");
}

/// One step of a random life.
#[derive(Clone, Debug)]
enum Step {
    Insert { chain: usize, from: usize, len: usize, orphan: bool, instance: u32, tier: usize },
    Remove { chain: usize, from: usize, len: usize, order: u8, instance: u32, tier: usize },
    Clear { instance: u32 },
}

const INSTANCES: u32 = 11;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let at = (0usize..24, 0usize..40, 1usize..40, 0..INSTANCES, 0usize..3);
    let insert = (at.clone(), any::<bool>()).prop_map(|((chain, from, len, instance, tier), orphan)| {
        Step::Insert { chain, from, len, orphan, instance, tier: tier & (from & 3) }
    });
    let remove = (at, 0u8..3).prop_map(|((chain, from, len, instance, tier), order)| Step::Remove {
        chain,
        from,
        len: len / 2 + 1,
        order,
        instance,
        tier: tier & (from & 3),
    });
    let clear = (0..INSTANCES).prop_map(|instance| Step::Clear { instance });
    proptest::collection::vec(prop_oneof![8 => insert, 6 => remove, 1 => clear], 1..60)
}

fn piece(chain: &[BlockHash], from: usize, len: usize) -> (usize, &[BlockHash]) {
    let from = from % chain.len();
    (from, &chain[from..chain.len().min(from + len)])
}

fn apply(step: &Step, chains: &[Vec<BlockHash>], index: &mut PrefixIndex, reference: &mut Reference) {
    match *step {
        Step::Insert { chain, from, len, orphan, instance, tier } => {
            let chain = &chains[chain % chains.len()];
            let (from, hashes) = piece(chain, if orphan { from } else { 0 }, len);
            let parent = from.checked_sub(1).map(|before| chain[before]);
            let (instance, tier) = (InstanceId(instance), Tier::LOCAL[tier]);
            let lacks = parent.is_some_and(|hash| !reference.tiers.contains_key(&(hash, instance)));
            let outcome = index.insert(parent, hashes, instance, tier);
            assert_eq!((outcome.added, outcome.orphan), (reference.insert(hashes, instance, tier), lacks));
            assert_eq!((outcome.refused, outcome.refusal), (0, None));
        }
        Step::Remove { chain, from, len, order, instance, tier } => {
            let mut hashes = piece(&chains[chain % chains.len()], from, len).1.to_vec();
            match order {
                0 => hashes.reverse(),
                1 => hashes.sort_unstable(),
                _ => {}
            }
            let (instance, tier) = (InstanceId(instance), Tier::LOCAL[tier]);
            assert_eq!(index.remove(&hashes, instance, tier), reference.remove(&hashes, instance, tier));
        }
        Step::Clear { instance } => {
            let instance = InstanceId(instance);
            assert_eq!(index.clear(instance), reference.clear(instance));
        }
    }
}

fn assert_same(index: &PrefixIndex, reference: &Reference, chains: &[Vec<BlockHash>]) {
    index.check().unwrap();
    assert_eq!(index.len(), reference.blocks());
    for id in (0..INSTANCES).map(InstanceId) {
        assert_eq!(index.held_blocks(id), reference.held(id));
    }
    for chain in chains {
        assert_eq!(found(index, chain), reference.matches(chain, INSTANCES));
        assert_eq!(index.holders(chain[chain.len() / 2]), reference.holders(chain[chain.len() / 2]));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_life_matches_the_naive_index(seed in any::<u64>(), chains in 1usize..24, steps in steps()) {
        let chains = forest(seed, chains, 24);
        let (mut index, mut reference) = (PrefixIndex::new(), Reference::default());
        for step in &steps {
            apply(step, &chains, &mut index, &mut reference);
            assert_same(&index, &reference, &chains);
        }
    }

    #[test]
    fn equal_lives_give_equal_indexes(seed in any::<u64>(), steps in steps()) {
        let chains = forest(seed, 12, 24);
        let live = || {
            let (mut index, mut reference) = (PrefixIndex::new(), Reference::default());
            steps.iter().for_each(|step| apply(step, &chains, &mut index, &mut reference));
            alloc::format!("{index:?}")
        };
        prop_assert!(live() == live());
    }

    #[test]
    fn a_small_bound_never_breaks_the_answers(seed in any::<u64>(), steps in steps()) {
        let chains = forest(seed, 12, 900);
        let (mut index, mut reference) = (PrefixIndex::with_capacity_bytes(600 << 10), Reference::default());
        for step in &steps {
            let Step::Insert { chain, instance, tier, .. } = *step else {
                apply(step, &chains, &mut index, &mut reference);
                continue;
            };
            let (hashes, instance) = (&chains[chain % chains.len()], InstanceId(instance));
            let outcome = index.insert(None, hashes, instance, Tier::LOCAL[tier]);
            let taken = &hashes[..hashes.len() - outcome.refused];
            prop_assert_eq!(outcome.added, reference.insert(taken, instance, Tier::LOCAL[tier]));
            prop_assert!(index.memory_bytes() <= index.capacity_bytes());
        }
        assert_same(&index, &reference, &chains);
    }
}
