//! A node's own thread: one engine, one KV cache, and the legs of requests that run here.
//!
//! Everything that touches KV happens on this thread, between two passes of the engine; the network
//! and the disk are elsewhere and send messages.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use baton_engine::{Engine, Event, SequenceId, StepTarget};
use baton_legs::{Effect, Input, Leg, LegFailure, LegHoldings, Legs, LegsConfig};
use baton_tiers::{HoldRefusal, KvCache, Notice};
use baton_types::{CacheChange, CostProfile, RequestId, Tier};
use baton_wire::v1;
use baton_wire::v1::failure::Stage;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::job::Job;
use super::links::{Links, ToWorker};
use super::pool::open;
use super::publish::Announcer;
use super::replica::Replicas;
use super::sink::KvStream;
use crate::audit::Audit;

/// Messages taken in between two passes.
const BATCH_MESSAGES: usize = 512;
/// How long the thread sleeps when there is nothing to compute; disk and waiting jobs are looked at then.
const IDLE: Duration = Duration::from_millis(20);
const BUSY_ELSEWHERE: Duration = Duration::from_millis(1);
/// How often the load report is renewed.
const REPORT: Duration = Duration::from_millis(100);

/// From here on owners of the store are no requests.
const FIRST_HELPER: u64 = 1 << 63;

/// The thread's state.
pub(super) struct Worker {
    pub(super) engine: Box<dyn Engine>,
    /// What the engine's passes cost.
    profile: Arc<CostProfile>,
    pub(super) cache: KvCache,
    pub(super) jobs: BTreeMap<u64, Job>,
    /// Where each of them is, and who goes next.
    pub(super) legs: Legs,
    /// Owners of the store that are no requests: reads for peers, replicas.
    pub(super) helpers: u64,
    pub(super) links: Arc<Links>,
    pub(super) kv_streams: BTreeMap<SequenceId, KvStream>,
    pub(super) chain_seed: u64,
    pub(super) facts: Vec<v1::Fact>,
    pub(super) report: Arc<Mutex<v1::NodeLoad>>,
    pub(super) attached: Option<mpsc::Sender<v1::FromNode>>,
    pub(super) handoff_bytes: u64,
    /// Whether it has no engine: its fastest tier is memory.
    pub(super) lends: bool,
    /// Announces the content of the cache to subscribers.
    pub(super) announcer: Option<Announcer>,
    /// Copies ahead of demand that are under way.
    pub(super) replicas: Replicas,
    audit: Audit,
    /// Of the transfer engine, whose ledger has a lock of its own.
    mover_audit: Audit,
    reported: Instant,
    began: Instant,
    turns: Arc<AtomicU64>,
}

/// The parts of a worker.
pub(super) struct Parts {
    pub(super) engine: Box<dyn Engine>,
    pub(super) profile: Arc<CostProfile>,
    pub(super) cache: KvCache,
    pub(super) links: Arc<Links>,
    pub(super) report: Arc<Mutex<v1::NodeLoad>>,
    pub(super) lends: bool,
    pub(super) pass_tokens: u32,
    pub(super) announcer: Option<Announcer>,
    /// Counted up at every turn.
    pub(super) turns: Arc<AtomicU64>,
}

impl Worker {
    pub(super) fn new(parts: Parts) -> Self {
        let shape = parts.engine.shape();
        let legs = LegsConfig::new(shape.block_tokens, shape.blocks.into(), parts.pass_tokens.into());
        Self {
            engine: parts.engine,
            profile: parts.profile,
            cache: parts.cache,
            jobs: BTreeMap::new(),
            legs: Legs::new(legs),
            helpers: 0,
            links: parts.links,
            kv_streams: BTreeMap::new(),
            chain_seed: 0,
            facts: Vec::new(),
            report: parts.report,
            attached: None,
            handoff_bytes: 0,
            lends: parts.lends,
            announcer: parts.announcer,
            replicas: Replicas::default(),
            audit: Audit::new(Instant::now()),
            mover_audit: Audit::new(Instant::now()),
            reported: Instant::now(),
            began: Instant::now(),
            turns: parts.turns,
        }
    }

    /// Runs until it is stopped or all senders of its inbox are gone.
    pub(super) fn run(mut self, inbox: &Receiver<ToWorker>) {
        let mut events = Vec::new();
        let mut busy = false;
        loop {
            self.turns.fetch_add(1, Ordering::Relaxed);
            if !self.take_in(inbox, busy) {
                return;
            }
            self.settle();
            // A pass may take long, so the reports of before go out first.
            self.flush();
            busy = self.pass(&mut events);
            self.flush();
            if self.reported.elapsed() >= REPORT {
                self.look_over();
                self.renew_report();
                let now_us = self.now_us();
                self.leg(Input::Tick { now_us });
            }
        }
    }

    /// Takes messages in; waits for one if there is nothing to compute. False: stop.
    fn take_in(&mut self, inbox: &Receiver<ToWorker>, busy: bool) -> bool {
        if !busy {
            let waiting = self.legs.iter().any(|(_, leg)| matches!(leg, Leg::Loading(_)));
            match inbox.recv_timeout(if waiting { BUSY_ELSEWHERE } else { IDLE }) {
                Ok(ToWorker::Stop) | Err(RecvTimeoutError::Disconnected) => return false,
                Ok(message) => self.message(message),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
        for _ in 0..BATCH_MESSAGES {
            match inbox.try_recv() {
                Ok(ToWorker::Stop) | Err(TryRecvError::Disconnected) => return false,
                Ok(message) => self.message(message),
                Err(TryRecvError::Empty) => break,
            }
        }
        true
    }

    fn message(&mut self, message: ToWorker) {
        match message {
            ToWorker::Attached { chain_seed, facts } => {
                self.forget_everything();
                self.chain_seed = chain_seed;
                self.attached = Some(facts);
                self.announce();
            }
            ToWorker::Detached => {
                self.attached = None;
                self.forget_everything();
            }
            ToWorker::Orders(orders) => {
                let target = |time_us| StepTarget { profile: Arc::clone(&self.profile), time_us };
                self.engine.set_step_target(orders.step_target_us.map(target));
                orders.orders.into_iter().for_each(|order| self.order(order));
            }
            ToWorker::Offered(ticket) => self.offered(ticket),
            ToWorker::Tokens { ticket, note } => self.tokens_came(ticket, &note),
            ToWorker::Landed(ticket) => self.landed(ticket),
            ToWorker::Wanted { keys, reply } => self.wanted(&keys, reply),
            ToWorker::Fetched { request, attempt, blocks } => self.fetched(request, attempt, blocks),
            ToWorker::Replica { chain, blocks } => self.replica(&chain, blocks),
            ToWorker::FlightEnded { request, attempt, outcome } => {
                self.flight_ended(request, attempt, outcome)
            }
            ToWorker::Stop => {}
        }
    }

    fn order(&mut self, order: v1::Order) {
        use v1::order::Order;
        let (request, attempt) = (order.request, order.attempt);
        if request >= FIRST_HELPER {
            return self.refuse(request, attempt, "requests are numbered below 2^63");
        }
        match order.order {
            Some(Order::Prefill(prefill)) => self.prefill_ordered(request, attempt, prefill),
            Some(Order::Expect(expect)) => self.expect_ordered(request, attempt, expect),
            Some(Order::StartDecode(start)) => self.start_decode(request, attempt, &start.answer),
            Some(Order::Handoff(handoff)) => self.handoff_ordered(request, attempt, handoff.to),
            Some(Order::Replicate(order)) => self.replicate_ordered(order),
            Some(Order::Release(_)) => self.release(request),
            // Its KV comes by flights.
            Some(Order::Take(_) | Order::Taken(_) | Order::Discard(_)) | None => {}
        }
    }

    /// Handles the cache's notices: changes to report, and requests that can go on.
    fn settle(&mut self) {
        let mut pool = super::pool::EnginePool(self.engine.as_mut());
        let (mut changes, mut ready) = (Vec::new(), Vec::new());
        for notice in self.cache.poll(&mut pool) {
            match notice {
                Notice::Ready { owner, readable_blocks } => {
                    if let Some(job) = self.jobs.get_mut(&owner.0) {
                        job.readable_blocks = readable_blocks;
                        if let Some(hold) = &mut job.hold {
                            hold.waiting = false;
                        }
                        ready.push(owner);
                    } else {
                        self.replicas.ready.push((owner, readable_blocks));
                    }
                }
                Notice::Changed(change) => changes.push(change),
            }
        }
        changes.iter_mut().for_each(|change| self.name_tier(change));
        if let Some(announcer) = &mut self.announcer {
            announcer.publish(&changes);
        }
        self.facts.extend(changes.iter().map(cache_fact));
        self.place_ready_replicas();
        for request in ready {
            let cached_blocks = self.jobs.get(&request.0).map_or(0, |job| job.readable_blocks);
            self.leg(Input::Cached { request, cached_blocks, waits: false });
        }
        self.leg(Input::RoomFreed);
        self.open_prefills();
    }

    /// One pass of the engine and what came of it.
    fn pass(&mut self, events: &mut Vec<Event>) -> bool {
        let mut sink = super::sink::Sink { kv_streams: &self.kv_streams };
        let busy = self.engine.step(events, &mut sink);
        for event in events.drain(..) {
            match event {
                Event::Computed { id, compute_us } => self.computed(id, compute_us),
                Event::PromptLogprobs { id, logprobs } => self.prompt_logprobs(id, &logprobs),
                Event::Token { id, index, token, logprob, finish } => {
                    let told = v1::Token {
                        index,
                        token,
                        finish: v1::Finish::from(finish).into(),
                        logprob: logprob.as_ref().map(v1::Logprob::from),
                        cached_tokens: None,
                    };
                    self.drew(id, told);
                }
                Event::Starved { id } => self.leg(Input::Starved { request: RequestId(id.0) }),
            }
        }
        busy
    }

    pub(super) fn report(&mut self, request: u64, fact: v1::fact::Fact) {
        let Some(job) = self.jobs.get(&request) else { return };
        self.facts.push(v1::Fact { request, attempt: job.attempt, fact: Some(fact) });
    }

    fn flush(&mut self) {
        if self.facts.is_empty() {
            return;
        }
        let facts = v1::Facts { facts: std::mem::take(&mut self.facts) };
        let message = v1::FromNode { message: Some(v1::from_node::Message::Facts(facts)) };
        // A conductor that does not keep up slows its nodes down; one that is gone closes the channel.
        if let Some(attached) = &self.attached
            && attached.blocking_send(message).is_err()
        {
            self.attached = None;
        }
    }

    /// Steps the legs.
    pub(super) fn leg(&mut self, input: Input) {
        let mut effects = Vec::new();
        self.legs.step(input, &mut effects);
        for effect in effects {
            self.obey(effect);
        }
    }

    fn obey(&mut self, effect: Effect) {
        match effect {
            Effect::Open { request, room_blocks } => self.open(request, room_blocks),
            Effect::Fetch { request, have_blocks, plan } => {
                self.start_fetch(request.0, have_blocks, plan.blocks);
            }
            Effect::Fetched { request, ok } => self.report(request.0, v1::fact::Fact::Fetch(ok)),
            Effect::Compute { request, cached_tokens } => self.start_prefill(request.0, cached_tokens),
            Effect::Seal { request } => self.seal(request.0),
            Effect::Withdraw { request, to } => self.withdraw(request, to),
            Effect::Admit { request } => self.admit(request.0),
            Effect::Send { request } => self.send_all(request.0),
            Effect::Decode { request } => self.decode(request.0),
            Effect::Grow { request, blocks } => self.grow(request, blocks),
            Effect::Close { request, held } => self.close(request.0, held),
            Effect::Fail { request, why } => {
                let (stage, message) = in_words(why, u64::from(self.engine.shape().blocks));
                let attempt = self.jobs.get(&request.0).map_or(0, |job| job.attempt);
                self.fail(request.0, attempt, stage, message);
            }
        }
    }

    /// Asks the cache for a leg's blocks.
    fn open(&mut self, request: RequestId, room_blocks: u32) {
        let Some(job) = self.jobs.get_mut(&request.0) else { return };
        match open(&mut self.cache, request.0, job, room_blocks) {
            Ok(hold) => {
                let (cached_blocks, waits) = (hold.readable_blocks, hold.waiting);
                job.readable_blocks = cached_blocks;
                job.hold = Some(hold);
                self.learn(request.0);
                self.leg(Input::Opened { request, cached_blocks, waits });
            }
            Err(HoldRefusal::NoRoom { .. }) => self.leg(Input::NoRoom { request }),
            Err(refused) => self.leg_failed(request.0, Stage::Room, refused.to_string()),
        }
    }

    /// A request's leg here is over, and so is whatever it had.
    pub(super) fn release(&mut self, request: u64) {
        self.leg(Input::Release { request: RequestId(request) });
    }

    /// Its sequence, its flight, its pins and its room go.
    fn close(&mut self, request: u64, held: LegHoldings) {
        if self.jobs.remove(&request).is_none() {
            return;
        }
        self.engine.stop(SequenceId(request));
        self.kv_streams.remove(&SequenceId(request));
        self.links.forget(request);
        if held.blocks {
            self.cache.close(RequestId(request));
        }
    }

    /// Time since this thread began, µs.
    pub(super) fn now_us(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn forget_everything(&mut self) {
        let requests: Vec<u64> = self.jobs.keys().copied().collect();
        requests.into_iter().for_each(|request| self.release(request));
        self.forget_replicas();
        self.facts.clear();
    }

    /// The tokens of a leg's blocks are known: they can be announced.
    pub(super) fn learn(&mut self, request: u64) {
        if let (Some(announcer), Some(job)) = (&mut self.announcer, self.jobs.get(&request)) {
            announcer.learn(&job.chain, &job.tokens);
        }
    }

    fn name_tier(&self, change: &mut CacheChange) {
        if let CacheChange::Stored { tier, .. } | CacheChange::Removed { tier, .. } = change {
            *tier = self.reported_tier(*tier);
        }
    }

    /// The name of a tier in reports: on a node without an engine the fastest tier is memory.
    const fn reported_tier(&self, tier: Tier) -> Tier {
        match tier {
            Tier::Hbm if self.lends => Tier::Dram,
            tier => tier,
        }
    }

    /// A new epoch begins with what the cache holds.
    fn announce(&mut self) {
        let mut held = self.cache.inventory();
        held.iter_mut().for_each(|change| self.name_tier(change));
        self.facts.extend(held.iter().map(cache_fact));
    }

    pub(super) fn helper(&mut self) -> RequestId {
        self.helpers += 1;
        RequestId(FIRST_HELPER | self.helpers)
    }

    /// Looks the books over, if it is time to.
    fn look_over(&mut self) {
        let begun = Instant::now();
        if self.audit.is_due(begun) {
            // The ledger of blocks is long: it is looked over while nobody waits for the engine.
            let idle = self.jobs.is_empty();
            let found =
                self.legs.check().and_then(|()| if idle { self.cache.check_ledger() } else { Ok(()) });
            self.audit.looked("node", (begun, Instant::now()), found);
        }
        let begun = Instant::now();
        if self.mover_audit.is_due(begun) {
            let found = self.links.check_mover();
            self.mover_audit.looked("transfer engine of a node", (begun, Instant::now()), found);
        }
    }

    fn renew_report(&mut self) {
        self.reported = Instant::now();
        let stats = self.cache.stats();
        let (running, waiting) = self.engine.load();
        let tiers = Tier::LOCAL.iter().zip(&stats.store.tiers);
        let own = tiers.filter(|(name, _)| !self.lends || **name != Tier::Dram);
        let tiers = own.map(|(name, tier)| v1::TierLoad {
            tier: v1::Tier::from(self.reported_tier(*name)).into(),
            capacity_blocks: tier.capacity_blocks,
            used_blocks: tier.used_blocks,
            reserved_blocks: tier.reserved_blocks,
            hit_blocks: tier.hit_blocks,
            evicted_blocks: tier.evicted_blocks,
        });
        let queued = u32::try_from(self.legs.queued()).unwrap_or(u32::MAX);
        *self.report.lock() = v1::NodeLoad {
            running,
            waiting: waiting + queued,
            holds: u32::try_from(stats.store.owners).unwrap_or(u32::MAX),
            tiers: tiers.collect(),
            handoff_bytes: self.handoff_bytes,
            integrity_rejects: stats.integrity_rejects,
            audit_failures: self.audit.failures() + self.mover_audit.failures(),
            // The line adds what its endpoint does.
            ..v1::NodeLoad::default()
        };
    }
}

/// The stage and the words of a failure on a node whose pool has so many blocks.
pub(super) fn in_words(why: LegFailure, blocks: u64) -> (Stage, String) {
    match why {
        LegFailure::TooLarge { needed_blocks } => {
            (Stage::Room, format!("its prompt needs {needed_blocks} blocks, the pool has {blocks}"))
        }
        LegFailure::NoRoom => (Stage::Room, "KV ran short, and nobody else here holds any".into()),
        LegFailure::GaveWay => (Stage::Preempted, "KV ran short: it gave way to older requests".into()),
        LegFailure::NotReady => (Stage::Engine, "the order to decode came before its KV was here".into()),
        LegFailure::NothingToSend => (Stage::Handoff, "its KV is not here, or not any more".into()),
    }
}

/// News of the cache, about no request.
fn cache_fact(change: &CacheChange) -> v1::Fact {
    let fact = v1::fact::Fact::Cache(v1::CacheChange::from(change));
    v1::Fact { request: 0, attempt: 0, fact: Some(fact) }
}

#[cfg(test)]
mod tests {
    use baton_store::StoreConfig;
    use baton_tiers::{CacheConfig, IoChoice};
    use baton_transports::{Endpoint, EndpointConfig, Receiver};

    use super::*;
    use crate::node::pool::KvMap;

    fn worker(runtime: &tokio::runtime::Handle) -> Worker {
        let choice = crate::node::EngineChoice::Seeded {
            spec: baton_engine::SeededSpec::default(),
            pool: baton_engine::PoolSpec::default(),
        };
        let mut engine = crate::node::engine::build(&choice).expect("an engine");
        let kv = KvMap::place(engine.as_mut()).expect("memory");
        let shape = engine.shape();
        let store = StoreConfig { hbm_blocks: shape.blocks.into(), ..StoreConfig::default() };
        let block_bytes = shape.block_bytes();
        let cache = CacheConfig { store, block_bytes, ssd_dir: None, ssd_io: IoChoice::Auto, fingerprint: 0 };
        let (to_worker, _) = std::sync::mpsc::channel();
        Worker::new(Parts {
            engine,
            profile: Arc::new(baton_engine::TimedSpec::zero_work().profile),
            cache: KvCache::new(cache).expect("a cache"),
            links: Arc::new(Links::new(to_worker, runtime.clone(), kv)),
            report: Arc::default(),
            lends: false,
            pass_tokens: 64,
            announcer: None,
            turns: Arc::default(),
        })
    }

    #[tokio::test]
    async fn the_transfer_engine_is_audited_and_its_failures_count() {
        let mut worker = worker(&tokio::runtime::Handle::current());
        let config = EndpointConfig::new(([127, 0, 0, 1], 0).into(), "here", 0);
        let receiver = Arc::clone(&worker.links) as Arc<dyn Receiver>;
        let endpoint = Endpoint::bind(config, receiver).await.expect("a port");
        worker.links.set_dialer(endpoint.dialer());
        worker.look_over();
        assert_eq!(worker.mover_audit.looks(), 0, "not before it is time");
        let long_ago = Instant::now().checked_sub(Duration::from_secs(60)).expect("a minute ago");
        worker.mover_audit = Audit::new(long_ago);
        worker.look_over();
        worker.look_over();
        assert_eq!((worker.mover_audit.looks(), worker.mover_audit.failures()), (1, 0));
        let now = Instant::now();
        worker.mover_audit.looked("a test", (now, now), Err("two and two are five".into()));
        worker.renew_report();
        assert_eq!(worker.report.lock().audit_failures, 1);
    }
}
