//! One transfer in progress: the bytes that have left, its rate and its next event.

use crate::network::units::{GRAINS_PER_BYTE, NEVER, UNLIMITED, after, grains, ns, rate};
use crate::network::{MAX_PATH_LINKS, PathLinks, Priority, ProducerPace, TransferId, TransferRequest};

/// Highest rate of a producer, grains a nanosecond; a faster one counts as this fast. It lies below
/// [`UNLIMITED`], so every producer limits its flight.
const MAX_PRODUCTION: u64 = u64::MAX / 2;

/// The schedule of a producer: `made` grains at `from_ns`, `rate` more each nanosecond, and
/// everything at `until_ns`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Production {
    from_ns: u64,
    made: u128,
    pub(crate) rate: u64,
    pub(crate) until_ns: u64,
}

impl Production {
    /// `made` of `bytes` at `now_ns`, then evenly as `paced` says; `None` when it says that all
    /// are there already.
    pub(crate) fn plan(now_ns: u64, made: u128, bytes: u64, paced: ProducerPace) -> Option<Self> {
        let until_ns = ns(paced.produced_until_us);
        let span = u128::from(until_ns.checked_sub(now_ns).filter(|&span| span > 0)?);
        let early = grains(bytes.saturating_sub(paced.last_bytes)).saturating_sub(made);
        let rate = u64::try_from(early / span).unwrap_or(MAX_PRODUCTION).min(MAX_PRODUCTION);
        Some(Self { from_ns: now_ns, made, rate, until_ns })
    }

    /// Grains produced by `at_ns`, without the last ones, which appear at `until_ns`.
    pub(crate) fn made_by(&self, at_ns: u64) -> u128 {
        let span = at_ns.min(self.until_ns).saturating_sub(self.from_ns);
        self.made + u128::from(self.rate) * u128::from(span)
    }
}

/// The state of a flight, named by the limit of its rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Its producer or a slower link limits it: it asks for at most the producer's rate.
    Keeping(Production),
    /// It fell behind its producer: it asks for as much as its links give until it has caught up.
    CatchingUp(Production),
    /// All its bytes are produced: it asks for as much as its links give.
    Elastic,
    /// The last byte has left and lands at this time: it asks for nothing.
    Landing {
        /// When, ns.
        at_ns: u64,
    },
    /// It is over; its slot is free.
    Ended,
}

/// One transfer in progress.
#[derive(Clone, Debug)]
pub(crate) struct Flight {
    pub(crate) id: TransferId,
    pub(crate) priority: Priority,
    pub(crate) path: PathLinks,
    /// Position among the members of each link of the path.
    pub(crate) link_positions: [u32; MAX_PATH_LINKS],
    pub(crate) bytes: u64,
    pub(crate) started_us: u64,
    pub(crate) deadline_ns: u64,
    pub(crate) paced: bool,
    pub(crate) phase: Phase,
    /// The request's rate cap.
    pub(crate) rate_cap: u64,
    pub(crate) rate: u64,
    pub(crate) delivered: u128,
    pub(crate) settled_ns: u64,
}

impl Flight {
    /// The flight of `request`, started at `now_us`, with no rate yet.
    pub(crate) fn new(request: &TransferRequest, now_us: u64) -> Self {
        let now_ns = ns(now_us);
        let production = request.paced.and_then(|paced| Production::plan(now_ns, 0, request.bytes, paced));
        Self {
            id: request.transfer,
            priority: request.priority,
            path: request.links,
            link_positions: [0; MAX_PATH_LINKS],
            bytes: request.bytes,
            started_us: now_us,
            deadline_ns: request.deadline_us.map_or(NEVER, ns),
            paced: request.paced.is_some(),
            phase: production.map_or(Phase::Elastic, Phase::Keeping),
            rate_cap: request.rate_cap_bytes_per_s.map_or(UNLIMITED, rate),
            rate: 0,
            delivered: 0,
            settled_ns: now_ns,
        }
    }

    /// Whether it takes part in the sharing of its links.
    pub(crate) const fn shares(&self) -> bool {
        matches!(self.phase, Phase::Keeping(_) | Phase::CatchingUp(_) | Phase::Elastic)
    }

    /// Its producer's schedule, while that runs.
    pub(crate) const fn production(&self) -> Option<&Production> {
        match &self.phase {
            Phase::Keeping(production) | Phase::CatchingUp(production) => Some(production),
            _ => None,
        }
    }

    /// The most that it can use, whatever the links give.
    pub(crate) fn cap(&self) -> u64 {
        match self.phase {
            Phase::Keeping(production) => production.rate.min(self.rate_cap),
            _ => self.rate_cap,
        }
    }

    /// Grains still to leave.
    pub(crate) fn remaining(&self) -> u128 {
        grains(self.bytes) - self.delivered
    }

    /// Grains that will have left by `at_ns` if nothing changes before.
    pub(crate) fn delivered_by(&self, at_ns: u64) -> u128 {
        let span = at_ns.saturating_sub(self.settled_ns);
        let there = self.production().map_or_else(|| grains(self.bytes), |p| p.made_by(at_ns));
        let moved = u128::from(self.rate) * u128::from(span);
        (self.delivered + moved).min(there.max(self.delivered))
    }

    /// Books what has left by `at_ns` and returns how much that was.
    pub(crate) fn settle(&mut self, at_ns: u64) -> u128 {
        let delivered = self.delivered_by(at_ns);
        let moved = delivered - self.delivered;
        self.delivered = delivered;
        self.settled_ns = self.settled_ns.max(at_ns);
        moved
    }

    /// Grains produced by the time of the last settlement that have not left.
    pub(crate) fn backlog(&self) -> u128 {
        self.production().map_or(0, |p| p.made_by(self.settled_ns).saturating_sub(self.delivered))
    }

    /// Whether it is free to go faster than its producer and has a whole byte to make up for.
    pub(crate) fn may_catch_up(&self) -> bool {
        matches!(self.phase, Phase::Keeping(p) if self.rate >= p.rate) && self.backlog() >= GRAINS_PER_BYTE
    }

    /// Follows a new schedule from the last settlement on. False if it had none to replace.
    pub(crate) fn repace(&mut self, paced: ProducerPace) -> bool {
        if !self.paced || !self.shares() {
            return false;
        }
        let made = self.delivered + self.backlog();
        let plan = Production::plan(self.settled_ns, made, self.bytes, paced);
        self.phase = plan.map_or(Phase::Elastic, Phase::Keeping);
        true
    }

    /// When it next changes by itself, as things stand; [`NEVER`] if it is stalled.
    pub(crate) fn next_event_ns(&self) -> u64 {
        let own = match self.phase {
            Phase::Keeping(production) => production.until_ns,
            Phase::CatchingUp(production) => {
                let gain = self.rate.saturating_sub(production.rate);
                after(self.settled_ns, self.backlog(), gain).min(production.until_ns)
            }
            Phase::Elastic => after(self.settled_ns, self.remaining(), self.rate),
            Phase::Landing { at_ns } => at_ns,
            Phase::Ended => return NEVER,
        };
        own.min(self.deadline_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::LinkId;

    fn flight(bytes: u64, paced: Option<ProducerPace>) -> Flight {
        let request = TransferRequest {
            transfer: TransferId(1),
            links: PathLinks::one(LinkId(0)),
            bytes,
            priority: Priority::Handoff,
            paced,
            deadline_us: None,
            rate_cap_bytes_per_s: None,
        };
        Flight::new(&request, 10)
    }

    fn paced(produced_until_us: u64, last_bytes: u64) -> Option<ProducerPace> {
        Some(ProducerPace { produced_until_us, last_bytes })
    }

    #[test]
    fn a_producer_makes_all_but_the_last_evenly() {
        let flight = flight(1_000, paced(110, 100));
        let production = *flight.production().unwrap();
        assert_eq!(production.made_by(ns(10)), 0);
        assert_eq!(production.made_by(ns(60)), grains(450));
        assert_eq!(production.made_by(ns(110)), grains(900));
        assert_eq!(flight.next_event_ns(), ns(110));
    }

    #[test]
    fn a_schedule_in_the_past_is_no_schedule() {
        assert_eq!(flight(1_000, paced(10, 100)).phase, Phase::Elastic);
        assert_eq!(flight(1_000, None).phase, Phase::Elastic);
    }

    #[test]
    fn a_last_layer_larger_than_all_waits_whole() {
        let flight = flight(1_000, paced(20, 5_000));
        assert_eq!(flight.production().unwrap().rate, 0);
        assert_eq!(flight.cap(), 0);
    }

    #[test]
    fn nothing_leaves_before_it_is_made() {
        let mut flight = flight(1_000, paced(110, 100));
        flight.rate = rate(1_000_000_000);
        assert_eq!(flight.settle(ns(60)), grains(450));
        assert_eq!(flight.backlog(), 0);
        assert_eq!(flight.settle(ns(50)), 0, "time does not go back");
    }

    #[test]
    fn a_late_producer_keeps_what_it_has_made() {
        let mut flight = flight(1_000, paced(110, 100));
        flight.settle(ns(60));
        assert!(flight.repace(ProducerPace { produced_until_us: 160, last_bytes: 100 }));
        let production = *flight.production().unwrap();
        assert_eq!(production.made_by(ns(60)), grains(450));
        assert_eq!(production.rate, rate(4_500_000), "450 bytes over 100 µs");
    }

    #[test]
    fn catching_up_ends_when_nothing_is_left_behind() {
        let mut flight = flight(1_000, paced(110, 100));
        let production = *flight.production().unwrap();
        flight.settle(ns(60));
        flight.rate = 2 * production.rate;
        assert!(flight.may_catch_up());
        flight.phase = Phase::CatchingUp(production);
        assert_eq!(flight.next_event_ns(), ns(110), "50 µs behind at twice the rate");
        flight.rate = 11 * production.rate;
        assert_eq!(flight.next_event_ns(), ns(65));
        flight.settle(ns(65));
        assert_eq!(flight.backlog(), 0);
    }

    #[test]
    fn an_unpaced_flight_is_not_repaced() {
        let mut unpaced = flight(1_000, None);
        assert!(!unpaced.repace(ProducerPace { produced_until_us: 160, last_bytes: 0 }));
        let mut landing = flight(1_000, paced(110, 100));
        landing.phase = Phase::Landing { at_ns: 5 };
        assert!(!landing.repace(ProducerPace { produced_until_us: 160, last_bytes: 0 }));
    }
}
