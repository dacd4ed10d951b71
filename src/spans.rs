//! A trace for each request: what it went through and when, sent to an OTLP collector.
//!
//! The conductor writes the story of a sampled request down while it is under way ([`Trace`]), hands
//! it over when the request ends ([`Spans::close`]), and never waits: the queue is bounded, and what
//! finds it full is dropped and counted. A task of its own ([`ExportTask`]) makes spans of the stories
//! and sends them in batches. Prompts and answers are not part of a story.

#[cfg(test)]
pub(crate) mod collector;
mod collector_client;
mod collector_url;
mod environment;
mod exporter;
mod shape;
mod story;
#[cfg(test)]
mod tests;

use std::hash::{BuildHasher as _, Hasher as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use baton_http::Trust;
use baton_router::TraceParent;
use baton_types::Rng;
use opentelemetry_otlp::ExporterBuildError;
use tokio::sync::mpsc;

use collector_client::CollectorClient;
pub(crate) use collector_url::{CollectorUrl, CollectorUrlError};
pub(crate) use environment::EnvironmentError;
pub(crate) use exporter::ExportTask;
pub(crate) use story::{Place, Story, Summary};

use crate::config::ServiceConfig;

/// Why spans cannot be sent.
#[derive(Debug, thiserror::Error)]
pub enum SpansError {
    /// The collector's address is at fault.
    #[error(transparent)]
    Collector(#[from] CollectorUrlError),
    /// A variable of the environment is at fault.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// There is no exporter for the collector.
    #[error("service.otlp_endpoint = \"{collector}\": {error}")]
    Exporter {
        /// The collector.
        collector: String,
        /// The library's words.
        error: ExporterBuildError,
    },
}

/// Stories of ended requests that may wait to be sent (I9).
const QUEUED_STORIES: usize = 2048;

/// Spans that left and spans that did not, since the start.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    sent: AtomicU64,
    dropped: AtomicU64,
}

impl Counts {
    fn sent(&self, spans: usize) {
        self.sent.fetch_add(spans as u64, Ordering::Relaxed);
    }

    fn dropped(&self, spans: usize) {
        self.dropped.fetch_add(spans as u64, Ordering::Relaxed);
    }

    /// Spans that a collector took, and spans that were lost to a full queue or an absent collector.
    pub(crate) fn read(&self) -> (u64, u64) {
        (self.sent.load(Ordering::Relaxed), self.dropped.load(Ordering::Relaxed))
    }
}

/// The conductor's side: decides what is traced, and takes in what has ended.
pub(crate) struct Spans {
    stories: Option<mpsc::Sender<Story>>,
    permille: u32,
    rng: Rng,
    counts: Arc<Counts>,
}

/// A request's place in its trace, sampled or not.
#[derive(Default)]
pub(crate) struct Trace {
    id: Option<u128>,
    story: Option<Box<Story>>,
}

impl Spans {
    /// Tracing nothing.
    #[cfg(test)]
    pub(crate) fn off() -> Self {
        Self::start(&ServiceConfig::default(), "").expect("without an endpoint there is nothing to start").0
    }

    /// Tracing as configured, with the task that sends; none and no task without an endpoint. Spans say
    /// that they are of this `instance`. To be called on a runtime.
    ///
    /// # Errors
    /// Names the endpoint when it cannot be one, or the environment variable that cannot be read.
    pub(crate) fn start(
        config: &ServiceConfig,
        instance: &str,
    ) -> Result<(Self, Option<ExportTask>), SpansError> {
        Self::start_trusting(Trust::of_system, config, instance)
    }

    /// Likewise; where spans go over TLS, `trust` says from whom certificates come.
    fn start_trusting(
        trust: impl FnOnce() -> Trust,
        config: &ServiceConfig,
        instance: &str,
    ) -> Result<(Self, Option<ExportTask>), SpansError> {
        let mut seed = std::hash::RandomState::new().build_hasher();
        seed.write_u32(std::process::id());
        let counts = Arc::new(Counts::default());
        let mut spans = Self {
            stories: None,
            permille: config.trace_permille,
            rng: Rng::new(seed.finish()),
            counts: Arc::clone(&counts),
        };
        if config.otlp_endpoint.is_empty() {
            return Ok((spans, None));
        }
        let (sender, receiver) = mpsc::channel(QUEUED_STORIES);
        let collector = CollectorUrl::parse(&config.otlp_endpoint)?;
        let client = CollectorClient::new(if collector.is_secure() { trust() } else { Trust::nobody() });
        let exporting = ExportTask::start((collector, client), instance, receiver, counts)?;
        spans.stories = Some(sender);
        Ok((spans, Some(exporting)))
    }

    /// A request arrived. The caller's word on sampling goes before the share that is configured.
    pub(crate) fn open(&mut self, parent: Option<TraceParent>, now_us: u64) -> Trace {
        if self.stories.is_none() {
            // The caller's id still helps to find a failure in the log.
            return Trace { id: parent.map(|parent| parent.trace_id), story: None };
        }
        let id = parent.map_or_else(|| self.fresh_id(), |parent| parent.trace_id);
        let sampled = parent.map_or_else(|| is_drawn(id, self.permille), |parent| parent.sampled);
        let story = sampled.then(|| {
            let ids = (id, self.fresh_span_id(), parent.map(|parent| parent.span_id));
            Box::new(Story::new(ids, now_us, SystemTime::now()))
        });
        Trace { id: Some(id), story }
    }

    /// A request ended. Never waits; the trace's id stays.
    pub(crate) fn close(&self, trace: &mut Trace, now_us: u64, summary: Summary) {
        let (Some(sender), Some(mut story)) = (&self.stories, trace.story.take()) else { return };
        story.end(now_us, summary);
        let spans = story.span_count();
        if sender.try_send(*story).is_err() {
            self.counts.dropped(spans);
        }
    }

    fn fresh_id(&mut self) -> u128 {
        (u128::from(self.rng.next_u64()) << 64 | u128::from(self.rng.next_u64())).max(1)
    }

    fn fresh_span_id(&mut self) -> u64 {
        self.rng.next_u64().max(1)
    }
}

/// Whether a trace without a caller's word is sampled: the same answer on every router.
fn is_drawn(trace_id: u128, permille: u32) -> bool {
    xxhash_rust::xxh3::xxh3_64(&trace_id.to_be_bytes()) % 1000 < u64::from(permille)
}

impl Trace {
    /// The trace's name as headers and collectors write it, for log lines.
    pub(crate) fn id(&self) -> Option<String> {
        self.id.map(|id| format!("{id:032x}"))
    }

    /// Whether something is written down: what only a story needs is not looked up without one.
    pub(crate) fn is_kept(&self) -> bool {
        self.story.is_some()
    }

    /// The request entered a stage.
    pub(crate) fn enter(&mut self, place: Place, now_us: u64) {
        if let Some(story) = &mut self.story {
            story.enter(place, now_us);
        }
    }

    /// Its client got the first token.
    pub(crate) fn first_token(&mut self, now_us: u64) {
        if let Some(story) = &mut self.story {
            story.first_token(now_us);
        }
    }

    /// Its present stage met a failure, which ends the stage unless it goes on all the same.
    pub(crate) fn failed(&mut self, failure: &'static str, now_us: u64) {
        if let Some(story) = &mut self.story {
            story.failed(failure, now_us);
        }
    }

    /// Why it was refused, cancelled or failed.
    pub(crate) fn reason(&mut self, reason: &'static str) {
        if let Some(story) = &mut self.story {
            story.reason(reason);
        }
    }
}
