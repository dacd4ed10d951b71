//! OpenTelemetry spans with GenAI attributes: a span a line, a session a line, or OTLP JSON.

use serde_json::{Map, Value};

use crate::error::RowFault;
use crate::flat::{Stamp, object};
use crate::moment::{epoch_unit, stamp_ms};
use crate::options::TimeUnit;
use crate::parser::{Parse, Row, Sessions, Setup, length, required};
use crate::record::{Extra, Record};

/// Spans inside spans are followed this deep.
const MOST_NESTING: usize = 8;

/// Reads spans that name token usage; others are passed over.
pub(crate) struct Otel {
    setup: Setup,
    ends_ms: Sessions<Option<f64>>,
    passed_over: u64,
}

impl Otel {
    pub(crate) fn new(setup: &Setup) -> Self {
        Self { ends_ms: Sessions::new(setup.limits.sessions), setup: setup.clone(), passed_over: 0 }
    }

    fn walk(
        &mut self,
        node: &Map<String, Value>,
        depth: usize,
        out: &mut Vec<Record>,
    ) -> Result<(), RowFault> {
        let mut is_group = false;
        for key in ["resourceSpans", "scopeSpans", "spans"] {
            let Some(Value::Array(children)) = node.get(key) else {
                continue;
            };
            is_group = true;
            if depth >= MOST_NESTING {
                return Err(RowFault::bound("spans are nested too deep", "check the file"));
            }
            for child in children.iter().filter_map(Value::as_object) {
                self.walk(child, depth + 1, out)?;
            }
        }
        if !is_group {
            self.span(node, out)?;
        }
        Ok(())
    }

    fn span(&mut self, span: &Map<String, Value>, out: &mut Vec<Record>) -> Result<(), RowFault> {
        let input = number(span, &["gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"]);
        let output = number(span, &["gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"]);
        let (Some(input), Some(output)) = (input, output) else {
            self.passed_over += 1;
            return Ok(());
        };
        let start_ms = required(
            self.time(
                span,
                &["start_time_unix_nano", "startTimeUnixNano", "start_time", "startTime", "timestamp"],
            )?,
            "start_time",
        )?;
        let end_ms = self.time(span, &["end_time_unix_nano", "endTimeUnixNano", "end_time", "endTime"])?;
        let mut extra = Extra {
            request_id: text(span, &["span_id", "spanId"]),
            session_id: text(span, &["gen_ai.conversation.id", "session.id", "trace_id", "traceId"]),
            parent: text(span, &["parent_span_id", "parentSpanId"]).filter(|id| !id.is_empty()),
            ..Extra::default()
        };
        if let Some(session) = &extra.session_id {
            let last_end = self.ends_ms.get(session)?;
            extra.delay_ms = last_end.filter(|end| *end <= start_ms).map(|end| start_ms - end);
            *last_end = end_ms;
        }
        if let Some(model) = text(span, &["gen_ai.request.model"]) {
            extra.unknown.insert("model".into(), model.into());
        }
        let limits = &self.setup.limits;
        out.push(Record {
            timestamp_ms: start_ms,
            input_length: length(input, "input_tokens", limits)?,
            output_length: length(output, "output_tokens", limits)?,
            hash_ids: Vec::new(),
            extra: Some(Box::new(extra)),
        });
        Ok(())
    }

    fn time(&self, span: &Map<String, Value>, keys: &[&str]) -> Result<Option<f64>, RowFault> {
        let Some(value) = lookup(span, keys) else {
            return Ok(None);
        };
        let number = value.as_f64().or_else(|| value.as_str()?.parse().ok());
        match (number, value.as_str()) {
            (Some(n), _) => {
                let unit = epoch_unit(n).unwrap_or(self.setup.unit);
                stamp_ms(&Stamp::Number(n), unit).map(Some)
            }
            (None, Some(text)) => stamp_ms(&Stamp::Text(text.into()), TimeUnit::Milliseconds).map(Some),
            (None, None) => Ok(None),
        }
    }
}

/// A field of a span or one of its attributes, in either notation.
fn lookup<'a>(span: &'a Map<String, Value>, keys: &[&str]) -> Option<&'a Value> {
    let attributes = span.get("attributes");
    keys.iter().find_map(|key| {
        let direct = span.get(*key).or_else(|| attributes?.get(*key));
        direct.or_else(|| {
            let entry =
                attributes?.as_array()?.iter().find(|a| a.get("key").and_then(Value::as_str) == Some(key))?;
            entry.get("value")?.as_object()?.values().next()
        })
    })
}

fn number(span: &Map<String, Value>, keys: &[&str]) -> Option<i64> {
    let value = lookup(span, keys)?;
    value.as_i64().or_else(|| value.as_str()?.parse().ok())
}

fn text(span: &Map<String, Value>, keys: &[&str]) -> Option<String> {
    match lookup(span, keys)? {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

impl Parse for Otel {
    fn parse(&mut self, row: &Row<'_>, out: &mut Vec<Record>) -> Result<(), RowFault> {
        let node = object(row.json()?)?;
        self.walk(&node, 0, out)
    }

    fn notes(&self) -> Vec<String> {
        if self.passed_over == 0 {
            return Vec::new();
        }
        vec![format!("{} spans without token usage were passed over", self.passed_over)]
    }
}
