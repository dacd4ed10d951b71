//! One prefix cache of a fixed size, least recently used out first: the hit ratio a single store of
//! so many tokens would have.

use std::collections::VecDeque;

use crate::seen::IdMap;

/// A cache of blocks. A request is looked up, then inserted whole, its root touched last, so that
/// no block is evicted before those that follow it.
#[derive(Debug)]
pub struct PrefixLru {
    /// By block: the number of its last use.
    last_uses: IdMap<u64>,
    /// Blocks and the numbers of their uses, oldest first. A use that is not its block's last means nothing.
    uses: VecDeque<(u64, u64)>,
    used: u64,
    capacity_blocks: u64,
}

impl PrefixLru {
    /// An empty cache of `capacity_blocks` blocks.
    #[must_use]
    pub fn new(capacity_blocks: u64) -> Self {
        Self { last_uses: IdMap::default(), uses: VecDeque::new(), used: 0, capacity_blocks }
    }

    /// Looks a prompt up and inserts it. Returns how many of its leading blocks were there.
    pub fn request(&mut self, ids: &[u64]) -> u64 {
        let matched = ids.iter().take_while(|id| self.last_uses.contains_key(*id)).count() as u64;
        for &id in ids.iter().rev() {
            self.used += 1;
            self.last_uses.insert(id, self.used);
            self.uses.push_back((id, self.used));
            while self.last_uses.len() as u64 > self.capacity_blocks {
                let Some((oldest, used)) = self.uses.pop_front() else { break };
                if self.last_uses.get(&oldest) == Some(&used) {
                    self.last_uses.remove(&oldest);
                }
            }
        }
        // Keeps the memory in proportion to the blocks held.
        if self.uses.len() / 2 > self.last_uses.len() {
            self.uses.retain(|(id, used)| self.last_uses.get(id) == Some(used));
        }
        matched
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
                prop_assert_eq!(lru.last_uses.len(), list.len());
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
