//! Announces a cache of our own to subscribers, as vLLM's events or as the standard ones.
//!
//! Two listeners: one sends every batch to every subscriber as it is published, numbered from 0; the other
//! repeats what a subscriber missed, as vLLM's does: to `["", number]` it answers `["", topic, number, batch]`
//! for each batch kept from that number on, and then the number −1.
//!
//! The publisher keeps a limited number of batches. A subscriber that asks for an older one gets a *snapshot* instead:
//! one batch under the newest number, which clears and then stores all blocks that are held now. A subscriber that
//! knows nothing of snapshots sees a hole. It must treat that as a loss anyway, and its state is right after it.

mod history;
mod ledger;
mod serve;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use baton_http::ConnectionSlots;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::broadcast;
use tokio::task::JoinHandle;

use crate::codec::{Form, Speaker, encode};
use crate::error::{EventError, Stage};
use crate::model::{Batch, Change, Event};
use crate::zmtp::Endpoint;
use history::History;

/// Settings of a [`Publisher`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublisherConfig {
    /// Where to publish, `tcp://HOST:PORT`; port 0 takes any.
    pub endpoint: String,
    /// Where to repeat; without it nothing is repeated.
    pub replay_endpoint: Option<String>,
    /// Topic of every batch.
    pub topic: String,
    /// The dialect.
    pub form: Form,
    /// The publisher, in the standard form.
    pub speaker: Speaker,
    /// Rank in a data-parallel group.
    pub dp_rank: Option<u32>,
    /// Batches kept for replay.
    pub history_batches: usize,
    /// Bytes of them.
    pub history_bytes: usize,
    /// Tokens of held blocks kept for snapshots; blocks beyond, or beyond the first 131,071, are not in them.
    pub snapshot_tokens: usize,
    /// Batches that a slow subscriber may be behind before it loses the oldest.
    pub queue_batches: usize,
    /// Connections to each of the two listeners, of which one address has at most half.
    pub max_peers: usize,
    /// Time for a peer to shake hands, or to take a message.
    pub peer_timeout_us: u64,
}

impl PublisherConfig {
    /// The defaults: vLLM's form, 10,000 batches kept.
    #[must_use]
    pub fn new(endpoint: impl Into<String>, replay_endpoint: Option<String>) -> Self {
        Self {
            endpoint: endpoint.into(),
            replay_endpoint,
            topic: String::new(),
            form: Form::Vllm,
            speaker: Speaker::default(),
            dp_rank: Some(0),
            history_batches: 10_000,
            history_bytes: 256 << 20,
            snapshot_tokens: 8 << 20,
            queue_batches: 10_000,
            max_peers: 128,
            peer_timeout_us: 10_000_000,
        }
    }
}

/// One published batch.
#[derive(Clone, Debug)]
struct PublishedBatch {
    sequence: u64,
    payload: Bytes,
}

/// The state that listeners and publisher share.
#[derive(Debug)]
struct Shared {
    config: PublisherConfig,
    history: Mutex<History>,
    live: broadcast::Sender<PublishedBatch>,
}

impl Shared {
    fn encode(&self, sequence: u64, events: Vec<Event>) -> Bytes {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let time_us = u64::try_from(since.as_micros()).unwrap_or(u64::MAX);
        let batch = Batch { sequence, time_us, dp_rank: self.config.dp_rank, events };
        encode(&batch, self.config.form, &self.config.speaker).into()
    }
}

/// Publishes until it is dropped.
#[derive(Debug)]
pub struct Publisher {
    shared: Arc<Shared>,
    endpoint: String,
    replay_endpoint: Option<String>,
    tasks: Vec<JoinHandle<()>>,
}

impl Publisher {
    /// Listens, and starts to serve. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `Invalid` where an endpoint is none, `Unavailable` where it cannot be listened on.
    pub async fn bind(config: PublisherConfig) -> Result<Self, EventError> {
        let (live, _) = broadcast::channel(config.queue_batches.max(1));
        let history = Mutex::new(History::new(&config));
        let shared = Arc::new(Shared { history, live, config });
        let (listener, endpoint) = listen(&shared.config.endpoint).await?;
        let room = || ConnectionSlots::new(shared.config.max_peers);
        let mut tasks =
            vec![tokio::spawn(serve::accept(listener, shared.clone(), room(), serve::Service::Live))];
        let mut replay_endpoint = None;
        if let Some(replay) = &shared.config.replay_endpoint {
            let (listener, endpoint) = listen(replay).await?;
            tasks.push(tokio::spawn(serve::accept(listener, shared.clone(), room(), serve::Service::Replay)));
            replay_endpoint = Some(endpoint);
        }
        Ok(Self { shared, endpoint, replay_endpoint, tasks })
    }

    /// Where it publishes, with the port that was taken.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Where it repeats.
    #[must_use]
    pub fn replay_endpoint(&self) -> Option<&str> {
        self.replay_endpoint.as_deref()
    }

    /// Publishes events as the next batch and returns its number. Never waits: who cannot keep up loses batches,
    /// and asks for them.
    pub fn publish(&self, events: Vec<Event>) -> u64 {
        let mut history = self.shared.history.lock();
        let sequence = history.next();
        history.record(&events);
        let payload = self.shared.encode(sequence, events);
        history.push(payload.clone());
        // Nobody may be listening. Under the lock, so that batches leave in order.
        let _ = self.shared.live.send(PublishedBatch { sequence, payload });
        sequence
    }

    /// Publishes changes as one batch; see [`Self::publish`].
    pub fn announce(&self, changes: Vec<Change>) -> u64 {
        self.publish(changes.into_iter().map(Event::from).collect())
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

async fn listen(endpoint: &str) -> Result<(TcpListener, String), EventError> {
    let wanted = Endpoint::parse(endpoint)?;
    let failed = |error: std::io::Error| {
        EventError::new(crate::Kind::Unavailable, Stage::Bind, format!("cannot listen on {wanted}: {error}"))
    };
    let listener = TcpListener::bind(wanted.address()).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, format!("tcp://{address}")))
}
