//! Lives of a node: lines that break, conductors that refuse, and what a new epoch begins with.

use std::time::Duration;

use baton_wire::v1;
use baton_wire::v1::fact::Fact;
use baton_wire::v1::order::Order;

use super::conductor::{Line, Stage, expect, nobody, prefill, work};

/// Names of the full blocks of a work's chain.
fn names(work: &v1::Work) -> Vec<u64> {
    baton_wire::unpack_keys(&work.chain).iter().map(|key| key.short().0).collect()
}

#[tokio::test]
async fn a_broken_line_frees_everything_and_the_next_epoch_begins_with_the_inventory() {
    let mut stage = Stage::start().await;
    let mut line = stage.attach().await;
    assert_eq!((line.hello.name.as_str(), line.hello.role()), ("n0", v1::Role::Both));
    let kept = work(50);
    let answer = line.serve(1, kept.clone()).await;
    assert_eq!(answer.len(), 4);
    line.idle().await;

    // Legs at every stage: held, expecting, queued behind a peer that nobody answers for, decoding.
    line.order(2, 1, prefill(work(40))).await;
    while !matches!(line.fact(2).await, (1, Fact::Prefilled(_))) {}
    line.order(3, 1, expect(work(70))).await;
    let fetching = v1::Prefill {
        work: Some(work(90)),
        room_tokens: 8,
        fetch_from: Some(nobody()),
        fetch_blocks: 5,
        ..Default::default()
    };
    line.order(4, 1, Order::Prefill(fetching)).await;
    line.order(
        5,
        1,
        Order::Prefill(v1::Prefill { decode: Some(nobody()), work: Some(work(33)), ..Default::default() }),
    )
    .await;
    drop(line);

    let mut line = stage.attach().await;
    line.idle().await;
    let stored = line.stored();
    assert!(names(&kept).iter().all(|name| stored.contains(name)), "{stored:?}");
    // The old life's requests are nobody's; their numbers may come again and mean something else.
    assert_eq!(line.serve(2, kept).await, answer, "what is cached answers alike");
    line.idle().await;
    drop(line);
    let line = stage.attach().await;
    drop(line);
    stage.attach().await;
    stage.end().await;
}

#[tokio::test]
async fn a_node_tries_again_until_it_is_welcome_and_leaves_when_it_is_not() {
    let mut stage = Stage::start().await;
    stage.line().await.refuse(tonic::Status::unavailable("restarting")).await;
    // Orders before the welcome are no welcome.
    let rude: Line = stage.line().await;
    rude.order(1, 1, prefill(work(20))).await;
    drop(rude);
    let mut line = stage.attach().await;
    line.idle().await;
    drop(line);
    stage.line().await.refuse(tonic::Status::failed_precondition("another model")).await;
    let ended = tokio::time::timeout(Duration::from_secs(20), stage.node).await.expect("it gives up");
    let why = ended.unwrap().unwrap_err();
    let why = why.to_string();
    assert!(why.contains("refused") && why.contains("another model"), "{why}");
}

/// Two conductors around a leader that was paused past its lease, as a node sees them.
#[tokio::test]
async fn orders_of_a_leader_that_was_replaced_are_refused_and_change_nothing() {
    let mut stage = Stage::start().await;
    drop(stage.attach_led(5).await);
    let mut line = stage.attach_led(7).await;
    let answer = line.serve(1, work(50)).await;
    line.idle().await;
    // The first wakes and says what it had in mind.
    line.leader = 5;
    line.order(2, 1, prefill(work(40))).await;
    let mut next = stage.attach_led(7).await;
    next.idle().await;
    assert!(!line.was_reported(2) && !next.was_reported(2), "nothing came of it");
    assert_eq!(next.load.refused_orders, 1);
    assert_eq!(next.serve(1, work(50)).await, answer);
    // It is no welcome either, nor is one of nobody's election taken for a newer one.
    drop(next);
    drop(stage.attach_led(5).await);
    let mut line = stage.attach_led(9).await;
    assert_eq!(line.serve(1, work(50)).await, answer);
    line.idle().await;
    assert_eq!(line.load.refused_orders, 2);
    stage.end().await;
}

#[tokio::test]
async fn a_node_stops_in_the_middle_of_work() {
    let mut stage = Stage::start().await;
    let line = stage.attach().await;
    for request in 1..20 {
        line.order(request, 1, prefill(work(60))).await;
    }
    line.order(30, 1, expect(work(100))).await;
    stage.end().await;
}
