//! The names under which the live service's numbers are exported: stable, documented in
//! `docs/metrics.md`, the same buckets as the simulator's reports.

mod bounded;
mod by_class;
mod by_node;
mod edge;
mod gauges;
pub(crate) mod objects;

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_http::{Figure, Kind, Page, label};
use baton_scheduler::{Prediction, ServedRequest};
use by_class::ByClass;
pub(crate) use by_class::SloOutcome;
use by_node::ByNode;
pub(crate) use edge::ControlCloseReason;
use edge::Edge;
use gauges::ShownGauges;
pub(crate) use gauges::{ClusterGauges, NodeGauges};
use metrics::{
    Counter, Gauge, Histogram, Key, KeyName, Label, Level, Metadata, Recorder, SharedString, Unit,
};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};

/// Every exported number, in the order of the documentation.
pub const NAMES: &[Figure] = &[
    Figure::counter("baton_requests_total", "Requests that reached the conductor"),
    Figure::counter("baton_requests_admitted_total", "Requests let in"),
    Figure::counter("baton_requests_refused_total", "Requests refused before any work, by `reason`"),
    Figure::counter(
        "baton_shadow_judged_total",
        "Requests that an admission mode of `scheduler.shadow` was asked about, by `mode`",
    ),
    Figure::counter("baton_shadow_refused_total", "Requests that it would have refused, by `mode`"),
    Figure::counter("baton_requests_finished_total", "Answers that were completed"),
    Figure::counter(
        "baton_requests_failed_total",
        "Admitted requests that were not served to their end, by `stage`",
    ),
    Figure::counter(
        "baton_requests_cancelled_total",
        "Requests ended early by their client or for it, by `why`",
    ),
    Figure::gauge("baton_requests_live", "Requests under way"),
    Figure::counter("baton_prompt_tokens_total", "Prompt tokens of completed answers"),
    Figure::counter("baton_cached_tokens_total", "Prompt tokens that were not computed again"),
    Figure::counter("baton_output_tokens_total", "Tokens of completed answers"),
    Figure::counter(
        "baton_slo_requests_total",
        "Requests that ended, judged by their objectives, by `class` and `outcome`",
    ),
    Figure::counter("baton_tenant_requests_total", "Requests that ended, by `tenant` and `outcome`"),
    Figure::counter("baton_slo_tokens_total", "Tokens of requests in SLO, by `class` and `kind`"),
    Figure::gauge("baton_slo_target_ratio", "Target share of a class (`target_permille`), by `class`"),
    Figure::histogram("baton_ttft_seconds", "From a request's arrival to its first token, by `class`"),
    Figure::histogram("baton_tbt_seconds", "Between two tokens of an answer"),
    Figure::histogram(
        "baton_request_tbt_seconds",
        "Mean of the longest tenth of the gaps of an answer that was served, by `class`",
    ),
    Figure::histogram("baton_ttft_error_ratio", "Measured over predicted time to first token"),
    Figure::histogram(
        "baton_prediction_error_ratio",
        "Measured over predicted of answers that were served, by `class`, `path` and `target`",
    ),
    Figure::counter(
        "baton_prediction_covered_total",
        "Answers that were served, within the most that was predicted of them or beyond, by `class`, `path`, `target` and `covered`",
    ),
    Figure::histogram(
        "baton_stage_seconds",
        "Time of a request in a stage that ended well, by `stage` and `role`",
    ),
    Figure::gauge("baton_ready", "1 while this front door serves requests (`/ready`), else 0"),
    Figure::gauge("baton_leads", "1 while this conductor leads, as the only one always does, else 0"),
    Figure::gauge("baton_nodes", "Nodes attached, by `role` and `state`"),
    Figure::gauge(
        "baton_role_pressure",
        "Demand of the last two minutes, refused requests included, over what serves (1: used up), by `role`",
    ),
    Figure::gauge(
        "baton_advised_nodes",
        "Nodes of one role only that the demand of the last two minutes asks for, by `role`",
    ),
    Figure::counter("baton_role_changes_total", "Roles of nodes that the conductor changed by forecast"),
    Figure::gauge("baton_index_bytes", "Memory of the index of KV blocks by node"),
    Figure::counter(
        "baton_index_refused_blocks_total",
        "KV blocks that nodes announced and the index did not take, as it was at its bound of 2 GiB",
    ),
    Figure::gauge(
        "baton_node_backlog_seconds",
        "Predicted time until a node has computed all prefills that it was given, by `node` and `role`",
    ),
    Figure::gauge("baton_node_step_seconds", "Predicted time of a node's decode step, by `node` and `role`"),
    Figure::gauge("baton_node_link_bytes_per_second", "Learnt link rate, by `node`, `role` and `direction`"),
    Figure::gauge(
        "baton_node_queued_requests",
        "Prefills that were sent to a node or are held back for it, by `node` and `role`",
    ),
    Figure::gauge(
        "baton_node_decodes",
        "Answers that a node generates or was promised, by `node` and `role`",
    ),
    Figure::gauge(
        "baton_node_running_sequences",
        "Sequences that a node's engine runs, by `node` and `role`",
    ),
    Figure::gauge("baton_kv_used_blocks", "KV blocks that a tier holds, by `node` and `tier`"),
    Figure::gauge("baton_kv_capacity_blocks", "KV blocks that a tier has room for, by `node` and `tier`"),
    Figure::gauge("baton_build_info", "1, with the version of this program, by `version`"),
    Figure::counter("baton_nodes_lost_total", "Lives of nodes that ended"),
    Figure::counter("baton_stage_timeouts_total", "Stages that took too long, by `stage`"),
    Figure::counter("baton_leg_failures_total", "Failures that nodes reported, by `stage`"),
    Figure::counter("baton_fetches_total", "Prefixes brought from other nodes before a prefill, by `source`"),
    Figure::counter("baton_copies_total", "Prefixes copied ahead of demand, by `target`"),
    Figure::counter("baton_stale_messages_total", "Messages about an earlier life or attempt, dropped"),
    Figure::counter("baton_repeated_tokens_total", "Tokens that a client had already, dropped"),
    Figure::counter(
        "baton_cache_expected_tokens_total",
        "Prompt tokens that were expected in the cache of the instance chosen, by `node`",
    ),
    Figure::counter(
        "baton_cache_found_tokens_total",
        "Prompt tokens of the same requests that it found there, by `node`",
    ),
    Figure::counter(
        "baton_cache_resyncs_total",
        "Corrections of the cache view after an engine reported another hit than expected, by `node`",
    ),
    Figure::counter(
        "baton_audit_failures_total",
        "Audits of the conductor's ledgers that found an inconsistency",
    ),
    Figure::counter(
        "baton_node_audit_failures_total",
        "Audits of a node's ledgers that found an inconsistency, by `node`",
    ),
    Figure::gauge(
        "baton_policy_version",
        "Version of the cluster's policy that is in force here; 0 without one",
    ),
    Figure::counter(
        "baton_nodes_refused_total",
        "Attachments refused for want of the cluster's key, or for another one",
    ),
    Figure::counter(
        "baton_kv_peers_refused_total",
        "Connections that nodes refused for want of the cluster's key, by `node`",
    ),
    Figure::counter(
        "baton_kv_sent_bytes_total",
        "Bytes of KV that left for other nodes, by the way that they went, by `node`",
    ),
    Figure::counter(
        "baton_orders_refused_total",
        "Orders that nodes refused because the conductor is no longer the leader, by `node`",
    ),
    Figure::counter("baton_http_requests_total", "Requests that the front door received, of any path"),
    Figure::counter(
        "baton_http_errors_total",
        "Responses of the front door that were errors, by `status` and `reason`",
    ),
    Figure::counter("baton_streams_broken_total", "Streams that did not reach their end, by `why`"),
    Figure::gauge("baton_connections", "Connections of clients that are open"),
    Figure::gauge(
        "baton_body_bytes",
        "Bytes that are held of requests under way and of whole answers that are yet to be read",
    ),
    Figure::counter(
        "baton_connections_closed_total",
        "Connections that were closed from this side, by `port` and `why`",
    ),
    Figure::counter("baton_accept_failures_total", "Times that no connection could be accepted, by `port`"),
];

/// Upper bounds of the time buckets, seconds.
pub const TIME_BUCKETS: &[f64] =
    &[0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0];
/// Upper bounds of the ratio buckets.
pub const RATIO_BUCKETS: &[f64] = &[0.25, 0.5, 0.75, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0];

/// The exported number with this name.
fn figure(name: &'static str) -> Figure {
    let known = NAMES.iter().find(|known| known.name == name).copied();
    known.unwrap_or(Figure::counter(name, ""))
}

/// The counters that `/admin/status` has as well: their names there and here.
const TOTALS: [(&str, &str); 4] = [
    ("output_tokens", "baton_output_tokens_total"),
    ("nodes_lost", "baton_nodes_lost_total"),
    ("stale_messages", "baton_stale_messages_total"),
    ("repeated_tokens", "baton_repeated_tokens_total"),
];

/// Handles of everything that is exported; cheap to clone.
#[derive(Clone)]
pub struct Metrics {
    shared: Arc<Shared>,
}

struct Shared {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    by_node: ByNode,
    by_class: ByClass,
    gauges: ShownGauges,
    edge: Edge,
    arrived: Counter,
    admitted: Counter,
    finished: Counter,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    output_tokens: Counter,
    nodes_lost: Counter,
    stale: Counter,
    repeated: Counter,
    nodes_refused: Counter,
    audit_failures: Counter,
    live: Gauge,
    policy: Gauge,
    tbt: Histogram,
    error: Histogram,
}

static METADATA: Metadata<'static> = Metadata::new("baton", Level::INFO, None);

impl Metrics {
    /// Counters at zero, described.
    ///
    /// # Errors
    /// When the exporter does not take the buckets.
    pub fn new() -> Result<Self, metrics_exporter_prometheus::BuildError> {
        let matcher = |name: &str| Matcher::Full(name.to_owned());
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(matcher("baton_ttft_seconds"), TIME_BUCKETS)
            .and_then(|b| b.set_buckets_for_metric(matcher("baton_tbt_seconds"), TIME_BUCKETS))
            .and_then(|b| b.set_buckets_for_metric(matcher("baton_request_tbt_seconds"), TIME_BUCKETS))
            .and_then(|b| b.set_buckets_for_metric(matcher("baton_stage_seconds"), TIME_BUCKETS))
            .and_then(|b| b.set_buckets_for_metric(matcher("baton_ttft_error_ratio"), RATIO_BUCKETS))
            .and_then(|b| b.set_buckets_for_metric(matcher("baton_prediction_error_ratio"), RATIO_BUCKETS))?
            .build_recorder();
        for known in NAMES {
            let (key, help) = (KeyName::from_const_str(known.name), SharedString::const_str(known.help));
            match known.kind {
                Kind::Counter => recorder.describe_counter(key, Some(Unit::Count), help),
                Kind::Gauge => recorder.describe_gauge(key, Some(Unit::Count), help),
                Kind::Histogram => recorder.describe_histogram(key, None, help),
            }
        }
        let count = |name: &'static str| recorder.register_counter(&Key::from_static_name(name), &METADATA);
        let gauge = |name: &'static str| recorder.register_gauge(&Key::from_static_name(name), &METADATA);
        let spread =
            |name: &'static str| recorder.register_histogram(&Key::from_static_name(name), &METADATA);
        let shared = Shared {
            arrived: count("baton_requests_total"),
            admitted: count("baton_requests_admitted_total"),
            finished: count("baton_requests_finished_total"),
            prompt_tokens: count("baton_prompt_tokens_total"),
            cached_tokens: count("baton_cached_tokens_total"),
            output_tokens: count("baton_output_tokens_total"),
            nodes_lost: count("baton_nodes_lost_total"),
            stale: count("baton_stale_messages_total"),
            repeated: count("baton_repeated_tokens_total"),
            nodes_refused: count("baton_nodes_refused_total"),
            audit_failures: count("baton_audit_failures_total"),
            live: gauge("baton_requests_live"),
            policy: gauge("baton_policy_version"),
            tbt: spread("baton_tbt_seconds"),
            error: spread("baton_ttft_error_ratio"),
            handle: recorder.handle(),
            by_node: ByNode::default(),
            by_class: ByClass::default(),
            gauges: ShownGauges::default(),
            edge: Edge::default(),
            recorder,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The page that Prometheus reads.
    #[must_use]
    pub fn page(&self) -> String {
        let mut page = Page::after(self.shared.handle.render());
        let version = label("version", env!("CARGO_PKG_VERSION"));
        page.family(figure("baton_build_info"), [(version, 1)]);
        self.shared.gauges.write(&mut page);
        self.shared.by_node.write(&mut page);
        self.shared.edge.write(&mut page);
        page.into_text()
    }

    /// Takes samples in; to be called every few seconds, or they pile up.
    pub fn upkeep(&self) {
        self.shared.handle.run_upkeep();
    }

    /// Counts since the start, for `/admin/status`. They are read from the exporter's text: a counter of the `metrics`
    /// crate can be written only.
    #[must_use]
    pub fn totals(&self) -> Vec<(String, u64)> {
        let page = self.shared.handle.render();
        let total = |exported: &str| {
            let value = page.lines().find_map(|line| line.strip_prefix(exported)?.strip_prefix(' '));
            value.and_then(|value| value.parse().ok()).unwrap_or_default()
        };
        TOTALS.iter().map(|(name, exported)| ((*name).to_owned(), total(exported))).collect()
    }

    /// Requests refused before any work, by reason, for `/admin/status`.
    #[must_use]
    pub fn refusals(&self) -> BTreeMap<String, u64> {
        let page = self.shared.handle.render();
        let counts = page.lines().filter_map(|line| {
            let counted = line.strip_prefix("baton_requests_refused_total{reason=\"")?;
            let (reason, count) = counted.split_once("\"} ")?;
            Some((reason.to_owned(), count.parse().ok()?))
        });
        counts.collect()
    }

    fn labelled(&self, name: &'static str, label: (&'static str, &str)) {
        let key = Key::from_parts(name, vec![Label::new(label.0, label.1.to_owned())]);
        self.shared.recorder.register_counter(&key, &METADATA).increment(1);
    }

    pub(crate) fn arrived(&self) {
        self.shared.arrived.increment(1);
        self.shared.live.increment(1.0);
    }

    pub(crate) fn ended(&self) {
        self.shared.live.decrement(1.0);
    }

    pub(crate) fn admitted(&self) {
        self.shared.admitted.increment(1);
    }

    pub(crate) fn refused(&self, reason: &str) {
        self.labelled("baton_requests_refused_total", ("reason", reason));
    }

    /// Sets the number of requests that a shadow mode would have rejected so far, and the number it judged.
    pub(crate) fn shadow(&self, mode: &'static str, (refused, judged): (u64, u64)) {
        for (name, total) in [("baton_shadow_refused_total", refused), ("baton_shadow_judged_total", judged)]
        {
            let key = Key::from_parts(name, vec![Label::new("mode", mode)]);
            self.shared.recorder.register_counter(&key, &METADATA).absolute(total);
        }
    }

    /// A request that reached the conductor and is refused before it is looked at.
    pub(crate) fn refused_early(&self, reason: &str) {
        self.shared.arrived.increment(1);
        self.refused(reason);
    }

    pub(crate) fn failed(&self, stage: &str) {
        self.labelled("baton_requests_failed_total", ("stage", stage));
    }

    pub(crate) fn cancelled(&self, why: &str) {
        self.labelled("baton_requests_cancelled_total", ("why", why));
    }

    pub(crate) fn stage_expired(&self, stage: &str) {
        self.labelled("baton_stage_timeouts_total", ("stage", stage));
    }

    pub(crate) fn leg_failed(&self, stage: baton_wire::v1::failure::Stage) {
        self.labelled("baton_leg_failures_total", ("stage", stage.name()));
    }

    pub(crate) fn fetched(&self, source: &str) {
        self.labelled("baton_fetches_total", ("source", source));
    }

    pub(crate) fn copied(&self, target: &str) {
        self.labelled("baton_copies_total", ("target", target));
    }

    pub(crate) fn first_token(&self, class: &str, ttft_us: u64, predicted_us: u64) {
        self.shared.by_class.first_token(&self.shared.recorder, class, ttft_us);
        if predicted_us > 0 {
            self.shared.error.record(ttft_us as f64 / predicted_us as f64);
        }
    }

    pub(crate) fn next_token(&self, gap_us: u64) {
        self.shared.tbt.record(gap_us as f64 / 1e6);
    }

    /// Shows the outcomes of these classes, at zero until there are some.
    pub(crate) fn show_classes<'a>(&self, names: impl IntoIterator<Item = &'a str>) {
        names.into_iter().for_each(|class| self.shared.by_class.show(&self.shared.recorder, class));
    }

    /// Counts a request of a class, and of a tenant if it names one, that has ended.
    pub(crate) fn slo_ended(&self, of: (&str, Option<&str>), outcome: SloOutcome) {
        self.shared.by_class.ended(&self.shared.recorder, of, outcome);
    }

    /// Counts the prompt and output tokens of a request in SLO.
    pub(crate) fn slo_tokens(&self, class: &str, tokens: [u64; 2]) {
        self.shared.by_class.in_slo(&self.shared.recorder, class, tokens);
    }

    /// Compares what was predicted of a request with what was measured.
    pub(crate) fn predicted(&self, class: &str, prediction: &Prediction, served: &ServedRequest) {
        self.shared.by_class.predicted(&self.shared.recorder, class, prediction, served);
    }

    /// The mean of the longest tenth of an answer's gaps.
    pub(crate) fn request_tbt(&self, class: &str, tbt_us: u64) {
        self.shared.by_class.request_tbt(&self.shared.recorder, class, tbt_us);
    }

    pub(crate) fn finished(&self, output_tokens: u64, prompt_tokens: u64, cached_tokens: u64) {
        self.shared.finished.increment(1);
        self.shared.output_tokens.increment(output_tokens);
        self.shared.prompt_tokens.increment(prompt_tokens);
        self.shared.cached_tokens.increment(cached_tokens);
    }

    /// Shows these nodes and classes, and no other.
    pub(crate) fn show(&self, gauges: ClusterGauges) {
        self.shared.gauges.set(gauges);
    }

    /// A stage of a request, at a node of this role, ended as it should.
    pub(crate) fn stage(&self, stage: &'static str, role: &'static str, time_us: u64) {
        let labels = vec![Label::new("stage", stage), Label::new("role", role)];
        let key = Key::from_parts("baton_stage_seconds", labels);
        self.shared.recorder.register_histogram(&key, &METADATA).record(time_us as f64 / 1e6);
    }

    pub(crate) fn node_lost(&self) {
        self.shared.nodes_lost.increment(1);
    }

    /// Counts the tokens that were expected in a node's cache for a request, and those that were found.
    pub(crate) fn cache_found(&self, node: &str, expected_tokens: u64, found_tokens: u64) {
        self.shared.by_node.add("baton_cache_expected_tokens_total", node, expected_tokens);
        self.shared.by_node.add("baton_cache_found_tokens_total", node, found_tokens);
    }

    pub(crate) fn policy_version(&self, version: u64) {
        self.shared.policy.set(version as f64);
    }

    pub(crate) fn node_refused(&self) {
        self.shared.nodes_refused.increment(1);
    }

    /// Takes over the counters that a node reports.
    pub(crate) fn node_load(&self, node: &str, load: &baton_wire::v1::NodeLoad) {
        let told = |name, total| self.shared.by_node.reported(name, (node, ""), total);
        let sent = load.sent.unwrap_or_default();
        let ways =
            [("way=\"rdma\"", sent.rdma), ("way=\"shm\"", sent.shared_memory), ("way=\"tcp\"", sent.tcp)];
        for (way, bytes) in ways {
            self.shared.by_node.reported("baton_kv_sent_bytes_total", (node, way), bytes);
        }
        told("baton_kv_peers_refused_total", load.refused_peers);
        told("baton_orders_refused_total", load.refused_orders);
        told("baton_cache_resyncs_total", load.resyncs);
        told("baton_node_audit_failures_total", load.audit_failures);
    }

    /// Drops the series of a node that left for good.
    pub(crate) fn forget_node(&self, node: &str) {
        self.shared.by_node.forget(node);
    }

    pub(crate) fn audit_failed(&self) {
        self.shared.audit_failures.increment(1);
    }

    pub(crate) fn stale_message(&self) {
        self.shared.stale.increment(1);
    }

    pub(crate) fn repeated_token(&self) {
        self.shared.repeated.increment(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_shows_only_what_is_documented() {
        let metrics = Metrics::new().unwrap();
        metrics.arrived();
        metrics.refused("ttft");
        metrics.first_token("gold", 150_000, 100_000);
        metrics.request_tbt("gold", 150_000);
        metrics.slo_ended(("gold", None), SloOutcome::InSlo);
        metrics.next_token(4_000);
        metrics.leg_failed(baton_wire::v1::failure::Stage::Unknown);
        let page = metrics.page();
        let known: std::collections::BTreeSet<&str> = NAMES.iter().map(|n| n.name).collect();
        for line in page.lines().filter(|l| l.starts_with("# TYPE ")) {
            let name = line.split(' ').nth(2).unwrap();
            assert!(known.contains(name), "{name} is exported and not in NAMES");
        }
        assert!(page.contains("baton_requests_refused_total{reason=\"ttft\"} 1"), "{page}");
        for name in ["baton_ttft_seconds", "baton_request_tbt_seconds"] {
            assert!(page.contains(&format!("{name}_bucket{{class=\"gold\",le=\"0.2\"}} 1")), "{page}");
        }
        assert!(page.contains("baton_slo_requests_total{class=\"gold\",outcome=\"in_slo\"} 1"), "{page}");
        assert!(page.contains("baton_leg_failures_total{stage=\"other\"} 1"), "{page}");
    }

    #[test]
    fn the_status_has_the_counts_of_the_page() {
        let metrics = Metrics::new().unwrap();
        metrics.finished(7, 5, 2);
        metrics.finished(4, 5, 2);
        (0..3).for_each(|_| metrics.node_lost());
        metrics.stale_message();
        let totals =
            [("output_tokens", 11), ("nodes_lost", 3), ("stale_messages", 1), ("repeated_tokens", 0)];
        assert_eq!(metrics.totals(), totals.map(|(name, total)| (name.to_owned(), total)));
        assert!(metrics.page().contains("\nbaton_output_tokens_total 11\n"), "{}", metrics.page());
        assert!(metrics.refusals().is_empty());
        for reason in ["ttft", "full", "ttft"] {
            metrics.refused(reason);
        }
        assert_eq!(metrics.refusals(), BTreeMap::from([("full".into(), 1), ("ttft".into(), 2)]));
    }

    /// The rows of the table in `docs/metrics.md`, cell by cell.
    fn documented() -> Vec<Vec<String>> {
        let page = include_str!("../docs/metrics.md");
        let rows = page.lines().filter(|line| line.starts_with("| `baton_"));
        // The object store, the indexer and the metadata server have tables and tests of their own.
        let others = ["| `baton_objects_", "| `baton_indexer_", "| `baton_metadata_"];
        let rows = rows.filter(|line| !others.iter().any(|other| line.starts_with(other)));
        rows.map(|row| row.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect())
            .collect()
    }

    #[test]
    fn the_dashboard_and_the_rules_name_nothing_that_is_not_exported() {
        let known = |name: &str| {
            let ends = ["_bucket", "_count", "_sum"];
            let base = ends.iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
            NAMES.iter().any(|figure| figure.name == name || figure.name == base)
        };
        let mut seen = 0;
        for kit in [
            include_str!("../deploy/observability/dashboard.json"),
            include_str!("../deploy/observability/rules.yml"),
        ] {
            let words = kit.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            for name in words.filter(|word| word.starts_with("baton_")) {
                assert!(known(name), "{name}");
                seen += 1;
            }
        }
        assert!(seen > 40, "{seen}");
    }

    #[test]
    fn the_documentation_has_every_name_and_no_other() {
        let rows = documented();
        let told: Vec<String> = rows.iter().map(|row| row[0].trim_matches('`').to_owned()).collect();
        let known: Vec<&str> = NAMES.iter().map(|n| n.name).collect();
        assert_eq!(told, known, "docs/metrics.md has a row for each of NAMES, in that order");
        for (row, name) in rows.iter().zip(NAMES) {
            assert_eq!((row[1].as_str(), row[4].as_str()), (name.kind.name(), name.help), "{}", name.name);
            let label =
                name.help.rsplit_once("by `").map_or("–".to_owned(), |(_, label)| format!("`{label}"));
            assert!(row[3].starts_with(&label), "{}: the label is {label}, not {}", name.name, row[3]);
        }
    }

    #[test]
    fn the_documentation_has_the_labels_and_buckets_in_force() {
        let rows = documented();
        let labels = |name: &str| rows.iter().find(|row| row[0] == format!("`{name}`")).unwrap()[3].clone();
        for reason in baton_scheduler::RejectReason::ALL {
            let told = labels("baton_requests_refused_total");
            assert!(told.contains(&format!("`{}`", reason.name())), "{}", reason.name());
        }
        for stage in baton_scheduler::FailStage::ALL {
            assert!(labels("baton_requests_failed_total").contains(&format!("`{stage}`")), "{stage}");
        }
        let ratio = labels("baton_prediction_error_ratio");
        let words = baton_scheduler::PredictionPath::ALL.map(|path| path.name()).into_iter();
        for word in words.chain(baton_scheduler::PredictionTarget::ALL.map(|target| target.name())) {
            assert!(ratio.contains(&format!("`{word}`")), "{word}");
        }
        for outcome in SloOutcome::ALL.map(SloOutcome::name) {
            assert!(labels("baton_slo_requests_total").contains(&format!("`{outcome}`")), "{outcome}");
        }
        let listed = |bounds: &[f64]| bounds.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let page = include_str!("../docs/metrics.md");
        assert!(page.contains(&format!("Buckets of the times, s: {}.", listed(TIME_BUCKETS))));
        assert!(page.contains(&format!("Buckets of the ratio: {}.", listed(RATIO_BUCKETS))));
    }
}
