//! Names of nodes that left for good: they are forgotten, and with them what was counted under them.

use std::collections::BTreeSet;

use baton_types::InstanceId;

use super::driver::Driver;

impl Driver {
    /// Forgets the nodes that left long ago, unless some state still refers to them.
    pub(super) fn forget_names(&mut self) {
        if !self.fleet.overdue(self.now_us) {
            return;
        }
        let referenced_instances = self.referenced_instances();
        let names = self.fleet.forget(self.now_us, &referenced_instances);
        names.iter().for_each(|name| self.forgotten(name));
    }

    /// Where every number is taken, who left first makes room for a new name.
    pub(super) fn make_room(&mut self, name: &str) {
        if !self.fleet.is_full(name) {
            return;
        }
        let referenced_instances = self.referenced_instances();
        if let Some(name) = self.fleet.forget_oldest(&referenced_instances) {
            self.forgotten(&name);
        }
    }

    fn forgotten(&self, name: &str) {
        tracing::debug!(node = name, "it left for good and is forgotten");
        self.metrics.forget_node(name);
    }

    /// Every instance that some request under way speaks of, here or in the core.
    fn referenced_instances(&self) -> BTreeSet<InstanceId> {
        let expected =
            self.sessions.values().filter_map(|session| session.expected.map(|(instance, _)| instance));
        let mut all: BTreeSet<InstanceId> = expected.collect();
        all.extend(self.pairs.iter().flat_map(|(_, pair)| pair.legs()).flatten());
        self.core.referenced_instances(|instance| {
            all.insert(instance);
        });
        all
    }
}
