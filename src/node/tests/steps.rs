//! Steps with prompts in them: how long the node lets them become.

use baton_engine::{PoolSpec, TimedSpec};
use baton_wire::v1;
use baton_wire::v1::fact::Fact;
use baton_wire::v1::order::Order;

use super::conductor::{BLOCK, Stage, prefill, work};
use crate::node::EngineChoice;

/// Steps of 10 ms, passes of 100 µs a prompt token, 512 tokens at most.
fn engine() -> EngineChoice {
    let mut profile = TimedSpec::zero_work().profile;
    profile.prefill.knots_us = vec![0.0, 100.0];
    profile.decode.base_us = vec![10_000.0];
    let pool =
        PoolSpec { block_tokens: BLOCK, blocks: 128, pass_tokens: 512, max_running: 16, threads: None };
    EngineChoice::Timed { spec: Box::new(TimedSpec::new(profile)), pool }
}

/// How many tokens a running answer gets while a prompt of 400 tokens is computed beside it.
async fn tokens_meanwhile(step_target_us: Option<u64>) -> usize {
    let mut stage = Stage::start_with(engine()).await;
    let mut line = stage.attach().await;
    assert_eq!(line.hello.mixed_chunk_tokens, None, "its engine has no fixed budget");
    assert_eq!(line.hello.max_running, Some(16));
    line.step_target_us = step_target_us;
    // Less than a block, so that the long prompt finds nothing cached.
    let mut answered = work(BLOCK - 1);
    answered.sampling.as_mut().unwrap().max_tokens = 200;
    line.order(1, 1, prefill(answered)).await;
    let Fact::Token(first) = line.fact(1).await.1 else { panic!("no token") };
    while !matches!(line.fact(1).await.1, Fact::Prefilled(_)) {}
    line.order(1, 1, Order::StartDecode(v1::StartDecode { answer: vec![first.token] })).await;
    while !matches!(line.fact(1).await.1, Fact::Token(token) if token.index == 3) {}
    line.order(2, 1, prefill(work(400))).await;
    while !line.was_reported(2) {
        line.receive().await;
    }
    let mut tokens = 0;
    let until = line.fact(2).await;
    assert!(matches!(until.1, Fact::Token(_) | Fact::Prefilled(_)), "{until:?}");
    while line.was_reported(1) {
        assert!(matches!(line.fact(1).await.1, Fact::Token(_)));
        tokens += 1;
    }
    stage.end().await;
    tokens
}

#[tokio::test]
async fn a_long_prompt_is_cut_so_that_steps_keep_the_target_that_orders_bring() {
    // 15 ms leave 5 for the prompt: 50 tokens a step, eight steps. Whole, it is in one.
    let cut = tokens_meanwhile(Some(15_000)).await;
    assert!(cut >= 8, "{cut} tokens came meanwhile");
    // A busy machine may bring the order late, so one try in a few must do.
    for _ in 0..5 {
        if tokens_meanwhile(None).await < 8 {
            return;
        }
    }
    panic!("a prompt that could be computed in one pass was cut without a target");
}
