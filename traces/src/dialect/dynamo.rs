//! `dynamo.request.trace.v1`: one record a finished request, ids and block size embedded.

use serde::Deserialize;

use crate::error::RowFault;
use crate::flat::{Name, json_fault};
use crate::parser::{Parse, Row, Sessions, Setup, length, required};
use crate::record::{Extra, Record};

#[derive(Deserialize)]
struct Line {
    #[serde(default)]
    event: Option<Box<Event>>,
    #[serde(flatten)]
    bare: Event,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Event {
    event_type: Option<String>,
    event_time_unix_ms: Option<f64>,
    agent_context: Option<AgentContext>,
    request: Option<Request>,
}

#[derive(Deserialize)]
struct AgentContext {
    session_id: Name,
    #[serde(default)]
    parent_session_id: Option<Name>,
}

#[derive(Deserialize)]
struct Request {
    request_id: Name,
    request_received_ms: Option<f64>,
    output_tokens: Option<i64>,
    total_time_ms: Option<f64>,
    model: Option<String>,
    replay: Option<Replay>,
}

#[derive(Deserialize)]
struct Replay {
    trace_block_size: u32,
    input_length: i64,
    input_sequence_hashes: Vec<u64>,
}

/// Block size of the first request in a sample.
pub(crate) fn block_tokens(line: &[u8]) -> Option<u32> {
    let line: Line = serde_json::from_slice(line).ok()?;
    let event = line.event.map_or(line.bare, |event| *event);
    Some(event.request?.replay?.trace_block_size)
}

/// Reads request records; tool and payload events are passed over.
pub(crate) struct DynamoRequest {
    setup: Setup,
    ends_ms: Sessions<Option<f64>>,
    contextual: Option<bool>,
    passed_over: u64,
}

impl DynamoRequest {
    pub(crate) fn new(setup: &Setup) -> Self {
        Self {
            ends_ms: Sessions::new(setup.limits.sessions),
            setup: setup.clone(),
            contextual: None,
            passed_over: 0,
        }
    }

    /// All requests have an agent context, or none has.
    fn check_context(&mut self, has_context: bool) -> Result<(), RowFault> {
        if *self.contextual.get_or_insert(has_context) == has_context {
            return Ok(());
        }
        Err(RowFault::check(
            "context",
            "rows with and without agent_context are mixed",
            "split the file: relations between agents would be lost",
        ))
    }

    /// Delay after the session's previous request, where the two did not overlap.
    fn delay_ms(
        &mut self,
        session: &str,
        start_ms: f64,
        end_ms: Option<f64>,
    ) -> Result<Option<f64>, RowFault> {
        let last_end = self.ends_ms.get(session)?;
        let delay = last_end.filter(|end| *end <= start_ms).map(|end| start_ms - end);
        *last_end = end_ms;
        Ok(delay)
    }
}

impl Parse for DynamoRequest {
    fn parse(&mut self, row: &Row<'_>, out: &mut Vec<Record>) -> Result<(), RowFault> {
        let line: Line = serde_json::from_slice(row.json()?).map_err(json_fault)?;
        let event = line.event.map_or(line.bare, |event| *event);
        match event.event_type.as_deref() {
            Some("request_end") => {}
            Some("request_payload" | "tool_start" | "tool_end" | "tool_error") => {
                self.passed_over += 1;
                return Ok(());
            }
            other => {
                return Err(RowFault::parse(
                    format!("event_type {} is not known", other.unwrap_or("(none)")),
                    "keep request_end and tool events only",
                ));
            }
        }
        let request = required(event.request, "request")?;
        let replay = required(request.replay, "request.replay")?;
        if replay.trace_block_size != self.setup.block_tokens {
            return Err(RowFault::check(
                "block-size",
                format!("trace_block_size {} after {}", replay.trace_block_size, self.setup.block_tokens),
                "one file holds one block size: split it",
            ));
        }
        self.check_context(event.agent_context.is_some())?;
        let start_ms = required(request.request_received_ms, "request.request_received_ms")?;
        let end_ms = request.total_time_ms.map(|t| start_ms + t).or(event.event_time_unix_ms);
        let mut extra = Extra { request_id: Some(request.request_id.0), ..Extra::default() };
        if let Some(context) = event.agent_context {
            extra.delay_ms = self.delay_ms(&context.session_id.0, start_ms, end_ms)?;
            extra.session_id = Some(context.session_id.0);
            extra.parent = context.parent_session_id.map(|name| name.0);
        }
        if let Some(model) = request.model {
            extra.unknown.insert("model".into(), model.into());
        }
        let limits = &self.setup.limits;
        out.push(Record {
            timestamp_ms: start_ms,
            input_length: length(replay.input_length, "input_length", limits)?,
            output_length: length(
                required(request.output_tokens, "request.output_tokens")?,
                "output_tokens",
                limits,
            )?,
            hash_ids: replay.input_sequence_hashes,
            extra: Some(Box::new(extra)),
        });
        Ok(())
    }

    fn notes(&self) -> Vec<String> {
        if self.passed_over == 0 {
            return Vec::new();
        }
        vec![format!("{} tool and payload events were passed over", self.passed_over)]
    }
}
