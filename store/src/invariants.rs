//! The audit of everything that must always hold. Slow: for tests, the simulator and debug builds.

use crate::lifecycle::{DRAM, HBM, NONE, SSD, Slot, TIERS};
use crate::store::Store;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

/// Fails with a sentence unless a condition holds.
macro_rules! ensure {
    ($condition:expr, $($sentence:tt)+) => {
        if !$condition {
            return Err(format!($($sentence)+));
        }
    };
}

impl Store {
    /// Audits every invariant of the whole state.
    ///
    /// # Errors
    /// The first one that does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        for block in self.table.numbers() {
            self.check_block(block)?;
            self.check_children(block)?;
        }
        ensure!(self.table.numbers().count() == self.table.len(), "the index and the blocks differ");
        self.check_pins()?;
        self.check_duties()?;
        for tier in HBM..TIERS {
            self.check_tier(tier)?;
        }
        Ok(())
    }

    fn check_block(&self, number: u32) -> Result<(), String> {
        let block = &self.table[number];
        let key = block.key;
        ensure!(self.table.find(key) == Some(number), "{key:?} is not found by its key");
        ensure!(block.slots[HBM] != Slot::Filling || block.pins > 0, "{key:?} is filled for nobody");
        ensure!(block.fastest() < TIERS, "{key:?} rests nowhere");
        ensure!(!block.unclaimed || block.slots[HBM] == Slot::Filling, "{key:?} is unclaimed without a slot");
        for (tier, slot) in block.slots.iter().enumerate() {
            let waits = self.tiers[tier].resting.is_parked(number);
            ensure!(!waits || !self.table.is_leaf_in(number, tier), "{key:?} waits for children it has not");
            let rests = self.tiers[tier].resting.contains(number);
            let expected = *slot == Slot::Ready && block.pins == 0;
            ensure!(rests == expected, "I3: {key:?} rests in tier {tier}: {rests}, expected {expected}");
        }
        if block.parent == NONE {
            return Ok(());
        }
        let parent = &self.table[block.parent];
        ensure!(parent.fastest() < TIERS, "{key:?} outlives its parent");
        ensure!(parent.fastest() <= block.fastest(), "{key:?} rests above its parent");
        ensure!(parent.pins >= block.pins, "I3: {key:?} has more pins than its parent");
        ensure!(self.table.children(block.parent).any(|child| child == number), "{key:?} is a lost child");
        Ok(())
    }

    fn check_children(&self, number: u32) -> Result<(), String> {
        let block = &self.table[number];
        let mut children = [0; TIERS + 1];
        for child in self.table.children(number) {
            ensure!(self.table[child].parent == number, "{:?} has a foreign child", block.key);
            children[self.table[child].fastest()] += 1;
        }
        ensure!(
            children[..2] == block.children,
            "{:?} has children {children:?}, counted {:?}",
            block.key,
            block.children
        );
        Ok(())
    }

    fn check_pins(&self) -> Result<(), String> {
        let mut pins = vec![0u32; self.table.numbers_end()];
        for hold in self.holds.iter() {
            let mut parent = NONE;
            for &block in &hold.blocks {
                ensure!(self.table[block].parent == parent, "{} holds no chain", hold.owner);
                pins[block as usize] += 1;
                parent = block;
            }
            for &block in &hold.blocks[..hold.sealed as usize] {
                ensure!(self.table[block].slots[HBM] == Slot::Ready, "I3: {} lost a block", hold.owner);
            }
        }
        for block in self.table.numbers() {
            let (counted, found) = (self.table[block].pins, pins[block as usize]);
            ensure!(counted == found, "I3: {:?} has {found} pins, counted {counted}", self.table[block].key);
        }
        Ok(())
    }

    /// Every slot that waits for bytes has one owner or ticket that will bring them.
    fn check_duties(&self) -> Result<(), String> {
        let mut fillers = vec![[0u32; TIERS]; self.table.numbers_end()];
        for hold in self.holds.iter() {
            for duty in &hold.duties {
                for &block in &hold.blocks[duty.from as usize..duty.to as usize] {
                    fillers[block as usize][HBM] += 1;
                }
            }
        }
        for ticket in &self.tickets {
            for &(block, generation) in &ticket.blocks {
                let live = self.table[block].generation == generation;
                fillers[block as usize][ticket.to] += u32::from(live);
            }
        }
        for block in self.table.numbers() {
            let known = &self.table[block];
            let expected = u32::from(!known.unclaimed);
            let found = fillers[block as usize];
            let hbm = known.slots[HBM] != Slot::Filling || found[HBM] == expected;
            ensure!(hbm, "{:?} is filled by {} owners, expected {expected}", known.key, found[HBM]);
            for tier in [DRAM, SSD] {
                let filling = u32::from(known.slots[tier] == Slot::Filling);
                ensure!(
                    found[tier] == filling,
                    "{:?} has {} copies coming, expected {filling}",
                    known.key,
                    found[tier]
                );
            }
        }
        Ok(())
    }

    fn check_tier(&self, tier: usize) -> Result<(), String> {
        let state = &self.tiers[tier];
        let space = state.space;
        let with =
            |slot| self.table.numbers().filter(|&block| self.table[block].slots[tier] == slot).count() as u64;
        let reserved = if tier == HBM {
            with(Slot::Filling) + self.holds.iter().map(|hold| u64::from(hold.room)).sum::<u64>()
        } else {
            let arriving = self.tickets.iter().filter(|ticket| ticket.to == tier);
            arriving.map(|ticket| ticket.blocks.len() as u64).sum()
        };
        let (used, capacity) = (with(Slot::Ready), space.capacity());
        ensure!(space.used() == used, "I4: tier {tier} uses {used}, counted {}", space.used());
        ensure!(
            space.reserved() == reserved,
            "I4: tier {tier} reserves {reserved}, counted {}",
            space.reserved()
        );
        ensure!(used + reserved <= capacity, "I4: tier {tier} holds {used} + {reserved} of {capacity}");
        ensure!(state.outgoing.is_empty() && state.removed.is_empty(), "tier {tier} kept news to itself");
        state.resting.check()?;
        let resting = self.table.numbers().filter(|&block| state.resting.contains(block)).count();
        ensure!(resting == state.resting.len(), "tier {tier} lets strangers rest");
        let numbers: Vec<u64> = self.tickets.iter().map(|ticket| ticket.number).collect();
        ensure!(numbers.is_sorted_by(|a, b| a < b), "tickets are out of order");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Input, StoreConfig};
    use baton_types::{BlockKey, RequestId};

    /// A store with one open owner of three blocks, two of them sealed, and one block at rest.
    fn store() -> Store {
        let mut store = Store::new(StoreConfig::default()).unwrap();
        let mut effects = Vec::new();
        let (a, b) = ([BlockKey(1), BlockKey(2), BlockKey(3)], [BlockKey(1), BlockKey(9)]);
        store.step(0, Input::Open { owner: RequestId(1), chain: &a, room_blocks: 2 }, &mut effects);
        store.step(0, Input::Seal { owner: RequestId(1), upto_blocks: 2 }, &mut effects);
        store.step(0, Input::Open { owner: RequestId(2), chain: &b, room_blocks: 0 }, &mut effects);
        store.step(0, Input::Seal { owner: RequestId(2), upto_blocks: 2 }, &mut effects);
        store.step(0, Input::Close { owner: RequestId(2) }, &mut effects);
        assert_eq!(store.check(), Ok(()));
        store
    }

    fn complaint(break_it: impl FnOnce(&mut Store, [u32; 4])) -> String {
        let mut store = store();
        let numbers = [1, 2, 3, 9].map(|key| store.table.find(BlockKey(key)).unwrap());
        break_it(&mut store, numbers);
        store.check().unwrap_err()
    }

    #[test]
    fn each_kind_of_damage_is_noticed() {
        assert!(complaint(|s, b| s.table[b[0]].pins += 1).contains("I3"));
        assert!(complaint(|s, _| s.tiers[HBM].space.reserve(1)).contains("I4"));
        assert!(complaint(|s, _| s.tiers[DRAM].space.reserve(1)).contains("I4"));
        assert!(complaint(|s, b| s.tiers[HBM].resting.lift(b[3])).contains("I3"));
        assert!(complaint(|s, b| s.table[b[0]].children[0] = 7).contains("children"));
        assert!(complaint(|s, b| s.table[b[3]].parent = b[1]).contains("child"));
        assert!(complaint(|s, b| s.table[b[2]].unclaimed = true).contains("filled by 1 owners"));
        assert!(complaint(|s, b| s.table[b[3]].slots[DRAM] = Slot::Filling).contains("copies coming"));
        assert!(complaint(|s, b| s.table[b[3]].key = BlockKey(77)).contains("not found"));
    }

    #[test]
    fn a_block_may_not_rest_above_its_parent() {
        let complaint = complaint(|s, b| {
            s.table[b[0]].slots = [Slot::Empty, Slot::Ready, Slot::Empty];
        });
        assert!(complaint.contains("rests above its parent") || complaint.contains("I3"), "{complaint}");
    }
}
