//! One prefix cache of a fixed size, least recently used out first: the hit ratio a single store of
//! so many tokens would have.

use crate::seen::IdMap;

const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Slot {
    id: u64,
    newer: u32,
    older: u32,
}

/// A cache of blocks. A request is looked up, then inserted whole, its root touched last, so that
/// no block is evicted before those that follow it.
#[derive(Debug)]
pub struct PrefixLru {
    slots: Vec<Slot>,
    by_id: IdMap<u32>,
    newest: u32,
    oldest: u32,
    capacity_blocks: usize,
}

impl PrefixLru {
    /// An empty cache of `capacity_blocks` blocks.
    #[must_use]
    pub fn new(capacity_blocks: u64) -> Self {
        Self {
            slots: Vec::new(),
            by_id: IdMap::default(),
            newest: NONE,
            oldest: NONE,
            capacity_blocks: usize::try_from(capacity_blocks).unwrap_or(usize::MAX).min(NONE as usize - 1),
        }
    }

    /// Looks a prompt up and inserts it. Returns how many of its leading blocks were there.
    pub fn request(&mut self, ids: &[u64]) -> u64 {
        let matched = ids.iter().take_while(|id| self.by_id.contains_key(*id)).count() as u64;
        if self.capacity_blocks > 0 {
            ids.iter().rev().for_each(|&id| self.touch(id));
        }
        matched
    }

    /// Blocks held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Whether no block is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    fn touch(&mut self, id: u64) {
        let slot = match self.by_id.get(&id) {
            Some(&slot) => {
                self.unlink(slot);
                slot
            }
            None => self.take_slot(id),
        };
        self.link_newest(slot);
    }

    /// A slot that holds `id` and is linked to nothing: a fresh one, or the oldest's.
    fn take_slot(&mut self, id: u64) -> u32 {
        let fresh = Slot { id, newer: NONE, older: NONE };
        let slot = if self.slots.len() < self.capacity_blocks {
            self.slots.push(fresh);
            u32::try_from(self.slots.len() - 1).expect("the capacity is below 2^32")
        } else {
            let slot = self.oldest;
            self.unlink(slot);
            self.by_id.remove(&self.slots[slot as usize].id);
            self.slots[slot as usize] = fresh;
            slot
        };
        self.by_id.insert(id, slot);
        slot
    }

    fn unlink(&mut self, slot: u32) {
        let Slot { newer, older, .. } = self.slots[slot as usize];
        match newer {
            NONE => self.newest = older,
            newer => self.slots[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.slots[older as usize].newer = newer,
        }
    }

    fn link_newest(&mut self, slot: u32) {
        let before = std::mem::replace(&mut self.newest, slot);
        self.slots[slot as usize].newer = NONE;
        self.slots[slot as usize].older = before;
        match before {
            NONE => self.oldest = slot,
            before => self.slots[before as usize].newer = slot,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The cache as a list, newest first.
    fn naive(list: &mut Vec<u64>, capacity: usize, ids: &[u64]) -> u64 {
        let matched = ids.iter().take_while(|id| list.contains(id)).count() as u64;
        for id in ids.iter().rev() {
            list.retain(|held| held != id);
            list.insert(0, *id);
            list.truncate(capacity);
        }
        matched
    }

    proptest! {
        #[test]
        fn it_is_the_naive_list(
            requests in proptest::collection::vec(proptest::collection::vec(0u64..30, 0..12), 0..80),
            capacity in 0u64..25,
        ) {
            let (mut lru, mut list) = (PrefixLru::new(capacity), Vec::new());
            for ids in &requests {
                prop_assert_eq!(lru.request(ids), naive(&mut list, capacity as usize, ids));
                prop_assert_eq!(lru.len(), list.len());
                prop_assert_eq!(lru.is_empty(), list.is_empty());
            }
        }
    }

    #[test]
    fn the_leaf_goes_before_the_root() {
        let mut lru = PrefixLru::new(3);
        lru.request(&[1, 2, 3]);
        lru.request(&[9]);
        assert_eq!(lru.request(&[1, 2, 3]), 2);
    }
}
