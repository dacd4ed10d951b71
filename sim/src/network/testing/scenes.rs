//! Scenes whose outcome can be worked out on paper. Rates are in MB/s, which is bytes per µs.

use super::{Driver, TimedEffect, link, request, start};
use crate::network::{
    Effect, Failure, FlightState, Input, LinkId, NetworkConfig, Priority, ProducerPace, Refusal, TransferId,
    TransferRequest,
};

fn failed(transfer: u64, reason: Failure, delivered_bytes: u64) -> Effect {
    Effect::Failed { transfer: TransferId(transfer), reason, delivered_bytes }
}

fn finished(transfer: u64, bytes: u64, started_us: u64) -> Effect {
    Effect::Finished { transfer: TransferId(transfer), bytes, started_us }
}

fn paced_request(transfer: u64, bytes: u64, until_us: u64, last_bytes: u64) -> TransferRequest {
    let paced = Some(ProducerPace { produced_until_us: until_us, last_bytes });
    TransferRequest { paced, ..request(transfer, &[0], bytes) }
}

fn with_priority(transfer: u64, bytes: u64, priority: Priority) -> Input {
    Input::Start(TransferRequest { priority, ..request(transfer, &[0], bytes) })
}

fn ends_of(effects: &[TimedEffect], transfer: u64) -> Vec<Effect> {
    let named = |effect: &Effect| match effect {
        Effect::Finished { transfer: t, .. } | Effect::Failed { transfer: t, .. } => t.0 == transfer,
    };
    effects.iter().map(|(_, effect)| effect.clone()).filter(named).collect()
}

#[test]
fn one_flight_goes_at_link_rate_and_lands_after_the_latency() {
    let mut driver = Driver::new(NetworkConfig::default(), &[link(1_000_000_000, 7)]);
    driver.at(50, start(1, &[0], 1_000_000));
    assert_eq!(driver.engine.next_deadline(), Some(1_050), "the last byte leaves");
    driver.run(1_050);
    assert_eq!(driver.engine.snapshot().flights[0].state, FlightState::Landing);
    assert_eq!(driver.finishes(), [(1, 1_057)]);
    assert_eq!(driver.effects[0].1, finished(1, 1_000_000, 50));
}

#[test]
fn a_part_of_a_microsecond_counts_whole() {
    let mut driver = Driver::over(&[1_000]);
    driver.at(0, start(1, &[0], 1_000_001));
    assert_eq!(driver.finishes(), [(1, 1_001)]);
}

#[test]
fn the_slowest_link_of_a_path_decides_and_latencies_add() {
    let links = [link(4_000_000_000, 3), link(1_000_000_000, 4), link(2_000_000_000, 5)];
    let mut driver = Driver::new(NetworkConfig::default(), &links);
    driver.at(0, start(1, &[0, 1, 2], 2_000_000));
    assert_eq!(driver.finishes(), [(1, 2_012)]);
}

#[test]
fn two_flights_share_and_the_survivor_speeds_up() {
    let mut driver = Driver::over(&[1_000]);
    driver.at(0, start(1, &[0], 1_000_000));
    driver.at(0, start(2, &[0], 3_000_000));
    assert_eq!((driver.rate_of(1), driver.rate_of(2)), (500_000_000, 500_000_000));
    // The first ends at 2,000 µs; the second has 2 MB left, alone.
    assert_eq!(driver.finishes(), [(1, 2_000), (2, 4_000)]);
}

#[test]
fn a_late_starter_slows_the_first() {
    let mut driver = Driver::over(&[1_000]);
    driver.at(0, start(1, &[0], 1_000_000));
    driver.at(400, start(2, &[0], 300_000));
    // 600 kB and 300 kB left at 400 µs: the second ends at 1,000 µs, the first at 1,300 µs.
    assert_eq!(driver.finishes(), [(1, 1_300), (2, 1_000)]);
}

#[test]
fn equal_ends_are_told_in_order_of_name() {
    let mut driver = Driver::over(&[1_000]);
    for transfer in [9, 3, 7] {
        driver.at(0, start(transfer, &[0], 100_000));
    }
    driver.run(u64::MAX);
    let names: Vec<Effect> = driver.effects.into_iter().map(|(_, effect)| effect).collect();
    assert_eq!(names, [3, 7, 9].map(|t| finished(t, 100_000, 0)));
}

#[test]
fn congestion_stays_where_it_is() {
    let mut driver = Driver::over(&[1_000, 1_000, 1_000]);
    for transfer in 0..4 {
        driver.at(0, start(transfer, &[0, 1], 1_000_000));
    }
    driver.at(0, start(9, &[2], 1_000_000));
    assert_eq!(driver.rate_of(0), 250_000_000);
    assert_eq!(driver.rate_of(9), 1_000_000_000);
}

#[test]
fn what_another_link_leaves_unused_is_not_divided_again() {
    // Flight 1 gets 100 on link 1 and so leaves 400 of its half of link 0; flight 2 keeps its half.
    let mut driver = Driver::over(&[1_000, 100]);
    driver.at(0, start(1, &[0, 1], 1_000_000));
    driver.at(0, start(2, &[0], 1_000_000));
    assert_eq!((driver.rate_of(1), driver.rate_of(2)), (100_000_000, 500_000_000));
}

#[test]
fn ample_bandwidth_leaves_only_the_last_layer_exposed() {
    let mut driver = Driver::over(&[1_000]);
    driver.at(0, Input::Start(paced_request(1, 800_000, 10_000, 50_000)));
    assert_eq!(driver.rate_of(1), 75_000_000, "750 kB over 10 ms");
    assert_eq!(driver.finishes(), [(1, 10_050)]);
}

#[test]
fn scarce_bandwidth_makes_a_paced_flight_an_ordinary_one() {
    let mut driver = Driver::over(&[100]);
    driver.at(0, Input::Start(paced_request(1, 2_000_000, 10_000, 50_000)));
    assert_eq!(driver.finishes(), [(1, 20_000)]);
}

#[test]
fn what_a_paced_flight_does_not_use_goes_to_others() {
    let mut driver = Driver::over(&[1_000]);
    driver.at(0, Input::Start(paced_request(1, 1_000_000, 10_000, 0)));
    driver.at(0, start(2, &[0], 9_000_000));
    assert_eq!((driver.rate_of(1), driver.rate_of(2)), (100_000_000, 900_000_000));
    assert_eq!(driver.finishes(), [(1, 10_000), (2, 10_000)]);
}

#[test]
fn a_paced_flight_that_lagged_catches_up_with_its_producer() {
    // Two producers' worth of demand on one link: 600 + 600 of 1,000 until flight 2 is cancelled.
    let mut driver = Driver::over(&[1_000]);
    driver.at(0, Input::Start(paced_request(1, 6_000_000, 10_000, 0)));
    driver.at(0, Input::Start(paced_request(2, 6_000_000, 10_000, 0)));
    assert_eq!(driver.rate_of(1), 500_000_000);
    driver.at(2_000, Input::Cancel { transfer: TransferId(2) });
    // 200 kB behind at 1,000 against 600: level after 500 µs.
    assert_eq!(driver.engine.snapshot().flights[0].state, FlightState::CatchingUp);
    assert_eq!(driver.rate_of(1), 1_000_000_000);
    assert_eq!(driver.engine.next_deadline(), Some(2_500));
    driver.run(2_500);
    assert_eq!(driver.engine.snapshot().flights[0].state, FlightState::Paced);
    assert_eq!(driver.rate_of(1), 600_000_000);
    assert_eq!(driver.finishes(), [(1, 10_000)]);
}

#[test]
fn a_flight_without_overlap_waits_for_all_its_bytes() {
    let mut driver = Driver::over(&[1_000]);
    driver.at(0, Input::Start(paced_request(1, 500_000, 4_000, u64::MAX)));
    assert_eq!(driver.rate_of(1), 0);
    assert_eq!(driver.finishes(), [(1, 4_500)]);
}

#[test]
fn a_late_prefill_holds_its_flight_back_and_an_early_one_lets_it_go() {
    let repace = |until_us| Input::Repace {
        transfer: TransferId(1),
        paced: ProducerPace { produced_until_us: until_us, last_bytes: 50_000 },
    };
    let mut late = Driver::over(&[1_000]);
    late.at(0, Input::Start(paced_request(1, 800_000, 10_000, 50_000)));
    late.at(5_000, repace(15_000));
    assert_eq!(late.rate_of(1), 37_500_000, "375 kB over 10 ms more");
    assert_eq!(late.finishes(), [(1, 15_050)]);
    let mut early = Driver::over(&[1_000]);
    early.at(0, Input::Start(paced_request(1, 800_000, 10_000, 50_000)));
    early.at(5_000, repace(5_000));
    assert_eq!(early.finishes(), [(1, 5_425)], "425 kB were left");
}

#[test]
fn a_repace_after_the_old_end_holds_what_has_not_left() {
    let mut driver = Driver::over(&[1]);
    driver.at(0, Input::Start(paced_request(1, 30_000, 10_000, 0)));
    driver.at(
        20_000,
        Input::Repace {
            transfer: TransferId(1),
            paced: ProducerPace { produced_until_us: 40_000, last_bytes: 1_000 },
        },
    );
    // 20 kB have left; of the other 10, 9 follow over 20 ms and 1 after them.
    assert_eq!(driver.rate_of(1), 450_000);
    assert_eq!(driver.finishes(), [(1, 41_000)]);
}

#[test]
fn priorities_weigh_and_each_speeds_up_as_the_better_ones_end() {
    let mut driver = Driver::over(&[2_700]);
    for (transfer, priority) in (0..).zip(Priority::ALL) {
        driver.at(0, with_priority(transfer, 1_000_000, priority));
    }
    let rates: Vec<u64> = (0..4).map(|t| driver.rate_of(t)).collect();
    assert_eq!(rates, [1_600_000_000, 800_000_000, 200_000_000, 100_000_000]);
    // 1 MB at 1,600; then 500 kB at 8/11 of 2,700; then 2/3; then all of it.
    assert_eq!(driver.finishes(), [(0, 625), (1, 880), (2, 1_297), (3, 1_482)]);
}

#[test]
fn the_floor_keeps_the_lowest_alive() {
    let config = NetworkConfig { floor_permille: 100, ..NetworkConfig::default() };
    let mut driver = Driver::new(config, &[link(1_000_000_000, 0)]);
    for transfer in 0..50 {
        driver.at(0, start(transfer, &[0], 10_000_000));
    }
    driver.at(0, with_priority(99, 1_000_000, Priority::Offload));
    let rate = driver.rate_of(99);
    assert!((100_000_000..100_001_000).contains(&rate), "{rate}");
    assert!(driver.rate_of(0) >= 17_999_900);
}

#[test]
fn a_rate_cap_binds_and_frees_the_rest() {
    let mut driver = Driver::over(&[1_000]);
    let rate_cap_bytes_per_s = Some(200_000_000);
    let capped = TransferRequest { rate_cap_bytes_per_s, ..request(1, &[0], 1_000_000) };
    driver.at(0, Input::Start(capped));
    driver.at(0, start(2, &[0], 4_000_000));
    assert_eq!(driver.rate_of(2), 800_000_000);
    assert_eq!(driver.finishes(), [(1, 5_000), (2, 5_000)]);
}

#[test]
fn a_cancelled_flight_says_what_had_left_and_frees_its_share() {
    let mut driver = Driver::over(&[1_000]);
    driver.at(0, start(1, &[0], 1_000_000));
    driver.at(0, start(2, &[0], 1_000_000));
    driver.at(1_000, Input::Cancel { transfer: TransferId(1) });
    assert_eq!(driver.effects, [(1_000, failed(1, Failure::Cancelled, 500_000))]);
    assert_eq!(driver.finishes(), [(2, 1_500)]);
    let stats = driver.engine.stats();
    assert_eq!((stats.cancelled, stats.abandoned_bytes, stats.wasted_bytes), (1, 1_000_000, 500_000));
}

#[test]
fn a_lost_link_fails_its_flights_and_refuses_new_ones_until_it_is_back() {
    let mut driver = Driver::over(&[1_200, 1_200]);
    for transfer in [5, 2] {
        driver.at(0, start(transfer, &[0, 1], 1_000_000));
    }
    driver.at(0, start(3, &[1], 1_000_000));
    driver.at(300, Input::LinkDown { link: LinkId(0) });
    driver.at(300, Input::LinkDown { link: LinkId(0) });
    driver.at(301, start(4, &[1, 0], 10));
    let down = Failure::LinkDown(LinkId(0));
    let effects =
        [(300, failed(2, down, 120_000)), (300, failed(5, down, 120_000)), (301, failed(4, down, 0))];
    assert_eq!(driver.effects, effects);
    assert_eq!(driver.engine.stats().ignored_inputs, 1, "it was down already");
    driver.at(400, Input::LinkUp { link: LinkId(0) });
    driver.at(400, start(4, &[0], 1_000));
    assert_eq!(driver.finishes(), [(3, 1_034), (4, 401)]);
    let stats = driver.engine.stats();
    assert_eq!((stats.failed_link_down, stats.refused), (2, 1));
}

#[test]
fn a_flight_in_the_air_is_lost_with_its_link() {
    let mut driver = Driver::new(NetworkConfig::default(), &[link(1_000_000_000, 100)]);
    driver.at(0, start(1, &[0], 1_000));
    driver.at(50, Input::LinkDown { link: LinkId(0) });
    assert_eq!(driver.effects, [(50, failed(1, Failure::LinkDown(LinkId(0)), 1_000))]);
    assert_eq!(driver.engine.next_deadline(), None);
}

#[test]
fn a_deadline_ends_a_flight_unless_it_lands_that_very_moment() {
    let deadline = |transfer, deadline_us| {
        Input::Start(TransferRequest { deadline_us: Some(deadline_us), ..request(transfer, &[0], 1_000_000) })
    };
    let mut driver = Driver::over(&[1_000]);
    driver.at(10, deadline(1, 1_010));
    assert_eq!(driver.finishes(), [(1, 1_010)]);
    driver.at(2_000, deadline(2, 2_999));
    driver.run(u64::MAX);
    driver.at(5_000, deadline(3, 5_000));
    let missed = [(2_999, failed(2, Failure::Deadline, 999_000)), (5_000, failed(3, Failure::Deadline, 0))];
    assert_eq!(driver.effects[1..], missed);
    assert_eq!(driver.engine.stats().failed_deadline, 2);
}

#[test]
fn a_new_rate_counts_from_now_on_and_zero_stalls() {
    let set = |bytes_per_s| Input::SetRate { link: LinkId(0), bytes_per_s };
    let mut driver = Driver::over(&[1_000]);
    driver.at(0, start(1, &[0], 1_000_000));
    driver.at(400, set(0));
    assert_eq!(driver.engine.next_deadline(), None, "stalled");
    driver.at(9_000, set(300_000_000));
    assert_eq!(driver.finishes(), [(1, 11_000)]);
}

#[test]
fn full_means_a_typed_refusal() {
    let config = NetworkConfig { max_flights: 3, max_flights_per_link: 2, ..NetworkConfig::default() };
    let mut driver = Driver::new(config, &[link(1_000_000, 0); 3]);
    driver.at(0, start(1, &[0], 100));
    driver.at(0, start(2, &[0, 1], 100));
    driver.at(0, start(3, &[2, 0], 100));
    driver.at(0, start(4, &[1], 100));
    driver.at(0, start(5, &[2], 100));
    driver.at(0, start(1, &[2], 100));
    driver.at(0, start(6, &[2, 7], 100));
    let refused = |transfer, why| (0, failed(transfer, Failure::Refused(why), 0));
    let effects = [
        refused(3, Refusal::LinkFull(LinkId(0))),
        refused(5, Refusal::TooManyFlights),
        refused(1, Refusal::Duplicate),
        refused(6, Refusal::UnknownLink(LinkId(7))),
    ];
    assert_eq!(driver.effects, effects);
    assert_eq!(driver.engine.link_flights(LinkId(0)), 2);
    assert_eq!(driver.engine.link_flights(LinkId(9)), 0);
    assert_eq!(driver.finishes().len(), 3, "the first of the duplicates goes on");
}

#[test]
fn odd_inputs_are_counted_and_change_nothing() {
    let mut driver = Driver::over(&[1_000]);
    let paced = ProducerPace { produced_until_us: 9, last_bytes: 1 };
    driver.at(5, start(1, &[0], 1_000_000));
    let odd = [
        Input::Cancel { transfer: TransferId(8) },
        Input::Repace { transfer: TransferId(8), paced },
        Input::Repace { transfer: TransferId(1), paced },
        Input::LinkDown { link: LinkId(8) },
        Input::LinkUp { link: LinkId(8) },
        Input::LinkUp { link: LinkId(0) },
        Input::SetRate { link: LinkId(8), bytes_per_s: 1 },
    ];
    for input in odd {
        driver.step(5, input);
    }
    assert_eq!(driver.engine.stats().ignored_inputs, 7);
    driver.step(3, Input::TimerFired);
    assert_eq!(driver.engine.stats().clock_regressions, 1);
    driver.at(6, start(2, &[0], 0));
    assert_eq!(driver.effects, [(6, finished(2, 0, 6))]);
    assert_eq!(driver.engine.stats().zero_byte, 1);
    assert_eq!(driver.finishes(), [(1, 1_005), (2, 6)]);
}

#[test]
fn the_ends_of_the_number_line_are_survived() {
    let mut driver = Driver::new(NetworkConfig::default(), &[link(u64::MAX, u64::MAX), link(1, 0)]);
    driver.at(0, start(1, &[0, 1], u64::MAX));
    driver.at(0, start(2, &[0], 1));
    driver.at(0, Input::Start(paced_request(3, u64::MAX, u64::MAX, u64::MAX)));
    driver.at(0, Input::Start(paced_request(4, u64::MAX, 1, 0)));
    driver.step(u64::MAX, Input::TimerFired);
    driver.step(u64::MAX, Input::Cancel { transfer: TransferId(1) });
    driver.step(u64::MAX, start(5, &[1], 1));
    assert_eq!(ends_of(&driver.effects, 1).len(), 1);
    assert!(driver.engine.stats().live > 0);
}

#[test]
fn what_a_flight_leaves_because_another_link_holds_it_back_stays_free() {
    // Flight 1 has link 0 for itself but only 100 on link 1; it takes 10 ms, not 1.
    let mut driver = Driver::over(&[1_000, 100]);
    driver.at(0, start(1, &[0, 1], 1_000_000));
    driver.at(0, start(2, &[0], 6_000_000));
    assert_eq!(driver.finishes(), [(1, 10_000), (2, 11_000)], "half the link for 10 ms, then all of it");
}

#[test]
fn a_snapshot_is_sorted_and_up_to_date() {
    let mut driver = Driver::over(&[1_000, 500]);
    driver.at(0, start(8, &[0], 1_000_000));
    driver.at(0, start(4, &[0, 1], 1_000_000));
    driver.step(100, Input::TimerFired);
    let snapshot = driver.engine.snapshot();
    let names: Vec<u64> = snapshot.flights.iter().map(|f| f.transfer.0).collect();
    assert_eq!(names, vec![4, 8]);
    assert_eq!(snapshot.flights[0].delivered_bytes, 50_000);
    assert_eq!(snapshot.flights[0].next_event_us, Some(2_000));
    assert_eq!(snapshot.links[0].carried_bytes, 100_000);
    assert_eq!(snapshot.links[0].used_bytes_per_s, 1_000_000_000);
    assert_eq!((snapshot.links[1].flights, snapshot.links[1].up), (1, true));
}

#[test]
fn the_audit_sees_what_is_wrong() {
    let mut driver = Driver::over(&[1_000]);
    driver.at(0, start(1, &[0], 1_000_000));
    let broken = |change: fn(&mut crate::network::Network)| {
        let mut engine = driver.engine.clone();
        change(&mut engine);
        engine.check().unwrap_err()
    };
    assert!(broken(|e| e.stats.finished += 1).contains("I5"));
    assert!(broken(|e| e.stats.started_bytes += 1).contains("I7"));
    assert!(broken(|e| e.config.max_flights = 0).contains("I9"));
    assert!(broken(|e| e.slots.clear()).contains("I5"));
    assert!(broken(|e| e.flows.flights[0].rate -= 1).contains("rate"));
    assert!(broken(|e| e.flows.flights[0].delivered = u128::MAX).contains("I7"));
    assert!(broken(|e| e.flows.flights[0].settled_ns += 1_000).contains("timer"));
    assert!(broken(|e| e.flows.flights[0].link_positions[0] = 3).contains("seat"));
    assert!(broken(|e| e.flows.links[0].carried = 1).contains("carried"));
    assert!(broken(|e| e.flows.links[0].up = false).contains("down"));
    assert!(broken(|e| e.flows.links[0].counts[1] = 1).contains("counts"));
    assert!(broken(|e| e.flows.links[0].rate /= 2).contains("used"));
    assert!(broken(|e| e.flows.links[0].rate *= 2).contains("afresh"));
    assert!(broken(|e| e.flows.timers.clear(0)).contains("timer"));
}

#[test]
fn laggards_freed_together_catch_up_at_equal_rates() {
    // Three producers of 500 on 1,200: each lags 100 a µs for 3,000 µs, until one is cancelled.
    let mut driver = Driver::over(&[1_200]);
    for transfer in 1..=3 {
        driver.at(0, Input::Start(paced_request(transfer, 5_000_000, 10_000, 0)));
    }
    assert_eq!(driver.rate_of(1), 400_000_000);
    driver.at(3_000, Input::Cancel { transfer: TransferId(3) });
    assert_eq!((driver.rate_of(1), driver.rate_of(2)), (600_000_000, 600_000_000));
    // 300 kB behind, gaining 100 a µs: level at 6,000 µs.
    driver.run(5_999);
    assert_eq!(driver.rate_of(1), 600_000_000);
    driver.run(6_000);
    assert_eq!((driver.rate_of(1), driver.rate_of(2)), (500_000_000, 500_000_000));
    assert_eq!(driver.finishes(), [(1, 10_000), (2, 10_000)]);
}

#[test]
fn a_name_and_a_place_are_free_again_after_each_kind_of_end() {
    let config = NetworkConfig { max_flights: 1, max_flights_per_link: 1, ..NetworkConfig::default() };
    let mut driver = Driver::new(config, &[link(1_000_000_000, 0)]);
    driver.at(0, start(1, &[0], 1_000));
    driver.run(1);
    driver.at(10, start(1, &[0], 1_000_000));
    driver.at(20, Input::Cancel { transfer: TransferId(1) });
    let deadline_us = Some(40);
    driver.at(30, Input::Start(TransferRequest { deadline_us, ..request(1, &[0], 1_000_000) }));
    driver.at(50, start(1, &[0], 1_000_000));
    driver.at(60, Input::LinkDown { link: LinkId(0) });
    driver.at(70, Input::LinkUp { link: LinkId(0) });
    driver.at(70, start(1, &[0], 1_000));
    driver.run(u64::MAX);
    let effects = [
        finished(1, 1_000, 0),
        failed(1, Failure::Cancelled, 10_000),
        failed(1, Failure::Deadline, 10_000),
        failed(1, Failure::LinkDown(LinkId(0)), 10_000),
        finished(1, 1_000, 70),
    ];
    assert_eq!(ends_of(&driver.effects, 1), effects);
    assert_eq!(driver.engine.stats().refused, 0);
}
