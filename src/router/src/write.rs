//! OpenAI's response objects, written by hand into a reused buffer.

mod logs;

use self::logs::{write_logs, write_prompt_logs};
use crate::answer::{Answer, StopReason, TokenLog};
use crate::error::ApiError;
use crate::json;
use crate::output_parsing::{Message, Part};
use crate::plan::Plan;
use crate::sampling::Endpoint;

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

/// Writes a stream's events. The part that all of them share is written once and copied.
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
        Self { chat, head, usage, plain: plan.output.is_plain() }
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

    /// Closes an event whose choices are closed.
    fn close(&self, out: &mut Vec<u8>, totals: Option<Totals>) {
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

    /// The event that says who speaks, for chats; the first has the prompt's tokens, where they are wanted.
    pub(crate) fn role(&self, out: &mut Vec<u8>, index: usize, (plan, totals): (&Plan, Option<Totals>)) {
        if self.chat {
            self.open(out, index);
            put(out, ",\"delta\":{\"role\":\"assistant\",\"content\":");
            put(out, if self.plain { "\"\"" } else { "null" });
            put(out, "},\"logprobs\":null,\"finish_reason\":null}]");
            if index == 0 && plan.tells_ids {
                write_prompt_ids(out, plan, 0);
            }
            self.close(out, totals);
        }
    }

    /// The event with an answer's new tokens, and the one with its end; none when there is neither. Tokens have an event
    /// even where they end within a character and make no text yet: clients take the time between events for the time
    /// between tokens.
    pub(crate) fn write_new(
        &self,
        out: &mut Vec<u8>,
        index: usize,
        answer: &mut Answer,
        (plan, totals): (&Plan, Option<Totals>),
    ) {
        let mut logs = if plan.logprobs { answer.take_logs() } else { Vec::new() };
        let more_tokens = answer.completion_tokens > answer.written_tokens && answer.finish.is_none();
        answer.written_tokens = answer.completion_tokens;
        if let Some(output) = &mut answer.output {
            let parts = output.take();
            if parts.is_empty() && !logs.is_empty() {
                self.delta(out, (index, None), (plan, &logs), (answer, totals));
            }
            for part in &parts {
                self.delta(out, (index, Some(part)), (plan, &logs), (answer, totals));
                logs.clear();
            }
        } else if more_tokens || !answer.shown.is_empty() || !logs.is_empty() {
            self.open(out, index);
            put(out, if self.chat { ",\"delta\":{\"content\":\"" } else { ",\"text\":\"" });
            json::escape(out, &answer.shown);
            answer.shown.clear();
            put(out, if self.chat { "\"}" } else { "\"" });
            put(out, ",\"logprobs\":");
            write_logs(out, plan, &logs);
            put(out, ",\"finish_reason\":null");
            self.close_choice(out, plan, answer);
            self.close(out, totals);
        }
        if let Some(finish) = answer.finish_name().filter(|_| !answer.end_sent) {
            answer.end_sent = true;
            self.open(out, index);
            put(out, if self.chat { ",\"delta\":{}" } else { ",\"text\":\"\"" });
            put(out, ",\"logprobs\":null,\"finish_reason\":\"");
            put(out, finish);
            put(out, "\"");
            write_stop_reason(out, answer.stop_reason.as_ref());
            self.close_choice(out, plan, answer);
            self.close(out, totals);
        }
    }

    /// The last fields of a choice, the brace that closes it, and the bracket behind it.
    fn close_choice(&self, out: &mut Vec<u8>, plan: &Plan, answer: &mut Answer) {
        if !self.chat && !std::mem::replace(&mut answer.prompt_sent, true) {
            write_prompt_ids(out, plan, answer.prompt_at());
        }
        if plan.tells_ids {
            write_ids(out, ",\"token_ids\":", answer.ids.drain(..));
        }
        put(out, "}]");
    }

    /// The event with a part of an answer, or only with what is said of its tokens.
    fn delta(
        &self,
        out: &mut Vec<u8>,
        (index, part): (usize, Option<&Part>),
        (plan, logs): (&Plan, &[TokenLog]),
        (answer, totals): (&mut Answer, Option<Totals>),
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
        put(out, ",\"finish_reason\":null");
        self.close_choice(out, plan, answer);
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
    let message = match &mut answer.output {
        Some(output) => Message::of(output.take()),
        None => Message { content: Some(std::mem::take(&mut answer.shown)), ..Message::default() },
    };
    match &message.content {
        Some(content) => json::string(out, content),
        None => put(out, "null"),
    }
    put(out, ",\"refusal\":null");
    if plan.output.reasoning.is_some() {
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
        write_stop_reason(&mut out, answer.stop_reason.as_ref());
        if !chat {
            write_prompt(&mut out, plan, answer);
        }
        if plan.tells_ids {
            write_ids(&mut out, ",\"token_ids\":", answer.ids.drain(..));
        }
        put(&mut out, "}");
    }
    put(&mut out, "]");
    // A chat has one prompt, whatever the number of its answers.
    if let Some(answer) = answers.first().filter(|_| chat) {
        write_prompt(&mut out, plan, answer);
    }
    put(&mut out, ",\"usage\":");
    Totals::of(plan, answers.iter()).write(&mut out);
    put(&mut out, "}");
    out
}

/// Writes the prompt's logprobs and token ids, where the client asked for them.
fn write_prompt(out: &mut Vec<u8>, plan: &Plan, answer: &Answer) {
    if plan.shows_prompt_logs {
        put(out, ",\"prompt_logprobs\":");
        write_prompt_logs(out, &plan.tokenization, &answer.prompt_logs);
    }
    if plan.tells_ids {
        write_prompt_ids(out, plan, answer.prompt_at());
    }
}

fn write_prompt_ids(out: &mut Vec<u8>, plan: &Plan, prompt_at: usize) {
    let tokens = plan.prompts.get(prompt_at).map(|prompt| &prompt.tokens);
    write_ids(out, ",\"prompt_token_ids\":", tokens.into_iter().flat_map(|tokens| tokens.iter()));
}

fn write_ids(out: &mut Vec<u8>, name: &str, ids: impl Iterator<Item = u32>) {
    put(out, name);
    list(out, ids, |out, id| json::integer(out, u64::from(id)));
}

fn write_stop_reason(out: &mut Vec<u8>, reason: Option<&StopReason>) {
    put(out, ",\"stop_reason\":");
    match reason {
        None => put(out, "null"),
        Some(StopReason::Text(text)) => json::string(out, text),
        Some(StopReason::Token(token)) => json::integer(out, u64::from(*token)),
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
