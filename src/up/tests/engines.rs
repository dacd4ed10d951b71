//! Servers that run elsewhere behind the real conductor: strict stand-ins that do what real ones were seen to do, the bad
//! parts included. Answers are the toy model's or a named failure, nothing stays held, and no stand-in has seen
//! anything that it must never be sent.

use std::time::{Duration, Instant};

use baton_remote::testing::{
    Fabric, FakeConnector, FakeRole, FakeSglang, FakeVllm, Fault, SglangSpec, VOCAB_TOKENS, VllmSpec,
    toy_answer,
};
use baton_types::{Finish, Role, Sampling};

use super::cluster::{Answer, Cluster, listen};

fn sampling(max_tokens: u32) -> Sampling {
    Sampling { temperature: 0.0, max_tokens, ..Sampling::default() }
}

fn prompt(rng: &mut baton_types::Rng, family: u64) -> Vec<u32> {
    let mut stem = baton_types::Rng::new(family);
    let token =
        |rng: &mut baton_types::Rng| 1 + u32::try_from(rng.below(u64::from(VOCAB_TOKENS) - 1)).unwrap();
    let shared = (0..family * 24).map(|_| token(&mut stem)).collect::<Vec<_>>();
    let own = 1 + rng.below(60);
    shared.into_iter().chain((0..own).map(|_| token(rng))).collect()
}

async fn cluster() -> Cluster {
    let mut cluster = Cluster::start("", &super::cluster::small_model(Default::default()), |config| {
        config.scheduler.fetch = false;
        config.scheduler.classes[0].ttft_us = 60_000_000;
        config.scheduler.classes[0].tbt_us = 10_000_000;
    })
    .await;
    cluster.body = "{}".into();
    cluster
}

/// Stand-ins of one kind, paired.
enum Pair {
    Vllm(Vec<FakeVllm>),
    Sglang(Vec<FakeSglang>),
}

impl Pair {
    async fn vllm(cluster: &mut Cluster, connector: FakeConnector, token_time: Duration) -> Self {
        Self::lending(cluster, connector, token_time, Duration::from_secs(30)).await
    }

    async fn lending(
        cluster: &mut Cluster,
        connector: FakeConnector,
        token_time: Duration,
        lease: Duration,
    ) -> Self {
        let fabric = Fabric::new();
        let mut fakes = Vec::new();
        let roles =
            [("p0", Role::Prefill), ("p1", Role::Prefill), ("d0", Role::Decode), ("d1", Role::Decode)];
        for (name, role) in roles {
            let fake = if role == Role::Prefill { FakeRole::Prefill } else { FakeRole::Decode };
            let spec = VllmSpec { token_time, lease, blocks: 4096, ..VllmSpec::new(fake, connector) };
            let fake = FakeVllm::start(spec, &fabric).await.unwrap();
            cluster.add_remote(name, role, fake.settings());
            fakes.push(fake);
        }
        cluster.ready().await;
        Self::Vllm(fakes)
    }

    async fn sglang(cluster: &mut Cluster, token_time: Duration) -> Self {
        let fabric = Fabric::new();
        let mut fakes = Vec::new();
        for (name, role) in [("p0", Role::Prefill), ("d0", Role::Decode)] {
            let fake = if role == Role::Prefill { FakeRole::Prefill } else { FakeRole::Decode };
            // As real ones do, it waits longer than a leg that nobody wants is let go on.
            let wait = Duration::from_secs(10);
            let spec = SglangSpec { token_time, wait, ..SglangSpec::new(fake) };
            let fake = FakeSglang::start(spec, &fabric).await.unwrap();
            cluster.add_remote(name, role, fake.settings());
            fakes.push(fake);
        }
        cluster.ready().await;
        Self::Sglang(fakes)
    }

    fn violations(&self) -> Vec<String> {
        match self {
            Self::Vllm(fakes) => fakes.iter().flat_map(|fake| fake.violations()).collect(),
            Self::Sglang(fakes) => fakes.iter().flat_map(|fake| fake.violations()).collect(),
        }
    }

    fn held(&self) -> usize {
        match self {
            Self::Vllm(fakes) => fakes.iter().map(FakeVllm::held_blocks).sum(),
            Self::Sglang(fakes) => fakes.iter().map(FakeSglang::held_tokens).sum(),
        }
    }

    /// Nothing is held two seconds after the last client left.
    async fn let_go(&self) {
        self.let_go_within(Duration::from_secs(2)).await;
    }

    async fn let_go_within(&self, time: Duration) {
        let until = Instant::now() + time;
        while self.held() > 0 {
            assert!(Instant::now() < until, "{} are still held", self.held());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

fn right(answer: &Answer, prompt: &[u32], sampling: &Sampling) {
    let (tokens, finish) = toy_answer(prompt, sampling);
    assert_eq!((answer.trouble.as_deref(), answer.finish), (None, Some(finish)));
    assert_eq!(answer.tokens, tokens);
}

async fn serves_many(cluster: &Cluster, pair: &Pair) {
    let mut rng = baton_types::Rng::new(5);
    let mut under_way = Vec::new();
    for at in 0..80u64 {
        let (tokens, sampling) =
            (prompt(&mut rng, at % 5), sampling(1 + u32::try_from(rng.below(20)).unwrap()));
        let ticket = cluster.submit(&tokens, sampling.clone());
        under_way.push((tokens, sampling, tokio::spawn(listen(ticket))));
    }
    for (tokens, sampling, answer) in under_way {
        right(&answer.await.unwrap(), &tokens, &sampling);
    }
    cluster.quiet().await;
    pair.let_go().await;
    assert_eq!(pair.violations(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pairs_of_every_kind_answer_as_one_engine_would() {
    for kind in 0..3 {
        let mut cluster = cluster().await;
        let pair = match kind {
            0 => Pair::vllm(&mut cluster, FakeConnector::Nixl, Duration::ZERO).await,
            1 => Pair::vllm(&mut cluster, FakeConnector::Mooncake, Duration::ZERO).await,
            _ => Pair::sglang(&mut cluster, Duration::ZERO).await,
        };
        serves_many(&cluster, &pair).await;
        cluster.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_of_its_own_serves_whole_requests() {
    let mut cluster = cluster().await;
    let fake =
        FakeVllm::start(VllmSpec::new(FakeRole::Whole, FakeConnector::None), &Fabric::new()).await.unwrap();
    cluster.add_remote("v0", Role::Both, fake.settings());
    cluster.ready().await;
    let pair = Pair::Vllm(vec![fake]);
    serves_many(&cluster, &pair).await;
    cluster.stop().await;
}

/// Clients leave at any moment; whatever phase that was, nothing is held two seconds later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_leave_at_any_moment_leave_nothing_held() {
    for kind in 0..2 {
        let mut cluster = cluster().await;
        let token_time = Duration::from_millis(3);
        let pair = match kind {
            0 => Pair::vllm(&mut cluster, FakeConnector::Nixl, token_time).await,
            _ => Pair::sglang(&mut cluster, token_time).await,
        };
        let mut rng = baton_types::Rng::new(11);
        for at in 0..60u64 {
            let tokens = prompt(&mut rng, at % 4);
            let ticket = cluster.submit(&tokens, sampling(30));
            let time_limit = Duration::from_micros(rng.below(60_000));
            let _ = tokio::time::timeout(time_limit, listen(ticket)).await;
        }
        cluster.quiet().await;
        pair.let_go().await;
        assert_eq!(pair.violations(), Vec::<String>::new());
        cluster.stop().await;
    }
}

/// The prefill finds the end of such an answer, and vLLM's NixlConnector lends its KV all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_that_end_at_their_first_token_leave_nothing_held() {
    let mut cluster = cluster().await;
    let pair = Pair::vllm(&mut cluster, FakeConnector::Nixl, Duration::ZERO).await;
    let mut rng = baton_types::Rng::new(13);
    for at in 0..8 {
        let tokens = prompt(&mut rng, at % 4);
        let (drawn, _) = toy_answer(&tokens, &sampling(1));
        let ends = Sampling { stop_token_ids: drawn, ..sampling(30) };
        let answer = listen(cluster.submit(&tokens, ends.clone())).await;
        right(&answer, &tokens, &ends);
        assert_eq!(answer.finish, Some(Finish::Stop));
    }
    cluster.quiet().await;
    pair.let_go().await;
    assert_eq!(pair.violations(), Vec::<String>::new());
    cluster.stop().await;
}

/// Whatever an engine does wrong, a client gets the right answer or a failure with a name, never a wrong token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_of_engines_cost_time_or_a_named_failure_and_never_a_wrong_token() {
    let mut cluster = cluster().await;
    let lease = Duration::from_secs(8);
    let pair = Pair::lending(&mut cluster, FakeConnector::Nixl, Duration::from_millis(1), lease).await;
    let Pair::Vllm(fakes) = &pair else { unreachable!("it was made above") };
    let faults = [
        Fault::Status(500),
        Fault::Hangup,
        Fault::DieAfter(3),
        Fault::ErrorAfter(2),
        Fault::DoneAfter(2),
        Fault::Garbage,
        Fault::Status(503),
        Fault::DieAfter(0),
    ];
    let mut rng = baton_types::Rng::new(23);
    let (mut served, mut failed) = (0, Vec::new());
    for at in 0..120u64 {
        let fault = &faults[usize::try_from(rng.below(faults.len() as u64)).unwrap()];
        let fake = &fakes[usize::try_from(rng.below(fakes.len() as u64)).unwrap()];
        if at % 3 == 0 {
            fake.fault(fault.clone(), 1);
        }
        let (tokens, sampling) = (prompt(&mut rng, at % 5), sampling(12));
        let answer = listen(cluster.submit(&tokens, sampling.clone())).await;
        let (truth, finish) = toy_answer(&tokens, &sampling);
        assert!(truth.starts_with(&answer.tokens), "a token that no engine alone would give");
        match answer.trouble {
            None => {
                assert_eq!((answer.tokens, answer.finish), (truth, Some(finish)));
                served += 1;
            }
            Some(trouble) => failed.push(trouble),
        }
    }
    // Each fault hits one attempt of one request: another attempt serves it.
    assert!(served >= 118, "{served} of 120: {failed:?}");
    cluster.quiet().await;
    // A decode server that failed never fetched its KV: that is lent until its lease ends.
    pair.let_go_within(lease + Duration::from_secs(2)).await;
    assert_eq!(pair.violations(), Vec::<String>::new());
    cluster.stop().await;
}

/// A decode server dies in mid-answer: another goes on from the tokens that the client has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_goes_on_where_its_server_died() {
    let mut cluster = cluster().await;
    let pair = Pair::vllm(&mut cluster, FakeConnector::Nixl, Duration::from_millis(5)).await;
    let Pair::Vllm(fakes) = &pair else { unreachable!("it was made above") };
    let mut rng = baton_types::Rng::new(31);
    let mut under_way = Vec::new();
    for at in 0..12u64 {
        let sampling = Sampling { ignore_eos: true, ..sampling(200) };
        let tokens = prompt(&mut rng, at % 5);
        let ticket = cluster.submit(&tokens, sampling.clone());
        under_way.push((tokens, sampling, tokio::spawn(listen(ticket))));
    }
    // Answers take a second: when this has passed, all are well under way.
    tokio::time::sleep(Duration::from_millis(400)).await;
    let busiest = [2, 3].into_iter().max_by_key(|at| fakes[*at].running()).expect("two of them");
    assert!(fakes[busiest].running() > 0, "nobody decodes");
    fakes[busiest].kill();
    let mut moved = 0;
    for (tokens, sampling, answer) in under_way {
        let answer = answer.await.unwrap();
        right(&answer, &tokens, &sampling);
        assert_eq!(answer.finish, Some(Finish::Length));
        moved += answer.usage.moves;
    }
    assert!(moved > 0, "nothing was decoding where it died");
    cluster.quiet().await;
    assert_eq!(pair.violations(), Vec::<String>::new());
    cluster.stop().await;
}

/// vLLM answers 500 to all that was in its engine when that died, and ends a moment later. One poisonous request was tried
/// on an engine after the other, as after any 500.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_of_which_engines_die_behind_their_servers_takes_two_at_most() {
    const POISON: u32 = 3;
    let mut cluster = cluster().await;
    let mut fakes = Vec::new();
    for name in ["v0", "v1", "v2", "v3"] {
        let spec = VllmSpec::new(FakeRole::Whole, FakeConnector::None);
        let spec = VllmSpec { poison: Some(POISON), token_time: Duration::from_millis(2), ..spec };
        let fake = FakeVllm::start(spec, &Fabric::new()).await.unwrap();
        cluster.add_remote(name, Role::Both, fake.settings());
        fakes.push(fake);
    }
    cluster.ready().await;
    // Fewer than engines: mostly the first that the poison comes to has nothing else, and what the second has is spared.
    // Where placement put two together, both are suspected, and both may be tried on the same engine.
    let mut rng = baton_types::Rng::new(5);
    let mut harmless = |at| {
        let mut tokens = prompt(&mut rng, at);
        tokens[0] = POISON + 1;
        tokens
    };
    let beside: Vec<_> = (0..3)
        .map(|at| {
            let (tokens, sampling) = (harmless(at % 4), Sampling { ignore_eos: true, ..sampling(1_500) });
            let answer = tokio::spawn(listen(cluster.submit(&tokens, sampling.clone())));
            (tokens, sampling, answer)
        })
        .collect();
    // Answers take seconds: what comes to an engine that has just died is no part of this.
    let until = Instant::now() + Duration::from_secs(30);
    while fakes.iter().map(FakeVllm::running).sum::<u64>() < 3 {
        assert!(Instant::now() < until, "they are not under way");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut poison = harmless(0);
    poison[0] = POISON;
    let answer = listen(cluster.submit(&poison, sampling(4))).await;
    let trouble = answer.trouble.expect("no engine survives it");
    assert!(trouble.contains("engine_died"), "{trouble}");
    assert_eq!(fakes.iter().filter(|fake| fake.engine_is_dead()).count(), 2);
    for (tokens, sampling, answer) in beside {
        let answer = answer.await.unwrap();
        match &answer.trouble {
            Some(trouble) => assert!(trouble.contains("engine_died"), "{trouble}"),
            None => right(&answer, &tokens, &sampling),
        }
    }
    // The others serve, and nobody is sent to those that are dead.
    for at in 0..8 {
        let (tokens, sampling) = (harmless(at % 4), sampling(4));
        right(&listen(cluster.submit(&tokens, sampling.clone())).await, &tokens, &sampling);
    }
    cluster.quiet().await;
    cluster.stop().await;
}
