//! A bucket below memory and SSD, for values that are asked for over weeks.
//!
//! The store writes an object there in the background, within bounds, once it has been read twice. It reads from
//! there the objects that no nearer tier has; it verifies each and places it in memory. The store lists the bucket at
//! the start, so a key that is not in the bucket costs nothing, and the bucket's content is bounded. A slow or dead
//! bucket costs a few misses and then nothing: the store leaves it alone until it answers a probe. The store answers
//! a removal when the bucket has confirmed it, or as unconfirmed. One store uses a prefix at a time.

mod bucket;
mod bucket_worker;
mod catalog;
mod frame;
mod health;
mod http;
mod label;
#[cfg(feature = "resp")]
mod list;
mod start;
mod variables;
mod watch;

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use object_store::ObjectStore as Bucket;
use parking_lot::Mutex;
use tokio::runtime::Runtime;
use tokio::sync::mpsc::unbounded_channel;

use super::below::is_due;
use super::budget::Budget;
use super::directory::Removal;
use super::{FoundValue, OperatorLog, name_of};
use crate::arena::ArenaMemory;
use bucket::BucketError;
use bucket_worker::{BucketWorker, Counts, add};
use catalog::Catalog;
pub(crate) use frame::total_bytes;
use health::Health;
use label::Label;
#[cfg(feature = "resp")]
pub(crate) use list::Page;

/// Times that a value is asked for until it is worth a write.
const AFTER: u8 = 2;
/// Values that wait for their write, and reads at a time.
const WRITES_MAX: u64 = 1_024;
const READS_MAX: u64 = 64;
/// Beside a value, an object has its header.
const OVERHEAD_BYTES: u64 = 1 << 20;

/// Which bucket.
#[derive(Clone, Debug)]
pub enum ColdBucket {
    /// `s3://bucket/prefix`, `file:///folder` or `memory:`.
    Url(String),
    /// One that was opened already.
    Given(Arc<dyn Bucket>),
}

/// The bucket below, and what it may take.
#[derive(Clone, Debug)]
pub struct ColdConfig {
    /// The bucket to use.
    pub bucket: ColdBucket,
    /// Address of the service, for S3; else the usual variables say.
    pub endpoint: Option<String>,
    /// Bytes that it keeps at most.
    pub capacity_bytes: u64,
    /// Objects that it keeps at most.
    pub objects_max: u64,
    /// How long it may take over one answer.
    pub time_limit: Duration,
}

impl ColdConfig {
    /// Sensible settings of this bucket.
    #[must_use]
    pub fn new(bucket: ColdBucket) -> Self {
        let time_limit = Duration::from_secs(5);
        Self { bucket, endpoint: None, capacity_bytes: 1 << 40, objects_max: 1 << 20, time_limit }
    }

    fn check(&self) -> Result<(), String> {
        if !(1 << 16..=1 << 50).contains(&self.capacity_bytes) {
            return Err("cold: capacity_bytes: give from 64 KiB to 1 PiB".into());
        }
        if !(1..=1 << 26).contains(&self.objects_max) {
            return Err("cold: objects_max: give from 1 to 67108864".into());
        }
        if !(Duration::from_millis(1)..=Duration::from_secs(60)).contains(&self.time_limit) {
            return Err("cold: time_limit: give from 1 ms to 60 s".into());
        }
        Ok(())
    }
}

/// Counters of the bucket since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ColdStats {
    /// Whether there is one, and it is asked at the moment.
    pub on: bool,
    /// Objects that it has, or may have.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Reads that it answered.
    pub hits: u64,
    /// Bytes of values that it gave.
    pub hit_bytes: u64,
    /// Objects written.
    pub written: u64,
    /// Their bytes.
    pub written_bytes: u64,
    /// Values that were not written: too much was on its way, there was no room, or the bucket was left alone.
    pub passed_over: u64,
    /// Objects that gave way to others.
    pub evicted: u64,
    /// Objects that were missing or not as written, and values that memory had not kept as they were put.
    pub refused: u64,
    /// Requests that failed or were not answered in time.
    pub failures: u64,
    /// Removals that are not confirmed yet.
    pub unconfirmed_removals: u64,
}

/// A value that is to be written.
pub(crate) struct Offer {
    pub(crate) name: u64,
    pub(crate) tenant: String,
    pub(crate) key: Vec<u8>,
    pub(crate) room: Arc<ArenaMemory>,
    pub(crate) checksum: Option<u32>,
}

/// Hears a value and the number of its copy.
pub(super) type Reply = Box<dyn FnOnce(Option<(FoundValue, u64)>) + Send>;

/// The bucket tier.
pub(crate) struct ColdTier {
    worker: Arc<BucketWorker>,
    /// Largest object that is read.
    object_max_bytes: u64,
    runtime: Option<Runtime>,
}

impl fmt::Debug for ColdTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cold").field("bucket", &self.worker.bucket).finish_non_exhaustive()
    }
}

/// Opens the bucket, if it passes its test. Otherwise reports the failure and returns none. `in_hand_max_bytes` of
/// memory may wait for their write, `reading_max_bytes` are read at a time; no value is larger than
/// `value_max_bytes`.
pub(super) fn open(
    config: &ColdConfig,
    (in_hand_max_bytes, reading_max_bytes): (u64, u64),
    value_max_bytes: u64,
    log: &OperatorLog,
) -> Result<Option<ColdTier>, String> {
    config.check()?;
    let object_max_bytes = value_max_bytes.saturating_add(OVERHEAD_BYTES);
    let answer_max_bytes = usize::try_from(object_max_bytes).unwrap_or(usize::MAX);
    let address = match &config.bucket {
        ColdBucket::Url(url) => url.clone(),
        ColdBucket::Given(bucket) => bucket.to_string(),
    };
    let (bucket, prefix) = match bucket::open(config, answer_max_bytes) {
        Ok(opened) => opened,
        Err(BucketError::Setting(why)) => return Err(why),
        Err(BucketError::Unusable(why)) => {
            log_disabled(&address, &why, log);
            return Ok(None);
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(64)
        .thread_name("objects-cold")
        .enable_all()
        .build()
        .map_err(|e| format!("cold: start threads: {e}; lower the number of threads"))?;
    let (orders, removals) = unbounded_channel();
    let (writes, removing) = BucketWorker::bounds();
    let worker = Arc::new(BucketWorker {
        bucket,
        prefix,
        time_limit: config.time_limit,
        catalog: Catalog::new(config.capacity_bytes, config.objects_max),
        health: Health::new(config.time_limit.min(Duration::from_secs(1)), Arc::clone(log)),
        log: Arc::clone(log),
        counts: Counts::default(),
        life: fresh_life(),
        next_tag: AtomicU32::new(1),
        off: AtomicBool::new(false),
        writing: Budget::new(in_hand_max_bytes, WRITES_MAX),
        reading: Budget::new(reading_max_bytes, READS_MAX),
        writes,
        removals: removing,
        #[cfg(feature = "resp")]
        heads: tokio::sync::Semaphore::new(list::HEADS_MAX),
        orders,
        stuck: Mutex::default(),
    });
    let (send, begun) = std::sync::mpsc::channel();
    let beginning = Arc::clone(&worker);
    runtime.spawn(async move { _ = send.send(beginning.begin().await) });
    // Not by `block_on`: the caller may be a task of another runtime.
    let begun = begun.recv().unwrap_or_else(|_| Err("its start ended early".into()));
    match begun {
        Ok(words) => log(&format!("cold: {address}: {words}")),
        Err(why) => {
            runtime.shutdown_background();
            log_disabled(&address, &why, log);
            return Ok(None);
        }
    }
    runtime.spawn(Arc::clone(&worker).remove_all(removals));
    runtime.spawn(Arc::clone(&worker).watch());
    Ok(Some(ColdTier { worker, object_max_bytes, runtime: Some(runtime) }))
}

/// Reports that the store has no bucket, and why.
fn log_disabled(address: &str, why: &str, log: &OperatorLog) {
    log(&format!(
        "cold: {address}: {why}; see to the bucket, its address and its keys, and start again. The store \
         goes on without it. Mind that what is removed meanwhile may be \
         back when a later start finds the bucket again"
    ));
}

/// A number that no other start has.
fn fresh_life() -> u32 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let mixed = RandomState::new().hash_one((now.as_nanos(), std::process::id()));
    u32::try_from(mixed >> 32).expect("32 bits")
}

/// The short name of a tenant. Should two share one, a flush of the one takes the copies of the other along.
fn short_name(tenant: &str) -> u32 {
    u32::try_from(name_of(tenant, b"") >> 32).expect("32 bits")
}

impl Drop for ColdTier {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // The store may be dropped by a thread of this very runtime.
            runtime.shutdown_background();
        }
    }
}

impl ColdTier {
    /// Whether a value that was touched so often is to be written now.
    pub(crate) fn admits(&self, touches: u8) -> bool {
        is_due(touches, AFTER)
    }

    /// Writes a value, unless the bucket has it. False when it is passed over and worth another offer. Waits for
    /// nothing.
    pub(crate) fn offer(&self, offer: Offer) -> bool {
        let Some(runtime) = &self.runtime else { return true };
        let (worker, value) = (&self.worker, offer.room.bytes());
        if worker.off.load(Ordering::SeqCst) || self.holds(offer.name) {
            return true;
        }
        let Some(bytes) = frame::total_bytes(&offer.tenant, &offer.key, value) else { return true };
        let held = worker.writing.take(value as u64).filter(|_| worker.health.is_open());
        let Some(held) = held else {
            add(&worker.counts.passed_over, 1);
            return false;
        };
        let tag = Label::tag(worker.life, worker.next_tag.fetch_add(1, Ordering::Relaxed));
        let label = Label { name: offer.name, tenant: short_name(&offer.tenant), digest: 0, tag };
        if worker.catalog.begin(label, bytes) {
            runtime.spawn(Arc::clone(worker).write(offer, tag, held));
        }
        true
    }

    /// The key has another value, of this digest if that is known, or none: what there is to wait for until its copy
    /// cannot come back.
    pub(crate) fn forget(&self, name: u64, digest: Option<u64>) -> Option<Removal> {
        self.worker.forget(name, digest)
    }

    /// Forgets everything of a tenant.
    #[cfg(feature = "resp")]
    pub(crate) fn forget_tenant(&self, tenant: &str) {
        for name in self.worker.catalog.of_tenant(short_name(tenant)) {
            self.worker.forget(name, None);
        }
    }

    /// Removals that the bucket has not confirmed.
    pub(crate) fn unconfirmed_removals(&self) -> u64 {
        if self.worker.off.load(Ordering::SeqCst) { 0 } else { self.worker.catalog.deleting() }
    }

    /// Whether it is asked at the moment.
    #[cfg(feature = "resp")]
    pub(crate) fn is_on(&self) -> bool {
        self.worker.is_on()
    }

    /// The digest of a value that is being put, if it may be the one that the bucket has in an object of so many bytes.
    pub(crate) fn digest(&self, name: u64, object_bytes: u64, room: &ArenaMemory) -> Option<u64> {
        self.worker.catalog.may_equal(name, object_bytes).then(|| frame::digest_of(room.slices()))
    }

    /// Whether it has a value of this name, asked for or not.
    pub(crate) fn holds(&self, name: u64) -> bool {
        self.worker.catalog.tag(name).is_some()
    }

    /// Whether this very copy is its key's value still.
    pub(crate) fn is_current(&self, name: u64, tag: u64) -> bool {
        self.worker.catalog.tag(name) == Some(tag)
    }

    /// Whether it is worth while to look.
    pub(crate) fn may_hold(&self, name: u64) -> bool {
        self.worker.is_on() && self.holds(name)
    }

    /// Reads the value of a key; `reply` is called once, at once or from another thread.
    pub(super) fn read(&self, name: u64, (tenant, key): (String, Vec<u8>), reply: Reply) {
        let worker = &self.worker;
        let found = Some(()).filter(|()| worker.is_on()).and_then(|()| worker.catalog.find(name));
        let found = found.filter(|(_, bytes)| *bytes <= self.object_max_bytes);
        let (Some(found), Some(runtime)) = (found, &self.runtime) else { return reply(None) };
        let Some(held) = worker.reading.take(found.1) else { return reply(None) };
        let read = Arc::clone(worker).read(found, (tenant, key), reply);
        runtime.spawn(async move {
            read.await;
            drop(held);
        });
    }

    /// A read was of use.
    pub(super) fn count_hit(&self, bytes: usize) {
        add(&self.worker.counts.hits, 1);
        add(&self.worker.counts.hit_bytes, bytes as u64);
    }

    /// Waits until what was offered is there or passed over and what was removed is gone, at most so long. False when
    /// it is not.
    pub(super) fn settle(&self, at_most: Duration) -> bool {
        let end = Instant::now() + at_most;
        while !self.worker.writing.is_free() || self.unconfirmed_removals() > 0 {
            if Instant::now() > end {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        true
    }

    pub(super) fn stats(&self) -> ColdStats {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (worker, counts) = (&self.worker, &self.worker.counts);
        ColdStats {
            on: worker.is_on(),
            objects: worker.catalog.objects(),
            bytes: worker.catalog.bytes(),
            hits: count(&counts.hits),
            hit_bytes: count(&counts.hit_bytes),
            written: count(&counts.written),
            written_bytes: count(&counts.written_bytes),
            passed_over: count(&counts.passed_over),
            evicted: count(&counts.evicted),
            refused: count(&counts.refused),
            failures: worker.health.failures(),
            unconfirmed_removals: worker.catalog.deleting(),
        }
    }
}
