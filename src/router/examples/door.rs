//! The front door before an engine that says the prompt's last bytes back: for trying clients.
//!
//! `cargo run -p baton-router --example door -- 127.0.0.1:8080 [model folder]`. Prompts that contain
//! `refuse:N` are refused N times per request body, then served; `fail` breaks off after five tokens;
//! `slow` takes its time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use baton_router::{
    Backend, Event, Fault, Model, Readiness, Refusal, Router, RouterConfig, Submission, SubmissionStream,
    Tokenization, Usage,
};
use baton_types::{Finish, TokenLogprob};
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Says back the prompt, without its chat marks, over and over.
struct Echo {
    tokenization: Tokenization,
    model: Arc<Model>,
    refusals: Mutex<BTreeMap<Bytes, u32>>,
}

impl Echo {
    fn refusal(&self, text: &str, body: &Bytes) -> Option<Refusal> {
        let times: u32 = text.split("refuse:").nth(1)?.chars().next()?.to_digit(10)?;
        let mut refusals = self.refusals.lock();
        let so_far = refusals.entry(body.clone()).or_default();
        *so_far += 1;
        (*so_far <= times).then(|| Refusal {
            status: 429,
            reason: "ttft".into(),
            message: "every prefill would be too late".into(),
            param: None,
            retry_after_us: Some(1_100_000),
            predicted_ttft_us: Some(4_000_000),
        })
    }

    /// The tokens to answer with: the last line of the conversation that is not the assistant's.
    fn script(&self, text: &str) -> Vec<u32> {
        let said = text.trim_end_matches("assistant\n").trim_end();
        let line = said.rsplit("user\n").next().unwrap_or(said);
        let lineage = baton_router::Lineage { seed: 0, root: baton_types::BlockKey(0), block_tokens: 16 };
        self.tokenization
            .prompt_now(line, false, &lineage)
            .map(|prompt| prompt.tokens.to_vec())
            .unwrap_or_default()
    }
}

fn likely(token: u32, top: u8) -> TokenLogprob {
    let others = (1..u32::from(top)).map(|rank| (token.wrapping_add(rank) % 256, -1.5 - rank as f32));
    let top = std::iter::once((token, -0.25)).chain(others).take(usize::from(top)).collect();
    TokenLogprob { logprob: -0.25, top }
}

struct Reading {
    script: Vec<u32>,
    pause: Duration,
    fails: bool,
    cached_tokens: u64,
}

async fn speak(submission: Submission, reading: Reading, events: mpsc::Sender<Event>) -> Option<()> {
    let sampling = &submission.sampling;
    events.send(Event::Admitted { decision: Some("prefill=p0 decode=d0".into()) }).await.ok()?;
    if let Some(top) = sampling.prompt_logprobs {
        let logprobs = submission.tokens.iter().skip(1).map(|token| likely(token, top)).collect();
        events.send(Event::PromptLogprobs(logprobs)).await.ok()?;
    }
    for at in 0..sampling.max_tokens as usize {
        tokio::time::sleep(reading.pause).await;
        if reading.fails && at == 5 {
            let fault = Fault {
                status: 502,
                stage: "decode_lost".into(),
                message: "the decode node went away".into(),
            };
            return events.send(Event::Failed(fault)).await.ok();
        }
        let token = reading.script.get(at).copied();
        let token = token.or_else(|| sampling.ignore_eos.then(|| u32::from(b'.')));
        let Some(token) = token else {
            let usage = Usage { cached_tokens: reading.cached_tokens, moves: 0 };
            return events.send(Event::Finished { finish: Finish::Stop, usage }).await.ok();
        };
        let logprob = sampling.logprobs.map(|top| likely(token, top));
        events.send(Event::Token { token, logprob }).await.ok()?;
    }
    let usage = Usage { cached_tokens: reading.cached_tokens, moves: 0 };
    events.send(Event::Finished { finish: Finish::Length, usage }).await.ok()
}

impl Backend for Echo {
    fn submit(&self, submission: Submission) -> SubmissionStream {
        let (sender, events) = mpsc::channel(64);
        let gone = CancellationToken::new();
        let guard: DropGuard = gone.clone().drop_guard();
        let text = self.tokenization.decode(&submission.tokens.to_vec(), true);
        if let Some(refusal) = self.refusal(&text, &submission.body) {
            sender.try_send(Event::Refused(refusal)).expect("the channel is new and has room");
            return SubmissionStream { events, guard: Box::new(guard) };
        }
        let reading = Reading {
            script: self.script(&text),
            pause: if text.contains("slow") {
                Duration::from_millis(300)
            } else {
                Duration::from_micros(200)
            },
            fails: text.contains("fail"),
            cached_tokens: submission.tokens.len() as u64 / 16 * 16,
        };
        tokio::spawn(async move {
            tokio::select! {
                _ = speak(submission, reading, sender) => {}
                () = gone.cancelled() => {}
            }
        });
        SubmissionStream { events, guard: Box::new(guard) }
    }

    fn model(&self) -> Option<Arc<Model>> {
        Some(Arc::clone(&self.model))
    }

    fn readiness(&self) -> Readiness {
        Readiness { ready: true, detail: "an echo is always there".into() }
    }
}

fn tokenization(folder: Option<&str>) -> Result<Tokenization, Box<dyn std::error::Error>> {
    Ok(match folder {
        None => Tokenization::bytes(),
        Some(folder) => Tokenization::folder(folder.as_ref())?,
    })
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:8080".to_owned());
    let folder = arguments.next();
    let engine = tokenization(folder.as_deref())?;
    let model = Arc::new(Model {
        name: "echo".into(),
        aliases: vec!["org/echo".into()],
        revision: "1".into(),
        vocab_tokens: engine.vocab_tokens(),
        end_tokens: engine.end_tokens(),
        max_model_tokens: 262_144,
        block_tokens: 16,
        constrains: false,
    });
    let echo = Echo { tokenization: engine, model, refusals: Mutex::default() };
    let router = Router::new(RouterConfig::default(), tokenization(folder.as_deref())?, Arc::new(echo));
    let listener = tokio::net::TcpListener::bind(&address).await?;
    println!("http://{}/v1", listener.local_addr()?);
    let stop = CancellationToken::new();
    let stopping = stop.clone();
    tokio::spawn(async move {
        let _ = tokio::signal::ctrl_c().await;
        stopping.cancel();
    });
    Arc::new(router).serve(listener, stop).await;
    Ok(())
}
