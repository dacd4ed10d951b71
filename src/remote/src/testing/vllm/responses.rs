//! A completion in vLLM's words, in one piece or as a stream.

use std::io;

use baton_types::Finish;
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::testing::body::CompletionRequest;
use crate::testing::fault::Fault;
use crate::testing::play::Play;
use crate::testing::steps::Pace;
use crate::testing::text::{TextAnswer, Voice, usage};
use crate::testing::toy::{VOCAB_TOKENS, toy_logprob};

/// An answer to send.
pub(super) struct Answer {
    pub(super) request: CompletionRequest,
    pub(super) id: String,
    pub(super) answer: Vec<u32>,
    pub(super) finish: Finish,
    /// Prompt tokens that were not computed.
    pub(super) cached: usize,
    /// The prompt was computed here.
    pub(super) computed: bool,
    pub(super) params: Value,
    pub(super) fault: Option<Fault>,
}

impl Answer {
    fn ids(&self, ids: &[u32]) -> Value {
        let tells = self.request.token_ids && self.fault != Some(Fault::NoTokenIds);
        if tells { json!(ids) } else { Value::Null }
    }

    fn logprobs(&self, from: usize, ids: &[u32]) -> Value {
        let Some(count) = self.request.sampling.logprobs else { return Value::Null };
        if self.fault == Some(Fault::NoTokenIds) {
            return Value::Null;
        }
        let name =
            |id: u32| if self.request.ids_in_logprobs { format!("token_id:{id}") } else { format!("t{id}") };
        let own = |at: usize| toy_logprob(ids[at], from + at);
        let top = |at: usize| {
            let others = (1..u32::from(count.max(1)))
                .map(|step| ((ids[at] + step) % VOCAB_TOKENS, own(at) - step as f32));
            let all = std::iter::once((ids[at], own(at))).chain(others);
            Value::Object(all.map(|(id, log)| (name(id), json!(log))).collect())
        };
        let each = 0..ids.len();
        json!({"text_offset": each.clone().collect::<Vec<_>>(), "tokens": ids.iter().map(|id| name(*id)).collect::<Vec<_>>(),
            "token_logprobs": each.clone().map(own).collect::<Vec<_>>(), "top_logprobs": each.map(top).collect::<Vec<_>>()})
    }

    fn prompt_logprobs(&self) -> Value {
        let Some(count) = self.request.sampling.prompt_logprobs else { return Value::Null };
        let one = |(at, token): (usize, &u32)| {
            if at == 0 {
                return Value::Null;
            }
            let own = toy_logprob(*token, at);
            let others =
                (1..=u32::from(count)).map(|step| ((token + step) % VOCAB_TOKENS, own - step as f32));
            let all = std::iter::once((*token, own)).chain(others);
            Value::Object(all.map(|(id, log)| (id.to_string(), json!({"logprob": log, "rank": 1}))).collect())
        };
        self.request.prompt.iter().enumerate().map(one).collect()
    }

    /// Without details of a prompt of which nothing was cached, as vLLM has it.
    fn usage(&self) -> Value {
        let mut usage = usage(self.request.prompt.len(), self.answer.len(), self.cached);
        if self.cached == 0 && self.request.voice == Voice::Ids {
            usage["prompt_tokens_details"] = Value::Null;
        }
        usage
    }

    fn choice(&self, from: usize, ids: &[u32], last: bool) -> Value {
        json!({"index": 0, "text": ids.iter().map(|id| format!(" t{id}")).collect::<String>(),
            "logprobs": self.logprobs(from, ids), "finish_reason": last.then(|| self.finish.name()), "stop_reason": null,
            "prompt_token_ids": null, "token_ids": self.ids(ids)})
    }

    /// The frame as text, with the prompt's ids where they are requested. The ids of long prompts do not become a JSON
    /// value each.
    fn worded(&self, frame: &Value, first: bool) -> String {
        const NONE: &str = r#""prompt_token_ids":null"#;
        let text = frame.to_string();
        if !first || !self.request.token_ids || self.fault == Some(Fault::NoTokenIds) {
            return text;
        }
        let ids = serde_json::to_string(&self.request.prompt).expect("numbers can be written");
        text.replacen(NONE, &format!(r#""prompt_token_ids":{ids}"#), 1)
    }

    fn frame(&self, choices: &Value) -> Value {
        json!({"id": self.id, "object": "text_completion", "created": 1_795_230_029, "model": "tiny", "choices": choices})
    }

    /// The answer in one piece.
    pub(super) fn whole(&self) -> String {
        let mut whole = if self.request.voice == Voice::Ids {
            self.whole_of_ids()
        } else {
            self.telling(&self.usage()).whole()
        };
        whole["kv_transfer_params"] = self.params.clone();
        whole["choices"][0]["prompt_token_ids"] = Value::Null;
        self.worded(&whole, true)
    }

    const fn telling<'a>(&'a self, usage: &'a Value) -> TextAnswer<'a> {
        let (id, answer, finish) = (self.id.as_str(), self.answer.as_slice(), self.finish.name());
        TextAnswer { voice: self.request.voice, tokenizer: self.request.tokenizer, id, answer, finish, usage }
    }

    fn whole_of_ids(&self) -> Value {
        let mut choice = self.choice(0, &self.answer, true);
        choice["prompt_logprobs"] = self.prompt_logprobs();
        let mut whole = self.frame(&json!([choice]));
        whole["usage"] = self.usage();
        whole
    }

    pub(super) async fn stream(&self, events: &mpsc::Sender<io::Result<Bytes>>, pace: Pace) {
        let error = json!({"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}});
        let tokens = self.answer.len();
        let play = Play { events, fault: self.fault.as_ref(), tokens, pace, error };
        if self.request.voice != Voice::Ids {
            let usage = self.usage();
            let telling = self.telling(&usage);
            return play.run(|at| telling.event(at), self.request.usage.then(|| telling.counts())).await;
        }
        let token = |at: usize| {
            let frame = self.frame(&json!([self.choice(at, &self.answer[at..=at], at + 1 == tokens)]));
            format!("data: {}\n\n", self.worded(&frame, at == 0)).into()
        };
        let last = self.request.usage.then(|| {
            let mut frame = self.frame(&json!([]));
            frame["usage"] = self.usage();
            frame
        });
        play.run(token, last).await;
    }
}
