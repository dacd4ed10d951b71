//! From the cores' effects to orders for nodes and answers for clients.

use baton_legs::pairs::{Cause, Effect, Phase, PrefillOrder};
use baton_router::{Event, Refusal};
use baton_scheduler::{Effect as Order, FailStage, Input, Rejection};
use baton_types::{InstanceId, RequestId, Role};
use baton_wire::v1;

use super::core::Trouble;
use super::driver::Driver;
use super::refusals::{RefusalText, RefusedRequest, refusal_text};
use super::session::Session;
use super::status::chosen;
use crate::capture::CaptureOutcome;
use crate::spans::Place;

impl Driver {
    pub(super) fn carry_out(&mut self, effect: Effect, trouble: &Trouble) {
        match effect {
            Effect::Order(Order::Replicate { from, to, chain }) => self.replicate(from, to, &chain),
            Effect::Order(Order::ChangeRole { instance, role }) => self.role_changed(instance, role),
            Effect::Order(Order::Explain(decision)) => self.decisions.note(decision),
            // Orders about requests come as those of an attempt.
            Effect::Order(_) => {}
            Effect::Entered { request, phase, attempt, legs } => self.entered(request, phase, attempt, legs),
            Effect::Prefill(ordered) => self.start_prefill(&ordered),
            Effect::Expect { request, attempt, instance, room_tokens, given_tokens } => {
                self.expect(request, (attempt, instance), room_tokens, given_tokens);
            }
            Effect::Decode { request, attempt, instance } => self.start_decode(request, attempt, instance),
            Effect::Handoff { request, attempt, from, to } => {
                if let Some(session) = self.sessions.get_mut(&request) {
                    session.prediction = None;
                }
                let handoff = v1::Handoff { to: self.fleet.peer(to) };
                self.push(from, request, attempt, v1::order::Order::Handoff(handoff));
            }
            Effect::Release { request, attempt, instance } => {
                self.push(instance, request, attempt, v1::order::Order::Release(v1::Release {}));
            }
            Effect::Admitted { request } => self.admitted(request),
            Effect::Blame { request, cause } => self.blame(request, cause, trouble),
            Effect::Late { request, attempt, phase } => self.late(request, attempt, phase),
            Effect::Refuse(rejection) => self.refuse(&rejection),
            Effect::CutShort(rejection) => self.cut_short(&rejection),
            Effect::Fail { request, stage, attempts } => self.fail(request, stage, attempts),
            Effect::Condemn { request } => self.fail_suspect(request),
            Effect::GiveUp { request, phase, impatient } => self.give_up(request, phase, impatient),
            Effect::Ended { request } => _ = self.end(request),
        }
    }

    pub(super) fn push(
        &mut self,
        instance: InstanceId,
        request: RequestId,
        attempt: u32,
        order: v1::order::Order,
    ) {
        if let Some(node) = self.fleet.get_mut(instance) {
            node.outbox.push(v1::Order { request: request.0, attempt, order: Some(order) });
        }
    }

    fn entered(&mut self, request: RequestId, phase: Phase, attempt: u32, legs: [Option<InstanceId>; 2]) {
        let Some(session) = self.sessions.get_mut(&request) else { return };
        let leg = legs[usize::from(matches!(phase, Phase::HandingOff | Phase::Decoding))];
        let role = leg.and_then(|leg| self.fleet.get(leg)).map_or("none", |node| node.role.name());
        if let Some((stage, role, time_us)) = session.enter(phase, role, self.now_us)
            && !self.canary.is(request)
        {
            self.metrics.stage(stage, role, time_us);
        }
        if !session.trace.is_kept() {
            return;
        }
        let name = |leg: Option<InstanceId>| self.fleet.get(leg?).map(|node| node.name.as_str().into());
        let [prefill, decode] = legs.map(name);
        session.trace.enter(Place { stage: phase.name(), attempt, prefill, decode }, self.now_us);
    }

    fn start_prefill(&mut self, ordered: &PrefillOrder) {
        let PrefillOrder { request, attempt, instance, decode, room_tokens, .. } = *ordered;
        let naming = self.naming();
        let peer = (decode != instance).then(|| self.fleet.peer(decode)).flatten();
        let fetch_from = ordered.fetch.and_then(|f| self.fleet.peer(f.from));
        let terms = self.decisions.of(request).and_then(chosen);
        let decided = terms.map(|terms| (terms.instance, terms.cached_tokens));
        let prediction = self.prediction(request, instance);
        let Some(session) = self.sessions.get_mut(&request) else { return };
        self.decisions.decodes_at(request, session.arrived_us, decode);
        // Only what was expected of this very instance, and for the prompt alone.
        let expected = decided.or(session.expected).filter(|(chosen, _)| *chosen == instance);
        session.expected = expected.filter(|_| session.answer.is_empty());
        session.moves = self.pairs.get(request).map_or(session.moves, |pair| pair.moves());
        // A prediction holds for the first placement; what is placed again says nothing of it.
        session.prediction = prediction.filter(|_| attempt == 1);
        let expected_tokens = session.expected.map(|(_, tokens)| tokens);
        let named = self.fleet.get(instance).is_some_and(|node| node.hello.wants_body);
        let prefill = v1::Prefill {
            work: Some(prefill_work(session, ordered.given_tokens, named.then_some(naming))),
            decode: peer,
            fetch_from,
            fetch_blocks: ordered.fetch.map_or(0, |f| f.blocks),
            room_tokens,
            order: ordered.order,
            expected_tokens,
        };
        self.push(instance, request, attempt, v1::order::Order::Prefill(prefill));
    }

    fn start_decode(&mut self, request: RequestId, attempt: u32, instance: InstanceId) {
        let Some(session) = self.sessions.get_mut(&request) else { return };
        session.last_token_us = self.now_us;
        session.decodes_at_us = Some(self.now_us);
        let answer = session.answer.clone();
        let order = v1::order::Order::StartDecode(v1::StartDecode { answer });
        self.push(instance, request, attempt, order);
    }

    /// KV will come: of the tokens that were prefilled. The decode node decodes the answer's later tokens itself.
    fn expect(
        &mut self,
        request: RequestId,
        (attempt, instance): (u32, InstanceId),
        room_tokens: u32,
        given_tokens: u32,
    ) {
        let naming = self.naming();
        let Some(session) = self.sessions.get(&request) else { return };
        let asked = self.fleet.get(instance).is_some_and(|node| node.hello.engine_moves_kv);
        let work = if asked {
            prefill_work(session, given_tokens, Some(naming))
        } else {
            decode_work(session, given_tokens, naming)
        };
        let expect = v1::Expect { work: Some(work), room_tokens };
        self.push(instance, request, attempt, v1::order::Order::Expect(expect));
    }

    fn replicate(&mut self, from: InstanceId, to: InstanceId, chain: &[baton_types::BlockHash]) {
        let peer = self.fleet.peer(from);
        if peer.is_none() || self.fleet.get(to).is_none() {
            return self.step(Input::ReplicateFinished { to });
        }
        let keys = self.names.full(chain);
        if keys.is_empty() {
            return self.step(Input::ReplicateFinished { to });
        }
        self.metrics.copied(if self.fleet.get(to).is_some_and(|n| n.role == Role::Store) {
            "store"
        } else {
            "peer"
        });
        let order = v1::Replicate { from: peer, chain: baton_wire::pack_keys(&keys) };
        self.push(to, RequestId(0), 0, v1::order::Order::Replicate(order));
    }

    fn set_outcome(&mut self, request: RequestId, outcome: CaptureOutcome, reason: &'static str) {
        if let Some(session) = self.sessions.get_mut(&request) {
            session.trace.reason(reason);
            session.outcome = outcome;
        }
    }

    /// Keeps what went wrong, for the error if nothing helps, and a word of it for the trace.
    fn blame(&mut self, request: RequestId, cause: Cause, trouble: &Trouble) {
        let now_us = self.now_us;
        let Some(session) = self.sessions.get_mut(&request) else { return };
        let (cause, failure) = match cause {
            // Its decode goes on.
            Cause::LostBehind => {
                session.cause = Some(trouble.cause.clone());
                return;
            }
            Cause::Lost | Cause::Leg => (trouble.cause.clone(), trouble.failure),
            Cause::Handoff => ("its KV did not reach the decode instance".into(), "handoff"),
            Cause::Late(phase) => (format!("{} on its instance", phase.timeout()), phase.timeout()),
        };
        session.blame(cause, failure, now_us);
    }

    fn late(&self, request: RequestId, attempt: u32, phase: Phase) {
        let Some(session) = self.sessions.get(&request) else { return };
        let stage = phase.timeout();
        self.metrics.stage_expired(stage);
        tracing::warn!(
            request = %session.submission.request_id,
            number = request.0,
            attempt,
            stage,
            "a stage took longer than it may"
        );
    }

    /// Ends a refused request; its session, and what to say to its client.
    fn end_refused(&mut self, rejection: &Rejection) -> Option<(Session, RefusalText)> {
        self.set_outcome(rejection.request, CaptureOutcome::Rejected, rejection.reason.name());
        let session = self.end(rejection.request)?;
        self.metrics.refused(rejection.reason.name());
        let class = self.config.scheduler.classes.get(session.class.index());
        let class = class.map_or("", |class| &class.name);
        self.decisions.refused(rejection, &session, class, self.now_us);
        let text = self.refusal_text(rejection, &session);
        Some((session, text))
    }

    fn cut_short(&mut self, rejection: &Rejection) {
        if let Some((session, text)) = self.end_refused(rejection) {
            session.fail(503, rejection.reason.name(), text.message);
        }
    }

    fn refuse(&mut self, rejection: &Rejection) {
        let Some((session, RefusalText { status, message, param })) = self.end_refused(rejection) else {
            return;
        };
        let retry_after_us = (status == 429 || status == 503).then_some(rejection.retry_after_us.max(1));
        session.send(Event::Refused(Refusal {
            status,
            reason: rejection.reason.name().into(),
            message: message.into(),
            param,
            retry_after_us,
            predicted_ttft_us: rejection.predicted_ttft_us.filter(|us| *us > 0),
        }));
    }

    fn refusal_text(&self, rejection: &Rejection, session: &Session) -> RefusalText {
        let scheduler = &self.config.scheduler;
        let prompt_tokens = session.submission.tokens.len() as u64;
        let request = RefusedRequest {
            prompt_tokens,
            answer_tokens: session.answer.len() as u64,
            asked_tokens: session.submission.asked_tokens,
            objectives: session.submission.objectives,
            class: scheduler.classes.get(session.class.index()).unwrap_or(&scheduler.classes[0]),
            least_tbt_us: scheduler.least_tbt_us(session.class),
            idle_step_us: self.core.idle_step_us(prompt_tokens),
        };
        refusal_text(rejection, &request)
    }

    pub(super) fn fail(&mut self, request: RequestId, stage: FailStage, attempts: u32) {
        let stage = stage.name();
        self.set_outcome(request, CaptureOutcome::Failed, stage);
        let Some(session) = self.end(request) else { return };
        let cause = session.cause.clone().unwrap_or_else(|| "no reason was told".into());
        self.metrics.failed(stage);
        let trace_id = session.trace.id();
        tracing::warn!(request = %session.submission.request_id, trace_id, stage, cause, "request failed");
        let message = format!(
            "the request was lost at stage '{stage}' after {attempts} attempt(s): {cause}; it is safe to send it again"
        );
        session.fail(502, stage, message);
    }

    fn fail_suspect(&mut self, request: RequestId) {
        let stage = "engine_died";
        self.set_outcome(request, CaptureOutcome::Failed, stage);
        let Some(session) = self.end(request) else { return };
        self.metrics.failed(stage);
        let (request, cause) = (&session.submission.request_id, session.cause.as_deref().unwrap_or_default());
        let trace_id = session.trace.id();
        tracing::warn!(%request, trace_id, stage, cause, "request failed: it was in two engines when they died");
        let message = "the request was in two engines when each of them died, and is not tried on a third: it may be \
                       what they died of; operators find its name and theirs in the log";
        session.fail(502, stage, message.into());
    }

    fn give_up(&mut self, request: RequestId, phase: Phase, impatient: bool) {
        let now_us = self.now_us;
        let stage = phase.timeout();
        self.set_outcome(request, CaptureOutcome::Failed, stage);
        let Some(session) = self.sessions.get_mut(&request) else { return };
        session.excused = impatient;
        let whose = if impatient { "the client's" } else { "its stage's" };
        session.fail(504, stage, format!("{whose} time ran out at stage '{}'", phase.name()));
        session.trace.failed(stage, now_us);
        self.end(request);
        self.metrics.cancelled(stage);
    }
}

/// The part of the work that both legs get: how much to compute, from which root, and how to sample.
fn outline(session: &Session, given_tokens: u32) -> v1::Work {
    let submission = &session.submission;
    let prompt_tokens = u32::try_from(submission.tokens.len()).unwrap_or(u32::MAX);
    v1::Work {
        token_count: prompt_tokens.saturating_add(given_tokens),
        prompt_tokens,
        sampling: Some((&*submission.sampling).into()),
        request_id: submission.request_id.to_string(),
        root: baton_wire::pack_keys(&[submission.root]),
        ..v1::Work::default()
    }
}

/// The work of a prefill leg. It has the tokens, and the node computes the keys of their blocks itself. A node with a
/// third-party engine gets the keys (`named`): it usually runs in this process, where computing them again costs more
/// than passing them.
fn prefill_work(session: &Session, given_tokens: u32, named: Option<(u64, u32)>) -> v1::Work {
    let submission = &session.submission;
    let whole = (!session.answer.is_empty()).then(|| submission.tokens.and(&session.answer));
    let tokens = baton_wire::pack_tokens(whole.as_ref().unwrap_or(&submission.tokens));
    let keys = |naming| baton_wire::pack_keys(&session.chain(given_tokens, naming));
    let chain = named.map(keys).unwrap_or_default();
    v1::Work { tokens, chain, body: session.submission.body.clone(), ..outline(session, given_tokens) }
}

/// The decode leg must know the keys before the KV comes; the tokens come with it. One whose engine moves KV
/// itself gets what the prefill leg gets.
fn decode_work(session: &Session, given_tokens: u32, naming: (u64, u32)) -> v1::Work {
    let chain = session.chain(given_tokens, naming);
    v1::Work { chain: baton_wire::pack_keys(&chain), ..outline(session, given_tokens) }
}
