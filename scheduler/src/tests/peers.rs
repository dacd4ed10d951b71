//! Several routers: requests of other routers count in the loads, get no orders, and vanish when they end.

use alloc::boxed::Box;
use alloc::vec::Vec;
use baton_types::{Epoch, InstanceId, RequestId, Role, SloClass};
use proptest::prelude::*;

use crate::placement::TURN_US;
use crate::testing::{
    assert_idle, burden, conductor, finished, foretold, offer, peer_sent, plain, rejection, request, started,
    starts, step,
};
use crate::{AdmissionMode, Conductor, Effect, Input, PolicyName, SchedulerConfig};

const PEER: RequestId = RequestId(900);

fn pool() -> Conductor {
    conductor(plain(PolicyName::Baton, AdmissionMode::Slo), 2, 2)
}

#[test]
fn work_placed_by_others_repels_ours_on_both_sides() {
    let mut conductor = pool();
    burden(&mut conductor, foretold(900, 40_000, 5_000), (0, 2), 2_000_000);
    // Three seconds of prefill: by its end the peer's decode has begun.
    let start = started(&offer(&mut conductor, 0, request(1, 30_000, 0)));
    assert_eq!((start.prefill, start.decode), (1, 3));
}

#[test]
fn others_can_be_what_makes_us_refuse() {
    let mut conductor = pool();
    for id in 0..2 {
        burden(&mut conductor, request(900 + u64::from(id), 1, 0), (id, 2), 50_000_000);
    }
    assert!(rejection(&offer(&mut conductor, 0, request(1, 1000, 0))).is_some());
}

#[test]
fn a_peer_request_passes_all_its_stops_without_an_order_and_leaves_nothing() {
    let mut conductor = pool();
    burden(&mut conductor, request(900, 2_000, 0), (0, 2), 200_000);
    assert_eq!(conductor.snapshot().requests, 1);
    let stops = [
        finished(900),
        Input::HandoffFinished { request: PEER },
        Input::DecodeFinished { request: PEER, output_tokens: 9, first_us: 0, tbt_us: 0 },
    ];
    for stop in stops {
        assert_eq!(step(&mut conductor, 200_000, stop), []);
    }
    assert_idle(&conductor.snapshot());
    let stats = conductor.stats();
    assert_eq!((stats.arrived, stats.admitted, stats.finished), (0, 0, 0), "it is not ours to count");
}

#[test]
fn no_trouble_of_a_peer_request_makes_us_act() {
    let epoch = Epoch(1);
    let troubles = [
        Input::RequestCancelled { request: PEER },
        Input::HandoffFailed { request: PEER },
        Input::InstanceLost { instance: InstanceId(0), epoch },
        Input::InstanceLost { instance: InstanceId(2), epoch },
        Input::DecodeFinished { request: PEER, output_tokens: 1, first_us: 0, tbt_us: 0 },
    ];
    for input in troubles {
        for handed_off in [false, true] {
            let mut conductor = pool();
            burden(&mut conductor, request(900, 2_000, 0), (0, 2), 200_000);
            if handed_off {
                step(&mut conductor, 200_000, finished(900));
            }
            let effects = step(&mut conductor, 210_000, input.clone());
            assert_eq!(effects, [], "{input:?}, handed off: {handed_off}");
            let known = conductor.knows(PEER);
            let stats = conductor.stats();
            assert_eq!((stats.failed, stats.retried, stats.cancelled), (0, 0, 0), "{input:?}");
            // The prefill instance may die once the KV has moved; any other loss ends the request here.
            assert!(!known || handed_off, "{input:?}");
        }
    }
}

#[test]
fn what_cannot_be_placed_here_is_stale() {
    let mut conductor = pool();
    step(&mut conductor, 0, Input::InstanceLost { instance: InstanceId(1), epoch: Epoch(1) });
    let ours = started(&offer(&mut conductor, 0, request(1, 100, 0)));
    assert_eq!(ours.prefill, 0);
    for (id, prefill, decode) in [(901, 1, 2), (902, 0, 77), (903, 4_000_000, 2), (1, 0, 2)] {
        let placed = peer_sent(request(id, 100, 0), (InstanceId(prefill), InstanceId(decode)), 5);
        assert!(step(&mut conductor, 0, Input::PeerPlaced(Box::new(placed))).is_empty());
    }
    assert_eq!(conductor.stats().stale_inputs, 4);
    assert_eq!(conductor.snapshot().requests, 1);
}

#[test]
fn peers_cannot_outgrow_the_bound() {
    let config = SchedulerConfig { max_waiting_requests: 5, ..plain(PolicyName::Baton, AdmissionMode::Slo) };
    let mut conductor = conductor(config, 1, 1);
    for id in 0..20 {
        burden(&mut conductor, request(900 + id, 10, 0), (0, 1), 1);
    }
    assert_eq!(conductor.snapshot().requests, 5);
}

/// Baton among routers.
fn among(router: u32, prefills: u32) -> Conductor {
    let mut conductor = conductor(plain(PolicyName::Baton, AdmissionMode::Slo), prefills, 1);
    conductor.share_as(router);
    conductor
}

/// What the effects give to the other routers.
fn shared(effects: &[Effect]) -> Vec<Input> {
    effects
        .iter()
        .filter_map(|e| if let Effect::Share(input) = e { Some((**input).clone()) } else { None })
        .collect()
}

/// Takes in what another router said; returns the effects.
fn hear(conductor: &mut Conductor, now_us: u64, said: &[Input]) -> Vec<Effect> {
    said.iter().flat_map(|input| step(conductor, now_us, input.clone())).collect()
}

fn loads(conductor: &Conductor) -> Vec<(u32, u32, u64, u64)> {
    let load = |i: &crate::InstanceLoad| (i.waiting, i.dispatched, i.backlog_us, i.reserved_tokens);
    conductor.snapshot().instances.iter().map(load).collect()
}

#[test]
fn what_waits_with_one_router_waits_with_the_other() {
    let (mut one, mut other) = (among(0, 1), among(1, 1));
    let mut said = Vec::new();
    for id in 1..4 {
        said.extend(shared(&offer(&mut one, 0, request(id, 20_000, 2))));
    }
    let effects = hear(&mut other, 0, &said);
    assert!(starts(&effects).is_empty() && shared(&effects).is_empty(), "{effects:?}");
    let (known, heard) = (loads(&one), loads(&other));
    assert_eq!((known[0].0, heard[0].0), (2, 2), "one was sent, two wait");
    assert_eq!(known, heard);
    for input in [finished(1), Input::RequestCancelled { request: RequestId(2) }] {
        let said = shared(&step(&mut one, 20_000, input));
        hear(&mut other, 20_000, &said);
        assert_eq!(loads(&one), loads(&other));
    }
}

#[test]
fn the_next_in_a_queue_is_its_routers_to_send_for_a_while() {
    let (mut one, mut other) = (among(0, 1), among(1, 1));
    let sent = offer(&mut one, 0, request(1, 60_000, 0));
    hear(&mut other, 0, &shared(&sent));
    let short = shared(&offer(&mut one, 0, request(2, 2_000, 0)));
    hear(&mut other, 0, &short);
    assert!(starts(&offer(&mut other, 0, request(3, 4_000, 0))).is_empty(), "the engine has enough");
    hear(&mut other, 1_000_000, &[finished(1)]);
    assert!(
        starts(&step(&mut other, 1_000_000 + TURN_US - 1, Input::TimerFired)).is_empty(),
        "it is the other's turn"
    );
    let passed_over = starts(&step(&mut other, 1_000_000 + TURN_US, Input::TimerFired));
    assert_eq!(passed_over.iter().map(|start| start.request).collect::<Vec<_>>(), [3]);
}

#[test]
fn of_two_that_take_the_same_place_the_later_one_yields() {
    // Each takes 4 s behind 21.5 s, of 30.
    let long = |id| request(id, 40_000, 0);
    let (mut one, mut other) = (among(0, 1), among(1, 1));
    burden(&mut one, request(900, 1, 0), (0, 1), 21_500_000);
    burden(&mut other, request(900, 1, 0), (0, 1), 21_500_000);
    let first = shared(&offer(&mut one, 0, long(1)));
    let second = shared(&offer(&mut other, 0, long(2)));
    assert!(
        hear(&mut one, 10_000, &second).iter().all(|e| !matches!(e, Effect::Reject(_))),
        "the first stays"
    );
    let yields = hear(&mut other, 10_000, &first);
    assert_eq!(rejection(&yields).map(|r| (r.request.0, r.reason)), Some((2, crate::RejectReason::Costly)));
    hear(&mut one, 20_000, &shared(&yields));
    assert_eq!(loads(&one)[0].0, 1);
    assert_eq!(loads(&other)[0].0, 1);
}

#[test]
fn a_higher_band_takes_the_place_of_what_waits_with_another_router() {
    let bands = |router| {
        let urgent = SloClass { name: "urgent".into(), priority: 1, ..SloClass::default() };
        let classes = Vec::from([SloClass::default(), urgent]);
        let config = SchedulerConfig { classes, ..plain(PolicyName::Baton, AdmissionMode::Slo) };
        let mut conductor = conductor(config, 1, 1);
        conductor.share_as(router);
        burden(&mut conductor, request(900, 1, 0), (0, 1), 21_500_000);
        conductor
    };
    let (mut one, mut other) = (bands(0), bands(1));
    let low = shared(&offer(&mut one, 0, request(1, 40_000, 0)));
    hear(&mut other, 10_000, &low);
    let urgent = crate::Request { class: baton_types::ClassId(1), ..request(2, 40_000, 0) };
    let said = shared(&offer(&mut other, 500_000, urgent));
    assert!(said.contains(&Input::PeerDisplaced { request: RequestId(1) }), "{said:?}");
    let effects = hear(&mut one, 510_000, &said);
    assert_eq!(rejection(&effects).map(|r| r.request.0), Some(1));
    assert_eq!(
        step(&mut one, 510_000, Input::PeerDisplaced { request: RequestId(1) }),
        [],
        "it is gone already"
    );
    assert_eq!(one.stats().stale_inputs, 1);
}

#[test]
fn a_refused_client_may_return_to_another_router() {
    let (mut one, mut other) = (among(0, 1), among(1, 1));
    for conductor in [&mut one, &mut other] {
        burden(conductor, request(900, 1, 0), (0, 1), 40_000_000);
    }
    let refused = offer(&mut one, 0, request(1, 1_000, 0));
    let after_us = rejection(&refused).expect("40 s of work").retry_after_us;
    hear(&mut other, 0, &shared(&refused));
    let back = offer(&mut other, after_us, request(1, 1_000, 0));
    assert_eq!((rejection(&back), other.stats().tickets_used), (None, 1));
    let taken = shared(&back);
    assert!(taken.iter().any(|said| matches!(said, Input::PeerTicketTaken { .. })), "{taken:?}");
    hear(&mut one, after_us, &taken);
    assert_eq!(one.stats().stale_inputs, 0);
}

#[test]
fn what_routers_say_is_plain_data_that_comes_back_as_it_was() {
    let mut conductor = among(3, 2);
    let mut said = shared(&offer(&mut conductor, 0, request(1, 30_000, 3)));
    said.extend(shared(&step(&mut conductor, 9_000, finished(1))));
    assert!(
        said.iter().any(|input| matches!(input, Input::PeerPlaced(placed) if placed.router == 3)),
        "{said:?}"
    );
    for input in said {
        let json = serde_json::to_value(&input).expect("plain data");
        assert_eq!(serde_json::from_value::<Input>(json.clone()).expect("as it was written"), input);
        if let Input::PeerPlaced(placed) = input {
            let mut odd = serde_json::to_value(placed).expect("plain data");
            odd["mood"] = "good".into();
            assert!(
                serde_json::from_value::<crate::PeerPlacement>(odd).is_err(),
                "a field of another version"
            );
        }
    }
}

#[test]
fn what_is_said_in_another_version_is_not_heard() {
    let mut conductor = pool();
    let said = peer_sent(request(900, 100, 0), (InstanceId(0), InstanceId(2)), 5);
    let newer = crate::PeerPlacement { version: crate::PEER_VERSION + 1, ..said };
    assert_eq!(step(&mut conductor, 0, Input::PeerPlaced(Box::new(newer))), []);
    assert_eq!((conductor.snapshot().requests, conductor.stats().stale_inputs), (0, 1));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    /// Two routers that share all inputs decide as one that sees everything.
    #[test]
    fn two_routers_that_tell_each_other_everything_decide_as_one(
        arrivals in proptest::collection::vec((1u64..3_000, any::<bool>()), 1..30),
    ) {
        let class = SloClass { ttft_us: 86_400_000_000, ..SloClass::default() };
        let config = SchedulerConfig { classes: Vec::from([class]), ..plain(PolicyName::Mooncake, AdmissionMode::None) };
        let mut alone = conductor(config.clone(), 3, 2);
        let mut routers = [conductor(config.clone(), 3, 2), conductor(config, 3, 2)];
        for (id, (tokens, left)) in (0u64..).zip(&arrivals) {
            let asked = started(&offer(&mut alone, 0, foretold(id, *tokens, 50)));
            let at = usize::from(*left);
            let chosen = started(&offer(&mut routers[at], 0, foretold(id, *tokens, 50)));
            prop_assert_eq!((asked.prefill, asked.decode), (chosen.prefill, chosen.decode));
            let work_us = crate::testing::naive_prefill_us(*tokens) + 1;
            burden(&mut routers[1 - at], foretold(id, *tokens, 50), (chosen.prefill, chosen.decode), work_us);
        }
        prop_assert_eq!(loads(&alone), loads(&routers[0]));
        prop_assert_eq!(loads(&alone), loads(&routers[1]));
    }

    /// No report about a peer's request causes an order.
    #[test]
    fn nothing_said_of_peers_gives_an_order(what in proptest::collection::vec((0u8..7, 0u64..4), 1..40)) {
        let mut conductor = pool();
        for (kind, id) in what {
            let request = RequestId(900 + id);
            let effects: Vec<Effect> = step(&mut conductor, 0, match kind {
                0 => {
                    let prefill = InstanceId(u32::try_from(id % 2).expect("small"));
                    let request = crate::testing::request(900 + id, 500, 0);
                    Input::PeerPlaced(Box::new(peer_sent(request, (prefill, InstanceId(2)), 1_000)))
                }
                1 => finished(900 + id),
                2 => Input::HandoffFinished { request },
                3 => Input::HandoffFailed { request },
                4 => Input::DecodeFinished { request, output_tokens: 3, first_us: 0, tbt_us: 0 },
                5 => Input::RequestCancelled { request },
                _ => Input::FetchFinished { request, ok: true },
            });
            prop_assert_eq!(effects, []);
        }
        for id in 0..4 {
            step(&mut conductor, 0, Input::RequestCancelled { request: RequestId(900 + id) });
        }
        assert_idle(&conductor.snapshot());
    }
}

#[test]
fn a_peer_that_does_both_legs_on_one_instance_counts_once_on_it() {
    let roles = [crate::testing::spec(0, Role::Both), crate::testing::spec(1, Role::Both)];
    let mut conductor =
        crate::testing::conductor_of(plain(PolicyName::LeastLoaded, AdmissionMode::None), &roles);
    burden(&mut conductor, request(900, 2_000, 0), (0, 0), 200_000);
    let load = conductor.snapshot().instances[0];
    assert_eq!((load.dispatched, load.decodes), (1, 1));
    assert_eq!(started(&offer(&mut conductor, 0, request(1, 100, 0))).prefill, 1);
}

/// Routers whose words to each other are on the way until they are delivered.
struct RouterGroup {
    conductors: Vec<Conductor>,
    /// To each router, in the order in which they were said.
    under_way: Vec<Vec<Input>>,
    now_us: u64,
    /// Live requests of each router, with those of them that compute their prompts.
    live: Vec<Vec<(u64, bool)>>,
}

impl RouterGroup {
    fn new(count: u32) -> Self {
        let conductors: Vec<Conductor> = (0..count).map(|router| among(router, 2)).collect();
        let live = conductors.iter().map(|_| Vec::new()).collect();
        let under_way = conductors.iter().map(|_| Vec::new()).collect();
        Self { conductors, under_way, now_us: 0, live }
    }

    /// One router takes an input; what it says is on its way to the others.
    fn feed(&mut self, at: usize, input: Input) {
        let effects = step(&mut self.conductors[at], self.now_us, input);
        for start in starts(&effects) {
            let own = self.live[at].iter_mut().find(|(id, _)| *id == start.request);
            let own = own.expect("a router sends its own requests only");
            assert!(!own.1, "request {} is sent twice", own.0);
            own.1 = true;
        }
        let over = |id: u64| effects.iter().any(|e| matches!(e, Effect::Reject(r) if r.request.0 == id));
        self.live[at].retain(|(id, _)| !over(*id));
        for to in (0..self.conductors.len()).filter(|to| *to != at) {
            self.under_way[to].extend(shared(&effects));
        }
    }

    fn offer(&mut self, at: usize, id: u64, tokens: u64) {
        self.live[at].push((id, false));
        self.feed(at, Input::RequestArrived(foretold(id, tokens, 20)));
    }

    /// The prefill of one of a router's requests ends, or its client leaves.
    fn end(&mut self, at: usize, nth: u64) {
        let count = self.live[at].len() as u64;
        if count == 0 {
            return;
        }
        let (id, sent) = self.live[at].remove(usize::try_from(nth % count).expect("small"));
        let request = RequestId(id);
        if sent && nth.is_multiple_of(2) {
            for input in [finished(id), Input::HandoffFinished { request }] {
                self.feed(at, input);
            }
            self.feed(at, Input::DecodeFinished { request, output_tokens: 20, first_us: 0, tbt_us: 0 });
        } else {
            self.feed(at, Input::RequestCancelled { request });
        }
    }

    /// A router hears the first of what is on its way to it.
    fn deliver(&mut self, at: usize, most: usize) {
        for _ in 0..most.min(self.under_way[at].len()) {
            let input = self.under_way[at].remove(0);
            self.feed(at, input);
        }
    }

    /// Everything is heard, and what is said for that as well.
    fn settle(&mut self) {
        for _ in 0..200 {
            (0..self.conductors.len()).for_each(|at| self.deliver(at, usize::MAX));
        }
        assert!(self.under_way.iter().all(Vec::is_empty), "they never agree");
    }

    /// Requests that wait, compute and keep room on each instance, as a router counts them.
    fn counts(&self, at: usize) -> Vec<(u32, u32, u32, u64)> {
        let of = |i: &crate::InstanceLoad| (i.waiting, i.dispatched, i.decodes, i.reserved_tokens);
        self.conductors[at].snapshot().instances.iter().map(of).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// However late words come, no request is sent twice, all routers count the same once they have heard everything, and
    /// nothing is left when all have ended.
    #[test]
    fn routers_that_have_heard_everything_count_the_same(
        count in 2u32..4,
        ops in proptest::collection::vec((0u8..6, 0usize..4, 0u64..40_000), 1..60),
    ) {
        let mut routers = RouterGroup::new(count);
        for (id, (kind, at, n)) in (1u64..).zip(ops) {
            let at = at % count as usize;
            routers.now_us += n % 30_000;
            match kind {
                0..=2 => routers.offer(at, id, n + 1),
                3 => routers.end(at, n),
                4 => routers.deliver(at, usize::try_from(n % 4).expect("small")),
                _ => routers.feed(at, Input::TimerFired),
            }
        }
        routers.settle();
        let live: usize = routers.live.iter().map(Vec::len).sum();
        for at in 0..count as usize {
            prop_assert_eq!(routers.counts(at), routers.counts(0), "router {}", at);
            prop_assert_eq!(routers.conductors[at].live_requests(), live);
        }
        for at in 0..count as usize {
            while !routers.live[at].is_empty() {
                routers.end(at, 1);
            }
        }
        routers.settle();
        routers.conductors.iter().for_each(|conductor| assert_idle(&conductor.snapshot()));
    }
}
