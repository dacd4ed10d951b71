//! Whether a request is admitted, and if not, its Retry-After.

use alloc::vec::Vec;
use baton_types::{ClassId, InstanceId, RequestId, Role, SloClass};

use crate::conductor::Conductor;
use crate::placement::{DecodeChoice, MIN_RETRY_AFTER_US, Placement, Refusal, within_reach};
use crate::policies::QueueLocation;
use crate::request::Entry;
use crate::tickets::Ticket;
use crate::{AdmissionMode, Effect, RejectReason, Rejection, Request};

impl Conductor {
    /// The request's class; an unknown one counts as the first.
    pub(crate) fn class(&self, request: &Request) -> &SloClass {
        self.config.classes.get(request.class.index()).unwrap_or(&self.config.classes[0])
    }

    /// The TTFT and the TBT that hold for a request, µs: its own, else its class's.
    pub(crate) fn objectives(&self, request: &Request) -> (u64, u64) {
        request.objectives.in_force(self.class(request))
    }

    /// The TTFT that holds for a request, µs.
    pub(crate) fn ttft_objective_us(&self, request: &Request) -> u64 {
        self.objectives(request).0
    }

    /// By less than this much work, µs, tenants are ahead of each other at any time: an objective's worth. A request that
    /// names a tighter one gains nothing by it against the others of its class.
    pub(crate) fn fair_lead_us(&self, request: &Request) -> u64 {
        self.ttft_objective_us(request).max(self.class(request).ttft_us)
    }

    /// Latest moment for the first token of a request that arrived at `arrived_us`: the objective
    /// less the room kept for higher bands, µs.
    pub(crate) fn deadline_us(&self, request: &Request, arrived_us: u64) -> u64 {
        let permille = u64::from(1000 - self.class(request).headroom_permille);
        arrived_us + self.ttft_objective_us(request) / 1000 * permille
    }

    /// Whether a request names a TBT of its own below that of the steps that it would share.
    fn wants_shorter_steps(&self, request: &Request) -> bool {
        request.objectives.tbt_us.is_some_and(|tbt_us| tbt_us < self.config.least_tbt_us(request.class))
    }

    /// From now on an unknown class counts as the first, whatever classes there will be later.
    pub(crate) fn settle_class(&self, request: &mut Request) {
        if request.class.index() >= self.config.classes.len() {
            request.class = ClassId::default();
        }
    }

    pub(crate) fn request_arrived(&mut self, mut request: Request, effects: &mut Vec<Effect>) {
        self.stats.arrived += 1;
        self.review_roles(effects);
        if request.prompt_tokens == 0 || self.requests.contains(request.id) {
            self.stats.stale_inputs += 1;
            return;
        }
        self.settle_class(&mut request);
        let deadline_us = self.deadline_us(&request, self.now_us);
        let entry = Entry { deadline_us, ..Entry::new(request, self.now_us) };
        if let Some(refusal) = self.refusal_before_placement(&entry.request) {
            self.reject(&entry, refusal, effects);
            return;
        }
        if self.policy().queueing == QueueLocation::BeforePlacement {
            self.park(entry);
            return;
        }
        self.admit(entry, effects);
    }

    /// Refusals that no placement can change: bounds, and prompts and answers that fit nowhere.
    fn refusal_before_placement(&self, request: &Request) -> Option<Refusal> {
        let refusal = |reason, retry_after_us| {
            Some(Refusal { reason, retry_after_us, predicted_ttft_us: None, closest: None })
        };
        if self.requests.len() >= self.config.max_waiting_requests as usize {
            return refusal(RejectReason::QueueFull, 1_000_000);
        }
        if !self.can_serve() {
            return refusal(RejectReason::NoInstance, 1_000_000);
        }
        if self.too_long(request) || self.answer_too_long(request) {
            return refusal(RejectReason::TooLong, 0);
        }
        let judged = self.config.effective_admission() != AdmissionMode::None && !request.let_in;
        if judged && self.wants_shorter_steps(request) {
            return refusal(RejectReason::Unreachable, 0);
        }
        None
    }

    /// Whether no instance that may prefill, or none that decodes, of those that serve now can ever hold the prompt.
    pub(crate) fn too_long(&self, request: &Request) -> bool {
        let held = |ids: &[InstanceId]| ids.iter().any(|id| self.holds(*id, request));
        let mixing = || self.mixing().any(|i| self.holds(i.spec.id, request));
        !(held(&self.fleet.prefills) || mixing()) || !held(&self.fleet.decodes)
    }

    /// Whether no decode instance that serves now can ever hold the prompt with all that its client asks for.
    fn answer_too_long(&self, request: &Request) -> bool {
        let left = request.asked_output_tokens.unwrap_or(0).saturating_sub(request.emitted_tokens);
        u64::from(left) > self.longest_answer_tokens(request.prompt_tokens).max(1)
    }

    /// The longest answer to a prompt of so many tokens whose KV some decode instance that serves now could hold, in whole
    /// blocks beside the prompt's, tokens. The KV of the last token is never written.
    #[must_use]
    pub fn longest_answer_tokens(&self, prompt_tokens: u64) -> u64 {
        let block = u64::from(self.config.block_tokens);
        let held_tokens = self.fleet.largest_decode_tokens / block * block;
        (held_tokens + 1).saturating_sub(prompt_tokens)
    }

    /// Whether an empty instance could hold the prompt, in whole blocks, and a token more.
    pub(crate) fn holds(&self, id: InstanceId, request: &Request) -> bool {
        let block = self.config.block_tokens;
        let capacity = self.fleet.get(id).map_or(0, |i| i.spec.capacity_tokens);
        let blocks = baton_types::blocks_for(request.prompt_tokens, block);
        request.prompt_tokens < capacity && blocks <= capacity / u64::from(block)
    }

    /// Places an entry under the admission mode in force, or refuses it. One that was let in before is only placed: it is not
    /// refused because it was parked meanwhile, or its conductor was replaced.
    pub(crate) fn admit(&mut self, mut entry: Entry, effects: &mut Vec<Effect>) {
        assert!(!self.requests.contains(entry.request.id), "request {} is let in twice", entry.request.id);
        let mode = if entry.request.let_in { AdmissionMode::None } else { self.config.effective_admission() };
        let only_feasible = mode == AdmissionMode::Slo;
        let ticket = self.take_ticket(&entry.request, effects);
        let (verdict, displaced) = self.find_place(&mut entry, only_feasible, ticket.as_ref());
        let request = &entry.request;
        // A client that comes back was counted when it was refused, and who was let in when it arrived.
        if ticket.is_none() && !request.let_in {
            self.note_demand(request, verdict.as_ref().ok().map(|placed| placed.candidate.plan.new_tokens));
            self.note_need(request);
        }
        if only_feasible {
            self.learn_reserve(request, verdict.as_ref().err().map(|refusal| refusal.reason));
        }
        // Tickets bind no request that is admitted already.
        self.kept.clear();
        self.explain(effects);
        self.judge_shadows(request, &verdict);
        match verdict {
            Err(refusal) => {
                let refusal = self.refuse_returned(&entry.request, ticket, refusal, effects);
                self.reject(&entry, refusal, effects);
            }
            Ok(placement) => match self.refusal_under(mode, request, &placement) {
                Some(refusal) => self.reject(&entry, refusal, effects),
                None => self.let_in(Entry { returned: ticket.is_some(), ..entry }, &placement, effects),
            },
        }
        self.place_displaced(&displaced, effects);
    }

    /// Where a request may go, and which waiting requests have to leave for it. If it must be feasible, it leaves the places
    /// that tickets keep, unless it comes at the time of its own, and those that higher bands are expected to need.
    fn find_place(
        &mut self,
        entry: &mut Entry,
        only_feasible: bool,
        ticket: Option<&Ticket>,
    ) -> (Result<Placement, Refusal>, Vec<RequestId>) {
        let (request, deadline_us) = (&entry.request, entry.deadline_us);
        if !only_feasible {
            return (self.place_for(request, deadline_us, false), Vec::new());
        }
        if !self.is_time_of(ticket) {
            self.see_tickets(request);
        }
        self.expect_higher(request);
        let placed = self.place_for(request, deadline_us, true);
        match placed {
            Ok(placement) => {
                self.note_in_time(request, &placement.candidate);
                (Ok(placement), Vec::new())
            }
            Err(refusal) => self.place_otherwise(entry, refusal),
        }
    }

    /// Where a request that would be refused may go all the same, and which waiting requests have to leave for it.
    fn place_otherwise(
        &mut self,
        entry: &mut Entry,
        refusal: Refusal,
    ) -> (Result<Placement, Refusal>, Vec<RequestId>) {
        if let Some((placement, displaced)) = self.place_by_displacing(&entry.request, entry.deadline_us) {
            return (Ok(placement), displaced);
        }
        // A refusal is explained by what it was decided by, whatever else is tried.
        let decision = self.stats.last_decision.take();
        let placed =
            self.place_to_warm(entry, refusal).or_else(|refusal| self.place_to_measure(entry, refusal));
        if placed.is_err() {
            self.stats.last_decision = decision;
        }
        (placed, Vec::new())
    }

    /// Counts a request that was placed, and puts it where it goes.
    fn let_in(&mut self, entry: Entry, placement: &Placement, effects: &mut Vec<Effect>) {
        self.stats.admitted += u64::from(!entry.request.let_in);
        self.stats.tickets_used += u64::from(entry.returned);
        self.replicator.note(&self.hits, &entry.request);
        self.commit(entry, placement, effects);
        self.replicate_hot(effects);
    }

    /// Counts what a request needs. It competes with its own band and with lower ones, and what they leave is left for it.
    fn note_need(&mut self, request: &Request) {
        let need = self.decode_need(request, self.now_us);
        let (needed, priority) = ((need.tokens, need.context_tokens), self.class(request).priority);
        let classes = self.config.classes.iter().enumerate();
        let lower = classes.filter(|(_, class)| class.priority <= priority).map(|(at, _)| at);
        self.margins.note_need(lower, needed);
    }

    /// Emits the record of the last decision, if it is one of those recorded.
    pub(crate) fn explain(&mut self, effects: &mut Vec<Effect>) {
        effects.extend(self.stats.last_decision.take().map(Effect::Explain));
    }

    pub(crate) fn place_for(
        &mut self,
        request: &Request,
        deadline_us: u64,
        only_feasible: bool,
    ) -> Result<Placement, Refusal> {
        let placed = self.place(request, deadline_us, only_feasible, None)?;
        if let Some(bound_us) = request.known_work_bound_us
            && placed.candidate.plan.work_us > bound_us
        {
            return Err(Refusal {
                reason: RejectReason::Costly,
                retry_after_us: self.ttft_objective_us(request),
                predicted_ttft_us: within_reach(placed.candidate.ttft_us),
                closest: None,
            });
        }
        Ok(placed)
    }

    /// The decision of an admission mode of the paper on a placement.
    fn refusal_under(
        &self,
        mode: AdmissionMode,
        request: &Request,
        placement: &Placement,
    ) -> Option<Refusal> {
        let ttft_us = placement.candidate.ttft_us;
        let objective_us = self.ttft_objective_us(request);
        let overload = match mode {
            AdmissionMode::None | AdmissionMode::Auto | AdmissionMode::Slo => return None,
            _ if ttft_us > objective_us => Some((RejectReason::Ttft, ttft_us - objective_us)),
            AdmissionMode::AtDecode => None,
            AdmissionMode::Early => self.decode_overload_now(request),
            AdmissionMode::EarlyPredict => self.decode_overload_at(request, self.now_us + ttft_us),
        };
        let (reason, wait_us) = overload?;
        Some(Refusal {
            reason,
            retry_after_us: wait_us.max(MIN_RETRY_AFTER_US),
            predicted_ttft_us: within_reach(ttft_us),
            closest: None,
        })
    }

    /// Why no decode instance could take the request at this moment, judging only those that
    /// decode now; with the predicted wait, µs.
    pub(crate) fn decode_overload_now(&self, request: &Request) -> Option<(RejectReason, u64)> {
        let need = self.decode_need(request, self.now_us);
        let mut worst = (RejectReason::NoInstance, u64::MAX);
        for instance in self.fleet.decodes.iter().filter_map(|id| self.fleet.get(*id)) {
            let (batch, context, _) = instance.decode.now();
            let step_us = instance.spec.profile.decode_us(batch + 1, context + need.context_tokens);
            #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
            let slow = step_us > need.tbt_us as f64;
            let full = self.is_full(instance, &need);
            if !slow && !full {
                return None;
            }
            let wait_us = self.decode_wait_us(instance, &need);
            let reason = if full { RejectReason::Room } else { RejectReason::Tbt };
            worst = (reason, worst.1.min(wait_us));
        }
        Some((worst.0, worst.1.min(60_000_000)))
    }

    /// The paper's system-level prediction: decode load of the whole pool at `at_us`, every decode
    /// being taken to last the same, evenly spread.
    fn decode_overload_at(&self, request: &Request, at_us: u64) -> Option<(RejectReason, u64)> {
        let need = self.decode_need(request, at_us);
        let pool = || self.fleet.decodes.iter().filter_map(|id| self.fleet.get(*id));
        let count = u32::try_from(pool().count()).unwrap_or(u32::MAX).max(1);
        let (mut batch, mut context, mut reserved) = (0u32, 0, 0);
        for instance in pool() {
            let (b, c, r) = instance.decode.at_most(at_us);
            (batch, context, reserved) = (batch + b, context + c, reserved + r);
        }
        let first = pool().next()?;
        let (batch, context) = (batch.div_ceil(count), context / u64::from(count));
        let step_us = first.spec.profile.decode_us(batch + 1, context + need.context_tokens);
        let duration_us = self.decode_duration_us(request, step_us);
        if !first.spec.holds(batch as usize + 1, reserved / u64::from(count) + need.tokens) {
            return Some((RejectReason::Room, duration_us / 2));
        }
        #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
        (step_us > need.tbt_us as f64).then_some((RejectReason::Tbt, duration_us / 2))
    }

    /// Counts the decisions of the shadow modes.
    fn judge_shadows(&mut self, request: &Request, verdict: &Result<Placement, Refusal>) {
        for at in 0..self.config.shadow.len() {
            let mode = self.config.shadow[at];
            let refused = match (mode, verdict) {
                (AdmissionMode::Slo, Err(_)) => true,
                (AdmissionMode::Slo, Ok(p)) => {
                    self.now_us + p.candidate.latest_us > p.candidate.deadline_us
                        || self.shadow_decode_refuses(request, p)
                }
                (_, Err(_)) => false,
                (_, Ok(p)) => self.refusal_under(mode, request, p).is_some(),
            };
            self.stats.count_shadow(mode, refused);
        }
    }

    fn shadow_decode_refuses(&self, request: &Request, placement: &Placement) -> bool {
        let candidate = &placement.candidate;
        let prefill = candidate.planned_end(self.now_us + candidate.ttft_us);
        self.fleet.get(prefill.on).is_some_and(|i| i.spec.role == Role::Prefill)
            && matches!(self.choose_decode(request, prefill), DecodeChoice::Never(..))
    }

    /// Refuses an entry that holds nothing.
    pub(crate) fn reject(&mut self, entry: &Entry, refusal: Refusal, effects: &mut Vec<Effect>) {
        assert!(
            !self.requests.contains(entry.request.id) && entry.decode.is_none(),
            "request {} is refused while it holds something",
            entry.request.id
        );
        self.stats.count_rejection(refusal.reason);
        self.demand.refused(refusal.reason);
        effects.push(Effect::Reject(Rejection {
            request: entry.request.id,
            reason: refusal.reason,
            retry_after_us: refusal.retry_after_us,
            predicted_ttft_us: refusal.predicted_ttft_us,
            wasted_tokens: 0,
        }));
    }
}
