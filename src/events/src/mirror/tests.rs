use super::*;
use crate::model::{BlockExtra, EngineHash};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const SEED: u64 = 11;
const BLOCK_TOKENS: u32 = 2;

fn config() -> MirrorConfig {
    MirrorConfig { chain_seed: SEED, block_tokens: BLOCK_TOKENS, ..MirrorConfig::default() }
}

fn root_of(salt: &str) -> BlockKey {
    ChainHasher::new(SEED, salt.as_bytes()).parent()
}

/// A mirror whose roots are those of the first text among the extra keys, or of the adapter.
fn mirror(config: MirrorConfig) -> Mirror {
    Mirror::new(
        config,
        Box::new(|lineage| match lineage.extra {
            [] => Some(root_of(lineage.lora.unwrap_or(""))),
            [ExtraKey::Text(salt)] => Some(root_of(salt)),
            _ => None,
        }),
    )
}

/// A prompt's blocks, each one symbol, under a salt.
type Prefix = (u8, Vec<u8>);

fn salt_word(salt: u8) -> String {
    if salt == 0 { String::new() } else { format!("salt {salt}") }
}

/// The engine's name of a block: any value that depends on all tokens before it will do.
fn name_of((salt, blocks): &Prefix) -> EngineHash {
    let bytes: Vec<u8> = [*salt].into_iter().chain(blocks.iter().copied()).collect();
    EngineHash::Word(xxhash_rust::xxh3::xxh3_64(&bytes))
}

fn tokens_of(symbol: u8) -> [u32; 2] {
    [u32::from(symbol), 100]
}

/// Our name of the block: our own chain, from scratch.
fn ours((salt, blocks): &Prefix) -> BlockHash {
    let mut hasher = ChainHasher::resume(SEED, root_of(&salt_word(*salt)));
    blocks.iter().map(|symbol| hasher.push_tokens(&tokens_of(*symbol)).short()).last().unwrap()
}

/// The blocks `from..` of a prefix, as the engine announces them.
fn stored(prefix: &Prefix, from: usize, tier: Tier) -> Change {
    let (salt, blocks) = prefix;
    let until = |length: usize| (*salt, blocks[..length].to_vec());
    let key = vec![ExtraKey::Text(salt_word(*salt))];
    let salted = from == 0 && *salt > 0;
    Change::Stored(StoredBlocks {
        hashes: (from + 1..=blocks.len()).map(|length| name_of(&until(length))).collect(),
        parent: (from > 0).then(|| name_of(&until(from))),
        tokens: blocks[from..].iter().flat_map(|symbol| tokens_of(*symbol)).collect(),
        block_tokens: BLOCK_TOKENS,
        medium: Some(Medium::at(tier)),
        extra: salted.then_some(BlockExtra { block: 0, keys: key }).into_iter().collect(),
        ..StoredBlocks::default()
    })
}

fn removed(hashes: Vec<EngineHash>, tier: Tier) -> Change {
    Change::Removed(RemovedBlocks { hashes, medium: Some(Medium::at(tier)), group: None })
}

/// An action in the simulated engine.
#[derive(Clone, Debug)]
enum Act {
    /// A prompt is computed: blocks that are there are announced again only if `again`.
    Store {
        prefix: Prefix,
        tier: Tier,
        again: bool,
    },
    /// One of the copies without children goes.
    Evict {
        which: prop::sample::Index,
    },
    Clear,
}

fn any_act() -> impl Strategy<Value = Act> {
    let prefix = (0u8..3, proptest::collection::vec(0u8..3, 1..6));
    let tier = prop_oneof![4 => Just(Tier::Hbm), 1 => Just(Tier::Dram), 1 => Just(Tier::Ssd)];
    prop_oneof![
        6 => (prefix, tier, any::<bool>()).prop_map(|(prefix, tier, again)| Act::Store { prefix, tier, again }),
        4 => any::<prop::sample::Index>().prop_map(|which| Act::Evict { which }),
    ]
}

/// The engine, naively: copies by block and tier.
#[derive(Default)]
struct Engine {
    copies: BTreeMap<(Prefix, Tier), usize>,
}

impl Engine {
    fn act(&mut self, act: &Act) -> Vec<Change> {
        match act {
            Act::Store { prefix, tier, again } => self.store(prefix, *tier, *again),
            Act::Evict { which } => self.evict(which).into_iter().collect(),
            Act::Clear => {
                self.copies.clear();
                vec![Change::Cleared(None)]
            }
        }
    }

    fn store(&mut self, (salt, blocks): &Prefix, tier: Tier, again: bool) -> Vec<Change> {
        let until = |length: usize| (*salt, blocks[..length].to_vec());
        let there = |length: &usize| self.copies.contains_key(&(until(*length), tier));
        // A prefix is there or it is not: nothing with children is evicted.
        let from = if again { 0 } else { (1..=blocks.len()).take_while(there).count() };
        if from == blocks.len() {
            return vec![];
        }
        for length in from + 1..=blocks.len() {
            *self.copies.entry((until(length), tier)).or_default() += 1;
        }
        vec![stored(&until(blocks.len()), from, tier)]
    }

    fn evict(&mut self, which: &prop::sample::Index) -> Option<Change> {
        let has_child = |prefix: &Prefix| {
            let longer = |other: &Prefix| other.0 == prefix.0 && other.1.len() > prefix.1.len();
            self.copies.keys().any(|(other, _)| longer(other) && other.1.starts_with(&prefix.1))
        };
        // Of several copies one may go at any time; the last only when nothing is below it.
        let can_go: Vec<_> = self
            .copies
            .iter()
            .filter(|((prefix, _), n)| **n > 1 || !has_child(prefix))
            .map(|(at, _)| at.clone())
            .collect();
        if can_go.is_empty() {
            return None;
        }
        let (prefix, tier) = can_go[which.index(can_go.len())].clone();
        let copies = self.copies.get_mut(&(prefix.clone(), tier)).unwrap();
        *copies -= 1;
        if *copies == 0 {
            self.copies.remove(&(prefix.clone(), tier));
        }
        Some(removed(vec![name_of(&prefix)], tier))
    }

    fn truth(&self) -> BTreeSet<(BlockHash, Tier)> {
        self.copies.keys().map(|(prefix, tier)| (ours(prefix), *tier)).collect()
    }
}

/// A naive index. It asserts that no block is reported twice, and none is removed that was not reported.
#[derive(Default)]
struct Index {
    held: BTreeSet<(BlockHash, Tier)>,
    parents: BTreeMap<BlockHash, Option<BlockHash>>,
}

impl Index {
    fn take(&mut self, change: CacheChange) {
        match change {
            CacheChange::Stored { parent, hashes, tier } => {
                let mut before = parent;
                for hash in hashes {
                    assert!(self.held.insert((hash, tier)), "{hash:?} is told twice");
                    assert_eq!(*self.parents.entry(hash).or_insert(before), before, "a block has one parent");
                    before = Some(hash);
                }
            }
            CacheChange::Removed { hashes, tier } => {
                for hash in hashes {
                    assert!(self.held.remove(&(hash, tier)), "{hash:?} is taken back and was not told");
                }
            }
            CacheChange::Cleared => self.held.clear(),
        }
    }
}

fn feed(mirror: &mut Mirror, index: &mut Index, changes: &[Change]) {
    for change in changes {
        let mut out = Vec::new();
        mirror.apply_event(&Event::from(change.clone()), &mut out);
        out.into_iter().for_each(|change| index.take(change));
        mirror.check().unwrap();
    }
}

fn snapshot_of(mirror: &Mirror) -> BTreeSet<(BlockHash, Tier)> {
    let mut index = Index::default();
    mirror.snapshot().into_iter().for_each(|change| index.take(change));
    index.held
}

/// Whether the order of two events matters to what is there in the end, parents aside.
fn conflict(a: &Change, b: &Change) -> bool {
    let touched = |change: &Change| -> Vec<EngineHash> {
        match change {
            Change::Stored(stored) => stored.hashes.iter().chain(&stored.parent).copied().collect(),
            Change::Removed(removed) => removed.hashes.clone(),
            _ => vec![],
        }
    };
    if let (Change::Stored(_), Change::Stored(_)) = (a, b) {
        return false;
    }
    let of_b = touched(b);
    touched(a).iter().any(|hash| of_b.contains(hash))
}

proptest! {
    #[test]
    fn without_loss_the_index_is_the_engines_cache(
        acts in proptest::collection::vec(prop_oneof![30 => any_act(), 1 => Just(Act::Clear)], 0..60)
    ) {
        let (mut engine, mut mirror, mut index) = (Engine::default(), mirror(config()), Index::default());
        for act in &acts {
            let changes = engine.act(act);
            feed(&mut mirror, &mut index, &changes);
            prop_assert_eq!(&index.held, &engine.truth());
        }
        prop_assert_eq!(snapshot_of(&mirror), engine.truth());
        prop_assert_eq!(mirror.parked.blocks(), 0);
    }

    #[test]
    fn children_before_their_parents_end_in_the_same_cache(
        acts in proptest::collection::vec(any_act(), 0..40),
        swaps in proptest::collection::vec(any::<prop::sample::Index>(), 0..400),
    ) {
        let mut engine = Engine::default();
        let mut changes: Vec<Change> = acts.iter().flat_map(|act| engine.act(act)).collect();
        let swaps = if changes.len() > 1 { &swaps[..] } else { &[] };
        for swap in swaps {
            let at = swap.index(changes.len() - 1);
            if !conflict(&changes[at], &changes[at + 1]) {
                changes.swap(at, at + 1);
            }
        }
        let (mut mirror, mut index) = (mirror(config()), Index::default());
        feed(&mut mirror, &mut index, &changes);
        prop_assert_eq!(&index.held, &engine.truth());
        prop_assert_eq!(mirror.parked.blocks(), 0);
    }

    #[test]
    fn lost_announcements_hide_blocks_and_invent_none(
        acts in proptest::collection::vec(any_act(), 0..50), losses in proptest::collection::vec(any::<bool>(), 50),
    ) {
        let (mut engine, mut mirror, mut index) = (Engine::default(), mirror(config()), Index::default());
        for (act, lost) in acts.iter().zip(losses) {
            let mut changes = engine.act(act);
            changes.retain(|change| !(lost && matches!(change, Change::Stored(_))));
            feed(&mut mirror, &mut index, &changes);
            prop_assert!(index.held.is_subset(&engine.truth()));
        }
    }

    #[test]
    fn whatever_was_lost_forgetting_and_hearing_all_again_is_exact(
        acts in proptest::collection::vec(any_act(), 0..50), losses in proptest::collection::vec(0u8..20, 50),
    ) {
        let mut engine = Engine::default();
        let all: Vec<Change> = acts.iter().flat_map(|act| engine.act(act)).collect();
        let (mut mirror, mut index) = (mirror(config()), Index::default());
        for (change, luck) in all.iter().zip(losses.iter().cycle()) {
            if *luck > 0 {
                feed(&mut mirror, &mut index, std::slice::from_ref(change));
            }
        }
        let mut out = Vec::new();
        mirror.forget(&mut out);
        out.into_iter().for_each(|change| index.take(change));
        prop_assert!(index.held.is_empty());
        feed(&mut mirror, &mut index, &all);
        prop_assert_eq!(&index.held, &engine.truth());
    }

    #[test]
    fn bounds_hold_whatever_is_told(
        acts in proptest::collection::vec(any_act(), 0..60), losses in proptest::collection::vec(any::<bool>(), 60),
        max_blocks in 1usize..8, max_parked_blocks in 0usize..6,
    ) {
        let small = MirrorConfig { max_blocks, max_parked_blocks, ..config() };
        let (mut engine, mut mirror, mut index) = (Engine::default(), mirror(small), Index::default());
        for (act, lost) in acts.iter().zip(losses) {
            let changes = engine.act(act);
            if !lost {
                feed(&mut mirror, &mut index, &changes);
            }
            prop_assert!(mirror.entries.len() <= max_blocks);
            prop_assert!(mirror.parked.blocks() <= max_parked_blocks);
            prop_assert_eq!(&snapshot_of(&mirror), &index.held);
        }
    }
}

fn prompt(salt: u8, blocks: &[u8]) -> Prefix {
    (salt, blocks.to_vec())
}

fn changes(mirror: &mut Mirror, change: Change) -> Vec<CacheChange> {
    let mut changes = Vec::new();
    mirror.apply_event(&Event::from(change), &mut changes);
    changes
}

#[test]
fn one_event_is_one_change_below_its_parent() {
    let mut mirror = mirror(config());
    let all: Vec<BlockHash> = (1..=3).map(|n| ours(&prompt(0, &[7, 8, 9][..n]))).collect();
    let first = changes(&mut mirror, stored(&prompt(0, &[7, 8]), 0, Tier::Hbm));
    assert_eq!(first, [CacheChange::Stored { parent: None, hashes: all[..2].to_vec(), tier: Tier::Hbm }]);
    let second = changes(&mut mirror, stored(&prompt(0, &[7, 8, 9]), 2, Tier::Hbm));
    assert_eq!(
        second,
        [CacheChange::Stored { parent: Some(all[1]), hashes: all[2..].to_vec(), tier: Tier::Hbm }]
    );
}

#[test]
fn a_copy_told_by_name_alone_counts_where_the_name_is_known() {
    let mut mirror = mirror(config());
    changes(&mut mirror, stored(&prompt(0, &[1, 2]), 0, Tier::Hbm));
    let names = [&[1][..], &[1, 2], &[9]].map(|blocks| name_of(&prompt(0, blocks)));
    let bare = StoredBlocks { hashes: names.to_vec(), medium: Some(Medium::Cpu), ..StoredBlocks::default() };
    let hashes = vec![ours(&prompt(0, &[1])), ours(&prompt(0, &[1, 2]))];
    let copied = changes(&mut mirror, Change::Stored(bare));
    assert_eq!(copied, [CacheChange::Stored { parent: None, hashes: hashes.clone(), tier: Tier::Dram }]);
    let left = changes(&mut mirror, Change::Cleared(Some(Medium::Gpu)));
    let mut sorted = hashes;
    sorted.sort_unstable();
    assert_eq!(left, [CacheChange::Removed { hashes: sorted, tier: Tier::Hbm }]);
    assert_eq!(changes(&mut mirror, Change::Cleared(Some(Medium::Cpu))), [CacheChange::Cleared]);
}

#[test]
fn pictures_hide_what_is_behind_them() {
    let mut mirror = mirror(config());
    let Change::Stored(mut event) = stored(&prompt(0, &[1, 2, 3]), 0, Tier::Hbm) else { unreachable!() };
    event.extra = vec![BlockExtra { block: 1, keys: vec![ExtraKey::Text("a picture".into())] }];
    let hashes = vec![ours(&prompt(0, &[1]))];
    let first = changes(&mut mirror, Change::Stored(event.clone()));
    assert_eq!(first, [CacheChange::Stored { parent: None, hashes, tier: Tier::Hbm }]);
    assert!(changes(&mut mirror, stored(&prompt(0, &[1, 2, 3, 4]), 3, Tier::Hbm)).is_empty());
    assert_eq!(mirror.entries.len(), 4);
    assert!(changes(&mut mirror, removed(event.hashes[1..].to_vec(), Tier::Hbm)).is_empty());
    assert_eq!(mirror.entries.len(), 2, "they were followed all the same");
}

#[test]
fn an_adapters_name_among_the_keys_of_every_block_is_the_adapter() {
    let mut mirror = mirror(config());
    let Change::Stored(mut event) = stored(&prompt(0, &[1, 2]), 0, Tier::Hbm) else { unreachable!() };
    event.lora = Some("poet".into());
    let key = ExtraKey::Text("poet".into());
    event.extra = (0..2).map(|block| BlockExtra { block, keys: vec![key.clone()] }).collect();
    let mut chain = ChainHasher::new(SEED, b"poet");
    let hashes: Vec<BlockHash> = [1, 2].map(|symbol| chain.push_tokens(&tokens_of(symbol)).short()).to_vec();
    assert_eq!(
        changes(&mut mirror, Change::Stored(event)),
        [CacheChange::Stored { parent: None, hashes, tier: Tier::Hbm }]
    );
}

#[test]
fn what_does_not_count_is_passed_over() {
    let mut mirror = mirror(config());
    let Change::Stored(event) = stored(&prompt(0, &[1, 2]), 0, Tier::Hbm) else { unreachable!() };
    let cases = [
        StoredBlocks { group: Some(1), ..event.clone() },
        StoredBlocks { attention: Some("sliding_window".into()), ..event.clone() },
        StoredBlocks { medium: Some(Medium::Remote), ..event.clone() },
        StoredBlocks { medium: Some(Medium::Other("tape".into())), ..event.clone() },
        StoredBlocks { block_tokens: 4, ..event.clone() },
        StoredBlocks { tokens: vec![1, 2, 3], ..event.clone() },
        StoredBlocks { base_block: Some(3), ..event.clone() },
    ];
    for case in cases {
        assert_eq!(changes(&mut mirror, Change::Stored(case)), []);
    }
    assert_eq!(changes(&mut mirror, Change::Unknown("dreamt".into())), []);
    assert_eq!((mirror.entries.len(), mirror.parked.blocks()), (0, 0));
    let gone = RemovedBlocks { hashes: event.hashes, medium: None, group: Some(1) };
    assert_eq!(changes(&mut mirror, Change::Removed(gone)), []);
}

#[test]
fn a_plain_mirror_leaves_salted_chains_alone() {
    let mut mirror = Mirror::plain(config(), root_of(""));
    assert_eq!(changes(&mut mirror, stored(&prompt(1, &[1]), 0, Tier::Hbm)), []);
    assert_eq!(changes(&mut mirror, stored(&prompt(0, &[1]), 0, Tier::Hbm)).len(), 1);
}

#[test]
fn of_too_many_orphans_the_oldest_make_room() {
    let mut mirror = mirror(MirrorConfig { max_parked_blocks: 2, ..config() });
    for last in 1..=3 {
        changes(&mut mirror, stored(&prompt(0, &[0, last]), 1, Tier::Hbm));
    }
    assert_eq!(mirror.parked.blocks(), 2);
    let joined = changes(&mut mirror, stored(&prompt(0, &[0]), 0, Tier::Hbm));
    let reported: usize = joined
        .iter()
        .map(|c| if let CacheChange::Stored { hashes, .. } = c { hashes.len() } else { 0 })
        .sum();
    assert_eq!((reported, mirror.parked.blocks()), (3, 0));
    changes(&mut mirror, stored(&prompt(0, &[5, 6, 7, 8]), 1, Tier::Hbm));
    assert_eq!(mirror.parked.blocks(), 0, "an event larger than the room is not parked at all");
}
