//! Look-ups, leases, pins, time to live, listing.

use std::sync::{Arc, Weak};

use super::Shard;
use crate::arena::ArenaMemory;
use crate::entry::{Entry, State};
use crate::key::Key;
use crate::lower::ForgottenCopies;
use crate::refusal::Refusal;
use crate::store::{ListedKey, ObjectStat};

/// A key and where it hashes to in its shard.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    pub(crate) key: Key<'a>,
    pub(crate) place: u64,
    pub(crate) now_us: u64,
}

/// A value for one call that reads it at once.
#[derive(Debug)]
pub(crate) struct FetchedValue {
    pub(crate) room: Arc<ArenaMemory>,
    pub(crate) checksum: Option<u32>,
}

/// A value under a lease.
#[derive(Debug)]
pub(crate) struct LeasedValue {
    pub(crate) number: u32,
    pub(crate) room: Weak<ArenaMemory>,
    pub(crate) stat: ObjectStat,
}

impl Shard {
    fn hit(&mut self, at: &Place<'_>) -> Option<u32> {
        let there = self.find_live(&at.key, at.place, at.now_us);
        let found = there.filter(|_| self.is_whole(at));
        match found {
            Some(number) => {
                self.counters.hits += 1;
                self.entries.at_mut(number).visited = true;
                // A reader of one part reads the others next.
                self.others(number).into_iter().for_each(|other| self.entries.at_mut(other).visited = true);
                self.touched(number);
            }
            None => {
                self.counters.misses += 1;
                self.counters.incomplete += u64::from(there.is_some());
            }
        }
        found
    }

    /// The value, kept alive by the answer itself.
    pub(crate) fn fetch(&mut self, at: &Place<'_>) -> Option<FetchedValue> {
        let entry = self.hit(at).map(|number| self.entries.at(number))?;
        let room = Arc::clone(entry.sealed().expect("what is found is sealed"));
        Some(FetchedValue { room, checksum: entry.checksum })
    }

    /// The value under a lease: it stays until [`Shard::close`], or the end of the lease.
    pub(crate) fn open(&mut self, at: &Place<'_>) -> Option<LeasedValue> {
        let number = self.hit(at)?;
        Some(self.lease(number, at.now_us))
    }

    /// Renews the lease of a value's readers; does nothing when another value has taken the memory.
    #[cfg(feature = "resp")]
    pub(crate) fn renew_reader(&mut self, (number, generation): (u32, u64), now_us: u64) {
        let lease_us = now_us.saturating_add(self.config.set.read_lease_us);
        let entry = self.entries.at_mut(number);
        if entry.generation == generation {
            entry.lease_us = entry.lease_us.max(lease_us);
        }
    }

    /// The value under a lease, for who has brought it up: neither a hit nor a touch.
    pub(crate) fn hold(&mut self, at: &Place<'_>) -> Option<LeasedValue> {
        let number = self.find_live(&at.key, at.place, at.now_us)?;
        Some(self.lease(number, at.now_us))
    }

    fn lease(&mut self, number: u32, now_us: u64) -> LeasedValue {
        let lease_us = now_us.saturating_add(self.config.set.read_lease_us);
        let entry = self.entries.at_mut(number);
        entry.readers += 1;
        entry.lease_us = entry.lease_us.max(lease_us);
        let room = Arc::downgrade(entry.sealed().expect("what is found is sealed"));
        LeasedValue { number, room, stat: stat_of(entry, now_us) }
    }

    /// Ends one reader's lease; does nothing when another value has taken the memory.
    pub(crate) fn close(&mut self, number: u32, generation: u64) {
        let entry = self.entries.at_mut(number);
        if entry.generation != generation {
            return;
        }
        entry.readers -= 1;
        if entry.readers == 0 && matches!(entry.state, State::Leaving(_)) {
            self.free(number);
        }
    }

    /// The facts about a key. Changes neither its mark nor its lease.
    pub(crate) fn stat(&self, at: &Place<'_>) -> Option<ObjectStat> {
        self.stat_hidden_too(at).filter(|_| self.is_whole(at))
    }

    /// The facts about a key, even if it is a part of an object that is not whole.
    pub(crate) fn stat_hidden_too(&self, at: &Place<'_>) -> Option<ObjectStat> {
        let entry = self.entries.at(self.find(&at.key, at.place)?);
        (!entry.is_expired(at.now_us)).then(|| stat_of(entry, at.now_us))
    }

    /// Removes a key, its copy below in the same step. Those who read it go on.
    pub(crate) fn remove(&mut self, at: &Place<'_>, name: Option<u64>) -> Result<ForgottenCopies, Refusal> {
        let removed = self.remove_here(at);
        if removed == Err(Refusal::Pinned) {
            return Err(Refusal::Pinned);
        }
        let forgotten = self.forget(name, None);
        if forgotten.is_nothing() { removed.map(|()| forgotten) } else { Ok(forgotten) }
    }

    /// Removes a key if the value in memory is of this generation.
    #[cfg(feature = "resp")]
    pub(crate) fn remove_generation(
        &mut self,
        at: &Place<'_>,
        name: Option<u64>,
        generation: u64,
    ) -> Result<ForgottenCopies, Refusal> {
        let number = self.find_live(&at.key, at.place, at.now_us).ok_or(Refusal::Absent)?;
        if self.entries.at(number).generation != generation {
            return Err(Refusal::Absent);
        }
        self.remove(at, name)
    }

    /// Gives up the copies of a key below; the bucket's only if it is not of a value with this digest.
    pub(super) fn forget(&self, name: Option<u64>, digest: Option<u64>) -> ForgottenCopies {
        let known = self.below.as_ref().zip(name);
        known.map(|(below, name)| below.forget(name, digest)).unwrap_or_default()
    }

    /// Removals of older values of a key that the SSD has not confirmed.
    pub(super) fn unconfirmed_removal(&self, name: Option<u64>) -> ForgottenCopies {
        let known = self.below.as_ref().zip(name);
        ForgottenCopies { ssd: known.and_then(|(below, name)| below.unconfirmed_removal(name)), cold: None }
    }

    fn remove_here(&mut self, at: &Place<'_>) -> Result<(), Refusal> {
        let number = self.find_live(&at.key, at.place, at.now_us).ok_or(Refusal::Absent)?;
        if self.entries.at(number).hard_pins > 0 {
            return Err(Refusal::Pinned);
        }
        self.counters.removed += 1;
        self.retire(number, at.now_us);
        Ok(())
    }

    /// Keeps a value until it is unpinned as often. A pinned value leaves its queue: hands do not meet it.
    pub(crate) fn pin(&mut self, at: &Place<'_>) -> Result<(), Refusal> {
        let number = self.find_live(&at.key, at.place, at.now_us).ok_or(Refusal::Absent)?;
        self.entries.at_mut(number).hard_pins += 1;
        self.unlink(number);
        Ok(())
    }

    pub(crate) fn unpin(&mut self, at: &Place<'_>) -> Result<(), Refusal> {
        // A pinned value that has expired is still there to be unpinned.
        let number = self.find(&at.key, at.place).ok_or(Refusal::Absent)?;
        let entry = self.entries.at_mut(number);
        entry.hard_pins = entry.hard_pins.checked_sub(1).ok_or(Refusal::Absent)?;
        if entry.hard_pins == 0 {
            self.link(number);
        }
        Ok(())
    }

    /// Keeps a value until a time, as long as something else is found that can be evicted.
    pub(crate) fn pin_softly(&mut self, at: &Place<'_>, for_us: u64) -> Result<(), Refusal> {
        let number = self.find_live(&at.key, at.place, at.now_us).ok_or(Refusal::Absent)?;
        let entry = self.entries.at_mut(number);
        entry.soft_pin_us = entry.soft_pin_us.max(at.now_us.saturating_add(for_us));
        Ok(())
    }

    /// Sets or takes away the time to live of a key.
    pub(crate) fn set_ttl(
        &mut self,
        at: &Place<'_>,
        ttl_us: Option<u64>,
        name: Option<u64>,
    ) -> Result<ForgottenCopies, Refusal> {
        let number = self.find_live(&at.key, at.place, at.now_us).ok_or(Refusal::Absent)?;
        self.expire_after(number, ttl_us, at.now_us);
        // A copy below has no end: one of a value that has would outlive it.
        Ok(self.forget(name.filter(|_| ttl_us.is_some()), None))
    }

    pub(super) fn expire_after(&mut self, number: u32, ttl_us: Option<u64>, now_us: u64) {
        let entry = self.entries.at_mut(number);
        let before = entry.expires_us != u64::MAX;
        entry.expires_us = ttl_us.map_or(u64::MAX, |ttl_us| now_us.saturating_add(ttl_us));
        let after = entry.expires_us != u64::MAX;
        self.expiring = self.expiring + usize::from(after) - usize::from(before);
    }

    /// Keys of `entries` entries from number `from` on, and where to go on; none at the end. Parts of an object that is
    /// not whole are among them only with `hidden`.
    pub(crate) fn list(
        &self,
        (from, entries): (u32, u32),
        now_us: u64,
        hidden: bool,
    ) -> (Vec<ListedKey>, Option<u32>) {
        let end = self.entries.end().min(from.saturating_add(entries));
        let live = (from..end).map(|number| self.entries.at(number));
        let live = live.filter(|entry| {
            let key = Key { tenant: baton_types::TenantId(entry.tenant), bytes: &entry.key };
            let readable = entry.sealed().is_some() && !entry.is_expired(now_us);
            readable && (hidden || self.is_whole(&Place { key, place: entry.place, now_us }))
        });
        let listed = live.map(|entry| ListedKey {
            tenant: baton_types::TenantId(entry.tenant),
            key: entry.key.to_vec(),
            stat: stat_of(entry, now_us),
        });
        (listed.collect(), (end < self.entries.end()).then_some(end))
    }
}

fn stat_of(entry: &Entry, now_us: u64) -> ObjectStat {
    ObjectStat {
        bytes: entry.bytes,
        generation: entry.generation,
        checksum: entry.checksum,
        ttl_us: (entry.expires_us != u64::MAX).then(|| entry.expires_us.saturating_sub(now_us)),
        hard_pins: entry.hard_pins,
        readers: entry.readers,
        lasts: false,
        cold: false,
    }
}
