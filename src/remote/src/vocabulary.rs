//! Whether an engine makes the tokens of a text that the front door makes.
//!
//! An engine takes token ids as they are: those of another tokenizer get a fluent answer to another prompt, with 200.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::engine::RemoteEngine;
use crate::error::{RemoteError, Stage};
use crate::http::Call;
use crate::settings::{Dialect, EngineRole};

const STAGE: Stage = Stage::Vocabulary;

/// A text and a chat, with the tokens that the front door makes of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// A text.
    pub text: String,
    /// Its tokens, with those that the tokenizer puts around a text.
    pub tokens: Vec<u32>,
    /// `messages` of a chat, as JSON.
    pub messages: String,
    /// The chat's tokens; `None` where there is nothing to compare.
    pub chat_tokens: Option<Vec<u32>>,
}

/// The part that was compared and is equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComparisonExtent {
    /// The ids of the text and of the chat.
    All,
    /// The ids of the text.
    Text,
    /// How many tokens the text has.
    Count,
    /// Nothing: the engine does not tell.
    Nothing,
}

impl ComparisonExtent {
    /// What was compared, in words.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::All => "those of a text and a chat are equal",
            Self::Text => "those of a text are equal",
            Self::Count => "a text has as many",
            Self::Nothing => "not compared",
        }
    }
}

impl RemoteEngine {
    /// Compares an engine's tokens of a text and of a chat with those that it will be sent. It is asked at `/tokenize`, or
    /// by an answer of one token where it has no such path.
    ///
    /// # Errors
    /// [`crate::Kind::Invalid`] when they differ; otherwise when the engine does not answer.
    pub async fn compare(&self, sample: &Sample) -> Result<ComparisonExtent, RemoteError> {
        let asked = json!({"model": self.named(), "prompt": sample.text, "add_special_tokens": true});
        let Some(answer) = self.fetch_json("/tokenize", &asked).await? else {
            return self.compare_by_answer(sample).await;
        };
        let Some(theirs) = ids(&answer["tokens"]) else { return self.compare_by_answer(sample).await };
        same("a text", &sample.tokens, &theirs)?;
        let Some(ours) = &sample.chat_tokens else { return Ok(ComparisonExtent::Text) };
        let messages: Box<RawValue> = serde_json::from_str(&sample.messages)
            .map_err(|error| RemoteError::ours(STAGE, format!("the sample's chat: {error}")))?;
        let asked = json!({"model": self.named(), "messages": messages, "add_generation_prompt": true});
        let answer = self.fetch_json("/tokenize", &asked).await?.unwrap_or_default();
        let Some(theirs) = ids(&answer["tokens"]) else { return Ok(ComparisonExtent::Text) };
        same("a chat", ours, &theirs).map(|()| ComparisonExtent::All)
    }

    async fn compare_by_answer(&self, sample: &Sample) -> Result<ComparisonExtent, RemoteError> {
        let paired = self.role().is_some_and(|role| role != EngineRole::Whole);
        if self.settings().dialect == Dialect::Sglang && paired {
            // It serves no request by itself.
            return Ok(ComparisonExtent::Nothing);
        }
        let asked = json!({"model": self.named(), "prompt": sample.text, "max_tokens": 1, "temperature": 0.0,
            "return_token_ids": true, "stream": false});
        let Some(answer) = self.fetch_json("/v1/completions", &asked).await? else {
            return Ok(ComparisonExtent::Nothing);
        };
        if let Some(theirs) = ids(&answer["choices"][0]["prompt_token_ids"]) {
            return same("a text", &sample.tokens, &theirs).map(|()| ComparisonExtent::Text);
        }
        match answer["usage"]["prompt_tokens"].as_u64() {
            Some(theirs) if theirs == sample.tokens.len() as u64 => Ok(ComparisonExtent::Count),
            Some(theirs) => {
                Err(differs(format!("a text has {theirs} tokens there, {} here", sample.tokens.len())))
            }
            None => Ok(ComparisonExtent::Nothing),
        }
    }

    fn named(&self) -> Option<String> {
        self.settings().model.clone().or_else(|| self.probed().map(|probe| probe.model.clone()))
    }

    /// An answer to a question; `None` when the engine does not have the path, or does not take the question.
    async fn fetch_json(&self, path: &str, asked: &Value) -> Result<Option<Value>, RemoteError> {
        let until = Instant::now() + Duration::from_micros(self.settings().timeouts.first_token_us);
        let call = Call { stage: STAGE, path, elsewhere: None, headers: vec![], until };
        let wire = self.wire();
        let answer = match wire.post(Bytes::from(asked.to_string()).into(), call).await {
            Ok(answer) => answer,
            Err(error) => {
                let status = error.status.and_then(|status| StatusCode::from_u16(status).ok());
                let lacks = |status: StatusCode| match status {
                    StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::TOO_MANY_REQUESTS => false,
                    StatusCode::NOT_IMPLEMENTED => true,
                    other => other.is_client_error(),
                };
                return if status.is_some_and(lacks) { Ok(None) } else { Err(error) };
            }
        };
        let page = wire.whole(answer, until, STAGE).await?;
        Ok(serde_json::from_slice(&page).ok())
    }
}

fn ids(list: &Value) -> Option<Vec<u32>> {
    let id = |one: &Value| one.as_u64().and_then(|id| u32::try_from(id).ok());
    list.as_array()?.iter().map(id).collect()
}

fn same(what: &str, ours: &[u32], theirs: &[u32]) -> Result<(), RemoteError> {
    if ours == theirs {
        return Ok(());
    }
    let at = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
    let word =
        |list: &[u32]| list.get(at).map_or_else(|| "at its end".to_owned(), |id| format!("token {id}"));
    let (there, here) = (theirs.len(), ours.len());
    Err(differs(format!(
        "{what} has {there} tokens there, {here} here, and differs from place {at} on: {} there, {} here",
        word(theirs),
        word(ours)
    )))
}

fn differs(how: String) -> RemoteError {
    let remedy =
        "give --model the folder of the model that the engine serves, with its tokenizer and chat template";
    RemoteError::ours(STAGE, format!("its tokens are not those of --model: {how}")).remedy(remedy)
}
