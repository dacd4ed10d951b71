//! Counters by node: a series for each that is known, and none for one that left for good.
//!
//! The exporter that has the other numbers never lets go of a series, and names of nodes never stop coming.

use std::collections::BTreeMap;

use baton_http::{Page, label};
use parking_lot::Mutex;

use super::figure;

/// Counters with a series for each node that was reported and is not forgotten.
#[derive(Debug, Default)]
pub(super) struct ByNode {
    counts: Mutex<BTreeMap<&'static str, BTreeMap<Labels, Series>>>,
}

/// A node, and other labels in the words of the page, if there are any.
type Labels = (String, &'static str);

#[derive(Debug, Default)]
struct Series {
    count: u64,
    /// The latest count that the node has reported.
    reported: u64,
}

impl ByNode {
    /// Adds `more` to a node's counter.
    pub(super) fn add(&self, name: &'static str, node: &str, more: u64) {
        let mut counts = self.counts.lock();
        let series = counts.entry(name).or_default().entry((node.to_owned(), "")).or_default();
        series.count = series.count.saturating_add(more);
    }

    /// A total that a node keeps and reports. One that is less than before is of a new life and counts on top. There
    /// is no series before there is something to count.
    pub(super) fn reported(&self, name: &'static str, (node, labels): (&str, &'static str), total: u64) {
        let mut counts = self.counts.lock();
        let (known, key) = (counts.get(name), (node.to_owned(), labels));
        if total == 0 && known.is_none_or(|by_node| !by_node.contains_key(&key)) {
            return;
        }
        let series = counts.entry(name).or_default().entry(key).or_default();
        let more = total.checked_sub(series.reported).unwrap_or(total);
        *series = Series { count: series.count.saturating_add(more), reported: total };
    }

    /// Ends every series of a node.
    pub(super) fn forget(&self, node: &str) {
        let mut counts = self.counts.lock();
        for by_node in counts.values_mut() {
            by_node.retain(|(of, _), _| of != node);
        }
        counts.retain(|_, by_node| !by_node.is_empty());
    }

    /// Adds all of it to a page that Prometheus reads.
    pub(super) fn write(&self, page: &mut Page) {
        for (name, by_node) in &*self.counts.lock() {
            let series = by_node.iter().map(|((node, labels), series)| {
                let comma = if labels.is_empty() { "" } else { "," };
                (format!("{}{comma}{labels}", label("node", node)), series.count)
            });
            page.family(figure(name), series);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPECTED: &str = "baton_cache_expected_tokens_total";
    const RESYNCS: &str = "baton_cache_resyncs_total";
    const SENT: &str = "baton_kv_sent_bytes_total";

    #[test]
    fn what_is_counted_for_a_node_goes_with_it() {
        let counts = ByNode::default();
        let written = || {
            let mut page = Page::default();
            counts.write(&mut page);
            page.into_text()
        };
        assert_eq!(written(), "");
        counts.add(EXPECTED, "p0", 5);
        counts.add(EXPECTED, "p0", 7);
        counts.add(EXPECTED, "a \"b\"\\c", 1);
        // Two lives: nine times in the first, twice in the second.
        for total in [0, 3, 9, 9, 0, 2] {
            counts.reported(RESYNCS, ("p0", ""), total);
        }
        counts.reported(SENT, ("p0", "way=\"tcp\""), 0);
        counts.reported(SENT, ("p0", "way=\"rdma\""), 7);
        let page = written();
        let told = "# HELP baton_cache_expected_tokens_total Prompt tokens that were expected in the cache of the \
                    instance chosen, by `node`\n# TYPE baton_cache_expected_tokens_total counter\n\
                    baton_cache_expected_tokens_total{node=\"a \\\"b\\\"\\\\c\"} 1\n\
                    baton_cache_expected_tokens_total{node=\"p0\"} 12\n\n";
        assert!(page.starts_with(told), "{page}");
        assert!(page.contains("\nbaton_cache_resyncs_total{node=\"p0\"} 11\n\n"), "{page}");
        assert!(
            page.ends_with("counter\nbaton_kv_sent_bytes_total{node=\"p0\",way=\"rdma\"} 7\n\n"),
            "{page}"
        );
        counts.forget("p0");
        let page = written();
        assert!(page.contains("{node=\"a ") && !page.contains("p0") && !page.contains(RESYNCS), "{page}");
        counts.forget("a \"b\"\\c");
        assert!(counts.counts.lock().is_empty());
    }
}
