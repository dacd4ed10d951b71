//! The legs that are under way on the engine, and the word to and from the conductor about them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use baton_legs::{Effect, Input, Leg, LegFailure};
use baton_remote::{Load, RemoteEngine};
use baton_types::{BlockKey, CacheChange, FetchPlan, InstanceId, RequestId};
use baton_wire::v1;
use baton_wire::v1::failure::Stage;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::follower::{Attachment, EventSource};
use super::knowledge::Knowledge;
use super::legs;
use super::life::{Job, Life};
use super::prompts::Prompts;
use super::split::PromptSplitter;
use super::work::Work;
use crate::node::attach::{NodeRuntime, WorkerGoneError};
use crate::node::error::OrderError;
use crate::node::worker::in_words;

/// How long an engine may take to say that it is there, after a connection to it broke.
const GONE_WITHIN: Duration = Duration::from_secs(1);
/// Legs at a time; the conductor admits fewer.
const LEGS_MOST: usize = 65_536;

/// The legs of one remote engine. Clones share them.
#[derive(Clone)]
pub(super) struct RemoteLegs {
    inner: Arc<Inner>,
}

struct Inner {
    engine: RemoteEngine,
    runtime: Handle,
    block_tokens: u32,
    capacity_blocks: u64,
    life: Mutex<Life>,
    /// The engine's last report.
    load: Mutex<Option<Load>>,
    doubt: Notify,
    /// Notified when a conductor has attached.
    attached: Notify,
    knowledge: Knowledge,
    prompts: Prompts,
    /// Where the engine needs it to keep the step target.
    splitter: Option<Arc<PromptSplitter>>,
    /// Times that what was known proved wrong.
    resyncs: AtomicU64,
}

/// The signals that a leg waits for, apart from its engine.
pub(super) struct LegSignals {
    /// The leg is not wanted any longer.
    pub(super) over: CancellationToken,
    /// It may go on.
    pub(super) gate: oneshot::Receiver<()>,
}

/// Sends the facts of one leg to the conductor.
#[derive(Clone)]
pub(super) struct FactSender {
    node_legs: RemoteLegs,
    facts: mpsc::Sender<v1::FromNode>,
    request: RequestId,
    attempt: u32,
}

impl RemoteLegs {
    /// No leg yet. Tasks of legs run on the present runtime.
    pub(super) fn new(
        engine: RemoteEngine,
        (block_tokens, capacity_blocks): (u32, u64),
        events: Option<EventSource>,
        prompts: Prompts,
        splitter: Option<PromptSplitter>,
    ) -> Self {
        let knowledge = Knowledge::new(block_tokens, capacity_blocks, events);
        let inner = Inner {
            engine,
            runtime: Handle::current(),
            block_tokens,
            capacity_blocks,
            life: Mutex::new(Life::new(block_tokens)),
            load: Mutex::default(),
            doubt: Notify::new(),
            attached: Notify::new(),
            knowledge,
            prompts,
            splitter: splitter.map(Arc::new),
            resyncs: AtomicU64::new(0),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Keeps the engine's report of its load.
    pub(super) fn looked(&self, load: Option<Load>) {
        *self.inner.load.lock() = load;
    }

    /// Returns when a leg could not reach the engine.
    pub(super) async fn doubted(&self) {
        self.inner.doubt.notified().await;
    }

    /// Reports all that was in the engine as cut off with it, and waits until the conductor has let this node go. A node
    /// that left without a word would take its requests for ones that the engine cannot have died of.
    pub(super) async fn report_engine_gone(&self, why: &str) {
        let (facts, told) = {
            let life = self.inner.life.lock();
            let Some(facts) = life.facts.clone() else { return };
            let in_engine = |leg: &Leg| matches!(leg, Leg::Computing(_) | Leg::Decoding { .. });
            let legs = life.legs.iter().filter(|(_, leg)| in_engine(leg)).map(|(request, _)| request);
            let jobs = legs.filter_map(|request| Some((request.0, life.jobs.get(&request)?.attempt)));
            let failure = v1::Failure { cut_off: true, engine_gone: true, ..failure(Stage::Engine, why) };
            let fact = || Some(v1::fact::Fact::Failure(failure.clone()));
            let told: Vec<v1::Fact> =
                jobs.map(|(request, attempt)| v1::Fact { request, attempt, fact: fact() }).collect();
            (facts, told)
        };
        if told.is_empty() {
            return;
        }
        let told = v1::FromNode { message: Some(v1::from_node::Message::Facts(v1::Facts { facts: told })) };
        let heard = async {
            if facts.send(told).await.is_ok() {
                facts.closed().await;
            }
        };
        // A conductor that does not answer takes this node for lost anyway.
        let _ = tokio::time::timeout(GONE_WITHIN, heard).await;
    }

    fn order(&self, order: v1::Order) {
        use v1::order::Order;
        let (request, attempt) = (RequestId(order.request), order.attempt);
        match order.order {
            Some(Order::Prefill(prefill)) => self.prefill(request, attempt, prefill),
            Some(Order::Expect(expect)) => self.expect(request, attempt, expect.work),
            Some(Order::Take(take)) => self.take(request, attempt, take.transfer),
            Some(Order::StartDecode(_)) => self.step_of((request, attempt), Input::StartDecode { request }),
            Some(Order::Taken(_)) => self.taken(request, attempt),
            Some(Order::Discard(loan)) => self.discard(request, &loan),
            Some(Order::Release(_)) => self.step(&mut self.inner.life.lock(), Input::Release { request }),
            // An offer is made only once: the engine may have released the blocks.
            Some(Order::Handoff(_)) => {
                let (stage, why) = in_words(LegFailure::NothingToSend, 0);
                self.fail(request, attempt, failure(stage, &why));
            }
            Some(Order::Replicate(_)) => {
                self.send_fact(&self.inner.life.lock(), (0, 0), v1::fact::Fact::Replicated(true));
            }
            None => {}
        }
    }

    fn prefill(&self, request: RequestId, attempt: u32, order: v1::Prefill) {
        let work = match self.work(order.work) {
            Ok(work) => Work { expected_tokens: order.expected_tokens, ..work },
            Err(why) => return self.fail(request, attempt, why.failure()),
        };
        let asks = work.asks(order.room_tokens);
        let fetch = order.fetch_from.map(|_| FetchPlan { from: InstanceId(0), blocks: order.fetch_blocks });
        let stays = order.decode.is_none();
        let mut life = self.inner.life.lock();
        self.open(&mut life, request, Job::new(attempt, work));
        let input = Input::Prefill { request, work: asks, stays, fetch, order: order.order };
        self.step(&mut life, input);
        self.step(&mut life, Input::OpenNext);
    }

    fn expect(&self, request: RequestId, attempt: u32, work: Option<v1::Work>) {
        let work = match self.work(work) {
            Ok(work) => work,
            Err(why) => return self.fail(request, attempt, why.failure()),
        };
        let asks = work.asks(0);
        let mut life = self.inner.life.lock();
        self.open(&mut life, request, Job::new(attempt, work));
        self.step(&mut life, Input::Expect { request, work: asks });
    }

    /// Makes a leg's job. A leg that the request had here before is over.
    fn open(&self, life: &mut Life, request: RequestId, job: Job) {
        self.step(life, Input::Release { request });
        life.jobs.insert(request, job);
    }

    /// The KV can be taken: its call begins, so that it is there when the order to decode comes.
    fn take(&self, request: RequestId, attempt: u32, transfer: Bytes) {
        let mut life = self.inner.life.lock();
        let Some(job) = life.jobs.get_mut(&request).filter(|job| job.attempt == attempt) else { return };
        job.transfer = transfer;
        self.step(&mut life, Input::Landed { request });
    }

    /// The offer of a prefill leg was passed on: the KV that its engine lends is the decode engine's to take.
    fn taken(&self, request: RequestId, attempt: u32) {
        let mut life = self.inner.life.lock();
        if let Some(job) = life.jobs.get_mut(&request).filter(|job| job.attempt == attempt) {
            job.go_on();
            self.step(&mut life, Input::HandedOff { request, ok: true, now_us: 0 });
        }
    }

    /// Steps a leg, if it is of this attempt.
    fn step_of(&self, (request, attempt): (RequestId, u32), input: Input) {
        let mut life = self.inner.life.lock();
        if life.jobs.get(&request).is_some_and(|job| job.attempt == attempt) {
            self.step(&mut life, input);
        }
    }

    fn step(&self, life: &mut Life, input: Input) {
        let mut effects = Vec::new();
        life.legs.step(input, &mut effects);
        for effect in effects {
            self.carry_out(life, effect);
        }
    }

    fn carry_out(&self, life: &mut Life, effect: Effect) {
        match effect {
            // The engine finds room, and what its cache holds, by itself.
            Effect::Open { request, .. } => {
                self.step(life, Input::Opened { request, cached_blocks: 0, waits: false });
            }
            // It computes what others hold.
            Effect::Fetch { request, .. } => {
                self.step(life, Input::FetchEnded { request, cached_blocks: 0 });
            }
            Effect::Fetched { request, ok } => self.report(life, request, v1::fact::Fact::Fetch(ok)),
            Effect::Compute { request, .. } => self.compute(life, request),
            // Of a prefill leg nothing is kept here.
            Effect::Seal { request } => {
                if life.legs.get(request) == Some(&Leg::Landed) {
                    self.decode(life, request);
                }
            }
            Effect::Decode { request } => {
                if let Some(job) = life.jobs.get_mut(&request) {
                    job.go_on();
                }
            }
            Effect::Close { request, .. } => _ = life.jobs.remove(&request),
            Effect::Fail { request, why } => {
                let (stage, message) = in_words(why, self.inner.capacity_blocks);
                self.report(life, request, v1::fact::Fact::Failure(failure(stage, &message)));
            }
            // The engine takes KV in, sends it and finds room for longer answers by itself.
            Effect::Withdraw { .. } | Effect::Admit { .. } | Effect::Send { .. } | Effect::Grow { .. } => {}
        }
    }

    /// Calls the engine for a prompt.
    fn compute(&self, life: &mut Life, request: RequestId) {
        let leaves = life.legs.get(request).is_some_and(Leg::leaves);
        let Some((work, signals, sender)) = self.task(life, request) else { return };
        let engine = self.inner.engine.clone();
        match leaves {
            true => _ = self.inner.runtime.spawn(legs::prefill(engine, work, sender, signals)),
            false => _ = self.inner.runtime.spawn(legs::whole(engine, work, sender, signals)),
        }
    }

    /// Calls the engine for the answer to a prompt whose KV it can take.
    fn decode(&self, life: &mut Life, request: RequestId) {
        let transfer = life.jobs.get(&request).map_or_else(Bytes::new, |job| job.transfer.clone());
        let Some((work, signals, sender)) = self.task(life, request) else { return };
        let engine = self.inner.engine.clone();
        self.inner.runtime.spawn(legs::decode(engine, (work, transfer), sender, signals));
    }

    /// The parts that a leg's task works with. `None` where the leg has a task already, or there is no conductor.
    fn task(&self, life: &mut Life, request: RequestId) -> Option<(Work, LegSignals, FactSender)> {
        let facts = life.facts.clone()?;
        let job = life.jobs.get_mut(&request)?;
        let (work, gate) = job.work.take().zip(job.gate.take())?;
        let sender = FactSender { node_legs: self.clone(), facts, request, attempt: job.attempt };
        Some((work, LegSignals { over: job.over.clone(), gate }, sender))
    }

    /// Fetches KV from another engine and discards it.
    fn discard(&self, request: RequestId, loan: &v1::Loan) {
        let engine = self.inner.engine.clone();
        let tokens = baton_wire::unpack_tokens(&loan.tokens).unwrap_or_default();
        let transfer = loan.transfer.clone();
        self.inner.runtime.spawn(async move {
            if let Err(error) = legs::discard(&engine, tokens, &transfer).await {
                tracing::warn!(%request, %error, "KV of a request that is gone waits for the end of its lease");
            }
        });
    }

    fn work(&self, work: Option<v1::Work>) -> Result<Work, OrderError> {
        let (legs, chain_seed) = {
            let life = self.inner.life.lock();
            (life.jobs.len(), life.chain_seed)
        };
        if legs >= LEGS_MOST {
            return Err(OrderError::Busy(LEGS_MOST));
        }
        let dialect = self.inner.engine.settings().dialect;
        Work::new(work, (chain_seed, self.inner.block_tokens), &self.inner.prompts, dialect)
    }

    fn fail(&self, request: RequestId, attempt: u32, failure: v1::Failure) {
        let fact = v1::fact::Fact::Failure(failure);
        self.send_fact(&self.inner.life.lock(), (request.0, attempt), fact);
    }

    /// Reports one thing about a leg.
    fn report(&self, life: &Life, request: RequestId, fact: v1::fact::Fact) {
        let attempt = life.jobs.get(&request).map_or(0, |job| job.attempt);
        self.send_fact(life, (request.0, attempt), fact);
    }

    /// Says one thing outside a leg's task; a line that is full is waited for there.
    fn send_fact(&self, life: &Life, (request, attempt): (u64, u32), fact: v1::fact::Fact) {
        let Some(facts) = life.facts.clone() else { return };
        let told = message(request, attempt, vec![fact]);
        self.inner.runtime.spawn(async move {
            // A line that is gone took its requests with it.
            let _ = facts.send(told).await;
        });
    }
}

impl FactSender {
    /// Reports to the conductor; false when it is gone.
    pub(super) async fn send(&self, facts: Vec<v1::fact::Fact>) -> bool {
        self.facts.send(message(self.request.0, self.attempt, facts)).await.is_ok()
    }

    /// Says that KV is nobody's: to the conductor that is there now, or comes before `until`, when the KV is gone by itself.
    /// It may be another than the one that wanted the KV, for a leg outlives its attachment where that broke.
    pub(super) async fn abandon(&self, loan: v1::Loan, until: Instant) {
        let inner = &self.node_legs.inner;
        let told = message(self.request.0, self.attempt, vec![v1::fact::Fact::Abandoned(loan)]);
        let saying = async {
            loop {
                let attached = inner.attached.notified();
                let facts = inner.life.lock().facts.clone();
                if let Some(facts) = facts
                    && facts.send(told.clone()).await.is_ok()
                {
                    break;
                }
                attached.await;
            }
        };
        let _ = tokio::time::timeout_at(until.into(), saying).await;
    }

    /// The engine has computed the prompt; reports what the conductor did not know of its cache. False when this leg is
    /// over.
    pub(super) async fn computed(&self, chain: &[BlockKey]) {
        let request = self.request;
        self.node_legs.step_of((request, self.attempt), Input::Computed { request });
        let news = self.node_legs.inner.knowledge.computed(chain);
        self.news(&news).await;
    }

    /// What keeps this engine's steps short.
    pub(super) fn splitter(&self) -> Option<&Arc<PromptSplitter>> {
        self.node_legs.inner.splitter.as_ref()
    }

    /// When the blocks of a chain that the engine is assumed to hold were last used, before it is asked for them.
    pub(super) fn held(&self, chain: &[BlockKey]) -> Vec<u64> {
        self.node_legs.inner.knowledge.held(chain)
    }

    /// The engine has reported how much of a prompt it found in its cache: what was known of that is corrected.
    /// `held` is what [`Self::held`] gave before.
    pub(super) async fn found(&self, work: &Work, held: &[u64], found_tokens: Option<u64>) {
        // A prompt whose logprobs are asked for is computed without a look into the cache.
        let looked = work.request.sampling.prompt_logprobs.is_none();
        let Some(found_tokens) = found_tokens.filter(|_| looked) else { return };
        let inner = &self.node_legs.inner;
        let (wrong, news) = inner.knowledge.found(work, held, (found_tokens, inner.block_tokens));
        if wrong {
            inner.resyncs.fetch_add(1, Ordering::Relaxed);
        }
        self.news(&news).await;
    }

    /// Reports changes of the engine's cache.
    async fn news(&self, news: &[CacheChange]) {
        if !news.is_empty() {
            // As in `send`.
            let _ = self.facts.send(message(0, 0, news.iter().map(cache_fact).collect())).await;
        }
    }

    /// Schedules a health check of the engine.
    pub(super) fn doubt(&self) {
        self.node_legs.inner.doubt.notify_one();
    }

    /// Whether the engine is gone: it takes no connections, or says that it is dead, as a server does for a moment
    /// whose engine has died behind it. One that takes its time to answer is there.
    pub(super) async fn engine_is_gone(&self) -> bool {
        let asked = tokio::time::timeout(GONE_WITHIN, self.node_legs.inner.engine.health()).await;
        asked.is_ok_and(|health| health.is_err())
    }

    /// This leg is over here.
    pub(super) fn close(self) {
        let request = self.request;
        self.node_legs.step_of((request, self.attempt), Input::Ended { request });
    }
}

impl NodeRuntime for RemoteLegs {
    fn attached(
        &self,
        welcome: &v1::Welcome,
        facts: mpsc::Sender<v1::FromNode>,
    ) -> Result<(), WorkerGoneError> {
        let mut life = self.inner.life.lock();
        life.clear();
        self.inner.knowledge.attached(Attachment { chain_seed: welcome.chain_seed, facts: facts.clone() });
        (life.chain_seed, life.facts) = (welcome.chain_seed, Some(facts));
        drop(life);
        self.inner.attached.notify_waiters();
        Ok(())
    }

    fn detached(&self) -> Result<(), WorkerGoneError> {
        let mut life = self.inner.life.lock();
        life.clear();
        life.facts = None;
        self.inner.knowledge.detached();
        Ok(())
    }

    fn ordered(&self, orders: v1::Orders) -> Result<(), WorkerGoneError> {
        if let Some(splitter) = &self.inner.splitter {
            splitter.set_step_target(orders.step_target_us);
        }
        orders.orders.into_iter().for_each(|order| self.order(order));
        Ok(())
    }

    fn load(&self) -> v1::NodeLoad {
        let (legs, audit_failures) = self.inner.life.lock().look_over();
        let load = self.inner.load.lock().unwrap_or_default();
        let whole = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        let capacity_blocks = self.inner.capacity_blocks;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a share of a count"
        )]
        let used_blocks = (load.kv_used_share.unwrap_or(0.0) * capacity_blocks as f64) as u64;
        let refound_tokens = self.inner.splitter.as_ref().map_or(0, |splitter| splitter.refound_tokens());
        let hit_tokens = load.prefix_hit_tokens.unwrap_or(0).saturating_sub(refound_tokens);
        let hit_blocks = hit_tokens / u64::from(self.inner.block_tokens);
        let hbm = v1::TierLoad {
            tier: v1::Tier::Hbm.into(),
            capacity_blocks,
            used_blocks,
            hit_blocks,
            ..v1::TierLoad::default()
        };
        v1::NodeLoad {
            running: whole(load.running),
            waiting: whole(load.waiting),
            holds: legs,
            tiers: vec![hbm],
            audit_failures,
            resyncs: self.inner.resyncs.load(Ordering::Relaxed),
            ..v1::NodeLoad::default()
        }
    }
}

pub(super) fn message(request: u64, attempt: u32, facts: Vec<v1::fact::Fact>) -> v1::FromNode {
    let facts = facts.into_iter().map(|fact| v1::Fact { request, attempt, fact: Some(fact) }).collect();
    v1::FromNode { message: Some(v1::from_node::Message::Facts(v1::Facts { facts })) }
}

/// A failure that is not the request's own.
fn failure(stage: Stage, why: &str) -> v1::Failure {
    v1::Failure { stage: stage.into(), message: why.into(), of_request: false, ..v1::Failure::default() }
}

pub(super) fn cache_fact(change: &CacheChange) -> v1::fact::Fact {
    v1::fact::Fact::Cache(v1::CacheChange::from(change))
}
