//! The shards' view of the tiers below: the channel to their worker, and the directory of copies.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;

use baton_tiers::BlobLogStats;
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};

use super::budget::Budget;
use super::cold::ColdTier;
use super::directory::{Directory, ForgottenCopies, Removal};
use super::pulse::Pulse;
use super::ssd::Order;
use super::{LowerStats, OperatorLog};

/// Values that may wait beside the memory at a time.
const BESIDE_MAX: u64 = 1_024;

/// Where a value that is sealed comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A client. The name is none without tiers below.
    Writer(Option<u64>),
    /// The SSD: this very copy, which stays.
    Ssd {
        /// Name of the key.
        name: u64,
        /// Number of the copy.
        tag: u64,
    },
    /// The bucket: this very copy, which stays.
    Cold {
        /// Name of the key.
        name: u64,
        /// Number of the copy.
        tag: u64,
    },
}

/// A shard's access to the SSD and bucket tiers.
pub(crate) struct LowerView {
    pub(crate) directory: Directory,
    /// Touches after the put from which on an object is copied down; none: it never is.
    after: Option<u8>,
    /// Bytes of objects being copied down, which stay in memory meanwhile though they were evicted.
    pub(super) in_hand_max_bytes: u64,
    /// Bytes of values that are read from the SSD at a time.
    pub(super) reading_max_bytes: u64,
    /// Values that were found below, wait for their readers, and have no room in memory.
    pub(crate) beside: Arc<Budget>,
    /// The bucket.
    pub(crate) cold: Option<ColdTier>,
    orders: Mutex<Sender<Order>>,
    /// The worker sleeps. A sender of work wakes it.
    pub(super) asleep: AtomicBool,
    /// Objects that shards have to offer.
    pub(super) offered: AtomicUsize,
    next_tag: AtomicU64,
    hits: AtomicU64,
    hit_bytes: AtomicU64,
    passed_over: AtomicU64,
    unasked: AtomicU64,
    unconfirmed: AtomicU64,
    cold_unconfirmed: AtomicU64,
    /// Whether the SSD answers.
    pub(super) pulse: Pulse,
    let_go: AtomicU64,
    pub(super) off: AtomicBool,
    pub(super) blob_log: Mutex<BlobLogStats>,
    log: OperatorLog,
}

impl Origin {
    /// The name under which a writer's value may have an older copy below.
    pub(crate) fn writer(self) -> Option<u64> {
        if let Self::Writer(name) = self { name } else { None }
    }
}

impl std::fmt::Debug for LowerView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Below").field("after", &self.after).finish_non_exhaustive()
    }
}

/// Whether so many touches ask for a copy in a tier that takes what was touched `after` times.
pub(super) const fn is_due(touches: u8, after: u8) -> bool {
    // The copy of what is read again and again may have gone meanwhile.
    touches == after || (touches > 8 && touches.is_power_of_two())
}

impl LowerView {
    pub(super) fn new(
        orders: Sender<Order>,
        after: Option<u8>,
        (in_hand_max_bytes, reading_max_bytes): (u64, u64),
        (cold, log): (Option<ColdTier>, OperatorLog),
    ) -> Self {
        Self {
            directory: Directory::default(),
            after,
            in_hand_max_bytes,
            reading_max_bytes,
            beside: Budget::new(reading_max_bytes, BESIDE_MAX),
            cold,
            orders: Mutex::new(orders),
            asleep: AtomicBool::new(false),
            offered: AtomicUsize::new(0),
            next_tag: AtomicU64::new(1 << 40),
            hits: AtomicU64::new(0),
            hit_bytes: AtomicU64::new(0),
            passed_over: AtomicU64::new(0),
            unasked: AtomicU64::new(0),
            pulse: Pulse::default(),
            unconfirmed: AtomicU64::new(0),
            cold_unconfirmed: AtomicU64::new(0),
            let_go: AtomicU64::new(0),
            off: AtomicBool::new(false),
            blob_log: Mutex::default(),
            log,
        }
    }

    pub(super) fn log(&self, words: &str) {
        (self.log)(words);
    }

    pub(super) fn send(&self, order: Order) {
        // A worker that has ended has dropped its pending work, and the directory with it.
        let _ = self.orders.lock().send(order);
    }

    /// A number for a copy; those found at the start have lower ones.
    pub(crate) fn fresh_tag(&self) -> u64 {
        self.next_tag.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether an object that was touched so often is to be copied down now.
    pub(crate) fn admits(&self, touches: u8) -> bool {
        self.after.is_some_and(|after| is_due(touches, after))
    }

    /// Touches of an object that comes up from the SSD: it was asked for as often as it took to get there.
    pub(crate) fn touches_from_ssd(&self) -> u8 {
        self.after.unwrap_or(0)
    }

    /// A shard has one more object to offer.
    pub(crate) fn offer(&self) {
        self.offered.fetch_add(1, Ordering::SeqCst);
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.send(Order::Wake);
        }
    }

    pub(crate) fn pass_over(&self) {
        self.passed_over.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_unasked(&self) {
        if self.unasked.fetch_add(1, Ordering::Relaxed) == 0 {
            self.log(
                "ssd: the disk does not answer: reads of what is there miss until it does; look at the disk",
            );
        }
    }

    /// One offer less.
    pub(crate) fn taken(&self) {
        self.offered.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether a key may be below, as far as that is known without a look.
    pub(crate) fn may_hold(&self, name: u64) -> bool {
        self.directory.tag(name).is_some() || self.cold.as_ref().is_some_and(|cold| cold.may_hold(name))
    }

    /// The key has another value from now on, or none. Of one with this digest the bucket keeps its copy.
    pub(crate) fn forget(&self, name: u64, digest: Option<u64>) -> ForgottenCopies {
        let ssd = self.directory.forget(name, |removal| self.send(Order::Remove { name, removal }));
        ForgottenCopies { ssd, cold: self.cold.as_ref().and_then(|cold| cold.forget(name, digest)) }
    }

    /// The removal of an older copy on the SSD that is not confirmed yet.
    pub(crate) fn unconfirmed_removal(&self, name: u64) -> Option<Removal> {
        self.directory.unconfirmed_removal(name)
    }

    pub(super) fn count_hit(&self, bytes: usize) {
        self.hits.fetch_add(1, Ordering::Relaxed);
        self.hit_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn count_released(&self) {
        self.let_go.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_unconfirmed(&self) {
        if self.unconfirmed.fetch_add(1, Ordering::Relaxed) == 0 {
            self.log(
                "ssd: the disk did not confirm a removal: DEL, EXPIRE and puts of other bytes are answered with TRYAGAIN \
                 where the older copy may be back after a restart; look at the disk",
            );
        }
    }

    pub(crate) fn count_cold_unconfirmed(&self) {
        if self.cold_unconfirmed.fetch_add(1, Ordering::Relaxed) == 0 {
            self.log(
                "cold: the bucket did not confirm a removal: it is tried again, but what was removed or replaced may \
                 be back after a restart that comes first",
            );
        }
    }

    pub(super) fn stats(&self) -> LowerStats {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        LowerStats {
            ssd: *self.blob_log.lock(),
            ssd_on: self.after.is_some() && !self.off.load(Ordering::Relaxed),
            ssd_hits: count(&self.hits),
            ssd_hit_bytes: count(&self.hit_bytes),
            passed_over: count(&self.passed_over),
            unasked: count(&self.unasked),
            unconfirmed: count(&self.unconfirmed),
            beside_bytes: self.beside.used_bytes(),
            let_go: count(&self.let_go),
            cold: self.cold.as_ref().map(ColdTier::stats).unwrap_or_default(),
            cold_unconfirmed: count(&self.cold_unconfirmed),
        }
    }
}

/// The name of a key below. It is the same in every life of the store, and an attacker cannot find another key of the
/// same name.
pub(crate) fn name_of(tenant: &str, key: &[u8]) -> u64 {
    let mut hash = Sha256::new();
    hash.update((tenant.len() as u64).to_le_bytes());
    hash.update(tenant.as_bytes());
    hash.update(key);
    let digest = hash.finalize();
    u64::from_le_bytes(digest[..8].try_into().expect("a digest has 32 bytes"))
}
