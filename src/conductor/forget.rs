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
        let spoken_of = self.spoken_of();
        let names = self.fleet.forget(self.now_us, &spoken_of);
        names.iter().for_each(|name| self.forgotten(name));
    }

    /// Where every number is taken, who left first makes room for a new name.
    pub(super) fn make_room(&mut self, name: &str) {
        if !self.fleet.is_full(name) {
            return;
        }
        let spoken_of = self.spoken_of();
        if let Some(name) = self.fleet.forget_oldest(&spoken_of) {
            self.forgotten(&name);
        }
    }

    fn forgotten(&self, name: &str) {
        tracing::debug!(node = name, "it left for good and is forgotten");
        self.metrics.forget_node(name);
    }

    /// Every instance that some request under way speaks of, here or in the core.
    fn spoken_of(&self) -> BTreeSet<InstanceId> {
        let expected =
            self.sessions.values().filter_map(|session| session.expected.map(|(instance, _)| instance));
        let mut all: BTreeSet<InstanceId> = expected.collect();
        all.extend(self.pairs.iter().flat_map(|(_, pair)| pair.legs()).flatten());
        self.core.spoken_of(|instance| {
            all.insert(instance);
        });
        all
    }
}
