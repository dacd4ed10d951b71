//! From the core's effects to orders for nodes and answers for clients.

use baton_router::{Event, Refusal};
use baton_scheduler::{Effect, FailStage, FetchPlan, Input, RejectReason, Rejection};
use baton_types::{InstanceId, RequestId, Role};
use baton_wire::v1;

use super::driver::Driver;
use super::session::{Phase, Session};
use super::status::chosen;
use crate::capture::CaptureOutcome;

/// A placement as the core orders it.
pub(super) struct Placed {
    pub instance: InstanceId,
    pub decode: InstanceId,
    pub fetch: Option<FetchPlan>,
    pub room_tokens: u32,
    pub order: u64,
}

impl Driver {
    pub(super) fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::StartPrefill { request, instance, decode, fetch, room_tokens, order } => {
                self.start_prefill(request, &Placed { instance, decode, fetch, room_tokens, order });
            }
            Effect::StartDecode { request, instance } => self.start_decode(request, instance),
            Effect::Handoff { request, from, to, room_tokens } => {
                self.hand_off(request, from, to, room_tokens);
            }
            Effect::Replicate { from, to, chain } => self.replicate(from, to, &chain),
            Effect::Release { request, instance } => self.release(request, instance),
            Effect::Reject(rejection) => self.reject(&rejection),
            Effect::Fail { request, stage } => self.fail(request, stage),
            Effect::Explain(decision) => self.decisions.note(decision),
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

    fn start_prefill(&mut self, request: RequestId, placed: &Placed) {
        let now_us = self.now_us;
        let peer = (placed.decode != placed.instance).then(|| self.fleet.peer(placed.decode)).flatten();
        let fetch_from = placed.fetch.and_then(|f| self.fleet.peer(f.from));
        let terms = self.decisions.of(request).and_then(chosen);
        let decided = terms.map(|terms| (terms.instance, terms.cached_tokens));
        let foreseen_us = terms.and_then(|terms| terms.ttft_us);
        let Some(session) = self.sessions.get_mut(&request) else { return };
        if session.done {
            self.pending.push_back(Input::RequestCancelled { request });
            self.end(request);
            return;
        }
        // Only what was expected of this very instance, and for the prompt alone.
        let expected = decided.or(session.expected).filter(|(chosen, _)| *chosen == placed.instance);
        session.expected = expected.filter(|_| session.answer.is_empty());
        session.attempt += 1;
        session.parked = false;
        session.moves += u32::from(session.attempt > 1 && !session.answer.is_empty());
        (session.prefill, session.decode) = (Some(placed.instance), Some(placed.decode));
        session.enter(Phase::Prefilling, now_us, &self.fleet);
        session.foreseen_us = foreseen_us.unwrap_or(session.foreseen_us);
        (session.landed, session.room_tokens) = (false, placed.room_tokens);
        session.given = u32::try_from(session.answer.len()).unwrap_or(u32::MAX);
        let (attempt, expected_tokens) = (session.attempt, session.expected.map(|(_, tokens)| tokens));
        let work = prefill_work(session);
        let told = self.fleet.get(placed.decode).is_some_and(|node| node.hello.engine_moves_kv);
        let local = placed.decode == placed.instance;
        // It draws the last token of the answer: nobody decodes on, and no KV has to move.
        let left = session.submission.sampling.max_tokens.saturating_sub(session.given);
        session.prefill_is_all = left <= 1 && !local && !told;
        let is_all = session.prefill_is_all;
        let peer = peer.filter(|_| !is_all);
        let expected = (!local && !is_all).then(|| if told { work.clone() } else { decode_work(session) });
        let stage_us = self.policy.prefill_stage_us(session);
        self.set_deadline(request, now_us + stage_us);
        if let Some(work) = expected {
            let expect = v1::Expect { work: Some(work), room_tokens: placed.room_tokens };
            self.push(placed.decode, request, attempt, v1::order::Order::Expect(expect));
        }
        let prefill = v1::Prefill {
            work: Some(work),
            decode: peer,
            fetch_from,
            fetch_blocks: placed.fetch.map_or(0, |f| f.blocks),
            room_tokens: if is_all { 0 } else { placed.room_tokens },
            order: placed.order,
            expected_tokens,
        };
        self.push(placed.instance, request, attempt, v1::order::Order::Prefill(prefill));
    }

    fn start_decode(&mut self, request: RequestId, instance: InstanceId) {
        let now_us = self.now_us;
        let Some(session) = self.sessions.get_mut(&request).filter(|s| !s.done) else { return };
        session.enter(Phase::Decoding, now_us, &self.fleet);
        session.last_token_us = now_us;
        let (attempt, answer) = (session.attempt, session.answer.clone());
        let stage_us = self.policy.token_stage_us(session);
        self.set_deadline(request, now_us + stage_us);
        let order = v1::order::Order::StartDecode(v1::StartDecode { answer });
        self.push(instance, request, attempt, order);
    }

    fn hand_off(&mut self, request: RequestId, from: InstanceId, to: InstanceId, room_tokens: u32) {
        let now_us = self.now_us;
        let peer = self.fleet.peer(to);
        let Some(session) = self.sessions.get_mut(&request) else { return };
        session.attempt += 1;
        session.decode = Some(to);
        (session.landed, session.prefill_is_all, session.room_tokens) = (false, false, room_tokens);
        session.enter(Phase::HandingOff, now_us, &self.fleet);
        let attempt = session.attempt;
        // What was prefilled: the answer's tokens that came since are decoded, not handed off.
        let told = self.fleet.get(to).is_some_and(|node| node.hello.engine_moves_kv);
        let work = if told { prefill_work(session) } else { decode_work(session) };
        let stage_us = self.policy.handoff_stage_us(session);
        self.set_deadline(request, now_us + stage_us);
        let expect = v1::Expect { work: Some(work), room_tokens };
        self.push(to, request, attempt, v1::order::Order::Expect(expect));
        self.push(from, request, attempt, v1::order::Order::Handoff(v1::Handoff { to: peer }));
    }

    fn replicate(&mut self, from: InstanceId, to: InstanceId, chain: &[baton_types::BlockHash]) {
        let peer = self.fleet.peer(from);
        if peer.is_none() || self.fleet.get(to).is_none() {
            self.pending.push_back(Input::ReplicateFinished { to });
            return;
        }
        let keys = self.names.full(chain);
        if keys.is_empty() {
            self.pending.push_back(Input::ReplicateFinished { to });
            return;
        }
        self.metrics.copied(if self.fleet.get(to).is_some_and(|n| n.role == Role::Store) {
            "store"
        } else {
            "peer"
        });
        let order = v1::Replicate { from: peer, chain: baton_wire::pack_keys(&keys) };
        self.push(to, RequestId(0), 0, v1::order::Order::Replicate(order));
    }

    fn release(&mut self, request: RequestId, instance: InstanceId) {
        let session = self.sessions.get(&request);
        let attempt = session.map_or(0, |s| s.attempt);
        // A decode leg that was told nothing has nothing to let go.
        if !session.is_some_and(|s| s.prefill_is_all && s.decode == Some(instance)) {
            self.push(instance, request, attempt, v1::order::Order::Release(v1::Release {}));
        }
        self.leg_is_over(request, instance);
    }

    /// Nothing more is believed of a leg that was let go. Without any, the request waits again.
    fn leg_is_over(&mut self, request: RequestId, instance: InstanceId) {
        let Some(session) = self.sessions.get_mut(&request) else { return };
        let over = |leg: Option<InstanceId>| leg == Some(instance);
        if session.phase == Phase::Decoding || over(session.prefill) {
            session.prefill = None;
        }
        if over(session.decode) {
            session.decode = None;
        }
        if session.prefill.is_none() && session.decode.is_none() {
            session.enter(Phase::Waiting, self.now_us, &self.fleet);
            let wait_us = self.policy.queue_stage_us(session);
            self.set_deadline(request, self.now_us + wait_us);
        }
    }

    fn set_outcome(&mut self, request: RequestId, outcome: CaptureOutcome, reason: &'static str) {
        if let Some(session) = self.sessions.get_mut(&request) {
            session.trace.reason(reason);
            session.outcome = outcome;
        }
    }

    fn reject(&mut self, rejection: &Rejection) {
        // Who was sent somewhere is not refused for what happened to its instances since; a policy
        // that looks again after the prefill means it.
        let lacks_pair = rejection.reason == RejectReason::NoInstance && !self.can_serve();
        let waits = |s: &Session| s.attempt > 0 || (s.parked && s.let_in) || lacks_pair;
        let waits = self.sessions.get(&rejection.request).is_some_and(waits);
        if waits && rejection.wasted_tokens == 0 && self.park(rejection.request) {
            return;
        }
        self.refuse(rejection);
    }

    /// Refuses a request that waited for a pair: none came back.
    pub(super) fn refuse_without_pair(&mut self, request: RequestId) {
        self.refuse(&Rejection {
            request,
            reason: RejectReason::NoInstance,
            retry_after_us: 1_000_000,
            predicted_ttft_us: None,
            turn_us: 0,
            wasted_tokens: 0,
        });
    }

    fn refuse(&mut self, rejection: &Rejection) {
        let done = self.sessions.get(&rejection.request).is_some_and(|s| s.done);
        if !done {
            self.set_outcome(rejection.request, CaptureOutcome::Rejected, rejection.reason.name());
        }
        let Some(session) = self.end(rejection.request).filter(|_| !done) else { return };
        self.metrics.refused(rejection.reason.name());
        let mut rejection = rejection.clone();
        if rejection.retry_after_us > 0 && rejection.reason != RejectReason::NoInstance {
            let (wait_us, turn_us) = (rejection.retry_after_us, rejection.turn_us);
            rejection.retry_after_us = self.turns.give(self.now_us, wait_us, turn_us);
        }
        let (status, message) = refusal_words(&rejection, &session);
        if !session.answer.is_empty() {
            return session.fail(503, rejection.reason.name(), message);
        }
        let told = (status == 429 || status == 503).then_some(rejection.retry_after_us.max(1));
        let _ = session.tell(Event::Refused(Refusal {
            status,
            reason: rejection.reason.name().into(),
            message: message.into(),
            retry_after_us: told,
            predicted_ttft_us: rejection.predicted_ttft_us.filter(|us| *us > 0),
        }));
    }

    fn fail(&mut self, request: RequestId, stage: FailStage) {
        let let_in = self.sessions.get(&request).is_some_and(|s| s.let_in);
        if stage == FailStage::NoPlacement && let_in && self.park(request) {
            return;
        }
        if stage == FailStage::NoPlacement && !self.can_serve() {
            return self.refuse_without_pair(request);
        }
        let stage = stage.name();
        self.set_outcome(request, CaptureOutcome::Failed, stage);
        let Some(session) = self.end(request) else { return };
        let cause = session.cause.clone().unwrap_or_else(|| "no reason was told".into());
        self.metrics.failed(stage);
        let trace_id = session.trace.id();
        tracing::warn!(request = %session.submission.request_id, trace_id, stage, cause, "request failed");
        let status = if stage.ends_with("timeout") { 504 } else { 502 };
        let message = format!(
            "the request was lost at stage '{stage}' after {} attempt(s): {cause}; it is safe to send it again",
            session.attempt
        );
        session.fail(status, stage, message);
    }
}

fn refusal_words(rejection: &Rejection, session: &Session) -> (u16, String) {
    let wait = format!("predicted to be admitted in {:.1} s", rejection.retry_after_us as f64 / 1e6);
    let seconds = |us: u64| format!("{:.2} s", us as f64 / 1e6);
    let ttft = rejection.predicted_ttft_us.map_or_else(|| "none".into(), seconds);
    match rejection.reason {
        RejectReason::Ttft => {
            (429, format!("no placement meets the time-to-first-token objective (best {ttft}); {wait}"))
        }
        RejectReason::Tbt => {
            (429, format!("decoding it now would break the time-between-tokens objective; {wait}"))
        }
        RejectReason::Room => (429, format!("no decode instance has room for its KV; {wait}")),
        RejectReason::Costly => {
            (429, format!("under the present overload its work would displace others; {wait}"))
        }
        RejectReason::Unreachable => (
            400,
            format!(
                "its objectives cannot be met here even when nothing else is served (first token after {ttft}); \
                 send a shorter prompt, or choose a class with longer objectives"
            ),
        ),
        RejectReason::QueueFull => (429, format!("the queue is full; {wait}")),
        RejectReason::NoInstance => {
            (503, "no prefill and decode instance pair is attached; see /ready and start nodes".into())
        }
        RejectReason::TooLong => (
            400,
            format!(
                "the prompt has {} tokens, more than any instance can hold",
                session.submission.tokens.len()
            ),
        ),
    }
}

/// What both legs are told: how much there is to compute, from what root, and how to draw.
fn outline(session: &Session) -> v1::Work {
    let submission = &session.submission;
    let prompt_tokens = u32::try_from(submission.tokens.len()).unwrap_or(u32::MAX);
    v1::Work {
        token_count: prompt_tokens.saturating_add(session.given),
        prompt_tokens,
        sampling: session.sampling_json.clone(),
        request_id: submission.request_id.to_string(),
        root: baton_wire::pack_keys(&[submission.root]),
        ..v1::Work::default()
    }
}

/// The prefill leg has the tokens, and finds the keys of their blocks by itself.
fn prefill_work(session: &Session) -> v1::Work {
    let submission = &session.submission;
    let whole = (!session.answer.is_empty()).then(|| submission.tokens.and(&session.answer));
    let tokens = baton_wire::pack_tokens(whole.as_ref().unwrap_or(&submission.tokens));
    v1::Work { tokens, body: session.body.clone(), ..outline(session) }
}

/// The decode leg must know the keys before the KV comes; the tokens come with it. One whose engine moves KV
/// itself is told what the prefill leg is told.
fn decode_work(session: &Session) -> v1::Work {
    v1::Work { chain: baton_wire::pack_keys(&session.submission.chain), ..outline(session) }
}
