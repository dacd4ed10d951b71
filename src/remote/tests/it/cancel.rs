//! Cancels at each phase: nothing stays held.

use std::time::Duration;

use baton_remote::Piece;
use baton_remote::testing::{FakeConnector, Fault};

use crate::scene::{SglangPair, VllmPair, becomes, greedy, prompt, request};

const BOTH: [FakeConnector; 2] = [FakeConnector::Nixl, FakeConnector::Mooncake];

async fn slow(connector: FakeConnector) -> VllmPair {
    let spec = |spec: &mut baton_remote::testing::VllmSpec| {
        spec.prefill_time = Duration::from_millis(300);
        spec.token_time = Duration::from_millis(20);
        spec.wait = Duration::from_secs(20);
    };
    VllmPair::with(connector, spec, |_| {}).await
}

#[tokio::test]
async fn a_prefill_that_is_dropped_leaves_nothing() {
    for connector in BOTH {
        let pair = slow(connector).await;
        let leg = pair.prefill.prefill(request(&prompt(1, 100), greedy(50))).await.unwrap();
        let run = tokio::spawn(leg.run());
        becomes("the prefill runs", || pair.p.held_blocks() > 0).await;
        run.abort();
        becomes("nothing is held", || pair.p.held_blocks() == 0 && pair.p.running() == 0).await;
        pair.assert_no_violation();
    }
}

#[tokio::test]
async fn a_leg_that_is_never_run_sends_nothing() {
    let pair = VllmPair::new(FakeConnector::Nixl).await;
    drop(pair.prefill.prefill(request(&prompt(1, 100), greedy(50))).await.unwrap());
    let rooms = SglangPair::new().await;
    let mut leg = rooms.prefill.prefill(request(&prompt(1, 100), greedy(50))).await.unwrap();
    assert!(leg.offer().is_some());
    drop(leg);
    assert_eq!((pair.p.received().len(), rooms.p.received().len()), (0, 0));
}

#[tokio::test]
async fn a_decode_that_is_dropped_while_tokens_come_leaves_nothing() {
    for connector in BOTH {
        let pair = slow(connector).await;
        let asked = request(&prompt(1, 100), greedy(500));
        let handoff = pair.handoff(&asked).await;
        let mut generation = pair.decode.decode(asked, handoff).await.unwrap();
        assert!(matches!(generation.next().await, Some(Ok(Piece::Tokens(_)))));
        assert!(pair.d.held_blocks() > 0);
        drop(generation);
        becomes("nothing is held", || pair.p.held_blocks() + pair.d.held_blocks() == 0).await;
        becomes("nothing runs", || pair.d.running() == 0).await;
        pair.assert_no_violation();
    }
}

#[tokio::test]
async fn a_decode_that_is_dropped_before_its_first_token_leaves_nothing() {
    let pair = slow(FakeConnector::Nixl).await;
    let asked = request(&prompt(1, 100), greedy(500));
    let handoff = pair.handoff(&asked).await;
    pair.d.fault(Fault::NeverAnswer, 1);
    let call = {
        let (decode, asked) = (pair.decode.clone(), asked.clone());
        tokio::spawn(async move { decode.decode(asked, handoff).await.map(drop) })
    };
    becomes("the decode engine has it", || pair.d.running() == 1).await;
    call.abort();
    becomes("nothing runs", || pair.d.running() == 0 && pair.d.held_blocks() == 0).await;
    // The prefill's blocks are lent until the lease is over: vLLM has no call that gives them back.
    assert!(pair.p.held_blocks() > 0);
}

#[tokio::test]
async fn a_future_of_next_that_is_dropped_loses_nothing() {
    let pair = slow(FakeConnector::Nixl).await;
    let asked = request(&prompt(1, 100), greedy(10));
    let handoff = pair.handoff(&asked).await;
    let mut generation = pair.decode.decode(asked.clone(), handoff).await.unwrap();
    let mut tokens = Vec::new();
    loop {
        // Shorter than a token takes: most of these are dropped.
        match tokio::time::timeout(Duration::from_millis(3), generation.next()).await {
            Ok(Some(Ok(Piece::Tokens(more)))) => tokens.extend(more.into_iter().map(|token| token.id)),
            Ok(Some(Ok(Piece::Finished { .. }))) => break,
            Ok(other) => panic!("{other:?}"),
            Err(_) => {}
        }
    }
    assert_eq!(tokens, crate::scene::truth(&asked).0);
}

#[tokio::test]
async fn sglang_legs_that_are_dropped_leave_nothing() {
    let pair = SglangPair::with(
        |spec| {
            spec.wait = Duration::from_secs(20);
            spec.token_time = Duration::from_millis(20);
        },
        |_| {},
    )
    .await;
    // While the prefill waits for its decode.
    let mut leg = pair.prefill.prefill(request(&prompt(1, 100), greedy(500))).await.unwrap();
    let handoff = leg.offer().unwrap();
    let run = tokio::spawn(leg.run());
    becomes("the prefill waits", || pair.p.running() == 1).await;
    run.abort();
    becomes("nothing is held", || pair.held() == 0).await;
    // While the decode waits for its prefill.
    let decode = {
        let engine = pair.decode.clone();
        tokio::spawn(
            async move { engine.decode(request(&prompt(1, 100), greedy(500)), handoff).await.map(drop) },
        )
    };
    becomes("the decode waits", || pair.d.running() == 1).await;
    decode.abort();
    becomes("nothing is held", || pair.held() == 0).await;
    // While tokens come.
    let asked = request(&prompt(2, 100), greedy(500));
    let mut leg = pair.prefill.prefill(asked.clone()).await.unwrap();
    let handoff = leg.offer().unwrap();
    let run = tokio::spawn(leg.run());
    let mut generation = pair.decode.decode(asked, handoff).await.unwrap();
    assert!(matches!(generation.next().await, Some(Ok(Piece::Tokens(_)))));
    run.await.unwrap().unwrap();
    drop(generation);
    becomes("nothing is held", || pair.held() == 0 && pair.d.running() == 0).await;
    pair.assert_no_violation();
}

#[tokio::test]
async fn an_answer_that_has_ended_is_not_aborted() {
    let pair = SglangPair::new().await;
    pair.serve(&request(&prompt(1, 30), greedy(5))).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    let aborts = |received: Vec<baton_remote::testing::ReceivedRequest>| {
        received.iter().filter(|one| one.path == "/abort_request").count()
    };
    assert_eq!(aborts(pair.p.received()) + aborts(pair.d.received()), 0);
    assert_eq!(pair.p.aborted() + pair.d.aborted(), 0);
}
