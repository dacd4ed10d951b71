//! The index while it serves: one follower a publisher, queries between their batches, snapshots to disk.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use baton_events::{Subscriber, SubscriberConfig, SubscriberStatus};
use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::contract::{Lookup, Registration, parse_leaving};
use crate::error::{IndexerError, Kind};
use crate::follow::{Follow, Step};
use crate::index::{Index, IndexLimits, PrefixMatch, StreamId};
use crate::metrics::Metrics;
use crate::snapshot::{self, Reader, Section};

/// Silence after which a publisher has said what it had to repeat.
const SILENCE: Duration = Duration::from_secs(3);
/// Bytes that are read of a file at once.
const PIECE_BYTES: usize = 4 << 20;

/// Settings of an [`Indexer`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IndexerSettings {
    /// Bounds of the index, and the seed of its names.
    pub limits: IndexLimits,
    /// How publishers are followed; endpoints are theirs. `None` for the defaults.
    pub subscription: Option<SubscriberConfig>,
}

/// How a registration went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegistrationOutcome {
    /// It is followed from now on.
    New,
    /// It was followed already, with the same data.
    Already,
}

/// A follower as others see it.
#[derive(Debug, Default)]
struct FollowerState {
    /// Cleared before the stream leaves the index: a task that still has a batch must not apply it.
    alive: AtomicBool,
    warm: AtomicBool,
    status: Mutex<SubscriberStatus>,
}

#[derive(Debug)]
struct FollowedStream {
    id: StreamId,
    registration: Registration,
    seen: Arc<FollowerState>,
    task: JoinHandle<()>,
}

impl Drop for FollowedStream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Sums over all publishers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Overview {
    pub(crate) streams: u64,
    pub(crate) connected: u64,
    pub(crate) warm: u64,
    pub(crate) contexts: u64,
    pub(crate) blocks: u64,
    pub(crate) orphans: u64,
    pub(crate) events: u64,
    pub(crate) batches: u64,
    pub(crate) gaps: u64,
    pub(crate) lost: u64,
    pub(crate) restarts: u64,
    pub(crate) ignored: u64,
    pub(crate) over_capacity: u64,
    /// Of bodies and answers; the server knows it.
    pub(crate) held_bytes: u64,
    /// Requests and answers without room; the server knows it.
    pub(crate) no_room: u64,
}

/// The open indexer.
#[derive(Debug)]
pub struct Indexer {
    settings: IndexerSettings,
    index: RwLock<Index>,
    /// By `instance|tenant|rank`.
    followed: Mutex<BTreeMap<String, FollowedStream>>,
    pub(crate) metrics: Metrics,
}

impl Indexer {
    /// An indexer that follows nobody yet.
    #[must_use]
    pub fn new(settings: IndexerSettings) -> Arc<Self> {
        let index = RwLock::new(Index::new(settings.limits));
        Arc::new(Self { settings, index, followed: Mutex::default(), metrics: Metrics::default() })
    }

    /// Starts following a publisher; it need not be there yet. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `Conflict` where the subscription's name is taken by other data, `Invalid` for an endpoint that is none,
    /// `Full` at the bound of publishers.
    pub fn register(
        self: &Arc<Self>,
        registration: Registration,
    ) -> Result<RegistrationOutcome, IndexerError> {
        let mut followed = self.followed.lock();
        let key = registration.key();
        if let Some(there) = followed.get(&key) {
            if there.registration == registration {
                return Ok(RegistrationOutcome::Already);
            }
            let field = difference(&there.registration, &registration);
            let message = format!("{key} is registered with another {field}; unregister it first");
            return Err(IndexerError::new(Kind::Conflict, message));
        }
        let subscriber = self.subscribe(&registration)?;
        let id = self.index.write().add(registration.clone())?;
        followed.insert(key, self.follow(id, registration, subscriber));
        Ok(RegistrationOutcome::New)
    }

    /// Stops following a publisher and forgets its blocks; whether it was there.
    pub fn unregister(&self, key: &str) -> bool {
        let Some(gone) = self.followed.lock().remove(key) else { return false };
        gone.seen.alive.store(false, Ordering::SeqCst);
        self.index.write().remove(gone.id);
        true
    }

    /// Takes over a stream of a snapshot and follows its publisher from there; whether it was new.
    ///
    /// # Errors
    /// As of [`register`](Self::register).
    pub fn adopt(self: &Arc<Self>, section: Section) -> Result<bool, IndexerError> {
        let mut followed = self.followed.lock();
        let registration = section.registration.clone();
        if followed.contains_key(&registration.key()) {
            return Ok(false);
        }
        let subscriber = self.subscribe(&registration)?;
        let id = section.restore(&mut self.index.write())?;
        followed.insert(registration.key(), self.follow(id, registration, subscriber));
        Ok(true)
    }

    fn subscribe(&self, registration: &Registration) -> Result<Subscriber, IndexerError> {
        let (endpoint, replay) = (registration.endpoint.clone(), registration.replay_endpoint.clone());
        let config = match &self.settings.subscription {
            Some(given) => SubscriberConfig { endpoint, replay_endpoint: replay, ..given.clone() },
            None => SubscriberConfig::new(endpoint, replay),
        };
        Subscriber::start(config).map_err(|e| IndexerError::invalid(e.message))
    }

    fn follow(
        self: &Arc<Self>,
        id: StreamId,
        registration: Registration,
        subscriber: Subscriber,
    ) -> FollowedStream {
        let follow = Follow::new(self.index.read().position(id));
        let seen = Arc::new(FollowerState::default());
        seen.alive.store(true, Ordering::SeqCst);
        seen.warm.store(follow.is_warm(), Ordering::SeqCst);
        let task = tokio::spawn(run(Arc::downgrade(self), (id, Arc::clone(&seen)), subscriber, follow));
        FollowedStream { id, registration, seen, task }
    }

    fn carry_out(&self, id: StreamId, seen: &FollowerState, steps: Vec<Step>) {
        for step in steps {
            // One lock a batch: queries pass between them.
            let mut index = self.index.write();
            if !seen.alive.load(Ordering::SeqCst) {
                return;
            }
            match step {
                Step::Clear => index.clear(id),
                Step::Apply(batch) => index.apply(id, &batch),
            }
        }
    }

    /// The holders of a prompt, and how much of it each has.
    pub(crate) fn query_tokens(&self, lookup: &Lookup, tokens: &[u32]) -> Value {
        let began = Instant::now();
        let answer = matched_json(lookup, self.index.read().match_tokens(lookup, tokens));
        self.metrics.queried(began.elapsed());
        answer
    }

    /// The holders of these blocks, and how many each has.
    pub(crate) fn query_hashes(&self, lookup: &Lookup, hashes: &[u64]) -> Value {
        let began = Instant::now();
        let answer = matched_json(lookup, self.index.read().match_hashes(lookup, hashes));
        self.metrics.queried(began.elapsed());
        answer
    }

    /// `/unregister` as it is sent.
    pub(crate) fn leave(&self, json: &[u8]) -> Result<(Vec<String>, Vec<String>), IndexerError> {
        let (key, unknown) = parse_leaving(json)?;
        let removed = if self.unregister(&key) { vec![key] } else { Vec::new() };
        Ok((removed, unknown))
    }

    /// Every publisher and how it is doing.
    pub(crate) fn services(&self) -> Value {
        let followed = self.followed.lock();
        let index = self.index.read();
        let all = followed.iter().map(|(key, one)| {
            let status = one.seen.status.lock().clone();
            let mut told = serde_json::to_value(&one.registration).expect("a registration is plain data");
            told["key"] = json!(key);
            told["connected"] = json!(status.connected);
            told["confirmed"] = json!(!one.seen.warm.load(Ordering::SeqCst));
            told["position"] = json!(index.position(one.id));
            told["counts"] = json!(index.counts(one.id));
            told["stream"] = json!({
                "epoch": status.epoch, "batches": status.batches, "gaps": status.gaps, "lost": status.lost,
                "restarts": status.restarts, "malformed": status.malformed, "last_error": status.last_error,
            });
            told
        });
        json!({ "services": all.collect::<Vec<Value>>() })
    }

    /// Every context and its blocks.
    pub(crate) fn global_view(&self) -> Value {
        let index = self.index.read();
        let contexts = index.contexts().into_iter().map(|(context, blocks)| {
            let mut told = serde_json::to_value(context).expect("a context is plain data");
            told["blocks"] = json!(blocks);
            told
        });
        json!({ "contexts": contexts.collect::<Vec<Value>>() })
    }

    pub(crate) fn overview(&self) -> Overview {
        let followed = self.followed.lock();
        let index = self.index.read();
        let contexts = index.contexts().iter().filter(|(_, blocks)| *blocks > 0).count() as u64;
        let mut sum = Overview { streams: followed.len() as u64, contexts, ..Overview::default() };
        for one in followed.values() {
            let (status, counts) = (one.seen.status.lock(), index.counts(one.id));
            sum.connected += u64::from(status.connected);
            sum.warm += u64::from(one.seen.warm.load(Ordering::SeqCst));
            sum.blocks += counts.blocks;
            sum.orphans += counts.orphans;
            sum.events += counts.events;
            sum.batches += status.batches;
            sum.gaps += status.gaps;
            sum.lost += status.lost;
            sum.restarts += status.restarts;
            sum.ignored += counts.odd_size + counts.elsewhere;
            sum.over_capacity += counts.over_capacity;
        }
        sum
    }

    /// The first stream after `key` as a section of a snapshot, with its key.
    pub(crate) fn section_after(&self, key: Option<&str>) -> Option<(String, Bytes)> {
        let mut after = key.map(str::to_owned);
        loop {
            let next = {
                let followed = self.followed.lock();
                let from = after.as_deref().map_or(std::ops::Bound::Unbounded, std::ops::Bound::Excluded);
                let mut rest = followed.range::<str, _>((from, std::ops::Bound::Unbounded));
                rest.next().map(|(key, one)| (key.clone(), one.id))
            };
            let (key, id) = next?;
            if let Some(section) = snapshot::section(&self.index.read(), id) {
                return Some((key, section));
            }
            after = Some(key);
        }
    }

    /// The first bytes of a snapshot.
    pub(crate) fn header(&self) -> Bytes {
        snapshot::header(self.settings.limits.seed)
    }

    pub(crate) const fn seed(&self) -> u64 {
        self.settings.limits.seed
    }

    /// Writes a snapshot to a file, which is replaced as a whole; gives its streams. Blocks: call it where that
    /// does no harm.
    ///
    /// # Errors
    /// `Unavailable` with what the disk said.
    pub fn save(&self, path: &Path) -> Result<u64, IndexerError> {
        let failed = |e: std::io::Error| {
            let message =
                format!("snapshot {}: {e}; give a file in a folder that can be written", path.display());
            IndexerError::new(Kind::Unavailable, message)
        };
        // Its whole name and more: two snapshots of one folder that differ in their extension do not share it.
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(".partial");
        let mut file = std::fs::File::create(&temporary).map_err(failed)?;
        file.write_all(&self.header()).map_err(failed)?;
        let (mut after, mut streams) = (None, 0);
        while let Some((key, section)) = self.section_after(after.as_deref()) {
            file.write_all(&section).map_err(failed)?;
            (after, streams) = (Some(key), streams + 1);
        }
        file.write_all(&snapshot::footer(streams)).map_err(failed)?;
        file.sync_all().and_then(|()| std::fs::rename(&temporary, path)).map_err(failed)?;
        // The new name lasts too, or a power cut leaves the snapshot before.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)?;
        Ok(streams)
    }

    /// Takes over a snapshot of a file and follows its publishers; gives streams and blocks. Within a tokio runtime.
    ///
    /// # Errors
    /// Where the file cannot be read, or is no whole snapshot of ours; what came before the fault is kept.
    pub fn load(self: &Arc<Self>, path: &Path) -> Result<(u64, u64), IndexerError> {
        let named =
            |e: &dyn std::fmt::Display, kind| IndexerError::new(kind, format!("{}: {e}", path.display()));
        let mut file = std::fs::File::open(path).map_err(|e| named(&e, Kind::Unavailable))?;
        let mut reader = Reader::new(self.seed());
        let (mut streams, mut blocks) = (0, 0);
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            let count = file.read(&mut piece).map_err(|e| named(&e, Kind::Unavailable))?;
            if count == 0 {
                break;
            }
            reader.push(&piece[..count]);
            while let Some(section) = reader.next_section().map_err(|e| named(&e, e.kind))? {
                let held = section.blocks() as u64;
                if self.adopt(section)? {
                    (streams, blocks) = (streams + 1, blocks + held);
                }
            }
        }
        reader.finish().map_err(|e| named(&e, e.kind))?;
        Ok((streams, blocks))
    }

    /// Checks every invariant of the index.
    ///
    /// # Errors
    /// The invariant that does not hold.
    pub fn check(&self) -> Result<(), String> {
        self.index.read().check()
    }
}

/// The first field in which two registrations differ, under its name on the wire.
fn difference(a: &Registration, b: &Registration) -> String {
    let fields = |one| serde_json::to_value(one).expect("a registration is plain data");
    let (a, b) = (fields(a), fields(b));
    let named = a.as_object().and_then(|all| all.keys().find(|name| a[name.as_str()] != b[name.as_str()]));
    named.cloned().unwrap_or_else(|| "data".into())
}

fn matched_json(lookup: &Lookup, matched: BTreeMap<&str, PrefixMatch>) -> Value {
    let instances = matched.into_iter().map(|(instance, matched)| {
        let [device, host, disk] = matched.media;
        let ranks: BTreeMap<String, u64> =
            matched.ranks.iter().map(|(rank, tokens)| (rank.to_string(), *tokens)).collect();
        let told = json!({
            "longest_matched": matched.longest, "GPU": device, "CPU": host, "DISK": disk, "DP": ranks,
        });
        (instance.to_owned(), told)
    });
    let instances: serde_json::Map<String, Value> = instances.collect();
    json!({ lookup.context.tenant.as_str(): instances })
}

/// Follows one publisher until the indexer has gone, or the stream has left it.
async fn run(
    indexer: Weak<Indexer>,
    (id, seen): (StreamId, Arc<FollowerState>),
    mut subscriber: Subscriber,
    mut follow: Follow,
) {
    loop {
        let steps = match tokio::time::timeout(SILENCE, subscriber.next()).await {
            Ok(Some(feed)) => follow.take(feed),
            Ok(None) => return,
            Err(_) => follow.silence(),
        };
        let Some(indexer) = indexer.upgrade() else { return };
        indexer.carry_out(id, &seen, steps);
        seen.warm.store(follow.is_warm(), Ordering::SeqCst);
        *seen.status.lock() = subscriber.status();
    }
}
