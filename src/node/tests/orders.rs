//! Orders that make no sense, come out of turn, or come twice: each is answered, and the node goes on.

use baton_types::Sampling;
use baton_wire::v1;
use baton_wire::v1::fact::Fact;
use baton_wire::v1::order::Order;

use super::conductor::{Line, Stage, VOCABULARY, expect, nobody, prefill, with_tokens, work};

fn damaged(damage: impl FnOnce(&mut v1::Work)) -> v1::Work {
    let mut work = work(40);
    damage(&mut work);
    work
}

fn sampled(change: impl FnOnce(&mut Sampling)) -> v1::Work {
    let mut sampling = Sampling { max_tokens: 4, ..Sampling::default() };
    change(&mut sampling);
    damaged(|w| w.sampling = Some((&sampling).into()))
}

/// It still serves, as it did at first, and holds nothing.
async fn still_serves(line: &mut Line, answer: &[u32]) {
    assert_eq!(line.serve(1_000_000, work(50)).await, answer);
    line.idle().await;
}

#[tokio::test]
async fn work_that_makes_no_sense_is_the_requests_fault() {
    let mut stage = Stage::start().await;
    let mut line = stage.attach().await;
    let answer = line.serve(1, work(50)).await;
    let nonsense = [
        damaged(|w| w.token_count = 0),
        damaged(|w| w.token_count = 39),
        damaged(|w| w.tokens[0].width = 5),
        damaged(|w| w.tokens[0].packed = w.tokens[0].packed.slice(1..)),
        damaged(|w| w.tokens.push(w.tokens[0].clone())),
        damaged(|w| w.prompt_tokens = 0),
        damaged(|w| w.prompt_tokens = 41),
        damaged(|w| w.prompt_tokens = u32::MAX),
        damaged(|w| w.chain = super::conductor::work(60).chain),
        damaged(|w| w.sampling = None),
        damaged(|w| w.sampling.as_mut().unwrap().logprobs = Some(256)),
        damaged(|w| w.sampling.as_mut().unwrap().temperature = f32::NAN),
    ];
    let mut request = 10;
    for work in nonsense {
        for order in [prefill(work.clone()), expect(work)] {
            request += 1;
            line.order(request, 1, order).await;
            let failure = line.failure(request).await;
            assert!(failure.of_request && !failure.message.is_empty(), "{failure:?}");
        }
    }
    line.order(9, 1, prefill(damaged(|w| w.tokens.clear()))).await;
    assert!(line.failure(9).await.message.contains("without its tokens"));
    let refused_by_the_engine = [
        with_tokens(work(40), |tokens| tokens[7] = VOCABULARY),
        with_tokens(work(40), |tokens| tokens[39] = u32::MAX),
        sampled(|s| s.temperature = -1.0),
        sampled(|s| s.max_tokens = 0),
        sampled(|s| s.logit_bias = vec![(VOCABULARY, 1.0)]),
        damaged(|w| w.prompt_tokens = 30),
    ];
    for work in refused_by_the_engine {
        request += 1;
        line.order(request, 1, prefill(work)).await;
        let failure = line.failure(request).await;
        assert!(failure.of_request && failure.message.contains("engine"), "{failure:?}");
    }
    for order in [Order::Prefill(v1::Prefill::default()), Order::Expect(v1::Expect::default())] {
        request += 1;
        line.order(request, 1, order).await;
        assert!(line.failure(request).await.message.contains("without work"));
    }
    line.order(u64::MAX, 1, prefill(work(20))).await;
    assert!(line.failure(u64::MAX).await.message.contains("2^63"));
    still_serves(&mut line, &answer).await;
    stage.end().await;
}

#[tokio::test]
async fn what_the_pool_can_never_hold_fails_at_once_beside_what_it_can() {
    let mut stage = Stage::start().await;
    let mut line = stage.attach().await;
    let answer = line.serve(1, work(50)).await;
    // Somebody holds blocks all the while.
    line.order(2, 1, prefill(work(40))).await;
    while !matches!(line.fact(2).await, (1, Fact::Prefilled(_))) {}
    line.order(40, 1, expect(work(3000))).await;
    let failure = line.failure(40).await;
    assert_eq!((failure.stage(), failure.of_request), (v1::failure::Stage::Room, false));
    line.order(41, 1, prefill(work(3000))).await;
    assert_eq!(line.failure(41).await.stage(), v1::failure::Stage::Room);
    line.release(2).await;
    // Room for an answer is promised as far as the pool has it: prompts that fit are served one by one.
    for (at, room_tokens) in [500, 100_000, u32::MAX].into_iter().enumerate() {
        let request = 10 + at as u64;
        let prefill = v1::Prefill { work: Some(work(40)), room_tokens, ..Default::default() };
        line.order(request, 1, Order::Prefill(prefill)).await;
        while !matches!(line.fact(request).await, (1, Fact::Prefilled(_))) {}
        line.release(request).await;
    }
    still_serves(&mut line, &answer).await;
    stage.end().await;
}

#[tokio::test]
async fn orders_out_of_turn_are_answered_or_ignored() {
    let mut stage = Stage::start().await;
    let mut line = stage.attach().await;
    let answer = line.serve(1, work(50)).await;
    let decode = || Order::StartDecode(v1::StartDecode { answer: vec![3] });
    let handoff = |to| Order::Handoff(v1::Handoff { to });
    // Of requests that are not here.
    line.order(2, 1, decode()).await;
    line.release(2).await;
    line.order(2, 3, handoff(Some(nobody()))).await;
    let failure = line.failure(2).await;
    assert_eq!((failure.stage(), failure.of_request), (v1::failure::Stage::Handoff, false));
    // Before its KV is here.
    line.order(3, 1, expect(work(40))).await;
    line.order(3, 1, decode()).await;
    assert!(line.failure(3).await.message.contains("before its KV"));
    // Of another attempt: not this leg's.
    line.order(4, 2, expect(work(40))).await;
    line.order(4, 1, decode()).await;
    line.order(4, 2, handoff(None)).await;
    assert_eq!(line.failure(4).await.stage(), v1::failure::Stage::Handoff);
    line.release(4).await;
    line.release(4).await;
    // A new attempt takes the place of the old one.
    line.order(5, 1, prefill(work(40))).await;
    line.order(5, 2, expect(work(40))).await;
    let leaving = v1::Prefill { work: Some(work(40)), decode: Some(nobody()), ..Default::default() };
    line.order(5, 3, Order::Prefill(leaving)).await;
    while !matches!(line.fact(5).await, (3, Fact::Prefilled(_))) {}
    line.order(5, 4, handoff(None)).await;
    // The first hand-off's failure may come before.
    while line.fact(5).await != (4, Fact::Handoff(false)) {}
    line.release(5).await;
    for order in [
        Order::Replicate(v1::Replicate::default()),
        Order::Replicate(v1::Replicate { from: Some(nobody()), chain: work(40).chain }),
    ] {
        line.order(0, 0, order).await;
    }
    line.send(v1::to_node::Message::Welcome(v1::Welcome::default())).await;
    line.send(v1::to_node::Message::Orders(v1::Orders {
        orders: vec![v1::Order::default()],
        ..Default::default()
    }))
    .await;
    assert!(matches!(line.fact(0).await, (0, Fact::Replicated(_) | Fact::Cache(_))));
    still_serves(&mut line, &answer).await;
    stage.end().await;
}

#[tokio::test]
async fn an_answer_goes_on_where_its_prompt_was_computed_without_waiting_for_the_order() {
    let mut stage = Stage::start().await;
    let mut line = stage.attach().await;
    let answer = line.serve(1, work(50)).await;
    line.order(2, 1, prefill(work(50))).await;
    let mut tokens = Vec::new();
    while tokens.len() < answer.len() {
        match line.fact(2).await {
            (1, Fact::Token(token)) => tokens.push(token.token),
            (1, Fact::Prefilled(_)) => assert_eq!(tokens.len(), 1),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(tokens, answer);
    stage.end().await;
}

#[tokio::test]
async fn a_decode_that_is_ordered_twice_runs_once() {
    let mut stage = Stage::start().await;
    let mut line = stage.attach().await;
    let answer = line.serve(1, work(50)).await;
    line.order(2, 1, prefill(work(50))).await;
    while !matches!(line.fact(2).await, (1, Fact::Prefilled(_))) {}
    for _ in 0..3 {
        line.order(2, 1, Order::StartDecode(v1::StartDecode { answer: answer[..1].to_vec() })).await;
    }
    let mut tokens = answer[..1].to_vec();
    while tokens.len() < answer.len() {
        match line.fact(2).await {
            (1, Fact::Token(token)) => tokens.push(token.token),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(tokens, answer);
    // An answer of one token that is ordered to decode has no token left to decode.
    let one = sampled(|s| s.max_tokens = 1);
    line.order(3, 1, prefill(one)).await;
    while !matches!(line.fact(3).await, (1, Fact::Prefilled(_))) {}
    line.order(3, 1, Order::StartDecode(v1::StartDecode::default())).await;
    still_serves(&mut line, &answer).await;
    stage.end().await;
}

#[tokio::test]
async fn peers_that_do_not_answer_cost_time_and_no_answer() {
    let mut stage = Stage::start().await;
    let mut line = stage.attach().await;
    let answer = line.serve(1, work(50)).await;
    // A fetch that brings nothing is computed.
    let mut other = with_tokens(work(120), |tokens| tokens.iter_mut().for_each(|token| *token += 1));
    other.chain = baton_wire::pack_keys(&[baton_types::BlockKey(77), baton_types::BlockKey(78)]);
    let fetch = v1::Prefill {
        work: Some(other),
        fetch_from: Some(nobody()),
        fetch_blocks: u32::MAX,
        room_tokens: 8,
        ..Default::default()
    };
    line.order(2, 1, Order::Prefill(fetch)).await;
    assert_eq!(line.fact(2).await, (1, Fact::Fetch(false)));
    while !matches!(line.fact(2).await, (1, Fact::Prefilled(_))) {}
    line.release(2).await;
    // A hand-off to nobody fails, and can be tried again.
    let away = v1::Prefill { work: Some(work(33)), decode: Some(nobody()), ..Default::default() };
    line.order(3, 1, Order::Prefill(away)).await;
    let failed = async |line: &mut Line, attempt| loop {
        match line.fact(3).await {
            (_, Fact::Token(_) | Fact::Prefilled(_)) => {}
            (told, Fact::Handoff(false)) => return assert_eq!(told, attempt),
            other => panic!("{other:?}"),
        }
    };
    failed(&mut line, 1).await;
    line.order(3, 2, Order::Handoff(v1::Handoff { to: Some(nobody()) })).await;
    failed(&mut line, 2).await;
    let bad = v1::Peer { kv_address: "no address at all".into(), ..nobody() };
    line.order(3, 3, Order::Handoff(v1::Handoff { to: Some(bad) })).await;
    failed(&mut line, 3).await;
    line.release(3).await;
    still_serves(&mut line, &answer).await;
    stage.end().await;
}

#[tokio::test]
async fn a_chain_that_contradicts_the_cache_is_served_without_it() {
    let mut stage = Stage::start().await;
    let mut line = stage.attach().await;
    let answer = line.serve(1, work(50)).await;
    // One block's key twice, and a known block behind another parent; with others at work.
    line.order(2, 1, prefill(work(40))).await;
    while !matches!(line.fact(2).await, (1, Fact::Prefilled(_))) {}
    let keys = baton_wire::unpack_keys(&work(50).chain);
    for (at, chain) in [vec![keys[0], keys[0]], vec![keys[1], keys[0]], vec![keys[2]]].into_iter().enumerate()
    {
        let mut odd = work(50);
        odd.chain = baton_wire::pack_keys(&chain);
        if at == 2 {
            // A chain that starts in the middle names no block of this prompt's.
            odd.chain = baton_wire::pack_keys(&[keys[2]]);
        }
        if at < 2 {
            assert_eq!(line.serve(20 + at as u64, odd).await, answer);
        } else {
            line.order(22, 1, prefill(odd)).await;
            line.fact(22).await;
            line.release(22).await;
        }
    }
    line.release(2).await;
    still_serves(&mut line, &answer).await;
    stage.end().await;
}
