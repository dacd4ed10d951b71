//! A node starts again: what its flash kept becomes readable.

use crate::effect::Effect;
use crate::lifecycle::{NONE, SSD, Slot, depth_class};
use crate::store::Store;
use crate::tiering::send_stored;
use alloc::vec::Vec;
use baton_types::BlockKey;

impl Store {
    /// Takes blocks over that rest on flash; those that do not fit into the tree or the tier are
    /// left out.
    pub(crate) fn recovered(&mut self, blocks: &[(BlockKey, Option<BlockKey>)], effects: &mut Vec<Effect>) {
        // Where in its chain each block is: by number, for the depth class of its children.
        let mut positions: Vec<u32> = Vec::new();
        let mut taken: Vec<u32> = Vec::new();
        self.table.reserve(blocks.len().min(self.tiers[SSD].space.free() as usize));
        for &(key, parent) in blocks {
            if self.tiers[SSD].space.free() == 0 {
                break;
            }
            let Some((above, position)) = self.place_below(parent, &positions) else { continue };
            if self.table.find(key).is_some() {
                continue;
            }
            let number = self.table.insert_in(key, above, self.age, (SSD, Slot::Ready));
            self.table[number].depth_class = depth_class(position);
            positions.resize(self.table.numbers_end(), 0);
            positions[number as usize] = position as u32;
            self.tiers[SSD].space.reserve(1);
            self.tiers[SSD].space.fill();
            taken.push(number);
        }
        send_stored(&self.table, SSD, &taken, effects);
        // The last block of a chain is in line to go before those that it continues, and what was
        // used last comes last of all.
        for &block in taken.iter().rev() {
            if let Some(reuse) = &mut self.reuse {
                reuse.recovered(block, positions[block as usize] as usize);
                reuse.rested(block);
            }
            let facts = self.facts(block);
            self.tiers[SSD].resting.rest(block, facts);
        }
    }

    /// The number of the block above, and the position of one below it. `None`: there is none that
    /// can be read from flash.
    fn place_below(&self, parent: Option<BlockKey>, positions: &[u32]) -> Option<(u32, usize)> {
        let Some(parent) = parent else { return Some((NONE, 0)) };
        let above = self.table.find(parent).filter(|&above| self.table[above].slots[SSD] == Slot::Ready)?;
        let position = positions.get(above as usize).map_or(0, |&position| position as usize);
        Some((above, position + 1))
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::{Rig, keys};
    use crate::{Effect, Input, Offload};
    use alloc::vec::Vec;
    use baton_types::{BlockHash, BlockKey, Tier};

    fn recover(rig: &mut Rig, blocks: &[(u128, u128)]) -> Vec<Effect> {
        let above = |parent: u128| (parent > 0).then_some(BlockKey(parent));
        let blocks: Vec<_> = blocks.iter().map(|&(key, parent)| (BlockKey(key), above(parent))).collect();
        rig.step(Input::Recovered { blocks: &blocks })
    }

    #[test]
    fn chains_come_back_and_what_hangs_in_the_air_does_not() {
        let mut rig = Rig::new([8, 0, 16], Offload::WriteThrough);
        let told = recover(&mut rig, &[(1, 0), (2, 1), (3, 2), (7, 6), (8, 7), (9, 1), (2, 9)]);
        let hashes = |list: &[u64]| list.iter().map(|&hash| BlockHash(hash)).collect();
        let stored = |parent, list: &[u64]| Effect::Stored { parent, hashes: hashes(list), tier: Tier::Ssd };
        assert_eq!(told, [stored(None, &[1, 2, 3]), stored(Some(BlockHash(1)), &[9])]);
        assert_eq!(
            (rig.hits(&[1, 2, 3]), rig.hits(&[1, 9]), rig.hits(&[7, 8])),
            ((0, 0, 3), (0, 0, 2), (0, 0, 0))
        );
        assert_eq!(rig.store.stats().tiers[2].used_blocks, 4);
        assert_eq!(rig.store.check(), Ok(()));
        rig.open(1, &[1, 2, 3, 4], 0);
        assert_eq!(rig.store.onboard_keys(crate::testing::owner(1)).len(), 3);
    }

    #[test]
    fn a_small_tier_takes_what_was_used_last_and_gives_up_leaves_first() {
        let mut rig = Rig::new([2, 0, 3], Offload::WriteThrough);
        recover(&mut rig, &[(5, 0), (6, 5), (1, 0), (2, 1)]);
        assert_eq!((rig.hits(&[5, 6]), rig.hits(&[1, 2])), ((0, 0, 2), (0, 0, 1)));
        assert_eq!(rig.store.check(), Ok(()));
        rig.serve(1, &[20]);
        rig.offloaded(0, true);
        assert_eq!((rig.hits(&[5, 6]), rig.hits(&[1])), ((0, 0, 2), (0, 0, 0)), "the oldest went");
        rig.serve(2, &[21]);
        rig.offloaded(1, true);
        assert_eq!(rig.hits(&[5, 6]), (0, 0, 1), "the end of the chain");
        assert_eq!(rig.store.parent(BlockKey(5)), None);
        assert_eq!(rig.store.offload_keys(9), keys(&[]));
    }

    /// Under every policy, recovered chains rest, are served and go from their ends.
    #[test]
    fn chains_come_back_under_every_eviction_policy() {
        for eviction in crate::Eviction::ALL {
            let mut rig = Rig::new([4, 0, 4], Offload::WriteThrough);
            rig = Rig::with(crate::StoreConfig { eviction, ..rig.store.config().clone() });
            recover(&mut rig, &[(1, 0), (2, 1), (3, 2), (4, 3)]);
            assert_eq!((rig.hits(&[1, 2, 3, 4]), rig.store.check()), ((0, 0, 4), Ok(())), "{eviction:?}");
            for (request, key) in [(1, 20), (2, 21)] {
                rig.serve(request, &[key]);
                rig.offloaded(request - 1, true);
                assert_eq!(rig.store.check(), Ok(()), "{eviction:?}");
            }
            let (_, _, left) = rig.hits(&[1, 2, 3, 4]);
            assert!(left >= 2, "{eviction:?} kept {left} of a chain of which two blocks had to go");
        }
    }

    #[test]
    fn a_node_without_flash_recovers_nothing() {
        let mut rig = Rig::new([8, 8, 0], Offload::WriteThrough);
        assert_eq!(recover(&mut rig, &[(1, 0)]), []);
        assert_eq!(rig.store.stats().blocks, 0);
    }
}
