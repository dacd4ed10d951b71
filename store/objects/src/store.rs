//! The store that threads share.

mod below;
mod room;
mod terms;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_types::TenantId;
use parking_lot::{Mutex, MutexGuard};

use crate::arena::Arena;
use crate::clock::Clock;
use crate::config::{EffectiveConfig, StoreConfig};
use crate::key::{Hasher, Key};
use crate::lower::{self, ForgottenCopies, LowerConfig, LowerTiers};
#[cfg(feature = "resp")]
use crate::parts::Parts;
use crate::reading::{Reading, copy_out, room_checksum};
use crate::refusal::Refusal;
use crate::shard::{FetchedValue, Place, Request, Shard};
use crate::stats::StoreStats;
use crate::tenant::Tenants;
use crate::ticket::PutTicket;

#[cfg(feature = "resp")]
pub(crate) use below::CONFIRM_WITHIN;
pub use terms::{ListedKey, ObjectStat, OverwriteRule, PutOptions, StoreOutcome};

/// When to try again where nothing better is known, µs.
const RETRY_AFTER_US: u64 = 10_000;
/// One wait for room, before looking again.
const WAIT_STEP: Duration = Duration::from_millis(5);

struct Inner {
    arena: Arc<Arena>,
    shards: Box<[Mutex<Shard>]>,
    tenants: Arc<Tenants>,
    hasher: Arc<Hasher>,
    clock: Clock,
    config: EffectiveConfig,
}

/// Immutable values by key, shared by threads; cloning shares the same store. See the crate.
#[derive(Clone)]
pub struct ObjectStore {
    inner: Arc<Inner>,
    lower: Option<Arc<LowerTiers>>,
}

impl fmt::Debug for ObjectStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectStore").field("shards", &self.inner.shards.len()).finish_non_exhaustive()
    }
}

impl ObjectStore {
    /// An empty store. Memory is mapped now, and taken from the machine a little ahead of its use.
    ///
    /// # Errors
    /// The setting that is wrong, or what the system says about the memory.
    pub fn new(config: &StoreConfig, clock: Clock) -> Result<Self, String> {
        Self::with_lower(config, clock, &LowerConfig::default())
    }

    /// A store with tiers below memory. Where a tier is unusable, this reports it and the store runs without it.
    ///
    /// # Errors
    /// The setting that is wrong, or what the system says about memory and threads.
    pub fn with_lower(config: &StoreConfig, clock: Clock, below: &LowerConfig) -> Result<Self, String> {
        let config = config.check()?;
        let opened = lower::open(below, config.set.capacity_bytes, config.set.value_max_bytes)?;
        let below = opened.as_ref().map(|opened| Arc::clone(&opened.below));
        let failed =
            |e| format!("store: map {} bytes: {e}; give a smaller capacity", config.set.capacity_bytes);
        let arena = Arena::new(config.pages).map_err(failed)?;
        let tenants = Arc::new(Tenants::new());
        let hasher = Arc::new(Hasher::new());
        let shard = |_| Mutex::new(Shard::new(&arena, (&tenants, &hasher), &config, below.clone()));
        let shards = (0..config.shards).map(shard).collect();
        let inner = Arc::new(Inner { arena, shards, tenants, hasher, clock, config });
        let (picks, mut turn) = (Arc::clone(&inner), 0);
        let pick = move || {
            let shards = &picks.shards;
            turn += 1;
            (0..shards.len()).find_map(|n| shards[(turn + n) % shards.len()].lock().pick())
        };
        let lower = opened.map(|opened| opened.start(pick)).transpose()?;
        Ok(Self { inner, lower })
    }

    /// The tenant of this name, with this quota from now on; none when there are [`crate::TENANTS_MAX`].
    #[must_use]
    pub fn open_tenant(&self, name: &str, quota_bytes: u64) -> Option<TenantId> {
        self.inner.tenants.open(name, quota_bytes)
    }

    /// Bytes of slots that a tenant has.
    #[must_use]
    pub fn tenant_used_bytes(&self, tenant: TenantId) -> u64 {
        self.inner.tenants.share(tenant).map_or(0, |share| share.used_bytes())
    }

    pub(crate) fn now_us(&self) -> u64 {
        self.inner.clock.now_us()
    }

    /// How long a put may wait for room.
    pub(crate) fn room_wait_us(&self) -> u64 {
        self.inner.config.set.room_wait_us
    }

    /// How long a reader may take over a step.
    #[cfg(feature = "resp")]
    pub(crate) fn read_lease_us(&self) -> u64 {
        self.inner.config.set.read_lease_us
    }

    /// Largest value, bytes.
    #[must_use]
    pub fn value_max_bytes(&self) -> u64 {
        self.inner.config.set.value_max_bytes
    }

    /// The rule by which keys are parts of one object, if there is one.
    #[cfg(feature = "resp")]
    pub(crate) fn parts(&self) -> Option<&Parts> {
        self.inner.config.set.parts.as_ref()
    }

    /// Whether reads compare values with their checksums.
    #[cfg(feature = "resp")]
    pub(crate) fn verifies_reads(&self) -> bool {
        self.inner.config.set.verify_reads
    }

    pub(crate) fn shard(&self, number: usize) -> MutexGuard<'_, Shard> {
        self.inner.shards[number].lock()
    }

    fn place<'a>(&self, key: Key<'a>) -> (usize, Place<'a>) {
        let part = self.inner.config.set.parts.as_ref().and_then(|rule| rule.split(key.bytes));
        let stem = part.map(|part| part.stem());
        // The parts of an object are in one shard, so that one look sees them all.
        let hashed = self.inner.hasher.hash(&key);
        let of_stem = stem.map(|stem| self.inner.hasher.hash(&Key { bytes: &stem, ..key }).shard_hash);
        #[expect(clippy::cast_possible_truncation, reason = "the low bits choose among at most 1024")]
        let shard = of_stem.unwrap_or(hashed.shard_hash) as usize & (self.inner.shards.len() - 1);
        (shard, Place { key, place: hashed.place, now_us: self.now_us() })
    }

    /// Reserves memory for a value, without waiting. The readable value stays until the seal.
    ///
    /// # Errors
    /// Why not; [`Refusal::retry_after_us`] says whether trying again may help.
    pub fn try_reserve(&self, key: Key<'_>, bytes: u64, options: PutOptions) -> Result<PutTicket, Refusal> {
        key.check()?;
        let max_bytes = self.value_max_bytes();
        let fits = u32::try_from(bytes).ok().filter(|bytes| u64::from(*bytes) <= max_bytes);
        let bytes = fits.ok_or(Refusal::Value { bytes, max_bytes })?;
        let (shard, at) = self.place(key);
        let request = Request { key, place: at.place, bytes, options, now_us: at.now_us, pressing: false };
        let begun = self.begin(shard, &request)?;
        Ok(PutTicket::new(self.clone(), shard, begun, &request))
    }

    /// Reserves memory, waiting for room as long as the settings allow. Blocks the thread meanwhile.
    ///
    /// # Errors
    /// As [`ObjectStore::try_reserve`].
    pub fn reserve(&self, key: Key<'_>, bytes: u64, options: PutOptions) -> Result<PutTicket, Refusal> {
        let mut end = None;
        loop {
            match self.try_reserve(key, bytes, options) {
                Err(Refusal::Full { retry_after_us }) => {
                    let wait = Duration::from_micros(self.room_wait_us());
                    let left = end.get_or_insert_with(|| Instant::now() + wait);
                    let left = left.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(Refusal::Full { retry_after_us });
                    }
                    self.inner.arena.wait_for_room(left.min(WAIT_STEP));
                }
                other => return other,
            }
        }
    }

    /// Puts a whole value. With [`PutOptions::checksum`] the bytes must match it; without, none is kept.
    ///
    /// # Errors
    /// Why not; nothing is changed then.
    pub fn put(&self, key: Key<'_>, value: &[u8], options: PutOptions) -> Result<StoreOutcome, Refusal> {
        let mut ticket = self.reserve(key, value.len() as u64, options)?;
        ticket.append(value)?;
        match options.checksum {
            Some(expected) => ticket.seal_checked(expected),
            None => ticket.seal(),
        }
    }

    /// The value under a lease, to be read in pieces; none when there is none.
    #[must_use]
    pub fn get(&self, key: Key<'_>) -> Option<Reading> {
        let (shard, at) = self.place(key);
        let opened = self.shard(shard).open(&at)?;
        Some(Reading::new(self.clone(), shard, opened))
    }

    /// Copies the value into `into`, as much as there is room for. Returns its length; none when there is none.
    ///
    /// # Errors
    /// [`Refusal::Corrupt`], if reads are verified.
    pub fn get_into(&self, key: Key<'_>, into: &mut [u8]) -> Result<Option<usize>, Refusal> {
        let Some(fetched) = self.fetch(key)? else { return Ok(None) };
        copy_out(&fetched.room, 0, into);
        Ok(Some(fetched.room.bytes()))
    }

    fn fetch(&self, key: Key<'_>) -> Result<Option<FetchedValue>, Refusal> {
        let (shard, at) = self.place(key);
        let fetched = self.shard(shard).fetch(&at);
        if let Some(FetchedValue { room, checksum: Some(expected) }) = &fetched
            && self.inner.config.set.verify_reads
        {
            let found = room_checksum(room);
            if found != *expected {
                return Err(Refusal::Corrupt { expected: *expected, found });
            }
        }
        Ok(fetched)
    }

    /// Reads the value and compares it with its checksum, if it has one. Counts as a read.
    ///
    /// # Errors
    /// [`Refusal::Absent`] or [`Refusal::Corrupt`].
    pub fn verify(&self, key: Key<'_>) -> Result<u32, Refusal> {
        let (shard, at) = self.place(key);
        let fetched = self.shard(shard).fetch(&at).ok_or(Refusal::Absent)?;
        let found = room_checksum(&fetched.room);
        match fetched.checksum {
            Some(expected) if expected != found => Err(Refusal::Corrupt { expected, found }),
            _ => Ok(found),
        }
    }

    /// The facts about a key. Renews no lease.
    #[must_use]
    pub fn stat(&self, key: Key<'_>) -> Option<ObjectStat> {
        let (shard, at) = self.place(key);
        let stat = self.shard(shard).stat(&at)?;
        Some(ObjectStat { lasts: self.lasts(key), cold: self.is_cold(key), ..stat })
    }

    /// As [`ObjectStore::stat`], also of a part of an object that is not whole.
    #[cfg(feature = "resp")]
    pub(crate) fn stat_hidden_too(&self, key: Key<'_>) -> Option<ObjectStat> {
        let (shard, at) = self.place(key);
        let stat = self.shard(shard).stat_hidden_too(&at)?;
        Some(ObjectStat { lasts: self.lasts(key), cold: self.is_cold(key), ..stat })
    }

    /// Whether a key is in memory, and the rest of its object there or below. Renews nothing.
    #[must_use]
    pub fn exists(&self, key: Key<'_>) -> bool {
        let (shard, at) = self.place(key);
        self.shard(shard).stat(&at).is_some()
    }

    /// Whether every part of a key's object is there, in memory or below. True for an object of one part.
    pub(crate) fn is_whole(&self, key: Key<'_>) -> bool {
        if self.inner.config.set.parts.is_none() {
            return true;
        }
        let (shard, at) = self.place(key);
        self.shard(shard).is_whole(&at)
    }

    /// Removes a key, from below too; returns when it cannot come back. Those who read it go on under their leases.
    ///
    /// # Errors
    /// [`Refusal::Absent`] or [`Refusal::Pinned`]; [`Refusal::Unconfirmed`] when it is gone but the disk or the
    /// bucket has not said so.
    pub fn remove(&self, key: Key<'_>) -> Result<(), Refusal> {
        self.confirm(&self.remove_unconfirmed(key)?)
    }

    /// Removes a key, and returns the pending removals to wait for.
    pub(crate) fn remove_unconfirmed(&self, key: Key<'_>) -> Result<ForgottenCopies, Refusal> {
        let (shard, at) = self.place(key);
        let name = self.name_of(key);
        self.shard(shard).remove(&at, name)
    }

    /// Keeps a value until it is unpinned as often.
    ///
    /// # Errors
    /// [`Refusal::Absent`].
    pub fn pin(&self, key: Key<'_>) -> Result<(), Refusal> {
        let (shard, at) = self.place(key);
        self.shard(shard).pin(&at)
    }

    /// Takes one pin away.
    ///
    /// # Errors
    /// [`Refusal::Absent`] when there is none.
    pub fn unpin(&self, key: Key<'_>) -> Result<(), Refusal> {
        let (shard, at) = self.place(key);
        self.shard(shard).unpin(&at)
    }

    /// Keeps a value from eviction for `for_us` from now on. It can still be removed and replaced.
    ///
    /// # Errors
    /// [`Refusal::Absent`].
    pub fn pin_softly(&self, key: Key<'_>, for_us: u64) -> Result<(), Refusal> {
        let (shard, at) = self.place(key);
        self.shard(shard).pin_softly(&at, for_us)
    }

    /// Sets the time to live from now on, µs; none is for ever.
    ///
    /// # Errors
    /// [`Refusal::Absent`]; [`Refusal::Unconfirmed`] when it is set but a copy below has no end.
    pub fn set_ttl(&self, key: Key<'_>, ttl_us: Option<u64>) -> Result<(), Refusal> {
        self.confirm(&self.set_ttl_unconfirmed(key, ttl_us)?)
    }

    /// Sets the time to live, and returns the pending removals of copies below, which have no end.
    pub(crate) fn set_ttl_unconfirmed(
        &self,
        key: Key<'_>,
        ttl_us: Option<u64>,
    ) -> Result<ForgottenCopies, Refusal> {
        let (shard, at) = self.place(key);
        let name = self.name_of(key);
        self.shard(shard).set_ttl(&at, ttl_us, name)
    }

    /// Lists keys of all tenants from a cursor on (0 is the start), over at most `entries` entries. Also returns the
    /// cursor to go on from (0 is the end). A key that exists during the whole scan is listed at least once.
    #[must_use]
    pub fn list(&self, cursor: u64, entries: u32) -> (Vec<ListedKey>, u64) {
        self.walk(cursor, entries, false)
    }

    /// As [`ObjectStore::list`], with the parts of objects that are not whole.
    #[cfg(feature = "resp")]
    pub(crate) fn list_hidden_too(&self, cursor: u64, entries: u32) -> (Vec<ListedKey>, u64) {
        self.walk(cursor, entries, true)
    }

    fn walk(&self, cursor: u64, entries: u32, hidden: bool) -> (Vec<ListedKey>, u64) {
        let mut number = u32::try_from(cursor & u64::from(u32::MAX)).expect("masked to 32 bits");
        let mut shard = usize::try_from(cursor >> 32).unwrap_or(usize::MAX);
        let (mut found, mut left, now_us) = (Vec::new(), entries.clamp(1, 100_000), self.now_us());
        // A look at an empty shard counts too: so each call ends.
        while shard < self.inner.shards.len() && left > 0 {
            let (mut listed, next) = self.shard(shard).list((number, left), now_us, hidden);
            found.append(&mut listed);
            left = left.saturating_sub(next.map_or(256, |next| next - number).max(1));
            (shard, number) = next.map_or((shard + 1, 0), |next| (shard, next));
        }
        let over = shard >= self.inner.shards.len();
        (found, if over { 0 } else { (shard as u64) << 32 | u64::from(number) })
    }

    /// Counts and sizes; no key is visited.
    #[must_use]
    pub fn stats(&self) -> StoreStats {
        let mut stats = StoreStats {
            capacity_bytes: self.inner.arena.capacity_bytes(),
            used_bytes: self.inner.arena.used_bytes(),
            ..StoreStats::default()
        };
        for shard in &self.inner.shards {
            let shard = shard.lock();
            stats.add(&shard.counters, shard.keys());
        }
        // A read that was answered from below missed memory first.
        let lower = self.lower_stats();
        stats.misses = stats.misses.saturating_sub(lower.ssd_hits + lower.cold.hits);
        stats
    }

    /// Bytes of everything but values. Visits every entry: for tests and measurements.
    #[must_use]
    pub fn metadata_bytes(&self) -> usize {
        self.inner.shards.iter().map(|shard| shard.lock().metadata_bytes()).sum()
    }

    /// Checks every invariant, for tests: nothing else may be under way.
    ///
    /// # Panics
    /// When one is broken.
    pub fn check(&self) {
        let used_bytes: u64 = self.inner.shards.iter().map(|shard| shard.lock().check()).sum();
        assert_eq!(used_bytes, self.inner.arena.used_bytes(), "slots in use are those of entries");
        assert!(used_bytes <= self.inner.arena.capacity_bytes());
    }
}
