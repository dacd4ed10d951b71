//! Which block rests where, in memory, and which slots may be given out.

use crate::index::{Entry, Place};
use crate::io_sequencer::Order;
use crate::layout::Layout;
use crate::short::ShortNameMap;
use crate::slots::Slots;
use baton_types::{BlockHash, BlockKey};

/// Blocks by short name, each with its place.
pub(crate) type Places = ShortNameMap<(BlockKey, Place)>;

/// The places of a slab file.
///
/// Contract: a slot is in exactly one state: free; reserved for one write; taken by a block that
/// rests here; or draining, until the sequencer says `Freed`.
#[derive(Debug)]
pub(crate) struct SlotTable {
    layout: Layout,
    places: Places,
    slots: Slots,
    draining: u32,
    next_generation: u64,
    epoch: u32,
}

impl SlotTable {
    /// Takes over what an earlier life left: `entries`, which are in `places`. The slots of
    /// `stale` ones drain: order their removal.
    pub(crate) fn new(layout: Layout, places: Places, entries: &[Entry], stale: &[Entry]) -> Self {
        let all = || entries.iter().chain(stale).map(|entry| entry.place);
        let next_generation = all().map(|place| place.generation + 1).max().unwrap_or(1);
        let mut slots = Slots::new(layout.slots());
        slots.take_these(all().map(|place| place.slot));
        Self { layout, places, slots, draining: stale.len() as u32, next_generation, epoch: 0 }
    }

    /// Blocks that may rest here.
    pub(crate) const fn capacity(&self) -> u32 {
        self.layout.capacity
    }

    /// Blocks that rest here.
    pub(crate) fn committed(&self) -> usize {
        self.places.len()
    }

    /// Blocks that rest here and places reserved.
    pub(crate) fn in_use(&self) -> usize {
        self.slots.taken() - self.draining as usize
    }

    /// Slots that wait for the sequencer.
    pub(crate) const fn draining(&self) -> u32 {
        self.draining
    }

    /// Whether a place can be reserved now.
    pub(crate) fn has_free(&self) -> bool {
        self.in_use() < self.layout.capacity as usize && self.slots.has_free()
    }

    /// A place to write a block with this checksum to: then commit it, or say what became of it.
    pub(crate) fn reserve(&mut self, checksum: u64) -> Option<Place> {
        if !self.has_free() {
            return None;
        }
        let slot = self.slots.take()?;
        let generation = self.next_generation;
        self.next_generation += 1;
        Some(Place { slot, generation, checksum })
    }

    /// The block was written in full to a reserved place. `false`: a block of that short name
    /// rests here already, and the place stays the caller's.
    pub(crate) fn commit(&mut self, key: BlockKey, place: Place) -> bool {
        let is_new = !self.places.contains_key(&key.short());
        if is_new {
            self.places.insert(key.short(), (key, place));
        }
        is_new
    }

    /// Nothing was ever written to a reserved place.
    pub(crate) fn give_back(&mut self, place: Place) {
        self.slots.give(place.slot);
    }

    /// A write to a reserved place failed: its slot drains.
    pub(crate) fn failed(&mut self) {
        self.draining += 1;
    }

    /// Discards the write to a reserved place: its slot drains once this is ordered.
    pub(crate) fn discard(&mut self, place: Place) -> Order {
        self.draining += 1;
        Order::Remove(place)
    }

    /// Gives a block up; its slot drains once this is ordered.
    pub(crate) fn remove(&mut self, block: BlockHash) -> Option<Order> {
        let (_, place) = self.places.remove(&block)?;
        Some(self.discard(place))
    }

    /// The sequencer freed a slot. `false`: that was before everything was forgotten.
    pub(crate) fn freed(&mut self, slot: u32, epoch: u32) -> bool {
        if epoch == self.epoch {
            self.draining -= 1;
            self.slots.give(slot);
        }
        epoch == self.epoch
    }

    /// Forgets every block; the file must be ordered to as well.
    pub(crate) fn clear(&mut self) {
        self.places.clear();
        self.slots = Slots::new(self.layout.slots());
        self.draining = 0;
        self.epoch += 1;
    }

    /// The place of a block of that short name.
    pub(crate) fn get(&self, block: BlockHash) -> Option<(BlockKey, Place)> {
        self.places.get(&block).copied()
    }

    /// Where a block rests.
    pub(crate) fn place(&self, key: BlockKey) -> Option<Place> {
        self.get(key.short()).filter(|(known, _)| *known == key).map(|(_, place)| place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout { block_bytes: 10, capacity: 2, fingerprint: 0 };

    #[test]
    fn a_slot_is_given_out_again_only_once_it_is_freed() {
        let mut slot_table = SlotTable::new(LAYOUT, Places::default(), &[], &[]);
        let first = slot_table.reserve(1).unwrap();
        let second = slot_table.reserve(2).unwrap();
        assert!(slot_table.reserve(3).is_none(), "the spare slot adds no capacity");
        assert!(slot_table.commit(BlockKey(1), first) && !slot_table.commit(BlockKey(1), second));
        assert!(matches!(slot_table.remove(BlockHash(1)), Some(Order::Remove(place)) if place == first));
        let third = slot_table.reserve(3).expect("the spare slot");
        assert!(third.slot != first.slot && third.generation > second.generation);
        slot_table.failed();
        assert!(!slot_table.has_free() && slot_table.in_use() == 1 && slot_table.draining() == 2);
        assert!(slot_table.freed(first.slot, 0));
        assert_eq!(slot_table.reserve(4).map(|place| place.slot), Some(first.slot));
    }

    #[test]
    fn what_was_freed_before_a_clear_stays_with_its_new_tenant() {
        let mut slot_table = SlotTable::new(LAYOUT, Places::default(), &[], &[]);
        let old = slot_table.reserve(1).unwrap();
        slot_table.failed();
        slot_table.clear();
        let new = slot_table.reserve(2).unwrap();
        assert_eq!(old.slot, new.slot);
        assert!(!slot_table.freed(old.slot, 0));
        assert_eq!((slot_table.in_use(), slot_table.draining()), (1, 0));
    }

    #[test]
    fn what_was_left_is_there_and_what_is_stale_drains() {
        let entry = |slot, generation| {
            let place = Place { slot, generation, checksum: 0 };
            Entry { key: BlockKey(5), parent: None, place }
        };
        let kept = entry(2, 9);
        let places = Places::from_iter([(kept.key.short(), (kept.key, kept.place))]);
        let mut slot_table = SlotTable::new(LAYOUT, places, &[kept], &[entry(0, 8)]);
        assert_eq!((slot_table.committed(), slot_table.in_use(), slot_table.draining()), (1, 1, 1));
        assert_eq!(slot_table.place(BlockKey(5)).map(|place| place.slot), Some(2));
        let place = slot_table.reserve(0).unwrap();
        assert_eq!((place.slot, place.generation), (1, 10));
        assert_eq!(slot_table.place(BlockKey(5 | 1 << 90)), None);
    }
}
