//! From candidates to one placement, or to a refusal that says when to come back.

use alloc::vec::Vec;
use baton_types::{InstanceId, Role};

use super::{Candidate, DecodeChoice, Placement, Refusal};
use crate::conductor::Conductor;
use crate::estimate::NEVER_US;
use crate::fleet::Instance;
use crate::{CandidateTerms, Decision, PolicyName, RejectReason, Request};

/// More candidates than this are thinned by a cheap lower bound before their terms are worked out.
const FULL_TERMS: usize = 48;

/// What the search has seen so far.
#[derive(Default)]
struct Search {
    best: Option<(Candidate, InstanceId)>,
    refusal: Option<Refusal>,
    terms: Vec<CandidateTerms>,
}

impl Conductor {
    /// Places a request by the policy, among all candidates or (`only_feasible`) among those that
    /// keep every promise.
    pub(crate) fn place(&mut self, request: &Request, deadline_us: u64, only_feasible: bool) -> Result<Placement, Refusal> {
        self.look_up(request);
        let candidates = self.candidate_ids(request);
        if candidates.is_empty() || self.fleet.decodes.is_empty() {
            return Err(Refusal { reason: RejectReason::NoInstance, retry_after_us: 1_000_000, predicted_ttft_us: NEVER_US });
        }
        match self.config.policy {
            PolicyName::Random => {
                let at = self.rng.below(candidates.len() as u64);
                return self.place_at(candidates[usize::try_from(at).expect("below a length")], request, deadline_us);
            }
            PolicyName::RoundRobin => {
                let at = self.turn % candidates.len() as u64;
                self.turn += 1;
                return self.place_at(candidates[usize::try_from(at).expect("below a length")], request, deadline_us);
            }
            _ => {}
        }
        self.search(request, deadline_us, only_feasible, &candidates)
    }

    /// Instances that may prefill the request, thinned when there are many.
    fn candidate_ids(&self, request: &Request) -> Vec<InstanceId> {
        let mut ids: Vec<InstanceId> = self.fleet.prefills.clone();
        if self.config.local_prefill && self.config.policy.orders_queues() {
            let permille = u64::from(self.config.local_room_permille);
            let mixes = |i: &&Instance| {
                let promised = i.decode.reserved_tokens() + request.prompt_tokens;
                let roomy = promised * 1000 <= i.spec.capacity_tokens * permille;
                roomy && i.spec.role == Role::Decode && i.spec.mixed_chunk_tokens != Some(0)
            };
            ids.extend(self.fleet.decodes.iter().filter_map(|id| self.fleet.get(*id)).filter(mixes).map(|i| i.spec.id));
        }
        if ids.len() > FULL_TERMS && !matches!(self.config.policy, PolicyName::Random | PolicyName::RoundRobin) {
            let bound = |id: &InstanceId| {
                let cached = self.tokens_of(request, self.hits.of(*id).blocks);
                self.fleet.get(*id).map_or(u64::MAX, |i| {
                    let slow = if i.spec.role == Role::Prefill { 100 } else { 150 };
                    i.backlog_us(self.now_us) + (request.prompt_tokens - cached) * slow
                })
            };
            ids.sort_by_cached_key(|id| (bound(id), *id));
            ids.truncate(FULL_TERMS);
            ids.sort_unstable();
        }
        ids
    }

    /// Works out every candidate's terms and takes the best.
    fn search(&mut self, request: &Request, deadline_us: u64, only_feasible: bool, ids: &[InstanceId]) -> Result<Placement, Refusal> {
        let explain = self.explains();
        let tie_random = matches!(self.config.policy, PolicyName::Dynamo | PolicyName::DynamoWspt);
        let mut search = Search::default();
        let mut ties = 1;
        for id in ids {
            let Some(instance) = self.fleet.get(*id) else { continue };
            let mut candidate = self.candidate(instance, request, deadline_us);
            candidate.score = self.score(&candidate, instance, request);
            let decode = if only_feasible { self.judge(&mut candidate, request, &mut search) } else { Some(*id) };
            if explain {
                search.terms.push(terms(&candidate));
            }
            let (Some(decode), true) = (decode, candidate.feasible || !only_feasible) else { continue };
            let better = search.best.as_ref().is_none_or(|(b, _)| candidate.score < b.score);
            let equal = search.best.as_ref().is_some_and(|(b, _)| (candidate.score - b.score).abs() < f64::EPSILON);
            ties = if better { 1 } else { ties + u64::from(equal) };
            if better || (equal && tie_random && self.rng.below(ties) == 0) {
                search.best = Some((candidate, decode));
            }
        }
        if explain {
            self.record(request, &mut search);
        }
        match search.best {
            Some((candidate, decode)) if only_feasible => Ok(self.placement(candidate, Some(decode), request)),
            Some((candidate, _)) => Ok(self.placement(candidate, None, request)),
            None => Err(search.refusal.unwrap_or(Refusal {
                reason: RejectReason::NoInstance,
                retry_after_us: 1_000_000,
                predicted_ttft_us: NEVER_US,
            })),
        }
    }

    /// Checks a candidate's promises; returns its decode instance, or remembers why there is none.
    fn judge(&self, candidate: &mut Candidate, request: &Request, search: &mut Search) -> Option<InstanceId> {
        let deadline = self.deadline_us(request, self.now_us);
        let refuse = |reason, retry_after_us: u64, search: &mut Search| {
            let refusal = Refusal { reason, retry_after_us, predicted_ttft_us: candidate.latest_us };
            if search.refusal.is_none_or(|r| retry_after_us < r.retry_after_us) {
                search.refusal = Some(refusal);
            }
        };
        if !candidate.feasible {
            let late_us = (self.now_us + candidate.latest_us).saturating_sub(deadline);
            refuse(RejectReason::Ttft, late_us.max(1000), search);
            return None;
        }
        let at_us = self.now_us + candidate.latest_us;
        let role = self.fleet.get(candidate.instance).map(|i| i.spec.role)?;
        if role == Role::Prefill {
            match self.choose_decode(request, at_us) {
                DecodeChoice::At(id, _) => return Some(id),
                DecodeChoice::Never(reason, wait_us) => refuse(reason, wait_us.max(1000), search),
            }
        } else {
            let instance = self.fleet.get(candidate.instance)?;
            let need = self.decode_need(request, at_us);
            match self.decode_fits(instance, &need) {
                Ok(_) => return Some(candidate.instance),
                Err(reason) => {
                    let free = instance.decode.room_at_us(self.now_us, need.tokens, instance.spec.capacity_tokens);
                    refuse(reason, free.saturating_sub(self.now_us).max(1000), search);
                }
            }
        }
        candidate.feasible = false;
        None
    }

    /// A placement on a given instance, whatever it promises.
    fn place_at(&self, id: InstanceId, request: &Request, deadline_us: u64) -> Result<Placement, Refusal> {
        let none = Refusal { reason: RejectReason::NoInstance, retry_after_us: 1_000_000, predicted_ttft_us: NEVER_US };
        let instance = self.fleet.get(id).ok_or(none)?;
        let candidate = self.candidate(instance, request, deadline_us);
        Ok(self.placement(candidate, None, request))
    }

    fn placement(&self, candidate: Candidate, decode: Option<InstanceId>, request: &Request) -> Placement {
        let local = self.fleet.get(candidate.instance).is_some_and(|i| i.spec.role.decodes());
        let decode = decode
            .or(local.then_some(candidate.instance))
            .or_else(|| self.least_loaded_decode())
            .unwrap_or(candidate.instance);
        Placement { candidate, decode, room_tokens: self.room_tokens(request) }
    }

    /// Whether the decision at hand is one of those recorded.
    const fn explains(&self) -> bool {
        self.config.explain_every > 0 && self.stats.arrived.is_multiple_of(self.config.explain_every as u64)
    }

    fn record(&mut self, request: &Request, search: &mut Search) {
        let decision = Decision {
            request: request.id,
            at_us: self.now_us,
            chosen: search.best.as_ref().map(|(c, _)| c.instance),
            candidates: core::mem::take(&mut search.terms),
        };
        self.stats.last_decision = Some(decision);
    }
}

/// A candidate's terms as the outside sees them.
fn terms(candidate: &Candidate) -> CandidateTerms {
    CandidateTerms {
        instance: candidate.instance,
        queue_us: candidate.queue_us,
        load_us: candidate.plan.load_us,
        compute_us: candidate.plan.work_us,
        cached_tokens: candidate.plan.cached_tokens,
        fetch_from: candidate.plan.fetch.map(|f| f.from),
        ttft_us: candidate.ttft_us,
        score: candidate.score,
        feasible: candidate.feasible,
    }
}
