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
            self.entries[slot as usize] = Some(thing);
            return slot;
        }
        self.entries.push(Some(thing));
        self.entries.len() as u32 - 1
    }

    pub(crate) fn remove(&mut self, slot: u32) -> T {
        self.free.push(slot);
        self.entries[slot as usize].take().expect("a slot is removed by whoever filled it, once")
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
}
