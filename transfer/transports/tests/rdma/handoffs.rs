//! Hand-offs and fetches as nodes make them, between two nodes that have devices of their own.

use std::time::Duration;

use baton_transports::*;

use crate::flights::{EPOCH, PLAN, Scene, block, plane, positions, ticket};
use crate::rails::{Cut, RailCut};

/// The node that sends (or asks) is on the rails' `a` ends, its peer on the `b` ends.
async fn scene() -> Scene {
    let on = |devices: &str| DataPlaneConfig { rdma: devices.parse().unwrap(), ..plane(false) };
    Scene::carried(Limits::default(), [on("rxe_a0,rxe_a1"), on("rxe_b0,rxe_b1")]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn kv_is_handed_off_by_rdma() {
    let scene = scene().await;
    for request in 1..=20 {
        scene.fly(ticket(request), PLAN, &positions(PLAN, 0)).await.unwrap();
        assert!(scene.node.holds_exactly(ticket(request), PLAN, 0), "flight {request}");
    }
    let (sent, there) = (scene.dialer.stats(), scene.endpoint.stats());
    assert_eq!(sent.sent, SentBytes { rdma: 20 * 60_000, ..SentBytes::default() }, "{sent:?}");
    assert_eq!((there.kv.received_bytes, there.sent), (20 * 60_000, SentBytes::default()));
    scene.unlent().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_are_fetched_by_rdma() {
    let scene = scene().await;
    let held: Vec<FetchedBlock> = (1..=30).map(|key| block(key << 64 | key, 100_000)).collect();
    scene.node.with(|book| book.store = held.iter().map(|one| (one.key, one.clone())).collect());
    let keys = held.iter().map(|one| one.key).collect();
    let want = Want { keys, epoch: EPOCH, priority: Priority::Fetch };
    let got = fetch(&scene.dialer, &scene.peer, want, Duration::from_secs(60)).await.unwrap();
    assert_eq!(got, held);
    let sent = scene.endpoint.stats().sent;
    assert_eq!(sent, SentBytes { rdma: 3_000_000, ..SentBytes::default() });
}

/// The loss of one rail does not affect a flight. With both lost, TCP carries the rest. The flight in progress may
/// fail, and its caller then retries it.
#[tokio::test(flavor = "multi_thread")]
async fn kv_arrives_whichever_rails_are_cut() {
    let scene = scene().await;
    let mut request = 0;
    let mut fly = async |tries: u32| {
        request += 1;
        for attempt in 1..=tries {
            let ticket = HandoffTicket { attempt, ..ticket(request) };
            match scene.fly(ticket, PLAN, &positions(PLAN, 0)).await {
                Ok(_) => return assert!(scene.node.holds_exactly(ticket, PLAN, 0), "{ticket:?}"),
                Err(error) => println!("{ticket:?}: {error}"),
            }
        }
        panic!("request {request} was not handed off in {tries} tries");
    };
    fly(1).await;
    let first = RailCut::new(0, Cut::Silent);
    fly(1).await;
    fly(1).await;
    let second = RailCut::new(1, Cut::Silent);
    for _ in 0..3 {
        fly(2).await;
    }
    let by_tcp = scene.dialer.stats().sent;
    assert!(by_tcp.tcp >= 60_000, "{by_tcp:?}");
    drop((first, second));
    fly(1).await;
    scene.unlent().await;
}
