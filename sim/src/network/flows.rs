//! Flights and links together: rates, and what happens as time passes.
//!
//! Progress is lazy: a flight is settled only when its rate changes or it is asked about. A change
//! marks links dirty; [`Flows::reflow`] then divides those links anew and gives their flights
//! their rates.

use crate::network::flight::{Flight, Phase};
use crate::network::share::{CLASSES, CappedFlight, Shares, SharingLaw};
use crate::network::timers::{Timer, Timers};
use crate::network::units::{NEVER, UNLIMITED, ns, rate};
use crate::network::{LinkId, LinkSpec, PathLinks, TransferId};

/// A link and the flights on it.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    pub(crate) rate: u64,
    pub(crate) latency_ns: u64,
    pub(crate) up: bool,
    /// Slots of the flights on it, landing ones included, in no particular order.
    pub(crate) members: Vec<u32>,
    /// How many of them share it, by class.
    pub(crate) counts: [u32; CLASSES],
    pub(crate) shares: Shares,
    dirty: bool,
    /// Grains that it has carried, as far as settled.
    pub(crate) carried: u128,
    /// The part of `carried` that belongs to flights that have ended.
    pub(crate) retired: u128,
}

impl Link {
    pub(crate) fn new(spec: LinkSpec) -> Self {
        Self {
            rate: rate(spec.bytes_per_s),
            latency_ns: ns(spec.latency_us),
            up: true,
            members: Vec::new(),
            counts: [0; CLASSES],
            shares: [UNLIMITED; CLASSES],
            dirty: false,
            carried: 0,
            retired: 0,
        }
    }
}

/// How a flight ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Its last byte has landed.
    Landed,
    /// Its deadline came first.
    Late,
}

/// A flight that ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlightEnd {
    pub(crate) slot: u32,
    pub(crate) id: TransferId,
    pub(crate) outcome: Outcome,
    pub(crate) bytes: u64,
    pub(crate) delivered: u128,
    pub(crate) started_us: u64,
    pub(crate) at_ns: u64,
}

/// Flows and the flights on them.
#[derive(Clone, Debug)]
pub(crate) struct Flows {
    pub(crate) law: SharingLaw,
    pub(crate) links: Vec<Link>,
    pub(crate) flights: Vec<Flight>,
    pub(crate) timers: Timers,
    free: Vec<u32>,
    dirty: Vec<u32>,
    touched: Vec<u32>,
    capped: Vec<CappedFlight>,
}

impl Flows {
    pub(crate) fn new(law: SharingLaw, links: Vec<Link>) -> Self {
        Self {
            law,
            links,
            flights: Vec::new(),
            timers: Timers::default(),
            free: Vec::new(),
            dirty: Vec::new(),
            touched: Vec::new(),
            capped: Vec::new(),
        }
    }

    /// Takes a flight in; its links must exist. It has a rate after the next reflow.
    #[expect(clippy::cast_possible_truncation, reason = "flights are bounded by a u32")]
    pub(crate) fn add(&mut self, mut flight: Flight) -> u32 {
        let slot = self.free.pop().unwrap_or(self.flights.len() as u32);
        let (path, class, sharing) = (flight.path, flight.priority.index(), flight.shares());
        for (seat, link) in flight.link_positions.iter_mut().zip(path.as_slice()) {
            let link = &mut self.links[link.index()];
            *seat = link.members.len() as u32;
            link.members.push(slot);
            link.counts[class] += u32::from(sharing);
        }
        self.mark(path);
        self.touched.push(slot);
        if (slot as usize) < self.flights.len() {
            self.flights[slot as usize] = flight;
        } else {
            self.flights.push(flight);
        }
        slot
    }

    /// Takes a flight out, booking what has left by `at_ns`, and returns how much that was.
    pub(crate) fn remove(&mut self, slot: u32, at_ns: u64) -> u128 {
        self.settle(slot, at_ns);
        self.stop_sharing(slot);
        let (path, delivered) = {
            let flight = &mut self.flights[slot as usize];
            flight.phase = Phase::Ended;
            (flight.path, flight.delivered)
        };
        for (position, &link) in path.as_slice().iter().enumerate() {
            self.links[link.index()].retired += delivered;
            self.stand_up(slot, position, link);
        }
        self.timers.clear(slot);
        self.free.push(slot);
        delivered
    }

    /// Replaces the schedule of a paced flight; false if it has none.
    pub(crate) fn repace(&mut self, slot: u32, at_ns: u64, paced: crate::network::ProducerPace) -> bool {
        self.settle(slot, at_ns);
        let flight = &mut self.flights[slot as usize];
        let path = flight.path;
        let changed = flight.repace(paced);
        if changed {
            self.mark(path);
            self.touched.push(slot);
        }
        changed
    }

    /// Sets a link's rate.
    pub(crate) fn set_rate(&mut self, link: LinkId, rate: u64) {
        self.links[link.index()].rate = rate;
        self.mark(PathLinks::one(link));
    }

    /// When something next happens by itself.
    pub(crate) fn next_ns(&self) -> Option<u64> {
        self.timers.first().map(|timer| timer.at_ns)
    }

    /// Lets everything happen that is due by `to_ns`, in order of time and then of name.
    pub(crate) fn advance(&mut self, to_ns: u64, ended: &mut Vec<FlightEnd>) {
        while let Some(at_ns) = self.next_ns().filter(|&at_ns| at_ns <= to_ns) {
            while let Some(timer) = self.timers.pop_due(at_ns) {
                self.fire(timer, ended);
            }
            self.reflow(at_ns);
        }
    }

    /// Gives every flight that a change has reached its rate from `at_ns` on.
    ///
    /// Paced flights that the change has freed to go faster than their producer, and that lag
    /// behind it, start to catch up; that can only slow others, so one more round settles it.
    pub(crate) fn reflow(&mut self, at_ns: u64) {
        let freed = self.reshare(at_ns);
        if freed.is_empty() {
            return;
        }
        for slot in freed {
            let flight = &mut self.flights[slot as usize];
            if let Phase::Keeping(production) = flight.phase {
                flight.phase = Phase::CatchingUp(production);
            }
            let path = flight.path;
            self.mark(path);
            self.touched.push(slot);
        }
        self.reshare(at_ns);
    }

    /// The highest rate that the links of `flight`'s path and its own limits allow.
    pub(crate) fn allowed(&self, flight: &Flight) -> u64 {
        let class = flight.priority.index();
        flight
            .path
            .as_slice()
            .iter()
            .fold(flight.cap(), |least, link| least.min(self.links[link.index()].shares[class]))
    }

    /// Divides `link` as its members stand.
    pub(crate) fn divided(&self, link: &Link, capped: &mut Vec<CappedFlight>) -> Shares {
        capped.clear();
        for &slot in &link.members {
            let flight = &self.flights[slot as usize];
            let cap = flight.cap();
            if flight.shares() && cap != UNLIMITED {
                capped.push(CappedFlight { cap, class: flight.priority.index() });
            }
        }
        self.law.divide(link.rate, &link.counts, capped)
    }

    /// Divides the dirty links, gives their flights rates, and names those freed to catch up.
    fn reshare(&mut self, at_ns: u64) -> Vec<u32> {
        let mut freed = Vec::new();
        let mut dirty = core::mem::take(&mut self.dirty);
        let mut capped = core::mem::take(&mut self.capped);
        dirty.retain(|&link| {
            let link = link as usize;
            let shares = self.divided(&self.links[link], &mut capped);
            self.links[link].dirty = false;
            core::mem::replace(&mut self.links[link].shares, shares) != shares
        });
        for link in dirty.drain(..) {
            for seat in 0..self.links[link as usize].members.len() {
                let slot = self.links[link as usize].members[seat];
                self.refresh(slot, at_ns, false, &mut freed);
            }
        }
        let mut touched = core::mem::take(&mut self.touched);
        for slot in touched.drain(..) {
            self.refresh(slot, at_ns, true, &mut freed);
        }
        (self.dirty, self.touched, self.capped) = (dirty, touched, capped);
        freed
    }

    /// Gives a flight the rate that it is now allowed; `touched` says that it changed itself.
    fn refresh(&mut self, slot: u32, at_ns: u64, touched: bool, freed: &mut Vec<u32>) {
        let flight = &self.flights[slot as usize];
        if !flight.shares() {
            if touched {
                self.schedule(slot);
            }
            return;
        }
        let rate = self.allowed(flight);
        if rate == flight.rate && !touched {
            return;
        }
        self.settle(slot, at_ns);
        let flight = &mut self.flights[slot as usize];
        flight.rate = rate;
        if flight.may_catch_up() {
            freed.push(slot);
        }
        self.schedule(slot);
    }

    fn schedule(&mut self, slot: u32) {
        let flight = &self.flights[slot as usize];
        match flight.next_event_ns() {
            NEVER => self.timers.clear(slot),
            at_ns => self.timers.set(Timer { at_ns, id: flight.id, slot }),
        }
    }

    fn settle(&mut self, slot: u32, at_ns: u64) {
        let flight = &mut self.flights[slot as usize];
        let moved = flight.settle(at_ns);
        if moved > 0 {
            for link in flight.path.as_slice() {
                self.links[link.index()].carried += moved;
            }
        }
    }

    /// Handles the events due for one flight. An earlier one of this list comes first: landing, end of
    /// production, last byte, deadline, end of catching up.
    fn fire(&mut self, timer: Timer, ended: &mut Vec<FlightEnd>) {
        let Timer { at_ns, slot, .. } = timer;
        self.settle(slot, at_ns);
        let flight = &mut self.flights[slot as usize];
        if let Phase::Landing { at_ns: due } = flight.phase
            && due <= at_ns
        {
            return self.end(slot, at_ns, Outcome::Landed, ended);
        }
        if flight.production().is_some_and(|p| p.until_ns <= at_ns) {
            flight.phase = Phase::Elastic;
            let path = flight.path;
            self.mark(path);
        }
        let flight = &self.flights[slot as usize];
        if flight.phase == Phase::Elastic && flight.remaining() == 0 {
            let latency_ns = flight.path.as_slice().iter().map(|link| self.links[link.index()].latency_ns);
            let due = latency_ns.fold(at_ns, u64::saturating_add);
            self.stop_sharing(slot);
            self.flights[slot as usize].phase = Phase::Landing { at_ns: due };
            if due == at_ns {
                return self.end(slot, at_ns, Outcome::Landed, ended);
            }
        }
        let flight = &mut self.flights[slot as usize];
        if flight.deadline_ns <= at_ns {
            return self.end(slot, at_ns, Outcome::Late, ended);
        }
        if let Phase::CatchingUp(production) = flight.phase
            && flight.backlog() == 0
        {
            flight.phase = Phase::Keeping(production);
            let path = flight.path;
            self.mark(path);
        }
        self.touched.push(slot);
    }

    fn end(&mut self, slot: u32, at_ns: u64, outcome: Outcome, ended: &mut Vec<FlightEnd>) {
        let delivered = self.remove(slot, at_ns);
        let flight = &self.flights[slot as usize];
        let (id, bytes, started_us) = (flight.id, flight.bytes, flight.started_us);
        ended.push(FlightEnd { slot, id, outcome, bytes, delivered, started_us, at_ns });
    }

    /// Gives the flight's shares back; it stays on its links until it lands.
    fn stop_sharing(&mut self, slot: u32) {
        let flight = &mut self.flights[slot as usize];
        flight.rate = 0;
        if !flight.shares() {
            return;
        }
        let (path, class) = (flight.path, flight.priority.index());
        for link in path.as_slice() {
            self.links[link.index()].counts[class] -= 1;
        }
        self.mark(path);
    }

    /// Leaves the members of `link`, the `position`th of the flight's path.
    fn stand_up(&mut self, slot: u32, position: usize, link: LinkId) {
        let seat = self.flights[slot as usize].link_positions[position];
        let members = &mut self.links[link.index()].members;
        members.swap_remove(seat as usize);
        let Some(&moved) = members.get(seat as usize) else { return };
        let flight = &mut self.flights[moved as usize];
        let at = flight.path.as_slice().iter().position(|&l| l == link);
        flight.link_positions[at.expect("a member of a link has it on its path")] = seat;
    }

    fn mark(&mut self, path: PathLinks) {
        for id in path.as_slice() {
            let link = &mut self.links[id.index()];
            if !link.dirty {
                link.dirty = true;
                self.dirty.push(id.0);
            }
        }
    }
}
