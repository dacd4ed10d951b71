//! What every medium must do.

use std::time::Duration;

use baton_transports::*;
use bytes::Bytes;

use crate::scene::*;

macro_rules! on_every_medium {
    ($($scenario:ident),* $(,)?) => {
        mod memory { $(#[tokio::test] async fn $scenario() { super::$scenario(super::Medium::Memory).await })* }
        mod shm { $(#[tokio::test] async fn $scenario() { super::$scenario(super::Medium::SharedMemory).await })* }
        mod engine { $(#[tokio::test] async fn $scenario() { super::$scenario(super::Medium::Engine).await })* }
        mod tcp { $(#[tokio::test] async fn $scenario() { super::$scenario(super::Medium::Tcp).await })* }
    };
}

on_every_medium!(
    in_order_all_land,
    any_order_lands,
    held_blocks_are_not_sent,
    nothing_to_send_completes,
    a_note_comes_once_and_before_the_slices,
    a_note_over_the_limit_is_the_callers_fault,
    more_than_the_window_lands,
    a_slow_prefill_is_no_stall,
    a_doubled_slice_ends_the_flight,
    a_missing_slice_is_not_completed,
    a_slice_outside_the_plan_is_the_callers_fault,
    a_dropped_flight_is_aborted,
    a_receiver_that_goes_ends_the_flight,
    a_receiver_may_refuse_midway,
    flights_do_not_mix,
    strange_tickets_are_refused,
    the_same_attempt_twice_is_refused,
    a_postponed_offer_is_repeated,
    an_offer_postponed_for_ever_gives_up,
    other_fingerprints_are_refused,
    plans_over_the_limits_are_refused,
    flights_are_bounded,
    connections_are_used_again,
    fetches_bring_the_leading_blocks,
    a_damaged_block_is_found,
    fetches_are_bounded,
    draining_lets_a_flight_end,
);

fn traffic(stats: &TransportStats, medium: Medium) -> MediumStats {
    match medium {
        Medium::SharedMemory => stats.shared_memory,
        Medium::Tcp => stats.tcp,
        Medium::Memory => stats.memory,
        Medium::Engine => stats.engine,
    }
}

async fn in_order_all_land(medium: Medium) {
    let scene = Scene::new(medium).await;
    let done = scene.fly(ticket(1), PLAN, &positions(PLAN, 0)).await.unwrap();
    assert_eq!((done.slices, done.bytes), (20, 60_000));
    assert_eq!(done.ring_slices, if medium == Medium::SharedMemory { 20 } else { 0 });
    assert!(scene.node.holds_exactly(ticket(1), PLAN, 0));
    scene.node.with(|book| assert_eq!((&book.completed, &book.aborted), (&vec![ticket(1)], &vec![])));
    let (sent, received) = (scene.dialer.stats(), scene.endpoint.stats());
    let (out, back) = (traffic(&sent, medium), traffic(&received, medium));
    assert_eq!((out.sent_slices, out.sent_bytes), (20, 60_000));
    assert_eq!((back.received_slices, back.received_bytes), (20, 60_000));
    let way = match medium {
        Medium::SharedMemory | Medium::Engine => SentBytes { shared_memory: 60_000, ..SentBytes::default() },
        Medium::Tcp => SentBytes { tcp: 60_000, ..SentBytes::default() },
        Medium::Memory => SentBytes::default(),
    };
    assert_eq!(sent.sent, way);
    assert_eq!((sent.sent_flights, received.received_flights), (1, 1));
    assert_eq!((sent.sending_flights, received.receiving_flights, sent.fallbacks), (0, 0, 0));
    assert_eq!(received.failures, FailureStats::default());
    assert_eq!(std::fs::read_dir(scene.shm.path()).unwrap().count(), 0);
}

async fn any_order_lands(medium: Medium) {
    let scene = Scene::new(medium).await;
    let mut order = positions(PLAN, 0);
    order.reverse();
    order.swap(3, 11);
    scene.fly(ticket(1), PLAN, &order).await.unwrap();
    assert!(scene.node.holds_exactly(ticket(1), PLAN, 0));
}

async fn a_note_comes_once_and_before_the_slices(medium: Medium) {
    let scene = Scene::new(medium).await;
    let flight = scene.start(ticket(1), PLAN).await.unwrap();
    let refused = noted(flight, &[b"unwanted"]).await.unwrap_err();
    assert!(refused.text.contains("no note is expected"), "{refused}");
    scene.node.with(|book| book.notes = Some(Vec::new()));
    let note = vec![7; 200_000];
    noted(scene.start(ticket(2), PLAN).await.unwrap(), &[&note]).await.unwrap();
    assert!(scene.node.holds_exactly(ticket(2), PLAN, 0));
    scene.node.with(|book| assert_eq!(book.notes, Some(vec![(ticket(2), note.into())])));
    let twice = noted(scene.start(ticket(3), PLAN).await.unwrap(), &[b"one", b"two"]).await.unwrap_err();
    assert_eq!(twice.kind, Kind::Bug, "{twice}");
    let mut late = scene.start(ticket(4), PLAN).await.unwrap();
    late.send(SliceAt { block: 0, layer: 0 }, layer(ticket(4), SliceAt { block: 0, layer: 0 }, PLAN))
        .await
        .unwrap();
    assert!(noted(late, &[b"late"]).await.is_err());
    scene.node.until("all but one are aborted", |book| book.aborted.len() == 3).await;
    scene.node.with(|book| assert_eq!(book.completed, [ticket(2)]));
}

/// The flight with these notes and every slice of the plan.
async fn noted(mut flight: Flight, notes: &[&[u8]]) -> Result<FlightStats, TransportError> {
    for note in notes {
        flight.note(note).await?;
    }
    for at in positions(PLAN, 0) {
        flight.send(at, layer(ticket(2), at, PLAN)).await?;
    }
    flight.finish().await
}

async fn a_note_over_the_limit_is_the_callers_fault(medium: Medium) {
    let scene = Scene::with(medium, Limits { note_bytes: 8, ..quick() }).await;
    scene.node.with(|book| book.notes = Some(Vec::new()));
    let mut flight = scene.start(ticket(1), PLAN).await.unwrap();
    let error = flight.note(&[0; 9]).await.unwrap_err();
    assert!(error.kind == Kind::Invalid && error.text.contains("note_bytes 8"), "{error}");
    flight.note(&[0; 8]).await.unwrap();
    scene.node.until("it came", |book| book.notes.as_ref().is_some_and(|notes| notes.len() == 1)).await;
}

async fn held_blocks_are_not_sent(medium: Medium) {
    let scene = Scene::new(medium).await;
    scene.node.with(|book| book.have_blocks = 2);
    let flight = scene.start(ticket(1), PLAN).await.unwrap();
    assert_eq!(flight.have_blocks(), 2);
    drop(flight);
    scene.fly(ticket(2), PLAN, &positions(PLAN, 2)).await.unwrap();
    assert!(scene.node.holds_exactly(ticket(2), PLAN, 2));
    let error = scene.fly(ticket(3), PLAN, &positions(PLAN, 1)).await.unwrap_err();
    assert_eq!(error.kind, Kind::Corrupt, "{error}");
    assert!(error.text.contains("holds the first 2 blocks"), "{error}");
}

async fn nothing_to_send_completes(medium: Medium) {
    let scene = Scene::new(medium).await;
    scene.node.with(|book| book.have_blocks = PLAN.blocks);
    assert_eq!(scene.fly(ticket(1), PLAN, &[]).await.unwrap().slices, 0);
    scene.node.with(|book| assert_eq!(book.completed, vec![ticket(1)]));
}

async fn more_than_the_window_lands(medium: Medium) {
    let scene = Scene::new(medium).await;
    let plan = Plan { blocks: 40, layers: 3, layer_bytes: 20_000 };
    scene.fly(ticket(1), plan, &positions(plan, 0)).await.unwrap();
    assert!(scene.node.holds_exactly(ticket(1), plan, 0));
    let many = Plan { blocks: 1000, layers: 3, layer_bytes: 1 };
    scene.fly(ticket(2), many, &positions(many, 0)).await.unwrap();
    assert!(scene.node.holds_exactly(ticket(2), many, 0));
}

async fn a_slow_prefill_is_no_stall(medium: Medium) {
    let scene = Scene::with(medium, Limits { progress_timeout_ms: 60, ..quick() }).await;
    let mut flight = scene.start(ticket(1), PLAN).await.unwrap();
    for (number, at) in positions(PLAN, 0).into_iter().enumerate() {
        if number % 7 == 0 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        flight.send(at, layer(ticket(1), at, PLAN)).await.unwrap();
    }
    flight.finish().await.unwrap();
}

async fn a_doubled_slice_ends_the_flight(medium: Medium) {
    let scene = Scene::new(medium).await;
    let mut order = positions(PLAN, 0);
    order.insert(6, order[2]);
    let error = scene.fly(ticket(1), PLAN, &order).await.unwrap_err();
    assert_eq!(error.kind, Kind::Corrupt, "{error}");
    assert!(error.text.contains("came twice"), "{error}");
    scene.node.until("the abort", |book| book.aborted.len() == 1).await;
    // What the engine moves is looked at when all of it is there.
    let seen = if medium == Medium::Engine { 0 } else { 6 };
    scene.node.with(|book| assert_eq!((book.completed.len(), book.slices.len()), (0, seen)));
    // In one process both sides count into the same counters; of the engine's the sender finds it.
    let sides = match medium {
        Medium::Memory => 2,
        Medium::Engine => 0,
        _ => 1,
    };
    assert_eq!(scene.endpoint.stats().failures.corrupt, sides);
}

async fn a_missing_slice_is_not_completed(medium: Medium) {
    let scene = Scene::new(medium).await;
    let mut order = positions(PLAN, 0);
    order.remove(4);
    let error = scene.fly(ticket(1), PLAN, &order).await.unwrap_err();
    assert_eq!(error.kind, Kind::Corrupt);
    assert!(error.text.contains("19 of 20"), "{error}");
    scene.node.until("the abort", |book| book.aborted.len() == 1).await;
    scene.node.with(|book| assert_eq!(book.completed.len(), 0));
    // The same request may be tried again.
    let again = Ticket { attempt: 2, ..ticket(1) };
    scene.fly(again, PLAN, &positions(PLAN, 0)).await.unwrap();
    assert!(scene.node.holds_exactly(again, PLAN, 0));
}

async fn a_slice_outside_the_plan_is_the_callers_fault(medium: Medium) {
    let scene = Scene::new(medium).await;
    let mut flight = scene.start(ticket(1), PLAN).await.unwrap();
    for (block, layer, size) in [(5, 0, 3000), (0, 4, 3000), (0, 0, 2999), (0, 0, 3001)] {
        let error = flight.send(SliceAt { block, layer }, Bytes::from(vec![0; size])).await.unwrap_err();
        assert_eq!((error.kind, error.stage), (Kind::Invalid, Stage::Send));
    }
    for at in positions(PLAN, 0) {
        flight.send(at, layer(ticket(1), at, PLAN)).await.unwrap();
    }
    flight.finish().await.unwrap();
}

async fn a_dropped_flight_is_aborted(medium: Medium) {
    let scene = Scene::new(medium).await;
    let mut flight = scene.start(ticket(1), PLAN).await.unwrap();
    for at in &positions(PLAN, 0)[..7] {
        flight.send(*at, layer(ticket(1), *at, PLAN)).await.unwrap();
    }
    drop(flight);
    scene.node.until("the abort", |book| book.aborted.len() == 1).await;
    scene.node.with(|book| {
        assert_eq!(book.aborted[0].0, ticket(1));
        assert!(book.completed.is_empty());
    });
    assert_eq!(scene.dialer.stats().sending_flights, 0);
}

async fn a_receiver_that_goes_ends_the_flight(medium: Medium) {
    let scene = Scene::new(medium).await;
    let mut flight = scene.start(ticket(1), PLAN).await.unwrap();
    flight
        .send(SliceAt { block: 0, layer: 0 }, layer(ticket(1), SliceAt { block: 0, layer: 0 }, PLAN))
        .await
        .unwrap();
    scene.endpoint.shutdown(Duration::ZERO).await;
    scene.node.with(|book| assert_eq!((book.aborted.len(), book.completed.len()), (1, 0)));
    let error = flight.finish().await.unwrap_err();
    assert_eq!(error.kind, Kind::Closed, "{error}");
    let error = scene.start(ticket(2), PLAN).await.unwrap_err();
    assert!(matches!(error.kind, Kind::Unavailable | Kind::Closed), "{error}");
    assert_eq!(scene.endpoint.stats().open_connections, 0);
}

async fn a_receiver_may_refuse_midway(medium: Medium) {
    let scene = Scene::new(medium).await;
    scene.node.with(|book| book.refuse_slice_after = Some(3));
    let error = scene.fly(ticket(1), PLAN, &positions(PLAN, 0)).await.unwrap_err();
    assert_eq!(error.kind, Kind::Closed);
    assert!(error.text.contains("the client has gone"), "{error}");
    scene.node.with(|book| assert_eq!((book.aborted.len(), book.completed.len()), (1, 0)));
}

async fn flights_do_not_mix(medium: Medium) {
    let scene = Scene::new(medium).await;
    let mut one = scene.start(ticket(1), PLAN).await.unwrap();
    let mut two = scene.start(ticket(2), PLAN).await.unwrap();
    assert_eq!(scene.endpoint.stats().receiving_flights, 2);
    for at in positions(PLAN, 0) {
        one.send(at, layer(ticket(1), at, PLAN)).await.unwrap();
        two.send(at, layer(ticket(2), at, PLAN)).await.unwrap();
    }
    let (one, two) = tokio::join!(one.finish(), two.finish());
    assert!(one.is_ok() && two.is_ok());
    assert!(scene.node.holds_exactly(ticket(1), PLAN, 0) && scene.node.holds_exactly(ticket(2), PLAN, 0));
}

async fn strange_tickets_are_refused(medium: Medium) {
    let scene = Scene::new(medium).await;
    scene.node.with(|book| book.newest_attempt = 2);
    let old_epoch = Ticket { request: 1, attempt: 2, epoch: EPOCH - 1 };
    for (ticket, why) in [(old_epoch, "epoch 6"), (ticket(1), "attempt 1 is outdated")] {
        let error = scene.start(ticket, PLAN).await.unwrap_err();
        assert_eq!((error.kind, error.stage), (Kind::Invalid, Stage::Offer));
        assert!(error.text.contains(why), "{error}");
    }
    scene.node.with(|book| assert!(book.slices.is_empty() && book.aborted.is_empty()));
    assert_eq!(scene.endpoint.stats().refused_offers, 2);
}

async fn the_same_attempt_twice_is_refused(medium: Medium) {
    let scene = Scene::new(medium).await;
    let first = scene.start(ticket(1), PLAN).await.unwrap();
    let error = scene.start(ticket(1), PLAN).await.unwrap_err();
    assert_eq!(error.kind, Kind::Invalid, "{error}");
    drop(first);
    scene.node.until("the abort", |book| book.aborted.len() == 1).await;
    scene.node.with(|book| assert_eq!(book.offers.len(), 1));
}

async fn a_postponed_offer_is_repeated(medium: Medium) {
    let scene = Scene::new(medium).await;
    scene.node.with(|book| book.postpone = 4);
    let done = scene.fly(ticket(1), PLAN, &positions(PLAN, 0)).await.unwrap();
    assert_eq!(done.postponed_offers, 4);
}

async fn an_offer_postponed_for_ever_gives_up(medium: Medium) {
    let scene = Scene::new(medium).await;
    scene.node.with(|book| book.postpone = u32::MAX);
    let error = scene.start(ticket(1), PLAN).await.unwrap_err();
    assert_eq!((error.kind, error.stage), (Kind::Retry, Stage::Offer));
    assert!(error.text.contains("no order for it yet"), "{error}");
    let offers = scene.endpoint.stats().refused_offers;
    assert!((5..40).contains(&offers), "{offers} offers in 400 ms");
}

async fn other_fingerprints_are_refused(medium: Medium) {
    let scene = Scene::new(medium).await;
    if medium == Medium::Memory {
        return; // A process has one fingerprint.
    }
    let host = if medium == Medium::SharedMemory { "here" } else { "there" };
    let shm_dir = Some(scene.shm.path().to_owned());
    let config = DialerConfig { host: host.into(), shm_dir, fingerprint: 0xbad, limits: quick() };
    let dialer = Dialer::new(config).unwrap();
    let error = Flight::start(&dialer, &scene.peer, ticket(1), PLAN).await.unwrap_err();
    assert_eq!((error.kind, error.stage), (Kind::Invalid, Stage::Handshake));
    assert!(error.text.contains("0bad") && error.text.contains("feed"), "{error}");
    assert_eq!(scene.endpoint.stats().failures.invalid, 1);
    assert_eq!(std::fs::read_dir(scene.shm.path()).unwrap().count(), 0);
}

async fn plans_over_the_limits_are_refused(medium: Medium) {
    let scene = Scene::new(medium).await;
    for plan in [Plan { layers: 0, ..PLAN }, Plan { layer_bytes: 1 << 20, ..PLAN }] {
        assert_eq!(scene.start(ticket(1), plan).await.unwrap_err().kind, Kind::Invalid);
    }
    scene.node.with(|book| assert!(book.offers.is_empty()));
}

async fn flights_are_bounded(medium: Medium) {
    let scene = Scene::with(medium, Limits { flights: 1, ..quick() }).await;
    let first = scene.start(ticket(1), PLAN).await.unwrap();
    assert_eq!(scene.start(ticket(2), PLAN).await.unwrap_err().kind, Kind::Retry);
    drop(first);
    scene.node.until("the abort", |book| book.aborted.len() == 1).await;
    scene.fly(ticket(3), PLAN, &positions(PLAN, 0)).await.unwrap();
}

async fn connections_are_used_again(medium: Medium) {
    let scene = Scene::new(medium).await;
    for request in 0..10 {
        scene.fly(ticket(request), PLAN, &positions(PLAN, 0)).await.unwrap();
        let want = Want { keys: vec![1], epoch: EPOCH, priority: Priority::Fetch };
        fetch(&scene.dialer, &scene.peer, want, Duration::from_secs(1)).await.unwrap();
    }
    assert_eq!(scene.endpoint.stats().open_connections, 1);
}

async fn fetches_bring_the_leading_blocks(medium: Medium) {
    let scene = Scene::new(medium).await;
    let big = 7 << 90;
    let held = [block(1, 100_000), block(2, 10), block(big, 300_000), block(5, 10)];
    scene.node.with(|book| book.store = held.iter().map(|one| (one.key, one.clone())).collect());
    let ask = |keys: &[u128], epoch| {
        let want = Want { keys: keys.to_vec(), epoch, priority: Priority::Fetch };
        fetch(&scene.dialer, &scene.peer, want, Duration::from_secs(5))
    };
    let got = ask(&[big, 1, 2], EPOCH).await.unwrap();
    assert_eq!(got, vec![held[2].clone(), held[0].clone(), held[1].clone()]);
    assert_eq!(ask(&[1, 4, 5], EPOCH).await.unwrap(), held[..1]);
    assert_eq!(ask(&[4], EPOCH).await.unwrap(), vec![]);
    assert_eq!(ask(&[1], EPOCH - 1).await.unwrap(), vec![]);
    assert_eq!(ask(&[], EPOCH).await.unwrap(), vec![]);
}

async fn a_damaged_block_is_found(medium: Medium) {
    let scene = Scene::new(medium).await;
    let bad = FetchedBlock { checksum: 1, ..block(2, 1000) };
    scene.node.with(|book| book.store = [(1, block(1, 10)), (2, bad)].into());
    let want = Want { keys: vec![1, 2], epoch: EPOCH, priority: Priority::Fetch };
    let error = fetch(&scene.dialer, &scene.peer, want, Duration::from_secs(1)).await.unwrap_err();
    assert_eq!((error.kind, error.stage), (Kind::Corrupt, Stage::Fetch));
    assert_eq!(scene.dialer.stats().failures.corrupt, 1);
}

async fn fetches_are_bounded(medium: Medium) {
    let limits = Limits { fetch_keys: 3, fetch_bytes: 25, block_bytes: 20, ..quick() };
    let scene = Scene::with(medium, limits).await;
    let held = [block(1, 10), block(2, 10), block(3, 10), block(4, 21)];
    scene.node.with(|book| book.store = held.iter().map(|one| (one.key, one.clone())).collect());
    let ask = |keys: &[u128]| {
        let want = Want { keys: keys.to_vec(), epoch: EPOCH, priority: Priority::Fetch };
        fetch(&scene.dialer, &scene.peer, want, Duration::from_secs(5))
    };
    assert_eq!(ask(&[1, 2, 3]).await.unwrap(), held[..2]);
    assert_eq!(ask(&[4]).await.unwrap(), vec![]);
    assert_eq!(ask(&[1, 2, 3, 4]).await.unwrap_err().kind, Kind::Invalid);
}

async fn draining_lets_a_flight_end(medium: Medium) {
    let scene = Scene::new(medium).await;
    let mut flight = scene.start(ticket(1), PLAN).await.unwrap();
    let rest = async {
        for at in positions(PLAN, 0) {
            tokio::time::sleep(Duration::from_millis(2)).await;
            flight.send(at, layer(ticket(1), at, PLAN)).await.unwrap();
        }
        flight.finish().await
    };
    let (done, ()) = tokio::join!(rest, scene.endpoint.shutdown(Duration::from_secs(5)));
    done.unwrap();
    assert!(scene.node.holds_exactly(ticket(1), PLAN, 0));
    assert_eq!(scene.endpoint.stats().open_connections, 0);
}
