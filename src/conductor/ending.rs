//! The ends of requests: cancelled, had by its client already, forgotten.

use baton_scheduler::Input;
use baton_types::{Finish, RequestId};

use super::driver::Driver;
use super::session::{Phase, Session};

impl Driver {
    /// Lets both legs of a request go.
    pub(super) fn cancel(&mut self, request: RequestId, why: &'static str) {
        let Some(session) = self.sessions.get_mut(&request) else { return };
        session.trace.reason(why);
        // Its releases carry the attempt, so it is let go while it is known.
        self.step(Input::RequestCancelled { request });
        if self.end(request).is_some() {
            self.metrics.cancelled(why);
        }
    }

    /// A front door that has all it wants of an answer may still listen for what it took.
    pub(super) fn tell_usage(&self, request: RequestId) {
        let Some(session) = self.sessions.get(&request) else { return };
        let computed = matches!(session.phase, Phase::HandingOff | Phase::Decoding);
        if computed && !session.done && !session.answer.is_empty() {
            session.finish(Finish::Stop);
        }
    }

    /// Lets the legs of a request go whose client has all of its answer already. False: it has not.
    pub(super) fn let_go_if_done(&mut self, request: RequestId) -> bool {
        if !self.sessions.get(&request).is_some_and(|s| s.done) {
            return false;
        }
        self.step(Input::RequestCancelled { request });
        self.end(request);
        true
    }

    /// Forgets a request; its client has been, or is about to be, told.
    pub(super) fn end(&mut self, request: RequestId) -> Option<Session> {
        let mut session = self.sessions.remove(&request)?;
        self.deadlines.remove(&(session.deadline_us, request));
        self.parked.remove(&request);
        self.trial_is_over(request);
        self.metrics.ended();
        if let Some(capture) = self.capture.as_ref().filter(|_| self.canary.request != Some(request)) {
            capture.record(session.captured(&self.config));
        }
        if session.trace.is_kept() {
            let summary = session.summary(&self.config);
            self.spans.close(&mut session.trace, self.now_us, summary);
        }
        Some(session)
    }
}
