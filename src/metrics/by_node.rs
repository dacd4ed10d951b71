//! Counters by node: a series for each that is known, and none for one that left for good.
//!
//! The exporter that has the other numbers never lets go of a series, and names of nodes never stop coming.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use parking_lot::Mutex;

use super::{Kind, NAMES};

/// See the module. As many nodes as are told of and not forgotten.
#[derive(Debug, Default)]
pub(super) struct ByNode {
    counts: Mutex<BTreeMap<&'static str, BTreeMap<Labels, Series>>>,
}

/// A node, and other labels in the words of the page, if there are any.
type Labels = (String, &'static str);

#[derive(Debug, Default)]
struct Series {
    count: u64,
    /// What the node has reported last.
    reported: u64,
}

impl ByNode {
    /// Counts so many more.
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
    pub(super) fn write(&self, page: &mut String) {
        for (name, by_node) in &*self.counts.lock() {
            let help = NAMES.iter().find(|known| known.name == *name && known.kind == Kind::Counter);
            let _ = writeln!(page, "# HELP {name} {}", help.map_or("", |known| known.help));
            let _ = writeln!(page, "# TYPE {name} counter");
            for ((node, labels), series) in by_node {
                let (node, comma) = (escaped(node), if labels.is_empty() { "" } else { "," });
                let _ = writeln!(page, "{name}{{node=\"{node}\"{comma}{labels}}} {}", series.count);
            }
            page.push('\n');
        }
    }
}

/// A label's value as the text format has it.
pub(super) fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPECTED: &str = "baton_cache_expected_tokens_total";
    const RESYNCS: &str = "baton_cache_resyncs_total";
    const SENT: &str = "baton_kv_sent_bytes_total";

    #[test]
    fn what_is_counted_for_a_node_goes_with_it() {
        let (counts, mut page) = (ByNode::default(), String::new());
        counts.write(&mut page);
        assert_eq!(page, "");
        counts.add(EXPECTED, "p0", 5);
        counts.add(EXPECTED, "p0", 7);
        counts.add(EXPECTED, "a \"b\"\\c", 1);
        // Two lives: nine times in the first, twice in the second.
        for total in [0, 3, 9, 9, 0, 2] {
            counts.reported(RESYNCS, ("p0", ""), total);
        }
        counts.reported(SENT, ("p0", "way=\"tcp\""), 0);
        counts.reported(SENT, ("p0", "way=\"rdma\""), 7);
        counts.write(&mut page);
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
        page.clear();
        counts.write(&mut page);
        assert!(page.contains("{node=\"a ") && !page.contains("p0") && !page.contains(RESYNCS), "{page}");
        counts.forget("a \"b\"\\c");
        assert!(counts.counts.lock().is_empty());
    }
}
