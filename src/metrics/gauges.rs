//! What an autoscaler and a dashboard need to know of the cluster: its nodes, and the classes' targets.

use std::collections::BTreeMap;

use baton_http::{Page, label};
use baton_scheduler::RoleAdvice;
use parking_lot::Mutex;

use super::figure;

/// One attached node, as its conductor sees it.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeGauges {
    pub(crate) name: String,
    pub(crate) role: String,
    /// `serving`, `draining` or `drained`.
    pub(crate) state: String,
    /// Predicted time until all prefills that it was given are computed.
    pub(crate) backlog_us: u64,
    /// Predicted time of its next decode step.
    pub(crate) step_us: u64,
    /// Learnt rate of its network link, out of it and into it.
    pub(crate) link_bytes_per_s: [u64; 2],
    /// Prefills that are sent to it or held back for it.
    pub(crate) queued: u64,
    /// Answers that it generates, or was promised.
    pub(crate) decodes: u64,
    pub(crate) running: u64,
    /// Name, used blocks and capacity of each of its tiers.
    pub(crate) tiers: Vec<(String, u64, u64)>,
}

/// The gauges of a cluster, replaced as a whole.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClusterGauges {
    pub(crate) nodes: Vec<NodeGauges>,
    /// Each class with its target share.
    pub(crate) targets: Vec<(String, f64)>,
    /// What the demand of the last minutes asks for.
    pub(crate) advice: Option<RoleAdvice>,
    /// Roles that the conductor changed.
    pub(crate) role_changes: u64,
    /// Memory of the index of blocks.
    pub(crate) index_bytes: u64,
    /// Blocks that it did not take.
    pub(crate) index_refused_blocks: u64,
}

/// The gauges that the page shows.
#[derive(Debug, Default)]
pub(super) struct ShownGauges(Mutex<ClusterGauges>);

impl ShownGauges {
    pub(super) fn set(&self, gauges: ClusterGauges) {
        *self.0.lock() = gauges;
    }

    /// Adds all of it to a page that Prometheus reads.
    pub(super) fn write(&self, page: &mut Page) {
        let shown = self.0.lock();
        let ClusterGauges { nodes, targets, advice, .. } = &*shown;
        let targets = targets.iter().map(|(class, target)| (label("class", class), target));
        page.family(figure("baton_slo_target_ratio"), targets);
        let parts = |of: fn(&RoleAdvice) -> [f64; 2]| {
            let values =
                advice.iter().flat_map(move |advice| ["prefill", "decode"].into_iter().zip(of(advice)));
            values.map(|(role, value)| (label("role", role), value))
        };
        page.family(figure("baton_role_pressure"), parts(|a| [a.prefill_pressure, a.decode_pressure]));
        page.family(figure("baton_advised_nodes"), parts(|a| [a.prefills.into(), a.decodes.into()]));
        for (name, value) in [
            ("baton_role_changes_total", shown.role_changes),
            ("baton_index_bytes", shown.index_bytes),
            ("baton_index_refused_blocks_total", shown.index_refused_blocks),
        ] {
            page.family(figure(name), [(String::new(), value)]);
        }
        let mut counts: BTreeMap<_, u32> = BTreeMap::new();
        for node in nodes.iter() {
            *counts.entry((node.role.as_str(), node.state.as_str())).or_default() += 1;
        }
        let counts = counts.into_iter();
        let of_state =
            |((role, state), count)| (format!("{},{}", label("role", role), label("state", state)), count);
        page.family(figure("baton_nodes"), counts.map(of_state));
        let labels =
            |node: &NodeGauges| format!("{},{}", label("node", &node.name), label("role", &node.role));
        let seconds = |us: u64| us as f64 / 1e6;
        let mut times = |name, value: fn(&NodeGauges) -> u64| {
            page.family(figure(name), nodes.iter().map(|node| (labels(node), seconds(value(node)))));
        };
        times("baton_node_backlog_seconds", |node| node.backlog_us);
        times("baton_node_step_seconds", |node| node.step_us);
        let links = nodes.iter().flat_map(|node| {
            let ways = ["out", "in"].into_iter().zip(node.link_bytes_per_s);
            ways.map(|(way, rate)| (format!("{},{}", labels(node), label("direction", way)), rate))
        });
        page.family(figure("baton_node_link_bytes_per_second"), links);
        let mut counts = |name, value: fn(&NodeGauges) -> u64| {
            page.family(figure(name), nodes.iter().map(|node| (labels(node), value(node))));
        };
        counts("baton_node_queued_requests", |node| node.queued);
        counts("baton_node_decodes", |node| node.decodes);
        counts("baton_node_running_sequences", |node| node.running);
        let mut tiers = |name, value: fn(&(String, u64, u64)) -> u64| {
            let series = nodes.iter().flat_map(|node| node.tiers.iter().map(move |tier| (node, tier)));
            let of_tier = |(node, tier): (&NodeGauges, &(String, u64, u64))| {
                (format!("{},{}", label("node", &node.name), label("tier", &tier.0)), value(tier))
            };
            page.family(figure(name), series.map(of_tier));
        };
        tiers("baton_kv_used_blocks", |tier| tier.1);
        tiers("baton_kv_capacity_blocks", |tier| tier.2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_node_has_its_gauges_and_none_is_left_of_one_that_went() {
        let gauges = ShownGauges::default();
        let set = |nodes| {
            let advice = RoleAdvice { prefill_pressure: 0.5, decode_pressure: 1.25, prefills: 1, decodes: 3 };
            let targets = vec![("gold".into(), 0.99)];
            let (index_bytes, index_refused_blocks) = (4_096, 17);
            gauges.set(ClusterGauges {
                nodes,
                targets,
                advice: Some(advice),
                role_changes: 2,
                index_bytes,
                index_refused_blocks,
            });
        };
        let written = || {
            let mut page = Page::default();
            gauges.write(&mut page);
            page.into_text()
        };
        let none = written();
        assert!(
            none.ends_with("\nbaton_index_refused_blocks_total 0\n\n") && none.matches("# TYPE").count() == 3,
            "{none}"
        );
        let node = |name: &str, role: &str, state: &str| {
            let [name, role, state] = [name, role, state].map(str::to_owned);
            NodeGauges { name, role, state, ..NodeGauges::default() }
        };
        let busy = NodeGauges {
            backlog_us: 1_500_000,
            step_us: 20_000,
            link_bytes_per_s: [3_000, 4_000],
            queued: 3,
            decodes: 7,
            running: 5,
            tiers: vec![("hbm".into(), 10, 64), ("dram".into(), 2, 128)],
            ..node("p0", "prefill", "serving")
        };
        set(vec![busy, node("d0", "decode", "serving"), node("d1", "decode", "draining")]);
        let page = written();
        for line in [
            "baton_slo_target_ratio{class=\"gold\"} 0.99",
            "baton_role_pressure{role=\"decode\"} 1.25",
            "baton_advised_nodes{role=\"prefill\"} 1",
            "baton_role_changes_total 2",
            "baton_index_bytes 4096",
            "baton_index_refused_blocks_total 17",
            "baton_nodes{role=\"decode\",state=\"draining\"} 1",
            "baton_nodes{role=\"prefill\",state=\"serving\"} 1",
            "baton_node_backlog_seconds{node=\"p0\",role=\"prefill\"} 1.5",
            "baton_node_step_seconds{node=\"p0\",role=\"prefill\"} 0.02",
            "baton_node_link_bytes_per_second{node=\"p0\",role=\"prefill\",direction=\"out\"} 3000",
            "baton_node_link_bytes_per_second{node=\"p0\",role=\"prefill\",direction=\"in\"} 4000",
            "baton_node_queued_requests{node=\"p0\",role=\"prefill\"} 3",
            "baton_node_decodes{node=\"p0\",role=\"prefill\"} 7",
            "baton_node_running_sequences{node=\"d0\",role=\"decode\"} 0",
            "baton_kv_used_blocks{node=\"p0\",tier=\"hbm\"} 10",
            "baton_kv_capacity_blocks{node=\"p0\",tier=\"dram\"} 128",
        ] {
            assert!(page.lines().any(|other| other == line), "{line} is not in {page}");
        }
        set(vec![node("d0", "decode", "serving")]);
        assert!(!written().contains("p0") && !written().contains("d1"), "{}", written());
    }
}
