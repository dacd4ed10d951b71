//! The whole state in a form to read: for the admin page, golden tests and bug reports.

use crate::network::flight::{Flight, Phase};
use crate::network::model::Network;
use crate::network::units::{bytes_per_s, ns, us_ceil, whole_bytes};
use crate::network::{LinkId, NetworkStats, PathLinks, Priority, TransferId};

/// The state of a [`Network`]: links by id, flights by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkSnapshot {
    /// The time of the last input.
    pub now_us: u64,
    /// Every link.
    pub links: Vec<LinkSnapshot>,
    /// Every flight in progress.
    pub flights: Vec<FlightSnapshot>,
    /// The counters.
    pub stats: NetworkStats,
}

/// One link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkSnapshot {
    /// Its number.
    pub link: LinkId,
    /// Whether it takes flights.
    pub up: bool,
    /// Its rate.
    pub bytes_per_s: u64,
    /// The part of it in use.
    pub used_bytes_per_s: u64,
    /// Flights on it, those landing included.
    pub flights: u32,
    /// Bytes that it has carried, for transfers that ended short too.
    pub carried_bytes: u64,
}

/// The state of a flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlightState {
    /// Follows its producer.
    Paced,
    /// Lags behind its producer and takes what it gets.
    CatchingUp,
    /// Takes what it gets.
    Flowing,
    /// Has sent its last byte.
    Landing,
}

/// One flight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlightSnapshot {
    /// The transfer that it carries.
    pub transfer: TransferId,
    /// Its priority.
    pub priority: Priority,
    /// Its path.
    pub links: PathLinks,
    /// Its state.
    pub state: FlightState,
    /// Its size.
    pub bytes: u64,
    /// Whole bytes that have left.
    pub delivered_bytes: u64,
    /// Its rate now.
    pub bytes_per_s: u64,
    /// When it started.
    pub started_us: u64,
    /// When it next changes by itself, if it does.
    pub next_event_us: Option<u64>,
}

impl Network {
    /// The state now, sorted.
    #[must_use]
    pub fn snapshot(&self) -> NetworkSnapshot {
        let live = self.flows.flights.iter().enumerate();
        let mut flights: Vec<FlightSnapshot> =
            live.filter_map(|(slot, flight)| self.flight_snapshot(slot, flight)).collect();
        flights.sort_unstable_by_key(|flight| flight.transfer);
        let ids = (0..).map(LinkId).take(self.flows.links.len());
        NetworkSnapshot {
            now_us: self.now_us,
            links: ids.map(|link| self.link_snapshot(link)).collect(),
            flights,
            stats: self.stats(),
        }
    }

    /// Flights in progress on `link`, those landing included; 0 for an unknown link.
    #[expect(clippy::cast_possible_truncation, reason = "bounded by max_flights, a u32")]
    pub(crate) fn link_flights(&self, link: LinkId) -> u32 {
        self.flows.links.get(link.index()).map_or(0, |link| link.members.len() as u32)
    }

    fn link_snapshot(&self, id: LinkId) -> LinkSnapshot {
        let link = &self.flows.links[id.index()];
        let now_ns = ns(self.now_us);
        let members = link.members.iter().map(|&slot| &self.flows.flights[slot as usize]);
        let (used, carried) = members.fold((0, link.retired), |(used, carried), flight| {
            (used + flight.rate, carried + flight.delivered_by(now_ns))
        });
        LinkSnapshot {
            link: id,
            up: link.up,
            bytes_per_s: bytes_per_s(link.rate),
            used_bytes_per_s: bytes_per_s(used),
            flights: self.link_flights(id),
            carried_bytes: whole_bytes(carried),
        }
    }

    fn flight_snapshot(&self, slot: usize, flight: &Flight) -> Option<FlightSnapshot> {
        let state = match flight.phase {
            Phase::Keeping(_) => FlightState::Paced,
            Phase::CatchingUp(_) => FlightState::CatchingUp,
            Phase::Elastic => FlightState::Flowing,
            Phase::Landing { .. } => FlightState::Landing,
            Phase::Ended => return None,
        };
        Some(FlightSnapshot {
            transfer: flight.id,
            priority: flight.priority,
            links: flight.path,
            state,
            bytes: flight.bytes,
            delivered_bytes: whole_bytes(flight.delivered_by(ns(self.now_us))),
            bytes_per_s: bytes_per_s(flight.rate),
            started_us: flight.started_us,
            next_event_us: u32::try_from(slot)
                .ok()
                .and_then(|slot| self.flows.timers.due_ns(slot))
                .map(us_ceil),
        })
    }
}
