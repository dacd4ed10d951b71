//! When a refused request would be let in (D14): by the predicted ends of what is in its way.

use alloc::vec::Vec;
use baton_types::InstanceId;

use super::Candidate;
use super::decode::DecodeNeed;
use crate::conductor::Conductor;
use crate::fleet::Instance;
use crate::{RejectReason, Request};

/// The least wait that is ever named, µs: about a decode step, below which predictions say nothing
/// and a client that comes back only costs a round trip.
pub(crate) const SOONEST_US: u64 = 100_000;
/// What is named when nothing that was promised ends in a way that would help, µs.
const LATEST_US: u64 = 60_000_000;

/// A candidate that kept its TTFT but found no decode instance.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stranded {
    pub reason: RejectReason,
    /// When its decode would have started, µs.
    pub at_us: u64,
    /// The only instance that could have decoded it, where the prefill is local.
    pub only: Option<InstanceId>,
}

impl Conductor {
    /// How much later a request must arrive for this candidate to be in time and to keep the
    /// promises made to others, µs.
    pub(crate) fn prefill_comeback_us(&self, request: &Request, candidate: &Candidate) -> u64 {
        let deadline_us = self.deadline_us(request, self.now_us);
        let late_us = (self.now_us + candidate.latest_us).saturating_sub(deadline_us);
        let Some(instance) = self.fleet.get(candidate.instance) else { return LATEST_US };
        let tail_us = self.handoff_tail_us(instance) + self.pipeline_latency_us(instance, &candidate.plan);
        let work = (candidate.plan.work_us, tail_us, deadline_us);
        let ahead_us = self.config.dispatch_ahead_us;
        late_us.max(instance.prefill.welcome_after_us(self.now_us, work, ahead_us)).max(SOONEST_US)
    }

    /// How much later a stranded request must arrive for its decode to be let in, µs.
    pub(crate) fn comeback_us(&self, request: &Request, stranded: Stranded) -> u64 {
        let need = self.decode_need(request, stranded.at_us);
        let pool = stranded.only.as_slice();
        let pool = if pool.is_empty() { self.fleet.decodes.as_slice() } else { pool };
        let able = pool.iter().filter(|id| self.holds(**id, request)).filter_map(|id| self.fleet.get(*id));
        able.map(|i| self.decode_wait_us(i, &need)).min().unwrap_or(LATEST_US).max(SOONEST_US)
    }

    /// How much later than `need` says an instance is predicted to take the decode, µs: what it
    /// has promised ends one by one, the earliest end that makes enough room is the answer.
    pub(crate) fn decode_wait_us(&self, instance: &Instance, need: &DecodeNeed) -> u64 {
        let ends = instance.decode.slots().iter().map(|s| s.finish_us).filter(|end| *end > need.at_us);
        let mut ends: Vec<u64> = ends.collect();
        ends.sort_unstable();
        let fits = |end: &u64| self.decode_fits(instance, &DecodeNeed { at_us: *end, ..*need }).is_ok();
        // Later starts can break the order, but hardly: a binary search is near enough for a hint.
        let first = ends.partition_point(|end| !fits(end));
        ends.get(first).or(ends.last()).map_or(LATEST_US, |end| end - need.at_us)
    }
}
