//! Room for answers that turn out longer than was reserved: reservations follow them, and whoever had to
//! give way waits here, with what its client has, until there is room again.
//!
//! A decode instance that runs short of KV takes it from the youngest, so the oldest always goes on; and
//! whoever gave way goes again in order of arrival. So everything that fits at all comes to its end.

use alloc::vec::Vec;
use baton_types::{InstanceId, RequestId};

use crate::conductor::Conductor;
use crate::estimate::Kin;
use crate::fleet::Instance;
use crate::placement::Placement;
use crate::request::{Entry, Stage};
use crate::{Effect, FailStage};

/// Of those that wait for room, so many are looked at when some comes free.
const LOOKS: usize = 8;

impl Conductor {
    /// An answer is longer than the room that was kept for it: it is expected to be as long as those that
    /// came as far, and keeps room for that.
    pub(crate) fn room_outgrown(&mut self, id: RequestId, emitted_tokens: u32) {
        let decoding = |e: &&Entry| e.stage == Stage::Decoding && !e.foreign;
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
        let step_us = instance.spec.profile.decode_us(batch.max(1), context);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a positive product far below 2^53"
        )]
        let left_us = (f64::from(self.further_tokens(request, emitted_tokens, 500)) * step_us) as u64;
        let finish_us = self.now_us + left_us;
        if let Some(entry) = self.requests.get_mut(id) {
            (entry.room_tokens, entry.finish_us) = (room_tokens, finish_us);
        }
        self.fleet.known_mut(decode).decode.grow(id, reserved_tokens, finish_us);
    }

    /// Its decode instance, or the one that its KV was on the way to, gave its KV up for an older request. What
    /// its client has goes on top of the prompt; no try of it is spent, for nothing went wrong.
    pub(crate) fn preempted(&mut self, id: RequestId, emitted_tokens: u32, effects: &mut Vec<Effect>) {
        let sent = |e: &&Entry| matches!(e.stage, Stage::Prefilling | Stage::HandingOff | Stage::Decoding);
        if self.requests.get(id).filter(sent).is_none() {
            self.stats.stale_inputs += 1;
            return;
        }
        let mut entry = self.requests.remove(id).expect("looked up above");
        self.let_go(&entry, effects);
        if entry.foreign {
            // Its own router places it again, and says so.
            return;
        }
        entry.request.has_emitted(emitted_tokens, self.config.block_tokens);
        entry.gave_way = true;
        self.stats.preempted += 1;
        self.retry(entry, FailStage::DecodeFailed, effects);
    }

    /// Until when an entry that is about to wait on a prefill instance stays there for want of room to decode it, µs;
    /// 0: there is room. Who was let in for its objective goes when it must, room or not.
    pub(crate) fn held_until_us(&self, entry: &Entry, placement: &Placement, at_us: u64) -> u64 {
        let candidate = &placement.candidate;
        if entry.gave_way {
            let roomy = self.has_room(self.fleet.known(placement.decode), entry, at_us);
            return if roomy { 0 } else { u64::MAX };
        }
        match candidate.room_wait_us {
            0 => 0,
            wait_us => entry.promised_us.saturating_sub(candidate.latest_us - wait_us).max(self.now_us + 1),
        }
    }

    /// Whether everything that is, or will by then be, on an instance leaves room for the entry; those that wait
    /// for room themselves do not count.
    fn has_room(&self, instance: &Instance, entry: &Entry, at_us: u64) -> bool {
        let need = self.decode_need(&entry.request, at_us);
        let (when, capacity_tokens) = ((self.now_us, at_us), instance.spec.capacity_tokens);
        let roomy = |kin| instance.decode.has_room(when, need.tokens, capacity_tokens, kin);
        roomy(Kin::default()) || roomy(self.kin(&instance.decode, need.chain))
    }

    /// Room came free: whoever waits for it goes on, the oldest first. None overtakes one that gave way, or that
    /// would wait for as long as there are smaller ones.
    pub(crate) fn let_held_go(&mut self) {
        if !core::mem::take(&mut self.room_came) {
            return;
        }
        let mut held: Vec<(u64, RequestId)> = self.fleet.iter().flat_map(|i| i.prefill.held()).collect();
        held.sort_unstable();
        for (_, id) in held.into_iter().take(LOOKS) {
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
            self.requests.insert(entry);
            self.fleet.known_mut(prefill).prefill.let_go(id);
            self.timers.set(prefill, self.now_us);
        }
    }

    /// Where a held entry waits, and an instance that has room for its decode now; its own where none that serves
    /// could ever have it, for then waiting is over as well.
    fn room_for(&self, entry: &Entry) -> Option<(InstanceId, InstanceId)> {
        let from = entry.prefill;
        let at_us = self.now_us + entry.work_us;
        let local = self.fleet.get(from).is_some_and(|i| i.spec.role.decodes());
        let able: Vec<InstanceId> = if local {
            Vec::from([from])
        } else {
            self.fleet.decodes_of(from).filter(|id| self.holds(*id, &entry.request)).collect()
        };
        if able.is_empty() {
            return entry.decode.map(|planned| (from, planned));
        }
        let roomy = able.into_iter().filter_map(|id| self.fleet.get(id));
        let roomy = roomy.filter(|i| self.has_room(i, entry, at_us));
        roomy.min_by_key(|i| (i.decode.reserved_tokens(), i.spec.id)).map(|i| (from, i.spec.id))
    }
}
