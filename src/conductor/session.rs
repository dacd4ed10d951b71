//! A request under way: both of its legs, its client, and how far its answer has come.

use baton_router::{Event, Fault, Submission, Usage};
use baton_types::{ClassId, Finish, InstanceId, TenantId, TokenLogprob};
use bytes::Bytes;
use std::sync::Arc;
use tokio::sync::mpsc;

use crate::capture::{CaptureOutcome, CaptureRow};
use crate::config::Config;
use crate::spans::{Place, Summary, Trace};

use super::discreet::discreet;
use super::fleet::{Fleet, Pace};

/// A request is late when this many times as many were served before it as can have been ahead of it: each is
/// counted by both of its instances, and moved ones come back into the line.
const TURN_SLACK: u64 = 4;

/// Where a request is, as far as its driver knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Held back by the core, sent nowhere.
    Waiting,
    /// Sent to its prefill instance.
    Prefilling,
    /// Prefilled; KV is on the way to its decode instance.
    HandingOff,
    /// Decoding.
    Decoding,
}

impl Phase {
    /// The word in errors, metrics and on the admin page.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Waiting => "queue",
            Self::Prefilling => "prefill",
            Self::HandingOff => "handoff",
            Self::Decoding => "decode",
        }
    }
}

/// A request under way.
pub(super) struct Session {
    pub submission: Submission,
    pub class: ClassId,
    pub tenant: TenantId,
    pub events: mpsc::Sender<Event>,
    pub phase: Phase,
    /// Counts placements and hand-offs; facts about an earlier one are out of date.
    pub attempt: u32,
    pub prefill: Option<InstanceId>,
    pub decode: Option<InstanceId>,
    /// Tokens that the client has.
    pub answer: Vec<u32>,
    /// Answer tokens that the present attempt was started with.
    pub given: u32,
    /// The hand-off was acknowledged before the prefill's own report came.
    pub landed: bool,
    /// The prefill draws all that is left of the answer: the decode leg was told nothing.
    pub prefill_is_all: bool,
    pub room_tokens: u32,
    pub cached_tokens: u64,
    /// Prompt tokens that were expected in the cache of the instance that was chosen, until it has told.
    pub expected: Option<(InstanceId, u64)>,
    pub predicted_ttft_us: u64,
    /// The same, foreseen when it was last placed: what its stages are given time by.
    pub foreseen_us: u64,
    pub arrived_us: u64,
    pub first_token_us: Option<u64>,
    pub last_token_us: u64,
    /// When the present stage is given up, µs.
    pub deadline_us: u64,
    /// Its turn in the present stage, behind others.
    pub turn: Turn,
    pub moves: u32,
    /// Attempts whose hand-off failed, and the latest of them.
    pub handoffs_failed: (u32, u32),
    /// Its client was told that it will be served.
    pub let_in: bool,
    /// The client has the prompt's logprobs.
    pub prompt_told: bool,
    /// Engines that died while it was in them.
    pub deaths: u32,
    /// It was once in an engine that died with another in it that was on trial: that death was the other's.
    pub spared: bool,
    /// Nothing can take it right now: it comes again when something changes.
    pub parked: bool,
    /// The client has all of its answer; the legs have not yet been let go.
    pub done: bool,
    /// What went wrong last, for the error if nothing helps.
    pub cause: Option<String>,
    /// How it ended, as far as it has.
    pub outcome: CaptureOutcome,
    pub sampling_json: String,
    /// What engines are told of the client's body, where there are such that want it.
    pub body: Bytes,
    /// Its place in a trace, and what is written down for it.
    pub trace: Trace,
}

/// A request's place among those that are in the same stage on the same instances.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Turn {
    /// What its instances had got done when the stage began, and when its time was last over.
    pub begun: Pace,
    pub seen: Pace,
    /// Requests that may have been ahead of it; 0: not yet counted.
    pub ahead: u64,
}

impl Turn {
    /// Whether its instances got on since its time was last over, and not so far that its turn must have come.
    /// `live` counts the requests under way.
    pub(super) fn is_to_come(&mut self, phase: Phase, pace: Pace, live: u64) -> bool {
        let count = |pace: Pace| match phase {
            Phase::Prefilling => pace.prefilled,
            Phase::HandingOff => pace.handed,
            Phase::Waiting | Phase::Decoding => 0,
        };
        if self.ahead == 0 {
            self.ahead = live;
        }
        let (done, seen) = (count(pace), count(self.seen));
        self.seen = pace;
        done > seen && done.saturating_sub(count(self.begun)) <= TURN_SLACK * self.ahead
    }
}

/// Whether a client can take what it is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// It can.
    Yes,
    /// It left, or does not read.
    No,
}

impl Session {
    pub(super) fn tell(&self, event: Event) -> Heard {
        if self.events.try_send(event).is_ok() { Heard::Yes } else { Heard::No }
    }

    /// Takes the answer's token at `index` if it is the next one; nothing is told twice or out of order.
    pub(super) fn token(&mut self, index: u32, token: u32, logprob: Option<TokenLogprob>) -> Option<Heard> {
        if index as usize != self.answer.len() {
            return None;
        }
        self.answer.push(token);
        Some(self.tell(Event::Token { token, logprob }))
    }

    pub(super) fn finish(&self, finish: Finish) {
        let usage = Usage { cached_tokens: self.cached_tokens, moves: self.moves };
        let _ = self.tell(Event::Finished { finish, usage });
    }

    pub(super) fn fail(&self, status: u16, stage: &str, message: String) {
        let told = discreet(&message);
        if told != message {
            tracing::info!(request = %self.submission.request_id, stage, message, "a request failed");
        }
        let _ = self.tell(Event::Failed(Fault { status, stage: stage.into(), message: told.into() }));
    }

    /// Goes on to another stage, or to the same one of another attempt.
    pub(super) fn enter(&mut self, phase: Phase, now_us: u64, fleet: &Fleet) {
        self.phase = phase;
        let pace = fleet.pace([self.prefill, self.decode]);
        self.turn = Turn { begun: pace, seen: pace, ahead: 0 };
        if self.trace.is_kept() {
            let waits = phase == Phase::Waiting;
            let name = |leg: Option<InstanceId>| fleet.get(leg?).map(|node| node.name.as_str().into());
            let (prefill, decode) = (name(self.prefill), name(self.decode));
            let attempt = self.attempt + u32::from(waits);
            self.trace.enter(Place { stage: phase.name(), attempt, prefill, decode }, now_us);
        }
    }

    /// Keeps what went wrong, for the error if nothing helps, and a word of it for the trace.
    pub(super) fn blame(&mut self, cause: String, failure: &'static str, now_us: u64) {
        self.cause = Some(cause);
        self.trace.failed(failure, now_us);
    }

    /// What its trace tells of it as a whole, without a word of what was said.
    pub(super) fn summary(&self, config: &Config) -> Summary {
        let class = config.scheduler.classes.get(self.class.index());
        Summary {
            request_id: Arc::clone(&self.submission.request_id),
            class: class.map_or_else(String::new, |class| class.name.clone()),
            tenant: self.submission.tenant.clone(),
            prompt_tokens: self.submission.tokens.len() as u64,
            cached_tokens: self.cached_tokens,
            output_tokens: self.answer.len() as u64,
            moves: self.moves,
            outcome: self.outcome.name(),
        }
    }

    /// When its client's patience ends, µs.
    pub(super) fn patience_us(&self) -> u64 {
        self.submission.timeout_us.map_or(u64::MAX, |t| self.arrived_us.saturating_add(t))
    }

    /// What is written down of it, without a word of what was said.
    pub(super) fn captured(&self, config: &Config) -> CaptureRow {
        let drawn = self.answer.len() as u64;
        let served = self.outcome == CaptureOutcome::Completed;
        let class = config.scheduler.classes.get(self.class.index());
        CaptureRow {
            at_us: self.arrived_us,
            prompt_tokens: self.submission.tokens.len() as u64,
            output_tokens: if served { drawn } else { u64::from(self.submission.sampling.max_tokens) },
            chain: Arc::clone(&self.submission.chain),
            class: class.map(|class| class.name.as_str().into()),
            session: self.submission.session,
            outcome: self.outcome,
        }
    }
}
