//! One answer as its client saw it, event by event.

use anyhow::{Context as _, Result};
use baton_sim::engine::GapSummary;
use serde::Deserialize;

/// One event of a completion stream, or an error body: what this client needs of it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Chunk {
    choices: Vec<Choice>,
    usage: Option<UsageFigures>,
    error: Option<ErrorBody>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Choice {
    text: Option<String>,
    delta: Option<ChatPiece>,
    finish_reason: Option<String>,
}

/// What an event adds to a chat's answer.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ChatPiece {
    role: Option<String>,
    content: Option<String>,
    /// What reasoning models draw first.
    #[serde(alias = "reasoning")]
    reasoning_content: Option<String>,
}

impl Choice {
    fn is_empty(&self) -> bool {
        let chat = self.delta.iter().flat_map(|delta| [&delta.content, &delta.reasoning_content]);
        std::iter::once(&self.text).chain(chat).flatten().all(String::is_empty)
    }

    /// Whether it only says that an answer begins.
    fn opens(&self) -> bool {
        self.is_empty() && self.delta.as_ref().is_some_and(|delta| delta.role.is_some())
    }
}

/// The server's own count of an answer's tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct UsageFigures {
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// More about the prompt.
    pub prompt_tokens_details: Option<PromptDetails>,
}

/// More about a prompt's tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct PromptDetails {
    /// Those that needed no computing.
    pub cached_tokens: Option<u64>,
}

impl UsageFigures {
    /// Prompt tokens that needed no computing, as far as the server says.
    pub fn cached_tokens(&self) -> u64 {
        self.prompt_tokens_details.and_then(|d| d.cached_tokens).unwrap_or(0)
    }
}

/// An error as completion APIs word it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ErrorBody {
    /// For a person.
    pub message: Option<String>,
    /// The kind of error.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// The error's name; some servers send a number.
    pub code: Option<serde_json::Value>,
}

impl ErrorBody {
    /// The error of a response body, when there is one.
    pub fn of(body: &[u8]) -> Self {
        serde_json::from_slice::<Chunk>(body).ok().and_then(|c| c.error).unwrap_or_default()
    }

    /// Its shortest name: at most 64 characters.
    pub fn name(&self) -> String {
        let code = match &self.code {
            Some(serde_json::Value::String(code)) => Some(code.clone()),
            Some(serde_json::Value::Number(code)) => Some(code.to_string()),
            _ => None,
        };
        let name = code.or_else(|| self.kind.clone()).unwrap_or_else(|| "unnamed".into());
        name.chars().take(64).collect()
    }
}

/// Gathers one answer.
#[derive(Debug, Default)]
pub struct Answer {
    first_us: Option<u64>,
    last_us: u64,
    gaps_us: Vec<u32>,
    tokens: u64,
    /// The end came in an event without text: a token only if the server counts one more.
    silent_end_us: Option<u64>,
    /// Tokens that came together with another in one event.
    pub merged_tokens: u64,
    /// The server's own count.
    pub usage: Option<UsageFigures>,
    /// The stream said that it was complete.
    pub done: bool,
    /// The error that the stream ended with.
    pub error: Option<ErrorBody>,
}

impl Answer {
    /// Takes in the payload of one event that came at `now_us`. An error for one that is not JSON.
    pub fn event(&mut self, payload: &[u8], now_us: u64) -> Result<()> {
        if payload == b"[DONE]" {
            self.done = true;
            return Ok(());
        }
        let chunk: Chunk = serde_json::from_slice(payload).context("an event is not JSON")?;
        if chunk.error.is_some() {
            self.error = chunk.error;
            return Ok(());
        }
        let silent = chunk.choices.iter().all(Choice::is_empty);
        if chunk.choices.iter().any(|c| c.finish_reason.is_some()) && silent {
            self.silent_end_us = Some(now_us);
        } else if !chunk.choices.is_empty() && !chunk.choices.iter().all(Choice::opens) {
            let counted = chunk.usage.map_or(0, |u| u.completion_tokens);
            self.tokens(counted.saturating_sub(self.tokens).max(1), now_us);
        }
        self.usage = chunk.usage.or(self.usage);
        Ok(())
    }

    /// Takes in `count` tokens that came together.
    fn tokens(&mut self, count: u64, now_us: u64) {
        let gap_us = u32::try_from(now_us.saturating_sub(self.last_us)).unwrap_or(u32::MAX);
        if self.first_us.is_none() {
            self.first_us = Some(now_us);
        } else {
            self.gaps_us.push(gap_us);
        }
        let together = usize::try_from(count - 1).unwrap_or(usize::MAX);
        self.gaps_us.resize(self.gaps_us.len().saturating_add(together.min(MAX_TOGETHER)), 0);
        self.merged_tokens += count - 1;
        self.tokens += count;
        self.last_us = now_us;
    }

    /// Ends the answer: whether it had a first token, its count and its gaps are final then.
    pub fn close(&mut self) {
        let counted = self.usage.map_or(0, |u| u.completion_tokens);
        if let Some(at_us) = self.silent_end_us.take().filter(|_| self.tokens < counted) {
            self.tokens(1, at_us);
        }
        self.merged_tokens += counted.saturating_sub(self.tokens);
    }

    /// Tokens so far, by events.
    pub const fn seen_tokens(&self) -> u64 {
        self.tokens
    }

    /// When the last token came; 0 before the first.
    pub const fn last_us(&self) -> u64 {
        self.last_us
    }

    /// When the first token came.
    pub const fn first_us(&self) -> Option<u64> {
        self.first_us
    }

    /// Tokens, by the server's count when it gave one, else by events.
    pub fn token_count(&self) -> u64 {
        self.usage.map_or(self.tokens, |u| u.completion_tokens)
    }

    /// The gaps between tokens, by the simulator's definitions.
    pub fn gaps(&mut self) -> GapSummary {
        baton_sim::engine::summarise(&mut self.gaps_us)
    }
}

/// Most tokens that one event is taken to carry.
const MAX_TOGETHER: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn told(events: &[(&str, u64)]) -> Answer {
        let mut answer = Answer::default();
        for (payload, at_us) in events {
            answer.event(payload.as_bytes(), *at_us).unwrap();
        }
        answer.close();
        answer
    }

    const A: &str = r#"{"choices":[{"text":"a","finish_reason":null}],"usage":null}"#;
    const END: &str = r#"{"choices":[{"text":"","finish_reason":"length"}]}"#;

    fn usage(tokens: u64) -> String {
        format!(
            r#"{{"choices":[],"usage":{{"prompt_tokens":5,"completion_tokens":{tokens},"prompt_tokens_details":{{"cached_tokens":4}}}}}}"#
        )
    }

    #[test]
    fn gaps_are_between_tokens_and_the_first_is_none() {
        let mut answer = told(&[(A, 100), (A, 130), (A, 190), (END, 200), (&usage(3), 200), ("[DONE]", 200)]);
        assert_eq!(answer.first_us(), Some(100));
        assert_eq!((answer.token_count(), answer.merged_tokens, answer.done), (3, 0, true));
        assert_eq!(answer.usage.unwrap().cached_tokens(), 4);
        let gaps = answer.gaps();
        assert_eq!((gaps.count, gaps.mean_us, gaps.worst_tenth_us), (2, 45, 60));
    }

    #[test]
    fn an_end_without_text_is_a_token_only_when_the_server_counts_it() {
        let mut counted = told(&[(A, 100), (END, 150), (&usage(2), 150)]);
        assert_eq!((counted.gaps().count, counted.merged_tokens), (1, 0));
        let mut uncounted = told(&[(A, 100), (END, 150), (&usage(1), 150)]);
        assert_eq!(uncounted.gaps().count, 0);
    }

    #[test]
    fn tokens_that_come_together_are_told_apart_where_the_server_counts_along() {
        let along = r#"{"choices":[{"text":"abc"}],"usage":{"prompt_tokens":1,"completion_tokens":4}}"#;
        let mut answer = told(&[(A, 100), (along, 160)]);
        let gaps = answer.gaps();
        assert_eq!((gaps.count, gaps.max_us, gaps.mean_us, answer.merged_tokens), (3, 60, 20, 2));
        assert_eq!(told(&[(A, 1), (&usage(5), 2)]).merged_tokens, 4, "told only at the end");
    }

    #[test]
    fn the_opening_of_a_chat_is_no_token() {
        let role = r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#;
        let piece = r#"{"choices":[{"delta":{"content":"a"}}]}"#;
        let thought = r#"{"choices":[{"delta":{"reasoning_content":"b","content":null}}]}"#;
        let first = r#"{"choices":[{"delta":{"role":"assistant","content":"c"}}]}"#;
        let end = r#"{"choices":[{"delta":{},"finish_reason":"length"}]}"#;
        let answer = told(&[(role, 10), (thought, 20), (piece, 30), (end, 30)]);
        assert_eq!((answer.first_us(), answer.seen_tokens()), (Some(20), 2));
        assert_eq!(told(&[(first, 5)]).seen_tokens(), 1);
    }

    #[test]
    fn an_error_in_the_stream_is_kept_with_its_name() {
        let answer = told(&[(A, 1), (r#"{"error":{"message":"m","type":"t","code":"decode_lost"}}"#, 2)]);
        assert_eq!(answer.error.unwrap().name(), "decode_lost");
        assert_eq!(ErrorBody::of(br#"{"error":{"type":"server_error","code":null}}"#).name(), "server_error");
        assert_eq!(ErrorBody::of(br#"{"error":{"code":503}}"#).name(), "503");
        assert_eq!(ErrorBody::of(b"<html>").name(), "unnamed");
        assert!(Answer::default().event(b"{", 0).is_err());
    }
}
