//! Tests of the whole core: a driver that audits it at every step, scenes with known answers,
//! and random runs against an independent model.

mod properties;
mod reference;
mod scenes;

use crate::network::{
    Effect, Input, LinkId, LinkSpec, Network, NetworkConfig, PathLinks, Priority, TransferId, TransferRequest,
};

/// An effect and the time of the step that gave it.
pub(crate) type TimedEffect = (u64, Effect);

/// Carries time for an engine, as a driver does, and checks it after every step.
pub(crate) struct Driver {
    pub(crate) engine: Network,
    pub(crate) effects: Vec<TimedEffect>,
}

impl Driver {
    pub(crate) fn new(config: NetworkConfig, links: &[LinkSpec]) -> Self {
        Self { engine: Network::new(config, links), effects: Vec::new() }
    }

    /// Equal weights aside, links of `rates` MB/s without latency, and no floor.
    pub(crate) fn over(rates: &[u64]) -> Self {
        let links: Vec<LinkSpec> = rates.iter().map(|&mb| link(mb * 1_000_000, 0)).collect();
        Self::new(NetworkConfig { floor_permille: 0, ..NetworkConfig::default() }, &links)
    }

    /// One step, without the timers before it.
    pub(crate) fn step(&mut self, now_us: u64, input: Input) {
        let mut effects = Vec::new();
        self.engine.step(now_us, input, &mut effects);
        self.effects.extend(effects.into_iter().map(|effect| (now_us, effect)));
        if let Err(breach) = self.engine.check() {
            panic!("at {now_us} µs: {breach}");
        }
    }

    /// Every timer up to `until_us`.
    pub(crate) fn run(&mut self, until_us: u64) {
        while let Some(at_us) = self.engine.next_deadline().filter(|&at| at <= until_us) {
            self.step(at_us, Input::TimerFired);
        }
    }

    /// The timers before `now_us`, then `input`.
    pub(crate) fn at(&mut self, now_us: u64, input: Input) {
        self.run(now_us.saturating_sub(1));
        self.step(now_us, input);
    }

    /// Everything to its end, and when each transfer finished, by name.
    pub(crate) fn finishes(&mut self) -> Vec<(u64, u64)> {
        self.run(u64::MAX);
        let mut ends: Vec<(u64, u64)> = self
            .effects
            .iter()
            .filter_map(|(at, effect)| match effect {
                Effect::Finished { transfer, .. } => Some((transfer.0, *at)),
                Effect::Failed { .. } => None,
            })
            .collect();
        ends.sort_unstable();
        ends
    }

    /// The rate of a flight now, bytes a second.
    pub(crate) fn rate_of(&self, transfer: u64) -> u64 {
        let snapshot = self.engine.snapshot();
        let flight = snapshot.flights.iter().find(|f| f.transfer.0 == transfer);
        flight.expect("the flight is in progress").bytes_per_s
    }
}

pub(crate) const fn link(bytes_per_s: u64, latency_us: u64) -> LinkSpec {
    LinkSpec { bytes_per_s, latency_us }
}

pub(crate) fn path(links: &[u32]) -> PathLinks {
    let links: Vec<LinkId> = links.iter().copied().map(LinkId).collect();
    PathLinks::new(&links).unwrap()
}

/// A plain hand-off.
pub(crate) fn request(transfer: u64, links: &[u32], bytes: u64) -> TransferRequest {
    TransferRequest {
        transfer: TransferId(transfer),
        links: path(links),
        bytes,
        priority: Priority::Handoff,
        paced: None,
        deadline_us: None,
        rate_cap_bytes_per_s: None,
    }
}

pub(crate) fn start(transfer: u64, links: &[u32], bytes: u64) -> Input {
    Input::Start(request(transfer, links, bytes))
}
