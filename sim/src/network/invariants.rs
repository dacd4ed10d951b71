//! The audit of the whole state.

use crate::network::flight::{Flight, Phase};
use crate::network::flows::{Flows, Link};
use crate::network::model::Network;
use crate::network::share::CLASSES;
use crate::network::units::{NEVER, grains};

impl Network {
    /// Audits every invariant: bytes conserved on each link (I7), transfers ended exactly once
    /// (I5), bounds (I9), and that the rates kept by small changes are those that the model gives
    /// afresh. Costs a pass over everything: for simulators, tests and debug builds.
    ///
    /// # Errors
    /// The first breach, with the flight or link it concerns.
    pub fn check(&self) -> Result<(), String> {
        self.check_counts()?;
        if !self.flows.timers.is_sound() {
            return Err(String::from("timers: heap and index disagree"));
        }
        for (slot, flight) in self.flows.flights.iter().enumerate() {
            if flight.phase != Phase::Ended {
                self.check_flight(slot, flight)?;
            }
        }
        for (id, link) in self.flows.links.iter().enumerate() {
            check_link(&self.flows, link).map_err(|breach| format!("link {id}: {breach}"))?;
        }
        Ok(())
    }

    fn check_counts(&self) -> Result<(), String> {
        let stats = self.stats();
        let ended = stats.finished + stats.cancelled + stats.failed_deadline + stats.failed_link_down;
        if stats.started != ended + stats.live {
            return Err(format!("I5: transfers started are not those ended and live: {stats:?}"));
        }
        let live = self.flows.flights.iter().filter(|f| f.phase != Phase::Ended);
        let (count, bytes) = live.fold((0u64, 0u64), |(n, b), f| (n + 1, b.saturating_add(f.bytes)));
        if count != stats.live || stats.live > u64::from(self.config.max_flights) {
            return Err(format!("I9: {count} flights, {} named", stats.live));
        }
        let known = stats.finished_bytes.saturating_add(stats.abandoned_bytes).saturating_add(bytes);
        if stats.started_bytes != known {
            return Err(format!("I7: {} bytes started, {known} known", stats.started_bytes));
        }
        Ok(())
    }

    fn check_flight(&self, slot: usize, flight: &Flight) -> Result<(), String> {
        let breach = |what: &str| Err(format!("flight {}: {what}: {flight:?}", flight.id.0));
        let Ok(index) = u32::try_from(slot) else { return breach("slot out of range") };
        if self.slots.get(&flight.id) != Some(&index) {
            return breach("not found under its name");
        }
        if flight.delivered > grains(flight.bytes) {
            return breach("I7: more delivered than asked for");
        }
        if flight.production().is_some_and(|p| flight.delivered > p.made_by(flight.settled_ns)) {
            return breach("delivered before it was produced");
        }
        if flight.shares() && flight.rate != self.flows.allowed(flight) {
            return breach("rate is not what its links allow");
        }
        if !flight.shares() && (flight.rate != 0 || flight.remaining() != 0) {
            return breach("landing with bytes left");
        }
        let due_ns = self.flows.timers.due_ns(index).unwrap_or(NEVER);
        if due_ns != flight.next_event_ns() {
            return breach("timer is not its next event");
        }
        for (link, &seat) in flight.path.as_slice().iter().zip(&flight.link_positions) {
            let members = &self.flows.links[link.index()].members;
            if members.get(seat as usize) != Some(&index) {
                return breach("not in its seat on a link");
            }
        }
        Ok(())
    }
}

fn check_link(network: &Flows, link: &Link) -> Result<(), String> {
    let mut counts = [0u32; CLASSES];
    let (mut used, mut delivered) = (0u64, 0u128);
    for &slot in &link.members {
        let flight = &network.flights[slot as usize];
        counts[flight.priority.index()] += u32::from(flight.shares());
        used += flight.rate;
        delivered += flight.delivered;
    }
    if counts != link.counts {
        return Err(format!("counts {:?}, members {counts:?}", link.counts));
    }
    if used > link.rate {
        return Err(format!("{used} used of {}", link.rate));
    }
    if !link.up && !link.members.is_empty() {
        return Err(String::from("flights on a link that is down"));
    }
    if link.carried != link.retired + delivered {
        return Err(format!("I7: carried {}, flights {}", link.carried, link.retired + delivered));
    }
    let shares = network.divided(link, &mut Vec::new());
    if shares != link.shares {
        return Err(format!("shares {:?}, afresh {shares:?}", link.shares));
    }
    Ok(())
}
