//! What the metrics page shows of the attached nodes.

use std::collections::BTreeMap;

use baton_types::Tier;

use super::driver::Driver;
use crate::metrics::{ClusterGauges, NodeGauges};

/// The gauges are at most this old, µs, while anything happens at all.
const FRESH_US: u64 = 1_000_000;

/// When the gauges were set, and for how many nodes.
#[derive(Debug, Default)]
pub(super) struct ShownNodes {
    at_us: u64,
    nodes: usize,
}

impl Driver {
    /// Sets the gauges of the nodes, if it is time to.
    pub(super) fn show_nodes(&mut self) {
        let nodes = self.fleet.iter().count();
        if nodes == self.shown.nodes && self.now_us < self.shown.at_us + FRESH_US {
            return;
        }
        self.shown = ShownNodes { at_us: self.now_us, nodes };
        let loads = self.core.snapshot().instances;
        let loads: BTreeMap<_, _> = loads.iter().map(|load| (load.instance, load)).collect();
        let nodes = self.fleet.iter().map(|(id, node)| {
            let load = loads.get(&id);
            let count =
                |of: fn(&baton_scheduler::InstanceLoad) -> u32| load.map_or(0, |load| of(load).into());
            let tiers = node.load.tiers.iter().map(|tier| {
                (tier.tier().read().map_or("other", Tier::name), tier.used_blocks, tier.capacity_blocks)
            });
            NodeGauges {
                name: node.name.clone(),
                role: node.role.name(),
                state: node.state(),
                backlog_us: load.map_or(0, |load| load.backlog_us),
                step_us: load.map_or(0, |load| load.step_us),
                queued: count(|load| load.waiting + load.dispatched),
                decodes: count(|load| load.decodes),
                running: node.load.running.into(),
                tiers: tiers.collect(),
            }
        });
        let classes = self.config.scheduler.classes.iter();
        let targets = classes.map(|class| (class.name.clone(), f64::from(class.target_permille) / 1000.0));
        self.metrics.show(ClusterGauges { nodes: nodes.collect(), targets: targets.collect() });
    }
}
