//! The Mooncake family: one flat JSON row a request; independent, in sessions, as deltas, or as a
//! graph.

use crate::dialect::Dialect;
use crate::error::RowFault;
use crate::flat::{self, FlatRow};
use crate::moment::stamp_ms;
use crate::parser::{Parse, Row, Sessions, Setup, length, required, session_key};
use crate::prompt::{Prompt, mix};
use crate::record::{Extra, Record};

/// The state of a session between its turns.
#[derive(Debug, Default)]
struct Session {
    turns: u64,
    last_ms: f64,
    last_output: u64,
    prompt: Option<Prompt>,
}

/// Reads Mooncake, Mooncake-delta and agentic rows.
pub(crate) struct Mooncake {
    setup: Setup,
    sessions: Sessions<Session>,
    last_ms: f64,
    untimed: u64,
    no_output: u64,
    /// Some row named its output length, so a row that does not is broken.
    names_output: bool,
    from_text: u64,
}

impl Mooncake {
    pub(crate) fn new(setup: &Setup) -> Self {
        Self {
            sessions: Sessions::new(setup.limits.sessions),
            setup: setup.clone(),
            last_ms: 0.0,
            untimed: 0,
            no_output: 0,
            names_output: false,
            from_text: 0,
        }
    }

    /// Prompt tokens and ids as the row states them.
    fn prompt_of(&mut self, row: &mut FlatRow) -> Result<(u64, Vec<u64>), RowFault> {
        let limits = self.setup.limits;
        let ids = row.hash_ids.take().unwrap_or_default();
        if let Some(tokens) = row.input_length {
            return Ok((length(tokens, "input_length", &limits)?, ids));
        }
        if let Some(tokens) = row.prompt_tokens {
            return Ok((tokens, ids));
        }
        if row.text.is_empty() {
            return required(None, "input_length");
        }
        self.from_text += 1;
        let prompt = text_prompt(&row.text, self.setup.block_tokens);
        Ok((prompt.tokens(), prompt.ids()))
    }

    fn output_of(&mut self, row: &FlatRow) -> Result<u64, RowFault> {
        match row.output_length {
            Some(tokens) => {
                self.names_output = true;
                length(tokens, "output_length", &self.setup.limits)
            }
            None if self.names_output => required(None, "output_length"),
            None => {
                self.no_output += 1;
                Ok(1)
            }
        }
    }

    /// Arrival and closed-loop delay. A later turn of a session waits for the one before.
    fn timing(&mut self, row: &FlatRow) -> Result<(f64, Option<f64>), RowFault> {
        let given = match &row.timestamp {
            Some(stamp) => Some(stamp_ms(stamp, self.setup.unit)?),
            None => None,
        };
        let delay = finite(row.delay_ms, "delay")?;
        let tool_wait = finite(row.tool_wait_ms, "tool_wait_ms")?;
        let wait = delay.or(tool_wait.map(|_| 0.0)).map(|d| d + tool_wait.unwrap_or(0.0));
        let waits_for_rows = !row.extra.wait_for.is_empty();
        if let Some(name) = &row.extra.session_id {
            let session = self.sessions.get(name)?;
            if session.turns > 0 {
                let wait = wait.or(given.map(|at| (at - session.last_ms).max(0.0)));
                let wait = wait.unwrap_or(0.0);
                let at = given.unwrap_or(session.last_ms + wait);
                return Ok((at, Some(wait)));
            }
        }
        if waits_for_rows {
            return Ok((given.unwrap_or(self.last_ms), Some(wait.unwrap_or(0.0))));
        }
        if given.is_none() && wait.is_none() {
            self.untimed += 1;
        }
        Ok((given.or(wait).unwrap_or(0.0), None))
    }

    /// Rebuilds the whole prompt of a delta row and remembers the session.
    fn join_session(&mut self, record: &mut Record, delta: bool) -> Result<(), RowFault> {
        let Some(name) = record.session_id().map(str::to_string) else {
            return Ok(());
        };
        let block_tokens = self.setup.block_tokens;
        let session = self.sessions.get(&name)?;
        if delta {
            let own = mix(session_key(&name), session.turns);
            let prompt = session.prompt.get_or_insert_with(|| Prompt::new(block_tokens, 0));
            if session.turns > 0 {
                prompt.push(mix(own, 1), session.last_output);
            }
            if record.hash_ids.is_empty() {
                prompt.push(mix(own, 2), record.input_length);
            } else {
                prompt.push_ids(&record.hash_ids, record.input_length);
            }
            record.input_length = prompt.tokens();
            record.hash_ids = prompt.ids();
        }
        session.turns += 1;
        session.last_ms = record.timestamp_ms;
        session.last_output = record.output_length;
        length(
            i64::try_from(record.input_length).unwrap_or(i64::MAX),
            "the rebuilt input_length",
            &self.setup.limits,
        )?;
        Ok(())
    }
}

/// The prompt that a row's texts make.
pub(crate) fn text_prompt(texts: &[String], block_tokens: u32) -> Prompt {
    let mut prompt = Prompt::new(block_tokens, 0);
    texts.iter().for_each(|text| prompt.push_text(text.as_bytes()));
    prompt
}

fn finite(value: Option<f64>, field: &str) -> Result<Option<f64>, RowFault> {
    match value {
        Some(v) if !v.is_finite() || v < 0.0 => {
            Err(RowFault::parse(format!("{field} {v} is not a time"), "write milliseconds >= 0"))
        }
        _ => Ok(value),
    }
}

/// An objective of a row may be what one of a call may be.
fn objective(value: Option<f64>, field: &str) -> Result<(), RowFault> {
    match value {
        Some(ms) if !(1.0..=86_400_000.0).contains(&ms) => Err(RowFault::parse(
            format!("{field} {ms} is no objective"),
            "write milliseconds, from 1 to 86,400,000",
        )),
        _ => Ok(()),
    }
}

impl Parse for Mooncake {
    fn parse(&mut self, row: &Row<'_>, out: &mut Vec<Record>) -> Result<(), RowFault> {
        let mut row = flat::parse(row.json()?, &self.setup.columns, &self.setup.limits)?;
        if self.setup.dialect == Dialect::AgenticMooncake && row.extra.request_id.is_none() {
            return required(None, "request_id");
        }
        let delta = self.setup.delta || row.delta == Some(true);
        let (input_length, hash_ids) = self.prompt_of(&mut row)?;
        let output_length = self.output_of(&row)?;
        let (timestamp_ms, delay_ms) = self.timing(&row)?;
        objective(row.extra.slo_ttft_ms, "slo_ttft_ms")?;
        objective(row.extra.slo_tbt_ms, "slo_tbt_ms")?;
        let mut extra = row.extra;
        extra.delay_ms = delay_ms;
        let mut record = Record {
            timestamp_ms,
            input_length,
            output_length,
            hash_ids,
            extra: (extra != Extra::default()).then(|| Box::new(extra)),
        };
        self.join_session(&mut record, delta)?;
        self.last_ms = timestamp_ms;
        out.push(record);
        Ok(())
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.untimed > 0 {
            notes.push(format!(
                "{} rows have neither a time nor a delay: they start at 0 (meant for closed-loop replay)",
                self.untimed
            ));
        }
        if self.no_output > 0 {
            notes.push(format!("{} rows name no output length: 1 token", self.no_output));
        }
        if self.from_text > 0 {
            notes.push(format!(
                "{} rows hold text: 4 bytes are taken for a token, ids follow from the text, the text itself is not carried",
                self.from_text
            ));
        }
        notes
    }
}
