//! TraceLab: one round of a coding agent a row, with the engine's own split of the prompt into
//! cached prefix and new tokens, and no ids.

use std::collections::VecDeque;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::error::RowFault;
use crate::flat::{Name, json_fault};
use crate::moment::iso_ms;
use crate::parser::{Parse, Row, Sessions, Setup, length, session_key};
use crate::prompt::{Prompt, mix};
use crate::record::{Extra, Record};

#[derive(Deserialize)]
struct Round {
    session_id: Name,
    input_tokens_total: i64,
    #[serde(default)]
    prefix_tokens: Option<i64>,
    output_tokens: i64,
    #[serde(default)]
    user: Option<Name>,
    #[serde(default)]
    timing_events: VecDeque<Event>,
    #[serde(default)]
    model: Option<Value>,
    #[serde(default)]
    provider: Option<Value>,
    #[serde(default)]
    project: Option<Value>,
}

#[derive(Deserialize)]
struct Event {
    #[serde(rename = "type", alias = "event_type", default)]
    kind: Option<String>,
    #[serde(default)]
    timestamp: Option<String>,
}

#[derive(Default)]
struct Session {
    prompt: Option<Prompt>,
    rounds: u64,
    last_end_ms: Option<f64>,
}

/// Reads rounds; ids are minted per session from the prefix split.
pub(crate) struct TraceLab {
    setup: Setup,
    sessions: Sessions<Session>,
}

impl TraceLab {
    pub(crate) fn new(setup: &Setup) -> Self {
        Self { sessions: Sessions::new(setup.limits.sessions), setup: setup.clone() }
    }
}

/// Start (the last thing that went in) and end (the last thing that came out) of a round.
fn span_ms(events: &VecDeque<Event>) -> Option<(f64, f64)> {
    let mut start: Option<f64> = None;
    let (mut first, mut last) = (f64::INFINITY, f64::NEG_INFINITY);
    for event in events {
        let Some(at) = event.timestamp.as_deref().and_then(iso_ms) else {
            continue;
        };
        if matches!(event.kind.as_deref(), Some("user_message" | "tool_result")) {
            start = Some(start.map_or(at, |s| s.max(at)));
        }
        first = first.min(at);
        last = last.max(at);
    }
    first.is_finite().then(|| (start.unwrap_or(first), last))
}

impl Parse for TraceLab {
    fn parse(&mut self, row: &Row<'_>, out: &mut Vec<Record>) -> Result<(), RowFault> {
        let round: Round = serde_json::from_slice(row.json()?).map_err(json_fault)?;
        let limits = self.setup.limits;
        let (start_ms, end_ms) = span_ms(&round.timing_events)
            .ok_or_else(|| RowFault::parse("no timing event has a time", "fix or remove the row"))?;
        let total = length(round.input_tokens_total, "input_tokens_total", &limits)?;
        let prefix = length(round.prefix_tokens.unwrap_or(0), "prefix_tokens", &limits)?;
        let output_length = length(round.output_tokens, "output_tokens", &limits)?;
        let name = round.session_id.0;
        let block_tokens = self.setup.block_tokens;
        let session = self.sessions.get(&name)?;
        let prompt = session.prompt.get_or_insert_with(|| Prompt::new(block_tokens, session_key(&name)));
        prompt.keep(prefix.min(total));
        let fresh = total.saturating_sub(prompt.tokens());
        prompt.push(mix(session_key(&name), session.rounds), fresh);
        let (input_length, hash_ids) = (prompt.tokens(), prompt.ids());
        // The answer becomes part of the next round's prefix.
        prompt.push(mix(session_key(&name), session.rounds | 1 << 63), output_length);
        let delay_ms = session.last_end_ms.filter(|end| *end <= start_ms).map(|end| start_ms - end);
        session.last_end_ms = Some(end_ms);
        session.rounds += 1;
        let fields = [("model", round.model), ("provider", round.provider), ("project", round.project)];
        let unknown: Map<String, Value> =
            fields.into_iter().filter_map(|(k, v)| Some((k.to_string(), v?))).collect();
        out.push(Record {
            timestamp_ms: start_ms,
            input_length,
            output_length,
            hash_ids,
            extra: Some(Box::new(Extra {
                session_id: Some(name),
                tenant: round.user.map(|user| user.0),
                delay_ms,
                unknown,
                ..Extra::default()
            })),
        });
        Ok(())
    }

    fn notes(&self) -> Vec<String> {
        vec![
            "ids are minted per session from prefix_tokens, rounded down to a block; nothing is shared between sessions".into(),
            "tool calls and timing events are not carried".into(),
        ]
    }
}
