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
    counts: Mutex<BTreeMap<&'static str, BTreeMap<String, u64>>>,
}

impl ByNode {
    /// Counts so many more.
    pub(super) fn add(&self, name: &'static str, node: &str, more: u64) {
        self.change(name, node, |count| count.saturating_add(more));
    }

    /// A total that a node keeps and reports: it never falls here, also when the node starts anew.
    pub(super) fn reported(&self, name: &'static str, node: &str, total: u64) {
        if total > 0 {
            self.change(name, node, |count| count.max(total));
        }
    }

    fn change(&self, name: &'static str, node: &str, to: impl FnOnce(u64) -> u64) {
        let mut counts = self.counts.lock();
        let by_node = counts.entry(name).or_default();
        match by_node.get_mut(node) {
            Some(count) => *count = to(*count),
            None => {
                by_node.insert(node.to_owned(), to(0));
            }
        }
    }

    /// Ends every series of a node.
    pub(super) fn forget(&self, node: &str) {
        let mut counts = self.counts.lock();
        for by_node in counts.values_mut() {
            by_node.remove(node);
        }
        counts.retain(|_, by_node| !by_node.is_empty());
    }

    /// Adds all of it to a page that Prometheus reads.
    pub(super) fn write(&self, page: &mut String) {
        for (name, by_node) in &*self.counts.lock() {
            let help = NAMES.iter().find(|known| known.name == *name && known.kind == Kind::Counter);
            let _ = writeln!(page, "# HELP {name} {}", help.map_or("", |known| known.help));
            let _ = writeln!(page, "# TYPE {name} counter");
            for (node, count) in by_node {
                let _ = writeln!(page, "{name}{{node=\"{}\"}} {count}", escaped(node));
            }
            page.push('\n');
        }
    }
}

/// A label's value as the text format has it.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPECTED: &str = "baton_cache_expected_tokens_total";
    const RESYNCS: &str = "baton_cache_resyncs_total";

    #[test]
    fn what_is_counted_for_a_node_goes_with_it() {
        let (counts, mut page) = (ByNode::default(), String::new());
        counts.write(&mut page);
        assert_eq!(page, "");
        counts.add(EXPECTED, "p0", 5);
        counts.add(EXPECTED, "p0", 7);
        counts.add(EXPECTED, "a \"b\"\\c", 1);
        for total in [3, 9, 0, 2] {
            counts.reported(RESYNCS, "p0", total);
        }
        counts.write(&mut page);
        let told = "# HELP baton_cache_expected_tokens_total Prompt tokens that were expected in the cache of the \
                    instance chosen, by `node`\n# TYPE baton_cache_expected_tokens_total counter\n\
                    baton_cache_expected_tokens_total{node=\"a \\\"b\\\"\\\\c\"} 1\n\
                    baton_cache_expected_tokens_total{node=\"p0\"} 12\n\n";
        assert!(page.starts_with(told), "{page}");
        assert!(page.ends_with("baton_cache_resyncs_total{node=\"p0\"} 9\n\n"), "{page}");
        counts.forget("p0");
        page.clear();
        counts.write(&mut page);
        assert!(page.contains("{node=\"a ") && !page.contains("p0") && !page.contains(RESYNCS), "{page}");
        counts.forget("a \"b\"\\c");
        assert!(counts.counts.lock().is_empty());
    }
}
