//! Queries of the driver that owns the bytes, for use before it moves any. They change nothing.

use crate::input::Owner;
use crate::lifecycle::{HBM, NONE, Slot};
use crate::pin::Hold;
use crate::store::Store;
use alloc::vec::Vec;
use baton_types::{BlockHash, BlockKey, Tier};

/// A block's copy in one tier, as the store sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyState {
    /// There is none, and no slot for one.
    Absent,
    /// A slot is reserved and bytes are on their way.
    Filling,
    /// The copy is complete and readable.
    Ready,
}

impl Store {
    /// The copy of `key` in a tier.
    #[must_use]
    pub fn copy_state(&self, key: BlockKey, tier: Tier) -> CopyState {
        let block = self.table.find(key).map(|block| &self.table[block]);
        match block.map(|block| block.slots[tier.index()]) {
            None | Some(Slot::Empty) => CopyState::Absent,
            Some(Slot::Filling) => CopyState::Filling,
            Some(Slot::Ready) => CopyState::Ready,
        }
    }

    /// The whole name of a block that rests here in any tier, by its short one.
    #[must_use]
    pub fn named(&self, hash: BlockHash) -> Option<BlockKey> {
        self.table.find_short(hash).map(|block| self.table[block].key)
    }

    /// The block that `key` continues; `None` if it is a root, or not known.
    #[must_use]
    pub fn parent(&self, key: BlockKey) -> Option<BlockKey> {
        let parent = self.table[self.table.find(key)?].parent;
        (parent != NONE).then(|| self.table[parent].key)
    }

    /// The position of the first block of `chain` that is known here as the continuation of
    /// another block. Honest chains have none, since a key commits to all that precedes it (I1).
    #[must_use]
    pub fn misfit(&self, chain: &[BlockKey]) -> Option<usize> {
        let mut parent = Some(NONE);
        chain.iter().position(|&key| {
            let known = self.table.find(key);
            let fits = known.is_none_or(|block| Some(self.table[block].parent) == parent);
            parent = known;
            !fits
        })
    }

    /// The blocks of an unanswered [`Offload`](crate::Effect::Offload) whose copies have not been
    /// called off, parents before children.
    #[must_use]
    pub fn offload_keys(&self, ticket: u64) -> Vec<BlockKey> {
        let Ok(position) = self.tickets.binary_search_by_key(&ticket, |known| known.number) else {
            return Vec::new();
        };
        let blocks = self.tickets[position].blocks.iter().rev();
        let live = blocks.filter(|&&(block, generation)| self.table[block].generation == generation);
        live.map(|&(block, _)| self.table[block].key).collect()
    }

    /// The blocks that still wait for their bytes in that unanswered [`Onboard`](crate::Effect::Onboard) of the owner
    /// which comes first in its chain, from the root, each with the fastest tier to read it from, if it still is in
    /// one.
    #[must_use]
    pub fn onboard_keys(&self, owner: Owner) -> Vec<(BlockKey, Option<Tier>)> {
        let Some(hold) = self.hold(owner) else { return Vec::new() };
        let Some(load) = hold.first_load().map(|at| hold.duties[at]) else { return Vec::new() };
        let run = hold.blocks[load.from as usize..load.to as usize].iter().map(|&block| &self.table[block]);
        let unfilled = run.filter(|block| block.slots[HBM] == Slot::Filling);
        unfilled.map(|block| (block.key, Tier::LOCAL.get(block.below_hbm()).copied())).collect()
    }

    /// The first position of the owner's chain, at `from` or later, whose HBM slot is filled by
    /// another owner or by an unanswered `Onboard` of this one. `None`: nothing to wait for.
    #[must_use]
    pub fn next_awaited(&self, owner: Owner, from: u32) -> Option<u32> {
        let hold = self.hold(owner).filter(|hold| !hold.reads_only)?;
        let mine =
            |at: u32| hold.duties.iter().any(|duty| !duty.is_load && (duty.from..duty.to).contains(&at));
        let unfilled = |at: &u32| self.table[hold.blocks[*at as usize]].slots[HBM] == Slot::Filling;
        (from..hold.blocks.len() as u32).filter(unfilled).find(|&at| !mine(at))
    }

    /// The leading blocks of the owner's chain that are readable in HBM.
    #[must_use]
    pub fn readable_blocks(&self, owner: Owner) -> u32 {
        let Some(hold) = self.hold(owner) else { return 0 };
        let ready = |&&block: &&u32| self.table[block].slots[HBM] == Slot::Ready;
        hold.blocks.iter().take_while(ready).count() as u32
    }

    fn hold(&self, owner: Owner) -> Option<&Hold> {
        self.holds.find(owner).map(|number| self.holds.get(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Offload;
    use crate::testing::{Rig, keys, owner};

    /// DRAM holds 1–2–3; HBM, of 8 slots, is free.
    fn rig() -> Rig {
        let mut rig = Rig::new([8, 16, 0], Offload::WriteThrough);
        rig.serve(1, &[1, 2, 3]);
        assert_eq!(rig.store.offload_keys(0), keys(&[1, 2, 3]), "parents first");
        rig.offloaded(0, true);
        assert_eq!(rig.store.offload_keys(0), [], "answered");
        rig.open(2, &[], 8);
        rig.close(2);
        rig
    }

    #[test]
    fn a_block_is_named_by_its_short_name_in_whatever_tier() {
        let mut rig = rig();
        let whole = 7 << 64 | 42;
        rig.serve(3, &[whole]);
        assert_eq!(rig.store.named(BlockKey(42).short()), Some(BlockKey(whole)), "in HBM");
        assert_eq!(rig.store.named(BlockKey(2).short()), Some(BlockKey(2)), "in DRAM alone");
        assert_eq!(rig.store.named(BlockKey(43).short()), None);
        rig.step(crate::Input::Clear);
        assert_eq!(rig.store.named(BlockKey(42).short()), None);
    }

    #[test]
    fn a_copy_is_absent_then_filling_then_ready() {
        let mut rig = rig();
        let state = |rig: &Rig, key, tier| rig.store.copy_state(BlockKey(key), tier);
        assert_eq!(state(&rig, 1, Tier::Hbm), CopyState::Absent);
        assert_eq!(state(&rig, 1, Tier::Dram), CopyState::Ready);
        assert_eq!(state(&rig, 99, Tier::Dram), CopyState::Absent);
        rig.open(3, &[1, 9], 0);
        assert_eq!(state(&rig, 1, Tier::Hbm), CopyState::Filling);
        rig.onboarded(3, true);
        assert_eq!(state(&rig, 1, Tier::Hbm), CopyState::Ready);
        assert_eq!(state(&rig, 9, Tier::Hbm), CopyState::Filling);
    }

    #[test]
    fn a_chain_must_hang_in_the_tree_as_before() {
        let rig = rig();
        let misfit = |chain: &[u128]| rig.store.misfit(&keys(chain));
        assert_eq!(misfit(&[]), None);
        assert_eq!(misfit(&[1, 2, 3, 4]), None);
        assert_eq!(misfit(&[1, 2, 7, 8]), None);
        assert_eq!(misfit(&[2, 3]), Some(0), "2 continues 1");
        assert_eq!(misfit(&[7, 1]), Some(1), "1 is a root");
        assert_eq!(misfit(&[1, 3]), Some(1), "3 continues 2");
        assert_eq!(misfit(&[1, 1]), Some(1));
    }

    #[test]
    fn a_load_names_its_blocks_until_it_is_answered() {
        let mut rig = rig();
        rig.open(3, &[1, 2, 4], 0);
        let want = [1, 2].map(|key| (BlockKey(key), Some(Tier::Dram)));
        assert_eq!(rig.store.onboard_keys(owner(3)), want);
        assert_eq!(rig.store.onboard_keys(owner(4)), []);
        rig.onboarded(3, false);
        assert_eq!(rig.store.onboard_keys(owner(3)), []);
    }

    #[test]
    fn who_waits_for_what() {
        let mut rig = rig();
        rig.open(3, &[1, 2, 4], 0);
        rig.open(4, &[1, 2, 4, 5], 0);
        let awaited = |rig: &Rig, of, from| rig.store.next_awaited(owner(of), from);
        assert_eq!((awaited(&rig, 3, 0), awaited(&rig, 4, 0)), (Some(0), Some(0)));
        rig.onboarded(3, true);
        assert_eq!((awaited(&rig, 3, 0), awaited(&rig, 4, 0)), (None, Some(2)));
        assert_eq!(rig.store.readable_blocks(owner(4)), 2);
        assert_eq!(awaited(&rig, 4, 3), None, "5 is its own to fill");
        rig.close(3);
        assert_eq!(awaited(&rig, 4, 0), None, "4 is inherited");
        assert_eq!(rig.store.readable_blocks(owner(9)), 0);
    }

    #[test]
    fn readers_wait_for_nothing() {
        let mut rig = rig();
        rig.open(3, &[1, 2], 0);
        rig.read(4, &[1, 2]);
        assert_eq!(rig.store.next_awaited(owner(4), 0), None);
        assert_eq!(rig.store.next_awaited(owner(9), 0), None);
    }

    #[test]
    fn a_called_off_copy_leaves_its_ticket() {
        let mut rig = Rig::new([2, 4, 0], Offload::WriteThrough);
        rig.serve(1, &[1, 2]);
        rig.open(2, &[8], 0);
        assert_eq!(rig.store.offload_keys(0), keys(&[1]), "2 was evicted before its copy was made");
    }
}
