//! The counters, as a page for Prometheus.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use baton_http::{Figure, Page};

use crate::service::Overview;

/// Upper ends of the latency's buckets, in microseconds.
const BUCKETS_US: [u64; 10] = [50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 50_000, 250_000];

/// A figure and where it is read.
type Row = (Figure, fn(&Overview, &Metrics) -> u64);

/// Every exported figure but the latency, in the order of docs/metrics.md.
const FIGURES: [Row; 17] = [
    (Figure::gauge("baton_indexer_instances", "Publishers that are followed"), |now, _| now.streams),
    (Figure::gauge("baton_indexer_connected", "Publishers whose live stream is connected"), |now, _| {
        now.connected
    }),
    (
        Figure::gauge(
            "baton_indexer_unconfirmed",
            "Publishers restored from a snapshot that their live stream has not confirmed yet",
        ),
        |now, _| now.warm,
    ),
    (Figure::gauge("baton_indexer_contexts", "Contexts in which an instance holds blocks"), |now, _| {
        now.contexts
    }),
    (Figure::gauge("baton_indexer_blocks", "Blocks held; each instance's copy counts once"), |now, _| {
        now.blocks
    }),
    (Figure::gauge("baton_indexer_orphans", "Blocks whose parent has not been announced yet"), |now, _| {
        now.orphans
    }),
    (Figure::counter("baton_indexer_events_total", "KV events applied"), |now, _| now.events),
    (Figure::counter("baton_indexer_batches_total", "Batches of KV events received"), |now, _| now.batches),
    (
        Figure::counter("baton_indexer_gaps_total", "Gaps in the sequence numbers of live streams"),
        |now, _| now.gaps,
    ),
    (
        Figure::counter(
            "baton_indexer_lost_batches_total",
            "Batches in these gaps that the publisher could not replay",
        ),
        |now, _| now.lost,
    ),
    (Figure::counter("baton_indexer_restarts_total", "Publisher restarts detected"), |now, _| now.restarts),
    (
        Figure::counter(
            "baton_indexer_ignored_blocks_total",
            "Blocks ignored for another block size, tenant, model or medium",
        ),
        |now, _| now.ignored,
    ),
    (
        Figure::counter(
            "baton_indexer_over_capacity_blocks_total",
            "Blocks not indexed because a limit was reached",
        ),
        |now, _| now.over_capacity,
    ),
    (
        Figure::counter("baton_indexer_refused_requests_total", "HTTP requests answered with an error"),
        |_, own| own.refused.load(Ordering::Relaxed),
    ),
    (
        Figure::gauge(
            "baton_indexer_held_bytes",
            "Bytes of bodies that are received, and of answers and snapshots that are yet to be read",
        ),
        |now, _| now.held_bytes,
    ),
    (
        Figure::counter(
            "baton_indexer_no_room_total",
            "Requests refused (503) because requests and unread answers took all the room that there is for them",
        ),
        |now, _| now.no_room,
    ),
    (Figure::counter("baton_indexer_snapshots_total", "Snapshots sent to peers"), |_, own| {
        own.snapshots.load(Ordering::Relaxed)
    }),
];

/// The latency.
const QUERY: Figure =
    Figure::histogram("baton_indexer_query_seconds", "Time of a query, including the wait for the index");

/// Counts of the service itself; those of streams come from the index.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    /// By bucket; the last counts what is above all.
    queries: [AtomicU64; BUCKETS_US.len() + 1],
    query_time_us: AtomicU64,
    refused: AtomicU64,
    snapshots: AtomicU64,
}

impl Metrics {
    pub(crate) fn queried(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = BUCKETS_US.iter().position(|end| us <= *end).unwrap_or(BUCKETS_US.len());
        self.queries[bucket].fetch_add(1, Ordering::Relaxed);
        self.query_time_us.fetch_add(us, Ordering::Relaxed);
    }

    pub(crate) fn refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn snapshot_given(&self) {
        self.snapshots.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn page(&self, overview: &Overview) -> String {
        let mut page = Page::default();
        for (figure, read) in FIGURES {
            page.value(figure, read(overview, self));
        }
        #[expect(clippy::cast_precision_loss, reason = "285 years of microseconds are exact")]
        let seconds = |us: u64| us as f64 / 1e6;
        let ends = BUCKETS_US.iter().map(|us| Some(seconds(*us))).chain([None]);
        let buckets = ends.zip(self.queries.iter().map(|count| count.load(Ordering::Relaxed)));
        page.distribution(QUERY, buckets, seconds(self.query_time_us.load(Ordering::Relaxed)));
        page.into_text()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_has_every_figure_and_no_other() {
        let figures = FIGURES.into_iter().map(|(figure, _)| figure).chain([QUERY]);
        let expected: Vec<_> =
            figures.map(|f| format!("| `{}` | {} | {} |", f.name, f.kind.name(), f.help)).collect();
        let page = include_str!("../../../docs/metrics.md");
        let documented: Vec<_> = page.lines().filter(|line| line.starts_with("| `baton_indexer_")).collect();
        assert_eq!(documented, expected, "docs/metrics.md has a row for each, in that order");
        let ends: Vec<_> = BUCKETS_US.iter().map(|us| us.to_string()).collect();
        assert!(page.contains(&format!("Buckets of the query time, µs: {}.", ends.join(" "))));
    }

    #[test]
    fn queries_are_counted_in_the_bucket_that_holds_them() {
        let metrics = Metrics::default();
        for us in [50, 51, 300_000] {
            metrics.queried(Duration::from_micros(us));
        }
        metrics.refused();
        let page = metrics.page(&Overview { streams: 3, ..Overview::default() });
        for line in [
            "baton_indexer_instances 3",
            "baton_indexer_refused_requests_total 1",
            "baton_indexer_query_seconds_bucket{le=\"0.00005\"} 1",
            "baton_indexer_query_seconds_bucket{le=\"0.0001\"} 2",
            "baton_indexer_query_seconds_bucket{le=\"+Inf\"} 3",
            "baton_indexer_query_seconds_sum 0.300101",
            "baton_indexer_query_seconds_count 3",
        ] {
            assert!(page.lines().any(|one| one == line), "{line}: {page}");
        }
    }
}
