//! The proof of the pair: what comes out of a cluster is, to the bit, what one engine alone answers.

use baton_engine::PoolSpec;
use baton_types::{Rng, Role, Sampling};

use super::cluster::{Answer, Cluster, alone, listen, small_model};

fn pool(blocks: u32) -> PoolSpec {
    PoolSpec { block_tokens: 16, blocks, pass_tokens: 48, max_running: 16, threads: None }
}

/// A prompt that often begins like others and a random way of drawing.
fn request(rng: &mut Rng) -> (Vec<u32>, Sampling) {
    let shared = [0, 16, 33, 64, 100][rng.below(5) as usize];
    let family = rng.below(4) as u32;
    let own = 1 + rng.below(70) as u32;
    let mut tokens: Vec<u32> = (0..shared).map(|at| 1 + (at * 7 + family * 13) % 250).collect();
    tokens.extend((0..own).map(|_| 1 + rng.below(250) as u32));
    let sampling = Sampling {
        temperature: [0.0, 0.7, 1.3][rng.below(3) as usize],
        top_p: [1.0, 0.9][rng.below(2) as usize],
        top_k: [0, 20][rng.below(2) as usize],
        frequency_penalty: [0.0, 0.4][rng.below(2) as usize],
        seed: rng.next_u64(),
        max_tokens: 1 + rng.below(40) as u32,
        logprobs: Some(3),
        ..Sampling::default()
    };
    (tokens, sampling)
}

fn assert_equal(answer: &Answer, expected: &Answer, what: &str) {
    assert_eq!(answer.trouble, None, "{what}");
    assert_eq!(answer.tokens, expected.tokens, "{what}: tokens");
    assert_eq!(answer.finish, expected.finish, "{what}: finish");
    let bits = |a: &Answer| -> Vec<Vec<u32>> {
        let one = |l: &baton_types::TokenLogprob| {
            std::iter::once(l.logprob.to_bits())
                .chain(l.top.iter().flat_map(|(t, p)| [*t, p.to_bits()]))
                .collect()
        };
        a.logprobs.iter().map(|l| l.as_ref().map(one).unwrap_or_default()).collect()
    };
    assert_eq!(bits(answer), bits(expected), "{what}: logprobs");
}

/// A tiny pool on a busy machine may be full for a while: who is refused comes back, as its client would.
async fn come_back(cluster: &Cluster, mut answer: Answer, asked: (&[u32], &Sampling)) -> Answer {
    const RETURNS: u32 = 50;
    for _ in 0..RETURNS {
        if !answer.trouble.as_ref().is_some_and(|trouble| trouble.starts_with("Refusal { status: 429")) {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        answer = listen(cluster.submit(asked.0, asked.1.clone())).await;
    }
    answer
}

/// Many requests at a time, each compared with the engine alone.
async fn compare(cluster: &Cluster, rounds: u32, seed: u64) -> (u64, u64) {
    let choice = small_model(pool(64));
    let mut reference = crate::node::build_engine(&choice).unwrap();
    let mut rng = Rng::fork(seed, 9);
    let (mut cached, mut prompt) = (0, 0);
    for round in 0..rounds {
        let requests: Vec<_> = (0..1 + rng.below(12)).map(|_| request(&mut rng)).collect();
        let tickets: Vec<_> = requests.iter().map(|(t, s)| cluster.submit(t, s.clone())).collect();
        let answers: Vec<_> = tickets.into_iter().map(|t| tokio::spawn(listen(t))).collect();
        for (at, (answer, (tokens, sampling))) in answers.into_iter().zip(&requests).enumerate() {
            let answer = come_back(cluster, answer.await.unwrap(), (tokens, sampling)).await;
            let expected = alone(reference.as_mut(), tokens, sampling);
            assert_equal(&answer, &expected, &format!("seed {seed}, round {round}, request {at}"));
            cached += answer.usage.cached_tokens;
            prompt += tokens.len() as u64;
        }
    }
    (cached, prompt)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pair_answers_as_one_engine_does() {
    let cluster = Cluster::start("2p2d", &small_model(pool(256)), |_| {}).await;
    let (cached, prompt) = compare(&cluster, 60, 1).await;
    assert!(cached * 10 > prompt, "prefixes are reused: {cached} of {prompt} tokens");
    cluster.quiet().await;
    // All that was handed off went by the transfer engine, as soon as both ends have reported.
    let mut moved = (0, 1);
    for _ in 0..100 {
        let nodes = cluster.status().await.nodes;
        moved = nodes.iter().fold((0, 0), |sum, n| (sum.0 + n.handoff_bytes, sum.1 + n.received_bytes));
        if moved.0 > 0 && moved.0 <= moved.1 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    // A sender that is let go in the same moment does not count its last one.
    assert!(moved.0 > 0 && moved.0 <= moved.1, "{moved:?}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tiny_pools_that_evict_and_starve_answer_the_same() {
    let tune = |config: &mut crate::config::Config| config.scheduler.prior_output_tokens = 4;
    let cluster = Cluster::start("1p2d", &small_model(pool(40)), tune).await;
    compare(&cluster, 40, 2).await;
    cluster.quiet().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn coupled_instances_answer_the_same() {
    let cluster = Cluster::start("2b", &small_model(pool(128)), |_| {}).await;
    compare(&cluster, 30, 3).await;
    cluster.quiet().await;
    cluster.stop().await;
}

async fn drain(cluster: &Cluster, drain: bool) {
    let question = |reply| crate::conductor::Question::Drain { node: "s0".into(), drain, reply };
    cluster.inbox.ask(question).await.unwrap().unwrap();
}

/// Memory that is lent, drained, lost and lent again; that it is used is for `tests/service/lenders.rs` to see.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lent_memory_never_changes_an_answer() {
    let engine = small_model(pool(40));
    let tune = |config: &mut crate::config::Config| config.scheduler.prior_output_tokens = 4;
    let mut cluster = Cluster::start("1p2d1s", &engine, tune).await;
    compare(&cluster, 25, 21).await;
    drain(&cluster, true).await;
    compare(&cluster, 8, 22).await;
    drain(&cluster, false).await;
    cluster.kill("s0").await;
    compare(&cluster, 8, 23).await;
    cluster.add("s0", Role::Store, &engine);
    compare(&cluster, 12, 24).await;
    cluster.quiet().await;
    cluster.stop().await;
}

/// The only decode instance dies and comes back: its requests wait and then continue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_wait_for_the_only_instance_to_come_back() {
    let engine = small_model(pool(256));
    let mut cluster = Cluster::start("1p1d", &engine, |_| {}).await;
    let mut reference = crate::node::build_engine(&small_model(pool(64))).unwrap();
    let mut rng = Rng::fork(5, 9);
    for (name, role) in [("d0", Role::Decode), ("p0", Role::Prefill), ("d0", Role::Decode)] {
        let requests: Vec<_> = (0..6)
            .map(|_| {
                let (tokens, sampling) = request(&mut rng);
                (tokens, Sampling { max_tokens: 200, ignore_eos: true, ..sampling })
            })
            .collect();
        let tickets: Vec<_> = requests.iter().map(|(t, s)| cluster.submit(t, s.clone())).collect();
        let answers: Vec<_> = tickets.into_iter().map(|t| tokio::spawn(listen(t))).collect();
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        cluster.kill(name).await;
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        cluster.add(name, role, &engine);
        for (at, (answer, (tokens, sampling))) in answers.into_iter().zip(&requests).enumerate() {
            let answer = answer.await.unwrap();
            let expected = alone(reference.as_mut(), tokens, sampling);
            assert_equal(&answer, &expected, &format!("without {name}, request {at}"));
        }
        cluster.ready().await;
    }
    cluster.quiet().await;
    cluster.stop().await;
}

/// Decode and prefill instances die in the middle of answers; clients see every token once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_survive_the_loss_of_instances() {
    let engine = small_model(pool(256));
    let mut cluster = Cluster::start("2p2d", &engine, |_| {}).await;
    let mut reference = crate::node::build_engine(&small_model(pool(64))).unwrap();
    let mut rng = Rng::fork(4, 9);
    for round in 0..12 {
        let requests: Vec<_> = (0..8)
            .map(|_| {
                let (tokens, sampling) = request(&mut rng);
                (tokens, Sampling { max_tokens: 60, ignore_eos: true, ..sampling })
            })
            .collect();
        let tickets: Vec<_> = requests.iter().map(|(t, s)| cluster.submit(t, s.clone())).collect();
        let answers: Vec<_> = tickets.into_iter().map(|t| tokio::spawn(listen(t))).collect();
        tokio::time::sleep(std::time::Duration::from_millis(1 + rng.below(40))).await;
        let (name, role) =
            [("d0", Role::Decode), ("p0", Role::Prefill), ("d1", Role::Decode), ("p1", Role::Prefill)]
                [round % 4];
        cluster.kill(name).await;
        cluster.add(name, role, &engine);
        for (at, (answer, (tokens, sampling))) in answers.into_iter().zip(&requests).enumerate() {
            let answer = answer.await.unwrap();
            let expected = alone(reference.as_mut(), tokens, sampling);
            assert_equal(&answer, &expected, &format!("round {round} without {name}, request {at}"));
        }
        cluster.ready().await;
    }
    cluster.quiet().await;
    cluster.stop().await;
}

/// Nodes that are stopped in order did not die of what they had: it may go on from one to the next any number of times.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_goes_on_from_every_node_that_is_stopped() {
    let mut cluster = Cluster::start("", &small_model(pool(256)), |_| {}).await;
    for name in ["b0", "b1", "b2"] {
        cluster.add_process(name, Role::Both, &small_model(pool(256)));
    }
    cluster.ready().await;
    let sampling = Sampling { temperature: 0.0, max_tokens: 2000, ignore_eos: true, ..Sampling::default() };
    let answer = tokio::spawn(listen(cluster.submit(&[1, 2, 3], sampling)));
    let mut seen = 0;
    for _ in 0..2 {
        let node = loop {
            let status = cluster.status().await;
            let request = status.requests.first().filter(|request| request.answer_tokens > seen);
            let decode = request.and_then(|request| request.decode);
            if let Some(node) = status.nodes.iter().find(|node| Some(node.instance) == decode) {
                break node.name.clone();
            }
            assert!(!answer.is_finished(), "{status:#?}");
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        };
        cluster.kill(&node).await;
        // Tokens beyond these are drawn elsewhere.
        seen = cluster.status().await.requests.first().map_or(0, |request| request.answer_tokens);
    }
    let answer = answer.await.unwrap();
    assert_eq!((answer.trouble.as_deref(), answer.tokens.len()), (None, 2000));
    cluster.quiet().await;
    cluster.stop().await;
}

/// The prompt's logprobs are the prefill leg's to tell; the decode leg's engine has not computed the prompt.
#[tokio::test]
async fn prompt_logprobs_come_through_a_pair_as_through_one_node() {
    let sampling = Sampling {
        temperature: 0.0,
        max_tokens: 5,
        logprobs: Some(2),
        prompt_logprobs: Some(2),
        ..Sampling::default()
    };
    let prompt: Vec<u32> = (1..60).collect();
    let mut told = Vec::new();
    for layout in ["1b", "1p1d"] {
        let cluster = Cluster::start(layout, &small_model(pool(256)), |_| {}).await;
        let answer = listen(cluster.submit(&prompt, sampling.clone())).await;
        assert_eq!((answer.trouble.as_deref(), answer.tokens.len()), (None, 5), "{layout}");
        told.push((answer.tokens, answer.logprobs));
        cluster.quiet().await;
        cluster.stop().await;
    }
    assert_eq!(told[0], told[1]);
}

/// An answer that ends with its first token is complete before its prefill is reported.
#[tokio::test]
async fn an_answer_of_one_token_says_what_was_cached() {
    let prompt: Vec<u32> = (1..100).collect();
    let sampling =
        |max_tokens| Sampling { temperature: 0.0, max_tokens, ignore_eos: true, ..Sampling::default() };
    for layout in ["1b", "1p1d"] {
        let cluster = Cluster::start(layout, &small_model(pool(256)), |_| {}).await;
        for (max_tokens, warm) in [(2, false), (1, true), (2, true), (1, true)] {
            let answer = listen(cluster.submit(&prompt, sampling(max_tokens))).await;
            let cached = answer.usage.cached_tokens;
            assert_eq!(answer.trouble, None, "{layout}");
            assert_eq!(cached > 0, warm, "{layout}: {max_tokens} tokens, {cached} cached");
            cluster.quiet().await;
        }
        cluster.stop().await;
    }
}
