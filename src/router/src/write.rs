//! OpenAI's response objects, written by hand into a reused buffer.

use crate::answer::{Answer, TokenLog};
use crate::error::ApiError;
use crate::json;
use crate::plan::Plan;
use crate::sampling::Endpoint;
use crate::speech::{Message, Part};
use crate::tokenize::Tokenization;

/// Last words of a stream that went well.
pub(crate) const DONE: &[u8] = b"data: [DONE]\n\n";
/// A line that clients skip.
pub(crate) const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";

fn put(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(text.as_bytes());
}

/// Tokens of a whole call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
    /// `None` as long as an engine has not said.
    pub(crate) cached_tokens: Option<u64>,
}

impl Totals {
    /// Prompts count once, answers each, and of several answers to a prompt the one that found least.
    pub(crate) fn of<'a>(plan: &Plan, answers: impl Iterator<Item = &'a Answer>) -> Self {
        let mut cached: Vec<Option<u64>> = vec![None; plan.prompts.len()];
        let mut completion_tokens = 0;
        for answer in answers {
            completion_tokens += answer.completion_tokens;
            let of_prompt = &mut cached[answer.prompt_at()];
            *of_prompt = match (*of_prompt, answer.cached_tokens) {
                (Some(before), Some(now)) => Some(before.min(now)),
                (before, now) => before.or(now),
            };
        }
        let cached_tokens = cached.into_iter().try_fold(0, |sum, one| Some(sum + one?));
        Self { prompt_tokens: plan.prompt_tokens(), completion_tokens, cached_tokens }
    }

    fn write(self, out: &mut Vec<u8>) {
        put(out, "{\"prompt_tokens\":");
        json::integer(out, self.prompt_tokens);
        put(out, ",\"completion_tokens\":");
        json::integer(out, self.completion_tokens);
        put(out, ",\"total_tokens\":");
        json::integer(out, self.prompt_tokens + self.completion_tokens);
        put(out, ",\"prompt_tokens_details\":");
        match self.cached_tokens {
            None => put(out, "null}"),
            Some(cached_tokens) => {
                put(out, "{\"cached_tokens\":");
                json::integer(out, cached_tokens);
                put(out, "}}");
            }
        }
    }
}

/// Writes a stream's events. What all have in common is written once and copied.
#[derive(Debug)]
pub(crate) struct ChunkWriter {
    chat: bool,
    head: Vec<u8>,
    usage: Usage,
    /// Whether content may be absent, so that who speaks says none.
    plain: bool,
}

#[derive(Clone, Copy, Debug)]
enum Usage {
    Absent,
    /// `null` in all but the last event.
    Last,
    Each,
}

impl ChunkWriter {
    pub(crate) fn new(plan: &Plan) -> Self {
        let chat = plan.endpoint == Endpoint::Chat;
        let mut head = b"data: ".to_vec();
        write_head(&mut head, plan, if chat { "chat.completion.chunk" } else { "text_completion" });
        put(&mut head, ",\"choices\":[");
        let usage = match (plan.include_usage, plan.continuous_usage) {
            (false, _) => Usage::Absent,
            (true, false) => Usage::Last,
            (true, true) => Usage::Each,
        };
        Self { chat, head, usage, plain: plan.speech.is_plain() }
    }

    /// Whether every event has the tokens so far.
    pub(crate) fn wants_totals(&self) -> bool {
        matches!(self.usage, Usage::Each)
    }

    fn open(&self, out: &mut Vec<u8>, index: usize) {
        out.extend_from_slice(&self.head);
        put(out, "{\"index\":");
        json::integer(out, index as u64);
    }

    fn close(&self, out: &mut Vec<u8>, totals: Option<Totals>) {
        put(out, "]");
        match (self.usage, totals) {
            (Usage::Absent, _) => {}
            (Usage::Each, Some(totals)) => {
                put(out, ",\"usage\":");
                totals.write(out);
            }
            _ => put(out, ",\"usage\":null"),
        }
        put(out, "}\n\n");
    }

    /// The event that says who speaks, for chats.
    pub(crate) fn role(&self, out: &mut Vec<u8>, index: usize, totals: Option<Totals>) {
        if self.chat {
            self.open(out, index);
            put(out, ",\"delta\":{\"role\":\"assistant\",\"content\":");
            put(out, if self.plain { "\"\"" } else { "null" });
            put(out, "},\"logprobs\":null,\"finish_reason\":null}");
            self.close(out, totals);
        }
    }

    /// The event with an answer's new text, and the one with its end; none when there is neither.
    pub(crate) fn news(
        &self,
        out: &mut Vec<u8>,
        index: usize,
        answer: &mut Answer,
        (plan, totals): (&Plan, Option<Totals>),
    ) {
        let mut logs = if plan.logprobs { answer.take_logs() } else { Vec::new() };
        if let Some(speech) = &mut answer.speech {
            let parts = speech.take();
            if parts.is_empty() && !logs.is_empty() {
                self.delta(out, (index, None), (plan, &logs), totals);
            }
            for part in &parts {
                self.delta(out, (index, Some(part)), (plan, &logs), totals);
                logs.clear();
            }
        } else if !answer.shown.is_empty() || !logs.is_empty() {
            self.open(out, index);
            put(out, if self.chat { ",\"delta\":{\"content\":\"" } else { ",\"text\":\"" });
            json::escape(out, &answer.shown);
            answer.shown.clear();
            put(out, if self.chat { "\"}" } else { "\"" });
            put(out, ",\"logprobs\":");
            write_logs(out, plan, &logs);
            put(out, ",\"finish_reason\":null}");
            self.close(out, totals);
        }
        if let Some(finish) = answer.finish_name().filter(|_| !answer.end_told) {
            answer.end_told = true;
            self.open(out, index);
            put(out, if self.chat { ",\"delta\":{}" } else { ",\"text\":\"\"" });
            put(out, ",\"logprobs\":null,\"finish_reason\":\"");
            put(out, finish);
            put(out, "\"}");
            self.close(out, totals);
        }
    }

    /// The event with a part of an answer, or only with what is said of its tokens.
    fn delta(
        &self,
        out: &mut Vec<u8>,
        (index, part): (usize, Option<&Part>),
        (plan, logs): (&Plan, &[TokenLog]),
        totals: Option<Totals>,
    ) {
        self.open(out, index);
        put(out, ",\"delta\":{");
        if let Some(part) = part {
            write_part(out, part);
        }
        put(out, "},\"logprobs\":");
        if logs.is_empty() {
            put(out, "null");
        } else {
            write_logs(out, plan, logs);
        }
        put(out, ",\"finish_reason\":null}");
        self.close(out, totals);
    }

    /// The last events of a stream that went well.
    pub(crate) fn end(&self, out: &mut Vec<u8>, totals: Totals) {
        if !matches!(self.usage, Usage::Absent) {
            out.extend_from_slice(&self.head);
            put(out, "],\"usage\":");
            totals.write(out);
            put(out, "}\n\n");
        }
        out.extend_from_slice(DONE);
    }

    /// The last event of a stream that did not.
    pub(crate) fn error(&self, out: &mut Vec<u8>, error: &ApiError) {
        put(out, "data: ");
        error.write(out);
        put(out, "\n\n");
    }
}

fn write_head(out: &mut Vec<u8>, plan: &Plan, object: &str) {
    put(out, "{\"id\":");
    json::string(out, &plan.id);
    put(out, ",\"object\":");
    json::string(out, object);
    put(out, ",\"created\":");
    json::integer(out, plan.created_s);
    put(out, ",\"model\":");
    json::string(out, &plan.model);
}

/// The fields of a delta.
fn write_part(out: &mut Vec<u8>, part: &Part) {
    match part {
        Part::Reasoning(text) => {
            put(out, "\"reasoning_content\":");
            json::string(out, text);
        }
        Part::Content(text) => {
            put(out, "\"content\":");
            json::string(out, text);
        }
        Part::Call { index, id, name } => {
            put(out, "\"tool_calls\":[{\"index\":");
            json::integer(out, *index as u64);
            put(out, ",");
            write_call(out, (id, name, ""));
            put(out, "]");
        }
        Part::Arguments { index, text } => {
            put(out, "\"tool_calls\":[{\"index\":");
            json::integer(out, *index as u64);
            put(out, ",\"function\":{\"arguments\":");
            json::string(out, text);
            put(out, "}}]");
        }
    }
}

/// A call's fields from its id on, with the brace that closes it.
fn write_call(out: &mut Vec<u8>, (id, name, arguments): (&str, &str, &str)) {
    put(out, "\"id\":");
    json::string(out, id);
    put(out, ",\"type\":\"function\",\"function\":{\"name\":");
    json::string(out, name);
    put(out, ",\"arguments\":");
    json::string(out, arguments);
    put(out, "}}");
}

/// A chat's message from its content on, with the brace that closes it.
fn write_message(out: &mut Vec<u8>, plan: &Plan, answer: &mut Answer) {
    let message = match &mut answer.speech {
        Some(speech) => Message::of(speech.take()),
        None => Message { content: Some(std::mem::take(&mut answer.shown)), ..Message::default() },
    };
    match &message.content {
        Some(content) => json::string(out, content),
        None => put(out, "null"),
    }
    put(out, ",\"refusal\":null");
    if plan.speech.thoughts.is_some() {
        put(out, ",\"reasoning_content\":");
        match &message.reasoning {
            Some(reasoning) => json::string(out, reasoning),
            None => put(out, "null"),
        }
    }
    if !message.calls.is_empty() {
        put(out, ",\"tool_calls\":");
        list(out, &message.calls, |out, (id, name, arguments)| {
            put(out, "{");
            write_call(out, (id, name, arguments));
        });
    }
    put(out, "}");
}

/// The response to a call that is not streamed.
pub(crate) fn whole(plan: &Plan, answers: &mut [Answer]) -> Vec<u8> {
    let chat = plan.endpoint == Endpoint::Chat;
    let text: usize = answers.iter().map(|answer| answer.shown.len() + 128).sum();
    let mut out = Vec::with_capacity(256 + text + text / 8);
    write_head(&mut out, plan, if chat { "chat.completion" } else { "text_completion" });
    put(&mut out, ",\"choices\":[");
    for (index, answer) in answers.iter_mut().enumerate() {
        if index > 0 {
            put(&mut out, ",");
        }
        put(&mut out, "{\"index\":");
        json::integer(&mut out, index as u64);
        if chat {
            put(&mut out, ",\"message\":{\"role\":\"assistant\",\"content\":");
            write_message(&mut out, plan, answer);
        } else {
            put(&mut out, ",\"text\":");
            json::string(&mut out, &answer.shown);
        }
        put(&mut out, ",\"logprobs\":");
        write_logs(&mut out, plan, &answer.take_logs());
        put(&mut out, ",\"finish_reason\":");
        json::string(&mut out, answer.finish_name().unwrap_or("stop"));
        if plan.shows_prompt_logs {
            put(&mut out, ",\"prompt_logprobs\":");
            write_prompt_logs(&mut out, &plan.tokenization, &answer.prompt_logs);
        }
        put(&mut out, "}");
    }
    put(&mut out, "],\"usage\":");
    Totals::of(plan, answers.iter()).write(&mut out);
    put(&mut out, "}");
    out
}

fn write_logs(out: &mut Vec<u8>, plan: &Plan, logs: &[TokenLog]) {
    if !plan.logprobs {
        put(out, "null");
    } else if plan.endpoint == Endpoint::Chat {
        write_chat_logs(out, &plan.tokenization, logs);
    } else {
        write_completion_logs(out, &plan.tokenization, logs);
    }
}

/// Writes `items` between brackets, with commas.
fn list<T>(out: &mut Vec<u8>, items: impl IntoIterator<Item = T>, mut item: impl FnMut(&mut Vec<u8>, T)) {
    out.push(b'[');
    for (at, one) in items.into_iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        item(out, one);
    }
    out.push(b']');
}

fn write_chat_logs(out: &mut Vec<u8>, with: &Tokenization, logs: &[TokenLog]) {
    let entry = |out: &mut Vec<u8>, token: u32, logprob: f32| {
        put(out, "{\"token\":");
        token_name(out, with, token);
        put(out, ",\"logprob\":");
        json::logprob(out, logprob);
        put(out, ",\"bytes\":");
        json::byte_array(out, with.token_bytes(token));
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

fn write_completion_logs(out: &mut Vec<u8>, with: &Tokenization, logs: &[TokenLog]) {
    put(out, "{\"tokens\":");
    list(out, logs, |out, log| token_name(out, with, log.token));
    put(out, ",\"token_logprobs\":");
    list(out, logs, |out, log| match &log.logprob {
        Some(logprob) => json::logprob(out, logprob.logprob),
        None => put(out, "null"),
    });
    put(out, ",\"top_logprobs\":");
    list(out, logs, |out, log| match &log.logprob {
        Some(logprob) => top_by_name(out, with, (log.token, logprob.logprob), &logprob.top),
        None => put(out, "null"),
    });
    put(out, ",\"text_offset\":");
    list(out, logs, |out, log| json::integer(out, log.start_chars as u64));
    put(out, "}");
}

/// The likeliest tokens by name, the one that was drawn among them; a name stands once.
fn top_by_name(out: &mut Vec<u8>, with: &Tokenization, drawn: (u32, f32), top: &[(u32, f32)]) {
    let also = top.iter().all(|one| one.0 != drawn.0).then_some(drawn);
    let mut names: Vec<Vec<u8>> = Vec::with_capacity(top.len() + 1);
    put(out, "{");
    for (token, logprob) in top.iter().copied().chain(also) {
        let mut name = Vec::new();
        token_name(&mut name, with, token);
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
fn write_prompt_logs(out: &mut Vec<u8>, with: &Tokenization, logs: &[TokenLog]) {
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
