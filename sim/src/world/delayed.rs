//! Delayed inputs: cache changes for the conductors, placements for the other routers.

use std::collections::VecDeque;

use baton_scheduler::Input;
use baton_types::{CacheChange, CacheEvent, Role, Tier};

use super::World;
use super::inbox::ConductorInput;
use crate::events::Event;

/// Inputs that a conductor will receive later, by source. Each queue is in order of time.
#[derive(Debug, Default)]
pub(crate) struct DelayQueue {
    caches: VecDeque<(u64, CacheEvent)>,
    peers: VecDeque<(u64, Input)>,
}

/// The change as an instance without an engine reports it: its fastest tier is DRAM.
fn in_memory(change: CacheChange) -> CacheChange {
    let below = |tier| if tier == Tier::Hbm { Tier::Dram } else { tier };
    match change {
        CacheChange::Stored { parent, hashes, tier } => {
            CacheChange::Stored { parent, hashes, tier: below(tier) }
        }
        CacheChange::Removed { hashes, tier } => CacheChange::Removed { hashes, tier: below(tier) },
        CacheChange::Cleared => CacheChange::Cleared,
    }
}

impl World {
    /// Sends an input to the other routers, which receive it `router_sync_us` later.
    pub(crate) fn send_to_peers(&mut self, router: u32, input: &Input) {
        let due_us = self.now_us + self.setup.router_sync_us;
        for peer in (0..self.setup.routers).filter(|p| *p != router) {
            self.delayed[peer as usize].peers.push_back((due_us, input.clone()));
            self.events.push(due_us, Event::DelayedDue(peer));
        }
    }

    /// Reports a cache change to the conductors. A fault may delay or lose the report.
    pub(crate) fn publish(&mut self, node: u32, change: CacheChange) {
        let spec = &self.nodes[node as usize].spec;
        let change = if spec.role == Role::Store { in_memory(change) } else { change };
        let event = CacheEvent { instance: spec.id, epoch: spec.epoch, change };
        let faults = self.setup.faults;
        if faults.lost_news_permille > 0 && self.report_rng.chance_permille(faults.lost_news_permille) {
            return;
        }
        if faults.news_delay_us == 0 {
            for router in 1..self.setup.routers {
                self.send(router, ConductorInput::Fact(Input::Cache(event.clone())));
            }
            self.send(0, ConductorInput::Fact(Input::Cache(event)));
            return;
        }
        let due_us = self.now_us + faults.news_delay_us;
        for router in 0..self.setup.routers {
            self.delayed[router as usize].caches.push_back((due_us, event.clone()));
            self.events.push(due_us, Event::DelayedDue(router));
        }
    }

    pub(crate) fn deliver_delayed(&mut self, router: u32) {
        let now_us = self.now_us;
        let due = |at: Option<&(u64, CacheEvent)>| at.is_some_and(|(us, _)| *us <= now_us);
        while due(self.delayed[router as usize].caches.front()) {
            if let Some((_, event)) = self.delayed[router as usize].caches.pop_front() {
                self.send(router, ConductorInput::Fact(Input::Cache(event)));
            }
        }
        while self.delayed[router as usize].peers.front().is_some_and(|(us, _)| *us <= now_us) {
            if let Some((_, input)) = self.delayed[router as usize].peers.pop_front() {
                self.send(router, ConductorInput::Fact(input));
            }
        }
    }
}
