//! The results of a live run beyond the simulator's figures: punctuality, statuses, errors, and kept promises.

use std::collections::BTreeMap;

use baton_sim::metrics::{LatencySummary, Samples, Status};
use serde::Serialize;

use super::pace::PacedResult;

/// Lag at the 99th percentile beyond which the load was not what the trace asks for, ms.
const LATE_MS: f64 = 5.0;
/// Maximum number of distinct errors that are counted separately.
const MOST_ERRORS: usize = 64;

/// A live run from the client's side.
#[derive(Debug, Serialize)]
pub struct LiveSummary {
    /// URL of the service under load.
    pub url: String,
    /// Model asked for.
    pub model: String,
    /// Ids that prompts were made of: those below it.
    pub vocab_tokens: u32,
    /// Requests sent.
    pub sent: u64,
    /// How much later than due requests went out.
    pub lag_ms: LatencySummary,
    /// The lag was so large that the figures are not those of the trace's load.
    pub late: bool,
    /// Requests that waited because too many were in flight.
    pub waited_for_cap: u64,
    /// Most requests in flight at a time.
    pub most_in_flight: u64,
    /// The run was ended before its time.
    pub interrupted: bool,
    /// Answers by HTTP status, one an attempt.
    pub statuses: BTreeMap<u16, u64>,
    /// Failures by stage and name.
    pub errors: BTreeMap<String, u64>,
    /// Whether the retry times in refusals were kept.
    pub promises: Promises,
    /// The server's own counts.
    pub usage: UsageSums,
    /// Answers with fewer or more tokens than asked for.
    pub wrong_length: u64,
    /// Tokens that came together with another: their gaps are not known one by one.
    pub merged_tokens: u64,
}

/// Whether Retry-After was true.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct Promises {
    /// Number of refusals.
    pub refusals: u64,
    /// Of those, with a time to come back.
    pub told: u64,
    /// Of those, obeyed: the client came back then.
    pub obeyed: u64,
    /// Of those obeyed, admitted: the promise was kept.
    pub kept: u64,
    /// Of those obeyed, refused again.
    pub refused_again: u64,
}

/// The server's counts over all completed requests.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct UsageSums {
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// Prompt tokens that needed no computing.
    pub cached_tokens: u64,
    /// Completed requests without a count.
    pub missing: u64,
    /// Completed requests whose prompt the server counted otherwise than the trace.
    pub other_prompt_length: u64,
}

impl LiveSummary {
    /// Sums a run up; `identity` is the URL, the model and the vocabulary.
    pub fn new(paced: &PacedResult, identity: (String, String, u32)) -> Self {
        let mut lag_us = Samples::default();
        paced.sent.iter().for_each(|s| lag_us.push(s.lag_us));
        let lag_ms = lag_us.figures(1e3).0;
        let mut summary = Self {
            url: identity.0,
            model: identity.1,
            vocab_tokens: identity.2,
            sent: paced.sent.len() as u64,
            late: lag_ms.p99.is_some_and(|p99| p99 > LATE_MS),
            lag_ms,
            waited_for_cap: paced.waited_for_cap,
            most_in_flight: paced.most_in_flight,
            interrupted: paced.interrupted,
            statuses: BTreeMap::new(),
            errors: BTreeMap::new(),
            promises: Promises::default(),
            usage: UsageSums::default(),
            wrong_length: 0,
            merged_tokens: 0,
        };
        paced.sent.iter().for_each(|one| summary.take(one));
        summary
    }

    fn take(&mut self, one: &super::live::SentRequest) {
        for status in &one.statuses {
            *self.statuses.entry(*status).or_default() += 1;
        }
        if let Some(error) = &one.error {
            let known = self.errors.len() < MOST_ERRORS || self.errors.contains_key(error);
            *self.errors.entry(if known { error.clone() } else { "more".into() }).or_default() += 1;
        }
        self.wrong_length += u64::from(one.wrong_length);
        self.merged_tokens += one.merged_tokens;
        self.promises.take(one);
        if one.outcome.status == Status::Completed {
            self.usage.take(one);
        }
    }

    /// The summary for a terminal; what makes the figures doubtful is in capitals.
    pub fn text(&self) -> String {
        let ms = |v: Option<f64>| v.map_or_else(|| "–".into(), |v| format!("{v:.2} ms"));
        let mut lines = vec![format!(
            "sent {} to {} (model {}), at most {} in flight; lag p50 {}, p99 {}, max {}",
            self.sent,
            self.url,
            self.model,
            self.most_in_flight,
            ms(self.lag_ms.p50),
            ms(self.lag_ms.p99),
            ms(self.lag_ms.max)
        )];
        let statuses: Vec<String> = self.statuses.iter().map(|(s, n)| format!("{s}: {n}")).collect();
        let errors: Vec<String> = self.errors.iter().map(|(e, n)| format!("{e}: {n}")).collect();
        lines.push(format!(
            "statuses {}",
            if statuses.is_empty() { "none".into() } else { statuses.join(", ") }
        ));
        if !errors.is_empty() {
            lines.push(format!("errors {}", errors.join("; ")));
        }
        let p = &self.promises;
        if p.refusals > 0 {
            lines.push(format!(
                "refusals {}: {} told when to return, {} obeyed, of those {} admitted and {} refused again",
                p.refusals, p.told, p.obeyed, p.kept, p.refused_again
            ));
        }
        let u = &self.usage;
        lines.push(format!(
            "tokens by the server: {} prompt ({} cached), {} generated",
            u.prompt_tokens, u.cached_tokens, u.completion_tokens
        ));
        lines.extend(self.doubts());
        lines.join("\n")
    }

    fn doubts(&self) -> Vec<String> {
        let mut lines = Vec::new();
        let mut doubt = |holds: bool, text: String| {
            if holds {
                lines.push(format!("WARNING: {text}"));
            }
        };
        doubt(
            self.late,
            format!(
                "the 99th percentile of the lag is over {LATE_MS} ms: this was not the trace's load; use a faster or idler machine, or a lower --speed"
            ),
        );
        doubt(
            self.waited_for_cap > 0,
            format!(
                "{} requests waited for --concurrency-cap; raise it for a true open loop",
                self.waited_for_cap
            ),
        );
        doubt(self.interrupted, "stopped early; what was in flight counts as cancelled".into());
        doubt(
            self.wrong_length > 0,
            format!(
                "{} answers were not as long as asked for; the server may not know ignore_eos",
                self.wrong_length
            ),
        );
        doubt(
            self.merged_tokens > 0,
            format!(
                "{} tokens came together with another: gaps are between events, and TBT reads high",
                self.merged_tokens
            ),
        );
        let u = &self.usage;
        doubt(u.missing > 0, format!("{} answers came without usage; cached tokens are too low", u.missing));
        doubt(
            u.other_prompt_length > 0,
            format!(
                "the server counted {} prompts otherwise than the trace; do prefixes still match?",
                u.other_prompt_length
            ),
        );
        lines
    }
}

impl Promises {
    fn take(&mut self, one: &super::live::SentRequest) {
        for (at, refusal) in one.refusals.iter().enumerate() {
            self.refusals += 1;
            self.told += u64::from(refusal.retry_after_us.is_some());
            self.obeyed += u64::from(refusal.returned);
            let again = at + 1 < one.refusals.len();
            self.refused_again += u64::from(refusal.returned && again);
            // Admitted, whatever became of it then: a failure before any answer says nothing.
            let admitted = !again && one.statuses.last().is_some_and(|s| (200..300).contains(s));
            self.kept += u64::from(refusal.returned && admitted);
        }
    }
}

impl UsageSums {
    fn take(&mut self, one: &super::live::SentRequest) {
        let Some(usage) = &one.usage else {
            self.missing += 1;
            return;
        };
        self.prompt_tokens += usage.prompt_tokens;
        self.completion_tokens += usage.completion_tokens;
        self.cached_tokens += usage.cached_tokens();
        self.other_prompt_length += u64::from(usage.prompt_tokens != one.outcome.prompt_tokens);
    }
}
