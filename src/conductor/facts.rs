//! What nodes report, taken in: each fact is about one attempt, and out-of-date ones are dropped (I12).

use baton_router::{Event, Model};
use baton_scheduler::Input;
use baton_types::{CacheEvent, Epoch, Finish, InstanceId, RequestId, TokenLogprob};
use baton_wire::v1;
use std::sync::Arc;
use tokio::sync::mpsc;

use super::driver::Driver;
use super::fleet::{Node, check_tokenizer};
use super::inbox::{Loss, NotTaken};
use super::session::{Heard, Phase, Session};

impl Driver {
    pub(super) fn joined(
        &mut self,
        hello: v1::Hello,
        orders: mpsc::Sender<v1::ToNode>,
    ) -> Result<v1::Welcome, NotTaken> {
        let block_tokens = self.config.scheduler.block_tokens;
        // Who is turned away does not end the life of whoever has its name.
        let checked = self.fleet.check(&hello, block_tokens).map_err(NotTaken::Unfit)?;
        check_tokenizer(&hello, &self.tokenizer).map_err(NotTaken::Unfit)?;
        self.fleet.name_is_free(&hello, self.now_us).map_err(NotTaken::NameTaken)?;
        let before = self.fleet.by_name(&hello.name);
        if let Some((instance, epoch)) = before.and_then(|id| Some((id, self.fleet.get(id)?.epoch))) {
            self.gone(instance, epoch, &Loss::Left("it attached again".into()));
        }
        let model = model_of(&hello, block_tokens);
        let (name, role) = (hello.name.clone(), hello.role.clone());
        self.make_room(&name);
        let spec = self.fleet.admit(hello, orders, checked, self.now_us).map_err(NotTaken::Unfit)?;
        let (instance, epoch) = (spec.id, spec.epoch);
        tracing::info!(node = name, role, instance = instance.0, epoch = epoch.0, "node attached");
        self.shared.model.store(Some(Arc::new(model)));
        self.step(Input::InstanceJoined(spec));
        self.look_after_canary();
        Ok(v1::Welcome {
            instance: instance.0,
            epoch: epoch.0,
            heartbeat_us: self.config.service.heartbeat_us,
            chain_seed: *self.config.service.chain_seed.expose(),
            leader: self.lead.token().unwrap_or(0),
            // The port adds it, which knows what was asked.
            proof: Default::default(),
        })
    }

    /// A life of a node is over: whatever it held moves elsewhere.
    pub(super) fn gone(&mut self, instance: InstanceId, epoch: Epoch, loss: &Loss) {
        if !self.fleet.is_current(instance, epoch) {
            return;
        }
        let served = self.can_serve();
        let Some(node) = self.fleet.remove(instance, self.now_us) else { return };
        let why = loss.why();
        // One that drained has left those that it still served without a pair.
        if (served || node.draining) && !self.can_serve() {
            self.pair_lost_us = Some(self.now_us);
        }
        self.tell_of_loss((&node.name, instance, epoch), loss);
        let done = |s: &Session| s.done && [s.prefill, s.decode].contains(&Some(instance));
        let over: Vec<_> = self.sessions.iter().filter(|(_, s)| done(s)).map(|(r, _)| *r).collect();
        for request in over {
            self.let_go_if_done(request);
        }
        if let Loss::Died(why) = loss {
            self.suspect_all(instance, &node.name, why);
        }
        let (mut emitted, now_us) = (Vec::new(), self.now_us);
        for (request, session) in &mut self.sessions {
            let legs = [session.prefill, session.decode];
            if !legs.contains(&Some(instance)) {
                continue;
            }
            let cause = format!("{} was lost: {why}", node.name);
            if session.phase == Phase::Decoding && session.decode != Some(instance) {
                // Its decode goes on.
                session.cause = Some(cause);
                continue;
            }
            session.blame(cause, "node_lost", now_us);
            if session.phase == Phase::Decoding {
                emitted.push((*request, u32::try_from(session.answer.len()).unwrap_or(u32::MAX)));
            }
        }
        for (request, emitted_tokens) in emitted {
            self.step(Input::TokensEmitted { request, emitted_tokens });
        }
        self.step(Input::InstanceLost { instance, epoch });
        self.look_after_canary();
    }

    fn tell_of_loss(&self, (node, instance, epoch): (&str, InstanceId, Epoch), loss: &Loss) {
        let (instance, epoch, why) = (instance.0, epoch.0, loss.why());
        self.metrics.node_lost();
        match loss {
            Loss::Left(_) => tracing::info!(node, instance, epoch, why, "node left"),
            // When the service stops, its nodes end as they like.
            Loss::Died(_) if self.closing => tracing::info!(node, instance, epoch, why, "node left"),
            Loss::Died(_) => tracing::warn!(node, instance, epoch, why, "node lost"),
        }
    }

    pub(super) fn fact(&mut self, instance: InstanceId, epoch: Epoch, told: v1::Fact) {
        let Some(fact) = told.fact else { return };
        let request = RequestId(told.request);
        match fact {
            v1::fact::Fact::Cache(change) => {
                let Some(change) = change.read() else { return self.metrics.stale_message() };
                return self.step(Input::Cache(CacheEvent { instance, epoch, change }));
            }
            v1::fact::Fact::Replicated(_) => return self.step(Input::ReplicateFinished { to: instance }),
            v1::fact::Fact::Abandoned(loan) => return self.abandoned(request, instance, loan),
            _ => {}
        }
        let current = self.sessions.get(&request).filter(|s| s.attempt == told.attempt);
        if !current.is_some_and(|s| may_tell(s, instance, &fact)) {
            return self.metrics.stale_message();
        }
        match fact {
            v1::fact::Fact::Token(token) => self.token(request, &token),
            v1::fact::Fact::Prefilled(done) => self.prefilled(request, &done),
            v1::fact::Fact::Handoff(ok) => self.handed_off(request, ok),
            v1::fact::Fact::Ended(ended) => self.ended(request, &ended),
            v1::fact::Fact::Offer(offer) => self.offered(request, offer),
            v1::fact::Fact::Fetch(ok) => self.fetched(request, ok),
            v1::fact::Fact::Failure(failure) => self.leg_failed(request, instance, &failure),
            v1::fact::Fact::PromptLogprobs(told) => {
                let logprobs: Vec<TokenLogprob> = told.logprobs.iter().map(TokenLogprob::from).collect();
                let first = |s: &&mut Session| s.answer.is_empty() && !s.prompt_told;
                if let Some(session) = self.sessions.get_mut(&request).filter(first) {
                    session.prompt_told = true;
                    let _ = session.tell(Event::PromptLogprobs(logprobs));
                }
            }
            _ => {}
        }
    }

    fn token(&mut self, request: RequestId, told: &v1::Token) {
        let now_us = self.now_us;
        let Some(session) = self.sessions.get_mut(&request).filter(|s| !s.done) else { return };
        let logprob = told.logprob.as_ref().map(TokenLogprob::from);
        let Some(heard) = session.token(told.index, told.token, logprob) else {
            // The client has it: nothing is told twice.
            return self.metrics.repeated_token();
        };
        if let Some(cached_tokens) = told.cached_tokens.filter(|_| session.moves == 0) {
            session.cached_tokens = cached_tokens.min(session.submission.tokens.len() as u64);
        }
        if session.first_token_us.is_none() {
            session.first_token_us = Some(now_us);
            session.trace.first_token(now_us);
            self.metrics.first_token(now_us - session.arrived_us, session.predicted_ttft_us);
        } else {
            self.metrics.next_token(now_us - session.last_token_us);
        }
        session.last_token_us = now_us;
        self.trial_is_over(request);
        if heard == Heard::No {
            return self.cancel(request, "client_left_or_slow");
        }
        match finish_of(told.finish) {
            Some(finish) => self.complete(request, finish),
            None => self.follow_room(request),
        }
    }

    /// The core hears when an answer becomes longer than the room that it keeps for it.
    fn follow_room(&mut self, request: RequestId) {
        let Some(session) = self.sessions.get_mut(&request).filter(|s| s.phase == Phase::Decoding) else {
            return;
        };
        let emitted_tokens = u32::try_from(session.answer.len()).unwrap_or(u32::MAX);
        if emitted_tokens.saturating_sub(session.given) < session.room_tokens {
            return;
        }
        // It keeps at least so much more, and need not hear of each token.
        session.room_tokens = session.room_tokens.saturating_add(session.room_tokens / 4).saturating_add(1);
        self.step(Input::RoomOutgrown { request, emitted_tokens });
    }

    /// The end of an answer whose last token did not know that it was the last.
    fn ended(&mut self, request: RequestId, told: &v1::Ended) {
        let Some(session) = self.sessions.get_mut(&request).filter(|s| !s.done) else { return };
        if let Some(cached_tokens) = told.cached_tokens.filter(|_| session.moves == 0) {
            session.cached_tokens = cached_tokens.min(session.submission.tokens.len() as u64);
        }
        if let Some(found) = told.cached_tokens {
            self.weigh(request, found);
        }
        let Some(session) = self.sessions.get_mut(&request) else { return };
        let Some(finish) = finish_of(told.finish) else { return };
        if session.answer.is_empty() {
            // Never a success without an answer.
            let message = "it ended its answer before any token".into();
            let failure =
                v1::Failure { stage: "engine".into(), message, of_request: false, ..v1::Failure::default() };
            let Some(leg) = session.decode.or(session.prefill) else { return };
            return self.leg_failed(request, leg, &failure);
        }
        self.complete(request, finish);
    }

    /// What was expected in an instance's cache, and what it found there.
    fn weigh(&mut self, request: RequestId, found_tokens: u64) {
        let Some(session) = self.sessions.get_mut(&request) else { return };
        let Some((instance, expected_tokens)) = session.expected.take() else { return };
        if let Some(node) = self.fleet.get(instance) {
            self.metrics.cache_found(&node.name, expected_tokens, found_tokens);
        }
    }

    fn complete(&mut self, request: RequestId, finish: Finish) {
        let Some(session) = self.sessions.get_mut(&request) else { return };
        session.finish(finish);
        session.done = true;
        session.outcome = crate::capture::CaptureOutcome::Completed;
        self.metrics.finished(
            session.answer.len() as u64,
            session.submission.tokens.len() as u64,
            session.cached_tokens,
        );
        if session.phase == Phase::Decoding {
            self.conclude(request);
        }
    }

    /// The core hears of the end; the decode node has let go by itself.
    fn conclude(&mut self, request: RequestId) {
        let Some(session) = self.sessions.get(&request) else { return };
        let output_tokens = u32::try_from(session.answer.len()).unwrap_or(u32::MAX);
        self.step(Input::DecodeFinished { request, output_tokens });
        self.end(request);
    }

    fn fetched(&mut self, request: RequestId, ok: bool) {
        let lent = self.core.stats().lent_fetches;
        self.step(Input::FetchFinished { request, ok });
        let from_store = self.core.stats().lent_fetches > lent;
        self.metrics.fetched(match (ok, from_store) {
            (false, _) => "nothing",
            (true, true) => "store",
            (true, false) => "peer",
        });
    }

    fn prefilled(&mut self, request: RequestId, done: &v1::Prefilled) {
        let now_us = self.now_us;
        let Some(session) = self.sessions.get_mut(&request) else { return };
        let mut counts_later = false;
        if let Some(node) = session.prefill.and_then(|leg| self.fleet.get_mut(leg)) {
            node.pace.prefilled += 1;
            // A server that prefills and decodes tells its count with the end of the answer.
            counts_later = node.hello.engine_moves_kv && session.prefill == session.decode;
        }
        if !counts_later {
            self.weigh(request, done.cached_tokens);
        }
        let Some(session) = self.sessions.get_mut(&request) else { return };
        session.enter(Phase::HandingOff, now_us, &self.fleet);
        if session.moves == 0 {
            session.cached_tokens = done.cached_tokens.min(session.submission.tokens.len() as u64);
        }
        let (landed, done_already) = (session.landed, session.done);
        let legs = (session.prefill, session.decode, session.attempt);
        let local = session.prefill == session.decode;
        let is_all = session.prefill_is_all;
        let stage_us = self.policy.handoff_stage_us(session);
        self.set_deadline(request, now_us + stage_us);
        self.step(Input::PrefillFinished {
            request,
            compute_us: done.compute_us,
            cached_tokens: done.cached_tokens,
        });
        if done_already {
            return self.conclude_early(request, legs, (local, is_all));
        }
        if landed {
            self.step(Input::HandoffFinished { request });
        }
    }

    /// The first token was the last: both legs are let go without a decode.
    fn conclude_early(
        &mut self,
        request: RequestId,
        legs: (Option<InstanceId>, Option<InstanceId>, u32),
        (local, is_all): (bool, bool),
    ) {
        if !self.sessions.contains_key(&request) {
            return;
        }
        let (prefill, decode, attempt) = legs;
        if !local {
            self.step(Input::HandoffFinished { request });
        }
        // A node that would have decoded itself, or that had nothing to hand off, has let go by itself.
        if !local && !is_all {
            for leg in [prefill, decode].into_iter().flatten() {
                let release = v1::order::Order::Release(v1::Release {});
                self.push(leg, request, attempt, release);
            }
        }
        self.conclude(request);
    }

    /// The engines move the KV themselves: the decode leg's is told how, and what comes of it shows in its tokens.
    fn offered(&mut self, request: RequestId, offer: v1::Offer) {
        let Some(session) = self.sessions.get_mut(&request).filter(|s| !s.landed) else { return };
        let (Some(decode), attempt) = (session.decode, session.attempt) else { return };
        let prefill = session.prefill;
        // Only an engine that moves KV itself has any to offer: the other side would not know what to do with it.
        let moves = |id| self.fleet.get(id).is_some_and(|node| node.hello.engine_moves_kv);
        if !prefill.is_some_and(moves) {
            return;
        }
        session.landed = true;
        let take = v1::order::Order::Take(v1::Take { transfer: offer.transfer });
        self.push(decode, request, attempt, take);
        if let Some(prefill) = prefill {
            self.push(prefill, request, attempt, v1::order::Order::Taken(v1::Taken {}));
        }
    }

    /// KV that its request does not want any more waits at an engine: any engine of its kind that decodes lets it go by
    /// taking it.
    fn abandoned(&mut self, request: RequestId, at: InstanceId, loan: v1::Loan) {
        let kind = self.fleet.get(at).map(|node| node.kind);
        let lets_go = |node: &Node| {
            let decodes = node.hello.engine_moves_kv && node.role == baton_types::Role::Decode;
            decodes && Some(node.kind) == kind
        };
        let found = self.fleet.iter().find(|(_, node)| lets_go(node)).map(|(id, _)| id);
        // Without one its lease ends by itself.
        if let Some(instance) = found {
            self.push(instance, request, 0, v1::order::Order::Discard(loan));
        }
    }

    fn handed_off(&mut self, request: RequestId, ok: bool) {
        let now_us = self.now_us;
        if !ok && self.let_go_if_done(request) {
            return;
        }
        let Some(session) = self.sessions.get_mut(&request) else { return };
        if !ok {
            session.cause = Some("its KV did not reach the decode instance".into());
            session.trace.failed("handoff", now_us);
            return self.handoff_failed(request);
        }
        for leg in [session.prefill, session.decode].into_iter().flatten() {
            if let Some(node) = self.fleet.get_mut(leg) {
                node.pace.handed += 1;
            }
        }
        match session.phase {
            Phase::Prefilling => session.landed = true,
            _ => self.step(Input::HandoffFinished { request }),
        }
    }

    fn leg_failed(&mut self, request: RequestId, instance: InstanceId, failure: &v1::Failure) {
        let now_us = self.now_us;
        if self.let_go_if_done(request) {
            return;
        }
        let Some(session) = self.sessions.get_mut(&request) else { return };
        let node = self.fleet.get(instance).map_or_else(String::new, |n| n.name.clone());
        let phase = session.phase;
        self.metrics.leg_failed(&failure.stage);
        if failure.of_request {
            session.outcome = crate::capture::CaptureOutcome::Failed;
            session.fail(400, &failure.stage, failure.message.clone());
            session.trace.failed(crate::spans::failure_word(&failure.stage), now_us);
            return self.cancel(request, "invalid");
        }
        if failure.engine_gone || failure.cut_off {
            return self.engine_broke(request, instance, failure);
        }
        let cause = format!("{} on {node}: {}", failure.stage, failure.message);
        session.blame(cause, crate::spans::failure_word(&failure.stage), now_us);
        let emitted_tokens = u32::try_from(session.answer.len()).unwrap_or(u32::MAX);
        let on_decode = session.decode == Some(instance) && session.prefill != Some(instance);
        self.step(match phase {
            // Nothing went wrong: it waits for room.
            _ if failure.stage == "preempted" => Input::Preempted { request, emitted_tokens },
            Phase::Decoding => Input::DecodeFailed { request, emitted_tokens },
            _ if on_decode => Input::HandoffFailed { request },
            // The KV is not there, or not there any more.
            _ => Input::PrefillFailed { request },
        });
    }
}

/// What the word for an end on the wire stands for; 0 is none.
const fn finish_of(word: u32) -> Option<Finish> {
    match word {
        0 => None,
        1 => Some(Finish::Stop),
        _ => Some(Finish::Length),
    }
}

/// Whether a node has a say in this: each leg tells what it does, and at its stage.
fn may_tell(session: &Session, instance: InstanceId, fact: &v1::fact::Fact) -> bool {
    use v1::fact::Fact;
    let (prefills, decodes) = (session.prefill == Some(instance), session.decode == Some(instance));
    match (session.phase, fact) {
        // A prefill draws one token, the first of its attempt.
        (Phase::Prefilling, Fact::Token(token)) => prefills && token.index == session.given,
        (Phase::Prefilling, Fact::Prefilled(_) | Fact::Fetch(_) | Fact::PromptLogprobs(_)) => prefills,
        (Phase::Prefilling, Fact::Ended(_)) => prefills,
        (Phase::Prefilling, Fact::Offer(_)) => prefills && !decodes,
        (Phase::Prefilling | Phase::HandingOff, Fact::Handoff(true)) => decodes,
        (Phase::Prefilling | Phase::HandingOff, Fact::Handoff(false) | Fact::Failure(_)) => {
            prefills || decodes
        }
        (Phase::Decoding, Fact::Token(_) | Fact::Ended(_) | Fact::Failure(_)) => decodes,
        _ => false,
    }
}

/// Whether an engine of this kind, the first word of its build, holds an answer to a grammar.
fn constrains(build: &str) -> bool {
    matches!(build.split(' ').next(), Some("vllm" | "sglang"))
}

fn model_of(hello: &v1::Hello, block_tokens: u32) -> Model {
    let print = hello.fingerprint.clone().unwrap_or_default();
    let constrains = constrains(&print.engine);
    Model {
        name: print.model,
        aliases: Vec::new(),
        revision: print.revision,
        vocab_tokens: print.vocab_tokens,
        end_tokens: hello.end_tokens.clone(),
        max_model_tokens: hello.max_model_tokens,
        block_tokens,
        constrains,
    }
}
