//! Shedding: waiting requests that bar one with a better claim, and have cost no work yet, are displaced. Promises to
//! lower bands do not bar a higher one, a tenant that floods does not bar the others, and a large request does not bar
//! smaller ones of its own band.

use alloc::vec::Vec;
use core::cmp::Reverse;

use baton_types::{InstanceId, RequestId};

use crate::conductor::Conductor;
use crate::estimate::DecodeSlot;
use crate::placement::{DecodeChoice, Placement, Refusal};
use crate::queue::{Claim, WaitingPrefill};
use crate::request::{Entry, Stage};
use crate::{AdmissionMode, Effect, Input, RejectReason, Request};

/// Most instances that are tried, those that lose the least work first.
const INSTANCES: usize = 2;
/// Requests that one arrival may displace.
const DISPLACED: usize = 16;

/// The reservations of a displaced request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    instance: InstanceId,
    waiting: WaitingPrefill,
    decode: Option<(InstanceId, DecodeSlot)>,
}

impl Conductor {
    /// A placement that keeps every promise once waiting requests of lesser claim have left one instance, and these
    /// requests, which hold nothing then. `None`, with nothing changed, when even that does not help.
    pub(crate) fn place_by_displacing(
        &mut self,
        request: &Request,
        deadline_us: u64,
    ) -> Option<(Placement, Vec<RequestId>)> {
        // Without a place the request is explained by what was decided before, not by what is tried here.
        let decision = self.stats.last_decision.take();
        // Larger ones of its own band leave only where no lesser claim does.
        let ids = self.candidate_ids(request, None);
        for larger_too in [false, true] {
            for (instance, leave) in self.least_in_the_way(&ids, (request, deadline_us), larger_too) {
                let waiting =
                    |id: &RequestId| *self.fleet.known(instance).prefill.of(*id).expect("it waits there");
                let leave: Vec<WaitingPrefill> = leave.iter().map(waiting).collect();
                let places: Vec<Place> = leave.iter().map(|w| self.take_off(instance, *w)).collect();
                self.kept.made_way = Some((instance, leave));
                let placed = self.place_for(request, deadline_us, true);
                if let (Some((_, mut displaced)), Ok(placement)) = (self.kept.made_way.take(), placed) {
                    // They are placed again in order of arrival.
                    displaced.sort_unstable_by_key(|w| (w.arrived_us, w.request));
                    return Some((placement, displaced.iter().map(|w| w.request).collect()));
                }
                places.into_iter().for_each(|place| self.put_back(place));
            }
        }
        self.stats.last_decision = decision;
        None
    }

    /// Instances that would take the request if some of lesser claim left, with those, the least work first.
    fn least_in_the_way(
        &self,
        ids: &[InstanceId],
        (request, deadline_us): (&Request, u64),
        larger_too: bool,
    ) -> Vec<(InstanceId, Vec<RequestId>)> {
        let mut waiting = ids.iter().flat_map(|id| self.waiting_on(*id));
        // Whatever its work is on an instance: some of those that wait are larger than nothing.
        if !waiting.any(|w| self.claim(w, request, larger_too.then_some(0)).is_some()) {
            return Vec::new();
        }
        let mut found = Vec::new();
        for &id in ids {
            let Some(leave) = self.in_the_way_on(id, request, deadline_us, larger_too) else { continue };
            let work_us: u64 = leave.iter().filter_map(|id| self.requests.get(*id)).map(|e| e.work_us).sum();
            found.push((work_us, id, leave));
        }
        found.sort_unstable();
        found.truncate(INSTANCES);
        found.into_iter().map(|(_, id, leave)| (id, leave)).collect()
    }

    /// The requests that have to leave one instance for the request, if that is enough, and fair.
    fn in_the_way_on(
        &self,
        id: InstanceId,
        request: &Request,
        deadline_us: u64,
        larger_too: bool,
    ) -> Option<Vec<RequestId>> {
        let instance = self.fleet.known(id);
        let candidate = self.candidate(instance, request, deadline_us);
        if candidate.plan.breaks_decodes {
            return None;
        }
        let than_us = larger_too.then_some(candidate.plan.alone_us);
        // Others count on the blocks of those that they follow.
        let mut followed: Vec<RequestId> = self.waiting_on(id).iter().filter_map(|w| w.after).collect();
        followed.sort_unstable();
        let claim = |w: &WaitingPrefill| {
            let free = followed.binary_search(&w.request).is_err();
            free.then(|| self.claim(w, request, than_us)).flatten()
        };
        // The larger do not leave for a newcomer because places are kept.
        let kept = if larger_too { &[] } else { self.kept.prefills(id) };
        let mut leave = instance.prefill.in_the_way(self.now_us, candidate.new, kept, claim)?;
        if leave.is_empty() {
            // Room to decode is missing.
            leave = self.least_claims(id, claim);
        }
        let own = self.class(request);
        let equal = |id: &&RequestId| {
            self.requests.get(**id).is_some_and(|e| self.class(&e.request).priority == own.priority)
        };
        // Shares are settled one for one: many small requests do not make way for a large one.
        let fair = !own.sheddable || leave.iter().filter(equal).count() <= 1;
        (fair && (1..=DISPLACED).contains(&leave.len())).then_some(leave)
    }

    fn waiting_on(&self, instance: InstanceId) -> &[WaitingPrefill] {
        self.fleet.get(instance).map_or(&[][..], |i| i.prefill.waiting())
    }

    /// The claim of what waits if it has to make way for the request: it is of a lower band, or of the same and of a
    /// tenant that has had more of its share. Of the same band it may also be larger than `than_us`, where its tenant
    /// has had no less than the request's, and its client did not come back for this place.
    fn claim(&self, waiting: &WaitingPrefill, request: &Request, than_us: Option<u64>) -> Option<Claim> {
        let own = self.class(request);
        let (same, tag_us) = (waiting.tenant == request.tenant, self.fair.tag_us(request.tenant));
        let ahead = || !same && waiting.tag_us > tag_us + self.fair_lead_us(request);
        let equal = waiting.priority == own.priority;
        let lesser = waiting.priority < own.priority || (equal && (!own.sheddable || ahead()));
        let larger =
            || equal && than_us.is_some_and(|us| waiting.alone_us > us) && (same || waiting.tag_us >= tag_us);
        if !lesser && !larger() {
            return None;
        }
        let entry = self.requests.get(waiting.request)?;
        // Where the larger leave as well, size alone decides in a band.
        let over_us = if equal && than_us.is_none() { waiting.tag_us } else { 0 };
        let claim = (waiting.priority, Reverse(over_us));
        (self.may_be_displaced(entry) && (lesser || !entry.returned)).then_some(claim)
    }

    /// A request that lost its instance was promised more, and its client may have half of the answer.
    fn may_be_displaced(&self, entry: &Entry) -> bool {
        let untouched = !entry.is_placed_again() && entry.request.emitted_tokens == 0;
        untouched && self.class(&entry.request).sheddable
    }

    /// The waiting requests of an instance with the least claim, the newest first.
    fn least_claims(
        &self,
        instance: InstanceId,
        claim: impl Fn(&WaitingPrefill) -> Option<Claim>,
    ) -> Vec<RequestId> {
        let all = self.waiting_on(instance).iter();
        let mut all: Vec<_> = all.filter_map(|w| claim(w).map(|claim| (claim, w))).collect();
        all.sort_unstable_by_key(|(claim, w)| (*claim, Reverse((w.arrived_us, w.request))));
        all.truncate(DISPLACED);
        all.into_iter().map(|(_, w)| w.request).collect()
    }

    /// Takes a waiting request off both legs' ledgers.
    pub(crate) fn take_off(&mut self, instance: InstanceId, waiting: WaitingPrefill) -> Place {
        let id = waiting.request;
        let entry = self.requests.get(id).expect("a request that waits is live");
        assert!(entry.stage == Stage::Waiting && entry.prefill == instance, "request {id} waits elsewhere");
        let (decode, own) = (entry.decode, entry.peer.is_none());
        self.leave_queue(id, instance, own);
        let slot = decode.map(|decode| {
            let mut instance = self.fleet.known_mut(decode);
            let slot = instance.decode.slots().iter().find(|s| s.request == id).copied();
            assert!(
                instance.decode.release(id),
                "request {id} gives room back on {decode} that it did not have (I5)"
            );
            (decode, slot.expect("it was given back"))
        });
        Place { instance, waiting, decode: slot }
    }

    /// A waiting request leaves a queue, and the list of those that others may follow if it is this router's `own`.
    pub(crate) fn leave_queue(&mut self, id: RequestId, instance: InstanceId, own: bool) {
        let waited = self.fleet.known_mut(instance).prefill.remove_waiting(id);
        let listed = self.queued.over(id) == own;
        assert!(waited && listed, "request {id} leaves a queue that it was not in (I5)");
    }

    pub(crate) fn put_back(&mut self, place: Place) {
        let id = place.waiting.request;
        let chain = self.requests.chain_of(id).to_vec();
        self.fleet.known_mut(place.instance).prefill.enqueue(place.waiting);
        if place.waiting.peer.is_none() {
            self.list_waiting(id, place.instance, &chain);
        }
        if let Some((decode, slot)) = place.decode {
            self.keep(decode, slot, &chain);
        }
    }

    /// Displaced requests are placed where every promise is still kept. Where there is no such place they are refused
    /// after all.
    pub(crate) fn place_displaced(&mut self, displaced: &[RequestId], effects: &mut Vec<Effect>) {
        let mut displaced = displaced.to_vec();
        let mut at = 0;
        while let Some(id) = displaced.get(at).copied() {
            at += 1;
            let mut entry = self.requests.remove(id).expect("a request that is displaced is live");
            assert!(entry.stage == Stage::Waiting, "request {id} is displaced, though it was sent");
            if entry.peer.is_some() {
                // Its own router places it again, and says so.
                self.share(Input::PeerDisplaced { request: id }, effects);
                continue;
            }
            entry.stage = Stage::Unplaced;
            entry.decode = None;
            entry.fetch = None;
            self.see_tickets(&entry.request);
            self.expect_higher(&entry.request);
            let mut verdict = self.place_for(&entry.request, entry.deadline_us, true);
            if verdict.is_err()
                && displaced.len() < DISPLACED
                && let Some((placement, from)) = self.place_by_displacing(&entry.request, entry.deadline_us)
            {
                verdict = Ok(placement);
                displaced.extend(from);
            }
            self.kept.clear();
            self.explain(effects);
            match verdict {
                Ok(placement) => self.commit(entry, &placement, effects),
                Err(refusal) => self.refuse_displaced(&entry, refusal, effects),
            }
        }
    }

    /// Refuses a request that had been admitted, and holds nothing any more.
    pub(crate) fn refuse_displaced(&mut self, entry: &Entry, refusal: Refusal, effects: &mut Vec<Effect>) {
        let refusal = Refusal { reason: RejectReason::Costly, ..refusal };
        let refusal = self.with_ticket(&entry.request, 0, refusal, effects);
        let weight = self.class(&entry.request).weight;
        self.fair.take_back(entry.request.tenant, weight, entry.work_us);
        self.share(Input::RequestCancelled { request: entry.request.id }, effects);
        self.reject(entry, refusal, effects);
    }

    /// The refusal of a request whose turn has come, if its decode fits nowhere any more. It was admitted for a moment to
    /// come, and requests that came later, or last longer than predicted, are there before it. Nothing overtakes a decode
    /// that has begun, so the promise gives way here, before its work begins. `since_us` is when it was placed.
    pub(crate) fn refusal_at_turn(&mut self, entry: &Entry, since_us: u64, at_us: u64) -> Option<Refusal> {
        let refuses = self.config.effective_admission() == AdmissionMode::Slo;
        if !refuses || !self.may_be_displaced(entry) {
            return None;
        }
        self.expect_higher(&entry.request);
        let refusal = self.misfit_at_turn(entry, since_us, at_us).map(|reason| {
            let instance = self.fleet.known(entry.prefill);
            let candidate = self.candidate(instance, &entry.request, entry.deadline_us);
            self.no_decode(&entry.request, candidate, reason)
        });
        self.kept.clear();
        refusal
    }

    /// Why the decode of a request whose turn has come must not be: it would take a place that higher bands are expected
    /// to need, find no room in time, or make the steps of all that decode beside it too long.
    fn misfit_at_turn(&self, entry: &Entry, since_us: u64, at_us: u64) -> Option<RejectReason> {
        if self.kept.expected.is_none() {
            // What was placed at this moment was judged at this moment.
            if since_us >= self.now_us {
                return None;
            }
            // A ticket keeps a place, and none is left: it would wait in vain, and be late.
            if !self.finds_room_in_time(entry, at_us) {
                return Some(RejectReason::Room);
            }
            if !self.spends_step_margins(entry, at_us) {
                return None;
            }
        }
        match self.choose_decode(&entry.request, entry.planned_end(at_us)) {
            DecodeChoice::Never(RejectReason::Room) if self.kept.expected.is_some() => {
                Some(RejectReason::Room)
            }
            DecodeChoice::Never(RejectReason::Tbt | RejectReason::Room) => Some(RejectReason::Tbt),
            _ => None,
        }
    }

    /// Whether some decode instance is predicted to have room for the request when its prefill ends, or by the time of its
    /// objective: later it would wait there in vain. The rule is that of its admission, but for what tickets keep: its own
    /// is used. A decode that is overdue may end at any moment.
    fn finds_room_in_time(&self, entry: &Entry, at_us: u64) -> bool {
        let due_us = entry.arrived_us.saturating_add(self.ttft_objective_us(&entry.request));
        let able = self.roomiest_decodes(&entry.request, entry.prefill);
        let roomy = |id: &InstanceId| {
            let instance = self.fleet.known(*id);
            instance.decode.turn(&instance.spec, self.now_us, (at_us, 0, 0)).at_us
                <= at_us.max(due_us.min(entry.promised_us))
                && [at_us, due_us].into_iter().any(|by_us| self.takes_room_from(instance, entry, (0, by_us)))
        };
        able.is_empty() || due_us <= at_us || able.iter().any(roomy)
    }

    /// Whether on every decode instance the steps with this request would use up more than half of their margin. Who came
    /// back for its place may use up all of it.
    #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
    fn spends_step_margins(&self, entry: &Entry, at_us: u64) -> bool {
        let need = self.decode_need(&entry.request, at_us);
        let able = self.roomiest_decodes(&entry.request, entry.prefill).into_iter();
        able.filter_map(|id| self.fleet.get(id)).all(|instance| {
            let (tbt_us, promised_us) = (need.tbt_us as f64, self.promised_step_us(instance, &need));
            let most_us = if entry.returned { tbt_us } else { f64::midpoint(tbt_us, promised_us) };
            self.predicted_step_us(instance, &need) > most_us
        })
    }
}
