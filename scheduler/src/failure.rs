//! Failures after admission: the request is placed again up to a limit, then fails with the stage's name.

use alloc::vec::Vec;
use baton_types::{Epoch, InstanceId, RequestId};

use crate::conductor::Conductor;
use crate::placement::Placement;
use crate::request::{Entry, Stage};
use crate::{Effect, FailStage, Input, InstanceState, PeerStage};

impl Conductor {
    pub(crate) fn handoff_failed(&mut self, id: RequestId, effects: &mut Vec<Effect>) {
        let Some(entry) =
            self.requests.get(id).filter(|e| matches!(e.stage, Stage::HandingOff | Stage::Prefilling))
        else {
            self.stats.stale_inputs += 1;
            return;
        };
        let (stage, foreign) = (entry.stage, entry.peer.is_some());
        let mut entry = self.requests.remove(id).expect("looked up above");
        if foreign {
            // Its own router places it again, and says so.
            self.release_legs(&entry, effects);
            return;
        }
        entry.excluded = entry.decode;
        if stage == Stage::Prefilling {
            // The decode side failed while layers were still being computed: start over.
            self.release_legs(&entry, effects);
            entry.retries += 1;
            self.retry(entry, FailStage::HandoffFailed, effects);
            return;
        }
        let from = entry.prefill;
        let old = entry.decode.take().expect("a request that is handed over has a decode instance (I8)");
        self.end_handoff(id, from, old, false);
        self.release_decode(id, old);
        effects.push(Effect::Release { request: id, instance: old });
        entry.retries += 1;
        let wanted =
            self.decode_for(&entry, self.now_us).filter(|_| entry.retries <= self.config.max_retries);
        // A holder that has become a decode instance reserves no room for the decode of this request.
        let target = wanted.and_then(|to| {
            if to == from { self.roomiest_decode(&entry.request, from, Some(from)) } else { Some(to) }
        });
        let Some(to) = target else {
            effects.push(Effect::Release { request: id, instance: from });
            self.fail(&entry, FailStage::HandoffFailed, effects);
            return;
        };
        assert!(to != from, "request {id} would be handed over to where it is");
        let now_us = self.now_us;
        self.reserve_decode(&mut entry, to, now_us);
        self.begin_handoff(&entry, entry.request.prompt_tokens, true);
        effects.push(Effect::Handoff { request: id, from, to, room_tokens: entry.room_tokens });
        self.share_placement(&entry, PeerStage::Prefilled, effects);
        self.requests.insert(entry);
    }

    /// A prefill failed on a living instance: the request starts over elsewhere.
    pub(crate) fn prefill_failed(&mut self, id: RequestId, effects: &mut Vec<Effect>) {
        let open = |e: &&Entry| matches!(e.stage, Stage::Prefilling | Stage::HandingOff);
        let Some(at) = self.requests.get(id).filter(open).map(|e| e.prefill) else {
            self.stats.stale_inputs += 1;
            return;
        };
        self.start_over(id, at, FailStage::PrefillFailed, effects);
    }

    /// A decode failed on a living instance: the request continues elsewhere.
    pub(crate) fn decode_failed(&mut self, id: RequestId, emitted_tokens: u32, effects: &mut Vec<Effect>) {
        let decoding = self.requests.get(id).filter(|e| e.stage == Stage::Decoding);
        let Some(at) = decoding.and_then(|e| e.decode) else {
            self.stats.stale_inputs += 1;
            return;
        };
        self.tokens_emitted(id, emitted_tokens);
        self.start_over(id, at, FailStage::DecodeFailed, effects);
    }

    /// Releases everything and places the request again, away from `at` if there is a choice.
    fn start_over(&mut self, id: RequestId, at: InstanceId, stage: FailStage, effects: &mut Vec<Effect>) {
        let mut entry = self.requests.remove(id).expect("looked up by the caller");
        self.release_legs(&entry, effects);
        if entry.peer.is_some() {
            // Its own router places it again, and says so.
            return;
        }
        entry.excluded = Some(at);
        entry.retries += 1;
        self.retry(entry, stage, effects);
    }

    pub(crate) fn instance_lost(&mut self, id: InstanceId, epoch: Epoch, effects: &mut Vec<Effect>) {
        if !self.is_current(id, epoch) {
            self.stats.stale_inputs += 1;
            return;
        }
        self.fleet.set_state(id, InstanceState::Lost);
        self.index.clear(id);
        self.last_copies.cleared(id);
        self.timers.unset(id);
        self.end_fetches_from(id);
        // Slot order is the same on every run.
        let touched: Vec<RequestId> = self
            .requests
            .iter()
            .filter(|e| e.stage != Stage::Unplaced)
            .filter(|e| match e.stage {
                Stage::Decoding => e.decode == Some(id),
                _ => e.prefill == id || e.decode == Some(id),
            })
            .map(|e| e.request.id)
            .collect();
        for request in touched {
            let mut entry = self.requests.remove(request).expect("one retry ends no other request");
            self.release_legs(&entry, effects);
            if entry.peer.is_some() {
                continue;
            }
            // A retry is not counted for a request that had not been sent.
            entry.retries += u32::from(entry.stage != Stage::Waiting);
            // Where both legs are on one instance, the leg that was active names the loss.
            let decode = entry.decode == Some(id) && (entry.prefill != id || entry.stage == Stage::Decoding);
            let stage = if decode { FailStage::DecodeLost } else { FailStage::PrefillLost };
            self.retry(entry, stage, effects);
        }
        let lost = self.fleet.known_mut(id);
        assert!(
            lost.owes_nothing() && lost.prefill.outbound.flights() == 0,
            "lost instance {id} has work still (I13)"
        );
    }

    /// A lost instance delivers nothing. The driver's later reports about its fetches are stale.
    fn end_fetches_from(&mut self, lost: InstanceId) {
        let reads = |e: &&Entry| e.stage == Stage::Prefilling && e.fetch.is_some_and(|f| f.from == lost);
        let readers: Vec<RequestId> = self.requests.iter().filter(reads).map(|e| e.request.id).collect();
        for request in readers {
            self.fetch_finished(request, false);
        }
    }

    /// Places an entry that holds nothing again, or fails it with `stage` once its retries are used up.
    pub(crate) fn retry(&mut self, mut entry: Entry, stage: FailStage, effects: &mut Vec<Effect>) {
        assert!(entry.peer.is_none(), "request {} is another router's to place again", entry.request.id);
        if entry.told_tokens > entry.request.emitted_tokens {
            entry.request.has_emitted(entry.told_tokens, self.config.block_tokens);
        }
        if entry.retries > self.config.max_retries {
            self.fail(&entry, stage, effects);
            return;
        }
        if self.too_long(&entry.request) {
            self.fail(&entry, FailStage::NoPlacement, effects);
            return;
        }
        // It was let in: it is not refused because the failure made it late.
        match self.place(&entry.request, entry.deadline_us, false, entry.excluded) {
            Ok(placement) => self.replace(entry, &placement, effects),
            Err(_) => {
                self.explain(effects);
                self.fail(&entry, FailStage::NoPlacement, effects);
            }
        }
    }

    /// Continues with the new placement.
    pub(crate) fn replace(&mut self, mut entry: Entry, placement: &Placement, effects: &mut Vec<Effect>) {
        assert!(entry.peer.is_none(), "request {} is another router's to place again", entry.request.id);
        entry.stage = Stage::Unplaced;
        entry.decode = None;
        entry.fetch = None;
        self.explain(effects);
        self.stats.retried += 1;
        self.commit(entry, placement, effects);
    }

    fn fail(&mut self, entry: &Entry, stage: FailStage, effects: &mut Vec<Effect>) {
        assert!(!self.requests.contains(entry.request.id), "request {} fails and lives", entry.request.id);
        self.stats.failed += 1;
        self.share(Input::RequestCancelled { request: entry.request.id }, effects);
        effects.push(Effect::Fail { request: entry.request.id, stage });
    }
}
