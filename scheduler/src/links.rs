//! KV between instances: which links a request's fetch and hand-off keep busy, and what that predicts.

use baton_types::{InstanceId, RequestId, Role};

use crate::Request;
use crate::conductor::Conductor;
use crate::estimate::{receive_us, send_us, stated_us};
use crate::fleet::Instance;
use crate::placement::PlannedEnd;
use crate::request::Entry;

impl Conductor {
    /// Tokens of a prompt whose KV a decode instance lacks, by the latest look-up.
    pub(crate) fn tokens_to_send(&self, request: &Request, to: InstanceId) -> u64 {
        request.prompt_tokens - self.tokens_of(request, self.hits.of(to).by_tier[0])
    }

    /// Time for which the KV that a decode instance lacks keeps the link of a prefill instance to itself, µs.
    pub(crate) fn handoff_takes_us(&self, from: &Instance, request: &Request, to: InstanceId) -> u64 {
        send_us(from, self.tokens_to_send(request, to))
    }

    /// Time for which the KV of a request that is prefilled there keeps the instance's link to itself at least, µs: where
    /// the decode instance is the one that has most of it. KV leaves while it is computed, so the slower of the two sets
    /// the pace of the instance.
    pub(crate) fn sends_us(&self, instance: &Instance, request: &Request) -> u64 {
        if instance.spec.role != Role::Prefill || !self.config.policy.orders_queues() {
            return 0;
        }
        let there_tokens = self.tokens_of(request, self.hits.decode_blocks);
        send_us(instance, request.prompt_tokens - there_tokens)
    }

    /// How long after its prefill a request's KV has come to a decode instance, by what the links at both ends have to
    /// carry, µs.
    pub(crate) fn landing_delay_us(
        &self,
        instance: &Instance,
        request: &Request,
        prefill: PlannedEnd,
    ) -> u64 {
        if instance.spec.id == prefill.on || !self.config.policy.orders_queues() {
            return 0;
        }
        let tokens = self.tokens_to_send(request, instance.spec.id);
        let sent_us = send_us(self.fleet.known(prefill.on), tokens).saturating_sub(prefill.work_us);
        let left_us = instance.inbound.left_us(self.now_us);
        let taken_us = self.now_us + left_us + receive_us(instance, tokens);
        sent_us.max(taken_us.saturating_sub(prefill.at_us))
    }

    /// A request's KV is sent from one instance to another.
    fn begin_flight(
        &mut self,
        id: RequestId,
        (from, to): (InstanceId, InstanceId),
        tokens: u64,
        ready: bool,
    ) {
        let now_us = self.now_us;
        let mut source = self.fleet.known_mut(from);
        assert!(source.state != crate::InstanceState::Lost, "KV comes from lost instance {from}");
        let sent_us = stated_us(&source, tokens);
        source.prefill.outbound.begin(now_us, id, sent_us, ready);
        drop(source);
        let mut target = self.fleet.known_mut(to);
        let received_us = stated_us(&target, tokens);
        target.inbound.begin(now_us, id, received_us, ready);
    }

    /// It has landed, or never will.
    pub(crate) fn end_flight(&mut self, id: RequestId, from: InstanceId, to: InstanceId, landed: bool) {
        let now_us = self.now_us;
        let landed = landed && !self.fleet.known(to).spec.engine_moves_kv;
        self.fleet.known_mut(from).prefill.outbound.end(now_us, id, landed);
        self.fleet.known_mut(to).inbound.end(now_us, id, landed);
    }

    /// Counts the fetch of a sent request on the links that it uses; so many blocks are where they go already.
    pub(crate) fn begin_fetch(&mut self, entry: &Entry, here_blocks: u32) {
        let Some(fetch) = entry.fetch else { return };
        assert!(fetch.from != entry.prefill, "request {} fetches what is there", entry.request.id);
        let [all, here] = [fetch.blocks, here_blocks].map(|blocks| self.tokens_of(&entry.request, blocks));
        let (id, tokens) = (entry.request.id, all.saturating_sub(here));
        self.begin_flight(id, (fetch.from, entry.prefill), tokens, true);
    }

    /// Counts the hand-off of a request, of so many tokens, on the links that it uses.
    pub(crate) fn begin_handoff(&mut self, entry: &Entry, tokens: u64, ready: bool) {
        if let Some(decode) = entry.decode.filter(|to| *to != entry.prefill) {
            self.begin_flight(entry.request.id, (entry.prefill, decode), tokens, ready);
        }
    }

    /// The prefill of a request is over: all of its KV can leave.
    pub(crate) fn handoff_is_ready(&mut self, id: RequestId, from: InstanceId, to: InstanceId) {
        if from != to {
            let now_us = self.now_us;
            self.fleet.known_mut(from).prefill.outbound.make_ready(now_us, id);
            self.fleet.known_mut(to).inbound.make_ready(now_us, id);
        }
    }

    /// A hand-off has landed, or never will.
    pub(crate) fn end_handoff(&mut self, id: RequestId, from: InstanceId, to: InstanceId, landed: bool) {
        if from != to {
            self.end_flight(id, from, to, landed);
            // The link may have been what the next prefill waits for.
            self.timers.set(from, self.now_us);
        }
    }
}
