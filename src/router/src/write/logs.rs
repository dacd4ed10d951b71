//! Writes logprobs, in the formats of both endpoints and of vLLM.

use super::{list, put};
use crate::answer::TokenLog;
use crate::json;
use crate::plan::Plan;
use crate::sampling::Endpoint;
use crate::tokenize::Tokenization;

/// How tokens are named.
#[derive(Clone, Copy)]
struct Names<'a> {
    tokenization: &'a Tokenization,
    by_id: bool,
}

impl Names<'_> {
    fn write(self, out: &mut Vec<u8>, token: u32) {
        if self.by_id {
            put(out, "\"token_id:");
            json::integer(out, u64::from(token));
            put(out, "\"");
        } else {
            token_name(out, self.tokenization, token);
        }
    }
}

/// Writes the logprobs of tokens, in the format of the call.
pub(super) fn write_logs(out: &mut Vec<u8>, plan: &Plan, logs: &[TokenLog]) {
    let names = Names { tokenization: &plan.tokenization, by_id: plan.names_by_id };
    if !plan.logprobs {
        put(out, "null");
    } else if plan.endpoint == Endpoint::Chat {
        write_chat_logs(out, names, logs);
    } else {
        write_completion_logs(out, names, logs);
    }
}

fn write_chat_logs(out: &mut Vec<u8>, names: Names<'_>, logs: &[TokenLog]) {
    let entry = |out: &mut Vec<u8>, token: u32, logprob: f32| {
        put(out, "{\"token\":");
        names.write(out, token);
        put(out, ",\"logprob\":");
        json::logprob(out, logprob);
        put(out, ",\"bytes\":");
        json::byte_array(out, names.tokenization.token_bytes(token));
    };
    put(out, "{\"content\":");
    list(out, logs, |out, log| {
        entry(out, log.token, log.logprob.as_ref().map_or(f32::NEG_INFINITY, |logprob| logprob.logprob));
        put(out, ",\"top_logprobs\":");
        list(out, log.logprob.iter().flat_map(|logprob| &logprob.top), |out, &(token, logprob)| {
            entry(out, token, logprob);
            put(out, "}");
        });
        put(out, "}");
    });
    put(out, ",\"refusal\":null}");
}

fn write_completion_logs(out: &mut Vec<u8>, names: Names<'_>, logs: &[TokenLog]) {
    put(out, "{\"tokens\":");
    list(out, logs, |out, log| names.write(out, log.token));
    put(out, ",\"token_logprobs\":");
    list(out, logs, |out, log| match &log.logprob {
        Some(logprob) => json::logprob(out, logprob.logprob),
        None => put(out, "null"),
    });
    put(out, ",\"top_logprobs\":");
    list(out, logs, |out, log| match &log.logprob {
        Some(logprob) => top_by_name(out, names, (log.token, logprob.logprob), &logprob.top),
        None => put(out, "null"),
    });
    put(out, ",\"text_offset\":");
    list(out, logs, |out, log| json::integer(out, log.start_chars as u64));
    put(out, "}");
}

/// The likeliest tokens by name, the one that was drawn among them; a name stands once.
fn top_by_name(out: &mut Vec<u8>, with: Names<'_>, drawn: (u32, f32), top: &[(u32, f32)]) {
    let also = top.iter().all(|one| one.0 != drawn.0).then_some(drawn);
    let mut names: Vec<Vec<u8>> = Vec::with_capacity(top.len() + 1);
    put(out, "{");
    for (token, logprob) in top.iter().copied().chain(also) {
        let mut name = Vec::new();
        with.write(&mut name, token);
        if names.contains(&name) {
            continue;
        }
        if !names.is_empty() {
            put(out, ",");
        }
        out.extend_from_slice(&name);
        put(out, ":");
        json::logprob(out, logprob);
        names.push(name);
    }
    put(out, "}");
}

/// vLLM's shape: for each token but the first, the tokens considered there, by id.
pub(super) fn write_prompt_logs(out: &mut Vec<u8>, with: &Tokenization, logs: &[TokenLog]) {
    list(out, logs, |out, log| {
        let Some(logprob) = &log.logprob else { return put(out, "null") };
        let rank = logprob.top.iter().position(|one| one.0 == log.token);
        let also = rank.is_none().then_some((log.token, logprob.logprob));
        put(out, "{");
        for (at, (token, value)) in logprob.top.iter().copied().chain(also).enumerate() {
            put(out, if at > 0 { ",\"" } else { "\"" });
            json::integer(out, u64::from(token));
            put(out, "\":{\"logprob\":");
            json::logprob(out, value);
            put(out, ",\"rank\":");
            if at < logprob.top.len() {
                json::integer(out, at as u64 + 1)
            } else {
                put(out, "null")
            }
            put(out, ",\"decoded_token\":");
            token_name(out, with, token);
            put(out, "}");
        }
        put(out, "}");
    });
}

/// The token as a JSON string; bytes that are no text are named `bytes:\x..`.
fn token_name(out: &mut Vec<u8>, with: &Tokenization, token: u32) {
    let bytes = with.token_bytes(token);
    if let Ok(text) = std::str::from_utf8(bytes) {
        return json::string(out, text);
    }
    put(out, "\"bytes:");
    for byte in bytes {
        put(out, &format!("\\\\x{byte:02x}"));
    }
    put(out, "\"");
}
