//! A driver stepped by hand: its clock, its nodes and its clients are the test's.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use baton_router::{Backend as _, Submission};
use baton_types::{CostProfile, DecodeCost, FitReport, PrefillCost, Sampling, ValidRange};
use baton_wire::v1;
use tokio::sync::{mpsc, oneshot};

use super::open_legs::{Client, Leg, OpenLegs, token_of};
use crate::conductor::inbox::{Loss, Message};
use crate::conductor::{Door, Driver, DriverConfig, Inbox, Question, Status};
use crate::config::Config;
use crate::metrics::Metrics;
use crate::spans::Spans;

/// Tokens of a prompt, unless a test says otherwise.
pub(super) const PROMPT: u32 = 40;

/// An attached node's side of the line.
pub(super) struct Line {
    pub life: v1::Welcome,
    pub orders: mpsc::Receiver<v1::ToNode>,
    /// The step target of its last orders.
    pub step_target_us: Option<u64>,
}

/// A driver with the clock, nodes and clients of a test.
pub(super) struct Bench {
    pub driver: Driver,
    pub door: Door,
    pub inbox: Inbox,
    pub clock_us: Arc<AtomicU64>,
    pub lines: BTreeMap<String, Line>,
    pub clients: BTreeMap<String, Client>,
    pub open_legs: OpenLegs,
    receiver: mpsc::Receiver<Message>,
}

/// Small, valid and quick: a prefill takes about a millisecond, a step about two.
pub(super) fn profile() -> CostProfile {
    CostProfile {
        name: "scripted".into(),
        source: "made up for tests".into(),
        kv_bytes_per_token: 64,
        kv_capacity_tokens: 65_536,
        layers: 2,
        shared_us: 0.0,
        fit: FitReport::default(),
        valid: ValidRange::default(),
        prefill: PrefillCost {
            knots_tokens: vec![0, 1000],
            knots_us: vec![100.0, 10_100.0],
            attention_ps_per_pair: 0.0,
        },
        decode: DecodeCost {
            batches: vec![1, 64],
            base_us: vec![2000.0, 4000.0],
            context_ps_per_token: vec![10.0, 10.0],
        },
    }
}

/// The Hello message of a scripted node.
pub(super) fn hello(name: &str, role: &str) -> v1::Hello {
    v1::Hello {
        protocol_version: baton_wire::PROTOCOL_VERSION,
        name: name.into(),
        role: v1::Role::from(crate::conductor::parse_role(role).unwrap()).into(),
        fingerprint: Some(v1::Fingerprint {
            model: "scripted".into(),
            block_tokens: 16,
            vocab_tokens: 100_000,
            ..Default::default()
        }),
        capacity_tokens: 65_536,
        pass_tokens: 1024,
        mixed_chunk_tokens: None,
        max_running: None,
        net_bytes_per_s: 1_000_000_000,
        host_bytes_per_s: 1_000_000_000,
        ssd_bytes_per_s: 0,
        kv_address: format!("127.0.0.1:{}", 9000 + name.len()),
        host: "here".into(),
        profile: Some((&profile()).into()),
        max_model_tokens: 60_000,
        end_tokens: vec![2],
        wants_body: false,
        // Those whose name ends so have engines that move KV themselves.
        engine_moves_kv: name.ends_with('x'),
        proof: Default::default(),
        process: 0,
        may_change_role: false,
    }
}

/// Blocks of 16 tokens, stages of a second and no prefills on decode nodes.
pub(super) fn config() -> Config {
    let mut config = Config::default();
    config.scheduler.block_tokens = 16;
    config.scheduler.local_prefill = false;
    config.scheduler.classes[0].ttft_us = 2_000_000;
    config.service.stage_floor_us = 1_000_000;
    config.service.lost_after_us = 1_000_000;
    config.service.heartbeat_us = 100_000;
    config
}

impl Bench {
    /// A conductor without nodes.
    pub(super) fn new(config: Config) -> Self {
        let with = DriverConfig { config, metrics: Metrics::new().unwrap(), spans: Spans::off() };
        let (mut driver, inbox, door) = Driver::new(with).unwrap();
        let clock_us = Arc::new(AtomicU64::new(1_000_000));
        let clock = Arc::clone(&clock_us);
        driver.clock = Box::new(move || clock.load(Ordering::Relaxed));
        let receiver = driver.receiver.take().unwrap();
        let (lines, clients, open_legs) = (BTreeMap::new(), BTreeMap::new(), OpenLegs::default());
        Self { driver, door, inbox, clock_us, lines, clients, open_legs, receiver }
    }

    /// A conductor with the nodes named, by their first letter prefill, decode or both; a canary has
    /// passed if there is a pair.
    pub(super) async fn with(names: &[&str]) -> Self {
        Self::tuned(names, |_| {}).await
    }

    pub(super) async fn tuned(names: &[&str], tune: impl FnOnce(&mut Config)) -> Self {
        let mut config = config();
        tune(&mut config);
        let mut bench = Self::new(config);
        for name in names {
            bench.join(name).await;
        }
        if bench.driver.core.has_pair() {
            bench.pass_canary().await;
            assert!(bench.door.readiness().ready);
        }
        bench
    }

    /// Lets the driver take in whatever there is, as often as something new comes of it.
    pub(super) async fn pump(&mut self) {
        self.turn(Vec::new());
        loop {
            // The canary is a task of its own.
            for _ in 0..4 {
                tokio::task::yield_now().await;
            }
            let mut batch = Vec::new();
            while let Ok(message) = self.receiver.try_recv() {
                batch.push(message);
            }
            if batch.is_empty() {
                return;
            }
            self.turn(batch);
        }
    }

    fn turn(&mut self, mut batch: Vec<Message>) {
        self.driver.turn(&mut batch);
        self.driver.check_sessions();
        for client in self.clients.values_mut() {
            if client.read() {
                self.open_legs.finished(&client.name);
            }
        }
        let open_legs = &mut self.open_legs;
        self.lines.retain(|name, line| {
            while let Ok(message) = line.orders.try_recv() {
                let Some(v1::to_node::Message::Orders(orders)) = message.message else { continue };
                line.step_target_us = orders.step_target_us;
                orders.orders.into_iter().for_each(|order| open_legs.ordered(name, order));
            }
            // The driver has ended this life.
            if line.orders.is_closed() {
                open_legs.lost(name);
            }
            !line.orders.is_closed()
        });
    }

    pub(super) async fn send_hello(&mut self, hello: v1::Hello) -> Result<v1::Welcome, String> {
        let (orders, receiver) = mpsc::channel(64);
        let (reply, mut answer) = oneshot::channel();
        let name = hello.name.clone();
        self.inbox.send(Message::Joined { hello: Box::new(hello), orders, reply }).await;
        self.pump().await;
        let life = answer.try_recv().unwrap().map_err(|why| why.to_string())?;
        self.lines.insert(name, Line { life: life.clone(), orders: receiver, step_target_us: None });
        self.pump().await;
        Ok(life)
    }

    /// Attaches a node. The first letter of its name determines its role.
    pub(super) async fn join(&mut self, name: &str) -> v1::Welcome {
        let role = match name.as_bytes()[0] {
            b'p' => "prefill",
            b'd' => "decode",
            _ => "both",
        };
        self.send_hello(hello(name, role)).await.unwrap()
    }

    /// A node's line breaks.
    pub(super) async fn kill(&mut self, name: &str) {
        let line = &self.lines[name];
        let (instance, epoch) = of(&line.life);
        let loss = Loss::Died("it crashed".into());
        self.inbox.send(Message::Gone { instance, epoch, loss }).await;
        self.pump().await;
    }

    /// A node leaves in order.
    pub(super) async fn let_leave(&mut self, name: &str) {
        let (instance, epoch) = of(&self.lines[name].life);
        let loss = Loss::Left("it left".into());
        self.inbox.send(Message::Gone { instance, epoch, loss }).await;
        self.pump().await;
    }

    /// Time passes while every node but those named is heard.
    pub(super) async fn wait_alive_us(&mut self, us: u64, silent: &[&str]) {
        let mut left_us = us;
        while left_us > 0 {
            let part_us = left_us.min(200_000);
            left_us -= part_us;
            self.clock_us.fetch_add(part_us, Ordering::Relaxed);
            for (name, line) in &self.lines {
                if !silent.contains(&name.as_str()) {
                    let (instance, epoch) = of(&line.life);
                    self.inbox.send(Message::Beat { instance, epoch, load: Box::default() }).await;
                }
            }
            self.pump().await;
        }
    }

    /// The conductor itself is stopped for so long.
    pub(super) async fn pause_us(&mut self, us: u64) {
        self.driver.rest();
        self.clock_us.fetch_add(us, Ordering::Relaxed);
        self.pump().await;
    }

    /// Stops the conductor for so long while a node reports.
    pub(super) async fn say_in_a_pause(&mut self, leg: &Leg, facts: Vec<v1::fact::Fact>, us: u64) {
        self.driver.rest();
        self.clock_us.fetch_add(us, Ordering::Relaxed);
        self.send_facts(leg, facts).await;
    }

    /// The conductor is stopped between two messages of one turn.
    pub(super) async fn stall_in_a_turn_us(&mut self, us: u64) {
        self.driver.rest();
        let (clock, looks) = (Arc::clone(&self.clock_us), AtomicU64::new(0));
        self.driver.clock = Box::new(move || {
            // The first look is the turn's begin.
            if looks.fetch_add(1, Ordering::Relaxed) == 1 {
                clock.fetch_add(us, Ordering::Relaxed);
            }
            clock.load(Ordering::Relaxed)
        });
        let (reply, _answer) = oneshot::channel();
        self.turn(vec![Message::Ask(Question::Status(reply))]);
        let clock = Arc::clone(&self.clock_us);
        self.driver.clock = Box::new(move || clock.load(Ordering::Relaxed));
        self.pump().await;
    }

    pub(super) fn submission(name: &str, sampling: Sampling) -> Submission {
        Submission {
            request_id: name.into(),
            tokens: (0..PROMPT).map(|at| at + 3).collect(),
            root: Default::default(),
            chain: Arc::new([]),
            sampling: Arc::new(sampling),
            class: None,
            class_param: None,
            objectives: baton_types::RequestObjectives::default(),
            tenant: None,
            session: None,
            body: Default::default(),
            asked_tokens: None,
            explain: false,
            timeout_us: None,
            trace: None,
        }
    }

    pub(super) async fn submit(&mut self, name: &str, max_tokens: u32) {
        let sampling = Sampling { max_tokens, ..Sampling::default() };
        self.send(Self::submission(name, sampling)).await;
    }

    pub(super) async fn send(&mut self, submission: Submission) {
        let (name, max_tokens) = (submission.request_id.to_string(), submission.sampling.max_tokens);
        let ticket = self.door.submit(submission);
        self.clients.insert(name.clone(), Client::new(&name, ticket, max_tokens));
        self.pump().await;
    }

    /// The client goes away.
    pub(super) async fn leave(&mut self, name: &str) {
        self.clients.get_mut(name).unwrap().ticket = None;
        self.pump().await;
    }

    pub(super) fn client(&self, name: &str) -> &Client {
        &self.clients[name]
    }

    pub(super) fn legs(&self, name: &str) -> Vec<Leg> {
        self.open_legs.open.values().filter(|leg| leg.name == name).cloned().collect()
    }

    /// The open prefill leg of a request.
    pub(super) fn prefill(&self, name: &str) -> Leg {
        let legs = self.legs(name);
        let found = legs.iter().find(|leg| leg.prefills).cloned();
        found.unwrap_or_else(|| panic!("{name} has no prefill: {:#?}", self.open_legs.log))
    }

    /// The open decode leg of a request.
    pub(super) fn decode(&self, name: &str) -> Leg {
        let legs = self.legs(name);
        let found = legs.iter().find(|leg| !leg.prefills).cloned();
        found.unwrap_or_else(|| panic!("{name} has no decode: {:#?}", self.open_legs.log))
    }

    /// A leg's node reports.
    pub(super) async fn send_facts(&mut self, leg: &Leg, facts: Vec<v1::fact::Fact>) {
        self.send_facts_as(&leg.node, (leg.request, leg.attempt), facts).await;
    }

    /// Any node reports about any request and attempt.
    pub(super) async fn send_facts_as(&mut self, node: &str, about: (u64, u32), facts: Vec<v1::fact::Fact>) {
        let life = self.lines[node].life.clone();
        self.send_facts_in(&life, about, facts).await;
    }

    /// Any life of a node reports.
    pub(super) async fn send_facts_in(
        &mut self,
        life: &v1::Welcome,
        about: (u64, u32),
        facts: Vec<v1::fact::Fact>,
    ) {
        let (instance, epoch) = of(life);
        let (request, attempt) = about;
        let facts = facts.into_iter().map(|fact| v1::Fact { request, attempt, fact: Some(fact) }).collect();
        self.inbox.send(Message::Facts { instance, epoch, facts }).await;
        self.pump().await;
    }

    /// The prefill leg does its part.
    pub(super) async fn do_prefill(&mut self, name: &str) {
        let leg = self.prefill(name);
        let first = token(name, leg.given(), 0);
        self.send_facts(&leg, vec![first, prefilled()]).await;
    }

    /// The KV arrives.
    pub(super) async fn do_handoff(&mut self, name: &str) {
        let leg = self.decode(name);
        self.send_facts(&leg, vec![v1::fact::Fact::Handoff(true)]).await;
    }

    /// A request that decodes: its prefill is over, and its KV has arrived.
    pub(super) async fn begin_decode(&mut self, name: &str, max_tokens: u32) {
        self.submit(name, max_tokens).await;
        self.do_prefill(name).await;
        self.do_handoff(name).await;
    }

    /// Tokens of its answer so far: those that its client has, and one that a prefill drew and that comes with the next.
    pub(super) fn drawn(&self, name: &str) -> usize {
        let session = self.driver.sessions.values().find(|s| &*s.submission.request_id == name);
        let has = || self.clients.get(name).map_or(0, |client| client.tokens.len());
        session.map_or_else(has, |session| session.answer.len())
    }

    /// The decode leg draws tokens `from..upto`, the last of which ends the answer if it is the
    /// request's last.
    pub(super) async fn do_decode(&mut self, name: &str, upto: u32) {
        let legs = self.legs(name);
        let leg = legs.iter().find(|leg| leg.answer.is_some()).expect("nobody decodes").clone();
        let (from, most) = (self.drawn(name) as u32, self.client(name).max_tokens);
        for index in from..upto {
            let finish = if index + 1 == most { 2 } else { 0 };
            self.send_facts(&leg, vec![token(name, index, finish)]).await;
        }
    }

    /// All that is left of a request goes well.
    pub(super) async fn serve(&mut self, name: &str) {
        let most = self.client(name).max_tokens;
        if !self.legs(name).iter().any(|leg| leg.answer.is_some()) {
            if self.drawn(name) as u32 == self.prefill(name).given() {
                self.do_prefill(name).await;
            }
            if !self.legs(name).iter().any(|leg| leg.answer.is_some()) {
                self.do_handoff(name).await;
            }
        }
        self.do_decode(name, most).await;
        self.ended_well(name);
    }

    /// Its whole answer came, in order, and ended as it should.
    pub(super) fn ended_well(&self, name: &str) {
        let client = self.client(name);
        let wanted: Vec<u32> = (0..client.max_tokens).map(|at| token_of(name, at)).collect();
        assert_eq!(client.tokens, wanted, "{name}");
        let ended = matches!(client.last, Some(baton_router::Event::Finished { .. }));
        assert!(ended, "{name} came to {:?}", client.last);
    }

    /// Serves the canary that is under way.
    pub(super) async fn pass_canary(&mut self) {
        let leg = self.open_legs.open.values().find(|leg| leg.prefills && leg.name.starts_with("canary"));
        let prefill = leg.expect("no canary is under way").clone();
        let raw = |index, finish| fact_token(index, 70 + index, finish);
        self.send_facts(&prefill, vec![raw(0, 0), prefilled()]).await;
        if prefill.to.is_some() {
            self.do_handoff(&prefill.name).await;
        }
        let decode = self.legs(&prefill.name).into_iter().find(|leg| leg.answer.is_some()).unwrap();
        self.send_facts(&decode, vec![raw(1, 2)]).await;
        self.open_legs.finished(&prefill.name);
    }

    /// Serves whatever canary is under way, for tests that are about something else.
    pub(super) async fn drop_canaries(&mut self) {
        if self.open_legs.open.values().any(|leg| leg.prefills && leg.name.starts_with("canary")) {
            self.pass_canary().await;
        }
    }

    pub(super) fn status(&mut self) -> Status {
        let (reply, mut answer) = oneshot::channel();
        self.driver.turn(&mut vec![Message::Ask(Question::Status(reply))]);
        *answer.try_recv().unwrap()
    }

    /// One of the counters that the admin adds to the status.
    pub(super) fn total(&self, name: &str) -> u64 {
        self.driver.metrics.totals().iter().find(|(known, _)| known == name).unwrap().1
    }

    /// Nothing is under way, and every leg that was ever opened has ended.
    pub(super) fn quiet(&mut self) {
        let status = self.status();
        assert_eq!(status.live_requests, 0, "{:?}", status.requests);
        assert_eq!(self.driver.core.live_requests(), 0);
        let open: Vec<_> = self.open_legs.open.values().filter(|leg| !leg.over).collect();
        assert!(open.is_empty(), "{open:#?}\n{:#?}", self.open_legs.log);
        for node in status.nodes {
            assert_eq!((node.waiting, node.dispatched, node.decodes, node.reserved_tokens), (0, 0, 0, 0));
        }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // Clients that are dropped first would only be cancelled into the void.
        self.receiver.close();
    }
}

/// Which life of which instance.
pub(super) fn of(life: &v1::Welcome) -> (baton_types::InstanceId, baton_types::Epoch) {
    (baton_types::InstanceId(life.instance), baton_types::Epoch(life.epoch))
}

pub(super) fn fact_token(index: u32, token: u32, finish: i32) -> v1::fact::Fact {
    v1::fact::Fact::Token(v1::Token { index, token, finish, logprob: None, cached_tokens: None })
}

/// The right token of an answer.
pub(super) fn token(name: &str, index: u32, finish: i32) -> v1::fact::Fact {
    fact_token(index, token_of(name, index), finish)
}

pub(super) fn prefilled() -> v1::fact::Fact {
    v1::fact::Fact::Prefilled(v1::Prefilled { compute_us: 1000, cached_tokens: 0 })
}

pub(super) fn failure(of_request: bool) -> v1::fact::Fact {
    let (stage, message) = (v1::failure::Stage::Engine.into(), "it broke".into());
    v1::fact::Fact::Failure(v1::Failure { stage, message, of_request, ..v1::Failure::default() })
}
