//! Stand-ins of engines as a program: what routers are compared in front of (`scripts/compare`).
//!
//! `cargo run --release -p baton-remote --features testing --example stand_in -- --engine vllm --whole 9000,9001`
//! `... -- --engine sglang --prefill 9000,9001 --decode 9002,9003 --bootstrap 9100,9101`
//!
//! A token is a byte. With `--tokenizer FOLDER` it is a token of that folder's byte-level BPE, chats are rendered as ChatML
//! (the template that `scripts/compare/tokenizer.py` writes), and an answer has one word for each token.
//!
//! All of them are in one process and on one thread, as the engines of a pair have to meet. Each counts in `/metrics` the prompt tokens that
//! it was asked for and those that its cache held. The program ends with its standard input, or at Ctrl-C, and says then what the engines
//! should not have been sent; with anything to say it fails.

use std::collections::BTreeMap;
use std::error::Error;
use std::ops::Deref;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use baton_remote::testing::{
    Cost, Fabric, FakeConnector, FakeRole, FakeSglang, FakeTokenizer, FakeVllm, SglangSpec, Stand,
    TrainedTokenizer, VllmSpec,
};
use serde_json::Value;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const USAGE: &str = "stand_in --engine vllm|sglang [--whole PORTS] [--prefill PORTS --decode PORTS] [--bootstrap PORTS] \
    [--tokenizer FOLDER] [--block-tokens 64] [--cache-blocks 0] [--prompt-token-us 0] [--token-us 0] [--step-tokens 0] [--max-model-tokens 262144]; PORTS like 9000,9001";

/// The arguments of the command line.
struct Args(BTreeMap<String, String>);

impl Args {
    fn read() -> Outcome<Self> {
        let known = USAGE.split_whitespace().map(|word| word.trim_matches(|c| "[];".contains(c)));
        let known: Vec<&str> = known.filter(|word| word.starts_with("--")).collect();
        let mut all = BTreeMap::new();
        let mut words = std::env::args().skip(1);
        while let Some(name) = words.next() {
            let value = words.next().filter(|_| known.contains(&name.as_str()));
            let value = value.ok_or_else(|| format!("{name}: not known, or without a value; {USAGE}"))?;
            all.insert(name, value);
        }
        Ok(Self(all))
    }

    fn number(&self, name: &str, otherwise: u32) -> Outcome<u32> {
        let Some(text) = self.0.get(name) else { return Ok(otherwise) };
        text.parse().map_err(|error| format!("{name} {text}: {error}").into())
    }

    fn micros(&self, name: &str) -> Outcome<Duration> {
        Ok(Duration::from_micros(self.number(name, 0)?.into()))
    }

    fn ports(&self, name: &str) -> Outcome<Vec<u16>> {
        let text = self.0.get(name).map_or("", String::as_str);
        let words = text.split(',').filter(|word| !word.is_empty());
        words.map(|word| word.parse().map_err(|error| format!("{name} {word}: {error}").into())).collect()
    }

    fn cost(&self) -> Outcome<Cost> {
        let prompt_token_time = self.micros("--prompt-token-us")?;
        let step_tokens = self.number("--step-tokens", 0)?;
        Ok(Cost { cache_blocks: self.number("--cache-blocks", 0)?, prompt_token_time, step_tokens })
    }

    fn tokenizer(&self) -> Outcome<FakeTokenizer> {
        let Some(folder) = self.0.get("--tokenizer") else { return Ok(FakeTokenizer::BYTES) };
        let file = Path::new(folder).join("tokenizer.json");
        let read = std::fs::read(&file).map_err(Into::into).and_then(|json| trained(&json));
        let trained = read.map_err(|error| format!("{}: {error}", file.display()))?;
        // Every stand-in uses it until the program ends.
        Ok(FakeTokenizer { trained: Some(Box::leak(Box::new(trained))), ..FakeTokenizer::BYTES })
    }
}

/// Reads a `tokenizer.json`. The words for answers each begin with a space: byte-level BPE splits a text before every such
/// space, so a word never merges with its neighbours.
fn trained(json: &[u8]) -> Outcome<TrainedTokenizer> {
    let json: Value = serde_json::from_slice(json)?;
    let vocabulary = json["model"]["vocab"].as_object().ok_or("its model has no vocabulary")?;
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let highest = vocabulary.values().chain(added(&json)).filter_map(id).max().unwrap_or(0);
    let encoder = encoder(json.clone())?;
    let is_word = |word: &str| word.len() > 1 && word.bytes().all(|byte| byte.is_ascii_lowercase());
    let words = vocabulary.iter().filter_map(|(name, token)| {
        let (word, token) = (name.strip_prefix('Ġ').filter(|word| is_word(word))?, id(token)?);
        let text = format!(" {word}");
        (encoder.encode(&text).ok()? == [token]).then_some((token, text))
    });
    let words = words.collect();
    let encode = move |text: &str| encoder.encode(text).map_err(|error| error.to_string());
    Ok(TrainedTokenizer::new(encode, highest + 1, words)?)
}

/// Ids of the added tokens, which the model's vocabulary may lack.
fn added(json: &Value) -> impl Iterator<Item = &Value> {
    json["added_tokens"].as_array().into_iter().flatten().map(|token| &token["id"])
}

/// An encoder that neither truncates nor pads.
fn encoder(json: Value) -> Outcome<fastokens::Tokenizer> {
    let mut encoder = fastokens::Tokenizer::from_json(json)?;
    encoder.set_truncation(None);
    encoder.set_padding(None);
    Ok(encoder)
}

/// Room for everything that runs at a time: what is compared is routers.
const POOL_TOKENS: u32 = 1 << 23;
/// Longer than any load lasts that is meant.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Any stand-in.
enum Engine {
    Vllm(FakeVllm),
    Sglang(FakeSglang),
}

impl Engine {
    async fn start(
        args: &Args,
        tokenizer: FakeTokenizer,
        (role, at): (FakeRole, (u16, u16)),
        fabric: &Fabric,
    ) -> Outcome<Self> {
        let block_tokens = args.number("--block-tokens", 64)?.max(1);
        let max_model_tokens = args.number("--max-model-tokens", 1 << 18)?;
        let (token_time, cost) = (args.micros("--token-us")?, args.cost()?);
        let (port, bootstrap_port) = at;
        Ok(match args.0.get("--engine").map(String::as_str) {
            Some("vllm") => {
                let connector =
                    if role == FakeRole::Whole { FakeConnector::None } else { FakeConnector::Nixl };
                let spec = VllmSpec {
                    block_tokens,
                    blocks: POOL_TOKENS / block_tokens,
                    max_model_tokens,
                    token_time,
                    cost,
                    port,
                    letters: true,
                    remembers: false,
                    tokenizer,
                    ..VllmSpec::new(role, connector)
                };
                Self::Vllm(FakeVllm::start(spec, fabric).await?)
            }
            Some("sglang") => {
                let spec = SglangSpec {
                    bootstrap_port,
                    wait: TIME_LIMIT,
                    repeats: false,
                    pool_tokens: POOL_TOKENS,
                    page_tokens: block_tokens,
                    max_model_tokens,
                    token_time,
                    cost,
                    port,
                    letters: true,
                    remembers: false,
                    tokenizer,
                    ..SglangSpec::new(role)
                };
                Self::Sglang(FakeSglang::start(spec, fabric).await?)
            }
            _ => return Err(USAGE.into()),
        })
    }

    fn url(&self) -> String {
        match self {
            Self::Vllm(engine) => engine.url(),
            Self::Sglang(engine) => engine.url(),
        }
    }
}

impl Deref for Engine {
    type Target = Stand;

    fn deref(&self) -> &Stand {
        match self {
            Self::Vllm(engine) => engine,
            Self::Sglang(engine) => engine,
        }
    }
}

async fn start(args: &Args) -> Outcome<Vec<Engine>> {
    let (fabric, mut engines) = (Fabric::new(), Vec::new());
    let (bootstraps, tokenizer) = (args.ports("--bootstrap")?, args.tokenizer()?);
    let roles =
        [("--whole", FakeRole::Whole), ("--prefill", FakeRole::Prefill), ("--decode", FakeRole::Decode)];
    for (name, role) in roles {
        for (at, port) in args.ports(name)?.into_iter().enumerate() {
            let bootstrap = bootstraps.get(at).copied().unwrap_or(8_998);
            let engine = Engine::start(args, tokenizer, (role, (port, bootstrap)), &fabric).await?;
            println!("{} on {}", name.trim_start_matches('-'), engine.url());
            engines.push(engine);
        }
    }
    if engines.is_empty() {
        return Err(format!("no port to serve on; {USAGE}").into());
    }
    println!("ready");
    Ok(engines)
}

async fn over() {
    // A read that fails has ended too.
    let ended = tokio::task::spawn_blocking(|| std::io::copy(&mut std::io::stdin(), &mut std::io::sink()));
    tokio::select! {
        _ = ended => {}
        _ = tokio::signal::ctrl_c() => {}
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Outcome<ExitCode> {
    let args = Args::read()?;
    let engines = start(&args).await?;
    over().await;
    let mut fine = true;
    for engine in &engines {
        for violation in engine.violations() {
            fine = false;
            println!("{}: {violation}", engine.url());
        }
        if engine.exited() {
            fine = false;
            println!("{}: exited", engine.url());
        }
    }
    Ok(if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
