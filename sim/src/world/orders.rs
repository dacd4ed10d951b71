//! Carrying out what a conductor orders, and taking back what a request holds.

use baton_legs::Input as LegInput;
use baton_legs::pairs::{Effect, PrefillOrder};
use baton_scheduler::Effect as Order;
use baton_store::Input as StoreInput;
use baton_types::{InstanceId, RequestId};

use super::World;
use super::requests::READER;
use crate::metrics::Status;

impl World {
    pub(crate) fn carry_out(&mut self, router: u32, effect: Effect) {
        match effect {
            Effect::Prefill(PrefillOrder {
                request,
                attempt,
                instance,
                decode,
                fetch,
                room_tokens,
                order,
                ..
            }) => {
                let Some(slot) = self.slot_of(request) else { return };
                self.witness_clean(slot);
                let live = &mut self.live[slot as usize];
                live.attempt = attempt;
                (live.prefill, live.decode) = (instance.0, decode.0);
                (live.fetch, live.order) = (fetch, order);
                (live.given_tokens, live.room_tokens) = (live.streamed_tokens, room_tokens);
                self.enter_prefill(slot);
            }
            Effect::Decode { request, instance, .. } => {
                if let Some(slot) = self.slot_of(request) {
                    self.start_decode(slot, instance.0);
                }
            }
            Effect::Expect { request, attempt, instance, room_tokens, .. } => {
                let Some(slot) = self.slot_of(request) else { return };
                let live = &mut self.live[slot as usize];
                (live.attempt, live.decode, live.room_tokens) = (attempt, instance.0, room_tokens);
                if self.nodes[instance.index()].alive {
                    self.leg(instance.0, LegInput::Expect { request, work: self.work(slot) });
                }
            }
            Effect::Handoff { request, from, .. } => self.leg(from.0, LegInput::HandOff { request }),
            Effect::Order(Order::Replicate { from, to, chain }) => self.replicate(from.0, to.0, &chain),
            Effect::Order(Order::Share(input)) => self.send_to_peers(router, &input),
            Effect::Order(Order::ChangeRole { instance, role }) => {
                self.nodes[instance.index()].spec.role = role;
            }
            Effect::Order(Order::Explain(decision)) => self.metrics.explained(decision),
            Effect::Release { request, instance, .. } => self.release(request, instance),
            Effect::Refuse(rejection) => self.rejected(&rejection, true),
            // A client that has the beginning of an answer gets an error, and no time to come back.
            Effect::CutShort(rejection) => self.rejected(&rejection, false),
            Effect::Fail { request, .. } | Effect::Condemn { request } => {
                self.lose(request, Status::Failed);
            }
            Effect::GiveUp { request, .. } => self.lose(request, Status::TimedOut),
            // Orders about requests come as effects of an attempt. The other effects concern only clients and
            // logs.
            Effect::Order(_)
            | Effect::Entered { .. }
            | Effect::Admitted { .. }
            | Effect::Blame { .. }
            | Effect::Late { .. }
            | Effect::Ended { .. } => {}
        }
    }

    /// A request that was admitted is not served.
    pub(crate) fn lose(&mut self, request: RequestId, status: Status) {
        if let Some(slot) = self.slot_of(request) {
            self.release_all(slot);
            self.end(slot, status, None);
        }
    }

    /// Takes back whatever a request holds on one instance.
    fn release(&mut self, request: RequestId, instance: InstanceId) {
        let Some(slot) = self.slot_of(request) else { return };
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
