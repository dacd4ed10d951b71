//! Generated tokens become cache: private slots are given to the store under their keys, the
//! bytes staying where they are.

use super::hold::{HoldRecord, Misuse, refusal};
use super::{KvCache, Pool};
use baton_store::{CopyState, Effect, Hits, Input, Owner};
use baton_types::{BlockKey, Tier};
use std::collections::BTreeSet;

impl KvCache {
    /// Ends a hold and keeps the generated blocks. `chain` is the whole chain of full blocks, that of the hold and
    /// its continuation, and `slots` has the slot of each. Slots beyond the hold's chain belong to its private room
    /// and are filled. Returns how many blocks beyond the hold's chain are now readable in HBM under their keys,
    /// including those that another owner filled.
    ///
    /// # Errors
    /// `NotOpen`, `NotYours` if the hold's own chain is not sealed throughout, or `WrongSlots`.
    /// The hold has then ended as by [`KvCache::close`].
    pub fn adopt(
        &mut self,
        owner: Owner,
        chain: &[BlockKey],
        slots: &[u32],
        pool: &mut dyn Pool,
    ) -> Result<u32, Misuse> {
        let checked = self.check_adoption(owner, chain, slots);
        let beyond = match &checked {
            Ok(own_blocks) => self.adoptable(chain, *own_blocks),
            Err(_) => 0,
        };
        if beyond == 0 {
            self.close(owner);
            return checked.map(|_| 0);
        }
        let Some(held) = self.held.remove(&owner) else { return Err(Misuse::NotOpen) };
        let upto = held.chain.len() + beyond;
        let adopted = self.carry_over(owner, held, &chain[..upto], &slots[..upto]);
        self.run_copies(pool);
        Ok(adopted)
    }

    /// The length of the hold's own chain, if it may be continued by `chain` in `slots`.
    fn check_adoption(&self, owner: Owner, chain: &[BlockKey], slots: &[u32]) -> Result<usize, Misuse> {
        let held = self.held.get(&owner).filter(|held| !held.reads_only).ok_or(Misuse::NotOpen)?;
        let own = held.chain.len();
        if chain.len() != slots.len() || chain.get(..own) != Some(&held.chain[..]) {
            return Err(Misuse::WrongSlots);
        }
        let readable = self.store.readable_blocks(owner);
        if readable < own as u32 {
            return Err(Misuse::NotYours { position: readable });
        }
        let known = |(&key, &slot): (&BlockKey, &u32)| self.address(key) == Some(slot);
        let mut room: BTreeSet<u32> = held.room.iter().copied().collect();
        let fits = chain[..own].iter().zip(slots).all(known) && slots[own..].iter().all(|s| room.remove(s));
        if fits { Ok(own) } else { Err(Misuse::WrongSlots) }
    }

    /// How many blocks beyond the first `own` can be adopted: up to the first that another owner
    /// is filling, or that cannot be what it claims to be.
    fn adoptable(&self, chain: &[BlockKey], own: usize) -> usize {
        let plausible = self.plausible_blocks(chain).max(own);
        let filling = |key: &&BlockKey| self.store.copy_state(**key, Tier::Hbm) == CopyState::Filling;
        chain[own..plausible].iter().take_while(|key| !filling(key)).count()
    }

    /// Closes the hold and at once opens, seals and closes the longer one; nothing can come
    /// between, and the room given back is enough for it.
    fn carry_over(&mut self, owner: Owner, held: HoldRecord, chain: &[BlockKey], slots: &[u32]) -> u32 {
        let own = held.chain.len();
        self.close_in_store(owner, &held.chain);
        let answers = self.step(Input::Open { owner, chain, room_blocks: 0 });
        let mut kept = BTreeSet::new();
        let opened = refusal(&answers).is_ok();
        if opened {
            for (&key, &slot) in chain.iter().zip(slots).skip(own) {
                if self.address(key).is_none() {
                    self.settle_in(key, slot);
                    kept.insert(slot);
                }
            }
            self.step(Input::Seal { owner, upto_blocks: chain.len() as u32 });
            self.close_in_store(owner, chain);
        }
        held.room.iter().filter(|slot| !kept.contains(slot)).for_each(|&slot| self.slots.give(slot));
        self.discount(&answers, chain.len());
        if opened { (chain.len() - own) as u32 } else { 0 }
    }

    /// Takes an adoption's open out of the counts of requests.
    fn discount(&mut self, answers: &[Effect], asked: usize) {
        for answer in answers {
            let Effect::Opened { hbm, dram, ssd, .. } = *answer else { continue };
            let Hits { hbm: a, dram: b, ssd: c, total } = self.adopted.hits;
            let found = hbm + dram + ssd;
            self.adopted.hits = Hits { hbm: a + hbm, dram: b + dram, ssd: c + ssd, total: total + found };
            self.adopted.opened += 1;
            self.adopted.missed += asked as u64 - u64::from(found);
        }
    }
}
