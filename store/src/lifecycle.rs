//! One block: where its copies are in their life, who needs it, and where it hangs in the tree.

use baton_types::BlockKey;

/// "No block" in links.
pub(crate) const NONE: u32 = u32::MAX;
/// HBM's position among the tiers.
pub(crate) const HBM: usize = 0;
/// DRAM's position among the tiers.
pub(crate) const DRAM: usize = 1;
/// Flash's position among the tiers.
pub(crate) const SSD: usize = 2;
/// Number of local tiers, and the "fastest tier" of a block that has no copy.
pub(crate) const TIERS: usize = 3;
/// Frequencies saturate here.
pub(crate) const MAX_FREQUENCY: u8 = 59;
/// The deepest depth class.
pub(crate) const MAX_DEPTH_CLASS: u8 = 14;

/// A block's copy in one tier: `Empty` → `Filling` → `Ready` → `Empty`, or back from `Filling`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Slot {
    /// No slot.
    #[default]
    Empty,
    /// A slot is reserved and bytes are on their way.
    Filling,
    /// Readable (I2).
    Ready,
}

/// The state of a block. One cache line.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    /// Its name.
    pub key: BlockKey,
    /// The block that it continues.
    pub parent: u32,
    /// One of the blocks that continue it.
    pub first_child: u32,
    /// Next among the blocks that continue the same parent.
    pub next_sibling: u32,
    /// Previous among them.
    pub prev_sibling: u32,
    /// Children whose fastest tier is HBM, and DRAM.
    pub children: [u32; 2],
    /// Owners that hold it.
    pub pins: u32,
    /// Changes when a copy under way is called off, so that its ticket is seen to be stale.
    pub generation: u32,
    /// The halving of frequencies that `frequency` was last brought up to.
    pub age: u16,
    /// Its copies.
    pub slots: [Slot; TIERS],
    /// Times asked for, halved now and then, saturating.
    pub frequency: u8,
    /// Base-2 logarithm of its position in the chain, saturating.
    pub depth_class: u8,
    /// Whether it was asked for more than once.
    pub twice: bool,
    /// Whether it has a reserved HBM slot without an owner to fill it: only readers hold the block, and the next
    /// owner that opens it takes the slot over.
    pub unclaimed: bool,
}

impl Block {
    /// A block in use for the first time, without copies.
    pub(crate) const fn new(key: BlockKey, parent: u32, age: u16) -> Self {
        Self {
            key,
            parent,
            first_child: NONE,
            next_sibling: NONE,
            prev_sibling: NONE,
            children: [0; 2],
            pins: 0,
            generation: 0,
            age,
            slots: [Slot::Empty; TIERS],
            frequency: 1,
            depth_class: 0,
            twice: false,
            unclaimed: false,
        }
    }

    /// The fastest tier that it counts as resting in: HBM from the moment its slot is reserved,
    /// slower tiers once their copy is complete. `TIERS` if none.
    pub(crate) fn fastest(&self) -> usize {
        if self.slots[HBM] != Slot::Empty {
            return HBM;
        }
        self.below_hbm()
    }

    /// The fastest tier below HBM that it can be read from; `TIERS` if none.
    pub(crate) fn below_hbm(&self) -> usize {
        self.fastest_after(HBM)
    }

    /// The fastest tier that it can be read from.
    pub(crate) fn readable(&self) -> Option<usize> {
        (HBM..TIERS).find(|&tier| self.slots[tier] == Slot::Ready)
    }

    /// The fastest tier slower than `tier` that it can be read from; `TIERS` if none.
    pub(crate) fn fastest_after(&self, tier: usize) -> usize {
        (tier + 1..TIERS).find(|&slower| self.slots[slower] == Slot::Ready).unwrap_or(TIERS)
    }

    /// Whether its readable copy in `tier` is all there is of it and of what continues it.
    pub(crate) fn is_last_leaf_copy(&self, tier: usize) -> bool {
        let mut alone = [Slot::Empty; TIERS];
        alone[tier] = Slot::Ready;
        self.first_child == NONE && self.slots == alone
    }

    /// Counts one more request for it; `age` is the number of halvings so far.
    pub(crate) fn touch(&mut self, age: u16) {
        self.frequency = (self.frequency_at(age) + 1).min(MAX_FREQUENCY);
        self.age = age;
        self.twice = true;
    }

    /// Its frequency after all halvings up to `age`.
    pub(crate) fn frequency_at(&self, age: u16) -> u8 {
        let halvings = u32::from(age.wrapping_sub(self.age)).min(7);
        self.frequency >> halvings
    }
}

/// The depth class of a block at `position` in its chain.
pub(crate) fn depth_class(position: usize) -> u8 {
    (position + 1).ilog2().min(u32::from(MAX_DEPTH_CLASS)) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_fits_a_cache_line() {
        assert_eq!(size_of::<Block>(), 64);
    }

    #[test]
    fn the_fastest_tier_counts_a_reserved_hbm_slot_but_no_unfinished_copy_below() {
        let mut block = Block::new(BlockKey(1), NONE, 0);
        assert_eq!((block.fastest(), block.readable()), (TIERS, None));
        block.slots = [Slot::Filling, Slot::Ready, Slot::Filling];
        assert_eq!((block.fastest(), block.readable()), (HBM, Some(DRAM)));
        assert_eq!((block.below_hbm(), block.fastest_after(DRAM)), (DRAM, TIERS));
        block.slots = [Slot::Ready, Slot::Filling, Slot::Empty];
        assert_eq!(block.below_hbm(), TIERS);
        block.slots = [Slot::Empty, Slot::Ready, Slot::Filling];
        assert_eq!((block.fastest(), block.fastest_after(DRAM)), (DRAM, TIERS));
    }

    #[test]
    fn frequencies_halve_lazily_and_saturate() {
        let mut block = Block::new(BlockKey(1), NONE, 0);
        for _ in 0..100 {
            block.touch(0);
        }
        assert_eq!(block.frequency, MAX_FREQUENCY);
        assert_eq!(block.frequency_at(2), MAX_FREQUENCY / 4);
        assert_eq!(block.frequency_at(300), 0);
        block.touch(3);
        assert_eq!((block.frequency, block.age), (MAX_FREQUENCY / 8 + 1, 3));
    }

    #[test]
    fn depth_classes_grow_with_the_logarithm() {
        assert_eq!([0, 1, 2, 3, 7, usize::MAX - 1].map(depth_class), [0, 1, 1, 2, 3, MAX_DEPTH_CLASS]);
    }
}
