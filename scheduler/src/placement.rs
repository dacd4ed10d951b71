//! Where a request goes: candidates, their terms, and the pick.

mod decode;
mod dispatch;
mod passes;
mod pick;
mod prefill;
mod retry_after;

use alloc::vec::Vec;
use baton_types::{InstanceId, RequestId};
use core::cmp::Reverse;

use crate::estimate::NEVER_US;
use crate::index::WideMatch;
use crate::queue::NewWork;
use crate::{FetchPlan, RejectReason};

pub(crate) use decode::{DecodeChoice, DecodeNeed, PlannedEnd};
pub(crate) use dispatch::TURN_US;
pub(crate) use retry_after::MIN_RETRY_AFTER_US;

/// The hit of one instance for the present request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hit {
    pub blocks: u32,
    pub by_tier: [u32; 3],
    /// Leading blocks that the instance will hold once the prefills sent to it are over.
    pub coming: u32,
}

impl Hit {
    /// Leading blocks that a prefill sent there now would find when it starts.
    pub(crate) fn by_its_turn(self) -> u32 {
        self.blocks.max(self.coming)
    }
}

/// The result of one look-up, by instance; reused for every request.
#[derive(Debug, Default)]
pub(crate) struct Hits {
    by_instance: Vec<Hit>,
    touched: Vec<InstanceId>,
    /// Holders with the longest hits, longest first, at most [`Hits::TOP`].
    top: Vec<(u32, InstanceId)>,
    /// Where requests wait that will compute some of it: by instance, the most leading blocks, and the first request of
    /// those that compute so many.
    waiting: Vec<(InstanceId, (u32, Reverse<RequestId>))>,
    /// Holders of the beginning, where they are many: those without a hit of their own hold no more.
    pub wide: WideMatch,
    /// The most leading blocks that a decode instance has in its fastest memory.
    pub decode_blocks: u32,
}

impl Hits {
    /// Most holders that are kept as fetch sources.
    const TOP: usize = 8;

    pub(crate) fn reset(&mut self, bound: usize) {
        for id in self.touched.drain(..) {
            self.by_instance[id.index()] = Hit::default();
        }
        if self.by_instance.len() < bound {
            self.by_instance.resize(bound, Hit::default());
        }
        self.top.clear();
        self.waiting.clear();
        self.wide.clear();
        self.decode_blocks = 0;
    }

    pub(crate) fn record(&mut self, instance: InstanceId, hit: Hit) {
        debug_assert_eq!(
            hit.by_tier.iter().sum::<u32>(),
            hit.blocks,
            "each block counts in its fastest tier"
        );
        if let Some(slot) = self.by_instance.get_mut(instance.index()) {
            *slot = hit;
            self.touched.push(instance);
        }
    }

    /// Records that an instance will hold so many blocks. Call it after recording the blocks that it holds now.
    pub(crate) fn will_hold(&mut self, instance: InstanceId, blocks: u32) {
        if let Some(slot) = self.by_instance.get_mut(instance.index()) {
            slot.coming = slot.coming.max(blocks);
            self.touched.push(instance);
        }
    }

    /// Records that a request that waits for an instance will compute so many blocks there.
    pub(crate) fn waits(&mut self, request: RequestId, instance: InstanceId, blocks: u32) {
        let most = (blocks, Reverse(request));
        match self.waiting.binary_search_by_key(&instance, |(at, _)| *at) {
            Ok(nth) => self.waiting[nth].1 = self.waiting[nth].1.max(most),
            Err(nth) => self.waiting.insert(nth, (instance, most)),
        }
    }

    /// The request that will compute the most leading blocks of all that wait for an instance, and their number.
    pub(crate) fn waiting_on(&self, instance: InstanceId) -> Option<(RequestId, u32)> {
        let nth = self.waiting.binary_search_by_key(&instance, |(at, _)| *at).ok()?;
        let (blocks, Reverse(request)) = self.waiting[nth].1;
        Some((request, blocks))
    }

    /// Whether so many blocks would be among the longest hits.
    pub(crate) fn lacks_sources(&self, blocks: u32) -> bool {
        self.top.len() < Self::TOP || self.top.last().is_some_and(|(least, _)| *least < blocks)
    }

    /// Keeps a possible fetch source.
    pub(crate) fn offer_source(&mut self, instance: InstanceId, blocks: u32) {
        let at = self.top.partition_point(|(b, _)| *b >= blocks);
        if at < Self::TOP {
            self.top.insert(at, (blocks, instance));
            self.top.truncate(Self::TOP);
        }
        debug_assert!(self.top.is_sorted_by(|one, next| one.0 >= next.0), "the longest come first");
    }

    pub(crate) fn of(&self, instance: InstanceId) -> Hit {
        let hit = self.by_instance.get(instance.index()).copied().unwrap_or_default();
        if hit.blocks > 0 {
            return hit;
        }
        let held = self.wide.of(instance).filter(|_| instance.index() < self.by_instance.len());
        held.map_or(hit, |m| Hit { blocks: m.blocks, by_tier: m.by_tier, ..hit })
    }

    /// Instances that hold some of it or will, about as many as asked for; some come twice.
    pub(crate) fn some_holders(&self, count: usize) -> impl Iterator<Item = InstanceId> {
        let of_many = |holders: usize| holders.div_ceil(count).max(1);
        let wide = self.wide.matches().map(|m| m.instance).step_by(of_many(self.wide.matches().len()));
        let waiting = self.waiting.iter().map(|(id, _)| *id).step_by(of_many(self.waiting.len()));
        self.touched.iter().copied().step_by(of_many(self.touched.len())).chain(waiting).chain(wide)
    }

    pub(crate) fn sources(&self) -> &[(u32, InstanceId)] {
        &self.top
    }
}

/// One way to prefill the request: which blocks are reused, from where, at what cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Plan {
    pub cached_tokens: u64,
    pub new_tokens: u64,
    pub load_us: u64,
    pub work_us: u64,
    /// The work if no other prompt shared its passes, µs.
    pub alone_us: u64,
    /// Whether the decodes there leave no room for the prefill, or it would slow them beyond their objective.
    pub breaks_decodes: bool,
    pub fetch: Option<FetchPlan>,
    /// The request that waits on the same instance and computes some of it first.
    pub after: Option<RequestId>,
}

/// A candidate instance with its arithmetic.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Candidate {
    pub instance: InstanceId,
    pub plan: Plan,
    /// Expected wait before its first pass, µs.
    pub queue_us: u64,
    /// Predicted TTFT by the order of service, µs.
    pub ttft_us: u64,
    /// Predicted TTFT at the latest that the order of service allows, µs.
    pub latest_us: u64,
    /// By how much it delays the requests that wait there, summed, µs.
    pub behind_us: u64,
    /// The part of the wait that is a wait for room to decode, µs.
    pub room_wait_us: u64,
    /// Latest time for the first token that keeps the objective with the learnt margin, µs.
    pub deadline_us: u64,
    /// Its prefill as new work for the instance's queue.
    pub new: NewWork,
    /// The number that the policy minimises.
    pub score: f64,
    pub feasible: bool,
}

impl Candidate {
    /// Its prefill, which ends at that time, µs.
    pub(crate) const fn planned_end(&self, at_us: u64) -> PlannedEnd {
        PlannedEnd { on: self.instance, at_us, work_us: self.plan.work_us }
    }
}

/// A placement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Placement {
    pub candidate: Candidate,
    pub decode: InstanceId,
    pub room_tokens: u32,
}

/// A prefill that was not to be: what a ticket keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlannedPrefill {
    pub instance: InstanceId,
    /// Its part of the instance's time, µs; nothing where it would wait for decodes to end.
    pub work_us: u64,
    /// From its arrival to the start of its decode, µs.
    pub takes_us: u64,
    /// Latest moment for its end, had it been let in, µs.
    pub due_us: u64,
}

impl From<&Candidate> for PlannedPrefill {
    fn from(candidate: &Candidate) -> Self {
        let Candidate { instance, plan, new, .. } = candidate;
        // Those that it would share a pass with now may be gone when it comes back.
        // Beside decodes that leave no time for it, it is they that it waits for.
        let work_us = if plan.breaks_decodes { 0 } else { plan.alone_us };
        let takes_us = if plan.breaks_decodes { 0 } else { plan.load_us.saturating_add(plan.work_us) };
        Self { instance: *instance, work_us, takes_us, due_us: new.deadline_us }
    }
}

/// Why there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub reason: RejectReason,
    pub retry_after_us: u64,
    pub predicted_ttft_us: Option<u64>,
    /// Where it was closest to being placed; none where a wait is no use.
    pub closest: Option<PlannedPrefill>,
}

/// The prediction, or `None` if it stands for never.
pub(crate) fn within_reach(us: u64) -> Option<u64> {
    (us < NEVER_US).then_some(us)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_forget_the_last_request_and_keep_the_longest_sources() {
        let mut hits = Hits::default();
        hits.reset(12);
        for id in 0..12 {
            hits.record(InstanceId(id), Hit { blocks: id, by_tier: [id, 0, 0], coming: 0 });
            hits.offer_source(InstanceId(id), id);
        }
        hits.record(InstanceId(99), Hit { blocks: 9, by_tier: [9, 0, 0], coming: 0 });
        assert_eq!(hits.sources().len(), Hits::TOP);
        assert_eq!(hits.sources()[0], (11, InstanceId(11)));
        assert_eq!(hits.of(InstanceId(5)).blocks, 5);
        hits.will_hold(InstanceId(5), 3);
        assert_eq!(hits.of(InstanceId(5)).by_its_turn(), 5);
        hits.will_hold(InstanceId(5), 8);
        hits.will_hold(InstanceId(5), 7);
        assert_eq!(
            hits.of(InstanceId(5)),
            Hit { coming: 8, ..Hit { blocks: 5, by_tier: [5, 0, 0], coming: 0 } }
        );
        hits.reset(12);
        assert_eq!(hits.of(InstanceId(5)), Hit::default());
        assert!(hits.sources().is_empty() && hits.touched.is_empty());
    }
}
