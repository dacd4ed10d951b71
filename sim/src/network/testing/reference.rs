//! The model written a second time, with nothing of the engine's machinery: real-valued time and
//! bytes, all flights in one list, every rate computed afresh at every event, in µs and bytes.

use crate::network::{Input, LinkSpec, NetworkConfig, ProducerPace, TransferRequest};
use std::collections::BTreeMap;

/// Times this close are the same, µs.
const SAME_US: f64 = 1e-6;

/// How a transfer ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fate {
    Finished,
    Cancelled,
    Late,
    Lost(u32),
    Refused,
}

/// The end of one transfer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    pub(crate) at: f64,
    pub(crate) fate: Fate,
    pub(crate) delivered: f64,
}

#[derive(Clone, Debug)]
enum State {
    Keeping,
    Catching,
    Elastic,
    Landing(f64),
}

#[derive(Clone, Debug)]
struct RefFlight {
    request: TransferRequest,
    state: State,
    from: f64,
    made: f64,
    slope: f64,
    until: f64,
    delivered: f64,
    rate: f64,
}

impl RefFlight {
    /// The production schedule; its slope is a whole number of 10⁻⁹ byte/µs, as documented.
    fn plan(&mut self, now: f64, made: f64, paced: ProducerPace) {
        let until = paced.produced_until_us as f64;
        if until <= now {
            self.state = State::Elastic;
            return;
        }
        let early = (self.request.bytes.saturating_sub(paced.last_bytes) as f64 - made).max(0.0);
        let slope = (early / (until - now) * 1e9).floor() / 1e9;
        (self.from, self.made, self.slope, self.until) = (now, made, slope, until);
        self.state = State::Keeping;
    }

    fn backlog(&self, now: f64) -> f64 {
        match self.state {
            State::Keeping | State::Catching => {
                self.made + self.slope * (now.min(self.until) - self.from) - self.delivered
            }
            _ => 0.0,
        }
    }

    fn cap(&self) -> f64 {
        let cap = self.request.rate_cap_bytes_per_s.map_or(f64::INFINITY, |c| c as f64 / 1e6);
        if matches!(self.state, State::Keeping) { cap.min(self.slope) } else { cap }
    }

    fn shares(&self) -> bool {
        !matches!(self.state, State::Landing(_))
    }

    fn deadline(&self) -> f64 {
        self.request.deadline_us.map_or(f64::INFINITY, |d| d as f64)
    }

    fn next(&self, now: f64) -> f64 {
        let own = match self.state {
            State::Keeping => self.until,
            State::Catching if self.rate > self.slope => {
                (now + self.backlog(now).max(0.0) / (self.rate - self.slope)).min(self.until)
            }
            State::Catching => self.until,
            State::Elastic => now + (self.request.bytes as f64 - self.delivered) / self.rate,
            State::Landing(at) => at,
        };
        own.min(self.deadline())
    }
}

/// The whole model.
pub(crate) struct Reference {
    weights: [f64; 4],
    floor: f64,
    links: Vec<(f64, f64, bool)>,
    flights: BTreeMap<u64, RefFlight>,
    now: f64,
    pub(crate) ends: Vec<(u64, End)>,
}

impl Reference {
    pub(crate) fn new(config: &NetworkConfig, links: &[LinkSpec]) -> Self {
        let of = |l: &LinkSpec| (l.bytes_per_s as f64 / 1e6, l.latency_us as f64, true);
        Self {
            weights: config.weights().map(f64::from),
            floor: f64::from(config.floor_permille) / 1e3,
            links: links.iter().map(of).collect(),
            flights: BTreeMap::new(),
            now: 0.0,
            ends: Vec::new(),
        }
    }

    pub(crate) fn step(&mut self, now_us: u64, input: &Input) {
        self.run(now_us as f64);
        match input {
            Input::Start(request) => self.start(request.clone()),
            Input::Cancel { transfer } => {
                if self.flights.contains_key(&transfer.0) {
                    self.end(transfer.0, Fate::Cancelled);
                }
            }
            Input::Repace { transfer, paced } => {
                let now = self.now;
                if let Some(flight) = self.flights.get_mut(&transfer.0)
                    && flight.request.paced.is_some()
                    && flight.shares()
                {
                    let made = flight.delivered + flight.backlog(now).max(0.0);
                    flight.plan(now, made, *paced);
                }
            }
            Input::LinkDown { link } => self.lose(*link),
            Input::LinkUp { link } => self.links[link.index()].2 = true,
            Input::SetRate { link, bytes_per_s } => {
                self.links[link.index()].0 = *bytes_per_s as f64 / 1e6;
            }
            Input::TimerFired => {}
        }
        self.rerate();
    }

    /// Every event up to `until`.
    pub(crate) fn run(&mut self, until: f64) {
        loop {
            let next = self.flights.values().map(|f| f.next(self.now)).fold(f64::INFINITY, f64::min);
            if next > until + SAME_US || next == f64::INFINITY {
                break;
            }
            let due: Vec<u64> = self
                .flights
                .iter()
                .filter(|(_, f)| f.next(self.now) <= next + SAME_US)
                .map(|(&id, _)| id)
                .collect();
            self.flow(next);
            for id in due {
                self.fire(id);
            }
            self.rerate();
        }
        if until.is_finite() {
            self.flow(until);
        }
    }

    fn flow(&mut self, to: f64) {
        let span = (to - self.now).max(0.0);
        for flight in self.flights.values_mut() {
            flight.delivered += flight.rate * span;
        }
        self.now = self.now.max(to);
    }

    fn fire(&mut self, id: u64) {
        let now = self.now;
        let latency: f64 =
            self.flights[&id].request.links.as_slice().iter().map(|l| self.links[l.index()].1).sum();
        let flight = self.flights.get_mut(&id).unwrap();
        let left = flight.request.bytes as f64 - flight.delivered;
        match flight.state {
            State::Landing(at) if at <= now + SAME_US => return self.end(id, Fate::Finished),
            State::Elastic if left <= flight.rate * 2.0 * SAME_US => {
                flight.state = State::Landing(now + latency);
                (flight.rate, flight.delivered) = (0.0, flight.request.bytes as f64);
            }
            State::Keeping | State::Catching if flight.until <= now + SAME_US => {
                flight.state = State::Elastic;
            }
            State::Catching => flight.state = State::Keeping,
            _ => {}
        }
        if self.flights[&id].deadline() <= now + SAME_US {
            self.end(id, Fate::Late);
        }
    }

    fn start(&mut self, request: TransferRequest) {
        let id = request.transfer.0;
        let now = self.now;
        let down = request.links.as_slice().iter().find(|l| !self.links[l.index()].2);
        let fate = match (down, request.deadline_us) {
            (Some(link), _) => Some(Fate::Lost(link.0)),
            (None, Some(deadline)) if deadline as f64 <= now => Some(Fate::Late),
            _ => None,
        };
        if self.flights.contains_key(&id) {
            self.ends.push((id, End { at: now, fate: Fate::Refused, delivered: 0.0 }));
            return;
        }
        if let Some(fate) = fate {
            self.ends.push((id, End { at: now, fate, delivered: 0.0 }));
            return;
        }
        let mut flight = RefFlight {
            request,
            state: State::Elastic,
            from: now,
            made: 0.0,
            slope: 0.0,
            until: now,
            delivered: 0.0,
            rate: 0.0,
        };
        if let Some(paced) = flight.request.paced {
            flight.plan(now, 0.0, paced);
        }
        self.flights.insert(id, flight);
    }

    fn lose(&mut self, link: crate::network::LinkId) {
        let was_up = core::mem::replace(&mut self.links[link.index()].2, false);
        let on = |f: &RefFlight| f.request.links.as_slice().contains(&link);
        let lost: Vec<u64> = self.flights.iter().filter(|(_, f)| on(f)).map(|(&id, _)| id).collect();
        for id in lost.into_iter().filter(|_| was_up) {
            self.end(id, Fate::Lost(link.0));
        }
    }

    fn end(&mut self, id: u64, fate: Fate) {
        let flight = self.flights.remove(&id).unwrap();
        self.ends.push((id, End { at: self.now, fate, delivered: flight.delivered }));
    }

    /// All rates afresh; laggards that reach their producer's rate go on to catch up.
    fn rerate(&mut self) {
        self.assign();
        let now = self.now;
        let mut freed = false;
        for flight in self.flights.values_mut() {
            let keeping = matches!(flight.state, State::Keeping);
            if keeping && flight.rate >= flight.slope * (1.0 - 1e-9) && flight.backlog(now) >= 1.0 {
                flight.state = State::Catching;
                freed = true;
            }
        }
        if freed {
            self.assign();
        }
    }

    fn assign(&mut self) {
        let mut rates: BTreeMap<u64, f64> = self.flights.iter().map(|(&id, f)| (id, f.cap())).collect();
        for link in 0..self.links.len() {
            for (id, share) in self.divide(link) {
                let rate = rates.get_mut(&id).unwrap();
                *rate = rate.min(share);
            }
        }
        for (id, flight) in &mut self.flights {
            flight.rate = if flight.shares() { rates[id] } else { 0.0 };
        }
    }

    /// One link's shares, by fixing one round of content flights after another.
    fn divide(&self, link: usize) -> Vec<(u64, f64)> {
        let on = |f: &RefFlight| f.shares() && f.request.links.as_slice().iter().any(|l| l.index() == link);
        let flights: Vec<(u64, f64, usize)> = self
            .flights
            .iter()
            .filter(|(_, f)| on(f))
            .map(|(&id, f)| (id, f.cap(), f.request.priority.index()))
            .collect();
        let weights = self.weights_among(&flights);
        let mut fixed = vec![false; flights.len()];
        loop {
            let free = || flights.iter().zip(&fixed).filter(|(_, fixed)| !**fixed).map(|(f, _)| f);
            let weight: f64 = free().map(|f| weights[f.2]).sum();
            let taken: f64 = flights.iter().zip(&fixed).filter(|(_, x)| **x).map(|(f, _)| f.1).sum();
            let level = (self.links[link].0 - taken) / weight;
            let content = |f: &(u64, f64, usize)| f.1 <= level * weights[f.2];
            let more: Vec<usize> =
                (0..flights.len()).filter(|&i| !fixed[i] && content(&flights[i])).collect();
            if more.is_empty() || weight == 0.0 {
                let share = |(i, f): (usize, &(u64, f64, usize))| {
                    (f.0, if fixed[i] { f.1 } else { level * weights[f.2] })
                };
                return flights.iter().enumerate().map(share).collect();
            }
            for i in more {
                fixed[i] = true;
            }
        }
    }

    fn weights_among(&self, flights: &[(u64, f64, usize)]) -> [f64; 4] {
        let mut weights = self.weights;
        let Some(lowest) = flights.iter().map(|f| f.2).max() else { return weights };
        let above: f64 = flights.iter().filter(|f| f.2 < lowest).map(|f| weights[f.2]).sum();
        let count = flights.iter().filter(|f| f.2 == lowest).count() as f64;
        let lifted = above * self.floor / ((1.0 - self.floor) * count);
        // Weights are whole millionths, as documented; the margin undoes the noise of the division.
        weights[lowest] = weights[lowest].max((lifted * 1e6 - 1e-4).ceil() / 1e6);
        weights
    }
}
