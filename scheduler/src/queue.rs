//! An instance's prefill queue: the prefills that it has been given, and which is sent next.
//!
//! Order of service: among the waiting requests of the highest band, and of the tenant with the least service so far,
//! the one with the shortest predicted work is next. If serving it first would break a promise to another request, of
//! any band, the earliest deadline is next instead. A promise to a lower band yields where one to a higher band could
//! not be kept otherwise. A request that has waited for twice its promised time goes before all. So short work does not
//! wait behind long work, promises are kept, and no request starves.
//!
//! A request may count on blocks that another one, which waits in the same queue, will compute. It takes its place right
//! behind that one by deadline, so that the blocks are still there when its turn comes, and is never served first.

mod passes;
mod work;

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use baton_types::RequestId;
use core::cmp::Reverse;
use serde::{Deserialize, Serialize};

use crate::estimate::LinkLedger;
use crate::placement::Plan;
use crate::shares::FairShares;
use crate::tickets::KeptPrefill;
pub(crate) use work::{DispatchedPrefill, NewWork, Outlook, WaitingPrefill};

/// Most rounds of an estimate; it is only a hint.
const WELCOME_ROUNDS: usize = 16;

/// One instance's prefill work.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct PrefillLedger {
    /// By place, then arrival.
    waiting: Vec<WaitingPrefill>,
    waiting_us: u64,
    waiting_tokens: u64,
    dispatched: Vec<DispatchedPrefill>,
    dispatched_us: u64,
    active_tokens: u64,
    /// Since when the engine works on what is dispatched, µs.
    head_since_us: u64,
    /// Until then the engine takes nothing new, µs; 0 once that is over.
    #[serde(default)]
    busy_until_us: u64,
    /// The KV that leaves the instance.
    pub outbound: LinkLedger,
}

impl PrefillLedger {
    pub(crate) fn waiting(&self) -> &[WaitingPrefill] {
        &self.waiting
    }

    pub(crate) fn dispatched(&self) -> &[DispatchedPrefill] {
        &self.dispatched
    }

    pub(crate) const fn waiting_us(&self) -> u64 {
        self.waiting_us
    }

    /// New prompt tokens sent to the engine and not finished.
    pub(crate) const fn active_tokens(&self) -> u64 {
        self.active_tokens
    }

    /// Work left at the engine by the predictions, µs.
    pub(crate) fn dispatched_left_us(&self, now_us: u64) -> u64 {
        self.computing_left_us(now_us).max(self.outbound.left_us(now_us))
    }

    /// As [`Self::dispatched_left_us`], of what the engine computes alone.
    pub(crate) fn computing_left_us(&self, now_us: u64) -> u64 {
        let sent_us = self.dispatched_us.saturating_sub(now_us.saturating_sub(self.head_since_us));
        sent_us.max(self.busy_until_us.saturating_sub(now_us))
    }

    /// The engine takes nothing new until then, µs.
    pub(crate) fn set_busy(&mut self, until_us: u64) {
        self.busy_until_us = self.busy_until_us.max(until_us);
    }

    /// Until when the engine takes nothing new, µs, if it does not now.
    pub(crate) fn busy_until_us(&self, now_us: u64) -> Option<u64> {
        Some(self.busy_until_us).filter(|until_us| *until_us > now_us)
    }

    /// Whether the engine takes requests again, and nobody has looked since.
    pub(crate) const fn is_back(&self, now_us: u64) -> bool {
        self.busy_until_us > 0 && self.busy_until_us <= now_us
    }

    /// The engine takes requests again.
    pub(crate) const fn end_busy(&mut self) {
        self.busy_until_us = 0;
    }

    /// When the engine has done all that is here, by the predictions; at any time before now without sent work, µs.
    pub(crate) fn free_at_us(&self) -> u64 {
        let sent_until_us = if self.dispatched.is_empty() {
            0
        } else {
            self.head_since_us.saturating_add(self.dispatched_us)
        };
        let free_us = sent_until_us.max(self.outbound.free_at_us()).max(self.busy_until_us);
        free_us.saturating_add(self.waiting_us)
    }

    /// What waits here of a request.
    pub(crate) fn of(&self, request: RequestId) -> Option<&WaitingPrefill> {
        self.waiting.iter().find(|w| w.request == request)
    }

    /// Requests of this router that are held back for want of room, with their arrivals.
    pub(crate) fn held(&self) -> impl Iterator<Item = (u64, RequestId)> {
        self.waiting
            .iter()
            .filter(|w| w.held_until_us > 0 && w.peer.is_none())
            .map(|w| (w.arrived_us, w.request))
    }

    /// The earliest end of the holds after `now_us`.
    pub(crate) fn held_until_us(&self, now_us: u64) -> Option<u64> {
        let until = self.waiting.iter().map(|w| w.held_until_us);
        until.filter(|until_us| (now_us + 1..u64::MAX).contains(until_us)).min()
    }

    /// Ends the hold of a request.
    pub(crate) fn end_hold(&mut self, request: RequestId) {
        let waiting = self.waiting.iter_mut().find(|w| w.request == request);
        waiting.expect("who is let go waits here").held_until_us = 0;
    }

    /// Holds what waits at a position until then, µs.
    pub(crate) fn hold(&mut self, at: usize, until_us: u64) {
        self.waiting[at].held_until_us = until_us;
    }

    pub(crate) fn enqueue(&mut self, waiting: WaitingPrefill) {
        debug_assert!(
            self.waiting.iter().all(|w| w.request != waiting.request),
            "request {} waits here already",
            waiting.request
        );
        let at = self.waiting.partition_point(|w| w.turn() < waiting.turn());
        self.waiting_us += waiting.work_us;
        self.waiting_tokens += waiting.new_tokens;
        let after = waiting.after.filter(|leader| self.waiting[..at].iter().any(|w| w.request == *leader));
        self.waiting.insert(at, WaitingPrefill { after, ..waiting });
    }

    /// Takes out what is served: those that follow it are free to go.
    pub(crate) fn take_served(&mut self, at: usize) -> WaitingPrefill {
        let served = self.waiting[at].request;
        self.waiting[at..].iter_mut().filter(|w| w.after == Some(served)).for_each(|w| w.after = None);
        self.take_waiting(at)
    }

    /// Takes out what is not served here: one of those that follow it leads the others.
    pub(crate) fn take_waiting(&mut self, at: usize) -> WaitingPrefill {
        let waiting = self.waiting.remove(at);
        assert!(self.waiting_us >= waiting.work_us, "more work leaves a queue than was counted in it");
        self.waiting_us -= waiting.work_us;
        self.waiting_tokens -= waiting.new_tokens;
        assert!(!self.waiting.is_empty() || self.waiting_us == 0, "work is counted where nobody waits");
        self.lead_on(at, waiting.request);
        waiting
    }

    /// Those that followed a request that has left, from a position on, follow the first of them.
    fn lead_on(&mut self, at: usize, left: RequestId) {
        let mut first = None;
        for follower in self.waiting[at..].iter_mut().filter(|w| w.after == Some(left)) {
            follower.after = first;
            // What is held may be sent after all the others.
            first = first.or((follower.held_until_us == 0).then_some(follower.request));
        }
    }

    fn is_followed(&self, request: RequestId) -> bool {
        self.waiting.iter().any(|w| w.after == Some(request))
    }

    /// A waiting request has more work than was known. It takes its turn by its own deadline, unless others count on its
    /// blocks: then it keeps its turn.
    pub(crate) fn grow(&mut self, at: usize, plan: &Plan) {
        let before = self.waiting[at];
        assert!(before.after.is_none(), "request {} has its turn before what it follows", before.request);
        let Plan { work_us, alone_us, new_tokens, .. } = *plan;
        let grown = WaitingPrefill { work_us, alone_us, new_tokens, ..before };
        if self.is_followed(before.request) {
            self.waiting_us = self.waiting_us - before.work_us + work_us;
            self.waiting_tokens = self.waiting_tokens - before.new_tokens + new_tokens;
            self.waiting[at] = grown;
        } else {
            self.take_waiting(at);
            self.enqueue(WaitingPrefill { order_us: before.deadline_us, ..grown });
        }
    }

    pub(crate) fn remove_waiting(&mut self, request: RequestId) -> bool {
        let found = self.waiting.iter().position(|w| w.request == request);
        found.map(|at| self.take_waiting(at)).is_some()
    }

    pub(crate) fn dispatch(&mut self, mut work: DispatchedPrefill) {
        debug_assert!(
            self.dispatched.iter().all(|d| d.request != work.request),
            "request {} was sent here before, and has not ended",
            work.request
        );
        if self.dispatched.is_empty() {
            self.head_since_us = work.sent_us;
        }
        self.count_beside(&mut work);
        self.dispatched_us += work.work_us;
        self.active_tokens += work.new_tokens;
        self.dispatched.push(work);
    }

    /// Since when the engine works on what is dispatched, or has nothing, µs.
    pub(crate) const fn head_since_us(&self) -> u64 {
        self.head_since_us
    }

    /// Whether nothing that was sent here was computed since then, µs.
    pub(crate) const fn idles_since(&self, since_us: u64) -> bool {
        self.dispatched.is_empty() && self.head_since_us < since_us
    }

    /// Takes finished (or given up) work out and restarts the clock of what is left.
    pub(crate) fn finish(&mut self, now_us: u64, request: RequestId) -> Option<DispatchedPrefill> {
        let at = self.dispatched.iter().position(|d| d.request == request)?;
        let done = self.dispatched.remove(at);
        // The engine's progress on the others is not credited to them: an engine that runs late would otherwise look
        // ever less loaded than it is, and attract ever more work.
        self.head_since_us = now_us;
        assert!(self.dispatched_us >= done.work_us, "more work ends than was sent");
        assert!(self.active_tokens >= done.new_tokens, "more tokens end than were sent");
        self.dispatched_us -= done.work_us;
        self.active_tokens -= done.new_tokens;
        Some(done)
    }

    /// Checks that the sums are those of the queued and sent work, and that the waiting requests are in order.
    ///
    /// # Errors
    /// Says which is off.
    pub(crate) fn check(&self) -> Result<(), String> {
        // Wide sums, because a saved ledger may hold any numbers.
        let waiting_us: u128 = self.waiting.iter().map(|w| u128::from(w.work_us)).sum();
        let dispatched_us: u128 = self.dispatched.iter().map(|d| u128::from(d.work_us)).sum();
        let active_tokens: u128 = self.dispatched.iter().map(|d| u128::from(d.new_tokens)).sum();
        let waiting_tokens: u128 = self.waiting.iter().map(|w| u128::from(w.new_tokens)).sum();
        let known =
            [self.waiting_us, self.dispatched_us, self.active_tokens, self.waiting_tokens].map(u128::from);
        if known != [waiting_us, dispatched_us, active_tokens, waiting_tokens] {
            return Err(format!(
                "I5: {waiting_us} µs wait and {dispatched_us} µs with {active_tokens} tokens are sent, the ledger says {known:?}"
            ));
        }
        if !self.waiting.is_sorted_by_key(WaitingPrefill::turn) {
            return Err(String::from("I5: those who wait are not in the order of their deadlines"));
        }
        let before = |at: usize, leader: RequestId| self.waiting[..at].iter().any(|w| w.request == leader);
        match self.waiting.iter().enumerate().find(|(at, w)| w.after.is_some_and(|l| !before(*at, l))) {
            Some((_, w)) => Err(format!("I5: what request {} follows does not wait before it", w.request)),
            None => Ok(()),
        }
    }

    /// When the engine will have at most `ahead_us` of work left, by the predictions.
    pub(crate) const fn runs_low_at_us(&self, ahead_us: u64) -> u64 {
        let computed_us = self.head_since_us + self.dispatched_us.saturating_sub(ahead_us);
        let sent_us = self.outbound.free_at_us().saturating_sub(ahead_us);
        if computed_us > sent_us { computed_us } else { sent_us }
    }

    /// Hands out place, deadline and work of all that waits, with what waits, and of what tickets keep, by place, µs.
    fn promises(
        &self,
        kept: impl Iterator<Item = (u64, u64)>,
        mut each: impl FnMut(u64, u64, u64, Option<&WaitingPrefill>),
    ) {
        let mut kept = kept.peekable();
        for w in &self.waiting {
            while let Some((due_us, work_us)) = kept.next_if(|(due_us, _)| *due_us <= w.order_us) {
                each(due_us, due_us, work_us, None);
            }
            each(w.order_us, w.deadline_us, w.work_us, Some(w));
        }
        kept.for_each(|(due_us, work_us)| each(due_us, due_us, work_us, None));
    }

    /// The outlook of new work here, with what tickets keep. What was late before others made way has no deadline to keep.
    pub(crate) fn outlook(
        &self,
        now_us: u64,
        new: NewWork,
        kept: &[KeptPrefill],
        made_way: &[WaitingPrefill],
    ) -> Outlook {
        let NewWork { work_us, order_us, priority, rank_us, .. } = new;
        let ahead = self.dispatched_left_us(now_us);
        let (mut shorter, mut behind, mut by_deadline) = (ahead, 0, ahead);
        let mut clock = now_us + ahead;
        let mut keeps_promises = true;
        let promised = |place_us: u64, due_us: u64, before_us: u64, _: Option<&WaitingPrefill>| {
            clock += before_us;
            if place_us <= order_us {
                by_deadline += before_us;
                return;
            }
            let before = made_way.iter().filter(|other| other.order_us <= place_us);
            let as_it_was_us = clock + before.map(|other| other.work_us).sum::<u64>();
            if as_it_was_us <= due_us && clock + work_us > due_us {
                keeps_promises = false;
            }
        };
        self.promises(by_chance(kept), promised);
        for w in &self.waiting {
            if w.priority > priority || (w.priority == priority && w.alone_us <= rank_us) {
                shorter += w.work_us;
            } else {
                behind += 1;
            }
        }
        Outlook { expected_wait_us: shorter, deadline_wait_us: by_deadline, behind, keeps_promises }
    }

    /// How much later work of `work_us` with a first token `tail_us` behind it, which arriving now
    /// would be due at `deadline_us`, must arrive to be on time without making late what would not be, µs. Later means a later
    /// deadline: others then count as before it, or are already sent (`ahead_us` before they run).
    pub(crate) fn earliest_admission_us(
        &self,
        now_us: u64,
        work: (u64, u64, u64),
        ahead_us: u64,
        kept: &[KeptPrefill],
    ) -> u64 {
        let (work_us, tail_us, deadline_us) = work;
        let start_us = now_us + self.dispatched_left_us(now_us);
        let mut later_us = 0;
        // Each round puts more work first; nearly all estimates settle in two or three.
        for _ in 0..WELCOME_ROUNDS {
            let due_us = deadline_us + later_us;
            let (mut clock_us, mut end_us, mut needed_us) = (start_us, start_us + work_us, later_us);
            let promised = |place_us: u64, other_due_us: u64, before_us: u64, _: Option<&WaitingPrefill>| {
                let sent_us = clock_us.saturating_sub(ahead_us);
                clock_us += before_us;
                if place_us <= due_us || sent_us <= now_us + later_us {
                    end_us += before_us;
                } else if clock_us <= other_due_us && clock_us + work_us > other_due_us {
                    needed_us = needed_us.max((place_us - deadline_us).min(sent_us - now_us));
                }
            };
            self.promises(kept.iter().map(|kept| (kept.due_us, kept.whole_us)), promised);
            needed_us = needed_us.max((end_us + tail_us).saturating_sub(deadline_us));
            if needed_us <= later_us {
                break;
            }
            later_us = needed_us;
        }
        later_us
    }

    /// Waiting work that has to leave so that new work, and all that stays, ends in time: the rule of Moore and Hodgson
    /// (1968), which keeps the most. By deadline, each time that one would be late, one of those so far leaves: the one
    /// with the least claim, of equals the largest, and of those the newest. `claim` is `None` for work that stays.
    /// `None` where that is not enough.
    pub(crate) fn in_the_way(
        &self,
        now_us: u64,
        new: NewWork,
        kept: &[KeptPrefill],
        claim: impl Fn(&WaitingPrefill) -> Option<Claim>,
    ) -> Option<Vec<RequestId>> {
        let mut clock_us = now_us + self.dispatched_left_us(now_us);
        let (mut as_it_is_us, mut joins_at, mut jobs) = (clock_us, 0, Vec::new());
        self.promises(by_chance(kept), |place_us, due_us, work_us, waiting| {
            as_it_is_us += work_us;
            joins_at += usize::from(place_us <= new.order_us);
            // A request that is late anyway has no deadline to keep.
            let due_us = if as_it_is_us <= due_us { due_us } else { u64::MAX };
            let claimed = waiting.and_then(|w| Some((claim(w)?, Reverse(w.work_us), Reverse(w.request))));
            jobs.push((due_us, work_us, claimed));
        });
        jobs.insert(joins_at, (new.deadline_us, new.work_us, None));
        let (mut may_leave, mut leave) = (Vec::new(), Vec::new());
        for (due_us, work_us, claimed) in jobs {
            clock_us += work_us;
            may_leave.extend(claimed);
            let own = claimed.map(|(.., Reverse(request))| request);
            // A request that has left has no deadline to keep.
            while clock_us > due_us && own.is_none_or(|request| !leave.contains(&request)) {
                let mut least = (0..may_leave.len()).min_by_key(|at| may_leave[*at])?;
                let (claim, Reverse(freed_us), _) = may_leave[least];
                let last = may_leave.len() - 1;
                if clock_us - freed_us > due_us
                    && own == Some(may_leave[last].2.0)
                    && may_leave[last].0 == claim
                {
                    least = last;
                }
                let (_, Reverse(freed_us), Reverse(request)) = may_leave.swap_remove(least);
                clock_us -= freed_us;
                leave.push(request);
            }
        }
        Some(leave)
    }

    /// The work that is served next, of what waits and `may` be.
    pub(crate) fn next(
        &self,
        now_us: u64,
        fair: &FairShares,
        may: impl Fn(&WaitingPrefill) -> bool,
    ) -> Option<usize> {
        let free = |w: &&WaitingPrefill| w.held_until_us <= now_us && may(w) && w.after.is_none();
        let aged = self.waiting.iter().enumerate().filter(|(_, w)| free(w) && w.is_aged(now_us));
        if let Some((at, _)) = aged.min_by_key(|(_, w)| w.arrived_us) {
            return Some(at);
        }
        let band = self.waiting.iter().filter(free).map(|w| w.priority).max()?;
        let in_band = |w: &&WaitingPrefill| w.priority == band && free(w);
        let tenant = self.waiting.iter().filter(in_band).map(|w| (fair.served(w.tenant), w.tenant)).min()?.1;
        let preferred = self
            .waiting
            .iter()
            .enumerate()
            .filter(|(_, w)| in_band(w) && w.tenant == tenant)
            .min_by_key(|(at, w)| (w.alone_us, *at))?
            .0;
        if self.breaks_promise(now_us, preferred) {
            return self.waiting.iter().position(|w| free(&w));
        }
        Some(preferred)
    }

    /// Whether serving `first` before all others makes any of them late that would not be. If `first` is in time only
    /// when it is served now, promises to lower bands do not count.
    fn breaks_promise(&self, now_us: u64, first: usize) -> bool {
        let start_us = now_us + self.dispatched_left_us(now_us);
        let (before, own) = (&self.waiting[..first], &self.waiting[first]);
        let in_turn_us = start_us + before.iter().map(|w| w.work_us).sum::<u64>() + own.work_us;
        let urgent = in_turn_us > own.deadline_us && start_us + own.work_us <= own.deadline_us;
        let mut clock_us = start_us;
        before.iter().any(|w| {
            clock_us += w.work_us;
            let broken = clock_us <= w.deadline_us && clock_us + own.work_us > w.deadline_us;
            broken && !(urgent && w.priority < own.priority)
        })
    }
}

/// Deadlines and works of what tickets keep, by the chance that clients return, µs.
fn by_chance(kept: &[KeptPrefill]) -> impl Iterator<Item = (u64, u64)> {
    kept.iter().filter(|kept| kept.work_us > 0).map(|kept| (kept.due_us, kept.work_us))
}

/// The claim of a waiting request to its place: its band, and how little of its tenant's share lies before it.
pub(crate) type Claim = (i32, Reverse<u64>);

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use baton_types::{InstanceId, TenantId};
    use proptest::prelude::*;

    fn waiting(id: u64, work_us: u64, deadline_us: u64) -> WaitingPrefill {
        WaitingPrefill {
            request: RequestId(id),
            work_us,
            alone_us: work_us,
            new_tokens: work_us / 10,
            arrived_us: id,
            deadline_us,
            order_us: deadline_us,
            priority: 0,
            tenant: TenantId(0),
            weight: 1,
            held_until_us: 0,
            tag_us: 0,
            since_us: 0,
            peer: None,
            after: None,
        }
    }

    /// Ten microseconds a token.
    fn sent(id: u64, work_us: u64, deadline_us: u64) -> DispatchedPrefill {
        DispatchedPrefill {
            request: RequestId(id),
            work_us,
            new_tokens: work_us / 10,
            deadline_us,
            sent_us: 0,
            beside_tokens: 0,
        }
    }

    fn ledger(all: &[WaitingPrefill]) -> PrefillLedger {
        let mut ledger = PrefillLedger::default();
        all.iter().for_each(|w| ledger.enqueue(*w));
        ledger
    }

    fn next_id(ledger: &PrefillLedger, now_us: u64) -> u64 {
        let at = ledger.next(now_us, &FairShares::default(), |_| true).expect("something waits");
        ledger.waiting()[at].request.0
    }

    #[test]
    fn short_work_goes_first_while_promises_allow() {
        let l = ledger(&[waiting(1, 1000, 5000), waiting(2, 10, 6000)]);
        assert_eq!(next_id(&l, 100), 2);
        let tight = ledger(&[waiting(1, 1000, 1105), waiting(2, 10, 6000)]);
        assert_eq!(next_id(&tight, 100), 1, "ten more would break the first promise");
        let lost = ledger(&[waiting(1, 1000, 500), waiting(2, 10, 6000)]);
        assert_eq!(next_id(&lost, 100), 2, "a promise already broken holds nobody back");
    }

    #[test]
    fn bands_are_strict_and_tenants_take_turns() {
        let urgent = WaitingPrefill { priority: 1, ..waiting(9, 500, 9000) };
        assert_eq!(next_id(&ledger(&[waiting(1, 1, 9000), urgent]), 0), 9);
        let mut fair = FairShares::default();
        let mut l = ledger(&[]);
        for id in 0..6 {
            l.enqueue(WaitingPrefill { tenant: TenantId(u32::from(id >= 4)), ..waiting(id, 100, 100_000) });
        }
        let mut order = vec![];
        while let Some(at) = l.next(0, &fair, |_| true) {
            let w = l.take_waiting(at);
            fair.charge(w.tenant, w.weight, w.work_us);
            order.push(w.tenant.0);
        }
        assert_eq!(order[..4], [0, 1, 0, 1], "{order:?}");
    }

    #[test]
    fn what_has_waited_twice_as_long_as_promised_goes_first() {
        let l = ledger(&[waiting(1, 1_000_000, 101), waiting(50, 1, 10_000_000)]);
        assert_eq!(next_id(&l, 200), 50, "it is late, and holds nobody up");
        assert_eq!(next_id(&l, 202), 1);
    }

    #[test]
    fn a_lower_band_goes_first_while_the_higher_is_in_time_all_the_same() {
        let urgent = WaitingPrefill { priority: 1, ..waiting(9, 500, 9_000) };
        let l = ledger(&[waiting(1, 1_000, 1_400), urgent]);
        assert_eq!(next_id(&l, 0), 1, "the first promise would be broken, and the second need not be");
        let now_or_never = WaitingPrefill { deadline_us: 1_450, ..urgent };
        assert_eq!(next_id(&ledger(&[waiting(1, 1_000, 1_400), now_or_never]), 0), 9);
        let lost = WaitingPrefill { deadline_us: 1_450, work_us: 2_000, alone_us: 2_000, ..urgent };
        assert_eq!(next_id(&ledger(&[waiting(1, 1_000, 1_400), lost]), 0), 1, "it is late anyway");
    }

    #[test]
    fn the_fewest_leave_and_only_those_of_lesser_claim() {
        let l = ledger(&[
            waiting(1, 100, 150),
            waiting(2, 300, 500),
            waiting(3, 200, 700),
            waiting(4, 90, 9_000),
        ]);
        let new = |work_us, deadline_us| NewWork {
            work_us,
            deadline_us,
            order_us: deadline_us,
            priority: 1,
            rank_us: work_us,
        };
        let all = |w: &WaitingPrefill| Some((w.priority, Reverse(0)));
        let ids = |leave: Vec<RequestId>| leave.into_iter().map(|r| r.0).collect::<Vec<_>>();
        assert_eq!(
            l.in_the_way(0, new(100, 9_500), &[], all).map(ids),
            Some(vec![]),
            "there is time for all"
        );
        assert_eq!(
            l.in_the_way(0, new(250, 600), &[], all).map(ids),
            Some(vec![2]),
            "the largest makes room for both"
        );
        assert_eq!(l.in_the_way(0, new(250, 240), &[], all), None, "it cannot be in time, whatever leaves");
        let small = |w: &WaitingPrefill| (w.request.0 != 2).then_some((w.priority, Reverse(0)));
        assert_eq!(l.in_the_way(0, new(190, 600), &[], small).map(ids), Some(vec![3]));
        assert_eq!(l.in_the_way(0, new(190, 600), &[], |_| None), None, "nobody may leave");
        let first = |w: &WaitingPrefill| Some((0, Reverse(u64::from(w.request.0 == 1))));
        assert_eq!(
            l.in_the_way(0, new(190, 600), &[], first).map(ids),
            Some(vec![1]),
            "the one with the least claim"
        );
        let kept = [KeptPrefill { instance: InstanceId(0), due_us: 9_000, work_us: 8_000, whole_us: 8_000 }];
        assert_eq!(
            l.in_the_way(0, new(400, 8_900), &kept, all).map(ids),
            Some(vec![2]),
            "beside what is kept there is no time for all"
        );
    }

    #[test]
    fn outlook_counts_what_is_ahead_and_behind() {
        let mut l = ledger(&[waiting(1, 100, 1000), waiting(2, 300, 2000)]);
        l.dispatch(sent(7, 50, u64::MAX));
        let new =
            |work_us| NewWork { work_us, deadline_us: 1500, order_us: 1500, priority: 0, rank_us: work_us };
        let o = l.outlook(10, new(200), &[], &[]);
        assert_eq!((o.expected_wait_us, o.deadline_wait_us, o.behind), (140, 140, 1));
        assert!(o.keeps_promises);
        assert!(!l.outlook(10, new(1700), &[], &[]).keeps_promises);
        let left = waiting(3, 1_600, 1_900);
        assert!(l.outlook(10, new(1700), &[], &[left]).keeps_promises, "the second was late before");
        assert_eq!((l.active_tokens(), l.runs_low_at_us(20)), (5, 30));
    }

    #[test]
    fn finishing_restarts_the_clock() {
        let mut l = PrefillLedger::default();
        l.dispatch(DispatchedPrefill { sent_us: 100, ..sent(1, 50, u64::MAX) });
        l.dispatch(DispatchedPrefill { sent_us: 110, ..sent(2, 70, u64::MAX) });
        assert_eq!(l.dispatched_left_us(130), 90);
        assert!(l.finish(160, RequestId(1)).is_some() && l.finish(160, RequestId(1)).is_none());
        assert_eq!(l.dispatched_left_us(160), 70);
        assert_eq!(l.dispatched_left_us(190), 40);
        assert_eq!(l.finish(190, RequestId(2)).map(|d| d.new_tokens), Some(7));
        assert_eq!(l.dispatched_left_us(190) + l.active_tokens(), 0);
    }

    /// A regression: a prompt that had begun counted as done with sharing. With its last pass still to come, what was sent into
    /// that made it late.
    #[test]
    fn the_last_pass_of_a_long_prompt_is_shared_too() {
        let mut l = PrefillLedger::default();
        let long = DispatchedPrefill { new_tokens: 8_245, ..sent(1, 830_000, 850_000) };
        l.dispatch(long);
        let until = |work_us: u64| l.shares_late_until_us(700_000, (work_us, work_us / 100), 8_192);
        assert_eq!(until(100_000), Some(850_001), "53 tokens of it go with all of these");
        assert_eq!(until(20_000), None, "it has so much time");
        let whole = DispatchedPrefill { new_tokens: 16_384, ..long };
        let mut l = PrefillLedger::default();
        l.dispatch(whole);
        assert_eq!(l.shares_late_until_us(700_000, (100_000, 1_000), 8_192), None, "its passes are full");
    }

    /// A regression: it was sent early whatever that did to others, and at three times the load a third of the admitted
    /// requests came too late.
    #[test]
    fn what_would_end_a_pass_late_for_others_is_not_sent_into_it() {
        let mut l = PrefillLedger::default();
        l.dispatch(DispatchedPrefill { sent_us: 100, ..sent(1, 50_000, 51_000) });
        let until = |l: &PrefillLedger, now_us, work_us, pass| {
            l.shares_late_until_us(now_us, (work_us, work_us / 10), pass)
        };
        assert_eq!(until(&l, 100, 40_000, 8192), Some(2_101), "it may not have begun");
        assert_eq!(until(&l, 2_100, 40_000, 8192), None, "what has begun shares no pass with it");
        l.dispatch(DispatchedPrefill { sent_us: 2_200, ..sent(2, 30_000, 100_000) });
        assert_eq!(until(&l, 3_000, 10_000, 8192), None, "80 ms and 10 are in time");
        assert_eq!(until(&l, 3_000, 40_000, 8192), Some(100_001));
        assert_eq!(until(&l, 3_000, 40_000, 500), None, "no more than 5 ms of it fit into a pass");
        l.dispatch(DispatchedPrefill { sent_us: 3_000, ..sent(3, 10_000, u64::MAX) });
        assert_eq!(until(&l, 4_000, 40_000, 1_000), None, "the pass of the second is full");
        assert_eq!(until(&l, 100_100, 40_000, 8192), None, "one that is late holds nobody up");
    }

    proptest! {
        #[test]
        fn with_enough_capacity_for_all_nobody_is_late(
            jobs in proptest::collection::vec((1u64..100, 0u64..2000), 1..30),
        ) {
            // Deadlines are set so that serving by deadline is feasible; the real order must be too.
            let mut sorted: Vec<(u64, u64)> = jobs.clone();
            sorted.sort_by_key(|j| j.1);
            let (mut clock, mut l) = (0, PrefillLedger::default());
            for (id, (work, slack)) in sorted.iter().enumerate() {
                clock += work;
                l.enqueue(waiting(id as u64, *work, clock + slack));
            }
            let mut now = 0;
            while let Some(at) = l.next(now, &FairShares::default(), |_| true) {
                let w = l.take_waiting(at);
                now += w.work_us;
                prop_assert!(now <= w.deadline_us, "{w:?} ended at {now}");
            }
        }
    }
}
