//! Handles the reports of the nodes. The pairs detect outdated ones, and clients get the events of their requests
//! (I12).

use baton_legs::pairs::{Fact, FactOutcome, Failure, Pair, Phase};
use baton_router::{Event, Model};
use baton_scheduler::{FailStage, Input};
use baton_types::{CacheEvent, Epoch, Finish, InstanceId, RequestId, TokenLogprob};
use baton_wire::v1;
use baton_wire::v1::failure::Stage;
use std::sync::Arc;
use tokio::sync::mpsc;

use super::core::Trouble;
use super::driver::Driver;
use super::fleet::{Node, check_tokenizer};
use super::inbox::Loss;
use super::node_error::AttachRefusal;
use super::session::Session;

/// A request, its attempt, and the instance that speaks of it.
type FactSource = (RequestId, u32, InstanceId);

impl Driver {
    pub(super) fn joined(
        &mut self,
        hello: v1::Hello,
        orders: mpsc::Sender<v1::ToNode>,
    ) -> Result<v1::Welcome, AttachRefusal> {
        let block_tokens = self.config.scheduler.block_tokens;
        // A node that is refused does not end the life of the one that has its name.
        let checked = self.fleet.check(&hello, block_tokens)?;
        check_tokenizer(&hello, &self.tokenizer)?;
        self.fleet.name_is_free(&hello, self.now_us)?;
        let before = self.fleet.by_name(&hello.name);
        if let Some((instance, epoch)) = before.and_then(|id| Some((id, self.fleet.get(id)?.epoch))) {
            self.gone(instance, epoch, &Loss::Left("it attached again".into()));
        }
        let model = model_of(&hello, block_tokens);
        let (name, role) = (hello.name.clone(), checked.0.name());
        self.make_room(&name);
        let spec = self.fleet.admit(hello, orders, checked, self.now_us)?;
        let (instance, epoch) = (spec.id, spec.epoch);
        tracing::info!(node = name, role, instance = instance.0, epoch = epoch.0, "node attached");
        self.publish_model(model);
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

    /// Publishes the model with the shortest context of the engines, for any of them may be given a request, and no longer
    /// than what a decode instance holds.
    fn publish_model(&self, model: Model) {
        let longest = self.fleet.longest_context_tokens(model.block_tokens);
        let max_model_tokens = longest.unwrap_or(model.max_model_tokens);
        self.shared.model.store(Some(Arc::new(Model { max_model_tokens, ..model })));
    }

    /// Publishes the model anew after an engine has come or gone.
    pub(super) fn look_after_model(&self) {
        if let Some(model) = self.shared.model.load_full() {
            self.publish_model(Model::clone(&model));
        }
    }

    /// A life of a node is over: whatever it held moves elsewhere.
    pub(super) fn gone(&mut self, instance: InstanceId, epoch: Epoch, loss: &Loss) {
        if !self.fleet.is_current(instance, epoch) {
            return;
        }
        let decodes =
            |request: &RequestId| self.pairs.get(*request).is_some_and(|p| p.legs()[1] == Some(instance));
        let there: Vec<RequestId> = self.sessions.keys().copied().filter(decodes).collect();
        there.into_iter().for_each(|request| _ = self.complete_if_whole(request));
        let Some(node) = self.fleet.remove(instance, self.now_us) else { return };
        let why = loss.why();
        self.log_loss((&node.name, instance, epoch), loss);
        let trouble = Trouble { cause: format!("{} was lost: {why}", node.name), failure: "node_lost" };
        let died = matches!(loss, Loss::Died(_));
        self.pair_with_cause(&trouble, |pairs, now_us, live, effects| {
            pairs.lost(now_us, (instance, epoch, died), live, effects);
        });
        self.look_after_model();
        self.look_after_canary();
    }

    fn log_loss(&self, (node, instance, epoch): (&str, InstanceId, Epoch), loss: &Loss) {
        let (instance, epoch, why) = (instance.0, epoch.0, loss.why());
        self.metrics.node_lost();
        match loss {
            Loss::Left(_) => tracing::info!(node, instance, epoch, why, "node left"),
            // When the service stops, its nodes end as they like.
            Loss::Died(_) if self.closing => tracing::info!(node, instance, epoch, why, "node left"),
            Loss::Died(_) => tracing::warn!(node, instance, epoch, why, "node lost"),
        }
    }

    pub(super) fn fact(&mut self, instance: InstanceId, epoch: Epoch, reported: v1::Fact) {
        let Some(fact) = reported.fact else { return };
        let request = RequestId(reported.request);
        match fact {
            v1::fact::Fact::Cache(change) => {
                let Some(change) = change.read() else { return self.metrics.stale_message() };
                return self.step(Input::Cache(CacheEvent { instance, epoch, change }));
            }
            v1::fact::Fact::Replicated(_) => return self.step(Input::ReplicateFinished { to: instance }),
            v1::fact::Fact::Abandoned(loan) => return self.abandoned(request, instance, loan),
            _ => {}
        }
        let about = (request, reported.attempt, instance);
        match fact {
            v1::fact::Fact::Token(token) => self.token(about, &token),
            v1::fact::Fact::Prefilled(done) => self.prefilled(about, &done),
            v1::fact::Fact::Handoff(ok) => _ = self.on_fact(about, Fact::HandedOff { ok }),
            v1::fact::Fact::Ended(ended) => self.ended(about, &ended),
            v1::fact::Fact::Offer(offer) => self.offered(about, offer),
            v1::fact::Fact::Fetch(ok) => self.fetched(about, ok),
            v1::fact::Fact::Failure(failure) => self.leg_failed(about, &failure),
            v1::fact::Fact::PromptLogprobs(prompt) => self.prompt_logprobs(about, &prompt),
            _ => {}
        }
    }

    /// Whether a node may say this now; what is out of date is counted.
    fn accepts_fact(&self, about: FactSource, fact: &Fact) -> bool {
        let may = self.pairs.accepts(about, fact);
        if !may {
            self.metrics.stale_message();
        }
        may
    }

    fn on_fact(&mut self, about: FactSource, fact: Fact) -> FactOutcome {
        self.on_fact_with_cause(&Trouble::default(), about, fact)
    }

    fn on_fact_with_cause(&mut self, trouble: &Trouble, about: FactSource, fact: Fact) -> FactOutcome {
        let outcome = self.pair_with_cause(trouble, |pairs, now_us, live, effects| {
            pairs.on_fact(now_us, (about, fact), live, effects)
        });
        match outcome {
            FactOutcome::Yes => {}
            FactOutcome::Stale => self.metrics.stale_message(),
            FactOutcome::Repeated => self.metrics.repeated_token(),
        }
        outcome
    }

    fn token(&mut self, about: FactSource, token: &v1::Token) {
        let (request, now_us, finish) = (about.0, self.now_us, token.finish().read());
        let early = finish.is_none() && self.pairs.get(request).is_some_and(Pair::decodes_elsewhere);
        if self.on_fact(about, Fact::Token { index: token.index, last: finish.is_some() }) != FactOutcome::Yes
        {
            return;
        }
        let Some(session) = self.sessions.get_mut(&request) else { return };
        let logprob = token.logprob.as_ref().map(TokenLogprob::from);
        if let Some(cached_tokens) = token.cached_tokens.filter(|_| session.moves == 0) {
            session.found(cached_tokens);
        }
        if early {
            return session.early_token(token.token, logprob);
        }
        let came_at_once = session.early.len();
        let reads = session.token(token.token, logprob, now_us);
        if session.first_token_us.is_none() {
            session.first_token_us = Some(now_us);
            session.trace.first_token(now_us);
            if !self.canary.is(request) {
                let class = self.config.scheduler.classes.get(session.class.index());
                let class = class.map_or("", |class| &class.name);
                let predicted_us = session.prediction.map_or(0, |prediction| prediction.ttft_us);
                self.metrics.first_token(class, now_us - session.arrived_us, predicted_us);
            }
        } else {
            self.metrics.next_token(now_us - session.last_token_us);
        }
        (0..came_at_once).for_each(|_| self.metrics.next_token(0));
        session.last_token_us = now_us;
        if let Some((role, time_us)) = session.first_step(now_us)
            && !self.canary.is(request)
        {
            self.metrics.stage("decode_step", role, time_us);
        }
        if !reads {
            return self.cancel(request, "client_left_or_slow");
        }
        if let Some(finish) = finish {
            self.complete(request, finish);
        }
    }

    /// The end of an answer whose last token did not know that it was the last.
    fn ended(&mut self, about: FactSource, ended: &v1::Ended) {
        if !self.accepts_fact(about, &Fact::Ended) {
            return;
        }
        let request = about.0;
        let Some(session) = self.sessions.get_mut(&request) else { return };
        if let Some(cached_tokens) = ended.cached_tokens.filter(|_| session.moves == 0) {
            session.found(cached_tokens);
        }
        let empty = session.answer.is_empty();
        if let Some(found) = ended.cached_tokens {
            self.weigh(request, found);
        }
        let Some(finish) = ended.finish().read() else { return };
        if empty {
            // Never a success without an answer.
            let message = "it ended its answer before any token".into();
            let failure = v1::Failure {
                stage: Stage::Engine.into(),
                message,
                of_request: false,
                ..v1::Failure::default()
            };
            return self.leg_failed(about, &failure);
        }
        self.complete(request, finish);
    }

    fn prompt_logprobs(&mut self, about: FactSource, prompt: &v1::PromptLogprobs) {
        if self.on_fact(about, Fact::PromptLogprobs) != FactOutcome::Yes {
            return;
        }
        let first = |s: &&mut Session| s.answer.is_empty() && !s.prompt_logprobs_sent;
        if let Some(session) = self.sessions.get_mut(&about.0).filter(first) {
            session.prompt_logprobs_sent = true;
            let logprobs: Vec<TokenLogprob> = prompt.logprobs.iter().map(TokenLogprob::from).collect();
            session.send(Event::PromptLogprobs(logprobs));
        }
    }

    /// Compares the cached tokens that the conductor expected at an instance with those that the instance found.
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
        session.outcome = crate::capture::CaptureOutcome::Completed;
        self.metrics.finished(
            session.answer.len() as u64,
            session.submission.tokens.len() as u64,
            session.cached_tokens,
        );
        let answered = (request, session.gaps.tbt_us().unwrap_or(0));
        self.pair(|pairs, now_us, live, effects| pairs.complete(now_us, answered, live, effects));
    }

    /// Completes an answer that has all its tokens, and that broke off before it said how it ended. False: it has not.
    fn complete_if_whole(&mut self, request: RequestId) -> bool {
        let decodes = self.pairs.get(request).is_some_and(|pair| pair.phase() == Phase::Decoding);
        let whole = |s: &Session| s.answer.len() >= s.submission.sampling.max_tokens as usize;
        let whole = decodes && self.sessions.get(&request).is_some_and(whole);
        if whole {
            self.complete(request, Finish::Length);
        }
        whole
    }

    fn fetched(&mut self, about: FactSource, ok: bool) {
        let lent = self.core.stats().lent_fetches;
        if self.on_fact(about, Fact::Fetched { ok }) != FactOutcome::Yes {
            return;
        }
        let from_store = self.core.stats().lent_fetches > lent;
        self.metrics.fetched(match (ok, from_store) {
            (false, _) => "nothing",
            (true, true) => "store",
            (true, false) => "peer",
        });
    }

    fn prefilled(&mut self, about: FactSource, done: &v1::Prefilled) {
        let (request, instance) = (about.0, about.2);
        // An engine that prefills and decodes reports its count with the end of the answer.
        let decodes = self.pairs.get(request).is_some_and(|pair| pair.legs()[1] == Some(instance));
        let moves_kv = self.fleet.get(instance).is_some_and(|node| node.hello.engine_moves_kv);
        let session = self.sessions.get(&request);
        // A prompt whose logprobs are asked for is computed without a look into the cache.
        let looks = session.is_some_and(|session| session.submission.sampling.prompt_logprobs.is_none());
        let reports_late = decodes && moves_kv && done.cached_tokens == 0 && looks;
        // Until then the time it took is taken to be that of the prompt behind what was expected in its cache.
        let expected = session.and_then(|session| session.expected);
        let expected = expected.filter(|(at, _)| reports_late && *at == instance);
        let cached_tokens = expected.map_or(done.cached_tokens, |(_, tokens)| tokens);
        let fact = Fact::Prefilled { compute_us: done.compute_us, cached_tokens };
        if !self.accepts_fact(about, &fact) {
            return;
        }
        if !reports_late {
            self.weigh(request, done.cached_tokens);
        }
        if let Some(session) = self.sessions.get_mut(&request).filter(|session| session.moves == 0) {
            session.found(done.cached_tokens);
        }
        self.on_fact(about, fact);
    }

    /// The engines move the KV themselves: the decode leg's engine hears how, and what comes of it shows in its tokens.
    fn offered(&mut self, about: FactSource, offer: v1::Offer) {
        let (request, attempt, prefill) = about;
        // Only an engine that moves KV itself has any to offer: the other side would not know what to do with it.
        let moves = self.fleet.get(prefill).is_some_and(|node| node.hello.engine_moves_kv);
        if !moves || self.on_fact(about, Fact::Offered) != FactOutcome::Yes {
            return;
        }
        let Some([_, Some(decode)]) = self.pairs.get(request).map(|pair| pair.legs()) else { return };
        let take = v1::order::Order::Take(v1::Take { transfer: offer.transfer });
        self.push(decode, request, attempt, take);
        self.push(prefill, request, attempt, v1::order::Order::Taken(v1::Taken {}));
    }

    /// Releases KV that its request no longer needs and that an engine still holds. Any decode engine of the same kind
    /// releases it by fetching it.
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

    fn leg_failed(&mut self, about: FactSource, failure: &v1::Failure) {
        let (request, _, instance) = about;
        let fact = Fact::Failed(failure_of(failure));
        if !self.accepts_fact(about, &fact) {
            return;
        }
        let answered = self.pairs.get(request).is_some_and(|pair| pair.is_answered());
        let node = self.fleet.get(instance).map_or_else(String::new, |n| n.name.clone());
        let epoch = self.fleet.get(instance).map(|n| n.epoch);
        let word = failure.stage().name();
        if !answered {
            self.metrics.leg_failed(failure.stage());
        }
        if failure.cannot_go_on && !answered {
            return self.cannot_go_on(request, &failure.message);
        }
        if failure.of_request && !answered {
            if let Some(session) = self.sessions.get_mut(&request) {
                session.outcome = crate::capture::CaptureOutcome::Failed;
                session.excused = true;
                let status = u16::try_from(failure.status).ok().filter(|status| (400..500).contains(status));
                session.fail(status.unwrap_or(400), word, failure.message.clone());
                session.trace.failed(word, self.now_us);
            }
            return self.cancel(request, "invalid");
        }
        let lost = epoch.filter(|_| failure.engine_gone && !answered);
        if !self.complete_if_whole(request) {
            let trouble = if failure.engine_gone || failure.cut_off {
                Trouble { cause: format!("{node} was lost: {}", failure.message), failure: "node_lost" }
            } else {
                Trouble { cause: format!("{word} on {node}: {}", failure.message), failure: word }
            };
            self.on_fact_with_cause(&trouble, about, fact);
        }
        if let Some(epoch) = lost {
            let why = format!("its engine is gone: {}", failure.message);
            self.gone(instance, epoch, &Loss::Died(why));
        }
    }

    /// Fails an answer that no node can go on with. The cause is what broke before.
    fn cannot_go_on(&mut self, request: RequestId, why: &str) {
        let attempts = self.pairs.get(request).map_or(0, Pair::attempt);
        if let Some(session) = self.sessions.get_mut(&request) {
            let before = session.cause.take().map_or_else(String::new, |cause| format!("{cause}; "));
            session.cause = Some(format!("{before}{why}"));
        }
        self.pair(|pairs, now_us, live, effects| pairs.cancel(now_us, request, live, effects));
        self.fail(request, FailStage::DecodeFailed, attempts);
    }
}

fn failure_of(failure: &v1::Failure) -> Failure {
    match failure {
        v1::Failure { of_request: true, .. } => Failure::OfRequest,
        v1::Failure { engine_gone, cut_off, .. } if *engine_gone || *cut_off => {
            Failure::Engine { cut_off: *cut_off, gone: *engine_gone }
        }
        v1::Failure { busy_us: us @ 1.., .. } => Failure::Busy { us: *us },
        failure if failure.stage() == Stage::Preempted => Failure::Preempted,
        _ => Failure::Other,
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
