//! Reading requests as strictly as the real servers do.

use std::collections::BTreeMap;

use baton_types::Sampling;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::server::Reply;
use super::text::{FakeTokenizer, Voice};

/// The content of a request to `/v1/completions`.
#[derive(Debug)]
pub(super) struct CompletionRequest {
    pub(super) voice: Voice,
    pub(super) tokenizer: FakeTokenizer,
    pub(super) salt: String,
    pub(super) prompt: Vec<u32>,
    pub(super) sampling: Sampling,
    pub(super) stream: bool,
    pub(super) usage: bool,
    pub(super) token_ids: bool,
    pub(super) ids_in_logprobs: bool,
    pub(super) params: Option<Map<String, Value>>,
}

/// Why a request is not served.
pub(super) type RefusalReason = String;

/// A 400 as vLLM words it.
pub(super) fn bad_request(message: &str) -> Reply {
    Reply::json(
        400,
        &json!({"error": {"message": message, "type": "BadRequestError", "param": null, "code": 400}}),
    )
}

/// A 500 as vLLM words it.
pub(super) fn server_error() -> Reply {
    Reply::json(
        500,
        &json!({"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}),
    )
}

/// A request's fields, and its prompt. A long prompt is parsed once, without intermediate values.
#[derive(Debug, Default)]
pub(super) struct ReadRequest {
    pub(super) fields: Value,
    prompt: Option<Prompt>,
}

#[derive(Debug)]
enum Prompt {
    Ids(Vec<u32>),
    Text(String),
}

impl ReadRequest {
    /// Reads a JSON object; nothing for anything else.
    pub(super) fn new(body: &[u8]) -> Option<Self> {
        let all: BTreeMap<String, &RawValue> = serde_json::from_slice(body).ok()?;
        let (mut fields, mut prompt) = (Map::new(), None);
        for (name, value) in all {
            if name == "prompt" || name == "input_ids" {
                let ids = serde_json::from_str(value.get()).map(Prompt::Ids);
                prompt = ids.or_else(|_| serde_json::from_str(value.get()).map(Prompt::Text)).ok();
            } else {
                fields.insert(name, serde_json::from_str(value.get()).ok()?);
            }
        }
        Some(Self { fields: Value::Object(fields), prompt })
    }

    /// The prompt, and how it was worded.
    pub(super) fn prompt(
        &mut self,
        chat: bool,
        tokenizer: FakeTokenizer,
    ) -> Result<(Voice, Vec<u32>), RefusalReason> {
        if chat {
            return Ok((Voice::Chat, tokenizer.tokens_of_chat(&self.fields["messages"], true)?));
        }
        match self.prompt.take() {
            Some(Prompt::Ids(ids)) => Ok((Voice::Ids, known(ids, tokenizer)?)),
            Some(Prompt::Text(text)) => Ok((Voice::Completion, tokenizer.tokens_of(&text, true)?)),
            None => Err(NO_LIST.into()),
        }
    }

    /// The salt that separates the prompt's cached blocks from others'.
    pub(super) fn salt(&self) -> String {
        let of = |name: &str| self.fields[name].as_str().unwrap_or_default();
        [of("cache_salt"), of("extra_key")].concat()
    }
}

const NO_LIST: &str = "the prompt is no list of token ids";

/// Token ids of the vocabulary, at least one.
fn token_list(value: &Value, tokenizer: FakeTokenizer) -> Result<Vec<u32>, RefusalReason> {
    let list = value.as_array().ok_or(NO_LIST)?;
    let ids: Option<Vec<u32>> =
        list.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect();
    known(ids.ok_or(NO_LIST)?, tokenizer)
}

fn known(ids: Vec<u32>, tokenizer: FakeTokenizer) -> Result<Vec<u32>, RefusalReason> {
    if ids.is_empty() {
        return Err(NO_LIST.into());
    }
    match ids.iter().find(|id| **id >= tokenizer.vocab_tokens()) {
        Some(id) => Err(format!("token {id} is out of vocabulary")),
        None => Ok(ids),
    }
}

fn flag(body: &Value, name: &str) -> Result<bool, RefusalReason> {
    match &body[name] {
        Value::Null => Ok(false),
        value => value.as_bool().ok_or_else(|| format!("{name} should be a valid boolean")),
    }
}

fn count(body: &Value, name: &str) -> Result<Option<u32>, RefusalReason> {
    match &body[name] {
        Value::Null => Ok(None),
        value => {
            let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
            number.map(Some).ok_or_else(|| format!("{name} should be a valid count"))
        }
    }
}

fn real(
    body: &Value,
    name: &str,
    range: std::ops::RangeInclusive<f64>,
) -> Result<Option<f64>, RefusalReason> {
    match &body[name] {
        Value::Null => Ok(None),
        value => match value.as_f64() {
            Some(number) if range.contains(&number) => Ok(Some(number)),
            _ => Err(format!("{name} should be within {range:?}, got {value}")),
        },
    }
}

/// Checks the draws that both engines name alike.
pub(super) fn draws(params: &Value) -> Result<(), RefusalReason> {
    real(params, "temperature", 0.0..=f64::MAX)?;
    real(params, "top_p", f64::MIN_POSITIVE..=1.0)?;
    real(params, "top_k", -1.0..=f64::MAX)?;
    real(params, "min_p", 0.0..=1.0)?;
    real(params, "presence_penalty", -2.0..=2.0)?;
    real(params, "frequency_penalty", -2.0..=2.0)?;
    real(params, "repetition_penalty", f64::MIN_POSITIVE..=f64::MAX)?;
    if let Some(biases) = params["logit_bias"].as_object()
        && biases.iter().any(|(token, bias)| token.parse::<u32>().is_err() || !bias.is_number())
    {
        return Err("logit_bias has a key that is no token".into());
    }
    Ok(())
}

/// Lengths and ends, by the names that an engine gives them.
pub(super) fn lengths(
    params: &Value,
    (most, least): (&str, &str),
    tokenizer: FakeTokenizer,
) -> Result<Sampling, RefusalReason> {
    let max_tokens = count(params, most)?.unwrap_or(16);
    let min_tokens = count(params, least)?.unwrap_or(0);
    if max_tokens == 0 {
        return Err(format!("{most} must be at least 1"));
    }
    if min_tokens > max_tokens {
        return Err(format!("{least} must be less than or equal to {most}={max_tokens}, got {min_tokens}"));
    }
    let stop_token_ids = match &params["stop_token_ids"] {
        Value::Null => Vec::new(),
        value => token_list(value, tokenizer)?,
    };
    let ignore_eos = flag(params, "ignore_eos")?;
    Ok(Sampling { max_tokens, min_tokens, stop_token_ids, ignore_eos, ..Sampling::default() })
}

/// Reads a request to `/v1/completions` or, as a chat, to `/v1/chat/completions`.
pub(super) fn completion(
    mut read: ReadRequest,
    chat: bool,
    (tokenizer, max_model_tokens): (FakeTokenizer, u32),
) -> Result<CompletionRequest, RefusalReason> {
    let (voice, prompt) = read.prompt(chat, tokenizer)?;
    let salt = read.salt();
    let body = &read.fields;
    draws(body)?;
    let mut sampling = lengths(body, (most_tokens(body), "min_tokens"), tokenizer)?;
    let stream = flag(body, "stream")?;
    if !body["stream_options"].is_null() && !stream {
        return Err("Stream options can only be defined when `stream=True`.".into());
    }
    if count(body, "n")?.unwrap_or(1) != 1 {
        return Err("n is not 1".into());
    }
    // Chats say yes or no, and are answered without; so are texts.
    if voice == Voice::Ids {
        sampling.logprobs = top(body, "logprobs")?;
        sampling.prompt_logprobs = top(body, "prompt_logprobs")?;
    }
    if stream && sampling.prompt_logprobs.is_some() {
        return Err("`prompt_logprobs` are not available when `stream=True`.".into());
    }
    if prompt.len() as u64 + u64::from(sampling.max_tokens) > u64::from(max_model_tokens) {
        return Err(format!("This model's maximum context length is {max_model_tokens} tokens."));
    }
    xargs(&body["vllm_xargs"])?;
    let params = match &body["kv_transfer_params"] {
        Value::Null => None,
        Value::Object(params) => Some(params.clone()),
        _ => return Err("kv_transfer_params should be a valid dictionary".into()),
    };
    Ok(CompletionRequest {
        voice,
        tokenizer,
        salt,
        prompt,
        sampling,
        stream,
        usage: body["stream_options"]["include_usage"] == json!(true),
        token_ids: flag(body, "return_token_ids")?,
        ids_in_logprobs: flag(body, "return_tokens_as_token_ids")?,
        params,
    })
}

/// The field in which OpenAI's clients say how long an answer may be.
pub(super) fn most_tokens(body: &Value) -> &'static str {
    if body["max_completion_tokens"].is_null() { "max_tokens" } else { "max_completion_tokens" }
}

/// Further fields are texts, numbers, or lists of these.
fn xargs(given: &Value) -> Result<(), RefusalReason> {
    let plain = |value: &Value| value.is_string() || value.is_number();
    let fits = |value: &Value| plain(value) || value.as_array().is_some_and(|list| list.iter().all(plain));
    match given {
        Value::Null => Ok(()),
        Value::Object(fields) if fields.values().all(fits) => Ok(()),
        _ => Err("vllm_xargs should be a valid dictionary of strings, numbers and lists of these".into()),
    }
}

fn top(body: &Value, name: &str) -> Result<Option<u8>, RefusalReason> {
    match count(body, name)? {
        None => Ok(None),
        Some(number) if number <= 20 => Ok(u8::try_from(number).ok()),
        Some(number) => Err(format!("Requested {name} of {number}, which is greater than max allowed: 20")),
    }
}
