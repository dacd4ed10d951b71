//! One direction of an instance's network link: the KV on its way over it, how long it keeps the link busy, and the rate
//! that it was seen to have.

use alloc::vec::Vec;
use baton_types::RequestId;
use serde::{Deserialize, Serialize};

use super::{as_f64, whole_us};

/// KV that was sent and has not landed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct LinkFlight {
    request: RequestId,
    /// Time for which it keeps the link to itself at the stated rate, µs.
    stated_us: u64,
    /// When it began.
    began: LinkClock,
    /// When all of it was there to be sent.
    ready: Option<LinkClock>,
}

/// A moment, and the time of a link that a flight has had by then if it was there from the start, µs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct LinkClock {
    at_us: u64,
    /// As one of all flights.
    least_us: f64,
    /// As one of those whose KV is ready.
    most_us: f64,
}

/// The flights of one direction, and how slow it is.
///
/// Flights share a link evenly, so what a flight has had of it is the time over the number of flights, summed up. Nobody
/// sees when bytes leave: while it is computed a flight has less to send. But from when all of it was there it had at least
/// the share of one among all, and from its beginning it had at most the share of one among those that were ready. The time
/// that it needed is between the two, and the learnt rate moves no further than to the nearer of them. So it stays where
/// nothing was seen, as on a link that is faster than the engines. A link waits where the other end of a flight is busy;
/// that counts as its own slowness, so both ends learn the rate at which KV really comes through.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LinkLedger {
    flights: Vec<LinkFlight>,
    /// When all that was sent has passed if the link never idles, µs.
    free_at_us: u64,
    /// Time that KV takes over the time at the stated rate, as learnt.
    slowness: f64,
    /// What it was learnt from.
    landings: u32,
    /// The least time from when all KV is there until it has landed that was seen lately, µs: messages and checks,
    /// which take their time at any rate.
    latency_us: Option<f64>,
    clock: LinkClock,
}

/// Part of the way to what was seen that the logarithm of the slowness goes at a landing at least; the first ones teach
/// more, as in a mean. In logarithms a flight that was held up weighs no more than one that was not.
const GAIN: f64 = 0.1;
/// Most that one landing counts for, as a factor either way: a few flights are held up by something else than the link,
/// such as room.
const OUTLIER: f64 = 2.0;
/// Part of the way to a longer landing that the latency goes: it follows one that grew for good.
const LATENCY_GAIN: f64 = 0.01;
/// Most that counts as latency, µs: no message or check takes longer, and the KV of a short prompt may.
const MOST_LATENCY_US: f64 = 20_000.0;
/// Furthest that the learnt rate is from the stated one, as a factor either way.
const FURTHEST: f64 = 1000.0;

impl Default for LinkLedger {
    fn default() -> Self {
        Self {
            flights: Vec::new(),
            free_at_us: 0,
            slowness: 1.0,
            landings: 0,
            latency_us: None,
            clock: LinkClock::default(),
        }
    }
}

impl LinkLedger {
    /// A request's KV is sent from now on: at once what is ready, the rest as it is computed. `stated_us` is its time at
    /// the stated rate.
    pub(crate) fn begin(&mut self, now_us: u64, request: RequestId, stated_us: u64, ready: bool) {
        debug_assert!(
            self.flights.iter().all(|flight| flight.request != request),
            "the KV of request {request} is sent twice over one link"
        );
        self.go_on(now_us);
        let clock = self.clock;
        self.flights.push(LinkFlight { request, stated_us, began: clock, ready: ready.then_some(clock) });
        self.plan();
    }

    /// All of a request's KV is computed.
    pub(crate) fn make_ready(&mut self, now_us: u64, request: RequestId) {
        self.go_on(now_us);
        if let Some(flight) = self.flights.iter_mut().find(|flight| flight.request == request) {
            flight.ready.get_or_insert(self.clock);
        }
    }

    /// A request's KV has landed, or never will.
    pub(crate) fn end(&mut self, now_us: u64, request: RequestId, landed: bool) {
        self.go_on(now_us);
        let at = self.flights.iter().position(|flight| flight.request == request);
        let flight = self.flights.remove(at.expect("what lands was sent"));
        if landed {
            self.learn(&flight);
        }
        self.plan();
    }

    /// Sums up the shares of the flights until now.
    fn go_on(&mut self, now_us: u64) {
        let past_us = as_f64(now_us.saturating_sub(self.clock.at_us));
        let ready = self.flights.iter().filter(|flight| flight.ready.is_some()).count() as u64;
        self.clock.at_us = now_us;
        self.clock.least_us += past_us / as_f64(self.flights().max(1));
        self.clock.most_us += past_us / as_f64(ready.max(1));
    }

    /// Learns from a flight that has landed.
    fn learn(&mut self, flight: &LinkFlight) {
        let Some(ready) = flight.ready else { return };
        let landing_us = as_f64(self.clock.at_us.saturating_sub(ready.at_us));
        let before_us = *self.latency_us.get_or_insert(landing_us);
        let latency_us = landing_us.min(before_us + LATENCY_GAIN * (landing_us - before_us));
        self.latency_us = Some(latency_us);
        if flight.stated_us == 0 || landing_us == 0.0 {
            return;
        }
        let of_stated = |us: f64| us / as_f64(flight.stated_us);
        let sending = (landing_us - latency_us.min(MOST_LATENCY_US)) / landing_us;
        let least = of_stated(self.clock.least_us - ready.least_us) * sending;
        let most = of_stated(self.clock.most_us - flight.began.most_us).max(least);
        let seen = self.slowness.clamp(least, most);
        let seen = seen.clamp(self.slowness / OUTLIER, self.slowness * OUTLIER);
        self.landings = self.landings.saturating_add(1);
        self.slowness *= libm::pow(seen / self.slowness, GAIN.max(1.0 / f64::from(self.landings)));
        self.slowness = self.slowness.clamp(1.0 / FURTHEST, FURTHEST);
    }

    /// Sets what was learnt of the rate, and returns what was learnt before.
    pub(crate) const fn replace_slowness(&mut self, slowness: f64) -> f64 {
        core::mem::replace(&mut self.slowness, slowness)
    }

    /// From now on the next landing counts like the first.
    pub(crate) const fn doubt(&mut self) {
        self.landings = 0;
    }

    /// When all will have passed, by what each flight has had of the link.
    fn plan(&mut self) {
        let left_us = |flight: &LinkFlight| {
            let had_us = whole_us(self.clock.least_us - flight.began.least_us);
            self.learnt_us(flight.stated_us).saturating_sub(had_us)
        };
        let left = self.flights.iter().map(left_us);
        self.free_at_us = left.fold(self.clock.at_us, u64::saturating_add);
    }

    /// Time at the learnt rate for what takes `stated_us` at the stated one, µs.
    pub(crate) fn learnt_us(&self, stated_us: u64) -> u64 {
        whole_us(as_f64(stated_us) * self.slowness)
    }

    /// The learnt rate of a link whose stated rate is this, bytes/s.
    pub(crate) fn bytes_per_s(&self, stated: u64) -> u64 {
        whole_us(as_f64(stated) / self.slowness)
    }

    /// When all that was sent has passed if the link never idles, µs.
    pub(crate) const fn free_at_us(&self) -> u64 {
        self.free_at_us
    }

    /// Time until all that was sent has passed, µs.
    pub(crate) const fn left_us(&self, now_us: u64) -> u64 {
        self.free_at_us.saturating_sub(now_us)
    }

    /// How many requests' KV is on its way.
    pub(crate) fn flights(&self) -> u64 {
        self.flights.len() as u64
    }

    /// The requests whose KV is on its way.
    pub(crate) fn requests(&self) -> impl Iterator<Item = RequestId> {
        self.flights.iter().map(|flight| flight.request)
    }

    /// Whether what it has learnt can have been learnt: a saved ledger may hold any numbers.
    pub(crate) fn is_sound(&self) -> bool {
        (1.0 / FURTHEST..=FURTHEST).contains(&self.slowness)
            && self.latency_us.is_none_or(|us| us >= 0.0)
            && self.clock.least_us >= 0.0
            && self.clock.most_us >= self.clock.least_us
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
        link.end(1_300, A, true);
        assert_eq!(link.left_us(1_300), 200, "the other has had half of 200");
        link.end(1_400, B, true);
        assert_eq!((link.free_at_us(), link.left_us(1_400)), (1_400, 0), "nothing is on its way");
        assert_eq!((link.flights(), link.learnt_us(1_000)), (0, 1_000), "neither took longer than its share");
    }

    #[test]
    fn what_a_flight_has_had_of_its_link_is_not_left() {
        let mut link = LinkLedger::default();
        link.begin(0, A, 500, false);
        link.begin(200, B, 300, true);
        assert_eq!((link.free_at_us(), link.left_us(300)), (800, 500), "300 of the first, and 300");
        link.begin(400, RequestId(3), 100, true);
        assert_eq!(link.left_us(400), 200 + 200 + 100, "two shared 200");
        // The first has had all of its time, and is held up: the others are left.
        link.make_ready(900, A);
        link.end(1_000, B, true);
        assert!(link.left_us(1_000) <= 1, "each has had its time");
        link.begin(1_000, B, 300, true);
        assert!((300..=301).contains(&link.left_us(1_000)));
    }

    /// A flight of a test: when it begins, how long its KV is computed, and its time at the stated rate, µs.
    type TestFlight = (u64, u64, u64);

    /// Flies them over a link that all flights share evenly, and that takes `slowness` times as long as stated. Returns
    /// what was learnt.
    fn learnt(slowness: f64, flown: &[TestFlight]) -> f64 {
        const STEP_US: u64 = 200;
        let (mut link, mut on_the_way) = (LinkLedger::default(), Vec::<(RequestId, TestFlight, f64)>::new());
        let mut coming = (0..).map(RequestId).zip(flown.iter().copied()).peekable();
        let mut now_us = 0;
        while coming.peek().is_some() || !on_the_way.is_empty() {
            while let Some((id, flight)) = coming.next_if(|(_, flight)| flight.0 <= now_us) {
                link.begin(now_us, id, flight.2, flight.1 == 0);
                on_the_way.push((id, flight, 0.0));
            }
            // Who has sent all that is computed leaves its share to the others.
            let computed = |now_us: u64, (begun_us, computes_us, takes_us): TestFlight| {
                let part = (now_us - begun_us) as f64 / computes_us.max(1) as f64;
                takes_us as f64 * if computes_us == 0 { 1.0 } else { part.min(1.0) }
            };
            let able =
                on_the_way.iter().filter(|(_, flight, sent)| *sent < computed(now_us, *flight)).count();
            let share_us = STEP_US as f64 / slowness / able.max(1) as f64;
            now_us += STEP_US;
            for (_, flight, sent) in &mut on_the_way {
                *sent = (*sent + share_us).min(computed(now_us, *flight)).max(*sent);
            }
            for (id, (begun_us, computes_us, _), _) in &on_the_way {
                if *computes_us > 0 && now_us >= begun_us + computes_us {
                    link.make_ready(now_us, *id);
                }
            }
            on_the_way.retain(|(id, (_, _, takes_us), sent)| {
                let landed = *sent >= *takes_us as f64;
                if landed {
                    link.make_ready(now_us, *id);
                    link.end(now_us, *id, true);
                }
                !landed
            });
        }
        assert!(link.is_sound(), "{link:?}");
        link.slowness
    }

    #[test]
    fn a_link_that_is_faster_than_the_engine_teaches_nothing_but_that() {
        // KV of 5 ms in passes of 50 ms; what is behind when a pass is over takes a moment.
        let flown: Vec<TestFlight> = (0..200).map(|at| (at * 50_000, 50_000, 5_000)).collect();
        assert!((0.9..1.1).contains(&learnt(1.0, &flown)));
        assert!((0.9..1.1).contains(&learnt(0.2, &flown)), "no flight shows it");
        // It could carry ten times as much.
        assert!(learnt(20.0, &flown) > 10.0, "the engine is faster");
    }

    #[test]
    fn one_landing_moves_the_rate_little_and_a_flight_that_never_lands_not_at_all() {
        let mut link = LinkLedger::default();
        link.begin(0, A, 1_000, true);
        link.end(90_000, A, false);
        assert_eq!(link.learnt_us(1_000), 1_000);
        (0..20).for_each(|at| {
            link.begin(90_000 + at * 1_000, A, 1_000, true);
            link.end(91_000 + at * 1_000, A, true);
        });
        assert_eq!(link.learnt_us(1_000), 1_000);
        link.begin(200_000, A, 1_000, true);
        link.end(290_000, A, true);
        assert_eq!(link.learnt_us(10_000), 10_717, "a tenth of the way to twice the time");
        assert_eq!(link.bytes_per_s(10_718), 10_000);
        link.doubt();
        link.begin(300_000, A, 10_000, true);
        link.end(310_000, A, true);
        assert_eq!(
            link.learnt_us(10_000),
            10_000,
            "where it is in doubt, one landing counts as if it were the first"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn the_rate_of_a_busy_link_is_learnt(
            slowness in 0.2f64..8.0,
            sizes in proptest::collection::vec((2_000u64..20_000, 0u64..4, 1u64..3), 100..150),
        ) {
            // So much comes that the link is always busy, with a few flights at a time.
            let mut begin_us = 0;
            let flown: Vec<TestFlight> = sizes
                .into_iter()
                .map(|(takes_us, computes, load)| {
                    let at_us = begin_us;
                    begin_us += (takes_us as f64 * slowness) as u64 * load / 2;
                    (at_us, (takes_us as f64 * slowness) as u64 * computes / 4, takes_us)
                })
                .collect();
            let ratio = learnt(slowness, &flown) / slowness;
            prop_assert!((0.6..1.5).contains(&ratio), "{ratio} of {slowness}");
        }
    }

    proptest! {
        #[test]
        fn what_is_left_is_at_most_all_that_is_on_its_way_and_passes_with_time(
            steps in proptest::collection::vec((0u64..6, 0u8..4, 1u64..1_000, 0u64..300), 1..60),
        ) {
            let (mut link, mut naive) = (LinkLedger::default(), alloc::collections::BTreeMap::new());
            let mut now_us = 0;
            for (request, what, takes_us, later_us) in steps {
                let (id, before_us) = (RequestId(request), link.left_us(now_us));
                now_us += later_us;
                prop_assert_eq!(link.left_us(now_us), before_us.saturating_sub(later_us));
                match what {
                    0 | 1 if !naive.contains_key(&request) => {
                        naive.insert(request, takes_us);
                        link.begin(now_us, id, takes_us, what == 1);
                    }
                    2 => link.make_ready(now_us, id),
                    _ => {
                        if naive.remove(&request).is_some() {
                            link.end(now_us, id, true);
                        }
                    }
                }
                let all_us: u64 = naive.values().map(|us| link.learnt_us(*us)).sum();
                prop_assert!(what == 2 || link.left_us(now_us) <= all_us);
                prop_assert_eq!(link.flights(), naive.len() as u64);
                prop_assert!(link.is_sound());
            }
        }
    }
}
