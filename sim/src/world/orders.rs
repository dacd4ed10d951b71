//! Carrying out what a conductor orders, and taking back what a request holds.

use baton_scheduler::Effect as Order;
use baton_store::Input as StoreInput;
use baton_types::{InstanceId, RequestId};

use super::World;
use super::requests::{Phase, READER};
use crate::metrics::Status;

impl World {
    pub(crate) fn carry_out(&mut self, router: u32, order: Order) {
        self.share_placement(router, &order);
        match order {
            Order::StartPrefill { request, instance, decode, fetch, room_tokens, order } => {
                let Some(slot) = self.slot_of(request) else { return };
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
                let Some(slot) = self.slot_of(request) else { return };
                let live = &mut self.live[slot as usize];
                (live.decode, live.room_tokens) = (to.0, room_tokens);
                self.begin_handoff(slot);
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

    /// Takes back whatever a request holds on one instance.
    fn release(&mut self, request: RequestId, instance: InstanceId) {
        let Some(slot) = self.slot_of(request) else { return };
        let at = instance.0;
        let live = &self.live[slot as usize];
        if live.prefill == at {
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
        self.live[slot as usize].phase = Phase::Outside;
    }

    /// Frees the prefill side: place in the queue, engine work, pins, transfers.
    pub(crate) fn leave_prefill(&mut self, slot: u32) {
        let live = &mut self.live[slot as usize];
        let at = live.prefill;
        let left = live.prompt_tokens - live.cached_tokens;
        let was_open = std::mem::take(&mut live.prefill_open);
        let prefilled = live.prefilled;
        let reading_from = live.reading_from.take();
        (live.loads, live.shares) = (0, false);
        let (id, local) = (live.id, live.prefill == live.decode);
        if matches!(live.phase, Phase::Incoming | Phase::Loading | Phase::Prefilling) {
            live.phase = Phase::Outside;
        }
        if let Some(source) = reading_from {
            self.step_store(source, StoreInput::Close { owner: RequestId(id.0 | READER) });
        }
        self.cancel_flights_of(slot);
        let node = &mut self.nodes[at as usize];
        node.incoming.retain(|(_, s)| *s != slot);
        node.sharing.retain(|s| *s != slot);
        if !was_open {
            return;
        }
        if !prefilled {
            node.opened_tokens = node.opened_tokens.saturating_sub(left);
        }
        node.engine.remove(self.now_us, slot);
        self.touch(at);
        self.step_store(at, StoreInput::Close { owner: id });
        if local {
            self.live[slot as usize].decode_open = false;
        }
        self.door(at);
    }

    /// Frees the decode side: room, engine work, the hand-off.
    pub(crate) fn leave_decode(&mut self, slot: u32) {
        self.cancel_handoff(slot);
        let live = &mut self.live[slot as usize];
        let (at, id) = (live.decode, live.id);
        let was_open = std::mem::take(&mut live.decode_open);
        if matches!(live.phase, Phase::HandingOff | Phase::Decoding) {
            live.phase = Phase::Outside;
        }
        self.nodes[at as usize].crowded.retain(|s| *s != slot);
        if !was_open {
            return;
        }
        self.nodes[at as usize].engine.remove(self.now_us, slot);
        self.touch(at);
        self.step_store(at, StoreInput::Close { owner: id });
        self.door(at);
    }
}
