//! Shedding: a request of a class that is not sheddable takes the place of sheddable ones
//! that were let in but have cost nobody anything yet.

use alloc::vec::Vec;
use baton_types::{InstanceId, RequestId};

use crate::conductor::Conductor;
use crate::estimate::DecodeSlot;
use crate::placement::{Placement, Refusal};
use crate::queue::WaitingPrefill;
use crate::request::Stage;
use crate::{Effect, RejectReason, Request};

/// Instances on which room is looked for, those with most waiting work first.
const INSTANCES: usize = 2;
/// Requests that one arrival may displace.
const DISPLACED: usize = 16;

/// What a displaced request held.
#[derive(Clone, Copy, Debug)]
struct Place {
    instance: InstanceId,
    waiting: WaitingPrefill,
    decode: Option<(InstanceId, DecodeSlot)>,
}

impl Conductor {
    /// A placement that keeps every promise once sheddable requests waiting on one instance have
    /// left it, and who they are; those then hold nothing. `None`, and nothing changed, when even
    /// that does not help.
    pub(crate) fn place_by_displacing(
        &mut self,
        request: &Request,
        deadline_us: u64,
    ) -> Option<(Placement, Vec<RequestId>)> {
        let own = self.class(request).priority;
        for instance in self.most_sheddable(own) {
            let places: Vec<Place> = self
                .sheddable_on(instance, own)
                .into_iter()
                .map(|waiting| self.take_off(instance, waiting))
                .collect();
            if let Ok(placement) = self.place_for(request, deadline_us, true) {
                let mut displaced: Vec<&WaitingPrefill> = places.iter().map(|p| &p.waiting).collect();
                // First come, first looked after.
                displaced.sort_unstable_by_key(|w| (w.arrived_us, w.request));
                return Some((placement, displaced.iter().map(|w| w.request).collect()));
            }
            places.into_iter().for_each(|place| self.put_back(place));
        }
        None
    }

    /// Instances with something to displace, those with most waiting work first.
    fn most_sheddable(&self, priority: i32) -> Vec<InstanceId> {
        let queues = self.fleet.iter().filter(|i| i.serves() && !i.prefill.waiting().is_empty());
        let mut work: Vec<(u64, InstanceId)> = queues.map(|i| (i.prefill.waiting_us(), i.spec.id)).collect();
        work.sort_unstable_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
        let mut ids: Vec<InstanceId> = work.into_iter().map(|(_, id)| id).collect();
        ids.retain(|id| self.waiting_on(*id).iter().any(|w| self.may_go(w, priority)));
        ids.truncate(INSTANCES);
        ids
    }

    fn waiting_on(&self, instance: InstanceId) -> &[WaitingPrefill] {
        self.fleet.get(instance).map_or(&[][..], |i| i.prefill.waiting())
    }

    /// Whether a waiting request may be displaced by one of that band: it is of no higher one, and
    /// was never placed twice.
    fn may_go(&self, waiting: &WaitingPrefill, priority: i32) -> bool {
        waiting.priority <= priority
            && self.requests.get(waiting.request).is_some_and(|e| {
                // A request that lost its instance was promised more, and its client may have half of the answer.
                let untouched = e.retries == 0 && e.request.emitted_tokens == 0 && !e.gave_way;
                self.class(&e.request).sheddable && untouched
            })
    }

    /// What is displaced on an instance: the lowest band and the newest first, so that those who
    /// have waited longest stay.
    fn sheddable_on(&self, instance: InstanceId, priority: i32) -> Vec<WaitingPrefill> {
        let all = self.waiting_on(instance).iter().filter(|w| self.may_go(w, priority));
        let mut all: Vec<WaitingPrefill> = all.copied().collect();
        all.sort_unstable_by(|a, b| {
            a.priority.cmp(&b.priority).then((b.arrived_us, b.request).cmp(&(a.arrived_us, a.request)))
        });
        all.truncate(DISPLACED);
        all
    }

    /// Takes a waiting request off both legs' ledgers.
    fn take_off(&mut self, instance: InstanceId, waiting: WaitingPrefill) -> Place {
        let id = waiting.request;
        let entry = self.requests.get(id).expect("a request that waits is live");
        assert!(entry.stage == Stage::Waiting && entry.prefill == instance, "request {id} waits elsewhere");
        let decode = entry.decode;
        let waited = self.fleet.known_mut(instance).prefill.remove_waiting(id);
        assert!(waited, "request {id} leaves a queue that it was not in (I5)");
        let slot = decode.map(|decode| {
            let ledger = &mut self.fleet.known_mut(decode).decode;
            let slot = ledger.slots().iter().find(|s| s.request == id).copied();
            assert!(ledger.release(id), "request {id} gives room back on {decode} that it did not have (I5)");
            (decode, slot.expect("it was given back"))
        });
        Place { instance, waiting, decode: slot }
    }

    fn put_back(&mut self, place: Place) {
        self.fleet.known_mut(place.instance).prefill.enqueue(place.waiting);
        if let Some((decode, slot)) = place.decode {
            let chain = self.requests.chain_of(slot.request).to_vec();
            self.keep(decode, slot, &chain);
        }
    }

    /// Displaced requests go where every promise is still kept; where there is no such place they
    /// are refused after all.
    pub(crate) fn place_displaced(&mut self, displaced: &[RequestId], effects: &mut Vec<Effect>) {
        for id in displaced {
            let mut entry = self.requests.remove(*id).expect("a request that is displaced is live");
            assert!(entry.stage == Stage::Waiting, "request {id} is displaced, though it was sent");
            entry.stage = Stage::Unplaced;
            entry.decode = None;
            entry.fetch = None;
            let verdict = self.place_for(&entry.request, entry.deadline_us, true);
            self.explain(effects);
            match verdict {
                Ok(placement) => self.commit(entry, &placement, effects),
                Err(refusal) => {
                    let refusal = Refusal { reason: RejectReason::Costly, ..refusal };
                    self.reject(&entry, refusal, effects);
                }
            }
        }
    }
}
