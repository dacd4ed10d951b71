//! What an instance has been given to prefill, and which of it goes next.
//!
//! Order of service: strict priority bands; inside a band the tenant with the least service so
//! far; inside a tenant the shortest predicted work, unless serving it first would break a
//! promise to another (then the earliest deadline) or something has waited past the ageing bound
//! (then the oldest). So short work does not wait behind long, and nothing starves.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use baton_types::{RequestId, TenantId};
use serde::{Deserialize, Serialize};

/// Placed on an instance, held back by the conductor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WaitingPrefill {
    pub request: RequestId,
    pub work_us: u64,
    pub arrived_us: u64,
    /// Latest moment for its prefill to end, µs.
    pub deadline_us: u64,
    pub priority: i32,
    pub tenant: TenantId,
    /// Weight of its class.
    pub weight: u32,
    /// It stays here until then, µs: there is no room yet to decode it.
    pub held_until_us: u64,
}

/// Sent to the engine, not yet finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DispatchedPrefill {
    pub request: RequestId,
    pub work_us: u64,
    pub new_tokens: u64,
    /// Latest moment for its prefill to end, µs.
    pub deadline_us: u64,
}

/// What a new piece of work would meet in a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outlook {
    /// Wait by the order of service, µs.
    pub expected_wait_us: u64,
    /// Wait if served by deadline, the latest that it can be, µs.
    pub deadline_wait_us: u64,
    /// How many would be served after it.
    pub behind: u32,
    /// Whether everything that now meets its deadline still would.
    pub keeps_promises: bool,
}

/// Rounds after which an estimate is taken as it is: a hint is not worth a walk without end.
const WELCOME_ROUNDS: usize = 16;

/// An engine is taken to have begun with what it was sent after this, µs: what comes later joins no pass of it.
const BEGINS_US: u64 = 2_000;

/// One instance's prefill work.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct PrefillLedger {
    /// By deadline, then arrival.
    waiting: Vec<WaitingPrefill>,
    waiting_us: u64,
    dispatched: Vec<DispatchedPrefill>,
    dispatched_us: u64,
    active_tokens: u64,
    /// Since when the engine works on what is dispatched, µs.
    head_since_us: u64,
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

    /// Work left at the engine if it keeps to the predictions, µs.
    pub(crate) fn dispatched_left_us(&self, now_us: u64) -> u64 {
        self.dispatched_us.saturating_sub(now_us.saturating_sub(self.head_since_us))
    }

    /// Requests held back for want of room, with their arrivals.
    pub(crate) fn held(&self) -> impl Iterator<Item = (u64, RequestId)> {
        self.waiting.iter().filter(|w| w.held_until_us > 0).map(|w| (w.arrived_us, w.request))
    }

    /// When the first of those held back goes on at the latest.
    pub(crate) fn held_until_us(&self) -> Option<u64> {
        let until = self.waiting.iter().map(|w| w.held_until_us);
        until.filter(|until_us| (1..u64::MAX).contains(until_us)).min()
    }

    /// A request is held back no longer.
    pub(crate) fn let_go(&mut self, request: RequestId) {
        let waiting = self.waiting.iter_mut().find(|w| w.request == request);
        waiting.expect("who is let go waits here").held_until_us = 0;
    }

    pub(crate) fn enqueue(&mut self, waiting: WaitingPrefill) {
        debug_assert!(
            self.waiting.iter().all(|w| w.request != waiting.request),
            "request {} waits here already",
            waiting.request
        );
        let key = (waiting.deadline_us, waiting.arrived_us, waiting.request);
        let at = self.waiting.partition_point(|w| (w.deadline_us, w.arrived_us, w.request) < key);
        self.waiting_us += waiting.work_us;
        self.waiting.insert(at, waiting);
    }

    pub(crate) fn take_waiting(&mut self, at: usize) -> WaitingPrefill {
        let waiting = self.waiting.remove(at);
        assert!(self.waiting_us >= waiting.work_us, "more work leaves a queue than was counted in it");
        self.waiting_us -= waiting.work_us;
        assert!(!self.waiting.is_empty() || self.waiting_us == 0, "work is counted where nobody waits");
        waiting
    }

    pub(crate) fn remove_waiting(&mut self, request: RequestId) -> bool {
        let found = self.waiting.iter().position(|w| w.request == request);
        found.map(|at| self.take_waiting(at)).is_some()
    }

    pub(crate) fn dispatch(&mut self, now_us: u64, work: DispatchedPrefill) {
        debug_assert!(
            self.dispatched.iter().all(|d| d.request != work.request),
            "request {} was sent here before, and has not ended",
            work.request
        );
        if self.dispatched.is_empty() {
            self.head_since_us = now_us;
        }
        self.dispatched_us += work.work_us;
        self.active_tokens += work.new_tokens;
        self.dispatched.push(work);
    }

    /// Takes finished (or given up) work out and restarts the clock of what is left.
    pub(crate) fn finish(&mut self, now_us: u64, request: RequestId) -> Option<DispatchedPrefill> {
        let at = self.dispatched.iter().position(|d| d.request == request)?;
        let done = self.dispatched.remove(at);
        // Whatever the engine has done of the others already is not credited to them: an engine that
        // runs late would otherwise look ever less loaded than it is, and draw ever more work.
        self.head_since_us = now_us;
        assert!(self.dispatched_us >= done.work_us, "more work ends than was sent");
        assert!(self.active_tokens >= done.new_tokens, "more tokens end than were sent");
        self.dispatched_us -= done.work_us;
        self.active_tokens -= done.new_tokens;
        Some(done)
    }

    /// Checks that the sums are those of what is queued and sent, and that those who wait stand in their order.
    ///
    /// # Errors
    /// Says which is off.
    pub(crate) fn check(&self) -> Result<(), String> {
        // Wide sums: a saved ledger may say anything.
        let waiting_us: u128 = self.waiting.iter().map(|w| u128::from(w.work_us)).sum();
        let dispatched_us: u128 = self.dispatched.iter().map(|d| u128::from(d.work_us)).sum();
        let active_tokens: u128 = self.dispatched.iter().map(|d| u128::from(d.new_tokens)).sum();
        let known = [self.waiting_us, self.dispatched_us, self.active_tokens].map(u128::from);
        if known != [waiting_us, dispatched_us, active_tokens] {
            return Err(format!(
                "I5: {waiting_us} µs wait and {dispatched_us} µs with {active_tokens} tokens are sent, the ledger says {known:?}"
            ));
        }
        if self.waiting.is_sorted_by_key(|w| (w.deadline_us, w.arrived_us, w.request)) {
            Ok(())
        } else {
            Err(String::from("I5: those who wait are not in the order of their deadlines"))
        }
    }

    /// When the engine will have at most `ahead_us` of work left, if it keeps to the predictions.
    pub(crate) const fn runs_low_at_us(&self, ahead_us: u64) -> u64 {
        self.head_since_us + self.dispatched_us.saturating_sub(ahead_us)
    }

    /// Until when work of `work_us` over `new_tokens` tokens is not to be sent, if it is not, µs: what an engine has not
    /// begun yet shares passes of `pass_tokens` with what is sent after it, and ends with them. That must make nothing
    /// late which was sent in time.
    pub(crate) fn shares_late_until_us(
        &self,
        now_us: u64,
        work: (u64, u64),
        pass_tokens: u64,
    ) -> Option<u64> {
        let (work_us, new_tokens) = work;
        let begins_us = self.head_since_us + BEGINS_US;
        let begun = usize::from(now_us >= begins_us);
        let end_us = now_us + self.dispatched_left_us(now_us);
        let mut room = pass_tokens;
        for sent in self.dispatched.iter().skip(begun).rev() {
            let shared = new_tokens.min(room);
            let later_us = work_us.saturating_mul(shared) / new_tokens.max(1);
            if end_us <= sent.deadline_us && end_us.saturating_add(later_us) > sent.deadline_us {
                let looked_at_us =
                    if begun == 0 { begins_us.min(sent.deadline_us) } else { sent.deadline_us };
                return Some(looked_at_us.max(now_us) + 1);
            }
            room = room.saturating_sub(sent.new_tokens);
        }
        None
    }

    /// What work of `work_us` due at `deadline_us` would meet here.
    pub(crate) fn outlook(&self, now_us: u64, work_us: u64, deadline_us: u64) -> Outlook {
        let left = self.dispatched_left_us(now_us);
        let (mut shorter, mut behind, mut by_deadline) = (left, 0, left);
        let mut clock = now_us + left;
        let mut keeps_promises = true;
        for w in &self.waiting {
            if w.work_us <= work_us {
                shorter += w.work_us;
            } else {
                behind += 1;
            }
            clock += w.work_us;
            if w.deadline_us <= deadline_us {
                by_deadline += w.work_us;
            } else if clock <= w.deadline_us && clock + work_us > w.deadline_us {
                keeps_promises = false;
            }
        }
        Outlook { expected_wait_us: shorter, deadline_wait_us: by_deadline, behind, keeps_promises }
    }

    /// How much later work of `work_us` with a first token `tail_us` behind it, which arriving now
    /// would be due at `deadline_us`, must arrive to be on time without making late what would not be, µs. Later means a later
    /// deadline: others then count as before it, or are already sent (`ahead_us` before they run).
    pub(crate) fn earliest_admission_us(&self, now_us: u64, work: (u64, u64, u64), ahead_us: u64) -> u64 {
        let (work_us, tail_us, deadline_us) = work;
        let start_us = now_us + self.dispatched_left_us(now_us);
        let mut later_us = 0;
        // Each round lets more go first; nearly all settle in two or three.
        for _ in 0..WELCOME_ROUNDS {
            let due_us = deadline_us + later_us;
            let (mut clock_us, mut end_us, mut needed_us) = (start_us, start_us + work_us, later_us);
            for w in &self.waiting {
                let sent_us = clock_us.saturating_sub(ahead_us);
                clock_us += w.work_us;
                if w.deadline_us <= due_us || sent_us <= now_us + later_us {
                    end_us += w.work_us;
                } else if clock_us <= w.deadline_us && clock_us + work_us > w.deadline_us {
                    needed_us = needed_us.max((w.deadline_us - deadline_us).min(sent_us - now_us));
                }
            }
            needed_us = needed_us.max((end_us + tail_us).saturating_sub(deadline_us));
            if needed_us <= later_us {
                break;
            }
            later_us = needed_us;
        }
        later_us
    }

    /// Which waiting work goes next.
    pub(crate) fn next(&self, now_us: u64, ageing_us: u64, fair: &FairShares) -> Option<usize> {
        let free = |w: &&WaitingPrefill| w.held_until_us <= now_us;
        let band = self.waiting.iter().filter(free).map(|w| w.priority).max()?;
        let in_band = |w: &&WaitingPrefill| w.priority == band && free(w);
        let oldest = self.waiting.iter().filter(in_band).map(|w| w.arrived_us).min()?;
        if now_us.saturating_sub(oldest) > ageing_us {
            return self.waiting.iter().position(|w| in_band(&w) && w.arrived_us == oldest);
        }
        let tenant = self.waiting.iter().filter(in_band).map(|w| (fair.served(w.tenant), w.tenant)).min()?.1;
        let shortest = self
            .waiting
            .iter()
            .enumerate()
            .filter(|(_, w)| in_band(w) && w.tenant == tenant)
            .min_by_key(|(at, w)| (w.work_us, *at))?
            .0;
        if self.breaks_promise(now_us, shortest) {
            return self.waiting.iter().position(|w| in_band(&w));
        }
        Some(shortest)
    }

    /// Whether serving `first` before all others makes any of them late that would not be.
    fn breaks_promise(&self, now_us: u64, first: usize) -> bool {
        debug_assert!(first < self.waiting.len(), "who is served first waits");
        let start = now_us + self.dispatched_left_us(now_us);
        let extra = self.waiting[first].work_us;
        let mut clock = start;
        for (at, w) in self.waiting.iter().enumerate() {
            if at == first {
                return false;
            }
            clock += w.work_us;
            if clock <= w.deadline_us && clock + extra > w.deadline_us {
                return true;
            }
        }
        false
    }
}

/// Service received by each tenant, weighted; a newcomer starts at the least of those known.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct FairShares {
    served: Vec<u64>,
    floor: u64,
}

/// Tenants beyond this share one account (I9).
const MAX_TENANTS: usize = 4096;

impl FairShares {
    fn slot(tenant: TenantId) -> usize {
        tenant.index().min(MAX_TENANTS - 1)
    }

    /// Weighted service that a tenant has had, µs; an idle tenant does not save up.
    pub(crate) fn served(&self, tenant: TenantId) -> u64 {
        self.served.get(Self::slot(tenant)).copied().unwrap_or(0).max(self.floor)
    }

    /// Charges a tenant for work just dispatched.
    pub(crate) fn charge(&mut self, tenant: TenantId, weight: u32, work_us: u64) {
        let slot = Self::slot(tenant);
        if self.served.len() <= slot {
            self.served.resize(slot + 1, 0);
        }
        let before = self.served[slot].max(self.floor);
        self.served[slot] = before + work_us / u64::from(weight.max(1));
        // The tenant just served was the least served one that waits: nobody may lag behind it.
        self.floor = before;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use proptest::prelude::*;

    fn waiting(id: u64, work_us: u64, deadline_us: u64) -> WaitingPrefill {
        WaitingPrefill {
            request: RequestId(id),
            work_us,
            arrived_us: id,
            deadline_us,
            priority: 0,
            tenant: TenantId(0),
            weight: 1,
            held_until_us: 0,
        }
    }

    /// Ten microseconds a token.
    fn sent(id: u64, work_us: u64, deadline_us: u64) -> DispatchedPrefill {
        DispatchedPrefill { request: RequestId(id), work_us, new_tokens: work_us / 10, deadline_us }
    }

    fn ledger(all: &[WaitingPrefill]) -> PrefillLedger {
        let mut ledger = PrefillLedger::default();
        all.iter().for_each(|w| ledger.enqueue(*w));
        ledger
    }

    fn next_id(ledger: &PrefillLedger, now_us: u64, ageing_us: u64) -> u64 {
        let at = ledger.next(now_us, ageing_us, &FairShares::default()).expect("something waits");
        ledger.waiting()[at].request.0
    }

    #[test]
    fn short_work_goes_first_while_promises_allow() {
        let l = ledger(&[waiting(1, 1000, 5000), waiting(2, 10, 6000)]);
        assert_eq!(next_id(&l, 100, 1_000_000), 2);
        let tight = ledger(&[waiting(1, 1000, 1105), waiting(2, 10, 6000)]);
        assert_eq!(next_id(&tight, 100, 1_000_000), 1, "ten more would break the first promise");
        let lost = ledger(&[waiting(1, 1000, 500), waiting(2, 10, 6000)]);
        assert_eq!(next_id(&lost, 100, 1_000_000), 2, "a promise already broken holds nobody back");
    }

    #[test]
    fn nothing_waits_past_the_ageing_bound() {
        let l = ledger(&[waiting(1, 1_000_000, 10_000_000), waiting(50, 1, 10_000_000)]);
        assert_eq!(next_id(&l, 60, 100), 50);
        assert_eq!(next_id(&l, 102, 100), 1);
    }

    #[test]
    fn bands_are_strict_and_tenants_take_turns() {
        let urgent = WaitingPrefill { priority: 1, ..waiting(9, 500, 9000) };
        assert_eq!(next_id(&ledger(&[waiting(1, 1, 9000), urgent]), 0, 1_000_000), 9);
        let mut fair = FairShares::default();
        let mut l = ledger(&[]);
        for id in 0..6 {
            l.enqueue(WaitingPrefill { tenant: TenantId(u32::from(id >= 4)), ..waiting(id, 100, 100_000) });
        }
        let mut order = vec![];
        while let Some(at) = l.next(0, 1_000_000, &fair) {
            let w = l.take_waiting(at);
            fair.charge(w.tenant, w.weight, w.work_us);
            order.push(w.tenant.0);
        }
        assert_eq!(order[..4], [0, 1, 0, 1], "{order:?}");
    }

    #[test]
    fn an_idle_tenant_does_not_save_up_service() {
        let mut fair = FairShares::default();
        for _ in 0..10 {
            fair.charge(TenantId(0), 1, 100);
        }
        assert!(fair.served(TenantId(1)) >= 900);
    }

    #[test]
    fn outlook_counts_what_is_ahead_and_behind() {
        let mut l = ledger(&[waiting(1, 100, 1000), waiting(2, 300, 2000)]);
        l.dispatch(0, sent(7, 50, u64::MAX));
        let o = l.outlook(10, 200, 1500);
        assert_eq!((o.expected_wait_us, o.deadline_wait_us, o.behind), (140, 140, 1));
        assert!(o.keeps_promises);
        assert!(!l.outlook(10, 1700, 1500).keeps_promises);
        assert_eq!((l.active_tokens(), l.runs_low_at_us(20)), (5, 30));
    }

    #[test]
    fn finishing_restarts_the_clock() {
        let mut l = PrefillLedger::default();
        l.dispatch(100, sent(1, 50, u64::MAX));
        l.dispatch(110, sent(2, 70, u64::MAX));
        assert_eq!(l.dispatched_left_us(130), 90);
        assert!(l.finish(160, RequestId(1)).is_some() && l.finish(160, RequestId(1)).is_none());
        assert_eq!(l.dispatched_left_us(160), 70);
        assert_eq!(l.dispatched_left_us(190), 40);
        assert_eq!(l.finish(190, RequestId(2)).map(|d| d.new_tokens), Some(7));
        assert_eq!(l.dispatched_left_us(190) + l.active_tokens(), 0);
    }

    /// It was sent early whatever it did to others: at three times the load a third of those let in came too late.
    #[test]
    fn what_would_end_a_pass_late_for_others_is_not_sent_into_it() {
        let mut l = PrefillLedger::default();
        l.dispatch(100, sent(1, 50_000, 51_000));
        let until = |l: &PrefillLedger, now_us, work_us, pass| {
            l.shares_late_until_us(now_us, (work_us, work_us / 10), pass)
        };
        assert_eq!(until(&l, 100, 40_000, 8192), Some(2_101), "it may not have begun");
        assert_eq!(until(&l, 2_100, 40_000, 8192), None, "what has begun shares no pass with it");
        l.dispatch(2_200, sent(2, 30_000, 100_000));
        assert_eq!(until(&l, 3_000, 10_000, 8192), None, "80 ms and 10 are in time");
        assert_eq!(until(&l, 3_000, 40_000, 8192), Some(100_001));
        assert_eq!(until(&l, 3_000, 40_000, 500), None, "no more than 5 ms of it fit into a pass");
        l.dispatch(3_000, sent(3, 10_000, u64::MAX));
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
            while let Some(at) = l.next(now, u64::MAX, &FairShares::default()) {
                let w = l.take_waiting(at);
                now += w.work_us;
                prop_assert!(now <= w.deadline_us, "{w:?} ended at {now}");
            }
        }
    }
}
