//! Several routers: requests of other routers count in the loads, get no orders, and vanish when they end.

use alloc::vec::Vec;
use baton_types::{Epoch, InstanceId, RequestId, Role, SloClass};
use proptest::prelude::*;

use crate::testing::{
    assert_idle, burden, conductor, finished, foretold, offer, plain, rejection, request, started, step,
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
        Input::DecodeFinished { request: PEER, output_tokens: 9 },
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
        Input::DecodeFinished { request: PEER, output_tokens: 1 },
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
        let placed = Input::PeerPlaced {
            request: request(id, 100, 0),
            prefill: InstanceId(prefill),
            decode: InstanceId(decode),
            work_us: 5,
        };
        assert!(step(&mut conductor, 0, placed).is_empty());
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
        let loads = |c: &Conductor| c.snapshot().instances.iter().map(|i| (i.backlog_us, i.reserved_tokens)).collect::<Vec<_>>();
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
                0 => Input::PeerPlaced {
                    request: crate::testing::request(900 + id, 500, 0),
                    prefill: InstanceId(u32::try_from(id % 2).expect("small")),
                    decode: InstanceId(2),
                    work_us: 1_000,
                },
                1 => finished(900 + id),
                2 => Input::HandoffFinished { request },
                3 => Input::HandoffFailed { request },
                4 => Input::DecodeFinished { request, output_tokens: 3 },
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
