//! Sends placed work to engines: at once for policies that leave the order to the engine, just in time for policies
//! that order the queues themselves.

use alloc::vec::Vec;
use baton_types::{BlockHash, InstanceId, RequestId, Role};

use super::{Candidate, DecodeChoice, Placement, Plan, PlannedEnd, within_reach};
use crate::conductor::Conductor;
use crate::estimate::{StepOutlook, WaitOutlook};
use crate::fleet::Instance;
use crate::policies::QueueLocation;
use crate::queue::{DispatchedPrefill, WaitingPrefill};
use crate::request::{Entry, Stage};
use crate::{Effect, FailStage, PeerStage, Prediction, RejectReason, Request};

/// How long a router has to send what is next, from when the others know of it, µs: several times what news take from
/// router to router, and a fraction of what is sent ahead.
pub(crate) const TURN_US: u64 = 50_000;

impl Conductor {
    /// Puts an admitted request on its instance's queue, or sends it to the engine at once.
    pub(crate) fn commit(&mut self, mut entry: Entry, placement: &Placement, effects: &mut Vec<Effect>) {
        let plan = &placement.candidate.plan;
        let id = placement.candidate.instance;
        assert!(
            entry.stage == Stage::Unplaced && entry.decode.is_none(),
            "request {} is placed while it holds something elsewhere",
            entry.request.id
        );
        assert!(
            plan.cached_tokens + plan.new_tokens == entry.request.prompt_tokens,
            "the plan for request {} is another prompt's",
            entry.request.id
        );
        debug_assert!(
            self.fleet.share(id, placement.decode),
            "{} cannot take the KV of {id}: it is of another kind",
            placement.decode
        );
        entry.prefill = id;
        entry.take_plan(plan);
        entry.promised_us = placement.candidate.deadline_us;
        if self.config.policy.orders_queues() {
            entry.stage = Stage::Waiting;
            // The decode is planned here and settled when the prefill is sent, so that later requests see this one.
            let at_us = self.now_us + placement.candidate.latest_us;
            let held_until_us = self.held_until_us(&entry, placement, at_us);
            let step_us = self.reserve_decode(&mut entry, placement.decode, at_us);
            self.predict(&mut entry, &placement.candidate, step_us);
            let tag_us = self.tag_us(&entry);
            entry.tag_us = Some(tag_us);
            let (after, order_us) = (plan.after, placement.candidate.new.order_us);
            let waiting =
                WaitingPrefill { held_until_us, tag_us, after, order_us, ..self.waiting_of(&entry) };
            self.fleet.known_mut(placement.decode).decode.hold(entry.request.id, held_until_us > 0);
            self.fleet.known_mut(id).prefill.enqueue(waiting);
            self.list_waiting(entry.request.id, id, &entry.request.chain);
            self.timers.set(id, self.now_us);
            self.share_waiting(&entry, effects);
            self.requests.insert(entry);
        } else {
            entry.stage = Stage::Prefilling;
            let at_us = self.now_us + placement.candidate.ttft_us;
            let elsewhere = entry.excluded == Some(placement.decode) && placement.decode != id;
            let other = elsewhere.then(|| self.decode_for(&entry, at_us)).flatten();
            let decode = other.unwrap_or(placement.decode);
            let step_us = self.reserve_decode(&mut entry, decode, at_us);
            self.predict(&mut entry, &placement.candidate, step_us);
            self.send(entry, decode, effects);
        }
    }

    /// Records what is predicted of a request that is placed for the first time and has its decode planned.
    fn predict(&self, entry: &mut Entry, candidate: &Candidate, step_us: f64) {
        let Some(latest_us) = within_reach(candidate.latest_us).filter(|_| entry.prediction.is_none()) else {
            return;
        };
        let waited_us = self.now_us - entry.arrived_us;
        let instance = self.fleet.known(candidate.instance);
        let alike = self.margins.samples(entry.request.class, instance.spec.role);
        let own_us = candidate.ttft_us - candidate.queue_us.min(candidate.ttft_us);
        let outlook = WaitOutlook {
            queue_us: candidate.queue_us,
            own_us,
            slack_us: entry.deadline_us.saturating_sub(self.now_us).saturating_sub(own_us),
            by_order_us: waited_us + candidate.ttft_us,
        };
        // Before anything was served, the latest by deadline is the most that can be said.
        let unknown = (outlook.by_order_us, waited_us + latest_us);
        let (ttft_us, ttft_most_us) = alike.first_tokens.predict(&outlook).unwrap_or(unknown);
        entry.outlook = Some(outlook);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "step times are positive and far below 2^53 µs"
        )]
        let step_us = step_us as u64;
        let step = StepOutlook { step_us };
        let unknown = (step_us, step_us.max(self.config.least_tbt_us(entry.request.class)));
        let (tbt_us, tbt_most_us) = alike.gaps.predict(&step).unwrap_or(unknown);
        entry.expected_step_us = step_us;
        let tail_us = self.handoff_tail_us(instance);
        let unknown = (ttft_us.saturating_sub(tail_us), ttft_most_us.saturating_sub(tail_us));
        let (decode_start_us, decode_start_most_us) =
            alike.decode_starts.predict(&outlook).unwrap_or(unknown);
        entry.prediction = Some(Prediction {
            path: instance.spec.role.into(),
            ttft_us,
            ttft_most_us,
            decode_start_us,
            decode_start_most_us,
            tbt_us,
            tbt_most_us,
            output_tokens: self.expected_tokens(&entry.request),
            output_tokens_most: entry.room_tokens,
        });
    }

    /// Where its tenant's share begins with a request that is let in: it keeps its tag when it is placed again.
    pub(crate) fn tag_us(&mut self, entry: &Entry) -> u64 {
        if let Some(tag_us) = entry.tag_us {
            return tag_us;
        }
        self.fair.move_on(self.now_us, || self.fleet.least_tag_us());
        let weight = self.class(&entry.request).weight;
        self.fair.admit(entry.request.tenant, weight, entry.work_us)
    }

    pub(crate) fn waiting_of(&self, entry: &Entry) -> WaitingPrefill {
        let class = self.class(&entry.request);
        let instance = self.fleet.known(entry.prefill);
        let deadline_us = entry.promised_us.saturating_sub(self.handoff_tail_us(instance));
        WaitingPrefill {
            request: entry.request.id,
            work_us: entry.work_us,
            alone_us: entry.alone_us,
            new_tokens: entry.new_tokens,
            arrived_us: entry.arrived_us,
            deadline_us,
            order_us: deadline_us,
            priority: class.priority,
            tenant: entry.request.tenant,
            weight: class.weight,
            held_until_us: 0,
            tag_us: 0,
            since_us: self.now_us,
            peer: entry.peer,
            after: None,
        }
    }

    /// Emits `StartPrefill` for an entry whose plan and decode room are settled.
    fn send(&mut self, mut entry: Entry, decode: InstanceId, effects: &mut Vec<Effect>) {
        assert!(
            entry.decode == Some(decode),
            "request {} is sent without room for its decode (I8)",
            entry.request.id
        );
        entry.stage = Stage::Prefilling;
        entry.gave_way = false;
        self.dispatch(&entry);
        let tokens = match self.router {
            // What the others count.
            Some(_) => entry.request.prompt_tokens,
            None => self.tokens_to_send(&entry.request, decode),
        };
        self.begin_handoff(&entry, tokens, false);
        self.begin_fetch(&entry, self.hits.of(entry.prefill).by_its_turn());
        self.note_use(&entry, decode);
        self.sequence += 1;
        effects.push(Effect::StartPrefill {
            request: entry.request.id,
            instance: entry.prefill,
            decode,
            fetch: entry.fetch,
            room_tokens: entry.room_tokens,
            order: self.sequence,
        });
        self.share_placement(&entry, PeerStage::Sent { order: self.sequence }, effects);
        self.requests.insert(entry);
    }

    /// Lists a request of this router that waits, for those that may follow it.
    pub(crate) fn list_waiting(&mut self, request: RequestId, on: InstanceId, chain: &[BlockHash]) {
        let requests = &self.requests;
        self.queued.begins(request, on, chain, |id| requests.chain_of(id));
    }

    /// Counts a sent prefill on its engine.
    pub(crate) fn dispatch(&mut self, entry: &Entry) {
        let (now_us, tail_us) = (self.now_us, self.handoff_tail_us(self.fleet.known(entry.prefill)));
        // This is the objective without the margin: a request that misses only the margin is not given up.
        let due_us = entry.arrived_us.saturating_add(self.ttft_objective_us(&entry.request));
        let work = DispatchedPrefill {
            request: entry.request.id,
            work_us: entry.work_us,
            new_tokens: entry.new_tokens,
            deadline_us: due_us.saturating_sub(tail_us),
            sent_us: now_us,
            beside_tokens: 0,
        };
        self.fleet.known_mut(entry.prefill).prefill.dispatch(work);
        let (requests, chain) = (&self.requests, &entry.request.chain);
        self.coming.begins(entry.request.id, entry.prefill, chain, |id| requests.chain_of(id));
    }

    /// Runs every queue whose wake-up time has come.
    pub(crate) fn run_queues(&mut self, effects: &mut Vec<Effect>) {
        while let Some(id) = self.timers.pop_due(self.now_us) {
            self.note_back(id, effects);
            if self.fleet.stores.binary_search(&id).is_ok() {
                self.save_from_any(effects);
            } else {
                self.run_queue(id, effects);
            }
        }
        if self.policy().queueing == QueueLocation::BeforePlacement {
            self.run_unplaced(effects);
        }
    }

    /// The waiting work that is served next, and when its turn ends, µs. Another router that does not send in its turn is
    /// passed over.
    fn whose_turn(&self, instance: &Instance, ahead_us: u64) -> (Option<usize>, u64) {
        let mut turn_us = instance.prefill.runs_low_at_us(ahead_us);
        let mut passed = Vec::new();
        loop {
            let may = |w: &WaitingPrefill| w.peer.is_none_or(|peer| !passed.contains(&peer));
            let next = instance.prefill.next(self.now_us, &self.fair, may);
            let Some(waiting) = next.map(|at| instance.prefill.waiting()[at]) else { return (next, turn_us) };
            let Some(peer) = waiting.peer else { return (next, turn_us) };
            turn_us = turn_us.max(waiting.since_us).max(waiting.held_until_us) + TURN_US;
            if self.now_us < turn_us {
                return (next, turn_us);
            }
            passed.push(peer);
        }
    }

    /// Sends waiting work of one instance until its engine has enough for a while.
    fn run_queue(&mut self, id: InstanceId, effects: &mut Vec<Effect>) {
        loop {
            let now_us = self.now_us;
            let Some(instance) = self.fleet.get(id) else { return };
            if let Some(until_us) = instance.prefill.busy_until_us(now_us) {
                self.timers.set(id, until_us);
                return;
            }
            let ahead_us = self.dispatch_ahead_us(instance);
            let left_us = instance.prefill.dispatched_left_us(now_us);
            let (next, turn_us) = self.whose_turn(instance, ahead_us);
            let Some(at) = next else {
                if let Some(wake_us) = instance.prefill.held_until_us(now_us) {
                    self.timers.set(id, wake_us);
                }
                return;
            };
            if left_us > ahead_us {
                let wake_us = instance.prefill.runs_low_at_us(ahead_us);
                // A link that is behind its rate is looked at again, at the latest when a flight ends.
                let again_us =
                    if wake_us > now_us { wake_us } else { now_us + (left_us - ahead_us).max(1_000) };
                self.timers.set(id, again_us);
                return;
            }
            let waiting = &instance.prefill.waiting()[at];
            let request = waiting.request;
            let entry = self.requests.get(request).expect("a request that waits is live");
            let work = (waiting.work_us, entry.new_tokens);
            let pass_tokens = instance.spec.pass_tokens.into();
            if let Some(wake_us) = instance.prefill.shares_late_until_us(now_us, work, pass_tokens) {
                self.timers.set(id, wake_us);
                return;
            }
            // Beside decodes there is little time: another router may have chosen it at the same moment.
            let settles_us = waiting.since_us + TURN_US;
            if self.router.is_some() && instance.spec.role == Role::Decode && now_us < settles_us {
                self.timers.set(id, settles_us);
                return;
            }
            if waiting.peer.is_some() {
                self.timers.set(id, turn_us);
                return;
            }
            if !self.send_waiting(id, at, request, effects) {
                return;
            }
        }
    }

    /// Sends one waiting request; false when no decode instance can take it.
    fn send_waiting(
        &mut self,
        id: InstanceId,
        at: usize,
        request: RequestId,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let mut entry = self.requests.remove(request).expect("a request that waits is live");
        assert!(entry.stage == Stage::Waiting && entry.prefill == id, "request {request} waits elsewhere");
        let planned = entry.decode.take();
        assert!(self.queued.over(request), "request {request} waits, and is not listed (I5)");
        // The plan of its own decode would count as a decode beside its prefill.
        self.forget_plan(request, planned);
        self.look_up(&entry.request);
        let others = self.fleet.known(id).prefill.joinable_tokens(self.now_us, Some(at));
        let plan = self.plan(self.fleet.known(id), &entry.request, others, None);
        if plan.breaks_decodes
            && let Some(placement) = self.placed_harmlessly(id, &entry)
        {
            let waiting = self.fleet.known_mut(id).prefill.take_waiting(at);
            assert!(waiting.request == request, "request {request} moves, and another leaves the queue");
            self.replace(entry, &placement, effects);
            return true;
        }
        if let Some(planned) = planned
            && plan.new_tokens > entry.new_tokens
        {
            self.wait_with_more_work(at, (entry, planned), &plan, effects);
            return true;
        }
        let instance = self.fleet.known(id);
        let at_us = self.now_us + plan.work_us + instance.prefill.dispatched_left_us(self.now_us);
        let local = instance.spec.role.decodes();
        let since_us = instance.prefill.waiting()[at].since_us;
        let decode = if local { Some(id) } else { self.decode_for(&entry, at_us) };
        // The planned instance may have changed to a role that does not decode.
        let decodes = |to: &InstanceId| self.fleet.get(*to).is_some_and(|i| i.spec.role.decodes());
        let decode = decode.or(planned.filter(|to| decodes(to) && self.fleet.share(id, *to)));
        if let Some(decode) = decode
            && let Some(until_us) = self.fleet.known(decode).prefill.busy_until_us(self.now_us)
        {
            self.wait_for_decode(at, (entry, decode), until_us, effects);
            return true;
        }
        if !local && let Some(refusal) = self.refusal_at_turn(&entry, since_us, at_us) {
            let waiting = self.fleet.known_mut(id).prefill.take_waiting(at);
            assert!(waiting.request == request, "request {request} is refused, and another leaves the queue");
            self.refuse_displaced(&entry, refusal, effects);
            return true;
        }
        let Some(decode) = decode else {
            entry.decode = None;
            return self.wait_or_leave(at, entry, effects);
        };
        entry.stage = Stage::Prefilling;
        let planned_us = entry.work_us;
        entry.take_plan(&plan);
        if !local {
            let takes_us = self.handoff_takes_us(self.fleet.known(id), &entry.request, decode);
            entry.work_us = entry.work_us.max(takes_us);
        }
        let mut instance = self.fleet.known_mut(id);
        let waiting = instance.prefill.take_served(at);
        drop(instance);
        assert!(waiting.request == request, "request {request} is sent, and another leaves the queue");
        self.fair.charge(waiting.tenant, waiting.weight, planned_us);
        self.reserve_decode(&mut entry, decode, at_us);
        self.send(entry, decode, effects);
        true
    }

    /// Some of what a request was to find in caches is gone: it takes its turn among the others with the work that it is now,
    /// which may be now.
    fn wait_with_more_work(
        &mut self,
        at: usize,
        (mut entry, decode): (Entry, InstanceId),
        plan: &Plan,
        effects: &mut Vec<Effect>,
    ) {
        assert!(plan.new_tokens > entry.new_tokens, "request {} waits for ever", entry.request.id);
        // The fetch is settled when it is sent.
        entry.take_work(plan);
        let decodes_at_us = entry.decode_at_us.max(self.now_us);
        self.reserve_decode(&mut entry, decode, decodes_at_us);
        let waits = self.fleet.known(entry.prefill).prefill.waiting()[at].request;
        assert!(waits == entry.request.id, "one request waits again, and another leaves the queue");
        self.fleet.known_mut(entry.prefill).prefill.grow(at, plan);
        self.share_waiting(&entry, effects);
        self.list_waiting(entry.request.id, entry.prefill, &entry.request.chain);
        self.requests.insert(entry);
    }

    /// No instance can decode what this instance prefills: places the request elsewhere if possible, else it waits.
    /// Returns whether it was moved.
    fn wait_or_leave(&mut self, at: usize, entry: Entry, effects: &mut Vec<Effect>) -> bool {
        // Any candidate is of another kind, since no instance of this kind can decode it.
        let goes = !self.candidate_ids(&entry.request, None).is_empty();
        if !goes {
            self.list_waiting(entry.request.id, entry.prefill, &entry.request.chain);
            self.requests.insert(entry);
            return false;
        }
        self.move_waiting(at, entry, effects);
        true
    }

    /// Whether a prefill instance takes the request; it has no decodes, except for those of its former role.
    fn prefills_elsewhere(&self, id: InstanceId, request: &Request) -> bool {
        let only_prefills = |other: InstanceId| {
            other != id && self.fleet.get(other).is_some_and(|i| i.spec.role == Role::Prefill)
        };
        self.candidate_ids(request, None).into_iter().any(only_prefills)
    }

    /// A new placement for a request whose prefill on `id` would break decodes: on a prefill instance, if placing the
    /// request again picks one. Another instance whose decodes it would break is not taken, because that one would move
    /// it on in turn, for ever.
    fn placed_harmlessly(&mut self, id: InstanceId, entry: &Entry) -> Option<Placement> {
        if !self.prefills_elsewhere(id, &entry.request) {
            return None;
        }
        let placed = self.place(&entry.request, entry.deadline_us, false, entry.excluded).ok()?;
        let candidate = &placed.candidate;
        if self.fleet.known(candidate.instance).spec.role == Role::Prefill && !candidate.plan.breaks_decodes {
            return Some(placed);
        }
        // The request stays, so there was no decision.
        self.stats.last_decision = None;
        None
    }

    /// Places a waiting request again if its instance cannot prefill it.
    fn move_waiting(&mut self, at: usize, entry: Entry, effects: &mut Vec<Effect>) {
        let waiting = self.fleet.known_mut(entry.prefill).prefill.take_waiting(at);
        assert!(waiting.request == entry.request.id, "one request moves, and another leaves the queue");
        self.retry(entry, FailStage::NoPlacement, effects);
    }

    fn forget_plan(&mut self, request: RequestId, planned: Option<InstanceId>) {
        let Some(planned) = planned else { return };
        let released = self.fleet.known_mut(planned).decode.release(request);
        assert!(released, "request {request} was not planned for {planned} (I8)");
    }

    /// The decode instance to hand the KV to. The one that the KV did not reach is avoided if there is another.
    pub(crate) fn decode_for(&self, entry: &Entry, at_us: u64) -> Option<InstanceId> {
        let best = self.decode_by_then(&entry.request, entry.planned_end(at_us));
        if best.is_none() || best != entry.excluded {
            return best;
        }
        self.roomiest_decode(&entry.request, entry.prefill, best).or(best)
    }

    /// The decode instance with the most room among those that take KV `from` this prefill instance, without `but`.
    pub(crate) fn roomiest_decode(
        &self,
        request: &Request,
        from: InstanceId,
        but: Option<InstanceId>,
    ) -> Option<InstanceId> {
        let able = self.roomiest_decodes(request, from).into_iter().filter(|id| Some(*id) != but);
        let serving = able.filter_map(|id| self.fleet.get(id));
        let burden = |i: &&Instance| (i.prefill.busy_until_us(self.now_us), i.taken_tokens(), i.spec.id);
        serving.min_by_key(burden).map(|i| i.spec.id)
    }

    /// The decode instance to hand the KV to: one predicted to keep the objective and to have room by `at_us`, else of
    /// those with room the one with the shortest steps, else the one with the most room. If the request waited here for room it would delay those behind it, which may need less.
    /// The decode instance itself admits KV as room becomes free (I8).
    fn decode_by_then(&self, request: &Request, prefill: PlannedEnd) -> Option<InstanceId> {
        if let DecodeChoice::At(id, _) = self.choose_decode(request, prefill) {
            return Some(id);
        }
        let PlannedEnd { on: from, at_us, .. } = prefill;
        let need = self.decode_need(request, at_us);
        let able = self.roomiest_decodes(request, from).into_iter().filter_map(|id| self.fleet.get(id));
        let roomy = able.filter(|i| self.decode_fits(i, &need) == Err(RejectReason::Tbt));
        let steps = roomy.map(|i| (self.predicted_step_us(i, &need), i.spec.id));
        let quickest = steps.min_by(|(one_us, _), (other_us, _)| one_us.total_cmp(other_us));
        quickest.map(|(_, id)| id).or_else(|| self.roomiest_decode(request, from, None))
    }
}
