//! What is counted, as a page for Prometheus.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::service::Overview;

/// Upper ends of the latency's buckets, in microseconds.
const BUCKETS_US: [u64; 10] = [50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 50_000, 250_000];

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
        let mut page = String::new();
        let mut figure = |name: &str, kind: &str, help: &str, value: u64| {
            let _ = write!(page, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n");
        };
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        for (name, help, value) in [
            ("instances", "Publishers that are followed.", overview.streams),
            ("connected", "Publishers whose live stream is connected.", overview.connected),
            (
                "unconfirmed",
                "Publishers answered for by a snapshot that they have not confirmed.",
                overview.warm,
            ),
            ("contexts", "Contexts that somebody holds blocks in.", overview.contexts),
            ("blocks", "Blocks held, each copy on an instance once.", overview.blocks),
            ("orphans", "Blocks that wait for their parent.", overview.orphans),
        ] {
            figure(&format!("baton_indexer_{name}"), "gauge", help, value);
        }
        for (name, help, value) in [
            ("events", "Events taken in.", overview.events),
            ("batches", "Batches that publishers sent.", overview.batches),
            ("gaps", "Holes seen in live streams.", overview.gaps),
            ("lost_batches", "Batches that nobody could repeat.", overview.lost),
            ("restarts", "Publishers seen to begin anew.", overview.restarts),
            ("ignored_blocks", "Blocks of another size, tenant, model or medium.", overview.ignored),
            ("over_capacity_blocks", "Blocks not taken because a bound was reached.", overview.over_capacity),
            ("refused_requests", "Calls answered with an error.", read(&self.refused)),
            ("snapshots", "Snapshots given to peers.", read(&self.snapshots)),
        ] {
            figure(&format!("baton_indexer_{name}_total"), "counter", help, value);
        }
        self.histogram(&mut page);
        page
    }

    fn histogram(&self, page: &mut String) {
        let name = "baton_indexer_query_seconds";
        let _ = write!(
            page,
            "# HELP {name} Time of a query, for the lookup, the wait for its turn included.\n# TYPE {name} histogram\n"
        );
        let mut sum = 0;
        for (count, end) in self.queries.iter().zip(BUCKETS_US.map(Some).into_iter().chain([None])) {
            sum += count.load(Ordering::Relaxed);
            #[expect(clippy::cast_precision_loss, reason = "the ends of buckets are small")]
            let end = end.map_or_else(|| "+Inf".to_owned(), |us| (us as f64 / 1e6).to_string());
            let _ = writeln!(page, "{name}_bucket{{le=\"{end}\"}} {sum}");
        }
        #[expect(clippy::cast_precision_loss, reason = "285 years of microseconds are exact")]
        let seconds = self.query_time_us.load(Ordering::Relaxed) as f64 / 1e6;
        let _ = write!(page, "{name}_sum {seconds}\n{name}_count {sum}\n");
    }
}
