//! Checks that the live driver gives the same orders as a simulated conductor for the same schedule.
//!
//! The simulator records each input of its conductor with the time, and the orders of its pairs. The driver gets the
//! same inputs from scripted nodes and clients, as protobuf and submissions. The orders of its pairs must be equal byte
//! for byte, and each order must leave on the connection of its node.

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_legs::pairs::{Effect, EmittedTokens, Fact, Failure, Phase, PrefillOrder};
use baton_router::Submission;
use baton_scheduler::{
    AdmissionMode, Effect as Order, Input, InstanceSpec, PolicyName, Request, SchedulerConfig,
};
use baton_sim::engine::Mix;
use baton_sim::{Clients, ConductorInput, Pool, Setup, Step, TraceWorkload, World, profiles};
use baton_traces::synth::{Kind, Workload, workload};
use baton_types::simulated::FaultPlan;
use baton_types::{BlockHash, BlockKey, CacheChange, InstanceId, RequestId, Role, Sampling, SloClass};
use baton_wire::v1;
use tokio::sync::{mpsc, oneshot};

use super::bench::{Bench, Line, hello};
use crate::conductor::inbox::{Loss, Message};
use crate::config::Config;
use crate::policy::as_served;

const BLOCK_TOKENS: u32 = 16;

/// The Hello message with which the driver sees this instance.
fn hello_of(spec: &InstanceSpec) -> v1::Hello {
    let role = spec.role.name();
    let mut hello = hello(&format!("{role}{}", spec.id), role);
    hello.capacity_tokens = spec.capacity_tokens;
    hello.pass_tokens = spec.pass_tokens;
    hello.mixed_chunk_tokens = spec.mixed_chunk_tokens;
    hello.max_running = spec.max_running;
    hello.net_bytes_per_s = spec.net_bytes_per_s;
    hello.host_bytes_per_s = spec.host_bytes_per_s;
    hello.ssd_bytes_per_s = spec.ssd_bytes_per_s;
    hello.profile = Some((&*spec.profile).into());
    hello.max_model_tokens = 1 << 30;
    hello.kv_address = format!("127.0.0.1:{}", 9000 + spec.id.0);
    hello
}

/// A live driver and the lines of its nodes.
struct ScheduleRun {
    bench: Bench,
    config: Config,
    /// Events that clients have yet to read.
    clients: Vec<mpsc::Receiver<baton_router::Event>>,
    /// The attempt in which each request drew its latest token.
    drawn: BTreeMap<RequestId, u32>,
    /// What the simulator calls the blocks of generated tokens, and what the driver calls them.
    names: BTreeMap<BlockHash, BlockHash>,
}

impl ScheduleRun {
    fn new(config: Config) -> Self {
        let mut bench = Bench::new(config.clone());
        bench.driver.canary.call_off();
        Self { bench, config, clients: Vec::new(), drawn: BTreeMap::new(), names: BTreeMap::new() }
    }

    /// One thing is heard.
    fn play(&mut self, step: &Step) {
        let driver = &mut self.bench.driver;
        driver.now_us = step.now_us;
        match &step.input {
            ConductorInput::Fact(Input::InstanceJoined(spec)) => self.join(spec),
            ConductorInput::Fact(Input::TimerFired) => driver.step(Input::TimerFired),
            ConductorInput::Fact(Input::Cache(event)) => {
                let fact = v1::fact::Fact::Cache((&self.translated(&event.change)).into());
                self.send_fact((RequestId(0), 0, event.instance), fact);
            }
            ConductorInput::Fact(Input::ReplicateFinished { to }) => {
                self.send_fact((RequestId(0), 0, *to), v1::fact::Fact::Replicated(true));
            }
            ConductorInput::Fact(other) => {
                panic!("a simulated conductor of its own hears nothing else: {other:?}")
            }
            ConductorInput::Arrived(request) => self.submit(request),
            ConductorInput::Left(request) => driver.take_in(Message::Cancel(*request)),
            ConductorInput::Leg(about, fact) => self.send_fact(*about, worded(fact)),
            ConductorInput::Emitted(emitted) | ConductorInput::Answered(emitted, _) => self.draw(emitted),
            ConductorInput::Lost(instance, epoch) => {
                let loss = Loss::Died("it crashed".into());
                driver.take_in(Message::Gone { instance: *instance, epoch: *epoch, loss });
            }
            ConductorInput::Woken => {
                // The models of engines draw tokens all the time, and say so at the end.
                let decodes =
                    |request| driver.pairs.get(request).is_some_and(|pair| pair.phase() == Phase::Decoding);
                let sessions = driver.sessions.iter_mut().filter(|(request, _)| decodes(**request));
                sessions.for_each(|(_, session)| session.last_token_us = step.now_us);
                driver.expire();
                driver.try_parked();
            }
        }
    }

    /// The requests that are placed with tokens that they drew before: notes the names of their blocks.
    fn note_names(&mut self, ordered: &[Effect]) {
        let driver = &self.bench.driver;
        for effect in ordered {
            let Effect::Prefill(PrefillOrder { request, .. }) = effect else { continue };
            let Some(session) = driver.sessions.get(request) else { continue };
            let given_tokens = u32::try_from(session.answer.len()).unwrap();
            let chain = session.chain(given_tokens, driver.naming());
            let named = session.submission.chain.len();
            let own = baton_sim::own_blocks(*request, named..chain.len());
            self.names
                .extend(own.iter().zip(&chain[named..]).map(|(theirs, ours)| (theirs.short(), ours.short())));
        }
    }

    /// A change of a simulated node's cache in the driver's names.
    fn translated(&self, change: &CacheChange) -> CacheChange {
        let name = |hash: &BlockHash| *self.names.get(hash).unwrap_or(hash);
        let mut change = change.clone();
        match &mut change {
            CacheChange::Stored { parent, hashes, .. } => {
                parent.iter_mut().chain(hashes).for_each(|hash| *hash = name(hash));
            }
            CacheChange::Removed { hashes, .. } => hashes.iter_mut().for_each(|hash| *hash = name(hash)),
            CacheChange::Cleared => {}
        }
        change
    }

    fn join(&mut self, spec: &InstanceSpec) {
        let (orders, receiver) = mpsc::channel(1 << 12);
        let (reply, mut answer) = oneshot::channel();
        let hello = Box::new(hello_of(spec));
        let name = hello.name.clone();
        self.bench.driver.take_in(Message::Joined { hello, orders, reply });
        let life = answer.try_recv().unwrap().expect("a node that fits");
        assert_eq!((life.instance, life.epoch), (spec.id.0, spec.epoch.0));
        self.bench.lines.insert(name, Line { life, orders: receiver, step_target_us: None });
    }

    fn submit(&mut self, request: &Request) {
        let class = &self.config.scheduler.classes[request.class.index()];
        let tokens = u32::try_from(request.prompt_tokens).unwrap();
        let max_tokens = request.max_output_tokens.unwrap_or(u32::MAX);
        let sampling = Sampling { max_tokens, ..Sampling::default() };
        let submission = Submission {
            tokens: (0..tokens).collect(),
            chain: request.chain.iter().map(|hash| BlockKey(hash.0.into())).collect(),
            class: Some(class.name.as_str().into()),
            objectives: request.objectives,
            ..Bench::submission(&request.id.to_string(), sampling)
        };
        let (sender, events) = mpsc::channel(1 << 14);
        self.clients.push(events);
        self.bench.driver.take_in(Message::submit(request.id, submission, sender));
    }

    fn send_fact(
        &mut self,
        (request, attempt, instance): (RequestId, u32, InstanceId),
        fact: v1::fact::Fact,
    ) {
        let Some(node) = self.bench.driver.fleet.get(instance) else { return };
        let (epoch, facts) = (node.epoch, vec![v1::Fact { request: request.0, attempt, fact: Some(fact) }]);
        self.bench.driver.take_in(Message::Facts { instance, epoch, facts });
    }

    /// An answer is drawn up to so many tokens: by the decode node, or by the prefill node if it draws the last.
    /// The models of engines say at the end of a stay what they drew, and when the first of it was.
    fn draw(&mut self, emitted: &EmittedTokens) {
        let (request, upto, now_us) = (emitted.request, emitted.tokens, self.bench.driver.now_us);
        let Some(pair) = self.bench.driver.pairs.get(request) else { return };
        let (attempt, [prefill, decode]) = (pair.attempt(), pair.legs());
        let fresh = self.drawn.insert(request, attempt) != Some(attempt);
        let leg = if pair.phase() == Phase::Prefilling { prefill } else { decode };
        let session = &self.bench.driver.sessions[&request];
        // A session that was kept awake (`Woken`) had its latest token then.
        let (from, first_us) = (session.answer.len() as u32, emitted.first_us.max(session.last_token_us));
        for index in from..upto {
            let finish = if emitted.last && index + 1 == upto { 2 } else { 0 };
            self.bench.driver.now_us = if fresh && index == from { first_us } else { now_us };
            // Each request draws tokens of its own: nobody else has its blocks, in the simulator neither.
            let token =
                v1::Token { index, token: request.0 as u32, finish, logprob: None, cached_tokens: None };
            self.send_fact((request, attempt, leg.unwrap()), v1::fact::Fact::Token(token));
        }
        self.bench.driver.now_us = now_us;
    }
}

/// Orders as they leave, by node: request, attempt and what is ordered.
type OrderLog = BTreeMap<u32, Vec<(u64, u32, String)>>;

/// The parts of an order that the pairs decide.
fn worded_order(order: &v1::order::Order) -> String {
    let at = |peer: &Option<v1::Peer>| peer.as_ref().map(|peer| peer.instance);
    let tokens = |work: &Option<v1::Work>| work.as_ref().map_or(0, |work| work.token_count);
    match order {
        v1::order::Order::Prefill(one) => format!(
            "prefill of {}, to {:?}, fetch {} from {:?}, room {}, at {}",
            tokens(&one.work),
            at(&one.decode),
            one.fetch_blocks,
            at(&one.fetch_from),
            one.room_tokens,
            one.order
        ),
        v1::order::Order::Expect(one) => format!("expect {}, room {}", tokens(&one.work), one.room_tokens),
        v1::order::Order::Handoff(one) => format!("hand off to {:?}", at(&one.to)),
        v1::order::Order::StartDecode(_) => "decode".into(),
        v1::order::Order::Release(_) => "release".into(),
        v1::order::Order::Replicate(one) => format!("replicate from {:?}", at(&one.from)),
        other => panic!("no simulated node gets {other:?}"),
    }
}

impl ScheduleRun {
    /// The orders that must leave, by node.
    fn meant(&self, effects: &[Effect]) -> OrderLog {
        let mut meant = OrderLog::new();
        let lives = |at: InstanceId| self.bench.driver.fleet.get(at).is_some();
        let known = |at: InstanceId| lives(at).then_some(at.0);
        let tokens = |request: RequestId, given: u32| {
            let prompt = self.bench.driver.sessions[&request].submission.tokens.len();
            prompt + given as usize
        };
        let mut add = |at: InstanceId, request: RequestId, attempt, words: String| {
            // A dead node gets no orders.
            if lives(at) {
                meant.entry(at.0).or_default().push((request.0, attempt, words));
            }
        };
        for effect in effects {
            match *effect {
                Effect::Prefill(one) => {
                    let to = (one.decode != one.instance).then(|| known(one.decode)).flatten();
                    let (blocks, from) = one.fetch.map_or((0, None), |plan| (plan.blocks, known(plan.from)));
                    let words = format!(
                        "prefill of {}, to {to:?}, fetch {blocks} from {from:?}, room {}, at {}",
                        tokens(one.request, one.given_tokens),
                        one.room_tokens,
                        one.order
                    );
                    add(one.instance, one.request, one.attempt, words);
                }
                Effect::Expect { request, attempt, instance, room_tokens, given_tokens } => {
                    let words = format!("expect {}, room {room_tokens}", tokens(request, given_tokens));
                    add(instance, request, attempt, words);
                }
                Effect::Handoff { request, attempt, from, to } => {
                    add(from, request, attempt, format!("hand off to {:?}", known(to)));
                }
                Effect::Decode { request, attempt, instance } => {
                    add(instance, request, attempt, "decode".into())
                }
                Effect::Release { request, attempt, instance } => {
                    add(instance, request, attempt, "release".into());
                }
                Effect::Order(Order::Replicate { from, to, .. }) => {
                    add(to, RequestId(0), 0, format!("replicate from {:?}", known(from)));
                }
                _ => {}
            }
        }
        meant
    }

    /// The orders that have left.
    fn sent(&mut self) -> OrderLog {
        self.bench.driver.send_orders();
        let mut sent = OrderLog::new();
        for line in self.bench.lines.values_mut() {
            while let Ok(message) = line.orders.try_recv() {
                let Some(v1::to_node::Message::Orders(orders)) = message.message else { continue };
                let worded = orders.orders.into_iter().map(|one| {
                    (one.request, one.attempt, worded_order(&one.order.expect("an order orders something")))
                });
                sent.entry(line.life.instance).or_default().extend(worded);
            }
        }
        sent
    }
}

/// A node's report about a leg, as protobuf.
fn worded(fact: &Fact) -> v1::fact::Fact {
    match *fact {
        Fact::Prefilled { compute_us, cached_tokens } => {
            v1::fact::Fact::Prefilled(v1::Prefilled { compute_us, cached_tokens })
        }
        Fact::HandedOff { ok } => v1::fact::Fact::Handoff(ok),
        Fact::Fetched { ok } => v1::fact::Fact::Fetch(ok),
        Fact::Failed(failure) => {
            let stage = match failure {
                Failure::Preempted => v1::failure::Stage::Preempted,
                _ => v1::failure::Stage::Store,
            };
            v1::fact::Fact::Failure(v1::Failure { stage: stage.into(), ..v1::Failure::default() })
        }
        ref other => panic!("no simulated node says {other:?}"),
    }
}

/// A cluster and its load, with the settings of a service.
fn scenario(seed: u64, admission: AdmissionMode, tune: impl FnOnce(&mut Setup)) -> (Config, Vec<Step>) {
    let mut scheduler = SchedulerConfig {
        policy: PolicyName::Baton,
        admission,
        block_tokens: BLOCK_TOKENS,
        classes: vec![
            SloClass { ttft_us: 2_000_000, tbt_us: 80_000, ..SloClass::default() },
            SloClass { name: "slow".into(), ttft_us: 20_000_000, ..SloClass::default() },
        ],
        seed,
        ..SchedulerConfig::default()
    };
    as_served(&mut scheduler);
    let profile = Arc::new(profiles::named("llama3-70b-8xa100").unwrap());
    let mut setup = Setup::disaggregated(3, 3, &profile, scheduler);
    for pool in &mut setup.pools {
        pool.hbm_tokens = Some(60_000);
        pool.dram_tokens = 60_000;
        pool.mix = Mix::Target(setup.scheduler.step_target_us());
    }
    setup.seed = seed;
    setup.clients = Clients { retries: 2, jitter_permille: 100, leave_permille: 30 };
    tune(&mut setup);
    let mut config = Config { scheduler: setup.scheduler.clone(), ..Config::default() };
    // Beats are no part of the schedule.
    config.service.lost_after_us = 1 << 50;
    let usual = Workload::new(Kind::Agents, seed);
    let load = Workload {
        requests: 300,
        requests_per_s: 6.0,
        input_mean: 12_000.0,
        shared_tokens: 2_000,
        groups: 12,
        block_tokens: BLOCK_TOKENS,
        ..usual
    };
    let mut trace = workload(&load).unwrap();
    for record in &mut trace.records {
        // A front door names full blocks, a trace the last one too.
        record.input_length = record.hash_ids.len() as u64 * u64::from(BLOCK_TOKENS);
    }
    // Some requests are classifications with one answer token.
    trace.records.iter_mut().step_by(7).for_each(|record| record.output_length = 1);
    let trace = Arc::new(trace);
    let steps = World::recorded(setup, Box::new(TraceWorkload::new(trace, 1.0))).unwrap();
    (config, steps)
}

/// Plays a schedule, and compares what came of each step.
async fn play(config: Config, steps: &[Step]) -> Result<Vec<Effect>, String> {
    let mut played = ScheduleRun::new(config);
    let mut all = Vec::new();
    for (at, step) in steps.iter().enumerate() {
        played.play(step);
        let ordered = std::mem::take(&mut played.bench.driver.ordered);
        let (simulated, served) = (format!("{:#?}", step.effects), format!("{ordered:#?}"));
        let place = || format!("step {at} at {} µs: {:?}", step.now_us, step.input);
        if served != simulated {
            return Err(format!("{}\nsimulated: {simulated}\nserved: {served}", place()));
        }
        played.note_names(&ordered);
        let (meant, sent) = (played.meant(&ordered), played.sent());
        if meant != sent {
            return Err(format!("{}\nmeant: {meant:?}\nsent: {sent:?}", place()));
        }
        all.extend(ordered);
    }
    Ok(all)
}

async fn same_orders(seed: u64, admission: AdmissionMode, tune: impl FnOnce(&mut Setup)) -> Vec<Effect> {
    let (config, steps) = scenario(seed, admission, tune);
    play(config, &steps).await.unwrap_or_else(|why| panic!("seed {seed}, {why}"))
}

/// How often each kind of order came.
fn count(kinds: &mut BTreeMap<String, usize>, effects: &[Effect]) {
    for effect in effects {
        let text = format!("{effect:?}");
        let name = text.split([' ', '(', '{']).next().unwrap_or_default().to_owned();
        *kinds.entry(name).or_default() += 1;
        if let Effect::Prefill(PrefillOrder { room_tokens: 0, .. }) = effect {
            *kinds.entry("alone".to_owned()).or_default() += 1;
        }
    }
}

fn at_least(kinds: &BTreeMap<String, usize>, least: &[(&str, usize)]) {
    for (kind, least) in least {
        assert!(kinds.get(*kind).is_some_and(|count| count >= least), "{kind} in {kinds:?}");
    }
}

#[tokio::test]
async fn the_live_driver_orders_what_the_simulated_one_does() {
    let mut kinds = BTreeMap::new();
    for seed in 0..2 {
        for admission in [AdmissionMode::Auto, AdmissionMode::None, AdmissionMode::EarlyPredict] {
            count(&mut kinds, &same_orders(seed, admission, |_| {}).await);
        }
    }
    at_least(&kinds, &[("Prefill", 1_500), ("Ended", 1_500), ("Release", 20), ("alone", 100)]);
}

#[tokio::test]
async fn under_overload_clients_are_refused_and_come_back_alike() {
    let mut kinds = BTreeMap::new();
    for (seed, policy) in [(5, PolicyName::Baton), (6, PolicyName::Mooncake), (7, PolicyName::DynamoWspt)] {
        let tune = |setup: &mut Setup| {
            setup.scheduler.policy = policy;
            setup.pools.truncate(1);
            (setup.pools[0].role, setup.pools[0].count) = (Role::Both, 2);
        };
        count(&mut kinds, &same_orders(seed, AdmissionMode::Slo, tune).await);
    }
    at_least(&kinds, &[("Prefill", 600), ("Refuse", 60)]);
}

#[tokio::test]
async fn hand_offs_that_fail_are_tried_again_alike() {
    let mut kinds = BTreeMap::new();
    for seed in 10..15 {
        let tune = |setup: &mut Setup| {
            setup.faults = FaultPlan { lost_links: 24, news_delay_us: 50_000, seed, ..FaultPlan::default() };
            setup.pools.iter_mut().for_each(|pool| pool.net_bytes_per_s = 3_000_000_000);
        };
        count(&mut kinds, &same_orders(seed, AdmissionMode::Auto, tune).await);
    }
    at_least(&kinds, &[("Handoff", 50), ("Blame", 100), ("Fail", 10)]);
}

/// In some of them a request loses its instance twice: what it drew before the first time is in a cache then.
#[tokio::test]
async fn requests_of_nodes_that_die_go_on_elsewhere_alike() {
    let mut kinds = BTreeMap::new();
    for seed in [20, 21, 22, 23, 32, 36] {
        let tune = |setup: &mut Setup| {
            setup.faults = FaultPlan { deaths: 4, seed, ..FaultPlan::default() };
        };
        count(&mut kinds, &same_orders(seed, AdmissionMode::Auto, tune).await);
    }
    at_least(&kinds, &[("Blame", 15), ("Prefill", 600)]);
}

/// The prefill instance dies, and the decode instances' engines never mix a prefill into a decode step.
#[tokio::test]
async fn without_an_instance_that_may_prefill_requests_wait_alike() {
    let mut waiting = 0;
    for seed in [40, 41, 42, 43, 44] {
        let tune = |setup: &mut Setup| {
            setup.faults = FaultPlan { deaths: 6, seed, ..FaultPlan::default() };
            setup.pools[0].count = 1;
            setup.pools.iter_mut().for_each(|pool| pool.mix = Mix::PrefillFirst);
        };
        let (config, steps) = scenario(seed, AdmissionMode::Auto, tune);
        let waits =
            |step: &&Step| matches!(step.input, ConductorInput::Arrived(_)) && step.effects.is_empty();
        waiting += steps.iter().filter(waits).count();
        play(config, &steps).await.unwrap_or_else(|why| panic!("seed {seed}, {why}"));
    }
    assert!(waiting > 20, "{waiting} requests waited for the prefill instance");
}

#[tokio::test]
async fn replicas_are_ordered_alike() {
    let mut kinds = BTreeMap::new();
    for seed in 30..32 {
        let tune = |setup: &mut Setup| {
            let mut lender = Pool::new(Role::Store, 1, Arc::clone(&setup.pools[0].profile));
            lender.dram_tokens = 200_000;
            setup.pools.push(lender);
            setup.scheduler.replicate = true;
        };
        for effect in same_orders(seed, AdmissionMode::Auto, tune).await {
            let replicates = matches!(effect, Effect::Order(Order::Replicate { .. }));
            *kinds.entry("Replicate".to_owned()).or_default() += usize::from(replicates);
        }
    }
    at_least(&kinds, &[("Replicate", 5)]);
}

#[tokio::test]
async fn a_schedule_of_another_policy_is_told_apart() {
    let (mut config, steps) = scenario(1, AdmissionMode::Auto, |_| {});
    config.scheduler.classes[0].headroom_permille += 100;
    let why = play(config, &steps).await.expect_err("other promises");
    assert!(why.contains("simulated:"), "{why}");
}
