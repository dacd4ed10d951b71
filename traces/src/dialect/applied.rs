//! Applied Compute agentic sessions: one row a session, expanded into `num_turns + 1` requests.

use serde::Deserialize;

use crate::error::RowFault;
use crate::flat::json_fault;
use crate::parser::{Parse, Row, Setup, length};
use crate::prompt::{Prompt, mix};
use crate::record::{Extra, Record};

#[derive(Deserialize)]
struct SessionRow {
    num_turns: usize,
    input_prompt_length: i64,
    assistant_response_length: Vec<i64>,
    tool_call_output_length: Vec<i64>,
    tool_call_latency: Vec<f64>,
    final_assistant_response_length: i64,
}

/// Reads one agent session a row.
pub(crate) struct AppliedDialect {
    setup: Setup,
    sessions: u64,
}

impl AppliedDialect {
    pub(crate) fn new(setup: &Setup) -> Self {
        Self { setup: setup.clone(), sessions: 0 }
    }
}

impl SessionRow {
    fn check(&self) -> Result<(), RowFault> {
        let lengths = [
            self.assistant_response_length.len(),
            self.tool_call_output_length.len(),
            self.tool_call_latency.len(),
        ];
        if lengths.iter().any(|&n| n != self.num_turns) {
            return Err(RowFault::parse(
                format!("num_turns is {} but the lists hold {lengths:?} entries", self.num_turns),
                "give one response, one tool output and one latency a turn",
            ));
        }
        if self.tool_call_latency.iter().any(|t| !t.is_finite() || *t < 0.0) {
            return Err(RowFault::parse("a tool_call_latency is negative", "fix the row"));
        }
        Ok(())
    }
}

impl Parse for AppliedDialect {
    fn parse(&mut self, row: &Row<'_>, out: &mut Vec<Record>) -> Result<(), RowFault> {
        let session: SessionRow = serde_json::from_slice(row.json()?).map_err(json_fault)?;
        session.check()?;
        let limits = &self.setup.limits;
        let number = self.sessions;
        self.sessions += 1;
        let own = mix(0x6170_706c, number);
        let mut prompt = Prompt::new(self.setup.block_tokens, 0);
        prompt.push(own, length(session.input_prompt_length, "input_prompt_length", limits)?);
        let (mut start_ms, mut delay_ms) = (0.0, None);
        for turn in 0..=session.num_turns {
            let last = turn == session.num_turns;
            let answer = if last {
                session.final_assistant_response_length
            } else {
                session.assistant_response_length[turn]
            };
            let answer = length(answer, "assistant_response_length", limits)?;
            length(i64::try_from(prompt.tokens()).unwrap_or(i64::MAX), "the session's input", limits)?;
            out.push(Record {
                timestamp_ms: start_ms,
                input_length: prompt.tokens(),
                output_length: answer,
                hash_ids: prompt.ids(),
                extra: Some(Box::new(Extra {
                    session_id: Some(format!("session-{number}")),
                    delay_ms,
                    ..Extra::default()
                })),
            });
            if !last {
                let tool = length(session.tool_call_output_length[turn], "tool_call_output_length", limits)?;
                prompt.push(mix(own, 2 * turn as u64 + 1), answer);
                prompt.push(mix(own, 2 * turn as u64 + 2), tool);
                let wait_ms = session.tool_call_latency[turn] * self.setup.unit.in_ms();
                start_ms += wait_ms;
                delay_ms = Some(wait_ms);
            }
        }
        Ok(())
    }

    fn notes(&self) -> Vec<String> {
        vec![
            "sessions have no start time: all start at 0 (meant for closed-loop replay with a concurrency cap)".into(),
            "no prefix is shared between sessions: the rows do not say".into(),
        ]
    }
}
