//! Made-to-measure workloads: chats, agents and documents with given means.

use std::str::FromStr;

use baton_types::Rng;

use crate::dialect::Dialect;
use crate::error::{RowFault, Stage, TraceError};
use crate::prompt::{Prompt, mix};
use crate::record::{Extra, Record, Trace};
use crate::synth::sample::{exponential, log_normal, tokens};

/// Kinds of sessions in a workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// People chatting: a common system prompt, turns that grow, minutes between them.
    Chat,
    /// Agents: a few long system prompts shared by many sessions, many quick turns.
    Agents,
    /// Questions about long documents, some much more popular than others.
    Documents,
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "chat" => Ok(Self::Chat),
            "agents" => Ok(Self::Agents),
            "documents" => Ok(Self::Documents),
            _ => Err(format!("no workload is called {text:?}; choose chat, agents or documents")),
        }
    }
}

/// The statistics a workload is made to.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// The kind of its sessions.
    pub kind: Kind,
    /// Seed: equal seeds give equal traces.
    pub seed: u64,
    /// Number of requests to generate (rows of the trace).
    pub requests: u64,
    /// Rows over the span, and over each part of it but for chance.
    pub requests_per_s: f64,
    /// Mean prompt length.
    pub input_mean: f64,
    /// Mean output length.
    pub output_mean: f64,
    /// Mean turns of a session.
    pub turns_mean: f64,
    /// Tokens that begin every prompt of a group.
    pub shared_tokens: u64,
    /// Groups: system prompts of agents, documents, or 1 for all chats alike.
    pub groups: u64,
    /// Mean pause between an answer and the next turn.
    pub think_mean_ms: f64,
    /// Rows name their delay, so that a turn waits for the one before.
    pub closed_loop: bool,
    /// Tokens a block id stands for.
    pub block_tokens: u32,
}

impl Workload {
    /// Usual statistics of a kind; change what you know better.
    #[must_use]
    pub fn new(kind: Kind, seed: u64) -> Self {
        let base = Self {
            kind,
            seed,
            requests: 10_000,
            requests_per_s: 5.0,
            input_mean: 6_000.0,
            output_mean: 300.0,
            turns_mean: 5.0,
            shared_tokens: 800,
            groups: 1,
            think_mean_ms: 60_000.0,
            closed_loop: false,
            block_tokens: 512,
        };
        match kind {
            Kind::Chat => base,
            Kind::Agents => Self {
                input_mean: 24_000.0,
                output_mean: 180.0,
                turns_mean: 20.0,
                shared_tokens: 9_000,
                groups: 8,
                think_mean_ms: 3_000.0,
                ..base
            },
            Kind::Documents => Self {
                input_mean: 32_000.0,
                output_mean: 150.0,
                turns_mean: 3.0,
                shared_tokens: 0,
                groups: 200,
                think_mean_ms: 40_000.0,
                ..base
            },
        }
    }

    fn check(&self) -> Result<(), TraceError> {
        let positive = [
            ("requests-per-s", self.requests_per_s),
            ("input-mean", self.input_mean),
            ("output-mean", self.output_mean),
        ];
        if let Some((name, value)) = positive.iter().find(|(_, v)| !v.is_finite() || *v <= 0.0) {
            return Err(refusal(format!("{name} {value} is not above 0"), "give a number above 0"));
        }
        if !(self.turns_mean.is_finite() && self.turns_mean >= 1.0 && self.turns_mean <= 10_000.0) {
            return Err(refusal(
                "turns-mean is not between 1 and 10,000".into(),
                "give a mean of at least one turn",
            ));
        }
        if !(self.think_mean_ms.is_finite() && self.think_mean_ms >= 0.0) {
            return Err(refusal("think-mean-ms is negative".into(), "give milliseconds >= 0"));
        }
        if self.input_mean > 10_000_000.0 || self.output_mean > 10_000_000.0 || self.block_tokens == 0 {
            return Err(refusal(
                "means over 10 M tokens, or blocks of 0".into(),
                "give smaller means, or a block size of at least 1",
            ));
        }
        Ok(())
    }
}

fn refusal(problem: String, remedy: &str) -> TraceError {
    RowFault::new(Stage::Scale, "synth", problem, remedy).at("(synthetic)".as_ref(), None)
}

/// One turn before lengths are scaled.
struct Turn {
    session: u64,
    group: u64,
    /// Turns of its conversation before it.
    index: u64,
    /// Whether no row of its session comes before it; one with an index above 0 was under way when the trace began.
    opens: bool,
    at_ms: f64,
    delay_ms: f64,
    /// New tokens of the user in this turn, unscaled.
    said: f64,
    output: u64,
}

/// A trace made to the statistics of `spec`: rows exact, rate exact, means within a percent or two.
/// Fails where they contradict each other (answers alone would make prompts longer than asked).
pub fn workload(spec: &Workload) -> Result<Trace, TraceError> {
    spec.check()?;
    let turns = plan(spec);
    let scale = said_scale(spec, &turns)?;
    let documents = document_sizes(spec);
    let mut prompt = Prompt::new(spec.block_tokens, 0);
    let mut before = 0;
    let mut rows: Vec<(f64, Record)> = Vec::with_capacity(turns.len());
    for turn in &turns {
        let session = mix(spec.seed, turn.session | 1 << 62);
        if turn.index == 0 {
            before = 0;
        }
        if turn.opens {
            prompt = Prompt::new(spec.block_tokens, 0);
            let shared = spec.shared_tokens + tokens(scale * documents.get(turn.group), 0);
            prompt.push(mix(spec.seed, turn.group), shared);
            prompt.push(mix(session, u64::MAX), before);
        }
        let own = mix(session, turn.index);
        let said = tokens(turn.said * scale, 1);
        prompt.push(own, said);
        rows.push((turn.at_ms, record(spec, turn, &prompt)));
        prompt.push(mix(own, 1), turn.output);
        before += said + turn.output;
    }
    rows.sort_by(|a, b| a.0.total_cmp(&b.0));
    Ok(Trace {
        block_tokens: spec.block_tokens,
        records: stretch(rows, spec),
        assumptions: vec![format!("made up: {:?}, seed {}", spec.kind, spec.seed)],
        dialect: Dialect::Mooncake,
    })
}

fn record(spec: &Workload, turn: &Turn, prompt: &Prompt) -> Record {
    Record {
        timestamp_ms: turn.at_ms,
        input_length: prompt.tokens(),
        output_length: turn.output,
        hash_ids: prompt.ids(),
        extra: Some(Box::new(Extra {
            session_id: Some(format!("s{}", turn.session)),
            delay_ms: (spec.closed_loop && !turn.opens).then_some(turn.delay_ms),
            ..Extra::default()
        })),
    }
}

/// Sessions, their turns and when each happens.
///
/// Sessions begin uniformly over the trace. Turns of a session after the trace's end move to its beginning, as a
/// session of its own that was in progress by then. So the rate of turns is uniform over the trace.
#[expect(clippy::cast_precision_loss, reason = "row counts are below 2^53")]
fn plan(spec: &Workload) -> Vec<Turn> {
    let mut rng = Rng::fork(spec.seed, 0x776f_726b);
    let span_ms = spec.requests as f64 * 1000.0 / spec.requests_per_s;
    let mut turns = Vec::new();
    let mut session = 0;
    while (turns.len() as u64) < spec.requests {
        let group = pick_group(spec, &mut rng);
        let mut at_ms = rng.unit() * span_ms;
        let mut delay_ms = 0.0;
        let (mut index, mut opens) = (0, true);
        loop {
            turns.push(Turn {
                session,
                group,
                index,
                opens,
                at_ms,
                delay_ms,
                said: log_normal(&mut rng, 1.0, 0.9),
                output: tokens(log_normal(&mut rng, spec.output_mean, 0.7), 1),
            });
            delay_ms = exponential(&mut rng, spec.think_mean_ms);
            at_ms += delay_ms;
            index += 1;
            opens = at_ms >= span_ms;
            if opens {
                at_ms %= span_ms;
                session += 1;
            }
            let full = turns.len() as u64 == spec.requests;
            if full || rng.unit() * spec.turns_mean < 1.0 {
                break;
            }
        }
        session += 1;
    }
    turns
}

/// Groups are equally likely, but documents follow Zipf's law.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "group numbers are small"
)]
fn pick_group(spec: &Workload, rng: &mut Rng) -> u64 {
    let groups = spec.groups.max(1);
    if spec.kind == Kind::Documents {
        return ((groups as f64 + 1.0).powf(rng.unit()) - 1.0).floor().clamp(0.0, groups as f64 - 1.0) as u64;
    }
    rng.below(groups)
}

/// Unscaled sizes of documents; everything else has none.
struct Sizes(Vec<f64>);

impl Sizes {
    fn get(&self, group: u64) -> f64 {
        usize::try_from(group).ok().and_then(|at| self.0.get(at)).copied().unwrap_or(0.0)
    }
}

/// A document is some thirty questions long.
const DOCUMENT_QUESTIONS: f64 = 30.0;

fn document_sizes(spec: &Workload) -> Sizes {
    if spec.kind != Kind::Documents {
        return Sizes(Vec::new());
    }
    let mut rng = Rng::fork(spec.seed, 0x646f_6373);
    Sizes(
        (0..spec.groups.clamp(1, 1_000_000)).map(|_| log_normal(&mut rng, DOCUMENT_QUESTIONS, 0.6)).collect(),
    )
}

/// The factor on what users say (and on documents) that gives prompts the asked mean: prompts are
/// linear in it.
#[expect(clippy::cast_precision_loss, reason = "sums are below 2^53")]
fn said_scale(spec: &Workload, turns: &[Turn]) -> Result<f64, TraceError> {
    let documents = document_sizes(spec);
    let (mut fixed, mut scaled) = (0.0, 0.0);
    let (mut answers, mut said) = (0.0, 0.0);
    for turn in turns {
        if turn.index == 0 {
            (answers, said) = (spec.shared_tokens as f64, documents.get(turn.group));
        }
        said += turn.said;
        fixed += answers;
        scaled += said;
        answers += turn.output as f64;
    }
    let wanted = spec.input_mean * turns.len() as f64;
    if wanted <= fixed || scaled <= 0.0 {
        let least = fixed / turns.len().max(1) as f64;
        return Err(refusal(
            format!(
                "a mean prompt of {} tokens is too short: shared tokens and earlier answers alone make {least:.0}",
                spec.input_mean
            ),
            "ask for longer prompts, fewer turns, shorter answers or fewer shared tokens",
        ));
    }
    Ok((wanted - fixed) / scaled)
}

/// Stretches times so that the first row is at 0 and the rate is the asked one.
#[expect(clippy::cast_precision_loss, reason = "row counts are below 2^53")]
fn stretch(rows: Vec<(f64, Record)>, spec: &Workload) -> Vec<Record> {
    let first = rows.first().map_or(0.0, |row| row.0);
    let last = rows.last().map_or(0.0, |row| row.0);
    let span_ms = rows.len() as f64 * 1000.0 / spec.requests_per_s;
    let factor = if last > first { span_ms / (last - first) } else { 0.0 };
    rows.into_iter()
        .map(|(at_ms, mut record)| {
            record.timestamp_ms = ((at_ms - first) * factor * 1000.0).round() / 1000.0;
            record
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::summary::{SummaryOptions, summarise};

    #[test]
    fn workloads_have_the_statistics_they_were_asked_for() {
        for kind in [Kind::Chat, Kind::Agents, Kind::Documents] {
            for seed in 0..3 {
                // Long beside a session: of those under way at its ends a trace has a part each.
                let spec = Workload { requests: 10_000, ..Workload::new(kind, seed) };
                let trace = workload(&spec).unwrap();
                let summary = summarise(&trace, &SummaryOptions::default());
                assert_eq!(summary.requests, 10_000);
                for (got, wanted, bound) in [
                    (summary.input_length.mean, spec.input_mean, 0.01),
                    (summary.output_length.mean, spec.output_mean, 0.06),
                    (summary.requests_per_s, spec.requests_per_s, 0.001),
                    (summary.sessions.turns.mean, spec.turns_mean, 0.2),
                ] {
                    assert!((got - wanted).abs() < bound * wanted, "{kind:?} {seed}: {got} for {wanted}");
                }
                assert!(summary.unbounded.block_hit_ratio > 0.3, "{kind:?} reuses prefixes");
            }
        }
    }

    #[test]
    fn the_rate_holds_from_the_beginning_to_the_end() {
        for (kind, requests, rate) in [
            (Kind::Chat, 3_000, 8.0),
            (Kind::Chat, 10_000, 5.0),
            (Kind::Agents, 10_000, 5.0),
            (Kind::Documents, 10_000, 5.0),
        ] {
            for seed in 0..3 {
                let spec = Workload { requests, requests_per_s: rate, ..Workload::new(kind, seed) };
                let trace = workload(&spec).unwrap();
                let span_ms = trace.records.last().unwrap().timestamp_ms;
                let due = |tenth: f64| {
                    let times = trace.records.iter().map(|record| record.timestamp_ms * 10.0 / span_ms);
                    times.filter(|at| (tenth..tenth + 1.0).contains(at)).count()
                };
                let counts: Vec<usize> = (0..10).map(|tenth| due(f64::from(tenth))).collect();
                let mean = trace.records.len() / 10;
                let held = counts.iter().all(|count| count * 3 > mean * 2 && count * 2 < mean * 3);
                assert!(held, "{kind:?} {seed}: {counts:?}");
            }
        }
    }

    #[test]
    fn a_session_that_was_under_way_has_its_past_and_shares_it_with_no_other() {
        let spec =
            Workload { requests: 2_000, shared_tokens: 0, block_tokens: 16, ..Workload::new(Kind::Chat, 7) };
        let trace = workload(&spec).unwrap();
        let mut firsts = std::collections::HashMap::new();
        let mut prompts: std::collections::HashMap<&str, u64> = std::collections::HashMap::new();
        for record in &trace.records {
            let session = record.session_id().unwrap();
            let first = firsts.entry(record.hash_ids[0]).or_insert(session);
            assert_eq!(*first, session, "its prompt begins like that of another session");
            let before = prompts.insert(session, record.input_length).unwrap_or(0);
            assert!(record.input_length > before, "{session} shrinks");
        }
        // The first rows are not all of conversations that have just begun: those are shorter.
        let mean =
            |rows: &[Record]| rows.iter().map(|record| record.input_length).sum::<u64>() / rows.len() as u64;
        let (early, all) = (mean(&trace.records[..200]), mean(&trace.records));
        assert!(early * 3 > all * 2, "{early} of {all} tokens");
    }

    #[test]
    fn agents_of_a_group_share_their_system_prompt() {
        let spec = Workload { requests: 500, groups: 2, ..Workload::new(Kind::Agents, 1) };
        let trace = workload(&spec).unwrap();
        let mut roots: Vec<u64> = trace.records.iter().map(|r| r.hash_ids[0]).collect();
        roots.sort_unstable();
        roots.dedup();
        assert_eq!(roots.len(), 2);
    }

    #[test]
    fn contradictions_are_refused_with_what_would_do() {
        let spec = Workload { input_mean: 10.0, ..Workload::new(Kind::Chat, 1) };
        assert!(workload(&spec).unwrap_err().to_string().contains("too short"));
        let spec = Workload { requests_per_s: 0.0, ..Workload::new(Kind::Chat, 1) };
        assert!(workload(&spec).is_err());
    }

    #[test]
    fn closed_loop_rows_name_their_delay() {
        let spec = Workload { requests: 3_000, closed_loop: true, ..Workload::new(Kind::Chat, 2) };
        let trace = workload(&spec).unwrap();
        let turns = trace.records.iter().filter(|r| r.delay_ms().is_some()).count();
        assert!(turns > 2_000, "{turns}");
        assert_eq!(workload(&spec).unwrap(), trace);
    }
}
