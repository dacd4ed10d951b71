//! Which of very many lists goes first: a tournament of their ranks, lowest first.

use super::list::Lists;
use alloc::string::String;
use alloc::vec::Vec;

/// Stands for a list without blocks.
const NOBODY: u32 = u32::MAX;
/// The highest rank that a list can have.
pub(super) const MAX_RANK: u32 = NOBODY - 1;

/// The ranks of the first lists, and a binary tree of the lowest among those with
/// blocks. Finding the lowest takes constant time, a change the depth of the tree. Ties go to the
/// list with the lower number.
#[derive(Debug, Default)]
pub(super) struct Ranks {
    rank: Vec<u32>,
    /// Node 1 is the root, node `n` has children `2n` and `2n + 1`; the leaves are last.
    tree: Vec<u32>,
}

impl Ranks {
    /// So many lists, all of rank 0 and without blocks.
    pub(super) fn new(lists: usize) -> Self {
        let leaves = lists.next_power_of_two();
        Self { rank: alloc::vec![0; lists], tree: alloc::vec![NOBODY; 2 * leaves] }
    }

    /// Whether there are no lists to rank.
    pub(super) const fn is_empty(&self) -> bool {
        self.rank.is_empty()
    }

    /// `list` has blocks now.
    pub(super) fn mark_filled(&mut self, list: usize) {
        self.set(list, self.rank[list]);
    }

    /// `list` has a new rank.
    pub(super) fn rerank(&mut self, list: usize, rank: u32) {
        self.rank[list] = rank.min(MAX_RANK);
        if self.tree[self.tree.len() / 2 + list] != NOBODY {
            self.set(list, self.rank[list]);
        }
    }

    /// The list of the lowest rank that has blocks.
    pub(super) fn lowest(&mut self, lists: &Lists) -> Option<usize> {
        loop {
            let lowest = *self.tree.get(1)?;
            if lowest == NOBODY {
                return None;
            }
            let (mut node, leaves) = (1, self.tree.len() / 2);
            while node < leaves {
                node = 2 * node + usize::from(self.tree[2 * node] != lowest);
            }
            let list = node - leaves;
            if lists.oldest(list).is_some() {
                return Some(list);
            }
            self.set(list, NOBODY);
        }
    }

    /// Audits the tree: every list with blocks stands in it with its rank.
    pub(super) fn check(&self, lists: &Lists) -> Result<(), String> {
        let leaves = self.tree.len() / 2;
        for (list, &rank) in self.rank.iter().enumerate() {
            let stands = self.tree[leaves + list];
            let missing = stands == NOBODY && lists.oldest(list).is_some();
            if missing || (stands != NOBODY && stands != rank) {
                return Err(alloc::format!("list {list} of rank {rank} stands as {stands}"));
            }
        }
        for node in 1..leaves {
            if self.tree[node] != self.tree[2 * node].min(self.tree[2 * node + 1]) {
                return Err(alloc::format!("node {node} of the ranks is not the lower of its two"));
            }
        }
        Ok(())
    }

    fn set(&mut self, list: usize, rank: u32) {
        let mut node = self.tree.len() / 2 + list;
        if self.tree[node] == rank {
            return;
        }
        self.tree[node] = rank;
        while node > 1 {
            node /= 2;
            let lower = self.tree[2 * node].min(self.tree[2 * node + 1]);
            if self.tree[node] == lower {
                return;
            }
            self.tree[node] = lower;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_lowest_is_what_a_scan_finds(
            ops in proptest::collection::vec((0u8..4, 0usize..5, 0u32..6), 0..80),
        ) {
            let (mut lists, mut ranks) = (Lists::new(5), Ranks::new(5));
            let mut naive = [0u32; 5];
            for (op, mark_filled, value) in ops {
                match op {
                    0 | 1 if !lists.contains(value) => {
                        lists.push_newest(mark_filled, value);
                        ranks.mark_filled(mark_filled);
                    }
                    2 if lists.contains(value) => lists.unlink(value),
                    3 => {
                        ranks.rerank(mark_filled, value);
                        naive[mark_filled] = value;
                    }
                    _ => {}
                }
                prop_assert_eq!(ranks.check(&lists), Ok(()));
                let scan = (0..5).filter(|&s| lists.oldest(s).is_some()).min_by_key(|&s| naive[s]);
                prop_assert_eq!(ranks.lowest(&lists), scan);
                prop_assert_eq!(ranks.check(&lists), Ok(()));
            }
        }
    }
}
