//! The figures of an object store.

use baton_http::{Figure, Page};
use baton_objects::resp::{BUFFERS_MAX_BYTES, Server, ServerStats};
use baton_objects::{LowerStats, ObjectStore, StoreStats};

/// The state of a store and its server.
struct ObjectsSnapshot {
    store: StoreStats,
    server: ServerStats,
    lower: LowerStats,
}

/// A figure and where it is read.
type Row = (Figure, fn(&ObjectsSnapshot) -> u64);

/// Every exported figure but the SSD's wear, in the order of docs/metrics.md.
const FIGURES: [Row; 51] = [
    (Figure::gauge("baton_objects_keys", "Keys that can be read"), |now| now.store.keys),
    (Figure::gauge("baton_objects_capacity_bytes", "Memory for values"), |now| now.store.capacity_bytes),
    (Figure::gauge("baton_objects_used_bytes", "Memory of values in use"), |now| now.store.used_bytes),
    (Figure::gauge("baton_objects_connections", "Open connections"), |now| now.server.connections),
    (Figure::counter("baton_objects_commands_total", "Commands served"), |now| now.server.commands),
    (Figure::counter("baton_objects_hits_total", "Reads that found a value"), |now| now.store.hits),
    (Figure::counter("baton_objects_misses_total", "Reads that found none"), |now| now.store.misses),
    (Figure::counter("baton_objects_incomplete_total", "Of these, a part of the object missing"), |now| {
        now.store.incomplete
    }),
    (Figure::counter("baton_objects_puts_total", "Values sealed"), |now| now.store.puts),
    (Figure::counter("baton_objects_unchanged_total", "Puts of what was there already"), |now| {
        now.store.unchanged
    }),
    (Figure::counter("baton_objects_removed_total", "Values removed by request"), |now| now.store.removed),
    (Figure::counter("baton_objects_evicted_total", "Values evicted for room"), |now| now.store.evicted),
    (Figure::counter("baton_objects_expired_total", "Values at the end of their time"), |now| {
        now.store.expired
    }),
    (Figure::counter("baton_objects_abandoned_total", "Writes that their client did not finish"), |now| {
        now.store.abandoned
    }),
    (Figure::counter("baton_objects_taken_over_total", "Writers replaced by another"), |now| {
        now.store.taken_over
    }),
    (Figure::gauge("baton_objects_buffers_max_bytes", "Bytes for commands and answers on their way"), |_| {
        BUFFERS_MAX_BYTES
    }),
    (Figure::gauge("baton_objects_buffered_bytes", "Of these, in use"), |now| now.server.buffered_bytes),
    (Figure::counter("baton_objects_refused_total", "Connections for which there was no place"), |now| {
        now.server.refused
    }),
    (Figure::counter("baton_objects_displaced_total", "Connections that gave way to a newcomer"), |now| {
        now.server.displaced
    }),
    (
        Figure::counter("baton_objects_cut_silent_total", "Connections ended without a login or a word"),
        |now| now.server.cut_silent,
    ),
    (
        Figure::counter(
            "baton_objects_cut_half_sent_total",
            "Connections ended in the middle of a command that did not go on",
        ),
        |now| now.server.cut_half_sent,
    ),
    (Figure::counter("baton_objects_cut_unread_total", "Connections ended for answers left unread"), |now| {
        now.server.cut_unread
    }),
    (
        Figure::counter(
            "baton_objects_accept_errors_total",
            "Connections that the system did not hand over, mostly for too many open files",
        ),
        |now| now.server.accept_errors,
    ),
    (
        Figure::counter(
            "baton_objects_handshakes_failed_total",
            "Connections that did not come to speak TLS",
        ),
        |now| now.server.handshakes_failed,
    ),
    (Figure::gauge("baton_objects_ssd_on", "Whether values are copied to the SSD"), |now| {
        u64::from(now.lower.ssd_on)
    }),
    (Figure::gauge("baton_objects_ssd_keys", "Values on the SSD"), |now| now.lower.ssd.values),
    (Figure::gauge("baton_objects_ssd_used_bytes", "Blocks of the file in use"), |now| {
        now.lower.ssd.used_bytes
    }),
    (Figure::counter("baton_objects_ssd_written_bytes_total", "Blocks written to the SSD"), |now| {
        now.lower.ssd.written_bytes
    }),
    (Figure::counter("baton_objects_ssd_hits_total", "Reads that the SSD answered"), |now| {
        now.lower.ssd_hits
    }),
    (Figure::counter("baton_objects_ssd_hit_bytes_total", "Bytes of those reads"), |now| {
        now.lower.ssd_hit_bytes
    }),
    (Figure::counter("baton_objects_ssd_evicted_total", "Values that left the SSD for room"), |now| {
        now.lower.ssd.evicted
    }),
    (Figure::counter("baton_objects_ssd_corrupt_total", "Values that were not as stored"), |now| {
        now.lower.ssd.corrupt
    }),
    (Figure::counter("baton_objects_ssd_errors_total", "Reads and writes that the SSD refused"), |now| {
        now.lower.ssd.io_errors
    }),
    (Figure::counter("baton_objects_ssd_passed_over_total", "Values not copied, too many waited"), |now| {
        now.lower.passed_over
    }),
    (Figure::counter("baton_objects_ssd_unasked_total", "Reads not made as the SSD did not answer"), |now| {
        now.lower.unasked
    }),
    (
        Figure::gauge(
            "baton_objects_beside_bytes",
            "Values from below that memory has no room for and readers wait for",
        ),
        |now| now.lower.beside_bytes,
    ),
    (
        Figure::counter(
            "baton_objects_let_go_total",
            "Values from below answered as misses, no room for them",
        ),
        |now| now.lower.let_go,
    ),
    (Figure::counter("baton_objects_ssd_unconfirmed_total", "Removals not confirmed by the SSD"), |now| {
        now.lower.unconfirmed
    }),
    (Figure::gauge("baton_objects_cold_on", "Whether the bucket is asked at the moment"), |now| {
        u64::from(now.lower.cold.on)
    }),
    (Figure::gauge("baton_objects_cold_keys", "Values in the bucket"), |now| now.lower.cold.objects),
    (Figure::gauge("baton_objects_cold_used_bytes", "Bytes of objects in the bucket"), |now| {
        now.lower.cold.bytes
    }),
    (Figure::counter("baton_objects_cold_written_total", "Values written to the bucket"), |now| {
        now.lower.cold.written
    }),
    (Figure::counter("baton_objects_cold_written_bytes_total", "Bytes of those objects"), |now| {
        now.lower.cold.written_bytes
    }),
    (Figure::counter("baton_objects_cold_hits_total", "Reads that the bucket answered"), |now| {
        now.lower.cold.hits
    }),
    (Figure::counter("baton_objects_cold_hit_bytes_total", "Bytes of those reads"), |now| {
        now.lower.cold.hit_bytes
    }),
    (Figure::counter("baton_objects_cold_evicted_total", "Values that left the bucket for room"), |now| {
        now.lower.cold.evicted
    }),
    (Figure::counter("baton_objects_cold_refused_total", "Objects that were not as written"), |now| {
        now.lower.cold.refused
    }),
    (Figure::counter("baton_objects_cold_errors_total", "Requests that failed or took too long"), |now| {
        now.lower.cold.failures
    }),
    (Figure::counter("baton_objects_cold_passed_over_total", "Values not written"), |now| {
        now.lower.cold.passed_over
    }),
    (Figure::gauge("baton_objects_cold_removing", "Removals under way or to be tried again"), |now| {
        now.lower.cold.unconfirmed_removals
    }),
    (
        Figure::counter(
            "baton_objects_cold_unconfirmed_total",
            "Removals not confirmed in time by the bucket",
        ),
        |now| now.lower.cold_unconfirmed,
    ),
];

/// The SSD's wear.
const WEAR: Figure = Figure::gauge(
    "baton_objects_ssd_written_per_hit_byte",
    "Bytes written to the SSD for each byte that it gave back",
);

/// The page that Prometheus reads.
pub(crate) fn page(server: &Server, store: &ObjectStore) -> String {
    let now = ObjectsSnapshot { store: store.stats(), server: server.stats(), lower: store.lower_stats() };
    let mut page = Page::default();
    for (figure, read) in FIGURES {
        page.value(figure, read(&now));
    }
    page.value(WEAR, format_args!("{:.6}", now.lower.written_per_hit_byte()));
    page.into_text()
}

#[cfg(test)]
mod tests {
    use baton_objects::resp::RespConfig;
    use baton_objects::{Clock, StoreConfig};

    use super::*;

    #[test]
    fn the_documentation_has_every_metric_and_no_other() {
        let figures = FIGURES.into_iter().map(|(figure, _)| figure).chain([WEAR]);
        let exported: Vec<_> =
            figures.map(|f| format!("| `{}` | {} | {} |", f.name, f.kind.name(), f.help)).collect();
        let page = include_str!("../../docs/metrics.md");
        let told: Vec<_> = page.lines().filter(|line| line.starts_with("| `baton_objects_")).collect();
        assert_eq!(told, exported, "docs/metrics.md has a row for each, in that order");
    }

    #[test]
    fn metrics_say_what_is_there() {
        let config =
            StoreConfig { capacity_bytes: 4 << 20, value_max_bytes: 1 << 20, ..StoreConfig::default() };
        let store = ObjectStore::new(&config, Clock::machine()).expect("small");
        let server = Server::new(store.clone(), RespConfig::default()).expect("good settings");
        store.put(baton_objects::Key::anonymous(b"a"), b"x", Default::default()).expect("room");
        let text = page(&server, &store);
        assert!(text.contains("\nbaton_objects_keys 1\n") && text.contains("\nbaton_objects_puts_total 1\n"));
        assert!(text.contains("# TYPE baton_objects_hits_total counter"));
        assert!(text.contains("\nbaton_objects_ssd_on 0\n") && text.contains("\nbaton_objects_cold_on 0\n"));
        assert!(text.contains("\nbaton_objects_ssd_written_per_hit_byte 0.000000\n"));
    }
}
