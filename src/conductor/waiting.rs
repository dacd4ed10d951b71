//! What waits, and for how long: each stage of a request has a time at which it is given up, and who
//! was let in but fits nowhere right now is tried again.

use baton_scheduler::Input;
use baton_types::RequestId;

use super::driver::Driver;
use super::inbox::Loss;
use super::session::{Phase, Session};
use crate::capture::CaptureOutcome;

/// How often requests that nothing could take are tried again, µs.
pub(super) const UNPARK_EVERY_US: u64 = 50_000;
/// How long requests wait for a pair to come back after the last one was lost, µs: those under way and new ones alike.
/// A node that is started anew, or whose line broke, is back within this; a server that loads a model is not.
const PAIR_BACK_WITHIN_US: u64 = 5_000_000;
/// Placements and hand-offs of one request at most (I9).
const MAX_ATTEMPTS: u32 = 32;

/// How long a second failed hand-off waits before it is tried again, µs; each further one twice as long.
const HANDOFF_PAUSE_US: u64 = 100_000;

impl Driver {
    /// The first failure moves at once; further ones wait, so that an instance that has died is known to
    /// be lost before every try was spent on it.
    pub(super) fn handoff_failed(&mut self, request: RequestId) {
        let Some(session) = self.sessions.get_mut(&request) else { return };
        let (count, latest) = session.handoffs_failed;
        if latest == session.attempt {
            // Both legs told of it.
            return;
        }
        session.handoffs_failed = (count + 1, session.attempt);
        if count == 0 {
            return self.step(Input::HandoffFailed { request });
        }
        let pause_us = HANDOFF_PAUSE_US << (count - 1).min(4);
        self.later.insert((self.now_us + pause_us, request, session.attempt));
    }

    fn retry_handoffs(&mut self) {
        while let Some(&(at_us, request, attempt)) = self.later.first().filter(|(at, ..)| *at <= self.now_us)
        {
            self.later.remove(&(at_us, request, attempt));
            let open = |s: &Session| matches!(s.phase, Phase::Prefilling | Phase::HandingOff) && !s.done;
            if self.sessions.get(&request).is_some_and(|s| s.attempt == attempt && open(s)) {
                self.step(Input::HandoffFailed { request });
            }
        }
    }

    /// A request that nothing can take right now waits for its stage's time. False: it has waited for too long, or
    /// there is no pair, and none is expected back.
    pub(super) fn park(&mut self, request: RequestId) -> bool {
        let waits = |s: &Session| !s.done && s.attempt < MAX_ATTEMPTS;
        if !self.sessions.get(&request).is_some_and(waits) || !(self.can_serve() || self.pair_may_return()) {
            return false;
        }
        self.hold(request);
        true
    }

    /// Whether the last pair was lost so lately that its nodes may be about to come back.
    pub(super) fn pair_may_return(&self) -> bool {
        self.pair_lost_us.is_some_and(|at_us| self.now_us < at_us + PAIR_BACK_WITHIN_US)
    }

    /// Keeps a request of which the core does not know, until it is tried again.
    pub(super) fn hold(&mut self, request: RequestId) {
        self.trial_is_over(request);
        let Some(session) = self.sessions.get_mut(&request) else { return };
        if !session.parked {
            session.parked = true;
            (session.prefill, session.decode) = (None, None);
            session.enter(Phase::Waiting, self.now_us, &self.fleet);
            let wait_us = self.policy.parked_stage_us(session);
            self.set_deadline(request, self.now_us + wait_us);
        }
        self.parked.insert(request);
    }

    /// Tries again whoever was parked.
    pub(super) fn unpark(&mut self) {
        if self.parked.is_empty() || self.now_us < self.unparked_us + UNPARK_EVERY_US {
            return;
        }
        self.unparked_us = self.now_us;
        for request in std::mem::take(&mut self.parked) {
            if !self.goes_on_trial(request) {
                self.parked.insert(request);
                continue;
            }
            self.arrive(request);
            let held_back = self.parked.contains(&request);
            if !held_back && self.sessions.get(&request).is_some_and(|s| !s.let_in) {
                self.admitted(request);
            }
        }
    }

    /// Gives the present stage of a request until `at_us`, or until its client's patience ends.
    pub(super) fn set_deadline(&mut self, request: RequestId, at_us: u64) {
        let Some(session) = self.sessions.get_mut(&request) else { return };
        let patience_us = session.patience_us();
        self.deadlines.remove(&(session.deadline_us, request));
        session.deadline_us = at_us.min(patience_us);
        self.deadlines.insert((session.deadline_us, request));
    }

    /// Ends stages whose time is over and lives that went silent.
    pub(super) fn expire(&mut self) {
        self.retry_handoffs();
        while let Some(&(at_us, request)) = self.deadlines.first().filter(|(at, _)| *at <= self.now_us) {
            self.deadlines.remove(&(at_us, request));
            self.stage_expired(request);
        }
        let since_us = self.now_us.saturating_sub(self.config.service.lost_after_us);
        for (instance, epoch) in self.fleet.silent(since_us) {
            self.gone(instance, epoch, &Loss::Died("no heartbeat".into()));
        }
    }

    fn stage_expired(&mut self, request: RequestId) {
        let (live, can_serve) = (self.sessions.len() as u64, self.can_serve());
        let Some(session) = self.sessions.get_mut(&request) else { return };
        let patience_us = session.patience_us();
        if session.phase == Phase::Decoding {
            // Tokens since then have moved the deadline without touching the queue.
            let since_us = session.last_token_us.max(self.away.back_us);
            let due_us = since_us + self.policy.token_stage_us(session);
            if due_us.min(patience_us) > self.now_us {
                return self.set_deadline(request, due_us);
            }
        }
        if session.done {
            self.let_go_if_done(request);
            return;
        }
        let phase = session.phase;
        let pace = self.fleet.pace([session.prefill, session.decode]);
        if patience_us > self.now_us && session.turn.is_to_come(phase, pace, live) {
            let stage_us = match phase {
                Phase::Prefilling => self.policy.prefill_stage_us(session),
                _ => self.policy.handoff_stage_us(session),
            };
            return self.set_deadline(request, self.now_us + stage_us);
        }
        let stage = match phase {
            Phase::Waiting => "queue_timeout",
            Phase::Prefilling => "prefill_timeout",
            Phase::HandingOff => "handoff_timeout",
            Phase::Decoding => "decode_timeout",
        };
        self.metrics.stage_expired(stage);
        tracing::warn!(
            request = %session.submission.request_id,
            number = request.0,
            attempt = session.attempt,
            stage,
            "a stage took longer than it may"
        );
        let lacks_pair = !session.let_in || (patience_us > self.now_us && !can_serve);
        if phase == Phase::Waiting && lacks_pair {
            return self.refuse_without_pair(request);
        }
        if patience_us <= self.now_us || phase == Phase::Waiting {
            let whose = if phase == Phase::Waiting { "its stage's" } else { "the client's" };
            let message = format!("{whose} time ran out at stage '{}'", phase.name());
            return self.give_up(request, stage, message);
        }
        session.blame(format!("{stage} on its instance"), stage, self.now_us);
        let emitted_tokens = u32::try_from(session.answer.len()).unwrap_or(u32::MAX);
        self.step(match phase {
            Phase::Prefilling => Input::PrefillFailed { request },
            Phase::HandingOff => Input::HandoffFailed { request },
            _ => Input::DecodeFailed { request, emitted_tokens },
        });
        // Whatever the core made of it, no request is left without a time at which something happens.
        if self.sessions.get(&request).is_some_and(|s| s.deadline_us <= self.now_us) {
            self.give_up(request, stage, format!("nothing went on after stage '{}'", phase.name()));
        }
    }

    fn give_up(&mut self, request: RequestId, stage: &'static str, message: String) {
        if let Some(session) = self.sessions.get_mut(&request) {
            session.outcome = CaptureOutcome::Failed;
            session.fail(504, stage, message);
            session.trace.failed(stage, self.now_us);
        }
        self.cancel(request, stage);
    }

    /// Audits that driver and core know the same requests and that each has its time.
    #[cfg(test)]
    pub(super) fn check_sessions(&self) {
        let times = self.sessions.iter().map(|(request, s)| (s.deadline_us, *request));
        assert_eq!(times.collect::<std::collections::BTreeSet<_>>(), self.deadlines, "deadlines");
        let mut known = 0;
        for (request, session) in &self.sessions {
            let parked = self.parked.contains(request);
            assert!(session.deadline_us > self.now_us, "request {request} is overdue");
            assert_ne!(self.core.knows(*request), parked, "request {request}, parked: {parked}");
            let sent = session.prefill.is_some() || session.decode.is_some();
            assert_eq!(sent, session.phase != Phase::Waiting, "request {request}: {:?}", session.phase);
            known += usize::from(!parked);
        }
        assert_eq!(self.core.live_requests(), known);
        assert!(self.parked.iter().all(|request| self.sessions.contains_key(request)));
    }
}
