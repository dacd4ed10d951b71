//! One direction of an instance's network link: the KV on its way over it, and how long it keeps the link busy.

use alloc::vec::Vec;
use baton_types::RequestId;
use serde::{Deserialize, Serialize};

/// KV that was sent and has not arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct LinkFlight {
    request: RequestId,
    /// Time for which it keeps the link to itself, µs.
    takes_us: u64,
    /// Since when all of it is there to be sent, µs.
    ready_since_us: Option<u64>,
}

/// The flights of one direction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LinkLedger {
    flights: Vec<LinkFlight>,
    /// When all that was sent has passed if the link never idles, µs.
    free_at_us: u64,
}

fn total_us<'a>(flights: impl Iterator<Item = &'a LinkFlight>) -> u64 {
    flights.fold(0, |sum_us, flight| sum_us.saturating_add(flight.takes_us))
}

impl LinkLedger {
    /// A request's KV is sent from now on: at once what is ready, the rest as it is computed.
    pub(crate) fn begin(&mut self, now_us: u64, request: RequestId, takes_us: u64, ready: bool) {
        debug_assert!(
            self.flights.iter().all(|flight| flight.request != request),
            "the KV of request {request} is sent twice over one link"
        );
        self.flights.push(LinkFlight { request, takes_us, ready_since_us: ready.then_some(now_us) });
        self.free_at_us = self.free_at_us.max(now_us).saturating_add(takes_us);
    }

    /// All of a request's KV is computed.
    pub(crate) fn make_ready(&mut self, now_us: u64, request: RequestId) {
        let computing = |f: &&mut LinkFlight| f.request == request && f.ready_since_us.is_none();
        if let Some(flight) = self.flights.iter_mut().find(computing) {
            flight.ready_since_us = Some(now_us);
        }
    }

    /// A request's KV has arrived, or never will.
    pub(crate) fn end(&mut self, now_us: u64, request: RequestId) {
        let at = self.flights.iter().position(|flight| flight.request == request);
        self.flights.remove(at.expect("what arrives was sent"));
        // What is on its way still takes no longer than all of it alone.
        self.free_at_us = self.free_at_us.min(now_us.saturating_add(total_us(self.flights.iter())));
    }

    /// When all that was sent has passed if the link never idles, µs.
    pub(crate) const fn free_at_us(&self) -> u64 {
        self.free_at_us
    }

    /// Time until all that was sent has passed, µs. A link idles while the other end of a flight is busy, so it may be
    /// behind its rate. Flights share a link and began one after another, so half of what is ready is left in the mean.
    /// What is ready for longer than all of that together takes is held up by something else, for example for room.
    pub(crate) fn left_us(&self, now_us: u64) -> u64 {
        let ready = || self.flights.iter().filter(|flight| flight.ready_since_us.is_some());
        let all_us = total_us(ready());
        let held_up_by_link =
            |f: &&LinkFlight| f.ready_since_us.is_some_and(|us| now_us.saturating_sub(us) < all_us);
        self.free_at_us.saturating_sub(now_us).max(total_us(ready().filter(held_up_by_link)) / 2)
    }

    /// How many requests' KV is on its way.
    pub(crate) fn flights(&self) -> u64 {
        self.flights.len() as u64
    }

    /// The requests whose KV is on its way.
    pub(crate) fn requests(&self) -> impl Iterator<Item = RequestId> {
        self.flights.iter().map(|flight| flight.request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const A: RequestId = RequestId(1);
    const B: RequestId = RequestId(2);

    #[test]
    fn flights_follow_each_other_and_an_idle_link_is_free() {
        let mut link = LinkLedger::default();
        link.begin(1_000, A, 500, false);
        link.begin(1_100, B, 300, false);
        assert_eq!((link.free_at_us(), link.left_us(1_200)), (1_800, 600));
        link.end(1_300, A);
        assert_eq!(link.left_us(1_300), 300, "no longer than the other alone");
        link.end(1_400, B);
        assert_eq!((link.free_at_us(), link.left_us(1_400)), (1_400, 0), "nothing is on its way");
        assert_eq!(link, LinkLedger { free_at_us: 1_400, ..LinkLedger::default() });
    }

    #[test]
    fn a_link_behind_its_rate_is_not_free_when_it_should_be() {
        let mut link = LinkLedger::default();
        link.begin(0, A, 500, false);
        link.begin(4_800, B, 300, true);
        assert_eq!(link.left_us(4_800), 300, "by its rate");
        assert_eq!(link.left_us(5_000), 150, "half of what is ready");
        link.make_ready(5_000, A);
        link.make_ready(5_400, A);
        assert_eq!(link.left_us(5_100), 400);
        assert_eq!(link.left_us(5_600), 250, "it is not the link that holds the second up");
        link.end(5_600, B);
        assert_eq!((link.left_us(5_499), link.left_us(5_500)), (250, 0));
    }

    proptest! {
        #[test]
        fn what_is_left_is_at_most_all_that_is_on_its_way(
            steps in proptest::collection::vec((0u64..6, 0u8..4, 1u64..1_000), 1..60),
        ) {
            let (mut link, mut naive) = (LinkLedger::default(), alloc::collections::BTreeMap::new());
            for (now_us, (request, what, takes_us)) in (0..).zip(steps) {
                let id = RequestId(request);
                let mut ended = false;
                match what {
                    0 | 1 if !naive.contains_key(&request) => {
                        link.begin(now_us, id, takes_us, what == 1);
                        naive.insert(request, (takes_us, what == 1));
                    }
                    2 => {
                        link.make_ready(now_us, id);
                        naive.entry(request).and_modify(|(_, ready)| *ready = true);
                    }
                    _ => {
                        ended = naive.remove(&request).is_some();
                        if ended {
                            link.end(now_us, id);
                        }
                    }
                }
                let ready_us: u64 = naive.values().filter(|(_, ready)| *ready).map(|(us, _)| us).sum();
                let by_rate_us = link.free_at_us().saturating_sub(now_us);
                prop_assert!(link.left_us(now_us) <= by_rate_us.max(ready_us / 2));
                prop_assert!(link.left_us(now_us) >= by_rate_us);
                let all_us: u64 = naive.values().map(|(us, _)| us).sum();
                prop_assert!(!ended || by_rate_us <= all_us);
                prop_assert_eq!(link.flights(), naive.len() as u64);
            }
        }
    }
}
