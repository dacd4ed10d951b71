//! When a refused request would be let in: by the predicted ends of what is in its way.

use core::cell::OnceCell;

use alloc::vec::Vec;
use baton_types::InstanceId;

use super::decode::DecodeNeed;
use super::{Candidate, Refusal, within_reach};
use crate::conductor::Conductor;
use crate::fleet::Instance;
use crate::{RejectReason, Request};

/// The least wait that is ever named, µs: about a decode step, below which predictions say nothing
/// and a client that comes back only costs a round trip.
pub(crate) const MIN_RETRY_AFTER_US: u64 = 100_000;
/// What is named when nothing that was promised ends in a way that would help, µs.
const LATEST_US: u64 = 60_000_000;

/// Who waits for room may be predicted to wait for one in so many parts of what its objective leaves: ends of decodes
/// are guesses, and one that is off by its own length is not rare.
const WAIT_SHARE: u64 = 3;

/// A candidate that kept its TTFT but found no decode instance.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoDecode {
    pub reason: RejectReason,
    /// When its decode would have started, µs.
    pub at_us: u64,
    /// By when it should, for its objective, µs.
    pub deadline_us: u64,
    /// The only instance that could have decoded it, where the prefill is local.
    pub only: Option<InstanceId>,
}

impl Conductor {
    /// How much later a request must arrive for this candidate to be in time and to keep the
    /// promises made to others, µs.
    pub(crate) fn prefill_retry_after_us(&self, candidate: &Candidate) -> u64 {
        let deadline_us = candidate.deadline_us;
        let late_us = (self.now_us + candidate.latest_us).saturating_sub(deadline_us);
        let Some(instance) = self.fleet.get(candidate.instance) else { return LATEST_US };
        let tail_us = self.handoff_tail_us(instance) + self.pipeline_latency_us(instance, &candidate.plan);
        let work = (candidate.plan.work_us, tail_us, deadline_us);
        let ahead_us = self.dispatch_ahead_us(instance);
        late_us
            .max(instance.prefill.earliest_admission_us(self.now_us, work, ahead_us))
            .max(MIN_RETRY_AFTER_US)
    }

    /// How much later a no_decode request must arrive for its decode to be let in, µs. Who would only wait for room
    /// does so here as long as its objective allows, and need not come later for that.
    pub(crate) fn predicted_retry_after_us(&self, request: &Request, no_decode: NoDecode) -> u64 {
        let slack_us = if no_decode.reason == RejectReason::Room && self.config.policy.orders_queues() {
            no_decode.deadline_us.saturating_sub(no_decode.at_us) / WAIT_SHARE
        } else {
            0
        };
        self.decode_retry_after_us(request, no_decode).saturating_sub(slack_us).max(MIN_RETRY_AFTER_US)
    }

    fn decode_retry_after_us(&self, request: &Request, no_decode: NoDecode) -> u64 {
        let need = self.decode_need(request, no_decode.at_us);
        let pool = no_decode.only.as_slice();
        let pool = if pool.is_empty() { self.fleet.decodes.as_slice() } else { pool };
        let able = pool.iter().filter(|id| self.holds(**id, request)).filter_map(|id| self.fleet.get(*id));
        able.map(|i| self.decode_wait_us(i, &need)).min().unwrap_or(LATEST_US)
    }

    /// What each of those who wait for decodes to end puts the next one off by, µs: its decode takes so long, and a
    /// share of the room.
    pub(crate) fn decode_turn_us(&self, request: &Request) -> u64 {
        let need = self.decode_need(request, self.now_us);
        let pool = || self.fleet.decodes.iter().filter_map(|id| self.fleet.get(*id));
        let room: u64 = pool().map(|i| i.spec.capacity_tokens).sum();
        let step_us = pool().map(|i| self.predicted_step_us(i, &need)).fold(f64::INFINITY, f64::min);
        if room == 0 {
            return 0;
        }
        #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
        let tbt_us = need.tbt_us as f64;
        let takes_us = self.decode_duration_us(request, step_us.min(tbt_us));
        u64::try_from(u128::from(takes_us) * u128::from(need.tokens) / u128::from(room)).unwrap_or(u64::MAX)
    }

    /// The same candidate once there is room to decode it, and where, if that is in time: what was promised there
    /// ends before.
    pub(crate) fn wait_for_room(
        &self,
        request: &Request,
        mut candidate: Candidate,
    ) -> Option<(Candidate, InstanceId)> {
        if !self.config.policy.orders_queues() {
            // Nothing waits here: it would be sent at once.
            return None;
        }
        let at_us = self.now_us + candidate.latest_us;
        let need = self.decode_need(request, at_us);
        let slack_us = candidate.deadline_us.checked_sub(at_us)? / WAIT_SHARE;
        let from = candidate.instance;
        let local = self.fleet.get(from)?.spec.role.decodes();
        let pool = if local { Vec::from([from]) } else { self.roomiest_decodes(from) };
        let able = pool.into_iter().filter(|id| self.holds(*id, request)).filter_map(|id| self.fleet.get(id));
        let (wait_us, id) = able
            .map(|i| (self.decode_wait_us(i, &need), i))
            .filter(|(wait_us, _)| *wait_us <= slack_us)
            .filter(|(wait_us, i)| {
                let then_us = at_us + wait_us;
                self.decode_fits(i, &DecodeNeed { at_us: then_us, ends_by_us: then_us, ..need }).is_ok()
            })
            .map(|(wait_us, i)| (wait_us, i.spec.id))
            .min()?;
        candidate.latest_us += wait_us;
        candidate.ttft_us += wait_us;
        candidate.room_wait_us = wait_us;
        candidate.feasible = true;
        Some((candidate, id))
    }

    /// The refusal of a request whose objectives cannot be met here whatever ends: not its prefill, nor the steps of
    /// its decode, on any instance that had nothing else to do.
    pub(crate) fn unreachable(&self, request: &Request) -> Option<Refusal> {
        let need = self.decode_need(request, self.now_us);
        let mut decodes = self.fleet.decodes.iter().filter_map(|id| self.fleet.get(*id));
        let step_us = |i: &Instance| i.spec.profile.decode_us(1, request.prompt_tokens);
        #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
        let slow = |i: &Instance| step_us(i) > need.tbt_us as f64;
        let budget_us = self.deadline_us(request, self.now_us) - self.now_us;
        let best_us = self.idle_ttft_us(request)?;
        if best_us <= budget_us && !decodes.all(slow) {
            return None;
        }
        Some(Refusal {
            reason: RejectReason::Unreachable,
            retry_after_us: 0,
            predicted_ttft_us: within_reach(best_us),
            turn_us: 0,
        })
    }

    /// The best TTFT that instances with nothing else to do would give, µs, with what is cached now.
    fn idle_ttft_us(&self, request: &Request) -> Option<u64> {
        let prefills = self.fleet.prefills.iter().filter_map(|id| self.fleet.get(*id));
        let able = prefills.chain(self.mixing()).filter(|i| self.holds(i.spec.id, request));
        able.map(|i| self.idle_prefill_us(i, request)).min()
    }

    /// How much later than `need` says an instance is predicted to take the decode, µs: what it
    /// has promised ends one by one, the earliest end that makes enough room is the answer.
    pub(crate) fn decode_wait_us(&self, instance: &Instance, need: &DecodeNeed<'_>) -> u64 {
        let ends = instance.decode.slots().iter().map(|s| s.finish_us).filter(|end| *end > need.at_us);
        let mut ends: Vec<u64> = ends.collect();
        ends.sort_unstable();
        let kin = OnceCell::new();
        let fits = |end: &u64| {
            let then = DecodeNeed { at_us: *end, ends_by_us: *end, ..*need };
            self.decode_fits_beside(instance, &then, &kin).is_ok()
        };
        // Later starts can break the order, but hardly: a binary search is near enough for a hint.
        let first = ends.partition_point(|end| !fits(end));
        ends.get(first).or(ends.last()).map_or(LATEST_US, |end| end - need.at_us)
    }
}
