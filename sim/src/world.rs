//! The simulated world: the real cores, driven by events, with models where metal would be.
//!
//! The world first handles every event of one moment, engines' ends before all others. Then the
//! engines plan. So requests that arrive together are planned together, whatever the order of the
//! events, and stepping equals fast-forwarding. No call returns to a part that is half done: the world
//! queues inputs for conductors and nodes that may admit requests, and handles both after the event.

mod audit;
mod decode;
mod delayed;
mod flights;
mod inbox;
mod legs;
mod node;
mod orders;
mod prefill;
mod requests;
mod resume;
mod sample;
mod trouble;

use std::collections::VecDeque;

use crate::network::{Effect as NetworkEffect, Input as NetworkInput, LinkSpec, Network};
use baton_legs::Effect as LegEffect;
use baton_legs::pairs::{Effect as PairEffect, Pairs, PairsConfig};
use baton_scheduler::Conductor;
use baton_store::Effect as StoreEffect;
use baton_types::{ChainHasher, Rng};
use hashbrown::HashMap;

use crate::engine::{Engine, EngineEvent, Moment};
use crate::events::{Event, Events};
use crate::faults::{self, Fault};
use crate::metrics::Collector;
use crate::oracle::Oracle;
use crate::setup::Setup;
use crate::workload::{Arrival, Workload};

use delayed::DelayQueue;
use flights::Purpose;
use inbox::RoutedInput;
pub use inbox::{ConductorInput, Step};
use node::Node;
use requests::LiveRequest;
pub use resume::own_blocks;

/// A run in progress.
pub struct World {
    pub(crate) setup: Setup,
    pub(crate) now_us: u64,
    /// Whether engines have planned at this moment already.
    planned: bool,
    /// Whether loads were sampled at this moment.
    pub(crate) sampled: bool,
    pub(crate) events: Events,
    pub(crate) nodes: Vec<Node>,
    pub(crate) conductors: Vec<Conductor>,
    pub(crate) conductor_wakes: Vec<u64>,
    pub(crate) pair_wakes: Vec<u64>,
    pub(crate) delayed: Vec<DelayQueue>,
    pub(crate) network: Network,
    pub(crate) network_wake_us: u64,
    pub(crate) flights: HashMap<u64, Purpose>,
    pub(crate) next_flight: u64,
    pub(crate) workload: Box<dyn Workload>,
    pub(crate) upcoming: Option<Arrival>,
    pub(crate) foreseen: VecDeque<Arrival>,
    pub(crate) live: Vec<LiveRequest>,
    pub(crate) free: Vec<u32>,
    pub(crate) in_flight: u64,
    pub(crate) arrivals: u64,
    /// Of each conductor, the attempts of its requests.
    pub(crate) pairs: Vec<Pairs>,
    pub(crate) faults: Vec<(u64, Fault)>,
    pub(crate) rng: Rng,
    pub(crate) report_rng: Rng,
    pub(crate) metrics: Collector,
    pub(crate) oracle: Oracle,
    /// Nodes whose engine must plan before time goes on.
    dirty: Vec<u32>,
    /// Nodes that may be able to admit a waiting request.
    pub(crate) admittable: VecDeque<u32>,
    /// Inputs that the conductors have not received yet.
    pub(crate) inbox: VecDeque<RoutedInput>,
    /// Prefills whose first pass was planned just now.
    starting: Vec<u32>,
    /// Scratch, reused.
    pub(crate) gaps_us: Vec<u32>,
    pair_effects: Vec<PairEffect>,
    /// Inputs and orders of the conductors, if the run records them.
    schedule: Option<Vec<Step>>,
    store_effects: Vec<StoreEffect>,
    leg_effects: Vec<LegEffect>,
    network_effects: Vec<NetworkEffect>,
    ended: Vec<EngineEvent>,
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
        let mut world = Self::empty(setup, workload)?;
        world.start();
        Ok(world)
    }

    fn empty(setup: Setup, workload: Box<dyn Workload>) -> Result<Self, String> {
        setup.validate()?;
        let nodes = node::build(&setup)?;
        let links: Vec<LinkSpec> = nodes.iter().flat_map(|n| n.links(&setup)).collect();
        let mut conductors = Vec::new();
        for router in 0..setup.routers {
            let mut config = setup.scheduler.clone();
            config.seed = config.seed.wrapping_add(u64::from(router));
            let mut conductor = Conductor::new(config).map_err(|e| e.to_string())?;
            if setup.routers > 1 {
                conductor.share_as(router);
            }
            conductors.push(conductor);
        }
        let faults = faults::draw(&setup.faults, setup.instances(), workload.span_us());
        let routers = conductors.len();
        let (scheduler, slack) = (&setup.scheduler, setup.stage_slack);
        let limits = PairsConfig::new(&scheduler.classes, slack, setup.stage_floor_us);
        Ok(Self {
            now_us: 0,
            planned: false,
            sampled: false,
            events: Events::default(),
            network: Network::new(setup.network, &links),
            network_wake_us: u64::MAX,
            flights: HashMap::new(),
            next_flight: 0,
            upcoming: None,
            foreseen: VecDeque::new(),
            live: Vec::new(),
            free: Vec::new(),
            in_flight: 0,
            arrivals: 0,
            rng: Rng::fork(setup.seed, 3),
            report_rng: Rng::fork(setup.faults.seed, 4),
            metrics: Collector::new(&setup, workload.as_ref()),
            oracle: Oracle::new(setup.audit_every),
            dirty: Vec::new(),
            admittable: VecDeque::new(),
            inbox: VecDeque::new(),
            starting: Vec::new(),
            gaps_us: Vec::new(),
            pair_effects: Vec::new(),
            schedule: None,
            store_effects: Vec::new(),
            leg_effects: Vec::new(),
            network_effects: Vec::new(),
            ended: Vec::new(),
            conductor_wakes: vec![u64::MAX; routers],
            pair_wakes: vec![u64::MAX; routers],
            pairs: vec![Pairs::new(limits); routers],
            delayed: (0..routers).map(|_| DelayQueue::default()).collect(),
            nodes,
            conductors,
            workload,
            faults,
            setup,
        })
    }

    fn start(&mut self) {
        for at in 0..self.nodes.len() {
            let spec = self.nodes[at].spec.clone();
            self.send_to_all(&baton_scheduler::Input::InstanceJoined(spec));
        }
        self.deliver();
        for (at, (when_us, _)) in self.faults.iter().enumerate() {
            self.events.push(*when_us, Event::Fault(u32::try_from(at).expect("plans are small")));
        }
        self.pull_arrival();
        if self.setup.sample_us > 0 {
            self.events.push(0, Event::Sample);
        }
    }

    /// Adds a fault to those of the plan; before the run begins.
    pub fn inject(&mut self, at_us: u64, fault: Fault) {
        let number = u32::try_from(self.faults.len()).expect("plans are small");
        self.faults.push((at_us, fault));
        self.events.push(at_us, Event::Fault(number));
    }

    /// Runs to the end, and records the conductors' inputs and the orders of their pairs.
    ///
    /// # Errors
    /// As [`World::new`] and [`World::run`].
    pub fn recorded(setup: Setup, workload: Box<dyn Workload>) -> Result<Vec<Step>, String> {
        let mut world = Self::empty(setup, workload)?;
        world.schedule = Some(Vec::new());
        world.start();
        world.run()?;
        Ok(world.schedule.unwrap_or_default())
    }

    /// A digest of every order of every conductor so far; only audited runs keep one.
    #[must_use]
    pub const fn orders_digest(&self) -> u64 {
        self.oracle.orders_digest()
    }

    /// Runs to the end: until nothing is left that could happen.
    ///
    /// # Errors
    /// The first violation that the oracle found, with the time.
    pub fn run(&mut self) -> Result<(), String> {
        while self.advance()? {}
        self.rest()
    }

    /// Checks a world that has come to rest: every request has ended, nothing is held.
    ///
    /// # Errors
    /// The first violation that the oracle found.
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
    /// The first violation that the oracle found, with the time.
    pub fn advance(&mut self) -> Result<bool, String> {
        let Some(now_us) = self.events.next_us() else { return Ok(false) };
        self.planned &= now_us == self.now_us;
        self.now_us = now_us;
        while let Some(event) = self.events.pop_at(now_us) {
            self.handle(event);
            // All engine events of this moment are handled before a conductor receives any of them.
            if !self.events.engine_is_next_at(now_us) {
                self.deliver();
            }
        }
        self.settle();
        self.audit()?;
        Ok(true)
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrival => self.arrive(),
            Event::Retry(slot, generation) => self.comes_back(slot, generation),
            Event::Cancel(slot, generation) => self.client_leaves(slot, generation),
            Event::Engine(node, version) => self.stride_due(node, version),
            Event::Pipeline(node) => self.pipeline_due(node),
            Event::Network => {
                self.network_wake_us = u64::MAX;
                self.step_network(NetworkInput::TimerFired);
            }
            Event::Conductor(router) => {
                self.conductor_wakes[router as usize] = u64::MAX;
                self.send(router, ConductorInput::Fact(baton_scheduler::Input::TimerFired));
            }
            Event::Pairs(router) => {
                self.pair_wakes[router as usize] = u64::MAX;
                self.send(router, ConductorInput::Woken);
            }
            Event::DelayedDue(router) => self.deliver_delayed(router),
            Event::Fault(at) => self.strike(at),
            Event::Sample => self.sample(),
        }
    }

    /// Lets engines plan, then wakes the cores at their next deadlines.
    fn settle(&mut self) {
        loop {
            let mut dirty = std::mem::take(&mut self.dirty);
            dirty.sort_unstable();
            for at in dirty.drain(..) {
                self.poll(at);
            }
            self.dirty = dirty;
            self.planned = true;
            self.prefills_started();
            self.deliver();
            if self.dirty.is_empty() {
                break;
            }
        }
        if let Some(at_us) = self.network.next_deadline()
            && at_us < self.network_wake_us
        {
            self.network_wake_us = at_us.max(self.now_us);
            self.events.push(self.network_wake_us, Event::Network);
        }
        for (router, conductor) in self.conductors.iter_mut().enumerate() {
            if let Some(at_us) = conductor.next_deadline()
                && at_us < self.conductor_wakes[router]
            {
                self.conductor_wakes[router] = at_us.max(self.now_us);
                self.events.push(
                    at_us.max(self.now_us),
                    Event::Conductor(u32::try_from(router).expect("few routers")),
                );
            }
        }
        for (router, pairs) in (0u32..).zip(&self.pairs) {
            let wake_us = &mut self.pair_wakes[router as usize];
            if let Some(at_us) = pairs.next_deadline().filter(|at_us| at_us < wake_us) {
                *wake_us = at_us.max(self.now_us);
                self.events.push(*wake_us, Event::Pairs(router));
            }
        }
        self.go_on_sampling();
    }

    /// Does something to a node's engine and takes in what ended by it.
    pub(crate) fn engine(&mut self, at: u32, act: impl FnOnce(&mut Engine, Moment, &mut Vec<EngineEvent>)) {
        let mut ended = std::mem::take(&mut self.ended);
        let moment = Moment { now_us: self.now_us, planned: self.planned };
        act(&mut self.nodes[at as usize].engine, moment, &mut ended);
        self.take_ended(at, &mut ended);
        self.ended = ended;
        let node = &mut self.nodes[at as usize];
        if !node.dirty {
            node.dirty = true;
            self.dirty.push(at);
        }
    }

    /// The engine of a node looks at what it has.
    fn poll(&mut self, at: u32) {
        self.nodes[at as usize].engine.join(self.now_us);
        self.take_starved(at);
        let node = &mut self.nodes[at as usize];
        node.dirty = false;
        if let Some((wake_us, version)) = node.engine.poll(self.now_us) {
            self.events.push(wake_us, Event::Engine(at, version));
        }
        self.starting.append(&mut node.engine.started);
    }

    fn prefills_started(&mut self) {
        let mut starting = std::mem::take(&mut self.starting);
        for slot in starting.drain(..) {
            self.prefill_started(slot);
        }
        self.starting = starting;
    }

    fn stride_due(&mut self, at: u32, version: u32) {
        let mut leaves_us = None;
        self.engine(at, |engine, _, ended| leaves_us = engine.advance(version, ended));
        if let Some(leaves_us) = leaves_us {
            self.events.push(leaves_us, Event::Pipeline(at));
        }
        self.nodes[at as usize].engine.forget_gaps();
    }

    fn pipeline_due(&mut self, at: u32) {
        self.engine(at, |engine, moment, ended| engine.drain_pipeline(moment.now_us, ended));
        self.nodes[at as usize].engine.forget_gaps();
    }

    fn take_ended(&mut self, at: u32, ended: &mut Vec<EngineEvent>) {
        for end in ended.drain(..) {
            match end {
                EngineEvent::Prefilled { slot, compute_us } => self.prefilled(at, slot, compute_us),
                EngineEvent::FirstToken { slot, at_us } => self.first_token(slot, at_us),
                EngineEvent::Decoded { slot, emitted_tokens, mark } => {
                    self.decoded(at, slot, emitted_tokens, &mark)
                }
            }
        }
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

    /// Outcomes so far, when they are kept.
    #[must_use]
    pub fn outcomes(&self) -> &[crate::metrics::Outcome] {
        &self.metrics.outcomes
    }

    /// The measurements of the run.
    #[must_use]
    pub fn into_metrics(mut self) -> crate::metrics::Collector {
        self.finish_samples();
        self.metrics
    }
}
