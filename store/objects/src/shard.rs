//! One shard: the entries whose keys hash here, their queues and their slots. Plain logic under one lock, with
//! the time handed in.

mod audit;
mod evict;
mod offer;
mod parts;
mod read;
mod write;

use std::collections::VecDeque;
use std::sync::Arc;

use baton_types::TenantId;
use hashbrown::HashTable;

use crate::arena::{Arena, CLASSES, Slabs, classes_of};
use crate::config::EffectiveConfig;
use crate::entry::{Entries, Entry, State};
use crate::key::{Hasher, Key};
use crate::lower::LowerView;
use crate::refusal::Refusal;
use crate::sieve::{Queue, QueueKind};
use crate::stats::Counters;
use crate::tenant::{Share, Tenants};

pub(crate) use offer::PickedObject;
pub(crate) use read::{FetchedValue, LeasedValue, Place};
pub(crate) use write::{Request, ReservedMemory, SealParams, Stop};

/// One shard of the object store.
#[derive(Debug)]
pub(crate) struct Shard {
    arena: Arc<Arena>,
    slabs: Arc<Slabs>,
    tenants: Arc<Tenants>,
    /// The tenants' shares, as far as they were needed here: so that a put takes no lock for them.
    shares: Vec<Arc<Share>>,
    config: EffectiveConfig,
    entries: Entries,
    sealed: HashTable<u32>,
    pending: HashTable<u32>,
    queues: [Queue; CLASSES.len()],
    /// True while soft pins give way, because no other entry can be evicted.
    by_tenant: Vec<Queue>,
    /// Pins that can give way do: nothing else is left that could.
    pressing: bool,
    hasher: Arc<Hasher>,
    /// Entries that left while they were leased, with their generations.
    leaving: VecDeque<(u32, u64)>,
    leaving_live: usize,
    next_generation: u64,
    /// Sealed entries that end some day.
    expiring: usize,
    sweep_at: u32,
    /// Evictions until ages are compared.
    compare_in: u8,
    pub(crate) counters: Counters,
    /// The tiers below, if there are any.
    below: Option<Arc<LowerView>>,
    /// Entries to be copied down, with their generations, oldest first.
    offers: VecDeque<(u32, u64)>,
    /// Marks of keys that were evicted without a copy: put again they are touched for the second time.
    ghosts: Vec<u32>,
}

impl Shard {
    pub(crate) fn new(
        arena: &Arc<Arena>,
        (tenants, hasher): (&Arc<Tenants>, &Arc<Hasher>),
        config: &EffectiveConfig,
        below: Option<Arc<LowerView>>,
    ) -> Self {
        let ghosts = if below.is_some() { offer::ghosts(config.keys_by_shard) } else { Vec::new() };
        Self {
            arena: Arc::clone(arena),
            slabs: Slabs::new(Arc::clone(arena)),
            tenants: Arc::clone(tenants),
            shares: Vec::new(),
            config: config.clone(),
            entries: Entries::new(),
            sealed: HashTable::new(),
            pending: HashTable::new(),
            queues: std::array::from_fn(|_| Queue::new(QueueKind::Class)),
            by_tenant: Vec::new(),
            pressing: false,
            hasher: Arc::clone(hasher),
            leaving: VecDeque::new(),
            leaving_live: 0,
            next_generation: 1,
            expiring: 0,
            sweep_at: 0,
            compare_in: 0,
            counters: Counters::default(),
            below,
            offers: VecDeque::new(),
            ghosts,
        }
    }

    fn is(entry: &Entry, key: &Key<'_>) -> bool {
        entry.tenant == key.tenant.0 && *entry.key == *key.bytes
    }

    /// The sealed entry of a key, expired or not.
    fn find(&self, key: &Key<'_>, place: u64) -> Option<u32> {
        let same = |number: &u32| {
            let entry = self.entries.at(*number);
            entry.place == place && Self::is(entry, key)
        };
        self.sealed.find(place, same).copied()
    }

    /// The share of a tenant.
    fn share(&mut self, tenant: TenantId) -> Result<&Share, Refusal> {
        while self.shares.len() <= tenant.0 as usize {
            let next = TenantId(u32::try_from(self.shares.len()).expect("at most TENANTS_MAX"));
            self.shares.push(self.tenants.share(next)?);
        }
        Ok(&self.shares[tenant.0 as usize])
    }

    /// Puts a sealed entry into its queues.
    fn link(&mut self, number: u32) {
        let entry = self.entries.at(number);
        let (class, tenant) = (usize::from(entry.class), entry.tenant as usize);
        while self.by_tenant.len() <= tenant {
            self.by_tenant.push(Queue::new(QueueKind::Tenant));
        }
        self.queues[class].link(&mut self.entries, number);
        self.by_tenant[tenant].link(&mut self.entries, number);
    }

    /// Takes an entry out of its queues, if it is in them.
    fn unlink(&mut self, number: u32) {
        let entry = self.entries.at(number);
        let (class, tenant) = (usize::from(entry.class), entry.tenant as usize);
        self.queues[class].unlink(&mut self.entries, number);
        if let Some(queue) = self.by_tenant.get_mut(tenant) {
            queue.unlink(&mut self.entries, number);
        }
    }

    /// The sealed entry of a key; one that has expired goes now.
    fn find_live(&mut self, key: &Key<'_>, place: u64, now_us: u64) -> Option<u32> {
        let number = self.find(key, place)?;
        self.unexpired(number, now_us)
    }

    /// The sealed entry of the same key as `number`.
    fn find_other(&mut self, number: u32, now_us: u64) -> Option<u32> {
        let entries = &self.entries;
        let entry = entries.at(number);
        let key = Key { tenant: TenantId(entry.tenant), bytes: &entry.key };
        let found = self.sealed.find(entry.place, |other| Self::is(entries.at(*other), &key)).copied()?;
        self.unexpired(found, now_us)
    }

    fn unexpired(&mut self, number: u32, now_us: u64) -> Option<u32> {
        if self.entries.at(number).is_expired(now_us) {
            self.counters.expired += 1;
            self.retire(number, now_us);
            return None;
        }
        Some(number)
    }

    /// Removes a sealed entry: out of sight at once, freed when its last reader is done.
    fn retire(&mut self, number: u32, now_us: u64) {
        let entry = self.entries.at_mut(number);
        let (place, generation) = (entry.place, entry.generation);
        let found = self.sealed.find_entry(place, |other| *other == number);
        found.expect("a sealed entry is in its table").remove();
        self.unlink(number);
        let entry = self.entries.at_mut(number);
        if entry.expires_us != u64::MAX {
            entry.expires_us = u64::MAX;
            self.expiring -= 1;
        }
        if !entry.is_leased(now_us) {
            return self.free(number);
        }
        let State::Sealed(room) = &entry.state else { unreachable!("only sealed entries are in the table") };
        entry.state = State::Leaving(Arc::clone(room));
        self.leaving.push_back((number, generation));
        self.leaving_live += 1;
        if self.leaving.len() > 2 * self.leaving_live + 64 {
            let entries = &self.entries;
            self.leaving.retain(|(number, generation)| entries.at(*number).generation == *generation);
        }
    }

    /// Makes an entry vacant; its memory is free once no call of a reader touches it.
    fn free(&mut self, number: u32) {
        let entry = self.entries.free(number);
        if matches!(entry.state, State::Leaving(_)) {
            self.leaving_live -= 1;
        }
        self.shares[entry.tenant as usize].refund(slot_bytes(entry.bytes));
    }

    /// Where a key is in the tables.
    fn place_of(&self, key: &Key<'_>) -> u64 {
        self.hasher.hash(key).place
    }

    pub(crate) fn keys(&self) -> usize {
        self.sealed.len()
    }
}

/// Bytes of slots that a value of `bytes` takes.
fn slot_bytes(bytes: u32) -> u64 {
    classes_of(bytes as usize).map(|class| CLASSES[usize::from(class)] as u64).sum()
}
