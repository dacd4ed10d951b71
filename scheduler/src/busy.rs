//! Engines that take nothing new for a while: their servers answered 429 or 503, and when to ask again.
//!
//! The wait counts as work that the engine has before it. So placement, admission and Retry-After see it as they see a
//! queue, and nothing is sent there before it is over.

use alloc::vec::Vec;
use baton_types::{InstanceId, RequestId};

use crate::conductor::Conductor;
use crate::request::{Entry, Stage};
use crate::{Effect, FailStage};

/// The longest time that an engine is believed to take nothing new, µs.
const MOST_BUSY_US: u64 = 60_000_000;

impl Conductor {
    /// An engine refused a leg for now: the request is placed again where it is predicted best, which may be there once
    /// the engine takes requests again. It keeps its retries, since nothing failed.
    pub(crate) fn leg_refused(
        &mut self,
        (id, at): (RequestId, InstanceId),
        (emitted_tokens, busy_us): (u32, u64),
        effects: &mut Vec<Effect>,
    ) {
        let has_leg = |e: &&Entry| match e.stage {
            Stage::Unplaced | Stage::Waiting => false,
            Stage::Prefilling | Stage::HandingOff => e.prefill == at || e.decode == Some(at),
            Stage::Decoding => e.decode == Some(at),
        };
        if self.requests.get(id).filter(has_leg).is_none() {
            self.stats.stale_inputs += 1;
            return;
        }
        let mut entry = self.requests.remove(id).expect("looked up above");
        self.release_legs(&entry, effects);
        let waiting = self.set_busy(at, busy_us);
        // Another router's request is placed again by its own router, which says so.
        if entry.peer.is_none() {
            entry.told_tokens = entry.told_tokens.max(emitted_tokens);
            if self.config.policy.orders_queues() {
                entry.request.let_in = true;
            } else {
                // This policy holds no requests: where all engines are busy it would send this one without end.
                entry.excluded = Some(at);
                entry.retries += 1;
            }
            let decoding = entry.stage == Stage::Decoding;
            let stage = if decoding { FailStage::DecodeFailed } else { FailStage::PrefillFailed };
            self.retry(entry, stage, effects);
        }
        for request in waiting {
            let entry = self.requests.remove(request).expect("one retry ends no other request");
            self.release_legs(&entry, effects);
            self.retry(entry, FailStage::NoPlacement, effects);
        }
    }

    /// An engine takes nothing new for so long. Returns what waits for it, and may now be served sooner elsewhere.
    fn set_busy(&mut self, at: InstanceId, busy_us: u64) -> Vec<RequestId> {
        let until_us = self.now_us + busy_us.min(MOST_BUSY_US);
        let mut instance = self.fleet.known_mut(at);
        let known = instance.prefill.busy_until_us(self.now_us).is_some();
        instance.prefill.set_busy(until_us);
        self.timers.set(at, until_us);
        let own = instance.prefill.waiting().iter().filter(|w| w.peer.is_none() && !known);
        own.map(|w| w.request).collect()
    }

    /// An engine that was busy takes requests again: wakes those that wait for it.
    pub(crate) fn note_back(&mut self, id: InstanceId, effects: &mut Vec<Effect>) {
        let now_us = self.now_us;
        if self.fleet.get(id).is_some_and(|i| i.prefill.is_back(now_us)) {
            self.fleet.known_mut(id).prefill.end_busy();
            self.wake_waiting();
            self.retry_held(effects);
        }
    }

    /// Whether an instance's engine takes nothing new now.
    pub(crate) fn refuses(&self, id: InstanceId) -> bool {
        self.fleet.get(id).is_some_and(|i| i.prefill.busy_until_us(self.now_us).is_some())
    }

    /// The turn of a waiting request has come, and the engine that is to decode it takes nothing new until then: others
    /// may go before it.
    pub(crate) fn wait_for_decode(
        &mut self,
        at: usize,
        (mut entry, decode): (Entry, InstanceId),
        until_us: u64,
        effects: &mut Vec<Effect>,
    ) {
        let (id, prefill) = (entry.request.id, entry.prefill);
        let decodes_at_us = entry.decode_at_us.max(until_us);
        self.reserve_decode(&mut entry, decode, decodes_at_us);
        self.fleet.known_mut(decode).decode.hold(id, true);
        self.fleet.known_mut(prefill).prefill.hold(at, until_us);
        self.share_waiting(&entry, effects);
        self.list_waiting(id, prefill, &entry.request.chain);
        self.requests.insert(entry);
    }
}
