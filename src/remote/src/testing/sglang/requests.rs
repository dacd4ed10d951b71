//! Reads requests to the stand-in for SGLang, and rejects invalid ones with a reason.

use baton_types::Sampling;
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::Sglang;
use crate::testing::FakeRole;
use crate::testing::body::{ReadRequest, draws, lengths, most_tokens};
use crate::testing::server::{Reply, event};
use crate::testing::text::{FakeTokenizer, Voice};

/// Sampling parameters that SGLang knows; any other is a 400.
const KNOWN_PARAMS: &[&str] = &[
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "stop_token_ids",
    "logit_bias",
    "sampling_seed",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "custom_params",
];

/// Fields of a body that Baton writes, and those of a client that are nobody else's business. `/generate` takes more, which
/// name KV, places, ranks and processes, and change or end what it serves.
const KNOWN_FIELDS: &[&str] = &[
    "rid",
    "input_ids",
    "sampling_params",
    "stream",
    "return_logprob",
    "top_logprobs_num",
    "logprob_start_len",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "disagg_prefill_dp_rank",
    "routed_dp_rank",
    "cache_salt",
    "custom_labels",
    "extra_key",
    "lora_path",
    "max_thinking_tokens",
    "priority",
    "require_reasoning",
    "routing_key",
];

/// The content of a request.
pub(super) struct GenerateRequest {
    pub(super) voice: Voice,
    pub(super) tokenizer: FakeTokenizer,
    pub(super) salt: String,
    pub(super) rid: String,
    pub(super) prompt: Vec<u32>,
    pub(super) sampling: Sampling,
    pub(super) stream: bool,
    pub(super) usage: bool,
    pub(super) logprobs: bool,
    pub(super) room: Option<(String, u16, u64)>,
}

/// SGLang's own sampling parameters.
fn own_params(params: &Value, tokenizer: FakeTokenizer) -> Result<Sampling, String> {
    let names = params.as_object().ok_or("sampling_params is no object")?;
    if let Some(name) = names.keys().find(|name| !KNOWN_PARAMS.contains(&name.as_str())) {
        return Err(format!("SamplingParams got an unexpected keyword argument '{name}'"));
    }
    draws(params)?;
    lengths(params, ("max_new_tokens", "min_new_tokens"), tokenizer)
}

/// Those of OpenAI's requests.
fn openai_params(body: &Value, tokenizer: FakeTokenizer) -> Result<Sampling, String> {
    draws(body)?;
    lengths(body, (most_tokens(body), "min_tokens"), tokenizer)
}

/// Why a grammar cannot be compiled; the stand-in knows of parentheses only.
pub(super) fn uncompiled(params: &Value) -> Option<String> {
    let regex = params["regex"].as_str()?;
    let open = regex.matches('(').count() != regex.matches(')').count();
    open.then(|| "Failed to compile regex grammar: The parenthesis is not closed.".into())
}

/// A request that the scheduler refuses: as recorded, a stream has begun by then, and its counts are of nothing.
pub(super) fn refused_late(request: &GenerateRequest, wrong: &str) -> Reply {
    if !request.stream {
        return Reply::json(400, &json!({"error": {"message": wrong}}));
    }
    let (events, reply) = mpsc::channel(2);
    let end = json!({"text": "", "output_ids": [], "meta_info": {"id": request.rid, "prompt_tokens": 1, "completion_tokens": 0,
        "finish_reason": {"type": "abort", "message": wrong, "status_code": 400, "err_type": "BadRequestError"}}});
    // There is room for both.
    let _ = events.try_send(Ok(event(&end)));
    let _ = events.try_send(Ok(Bytes::from_static(b"data: [DONE]\n\n")));
    Reply::Stream(reply)
}

impl Sglang {
    pub(super) fn request(&self, mut read: ReadRequest, path: &str) -> Result<GenerateRequest, String> {
        let tokenizer = self.spec.tokenizer;
        let (voice, prompt) = read.prompt(path == "/v1/chat/completions", tokenizer)?;
        let (salt, body) = (read.salt(), &read.fields);
        let known = |name: &&String| path != "/generate" || KNOWN_FIELDS.contains(&name.as_str());
        if let Some(name) = body.as_object().and_then(|fields| fields.keys().find(|name| !known(name))) {
            self.stand.log.violate(format!("a client's {name}"));
        }
        let mut sampling = match path {
            "/generate" => own_params(&body["sampling_params"], tokenizer)?,
            _ => openai_params(body, tokenizer)?,
        };
        if prompt.len() as u64 + u64::from(sampling.max_tokens) > u64::from(self.spec.max_model_tokens) {
            return Err(format!(
                "The input is longer than the model's context length ({}).",
                self.spec.max_model_tokens
            ));
        }
        let room = self.room(body)?;
        self.check_ranks(body, room.as_ref().map(|(_, _, room)| *room))?;
        let logprobs = body["return_logprob"] == json!(true);
        if logprobs && body["logprob_start_len"] == json!(0) {
            sampling.prompt_logprobs = Some(1);
        }
        Ok(GenerateRequest {
            voice,
            tokenizer,
            salt,
            rid: body["rid"]
                .as_str()
                .map_or_else(|| format!("{:032x}", rand::random::<u128>()), str::to_owned),
            prompt,
            sampling,
            stream: body["stream"] == json!(true),
            usage: body["stream_options"]["include_usage"] == json!(true),
            logprobs,
            room,
        })
    }

    fn room(&self, body: &Value) -> Result<Option<(String, u16, u64)>, String> {
        let room = &body["bootstrap_room"];
        let port = body["bootstrap_port"].as_u64().and_then(|port| u16::try_from(port).ok());
        match (body["bootstrap_host"].as_str(), port, room.as_u64()) {
            (Some(host), Some(port), Some(room)) if room <= i64::MAX as u64 => {
                Ok(Some((host.to_owned(), port, room)))
            }
            (None, None, None) => Ok(None),
            _ => {
                self.stand.log.violate("some bootstrap fields, and not all, or of wrong types");
                Err("bootstrap fields".into())
            }
        }
    }

    /// As the real server: a rank that is not there is a 400, and a room that is of another rank than the request fails.
    fn check_ranks(&self, body: &Value, room: Option<u64>) -> Result<(), String> {
        let ranks = u64::from(self.spec.ranks);
        let Some(rank) = body["routed_dp_rank"].as_u64() else { return Ok(()) };
        if rank >= ranks {
            return Err(format!("routed_dp_rank={rank} out of range [0, {ranks})"));
        }
        if self.spec.role == FakeRole::Prefill && room.is_some_and(|room| room % ranks != rank) {
            self.stand.log.violate(format!("a room of another rank than {rank} of {ranks}"));
        }
        Ok(())
    }
}
