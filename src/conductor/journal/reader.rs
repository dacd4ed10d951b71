//! Reading: steps a conductor again through a file and compares what it orders.

use std::collections::BTreeMap;
use std::io::{BufRead, Read as _};

use baton_scheduler::{Conductor, Effect, Input};
use serde::{Deserialize, Serialize};

use super::{Chain, End, Header, JournalError, Line, VERSION, digest};

/// A line longer than this is damage, not data.
const LINE_BYTES: u64 = 1 << 30;

/// The result of a replay.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReplayReport {
    /// Steps whose effects were the same as recorded.
    pub steps: u64,
    /// Steps of the service before this file that are in no file.
    pub lost_steps_before: u64,
    /// Steps that the file says were dropped; what follows them cannot be replayed.
    pub lost_steps: u64,
    /// Why the file ends; `None` where it just stops, as after a crash or while it is written.
    pub end: Option<End>,
    /// Whether the last line is only half there.
    pub torn: bool,
    /// Time covered, µs.
    pub span_us: u64,
    /// A summary of the file's events.
    pub summary: Summary,
}

/// A summary of the steps that were replayed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// Requests that arrived.
    pub requests: u64,
    /// Decisions by kind: placements, hand-offs, copies, starts of decodes.
    pub decisions: BTreeMap<&'static str, u64>,
    /// Refusals by reason.
    pub rejections: BTreeMap<&'static str, u64>,
    /// Failures by stage.
    pub failures: BTreeMap<&'static str, u64>,
    /// Requests that finished.
    pub finished: u64,
    /// Requests that clients gave up.
    pub cancelled: u64,
    /// Inputs that did not fit the state.
    pub stale_inputs: u64,
}

impl Summary {
    fn count(&mut self, effect: &Effect) {
        let mut add = |kind| *self.decisions.entry(kind).or_default() += 1;
        match effect {
            Effect::StartPrefill { instance, decode, fetch, .. } => {
                add("prefill");
                if instance == decode {
                    add("prefill_local");
                }
                if fetch.is_some() {
                    add("prefill_with_fetch");
                }
            }
            Effect::StartDecode { .. } => add("decode"),
            Effect::Handoff { .. } => add("handoff_again"),
            Effect::Replicate { .. } => add("replicate"),
            Effect::ChangeRole { .. } => add("change_role"),
            Effect::Reject(r) => *self.rejections.entry(r.reason.name()).or_default() += 1,
            Effect::Fail { stage, .. } => *self.failures.entry(stage.name()).or_default() += 1,
            Effect::Release { .. } | Effect::Explain(_) | Effect::Share(_) => {}
        }
    }
}

/// Steps through a whole file.
///
/// # Errors
/// Names the line that is damaged, of another version, or whose effects are not those recorded.
pub fn replay(mut file: impl BufRead) -> Result<ReplayReport, JournalError> {
    let (mut chain, mut found) = (Chain::default(), ReplayReport::default());
    let header = first_header(&mut file, &mut chain)?;
    found.lost_steps_before = header.lost_steps_before;
    let mut conductor = begin(header)?;
    let stats = conductor.stats().clone();
    let mut first_us = None;
    for number in 2u64.. {
        match next_line(&mut file, &mut chain, number)? {
            NextLine::Line(Line::Step { now_us, input, effects }) => {
                let first_us = *first_us.get_or_insert(now_us);
                found.span_us = now_us.saturating_sub(first_us);
                found.summary.requests += u64::from(matches!(input, Input::RequestArrived(_)));
                let ordered = again(&mut conductor, (now_us, input), &effects, number)?;
                ordered.iter().for_each(|effect| found.summary.count(effect));
                found.steps += 1;
            }
            NextLine::Line(Line::Lost(steps)) => {
                found.lost_steps = steps;
                break;
            }
            NextLine::Line(Line::End(end)) => {
                found.end = Some(end);
                break;
            }
            NextLine::Line(Line::Header(_)) => {
                return Err(JournalError::SecondHeader(number));
            }
            NextLine::Torn => {
                found.torn = true;
                break;
            }
            NextLine::Over => break,
        }
    }
    conductor.check().map_err(JournalError::Inconsistent)?;
    let now = conductor.stats();
    found.summary.finished = now.finished - stats.finished;
    found.summary.cancelled = now.cancelled - stats.cancelled;
    found.summary.stale_inputs = now.stale_inputs - stats.stale_inputs;
    Ok(found)
}

/// The part of a first line that every format has. Fields of other formats are skipped.
#[derive(Deserialize)]
struct FirstLine {
    header: Format,
}

#[derive(Deserialize)]
struct Format {
    version: u32,
    #[serde(default)]
    program: String,
}

/// The header of a file. Its format is compared before the rest is read, which another format need not have in the
/// same shape.
///
/// # Errors
/// The file begins with no header, or with one of another format.
fn first_header(file: &mut impl BufRead, chain: &mut Chain) -> Result<Header, JournalError> {
    let NextLine::Line(text) = next_text(file, chain, 1)? else { return Err(JournalError::NoHeader) };
    let first = serde_json::from_str::<FirstLine>(&text).map_err(|_| JournalError::NoHeader)?;
    let Format { version, program } = first.header;
    if version != VERSION {
        return Err(JournalError::Format { version, program });
    }
    match parse(&text, 1)? {
        Line::Header(header) => Ok(*header),
        _ => Err(JournalError::NoHeader),
    }
}

fn begin(header: Header) -> Result<Conductor, JournalError> {
    Conductor::restore(header.base).map_err(JournalError::Restore)
}

/// One step again; its effects, if they are those recorded.
fn again(
    conductor: &mut Conductor,
    told: (u64, Input),
    recorded: &str,
    number: u64,
) -> Result<Vec<Effect>, JournalError> {
    let (now_us, input) = told;
    if let Input::InstanceJoined(spec) = &input {
        // The driver has made sure of it before; a file may say anything.
        spec.profile.validate().map_err(|why| JournalError::Profile { line: number, why })?;
    }
    let mut effects = Vec::new();
    let shown = input.clone();
    conductor.step(now_us, input, &mut effects);
    let replayed = digest(&effects).map_err(JournalError::Unwritable)?;
    if replayed == recorded {
        return Ok(effects);
    }
    let json = |value: serde_json::Result<String>| value.unwrap_or_else(|e| e.to_string());
    Err(JournalError::Divergence {
        line: number,
        now_us,
        input: json(serde_json::to_string(&shown)),
        recorded: recorded.to_owned(),
        replayed,
        effects: json(serde_json::to_string(&effects)),
    })
}

enum NextLine<T> {
    Line(T),
    /// Half a line, then the end.
    Torn,
    Over,
}

fn next_line(
    file: &mut impl BufRead,
    chain: &mut Chain,
    number: u64,
) -> Result<NextLine<Line<Input>>, JournalError> {
    Ok(match next_text(file, chain, number)? {
        NextLine::Line(text) => NextLine::Line(parse(&text, number)?),
        NextLine::Torn => NextLine::Torn,
        NextLine::Over => NextLine::Over,
    })
}

/// The JSON text of the next line, whose checksum fits.
fn next_text(
    file: &mut impl BufRead,
    chain: &mut Chain,
    number: u64,
) -> Result<NextLine<String>, JournalError> {
    let mut bytes = Vec::new();
    file.take(LINE_BYTES)
        .read_until(b'\n', &mut bytes)
        .map_err(|why| JournalError::Unreadable { line: number, why })?;
    if bytes.is_empty() {
        return Ok(NextLine::Over);
    }
    if bytes.pop() != Some(b'\n') {
        return Ok(NextLine::Torn);
    }
    let text = std::str::from_utf8(&bytes).ok().and_then(|line| chain.open(line));
    text.map(NextLine::Line).ok_or(JournalError::Damaged(number))
}

fn parse(text: &str, number: u64) -> Result<Line<Input>, JournalError> {
    serde_json::from_str(text).map_err(|why| JournalError::Unknown { line: number, why })
}
