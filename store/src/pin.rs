//! Holds: who pins which blocks, and the opening, sealing and closing of a hold.

use crate::config::Offload;
use crate::effect::Effect;
use crate::evict::Facts;
use crate::input::Owner;
use crate::lifecycle::{HBM, NONE, Slot, depth_class};
use crate::single_flight::Duty;
use crate::stats::Hits;
use crate::store::Store;
use alloc::vec::Vec;
use baton_types::BlockKey;
use hashbrown::HashTable;

/// One owner's hold.
#[derive(Debug, Default)]
pub(crate) struct Hold {
    /// Whether this is a hold; emptied places are not.
    pub is_open: bool,
    /// The owner of the hold.
    pub owner: Owner,
    /// Holds opened earlier have lower numbers.
    pub sequence: u64,
    /// The pinned blocks, from the root.
    pub blocks: Vec<u32>,
    /// Private HBM slots.
    pub room: u32,
    /// Leading blocks known to be readable in HBM.
    pub sealed: u32,
    /// Whether it only reads: then it has no part in filling.
    pub reads_only: bool,
    /// Blocks that no other owner fills or brings up.
    pub duties: Vec<Duty>,
}

/// All holds, by owner.
#[derive(Debug, Default)]
pub(crate) struct HoldTable {
    holds: Vec<Hold>,
    index: HashTable<u32>,
    free: Vec<u32>,
    spare: Vec<Hold>,
    opened: u64,
}

/// Emptied holds kept for their memory, and how many blocks each may keep room for.
const SPARE_HOLDS: usize = 64;
const SPARE_BLOCKS: usize = 1024;

fn spread(owner: Owner) -> u64 {
    let product = owner.0.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    product ^ (product >> 32)
}

impl HoldTable {
    /// How many are open.
    pub(crate) fn len(&self) -> usize {
        self.index.len()
    }

    /// The number of an owner's hold.
    pub(crate) fn find(&self, owner: Owner) -> Option<usize> {
        let of = |&number: &u32| self.holds[number as usize].owner == owner;
        self.index.find(spread(owner), of).map(|&number| number as usize)
    }

    /// A hold by its number, to look at.
    pub(crate) fn get(&self, number: usize) -> &Hold {
        &self.holds[number]
    }

    /// A hold by its number.
    pub(crate) fn get_mut(&mut self, number: usize) -> &mut Hold {
        &mut self.holds[number]
    }

    /// An empty hold to fill in and [`HoldTable::insert`], or to give back with [`HoldTable::recycle`].
    pub(crate) fn spare(&mut self) -> Hold {
        self.spare.pop().unwrap_or_default()
    }

    /// Keeps a hold's memory for the next one.
    pub(crate) fn recycle(&mut self, mut hold: Hold) {
        if self.spare.len() < SPARE_HOLDS && hold.blocks.capacity() <= SPARE_BLOCKS {
            hold.blocks.clear();
            hold.duties.clear();
            self.spare.push(Hold { blocks: hold.blocks, duties: hold.duties, ..Hold::default() });
        }
    }

    /// Adds the hold of an owner that has none.
    pub(crate) fn insert(&mut self, mut hold: Hold) {
        assert!(self.find(hold.owner).is_none(), "an owner has one hold");
        (hold.is_open, hold.sequence) = (true, self.opened);
        self.opened += 1;
        let hash = spread(hold.owner);
        let number = match self.free.pop() {
            Some(number) => {
                assert!(!self.holds[number as usize].is_open, "a hold keeps its place while it is open");
                self.holds[number as usize] = hold;
                number
            }
            None => {
                self.holds.push(hold);
                (self.holds.len() - 1) as u32
            }
        };
        let holds = &self.holds;
        self.index.insert_unique(hash, number, |&other| spread(holds[other as usize].owner));
    }

    /// Takes an owner's hold out.
    pub(crate) fn take(&mut self, owner: Owner) -> Option<Hold> {
        let holds = &self.holds;
        let of = |&number: &u32| holds[number as usize].owner == owner;
        let (number, _) = self.index.find_entry(spread(owner), of).ok()?.remove();
        self.free.push(number);
        Some(core::mem::take(&mut self.holds[number as usize]))
    }

    /// The open holds, in no meaningful but a fixed order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Hold> {
        self.holds.iter().filter(|hold| hold.is_open)
    }

    /// Takes all out.
    pub(crate) fn clear(&mut self) {
        *self = Self { opened: self.opened, ..Self::default() };
    }
}

/// The part of a chain that exists, counted before anything changes.
#[derive(Clone, Copy, Debug, Default)]
struct Census {
    /// By the tier to read from; blocks that another owner is bringing up excluded.
    hits: Hits,
    /// Blocks with an HBM slot that is still being filled.
    pending: u32,
    /// Leading blocks that are readable in HBM.
    sealed: u32,
    /// Blocks at rest in HBM: evictable now, not once they are pinned.
    resting: u64,
    /// Blocks to bring up whose HBM slot is reserved already.
    unclaimed: u32,
    /// The position of the first block to bring up, if there is one.
    first_load: u32,
}

impl Store {
    pub(crate) fn open(&mut self, owner: Owner, chain: &[BlockKey], room: u32, effects: &mut Vec<Effect>) {
        if self.refuse_second(owner, effects) {
            return;
        }
        let mut hold = self.holds.spare();
        let census = self.find_existing(chain, &mut hold.blocks);
        let missing = (chain.len() - hold.blocks.len()) as u64 + u64::from(room);
        let needed_blocks = missing + u64::from(census.hits.dram + census.hits.ssd - census.unclaimed);
        let hbm = &self.tiers[HBM];
        assert!(census.resting <= hbm.resting.len() as u64, "I3: unpinned blocks that are readable rest");
        let free_or_evictable_blocks = hbm.space.free() + hbm.resting.len() as u64 - census.resting;
        if needed_blocks > free_or_evictable_blocks {
            self.counts.refused += 1;
            self.holds.recycle(hold);
            effects.push(Effect::Refused { owner, needed_blocks, free_or_evictable_blocks });
            return;
        }
        self.pin(&hold.blocks);
        let made = self.make_room(HBM, needed_blocks);
        assert!(made, "the room was counted before");
        self.tiers[HBM].space.reserve(needed_blocks);
        (hold.owner, hold.room, hold.sealed) = (owner, room, census.sealed);
        self.start_onboard(&mut hold, census.hits, census.first_load);
        let found = hold.blocks.len();
        self.insert_missing(chain, &mut hold);
        self.note_asked(chain, &hold.blocks, found);
        self.count_opened(census, chain.len());
        let Hits { hbm, dram, ssd, .. } = census.hits;
        effects.push(Effect::Opened {
            owner,
            hbm,
            dram,
            ssd,
            pending: census.pending,
            reserved: missing as u32,
        });
        if dram + ssd > 0 {
            effects.push(Effect::Onboard { owner, dram_blocks: dram, ssd_blocks: ssd });
        }
        self.holds.insert(hold);
    }

    pub(crate) fn read(&mut self, owner: Owner, chain: &[BlockKey], effects: &mut Vec<Effect>) {
        if self.refuse_second(owner, effects) {
            return;
        }
        let mut hold = self.holds.spare();
        let (mut hits, mut parent) = (Hits::default(), NONE);
        for &key in chain {
            let Some(block) = self.table.find_under(parent, key) else { break };
            let Some(tier) = self.table[block].readable() else { break };
            hits.add(tier);
            hold.blocks.push(block);
            parent = block;
        }
        self.pin(&hold.blocks);
        self.note_asked(chain, &hold.blocks, hold.blocks.len());
        (hold.owner, hold.reads_only) = (owner, true);
        self.holds.insert(hold);
        self.count_opened(Census { hits, ..Census::default() }, chain.len());
        let Hits { hbm, dram, ssd, .. } = hits;
        effects.push(Effect::Opened { owner, hbm, dram, ssd, pending: 0, reserved: 0 });
    }

    pub(crate) fn seal(&mut self, owner: Owner, upto_blocks: u32, effects: &mut Vec<Effect>) {
        let found = self.holds.find(owner).filter(|&number| !self.holds.get_mut(number).reads_only);
        let Some(number) = found else {
            self.counts.stale_inputs += 1;
            return;
        };
        let hold = self.holds.get_mut(number);
        let upto = (upto_blocks as usize).min(hold.blocks.len());
        let from = (hold.sealed as usize).min(upto);
        hold.sealed = hold.sealed.max(upto as u32);
        let blocks = core::mem::take(&mut hold.blocks);
        self.settle_hbm(&blocks[from..upto], effects);
        self.holds.get_mut(number).blocks = blocks;
    }

    pub(crate) fn grow_room(&mut self, owner: Owner, room_blocks: u32, effects: &mut Vec<Effect>) {
        let needed_blocks = u64::from(room_blocks);
        let found = self.holds.find(owner).filter(|&number| !self.holds.get_mut(number).reads_only);
        let Some(number) = found else {
            self.counts.stale_inputs += 1;
            effects.push(Effect::GrowRefused { owner, needed_blocks, free_or_evictable_blocks: 0 });
            return;
        };
        let hbm = &self.tiers[HBM];
        let free_or_evictable_blocks = hbm.space.free() + hbm.resting.len() as u64;
        if needed_blocks > free_or_evictable_blocks {
            effects.push(Effect::GrowRefused { owner, needed_blocks, free_or_evictable_blocks });
            return;
        }
        let made = self.make_room(HBM, needed_blocks);
        assert!(made, "the room was counted before");
        self.tiers[HBM].space.reserve(needed_blocks);
        let hold = self.holds.get_mut(number);
        hold.room += room_blocks;
        effects.push(Effect::Grown { owner, room_blocks: hold.room });
    }

    pub(crate) fn close(&mut self, owner: Owner, effects: &mut Vec<Effect>) {
        let Some(hold) = self.holds.take(owner) else {
            self.counts.stale_inputs += 1;
            return;
        };
        self.tiers[HBM].space.unreserve(u64::from(hold.room));
        for &block in hold.blocks.iter().rev() {
            assert!(self.table[block].pins > 0, "I3: the blocks of an open hold are pinned");
            self.table[block].pins -= 1;
            if self.table[block].pins == 0 {
                self.come_to_rest(block);
            }
        }
        self.rewrite_missing_copies();
        self.hand_over(&hold, effects);
        self.holds.recycle(hold);
    }

    /// Blocks pinned by all owners together; 0 at rest (I3).
    #[must_use]
    pub fn pinned_total(&self) -> u64 {
        self.holds.iter().map(|hold| hold.blocks.len() as u64).sum()
    }

    /// The facts about a block that the eviction policy may use.
    pub(crate) fn facts(&self, block: u32) -> Facts {
        let known = &self.table[block];
        Facts {
            frequency: known.frequency_at(self.age),
            depth_class: known.depth_class,
            hash: known.key.short().0,
            list: self.reuse.as_ref().map_or(0, |reuse| reuse.list_of(block)),
        }
    }

    /// Where the store learns of reuse: takes note of a chain that was asked for, of which the hold has the leading
    /// blocks and the store had the first `found`.
    fn note_asked(&mut self, chain: &[BlockKey], blocks: &[u32], found: usize) {
        if let Some(reuse) = &mut self.reuse {
            reuse.asked(blocks, found, chain.len(), |position| chain[position].short().0);
        }
    }

    fn refuse_second(&mut self, owner: Owner, effects: &mut Vec<Effect>) -> bool {
        let second = self.holds.find(owner).is_some();
        if second {
            self.counts.double_opens += 1;
            effects.push(Effect::AlreadyOpen { owner });
        }
        second
    }

    /// Finds the blocks of `chain` that exist; since none outlives its parent, they come first.
    fn find_existing(&self, chain: &[BlockKey], blocks: &mut Vec<u32>) -> Census {
        let mut census = Census::default();
        let mut parent = NONE;
        blocks.reserve(chain.len());
        for &key in chain {
            let Some(block) = self.table.find_under(parent, key) else { break };
            let known = &self.table[block];
            match known.slots[HBM] {
                Slot::Ready => {
                    census.sealed += u32::from(census.sealed as usize == blocks.len());
                    census.resting += u64::from(known.pins == 0);
                    census.hits.add(HBM);
                }
                Slot::Filling if !known.unclaimed => census.pending += 1,
                slot => {
                    if census.hits.dram + census.hits.ssd == 0 {
                        census.first_load = blocks.len() as u32;
                    }
                    census.unclaimed += u32::from(slot == Slot::Filling);
                    census.hits.add(known.below_hbm());
                }
            }
            blocks.push(block);
            parent = block;
        }
        census
    }

    fn pin(&mut self, blocks: &[u32]) {
        for &block in blocks {
            let known = &mut self.table[block];
            known.touch(self.age);
            known.pins += 1;
            if known.pins > 1 {
                continue;
            }
            let slots = known.slots;
            for (tier, slot) in self.tiers.iter_mut().zip(slots) {
                if slot == Slot::Ready {
                    tier.resting.lift(block);
                }
            }
        }
    }

    /// Adds the rest of the chain as blocks that this hold fills; their slots are reserved.
    fn insert_missing(&mut self, chain: &[BlockKey], hold: &mut Hold) {
        let from = hold.blocks.len();
        let mut parent = hold.blocks.last().copied().unwrap_or(NONE);
        for (position, &key) in chain.iter().enumerate().skip(from) {
            let block = self.table.insert(key, parent, self.age);
            let known = &mut self.table[block];
            known.depth_class = depth_class(position);
            known.pins = 1;
            hold.blocks.push(block);
            parent = block;
        }
        if from < chain.len() {
            hold.duties.push(Duty { from: from as u32, to: chain.len() as u32, is_load: false });
        }
        assert!(hold.blocks.len() == chain.len(), "an owner that fills holds its whole chain");
        assert!(hold.sealed as usize <= hold.blocks.len(), "I2: only blocks of the chain are readable in it");
    }

    /// The last pin of `block` went: what was not sealed is dropped, what was may be evicted.
    fn come_to_rest(&mut self, block: u32) {
        if self.table[block].slots[HBM] == Slot::Filling {
            self.drop_copy(HBM, block);
        }
        let slots = self.table[block].slots;
        if let Some(reuse) = &mut self.reuse
            && slots.contains(&Slot::Ready)
        {
            reuse.rested(block);
        }
        let facts = self.facts(block);
        for (tier, slot) in slots.into_iter().enumerate() {
            if slot == Slot::Ready {
                self.tiers[tier].resting.rest(block, facts);
            }
        }
        if self.config.offload == Offload::WriteThrough && slots.contains(&Slot::Ready) {
            self.scratch.push(block);
        }
    }

    fn count_opened(&mut self, census: Census, asked: usize) {
        let Hits { hbm, dram, ssd, total } = census.hits;
        self.counts.opened += 1;
        for (tier, hits) in self.counts.tiers.iter_mut().zip([hbm, dram, ssd]) {
            tier.hit_blocks += u64::from(hits);
        }
        self.counts.shared_fill_blocks += u64::from(census.pending);
        let found = u64::from(total) + u64::from(census.pending);
        assert!(found <= asked as u64, "each block of a chain is found once at most");
        self.counts.missed_blocks += asked as u64 - found;
        self.count_touches(asked);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Input;
    use crate::testing::{Rig, owner};
    use baton_types::{BlockHash, Tier};

    fn rig(hbm_blocks: u64) -> Rig {
        Rig::new([hbm_blocks, 0, 0], Offload::Off)
    }

    fn opened(of: u64, hbm: u32, pending: u32, reserved: u32) -> Effect {
        Effect::Opened { owner: owner(of), hbm, dram: 0, ssd: 0, pending, reserved }
    }

    fn refused(of: u64, needed_blocks: u64, free_or_evictable_blocks: u64) -> Effect {
        Effect::Refused { owner: owner(of), needed_blocks, free_or_evictable_blocks }
    }

    #[test]
    fn a_block_is_readable_only_after_its_seal() {
        let mut rig = rig(8);
        assert_eq!(rig.open(1, &[1, 2, 3], 2), [opened(1, 0, 0, 5)]);
        assert_eq!(rig.hits(&[1, 2, 3]), (0, 0, 0));
        let hashes = alloc::vec![BlockHash(1), BlockHash(2)];
        assert_eq!(rig.seal(1, 2), [Effect::Stored { parent: None, hashes, tier: Tier::Hbm }]);
        assert_eq!(rig.hits(&[1, 2, 3]), (2, 0, 0));
        assert_eq!(rig.seal(1, 1), [], "sealing less changes nothing");
        let hashes = alloc::vec![BlockHash(3)];
        assert_eq!(rig.seal(1, 99), [Effect::Stored { parent: Some(BlockHash(2)), hashes, tier: Tier::Hbm }]);
    }

    #[test]
    fn a_close_drops_what_was_not_sealed_and_gives_everything_back() {
        let mut rig = rig(8);
        rig.open(1, &[1, 2, 3], 4);
        rig.seal(1, 1);
        assert_eq!(rig.store.pinned_total(), 3);
        assert_eq!(rig.close(1), [], "nobody had been told of the others");
        let hbm = rig.store.stats().tiers[0];
        assert_eq!((hbm.used_blocks, hbm.reserved_blocks, hbm.pinned_blocks), (1, 0, 0));
        assert_eq!(rig.store.pinned_total(), 0);
        assert_eq!(rig.close(1), [], "a second close is counted, no more");
        assert_eq!(rig.store.stats().stale_inputs, 1);
    }

    #[test]
    fn within_a_request_the_last_block_goes_first_and_the_root_last() {
        let mut rig = rig(6);
        rig.serve(1, &[1, 2, 3]);
        rig.serve(2, &[7, 8, 9]);
        rig.open(3, &[20, 21], 0);
        assert_eq!((rig.hits(&[1, 2, 3]), rig.hits(&[7, 8, 9])), ((1, 0, 0), (3, 0, 0)));
        rig.open(4, &[30, 31], 0);
        assert_eq!((rig.hits(&[1, 2, 3]), rig.hits(&[7, 8, 9])), ((0, 0, 0), (2, 0, 0)));
    }

    #[test]
    fn a_use_makes_a_chain_newer_and_the_news_is_batched() {
        let mut rig = rig(4);
        rig.serve(1, &[1, 2]);
        rig.serve(2, &[7, 8]);
        assert_eq!(rig.serve(3, &[1, 2])[0], opened(3, 2, 0, 0));
        let effects = rig.open(4, &[30, 31], 0);
        let hashes = alloc::vec![BlockHash(8), BlockHash(7)];
        assert_eq!(effects, [opened(4, 0, 0, 2), Effect::Removed { hashes, tier: Tier::Hbm }]);
    }

    #[test]
    fn pinned_blocks_are_never_evicted_and_refusals_change_nothing() {
        let mut rig = rig(4);
        rig.serve(1, &[1, 2]);
        rig.open(2, &[1], 0);
        rig.seal(2, 1);
        assert_eq!(rig.open(3, &[5, 6, 7, 8], 0), [refused(3, 4, 3)]);
        assert_eq!(rig.open(3, &[1, 2, 7], 2), [refused(3, 3, 2)], "its own prefix is no room for it");
        assert_eq!(rig.hits(&[1, 2]), (2, 0, 0));
        assert_eq!(
            rig.open(3, &[5, 6], 1),
            [opened(3, 0, 0, 3), Effect::Removed { hashes: alloc::vec![BlockHash(2)], tier: Tier::Hbm }]
        );
        assert_eq!(rig.hits(&[1, 2]), (1, 0, 0));
        assert_eq!(rig.store.stats().refused, 2);
    }

    #[test]
    fn an_owner_has_one_hold() {
        let mut rig = rig(8);
        rig.open(1, &[1], 0);
        assert_eq!(rig.open(1, &[2], 0), [Effect::AlreadyOpen { owner: owner(1) }]);
        assert_eq!(rig.read(1, &[1]), [Effect::AlreadyOpen { owner: owner(1) }]);
        assert_eq!(rig.store.stats().double_opens, 2);
    }

    #[test]
    fn a_reader_pins_the_readable_prefix_and_reserves_nothing() {
        let mut rig = rig(3);
        rig.serve(1, &[1, 2]);
        assert_eq!(rig.read(2, &[1, 2, 3]), [opened(2, 2, 0, 0)]);
        assert_eq!(rig.open(3, &[7, 8], 0), [refused(3, 2, 1)]);
        assert_eq!(rig.seal(2, 3), [], "a reader fills nothing");
        let grow = Input::GrowRoom { owner: owner(2), room_blocks: 1 };
        let refusal = Effect::GrowRefused { owner: owner(2), needed_blocks: 1, free_or_evictable_blocks: 0 };
        assert_eq!(rig.step(grow), [refusal]);
        rig.close(2);
        assert_eq!(rig.open(3, &[7, 8], 0)[0], opened(3, 0, 0, 2));
    }

    #[test]
    fn room_grows_by_evicting_and_is_refused_beyond_that() {
        let mut rig = rig(4);
        rig.serve(1, &[1, 2]);
        rig.open(2, &[7], 1);
        let grow = |room_blocks| Input::GrowRoom { owner: owner(2), room_blocks };
        assert_eq!(
            rig.step(grow(1)),
            [
                Effect::Grown { owner: owner(2), room_blocks: 2 },
                Effect::Removed { hashes: alloc::vec![BlockHash(2)], tier: Tier::Hbm }
            ]
        );
        let refusal = Effect::GrowRefused { owner: owner(2), needed_blocks: 2, free_or_evictable_blocks: 1 };
        assert_eq!(rig.step(grow(2)), [refusal]);
        rig.close(2);
        assert_eq!(rig.store.stats().tiers[0].reserved_blocks, 0);
    }

    #[test]
    fn chains_that_contradict_each_other_cannot_knot_the_tree() {
        let mut rig = rig(8);
        rig.serve(1, &[1, 2]);
        let mut effects = Vec::new();
        let wrong = [BlockKey(2), BlockKey(1)];
        rig.store.step(9, Input::Open { owner: owner(2), chain: &wrong, room_blocks: 0 }, &mut effects);
        assert_eq!(effects, [opened(2, 0, 0, 2)], "a key under another parent is another block");
        rig.store.step(9, Input::Close { owner: owner(2) }, &mut effects);
        assert_eq!(rig.hits(&[1, 2]), (2, 0, 0));
        assert_eq!(rig.store.check(), Ok(()));
    }
}
