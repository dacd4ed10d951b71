//! SGLang's `/generate`: the request's body, and its answers.

use baton_types::{Sampling, TokenLogprob};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::answer::{Progress, finish_of, most_likely, stream_error};
use crate::error::{Kind, RemoteError, Side, Stage};
use crate::fields::{Body, Client};
use crate::prompt::Prompt;
use crate::request::{Counts, Request, Token};
use crate::vllm::check_sampling;

/// Constraints that are vLLM's words: SGLang would ignore them, and the answer would not be held to them.
const FOREIGN: &[&str] = &[
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "structured_outputs",
    "allowed_token_ids",
    "bad_words",
];
/// Fields of a body that SGLang wants among its sampling parameters.
const MOVED: &[&str] = &["regex", "ebnf", "json_schema", "structural_tag", "custom_params"];

/// Fields of a client that go along as they are. `/generate` has many that only a router or SGLang itself may set, and more
/// with each version; those that it does not know it passes over in silence, as is done here.
const ALONG: &[&str] = &[
    "cache_salt",
    "custom_labels",
    "extra_key",
    "lora_path",
    "max_thinking_tokens",
    "priority",
    "require_reasoning",
    "routing_key",
];

/// The body of a request; the bootstrap fields are the caller's to add.
pub(crate) fn body(request: &Request, client: Client, leg: &str, stream: bool) -> Result<Body, RemoteError> {
    let sampling = &*request.sampling;
    check_sampling(request)?;
    let Client { mut along, seeded } = client;
    if let Some(name) = FOREIGN.iter().find(|name| along.take(name).is_some()) {
        let text = format!("{name} is not known to SGLang, which would ignore it");
        return Err(RemoteError::invalid(Stage::Prepare, text)
            .remedy("use response_format, json_schema, regex or ebnf"));
    }
    let params = params(sampling, &mut along, seeded)?;
    salt(&mut along)?;
    along.keep(ALONG);
    let mut body = along;
    body.set("rid", leg)?;
    body.set_tokens("input_ids", &request.tokens);
    body.set("sampling_params", &params)?;
    body.set("stream", &stream)?;
    if sampling.logprobs.is_some() || sampling.prompt_logprobs.is_some() {
        body.set("return_logprob", &true)?;
        let top = sampling.logprobs.unwrap_or(0).max(sampling.prompt_logprobs.unwrap_or(0));
        body.set("top_logprobs_num", &top)?;
        body.set("logprob_start_len", &if sampling.prompt_logprobs.is_some() { 0i64 } else { -1 })?;
    }
    Ok(body)
}

fn params(sampling: &Sampling, along: &mut Body, seeded: bool) -> Result<Body, RemoteError> {
    let mut params = Body::default();
    params.set("max_new_tokens", &sampling.max_tokens)?;
    params.set("min_new_tokens", &sampling.min_tokens.min(sampling.max_tokens))?;
    params.set("temperature", &sampling.temperature)?;
    params.set("top_p", &sampling.top_p)?;
    params.set("top_k", &if sampling.top_k == 0 { -1 } else { i64::from(sampling.top_k) })?;
    params.set("min_p", &sampling.min_p)?;
    params.set("presence_penalty", &sampling.presence_penalty)?;
    params.set("frequency_penalty", &sampling.frequency_penalty)?;
    params.set("repetition_penalty", &sampling.repetition_penalty)?;
    params.set("ignore_eos", &sampling.ignore_eos)?;
    if !sampling.stop_token_ids.is_empty() {
        params.set("stop_token_ids", &sampling.stop_token_ids)?;
    }
    if !sampling.logit_bias.is_empty() {
        params.set("logit_bias", &crate::vllm::biases(sampling))?;
    }
    if seeded {
        // SGLang's seeds are not negative.
        params.set("sampling_seed", &(sampling.seed & i64::MAX as u64))?;
    }
    for name in MOVED {
        if let Some(value) = along.take(name) {
            params.set_raw(*name, value);
        }
    }
    if let Some(format) = along.take("response_format") {
        constrain(&mut params, &format)?;
    }
    Ok(params)
}

/// OpenAI's `response_format` in SGLang's words.
fn constrain(params: &mut Body, format: &RawValue) -> Result<(), RemoteError> {
    #[derive(Deserialize)]
    struct Format {
        r#type: String,
        json_schema: Option<SchemaField>,
    }
    #[derive(Deserialize)]
    struct SchemaField {
        schema: Option<Box<RawValue>>,
    }
    let wrong = |text: String| RemoteError::invalid(Stage::Prepare, format!("response_format: {text}"));
    let read: Format = serde_json::from_str(format.get()).map_err(|error| wrong(error.to_string()))?;
    match read.r#type.as_str() {
        "text" => Ok(()),
        "json_object" => params.set("json_schema", r#"{"type": "object"}"#),
        "json_schema" => {
            let schema = read.json_schema.and_then(|named| named.schema);
            let schema = schema.ok_or_else(|| wrong("json_schema has no schema".into()))?;
            params.set("json_schema", schema.get())
        }
        "structural_tag" => params.set("structural_tag", format.get()),
        other => Err(wrong(format!("type {other:?} is not known to SGLang"))),
    }
}

/// Joins a client's salt and extra key into one salt: SGLang announces the salt but no extra key. Versions without
/// salts accept it as the extra key.
fn salt(along: &mut Body) -> Result<(), RemoteError> {
    let Some(salt) = along.take("cache_salt") else { return Ok(()) };
    let text = |raw: &RawValue, name: &str| {
        serde_json::from_str::<String>(raw.get())
            .map_err(|_| RemoteError::invalid(Stage::Prepare, format!("{name} is not a string")))
    };
    let mut joined = text(&salt, "cache_salt")?;
    if let Some(extra) = along.take("extra_key") {
        joined.push_str(&text(&extra, "extra_key")?);
    }
    along.set("cache_salt", &joined)?;
    along.set("extra_key", &joined)
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    output_ids: Vec<u32>,
    meta_info: Option<Meta>,
    error: Option<Value>,
    object: Option<String>,
}

type Log = (Option<f32>, u32, Option<Value>);

#[derive(Deserialize)]
struct Meta {
    finish_reason: Option<End>,
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    output_token_logprobs: Option<Vec<Log>>,
    output_top_logprobs: Option<Vec<Option<Vec<Log>>>>,
    input_token_logprobs: Option<Vec<Log>>,
    input_top_logprobs: Option<Vec<Option<Vec<Log>>>>,
}

#[derive(Deserialize)]
struct End {
    r#type: String,
    message: Option<String>,
    status_code: Option<u16>,
}

/// Reads the events of one answer, which repeat the answer so far or only add to it.
pub(crate) struct Reader {
    pub(crate) stage: Stage,
    pub(crate) prompt: Prompt,
    pub(crate) logprobs: Option<u8>,
    pub(crate) prompt_logprobs: Option<u8>,
    /// Tokens that have been read.
    pub(crate) seen: Vec<u32>,
}

impl Reader {
    /// Reads the content of an event.
    pub(crate) fn event(&mut self, data: &[u8]) -> Result<Progress, RemoteError> {
        let chunk: Chunk = serde_json::from_slice(data)
            .map_err(|error| self.bug(format!("the engine's answer cannot be read: {error}")))?;
        let Some(meta) = chunk.meta_info else {
            if chunk.error.is_some() || chunk.object.as_deref() == Some("error") {
                let value: Value = serde_json::from_slice(data).unwrap_or_default();
                return Err(stream_error(&value, self.stage));
            }
            return Err(self.bug("an answer without meta_info"));
        };
        // A request that it refuses late has no right counts.
        if let Some(end) = meta.finish_reason.as_ref().filter(|end| end.r#type == "abort") {
            return Err(self.aborted(end));
        }
        let ours = self.prompt.len() as u64;
        if let Some(theirs) = meta.prompt_tokens.filter(|theirs| *theirs != ours) {
            return Err(self.bug(format!("the engine counts {theirs} tokens in our prompt of {ours}")));
        }
        let mut progress = Progress::default();
        if let Some(end) = &meta.finish_reason {
            progress.finish = Some(finish_of(&end.r#type, self.stage)?);
        }
        let first = self.seen.is_empty();
        let fresh = self.fresh(&chunk.output_ids, meta.completion_tokens)?;
        if first && !fresh.is_empty() && self.prompt_logprobs.is_some() {
            progress.prompt_logprobs = Some(self.prompt_logs(&meta)?);
        }
        progress.tokens = self.tokens(fresh, &meta);
        self.seen.extend(progress.tokens.iter().map(|token| token.id));
        progress.counts = Counts {
            prompt_tokens: meta.prompt_tokens,
            answer_tokens: meta.completion_tokens,
            cached_tokens: meta.cached_tokens,
        };
        Ok(progress)
    }

    fn bug(&self, text: impl Into<String>) -> RemoteError {
        RemoteError::bug(self.stage, text)
    }

    fn aborted(&self, end: &End) -> RemoteError {
        let words = end.message.as_deref().unwrap_or("no reason given");
        let text = format!("the engine aborted the request: {words}");
        match end.status_code {
            Some(status @ 400..=499) => RemoteError::invalid(self.stage, text).status(status),
            Some(status) => RemoteError::retry(self.stage, text).status(status),
            None => RemoteError::new(Kind::Closed, Side::Engine, self.stage, text),
        }
    }

    /// The tokens that have not been read: an event lists all of the answer, or only what it adds.
    fn fresh<'a>(&self, ids: &'a [u32], total: Option<u64>) -> Result<&'a [u32], RemoteError> {
        let Some(total) = total.and_then(|total| usize::try_from(total).ok()) else {
            return if self.seen.is_empty() {
                Ok(ids)
            } else {
                Err(self.bug("an answer without completion_tokens"))
            };
        };
        let seen = self.seen.len();
        if ids.len() == total && total >= seen {
            return Ok(&ids[seen..]);
        }
        // An end token is counted and may not be listed.
        let missing = total.checked_sub(seen + ids.len());
        if missing == Some(0)
            || (missing == Some(1) && !ids.starts_with(&self.seen))
            || (seen == 0 && missing == Some(1))
        {
            return Ok(ids);
        }
        if ids.len() + 1 == total && ids.starts_with(&self.seen) {
            return Ok(&ids[seen..]);
        }
        let text = format!(
            "{} tokens listed, {seen} read before, {total} counted: the answer does not add up",
            ids.len()
        );
        Err(self.bug(text))
    }

    fn tokens(&self, fresh: &[u32], meta: &Meta) -> Vec<Token> {
        let Some(count) = self.logprobs else {
            return fresh.iter().map(|&id| Token { id, logprob: None }).collect();
        };
        let none = Vec::new();
        let logs = meta.output_token_logprobs.as_ref().unwrap_or(&none);
        // Logprobs line up with the tokens at their ends, whether they repeat or add; after a hand-off the first one may
        // be missing.
        let lead = logs.len() as i64 - fresh.len() as i64;
        let log_of = |at: usize, id: u32| {
            let place = usize::try_from(at as i64 + lead).ok()?;
            let (logprob, of, _) = logs.get(place)?;
            if *of != id {
                return None;
            }
            let tops = meta.output_top_logprobs.as_ref();
            let top =
                tops.and_then(|tops| tops.get(place)?.as_ref()).map(|top| pairs(top)).unwrap_or_default();
            Some(TokenLogprob { logprob: (*logprob)?, top: most_likely(top, count) })
        };
        fresh.iter().enumerate().map(|(at, &id)| Token { id, logprob: log_of(at, id) }).collect()
    }

    fn prompt_logs(&self, meta: &Meta) -> Result<Vec<TokenLogprob>, RemoteError> {
        let count = self.prompt_logprobs.unwrap_or(0);
        let logs = meta.input_token_logprobs.as_deref().unwrap_or_default();
        if logs.len() != self.prompt.len() {
            let text = format!("{} prompt logprobs came for {} tokens", logs.len(), self.prompt.len());
            return Err(self.bug(text));
        }
        let tops = meta.input_top_logprobs.as_deref().unwrap_or_default();
        let one = |at: usize, log: &Log| {
            let logprob = log.0.ok_or_else(|| self.bug("a token of the prompt has no logprob"))?;
            let top = tops.get(at).and_then(Option::as_ref).map(|top| pairs(top)).unwrap_or_default();
            Ok(TokenLogprob { logprob, top: most_likely(top, count) })
        };
        logs.iter().enumerate().skip(1).map(|(at, log)| one(at, log)).collect()
    }
}

fn pairs(logs: &[Log]) -> Vec<(u32, f32)> {
    logs.iter().filter_map(|(log, id, _)| Some((*id, (*log)?))).collect()
}

#[cfg(test)]
mod tests {
    use baton_types::Finish;
    use bytes::Bytes;
    use serde_json::json;

    use super::*;

    fn made(sampling: Sampling, client: &str) -> Result<Value, RemoteError> {
        let request = Request {
            id: "r".into(),
            tokens: vec![5, 6].into(),
            sampling: std::sync::Arc::new(sampling),
            body: Bytes::copy_from_slice(client.as_bytes()).into(),
            salt: None,
        };
        let body = body(&request, Client::of(&request)?, "leg", true)?;
        Ok(serde_json::from_slice(&body.written()?.flat()).unwrap())
    }

    fn reader(prompt: usize, logprobs: Option<u8>) -> Reader {
        let prompt = vec![1; prompt].into();
        Reader { stage: Stage::Stream, prompt, logprobs, prompt_logprobs: None, seen: Vec::new() }
    }

    fn ids(progress: &Progress) -> Vec<u32> {
        progress.tokens.iter().map(|token| token.id).collect()
    }

    #[test]
    fn sampling_becomes_sglangs_words() {
        let sampling =
            Sampling { temperature: 0.0, max_tokens: 24, ignore_eos: true, seed: 9, ..Sampling::default() };
        assert_eq!(
            made(sampling, r#"{"priority": 4, "seed": 9}"#).unwrap(),
            json!({"priority": 4, "rid": "leg", "input_ids": [5, 6], "stream": true, "sampling_params": {
                "max_new_tokens": 24, "min_new_tokens": 0, "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
                "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "ignore_eos": true,
                "sampling_seed": 9}})
        );
    }

    #[test]
    fn constraints_and_salts_are_translated_or_refused() {
        let of = |client: &str| made(Sampling::default(), client).unwrap();
        let params = |client: &str, name: &str| of(client)["sampling_params"][name].clone();
        assert_eq!(
            params(r#"{"response_format":{"type":"json_object"}}"#, "json_schema"),
            json!(r#"{"type": "object"}"#)
        );
        let schema =
            r#"{"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"a": 1}}}}"#;
        assert_eq!(params(schema, "json_schema"), json!(r#"{"a": 1}"#));
        assert_eq!(params(r#"{"regex":"a+"}"#, "regex"), json!("a+"));
        assert_eq!(params(r#"{"response_format":{"type":"text"}}"#, "json_schema"), Value::Null);
        let salted = of(r#"{"cache_salt":"s","extra_key":"k"}"#);
        assert_eq!((&salted["cache_salt"], &salted["extra_key"]), (&json!("sk"), &json!("sk")));
        for client in [
            r#"{"guided_json":{"a":1}}"#,
            r#"{"response_format":{"type":"grammar"}}"#,
            r#"{"response_format":7}"#,
            r#"{"cache_salt":7}"#,
        ] {
            let error = made(Sampling::default(), client).unwrap_err();
            assert_eq!((error.kind, error.side), (Kind::Invalid, Side::Client), "{client}");
        }
        assert!(made(Sampling::default(), r#"{"guided_json":null}"#).is_ok());
    }

    #[test]
    fn what_only_a_router_may_say_is_not_passed_on() {
        let inner = [
            "kv_hints",
            "encoder_urls",
            "http_worker_ipc",
            "need_wait_for_mm_inputs",
            "num_items_assigned",
            "positional_embed_overrides",
            "multi_item_delimiter_indices",
            "token_indices_to_pool",
            "bootstrap_room",
            "log_metrics",
            "some_field_of_tomorrow",
        ];
        for name in inner {
            let body = made(Sampling::default(), &format!(r#"{{"{name}":[1],"priority":2}}"#)).unwrap();
            assert_eq!((&body[name], &body["priority"]), (&Value::Null, &json!(2)), "{name}");
        }
    }

    #[test]
    fn logprobs_are_asked_for_in_sglangs_words() {
        let sampling = Sampling { logprobs: Some(2), prompt_logprobs: Some(3), ..Sampling::default() };
        let body = made(sampling, "").unwrap();
        assert_eq!((&body["return_logprob"], &body["top_logprobs_num"]), (&json!(true), &json!(3)));
        assert_eq!(body["logprob_start_len"], json!(0));
    }

    #[test]
    fn a_recorded_answer_is_read() {
        // The first prefill of pd_sglang.json, SGLang 0.5.23.
        let seen = r#"{"text":" router","output_ids":[354],"meta_info":{"id":"82035ce677804982ab9907e93237fbcb","finish_reason":{"type":"length","length":0},"prompt_tokens":20,"weight_version":"default","num_retractions":0,"storage_prefetch_wait":0.0,"completion_tokens":1,"cached_tokens":0,"weight_versions":[{"version":"default","start":0,"end":1}],"cached_tokens_details":null,"dp_rank":null,"e2e_latency":0.03609793600116973}}"#;
        let read = reader(20, None).event(seen.as_bytes()).unwrap();
        assert_eq!(
            (ids(&read), read.finish, read.counts.cached_tokens),
            (vec![354], Some(Finish::Length), Some(0))
        );
        assert!(reader(21, None).event(seen.as_bytes()).unwrap_err().text.contains("counts 20"));
    }

    fn event(ids: &[u32], total: u64) -> Vec<u8> {
        json!({"text": "", "output_ids": ids, "meta_info": {"completion_tokens": total, "prompt_tokens": 2}})
            .to_string()
            .into_bytes()
    }

    #[test]
    fn streams_that_repeat_and_streams_that_add_are_the_same() {
        let repeating = [event(&[7], 1), event(&[7, 7, 8], 3), event(&[7, 7, 8, 9], 4)];
        let adding = [event(&[7], 1), event(&[7, 8], 3), event(&[9], 4)];
        let ended = [event(&[7], 1), event(&[7, 7, 8, 9], 4), event(&[7, 7, 8, 9], 5)];
        for stream in [repeating, adding, ended] {
            let mut reader = reader(2, None);
            let all: Vec<u32> = stream.iter().flat_map(|data| ids(&reader.event(data).unwrap())).collect();
            assert_eq!(all, [7, 7, 8, 9]);
        }
    }

    #[test]
    fn answers_that_do_not_add_up_are_errors() {
        for stream in [
            vec![event(&[7, 8], 2), event(&[7], 1)],
            vec![event(&[7], 1), event(&[8], 4)],
            vec![event(&[7], 9)],
        ] {
            let mut reader = reader(2, None);
            let failed = stream.iter().find_map(|data| reader.event(data).err());
            assert_eq!(failed.unwrap().kind, Kind::Bug);
        }
    }

    #[test]
    fn logprobs_line_up_with_their_tokens() {
        let with = |ids: &[u32], logs: &[(f32, u32)], total: u64| {
            let logs: Vec<Value> = logs.iter().map(|(log, id)| json!([log, id, null])).collect();
            let tops: Vec<Value> = logs.iter().map(|log| json!([log, [-9.0, 99, null]])).collect();
            json!({"output_ids": ids, "meta_info": {"completion_tokens": total, "prompt_tokens": 2,
                "output_token_logprobs": logs, "output_top_logprobs": tops}})
            .to_string()
            .into_bytes()
        };
        let mut one = reader(2, Some(1));
        // The first token's is missing, as after a hand-off.
        let first = one.event(&with(&[7], &[], 1)).unwrap();
        assert_eq!(first.tokens[0].logprob, None);
        let second = one.event(&with(&[7, 8], &[(-0.5, 8)], 2)).unwrap();
        assert_eq!(second.tokens[0].logprob, Some(TokenLogprob { logprob: -0.5, top: vec![(8, -0.5)] }));
        let mut other = reader(2, Some(0));
        let odd = other.event(&with(&[7], &[(-0.5, 9)], 1)).unwrap();
        assert_eq!(odd.tokens[0].logprob, None, "a logprob of another token is not shown");
    }

    #[test]
    fn prompt_logprobs_are_read_once() {
        let mut reader = reader(2, None);
        reader.prompt_logprobs = Some(1);
        let data = json!({"output_ids": [7], "meta_info": {"completion_tokens": 1, "prompt_tokens": 2,
            "input_token_logprobs": [[null, 1, null], [-0.5, 1, null]],
            "input_top_logprobs": [null, [[-0.25, 3, null], [-0.5, 1, null]]]}});
        let read = reader.event(data.to_string().as_bytes()).unwrap();
        assert_eq!(read.prompt_logprobs, Some(vec![TokenLogprob { logprob: -0.5, top: vec![(3, -0.25)] }]));
        assert!(reader.event(&event(&[7, 8], 2)).unwrap().prompt_logprobs.is_none());
    }

    #[test]
    fn aborts_and_errors_have_their_kinds() {
        let of = |end: Value| {
            let data = json!({"output_ids": [], "meta_info": {"completion_tokens": 0, "finish_reason": end}});
            reader(2, None).event(data.to_string().as_bytes()).unwrap_err().kind
        };
        assert_eq!(of(json!({"type": "abort", "message": "too long", "status_code": 400})), Kind::Invalid);
        assert_eq!(
            of(json!({"type": "abort", "message": "KVTransferError", "status_code": 500})),
            Kind::Retry
        );
        assert_eq!(of(json!({"type": "abort"})), Kind::Closed);
        let failed = reader(2, None).event(br#"{"error":{"message":"timed out"}}"#).unwrap_err();
        assert!(failed.text.contains("timed out"));
        let failed = reader(2, None).event(br#"{"object":"error","message":"full","code":503}"#).unwrap_err();
        assert_eq!(failed.kind, Kind::Unavailable);
        assert_eq!(reader(2, None).event(b"{}").unwrap_err().kind, Kind::Bug);
    }
}
