//! Where everything is done that a bucket is asked for: write, read, remove; each within a bound.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{ObjectStore as Bucket, ObjectStoreExt as _, PutPayload};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

use super::super::budget::{Budget, BudgetShare};
use super::super::{FoundValue, OperatorLog};
use super::catalog::{Catalog, ForgetAction};
use super::frame;
use super::health::Health;
use super::label::{Kind, Label};
use super::{Offer, Reply};
use crate::lower::directory::Removal;

/// Writes and removals at a time.
const WRITES_MAX: usize = 8;
const REMOVALS_MAX: usize = 16;
/// Values that are removed at most to make room for one.
const VICTIMS_MAX: usize = 64;
/// Bytes of a write for each of which it may take as long as any answer.
const TIME_LIMIT_BYTES: usize = 8 << 20;
/// Removals that are tried again at a time.
const RETRIES_MAX: usize = 256;

/// Counters since the start.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) hits: AtomicU64,
    pub(super) hit_bytes: AtomicU64,
    pub(super) written: AtomicU64,
    pub(super) written_bytes: AtomicU64,
    pub(super) passed_over: AtomicU64,
    pub(super) evicted: AtomicU64,
    pub(super) refused: AtomicU64,
}

/// Runs the writes, reads and removals of a bucket.
pub(super) struct BucketWorker {
    pub(super) bucket: Arc<dyn Bucket>,
    pub(super) prefix: Path,
    pub(super) time_limit: Duration,
    pub(super) catalog: Catalog,
    pub(super) health: Health,
    pub(super) log: OperatorLog,
    pub(super) counts: Counts,
    /// Number of this start; tags carry it.
    pub(super) life: u32,
    pub(super) next_tag: AtomicU32,
    /// It is left alone for good.
    pub(super) off: AtomicBool,
    pub(super) writing: Arc<Budget>,
    pub(super) reading: Arc<Budget>,
    pub(super) writes: Semaphore,
    pub(super) removals: Arc<Semaphore>,
    /// Heads of objects being read for a list.
    #[cfg(feature = "resp")]
    pub(super) heads: Semaphore,
    /// Orders to remove: never more of them than there are copies.
    pub(super) orders: UnboundedSender<Label>,
    /// Removals that failed: names and tags.
    pub(super) stuck: Mutex<BTreeSet<(u64, u64)>>,
}

pub(super) fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

impl BucketWorker {
    /// Bounds of what goes on at a time.
    pub(super) fn bounds() -> (Semaphore, Arc<Semaphore>) {
        (Semaphore::new(WRITES_MAX), Arc::new(Semaphore::new(REMOVALS_MAX)))
    }

    /// Whether it is left alone for good.
    #[cfg(feature = "resp")]
    pub(super) fn is_off(&self) -> bool {
        self.off.load(Ordering::SeqCst)
    }

    pub(super) fn is_on(&self) -> bool {
        !self.off.load(Ordering::SeqCst) && self.health.is_open()
    }

    fn path(&self, label: &Label, kind: Kind) -> Path {
        label.path(&self.prefix, kind)
    }

    /// An answer of the bucket, none for what it has not; or why there is none in time.
    pub(super) async fn within<T>(
        time_limit: Duration,
        asked: impl Future<Output = object_store::Result<T>>,
    ) -> Result<Option<T>, String> {
        match tokio::time::timeout(time_limit, asked).await {
            Ok(Ok(answer)) => Ok(Some(answer)),
            Ok(Err(object_store::Error::NotFound { .. })) => Ok(None),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("no answer within {time_limit:?}")),
        }
    }

    /// Writes an object. A large one may take longer, because no client waits for it.
    pub(super) async fn put(&self, path: &Path, bytes: Vec<u8>) -> Result<(), String> {
        let times = u32::try_from(bytes.len() / TIME_LIMIT_BYTES).unwrap_or(u32::MAX).saturating_add(1);
        let time_limit = self.time_limit.saturating_mul(times);
        let put = Self::within(time_limit, self.bucket.put(path, PutPayload::from(bytes))).await;
        put?.map(|_| ()).ok_or_else(|| "no such bucket".into())
    }

    /// Reads an object of the expected length.
    pub(super) async fn get(&self, path: &Path, bytes: Option<u64>) -> Result<Option<Bytes>, String> {
        let read = async {
            let got = self.bucket.get(path).await?;
            if bytes.is_some_and(|bytes| got.meta.size != bytes) {
                return Ok(Bytes::new());
            }
            got.bytes().await
        };
        Self::within(self.time_limit, read).await
    }

    pub(super) async fn delete(&self, path: &Path) -> Result<(), String> {
        Self::within(self.time_limit, self.bucket.delete(path)).await.map(|_| ())
    }

    /// A value is to be written, if all that it takes is there. Its entry waits in the catalog.
    pub(super) async fn write(self: Arc<Self>, offer: Offer, tag: u64, _held: BudgetShare) {
        let name = offer.name;
        let permit = self.writes.acquire().await;
        if permit.is_err() || !self.is_on() || !self.make_room().await {
            self.catalog.drop_waiting(name, tag);
            return add(&self.counts.passed_over, 1);
        }
        let Offer { tenant, key, room, checksum, .. } = offer;
        let seal = move || frame::seal(&tenant, &key, &room, checksum);
        let Ok(Some(sealed)) = tokio::task::spawn_blocking(seal).await else {
            self.catalog.drop_waiting(name, tag);
            return add(&self.counts.refused, 1);
        };
        let Some(label) = self.catalog.start(name, tag, sealed.digest) else { return };
        let bytes = sealed.bytes.len() as u64;
        let put = self.put(&self.path(&label, Kind::Value), sealed.bytes).await;
        if self.health.record("write", put).is_some() {
            add(&self.counts.written, 1);
            add(&self.counts.written_bytes, bytes);
            if self.catalog.written(name, tag) {
                return;
            }
        } else {
            self.catalog.unsure(name, tag);
        }
        self.order(label);
    }

    /// Removes what was not read for long until all that is counted fits. False when that does not come about.
    pub(super) async fn make_room(&self) -> bool {
        for _ in 0..VICTIMS_MAX {
            if !self.catalog.is_over() {
                return true;
            }
            let Some(victim) = self.catalog.victim() else { return false };
            add(&self.counts.evicted, 1);
            if !self.remove(victim).await {
                return false;
            }
        }
        !self.catalog.is_over()
    }

    /// Has a copy removed that is to go.
    fn order(&self, label: Label) {
        // At the end of the store the receiver is gone, and no caller waits.
        let _ = self.orders.send(label);
    }

    /// Carries out orders to remove, some at a time.
    pub(super) async fn remove_all(self: Arc<Self>, mut orders: UnboundedReceiver<Label>) {
        while let Some(label) = orders.recv().await {
            let Ok(permit) = Arc::clone(&self.removals).acquire_owned().await else { return };
            let worker = Arc::clone(&self);
            tokio::spawn(async move {
                worker.remove(label).await;
                drop(permit);
            });
        }
    }

    async fn remove(&self, label: Label) -> bool {
        let Some(sure) = self.catalog.is_sure(label.name, label.tag) else { return true };
        if !self.is_on() {
            self.is_stuck(label);
            return false;
        }
        let path = self.path(&label, Kind::Value);
        let mut done = Ok(());
        if !sure {
            // Its writing may still arrive: a grave keeps it from being believed after the next start.
            done = self.put(&self.path(&label, Kind::Tombstone), Vec::new()).await;
        }
        if done.is_ok() {
            done = self.delete(&path).await;
        }
        if self.health.record("remove", done).is_none() {
            self.is_stuck(label);
            return false;
        }
        self.catalog.gone(label.name, label.tag);
        true
    }

    fn is_stuck(&self, label: Label) {
        self.catalog.stuck(label.name, label.tag);
        self.stuck.lock().insert((label.name, label.tag));
    }

    /// Tries some of the removals again that failed.
    pub(super) fn retry(&self) {
        let some: Vec<_> = {
            let mut stuck = self.stuck.lock();
            std::iter::from_fn(|| stuck.pop_first()).take(RETRIES_MAX).collect()
        };
        for (name, tag) in some {
            if let Some(label) = self.catalog.retry(name, tag) {
                self.order(label);
            }
        }
    }

    /// The key has another value, or none: what there is to wait for.
    pub(super) fn forget(&self, name: u64, digest: Option<u64>) -> Option<Removal> {
        if self.off.load(Ordering::SeqCst) {
            return None;
        }
        match self.catalog.forget(name, digest) {
            ForgetAction::Nothing => None,
            ForgetAction::UnderWay(removal) => Some(removal),
            ForgetAction::Remove(label, removal) => {
                // No caller waits for a bucket that is left alone.
                if self.is_on() {
                    self.order(label)
                } else {
                    self.is_stuck(label)
                }
                Some(removal)
            }
        }
    }

    /// Reads the value of a key; `reply` is called once, with the number of its copy.
    pub(super) async fn read(
        self: Arc<Self>,
        (label, bytes): (Label, u64),
        (tenant, key): (String, Vec<u8>),
        reply: Reply,
    ) {
        let got = self.get(&self.path(&label, Kind::Value), Some(bytes)).await;
        // Verification and copy touch each byte, so they do not run on the threads that serve the bucket.
        let answered = move || reply(self.judge(label, got, &tenant, &key).map(|found| (found, label.tag)));
        // A reply that panicked has said so.
        let _ = tokio::task::spawn_blocking(answered).await;
    }

    /// The value, if the bytes read are those that were written.
    fn judge(
        &self,
        label: Label,
        got: Result<Option<Bytes>, String>,
        tenant: &str,
        key: &[u8],
    ) -> Option<FoundValue> {
        let bytes = self.health.record("read", got)?;
        let found = bytes.and_then(|bytes| frame::open(&bytes, tenant, key));
        if found.is_none()
            && let Some(label) = self.catalog.refuse(label.name, label.tag)
        {
            // Missing, cut short, damaged or another key's: the object is useless.
            add(&self.counts.refused, 1);
            self.order(label);
        }
        found
    }
}
