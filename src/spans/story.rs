//! The record of a request while it is open: plain numbers, made into spans later.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// The stage in which a request waits.
pub(super) const QUEUE: &str = "queue";
/// The stage in which KV is on its way.
pub(super) const HANDOFF: &str = "handoff";
/// Maximum number of stages recorded per request; later ones are only counted (I9).
const MAX_STAGES: usize = 64;

/// Where a request is.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// `queue`, `prefill`, `handoff` or `decode`.
    pub stage: &'static str,
    /// Which attempt, from 1; a queue leads to the attempt that it names.
    pub attempt: u32,
    /// Name of the prefill instance.
    pub prefill: Option<Arc<str>>,
    /// Name of the decode instance.
    pub decode: Option<Arc<str>>,
}

/// A stage that was left, or is about to be.
#[derive(Clone, Debug)]
pub(super) struct Stage {
    pub place: Place,
    pub start_us: u64,
    pub end_us: u64,
    /// The failure in it, and its time.
    pub failure: Option<(&'static str, u64)>,
    /// The failure ended it.
    pub broken: bool,
}

/// The summary of a request; names and numbers only.
#[derive(Clone, Debug, Default)]
pub(crate) struct Summary {
    /// The client's name for it.
    pub request_id: Arc<str>,
    /// Its service class.
    pub class: String,
    /// Its tenant.
    pub tenant: Option<Arc<str>>,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Prompt tokens that were not computed again.
    pub cached_tokens: u64,
    /// Tokens of the answer.
    pub output_tokens: u64,
    /// Times that the answer moved to another instance.
    pub moves: u32,
    /// `completed`, `rejected`, `failed` or `cancelled`.
    pub outcome: &'static str,
}

/// One sampled request.
#[derive(Debug)]
pub(crate) struct Story {
    pub(super) trace_id: u128,
    pub(super) span_id: u64,
    pub(super) parent: Option<u64>,
    /// The wall clock's time at `arrived_us`.
    anchor: SystemTime,
    pub(super) arrived_us: u64,
    pub(super) ended_us: u64,
    pub(super) first_token_us: Option<u64>,
    pub(super) stages: Vec<Stage>,
    open: Stage,
    pub(super) attempts: u32,
    /// When attempts after the first began.
    pub(super) retries: Vec<(u32, u64)>,
    pub(super) untold_stages: u32,
    pub(super) reason: Option<&'static str>,
    pub(super) summary: Summary,
}

impl Story {
    /// A request that arrives now, into the queue. `ids` are the trace, its own span and its parent.
    pub(super) fn new(ids: (u128, u64, Option<u64>), now_us: u64, anchor: SystemTime) -> Self {
        let place = Place { stage: QUEUE, attempt: 1, prefill: None, decode: None };
        Self {
            trace_id: ids.0,
            span_id: ids.1,
            parent: ids.2,
            anchor,
            arrived_us: now_us,
            ended_us: now_us,
            first_token_us: None,
            stages: Vec::with_capacity(4),
            open: Stage { place, start_us: now_us, end_us: now_us, failure: None, broken: false },
            attempts: 0,
            retries: Vec::new(),
            untold_stages: 0,
            reason: None,
            summary: Summary::default(),
        }
    }

    pub(super) fn enter(&mut self, place: Place, now_us: u64) {
        let waits = place.stage == QUEUE;
        if waits && self.open.place.stage == QUEUE {
            return;
        }
        // A failure that another attempt or a wait follows ended the stage when it struck.
        let begins_anew = waits || place.attempt > self.attempts;
        let left_us = self.leave(begins_anew, now_us);
        if !waits && place.attempt > self.attempts {
            self.attempts = place.attempt;
            if place.attempt > 1 && self.retries.len() < MAX_STAGES {
                self.retries.push((place.attempt, now_us));
            }
            if left_us < now_us {
                let between = Place { stage: QUEUE, prefill: None, decode: None, ..place };
                self.open = fresh(between, left_us);
                self.leave(true, now_us);
            }
        }
        self.open = fresh(place, if waits { left_us } else { now_us });
    }

    /// Closes the open stage; when the wait for what follows began.
    fn leave(&mut self, failure_counts: bool, now_us: u64) -> u64 {
        let struck_us = self.open.failure.as_ref().map(|(_, at_us)| *at_us).filter(|_| failure_counts);
        let end_us = struck_us.unwrap_or(now_us);
        self.open.broken = struck_us.is_some();
        self.open.end_us = end_us;
        // One process hands nothing over to itself, and a request that is let go does not wait anew.
        let place = &self.open.place;
        let stays = place.stage == HANDOFF && place.prefill == place.decode;
        if self.stages.len() >= MAX_STAGES {
            self.untold_stages += 1;
        } else if !stays && (self.attempts == 0 || place.stage != QUEUE || self.open.start_us < end_us) {
            self.stages.push(self.open.clone());
        }
        end_us
    }

    pub(super) fn first_token(&mut self, now_us: u64) {
        self.first_token_us.get_or_insert(now_us);
    }

    pub(super) fn failed(&mut self, failure: &'static str, now_us: u64) {
        self.open.failure = Some((failure, now_us));
    }

    pub(super) fn reason(&mut self, reason: &'static str) {
        self.reason.get_or_insert(reason);
    }

    /// Records the end of the request: later calls add nothing.
    pub(super) fn end(&mut self, now_us: u64, summary: Summary) {
        self.leave(summary.outcome != "completed", now_us);
        self.ended_us = now_us;
        self.summary = summary;
    }

    /// Spans that it makes.
    pub(super) fn span_count(&self) -> usize {
        1 + self.stages.len()
    }

    /// The wall clock's time of a stamp.
    pub(super) fn wall(&self, at_us: u64) -> SystemTime {
        self.anchor + Duration::from_micros(at_us.saturating_sub(self.arrived_us))
    }
}

const fn fresh(place: Place, start_us: u64) -> Stage {
    Stage { place, start_us, end_us: start_us, failure: None, broken: false }
}
