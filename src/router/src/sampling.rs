//! From a body's fields to how tokens are drawn, with every bound checked.

use std::borrow::Cow;

use baton_types::Sampling;

use crate::backend::Model;
use crate::error::ApiError;
use crate::fields::{Fields, Logprobs, StopField};

/// Likeliest tokens beside each token's own logprob, at most.
const MAX_TOP_LOGPROBS: u32 = 20;
/// Longest stop string.
const MAX_STOP_BYTES: usize = 4_096;
/// Tokens that end an answer, and biased tokens, at most.
const MAX_TOKEN_LIST: usize = 4_096;

/// Which of the two calls a body belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Chat,
    Completions,
}

/// How tokens are drawn, but for the number of them, which depends on the prompt.
pub(crate) fn sampling(fields: &Fields<'_>, endpoint: Endpoint, model: &Model) -> Result<Sampling, ApiError> {
    let plain = Sampling::default();
    let mut sampling = Sampling {
        temperature: within("temperature", fields.temperature, 0.0..=2.0)?.unwrap_or(plain.temperature),
        top_p: within("top_p", fields.top_p, f32::MIN_POSITIVE..=1.0)?.unwrap_or(plain.top_p),
        min_p: within("min_p", fields.min_p, 0.0..=1.0)?.unwrap_or(plain.min_p),
        presence_penalty: within("presence_penalty", fields.presence_penalty, -2.0..=2.0)?.unwrap_or(0.0),
        frequency_penalty: within("frequency_penalty", fields.frequency_penalty, -2.0..=2.0)?.unwrap_or(0.0),
        repetition_penalty: within("repetition_penalty", fields.repetition_penalty, 0.01..=100.0)?
            .unwrap_or(1.0),
        top_k: top_k(fields.top_k)?,
        min_tokens: fields.min_tokens.unwrap_or(0),
        ignore_eos: fields.ignore_eos.unwrap_or(false),
        seed: fields.seed.map_or_else(rand::random, i64::cast_unsigned),
        ..plain
    };
    sampling.logit_bias = logit_bias(fields, model)?;
    sampling.stop_token_ids = stop_tokens(fields, model)?;
    sampling.logprobs = logprobs(fields, endpoint)?;
    sampling.prompt_logprobs = match fields.prompt_logprobs {
        Some(count) => Some(top_count("prompt_logprobs", count)?),
        None if fields.echo == Some(true) => sampling.logprobs,
        None => None,
    };
    Ok(sampling)
}

fn within(
    name: &'static str,
    value: Option<f32>,
    range: std::ops::RangeInclusive<f32>,
) -> Result<Option<f32>, ApiError> {
    match value {
        Some(value) if !range.contains(&value) => {
            let low = if *range.start() == f32::MIN_POSITIVE {
                "above 0".to_owned()
            } else {
                range.start().to_string()
            };
            Err(ApiError::invalid(name, format!("{name} is {value}; it goes from {low} to {}", range.end())))
        }
        value => Ok(value),
    }
}

fn top_k(value: Option<i64>) -> Result<u32, ApiError> {
    // −1 is what vLLM calls all.
    match value.unwrap_or(0) {
        -1 => Ok(0),
        value => u32::try_from(value).map_err(|_| {
            ApiError::invalid("top_k", format!("top_k is {value}; it is at least 1, or 0 or -1 for all"))
        }),
    }
}

fn in_vocabulary(name: &'static str, token: u32, model: &Model) -> Result<(), ApiError> {
    if token < model.vocab_tokens {
        return Ok(());
    }
    let message = format!("{name}: token {token} is not in the vocabulary of {} tokens", model.vocab_tokens);
    Err(ApiError::invalid(name, message))
}

fn logit_bias(fields: &Fields<'_>, model: &Model) -> Result<Vec<(u32, f32)>, ApiError> {
    let biases = fields.logit_bias.as_ref().map(|bias| bias.0.as_slice()).unwrap_or_default();
    bounded("logit_bias", biases.len())?;
    for &(token, bias) in biases {
        in_vocabulary("logit_bias", token, model)?;
        if !(-100.0..=100.0).contains(&bias) {
            let message = format!("logit_bias of token {token} is {bias}; it goes from -100 to 100");
            return Err(ApiError::invalid("logit_bias", message));
        }
    }
    Ok(biases.to_vec())
}

fn bounded(name: &'static str, length: usize) -> Result<(), ApiError> {
    if length <= MAX_TOKEN_LIST {
        return Ok(());
    }
    Err(ApiError::invalid(name, format!("{name} has {length} tokens; at most {MAX_TOKEN_LIST} are taken")))
}

fn stop_tokens(fields: &Fields<'_>, model: &Model) -> Result<Vec<u32>, ApiError> {
    let tokens = fields.stop_token_ids.as_deref().unwrap_or_default();
    bounded("stop_token_ids", tokens.len())?;
    tokens.iter().try_for_each(|&token| in_vocabulary("stop_token_ids", token, model))?;
    Ok(tokens.to_vec())
}

fn top_count(name: &'static str, count: u32) -> Result<u8, ApiError> {
    match u8::try_from(count) {
        Ok(small) if count <= MAX_TOP_LOGPROBS => Ok(small),
        _ => Err(ApiError::invalid(name, format!("{name} is {count}; it goes up to {MAX_TOP_LOGPROBS}"))),
    }
}

fn logprobs(fields: &Fields<'_>, endpoint: Endpoint) -> Result<Option<u8>, ApiError> {
    let top = fields.top_logprobs.map(|count| top_count("top_logprobs", count)).transpose()?;
    match (endpoint, fields.logprobs) {
        (Endpoint::Completions, Some(Logprobs::Top(count))) => top_count("logprobs", count).map(Some),
        (Endpoint::Completions, None | Some(Logprobs::Flag(false))) => Ok(None),
        (Endpoint::Completions, Some(Logprobs::Flag(true))) => Err(ApiError::invalid(
            "logprobs",
            "logprobs is a number here: how many of the likeliest tokens to show",
        )),
        (Endpoint::Chat, Some(Logprobs::Flag(true))) => Ok(Some(top.unwrap_or(0))),
        (Endpoint::Chat, None | Some(Logprobs::Flag(false))) => match top {
            Some(count) if count > 0 => {
                Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs to be true"))
            }
            _ => Ok(None),
        },
        (Endpoint::Chat, Some(Logprobs::Top(_))) => {
            Err(ApiError::invalid("logprobs", "logprobs is true or false here; how many is top_logprobs"))
        }
    }
}

/// The stop strings, not empty and not too many.
pub(crate) fn stops(fields: &mut Fields<'_>, limit: usize) -> Result<Vec<String>, ApiError> {
    let stops = match fields.stop.take() {
        None => Vec::new(),
        Some(StopField::One(stop)) => vec![stop],
        Some(StopField::Several(stops)) => stops,
    };
    let wrong: Option<Cow<'static, str>> = if stops.len() > limit {
        Some(format!("stop has {} strings; at most {limit} are taken", stops.len()).into())
    } else if stops.iter().any(String::is_empty) {
        Some("stop has an empty string, which would end every answer before it begins; leave it out".into())
    } else if stops.iter().any(|stop| stop.len() > MAX_STOP_BYTES) {
        Some(format!("stop has a string of more than {MAX_STOP_BYTES} bytes").into())
    } else {
        None
    };
    wrong.map_or(Ok(stops), |message| Err(ApiError::invalid("stop", message)))
}

/// The known length of a prompt.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PromptLength {
    /// It has so many tokens.
    Tokens(usize),
    /// It has that many or more, by its text alone.
    AtLeast(usize),
}

impl PromptLength {
    const fn tokens(self) -> usize {
        let (Self::Tokens(tokens) | Self::AtLeast(tokens)) = self;
        tokens
    }
}

impl std::fmt::Display for PromptLength {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tokens(tokens) => write!(f, "{tokens}"),
            Self::AtLeast(tokens) => write!(f, "at least {tokens}"),
        }
    }
}

/// Output tokens that the client asks for by number, under the newer name or the older one.
pub(crate) fn asked_tokens(fields: &Fields<'_>) -> Option<u32> {
    fields.max_completion_tokens.or(fields.max_tokens)
}

/// Output tokens at most for a prompt of such a length: as asked for, else `otherwise`, else what is
/// left of the context. Refuses what the context cannot hold.
pub(crate) fn room(
    fields: &Fields<'_>,
    prompt: PromptLength,
    otherwise: Option<u32>,
    model: &Model,
) -> Result<u32, ApiError> {
    let (context, prompt_tokens) = (model.max_model_tokens as usize, prompt.tokens());
    let asked = asked_tokens(fields);
    let name = if fields.max_completion_tokens.is_some() { "max_completion_tokens" } else { "max_tokens" };
    if asked == Some(0) && fields.echo != Some(true) {
        return Err(ApiError::invalid(name, format!("{name} is 0; it is at least 1, or 0 with echo")));
    }
    // Engines make a token at least, even where only the prompt is wanted.
    let wanted = asked.unwrap_or(1).max(1) as usize;
    if prompt_tokens + wanted > context {
        let of_which = if asked.is_some() { format!(" and {wanted} for the answer") } else { String::new() };
        let message = format!(
            "This model's maximum context length is {context} tokens. However, you asked for {prompt} in \
             the prompt{of_which}. Please shorten the prompt or the answer."
        );
        let param = if prompt_tokens >= context || asked.is_none() { "messages" } else { name };
        return Err(ApiError::invalid(param, message).code("context_length_exceeded"));
    }
    let left = u32::try_from(context - prompt_tokens).unwrap_or(u32::MAX);
    let room = asked.or(otherwise).unwrap_or(left).min(left);
    if fields.min_tokens.unwrap_or(0) > room {
        let message = format!("min_tokens is above the {room} tokens that the answer may have");
        return Err(ApiError::invalid("min_tokens", message));
    }
    Ok(room)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::read;

    fn model() -> Model {
        Model {
            name: "m".into(),
            aliases: vec![],
            revision: "r".into(),
            vocab_tokens: 512,
            end_tokens: vec![257],
            max_model_tokens: 100,
            block_tokens: 16,
            constrains: false,
        }
    }

    fn chat(json: &str) -> Result<Sampling, ApiError> {
        sampling(&read(json.as_bytes()).unwrap(), Endpoint::Chat, &model())
    }

    #[test]
    fn bounds_are_checked_and_named() {
        let cases = [
            (r#"{"temperature":2.1}"#, "temperature"),
            (r#"{"top_p":0}"#, "top_p"),
            (r#"{"top_k":-2}"#, "top_k"),
            (r#"{"presence_penalty":-2.5}"#, "presence_penalty"),
            (r#"{"repetition_penalty":0}"#, "repetition_penalty"),
            (r#"{"logit_bias":{"1":101}}"#, "logit_bias"),
            (r#"{"logit_bias":{"512":1}}"#, "logit_bias"),
            (r#"{"stop_token_ids":[512]}"#, "stop_token_ids"),
            (r#"{"top_logprobs":21,"logprobs":true}"#, "top_logprobs"),
            (r#"{"top_logprobs":2}"#, "top_logprobs"),
            (r#"{"logprobs":2}"#, "logprobs"),
        ];
        for (json, param) in cases {
            let error = chat(json).unwrap_err();
            assert_eq!((error.status, error.param), (400, Some(param)), "{json}");
        }
    }

    #[test]
    fn what_is_said_is_taken_over() {
        let read =
            chat(r#"{"temperature":0,"top_k":-1,"seed":-1,"logprobs":true,"top_logprobs":3,"min_p":0.5}"#)
                .unwrap();
        assert_eq!((read.temperature, read.top_k, read.seed, read.logprobs), (0.0, 0, u64::MAX, Some(3)));
        assert_eq!(read.min_p, 0.5);
        assert_ne!(chat("{}").unwrap().seed, chat("{}").unwrap().seed, "draws differ unless told");
    }

    #[test]
    fn the_answer_fits_the_context() {
        let room_after =
            |json: &str, prompt| super::room(&read(json.as_bytes()).unwrap(), prompt, None, &model());
        let room = |json: &str, prompt| room_after(json, PromptLength::Tokens(prompt));
        assert_eq!(room("{}", 40).unwrap(), 60);
        assert_eq!(room(r#"{"max_tokens":7}"#, 40).unwrap(), 7);
        assert_eq!(room(r#"{"max_tokens":7,"max_completion_tokens":9}"#, 40).unwrap(), 9);
        for (json, prompt) in [("{}", 100), (r#"{"max_tokens":61}"#, 40)] {
            assert_eq!(room(json, prompt).unwrap_err().code.as_deref(), Some("context_length_exceeded"));
        }
        let error = room_after("{}", PromptLength::AtLeast(100)).unwrap_err();
        assert!(error.message.contains("at least 100 in the prompt"), "{}", error.message);
        assert!(room(r#"{"max_tokens":0}"#, 1).is_err());
        assert_eq!(room(r#"{"max_tokens":0,"echo":true}"#, 1).unwrap(), 0);
        assert_eq!(room(r#"{"min_tokens":8,"max_tokens":7}"#, 1).unwrap_err().param, Some("min_tokens"));
    }

    #[test]
    fn stops_are_few_and_not_empty() {
        let stops = |json: &str| super::stops(&mut read(json.as_bytes()).unwrap(), 4);
        assert_eq!(stops(r#"{"stop":"a"}"#).unwrap(), ["a"]);
        assert_eq!(stops(r#"{"stop":[]}"#).unwrap(), Vec::<String>::new());
        assert!(stops(r#"{"stop":["a","b","c","d","e"]}"#).is_err() && stops(r#"{"stop":""}"#).is_err());
    }
}
