//! Between the tiers: who is evicted, what is copied down first, and what goes with it.
//!
//! Under `OnEvict` a tier keeps an eighth of its slots free or *condemned*: next in line and, if
//! the next tier has room and takes them, copied there ahead of time. An eviction takes its victim
//! strictly in line and at once. Where the copy is complete nothing is lost; where it is still
//! under way it is called off and the block is lost: under pressure the store drops, it never
//! waits, so it cannot deadlock. The slot below stays reserved until the driver answers the ticket.

use crate::config::Offload;
use crate::effect::Effect;
use crate::lifecycle::{HBM, NONE, SSD, Slot, TIERS};
use crate::store::Store;
use crate::table::Table;
use alloc::vec::Vec;
use baton_types::Tier;

/// A copy to a slower tier under way.
#[derive(Debug)]
pub(crate) struct CopyTicket {
    /// Its number; tickets are kept in ascending order.
    pub number: u64,
    /// The tier that gets the bytes.
    pub to: usize,
    /// The blocks, children before parents, with their generations at the start.
    pub blocks: Vec<(u32, u32)>,
}

/// Siblings looked at, when a parent asks whether all its children are condemned.
const MAX_SIBLINGS: usize = 8;

/// Reports that `blocks`, parents before children, became readable in `tier`: one effect for each
/// run of parent and child.
pub(crate) fn send_stored(table: &Table, tier: usize, blocks: &[u32], effects: &mut Vec<Effect>) {
    for run in blocks.chunk_by(|&parent, &child| table[child].parent == parent) {
        let parent = table[run[0]].parent;
        let parent = (parent != NONE).then(|| table[parent].key.short());
        let hashes = run.iter().map(|&block| table[block].key.short()).collect();
        effects.push(Effect::Stored { parent, hashes, tier: Tier::LOCAL[tier] });
    }
}

impl Store {
    /// Evicts from `tier` until `slots` are free; `false` if the rest is pinned or on its way.
    pub(crate) fn make_room(&mut self, tier: usize, slots: u64) -> bool {
        let missing = slots.saturating_sub(self.tiers[tier].space.free()) as usize;
        self.tiers[tier].removed.reserve(missing.min(self.tiers[tier].resting.len()));
        while self.tiers[tier].space.free() < slots {
            let table = &self.table;
            let Some(victim) = self.tiers[tier].resting.victim(|block| table.is_leaf_in(block, tier)) else {
                return false;
            };
            assert!(self.table[victim].pins == 0, "I3: a pinned block is never evicted");
            let before = self.tiers[tier].space.free();
            self.drop_copy(tier, victim);
            assert!(self.tiers[tier].space.free() > before, "an eviction frees a slot, or this never ends");
        }
        true
    }

    /// Takes a block's copy out of `tier`. Before it go all copies that could not stay without it: descendants sink
    /// to a tier that their parent's remaining copies allow, or go.
    pub(crate) fn drop_copy(&mut self, tier: usize, block: u32) {
        if self.table[block].fastest() != tier {
            return self.drop_slot(tier, block);
        }
        if self.table[block].is_last_leaf_copy(tier) {
            self.counts.lost_blocks += 1;
            self.vacate(tier, block);
            return self.remove_leaf(block, tier);
        }
        // Where the block and everything visited below it may stay; it rises on the way down, at
        // most once for each tier, and the nodes where it did are on the stack.
        let mut floors = [(NONE, TIERS); TIERS];
        floors[0] = (block, self.table[block].fastest_after(tier));
        let (mut top, mut current) = (0, block);
        loop {
            let (raised_at, floor) = floors[top];
            if floor < TIERS
                && let Some(child) = self.child_above(current, floor)
            {
                let child_floor = self.table[child].fastest_after(floor - 1);
                if child_floor > floor {
                    top += 1;
                    floors[top] = (child, child_floor);
                }
                current = child;
                continue;
            }
            let parent = self.table[current].parent;
            self.sink(current, floor);
            if current == block {
                assert!(self.table[block].slots[tier] == Slot::Empty, "the copy is gone");
                return;
            }
            top -= usize::from(current == raised_at);
            current = parent;
        }
    }

    /// Under `OnEvict`: condemns and copies until enough of each tier is free or condemned.
    pub(crate) fn condemn_ahead(&mut self) {
        for tier in HBM..SSD {
            while self.tiers[tier].space.free() + (self.tiers[tier].resting.condemned_len() as u64)
                < self.tiers[tier].ahead
            {
                let table = &self.table;
                let next = self.tiers[tier].resting.condemn(|condemned, block| {
                    table.is_leaf_in(block, tier)
                        || table.children(block).take(MAX_SIBLINGS + 1).enumerate().all(|(i, child)| {
                            i < MAX_SIBLINGS && (table[child].fastest() != tier || condemned.contains(child))
                        })
                });
                let Some(block) = next else { break };
                self.unpark_parent(tier, block);
                if self.table[block].fastest() == tier {
                    self.start_copy(tier, block);
                }
            }
        }
    }

    /// Copies as many of `blocks`, which rest in `from`, parents before children, as the next
    /// tier has or makes room for.
    pub(crate) fn copy_down(&mut self, from: usize, blocks: &[u32]) {
        let Some(to) = self.tiers[from].next else { return };
        let wanted = blocks.iter().filter(|&&block| self.wants_copy(from, to, block)).count() as u64;
        if wanted == 0 {
            return;
        }
        let mut granted = if self.make_room(to, wanted) { wanted } else { self.tiers[to].space.free() };
        let first = self.tiers[from].outgoing.len();
        for &block in blocks {
            // Making room may have taken a copy that counted as made, so ask again.
            if granted > 0 && self.wants_copy(from, to, block) {
                granted -= 1;
                self.start_copy(from, block);
            }
        }
        self.tiers[from].outgoing[first..].reverse();
    }

    /// Under `WriteThrough`: the blocks that just came to rest get the copies that they lack.
    pub(crate) fn rewrite_missing_copies(&mut self) {
        let mut rested = core::mem::take(&mut self.scratch);
        rested.reverse();
        for tier in HBM..SSD {
            self.copy_down(tier, &rested);
        }
        rested.clear();
        self.scratch = rested;
    }

    pub(crate) fn offload_done(&mut self, ticket: u64, ok: bool, effects: &mut Vec<Effect>) {
        let Ok(position) = self.tickets.binary_search_by_key(&ticket, |known| known.number) else {
            self.counts.stale_inputs += 1;
            return;
        };
        let ticket = self.tickets.remove(position).expect("the ticket was found there");
        let mut arrived = core::mem::take(&mut self.scratch);
        for &(block, generation) in &ticket.blocks {
            if ok && self.table[block].generation == generation {
                let slot = self.table[block].slots[ticket.to];
                assert!(slot == Slot::Filling, "I2: a copy arrives in the slot that waits for it");
                arrived.push(block);
                self.table.set_slot(block, ticket.to, Slot::Ready);
                self.tiers[ticket.to].space.fill();
            } else {
                self.call_off(ticket.to, block, generation);
            }
        }
        self.counts.tiers[ticket.to].offloaded_blocks += arrived.len() as u64;
        arrived.reverse();
        send_stored(&self.table, ticket.to, &arrived, effects);
        for &block in arrived.iter().rev() {
            if self.table[block].pins == 0 {
                let facts = self.facts(block);
                self.tiers[ticket.to].resting.rest(block, facts);
            }
        }
        if self.config.offload == Offload::WriteThrough {
            self.copy_down(ticket.to, &arrived);
        }
        arrived.clear();
        self.scratch = arrived;
    }

    /// Turns this step's chosen copies into one ticket for each tier; copies whose source went
    /// within the step never start.
    pub(crate) fn send_tickets(&mut self, effects: &mut Vec<Effect>) {
        for from in HBM..SSD {
            if self.tiers[from].outgoing.is_empty() {
                continue;
            }
            let to = self.tiers[from].next.expect("copies are chosen only where they can go");
            let mut blocks = core::mem::take(&mut self.tiers[from].outgoing);
            let chosen = blocks.len();
            blocks.retain(|&(block, generation)| self.table[block].generation == generation);
            self.tiers[to].space.unreserve((chosen - blocks.len()) as u64);
            if blocks.is_empty() {
                continue;
            }
            let number = self.next_ticket;
            self.next_ticket += 1;
            let count = blocks.len() as u32;
            let ascends = self.tickets.back().is_none_or(|last| last.number < number);
            assert!(ascends, "tickets are found by search, so they stand in order");
            self.tickets.push_back(CopyTicket { number, to, blocks });
            let (from, to) = (Tier::LOCAL[from], Tier::LOCAL[to]);
            effects.push(Effect::Offload { ticket: number, from, to, blocks: count });
        }
    }

    fn wants_copy(&self, from: usize, to: usize, block: u32) -> bool {
        let known = &self.table[block];
        known.slots[from] == Slot::Ready
            && known.slots[to] == Slot::Empty
            && (to != SSD || known.twice || !self.config.ssd_second_touch)
    }

    fn start_copy(&mut self, from: usize, block: u32) {
        let to = self.tiers[from].next.expect("copies are made only where they can go");
        if self.wants_copy(from, to, block) && self.make_room(to, 1) {
            assert!(self.wants_copy(from, to, block), "making room below takes no copy above");
            self.tiers[to].space.reserve(1);
            self.table.set_slot(block, to, Slot::Filling);
            let generation = self.table[block].generation;
            self.tiers[from].outgoing.push((block, generation));
        }
    }

    /// Ends a copy that did not arrive; its slot is free again.
    fn call_off(&mut self, to: usize, block: u32, generation: u32) {
        self.counts.tiers[to].offload_failed_blocks += 1;
        self.tiers[to].space.unreserve(1);
        if self.table[block].generation == generation {
            let slot = self.table[block].slots[to];
            assert!(slot == Slot::Filling, "I2: a copy that does not arrive was under way");
            self.table.set_slot(block, to, Slot::Empty);
        }
    }

    /// A child whose fastest tier is faster than `floor`, which is a tier.
    fn child_above(&self, block: u32, floor: usize) -> Option<u32> {
        let children = self.table[block].children;
        if children[..floor].iter().all(|&count| count == 0) {
            return None;
        }
        self.table.children(block).find(|&child| self.table[child].fastest() < floor)
    }

    /// Leaves a block only its copies in `floor` and slower tiers, or removes it if that is none.
    fn sink(&mut self, block: u32, floor: usize) {
        if floor == TIERS {
            self.remove_subtree(block);
        } else {
            self.drop_slots_above(floor, block);
        }
    }

    fn remove_subtree(&mut self, block: u32) {
        loop {
            let leaf = self.table.first_leaf_below(block);
            self.counts.lost_blocks += u64::from(self.table[leaf].readable().is_some());
            self.drop_slots_above(TIERS, leaf);
            self.remove_leaf(leaf, TIERS);
            if leaf == block {
                return;
            }
        }
    }

    /// As [`Table::remove_leaf`]; where the store learns of reuse its name is kept for a while.
    fn remove_leaf(&mut self, block: u32, tier: usize) {
        if let Some(reuse) = &mut self.reuse {
            reuse.removed(block, self.table[block].key.short().0);
        }
        self.table.remove_leaf(block, tier);
    }

    /// A copy of `block` in `tier` left or was condemned: its parent need not wait for it.
    fn unpark_parent(&mut self, tier: usize, block: u32) {
        let parent = self.table[block].parent;
        if parent != NONE && self.tiers[tier].resting.is_parked(parent) {
            let facts = self.facts(parent);
            self.tiers[tier].resting.unpark(parent, facts);
        }
    }

    /// Empties the slots in tiers faster than `floor`; copies that were on their way there are
    /// called off with their source.
    fn drop_slots_above(&mut self, floor: usize, block: u32) {
        for tier in HBM..floor {
            let slot = self.table[block].slots[tier];
            if slot == Slot::Ready || (slot == Slot::Filling && tier == HBM) {
                self.drop_slot(tier, block);
            }
        }
    }

    /// Empties one slot and calls off the copy that was being made from it.
    fn drop_slot(&mut self, tier: usize, block: u32) {
        let slot = self.table[block].slots[tier];
        // A copy on its way down keeps its reservation until its ticket is answered.
        assert!(slot == Slot::Ready || (slot == Slot::Filling && tier == HBM), "I4: no slot to empty");
        if slot == Slot::Ready {
            self.vacate(tier, block);
        } else {
            self.tiers[tier].space.unreserve(1);
        }
        let known = &mut self.table[block];
        if let Some(next) = self.tiers[tier].next
            && known.slots[next] == Slot::Filling
        {
            known.slots[next] = Slot::Empty;
            known.generation = known.generation.wrapping_add(1);
        }
        known.unclaimed &= tier != HBM;
        self.table.set_slot(block, tier, Slot::Empty);
        let fastest = self.table[block].fastest();
        if tier < fastest && fastest < TIERS {
            let facts = self.facts(block);
            self.tiers[fastest].resting.refresh(block, facts);
        }
    }

    /// A readable copy leaves `tier`: its space, its place in line, the news of it.
    fn vacate(&mut self, tier: usize, block: u32) {
        let hash = self.table[block].key.short();
        let state = &mut self.tiers[tier];
        state.space.empty();
        state.resting.lift(block);
        state.resting.forget(block, hash.0);
        state.removed.push(hash);
        self.counts.tiers[tier].evicted_blocks += 1;
        if self.reuse.is_some() {
            (HBM..TIERS).for_each(|tier| self.unpark_parent(tier, block));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StoreConfig;
    use crate::testing::Rig;
    use baton_types::BlockHash;

    fn offload(ticket: u64, from: Tier, to: Tier, blocks: u32) -> Effect {
        Effect::Offload { ticket, from, to, blocks }
    }

    fn tickets(effects: &[Effect]) -> Vec<u64> {
        let of = |effect: &Effect| match effect {
            Effect::Offload { ticket, .. } => Some(*ticket),
            _ => None,
        };
        effects.iter().filter_map(of).collect()
    }

    fn removed(hashes: &[u64], tier: Tier) -> Effect {
        Effect::Removed { hashes: hashes.iter().map(|&hash| BlockHash(hash)).collect(), tier }
    }

    #[test]
    fn on_evict_copies_the_next_in_line_ahead_and_eviction_is_then_at_once() {
        let mut rig = Rig::new([16, 8, 0], Offload::OnEvict);
        assert_eq!(tickets(&rig.serve(1, &[1, 2, 3])), [0; 0]);
        let effects = rig.serve(2, &[10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]);
        assert!(effects.contains(&offload(0, Tier::Hbm, Tier::Dram, 1)), "an eighth, less one free");
        assert_eq!(rig.hits(&[1, 2, 3]), (3, 0, 0), "the copy costs no hit");
        rig.offloaded(0, true);
        rig.open(3, &[40, 41], 0);
        assert_eq!(rig.hits(&[1, 2, 3]), (2, 1, 0), "out of HBM, still readable from DRAM");
        assert_eq!(rig.store.stats().lost_blocks, 0);
    }

    #[test]
    fn under_pressure_a_copy_under_way_is_called_off_and_nothing_waits() {
        let mut rig = Rig::new([8, 8, 0], Offload::OnEvict);
        let effects = rig.serve(1, &[1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(tickets(&effects), [0]);
        let effects = rig.open(2, &[20, 21], 6);
        assert_eq!(effects.last(), Some(&removed(&[8, 7, 6, 5, 4, 3, 2, 1], Tier::Hbm)));
        assert_eq!(rig.store.stats().lost_blocks, 8);
        assert_eq!(rig.store.stats().tiers[1].reserved_blocks, 1, "the bytes may still be arriving");
        assert_eq!(rig.offloaded(0, true), []);
        let dram = rig.store.stats().tiers[1];
        assert_eq!((dram.used_blocks, dram.reserved_blocks, dram.offload_failed_blocks), (0, 0, 1));
    }

    #[test]
    fn a_pin_saves_a_condemned_block_and_its_copy_stays() {
        let mut rig = Rig::new([8, 8, 0], Offload::OnEvict);
        rig.serve(1, &[1, 2, 3, 4]);
        rig.serve(2, &[11, 12, 13, 14]);
        rig.open(3, &[1, 2, 3, 4], 0);
        rig.offloaded(0, true);
        assert_eq!(rig.store.stats().tiers[1].used_blocks, 1);
        rig.close(3);
        rig.open(4, &[40], 0);
        assert_eq!((rig.hits(&[1, 2, 3, 4]), rig.hits(&[11, 12, 13, 14])), ((4, 0, 0), (3, 0, 0)));
    }

    #[test]
    fn a_failed_copy_gives_its_slot_back_and_the_block_stays_readable() {
        let mut rig = Rig::new([8, 8, 0], Offload::OnEvict);
        rig.serve(1, &[1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(rig.offloaded(0, false), []);
        assert_eq!(rig.hits(&[1, 2, 3, 4, 5, 6, 7, 8]), (8, 0, 0));
        assert_eq!(rig.store.stats().tiers[1].reserved_blocks, 0);
        rig.offloaded(0, true);
        assert_eq!(rig.store.stats().stale_inputs, 1);
    }

    #[test]
    fn write_through_copies_at_the_seal_and_on_to_flash_at_arrival() {
        let mut rig = Rig::new([8, 8, 8], Offload::WriteThrough);
        rig.open(1, &[1, 2], 0);
        assert_eq!(rig.seal(1, 2)[1], offload(0, Tier::Hbm, Tier::Dram, 2));
        let effects = rig.offloaded(0, true);
        let hashes = alloc::vec![BlockHash(1), BlockHash(2)];
        let stored = Effect::Stored { parent: None, hashes, tier: Tier::Dram };
        assert_eq!(effects, [stored, offload(1, Tier::Dram, Tier::Ssd, 2)]);
        rig.offloaded(1, true);
        rig.close(1);
        rig.open(2, &[], 8);
        assert_eq!(rig.hits(&[1, 2]), (0, 2, 0));
        assert_eq!(rig.store.stats().tiers.map(|tier| tier.used_blocks), [0, 2, 2]);
    }

    #[test]
    fn flash_takes_only_what_was_asked_for_twice() {
        let config = StoreConfig {
            hbm_blocks: 8,
            dram_blocks: 8,
            ssd_blocks: 8,
            offload: Offload::WriteThrough,
            ..StoreConfig::default()
        };
        let mut rig = Rig::with(config);
        rig.serve(1, &[1, 2]);
        assert_eq!(tickets(&rig.offloaded(0, true)), [0; 0]);
        let effects = rig.serve(2, &[1, 3]);
        assert_eq!(effects.last(), Some(&offload(2, Tier::Dram, Tier::Ssd, 1)), "block 1 alone");
    }

    #[test]
    fn without_dram_blocks_go_to_flash_directly() {
        let mut rig = Rig::new([8, 0, 8], Offload::WriteThrough);
        let effects = rig.serve(1, &[1]);
        assert!(effects.contains(&offload(0, Tier::Hbm, Tier::Ssd, 1)));
        rig.offloaded(0, true);
        rig.open(2, &[], 8);
        rig.close(2);
        let effects = rig.open(3, &[1], 0);
        assert!(matches!(effects[1], Effect::Onboard { dram_blocks: 0, ssd_blocks: 1, .. }));
    }

    #[test]
    fn a_full_lower_tier_gives_up_its_own_oldest() {
        let mut rig = Rig::new([8, 2, 0], Offload::WriteThrough);
        rig.serve(1, &[1, 2]);
        rig.offloaded(0, true);
        let effects = rig.serve(2, &[3, 4]);
        assert!(effects.contains(&removed(&[2, 1], Tier::Dram)));
        rig.offloaded(1, true);
        let dram = rig.store.stats().tiers[1];
        assert_eq!((dram.used_blocks, dram.evicted_blocks), (2, 2));
        assert_eq!(rig.hits(&[1, 2]), (2, 0, 0));
    }

    #[test]
    fn a_parent_that_is_lost_takes_what_continues_it_along() {
        let mut rig = Rig::new([4, 2, 0], Offload::WriteThrough);
        rig.open(1, &[1, 2], 0);
        rig.seal(1, 1);
        rig.offloaded(0, false);
        rig.seal(1, 2);
        rig.offloaded(1, true);
        assert_eq!(rig.close(1), [offload(2, Tier::Hbm, Tier::Dram, 1)], "the copy that it lacks");
        rig.offloaded(2, false);
        assert_eq!(rig.store.stats().tiers.map(|tier| tier.used_blocks), [2, 1, 0]);
        let effects = rig.open(2, &[], 4);
        assert_eq!(rig.hits(&[1, 2]), (0, 0, 0));
        assert!(
            effects.contains(&removed(&[2, 1], Tier::Hbm)) && effects.contains(&removed(&[2], Tier::Dram))
        );
        assert_eq!(rig.store.stats().blocks, 0);
    }
}
