//! An answer in SGLang's words, in one piece or as a stream.

use std::io;

use baton_types::Finish;
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::GenerateRequest;
use crate::testing::fault::Fault;
use crate::testing::play::Play;
use crate::testing::server::event;
use crate::testing::steps::Pace;
use crate::testing::text::{TextAnswer, Voice, usage};
use crate::testing::toy::toy_logprob;

/// An answer to send.
pub(super) struct Answer {
    pub(super) request: GenerateRequest,
    pub(super) answer: Vec<u32>,
    pub(super) finish: Finish,
    /// Prompt tokens that were not computed.
    pub(super) cached: usize,
    pub(super) fault: Option<Fault>,
    pub(super) repeats: bool,
}

impl Answer {
    pub(super) fn event(&self, from: usize, to: usize, last: bool) -> Value {
        let from = if self.repeats { 0 } else { from };
        let ids = &self.answer[from..to];
        let prompt_tokens = self.request.prompt.len() + usize::from(self.fault == Some(Fault::OtherPrompt));
        let end = last.then(|| json!({"type": self.finish.name(), "length": to}));
        let mut meta = json!({"id": self.request.rid, "finish_reason": end, "prompt_tokens": prompt_tokens,
            "completion_tokens": to, "cached_tokens": self.cached});
        if self.request.logprobs {
            let log = |at: usize| json!([toy_logprob(self.answer[at], at), self.answer[at], null]);
            meta["output_token_logprobs"] = (from..to).map(log).collect();
            meta["output_top_logprobs"] = (from..to).map(|at| json!([log(at)])).collect();
        }
        if self.request.sampling.prompt_logprobs.is_some() {
            let log = |at: usize| {
                if at == 0 { Value::Null } else { json!(toy_logprob(self.request.prompt[at], at)) }
            };
            let each = 0..self.request.prompt.len();
            meta["input_token_logprobs"] =
                each.map(|at| json!([log(at), self.request.prompt[at], null])).collect();
        }
        let mut event = json!({"text": "t", "meta_info": meta});
        if self.fault != Some(Fault::NoTokenIds) {
            event["output_ids"] = json!(ids);
        }
        event
    }

    /// The answer in one piece.
    pub(super) fn whole(&self) -> Value {
        match self.request.voice {
            Voice::Ids => self.event(0, self.answer.len(), true),
            _ => self.telling(&self.usage()).whole(),
        }
    }

    fn usage(&self) -> Value {
        usage(self.request.prompt.len(), self.answer.len(), self.cached)
    }

    const fn telling<'a>(&'a self, usage: &'a Value) -> TextAnswer<'a> {
        let (id, answer, finish) = (self.request.rid.as_str(), self.answer.as_slice(), self.finish.name());
        TextAnswer { voice: self.request.voice, tokenizer: self.request.tokenizer, id, answer, finish, usage }
    }

    pub(super) async fn stream(&self, events: &mpsc::Sender<io::Result<Bytes>>, pace: Pace) {
        let error = json!({"error": {"message": "KVTransferError", "code": 500}});
        let tokens = self.answer.len();
        let play = Play { events, fault: self.fault.as_ref(), tokens, pace, error };
        if self.request.voice != Voice::Ids {
            let usage = self.usage();
            let telling = self.telling(&usage);
            return play.run(|at| telling.event(at), self.request.usage.then(|| telling.counts())).await;
        }
        play.run(|at| event(&self.event(at, at + 1, at + 1 == tokens)), None).await;
    }
}
