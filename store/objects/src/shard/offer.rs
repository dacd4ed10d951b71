//! Objects to be copied to the tiers below, and when.

use std::sync::Arc;

use baton_types::TenantId;

use super::Shard;
use crate::arena::ArenaMemory;
use crate::lower::{LowerView, Offer, name_of};

/// Objects that may wait for the worker; further ones are skipped until they are touched again.
const OFFERS_MAX: usize = 1024;
/// Most marks of evicted keys.
const GHOSTS_MAX: usize = 1 << 16;

/// An object that is to be copied down.
#[derive(Debug)]
pub(crate) struct PickedObject {
    pub(crate) name: u64,
    pub(crate) tag: u64,
    pub(crate) tenant: String,
    pub(crate) key: Vec<u8>,
    pub(crate) room: Arc<ArenaMemory>,
    pub(crate) checksum: Option<u32>,
}

/// An empty table of marks for so many keys.
pub(super) fn ghosts(keys: usize) -> Vec<u32> {
    vec![0; keys.next_power_of_two().min(GHOSTS_MAX)]
}

/// The place of a key's mark, and the mark.
fn mark(place: u64, ghosts: usize) -> (usize, u32) {
    let at = usize::try_from(place >> 32).unwrap_or(0) & (ghosts - 1);
    (at, u32::try_from(place & u64::from(u32::MAX)).expect("masked to 32 bits") | 1)
}

impl Shard {
    /// A writer's entry was sealed: it may be known from earlier.
    pub(super) fn sealed_new(&mut self, number: u32) {
        let Some(below) = self.below.clone() else { return };
        let (at, mark) = mark(self.entries.at(number).place, self.ghosts.len());
        let touches = u8::from(std::mem::take(&mut self.ghosts[at]) == mark);
        self.entries.at_mut(number).touches = touches;
        if (0..=touches).any(|touches| below.admits(touches)) {
            self.offer(&below, number);
        }
    }

    /// An entry came up from the SSD.
    pub(super) fn sealed_from_ssd(&mut self, number: u32) {
        let touches = self.below.as_ref().map_or(0, |below| below.touches_from_ssd());
        self.entries.at_mut(number).touches = touches;
    }

    /// An entry was read.
    pub(super) fn touched(&mut self, number: u32) {
        let Some(below) = &self.below else { return };
        let entry = self.entries.at_mut(number);
        if entry.touches == u8::MAX {
            return;
        }
        entry.touches += 1;
        let touches = entry.touches;
        let cold = below.cold.as_ref().is_some_and(|cold| cold.admits(touches));
        if cold || below.admits(touches) {
            let below = Arc::clone(below);
            if cold {
                self.offer_cold(&below, number);
            }
            if below.admits(touches) {
                self.offer(&below, number);
            }
        }
    }

    /// The bucket is offered an entry at once; it takes what it has hands for.
    fn offer_cold(&mut self, below: &LowerView, number: u32) {
        let entry = self.entries.at_mut(number);
        if entry.expires_us == u64::MAX
            && let Some(cold) = &below.cold
            && let Some(room) = entry.sealed()
            && let Ok(share) = self.tenants.share(TenantId(entry.tenant))
        {
            let (tenant, key, room) = (share.name().to_owned(), entry.key.to_vec(), Arc::clone(room));
            let (name, checksum) = (name_of(&tenant, &key), entry.checksum);
            if !cold.offer(Offer { name, tenant, key, room, checksum }) {
                // The next touch offers it again.
                entry.touches -= 1;
            }
        }
    }

    /// Offers an entry to the worker, which copies it down later. An entry with a time to live is not worth a write.
    fn offer(&mut self, below: &LowerView, number: u32) {
        let entry = self.entries.at_mut(number);
        if entry.expires_us != u64::MAX {
            return;
        }
        if self.offers.len() >= OFFERS_MAX {
            // The next touch offers it again.
            entry.touches = entry.touches.saturating_sub(1);
            return below.pass_over();
        }
        self.offers.push_back((number, entry.generation));
        below.offer();
    }

    /// An entry is being evicted: unless it was worth a copy, its key is remembered for a while.
    pub(super) fn remember(&mut self, number: u32) {
        let Some(below) = &self.below else { return };
        let entry = self.entries.at(number);
        if !(0..=entry.touches).any(|touches| below.admits(touches)) {
            let (at, mark) = mark(entry.place, self.ghosts.len());
            self.ghosts[at] = mark;
        }
    }

    /// The next object that is to be copied down; from now on the directory has it as being written.
    pub(crate) fn pick(&mut self) -> Option<PickedObject> {
        let below = self.below.clone()?;
        while let Some((number, generation)) = self.offers.pop_front() {
            below.taken();
            let entry = self.entries.at(number);
            let Some(room) = entry.sealed().filter(|_| entry.generation == generation) else { continue };
            if entry.expires_us != u64::MAX {
                continue;
            }
            let Ok(share) = self.tenants.share(TenantId(entry.tenant)) else { continue };
            let (name, tag) = (name_of(share.name(), &entry.key), below.fresh_tag());
            if !below.directory.begin(name, tag) {
                continue;
            }
            let (room, checksum) = (Arc::clone(room), entry.checksum);
            let (tenant, key) = (share.name().to_owned(), entry.key.to_vec());
            return Some(PickedObject { name, tag, tenant, key, room, checksum });
        }
        None
    }
}
