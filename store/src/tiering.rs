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
use baton_types::{BlockKey, Tier};

/// A copy to a slower tier under way.
#[derive(Debug)]
pub(crate) struct Ticket {
    /// Its number; tickets are kept in ascending order.
    pub number: u64,
    /// Where the bytes go.
    pub to: usize,
    /// The blocks, children before parents, with their generations at the start.
    pub blocks: Vec<(u32, u32)>,
}

/// Siblings looked at, when a parent asks whether all its children are condemned.
const MAX_SIBLINGS: usize = 8;

/// Tells that `blocks` became readable in `tier`: one effect for each run of parent and child.
pub(crate) fn send_stored(
    table: &Table,
    tier: usize,
    blocks: impl Iterator<Item = u32>,
    effects: &mut Vec<Effect>,
) {
    let mut last = NONE;
    for block in blocks {
        let (hash, parent) = (table[block].key.short(), table[block].parent);
        match effects.last_mut() {
            Some(Effect::Stored { hashes, .. }) if last != NONE && parent == last => hashes.push(hash),
            _ => {
                let parent = (parent != NONE).then(|| table[parent].key.short());
                let mut hashes = Vec::with_capacity(blocks_hint(last));
                hashes.push(hash);
                effects.push(Effect::Stored { parent, hashes, tier: Tier::LOCAL[tier] });
            }
        }
        last = block;
    }
}

/// Room for a usual chain in the first run of a step, less in later ones.
const fn blocks_hint(last: u32) -> usize {
    if last == NONE { 32 } else { 4 }
}

impl Store {
    /// Evicts from `tier` until `slots` are free; `false` if the rest is pinned or on its way.
    pub(crate) fn make_room(&mut self, tier: usize, slots: u64) -> bool {
        while self.tiers[tier].space.free() < slots {
            let table = &self.table;
            let Some(victim) = self.tiers[tier].resting.victim(|block| table.is_leaf_in(block, tier)) else {
                return false;
            };
            self.drop_copy(tier, victim);
        }
        true
    }

    /// Takes a block's copy out of `tier`, and before it whatever could not stay without it:
    /// descendants sink to where what is left to their parent allows, or go.
    pub(crate) fn drop_copy(&mut self, tier: usize, block: u32) {
        if self.table[block].fastest() != tier {
            return self.drop_slot(tier, block);
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
                return;
            }
            top -= usize::from(current == raised_at);
            current = parent;
        }
    }

    pub(crate) fn evict_keys(&mut self, keys: &[BlockKey]) {
        for &key in keys {
            match self.table.find(key) {
                Some(block) if self.table[block].pins > 0 => self.counts.evict_refused_blocks += 1,
                Some(block) => self.remove_subtree(block),
                None => {}
            }
        }
    }

    /// Under `OnEvict`: condemns and copies until enough of each tier is free or condemned.
    pub(crate) fn condemn_ahead(&mut self) {
        for tier in HBM..SSD {
            while self.tiers[tier].space.free() + (self.tiers[tier].resting.condemned_len() as u64)
                < self.tiers[tier].ahead
            {
                let table = &self.table;
                let condemned = self.tiers[tier].resting.condemn(|resting, block| {
                    table.is_leaf_in(block, tier)
                        || table.children(block).take(MAX_SIBLINGS + 1).enumerate().all(|(i, child)| {
                            i < MAX_SIBLINGS && (table[child].fastest() != tier || resting.is_condemned(child))
                        })
                });
                let Some(block) = condemned else { break };
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
        let Some(ticket) = self.tickets.remove(position) else { return };
        let mut arrived = core::mem::take(&mut self.scratch);
        for &(block, generation) in &ticket.blocks {
            if ok && self.table[block].generation == generation {
                arrived.push(block);
                self.table.set_slot(block, ticket.to, Slot::Ready);
                self.tiers[ticket.to].space.fill();
            } else {
                self.call_off(ticket.to, block, generation);
            }
        }
        self.counts.tiers[ticket.to].offloaded_blocks += arrived.len() as u64;
        send_stored(&self.table, ticket.to, arrived.iter().rev().copied(), effects);
        for &block in &arrived {
            self.table[block].read[ticket.to] = false;
            if self.table[block].pins == 0 {
                let facts = self.facts(block);
                self.tiers[ticket.to].resting.rest(block, facts);
            }
        }
        if self.config.offload == Offload::WriteThrough {
            arrived.reverse();
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
            let Some(to) = self.tiers[from].next else { continue };
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
            self.tickets.push_back(Ticket { number, to, blocks });
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
        let Some(to) = self.tiers[from].next else { return };
        if self.wants_copy(from, to, block) && self.make_room(to, 1) {
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
            self.table.set_slot(block, to, Slot::Empty);
        }
    }

    /// A child whose fastest tier is faster than `floor`, which is a tier.
    fn child_above(&self, block: u32, floor: usize) -> Option<u32> {
        let kids = self.table[block].kids;
        if kids[..floor].iter().all(|&count| count == 0) {
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
            self.table.remove(leaf);
            if leaf == block {
                return;
            }
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
        let hash = self.table[block].key.short();
        let state = &mut self.tiers[tier];
        if self.table[block].slots[tier] == Slot::Ready {
            state.space.empty();
            state.resting.lift(block);
            state.resting.forget(block, hash.0);
            state.removed.push(hash);
            let counts = &mut self.counts.tiers[tier];
            counts.evicted_blocks += 1;
            counts.useless_offload_blocks += u64::from(tier != HBM && !self.table[block].read[tier]);
        } else {
            state.space.unreserve(1);
        }
        if let Some(next) = state.next
            && self.table[block].slots[next] == Slot::Filling
        {
            self.table[block].slots[next] = Slot::Empty;
            self.table[block].generation = self.table[block].generation.wrapping_add(1);
        }
        self.table[block].unclaimed &= tier != HBM;
        self.table.set_slot(block, tier, Slot::Empty);
        let fastest = self.table[block].fastest();
        if tier < fastest && fastest < TIERS {
            let facts = self.facts(block);
            self.tiers[fastest].resting.refresh(block, facts);
        }
    }
}
