//! The endpoint that is measured: whether it can be, and what it says of itself.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use baton_http::{Client, by};
use baton_remote::{Dialect, RemoteEngine, RemoteSettings};
use baton_types::Secret;
use bytes::Bytes;
use http::Method;

use super::caller::{AnswerFailure, AnswerStream, Caller, PATIENCE, PromptSpec, PromptWay};
use crate::cli::loadgen::answer::UsageFigures;
use crate::cli::loadgen::target::{ModelCard, Target};

/// Tokens of the prompts that find out how prompts are sent.
const TRIAL_TOKENS: [u32; 2] = [96, 480];
/// Tokens of the answers to them.
const TRIAL_ANSWER: u32 = 24;
/// An engine that is idle says so within this time: its figures are a few seconds old.
const IDLE_WITHIN: Duration = Duration::from_secs(6);
/// Longest page of metrics that is read, bytes.
const METRICS_BYTES: usize = 8 << 20;
/// Longest wait for a page.
const PAGE_TIME: Duration = Duration::from_secs(5);

/// Chooses the model: the one that was named, or the first that the endpoint lists.
pub async fn model(target: &Target, client: &Client, wanted: Option<&str>) -> Result<ModelCard> {
    let listed = target.models(client).await?;
    let names: Vec<&str> = listed.iter().map(|card| card.name.as_str()).take(8).collect();
    let at = target.base();
    match wanted {
        None => listed.first().cloned().with_context(|| {
            format!(
                "{at} lists no model; wait until it is ready, or give the URL of an OpenAI-compatible API"
            )
        }),
        Some(name) => listed.iter().find(|card| card.name == name).cloned().with_context(|| {
            format!(
                "{at} does not serve '{name}'; it serves: {}. Name one of them with --model",
                names.join(", ")
            )
        }),
    }
}

/// The outcome of a way to send prompts that works.
struct Trial {
    prompt_tokens: u64,
    /// Tokens for each event that carries some.
    per_event: f64,
}

/// Finds out how prompts reach the engine, sets the caller accordingly, and returns how many tokens come with an event.
///
/// # Errors
/// What each way came to, and what to do.
pub async fn find_way(caller: &mut Caller) -> Result<f64> {
    let chat = PromptWay::Chat { template_tokens: 0.0, tokens_per_letter: 1.0 };
    let ways = [(PromptWay::Ids, true), (chat.clone(), true), (chat, false)];
    let mut reasons: Vec<String> = Vec::new();
    for (way, ignore_eos) in ways {
        let name = match (&way, ignore_eos) {
            (PromptWay::Ids, _) => "token ids to /v1/completions",
            (_, true) => "text to /v1/chat/completions",
            (_, false) => "the same without ignore_eos",
        };
        (caller.way, caller.ignore_eos) = (way, ignore_eos);
        match works(caller).await {
            Ok(per_event) => return Ok(per_event),
            Err(AnswerFailure::Refused(status @ (401 | 403), why)) => {
                bail!("{}: {status}: {why}; give --api-key, or set BATON_API_KEY", caller.target.base());
            }
            Err(halt) => reasons.push(format!("{name}: {halt}")),
        }
    }
    bail!(
        "{} cannot be measured; it has to stream completions with usage. {}",
        caller.target.base(),
        reasons.join("; ")
    )
}

/// Tries the caller's way of sending prompts; one of text learns the lengths of its letters.
async fn works(caller: &mut Caller) -> Result<f64, AnswerFailure> {
    let [short, long] = TRIAL_TOKENS;
    let first = trial(caller, short).await?;
    if let PromptWay::Ids = caller.way {
        // One more: a token that begins every text.
        if first.prompt_tokens.abs_diff(u64::from(short)) > 1 {
            let why = format!("it counts {} tokens in a prompt of {short} ids", first.prompt_tokens);
            return Err(AnswerFailure::Failed(why));
        }
        return Ok(first.per_event);
    }
    let second = trial(caller, long).await?;
    let tokens_per_letter =
        (second.prompt_tokens as f64 - first.prompt_tokens as f64) / f64::from(long - short);
    if !(0.02..=4.0).contains(&tokens_per_letter) {
        let why = format!(
            "it counts {} and {} tokens in prompts of {short} and {long} letters",
            first.prompt_tokens, second.prompt_tokens
        );
        return Err(AnswerFailure::Failed(why));
    }
    let template_tokens = (first.prompt_tokens as f64 - tokens_per_letter * f64::from(short)).max(0.0);
    caller.way = PromptWay::Chat { template_tokens, tokens_per_letter };
    Ok(first.per_event)
}

async fn trial(caller: &Caller, tokens: u32) -> Result<Trial, AnswerFailure> {
    let mut answer = caller.send(PromptSpec::unique(tokens), TRIAL_ANSWER);
    let usage: Option<UsageFigures> = answer.end(Instant::now() + PATIENCE).await?;
    let Some(usage) = usage.filter(|usage| usage.prompt_tokens > 0) else {
        return Err(AnswerFailure::Failed("it counts no tokens (stream_options.include_usage)".into()));
    };
    if usage.completion_tokens < u64::from(TRIAL_ANSWER) {
        let why = format!("it ended an answer after {} of {TRIAL_ANSWER} tokens", usage.completion_tokens);
        return Err(AnswerFailure::Failed(why));
    }
    check_streaming(&answer)?;
    let per_event = usage.completion_tokens as f64 / answer.token_count().max(1) as f64;
    Ok(Trial {
        prompt_tokens: usage.prompt_tokens,
        per_event: if per_event < 1.05 { 1.0 } else { per_event },
    })
}

/// An answer that comes in one piece at its end shows no steps.
fn check_streaming(answer: &AnswerStream) -> Result<(), AnswerFailure> {
    let mut arrivals: Vec<u64> = answer.tokens.iter().map(|token| token.0).collect();
    arrivals.dedup();
    if arrivals.len() < 4 {
        return Err(AnswerFailure::Failed(format!(
            "{TRIAL_ANSWER} tokens came in {} pieces: it does not stream",
            arrivals.len()
        )));
    }
    Ok(())
}

/// The engine behind the endpoint as a node would attach it, for what it says of itself; `None` for a URL that is none.
pub fn engine(target: &Target, key: Option<&Secret<String>>, dialect: Dialect) -> Option<RemoteEngine> {
    let mut settings = RemoteSettings::new(dialect, target.base());
    settings.api_key = key.cloned();
    RemoteEngine::new(settings).ok()
}

/// Tokens that the engine's KV pool holds, as far as it is a kind that says so.
pub async fn capacity_tokens(target: &Target, key: Option<&Secret<String>>) -> Option<u64> {
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        if let Ok(probe) = engine(target, key, dialect)?.probe().await {
            return probe.capacity_tokens;
        }
    }
    None
}

/// Checks that one engine is behind the endpoint, and that it does nothing else, as far as its metrics show it.
///
/// # Errors
/// What it does, and what to do.
pub async fn check_idle(caller: &Caller, engine: Option<&RemoteEngine>) -> Result<()> {
    let until = Instant::now() + IDLE_WITHIN;
    loop {
        let page = metrics(caller).await;
        let nodes = |role: &str| total(&page, &format!("baton_nodes{{role=\"{role}\""));
        let (prefill, decode, both) = (nodes("prefill"), nodes("decode"), nodes("both"));
        if prefill + both > 1 || decode + both > 1 {
            bail!(
                "{} nodes serve behind {}; measure one engine at a time: `baton up --nodes 1b`, or the URL of an engine itself",
                prefill + decode + both,
                caller.target.base()
            );
        }
        let mut others = total(&page, "baton_node_running_sequences{");
        if let Some(engine) = engine
            && let Ok(load) = engine.load().await
        {
            others += load.running + load.waiting;
        }
        if others == 0 {
            return Ok(());
        }
        ensure!(
            Instant::now() <= until,
            "the engine works on {others} requests of others; take it out of service, or measure when it is idle"
        );
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// The page of metrics; empty where there is none.
async fn metrics(caller: &Caller) -> String {
    let request = caller.target.request(Method::GET, "/metrics", Bytes::new());
    let asked = caller.client.send_and_collect(request, METRICS_BYTES);
    match by(tokio::time::Instant::now() + PAGE_TIME, asked).await {
        Ok((status, page)) if status.is_success() => String::from_utf8_lossy(&page).into_owned(),
        _ => String::new(),
    }
}

/// The sum of the samples whose lines begin with `start`; counts only.
fn total(page: &str, start: &str) -> u64 {
    let values =
        page.lines().filter(|line| line.starts_with(start)).filter_map(|line| line.rsplit(' ').next());
    values.filter_map(|value| value.parse::<u64>().ok()).sum()
}
