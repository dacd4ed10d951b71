//! Multi-turn conversations as text: `{session_id, turns: [{text, delay, timestamp}]}`.

use serde::Deserialize;
use serde_json::Value;

use crate::error::RowFault;
use crate::flat::{Name, Stamp, json_fault};
use crate::moment::stamp_ms;
use crate::parser::{Parse, Row, Setup, length, session_key};
use crate::prompt::{Prompt, mix};
use crate::record::{Extra, Record};

#[derive(Deserialize)]
struct Conversation {
    session_id: Option<Name>,
    turns: Vec<Turn>,
}

#[derive(Deserialize)]
struct Turn {
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    texts: Option<Value>,
    #[serde(default)]
    role: Option<String>,
    #[serde(default)]
    delay: Option<f64>,
    #[serde(default)]
    timestamp: Option<Stamp>,
    #[serde(default)]
    output_length: Option<i64>,
}

/// Reads conversations; the prompt of a turn is everything said before it.
pub(crate) struct Turns {
    setup: Setup,
    rows: u64,
    no_output: u64,
}

impl Turns {
    pub(crate) fn new(setup: &Setup) -> Self {
        Self { setup: setup.clone(), rows: 0, no_output: 0 }
    }
}

impl Parse for Turns {
    fn parse(&mut self, row: &Row<'_>, out: &mut Vec<Record>) -> Result<(), RowFault> {
        let conversation: Conversation = serde_json::from_slice(row.json()?).map_err(json_fault)?;
        self.rows += 1;
        let session = conversation.session_id.map_or_else(|| format!("conversation-{}", self.rows), |n| n.0);
        let own = mix(session_key(&session), self.rows);
        let limits = self.setup.limits;
        let mut prompt = Prompt::new(self.setup.block_tokens, 0);
        let mut last_ms: Option<f64> = None;
        for (index, turn) in conversation.turns.into_iter().enumerate() {
            let role = turn.role.unwrap_or_else(|| "user".into());
            let text = turn.text.or(turn.texts.map(|t| t.to_string())).unwrap_or_default();
            prompt.push_text(format!("{role}\n{text}").as_bytes());
            let output = match turn.output_length {
                Some(tokens) => length(tokens, "output_length", &limits)?,
                None => {
                    self.no_output += 1;
                    1
                }
            };
            let given = turn.timestamp.map(|stamp| stamp_ms(&stamp, self.setup.unit)).transpose()?;
            let delay = turn.delay.filter(|d| d.is_finite() && *d >= 0.0);
            let wait = delay.or(given.zip(last_ms).map(|(at, last)| (at - last).max(0.0))).unwrap_or(0.0);
            let at = given.unwrap_or(last_ms.unwrap_or(0.0) + wait);
            out.push(Record {
                timestamp_ms: at,
                input_length: prompt.tokens(),
                output_length: output,
                hash_ids: prompt.ids(),
                extra: Some(Box::new(Extra {
                    session_id: Some(session.clone()),
                    delay_ms: last_ms.map(|_| wait),
                    ..Extra::default()
                })),
            });
            last_ms = Some(at);
            prompt.push(mix(own, index as u64), output);
        }
        Ok(())
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = vec![
            "rows hold text: 4 bytes are taken for a token, ids follow from the text, the text itself is not carried".to_string(),
        ];
        if self.no_output > 0 {
            notes.push(format!("{} turns name no output length: 1 token", self.no_output));
        }
        notes
    }
}
