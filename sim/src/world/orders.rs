//! Carrying out what a conductor orders, and taking back what a request holds.

use baton_legs::Input as LegInput;
use baton_scheduler::Effect as Order;
use baton_store::Input as StoreInput;
use baton_types::{InstanceId, RequestId};

use super::World;
use super::requests::READER;
use crate::metrics::Status;

impl World {
    pub(crate) fn carry_out(&mut self, router: u32, order: Order) {
        if self.setup.routers > 1 {
            self.share_order(router, &order);
        }
        match order {
            Order::StartPrefill { request, instance, decode, fetch, room_tokens, order } => {
                let Some(slot) = self.new_turn(request) else { return };
                self.witness_clean(slot);
                let live = &mut self.live[slot as usize];
                (live.prefill, live.decode) = (instance.0, decode.0);
                (live.fetch, live.room_tokens, live.order) = (fetch, room_tokens, order);
                self.enter_prefill(slot);
            }
            Order::StartDecode { request, instance } => {
                if let Some(slot) = self.slot_of(request) {
                    self.start_decode(slot, instance.0);
                }
            }
            Order::Handoff { request, to, room_tokens, .. } => {
                let Some(slot) = self.new_turn(request) else { return };
                let live = &mut self.live[slot as usize];
                (live.decode, live.room_tokens) = (to.0, room_tokens);
                let prefill = live.prefill;
                self.leg(prefill, LegInput::HandOff { request });
            }
            Order::Replicate { from, to, chain } => self.replicate(from.0, to.0, &chain),
            Order::Release { request, instance } => self.release(request, instance),
            Order::Reject(rejection) => {
                if let Some(slot) = self.slot_of(rejection.request) {
                    self.rejected(slot, &rejection);
                }
            }
            Order::Fail { request, .. } => {
                if let Some(slot) = self.slot_of(request) {
                    self.release_all(slot);
                    self.end(slot, Status::Failed, None);
                }
            }
            Order::Explain(decision) => self.metrics.explained(decision),
        }
    }

    /// The request's slot, if it is live; what was said of it so far is out of date from here on.
    fn new_turn(&mut self, request: RequestId) -> Option<u32> {
        let slot = self.slot_of(request)?;
        self.turns += 1;
        self.live[slot as usize].turn = self.turns;
        Some(slot)
    }

    /// Takes back whatever a request holds on one instance.
    fn release(&mut self, request: RequestId, instance: InstanceId) {
        let Some(slot) = self.new_turn(request) else { return };
        let at = instance.0;
        if self.live[slot as usize].prefill == at {
            self.leave_prefill(slot);
        }
        if self.live[slot as usize].decode == at {
            self.leave_decode(slot);
        }
    }

    /// Takes back whatever a request holds anywhere.
    pub(crate) fn release_all(&mut self, slot: u32) {
        self.leave_prefill(slot);
        self.leave_decode(slot);
    }

    /// Frees the prefill side: place in the queue, engine work, pins, transfers.
    pub(crate) fn leave_prefill(&mut self, slot: u32) {
        let live = &mut self.live[slot as usize];
        let (at, request) = (live.prefill, live.id);
        let loading = std::mem::take(&mut live.loads) > 0 || live.reading_from.is_some();
        let shared = std::mem::take(&mut live.shares);
        self.stop_reading(slot);
        if loading {
            self.drop_loads(slot);
        }
        if shared {
            self.nodes[at as usize].sharing.retain(|s| *s != slot);
        }
        self.leg(at, LegInput::Release { request });
    }

    /// A fetch's source need not keep its blocks any longer.
    pub(crate) fn stop_reading(&mut self, slot: u32) {
        if let Some(source) = self.live[slot as usize].reading_from.take() {
            let owner = RequestId(self.live[slot as usize].id.0 | READER);
            self.step_store(source, StoreInput::Close { owner });
        }
    }

    /// Frees the decode side: room, engine work, the hand-off.
    pub(crate) fn leave_decode(&mut self, slot: u32) {
        self.cancel_handoff(slot);
        let live = &self.live[slot as usize];
        let (at, request) = (live.decode, live.id);
        self.leg(at, LegInput::Release { request });
    }
}
