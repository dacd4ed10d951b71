//! The simulated world: the real cores, driven by events, with models where metal would be.
//!
//! Everything at one moment is handled first, then engines plan: so what arrives together is
//! planned together, whatever the order of the events (and stepping equals fast-forwarding).

mod decode;
mod flights;
mod node;
mod orders;
mod prefill;
mod requests;
mod sample;
mod tell;
mod trouble;

use baton_scheduler::{Conductor, Effect as Order};
use baton_store::Effect as StoreEffect;
use baton_transfer::{Effect as TransferEffect, LinkSpec, TransferEngine};
use baton_types::{ChainHasher, Rng};
use hashbrown::HashMap;

use crate::engine::Ended;
use crate::events::{Event, Events};
use crate::faults::Fault;
use crate::metrics::Collector;
use crate::oracle::Oracle;
use crate::setup::Setup;
use crate::workload::{Arrival, Workload};

use flights::Purpose;
use node::Node;
use requests::Live;
use tell::News;

/// A run in progress.
pub struct World {
    pub(crate) setup: Setup,
    pub(crate) now_us: u64,
    pub(crate) events: Events,
    pub(crate) nodes: Vec<Node>,
    pub(crate) conductors: Vec<Conductor>,
    pub(crate) conductor_wakes: Vec<u64>,
    pub(crate) news: Vec<News>,
    pub(crate) transfers: TransferEngine,
    pub(crate) transfers_wake_us: u64,
    pub(crate) flights: HashMap<u64, Purpose>,
    pub(crate) next_flight: u64,
    pub(crate) workload: Box<dyn Workload>,
    pub(crate) upcoming: Option<Arrival>,
    pub(crate) foreseen: std::collections::VecDeque<Arrival>,
    pub(crate) live: Vec<Live>,
    pub(crate) free: Vec<u32>,
    pub(crate) in_flight: u64,
    pub(crate) arrivals: u64,
    pub(crate) faults: Vec<(u64, Fault)>,
    pub(crate) rng: Rng,
    pub(crate) news_rng: Rng,
    pub(crate) metrics: Collector,
    pub(crate) oracle: Oracle,
    pub(crate) dirty: Vec<u32>,
    /// Scratch, reused.
    orders: Vec<Order>,
    store_effects: Vec<StoreEffect>,
    transfer_effects: Vec<TransferEffect>,
    ended: Vec<Ended>,
}

/// Seed of block names: trace ids are no secret.
pub(crate) fn chain_hasher() -> ChainHasher {
    ChainHasher::new(0x00BA_70C0, b"replay")
}

impl World {
    /// A world at rest.
    ///
    /// # Errors
    /// Says which setting is impossible.
    pub fn new(setup: Setup, workload: Box<dyn Workload>) -> Result<Self, String> {
        setup.validate()?;
        let nodes = node::build(&setup)?;
        let links: Vec<LinkSpec> = nodes.iter().flat_map(|n| n.links(&setup)).collect();
        let mut conductors = Vec::new();
        for router in 0..setup.routers {
            let mut config = setup.scheduler.clone();
            config.seed = config.seed.wrapping_add(u64::from(router));
            conductors.push(Conductor::new(config).map_err(|e| e.to_string())?);
        }
        let faults = setup.faults.draw(setup.instances(), workload.span_us());
        let routers = conductors.len();
        let mut world = Self {
            now_us: 0,
            events: Events::default(),
            transfers: TransferEngine::new(setup.transfer.clone(), &links),
            transfers_wake_us: u64::MAX,
            flights: HashMap::new(),
            next_flight: 0,
            upcoming: None,
            foreseen: std::collections::VecDeque::new(),
            live: Vec::new(),
            free: Vec::new(),
            in_flight: 0,
            arrivals: 0,
            rng: Rng::fork(setup.seed, 3),
            news_rng: Rng::fork(setup.faults.seed, 4),
            metrics: Collector::new(&setup, workload.as_ref()),
            oracle: Oracle::new(setup.audit_every),
            dirty: Vec::new(),
            orders: Vec::new(),
            store_effects: Vec::new(),
            transfer_effects: Vec::new(),
            ended: Vec::new(),
            conductor_wakes: vec![u64::MAX; routers],
            news: (0..routers).map(|_| News::default()).collect(),
            nodes,
            conductors,
            workload,
            faults,
            setup,
        };
        world.start();
        Ok(world)
    }

    fn start(&mut self) {
        for at in 0..self.nodes.len() {
            let spec = self.nodes[at].spec.clone();
            self.tell_all(&baton_scheduler::Input::InstanceJoined(spec));
        }
        for (at, (when_us, _)) in self.faults.iter().enumerate() {
            self.events.push(*when_us, Event::Fault(u32::try_from(at).expect("plans are small")));
        }
        self.pull_arrival();
        if self.setup.sample_us > 0 {
            self.events.push(0, Event::Sample);
        }
    }

    /// Runs to the end: until nothing is left that could happen.
    ///
    /// # Errors
    /// What the oracle found, with the time.
    pub fn run(&mut self) -> Result<(), String> {
        while self.advance()? {}
        self.rest()
    }

    /// Checks a world that has come to rest: every request has ended, nothing is held.
    ///
    /// # Errors
    /// What the oracle found.
    pub fn rest(&mut self) -> Result<(), String> {
        self.oracle_at_rest()
    }

    /// Requests that have arrived so far.
    #[must_use]
    pub const fn arrived(&self) -> u64 {
        self.arrivals
    }

    /// Handles everything at the next moment; false when there is none.
    ///
    /// # Errors
    /// What the oracle found, with the time.
    pub fn advance(&mut self) -> Result<bool, String> {
        let Some(now_us) = self.events.next_us() else { return Ok(false) };
        self.now_us = now_us;
        while let Some(event) = self.events.pop_at(now_us) {
            self.handle(event);
        }
        self.settle();
        self.audit()?;
        Ok(true)
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrival => self.arrive(),
            Event::Retry(slot) => self.offer(slot),
            Event::Cancel(slot, generation) => self.client_leaves(slot, generation),
            Event::Engine(node, version) => self.stride_due(node, version),
            Event::Pipeline(node) => self.pipeline_due(node),
            Event::Transfers => {
                self.transfers_wake_us = u64::MAX;
                self.step_transfers(baton_transfer::Input::TimerFired);
            }
            Event::Conductor(router) => {
                self.conductor_wakes[router as usize] = u64::MAX;
                self.tell(router, baton_scheduler::Input::TimerFired);
            }
            Event::News(router) => self.deliver_news(router),
            Event::Fault(at) => self.strike(at),
            Event::Sample => self.sample(),
        }
    }

    /// Lets engines plan, then wakes the cores at their next deadlines.
    fn settle(&mut self) {
        while let Some(at) = self.dirty.pop() {
            self.nodes[at as usize].dirty = false;
            self.poll(at);
        }
        if let Some(at_us) = self.transfers.next_deadline()
            && at_us < self.transfers_wake_us
        {
            self.transfers_wake_us = at_us.max(self.now_us);
            self.events.push(self.transfers_wake_us, Event::Transfers);
        }
        for (router, conductor) in self.conductors.iter_mut().enumerate() {
            if let Some(at_us) = conductor.next_deadline()
                && at_us < self.conductor_wakes[router]
            {
                self.conductor_wakes[router] = at_us.max(self.now_us);
                self.events.push(at_us.max(self.now_us), Event::Conductor(u32::try_from(router).expect("few routers")));
            }
        }
    }

    /// Marks a node whose engine must plan again before time goes on.
    pub(crate) fn touch(&mut self, node: u32) {
        let n = &mut self.nodes[node as usize];
        if !n.dirty {
            n.dirty = true;
            self.dirty.push(node);
        }
    }

    /// The engine of a node looks at what it has.
    fn poll(&mut self, at: u32) {
        let now_us = self.now_us;
        let node = &mut self.nodes[at as usize];
        if let Some((wake_us, version)) = node.engine.poll(now_us) {
            self.events.push(wake_us, Event::Engine(at, version));
        }
        let node = &mut self.nodes[at as usize];
        if let Some(end_us) = node.engine.pipeline_end_us() {
            self.events.push(end_us, Event::Pipeline(at));
        }
        let started = std::mem::take(&mut self.nodes[at as usize].engine.started);
        for slot in &started {
            self.prefill_started(*slot);
        }
        let node = &mut self.nodes[at as usize];
        node.engine.started = started;
        node.engine.started.clear();
    }

    fn stride_due(&mut self, at: u32, version: u32) {
        let mut ended = std::mem::take(&mut self.ended);
        let node = &mut self.nodes[at as usize];
        node.engine.advance(version, &mut ended);
        self.take_ended(at, &mut ended);
        self.ended = ended;
        self.touch(at);
    }

    fn pipeline_due(&mut self, at: u32) {
        let mut ended = std::mem::take(&mut self.ended);
        self.nodes[at as usize].engine.drain_pipeline(self.now_us, &mut ended);
        self.take_ended(at, &mut ended);
        self.ended = ended;
        self.touch(at);
    }

    fn take_ended(&mut self, at: u32, ended: &mut Vec<Ended>) {
        for end in ended.drain(..) {
            match end {
                Ended::Prefilled { slot, compute_us } => self.prefilled(at, slot, compute_us),
                Ended::FirstToken { slot, at_us } => self.first_token(slot, at_us),
                Ended::Decoded { slot, mark } => self.decoded(at, slot, &mark),
            }
        }
        self.nodes[at as usize].engine.forget_gaps();
    }

    /// Prefill instances that, by the conductor's index, hold the last block of a chain and all before it.
    #[must_use]
    pub fn replicas(&self, chain: &[baton_types::BlockHash]) -> u32 {
        let mut scratch = baton_scheduler::index::MatchScratch::default();
        let mut holders = 0;
        self.conductors[0].index().matches(chain, &mut scratch, |m| {
            let prefills = self.nodes[m.instance.index()].spec.role.prefills();
            holders += u32::from(prefills && m.blocks as usize == chain.len());
        });
        holders
    }

    /// What was measured.
    #[must_use]
    pub fn into_metrics(mut self) -> crate::metrics::Collector {
        self.close_books();
        self.metrics
    }

    fn audit(&mut self) -> Result<(), String> {
        if !self.oracle.is_due() {
            return Ok(());
        }
        let failed = |what: String| format!("oracle at {} µs: {what}", self.now_us);
        for conductor in &self.conductors {
            conductor.check().map_err(failed)?;
        }
        for node in &self.nodes {
            node.store.check().map_err(failed)?;
        }
        self.transfers.check().map_err(failed)?;
        self.audit_requests().map_err(failed)
    }
}
