//! The ends of requests: cancelled, complete, forgotten.

use baton_legs::pairs::Phase;
use baton_types::{Finish, RequestId};

use super::driver::Driver;
use super::session::Session;

impl Driver {
    /// Lets both legs of a request go.
    pub(super) fn cancel(&mut self, request: RequestId, why: &'static str) {
        let Some(session) = self.sessions.get_mut(&request) else { return };
        session.trace.reason(why);
        self.pair(|pairs, now_us, core, effects| pairs.cancel(now_us, request, core, effects));
        if self.end(request).is_some() {
            self.metrics.cancelled(why);
        }
    }

    /// A front door that has all it wants of an answer may still listen for what it took.
    pub(super) fn send_usage(&mut self, request: RequestId) {
        let Some((session, pair)) = self.sessions.get_mut(&request).zip(self.pairs.get(request)) else {
            return;
        };
        let computed = matches!(pair.phase(), Phase::HandingOff | Phase::Decoding);
        if computed && !session.answer.is_empty() {
            session.satisfied = session.finish(Finish::Stop);
        }
    }

    /// Forgets a request; its client has its last word, or is about to get it.
    pub(super) fn end(&mut self, request: RequestId) -> Option<Session> {
        let mut session = self.sessions.remove(&request)?;
        self.metrics.ended();
        self.count_end(request, &session);
        if let Some(capture) = self.capture.as_ref().filter(|_| !self.canary.is(request)) {
            capture.record(session.captured(&self.config));
        }
        if session.trace.is_kept() {
            let summary = session.summary(&self.config);
            self.spans.close(&mut session.trace, self.now_us, summary);
        }
        Some(session)
    }
}
