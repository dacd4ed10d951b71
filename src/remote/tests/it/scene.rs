//! Helpers that the tests share: requests, pairs, and waiting for a condition.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_remote::testing::{
    Fabric, FakeConnector, FakeRole, FakeSglang, FakeVllm, SglangSpec, VllmSpec, toy_answer,
};
use baton_remote::{
    ClientBody, Generation, Handoff, NextStep, PrefillResult, RemoteEngine, RemoteError, RemoteSettings,
    Request,
};
use baton_types::{Finish, Sampling};
use bytes::Bytes;

/// A prompt of the vocabulary.
pub fn prompt(seed: u32, length: usize) -> Vec<u32> {
    let next = |state: &mut u32| {
        *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        Some(1 + (*state >> 8) % 2_000)
    };
    std::iter::successors(Some(seed.wrapping_mul(97)), |state| Some(*state))
        .scan(seed, |state, _| next(state))
        .take(length)
        .collect()
}

/// Greedy, never at an end before `max_tokens`.
pub fn greedy(max_tokens: u32) -> Sampling {
    Sampling { temperature: 0.0, max_tokens, ignore_eos: true, ..Sampling::default() }
}

pub fn request(tokens: &[u32], sampling: Sampling) -> Request {
    Request {
        id: "test".into(),
        tokens: tokens.to_vec().into(),
        sampling: Arc::new(sampling),
        body: ClientBody::default(),
        salt: None,
    }
}

pub fn with_body(request: Request, body: &str) -> Request {
    Request { body: Bytes::copy_from_slice(body.as_bytes()).into(), ..request }
}

/// The answer that the toy model gives.
pub fn truth(request: &Request) -> (Vec<u32>, Finish) {
    toy_answer(&request.tokens, &request.sampling)
}

pub async fn ids(generation: Result<Generation, RemoteError>) -> Result<(Vec<u32>, Finish), RemoteError> {
    let all = generation?.all().await?;
    Ok((all.tokens.iter().map(|token| token.id).collect(), all.finish.unwrap()))
}

/// An engine with short time limits, so that their tests are short too.
pub fn engine(settings: RemoteSettings) -> RemoteEngine {
    engine_with(settings, |_| {})
}

pub fn engine_with(mut settings: RemoteSettings, change: impl FnOnce(&mut RemoteSettings)) -> RemoteEngine {
    settings.timeouts.connect_us = 2_000_000;
    settings.timeouts.page_us = 5_000_000;
    settings.timeouts.answer_us = 10_000_000;
    settings.timeouts.first_token_us = 10_000_000;
    settings.timeouts.silence_us = 10_000_000;
    change(&mut settings);
    RemoteEngine::new(settings).unwrap()
}

/// Two vLLMs with a connector.
pub struct VllmPair {
    pub p: FakeVllm,
    pub d: FakeVllm,
    pub prefill: RemoteEngine,
    pub decode: RemoteEngine,
}

impl VllmPair {
    pub async fn new(connector: FakeConnector) -> Self {
        Self::with(connector, |_| {}, |_| {}).await
    }

    pub async fn with(
        connector: FakeConnector,
        spec: impl Fn(&mut VllmSpec),
        settings: impl Fn(&mut RemoteSettings),
    ) -> Self {
        let fabric = Fabric::new();
        let start = async |role| {
            let mut one = VllmSpec::new(role, connector);
            spec(&mut one);
            FakeVllm::start(one, &fabric).await.unwrap()
        };
        let (p, d) = (start(FakeRole::Prefill).await, start(FakeRole::Decode).await);
        let prefill = engine_with(p.settings(), &settings);
        let decode = engine_with(d.settings(), &settings);
        Self { p, d, prefill, decode }
    }

    /// Both legs, one after the other, with the hand-off as bytes between them.
    pub async fn serve(&self, request: &Request) -> Result<(Vec<u32>, Finish), RemoteError> {
        let done = self.prefill.prefill(request.clone()).await?.run().await?;
        match done.next {
            NextStep::Answer(finish) => Ok((done.tokens.iter().map(|token| token.id).collect(), finish)),
            NextStep::Decode(handoff) => {
                let handoff = Handoff::from_bytes(&handoff.into_bytes())?;
                ids(self.decode.decode(request.clone(), handoff).await).await
            }
            NextStep::Offered => panic!("vLLM's hand-offs come after the prefill"),
        }
    }

    pub async fn handoff(&self, request: &Request) -> Handoff {
        handoff_of(self.prefill.prefill(request.clone()).await.unwrap().run().await.unwrap())
    }

    pub fn assert_no_violation(&self) {
        assert_eq!(self.p.violations(), Vec::<String>::new());
        assert_eq!(self.d.violations(), Vec::<String>::new());
        assert!(!self.p.exited() && !self.d.exited());
    }
}

pub fn handoff_of(done: PrefillResult) -> Handoff {
    match done.next {
        NextStep::Decode(handoff) => handoff,
        other => panic!("no hand-off but {other:?}"),
    }
}

/// Two SGLangs.
pub struct SglangPair {
    pub p: FakeSglang,
    pub d: FakeSglang,
    pub prefill: RemoteEngine,
    pub decode: RemoteEngine,
}

impl SglangPair {
    pub async fn new() -> Self {
        Self::with(|_| {}, |_| {}).await
    }

    pub async fn with(spec: impl Fn(&mut SglangSpec), settings: impl Fn(&mut RemoteSettings)) -> Self {
        let fabric = Fabric::new();
        let start = async |role| {
            let mut one = SglangSpec::new(role);
            spec(&mut one);
            FakeSglang::start(one, &fabric).await.unwrap()
        };
        let (p, d) = (start(FakeRole::Prefill).await, start(FakeRole::Decode).await);
        let prefill = engine_with(p.settings(), &settings);
        let decode = engine_with(d.settings(), &settings);
        Self { p, d, prefill, decode }
    }

    /// Both legs at once; when one fails, the other is dropped.
    pub async fn serve(&self, request: &Request) -> Result<(Vec<u32>, Finish), RemoteError> {
        let mut leg = self.prefill.prefill(request.clone()).await?;
        let handoff = Handoff::from_bytes(&leg.offer().unwrap().into_bytes())?;
        assert!(leg.offer().is_none(), "a hand-off is offered once");
        let decode = async { ids(self.decode.decode(request.clone(), handoff).await).await };
        let ((), answer) = tokio::try_join!(async { leg.run().await.map(drop) }, decode)?;
        Ok(answer)
    }

    pub fn assert_no_violation(&self) {
        assert_eq!(self.p.violations(), Vec::<String>::new());
        assert_eq!(self.d.violations(), Vec::<String>::new());
        assert!(!self.p.exited() && !self.d.exited());
    }

    pub fn held(&self) -> usize {
        self.p.held_tokens() + self.d.held_tokens()
    }
}

/// Waits until something is so; the limit is long, for machines are slow.
pub async fn becomes(what: &str, so: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !so() {
        assert!(Instant::now() < until, "{what} did not become so");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
