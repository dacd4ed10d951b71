//! What the metrics page shows of the attached nodes.

use super::driver::Driver;
use super::status::NodeStatus;
use crate::metrics::{ClusterGauges, NodeGauges};

/// The gauges are at most this old, µs, while anything happens at all.
const FRESH_US: u64 = 1_000_000;

impl From<NodeStatus> for NodeGauges {
    fn from(node: NodeStatus) -> Self {
        Self {
            name: node.name,
            role: node.role,
            state: node.state,
            backlog_us: node.backlog_us,
            step_us: node.step_us,
            link_bytes_per_s: node.link_bytes_per_s,
            queued: u64::from(node.waiting) + u64::from(node.dispatched),
            decodes: node.decodes.into(),
            running: node.running.into(),
            tiers: node
                .tiers
                .into_iter()
                .map(|(name, used, _, capacity, ..)| (name, used, capacity))
                .collect(),
        }
    }
}

impl Driver {
    /// Sets the gauges of the nodes, if nodes came, left or changed, or it is time to.
    pub(super) fn show_nodes(&mut self) {
        if self.shown_us.is_some_and(|at_us| self.now_us < at_us + FRESH_US) {
            return;
        }
        self.shown_us = Some(self.now_us);
        let classes = self.config.scheduler.classes.iter();
        let targets = classes.map(|class| (class.name.clone(), f64::from(class.target_permille) / 1000.0));
        let nodes = self.node_statuses().into_iter().map(NodeGauges::from);
        let (nodes, targets) = (nodes.collect(), targets.collect());
        self.metrics.show(ClusterGauges {
            nodes,
            targets,
            advice: self.core.role_advice(),
            role_changes: self.core.stats().role_changes,
            index_bytes: self.core.index().memory_bytes() as u64,
            index_refused_blocks: self.core.stats().index_refused_blocks,
        });
    }
}
