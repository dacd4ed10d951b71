//! Faulty connections and senders: in every case, `complete` means that every byte is there. Damage to KV itself on
//! its way is tested in `mover_faulty`.

use std::time::{Duration, Instant};

use baton_transports::*;
use proptest::prelude::*;

use crate::proxy::{Fault, between};
use crate::scene::*;

/// The scene with a proxy in between.
async fn through(way: Way, there: Fault, back: Fault) -> Scene {
    let mut scene = Scene::new(way).await;
    scene.peer.kv_address = between(scene.endpoint.address(), there, back).await.to_string();
    scene
}

#[tokio::test]
async fn a_flipped_byte_anywhere_in_a_flight_is_corrupt() {
    // Beyond the handshake and the offer: in the header that announces slices, in its body, in the last frame.
    for spot in [145, 200, 300, 350] {
        let scene = through(Way::Tcp, Fault::Flip(spot), Fault::None).await;
        let error = scene.fly(ticket(1), PLAN, &positions(PLAN, 0)).await.unwrap_err();
        assert_eq!(error.kind, Kind::Corrupt, "byte {spot}: {error}");
        scene.node.with(|book| assert_eq!((book.completed.len(), book.aborted.len()), (0, 1)));
    }
}

#[tokio::test]
async fn a_flipped_byte_in_the_answer_to_a_fetch_is_corrupt() {
    let scene = through(Way::Tcp, Fault::None, Fault::Flip(100)).await;
    scene.node.with(|book| book.store = [(1, block(1, 10_000))].into());
    let want = Want { keys: vec![1], epoch: EPOCH, priority: Priority::Fetch };
    let error = fetch(&scene.dialer, &scene.peer, want, Duration::from_secs(1)).await.unwrap_err();
    assert_eq!((error.kind, error.stage), (Kind::Corrupt, Stage::Fetch));
}

#[tokio::test]
async fn a_stall_ends_both_sides_in_bounded_time() {
    for way in [Way::Tcp, Way::Shm] {
        let scene = through(way, Fault::Stall(200), Fault::None).await;
        let start = Instant::now();
        let error = scene.fly(ticket(1), PLAN, &positions(PLAN, 0)).await.unwrap_err();
        assert!(matches!(error.kind, Kind::Unavailable), "{error}");
        assert!(start.elapsed() < Duration::from_secs(3));
        scene.node.until("the abort", |book| book.aborted.len() == 1).await;
        scene.node.with(|book| assert!(book.completed.is_empty()));
    }
}

#[tokio::test]
async fn a_stalled_fetch_ends_at_its_deadline() {
    let scene = through(Way::Tcp, Fault::None, Fault::Stall(100)).await;
    scene.node.with(|book| book.store = [(1, block(1, 10_000))].into());
    let want = Want { keys: vec![1], epoch: EPOCH, priority: Priority::Fetch };
    let error = fetch(&scene.dialer, &scene.peer, want, Duration::from_millis(120)).await.unwrap_err();
    assert_eq!((error.kind, error.stage), (Kind::Unavailable, Stage::Fetch));
}

#[tokio::test]
async fn after_a_send_dropped_midway_nothing_follows() {
    let mut scene = Scene::new(Way::Tcp).await;
    scene.peer.kv_address =
        between(scene.endpoint.address(), Fault::Stall(140), Fault::None).await.to_string();
    let plan = Plan { blocks: 100, layers: 1, layer_bytes: 64 << 10 };
    let mut flight = scene.start(ticket(1), plan).await.unwrap();
    let bytes = scene.placed(&[1; 64 << 10]);
    let mut sends = 0;
    loop {
        assert!(sends < 100, "a window whose bytes nobody takes out takes everything");
        let send = flight.send(SlicePosition { block: sends, layer: 0 }, &bytes);
        match tokio::time::timeout(Duration::from_millis(100), send).await {
            Ok(sent) => sent.unwrap(),
            Err(_) => break,
        }
        sends += 1;
    }
    let error = flight.send(SlicePosition { block: 99, layer: 0 }, &bytes).await.unwrap_err();
    assert_eq!((error.kind, error.stage), (Kind::Closed, Stage::Send), "{error}");
    assert_eq!(flight.finish().await.unwrap_err().kind, Kind::Closed);
    scene.node.until("the abort", |book| book.aborted.len() == 1).await;
}

#[tokio::test]
async fn nobody_there_is_unavailable() {
    let mut scene = Scene::new(Way::Tcp).await;
    scene.endpoint.shutdown(Duration::ZERO).await;
    let error = scene.start(ticket(1), PLAN).await.unwrap_err();
    assert_eq!((error.kind, error.stage), (Kind::Unavailable, Stage::Connect));
    scene.peer.kv_address = "no such place".into();
    assert_eq!(scene.start(ticket(1), PLAN).await.unwrap_err().kind, Kind::Unavailable);
}

#[tokio::test]
async fn a_peer_that_restarts_is_found_again() {
    let scene = Scene::new(Way::Tcp).await;
    scene.fly(ticket(1), PLAN, &positions(PLAN, 0)).await.unwrap();
    let listen = scene.endpoint.address();
    scene.endpoint.shutdown(Duration::ZERO).await;
    let node = std::sync::Arc::new(Node::default());
    let config = EndpointConfig::new(listen, "here", FINGERPRINT);
    let _again = Endpoint::bind(config, node.clone()).await.unwrap();
    // The idle connection is dead; the flight must not notice.
    scene.fly(ticket(2), PLAN, &positions(PLAN, 0)).await.unwrap();
    assert!(node.holds_exactly(ticket(2), PLAN, 0));
}

/// Faults whose place is in thousandths of what passes; [`placed`] turns it into bytes.
fn faults() -> impl Strategy<Value = Fault> {
    let spot = 0_usize..1_100;
    prop_oneof![
        3 => Just(Fault::None),
        3 => spot.clone().prop_map(Fault::Flip),
        2 => spot.clone().prop_map(Fault::Cut),
        1 => spot.clone().prop_map(Fault::Stall),
        2 => (spot.clone(), 1_usize..2000).prop_map(|(spot, count)| Fault::Lose(spot, count)),
        2 => (spot, 1_usize..2000).prop_map(|(spot, count)| Fault::Double(spot, count)),
    ]
}

/// The way in which a sender treats its list of slices.
#[derive(Clone, Copy, Debug)]
enum Sender {
    Right,
    Omits(usize),
    Doubles(usize),
    Stops(usize),
}

fn senders() -> impl Strategy<Value = Sender> {
    prop_oneof![
        6 => Just(Sender::Right),
        1 => (0_usize..100).prop_map(Sender::Omits),
        1 => (0_usize..100).prop_map(Sender::Doubles),
        1 => (0_usize..100).prop_map(Sender::Stops),
    ]
}

#[derive(Clone, Debug)]
struct Case {
    way: Way,
    plan: Plan,
    have_blocks: u32,
    order: Vec<SlicePosition>,
    sender: Sender,
    there: Fault,
    back: Fault,
}

fn cases() -> impl Strategy<Value = Case> {
    let way = prop_oneof![Just(Way::Tcp), Just(Way::Shm)];
    let shape = (1_u32..5, 1_u32..4, 1_u32..1500, 0_u32..3);
    (way, shape, senders(), faults(), faults()).prop_flat_map(|(way, shape, sender, there, back)| {
        let (blocks, layers, layer_bytes, have) = shape;
        let plan = Plan { blocks, layers, layer_bytes };
        let have_blocks = have.min(blocks);
        let order = Just(positions(plan, have_blocks)).prop_shuffle();
        order.prop_map(move |order| Case { way, plan, have_blocks, order, sender, there, back })
    })
}

/// The fault at its place in a stream of so many bytes.
fn placed(fault: Fault, total: usize) -> Fault {
    let at = |thousandths: usize| thousandths * total / 1_000;
    match fault {
        Fault::None => Fault::None,
        Fault::Flip(spot) => Fault::Flip(at(spot)),
        Fault::Cut(spot) => Fault::Cut(at(spot)),
        Fault::Stall(spot) => Fault::Stall(at(spot)),
        Fault::Lose(spot, count) => Fault::Lose(at(spot), count),
        Fault::Double(spot, count) => Fault::Double(at(spot), count),
    }
}

/// About how many bytes the sender of this case puts on the stream, and how many the receiver.
fn stream_bytes(case: &Case) -> (usize, usize) {
    let header = 40;
    (130 + 2 * header + case.order.len() * 8, 100 + 4 * header)
}

async fn run(case: &Case, scene: &Scene) -> Result<(), TransportError> {
    let mut order = case.order.clone();
    let slices = order.len().max(1);
    let mut flight = scene.start(ticket(1), case.plan).await?;
    match case.sender {
        Sender::Omits(at) if !order.is_empty() => drop(order.remove(at % slices)),
        Sender::Doubles(at) if !order.is_empty() => order.push(order[at % slices]),
        Sender::Stops(at) => order.truncate(at % slices),
        _ => {}
    }
    for at in order {
        scene.send(&mut flight, at, layer(ticket(1), at, case.plan)).await?;
    }
    if matches!(case.sender, Sender::Stops(_)) {
        return Ok(());
    }
    flight.finish().await.map(drop)
}

async fn judge(case: Case) -> Result<(), TestCaseError> {
    let (there, back) = stream_bytes(&case);
    let scene = through(case.way, placed(case.there, there), placed(case.back, back)).await;
    scene.node.with(|book| book.have_blocks = case.have_blocks);
    let start = Instant::now();
    let result = run(&case, &scene).await;
    prop_assert!(start.elapsed() < Duration::from_secs(4), "took {:?}", start.elapsed());
    scene
        .node
        .until("the end of each flight", |book| {
            book.offers.len() == book.completed.len() + book.aborted.len()
        })
        .await;
    let completed = scene.node.with(|book| book.completed.len());
    prop_assert!(completed <= 1);
    if completed == 1 {
        prop_assert!(scene.node.holds_exactly(ticket(1), case.plan, case.have_blocks));
    }
    let stops = matches!(case.sender, Sender::Stops(_));
    if result.is_ok() && !stops {
        prop_assert_eq!(completed, 1, "the sender was told that all is well");
    }
    if stops {
        prop_assert_eq!(completed, 0);
    }
    let clean = case.there == Fault::None && case.back == Fault::None;
    if clean && matches!(case.sender, Sender::Right) {
        prop_assert!(result.is_ok(), "nothing was wrong, but {result:?}");
    }
    let whole = scene.node.holds_exactly(ticket(1), case.plan, case.have_blocks);
    if clean && !stops {
        prop_assert_eq!(completed == 1, whole && result.is_ok());
    }
    scene.endpoint.shutdown(Duration::ZERO).await;
    prop_assert_eq!(scene.endpoint.stats().receiving_flights, 0);
    scene.unlent().await;
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn complete_means_that_every_byte_landed_once(case in cases()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(judge(case))?;
    }
}
