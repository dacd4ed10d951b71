//! Telling conductors what happened: at once to the one in charge, later to its peers.

use std::collections::VecDeque;

use baton_scheduler::{Effect as Order, Input};
use baton_types::{CacheChange, CacheEvent};

use super::World;
use crate::events::Event;

/// What a conductor will hear later, by source; each queue is in order of time.
#[derive(Debug, Default)]
pub(crate) struct News {
    caches: VecDeque<(u64, CacheEvent)>,
    peers: VecDeque<(u64, Input)>,
}

impl World {
    /// Steps one conductor and carries its orders out.
    pub(crate) fn tell(&mut self, router: u32, input: Input) {
        let mut orders = std::mem::take(&mut self.orders);
        self.conductors[router as usize].step(self.now_us, input, &mut orders);
        if orders.is_empty() {
            self.orders = orders;
            return;
        }
        // Orders may lead to further inputs; those steps use a list of their own.
        for order in orders.drain(..) {
            self.carry_out(router, order);
        }
        self.orders = orders;
    }

    /// Tells every conductor at once.
    pub(crate) fn tell_all(&mut self, input: &Input) {
        for router in 0..self.setup.routers {
            self.tell(router, input.clone());
        }
    }

    /// Tells the conductor in charge of a request, and its peers later.
    pub(crate) fn tell_of(&mut self, router: u32, input: Input) {
        if self.setup.routers > 1 {
            self.tell_peers(router, &input);
        }
        self.tell(router, input);
    }

    pub(crate) fn tell_peers(&mut self, router: u32, input: &Input) {
        let due_us = self.now_us + self.setup.router_sync_us;
        for peer in (0..self.setup.routers).filter(|p| *p != router) {
            self.news[peer as usize].peers.push_back((due_us, input.clone()));
            self.events.push(due_us, Event::News(peer));
        }
    }

    /// A cache changed: conductors hear of it, perhaps late, perhaps never.
    pub(crate) fn publish(&mut self, node: u32, change: CacheChange) {
        let spec = &self.nodes[node as usize].spec;
        let event = CacheEvent { instance: spec.id, epoch: spec.epoch, change };
        let faults = self.setup.faults;
        if faults.lost_news_permille > 0 && self.news_rng.chance_permille(faults.lost_news_permille) {
            return;
        }
        if faults.news_delay_us == 0 {
            for router in 1..self.setup.routers {
                self.tell(router, Input::Cache(event.clone()));
            }
            self.tell(0, Input::Cache(event));
            return;
        }
        let due_us = self.now_us + faults.news_delay_us;
        for router in 0..self.setup.routers {
            self.news[router as usize].caches.push_back((due_us, event.clone()));
            self.events.push(due_us, Event::News(router));
        }
    }

    pub(crate) fn deliver_news(&mut self, router: u32) {
        let now_us = self.now_us;
        let due = |at: Option<&(u64, CacheEvent)>| at.is_some_and(|(us, _)| *us <= now_us);
        while due(self.news[router as usize].caches.front()) {
            if let Some((_, event)) = self.news[router as usize].caches.pop_front() {
                self.tell(router, Input::Cache(event));
            }
        }
        while self.news[router as usize].peers.front().is_some_and(|(us, _)| *us <= now_us) {
            if let Some((_, input)) = self.news[router as usize].peers.pop_front() {
                self.tell(router, input);
            }
        }
    }

    /// Tells peers of a placement made by `router`.
    pub(crate) fn share_placement(&mut self, router: u32, order: &Order) {
        let Order::StartPrefill { request, instance, decode, .. } = order else { return };
        if self.setup.routers < 2 {
            return;
        }
        let Some(slot) = self.slot_of(*request) else { return };
        let live = &self.live[slot as usize];
        let request = baton_scheduler::Request {
            id: live.id,
            prompt_tokens: live.prompt_tokens,
            ..baton_scheduler::Request::default()
        };
        let spec = &self.nodes[instance.index()].spec;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive time")]
        let work_us = spec.profile.chunked_prefill_us(live.prompt_tokens, 0, spec.pass_tokens.into()) as u64;
        let input = Input::PeerPlaced { request, prefill: *instance, decode: *decode, work_us };
        self.tell_peers(router, &input);
    }
}
