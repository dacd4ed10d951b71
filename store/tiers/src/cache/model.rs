//! Random histories against a naive memory of what every block must hold. Under every eviction, damage and refusal by
//! the disk, no wrong byte is readable, no owner waits for ever, and at rest nothing is left over.

use super::testing::{BLOCK_BYTES, Bench, chain, content, owner};
use super::{BlockReadError, HoldRefusal, Misuse, Notice};
use crate::file::FileTier;
use baton_store::{Eviction, Offload, StoreConfig};
use baton_types::{BlockKey, Tier};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// One action, chosen before it is known what it will meet.
#[derive(Clone, Debug)]
enum Op {
    Open { owner: u64, path: Vec<u64>, room: u32 },
    Fill { owner: u64, blocks: u32 },
    SealBlindly { owner: u64, upto: u32 },
    Grow { owner: u64, room: u32 },
    Close { owner: u64 },
    Adopt { owner: u64, branches: Vec<u64>, honest: bool },
    Read { owner: u64, path: Vec<u64> },
    ReadBlocks { path: Vec<u64> },
    Serve { path: Vec<u64> },
    Poll,
    Quiet,
    DamageDram { pick: usize },
    SickDisk { fail_reads: u32, fail_writes: u32, lose_writes: u32, flip_reads: u32 },
    Restart,
    Clear,
}

/// The model's view of an owner.
#[derive(Debug)]
struct OwnerKnowledge {
    path: Vec<u64>,
    chain: Vec<BlockKey>,
    slots: Vec<u32>,
    /// Leading blocks filled or readable; only then may it fill more.
    filled: u32,
    waiting: bool,
    reads_only: bool,
}

struct World {
    bench: Bench,
    owners: BTreeMap<u64, OwnerKnowledge>,
    was_damaged: bool,
    /// Whether the disk said that it had written what it had not.
    has_lied: bool,
    seen: BTreeMap<&'static str, u64>,
}

impl World {
    fn new(config: StoreConfig) -> Self {
        let bench = Bench::with(config);
        Self { bench, owners: BTreeMap::new(), was_damaged: false, has_lied: false, seen: BTreeMap::new() }
    }

    fn count(&mut self, name: &'static str, times: u64) {
        *self.seen.entry(name).or_default() += times;
    }

    fn run(&mut self, op: &Op) {
        match op {
            Op::Open { owner, path, room } => self.open(*owner, path, *room),
            Op::Fill { owner, blocks } => self.fill(*owner, *blocks),
            Op::SealBlindly { owner, upto } => self.seal_blindly(*owner, *upto),
            Op::Grow { owner, room } => self.grow(*owner, *room),
            Op::Close { owner } => self.close(*owner),
            Op::Adopt { owner, branches, honest } => self.adopt(*owner, branches, *honest),
            Op::Read { owner, path } => self.read(*owner, path),
            Op::ReadBlocks { path } => self.read_blocks(&chain(path)),
            Op::Serve { path } => {
                self.open(77, path, 0);
                self.quiet();
                self.fill(77, 99);
                self.close(77);
            }
            Op::Poll => self.poll(),
            Op::Quiet => self.quiet(),
            Op::DamageDram { pick } => {
                let damaged = self.bench.damage_dram(*pick);
                self.was_damaged |= damaged;
                self.count("damaged", u64::from(damaged));
            }
            Op::SickDisk { fail_reads, fail_writes, lose_writes, flip_reads } => {
                let mut state = self.bench.disk.state.lock().unwrap();
                (state.fail_reads, state.fail_writes) = (*fail_reads, *fail_writes);
                (state.lose_writes, state.flip_reads) = (*lose_writes, *flip_reads);
                self.was_damaged |= fail_reads + fail_writes + lose_writes + flip_reads > 0;
                self.has_lied |= *lose_writes > 0;
            }
            Op::Restart => self.restart(),
            Op::Clear => {
                self.bench.cache.clear();
                self.owners.clear();
            }
        }
        self.bench.audit();
        self.audit_owners();
    }

    /// The node ends and starts again: owners are gone, and of the blocks those remain that were
    /// readable from flash with all their ancestors.
    fn restart(&mut self) {
        let mut state = self.bench.disk.state.lock().unwrap();
        (state.fail_reads, state.fail_writes, state.lose_writes, state.flip_reads) = (0, 0, 0, 0);
        drop(state);
        self.owners.clear();
        let before = self.lasting();
        self.bench.restart();
        let after = self.lasting();
        assert!(self.has_lied || before.is_subset(&after), "{before:?} {after:?}");
        let stats = self.bench.cache.stats();
        assert_eq!(stats.store.tiers[2].used_blocks, after.len() as u64);
        assert_eq!(stats.store.blocks, after.len() as u64);
        self.count("came back", after.len() as u64);
    }

    /// Blocks on flash whose ancestors are there, too.
    fn lasting(&self) -> BTreeSet<BlockKey> {
        let blocks = self.bench.cache.store.snapshot().blocks;
        let on_flash = blocks.iter().filter(|block| block.readable_in.contains(&Tier::Ssd));
        let parents: BTreeMap<_, _> = on_flash.map(|block| (block.key, block.parent)).collect();
        let is_whole = |mut key: BlockKey| loop {
            match parents.get(&key) {
                Some(Some(parent)) => key = *parent,
                Some(None) => return true,
                None => return false,
            }
        };
        parents.keys().copied().filter(|&key| is_whole(key)).collect()
    }

    fn open(&mut self, number: u64, path: &[u64], room: u32) {
        let chain = chain(path);
        match self.bench.cache.open(owner(number), &chain, room) {
            Ok(hold) => {
                assert!(!self.owners.contains_key(&number));
                assert_eq!(hold.slots.len(), chain.len() + room as usize);
                let distinct: BTreeSet<_> = hold.slots.iter().collect();
                assert_eq!(distinct.len(), hold.slots.len());
                hold.slots[chain.len()..].iter().for_each(|&slot| self.bench.scribble(slot));
                let known = OwnerKnowledge {
                    path: path.to_vec(),
                    chain,
                    slots: hold.slots,
                    filled: hold.readable_blocks,
                    waiting: hold.waiting,
                    reads_only: false,
                };
                self.count("waited", u64::from(known.waiting));
                self.owners.insert(number, known);
                self.damage_at_random(number);
            }
            Err(HoldRefusal::AlreadyOpen) => assert!(self.owners.contains_key(&number)),
            Err(HoldRefusal::NoRoom { needed_blocks, available_blocks }) => {
                assert!(needed_blocks > available_blocks);
                self.count("refused", 1);
            }
            Err(other) => panic!("{other}"),
        }
    }

    /// An owner that may compute writes nonsense first: the slots must be its alone.
    fn damage_at_random(&mut self, number: u64) {
        let known = &self.owners[&number];
        if known.waiting {
            return;
        }
        for &slot in &known.slots[known.filled as usize..known.chain.len()] {
            self.bench.scribble(slot);
        }
    }

    fn fill(&mut self, number: u64, blocks: u32) {
        let Some(known) = self.owners.get_mut(&number).filter(|k| !k.waiting && !k.reads_only) else {
            return;
        };
        let upto = known.filled.saturating_add(blocks).min(known.chain.len() as u32);
        for at in known.filled..upto {
            self.bench.fill(known.slots[at as usize], known.chain[at as usize]);
        }
        known.filled = upto;
        self.bench.cache.seal(owner(number), upto, &mut self.bench.memory).expect("it filled them");
    }

    /// A careless owner must not make readable what is not its own to fill.
    fn seal_blindly(&mut self, number: u64, upto: u32) {
        match self.owners.get(&number) {
            Some(known) if known.waiting => {
                let upto = upto.min(known.chain.len() as u32);
                let readable = self.bench.cache.store.readable_blocks(owner(number));
                let sealed = self.bench.cache.seal(owner(number), upto, &mut self.bench.memory);
                let refused = Err(Misuse::NotYours { position: readable });
                assert_eq!(sealed, if upto > readable { refused } else { Ok(()) });
                self.count("not yours", u64::from(sealed.is_err()));
            }
            Some(known) if !known.reads_only => {
                let more = upto.saturating_sub(known.filled);
                self.fill(number, more);
            }
            _ => {
                let sealed = self.bench.cache.seal(owner(number), upto, &mut self.bench.memory);
                assert_eq!(sealed, Err(Misuse::NotOpen));
            }
        }
    }

    fn grow(&mut self, number: u64, room: u32) {
        match self.bench.cache.grow(owner(number), room) {
            Ok(slots) => {
                slots.iter().for_each(|&slot| self.bench.scribble(slot));
                self.owners.get_mut(&number).expect("only holds grow").slots.extend(slots);
                self.count("grown", 1);
            }
            Err(HoldRefusal::NotOpen) => assert!(self.owners.get(&number).is_none_or(|k| k.reads_only)),
            Err(other) => assert!(matches!(other, HoldRefusal::NoRoom { .. })),
        }
    }

    fn close(&mut self, number: u64) {
        let was_open = self.owners.remove(&number).is_some();
        assert_eq!(self.bench.cache.close(owner(number)), was_open);
    }

    fn adopt(&mut self, number: u64, branches: &[u64], honest: bool) {
        let Some(known) = self.owners.remove(&number) else { return };
        let own = known.chain.len();
        let room = known.slots.len().saturating_sub(own);
        let path: Vec<u64> = known.path.iter().chain(branches.iter().take(room)).copied().collect();
        let keys = chain(&path);
        let mut slots = known.slots.get(..keys.len()).unwrap_or(&[]).to_vec();
        for at in own..slots.len() {
            self.bench.fill(slots[at], keys[at]);
        }
        if !honest {
            slots.reverse();
        }
        let honest = honest || slots.len() < 2;
        let adopted = self.bench.cache.adopt(owner(number), &keys, &slots, &mut self.bench.memory);
        match adopted {
            Ok(blocks) => {
                assert!(blocks as usize <= keys.len() - own);
                let upto = own + blocks as usize;
                let hits = self.bench.cache.lookup(&keys[..upto]);
                assert!(hits.hbm as usize == upto || blocks == 0, "adopted blocks are readable");
                self.count("adopted", u64::from(blocks));
            }
            Err(error) => {
                let why = known.reads_only || (known.filled as usize) < own || !honest;
                assert!(why, "{error} {known:?}");
                self.count("adoption refused", 1);
            }
        }
        assert!(!self.bench.cache.close(owner(number)), "adoption ends the hold");
    }

    fn read(&mut self, number: u64, path: &[u64]) {
        let chain = chain(path);
        match self.bench.cache.read_for_peer(owner(number), &chain) {
            Ok(readable) => {
                let chain = chain[..readable as usize].to_vec();
                self.read_blocks(&chain);
                let path = path.to_vec();
                let known = OwnerKnowledge {
                    path,
                    chain,
                    slots: vec![],
                    filled: 0,
                    waiting: false,
                    reads_only: true,
                };
                assert!(self.owners.insert(number, known).is_none());
            }
            Err(refused) => {
                assert_eq!(refused, HoldRefusal::AlreadyOpen);
                assert!(self.owners.contains_key(&number));
            }
        }
    }

    fn read_blocks(&mut self, keys: &[BlockKey]) {
        for &key in keys {
            let mut out = [0; BLOCK_BYTES];
            let readable = self.bench.cache.lookup(keys).total as usize;
            match self.bench.cache.read_block(key, &self.bench.memory, &mut out) {
                Ok(checksum) => {
                    assert_eq!(out, content(key));
                    assert_eq!(checksum, crate::block_checksum(key, &out));
                    self.count("read", 1);
                }
                Err(BlockReadError::Unreadable) => {
                    assert!(self.was_damaged, "an undamaged block must be readable");
                    self.count("unreadable", 1);
                }
                Err(other) => {
                    assert_eq!(other, BlockReadError::Absent);
                    assert!(keys[..readable].iter().all(|&there| there != key));
                }
            }
        }
    }

    fn poll(&mut self) {
        let notices = self.bench.cache.poll(&mut self.bench.memory);
        self.on_notices(&notices);
    }

    fn quiet(&mut self) {
        let notices = self.bench.quiet();
        self.on_notices(&notices);
    }

    fn on_notices(&mut self, notices: &[Notice]) {
        for notice in notices {
            let Notice::Ready { owner: baton_types::RequestId(number), readable_blocks } = *notice else {
                continue;
            };
            let known = self.owners.get_mut(&number).expect("only holds become ready");
            assert!(known.waiting, "ready once");
            assert!(readable_blocks >= known.filled);
            (known.waiting, known.filled) = (false, readable_blocks);
            self.count("came up", u64::from(readable_blocks));
            self.damage_at_random(number);
        }
    }

    /// Asserts that the slots given to an owner stay where they are.
    fn audit_owners(&self) {
        for known in self.owners.values().filter(|known| !known.reads_only) {
            for (&key, &slot) in known.chain.iter().zip(&known.slots).take(known.filled as usize) {
                assert_eq!(self.bench.cache.address(key), Some(slot), "a pinned block moved");
            }
        }
    }

    /// With a healthy disk, every owner comes to its end, without a cycle of waiting owners.
    fn finish(&mut self) {
        self.run(&Op::SickDisk { fail_reads: 0, fail_writes: 0, lose_writes: 0, flip_reads: 0 });
        for _ in 0..self.owners.len() + 1 {
            self.quiet();
            let numbers: Vec<u64> = self.owners.keys().copied().collect();
            numbers.iter().for_each(|&number| self.fill(number, u32::MAX));
        }
        assert!(self.owners.values().all(|known| !known.waiting), "{:?}", self.owners);
        for number in self.owners.keys().copied().collect::<Vec<_>>() {
            self.close(number);
        }
        self.quiet();
        let cache = &self.bench.cache;
        let stats = cache.stats();
        assert_eq!(
            (
                stats.store.owners,
                cache.waiting.len(),
                cache.copies.len(),
                cache.file.as_ref().map_or(0, FileTier::jobs)
            ),
            (0, 0, 0, 0)
        );
        for tier in stats.store.tiers {
            assert_eq!((tier.pinned_blocks, tier.reserved_blocks), (0, 0));
            assert!(tier.used_blocks <= tier.capacity_blocks);
        }
    }
}

fn path() -> impl Strategy<Value = Vec<u64>> {
    let later = proptest::collection::vec(prop_oneof![5 => Just(0u64), 1 => Just(1)], 0..5);
    (0u64..4, later).prop_map(|(first, mut later)| {
        later.insert(0, first);
        later
    })
}

fn op() -> impl Strategy<Value = Op> {
    let owner = || 0u64..4;
    let some = || 0u32..3;
    let branches = proptest::collection::vec(0u64..2, 0..4);
    prop_oneof![
        12 => (owner(), path(), 0u32..3).prop_map(|(owner, path, room)| Op::Open { owner, path, room }),
        12 => (owner(), 1u32..7).prop_map(|(owner, blocks)| Op::Fill { owner, blocks }),
        6 => (owner(), 1u32..9).prop_map(|(owner, upto)| Op::SealBlindly { owner, upto }),
        3 => (owner(), 0u32..5).prop_map(|(owner, room)| Op::Grow { owner, room }),
        8 => owner().prop_map(|owner| Op::Close { owner }),
        6 => (owner(), branches, proptest::bool::weighted(0.9))
            .prop_map(|(owner, branches, honest)| Op::Adopt { owner, branches, honest }),
        4 => (owner(), path()).prop_map(|(owner, path)| Op::Read { owner, path }),
        4 => path().prop_map(|path| Op::ReadBlocks { path }),
        16 => path().prop_map(|path| Op::Serve { path }),
        20 => Just(Op::Poll),
        12 => Just(Op::Quiet),
        2 => (0usize..30).prop_map(|pick| Op::DamageDram { pick }),
        2 => (some(), some(), some(), some()).prop_map(|(fail_reads, fail_writes, lose_writes, flip_reads)| {
            Op::SickDisk { fail_reads, fail_writes, lose_writes, flip_reads }
        }),
    ]
}

fn ops(longest: usize) -> impl Strategy<Value = Vec<Op>> {
    proptest::collection::vec(
        prop_oneof![200 => op(), 1 => Just(Op::Clear), 3 => Just(Op::Restart)],
        1..longest,
    )
}

/// Sizes at which everything is scarce, and every policy.
fn config() -> impl Strategy<Value = StoreConfig> {
    let eviction = prop_oneof![
        Just(Eviction::Lru),
        Just(Eviction::Lfu),
        Just(Eviction::S3Fifo),
        Just(Eviction::LengthAware)
    ];
    let offload =
        prop_oneof![1 => Just(Offload::Off), 4 => Just(Offload::WriteThrough), 4 => Just(Offload::OnEvict)];
    let slower = || prop_oneof![1 => Just(0u64), 4 => 1u64..24];
    (6u64..18, slower(), slower(), eviction, offload, any::<bool>()).prop_map(
        |(hbm_blocks, dram_blocks, ssd_blocks, eviction, offload, ssd_second_touch)| StoreConfig {
            hbm_blocks,
            dram_blocks,
            ssd_blocks,
            eviction,
            offload,
            ssd_second_touch,
        },
    )
}

fn play(config: StoreConfig, ops: &[Op]) -> World {
    let mut world = World::new(config);
    ops.iter().for_each(|op| world.run(op));
    world.finish();
    world
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn no_wrong_byte_is_ever_readable_and_nobody_waits_for_ever(config in config(), ops in ops(120)) {
        play(config, &ops);
    }
}

/// An owner that waits for a block that another brings up is heard of when the other has left.
#[test]
fn an_owner_that_brought_a_block_up_may_leave_those_that_wait_for_it() {
    let config = StoreConfig {
        hbm_blocks: 9,
        dram_blocks: 0,
        ssd_blocks: 8,
        eviction: Eviction::S3Fifo,
        offload: Offload::WriteThrough,
        ssd_second_touch: false,
    };
    let open = |owner, path: &[u64]| Op::Open { owner, path: path.to_vec(), room: 0 };
    let before = [Op::Serve { path: vec![0, 0] }, Op::Restart];
    let after = [open(2, &[0]), open(0, &[0, 0]), Op::Close { owner: 2 }];
    play(config, &[before.as_slice(), after.as_slice()].concat());
}

/// The histories above reach what they are meant to reach.
#[test]
fn random_histories_visit_every_corner() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut seen: BTreeMap<&str, u64> = BTreeMap::new();
    for _ in 0..600 {
        let (config, ops) =
            (config(), ops(120)).new_tree(&mut runner).expect("generation never fails").current();
        let world = play(config, &ops);
        let stats = world.bench.cache.stats();
        let tiers = stats.store.tiers;
        let mut add = |name, count: u64| *seen.entry(name).or_default() += count;
        world.seen.iter().for_each(|(name, count)| add(name, *count));
        add("integrity rejects", stats.integrity_rejects);
        add("onboard failed", stats.store.onboard_failed_blocks);
        add("from dram", tiers[1].onboarded_blocks);
        add("from flash", tiers[2].onboarded_blocks);
        add("to dram", tiers[1].offloaded_blocks);
        add("to flash", tiers[2].offloaded_blocks);
        add("shared fill", stats.store.shared_fill_blocks);
        add("offload failed", tiers[1].offload_failed_blocks + tiers[2].offload_failed_blocks);
    }
    assert_eq!(seen.len(), 19, "{seen:?}");
    assert!(seen.values().all(|&count| count > 10), "{seen:?}");
}
