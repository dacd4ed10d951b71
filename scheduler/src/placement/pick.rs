//! Picks one placement from the candidates, or a refusal with its Retry-After.

use alloc::vec::Vec;
use baton_types::{InstanceId, Rng, Role};

use super::{Candidate, DecodeChoice, Placement, PlannedPrefill, Refusal, within_reach};
use crate::conductor::Conductor;
use crate::fleet::{FleetOrders, Instance};
use crate::policies::{Choice, Ties};
use crate::{CandidateTerms, Decision, RejectReason, Request};

/// Most holders of a prefix that are compared by a cheap estimate for one request: of more, every second, or third.
const HOLDERS: usize = 128;

/// No instance serves: the client may retry in a second.
const NOWHERE: Refusal = Refusal {
    reason: RejectReason::NoInstance,
    retry_after_us: 1_000_000,
    predicted_ttft_us: None,
    closest: None,
};

/// Why candidates failed. The refusal names the failure that ends first.
#[derive(Default)]
struct CandidateFailures {
    /// The least late candidate that breaks the TTFT objective.
    late: Option<Candidate>,
    /// The best candidate that is in time but makes other requests late.
    delays_others: Option<Candidate>,
    /// The best candidate whose decodes leave no room for the prefill.
    breaks_decodes: Option<Candidate>,
    /// The earliest of those that failed for their decode alone, and why it did.
    no_decode: Option<(Candidate, RejectReason)>,
}

impl Conductor {
    /// Places a request by the policy, among all candidates or (`only_feasible`) among those that keep every promise.
    /// `excluded` is taken only if no other instance can prefill the request.
    pub(crate) fn place(
        &mut self,
        request: &Request,
        deadline_us: u64,
        only_feasible: bool,
        excluded: Option<InstanceId>,
    ) -> Result<Placement, Refusal> {
        self.look_up(request);
        let ids = self.candidate_ids(request, excluded);
        if ids.is_empty() {
            return Err(NOWHERE);
        }
        match self.policy().choice {
            Choice::Unseen(take) => {
                let at = take(self, ids.len() as u64);
                self.place_at(ids[usize::try_from(at).expect("below a length")], request, deadline_us)
            }
            Choice::Least { score, ties } => {
                let mut candidates = Vec::with_capacity(ids.len());
                for instance in ids.iter().filter_map(|id| self.fleet.get(*id)) {
                    let mut candidate = self.candidate(instance, request, deadline_us);
                    candidate.score = score(self, &candidate, instance);
                    candidates.push(candidate);
                }
                assert!(candidates.len() == ids.len(), "a pool names an instance that is not known");
                self.search(request, only_feasible, candidates, ties)
            }
        }
    }

    /// Instances that may prefill the request: of many, a few that are likely to be good.
    pub(crate) fn candidate_ids(&self, request: &Request, excluded: Option<InstanceId>) -> Vec<InstanceId> {
        let many = |orders: &&FleetOrders| {
            let (prefills, locals) = orders.prefilling();
            prefills + if self.may_prefill_locally() { locals } else { 0 } > self.config.candidates
        };
        let scored = matches!(self.policy().choice, Choice::Least { .. });
        if let Some(orders) = self.fleet.orders().filter(many).filter(|_| scored) {
            let (prefills, locals) = self.promising(orders, request);
            let ids = self.able_ids(
                request,
                excluded,
                prefills,
                locals.iter().filter_map(|id| self.fleet.get(*id)),
            );
            if !ids.is_empty() {
                return ids;
            }
        }
        self.able_ids(request, excluded, self.fleet.prefills.clone(), self.mixing())
    }

    /// Instances of a large fleet that are likely to be good for the request, those for the first leg and those that
    /// would prefill what they decode: the soonest ready, holders of its prefix, and some by lot.
    fn promising(&self, orders: &FleetOrders, request: &Request) -> (Vec<InstanceId>, Vec<InstanceId>) {
        let most = self.config.candidates;
        let mut ids: Vec<InstanceId> = Vec::with_capacity(most + 16);
        // The orders are those of a usual prompt; where instances differ, a longer one finds others sooner.
        let whole = |id| (id, request.prompt_tokens);
        ids.extend(self.soonest(orders, orders.prefills().take(most).map(whole), most / 4));
        ids.extend(self.soonest(orders, orders.locals().take(most).map(whole), most / 4));
        let mut rng = Rng::fork(self.config.seed, request.id.0);
        for pool in [&self.fleet.prefills, &self.fleet.decodes] {
            let any = |_| pool.get(usize::try_from(rng.below(pool.len() as u64)).unwrap_or(0)).copied();
            ids.extend((0..most / 24).filter_map(any));
        }
        ids.extend(self.hits.sources().iter().map(|(_, id)| *id));
        let new = |id| (id, request.prompt_tokens - self.tokens_of(request, self.hits.of(id).by_its_turn()));
        ids.extend(self.soonest(orders, self.hits.some_holders(HOLDERS).map(new), most / 2));
        ids.sort_unstable();
        ids.dedup();
        ids.retain(|id| orders.is_prefill(*id) || orders.is_local(*id));
        let may = self.may_prefill_locally();
        let (prefills, locals): (Vec<_>, Vec<_>) = ids.into_iter().partition(|id| orders.is_prefill(*id));
        (prefills, if may { locals } else { Vec::new() })
    }

    /// Those of the instances where so many new tokens would be computed soonest, by a cheap estimate.
    fn soonest(
        &self,
        orders: &FleetOrders,
        ids: impl Iterator<Item = (InstanceId, u64)>,
        most: usize,
    ) -> Vec<InstanceId> {
        let about = |(id, new_tokens)| Some((orders.about_us(id, self.now_us, new_tokens)?, id));
        let mut soonest: Vec<(u64, InstanceId)> = ids.filter_map(about).collect();
        if soonest.len() > most {
            soonest.select_nth_unstable(most);
            soonest.truncate(most);
        }
        soonest.into_iter().map(|(_, id)| id).collect()
    }

    /// Those of the instances that may prefill the request: `prefills` as the first leg, `locals` what they decode.
    fn able_ids<'a>(
        &'a self,
        request: &Request,
        excluded: Option<InstanceId>,
        prefills: Vec<InstanceId>,
        locals: impl Iterator<Item = &'a Instance>,
    ) -> Vec<InstanceId> {
        let mut ids = prefills;
        ids.retain(|id| self.holds(*id, request) && self.has_decode(*id, request));
        let roomy = |i: &&Instance| {
            let fits = |shared_tokens: u64| {
                let own_tokens = request.prompt_tokens.saturating_sub(shared_tokens);
                i.decode.reserved_tokens().saturating_add(own_tokens) <= i.spec.capacity_tokens
            };
            fits(0) || fits(i.decode.shared_with(self.chain_position(&i.decode, &request.chain)))
        };
        // A prompt needs a place among those that run, too, and those that are promised one need it first.
        let has_place = |i: &&Instance| i.spec.max_running.is_none_or(|most| i.decode.all().0 < most);
        // If no other instance prefills it, these do whatever it costs their decodes.
        let (alone, scarce) = (ids.is_empty(), self.demand.lacks_decodes());
        let spares = |i: &&Instance| alone || (!scarce && roomy(i) && has_place(i));
        let mixing = locals.filter(spares).map(|i| i.spec.id);
        let mixing: Vec<InstanceId> = mixing.filter(|id| self.holds(*id, request)).collect();
        ids.extend(mixing);
        if ids.len() > 1 {
            ids.retain(|id| Some(*id) != excluded);
        }
        // The others predict the wait, and hold the request for as long.
        if !self.config.policy.orders_queues() && !ids.iter().all(|id| self.refuses(*id)) {
            ids.retain(|id| !self.refuses(*id));
        }
        debug_assert!(
            ids.iter().all(|id| self.fleet.get(*id).is_some_and(Instance::serves)),
            "a candidate takes no work"
        );
        ids
    }

    /// Decode instances that may prefill what they decode.
    pub(crate) fn mixing(&self) -> impl Iterator<Item = &Instance> {
        let may = self.may_prefill_locally();
        let decodes = self.fleet.decodes.iter().filter(move |_| may);
        decodes.filter_map(|id| self.fleet.get(*id)).filter(|i| i.mixes())
    }

    fn may_prefill_locally(&self) -> bool {
        self.config.local_prefill && self.config.policy.orders_queues()
    }

    /// Whether some instance can decode what is prefilled there.
    fn has_decode(&self, id: InstanceId, request: &Request) -> bool {
        let local = self.fleet.get(id).is_some_and(|i| i.spec.role.decodes());
        local || self.fleet.decodes_of(id).any(|decode| self.holds(decode, request))
    }

    /// Takes the best of the scored candidates.
    fn search(
        &mut self,
        request: &Request,
        only_feasible: bool,
        mut candidates: Vec<Candidate>,
        ties: Ties,
    ) -> Result<Placement, Refusal> {
        let mut kept = CandidateFailures::default();
        let best = if only_feasible {
            self.best_feasible(&mut candidates, (request, ties), &mut kept)
        } else {
            self.best_of_all(&candidates, ties).map(|candidate| (candidate, None))
        };
        if self.explains() {
            candidates.sort_unstable_by_key(|c| c.instance);
            self.stats.last_decision = Some(Decision {
                request: request.id,
                at_us: self.now_us,
                chosen: best.as_ref().map(|(c, _)| c.instance),
                candidates: candidates.iter().map(terms).collect(),
            });
        }
        match best {
            Some((candidate, decode)) => Ok(self.placement(candidate, decode, request)),
            None => Err(self.earliest_refusal(request, &kept)),
        }
    }

    /// The candidate with the least score; `ties` decides between equals.
    fn best_of_all(&mut self, candidates: &[Candidate], ties: Ties) -> Option<Candidate> {
        let mut best: Option<Candidate> = None;
        let mut equals = 1;
        for candidate in candidates {
            let better = best.as_ref().is_none_or(|b| {
                let warmer = candidate.plan.cached_tokens > b.plan.cached_tokens;
                candidate.score < b.score || (ties == Ties::Warmest && warmer && candidate.score <= b.score)
            });
            let equal = best.as_ref().is_some_and(|b| (candidate.score - b.score).abs() < f64::EPSILON);
            equals = if better { 1 } else { equals + u64::from(equal) };
            if better || (equal && ties == Ties::ByLot && self.rng.below(equals) == 0) {
                best = Some(*candidate);
            }
        }
        best
    }

    /// Puts the one that was idle longest in front of idle candidates that are as good, as far as predictions are good. If
    /// the same one always took what no cache has, its cache would turn over, and those of the others stay empty.
    #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
    fn spread(&self, sorted: &mut [Candidate]) {
        let Some(best) = sorted.first().copied().filter(|best| best.queue_us == 0) else { return };
        let error = |id: InstanceId| self.fleet.known(id).prefill_residual.mean_error();
        let within_us =
            |c: &Candidate| best.plan.work_us as f64 * error(best.instance).max(error(c.instance));
        let alike = |c: &Candidate| {
            c.queue_us == 0
                && c.plan.cached_tokens == best.plan.cached_tokens
                && c.score <= best.score + within_us(c)
        };
        let equals = sorted.iter().enumerate().filter(|(_, c)| alike(c));
        let idle_longest = equals.min_by_key(|(_, c)| self.fleet.known(c.instance).idle_since_us());
        if let Some((nth, _)) = idle_longest {
            sorted.swap(0, nth);
        }
    }

    /// The candidate with the least score among those that keep every promise. Decode instances are chosen for the best
    /// candidates first, so usually only once.
    fn best_feasible(
        &self,
        candidates: &mut [Candidate],
        (request, ties): (&Request, Ties),
        kept: &mut CandidateFailures,
    ) -> Option<(Candidate, Option<InstanceId>)> {
        candidates.sort_unstable_by(|a, b| {
            let warmer = b.plan.cached_tokens.cmp(&a.plan.cached_tokens);
            a.score.total_cmp(&b.score).then(warmer).then(a.instance.cmp(&b.instance))
        });
        if ties == Ties::Warmest {
            self.spread(candidates);
        }
        for candidate in candidates.iter_mut() {
            if let Some(decode) = self.judge(candidate, request, kept) {
                return Some((*candidate, Some(decode)));
            }
        }
        let (no_room, _) = kept.no_decode.filter(|(_, reason)| *reason == RejectReason::Room)?;
        let (candidate, decode) = self.wait_for_room(request, no_room)?;
        let known = candidates.iter_mut().find(|c| c.instance == candidate.instance);
        known.into_iter().for_each(|known| *known = candidate);
        Some((candidate, Some(decode)))
    }

    /// Checks a candidate's promises. Returns its decode instance, or records why there is none.
    fn judge(
        &self,
        candidate: &mut Candidate,
        request: &Request,
        kept: &mut CandidateFailures,
    ) -> Option<InstanceId> {
        if !candidate.feasible {
            if candidate.plan.breaks_decodes {
                kept.breaks_decodes.get_or_insert(*candidate);
            } else if self.now_us + candidate.latest_us <= candidate.deadline_us {
                // Candidates come best first.
                kept.delays_others.get_or_insert(*candidate);
            } else if kept.late.is_none_or(|c| candidate.latest_us < c.latest_us) {
                kept.late = Some(*candidate);
            }
            return None;
        }
        let at_us = self.now_us + candidate.latest_us;
        let instance = self.fleet.get(candidate.instance)?;
        let local = instance.spec.role != Role::Prefill;
        let choice = if local {
            match self.decode_fits(instance, &self.decode_need(request, at_us)) {
                Ok(_) => DecodeChoice::At(candidate.instance, 0),
                Err(reason) => DecodeChoice::Never(reason),
            }
        } else {
            self.choose_decode(request, candidate.planned_end(at_us))
        };
        match choice {
            DecodeChoice::At(id, delay_us) => {
                if local || self.lands_in_time(candidate, request, (id, delay_us)) {
                    return Some(id);
                }
                if kept.late.is_none_or(|c| candidate.latest_us < c.latest_us) {
                    kept.late = Some(*candidate);
                }
            }
            DecodeChoice::Never(reason) => {
                if kept.no_decode.is_none_or(|(earliest, _)| candidate.latest_us < earliest.latest_us) {
                    kept.no_decode = Some((*candidate, reason));
                }
            }
        }
        candidate.feasible = false;
        None
    }

    /// Whether a candidate keeps its promise, and all others there theirs, with the time that its KV takes to this decode
    /// instance. The candidate's terms become those of this hand-off.
    fn lands_in_time(
        &self,
        candidate: &mut Candidate,
        request: &Request,
        (decode, delay_us): (InstanceId, u64),
    ) -> bool {
        let instance = self.fleet.known(candidate.instance);
        candidate.latest_us += delay_us;
        let mut keeps = self.now_us + candidate.latest_us <= candidate.deadline_us;
        let sends_us = self.handoff_takes_us(instance, request, decode);
        if sends_us > candidate.plan.work_us {
            candidate.plan.work_us = sends_us;
            candidate.plan.alone_us = candidate.plan.alone_us.max(sends_us);
            candidate.new.work_us = sends_us;
            keeps &= self.outlook(instance, candidate.new).keeps_promises;
        }
        keeps
    }

    /// The refusal with the earliest Retry-After.
    fn earliest_refusal(&self, request: &Request, kept: &CandidateFailures) -> Refusal {
        let no_decode = kept.no_decode.map(|(candidate, reason)| self.no_decode(request, candidate, reason));
        let breaks_decodes = kept.breaks_decodes.filter(|_| kept.late.or(kept.delays_others).is_none());
        let prefills =
            kept.late.into_iter().chain(kept.delays_others).chain(breaks_decodes).map(|candidate| {
                if candidate.plan.breaks_decodes {
                    // It is not the first token that is late: decode steps leave no time for a prefill.
                    return self.no_decode(request, candidate, RejectReason::Tbt);
                }
                Refusal {
                    reason: RejectReason::Ttft,
                    retry_after_us: self.prefill_retry_after_us(&candidate),
                    predicted_ttft_us: within_reach(candidate.latest_us),
                    closest: Some((&candidate).into()),
                }
            });
        let earliest_refusal = no_decode.into_iter().chain(prefills).min_by_key(|r| r.retry_after_us);
        self.unreachable(request).or(earliest_refusal).unwrap_or(NOWHERE)
    }

    /// The refusal of one that kept its TTFT but found no decode instance.
    pub(crate) fn no_decode(&self, request: &Request, candidate: Candidate, reason: RejectReason) -> Refusal {
        let (retry_after_us, takes_us) = self.decode_retry_after_us(request, &candidate, reason);
        Refusal {
            reason,
            retry_after_us,
            predicted_ttft_us: within_reach(candidate.latest_us),
            closest: Some(PlannedPrefill { takes_us, ..(&candidate).into() }),
        }
    }

    /// A placement on a given instance, whatever it promises.
    fn place_at(&self, id: InstanceId, request: &Request, deadline_us: u64) -> Result<Placement, Refusal> {
        let instance = self.fleet.get(id).ok_or(NOWHERE)?;
        let candidate = self.candidate(instance, request, deadline_us);
        Ok(self.placement(candidate, None, request))
    }

    fn placement(&self, candidate: Candidate, decode: Option<InstanceId>, request: &Request) -> Placement {
        let local = self.fleet.get(candidate.instance).is_some_and(|i| i.spec.role.decodes());
        let decode = decode
            .or(local.then_some(candidate.instance))
            .or_else(|| self.least_loaded_decode(request, candidate.instance))
            .expect("no candidate is without an instance that decodes what it prefills");
        Placement { candidate, decode, room_tokens: self.room_tokens(request) }
    }

    /// Whether the present decision is recorded.
    const fn explains(&self) -> bool {
        self.config.explain_every > 0 && self.stats.arrived.is_multiple_of(self.config.explain_every as u64)
    }
}

/// A candidate's terms for the decision record.
fn terms(candidate: &Candidate) -> CandidateTerms {
    CandidateTerms {
        instance: candidate.instance,
        queue_us: candidate.queue_us,
        load_us: within_reach(candidate.plan.load_us),
        compute_us: within_reach(candidate.plan.work_us),
        cached_tokens: candidate.plan.cached_tokens,
        fetch_from: candidate.plan.fetch.map(|f| f.from),
        ttft_us: within_reach(candidate.ttft_us),
        score: within_reach(candidate.ttft_us)
            .filter(|_| !candidate.plan.breaks_decodes)
            .map(|_| candidate.score),
        feasible: candidate.feasible,
    }
}
