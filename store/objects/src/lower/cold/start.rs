//! The start: the bucket proves itself, and is listed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use object_store::path::{Path, PathPart};
use object_store::{ObjectMeta, ObjectStoreExt as _};
use tokio::task::JoinSet;

use super::bucket_worker::BucketWorker;
use super::label::{FOLDERS, Kind, Label, folder};

/// How long the whole start may take.
pub(super) const START_WITHIN: Duration = Duration::from_secs(60);
/// Bytes that are written and read back.
const PROOF_BYTES: usize = 1 << 20;
/// How much older than the newest object a grave is when nothing that it stands for can still arrive, µs.
const GRAVE_AFTER_US: i64 = 24 * 3_600 * 1_000_000;

/// Services tell ages in whole seconds, or in something finer.
const SECOND_US: i64 = 1_000_000;

/// The result of a listing.
#[derive(Debug, Default)]
struct Census {
    /// Values with their length and age, and tombstones with theirs.
    values: Vec<(i64, Label, u64)>,
    tombstones: BTreeMap<Label, i64>,
}

impl BucketWorker {
    /// Proves the bucket and takes over what it has. Gives words for the log.
    pub(super) async fn begin(self: Arc<Self>) -> Result<String, String> {
        let timed = tokio::time::timeout(START_WITHIN, self.begin_at_leisure()).await;
        timed.unwrap_or_else(|_| Err(format!("not listed within {START_WITHIN:?}")))
    }

    async fn begin_at_leisure(self: &Arc<Self>) -> Result<String, String> {
        let (speed, age) = self.prove().await?;
        if age % SECOND_US == 0 {
            // The next start could not distinguish values that this store writes in its first second from late writes
            // of the previous store, and would drop them.
            tokio::time::sleep(Duration::from_micros(SECOND_US.unsigned_abs())).await;
        }
        let before = self.owner_before().await.map_err(|why| format!("read its owner: {why}"))?;
        let owned = self.put(&self.owner(), self.life.to_string().into_bytes()).await;
        owned.map_err(|why| format!("write its owner: {why}"))?;
        // A late write of the previous store is younger than this owner's mark, or in this listing.
        let census = self.list().await?;
        self.take_over(census, before).await?;
        let (objects, bytes) = (self.catalog.objects(), self.catalog.bytes());
        Ok(format!("{objects} objects, {bytes} bytes; {speed}"))
    }

    /// Writes something, reads it back, removes it. Says how fast that went, and when it was written, µs.
    async fn prove(&self) -> Result<(String, i64), String> {
        let mut rng = baton_types::Rng::new(u64::from(self.life));
        let words = (0..PROOF_BYTES / 8).map(|_| rng.next_u64().to_le_bytes());
        let proof: Vec<u8> = words.flatten().collect();
        let path = self.prefix.clone().join(PathPart::from(format!("proof-{:08x}", self.life)));
        let start = Instant::now();
        self.put(&path, proof.clone()).await.map_err(|why| format!("write: {why}"))?;
        let written = start.elapsed();
        let read = self.get(&path, None).await.map_err(|why| format!("read back: {why}"))?;
        let read_in = start.elapsed().saturating_sub(written);
        if read.is_none_or(|read| read != proof) {
            return Err("read back: other bytes than were written".into());
        }
        let known = Self::within(self.time_limit, self.bucket.head(&path)).await;
        let known = known.map_err(|why| format!("ask for its age: {why}"))?;
        let age = known.ok_or("it is gone before it was removed")?.last_modified.timestamp_micros();
        self.delete(&path).await.map_err(|why| format!("remove: {why}"))?;
        let rate = |took: Duration| PROOF_BYTES as u128 / took.as_micros().max(1);
        Ok((format!("1 MiB there at {} MB/s, back at {} MB/s", rate(written), rate(read_in)), age))
    }

    /// Everything that is ours, folder by folder.
    async fn list(self: &Arc<Self>) -> Result<Census, String> {
        let mut listings = JoinSet::new();
        for number in 0..FOLDERS {
            let (worker, place) = (Arc::clone(self), folder(&self.prefix, number));
            listings.spawn(async move { worker.list_folder(&place).await });
        }
        let mut census = Census::default();
        while let Some(listed) = listings.join_next().await {
            let listed = listed.map_err(|e| format!("list: {e}"))??;
            listed.into_iter().for_each(|meta| census.add(&meta));
            self.bounded(census.values.len() + census.tombstones.len())?;
        }
        Ok(census)
    }

    async fn list_folder(&self, place: &Path) -> Result<Vec<ObjectMeta>, String> {
        let (mut found, mut listing) = (Vec::new(), self.bucket.list(Some(place)));
        loop {
            let next = tokio::time::timeout(self.time_limit, listing.next()).await;
            match next.map_err(|_| format!("list: no answer within {:?}", self.time_limit))? {
                Some(Ok(meta)) => found.push(meta),
                Some(Err(error)) => return Err(format!("list: {error}")),
                None => return Ok(found),
            }
            self.bounded(found.len())?;
        }
    }

    fn bounded(&self, objects: usize) -> Result<(), String> {
        if objects as u64 <= self.catalog.listed_max() {
            return Ok(());
        }
        Err(format!("more than {} objects; allow more or give an empty prefix", self.catalog.listed_max()))
    }

    /// The start before this one, and when it began.
    async fn owner_before(&self) -> Result<Option<(u32, i64)>, String> {
        let path = self.owner();
        let known = Self::within(self.time_limit, self.bucket.head(&path)).await?;
        let Some(known) = known else { return Ok(None) };
        let life = self.get(&path, Some(known.size)).await?;
        let life = life.and_then(|life| std::str::from_utf8(&life).ok()?.parse().ok());
        Ok(life.map(|life| (life, known.last_modified.timestamp_micros())))
    }

    /// Of two copies of a key nobody knows which was meant to stay: both go, as does what has a grave, and what an
    /// earlier owner wrote when the last one had begun, which so knew nothing of it.
    async fn take_over(&self, mut census: Census, before: Option<(u32, i64)>) -> Result<(), String> {
        let is_late = |label: &Label, age: i64| {
            before.is_some_and(|(life, begun)| label.life() != life && age >= begun)
        };
        census.values.sort_unstable_by_key(|(age, label, _)| (*age, *label));
        let mut seen = BTreeSet::new();
        let twice: BTreeSet<u64> =
            census.values.iter().map(|(_, label, _)| label.name).filter(|name| !seen.insert(*name)).collect();
        for (age, label, bytes) in &census.values {
            if twice.contains(&label.name) || census.tombstones.contains_key(label) || is_late(label, *age) {
                let removed = self.delete(&label.path(&self.prefix, Kind::Value)).await;
                removed.map_err(|why| format!("remove what is in doubt: {why}"))?;
            } else {
                self.catalog.adopt(*label, *bytes);
            }
        }
        let newest =
            census.values.iter().map(|(age, ..)| *age).chain(census.tombstones.values().copied()).max();
        for (label, age) in &census.tombstones {
            if newest.is_some_and(|newest| newest - age > GRAVE_AFTER_US) {
                let removed = self.delete(&label.path(&self.prefix, Kind::Tombstone)).await;
                removed.map_err(|why| format!("remove an old grave: {why}"))?;
            }
        }
        Ok(())
    }

    /// Says which start of a store the objects belong to.
    pub(super) fn owner(&self) -> Path {
        self.prefix.clone().join(PathPart::from("owner"))
    }
}

impl Census {
    fn add(&mut self, meta: &ObjectMeta) {
        let age = meta.last_modified.timestamp_micros();
        match Label::read(&meta.location) {
            Some((label, Kind::Value)) => self.values.push((age, label, meta.size)),
            Some((label, Kind::Tombstone)) => _ = self.tombstones.insert(label, age),
            None => {}
        }
    }
}
