//! A request under way: its client, and how far its answer has come. Its legs are `baton_legs::pairs`'.

use baton_legs::pairs::Phase;
use baton_router::{Event, Fault, Submission, Usage};
use baton_scheduler::Prediction;
use baton_types::{BlockKey, ChainHasher, ClassId, Finish, InstanceId, TenantId, TokenLogprob};
use std::sync::Arc;
use tokio::sync::mpsc;

use crate::capture::{CaptureOutcome, CaptureRow};
use crate::config::Config;
use crate::spans::{Summary, Trace};

use super::discreet::discreet;
use super::gap_tally::GapTally;

/// A request under way.
pub(super) struct Session {
    pub submission: Submission,
    pub class: ClassId,
    pub tenant: TenantId,
    pub events: mpsc::Sender<Event>,
    /// Tokens that the client has, and those that it has with the next one.
    pub answer: Vec<u32>,
    pub cached_tokens: u64,
    /// Prompt tokens that the conductor expects in the cache of the chosen instance, until the instance has reported.
    pub expected: Option<(InstanceId, u64)>,
    /// What was predicted of it, unless it was placed again.
    pub prediction: Option<Prediction>,
    /// When its decode was ordered to begin, µs.
    pub decodes_at_us: Option<u64>,
    pub arrived_us: u64,
    /// Tokens of the answer that a prefill drew before it goes on elsewhere: the client has them with the next one.
    pub early: Vec<(u32, Option<TokenLogprob>)>,
    pub first_token_us: Option<u64>,
    pub last_token_us: u64,
    /// Times that it went on elsewhere in the middle of its answer.
    pub moves: u32,
    /// The client has the prompt's logprobs.
    pub prompt_logprobs_sent: bool,
    /// The latest failure, for the error if no retry succeeds.
    pub cause: Option<String>,
    /// How it ended, as far as it has.
    pub outcome: CaptureOutcome,
    /// The times between the tokens of its answer.
    pub gaps: GapTally,
    /// Its front door ended it since it had all that it wanted, for example at a stop string.
    pub satisfied: bool,
    /// It failed because of its client: its input is invalid, or its own time limit ended.
    pub excused: bool,
    /// Where it is, since when, µs, and the role of the node there.
    pub stage: Option<(Phase, u64, &'static str)>,
    /// Its place in a trace, and what is written down for it.
    pub trace: Trace,
}

impl Session {
    /// False: the client left, or does not read.
    pub(super) fn send(&self, event: Event) -> bool {
        self.events.try_send(event).is_ok()
    }

    /// Keys of the full blocks of the prompt followed by the first `given_tokens` of the answer. `naming` is the seed
    /// of the keys and the tokens in a block.
    pub(super) fn chain(&self, given_tokens: u32, naming: (u64, u32)) -> Arc<[BlockKey]> {
        let Submission { chain: named, tokens, root, .. } = &self.submission;
        if given_tokens == 0 {
            return Arc::clone(named);
        }
        let (seed, block_tokens) = (naming.0, naming.1 as usize);
        let mut rest = tokens.after(named.len() * block_tokens);
        rest.extend(self.answer.iter().take(given_tokens as usize));
        let mut hasher = ChainHasher::resume(seed, named.last().copied().unwrap_or(*root));
        let further = rest.chunks_exact(block_tokens).map(|block| hasher.push_tokens(block));
        named.iter().copied().chain(further).collect()
    }

    /// It comes to a phase at a node of this role. Returns the stage that it leaves, if that led here as it should,
    /// with the role of the node there and the time, µs.
    pub(super) fn enter(
        &mut self,
        phase: Phase,
        role: &'static str,
        now_us: u64,
    ) -> Option<(&'static str, &'static str, u64)> {
        let (left, since_us, left_role) = self.stage.replace((phase, now_us, role))?;
        let time_us = now_us - since_us;
        match (left, phase) {
            (Phase::Waiting, Phase::Prefilling) => Some((left.name(), role, time_us)),
            (Phase::Prefilling, Phase::HandingOff | Phase::Decoding)
            | (Phase::HandingOff, Phase::Decoding) => Some((left.name(), left_role, time_us)),
            _ => None,
        }
    }

    /// Its decode has given a token; returns role and time, µs, of the first one's step.
    pub(super) fn first_step(&mut self, now_us: u64) -> Option<(&'static str, u64)> {
        let (_, since_us, role) = self.stage.take_if(|(phase, ..)| *phase == Phase::Decoding)?;
        Some((role, now_us - since_us))
    }

    /// Counts what was in a cache.
    pub(super) fn found(&mut self, cached_tokens: u64) {
        self.cached_tokens = cached_tokens.min(self.submission.tokens.len() as u64);
    }

    /// Takes the answer's next token, which a prefill drew. The client has it when the decode has begun elsewhere: until then
    /// nothing would follow it, and the hand-off would be a gap in its answer.
    pub(super) fn early_token(&mut self, token: u32, logprob: Option<TokenLogprob>) {
        self.answer.push(token);
        self.early.push((token, logprob));
    }

    /// Takes the answer's next token, at `now_us`. False: as for [`Self::send`].
    pub(super) fn token(&mut self, token: u32, logprob: Option<TokenLogprob>, now_us: u64) -> bool {
        self.early_token(token, logprob);
        (0..self.early.len()).for_each(|_| self.gaps.token(now_us));
        self.send_early()
    }

    /// Sends what the client has yet to have, in order: nothing follows what it did not take.
    fn send_early(&mut self) -> bool {
        let events = &self.events;
        let sent = |(token, logprob)| events.try_send(Event::Token { token, logprob }).is_ok();
        self.early.drain(..).all(sent)
    }

    /// False: as for [`Self::send`].
    pub(super) fn finish(&mut self, finish: Finish) -> bool {
        self.send_early();
        let usage = Usage { cached_tokens: self.cached_tokens, moves: self.moves };
        self.send(Event::Finished { finish, usage })
    }

    /// Whether its client has its whole answer, or all that it wanted of it.
    pub(super) fn is_served(&self) -> bool {
        self.satisfied || self.outcome == CaptureOutcome::Completed
    }

    pub(super) fn fail(&self, status: u16, stage: &str, message: String) {
        let shown = discreet(&message);
        if shown != message {
            tracing::info!(request = %self.submission.request_id, stage, message, "a request failed");
        }
        self.send(Event::Failed(Fault { status, stage: stage.into(), message: shown.into() }));
    }

    /// Keeps what went wrong, for the error if nothing helps, and a word of it for the trace.
    pub(super) fn blame(&mut self, cause: String, failure: &'static str, now_us: u64) {
        self.cause = Some(cause);
        self.trace.failed(failure, now_us);
    }

    /// The request's summary in its trace, without any text of the conversation.
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

    /// When its client's time limit ends, µs.
    pub(super) fn time_limit_us(&self) -> u64 {
        self.submission.timeout_us.map_or(u64::MAX, |t| self.arrived_us.saturating_add(t))
    }

    /// The request's row in the capture file, without any text of the conversation.
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
            objectives: self.submission.objectives,
            session: self.submission.session,
            outcome: self.outcome,
        }
    }
}
