//! KV runs short in the middle of answers: a request that gives way waits and continues, and none is lost.

use baton_engine::PoolSpec;
use baton_types::Sampling;

use super::cluster::{Cluster, alone, listen, small_model};
use crate::config::Config;

fn pool(blocks: u32) -> PoolSpec {
    PoolSpec { block_tokens: 16, blocks, pass_tokens: 48, max_running: 32, threads: None }
}

/// Long answers, all at once, of which nobody has seen any: far more are let in than can stay to their end. The
/// tries that a failure may cost are those of every configuration: none of them is spent on this. On a busy machine
/// the first answers may end before the last callers ask: their length is known then, most are refused or nobody gives
/// way, and it is tried again.
async fn crowd(layout: &str, callers: u32, blocks: u32) {
    for _ in 0..4 {
        if one_gives_way(layout, callers, blocks).await {
            return;
        }
    }
    panic!("{layout}: none of four crowds was let in and gave way");
}

/// Whether most of the crowd was let in and at least one answer gave way to others. All that are let in are served to
/// their end.
async fn one_gives_way(layout: &str, callers: u32, blocks: u32) -> bool {
    let tune = |config: &mut Config| config.scheduler.prior_output_tokens = 8;
    let cluster = Cluster::start(layout, &small_model(pool(blocks)), tune).await;
    assert_eq!(cluster.config.scheduler.max_retries, Config::default().scheduler.max_retries);
    let ask = |caller: u32| -> (Vec<u32>, Sampling) {
        let tokens = (0..10 + caller % 30).map(|at| 1 + (at * 7 + caller * 13) % 250).collect();
        let sampling = Sampling {
            temperature: 0.8,
            seed: caller.into(),
            max_tokens: 150,
            ignore_eos: true,
            ..Sampling::default()
        };
        (tokens, sampling)
    };
    let asked: Vec<_> = (0..callers).map(ask).collect();
    let tickets: Vec<_> = asked.iter().map(|(t, s)| cluster.submit(t, s.clone())).collect();
    let answers: Vec<_> = tickets.into_iter().map(|t| tokio::spawn(listen(t))).collect();
    let mut reference = crate::node::build_engine(&small_model(pool(64))).unwrap();
    let (mut served, mut long) = (0, 0);
    for (answer, (tokens, sampling)) in answers.into_iter().zip(&asked) {
        let answer = answer.await.unwrap();
        let refused = answer.trouble.as_ref().is_some_and(|trouble| trouble.contains("status: 429"));
        if refused && answer.tokens.is_empty() {
            continue;
        }
        let expected = alone(reference.as_mut(), tokens, sampling);
        assert_eq!(answer.trouble, None, "{layout}: {} tokens were there", answer.tokens.len());
        assert_eq!(answer.tokens, expected.tokens, "{layout}");
        served += 1;
        long += u32::from(answer.tokens.len() == 150);
    }
    assert!(long * 2 > served, "{layout}: most answers are long");
    let gave_way = cluster.metrics.page().contains("baton_leg_failures_total{stage=\"preempted\"}");
    cluster.quiet().await;
    cluster.stop().await;
    gave_way && served * 2 > callers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_of_long_answers_loses_nobody_in_pairs() {
    crowd("1p2d", 40, 40).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_of_long_answers_loses_nobody_on_coupled_instances() {
    crowd("2b", 40, 40).await;
}

/// The pool has 128 tokens. It is the client's number that decides, not the length that its context would allow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_no_pool_can_hold_is_refused_before_any_work() {
    let cluster = Cluster::start("1p1d", &small_model(pool(8)), |_| {}).await;
    let tokens: Vec<u32> = (0..60).map(|at| 1 + at % 250).collect();
    let ask = |max_tokens| Sampling { seed: 3, max_tokens, ignore_eos: true, ..Sampling::default() };
    let mut reference = crate::node::build_engine(&small_model(pool(64))).unwrap();
    // The KV of the last token is never written.
    let whole = listen(cluster.ask(&tokens, ask(69))).await;
    assert_eq!(whole.trouble, None);
    assert_eq!(whole.tokens, alone(reference.as_mut(), &tokens, &ask(69)).tokens);
    let refused = listen(cluster.ask(&tokens, ask(70))).await;
    let trouble = refused.trouble.expect("its KV fits nowhere");
    assert!(trouble.contains("status: 400") && trouble.contains("too_long"), "{trouble}");
    assert!(trouble.contains("60 tokens") && trouble.contains("70"), "{trouble}");
    // A client that names no length has as much as there is room for.
    let open = listen(cluster.submit(&tokens, ask(500))).await;
    assert_eq!((open.trouble, &open.tokens), (None, &whole.tokens));
    let short =
        Sampling { max_tokens: 500, min_tokens: 0, stop_token_ids: whole.tokens[3..4].to_vec(), ..ask(0) };
    let open =
        listen(cluster.submit(&tokens, Sampling { ignore_eos: false, max_tokens: 500, ..short })).await;
    assert_eq!((open.trouble, open.tokens.len() < 69), (None, true));
    cluster.quiet().await;
    cluster.stop().await;
}

/// Two callers where there is room for one: the second waits for it, and is not sent away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_second_of_two_waits_for_the_room_of_the_first() {
    let tune = |config: &mut Config| config.scheduler.prior_output_tokens = 100;
    let cluster = Cluster::start("1p1d", &small_model(pool(16)), tune).await;
    let ask = |caller: u32| -> (Vec<u32>, Sampling) {
        let tokens = (0..60).map(|at| 1 + (at * 7 + caller * 13) % 250).collect();
        (tokens, Sampling { seed: 3, max_tokens: 120, ignore_eos: true, ..Sampling::default() })
    };
    let asked: Vec<_> = (0..2).map(ask).collect();
    let tickets: Vec<_> = asked.iter().map(|(t, s)| cluster.submit(t, s.clone())).collect();
    let answers: Vec<_> = tickets.into_iter().map(|t| tokio::spawn(listen(t))).collect();
    let mut reference = crate::node::build_engine(&small_model(pool(64))).unwrap();
    for (answer, (tokens, sampling)) in answers.into_iter().zip(&asked) {
        let answer = answer.await.unwrap();
        assert_eq!(answer.trouble, None);
        assert_eq!(answer.tokens, alone(reference.as_mut(), tokens, sampling).tokens);
    }
    cluster.quiet().await;
    cluster.stop().await;
}
