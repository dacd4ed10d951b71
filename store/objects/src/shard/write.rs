//! Reserve, seal, abandon.

use std::sync::Arc;

use hashbrown::HashTable;
use parking_lot::Mutex;

use super::{Shard, slot_bytes};
use crate::arena::{ArenaMemory, CLASSES, PAGE_BYTES, classes_of};
use crate::entry::{Entries, PendingRoom, State};
use crate::key::Key;
use crate::lower::{ForgottenCopies, Origin};
use crate::refusal::Refusal;
use crate::store::{OverwriteRule, PutOptions, StoreOutcome};

/// The arguments of a reservation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    pub(crate) key: Key<'a>,
    pub(crate) place: u64,
    pub(crate) bytes: u32,
    pub(crate) options: PutOptions,
    pub(crate) now_us: u64,
    /// Pins that can give way do.
    pub(crate) pressing: bool,
}

/// A reservation.
#[derive(Debug)]
pub(crate) struct ReservedMemory {
    pub(crate) number: u32,
    pub(crate) generation: u64,
    pub(crate) room: PendingRoom,
}

/// The arguments of a seal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SealParams {
    pub(crate) options: PutOptions,
    pub(crate) checksum: Option<u32>,
    pub(crate) origin: Origin,
    /// Hash of the value, if the bucket may have the same.
    pub(crate) digest: Option<u64>,
    pub(crate) now_us: u64,
}

/// Why there is no reservation.
#[derive(Debug)]
pub(crate) enum Stop {
    /// It must not be.
    Refused(Refusal),
    /// This shard has nothing more to give; another may.
    NoRoom,
    /// The tenant has so much that these bytes of slots do not fit its quota; what it has elsewhere may go.
    NoQuota(u64),
}

fn insert(table: &mut HashTable<u32>, entries: &Entries, number: u32) {
    table.insert_unique(entries.at(number).place, number, |other| entries.at(*other).place);
}

impl Shard {
    /// Reserves memory for a value. The readable value stays until the seal.
    pub(crate) fn begin(&mut self, request: &Request<'_>) -> Result<ReservedMemory, Stop> {
        self.sweep(request.now_us);
        self.admit(request).map_err(Stop::Refused)?;
        self.make_way_for_key(request.now_us)?;
        let cost = slot_bytes(request.bytes);
        self.charge(request, cost)?;
        let number = self.entries.take();
        self.pressing = request.pressing;
        let room = self.take_room(request.bytes, number, request.now_us);
        self.pressing = false;
        match room {
            Some(room) => Ok(self.reserve(request, number, room)),
            None => {
                self.shares[request.key.tenant.0 as usize].refund(cost);
                self.entries.at_mut(number).generation = u64::MAX;
                self.entries.free(number);
                Err(Stop::NoRoom)
            }
        }
    }

    /// Takes the cost of a value off its tenant's quota; what the tenant has here makes way.
    fn charge(&mut self, request: &Request<'_>, cost: u64) -> Result<(), Stop> {
        let Request { key, bytes, now_us, .. } = request;
        let share = self.share(key.tenant).map_err(Stop::Refused)?;
        if share.charge(cost) {
            return Ok(());
        }
        if cost > share.quota_bytes() {
            let (bytes, max_bytes) = (u64::from(*bytes), share.quota_bytes());
            return Err(Stop::Refused(Refusal::Value { bytes, max_bytes }));
        }
        self.evict_of(key.tenant, cost, *now_us, false);
        let share = self.share(key.tenant).map_err(Stop::Refused)?;
        if share.charge(cost) { Ok(()) } else { Err(Stop::NoQuota(cost)) }
    }

    /// Whether a writer may come at all: what is there may go, and nobody writes what it would rather find there.
    fn admit(&mut self, request: &Request<'_>) -> Result<(), Refusal> {
        let Request { key, place, now_us, .. } = request;
        // A put that replaces any value waits for no other: the last seal wins.
        if request.options.existing != OverwriteRule::Replace {
            self.take_over(request)?;
        }
        let Some(number) = self.find_live(key, *place, *now_us) else {
            return if request.options.only_if_present { Err(Refusal::Absent) } else { Ok(()) };
        };
        let there = self.entries.at(number);
        let differs = there.bytes != request.bytes
            || matches!((there.checksum, request.options.checksum), (Some(a), Some(b)) if a != b);
        match request.options.existing {
            OverwriteRule::Keep => Err(Refusal::Exists),
            OverwriteRule::Same if differs => Err(Refusal::Exists),
            OverwriteRule::Replace if there.hard_pins > 0 => Err(Refusal::Pinned),
            OverwriteRule::Same | OverwriteRule::Replace => Ok(()),
        }
    }

    /// Takes the place of the key's writers whose lease is over; refused while there is another.
    fn take_over(&mut self, request: &Request<'_>) -> Result<(), Refusal> {
        let Request { key, place, now_us, .. } = request;
        loop {
            let entries = &self.entries;
            let same = |number: &&u32| Self::is(entries.at(**number), key);
            let latest = self
                .pending
                .iter_hash(*place)
                .filter(same)
                .max_by_key(|number| entries.at(**number).lease_us);
            let Some(number) = latest.copied() else { return Ok(()) };
            let lease_us = entries.at(number).lease_us;
            if lease_us > *now_us {
                return Err(Refusal::Busy { retry_after_us: lease_us - now_us });
            }
            if !self.drop_pending(number) {
                return Err(Refusal::Busy { retry_after_us: 1_000 });
            }
            self.counters.taken_over += 1;
        }
    }

    fn make_way_for_key(&mut self, now_us: u64) -> Result<(), Stop> {
        let mut tries = 4;
        while self.entries.live() >= self.config.keys_by_shard {
            tries -= 1;
            if tries == 0 || !self.evict_any(now_us) {
                return Err(Stop::NoRoom);
            }
        }
        Ok(())
    }

    fn take_room(&mut self, bytes: u32, owner: u32, now_us: u64) -> Option<ArenaMemory> {
        let pages = bytes as usize / PAGE_BYTES;
        let mut tries = 2 * pages + 8;
        loop {
            let class = match ArenaMemory::take(&self.slabs, bytes, owner) {
                Ok(room) => return Some(room),
                Err(class) => class,
            };
            loop {
                tries = tries.checked_sub(1)?;
                if !self.make_room(class, now_us) {
                    return None;
                }
                // Several pages at once, or the first ones are taken and given back for each that is missing.
                if CLASSES[usize::from(class)] < PAGE_BYTES || self.arena.free_pages() >= pages {
                    break;
                }
            }
        }
    }

    fn reserve(&mut self, request: &Request<'_>, number: u32, room: ArenaMemory) -> ReservedMemory {
        let generation = self.next_generation;
        self.next_generation += 1;
        let room: PendingRoom = Arc::new(Mutex::new(Some(room)));
        let entry = self.entries.at_mut(number);
        entry.key = request.key.bytes.into();
        entry.tenant = request.key.tenant.0;
        entry.place = request.place;
        entry.generation = generation;
        entry.bytes = request.bytes;
        entry.class = classes_of(request.bytes as usize).next().unwrap_or(0);
        entry.lease_us = request.now_us.saturating_add(self.config.set.write_lease_us);
        entry.state = State::Pending(Arc::clone(&room));
        insert(&mut self.pending, &self.entries, number);
        self.trim(usize::from(self.entries.at(number).class), request.now_us);
        ReservedMemory { number, generation, room }
    }

    /// Makes a reservation readable; the copy below of what was there is given up in the same step.
    pub(crate) fn seal(
        &mut self,
        begun: &ReservedMemory,
        sealing: &SealParams,
    ) -> Result<(StoreOutcome, ForgottenCopies), Refusal> {
        let SealParams { options, checksum, origin, digest, now_us } = *sealing;
        if self.entries.at(begun.number).generation != begun.generation {
            return Err(Refusal::TakenOver);
        }
        let verdict = if self.is_current(origin) {
            self.settle(begun.number, &options, checksum, now_us)
        } else {
            Err(Refusal::TakenOver)
        };
        if !matches!(verdict, Ok(None)) {
            let dropped = self.drop_pending(begun.number);
            debug_assert!(dropped, "its writer seals it and so does not write");
            let generation = verdict?.expect("only none goes on");
            let forgotten = match (origin.writer(), options.ttl_us) {
                (name, Some(_)) => self.forget(name, None),
                // Equal bytes keep their copies, but the removal of an older value may still be in progress.
                (name, None) => self.unconfirmed_removal(name),
            };
            return Ok((StoreOutcome::Unchanged { generation }, forgotten));
        }
        let room = begun.room.lock().take().expect("a reservation with its generation has its room");
        let place = self.entries.at(begun.number).place;
        let found = self.pending.find_entry(place, |other| *other == begun.number);
        found.expect("a reservation is in its table").remove();
        let entry = self.entries.at_mut(begun.number);
        entry.state = State::Sealed(Arc::new(room));
        entry.lease_us = 0;
        entry.checksum = checksum;
        insert(&mut self.sealed, &self.entries, begun.number);
        self.link(begun.number);
        self.expire_after(begun.number, options.ttl_us, now_us);
        let mut forgotten = ForgottenCopies::default();
        match origin {
            Origin::Writer(name) => {
                self.counters.puts += 1;
                // A copy below has no end: one of a value that has would outlive it.
                forgotten = self.forget(name, digest.filter(|_| options.ttl_us.is_none()));
                self.sealed_new(begun.number);
            }
            Origin::Ssd { .. } => self.sealed_from_ssd(begun.number),
            Origin::Cold { .. } => {}
        }
        Ok((StoreOutcome::New { generation: begun.generation }, forgotten))
    }

    /// Whether what comes from below is still the value of its key.
    pub(crate) fn is_current(&self, origin: Origin) -> bool {
        match (origin, &self.below) {
            (Origin::Ssd { name, tag }, Some(below)) => below.directory.tag(name) == Some(tag),
            (Origin::Cold { name, tag }, Some(below)) => {
                below.cold.as_ref().is_some_and(|cold| cold.is_current(name, tag))
            }
            _ => true,
        }
    }

    /// Decides about the present value. Equal bytes stay, and their generation is returned. None means that the key
    /// is free. An error means that the value is in the way.
    fn settle(
        &mut self,
        number: u32,
        options: &PutOptions,
        checksum: Option<u32>,
        now_us: u64,
    ) -> Result<Option<u64>, Refusal> {
        let Some(old) = self.find_other(number, now_us) else { return Ok(None) };
        if options.existing == OverwriteRule::Keep {
            return Err(Refusal::Exists);
        }
        let there = self.entries.at(old);
        // Equal sums call for a look at the bytes; where one is missing, only a put that must know looks.
        let look = match (there.checksum, checksum) {
            (Some(a), Some(b)) => a == b,
            _ => options.existing == OverwriteRule::Same,
        };
        if look && self.same_bytes(old, number) {
            self.counters.unchanged += 1;
            self.expire_after(old, options.ttl_us, now_us);
            self.entries.at_mut(old).visited = true;
            return Ok(Some(self.entries.at(old).generation));
        }
        match options.existing {
            OverwriteRule::Replace if self.entries.at(old).hard_pins > 0 => Err(Refusal::Pinned),
            OverwriteRule::Replace => {
                self.retire(old, now_us);
                Ok(None)
            }
            OverwriteRule::Keep | OverwriteRule::Same => Err(Refusal::Exists),
        }
    }

    fn same_bytes(&self, sealed: u32, pending: u32) -> bool {
        let (sealed, pending) = (self.entries.at(sealed), self.entries.at(pending));
        let (State::Sealed(one), State::Pending(other)) = (&sealed.state, &pending.state) else {
            unreachable!("called for a sealed entry and a reservation")
        };
        let other = other.lock();
        let other = other.as_ref().expect("a reservation with its generation has its room");
        one.bytes() == other.bytes() && one.slices().eq(other.slices())
    }

    /// Renews the lease of a reservation.
    pub(crate) fn renew(&mut self, begun: &ReservedMemory, now_us: u64) -> Result<(), Refusal> {
        let lease_us = now_us.saturating_add(self.config.set.write_lease_us);
        let entry = self.entries.at_mut(begun.number);
        if entry.generation != begun.generation {
            return Err(Refusal::TakenOver);
        }
        entry.lease_us = lease_us;
        Ok(())
    }

    /// Gives a reservation up, if it is still this one.
    pub(crate) fn abandon(&mut self, begun: &ReservedMemory) {
        if self.entries.at(begun.number).generation == begun.generation
            && matches!(self.entries.at(begun.number).state, State::Pending(_))
        {
            let dropped = self.drop_pending(begun.number);
            debug_assert!(dropped, "its writer gives it up and so does not write");
        }
    }

    /// Takes a reservation's memory back; not while its writer is at this very moment copying into it.
    pub(super) fn drop_pending(&mut self, number: u32) -> bool {
        let State::Pending(room) = &self.entries.at(number).state else {
            unreachable!("only reservations are in the table of reservations")
        };
        let Some(taken) = room.try_lock().map(|mut room| room.take()) else { return false };
        drop(taken);
        let place = self.entries.at(number).place;
        let found = self.pending.find_entry(place, |other| *other == number);
        found.expect("a reservation is in its table").remove();
        self.free(number);
        true
    }
}
