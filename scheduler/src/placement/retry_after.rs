//! Retry-After: when a refused request would be admitted, by the predicted ends of the work that bars it.

use core::cell::OnceCell;

use alloc::vec::Vec;
use baton_types::{InstanceId, Role};

use super::decode::DecodeNeed;
use super::{Candidate, Refusal, within_reach};
use crate::conductor::Conductor;
use crate::estimate::ChainPosition;
use crate::fleet::Instance;
use crate::{RejectReason, Request};

/// The least Retry-After, µs: about one decode step. Predictions are no finer than that, and an earlier retry would
/// only cost a round trip.
pub(crate) const MIN_RETRY_AFTER_US: u64 = 100_000;
/// Retry-After when no promise that ends would help, µs.
const MAX_RETRY_AFTER_US: u64 = 60_000_000;

/// A request may be predicted to wait for room, or its turn, for one part in so many of what its objective leaves. Ends of decodes
/// are guesses, and a guess is often off by the whole length of the decode.
pub(super) const WAIT_SHARE: u64 = 3;

impl Conductor {
    /// How much later a request must arrive for this candidate to be in time and to keep the
    /// promises made to others, µs.
    pub(crate) fn prefill_retry_after_us(&self, candidate: &Candidate) -> u64 {
        let deadline_us = candidate.deadline_us;
        let Some(instance) = self.fleet.get(candidate.instance) else { return MAX_RETRY_AFTER_US };
        let plan = &candidate.plan;
        let tail_us = self.handoff_tail_us(instance) + self.pipeline_latency_us(instance, plan);
        let late_us = (self.now_us + candidate.latest_us).saturating_sub(deadline_us);
        // Those that it would share a pass with now may be gone.
        let work = (plan.alone_us, tail_us, deadline_us);
        let ahead_us = self.dispatch_ahead_us(instance);
        let kept = self.kept.prefills(candidate.instance);
        late_us
            .max(instance.prefill.earliest_admission_us(self.now_us, work, ahead_us, kept))
            .max(MIN_RETRY_AFTER_US)
    }

    /// How much later a request must arrive for its decode to be admitted, and how long after that its decode then starts,
    /// µs. A request that would only wait for room does so here as long as its objective allows.
    pub(crate) fn decode_retry_after_us(
        &self,
        request: &Request,
        candidate: &Candidate,
        reason: RejectReason,
    ) -> (u64, u64) {
        let at_us = self.now_us + if candidate.plan.breaks_decodes { 0 } else { candidate.latest_us };
        let slack_us = if reason == RejectReason::Room && self.config.policy.orders_queues() {
            candidate.deadline_us.saturating_sub(at_us) / WAIT_SHARE
        } else {
            0
        };
        let need = DecodeNeed { counts_all_tickets: true, ..self.decode_need(request, at_us) };
        let local = self.fleet.get(candidate.instance).is_some_and(|i| i.spec.role != Role::Prefill);
        let from = candidate.instance;
        let pool = if local { Vec::from([from]) } else { self.decodes_to_ask(request, from) };
        let able = pool.iter().filter(|id| self.holds(**id, request)).filter_map(|id| self.fleet.get(*id));
        let (retry_after_us, wait_us) = able
            .map(|i| self.decode_comes_us(i, &need, slack_us))
            .min()
            .unwrap_or((MAX_RETRY_AFTER_US, MAX_RETRY_AFTER_US));
        let retry_after_us = retry_after_us.max(MIN_RETRY_AFTER_US);
        let starts_us = (at_us - self.now_us).saturating_add(wait_us);
        (retry_after_us, starts_us.saturating_sub(retry_after_us))
    }

    /// The candidate at the time when there is room to decode it, and the decode instance, if the request is in time
    /// then. The promises made there end before.
    pub(crate) fn wait_for_room(
        &self,
        request: &Request,
        mut candidate: Candidate,
    ) -> Option<(Candidate, InstanceId)> {
        if !self.config.policy.orders_queues() {
            // This policy holds no requests: the prefill would be sent at once.
            return None;
        }
        let at_us = self.now_us + candidate.latest_us;
        let need = self.decode_need(request, at_us);
        let slack_us = candidate.deadline_us.checked_sub(at_us)? / WAIT_SHARE;
        let from = candidate.instance;
        let local = self.fleet.get(from)?.spec.role.decodes();
        let pool = if local { Vec::from([from]) } else { self.roomiest_decodes(request, from) };
        let able = pool.into_iter().filter(|id| self.holds(*id, request)).filter_map(|id| self.fleet.get(id));
        let (wait_us, id) = able
            .map(|i| (self.decode_wait_us(i, &need), i))
            .filter(|(wait_us, _)| *wait_us <= slack_us)
            .filter(|(wait_us, i)| {
                self.has_room_at(i, &need, (at_us + wait_us, need.arrives_us), &OnceCell::new())
            })
            .map(|(wait_us, i)| (wait_us, i.spec.id))
            .min()?;
        candidate.latest_us += wait_us;
        candidate.ttft_us += wait_us;
        candidate.room_wait_us = wait_us;
        candidate.feasible = true;
        Some((candidate, id))
    }

    /// The refusal of a request whose objectives no idle instance could meet: either its prefill or the steps of its
    /// decode take too long.
    pub(crate) fn unreachable(&self, request: &Request) -> Option<Refusal> {
        let need = self.decode_need(request, self.now_us);
        #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
        let slow = |step_us: f64| step_us > need.tbt_us as f64;
        let budget_us = self.deadline_us(request, self.now_us) - self.now_us;
        let reaches = self.idle_ttfts_us(request).any(|idle_us| idle_us <= budget_us);
        if reaches && !self.idle_steps_us(request.prompt_tokens).all(slow) {
            return None;
        }
        let best_us = self.idle_ttfts_us(request).min()?;
        Some(Refusal {
            reason: RejectReason::Unreachable,
            retry_after_us: 0,
            predicted_ttft_us: within_reach(best_us),
            closest: None,
        })
    }

    /// The time of a decode step of such a prompt on each decode instance, if all were idle, µs.
    fn idle_steps_us(&self, prompt_tokens: u64) -> impl Iterator<Item = f64> {
        let decodes = self.fleet.decodes.iter().filter_map(|id| self.fleet.get(*id));
        decodes.map(move |i| i.spec.profile.decode_us(1, prompt_tokens) * i.step_residual.lasting_ratio())
    }

    /// The least time of a decode step of such a prompt if all instances were idle, µs; for the words of a refusal.
    #[must_use]
    pub fn idle_step_us(&self, prompt_tokens: u64) -> Option<u64> {
        let least_us = self.idle_steps_us(prompt_tokens).min_by(f64::total_cmp)?;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive time")]
        within_reach(libm::ceil(least_us) as u64)
    }

    /// Instances that could prefill the request.
    pub(crate) fn able_prefills(&self, request: &Request) -> impl Iterator<Item = &Instance> {
        let prefills = self.fleet.prefills.iter().filter_map(|id| self.fleet.get(*id));
        prefills.chain(self.mixing()).filter(|i| self.holds(i.spec.id, request))
    }

    /// The TTFT on each instance if all were idle, with what it holds, or will hold once the prefills that were sent to it are
    /// over, µs.
    fn idle_ttfts_us(&self, request: &Request) -> impl Iterator<Item = u64> {
        let held = |i: &Instance| self.hits.of(i.spec.id).blocks;
        self.able_prefills(request).map(move |i| self.idle_prefill_us(i, request, held(i)))
    }

    /// How much later than `need` says the instance is predicted to have room for the decode, µs. Its promises end one
    /// by one. The answer is the earliest end that leaves enough room, or the request's turn.
    pub(crate) fn decode_wait_us(&self, instance: &Instance, need: &DecodeNeed<'_>) -> u64 {
        let chain_position = OnceCell::new();
        let turn_us = self.turn_of(instance, need, &chain_position).at_us;
        let ends = self.ends(instance, need, [turn_us]);
        let fits = |end: &u64| self.has_room_at(instance, need, (*end, need.arrives_us), &chain_position);
        // Later starts can break the order, but rarely: a binary search is precise enough for a hint.
        let first = ends.partition_point(|end| !fits(end));
        ends.get(first).or(ends.last()).map_or(MAX_RETRY_AFTER_US, |end| end - need.at_us)
    }

    /// How much later the request must arrive for the instance to have room for its decode, and how much later than `need`
    /// says it starts then, µs. It may wait here for so long, and at the instance, as others, for its turn.
    fn decode_comes_us(&self, instance: &Instance, need: &DecodeNeed<'_>, slack_us: u64) -> (u64, u64) {
        let chain_position = OnceCell::new();
        let turn_us = |at_us| self.turn_of(instance, &DecodeNeed { at_us, ..*need }, &chain_position).at_us;
        let fits = |end: u64, early_us: u64| {
            let arrives_us = need.arrives_us + (end - need.at_us).saturating_sub(early_us);
            self.has_room_at(instance, need, (end, arrives_us), &chain_position)
        };
        let (left_us, own_turn_us) = (self.left_us(instance, need), turn_us(need.at_us));
        let ends = self.ends(instance, need, [own_turn_us, own_turn_us.saturating_sub(left_us / WAIT_SHARE)]);
        // From here on it may wait as long as it can. Just before, it waits less here, as its turn comes later.
        let first = ends.partition_point(|end| !fits(*end, slack_us));
        let before = first.checked_sub(1).map(|nth| ends[nth]).filter(|end| fits(*end, 0));
        let early_us = |end| left_us.saturating_sub((turn_us(end) - end) * WAIT_SHARE).min(slack_us);
        let comes = |end: u64, early_us: u64| ((end - need.at_us).saturating_sub(early_us), end - need.at_us);
        let before = before.map(|end| comes(end, early_us(end)));
        let from = ends.get(first).or(ends.last()).map(|end| comes(*end, slack_us));
        before.into_iter().chain(from).min().unwrap_or((MAX_RETRY_AFTER_US, MAX_RETRY_AFTER_US))
    }

    /// When promises there end, and these moments, after the start of the request, in order, µs.
    fn ends<const N: usize>(&self, instance: &Instance, need: &DecodeNeed<'_>, turns: [u64; N]) -> Vec<u64> {
        let kept = self.kept.ends().filter(|_| need.counts_all_tickets);
        let busy = instance.prefill.busy_until_us(need.at_us);
        let ends = instance.decode.slots().iter().map(|s| s.finish_us).chain(kept).chain(turns).chain(busy);
        let mut ends: Vec<u64> = ends.filter(|end| *end > need.at_us).collect();
        ends.sort_unstable();
        ends
    }

    /// Whether the instance takes the request at a moment if it arrives then, µs.
    fn has_room_at(
        &self,
        instance: &Instance,
        need: &DecodeNeed<'_>,
        (at_us, arrives_us): (u64, u64),
        chain_position: &OnceCell<ChainPosition>,
    ) -> bool {
        let then = DecodeNeed { arrives_us, at_us, ends_by_us: at_us, ..*need };
        self.decode_fits_beside(instance, &then, chain_position).is_ok()
    }
}
