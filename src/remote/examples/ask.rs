//! Asks real engines: what they are, what they have to do, and an answer. With two URLs, as a pair.
//!
//! `cargo run -p baton-remote --example ask -- vllm http://127.0.0.1:8000`
//! `cargo run -p baton-remote --example ask -- nixl http://127.0.0.1:8200 http://127.0.0.1:8300`
//! `cargo run -p baton-remote --example ask -- mooncake http://127.0.0.1:8200 http://127.0.0.1:8300 http://127.0.0.1:8998`
//! `cargo run -p baton-remote --example ask -- sglang http://127.0.0.1:30000 http://127.0.0.1:30001 8998`

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use baton_remote::{
    ClientBody, CollectedAnswer, Dialect, Handoff, HandoffWay, NextStep, RemoteEngine, RemoteSettings,
    Request,
};
use baton_types::Sampling;

type Outcome<T> = Result<T, Box<dyn Error>>;

#[tokio::main]
async fn main() -> Outcome<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let word = |at: usize| words.get(at).map(String::as_str);
    let (Some(kind), Some(first)) = (word(0), word(1)) else {
        return Err("give a kind (vllm, nixl, mooncake, sglang, plain) and one or two URLs".into());
    };
    let way = match (kind, word(2).is_some()) {
        ("nixl", true) => HandoffWay::Nixl,
        ("mooncake", true) => HandoffWay::Mooncake { bootstrap_url: word(3).unwrap_or_default().into() },
        ("sglang", true) => HandoffWay::Rooms { host: None, port: word(3).unwrap_or("8998").parse()? },
        _ => HandoffWay::None,
    };
    let dialect = match kind {
        "sglang" => Dialect::Sglang,
        "plain" => Dialect::Plain,
        _ => Dialect::Vllm,
    };
    let engine = |url: &str| RemoteEngine::new(RemoteSettings::new(dialect, url).with_handoff(way.clone()));
    let prefill = engine(first)?;
    show(&prefill).await?;
    let request = request();
    let started = Instant::now();
    let answer = match word(2) {
        None => prefill.generate(request).await?.all().await?,
        Some(second) => {
            let decode = engine(second)?;
            show(&decode).await?;
            pair(&prefill, &decode, request).await?
        }
    };
    let ids: Vec<u32> = answer.tokens.iter().map(|token| token.id).collect();
    println!(
        "{:?} after {:.1} ms, {:?}: {ids:?}",
        answer.finish,
        started.elapsed().as_secs_f64() * 1e3,
        answer.counts
    );
    Ok(())
}

async fn show(engine: &RemoteEngine) -> Outcome<()> {
    println!("{}: {:?}", engine.settings().url, engine.probe().await?);
    match engine.load().await {
        Ok(load) => println!("  {load:?}"),
        Err(error) => println!("  {error}"),
    }
    Ok(())
}

async fn pair(prefill: &RemoteEngine, decode: &RemoteEngine, request: Request) -> Outcome<CollectedAnswer> {
    let mut leg = prefill.prefill(request.clone()).await?;
    if let Some(handoff) = leg.offer() {
        let decoded = async { decode.decode(request, handoff).await?.all().await };
        let (done, answer) = tokio::try_join!(leg.run(), decoded)?;
        println!("  prefill: {:?}", done.counts);
        return Ok(answer);
    }
    let done = leg.run().await?;
    println!("  prefill: {:?}", done.counts);
    match done.next {
        NextStep::Decode(handoff) => {
            let handoff = Handoff::from_bytes(&handoff.into_bytes())?;
            Ok(decode.decode(request, handoff).await?.all().await?)
        }
        NextStep::Answer(finish) => Ok(CollectedAnswer {
            tokens: done.tokens,
            finish: Some(finish),
            counts: done.counts,
            ..CollectedAnswer::default()
        }),
        NextStep::Offered => Err("an offer that was not taken".into()),
    }
}

fn request() -> Request {
    let sampling = Sampling { temperature: 0.0, max_tokens: 24, ignore_eos: true, ..Sampling::default() };
    Request {
        id: "ask".into(),
        tokens: (1..=100).collect::<Vec<u32>>().into(),
        sampling: Arc::new(sampling),
        body: ClientBody::default(),
        salt: None,
    }
}
