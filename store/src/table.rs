//! All known blocks: a slab, an index by key, and the tree of which block continues which.

use crate::lifecycle::{Block, DRAM, HBM, NONE, SSD, Slot, TIERS};
use alloc::vec::Vec;
use baton_types::{BlockHash, BlockKey};
use core::ops::{Index, IndexMut};
use hashbrown::HashTable;

/// Blocks by number and by key. A block's parent is in the table as long as the block is.
#[derive(Debug, Default)]
pub(crate) struct Table {
    blocks: Vec<Block>,
    free: Vec<u32>,
    index: HashTable<u32>,
}

/// Keys are hashes already; the product only spreads keys that a test numbers by hand.
fn spread(key: BlockKey) -> u64 {
    spread_short(key.short())
}

fn spread_short(hash: BlockHash) -> u64 {
    let product = hash.0.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    product ^ (product >> 32)
}

impl Index<u32> for Table {
    type Output = Block;
    fn index(&self, block: u32) -> &Block {
        &self.blocks[block as usize]
    }
}

impl IndexMut<u32> for Table {
    fn index_mut(&mut self, block: u32) -> &mut Block {
        &mut self.blocks[block as usize]
    }
}

impl Table {
    /// The block named `key`.
    pub(crate) fn find(&self, key: BlockKey) -> Option<u32> {
        self.index.find(spread(key), |&block| self[block].key == key).copied()
    }

    /// A block whose short name is `hash`.
    pub(crate) fn find_short(&self, hash: BlockHash) -> Option<u32> {
        self.index.find(spread_short(hash), |&block| self[block].key.short() == hash).copied()
    }

    /// The block named `key` that continues `parent`; a key under another parent is a miss, so
    /// that an inconsistent chain can never knot the tree.
    pub(crate) fn find_under(&self, parent: u32, key: BlockKey) -> Option<u32> {
        self.find(key).filter(|&block| self[block].parent == parent)
    }

    /// Adds a block that is not there yet, as a child of `parent`, with an HBM slot to be filled.
    pub(crate) fn insert(&mut self, key: BlockKey, parent: u32, age: u16) -> u32 {
        self.insert_in(key, parent, age, (HBM, Slot::Filling))
    }

    /// Adds a block that is not there yet, as a child of `parent`, with a copy in one tier.
    pub(crate) fn insert_in(&mut self, key: BlockKey, parent: u32, age: u16, copy: (usize, Slot)) -> u32 {
        let mut block = Block::new(key, parent, age);
        block.slots[copy.0] = copy.1;
        let fastest = block.fastest();
        let parent_lives = parent == NONE || self[parent].slots != [Slot::Empty; TIERS];
        assert!(parent_lives, "a block's parent is in the table as long as the block is");
        let number = match self.free.pop() {
            Some(number) => {
                assert!(self[number].slots == [Slot::Empty; TIERS], "the number of a block is its own");
                block.generation = self[number].generation;
                self[number] = block;
                number
            }
            None => {
                assert!(self.blocks.len() < NONE as usize, "blocks are numbered with 32 bits");
                self.blocks.push(block);
                (self.blocks.len() - 1) as u32
            }
        };
        let blocks = &self.blocks;
        self.index.insert_unique(spread(key), number, |&other| spread(blocks[other as usize].key));
        if parent != NONE {
            let above = &mut self[parent];
            if let Some(children) = above.children.get_mut(fastest) {
                *children += 1;
            }
            let next = core::mem::replace(&mut above.first_child, number);
            self[number].next_sibling = next;
            if next != NONE {
                self[next].prev_sibling = number;
            }
        }
        number
    }

    /// Makes room for so many more at once.
    pub(crate) fn reserve(&mut self, more: usize) {
        self.blocks.reserve(more);
        let blocks = &self.blocks;
        self.index.reserve(more, |&other| spread(blocks[other as usize].key));
    }

    /// Takes out a block without children, whose last copy was in `tier`, or which has none
    /// (`TIERS`).
    pub(crate) fn remove_leaf(&mut self, number: u32, tier: usize) {
        let block = &mut self[number];
        assert!(block.first_child == NONE, "a child never outlives its parent");
        assert!(block.pins == 0, "I3: a pinned block is never evicted");
        block.generation = block.generation.wrapping_add(1);
        block.slots = [Slot::Empty; TIERS];
        let (key, parent, next, prev) = (block.key, block.parent, block.next_sibling, block.prev_sibling);
        if tier <= DRAM && parent != NONE {
            let children = &mut self[parent].children[tier];
            assert!(*children > 0, "a parent counts its children by their fastest tier");
            *children -= 1;
        }
        if prev != NONE {
            self[prev].next_sibling = next;
        } else if parent != NONE {
            self[parent].first_child = next;
        }
        if next != NONE {
            self[next].prev_sibling = prev;
        }
        let entry = self.index.find_entry(spread(key), |&other| other == number);
        entry.expect("a block is indexed under its key").remove();
        self.free.push(number);
    }

    /// Changes a block's copy in `tier` and keeps its parent's count of children by fastest tier.
    pub(crate) fn set_slot(&mut self, number: u32, tier: usize, slot: Slot) {
        let block = &mut self[number];
        let (parent, before) = (block.parent, block.fastest());
        block.slots[tier] = slot;
        let after = block.fastest();
        if before == after || parent == NONE {
            return;
        }
        let children = &mut self[parent].children;
        if before <= DRAM {
            assert!(children[before] > 0, "a parent counts its children by their fastest tier");
            children[before] -= 1;
        }
        if after <= DRAM {
            children[after] += 1;
        }
    }

    /// Whether no child rests with its fastest copy in `tier`.
    pub(crate) fn is_leaf_in(&self, number: u32, tier: usize) -> bool {
        let block = &self[number];
        if tier < SSD { block.children[tier] == 0 } else { block.first_child == NONE }
    }

    /// The children of a block, newest first.
    pub(crate) fn children(&self, number: u32) -> impl Iterator<Item = u32> + '_ {
        let there = |child| (child != NONE).then_some(child);
        core::iter::successors(there(self[number].first_child), move |&child| there(self[child].next_sibling))
    }

    /// The end of the leftmost path below a block, or the block itself.
    pub(crate) fn first_leaf_below(&self, mut number: u32) -> u32 {
        while self[number].first_child != NONE {
            number = self[number].first_child;
        }
        number
    }

    /// The numbers of all blocks, ascending.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.blocks.len() as u32).filter(|&number| self[number].slots != [Slot::Empty; TIERS])
    }

    /// How many blocks there are.
    pub(crate) fn len(&self) -> usize {
        self.index.len()
    }

    /// One more than the highest number ever given out.
    pub(crate) fn numbers_end(&self) -> usize {
        self.blocks.len()
    }

    /// Takes out everything.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn blocks_are_found_by_key_and_numbers_are_used_again() {
        let mut table = Table::default();
        let root = table.insert(BlockKey(1), NONE, 0);
        let child = table.insert(BlockKey(2), root, 0);
        assert_eq!(table.find(BlockKey(2)), Some(child));
        assert_eq!(table.find_under(NONE, BlockKey(2)), None, "it continues another block");
        let generation = table[child].generation;
        table.remove_leaf(child, HBM);
        assert_eq!(table.find(BlockKey(2)), None);
        assert_eq!(table[root].children, [0, 0]);
        let again = table.insert(BlockKey(3), root, 0);
        assert_eq!(again, child);
        assert_ne!(table[again].generation, generation);
        assert_eq!(table.len(), 2);
    }

    #[test]
    fn keys_that_share_their_low_half_are_told_apart() {
        let mut table = Table::default();
        let a = table.insert(BlockKey(7), NONE, 0);
        let b = table.insert(BlockKey(7 | 1 << 100), NONE, 0);
        assert_eq!(table.find(BlockKey(7)), Some(a));
        table.remove_leaf(a, TIERS);
        assert_eq!(table.find(BlockKey(7 | 1 << 100)), Some(b));
    }

    #[test]
    fn the_tree_survives_removal_at_any_place() {
        for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
            let mut table = Table::default();
            let root = table.insert(BlockKey(9), NONE, 0);
            let children: Vec<u32> = (0..3).map(|k| table.insert(BlockKey(k), root, 0)).collect();
            let mut left = vec![children[2], children[1], children[0]];
            for position in order {
                table.remove_leaf(children[position], TIERS);
                left.retain(|&kid| kid != children[position]);
                assert_eq!(table.children(root).collect::<Vec<_>>(), left);
            }
        }
    }

    #[test]
    fn a_parent_counts_its_children_by_fastest_tier() {
        let mut table = Table::default();
        let root = table.insert(BlockKey(1), NONE, 0);
        let child = table.insert(BlockKey(2), root, 0);
        table.set_slot(child, DRAM, Slot::Ready);
        assert_eq!(table[root].children, [1, 0]);
        table.set_slot(child, HBM, Slot::Empty);
        assert_eq!(table[root].children, [0, 1]);
        assert!(table.is_leaf_in(root, HBM) && !table.is_leaf_in(root, DRAM));
        table.set_slot(child, DRAM, Slot::Empty);
        assert_eq!(table[root].children, [0, 0]);
    }

    #[test]
    #[should_panic(expected = "outlives")]
    fn a_parent_cannot_go_first() {
        let mut table = Table::default();
        let root = table.insert(BlockKey(1), NONE, 0);
        table.insert(BlockKey(2), root, 0);
        table.remove_leaf(root, TIERS);
    }
}
