//! Room for answers that turn out longer than predicted: their reservations grow. A request that was preempted waits
//! here, with the tokens that its client has, until there is room again.
//!
//! A decode instance that runs short of KV takes it from the youngest request, so the oldest always continues.
//! Preempted requests are sent again in order of arrival. So every request that fits at all completes.

use alloc::vec::Vec;
use baton_types::{InstanceId, RequestId};

use crate::conductor::Conductor;
use crate::estimate::ChainPosition;
use crate::fleet::Instance;
use crate::placement::{DecodeNeed, Placement};
use crate::request::{Entry, Stage};
use crate::{Effect, FailStage};

/// Most held requests that are checked when room becomes free.
const LOOKS: usize = 8;

impl Conductor {
    /// An answer is longer than its reserved room. Its expected length is now that of the answers that became as long,
    /// and room for that is reserved.
    pub(crate) fn room_outgrown(&mut self, id: RequestId, emitted_tokens: u32) {
        let decoding = |e: &&Entry| e.stage == Stage::Decoding;
        let Some(entry) = self.requests.get(id).filter(decoding) else {
            self.stats.stale_inputs += 1;
            return;
        };
        let decode = entry.decode.expect("a request that decodes has a decode instance (I8)");
        let request = &entry.request;
        let drawn = emitted_tokens.saturating_sub(request.emitted_tokens);
        if drawn < entry.room_tokens {
            return;
        }
        let more = self.further_tokens(request, emitted_tokens, 800);
        let room_tokens = drawn.saturating_add(more);
        let reserved_tokens = self.reserved_for(request.prompt_tokens, room_tokens);
        let instance = self.fleet.known(decode);
        let (batch, context, _) = instance.decode.now();
        let step_us = instance.step_us(batch.max(1), context);
        let further = self.further_tokens(request, emitted_tokens, 500);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a positive product far below 2^53"
        )]
        let left_us = (f64::from(further) * step_us) as u64;
        let finish_us = self.now_us + left_us;
        let output_tokens = u64::from(drawn) + u64::from(further);
        if let Some(entry) = self.requests.get_mut(id) {
            (entry.room_tokens, entry.finish_us) = (room_tokens, finish_us);
        }
        self.fleet.known_mut(decode).decode.grow(id, reserved_tokens, output_tokens, finish_us);
    }

    /// Its decode instance, or the one that was receiving its KV, released its KV for an older request. The client's
    /// tokens are added to the prompt. The request keeps its retries, since nothing failed.
    pub(crate) fn preempted(&mut self, id: RequestId, emitted_tokens: u32, effects: &mut Vec<Effect>) {
        let sent = |e: &&Entry| matches!(e.stage, Stage::Prefilling | Stage::HandingOff | Stage::Decoding);
        if self.requests.get(id).filter(sent).is_none() {
            self.stats.stale_inputs += 1;
            return;
        }
        let mut entry = self.requests.remove(id).expect("looked up above");
        self.release_legs(&entry, effects);
        if entry.peer.is_some() {
            // Its own router places it again, and says so.
            return;
        }
        entry.request.has_emitted(emitted_tokens, self.config.block_tokens);
        entry.gave_way = true;
        self.stats.preempted += 1;
        self.retry(entry, FailStage::DecodeFailed, effects);
    }

    /// The time until which an entry that is about to wait on a prefill instance is held for want of room to decode it,
    /// µs; 0: there is room. A request that was admitted for its objective is sent in time for it, room or not.
    pub(crate) fn held_until_us(&self, entry: &Entry, placement: &Placement, at_us: u64) -> u64 {
        let candidate = &placement.candidate;
        if entry.gave_way {
            let decode = self.fleet.known(placement.decode);
            let roomy = self.has_room(decode, entry, (self.now_us, at_us));
            return if roomy { 0 } else { u64::MAX };
        }
        match candidate.room_wait_us {
            0 => 0,
            wait_us => entry.promised_us.saturating_sub(candidate.latest_us - wait_us).max(self.now_us + 1),
        }
    }

    /// Whether all requests that are on an instance, or will be from the second moment on, leave room for the entry. Held
    /// requests do not count, nor those that are predicted to end between the two moments.
    fn has_room(&self, instance: &Instance, entry: &Entry, when: (u64, u64)) -> bool {
        let capacity_tokens = instance.spec.capacity_tokens;
        self.has_room_by(instance, entry, when, |need, (_, taken_tokens, shared_tokens)| {
            taken_tokens + need.tokens.saturating_sub(shared_tokens) <= capacity_tokens
        })
    }

    /// As [`Self::has_room`], by the rule of admission: what is left goes to smaller ones the more the larger it is.
    pub(crate) fn takes_room_from(&self, instance: &Instance, entry: &Entry, when: (u64, u64)) -> bool {
        self.has_room_by(instance, entry, when, |need, (at_us, taken_tokens, shared_tokens)| {
            self.takes_room(instance, need, (Some(at_us), taken_tokens, shared_tokens))
        })
    }

    fn has_room_by(
        &self,
        instance: &Instance,
        entry: &Entry,
        (now_us, at_us): (u64, u64),
        fits: impl Fn(&DecodeNeed<'_>, (u64, u64, u64)) -> bool,
    ) -> bool {
        let need = self.decode_need(&entry.request, at_us);
        let when = (now_us, at_us, self.lengths.mean_duration_us(1));
        let roomy = |chain_position| {
            instance
                .decode
                .has_room(when, chain_position, |at_us, taken, shared| fits(&need, (at_us, taken, shared)))
        };
        roomy(ChainPosition::default()) || roomy(self.chain_position(&instance.decode, need.chain))
    }

    /// Room became free: ends the holds of requests that fit, the oldest first. None overtakes a preempted request,
    /// which would otherwise wait for as long as there are smaller ones.
    pub(crate) fn retry_held(&mut self, effects: &mut Vec<Effect>) {
        if !core::mem::take(&mut self.room_came) {
            return;
        }
        for (_, id) in self.fleet.held().into_iter().take(LOOKS) {
            let entry = self.requests.get(id).expect("a request that waits is live");
            assert!(entry.stage == Stage::Waiting, "request {id} waits for room, and for nothing else");
            let gave_way = entry.gave_way;
            let Some((prefill, decode)) = self.room_for(entry) else {
                if gave_way {
                    return;
                }
                continue;
            };
            let mut entry = self.requests.remove(id).expect("looked up above");
            if let Some(old) = entry.decode.take() {
                self.release_decode(id, old);
            }
            let at_us = self.now_us + entry.work_us;
            self.reserve_decode(&mut entry, decode, at_us);
            self.fleet.known_mut(prefill).prefill.end_hold(id);
            self.share_waiting(&entry, effects);
            self.requests.insert(entry);
            self.timers.set(prefill, self.now_us);
        }
    }

    /// The prefill instance where a held entry waits, and a decode instance that has room for it now. If no serving
    /// instance can ever hold the request, the planned one is returned, because waiting is pointless then.
    fn room_for(&self, entry: &Entry) -> Option<(InstanceId, InstanceId)> {
        let from = entry.prefill;
        let at_us = self.now_us + entry.work_us;
        let local = self.fleet.get(from).is_some_and(|i| i.spec.role.decodes());
        let able: Vec<InstanceId> =
            if local { Vec::from([from]) } else { self.decodes_to_ask(&entry.request, from) };
        if able.is_empty() {
            return entry.decode.map(|planned| (from, planned));
        }
        let roomy = able.into_iter().filter_map(|id| self.fleet.get(id));
        let roomy = roomy.filter(|i| self.has_room(i, entry, (self.now_us, at_us)));
        roomy.min_by_key(|i| (i.taken_tokens(), i.spec.id)).map(|i| (from, i.spec.id))
    }
}
