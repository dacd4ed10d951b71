//! Behaviour that every transport must have.

use std::time::Duration;

use baton_transports::*;

use crate::scene::*;

macro_rules! by_every_way {
    ($($scenario:ident),* $(,)?) => {
        mod shm { $(#[tokio::test] async fn $scenario() { super::$scenario(super::Way::Shm).await })* }
        mod tcp { $(#[tokio::test] async fn $scenario() { super::$scenario(super::Way::Tcp).await })* }
    };
}

by_every_way!(
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

async fn in_order_all_land(way: Way) {
    let scene = Scene::new(way).await;
    let done = scene.fly(ticket(1), PLAN, &positions(PLAN, 0)).await.unwrap();
    assert_eq!((done.slices, done.bytes), (20, 60_000));
    assert!(scene.node.holds_exactly(ticket(1), PLAN, 0));
    scene.node.with(|book| assert_eq!((&book.completed, &book.aborted), (&vec![ticket(1)], &vec![])));
    let (sent, received) = (scene.dialer.stats(), scene.endpoint.stats());
    assert_eq!(received.kv.received_bytes, 60_000);
    let went = match way {
        Way::Shm => SentBytes { shared_memory: 60_000, ..SentBytes::default() },
        Way::Tcp => SentBytes { tcp: 60_000, ..SentBytes::default() },
    };
    assert_eq!(sent.sent, went);
    assert_eq!((sent.sending_flights, received.receiving_flights), (0, 0));
}

async fn any_order_lands(way: Way) {
    let scene = Scene::new(way).await;
    let mut order = positions(PLAN, 0);
    order.reverse();
    order.swap(3, 11);
    scene.fly(ticket(1), PLAN, &order).await.unwrap();
    assert!(scene.node.holds_exactly(ticket(1), PLAN, 0));
}

async fn a_note_comes_once_and_before_the_slices(way: Way) {
    let scene = Scene::new(way).await;
    let flight = scene.start(ticket(1), PLAN).await.unwrap();
    let refused = noted(&scene, flight, &[b"unwanted"]).await.unwrap_err();
    assert!(refused.text.contains("no note is expected"), "{refused}");
    scene.node.with(|book| book.notes = Some(Vec::new()));
    let note = vec![7; 200_000];
    noted(&scene, scene.start(ticket(2), PLAN).await.unwrap(), &[&note]).await.unwrap();
    assert!(scene.node.holds_exactly(ticket(2), PLAN, 0));
    scene.node.with(|book| assert_eq!(book.notes, Some(vec![(ticket(2), note.into())])));
    let twice =
        noted(&scene, scene.start(ticket(3), PLAN).await.unwrap(), &[b"one", b"two"]).await.unwrap_err();
    assert_eq!(twice.kind, Kind::Bug, "{twice}");
    let mut late = scene.start(ticket(4), PLAN).await.unwrap();
    scene
        .send(
            &mut late,
            SlicePosition { block: 0, layer: 0 },
            layer(ticket(4), SlicePosition { block: 0, layer: 0 }, PLAN),
        )
        .await
        .unwrap();
    assert!(noted(&scene, late, &[b"late"]).await.is_err());
    scene.node.until("all but one are aborted", |book| book.aborted.len() == 3).await;
    scene.node.with(|book| assert_eq!(book.completed, [ticket(2)]));
}

/// The flight with these notes and every slice of the plan.
async fn noted(scene: &Scene, mut flight: Flight, notes: &[&[u8]]) -> Result<FlightStats, TransportError> {
    for note in notes {
        flight.note(note).await?;
    }
    for at in positions(PLAN, 0) {
        scene.send(&mut flight, at, layer(ticket(2), at, PLAN)).await?;
    }
    flight.finish().await
}

async fn a_note_over_the_limit_is_the_callers_fault(way: Way) {
    let scene = Scene::with(way, Limits { note_bytes: 8, ..quick() }).await;
    scene.node.with(|book| book.notes = Some(Vec::new()));
    let mut flight = scene.start(ticket(1), PLAN).await.unwrap();
    let error = flight.note(&[0; 9]).await.unwrap_err();
    assert!(error.kind == Kind::Invalid && error.text.contains("note_bytes 8"), "{error}");
    flight.note(&[0; 8]).await.unwrap();
    scene.node.until("it came", |book| book.notes.as_ref().is_some_and(|notes| notes.len() == 1)).await;
}

async fn held_blocks_are_not_sent(way: Way) {
    let scene = Scene::new(way).await;
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

async fn nothing_to_send_completes(way: Way) {
    let scene = Scene::new(way).await;
    scene.node.with(|book| book.have_blocks = PLAN.blocks);
    assert_eq!(scene.fly(ticket(1), PLAN, &[]).await.unwrap().slices, 0);
    scene.node.with(|book| assert_eq!(book.completed, vec![ticket(1)]));
}

async fn more_than_the_window_lands(way: Way) {
    let scene = Scene::new(way).await;
    let plan = Plan { blocks: 40, layers: 3, layer_bytes: 20_000 };
    scene.fly(ticket(1), plan, &positions(plan, 0)).await.unwrap();
    assert!(scene.node.holds_exactly(ticket(1), plan, 0));
    let many = Plan { blocks: 1000, layers: 3, layer_bytes: 1 };
    scene.fly(ticket(2), many, &positions(many, 0)).await.unwrap();
    assert!(scene.node.holds_exactly(ticket(2), many, 0));
}

async fn a_slow_prefill_is_no_stall(way: Way) {
    let scene = Scene::with(way, Limits { progress_timeout_ms: 60, ..quick() }).await;
    let mut flight = scene.start(ticket(1), PLAN).await.unwrap();
    for (number, at) in positions(PLAN, 0).into_iter().enumerate() {
        if number % 7 == 0 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        scene.send(&mut flight, at, layer(ticket(1), at, PLAN)).await.unwrap();
    }
    flight.finish().await.unwrap();
}

async fn a_doubled_slice_ends_the_flight(way: Way) {
    let scene = Scene::new(way).await;
    let mut order = positions(PLAN, 0);
    order.insert(6, order[2]);
    let error = scene.fly(ticket(1), PLAN, &order).await.unwrap_err();
    assert_eq!(error.kind, Kind::Corrupt, "{error}");
    assert!(error.text.contains("came twice"), "{error}");
    scene.node.until("the abort", |book| book.aborted.len() == 1).await;
    scene.node.with(|book| assert_eq!(book.completed.len(), 0));
}

async fn a_missing_slice_is_not_completed(way: Way) {
    let scene = Scene::new(way).await;
    let mut order = positions(PLAN, 0);
    order.remove(4);
    let error = scene.fly(ticket(1), PLAN, &order).await.unwrap_err();
    assert_eq!(error.kind, Kind::Corrupt);
    assert!(error.text.contains("19 of 20"), "{error}");
    scene.node.until("the abort", |book| book.aborted.len() == 1).await;
    scene.node.with(|book| assert_eq!(book.completed.len(), 0));
    // A second attempt of the request may succeed.
    let again = HandoffTicket { attempt: 2, ..ticket(1) };
    scene.fly(again, PLAN, &positions(PLAN, 0)).await.unwrap();
    assert!(scene.node.holds_exactly(again, PLAN, 0));
}

async fn a_slice_outside_the_plan_is_the_callers_fault(way: Way) {
    let scene = Scene::new(way).await;
    let mut flight = scene.start(ticket(1), PLAN).await.unwrap();
    let whole = scene.placed(&[0; 3000]);
    let beyond = mover::Region { at: whole.memory.bytes() as u64 - 2999, ..whole.clone() };
    for (block, layer, from) in [(5, 0, &whole), (0, 4, &whole), (0, 0, &beyond)] {
        let error = flight.send(SlicePosition { block, layer }, from).await.unwrap_err();
        assert_eq!((error.kind, error.stage), (Kind::Invalid, Stage::Send));
    }
    for at in positions(PLAN, 0) {
        scene.send(&mut flight, at, layer(ticket(1), at, PLAN)).await.unwrap();
    }
    flight.finish().await.unwrap();
}

async fn a_dropped_flight_is_aborted(way: Way) {
    let scene = Scene::new(way).await;
    let mut flight = scene.start(ticket(1), PLAN).await.unwrap();
    for at in &positions(PLAN, 0)[..7] {
        scene.send(&mut flight, *at, layer(ticket(1), *at, PLAN)).await.unwrap();
    }
    drop(flight);
    scene.node.until("the abort", |book| book.aborted.len() == 1).await;
    scene.node.with(|book| {
        assert_eq!(book.aborted[0].0, ticket(1));
        assert!(book.completed.is_empty());
    });
    assert_eq!(scene.dialer.stats().sending_flights, 0);
}

async fn a_receiver_that_goes_ends_the_flight(way: Way) {
    let scene = Scene::new(way).await;
    let mut flight = scene.start(ticket(1), PLAN).await.unwrap();
    scene
        .send(
            &mut flight,
            SlicePosition { block: 0, layer: 0 },
            layer(ticket(1), SlicePosition { block: 0, layer: 0 }, PLAN),
        )
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

async fn a_receiver_may_refuse_midway(way: Way) {
    let scene = Scene::new(way).await;
    scene.node.with(|book| book.refuse_slice_after = Some(3));
    let error = scene.fly(ticket(1), PLAN, &positions(PLAN, 0)).await.unwrap_err();
    assert_eq!(error.kind, Kind::Closed);
    assert!(error.text.contains("the client has gone"), "{error}");
    scene.node.with(|book| assert_eq!((book.aborted.len(), book.completed.len()), (1, 0)));
}

async fn flights_do_not_mix(way: Way) {
    let scene = Scene::new(way).await;
    let mut one = scene.start(ticket(1), PLAN).await.unwrap();
    let mut two = scene.start(ticket(2), PLAN).await.unwrap();
    assert_eq!(scene.endpoint.stats().receiving_flights, 2);
    for at in positions(PLAN, 0) {
        scene.send(&mut one, at, layer(ticket(1), at, PLAN)).await.unwrap();
        scene.send(&mut two, at, layer(ticket(2), at, PLAN)).await.unwrap();
    }
    let (one, two) = tokio::join!(one.finish(), two.finish());
    assert!(one.is_ok() && two.is_ok());
    assert!(scene.node.holds_exactly(ticket(1), PLAN, 0) && scene.node.holds_exactly(ticket(2), PLAN, 0));
}

async fn strange_tickets_are_refused(way: Way) {
    let scene = Scene::new(way).await;
    scene.node.with(|book| book.newest_attempt = 2);
    let old_epoch = HandoffTicket { request: 1, attempt: 2, epoch: EPOCH - 1 };
    for (ticket, why) in [(old_epoch, "epoch 6"), (ticket(1), "attempt 1 is outdated")] {
        let error = scene.start(ticket, PLAN).await.unwrap_err();
        assert_eq!((error.kind, error.stage), (Kind::Invalid, Stage::Offer));
        assert!(error.text.contains(why), "{error}");
    }
    scene
        .node
        .with(|book| assert!(book.offers.is_empty() && book.slices.is_empty() && book.aborted.is_empty()));
}

async fn the_same_attempt_twice_is_refused(way: Way) {
    let scene = Scene::new(way).await;
    let first = scene.start(ticket(1), PLAN).await.unwrap();
    let error = scene.start(ticket(1), PLAN).await.unwrap_err();
    assert_eq!(error.kind, Kind::Invalid, "{error}");
    drop(first);
    scene.node.until("the abort", |book| book.aborted.len() == 1).await;
    scene.node.with(|book| assert_eq!(book.offers.len(), 1));
}

async fn a_postponed_offer_is_repeated(way: Way) {
    let scene = Scene::new(way).await;
    scene.node.with(|book| book.postpone = 4);
    scene.fly(ticket(1), PLAN, &positions(PLAN, 0)).await.unwrap();
    scene.node.with(|book| assert_eq!((book.postpone, &book.completed), (0, &vec![ticket(1)])));
}

async fn an_offer_postponed_for_ever_gives_up(way: Way) {
    let scene = Scene::new(way).await;
    scene.node.with(|book| book.postpone = u32::MAX);
    let error = scene.start(ticket(1), PLAN).await.unwrap_err();
    assert_eq!((error.kind, error.stage), (Kind::Retry, Stage::Offer));
    assert!(error.text.contains("no order for it yet"), "{error}");
    let offers = scene.node.with(|book| u32::MAX - book.postpone);
    assert!((5..40).contains(&offers), "{offers} offers in 400 ms");
}

async fn other_fingerprints_are_refused(way: Way) {
    let scene = Scene::unlike(way, 0xbad).await;
    let error = scene.start(ticket(1), PLAN).await.unwrap_err();
    assert_eq!((error.kind, error.stage), (Kind::Invalid, Stage::Handshake));
    assert!(error.text.contains("0bad") && error.text.contains("feed"), "{error}");
}

async fn plans_over_the_limits_are_refused(way: Way) {
    let scene = Scene::new(way).await;
    for plan in [Plan { layers: 0, ..PLAN }, Plan { layer_bytes: 1 << 20, ..PLAN }] {
        assert_eq!(scene.start(ticket(1), plan).await.unwrap_err().kind, Kind::Invalid);
    }
    scene.node.with(|book| assert!(book.offers.is_empty()));
}

async fn flights_are_bounded(way: Way) {
    let scene = Scene::with(way, Limits { flights: 1, ..quick() }).await;
    let first = scene.start(ticket(1), PLAN).await.unwrap();
    assert_eq!(scene.start(ticket(2), PLAN).await.unwrap_err().kind, Kind::Retry);
    drop(first);
    scene.node.until("the abort", |book| book.aborted.len() == 1).await;
    scene.fly(ticket(3), PLAN, &positions(PLAN, 0)).await.unwrap();
}

async fn connections_are_used_again(way: Way) {
    let scene = Scene::new(way).await;
    for request in 0..10 {
        scene.fly(ticket(request), PLAN, &positions(PLAN, 0)).await.unwrap();
        let want = Want { keys: vec![1], epoch: EPOCH, priority: Priority::Fetch };
        fetch(&scene.dialer, &scene.peer, want, Duration::from_secs(1)).await.unwrap();
    }
    assert_eq!(scene.endpoint.stats().open_connections, 1);
}

async fn fetches_bring_the_leading_blocks(way: Way) {
    let scene = Scene::new(way).await;
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

async fn a_damaged_block_is_found(way: Way) {
    let scene = Scene::new(way).await;
    let bad = FetchedBlock { checksum: 1, ..block(2, 1000) };
    scene.node.with(|book| book.store = [(1, block(1, 10)), (2, bad)].into());
    let want = Want { keys: vec![1, 2], epoch: EPOCH, priority: Priority::Fetch };
    let error = fetch(&scene.dialer, &scene.peer, want, Duration::from_secs(1)).await.unwrap_err();
    assert_eq!((error.kind, error.stage), (Kind::Corrupt, Stage::Fetch));
}

async fn fetches_are_bounded(way: Way) {
    let limits = Limits { fetch_keys: 3, fetch_bytes: 25, block_bytes: 20, ..quick() };
    let scene = Scene::with(way, limits).await;
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

async fn draining_lets_a_flight_end(way: Way) {
    let scene = Scene::new(way).await;
    let mut flight = scene.start(ticket(1), PLAN).await.unwrap();
    let rest = async {
        for at in positions(PLAN, 0) {
            tokio::time::sleep(Duration::from_millis(2)).await;
            scene.send(&mut flight, at, layer(ticket(1), at, PLAN)).await.unwrap();
        }
        flight.finish().await
    };
    let (done, ()) = tokio::join!(rest, scene.endpoint.shutdown(Duration::from_secs(5)));
    done.unwrap();
    assert!(scene.node.holds_exactly(ticket(1), PLAN, 0));
    assert_eq!(scene.endpoint.stats().open_connections, 0);
}
