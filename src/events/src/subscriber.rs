//! Following one engine: its live stream, and its replay socket where the live stream has holes.
//!
//! The consumer gets a row of *epochs*. Each begins with [`Feed::Cleared`]: the consumer discards its state of the
//! engine's cache. Then come batches whose numbers rise without a hole, so the consumer need not check them. An epoch
//! ends when the engine restarted, or when batches are lost that the engine cannot repeat.
//!
//! Messages are never dropped here: a slow consumer makes us read slower, the publisher then drops by its own
//! bound, and the hole is filled by replay.

mod live;
mod replay;
mod session;
mod stream;

use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::codec::Limits;
use crate::error::EventError;
use crate::model::Batch;
use crate::zmtp::Endpoint;

/// Settings of a [`Subscriber`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubscriberConfig {
    /// Where the engine publishes, `tcp://HOST:PORT`.
    pub endpoint: String,
    /// Where it repeats what it published; without it every hole and every reconnection ends the epoch.
    pub replay_endpoint: Option<String>,
    /// Only batches whose topic starts so; empty for all.
    pub topic: String,
    /// The limits of a batch.
    pub limits: Limits,
    /// Batches that wait for the consumer at most.
    pub queue_batches: usize,
    /// Time for connecting and shaking hands.
    pub connect_timeout_us: u64,
    /// Time without a message after which a replay is given up.
    pub replay_timeout_us: u64,
    /// Replays in a row that bring nothing new, after which a hole is given up.
    pub replay_attempts: u32,
    /// Wait before the first reconnection; doubled up to `backoff_max_us`.
    pub backoff_min_us: u64,
    /// Wait between reconnections at most.
    pub backoff_max_us: u64,
    /// Silence after which the publisher is asked for anything that was missed, since the last of its messages
    /// may be among the lost; doubled up to `probe_max_us` while silence lasts.
    pub probe_min_us: u64,
    /// Silence between two such questions at most.
    pub probe_max_us: u64,
}

impl SubscriberConfig {
    /// The defaults, for an engine at `endpoint`.
    #[must_use]
    pub fn new(endpoint: impl Into<String>, replay_endpoint: Option<String>) -> Self {
        Self {
            endpoint: endpoint.into(),
            replay_endpoint,
            topic: String::new(),
            limits: Limits::default(),
            queue_batches: 1024,
            connect_timeout_us: 5_000_000,
            replay_timeout_us: 5_000_000,
            replay_attempts: 3,
            backoff_min_us: 100_000,
            backoff_max_us: 10_000_000,
            probe_min_us: 1_000_000,
            probe_max_us: 60_000_000,
        }
    }
}

/// Why an epoch began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EpochReason {
    /// It is the first.
    Started,
    /// The engine's numbers began anew, or its past is another than the one we know.
    Restarted,
    /// Batches were lost for good, or could not be read.
    Lost,
}

/// An item that the consumer gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Feed {
    /// A new epoch: forget what you know of this engine's cache.
    Cleared {
        /// Number of the epoch, from 1.
        epoch: u64,
        /// Why the epoch before ended.
        why: EpochReason,
    },
    /// The next batch of the epoch.
    Batch {
        /// The epoch it belongs to.
        epoch: u64,
        /// The batch.
        batch: Batch,
    },
}

/// How a subscription is doing: plain counts since it started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SubscriberStatus {
    /// Whether the live stream is connected.
    pub connected: bool,
    /// The epoch.
    pub epoch: u64,
    /// Batches handed to the consumer, replayed ones included.
    pub batches: u64,
    /// Holes seen in the live stream.
    pub gaps: u64,
    /// Replays asked for.
    pub replays: u64,
    /// Batches that nobody could repeat.
    pub lost: u64,
    /// Messages that were no batch.
    pub malformed: u64,
    /// Restarts of the engine.
    pub restarts: u64,
    /// Connections of the live stream.
    pub connections: u64,
    /// The last error, in words.
    pub last_error: Option<String>,
}

/// A subscription that runs until it is dropped.
#[derive(Debug)]
pub struct Subscriber {
    feed: mpsc::Receiver<Feed>,
    status: watch::Receiver<SubscriberStatus>,
    task: JoinHandle<()>,
}

impl Subscriber {
    /// Starts following an engine; it need not be there yet. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `Invalid` where an endpoint is none.
    pub fn start(config: SubscriberConfig) -> Result<Self, EventError> {
        let live = Endpoint::parse(&config.endpoint)?;
        let replay = config.replay_endpoint.as_deref().map(Endpoint::parse).transpose()?;
        let (feed_to, feed) = mpsc::channel(config.queue_batches.max(1));
        let (status_to, status) = watch::channel(SubscriberStatus::default());
        let stream = stream::Stream::new(config.limits, feed_to, status_to);
        let session = session::Session { config, live, replay };
        let task = tokio::spawn(session.run(stream));
        Ok(Self { feed, status, task })
    }

    /// Waits for what comes next; may be cancelled. `None` never comes while the subscription lives.
    pub async fn next(&mut self) -> Option<Feed> {
        self.feed.recv().await
    }

    /// How it is doing.
    #[must_use]
    pub fn status(&self) -> SubscriberStatus {
        self.status.borrow().clone()
    }

    /// Batches that wait for the consumer.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.feed.len()
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A setting in microseconds as a duration.
const fn micros(us: u64) -> Duration {
    Duration::from_micros(us)
}
