//! Requests that were in an engine when it died: each of them may be what it died of.
//!
//! Such a request is tried once more: no more of them at a time than there are instances, so that one that is poison has
//! an instance without others of its kind as far as there is a choice. Its trial is over with its next token. In a second
//! engine that dies it is failed by name. What dies with a request on trial in it has died of that one: others there are
//! spared, once each, so that a poisonous one that draws tokens first is found all the same.

use baton_scheduler::Input;
use baton_types::{InstanceId, RequestId};
use baton_wire::v1;

use super::driver::Driver;
use super::inbox::Loss;
use super::session::{Phase, Session};
use crate::capture::CaptureOutcome;

/// Engines that may die with a request in them; then it is failed.
const DEATHS_MOST: u32 = 2;
/// The stage in errors, metrics and traces.
const STAGE: &str = "engine_died";

/// Whether an instance works on a request, as far as is known here.
fn is_in(session: &Session, instance: InstanceId) -> bool {
    match session.phase {
        Phase::Prefilling => session.prefill == Some(instance),
        Phase::Decoding => session.decode == Some(instance),
        Phase::Waiting | Phase::HandingOff => false,
    }
}

impl Driver {
    /// An instance died in the middle of its work. Who is spared is served elsewhere as after any loss.
    pub(super) fn suspect_all(&mut self, instance: InstanceId, node: &str, why: &str) {
        let found = self.sessions.iter().filter(|(_, s)| !s.done && is_in(s, instance));
        let mut requests: Vec<RequestId> = found.map(|(request, _)| *request).collect();
        if requests.iter().any(|request| self.on_trial.contains(request)) {
            let (on_trial, sessions) = (&self.on_trial, &mut self.sessions);
            requests.retain(|request| {
                let spared =
                    sessions.get_mut(request).is_some_and(|s| std::mem::replace(&mut s.spared, true));
                on_trial.contains(request) || spared
            });
        }
        requests.into_iter().for_each(|request| self.suspect(request, node, why));
    }

    /// A request was in an engine that died.
    pub(super) fn suspect(&mut self, request: RequestId, node: &str, why: &str) {
        let now_us = self.now_us;
        let Some(session) = self.sessions.get_mut(&request) else { return };
        session.deaths += 1;
        session.blame(format!("{node} was lost: {why}"), "node_lost", now_us);
        let deaths = session.deaths;
        // Its other leg is let go while it is known.
        self.step(Input::RequestCancelled { request });
        if deaths >= DEATHS_MOST {
            return self.condemn(request);
        }
        // Nobody's turn is waited for where somebody can be tried.
        self.unparked_us = 0;
        self.hold(request);
    }

    /// A leg's engine broke off, or is dead: then nobody is left there to be asked.
    pub(super) fn engine_broke(&mut self, request: RequestId, instance: InstanceId, failure: &v1::Failure) {
        let Some(node) = self.fleet.get(instance) else { return };
        let (name, epoch) = (node.name.clone(), node.epoch);
        // Then it is judged with the others that were there, when the instance is given up.
        let died_with_it =
            failure.engine_gone && self.sessions.get(&request).is_some_and(|s| is_in(s, instance));
        if failure.cut_off && !died_with_it {
            self.suspect(request, &name, &failure.message);
        } else if !failure.cut_off {
            // It never reached the engine.
            self.step(Input::RequestCancelled { request });
            self.unparked_us = 0;
            self.hold(request);
        }
        if failure.engine_gone {
            let why = format!("its engine is gone: {}", failure.message);
            self.gone(instance, epoch, &Loss::Died(why));
        }
    }

    fn condemn(&mut self, request: RequestId) {
        if let Some(session) = self.sessions.get_mut(&request) {
            session.trace.reason(STAGE);
            session.outcome = CaptureOutcome::Failed;
        }
        let Some(session) = self.end(request) else { return };
        self.metrics.failed(STAGE);
        let (request, cause) = (&session.submission.request_id, session.cause.as_deref().unwrap_or_default());
        let trace_id = session.trace.id();
        tracing::warn!(%request, trace_id, stage = STAGE, cause, "request failed: it was in two engines when they died");
        let message = "the request was in two engines when each of them died, and is not tried on a third: it may be \
                       what they died of; operators find its name and theirs in the log";
        session.fail(502, STAGE, message.into());
    }

    /// Whether a request that waits may be tried now; one that is suspected of an engine's death takes its turn.
    pub(super) fn goes_on_trial(&mut self, request: RequestId) -> bool {
        if self.sessions.get(&request).is_none_or(|s| s.deaths == 0) {
            return true;
        }
        let most = usize::try_from(self.fleet.prefills()).unwrap_or(usize::MAX).max(1);
        // Without a pair none is tried, and the core says so.
        if self.on_trial.len() >= most && self.can_serve() {
            return false;
        }
        self.on_trial.insert(request);
        true
    }

    /// An engine drew the request's next token and lives, or the request ended: the next one can be tried.
    pub(super) fn trial_is_over(&mut self, request: RequestId) {
        if self.on_trial.remove(&request) {
            self.unparked_us = 0;
        }
    }
}
