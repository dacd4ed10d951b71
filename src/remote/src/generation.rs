//! An answer as it comes: pieces out of a stream, with a deadline for each, and nothing left behind when it is dropped.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use baton_types::Finish;
use hyper::body::Incoming;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout_at};

use crate::answer::Progress;
use crate::error::{RemoteError, Stage};
use crate::http::{Answer, Call, Wire};
use crate::prompt::Prompt;
use crate::request::{Counts, Piece};
use crate::sse::Events;
use crate::{completions, sglang};

/// The end of a stream, in both engines.
const DONE: &[u8] = b"[DONE]";
/// How long the counts may take after an answer has said how it ended.
const END_TIME: Duration = Duration::from_secs(5);
/// How long an engine may take to hear that a request is aborted.
const ABORT_TIME: Duration = Duration::from_secs(5);

/// Reads events of either engine.
pub(crate) enum Reader {
    Completions(completions::Reader),
    Sglang(sglang::Reader),
}

impl Reader {
    fn event(&mut self, data: &[u8]) -> Result<Progress, RemoteError> {
        match self {
            Self::Completions(reader) => reader.event(data),
            Self::Sglang(reader) => reader.event(data),
        }
    }

    const fn enter(&mut self, stage: Stage) {
        match self {
            Self::Completions(reader) => reader.stage = stage,
            Self::Sglang(reader) => reader.stage = stage,
        }
    }

    const fn prompt(&self) -> &Prompt {
        match self {
            Self::Completions(reader) => &reader.prompt,
            Self::Sglang(reader) => &reader.prompt,
        }
    }
}

/// How long to wait, and how much to expect.
pub(crate) struct Terms {
    /// When the first token has to be there.
    pub(crate) first_by: Instant,
    /// Why it has to be there by then, when it is a lease that runs out.
    pub(crate) leased: bool,
    pub(crate) silence: Duration,
    pub(crate) max_tokens: u32,
    pub(crate) vocab_tokens: Option<u32>,
    pub(crate) event_bytes: usize,
}

/// Aborts a request at SGLang, which may not notice that the connection has closed.
pub(crate) struct Abort {
    wire: Arc<Wire>,
    leg: String,
    armed: bool,
}

impl Abort {
    pub(crate) const fn new(wire: Arc<Wire>, leg: String) -> Self {
        Self { wire, leg, armed: true }
    }

    /// The request has ended by itself.
    pub(crate) const fn disarm(&mut self) {
        self.armed = false;
    }
}

impl Drop for Abort {
    fn drop(&mut self) {
        // Outside a runtime no request can be sent, so the closed connection has to suffice.
        if let (true, Ok(runtime)) = (self.armed, tokio::runtime::Handle::try_current()) {
            let wire = Arc::clone(&self.wire);
            let body = serde_json::json!({"rid": self.leg}).to_string().into();
            // One short call for each request in flight, so these are bounded as requests are.
            runtime.spawn(async move {
                let until = Instant::now() + ABORT_TIME;
                let call = Call {
                    stage: Stage::Stream,
                    path: "/abort_request",
                    elsewhere: None,
                    headers: vec![],
                    until,
                };
                // An engine that does not receive it is not running the request either, or it will notice the closed
                // connection.
                drop(wire.post_only_head(body, call).await);
            });
        }
    }
}

/// A running answer. Dropping it closes its connection, which makes the engine drop the request and free its KV.
pub struct Generation {
    events: Option<Events<Incoming>>,
    reader: Reader,
    terms: Terms,
    silent_by: Instant,
    ready: VecDeque<Piece>,
    seen: u64,
    finish: Option<Finish>,
    counts: Counts,
    over: bool,
    /// Says goodbye when it is dropped before the end; none for engines that only need the closed connection.
    abort: Option<Abort>,
    place: Option<OwnedSemaphorePermit>,
}

impl std::fmt::Debug for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generation")
            .field("seen", &self.seen)
            .field("finish", &self.finish)
            .finish_non_exhaustive()
    }
}

impl Generation {
    pub(crate) fn streamed(answer: Answer, reader: Reader, terms: Terms, abort: Option<Abort>) -> Self {
        let events = Events::new(answer.body, terms.event_bytes);
        Self { events: Some(events), place: Some(answer.place), abort, ..Self::empty(reader, terms) }
    }

    /// An answer that came in one piece.
    pub(crate) fn at_once(progress: Progress, reader: Reader, terms: Terms) -> Result<Self, RemoteError> {
        let mut generation = Self::empty(reader, terms);
        generation.add(progress)?;
        let last = generation.complete()?;
        generation.ready.push_back(last);
        generation.over = true;
        Ok(generation)
    }

    fn empty(reader: Reader, terms: Terms) -> Self {
        Self {
            events: None,
            reader,
            silent_by: terms.first_by,
            terms,
            ready: VecDeque::new(),
            seen: 0,
            finish: None,
            counts: Counts::default(),
            over: false,
            abort: None,
            place: None,
        }
    }

    /// The next piece; `None` after `Finished` or an error. A future of it that is dropped loses nothing.
    ///
    /// # Errors
    /// Anything that keeps the answer from being the whole and right one: a broken connection, an error within the
    /// stream, an end without a finish, silence, tokens after the lease, more tokens than asked for.
    pub async fn next(&mut self) -> Option<Result<Piece, RemoteError>> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Some(Ok(piece));
            }
            if self.over {
                return None;
            }
            match self.step().await {
                Ok(()) => {}
                Err(error) => {
                    self.end();
                    return Some(Err(error));
                }
            }
        }
    }

    /// Reads one event into `ready`.
    async fn step(&mut self) -> Result<(), RemoteError> {
        let stage = self.stage();
        let Some(events) = &mut self.events else { return Err(RemoteError::bug(stage, "no stream")) };
        let event = match timeout_at(self.silent_by, events.next()).await {
            Ok(Ok(event)) => event,
            // All of the answer is there once it has said how it ended: what breaks then takes nothing away.
            _ if self.finish.is_some() => None,
            Ok(Err(error)) => return Err(error.at(stage)),
            Err(_) => return Err(self.too_late()),
        };
        match event {
            Some(data) if data != DONE => {
                self.reader.enter(stage);
                let progress = self.reader.event(&data)?;
                self.add(progress)
            }
            // After a finish, an end without [DONE] is an end as well.
            _ => {
                let last = self.complete()?;
                self.ready.push_back(last);
                if let Some(abort) = &mut self.abort {
                    abort.disarm();
                }
                self.end();
                Ok(())
            }
        }
    }

    const fn stage(&self) -> Stage {
        if self.seen == 0 { Stage::Start } else { Stage::Stream }
    }

    fn end(&mut self) {
        self.over = true;
        self.events = None;
        self.abort = None;
        self.place = None;
    }

    fn too_late(&self) -> RemoteError {
        if self.seen > 0 {
            return RemoteError::retry(
                Stage::Stream,
                format!("no token for {} s", self.terms.silence.as_secs_f32()),
            )
            .remedy("see whether the engine is stuck, or allow a longer silence");
        }
        if self.terms.leased {
            return RemoteError::retry(
                Stage::Handoff,
                "the prefilled blocks may be gone before the decode engine has read them: their lease runs out",
            )
            .remedy("prefill again; let fewer requests wait at the decode engine, or raise the engines' lease");
        }
        RemoteError::retry(Stage::Start, "the first token did not come in time")
            .remedy("see whether the engine is stuck, or give it more time")
    }

    fn add(&mut self, progress: Progress) -> Result<(), RemoteError> {
        let stage = self.stage();
        progress.check_ids(self.terms.vocab_tokens, stage)?;
        let Progress { prompt_logprobs, tokens, finish, counts } = progress;
        if self.finish.is_some() && !tokens.is_empty() {
            return Err(RemoteError::bug(stage, "tokens after the end of the answer"));
        }
        if self.terms.leased && self.seen == 0 && Instant::now() > self.terms.first_by {
            // The tokens may have waited for us, or for the engine: then it may have read blocks that were not its own.
            return Err(self.too_late());
        }
        if self.seen == 0 && !tokens.is_empty() {
            self.reader.prompt().forget_json();
        }
        self.seen += tokens.len() as u64;
        if self.seen > u64::from(self.terms.max_tokens) {
            let text = format!("{} tokens where {} were asked for", self.seen, self.terms.max_tokens);
            return Err(RemoteError::bug(stage, text));
        }
        if let Some(logs) = prompt_logprobs {
            self.ready.push_back(Piece::PromptLogprobs(logs));
        }
        if !tokens.is_empty() {
            self.silent_by = Instant::now() + self.terms.silence;
            self.ready.push_back(Piece::Tokens(tokens));
        }
        if finish.is_some() {
            self.finish = finish;
            self.silent_by = Instant::now() + self.terms.silence.min(END_TIME);
        }
        self.counts = Counts {
            prompt_tokens: counts.prompt_tokens.or(self.counts.prompt_tokens),
            answer_tokens: counts.answer_tokens.or(self.counts.answer_tokens),
            cached_tokens: counts.cached_tokens.or(self.counts.cached_tokens),
        };
        Ok(())
    }

    /// The last piece, if the answer is whole.
    fn complete(&self) -> Result<Piece, RemoteError> {
        let stage = self.stage();
        let Some(finish) = self.finish else {
            return Err(RemoteError::retry(stage, "the stream ended without saying how the answer ended"));
        };
        let counted = self.counts.answer_tokens.unwrap_or(self.seen);
        // An end token may be counted and not shown.
        let hidden = u64::from(finish == Finish::Stop);
        if counted > self.seen + hidden || counted < self.seen {
            let text = format!("{} tokens came, and the engine counts {counted}", self.seen);
            return Err(RemoteError::bug(stage, text));
        }
        if counted == 0 {
            return Err(RemoteError::retry(stage, "an answer without a token"));
        }
        Ok(Piece::Finished { finish, counts: self.counts })
    }

    /// Every piece up to the end, for callers that do not stream: tokens, and how they ended.
    ///
    /// # Errors
    /// As [`Self::next`].
    pub async fn all(mut self) -> Result<CollectedAnswer, RemoteError> {
        let mut collected = CollectedAnswer::default();
        while let Some(piece) = self.next().await {
            match piece? {
                Piece::PromptLogprobs(logs) => collected.prompt_logprobs = Some(logs),
                Piece::Tokens(tokens) => collected.tokens.extend(tokens),
                Piece::Finished { finish, counts } => {
                    collected.finish = Some(finish);
                    collected.counts = counts;
                }
            }
        }
        Ok(collected)
    }
}

/// A whole answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CollectedAnswer {
    /// Logprobs of the prompt's tokens but the first, when asked for.
    pub prompt_logprobs: Option<Vec<baton_types::TokenLogprob>>,
    /// The answer's tokens.
    pub tokens: Vec<crate::Token>,
    /// How it ended; always there in what [`Generation::all`] returns.
    pub finish: Option<Finish>,
    /// The usage of the request.
    pub counts: Counts,
}
