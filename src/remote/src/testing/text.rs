//! Text in and text out, as clients and routers of text have it: a token is a byte of the prompt, and a letter of the
//! answer.

use bytes::Bytes;
use serde_json::{Value, json};

use super::body::Wrong;

/// How a request and its answer are worded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Voice {
    /// Token ids, as Baton has it.
    Ids,
    /// The text of `/v1/completions`.
    Completion,
    /// The messages of `/v1/chat/completions`.
    Chat,
}

/// The letter that stands for a token; a token that is a letter stands for itself.
pub(super) fn letter(token: u32) -> char {
    let first = u32::from(b'a');
    let at = if (first..first + 26).contains(&token) { token - first } else { token % 26 };
    char::from(b'a' + u8::try_from(at).unwrap_or(0))
}

/// The token whose letter it is: the same for a byte-level tokenizer.
pub(super) fn lettered(token: u32) -> u32 {
    u32::from(letter(token))
}

/// The tokens of a text.
pub(super) fn tokens_of(text: &str) -> Result<Vec<u32>, Wrong> {
    if text.is_empty() {
        return Err("the prompt is empty".into());
    }
    Ok(text.bytes().map(u32::from).collect())
}

/// The tokens of a chat: each message's role and text, line by line.
pub(super) fn tokens_of_chat(messages: &Value) -> Result<Vec<u32>, Wrong> {
    let messages = messages.as_array().filter(|list| !list.is_empty()).ok_or("messages is no list")?;
    let mut text = String::new();
    for message in messages {
        let role = message["role"].as_str().ok_or("a message has no role")?;
        let content = message["content"].as_str().ok_or("a message has no text")?;
        text.extend([role, ": ", content, "\n"]);
    }
    text.push_str("assistant: ");
    tokens_of(&text)
}

/// An answer in text, about to be told.
pub(super) struct Telling<'a> {
    pub(super) voice: Voice,
    pub(super) id: &'a str,
    pub(super) answer: &'a [u32],
    pub(super) finish: &'a str,
    pub(super) usage: &'a Value,
}

impl Telling<'_> {
    const fn kind(&self, stream: bool) -> &'static str {
        match (self.voice, stream) {
            (Voice::Chat, true) => "chat.completion.chunk",
            (Voice::Chat, false) => "chat.completion",
            _ => "text_completion",
        }
    }

    /// The whole answer.
    pub(super) fn whole(&self) -> Value {
        let text: String = self.answer.iter().map(|token| letter(*token)).collect();
        let mut choice =
            json!({"index": 0, "logprobs": null, "finish_reason": self.finish, "stop_reason": null});
        if self.voice == Voice::Chat {
            choice["message"] = json!({"role": "assistant", "content": text, "tool_calls": []});
        } else {
            choice["text"] = json!(text);
        }
        json!({"id": self.id, "object": self.kind(false), "created": 1_795_230_029, "model": "tiny", "choices": [choice],
            "usage": self.usage})
    }

    /// The event of one token.
    pub(super) fn event(&self, at: usize) -> Bytes {
        let letter = self.answer.get(at).map_or('a', |token| letter(*token));
        let said = match (self.voice, at) {
            (Voice::Chat, 0) => format!(r#""delta":{{"role":"assistant","content":"{letter}"}}"#),
            (Voice::Chat, _) => format!(r#""delta":{{"content":"{letter}"}}"#),
            _ => format!(r#""text":"{letter}""#),
        };
        let last = at + 1 == self.answer.len();
        let finish = if last { format!("\"{}\"", self.finish) } else { "null".into() };
        format!(
            "data: {{\"id\":\"{}\",\"object\":\"{}\",\"created\":1795230029,\"model\":\"tiny\",\"choices\":[{{\"index\":0,{said},\"logprobs\":null,\"finish_reason\":{finish}}}]}}\n\n",
            self.id,
            self.kind(true)
        )
        .into()
    }

    /// The event that tells the counts.
    pub(super) fn counts(&self) -> Value {
        json!({"id": self.id, "object": self.kind(true), "created": 1_795_230_029, "model": "tiny", "choices": [],
            "usage": self.usage})
    }
}

/// An answer's counts, as both engines tell them to clients of text.
pub(super) fn usage(prompt: usize, answer: usize, cached: usize) -> Value {
    json!({"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer,
        "prompt_tokens_details": {"cached_tokens": cached}})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chats_that_go_on_begin_alike_and_what_is_no_text_is_refused() {
        let turn = |text: &str| json!([{"role": "user", "content": "hi"}, {"role": "user", "content": text}]);
        let [one, other] = ["a", "b"].map(|text| tokens_of_chat(&turn(text)).unwrap());
        let shared = one.iter().zip(&other).take_while(|(a, b)| a == b).count();
        assert_eq!(shared, "user: hi\nuser: ".len());
        for wrong in [json!([]), json!("x"), json!([{"role": "user"}]), json!([{"content": "x"}])] {
            assert!(tokens_of_chat(&wrong).is_err());
        }
        assert!(tokens_of("").is_err());
    }

    #[test]
    fn events_are_json_and_spell_the_whole_answer() {
        let usage = usage(3, 2, 0);
        for voice in [Voice::Chat, Voice::Completion] {
            let telling = Telling { voice, id: "x", answer: &[0, 27], finish: "length", usage: &usage };
            let text: String = (0..2)
                .map(|at| {
                    let event = telling.event(at);
                    let line = std::str::from_utf8(&event).unwrap().strip_prefix("data: ").unwrap();
                    let event: Value = serde_json::from_str(line.trim()).unwrap();
                    let choice = &event["choices"][0];
                    assert_eq!(choice["finish_reason"].is_string(), at == 1);
                    choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap().to_owned()
                })
                .collect();
            let whole = telling.whole();
            let choice = &whole["choices"][0];
            assert_eq!(choice["message"]["content"].as_str().or(choice["text"].as_str()), Some(&*text));
            assert_eq!((text.as_str(), &whole["usage"]["total_tokens"]), ("ab", &json!(5)));
        }
    }
}
