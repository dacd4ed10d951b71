//! Opening, filling, growing and closing a hold.

use super::{KvCache, Pool};
use baton_store::{Effect, Input, Owner};
use baton_types::BlockKey;

/// The answer to an owner's open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// The HBM slots of its chain, from the root, then those of its private room. Blocks that
    /// others fill have their slots here too.
    pub slots: Vec<u32>,
    /// Leading blocks that are readable in HBM now.
    pub readable_blocks: u32,
    /// Whether blocks are being brought up or filled by others: a
    /// [`Notice::Ready`](super::Notice::Ready) will follow, and tell from where on to compute.
    /// If not, the owner computes from `readable_blocks` on at once.
    pub waiting: bool,
}

/// Why an owner got nothing. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HoldRefusal {
    /// It has a hold already.
    #[error("cache: this owner has a hold already; close it first")]
    AlreadyOpen,
    /// It has none that could grow.
    #[error("cache: this owner has no hold to grow; open one first")]
    NotOpen,
    /// The rest of the pool is pinned.
    #[error(
        "cache: {needed_blocks} HBM blocks needed, {available_blocks} not in use; wait for a hold to close"
    )]
    NoRoom {
        /// Slots needed beyond those shared.
        needed_blocks: u64,
        /// Slots that could be had.
        available_blocks: u64,
    },
    /// The chain contradicts what is known: its block at `position` appears twice, continues
    /// another block, or has the 64-bit name of another.
    #[error("cache: block {position} of the chain contradicts known blocks; serve it without the cache")]
    Misfit {
        /// Its position in the chain.
        position: usize,
    },
}

/// An owner's violation of the contract. Nothing was sealed or adopted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Misuse {
    /// It has no hold, or one that only reads.
    #[error("cache: this owner holds nothing to fill; open first")]
    NotOpen,
    /// The block at `position` is not this owner's to vouch for: it is being brought up, or
    /// another owner fills it.
    #[error("cache: block {position} is not this owner's to vouch for; wait until it is ready")]
    NotYours {
        /// Its position in the chain.
        position: u32,
    },
    /// The slots named are not those of the hold.
    #[error("cache: the slots named are not those of this hold")]
    WrongSlots,
}

/// The cache's record of a hold.
#[derive(Debug)]
pub(crate) struct HoldRecord {
    /// The blocks pinned, from the root.
    pub chain: Vec<BlockKey>,
    /// Private slots.
    pub room: Vec<u32>,
    /// Leading blocks known to be readable in HBM.
    pub sealed: u32,
    /// Whether it only reads.
    pub reads_only: bool,
}

impl KvCache {
    /// Pins the existing blocks of `chain` and reserves slots for the rest of it and for `room_blocks` private ones.
    /// Blocks below HBM are brought up.
    ///
    /// A chain names full blocks, or blocks that nobody will write to once they are sealed: two
    /// owners of one block share its slot. The tokens after it belong in the private room.
    ///
    /// # Errors
    /// `AlreadyOpen`, `Misfit` or `NoRoom`; then nothing changed.
    pub fn open(&mut self, owner: Owner, chain: &[BlockKey], room_blocks: u32) -> Result<Hold, HoldRefusal> {
        let position = self.plausible_blocks(chain);
        if position < chain.len() && !self.held.contains_key(&owner) {
            return Err(HoldRefusal::Misfit { position });
        }
        let answers = self.step(Input::Open { owner, chain, room_blocks });
        refusal(&answers)?;
        let mut slots: Vec<u32> = chain.iter().map(|&key| self.slot_of(key)).collect();
        let room: Vec<u32> = (0..room_blocks).map(|_| self.take_slot()).collect();
        slots.extend(&room);
        let readable_blocks = self.store.readable_blocks(owner);
        let held = HoldRecord { chain: chain.to_vec(), room, sealed: readable_blocks, reads_only: false };
        self.held.insert(owner, held);
        let awaited = self.store.next_awaited(owner, readable_blocks);
        if let Some(position) = awaited {
            self.waiting.insert(owner, position);
        }
        Ok(Hold { slots, readable_blocks, waiting: awaited.is_some() })
    }

    /// The first `upto_blocks` of the owner's chain are filled in HBM: others may read them, and
    /// copies below are made as the policy wants.
    ///
    /// # Errors
    /// `NotOpen` or `NotYours`; then nothing was sealed.
    pub fn seal(&mut self, owner: Owner, upto_blocks: u32, pool: &mut dyn Pool) -> Result<(), Misuse> {
        let held = self.held.get(&owner).filter(|held| !held.reads_only).ok_or(Misuse::NotOpen)?;
        let upto_blocks = upto_blocks.min(held.chain.len() as u32);
        if upto_blocks <= held.sealed {
            return Ok(());
        }
        // A waiting owner does not know yet which blocks are its own.
        let position = self.store.readable_blocks(owner);
        if self.waiting.contains_key(&owner) && position < upto_blocks {
            return Err(Misuse::NotYours { position });
        }
        self.step(Input::Seal { owner, upto_blocks });
        if let Some(held) = self.held.get_mut(&owner) {
            held.sealed = upto_blocks;
        }
        self.run_copies(pool);
        Ok(())
    }

    /// Adds `room_blocks` private slots and gives them.
    ///
    /// # Errors
    /// `NotOpen` or `NoRoom`; then nothing changed.
    pub fn grow(&mut self, owner: Owner, room_blocks: u32) -> Result<Vec<u32>, HoldRefusal> {
        if self.held.get(&owner).is_none_or(|held| held.reads_only) {
            return Err(HoldRefusal::NotOpen);
        }
        refusal(&self.step(Input::GrowRoom { owner, room_blocks }))?;
        let slots: Vec<u32> = (0..room_blocks).map(|_| self.take_slot()).collect();
        if let Some(held) = self.held.get_mut(&owner) {
            held.room.extend(&slots);
        }
        Ok(slots)
    }

    /// Ends a hold. Sealed blocks stay as cache; what is not sealed is dropped, or handed to the
    /// next owner that waits for it. `false` if there was no hold: it ends once.
    pub fn close(&mut self, owner: Owner) -> bool {
        let Some(held) = self.held.remove(&owner) else { return false };
        self.close_in_store(owner, &held.chain);
        held.room.iter().for_each(|&slot| self.slots.give(slot));
        true
    }

    /// Forgets everything, holds included. After this no owner may use a slot.
    pub fn clear(&mut self) {
        self.step(Input::Clear);
    }

    /// The slot that a block of an open chain has, or now gets.
    fn slot_of(&mut self, key: BlockKey) -> u32 {
        self.address(key).unwrap_or_else(|| {
            let slot = self.take_slot();
            self.settle_in(key, slot);
            slot
        })
    }
}

/// The refusal among a step's answers.
pub(super) fn refusal(answers: &[Effect]) -> Result<(), HoldRefusal> {
    answers.iter().try_for_each(|answer| match *answer {
        Effect::AlreadyOpen { .. } => Err(HoldRefusal::AlreadyOpen),
        Effect::Refused { needed_blocks, free_or_evictable_blocks, .. }
        | Effect::GrowRefused { needed_blocks, free_or_evictable_blocks, .. } => {
            Err(HoldRefusal::NoRoom { needed_blocks, available_blocks: free_or_evictable_blocks })
        }
        _ => Ok(()),
    })
}
