//! The store's side of the tiers below its memory: what lasts there, what comes up, what must not come back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_types::TenantId;

use super::{ObjectStore, OverwriteRule, PutOptions, WAIT_STEP};
use crate::arena::ArenaMemory;
use crate::key::Key;
#[cfg(feature = "resp")]
use crate::lower::ColdTier;
use crate::lower::{
    self, BroughtValue, ForgottenCopies, FoundValue, LowerStats, LowerTiers, Origin, Removal, Waiter,
};
use crate::reading::Reading;
use crate::refusal::Refusal;

/// How long a removal waits for the word of the disk and of the bucket.
pub(crate) const CONFIRM_WITHIN: Duration = Duration::from_secs(2);

impl ObjectStore {
    pub(crate) fn lower(&self) -> Option<&Arc<LowerTiers>> {
        self.lower.as_ref()
    }

    /// The bucket below, if there is one.
    #[cfg(feature = "resp")]
    pub(crate) fn cold(&self) -> Option<&ColdTier> {
        self.lower.as_ref()?.below.cold.as_ref()
    }

    /// The counters of the tiers below; zeros without any.
    #[must_use]
    pub fn lower_stats(&self) -> LowerStats {
        self.lower.as_ref().map(|lower| lower.stats()).unwrap_or_default()
    }

    /// Waits until every object that was touched often enough rests below, at most so long. False when it does not.
    #[must_use]
    pub fn settle(&self, at_most: Duration) -> bool {
        self.lower.as_ref().is_none_or(|lower| lower.settle(at_most))
    }

    /// Name of a tenant; empty for the anonymous one and for one that is not there.
    pub(crate) fn tenant_name(&self, tenant: TenantId) -> String {
        self.inner.tenants.share(tenant).map_or_else(|_| String::new(), |share| share.name().to_owned())
    }

    /// The name of a key below, if there is anything below.
    pub(crate) fn name_of(&self, key: Key<'_>) -> Option<u64> {
        self.lower.as_ref()?;
        let share = self.inner.tenants.share(key.tenant).ok()?;
        Some(lower::name_of(share.name(), key.bytes))
    }

    /// Whether the tiers below may have a value that memory has not: then [`ObjectStore::bring`] is worth while.
    #[must_use]
    pub fn is_below(&self, key: Key<'_>) -> bool {
        let below = self.lower.as_ref().zip(self.name_of(key));
        below.is_some_and(|(lower, name)| lower.may_hold(name)) && self.is_whole(key)
    }

    /// Whether the value of a key is on the SSD for good, in memory or not.
    #[must_use]
    pub fn lasts(&self, key: Key<'_>) -> bool {
        self.lower.as_ref().zip(self.name_of(key)).is_some_and(|(lower, name)| lower.lasts(name))
    }

    /// Whether the bucket has the value of a key.
    #[must_use]
    pub fn is_cold(&self, key: Key<'_>) -> bool {
        self.lower.as_ref().zip(self.name_of(key)).is_some_and(|(lower, name)| lower.is_cold(name))
    }

    /// Bytes of the object that a value would be in the bucket; none without one.
    pub(crate) fn object_bytes(&self, key: Key<'_>, value_bytes: u32) -> Option<u64> {
        self.lower.as_ref()?.below.cold.as_ref()?;
        lower::total_bytes(&self.tenant_name(key.tenant), key.bytes, value_bytes as usize)
    }

    /// The digest of a value that is being put, if the bucket may have the same in an object of so many bytes.
    pub(crate) fn digest_below(&self, name: u64, object_bytes: u64, room: &ArenaMemory) -> Option<u64> {
        let cold = self.lower.as_ref()?.below.cold.as_ref()?;
        cold.digest(name, object_bytes, room)
    }

    /// Brings a value up from below and waits for it; afterwards it is in memory, if there is room. None when there
    /// is none below.
    #[must_use]
    pub fn bring(&self, key: Key<'_>) -> Option<Arc<BroughtValue>> {
        let (send, receive) = std::sync::mpsc::channel();
        self.bring_with(key, Box::new(move |found| _ = send.send(found)));
        receive.recv().ok().flatten()
    }

    /// Brings a value up without waiting: `waiter` is called once.
    pub(crate) fn bring_with(&self, key: Key<'_>, waiter: Waiter) {
        match &self.lower {
            Some(lower) if self.is_whole(key) => lower.bring(self, key, waiter),
            _ => waiter(None),
        }
    }

    /// Places a value from below in memory, and holds it there for the waiting readers. None when the key has another
    /// value by now, or there is no room at all.
    pub(crate) fn place_found(
        &self,
        key: Key<'_>,
        found: FoundValue,
        origin: Origin,
    ) -> Option<Arc<BroughtValue>> {
        let options = PutOptions { existing: OverwriteRule::Keep, ..PutOptions::default() };
        let placed = self.try_reserve(key, found.value.len() as u64, options).and_then(|mut ticket| {
            ticket.set_origin(origin);
            ticket.append(&found.value)?;
            ticket.finish(found.checksum).map(|_| ())
        });
        match placed {
            Ok(()) | Err(Refusal::Exists) => {
                if let Some(reading) = self.hold(key) {
                    return Some(Arc::new(BroughtValue::in_memory(reading)));
                }
            }
            Err(Refusal::TakenOver) => return None,
            Err(_) => {}
        }
        let below = &self.lower.as_ref()?.below;
        if !self.shard(self.place(key).0).is_current(origin) {
            return None;
        }
        match below.beside.take(found.value.len() as u64) {
            Some(held) => Some(Arc::new(BroughtValue::beside(found.value, held))),
            None => {
                below.count_released();
                None
            }
        }
    }

    /// The value of a key in memory, under a lease; neither a hit nor a touch.
    fn hold(&self, key: Key<'_>) -> Option<Reading> {
        let (shard, at) = self.place(key);
        let opened = self.shard(shard).hold(&at)?;
        Some(Reading::new(self.clone(), shard, opened))
    }

    /// Removes a key's value, if it is in memory and of this generation; what there is to wait for then.
    ///
    /// # Errors
    /// [`Refusal::Absent`]: it is another value, or none; [`Refusal::Pinned`].
    #[cfg(feature = "resp")]
    pub(crate) fn remove_generation(
        &self,
        key: Key<'_>,
        generation: u64,
    ) -> Result<ForgottenCopies, Refusal> {
        let (shard, at) = self.place(key);
        let name = self.name_of(key);
        self.shard(shard).remove_generation(&at, name, generation)
    }

    /// Waits, within a bound, until the removals are confirmed. A tier's silence is counted and reported.
    ///
    /// # Errors
    /// As [`ObjectStore::confirmed`].
    pub(crate) fn confirm(&self, forgotten: &ForgottenCopies) -> Result<(), Refusal> {
        if forgotten.is_nothing() {
            return Ok(());
        }
        let end = Instant::now() + CONFIRM_WITHIN;
        let mut pause = Duration::from_micros(100);
        while !forgotten.is_answered() && Instant::now() < end {
            std::thread::sleep(pause);
            pause = (2 * pause).min(WAIT_STEP);
        }
        self.confirmed(forgotten)
    }

    /// Counts what was not confirmed.
    ///
    /// # Errors
    /// [`Refusal::Unconfirmed`] when the disk or the bucket has not answered: both are at it still, and the caller may
    /// ask again.
    pub(crate) fn confirmed(&self, forgotten: &ForgottenCopies) -> Result<(), Refusal> {
        let Some(lower) = &self.lower else { return Ok(()) };
        let (ssd, cold) = (is_open(forgotten.ssd.as_ref()), is_open(forgotten.cold.as_ref()));
        if ssd {
            lower.below.count_unconfirmed();
        }
        if cold {
            lower.below.count_cold_unconfirmed();
        }
        if ssd || cold { Err(Refusal::Unconfirmed) } else { Ok(()) }
    }

    /// The result of a put after the wait for its removals. A bucket never fails a put: an unconfirmed removal there
    /// was counted and reported.
    ///
    /// # Errors
    /// [`Refusal::Unconfirmed`]: the value is there, but after a crash the SSD might give the older one.
    pub(crate) fn put_confirmed(&self, forgotten: &ForgottenCopies) -> Result<(), Refusal> {
        if is_open(forgotten.ssd.as_ref()) { Err(Refusal::Unconfirmed) } else { Ok(()) }
    }
}

fn is_open(removal: Option<&Removal>) -> bool {
    removal.is_some_and(|removal| removal.outcome() != Some(true))
}
