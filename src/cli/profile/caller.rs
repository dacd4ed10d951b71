//! Requests of a measurement: unique prompts of a given length, and when the tokens of each answer arrived.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use baton_http::{Client, next_piece, whole};
use baton_sim::workload::Arrival;
use baton_types::RequestObjectives;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{Method, Request};
use http_body_util::Full;
use indicatif::ProgressBar;
use serde_json::{Value, json};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio_util::task::AbortOnDropHandle;

use crate::cli::loadgen::answer::{Answer, ErrorBody, UsageFigures};
use crate::cli::loadgen::clock::RunClock;
use crate::cli::loadgen::prompt::Vocabulary;
use crate::cli::loadgen::sse::EventReader;
use crate::cli::loadgen::target::{MAX_BODY_BYTES, Target};

/// Tokens of the blocks that prompts are made of: shared prefixes are a multiple of it, and so of every usual KV block.
pub const PREFIX_GRAIN: u32 = 64;
/// No engine is silent for longer while it works on a request of this program alone, as long as its speed is unknown.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// How prompts reach the engine.
#[derive(Clone, Debug, PartialEq)]
pub enum PromptWay {
    /// Token ids to `/v1/completions`: exact lengths, and nothing to tokenise.
    Ids,
    /// Text to `/v1/chat/completions`; how many tokens it becomes is known from the engine's own counts.
    Chat {
        /// Tokens that the chat template adds.
        template_tokens: f64,
        /// Tokens of a letter.
        tokens_per_letter: f64,
    },
}

/// A prompt to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptSpec {
    /// All of its tokens.
    pub tokens: u32,
    /// Name and length of what it begins with, when that is shared with other prompts.
    pub prefix: Option<(u64, u32)>,
}

impl PromptSpec {
    /// A prompt that shares nothing.
    pub const fn unique(tokens: u32) -> Self {
        Self { tokens, prefix: None }
    }
}

/// Why an answer did not get as far as was waited for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnswerFailure {
    /// The endpoint refused the request: status and words.
    #[error("the endpoint answered {0}: {1}")]
    Refused(u16, String),
    /// It took too long.
    #[error("no token came in time")]
    Late,
    /// It ended with fewer tokens.
    #[error("the answer ended early")]
    Short,
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}

/// Sends the requests of a measurement.
pub struct Caller {
    /// Where to.
    pub target: Target,
    /// Over what.
    pub client: Client,
    /// The model's name in requests.
    pub model: String,
    /// How prompts are sent.
    pub way: PromptWay,
    /// Whether the engine is asked to go on where it would end an answer.
    pub ignore_eos: bool,
    /// Names the prompts of this run: an earlier one's may be in the cache.
    pub seed: u64,
    /// Requests that may be sent.
    pub requests: u32,
    /// Those of them that no new point may take.
    pub reserve: u32,
    /// When the measurement has to end.
    pub deadline: Instant,
    /// Shows how far it is.
    pub bar: ProgressBar,
    clock: RunClock,
    sent: AtomicU32,
    rows: AtomicU64,
}

impl Caller {
    /// A caller of `model` at `target`, bounded by a number of requests and a time.
    pub fn new(target: Target, client: Client, model: String, (requests, budget): (u32, Duration)) -> Self {
        let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let seed = since_epoch.map_or(0, |time| time.as_nanos() as u64);
        Self {
            target,
            client,
            model,
            way: PromptWay::Ids,
            ignore_eos: true,
            seed,
            requests,
            reserve: 0,
            deadline: Instant::now() + budget,
            bar: ProgressBar::hidden(),
            clock: RunClock::starting_in(Duration::ZERO),
            sent: AtomicU32::new(0),
            rows: AtomicU64::new(0),
        }
    }

    /// Requests sent so far.
    pub fn sent(&self) -> u32 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Requests that may still be sent.
    pub fn left(&self) -> u32 {
        self.requests.saturating_sub(self.sent())
    }

    /// Whether there is no time left, or no requests for more than ending what was begun.
    pub fn is_spent(&self) -> bool {
        Instant::now() >= self.deadline || self.left() <= self.reserve
    }

    /// Sends a request for `max_tokens` tokens and reads its answer as it comes.
    pub fn send(&self, prompt: PromptSpec, max_tokens: u32) -> AnswerStream {
        self.sent.fetch_add(1, Ordering::Relaxed);
        self.bar.inc(1);
        let (sender, events) = channel(max_tokens as usize + 16);
        let (client, clock) = (self.client.clone(), self.clock);
        let sent_us = clock.now_us();
        let request = self.request(prompt, max_tokens);
        let reading = tokio::spawn(async move {
            let ended = read(&client, request, clock, &sender).await;
            // Nobody waits for an answer that was dropped.
            let _ = sender.send(StreamEvent::Ended(ended)).await;
        });
        AnswerStream {
            sent_us,
            prompt_tokens: prompt.tokens,
            tokens: Vec::new(),
            ended: None,
            events,
            _reading: AbortOnDropHandle::new(reading),
        }
    }

    fn request(&self, prompt: PromptSpec, max_tokens: u32) -> Request<Full<Bytes>> {
        let mut body = json!({
            "model": self.model, "max_tokens": max_tokens, "temperature": 0, "stream": true,
            "stream_options": {"include_usage": true},
        });
        if self.ignore_eos {
            body["ignore_eos"] = true.into();
        }
        let path = match &self.way {
            PromptWay::Ids => "/v1/completions",
            PromptWay::Chat { .. } => "/v1/chat/completions",
        };
        let text = self.prompt(prompt);
        let head = body.to_string();
        let head = head.strip_suffix('}').expect("an object ends with a brace");
        let body = match &self.way {
            PromptWay::Ids => format!("{head},\"prompt\":{text}}}"),
            PromptWay::Chat { .. } => {
                format!("{head},\"messages\":[{{\"role\":\"user\",\"content\":{text}}}]}}")
            }
        };
        self.target.request(Method::POST, path, body.into())
    }

    /// The prompt as JSON: a list of ids, or a string.
    fn prompt(&self, prompt: PromptSpec) -> String {
        let (vocabulary, tokens) = match &self.way {
            // Whatever the model, ids below 256 are tokens of it.
            PromptWay::Ids => (Vocabulary::new(256).expect("two tokens or more"), prompt.tokens),
            PromptWay::Chat { template_tokens, tokens_per_letter } => {
                let letters = (f64::from(prompt.tokens) - template_tokens) / tokens_per_letter;
                (Vocabulary::letters(), letters.round().max(1.0) as u32)
            }
        };
        let scale = f64::from(tokens) / f64::from(prompt.tokens.max(1));
        let (name, prefix) = prompt.prefix.unwrap_or_default();
        let blocks = (f64::from(prefix) * scale) as u32 / PREFIX_GRAIN;
        let base = self.seed ^ name.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let arrival = Arrival {
            at_us: 0,
            prompt_tokens: u64::from(tokens),
            output_tokens: 1,
            ids: (0..u64::from(blocks)).map(|at| base.wrapping_add(at)).collect(),
            class: 0,
            objectives: RequestObjectives::default(),
            tenant: 0,
            cancel_after_us: None,
        };
        let row = self.seed.wrapping_add(self.rows.fetch_add(1, Ordering::Relaxed) << 32);
        let mut text = Vec::new();
        vocabulary.write_prompt(&arrival, row, PREFIX_GRAIN, &mut text);
        String::from_utf8(text).expect("digits and letters")
    }
}

/// What a stream's reader found.
enum StreamEvent {
    Tokens { at_us: u64, count: u64 },
    Ended(Result<Option<UsageFigures>, AnswerFailure>),
}

/// An answer under way. Dropping it closes the connection, which ends the request.
pub struct AnswerStream {
    /// When the request was sent, µs.
    pub sent_us: u64,
    /// Tokens of its prompt, as it was made.
    pub prompt_tokens: u32,
    /// When tokens came, µs, and how many at a time.
    pub tokens: Vec<(u64, u64)>,
    ended: Option<Result<Option<UsageFigures>, AnswerFailure>>,
    events: Receiver<StreamEvent>,
    _reading: AbortOnDropHandle<()>,
}

impl AnswerStream {
    /// Waits until `count` events with tokens have come.
    pub async fn reach(&mut self, count: usize, until: Instant) -> Result<(), AnswerFailure> {
        while self.tokens.len() < count {
            self.next(until).await?;
        }
        Ok(())
    }

    /// Waits for the end of the answer, and gives the engine's own count of its tokens.
    pub async fn end(&mut self, until: Instant) -> Result<Option<UsageFigures>, AnswerFailure> {
        loop {
            match self.next(until).await {
                Ok(()) => {}
                Err(AnswerFailure::Short) => break,
                Err(halt) => return Err(halt),
            }
        }
        match &self.ended {
            Some(Ok(usage)) => Ok(*usage),
            _ => Ok(None),
        }
    }

    /// Takes in what has come already.
    pub fn take_in(&mut self) {
        while let Ok(event) = self.events.try_recv() {
            self.keep(event);
        }
    }

    /// Tokens so far.
    pub fn token_count(&self) -> u64 {
        self.tokens.iter().map(|(_, count)| count).sum()
    }

    async fn next(&mut self, until: Instant) -> Result<(), AnswerFailure> {
        match &self.ended {
            Some(Ok(_)) => return Err(AnswerFailure::Short),
            Some(Err(halt)) => return Err(halt.clone()),
            None => {}
        }
        match tokio::time::timeout_at(until.into(), self.events.recv()).await {
            Err(_) => Err(AnswerFailure::Late),
            Ok(None) => Err(AnswerFailure::Failed("the answer's reader ended".into())),
            Ok(Some(event)) => {
                self.keep(event);
                Ok(())
            }
        }
    }

    fn keep(&mut self, event: StreamEvent) {
        match event {
            StreamEvent::Tokens { at_us, count } => self.tokens.push((at_us, count)),
            StreamEvent::Ended(ended) => self.ended = Some(ended),
        }
    }
}

/// Sends a request and reads its answer to the end.
async fn read(
    client: &Client,
    request: Request<Full<Bytes>>,
    clock: RunClock,
    sender: &Sender<StreamEvent>,
) -> Result<Option<UsageFigures>, AnswerFailure> {
    let broke = |why: String| AnswerFailure::Failed(format!("the connection broke: {why}"));
    let response = client.send(request).await.map_err(|e| broke(e.to_string()))?;
    let status = response.status();
    let header = response.headers().get(CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let streams = header.starts_with("text/event-stream");
    if !status.is_success() {
        let body = whole(response.into_body(), MAX_BODY_BYTES).await.unwrap_or_default();
        return Err(AnswerFailure::Refused(status.as_u16(), words(&body)));
    }
    if !streams {
        return Err(AnswerFailure::Failed(format!("the answer is no event stream but '{header}'")));
    }
    let (mut body, mut events, mut answer) =
        (response.into_body(), EventReader::default(), Answer::default());
    while let Some(data) = next_piece(&mut body).await.map_err(|e| broke(e.to_string()))? {
        let at_us = clock.now_us();
        let (mut told, mut counts) = (Ok(()), Vec::new());
        events
            .push(&data, |payload| {
                let before = answer.seen_tokens();
                if told.is_ok() {
                    told = answer.event(payload, at_us);
                }
                counts.push(answer.seen_tokens() - before);
            })
            .and(told)
            .map_err(|e| AnswerFailure::Failed(format!("{e:#}")))?;
        for count in counts.into_iter().filter(|count| *count > 0) {
            // Full only where an engine sends more than it was asked for.
            let _ = sender.try_send(StreamEvent::Tokens { at_us, count });
        }
        if let Some(error) = answer.error.take() {
            return Err(AnswerFailure::Failed(format!("the answer ended with an error: {}", said(&error))));
        }
    }
    // A token without text comes with the end.
    let before = answer.seen_tokens();
    answer.close();
    if answer.seen_tokens() > before {
        let _ = sender.try_send(StreamEvent::Tokens { at_us: answer.last_us(), count: 1 });
    }
    answer.done.then_some(answer.usage).ok_or_else(|| broke("the stream ended before [DONE]".into()))
}

/// The words of an error body, for a person.
fn words(body: &[u8]) -> String {
    let error = ErrorBody::of(body);
    if error != ErrorBody::default() {
        return said(&error);
    }
    // Not every server words errors alike.
    let json: Value = serde_json::from_slice(body).unwrap_or_default();
    let text = ["message", "detail"].iter().find_map(|key| json[key].as_str().map(str::to_owned));
    let text = text.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned());
    text.chars().take(200).collect()
}

fn said(error: &ErrorBody) -> String {
    let message = error.message.clone().unwrap_or_else(|| error.name());
    message.chars().take(200).collect()
}

/// The middle value; 0 of none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}
