//! kv-cache-tester conversations (`weka`): one conversation a row, agents and subagents inside.

use serde::Deserialize;

use crate::error::RowFault;
use crate::flat::{Name, json_fault};
use crate::parser::{Parse, Row, Setup, length, session_key};
use crate::prompt::{mix, own_id};
use crate::record::{Extra, Record};

#[derive(Deserialize)]
struct Conversation {
    id: Option<Name>,
    block_size: Option<u32>,
    #[serde(default)]
    hash_id_scope: Option<String>,
    requests: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    t: f64,
    #[serde(rename = "type", default)]
    kind: Option<String>,
    #[serde(rename = "in", default)]
    input: Option<i64>,
    #[serde(rename = "out", default)]
    output: Option<i64>,
    #[serde(default)]
    hash_ids: Vec<u64>,
    #[serde(default)]
    api_time: Option<f64>,
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    agent_id: Option<Name>,
    #[serde(default)]
    requests: Vec<Entry>,
}

/// Block size named by the first conversation of a sample.
pub(crate) fn block_tokens(line: &[u8]) -> Option<u32> {
    serde_json::from_slice::<Conversation>(line).ok()?.block_size
}

/// Reads conversations.
pub(crate) struct Weka {
    setup: Setup,
    rows: u64,
    local: u64,
}

/// The stream of requests that wait for one another: a conversation, or one subagent of it.
struct Stream {
    session: String,
    parent: Option<String>,
    /// Salt of the ids, where their scope is the conversation.
    scope: Option<u64>,
}

impl Weka {
    pub(crate) fn new(setup: &Setup) -> Self {
        Self { setup: setup.clone(), rows: 0, local: 0 }
    }

    fn expand(&self, entries: Vec<Entry>, stream: &Stream, out: &mut Vec<Record>) -> Result<(), RowFault> {
        let second_ms = self.setup.unit.in_ms();
        let mut last_end_ms: Option<f64> = None;
        for entry in entries {
            let start_ms = entry.t * second_ms;
            if !start_ms.is_finite() {
                return Err(RowFault::parse("a request's t is not finite", "fix the row"));
            }
            if entry.kind.as_deref() == Some("subagent") {
                let agent = entry.agent_id.map_or_else(|| format!("at-{}", entry.t), |name| name.0);
                let child = Stream {
                    session: format!("{}/{agent}", stream.session),
                    parent: Some(stream.session.clone()),
                    scope: stream.scope,
                };
                self.expand(entry.requests, &child, out)?;
                continue;
            }
            let end_ms = start_ms + entry.api_time.unwrap_or(0.0).max(0.0) * second_ms;
            let delay_ms = last_end_ms.map(|end| (start_ms - end).max(0.0));
            last_end_ms = Some(end_ms);
            out.push(self.record(entry, stream, delay_ms)?);
        }
        Ok(())
    }

    fn record(&self, entry: Entry, stream: &Stream, delay_ms: Option<f64>) -> Result<Record, RowFault> {
        let limits = &self.setup.limits;
        let missing = |field| RowFault::parse(format!("a request has no {field}"), "fix the row");
        let mut extra = Extra {
            session_id: Some(stream.session.clone()),
            parent: stream.parent.clone(),
            delay_ms,
            ..Extra::default()
        };
        if let Some(model) = entry.model {
            extra.unknown.insert("model".into(), model.into());
        }
        let ids = entry.hash_ids.into_iter();
        Ok(Record {
            timestamp_ms: entry.t * self.setup.unit.in_ms(),
            input_length: length(entry.input.ok_or_else(|| missing("in"))?, "in", limits)?,
            output_length: length(entry.output.ok_or_else(|| missing("out"))?, "out", limits)?.max(1),
            hash_ids: match stream.scope {
                Some(scope) => ids.map(|id| own_id(mix(scope, id))).collect(),
                None => ids.collect(),
            },
            extra: Some(Box::new(extra)),
        })
    }
}

impl Parse for Weka {
    fn parse(&mut self, row: &Row<'_>, out: &mut Vec<Record>) -> Result<(), RowFault> {
        let conversation: Conversation = serde_json::from_slice(row.json()?).map_err(json_fault)?;
        self.rows += 1;
        if conversation.block_size.is_some_and(|b| b != self.setup.block_tokens) {
            return Err(RowFault::check(
                "block-size",
                format!("block_size {:?} after {}", conversation.block_size, self.setup.block_tokens),
                "one file holds one block size: split it",
            ));
        }
        let session = conversation.id.map_or_else(|| format!("conversation-{}", self.rows), |n| n.0);
        let local = conversation.hash_id_scope.as_deref() != Some("global");
        self.local += u64::from(local);
        let stream =
            Stream { scope: local.then(|| mix(session_key(&session), self.rows)), session, parent: None };
        self.expand(conversation.requests, &stream, out)
    }

    fn notes(&self) -> Vec<String> {
        let mut notes =
            vec!["times count from each conversation's start: all conversations start at 0".to_string()];
        if self.local > 0 {
            notes.push(format!(
                "ids of {} conversations are local: they were renamed so that no prefix is shared between conversations",
                self.local
            ));
        }
        notes
    }
}
