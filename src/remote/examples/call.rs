//! How fast tokens pass: stand-ins and their clients in one process on loopback, so the figures hold both sides.
//!
//! `cargo run --release -p baton-remote --example call`

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_remote::testing::{Fabric, FakeConnector, FakeRole, FakeVllm, VllmSpec};
use baton_remote::{ClientBody, Handoff, NextStep, Piece, RemoteEngine, Request};
use baton_types::Sampling;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

fn request(prompt_tokens: u32, max_tokens: u32) -> Request {
    let sampling = Sampling { temperature: 0.0, max_tokens, ignore_eos: true, ..Sampling::default() };
    let tokens = (0..prompt_tokens).map(|at| 1 + at % 2_000).collect::<Vec<u32>>().into();
    Request {
        id: "pace".into(),
        tokens,
        sampling: Arc::new(sampling),
        body: ClientBody::default(),
        salt: None,
    }
}

async fn start(
    role: FakeRole,
    connector: FakeConnector,
    fabric: &Fabric,
) -> Outcome<(FakeVllm, RemoteEngine)> {
    let spec = VllmSpec { max_model_tokens: 1 << 20, blocks: 65_536, ..VllmSpec::new(role, connector) };
    let fake = FakeVllm::start(spec, fabric).await?;
    let engine = RemoteEngine::new(fake.settings())?;
    Ok((fake, engine))
}

/// Time of one answer, and of its first token.
async fn one(engine: &RemoteEngine, asked: Request) -> Outcome<(Duration, Duration)> {
    let started = Instant::now();
    let mut generation = engine.generate(asked).await?;
    let mut first = None;
    while let Some(piece) = generation.next().await {
        if let Piece::Tokens(_) = piece? {
            first.get_or_insert_with(|| started.elapsed());
        }
    }
    Ok((first.unwrap_or_default(), started.elapsed()))
}

fn middle(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times.get(times.len() / 2).map_or(0.0, |time| time.as_secs_f64() * 1e6)
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Outcome<()> {
    let fabric = Fabric::new();
    let (_whole, engine) = start(FakeRole::Whole, FakeConnector::None, &fabric).await?;
    one(&engine, request(64, 64)).await?;
    for prompt_tokens in [64, 8_192, 131_072] {
        let mut firsts = Vec::new();
        for _ in 0..51 {
            firsts.push(one(&engine, request(prompt_tokens, 1)).await?.0);
        }
        println!("first token, prompt of {prompt_tokens}: {:.0} µs", middle(firsts));
    }
    for streams in [1u32, 16, 128] {
        let tokens = 500;
        let started = Instant::now();
        let mut running = Vec::new();
        for _ in 0..streams {
            let engine = engine.clone();
            running.push(tokio::spawn(async move { one(&engine, request(64, tokens)).await }));
        }
        for stream in running {
            stream.await??;
        }
        let rate = f64::from(streams * tokens) / started.elapsed().as_secs_f64();
        println!("{streams} streams: {rate:.0} tokens/s");
    }
    let (_p, prefill) = start(FakeRole::Prefill, FakeConnector::Nixl, &fabric).await?;
    let (_d, decode) = start(FakeRole::Decode, FakeConnector::Nixl, &fabric).await?;
    let mut pairs = Vec::new();
    for _ in 0..51 {
        let asked = request(1_024, 2);
        let started = Instant::now();
        let done = prefill.prefill(asked.clone()).await?.run().await?;
        let NextStep::Decode(handoff) = done.next else { return Err("no hand-off".into()) };
        let handoff = Handoff::from_bytes(&handoff.into_bytes())?;
        decode.decode(asked, handoff).await?.all().await?;
        pairs.push(started.elapsed());
    }
    println!("both legs, prompt of 1024, 2 tokens: {:.0} µs", middle(pairs));
    Ok(())
}
