//! Measures the cost of the front door: from a body to tokens and chain, and from an event to bytes.
//!
//! `cargo run --release -p baton-router --example pace [model folder]` prints medians of wall time on
//! one thread, in µs, through `Router::call` alone: no sockets.

use std::sync::Arc;
use std::time::Instant;

use baton_router::{
    Backend, Event, Model, Readiness, Router, RouterConfig, Submission, SubmissionStream, Tokenization, Usage,
};
use baton_types::Finish;
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use parking_lot::Mutex;
use tokio::sync::mpsc;

const EVENTS: usize = 20_000;

/// Notes when it is asked, and says all at once that it has to say.
struct InstantBackend {
    model: Arc<Model>,
    submitted: Mutex<Option<Instant>>,
    prompt_tokens: Mutex<usize>,
}

impl Backend for InstantBackend {
    fn submit(&self, submission: Submission) -> SubmissionStream {
        *self.submitted.lock() = Some(Instant::now());
        *self.prompt_tokens.lock() = submission.tokens.len();
        let tokens = submission.sampling.max_tokens as usize;
        let said = |at: usize| Event::Token { token: u32::from(b'a') + (at % 26) as u32, logprob: None };
        let end = Event::Finished { finish: Finish::Length, usage: Usage::default() };
        if submission.class.as_deref() == Some("one by one") {
            let (sender, events) = mpsc::channel(1);
            tokio::spawn(async move {
                let all = std::iter::once(Event::Admitted { decision: None })
                    .chain((0..tokens).map(said))
                    .chain([end]);
                for event in all {
                    sender.send(event).await.expect("the answer is read to its end");
                }
            });
            return SubmissionStream { events, guard: Box::new(()) };
        }
        let (sender, events) = mpsc::channel(tokens + 2);
        let say = |event| sender.try_send(event).expect("the channel has room for all");
        say(Event::Admitted { decision: None });
        (0..tokens).map(said).for_each(say);
        say(end);
        SubmissionStream { events, guard: Box::new(()) }
    }

    fn model(&self) -> Option<Arc<Model>> {
        Some(Arc::clone(&self.model))
    }

    fn readiness(&self) -> Readiness {
        Readiness { ready: true, detail: String::new() }
    }
}

fn request(body: String) -> Request<Full<Bytes>> {
    let request = Request::post("/v1/chat/completions").header("content-type", "application/json");
    request.body(Full::new(body.into())).expect("a request of constants")
}

/// A chat of about `bytes` in turns of 2 KiB, whose last turn is `last`.
fn chat(bytes: usize, last: usize, salt: usize) -> String {
    let words = "the quick brown fox jumps over the lazy dog, and says \\\"hello\\\" to it.\\n";
    let turn = words.repeat(2_048 / words.len());
    let mut messages = String::new();
    for at in 0..bytes / turn.len() {
        let role = if at % 2 == 0 { "user" } else { "assistant" };
        messages.push_str(&format!("{{\"role\":\"{role}\",\"content\":\"{at} {turn}\"}},"));
    }
    format!(
        "{{\"model\":\"m\",\"cache_salt\":\"{salt}\",\"max_tokens\":1,\"messages\":[{messages}{{\"role\":\"user\",\"content\":\"{last}\"}}]}}"
    )
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

async fn to_submission(
    router: &Router,
    backend: &InstantBackend,
    bodies: impl Iterator<Item = String>,
) -> f64 {
    let mut times = Vec::new();
    for body in bodies {
        let request = request(body);
        let begun = Instant::now();
        let reply = router.call(request).await;
        let submitted =
            backend.submitted.lock().take().unwrap_or_else(|| panic!("refused: {}", reply.status()));
        times.push((submitted - begun).as_secs_f64() * 1e6);
    }
    median(times)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let tokenization = match std::env::args().nth(1) {
        None => Tokenization::bytes(),
        Some(folder) => Tokenization::folder(folder.as_ref())?,
    };
    let model = Model {
        name: "m".into(),
        aliases: Vec::new(),
        revision: "1".into(),
        vocab_tokens: tokenization.vocab_tokens(),
        end_tokens: tokenization.end_tokens(),
        max_model_tokens: 1 << 20,
        block_tokens: 16,
        constrains: false,
    };
    let backend = Arc::new(InstantBackend {
        model: Arc::new(model),
        submitted: Mutex::default(),
        prompt_tokens: Mutex::default(),
    });
    let router = Router::new(RouterConfig::default(), tokenization, Arc::clone(&backend) as Arc<dyn Backend>);
    for (name, bytes) in [("0 KiB", 0), ("16 KiB", 16 << 10), ("128 KiB", 128 << 10), ("512 KiB", 512 << 10)]
    {
        let cold = to_submission(&router, &backend, (0..60).map(|at| chat(bytes, 0, 1_000 + at))).await;
        let warm = to_submission(&router, &backend, (0..200).map(|at| chat(bytes, at, 1_000))).await;
        let tokens = *backend.prompt_tokens.lock();
        println!(
            "chat of {name:>7}, {tokens:>6} tokens: first time {cold:>7.1} µs, next turn {warm:>7.1} µs"
        );
    }
    let tool = r#""tools":[{"type":"function","function":{"name":"now"}}],"#;
    let ways = [(true, "one by one"), (true, "at once"), (false, "at once")];
    for ((stream, class), tools) in ways.into_iter().flat_map(|way| [(way, ""), (way, tool)]) {
        let body = format!(
            "{{\"messages\":[{{\"role\":\"user\",\"content\":\"x\"}}],{tools}\"max_tokens\":{EVENTS},\"stream\":{stream},\"service_tier\":\"{class}\"}}"
        );
        let mut times = Vec::new();
        for _ in 0..20 {
            let begun = Instant::now();
            let reply = router.call(request(body.clone())).await;
            let bytes = reply.into_body().collect().await?.to_bytes();
            times.push(begun.elapsed().as_secs_f64() * 1e6 / EVENTS as f64);
            let events = bytes.windows(6).filter(|six| six == b"data: ").count();
            assert!(!stream || events == EVENTS + 3, "{events} events: role, tokens, end and the last word");
        }
        println!(
            "{EVENTS} tokens that come {class}, streamed {stream}, calls looked for {}: {:.3} µs each, with the channel",
            !tools.is_empty(),
            median(times)
        );
    }
    Ok(())
}
