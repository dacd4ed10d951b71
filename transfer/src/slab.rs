//! Things by slot: a slot stays with its thing until it is removed, and is then used again.

use alloc::vec::Vec;
use core::ops::{Index, IndexMut};

/// A vector with holes. Iterates in order of slots, which is the same on every run.
#[derive(Clone, Debug)]
pub(crate) struct Slab<T> {
    entries: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    #[expect(clippy::cast_possible_truncation, reason = "everything kept here is bounded by a u32")]
    pub(crate) fn insert(&mut self, thing: T) -> u32 {
        if let Some(slot) = self.free.pop() {
            let before = self.entries[slot as usize].replace(thing);
            assert!(before.is_none(), "a free slot holds nothing");
            return slot;
        }
        assert!(self.entries.len() < u32::MAX as usize, "slots are numbered with 32 bits");
        self.entries.push(Some(thing));
        self.entries.len() as u32 - 1
    }

    pub(crate) fn remove(&mut self, slot: u32) -> T {
        self.free.push(slot);
        self.entries[slot as usize].take().expect("a slot is removed by the one that filled it, once")
    }

    pub(crate) fn get(&self, slot: u32) -> Option<&T> {
        self.entries.get(slot as usize).and_then(Option::as_ref)
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    #[expect(clippy::cast_possible_truncation, reason = "everything kept here is bounded by a u32")]
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let filled = self.entries.iter().enumerate();
        filled.filter_map(|(slot, entry)| entry.as_ref().map(|thing| (slot as u32, thing)))
    }
}

impl<T> Index<u32> for Slab<T> {
    type Output = T;

    fn index(&self, slot: u32) -> &T {
        self.entries[slot as usize].as_ref().expect("slots are named only while they are filled")
    }
}

impl<T> IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, slot: u32) -> &mut T {
        self.entries[slot as usize].as_mut().expect("slots are named only while they are filled")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeMap;
    use baton_types::Rng;

    #[test]
    fn slots_stay_and_are_used_again() {
        let mut slab = Slab::default();
        let (a, b) = (slab.insert('a'), slab.insert('b'));
        assert_eq!((slab.remove(a), slab.len()), ('a', 1));
        assert_eq!(slab.insert('c'), a);
        slab[b] = 'd';
        assert!(slab.iter().eq([(0, &'c'), (1, &'d')]));
        assert_eq!(slab.get(7), None);
    }

    #[test]
    fn behaves_as_a_map_and_takes_no_more_slots_than_were_ever_filled_at_once() {
        let (mut slab, mut model, mut rng, mut most) = (Slab::default(), BTreeMap::new(), Rng::new(1), 0);
        for turn in 0..20_000u64 {
            // Fills for a while, then drains, so that holes of every shape come up.
            let fills = if turn / 2_000 % 2 == 0 { 700 } else { 300 };
            if rng.chance_permille(fills) || model.is_empty() {
                let slot = slab.insert(turn);
                assert_eq!(model.insert(slot, turn), None, "a slot in use was given away");
                most = most.max(model.len());
            } else {
                let nth = rng.below(model.len() as u64) as usize;
                let (&slot, &kept) = model.iter().nth(nth).unwrap();
                slab[slot] += 1;
                assert_eq!((slab.remove(slot), model.remove(&slot)), (kept + 1, Some(kept)));
                assert_eq!(slab.get(slot), None);
            }
            assert_eq!(slab.len(), model.len());
            assert!(model.keys().all(|&slot| (slot as usize) < most), "a hole was left unused");
            if turn.is_multiple_of(64) {
                assert!(slab.iter().eq(model.iter().map(|(&slot, thing)| (slot, thing))));
                assert!(
                    model.iter().all(|(&slot, thing)| slab[slot] == *thing && slab.get(slot) == Some(thing))
                );
            }
        }
    }

    #[test]
    #[should_panic(expected = "removed by the one that filled it, once")]
    fn a_slot_is_not_removed_twice() {
        let mut slab = Slab::default();
        let slot = slab.insert(());
        slab.remove(slot);
        slab.remove(slot);
    }

    #[test]
    #[should_panic(expected = "only while they are filled")]
    fn a_hole_is_not_read() {
        let mut slab = Slab::default();
        let (hole, _) = (slab.insert(1), slab.insert(2));
        slab.remove(hole);
        assert_eq!(slab[hole], 1);
    }

    #[test]
    #[should_panic(expected = "only while they are filled")]
    fn a_hole_is_not_written() {
        let mut slab = Slab::default();
        let hole = slab.insert(1);
        slab.remove(hole);
        slab[hole] = 2;
    }
}
