//! One step of the store, and what follows from it at once.

use super::copies::CopyOrder;
use super::{Address, KvCache, Notice};
use crate::slots::Slots;
use crate::tier::Tier as _;
use baton_store::{CopyState, Effect, Input, Owner};
use baton_types::{BlockHash, BlockKey, CacheChange, Tier};

impl KvCache {
    /// Steps the store; slots that it gave up are free when this returns. Gives its answers to
    /// the one who asked.
    pub(super) fn step(&mut self, input: Input<'_>) -> Vec<Effect> {
        let mut effects = Vec::new();
        // The store has no timers: all its steps may happen at once.
        self.store.step(0, input, &mut effects);
        self.has_input = true;
        effects.into_iter().filter_map(|effect| self.settle(effect)).collect()
    }

    /// Acts on an effect, or gives it back if it is an answer.
    fn settle(&mut self, effect: Effect) -> Option<Effect> {
        match effect {
            Effect::Stored { parent, hashes, tier } => {
                self.notices.push(Notice::Changed(CacheChange::Stored { parent, hashes, tier }));
            }
            Effect::Removed { hashes, tier } => {
                hashes.iter().for_each(|&block| self.forget(block, tier));
                self.notices.push(Notice::Changed(CacheChange::Removed { hashes, tier }));
            }
            Effect::Cleared => {
                self.forget_all();
                self.notices.push(Notice::Changed(CacheChange::Cleared));
            }
            Effect::Offload { ticket, from, to, .. } => {
                self.copies.push_back(CopyOrder::new(ticket, from, to))
            }
            Effect::Onboard { owner, .. } => self.order_load(owner),
            // The owner hears of both by `Notice::Ready`, once it waits for nothing else.
            Effect::OnboardFailed { .. } | Effect::Inherited { .. } => {}
            answer @ (Effect::Opened { .. }
            | Effect::Refused { .. }
            | Effect::AlreadyOpen { .. }
            | Effect::Grown { .. }
            | Effect::GrowRefused { .. }) => return Some(answer),
        }
        None
    }

    /// The store gave up a readable copy.
    fn forget(&mut self, block: BlockHash, tier: Tier) {
        match tier {
            Tier::Hbm => _ = self.vacate(block),
            Tier::Dram => _ = self.dram.remove(block),
            Tier::Ssd => {
                if let Some(file) = &mut self.file {
                    file.remove(block);
                }
            }
        }
    }

    fn forget_all(&mut self) {
        self.addresses.clear();
        self.slots = Slots::new(self.config.hbm_blocks());
        self.dram.clear();
        if let Some(file) = &mut self.file {
            file.clear();
        }
        self.held.clear();
        self.waiting.clear();
        self.copies.clear();
        self.loads.clear();
        self.purposes.clear();
    }

    /// Frees a block's HBM slot, if it has one.
    pub(super) fn vacate(&mut self, block: BlockHash) -> bool {
        let left = self.addresses.remove(&block);
        if let Some(address) = left {
            self.slots.give(address.slot);
        }
        left.is_some()
    }

    /// Gives a block of the store its HBM slot.
    pub(super) fn settle_in(&mut self, key: BlockKey, slot: u32) {
        let before = self.addresses.insert(key.short(), Address { key, slot });
        assert!(before.is_none(), "a block has one HBM slot");
    }

    /// A free slot, which the store's count says there is.
    pub(super) fn take_slot(&mut self) -> u32 {
        self.slots.take().expect("I4: the store granted no more slots than there are")
    }

    /// The slot of a block in HBM.
    pub(super) fn address(&self, key: BlockKey) -> Option<u32> {
        self.addresses.get(&key.short()).filter(|address| address.key == key).map(|address| address.slot)
    }

    /// Ends an owner's hold in the store, and frees the slots of unfilled blocks.
    pub(super) fn close_in_store(&mut self, owner: Owner, chain: &[BlockKey]) {
        self.waiting.remove(&owner);
        self.loads.remove(&owner);
        self.step(Input::Close { owner });
        for &key in chain {
            if self.store.copy_state(key, Tier::Hbm) == CopyState::Absent && self.address(key).is_some() {
                self.vacate(key.short());
            }
        }
    }

    /// Leading blocks of `chain` that can be what they claim to be: none is known as the
    /// continuation of another block, appears twice, or shares its 64-bit name with another.
    pub(super) fn plausible_blocks(&self, chain: &[BlockKey]) -> usize {
        let fit = self.store.misfit(chain).unwrap_or(chain.len());
        let mut seen = crate::short::ShortNameMap::default();
        let is_new = |key: &&BlockKey| {
            let stranger = self.addresses.get(&key.short()).is_some_and(|address| address.key != **key);
            !stranger && seen.insert(key.short(), ()).is_none()
        };
        chain[..fit].iter().take_while(is_new).count()
    }
}
