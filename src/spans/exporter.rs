//! The task that sends: stories in, batches of spans out, whatever the collector does.

use std::sync::Arc;
use std::time::Duration;

use opentelemetry_otlp::{
    ExporterBuildError, Protocol, SpanExporter, WithExportConfig as _, WithHttpConfig as _,
    WithTonicConfig as _,
};
use opentelemetry_sdk::trace::SpanExporter as _;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;

use super::collector_client::CollectorClient;
use super::collector_url::CollectorUrl;
use super::shape::spans;
use super::story::Story;
use super::{Counts, SpansError, environment};

/// Requests in a batch at most.
const BATCH_STORIES: usize = 128;
/// How long a batch waits to be filled.
const BATCH_WAIT: Duration = Duration::from_millis(500);
/// How long the collector may take for a batch, retries included.
const SEND_LIMIT: Duration = Duration::from_secs(5);
/// How long one attempt to reach the collector may take.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(1);
/// Minimum time between two log lines about a full queue.
const TELL_EVERY: Duration = Duration::from_secs(60);
/// How long a shutdown waits for what is still to be sent.
const STOP_LIMIT: Duration = Duration::from_millis(1500);

/// The running task. It is stopped last, when no request is open.
pub(crate) struct ExportTask {
    task: JoinHandle<()>,
    stop: CancellationToken,
    counts: Arc<Counts>,
}

impl ExportTask {
    /// Starts sending what comes through `stories`, as `instance`. The collector need not be there.
    pub(super) fn start(
        (collector, client): (CollectorUrl, CollectorClient),
        instance: &str,
        stories: mpsc::Receiver<Story>,
        counts: Arc<Counts>,
    ) -> Result<Self, SpansError> {
        let read = |name: &str| std::env::var(name);
        environment::check_headers(&read)?;
        let resource = environment::resource(&read, instance)?;
        let mut exporter = exporter(&collector, client.clone())
            .map_err(|error| SpansError::Exporter { collector: collector.to_string(), error })?;
        exporter.set_resource(&resource);
        tracing::info!("spans of requests go to {collector}, by {}", collector.protocol());
        let stop = CancellationToken::new();
        let sender = Sender {
            collector,
            client,
            stories,
            exporter,
            counts: Arc::clone(&counts),
            stop: stop.clone(),
            absent: false,
            reported_dropped: 0,
            quiet_until: Instant::now(),
        };
        Ok(Self { task: tokio::spawn(sender.run()), stop, counts })
    }

    /// Sends what is queued and ends; gives up after 1.5 s.
    pub(crate) async fn stop(mut self) {
        self.stop.cancel();
        if tokio::time::timeout(STOP_LIMIT, &mut self.task).await.is_err() {
            self.task.abort();
            tracing::warn!("spans were still to be sent when the shutdown's time was over; they are lost");
        }
        let (sent, dropped) = self.counts.read();
        if dropped > 0 {
            tracing::warn!(sent, dropped, "spans were dropped since the start");
        }
    }
}

/// What sends a batch, and sends it again where that may help. Neither way connects before.
fn exporter(collector: &CollectorUrl, client: CollectorClient) -> Result<SpanExporter, ExporterBuildError> {
    if collector.is_http() {
        return SpanExporter::builder()
            .with_http()
            .with_http_client(client)
            .with_endpoint(collector.uri().to_string())
            .with_protocol(Protocol::HttpBinary)
            .with_timeout(SEND_LIMIT)
            .build();
    }
    let channel = Endpoint::from(collector.uri().clone())
        .connect_timeout(CONNECT_LIMIT)
        .timeout(SEND_LIMIT)
        .connect_lazy();
    SpanExporter::builder().with_tonic().with_channel(channel).with_timeout(SEND_LIMIT).build()
}

struct Sender {
    collector: CollectorUrl,
    /// The exporter has it too, for HTTP.
    client: CollectorClient,
    stories: mpsc::Receiver<Story>,
    exporter: SpanExporter,
    counts: Arc<Counts>,
    stop: CancellationToken,
    /// The last batch did not get through.
    absent: bool,
    /// Dropped spans that the log has reported.
    reported_dropped: u64,
    /// Before this time, the log does not report dropped spans again.
    quiet_until: Instant,
}

impl Sender {
    async fn run(mut self) {
        let mut batch = Vec::with_capacity(BATCH_STORIES);
        while self.gather(&mut batch).await {
            self.send(&mut batch).await;
        }
        // Nothing new is under way: what is queued is all there is.
        loop {
            while batch.len() < BATCH_STORIES
                && let Ok(story) = self.stories.try_recv()
            {
                batch.push(story);
            }
            if batch.is_empty() {
                return;
            }
            self.send(&mut batch).await;
        }
    }

    /// Waits for a batch. False when it is time to stop.
    async fn gather(&mut self, batch: &mut Vec<Story>) -> bool {
        let stop = self.stop.clone();
        let mut due = None;
        while batch.len() < BATCH_STORIES {
            let room = BATCH_STORIES - batch.len();
            let wait = async move {
                match due {
                    None => std::future::pending().await,
                    Some(due) => tokio::time::sleep_until(due).await,
                }
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => return false,
                count = self.stories.recv_many(batch, room) => {
                    if count == 0 {
                        return false;
                    }
                    due.get_or_insert_with(|| Instant::now() + BATCH_WAIT);
                }
                () = wait => return true,
            }
        }
        true
    }

    /// Logs that the collector is reachable but too slow for the sampled spans, at most once a minute.
    fn tell_dropped(&mut self) {
        let (sent, dropped) = self.counts.read();
        if dropped > self.reported_dropped && Instant::now() >= self.quiet_until {
            (self.reported_dropped, self.quiet_until) = (dropped, Instant::now() + TELL_EVERY);
            tracing::warn!(
                sent,
                dropped,
                "spans were dropped: more are made than the collector takes; lower service.trace_permille"
            );
        }
    }

    async fn send(&mut self, batch: &mut Vec<Story>) {
        let spans: Vec<_> = batch.drain(..).flat_map(|story| spans(&story)).collect();
        let count = spans.len();
        let sent = tokio::time::timeout(SEND_LIMIT, self.exporter.export(spans)).await;
        let failure = match sent {
            Ok(Ok(())) => None,
            Ok(Err(error)) => {
                let cause = self.client.take_cause().map_or_else(String::new, |cause| format!(": {cause}"));
                Some(format!("{error}{cause}"))
            }
            Err(_) => Some(format!("no answer within {} s", SEND_LIMIT.as_secs())),
        };
        let endpoint = &self.collector;
        match failure {
            None => {
                self.counts.sent(count);
                if std::mem::take(&mut self.absent) {
                    let (_, dropped) = self.counts.read();
                    tracing::info!(%endpoint, dropped, "the collector takes spans again");
                    self.reported_dropped = dropped;
                }
                self.tell_dropped();
            }
            Some(why) => {
                self.counts.dropped(count);
                // One word about it until it is back.
                if !std::mem::replace(&mut self.absent, true) {
                    tracing::warn!(
                        %endpoint,
                        why,
                        "spans cannot be sent by {} and are dropped; start a collector there, give the URL that it has for gRPC \
                         (without a path) or for HTTP (with one), or set service.otlp_endpoint = \"\"",
                        endpoint.protocol()
                    );
                }
            }
        }
    }
}
