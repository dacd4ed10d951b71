//! The legs that are under way on the engine, and the word to and from the conductor about them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use baton_remote::{Load, RemoteEngine};
use baton_types::{BlockKey, CacheChange};
use baton_wire::v1;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::assumed::Assumed;
use super::drift::Drift;
use super::legs;
use super::news::{self, Attachment, EventSource};
use super::prompts::Prompts;
use super::work::Work;
use crate::node::attach::{Gone, NodeRuntime};

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
    /// The last that the engine told.
    load: Mutex<Option<Load>>,
    doubt: Notify,
    /// Told when the conductor is there again.
    attached: Notify,
    knowledge: Knowledge,
    prompts: Prompts,
    /// Times that what was known proved wrong.
    resyncs: AtomicU64,
}

/// How it is known what the engine holds.
enum Knowledge {
    /// It announces that, to those that follow.
    Told {
        attachments: watch::Sender<Option<Attachment>>,
        /// Told when what is known proved wrong.
        drifted: Arc<Notify>,
        drift: Mutex<Drift>,
    },
    /// What it computed last, as far as there is room.
    Assumed(Mutex<Assumed>),
}

/// What counts for one attachment to the conductor.
struct Life {
    facts: Option<mpsc::Sender<v1::FromNode>>,
    chain_seed: u64,
    legs: BTreeMap<u64, Leg>,
}

/// One leg.
struct Leg {
    attempt: u32,
    /// A decode leg's, until it is told how to take its KV.
    work: Option<Work>,
    /// Its task ends: at once, or as soon as nothing would stay behind at the engine.
    over: CancellationToken,
    /// The word that it waits for: to decode, or that its offer was passed on.
    go: Option<oneshot::Sender<()>>,
    /// What waits for that.
    gate: Option<oneshot::Receiver<()>>,
}

impl Leg {
    fn new(attempt: u32, work: Option<Work>) -> Self {
        let (go, gate) = oneshot::channel();
        Self { attempt, work, over: CancellationToken::new(), go: Some(go), gate: Some(gate) }
    }
}

impl Drop for Leg {
    fn drop(&mut self) {
        self.over.cancel();
    }
}

/// What a leg waits for, apart from its engine.
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
    request: u64,
    attempt: u32,
}

impl RemoteLegs {
    /// No leg yet. Tasks of legs run on the present runtime.
    pub(super) fn new(
        engine: RemoteEngine,
        block_tokens: u32,
        capacity_blocks: u64,
        events: Option<EventSource>,
        prompts: Prompts,
    ) -> Self {
        let assumed = || Knowledge::Assumed(Mutex::new(Assumed::new(capacity_blocks)));
        let knowledge = events.map_or_else(assumed, |source| {
            let (attachments, seen) = watch::channel(None);
            // It ends with the last clone, which holds the only sender.
            let drifted = Arc::new(Notify::new());
            tokio::spawn(news::follow(source, block_tokens, seen, Arc::clone(&drifted)));
            Knowledge::Told { attachments, drifted, drift: Mutex::default() }
        });
        let life = Life { facts: None, chain_seed: 0, legs: BTreeMap::new() };
        let inner = Inner {
            engine,
            runtime: Handle::current(),
            block_tokens,
            capacity_blocks,
            life: Mutex::new(life),
            load: Mutex::default(),
            doubt: Notify::new(),
            attached: Notify::new(),
            knowledge,
            prompts,
            resyncs: AtomicU64::new(0),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Keeps what the engine told of its load.
    pub(super) fn looked(&self, load: Option<Load>) {
        *self.inner.load.lock() = load;
    }

    /// Returns when a leg found the engine away.
    pub(super) async fn doubted(&self) {
        self.inner.doubt.notified().await;
    }

    fn order(&self, order: v1::Order) {
        use v1::order::Order;
        let (request, attempt) = (order.request, order.attempt);
        match order.order {
            Some(Order::Prefill(prefill)) => self.prefill(request, attempt, prefill),
            Some(Order::Expect(expect)) => self.expect(request, attempt, expect.work),
            Some(Order::Take(take)) => self.take(request, attempt, take.transfer),
            Some(Order::StartDecode(_) | Order::Taken(_)) => self.start(request, attempt),
            Some(Order::Discard(loan)) => self.discard(request, &loan),
            Some(Order::Release(_)) => _ = self.inner.life.lock().legs.remove(&request),
            // What was offered once is not offered again: the engine may have given the blocks away.
            Some(Order::Handoff(_)) => {
                self.refuse(request, attempt, ("handoff", "its KV is not here any more"))
            }
            Some(Order::Replicate(_)) => {
                self.say(0, 0, v1::fact::Fact::Replicated(true));
            }
            None => {}
        }
    }

    fn prefill(&self, request: u64, attempt: u32, order: v1::Prefill) {
        let work = match self.work(order.work) {
            Ok(work) => Work { expected_tokens: order.expected_tokens, ..work },
            Err(why) => return self.refuse(request, attempt, ("engine", &why)),
        };
        if order.fetch_from.is_some() {
            // Its engine computes what others hold.
            self.say(request, attempt, v1::fact::Fact::Fetch(false));
        }
        let engine = self.inner.engine.clone();
        let alone = order.decode.is_none();
        self.open(request, attempt, |signals, sender| async move {
            if alone {
                legs::whole(engine, work, sender, signals).await;
            } else {
                legs::prefill(engine, work, sender, signals).await;
            }
        });
    }

    fn expect(&self, request: u64, attempt: u32, work: Option<v1::Work>) {
        match self.work(work) {
            Ok(work) => {
                self.inner.life.lock().legs.insert(request, Leg::new(attempt, Some(work)));
            }
            Err(why) => self.refuse(request, attempt, ("engine", &why)),
        }
    }

    /// The KV can be taken: its call begins, so that it is there when the word to decode comes.
    fn take(&self, request: u64, attempt: u32, transfer: Bytes) {
        let taken = {
            let mut life = self.inner.life.lock();
            life.legs.get_mut(&request).filter(|leg| leg.attempt == attempt).and_then(|leg| leg.work.take())
        };
        let Some(work) = taken else { return };
        let engine = self.inner.engine.clone();
        self.run(request, |signals, sender| legs::decode(engine, (work, transfer), sender, signals));
    }

    fn start(&self, request: u64, attempt: u32) {
        let mut life = self.inner.life.lock();
        let leg = life.legs.get_mut(&request).filter(|leg| leg.attempt == attempt);
        if let Some(go) = leg.and_then(|leg| leg.go.take()) {
            // A leg that has failed meanwhile has said so.
            let _ = go.send(());
        }
    }

    /// Takes KV off another engine and throws it away.
    fn discard(&self, request: u64, loan: &v1::Loan) {
        let engine = self.inner.engine.clone();
        let tokens = baton_wire::unpack_tokens(&loan.tokens).unwrap_or_default();
        let transfer = loan.transfer.clone();
        self.inner.runtime.spawn(async move {
            if let Err(error) = legs::discard(&engine, tokens, &transfer).await {
                tracing::warn!(request, %error, "KV of a request that is gone waits for the end of its lease");
            }
        });
    }

    fn work(&self, work: Option<v1::Work>) -> Result<Work, String> {
        let (legs, chain_seed) = {
            let life = self.inner.life.lock();
            (life.legs.len(), life.chain_seed)
        };
        if legs >= LEGS_MOST {
            return Err(format!("{LEGS_MOST} legs are under way on this node"));
        }
        Work::new(work, (chain_seed, self.inner.block_tokens), &self.inner.prompts)
    }

    fn open<F: Future<Output = ()> + Send + 'static>(
        &self,
        request: u64,
        attempt: u32,
        task: impl FnOnce(LegSignals, FactSender) -> F,
    ) {
        // Whatever was under way for it here is over.
        self.inner.life.lock().legs.insert(request, Leg::new(attempt, None));
        self.run(request, task);
    }

    /// Starts the task of a leg that is open.
    fn run<F: Future<Output = ()> + Send + 'static>(
        &self,
        request: u64,
        task: impl FnOnce(LegSignals, FactSender) -> F,
    ) {
        let mut life = self.inner.life.lock();
        let Some(facts) = life.facts.clone() else { return };
        let Some(leg) = life.legs.get_mut(&request) else { return };
        let Some(gate) = leg.gate.take() else { return };
        let sender = FactSender { node_legs: self.clone(), facts, request, attempt: leg.attempt };
        let signals = LegSignals { over: leg.over.clone(), gate };
        self.inner.runtime.spawn(task(signals, sender));
    }

    fn refuse(&self, request: u64, attempt: u32, (stage, why): (&str, &str)) {
        let failure = v1::Failure {
            stage: stage.into(),
            message: why.into(),
            of_request: false,
            ..v1::Failure::default()
        };
        self.say(request, attempt, v1::fact::Fact::Failure(failure));
    }

    /// Says one thing outside a leg's task; a line that is full is waited for there.
    fn say(&self, request: u64, attempt: u32, fact: v1::fact::Fact) {
        let Some(facts) = self.inner.life.lock().facts.clone() else { return };
        let told = message(request, attempt, vec![fact]);
        self.inner.runtime.spawn(async move {
            // A line that is gone took its requests with it.
            let _ = facts.send(told).await;
        });
    }
}

impl FactSender {
    /// Tells the conductor; false when it is gone.
    pub(super) async fn tell(&self, facts: Vec<v1::fact::Fact>) -> bool {
        self.facts.send(message(self.request, self.attempt, facts)).await.is_ok()
    }

    /// Says that KV is nobody's: to the conductor that is there now, or comes before `until`, when the KV is gone by itself.
    /// It may be another than the one that wanted the KV, for a leg outlives its attachment where that broke.
    pub(super) async fn abandon(&self, loan: v1::Loan, until: Instant) {
        let inner = &self.node_legs.inner;
        let told = message(self.request, self.attempt, vec![v1::fact::Fact::Abandoned(loan)]);
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

    /// The engine has computed this chain; says what the conductor did not know of it.
    pub(super) async fn computed(&self, chain: &[BlockKey]) {
        let Knowledge::Assumed(assumed) = &self.node_legs.inner.knowledge else { return };
        let news = assumed.lock().computed(chain);
        let facts: Vec<v1::fact::Fact> = news.iter().map(cache_fact).collect();
        if !facts.is_empty() {
            // As in `tell`.
            let _ = self.facts.send(message(0, 0, facts)).await;
        }
    }

    /// When the blocks of a chain that the engine is assumed to hold were last used, before it is asked for them.
    pub(super) fn held(&self, chain: &[BlockKey]) -> Vec<u64> {
        match &self.node_legs.inner.knowledge {
            Knowledge::Assumed(assumed) => assumed.lock().held(chain),
            Knowledge::Told { .. } => Vec::new(),
        }
    }

    /// The engine has told how much of a prompt it found in its cache: what was known of that is mended where it
    /// was wrong. `held` is what [`Self::held`] said before.
    pub(super) async fn found(&self, work: &Work, held: &[u64], found_tokens: Option<u64>) {
        let Some(found_tokens) = found_tokens else { return };
        let inner = &self.node_legs.inner;
        match &inner.knowledge {
            Knowledge::Assumed(assumed) => {
                // An engine computes one token at least, so that it never finds the last block of a whole prompt.
                let block_tokens = inner.block_tokens.max(1) as usize;
                let most = work.request.tokens.len().saturating_sub(1) / block_tokens;
                let found = usize::try_from(found_tokens).unwrap_or(usize::MAX) / block_tokens;
                let held = &held[..held.len().min(most)];
                let news = assumed.lock().found(held, found);
                if !news.is_empty() {
                    inner.resyncs.fetch_add(1, Ordering::Relaxed);
                    // As in `tell`.
                    let _ = self.facts.send(message(0, 0, news.iter().map(cache_fact).collect())).await;
                }
            }
            Knowledge::Told { drifted, drift, .. } => {
                let Some(expected_tokens) = work.expected_tokens else { return };
                if drift.lock().note(expected_tokens, found_tokens, Instant::now()) {
                    inner.resyncs.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!("the engine's cache is not as it announced: all of it is learnt anew");
                    drifted.notify_one();
                }
            }
        }
    }

    /// Somebody should look whether the engine is well.
    pub(super) fn doubt(&self) {
        self.node_legs.inner.doubt.notify_one();
    }

    /// Whether the engine is there no more: it takes no connections, or says that it is dead, as a server does for a moment
    /// whose engine has died behind it. One that takes its time to answer is there.
    pub(super) async fn engine_is_gone(&self) -> bool {
        let asked = tokio::time::timeout(GONE_WITHIN, self.node_legs.inner.engine.health()).await;
        asked.is_ok_and(|health| health.is_err())
    }

    /// This leg is over here.
    pub(super) fn close(self) {
        let mut life = self.node_legs.inner.life.lock();
        if life.legs.get(&self.request).is_some_and(|leg| leg.attempt == self.attempt) {
            life.legs.remove(&self.request);
        }
    }
}

impl NodeRuntime for RemoteLegs {
    fn attached(&self, welcome: &v1::Welcome, facts: mpsc::Sender<v1::FromNode>) -> Result<(), Gone> {
        let mut life = self.inner.life.lock();
        life.legs.clear();
        match &self.inner.knowledge {
            Knowledge::Told { attachments, .. } => {
                let chain_seed = welcome.chain_seed;
                attachments.send_replace(Some(Attachment { chain_seed, facts: facts.clone() }));
            }
            Knowledge::Assumed(assumed) => *assumed.lock() = Assumed::new(self.inner.capacity_blocks),
        }
        (life.chain_seed, life.facts) = (welcome.chain_seed, Some(facts));
        drop(life);
        self.inner.attached.notify_waiters();
        Ok(())
    }

    fn detached(&self) -> Result<(), Gone> {
        let mut life = self.inner.life.lock();
        life.legs.clear();
        life.facts = None;
        if let Knowledge::Told { attachments, .. } = &self.inner.knowledge {
            attachments.send_replace(None);
        }
        Ok(())
    }

    fn ordered(&self, orders: v1::Orders) -> Result<(), Gone> {
        orders.orders.into_iter().for_each(|order| self.order(order));
        Ok(())
    }

    fn load(&self) -> v1::NodeLoad {
        let legs = u32::try_from(self.inner.life.lock().legs.len()).unwrap_or(u32::MAX);
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
        let hit_blocks = load.prefix_hit_tokens.unwrap_or(0) / u64::from(self.inner.block_tokens);
        let hbm = v1::TierLoad {
            tier: "hbm".into(),
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
            resyncs: self.inner.resyncs.load(Ordering::Relaxed),
            ..v1::NodeLoad::default()
        }
    }
}

pub(super) fn message(request: u64, attempt: u32, facts: Vec<v1::fact::Fact>) -> v1::FromNode {
    let facts = facts.into_iter().map(|fact| v1::Fact { request, attempt, fact: Some(fact) }).collect();
    v1::FromNode { message: Some(v1::from_node::Message::Facts(v1::Facts { facts })) }
}

pub(super) fn cache_fact(change: &CacheChange) -> v1::fact::Fact {
    v1::fact::Fact::Cache(v1::CacheChange::from(change))
}
