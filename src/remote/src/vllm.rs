//! The body of a request to `/v1/completions`, for each leg.

use std::collections::BTreeMap;

use baton_types::Sampling;
use serde::Serialize;

use crate::error::{RemoteError, Stage};
use crate::fields::{Body, Client};
use crate::request::Request;
use crate::settings::Dialect;

/// Which part of a request an engine is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leg {
    /// All of it.
    Whole,
    /// The prompt; one token is drawn, and only to see whether the answer ends with it.
    Prefill,
    /// The answer, from the prompt's KV.
    Decode,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

/// The body of a leg; `kv_transfer_params` are the caller's to add.
pub(crate) fn body(
    request: &Request,
    client: Client,
    leg: Leg,
    dialect: Dialect,
) -> Result<Body, RemoteError> {
    let sampling = &*request.sampling;
    check_sampling(request)?;
    let Client { along: mut body, seeded } = client;
    // SGLang's word, which the router adds: vLLM would warn of it.
    body.take("require_reasoning");
    body.set_tokens("prompt", &request.tokens);
    draws(&mut body, sampling, seeded)?;
    lengths(&mut body, sampling, leg)?;
    body.set("return_token_ids", &true)?;
    body.set("return_tokens_as_token_ids", &true)?;
    // Only these name tokens by id on engines that do not know return_token_ids.
    let logprobs = if dialect == Dialect::Plain {
        Some(sampling.logprobs.unwrap_or(0).max(1))
    } else {
        sampling.logprobs
    };
    if let Some(count) = logprobs {
        body.set("logprobs", &count)?;
    }
    let prompt_logprobs = sampling.prompt_logprobs.filter(|_| leg != Leg::Decode);
    if let Some(count) = prompt_logprobs {
        body.set("prompt_logprobs", &count)?;
    }
    let stream = streams(leg, sampling);
    body.set("stream", &stream)?;
    if stream {
        body.set("stream_options", &StreamOptions { include_usage: true })?;
    }
    Ok(body)
}

/// Whether a leg's answer is streamed. A streamed prefill would not report where its blocks are. vLLM also reports the
/// prompt's logprobs only in an answer in one piece.
pub(crate) fn streams(leg: Leg, sampling: &Sampling) -> bool {
    match leg {
        Leg::Whole => sampling.prompt_logprobs.is_none(),
        Leg::Prefill => false,
        Leg::Decode => true,
    }
}

fn draws(body: &mut Body, sampling: &Sampling, seeded: bool) -> Result<(), RemoteError> {
    // All are said, defaults too: engines take theirs from the checkpoint's generation_config.json otherwise.
    body.set("temperature", &sampling.temperature)?;
    body.set("top_p", &sampling.top_p)?;
    // Every version takes −1 for all.
    body.set("top_k", &if sampling.top_k == 0 { -1 } else { i64::from(sampling.top_k) })?;
    body.set("min_p", &sampling.min_p)?;
    body.set("presence_penalty", &sampling.presence_penalty)?;
    body.set("frequency_penalty", &sampling.frequency_penalty)?;
    body.set("repetition_penalty", &sampling.repetition_penalty)?;
    body.set("ignore_eos", &sampling.ignore_eos)?;
    if !sampling.logit_bias.is_empty() {
        body.set("logit_bias", &biases(sampling))?;
    }
    if !sampling.stop_token_ids.is_empty() {
        body.set("stop_token_ids", &sampling.stop_token_ids)?;
    }
    if seeded {
        body.set("seed", &sampling.seed.cast_signed())?;
    }
    Ok(())
}

fn lengths(body: &mut Body, sampling: &Sampling, leg: Leg) -> Result<(), RemoteError> {
    let (most, least) = match leg {
        Leg::Whole | Leg::Decode => (sampling.max_tokens, sampling.min_tokens.min(sampling.max_tokens)),
        // The decode leg draws this token anew. Where draws are random, an end drawn here would count twice: once here
        // and once there; so only a greedy prefill may find the end.
        Leg::Prefill if sampling.max_tokens == 1 => (1, sampling.min_tokens.min(1)),
        Leg::Prefill if sampling.temperature > 0.0 => (1, 1),
        Leg::Prefill => (1, sampling.min_tokens.min(1)),
    };
    body.set("max_tokens", &most)?;
    body.set("min_tokens", &least)
}

/// Biases by token, as a JSON object.
pub(crate) fn biases(sampling: &Sampling) -> BTreeMap<String, f32> {
    sampling.logit_bias.iter().map(|(token, bias)| (token.to_string(), *bias)).collect()
}

/// Rejects settings that no engine accepts: JSON has no infinity, and an answer has a token.
pub(crate) fn check_sampling(request: &Request) -> Result<(), RemoteError> {
    let s = &*request.sampling;
    let wrong = |text: String| Err(RemoteError::invalid(Stage::Prepare, text));
    for (name, value) in [
        ("temperature", s.temperature),
        ("top_p", s.top_p),
        ("min_p", s.min_p),
        ("presence_penalty", s.presence_penalty),
        ("frequency_penalty", s.frequency_penalty),
        ("repetition_penalty", s.repetition_penalty),
    ] {
        if !value.is_finite() {
            return wrong(format!("{name} is {value}"));
        }
    }
    if let Some((token, bias)) = s.logit_bias.iter().find(|(_, bias)| !bias.is_finite()) {
        return wrong(format!("the bias of token {token} is {bias}"));
    }
    if s.max_tokens == 0 {
        return wrong("max_tokens is 0; engines draw a token at least".into());
    }
    if request.tokens.is_empty() {
        return wrong("the prompt is empty".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use serde_json::{Value, json};

    use super::*;
    use crate::fields::ClientBody;

    fn made(sampling: Sampling, client: &str, leg: Leg) -> Value {
        let request = Request {
            id: "r".into(),
            tokens: vec![5, 6].into(),
            sampling: Arc::new(sampling),
            body: Bytes::copy_from_slice(client.as_bytes()).into(),
            salt: None,
        };
        let client = Client::of(&request).unwrap();
        serde_json::from_slice(&body(&request, client, leg, Dialect::Vllm).unwrap().written().unwrap().flat())
            .unwrap()
    }

    #[test]
    fn a_plain_request_says_everything() {
        assert_eq!(
            made(Sampling::default(), "", Leg::Whole),
            json!({"prompt": [5, 6], "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0,
                "frequency_penalty": 0.0, "repetition_penalty": 1.0, "ignore_eos": false, "max_tokens": 16,
                "min_tokens": 0, "return_token_ids": true, "return_tokens_as_token_ids": true, "stream": true,
                "stream_options": {"include_usage": true}})
        );
    }

    #[test]
    fn every_field_of_the_sampling_goes_along() {
        let sampling = Sampling {
            temperature: 0.7,
            top_p: 0.9,
            top_k: 40,
            min_p: 0.05,
            presence_penalty: 0.5,
            frequency_penalty: -0.5,
            repetition_penalty: 1.1,
            logit_bias: vec![(3, -100.0), (9, 1.5)],
            seed: u64::MAX,
            max_tokens: 7,
            min_tokens: 3,
            stop_token_ids: vec![2],
            ignore_eos: true,
            logprobs: Some(4),
            prompt_logprobs: None,
        };
        let body = made(sampling, r#"{"seed": -1}"#, Leg::Decode);
        for (name, value) in [
            ("top_k", json!(40)),
            ("logit_bias", json!({"3": -100.0, "9": 1.5})),
            ("seed", json!(-1)),
            ("max_tokens", json!(7)),
            ("min_tokens", json!(3)),
            ("stop_token_ids", json!([2])),
            ("ignore_eos", json!(true)),
            ("logprobs", json!(4)),
        ] {
            assert_eq!(body[name], value, "{name}");
        }
        // As the client wrote it, not as the nearest double of the nearest float.
        let text = serde_json::to_string(&body["temperature"]).unwrap();
        assert_eq!(text, "0.7");
    }

    #[test]
    fn a_prefill_draws_one_token_and_does_not_stream() {
        let greedy = Sampling { temperature: 0.0, min_tokens: 5, ..Sampling::default() };
        let body = made(greedy, r#"{"stream": true, "min_tokens": 5, "priority": 2}"#, Leg::Prefill);
        assert_eq!(
            (&body["max_tokens"], &body["min_tokens"], &body["stream"]),
            (&json!(1), &json!(1), &json!(false))
        );
        assert_eq!((&body["stream_options"], &body["priority"]), (&Value::Null, &json!(2)));
        let open = Sampling { temperature: 0.0, ..Sampling::default() };
        assert_eq!(made(open, "", Leg::Prefill)["min_tokens"], json!(0));
    }

    #[test]
    fn sglangs_word_for_a_thought_is_left_out() {
        let body = made(Sampling::default(), r#"{"require_reasoning": true, "vendor": 1}"#, Leg::Whole);
        assert_eq!((&body["require_reasoning"], &body["vendor"]), (&Value::Null, &json!(1)));
    }

    #[test]
    fn a_random_prefill_cannot_end_an_answer_that_has_more_than_a_token() {
        assert_eq!(made(Sampling::default(), "", Leg::Prefill)["min_tokens"], json!(1));
        let one = Sampling { max_tokens: 1, ..Sampling::default() };
        assert_eq!(made(one, "", Leg::Prefill)["min_tokens"], json!(0));
    }

    #[test]
    fn prompt_logprobs_are_the_prefills() {
        let wants = Sampling { prompt_logprobs: Some(2), ..Sampling::default() };
        assert_eq!(made(wants.clone(), "", Leg::Prefill)["prompt_logprobs"], json!(2));
        assert_eq!(made(wants.clone(), "", Leg::Decode)["prompt_logprobs"], Value::Null);
        let whole = made(wants, "", Leg::Whole);
        assert_eq!((&whole["prompt_logprobs"], &whole["stream"]), (&json!(2), &json!(false)));
    }

    #[test]
    fn what_json_cannot_say_is_refused() {
        let request = |sampling: Sampling, tokens: Vec<u32>| Request {
            id: "r".into(),
            tokens: tokens.into(),
            sampling: Arc::new(sampling),
            body: ClientBody::default(),
            salt: None,
        };
        let plain = Sampling::default;
        for (sampling, tokens) in [
            (Sampling { temperature: f32::NAN, ..plain() }, vec![1]),
            (Sampling { min_p: f32::INFINITY, ..plain() }, vec![1]),
            (Sampling { logit_bias: vec![(1, f32::NAN)], ..plain() }, vec![1]),
            (Sampling { max_tokens: 0, ..plain() }, vec![1]),
            (plain(), vec![]),
        ] {
            assert!(check_sampling(&request(sampling, tokens)).is_err());
        }
    }
}
