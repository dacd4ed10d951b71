//! The common parts of the engines' answers: ends, errors within a stream, and logprobs.

use baton_types::{Finish, TokenLogprob};
use http::StatusCode;
use serde_json::Value;

use crate::error::{Kind, RemoteError, Side, Stage};
use crate::http::{message_of, refused};
use crate::request::{Counts, Token};

/// Ids that a model may have beyond those of its tokenizer: it pads its vocabulary, by less than 500 in those that are about,
/// and one with random weights draws such ids.
const PADDING_TOKENS: u32 = 1_024;

/// The content that one event of a stream, or an answer in one piece, adds.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Progress {
    pub(crate) prompt_logprobs: Option<Vec<TokenLogprob>>,
    pub(crate) tokens: Vec<Token>,
    pub(crate) finish: Option<Finish>,
    pub(crate) counts: Counts,
}

impl Progress {
    /// Refuses an id that is no token of a model whose tokenizer has so many.
    pub(crate) fn check_ids(&self, vocab_tokens: Option<u32>, stage: Stage) -> Result<(), RemoteError> {
        let Some(vocab_tokens) = vocab_tokens else { return Ok(()) };
        let bound = vocab_tokens.saturating_add(PADDING_TOKENS);
        match self.tokens.iter().find(|token| token.id >= bound) {
            Some(Token { id, .. }) => {
                Err(RemoteError::bug(stage, format!("token {id} is none of a vocabulary of {vocab_tokens}")))
            }
            None => Ok(()),
        }
    }
}

/// The end that an engine's word stands for; an end that is a failure is an error.
pub(crate) fn finish_of(word: &str, stage: Stage) -> Result<Finish, RemoteError> {
    match word {
        // vLLM's repetition detection stops an answer that goes round in circles.
        "stop" | "repetition" => Ok(Finish::Stop),
        "length" => Ok(Finish::Length),
        "abort" => Err(RemoteError::new(Kind::Closed, Side::Engine, stage, "the engine aborted the request")
            .remedy("see the engine's log, if it was not told to abort it")),
        "error" => Err(RemoteError::retry(stage, "the engine ended the answer with an error")),
        other => Err(RemoteError::bug(
            stage,
            format!("the answer ended by {other:?}, which is no end that Baton knows"),
        )),
    }
}

/// An error object within a stream whose status was 200.
pub(crate) fn stream_error(value: &Value, stage: Stage) -> RemoteError {
    let code = &value["error"]["code"];
    let code = if code.is_null() { &value["code"] } else { code };
    let status = code.as_u64().or_else(|| code.as_str().and_then(|text| text.parse().ok()));
    let status = status.and_then(|status| u16::try_from(status).ok());
    let text = format!("the engine failed within the stream: {}", message_of(value));
    match status.and_then(|status| StatusCode::from_u16(status).ok()) {
        Some(status) if status.as_u16() >= 400 => {
            let mut error = refused(status, b"", stage);
            error.text = text;
            error
        }
        _ => RemoteError::retry(stage, text),
    }
}

/// The likeliest `count` tokens, likeliest first, ties by lower id.
pub(crate) fn most_likely(mut tokens: Vec<(u32, f32)>, count: u8) -> Vec<(u32, f32)> {
    tokens.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    tokens.dedup_by_key(|(token, _)| *token);
    tokens.truncate(usize::from(count));
    tokens
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ends_are_ends_and_failures_are_errors() {
        let of = |word: &str| finish_of(word, Stage::Stream);
        assert_eq!(of("stop"), Ok(Finish::Stop));
        assert_eq!(of("length"), Ok(Finish::Length));
        assert_eq!(of("abort").unwrap_err().kind, Kind::Closed);
        assert_eq!(of("error").unwrap_err().kind, Kind::Retry);
        assert_eq!(of("tool_calls").unwrap_err().kind, Kind::Bug);
    }

    #[test]
    fn errors_within_a_stream_keep_their_meaning() {
        // As in faults_nixl.json, stream_failure.
        let seen = json!({"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}});
        let error = stream_error(&seen, Stage::Start);
        assert_eq!((error.kind, error.status), (Kind::Retry, Some(500)));
        assert!(error.text.contains("Internal server error"));
        let of = |value| stream_error(&value, Stage::Stream).kind;
        assert_eq!(of(json!({"error": {"message": "too long", "code": 400}})), Kind::Invalid);
        assert_eq!(of(json!({"error": {"message": "m", "code": "503"}})), Kind::Unavailable);
        assert_eq!(of(json!({"error": "odd"})), Kind::Retry);
        assert_eq!(of(json!({"error": {"message": "m", "code": 7}})), Kind::Retry);
    }

    #[test]
    fn the_likeliest_come_first_and_ties_by_id() {
        let tokens = vec![(9, -1.0), (3, -0.5), (2, -0.5), (7, f32::NEG_INFINITY)];
        assert_eq!(most_likely(tokens.clone(), 3), vec![(2, -0.5), (3, -0.5), (9, -1.0)]);
        assert_eq!(most_likely(tokens, 0), vec![]);
    }
}
