//! Text in and text out, as clients and text routers use it. A token is a byte of the prompt and a letter of the answer,
//! or a token of a trained tokenizer in both.

use std::collections::BTreeMap;
use std::fmt;

use bytes::Bytes;
use serde_json::{Value, json};

use super::body::RefusalReason;
use super::toy::VOCAB_TOKENS;

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

const LETTERS: &str = "abcdefghijklmnopqrstuvwxyz";

/// The letter that stands for a token; a token that is a letter stands for itself.
fn letter(token: u32) -> &'static str {
    let first = u32::from(b'a');
    let at = if (first..first + 26).contains(&token) { token - first } else { token % 26 } as usize;
    &LETTERS[at..=at]
}

/// The token whose letter it is: the same for a byte-level tokenizer.
pub(super) fn lettered(token: u32) -> u32 {
    u32::from(letter(token).as_bytes()[0])
}

type EncodeFunction = dyn Fn(&str) -> Result<Vec<u32>, String> + Send + Sync;

/// A trained tokenizer for stand-ins. The program that starts them supplies it, so that this crate depends on none.
pub struct TrainedTokenizer {
    encode: Box<EncodeFunction>,
    vocab_tokens: u32,
    /// Ascending by token.
    words: Vec<(u32, String)>,
}

impl TrainedTokenizer {
    /// Wraps `encode`, which turns a text into ids below `vocab_tokens` and recognises special tokens by name. Answers are
    /// made of `words`: each must stay one token next to any other, and must need no escape in JSON.
    ///
    /// # Errors
    /// If `words` is empty.
    pub fn new(
        encode: impl Fn(&str) -> Result<Vec<u32>, String> + Send + Sync + 'static,
        vocab_tokens: u32,
        words: BTreeMap<u32, String>,
    ) -> Result<Self, String> {
        if words.is_empty() {
            return Err(
                "the tokenizer has no word that is one token, and answers are made of such words".into()
            );
        }
        Ok(Self { encode: Box::new(encode), vocab_tokens, words: words.into_iter().collect() })
    }
}

impl fmt::Debug for TrainedTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = self.words.len();
        f.debug_struct("TrainedTokenizer")
            .field("vocab_tokens", &self.vocab_tokens)
            .field("words", &words)
            .finish()
    }
}

/// How a stand-in turns text into ids: one id a byte, or a trained tokenizer. Two byte tokenizers with different `turned`
/// read each other's ids as another text.
#[derive(Clone, Copy, Debug, Default)]
pub struct FakeTokenizer {
    /// So far is each byte's id from the byte: with 0 they are alike, as Baton's built-in vocabulary has it.
    pub turned: u8,
    /// Whether `/tokenize` is there, as it is in vLLM and newer SGLangs.
    pub unasked: bool,
    /// Used in place of bytes if present. It lives as long as the program.
    pub trained: Option<&'static TrainedTokenizer>,
}

/// Marks of chats, and what comes before a text, with their ids.
const MARKS: [(&str, u32); 4] =
    [("<|begin|>", 256), ("<|end|>", 257), ("<|im_start|>", 258), ("<|im_end|>", 259)];

impl FakeTokenizer {
    /// One id a byte, equal to the byte.
    pub const BYTES: Self = Self { turned: 0, unasked: false, trained: None };

    /// Upper bound of the ids that a prompt may have.
    pub(super) fn vocab_tokens(self) -> u32 {
        self.trained.map_or(VOCAB_TOKENS, |trained| trained.vocab_tokens)
    }

    /// The token to answer with when the model draws `token`: one whose text the tokenizer reads back as that token.
    pub(super) fn answer_token(self, token: u32) -> u32 {
        match self.trained {
            Some(trained) => trained.words[token as usize % trained.words.len()].0,
            None => lettered(token),
        }
    }

    /// The text of an answer's token.
    fn token_text(self, token: u32) -> &'static str {
        let Some(trained) = self.trained else { return letter(token) };
        let found = trained.words.binary_search_by_key(&token, |(id, _)| *id);
        &trained.words[found.unwrap_or(0)].1
    }

    /// The tokens of a text, with the mark that begins one if `add_special_tokens`. The trained tokenizer of
    /// `scripts/compare/tokenizer.py` has no such mark.
    pub(super) fn tokens_of(self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, RefusalReason> {
        if text.is_empty() {
            return Err("the prompt is empty".into());
        }
        if let Some(trained) = self.trained {
            return (trained.encode)(text);
        }
        let (mut tokens, mut rest) = (Vec::with_capacity(text.len() + 1), text);
        tokens.extend(add_special_tokens.then_some(MARKS[0].1));
        while let Some(byte) = rest.bytes().next() {
            let mark = MARKS.iter().find(|(mark, _)| rest.starts_with(mark));
            let (token, length) = match mark {
                Some((mark, token)) => (*token, mark.len()),
                None => {
                    let length = rest.chars().next().map_or(1, char::len_utf8);
                    let turned = |byte: u8| u32::from(byte.wrapping_add(self.turned));
                    tokens.extend(rest.bytes().take(length - 1).map(turned));
                    (turned(rest.as_bytes().get(length - 1).copied().unwrap_or(byte)), length)
                }
            };
            tokens.push(token);
            rest = &rest[length..];
        }
        Ok(tokens)
    }

    /// The tokens of a chat in ChatML, which is the template of Baton's built-in vocabulary and of
    /// `scripts/compare/tokenizer.py`.
    pub(super) fn tokens_of_chat(self, messages: &Value, opens: bool) -> Result<Vec<u32>, RefusalReason> {
        let messages = messages.as_array().filter(|list| !list.is_empty()).ok_or("messages is no list")?;
        let mut text = if self.trained.is_some() { "" } else { MARKS[0].0 }.to_owned();
        for message in messages {
            let role = message["role"].as_str().ok_or("a message has no role")?;
            let content = message["content"].as_str().ok_or("a message has no text")?;
            text.extend(["<|im_start|>", role, "\n", content, "<|im_end|>\n"]);
        }
        if opens {
            text.push_str("<|im_start|>assistant\n");
        }
        self.tokens_of(&text, false)
    }

    /// The response of `/tokenize`.
    pub(super) fn tokenize(self, body: &Value, max_model_tokens: u32) -> Result<Value, RefusalReason> {
        let flag = |name: &str, otherwise: bool| body[name].as_bool().unwrap_or(otherwise);
        let tokens = match body["prompt"].as_str() {
            Some(text) => self.tokens_of(text, flag("add_special_tokens", true))?,
            None => self.tokens_of_chat(&body["messages"], flag("add_generation_prompt", true))?,
        };
        Ok(
            json!({"count": tokens.len(), "max_model_len": max_model_tokens, "tokens": tokens, "token_strs": null}),
        )
    }
}

/// An answer in text, about to be sent.
pub(super) struct TextAnswer<'a> {
    pub(super) voice: Voice,
    pub(super) tokenizer: FakeTokenizer,
    pub(super) id: &'a str,
    pub(super) answer: &'a [u32],
    pub(super) finish: &'a str,
    pub(super) usage: &'a Value,
}

impl TextAnswer<'_> {
    const fn kind(&self, stream: bool) -> &'static str {
        match (self.voice, stream) {
            (Voice::Chat, true) => "chat.completion.chunk",
            (Voice::Chat, false) => "chat.completion",
            _ => "text_completion",
        }
    }

    /// The whole answer.
    pub(super) fn whole(&self) -> Value {
        let text: String = self.answer.iter().map(|token| self.tokenizer.token_text(*token)).collect();
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
        let text = self.answer.get(at).map_or("a", |token| self.tokenizer.token_text(*token));
        let said = match (self.voice, at) {
            (Voice::Chat, 0) => format!(r#""delta":{{"role":"assistant","content":"{text}"}}"#),
            (Voice::Chat, _) => format!(r#""delta":{{"content":"{text}"}}"#),
            _ => format!(r#""text":"{text}""#),
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

    /// The event with the counts.
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
        let plain = FakeTokenizer::default();
        let [one, other] = ["a", "b"].map(|text| plain.tokens_of_chat(&turn(text), true).unwrap());
        let shared = one.iter().zip(&other).take_while(|(a, b)| a == b).count();
        let marks = 1 + 2 * "#user\n".len() + "hi#\n".len();
        assert_eq!(shared, marks);
        for wrong in [json!([]), json!("x"), json!([{"role": "user"}]), json!([{"content": "x"}])] {
            assert!(plain.tokens_of_chat(&wrong, true).is_err());
        }
        assert!(plain.tokens_of("", true).is_err());
    }

    #[test]
    fn another_tokenizer_has_as_many_other_tokens() {
        let of = |turned| {
            FakeTokenizer { turned, ..FakeTokenizer::default() }.tokens_of("né<|end|>n", true).unwrap()
        };
        assert_eq!(of(0), [256, 110, 195, 169, 257, 110]);
        assert_eq!(of(1), [256, 111, 196, 170, 257, 111]);
    }

    #[test]
    fn events_are_json_and_spell_the_whole_answer() {
        let usage = usage(3, 2, 0);
        for voice in [Voice::Chat, Voice::Completion] {
            let telling = TextAnswer {
                voice,
                tokenizer: FakeTokenizer::BYTES,
                id: "x",
                answer: &[0, 27],
                finish: "length",
                usage: &usage,
            };
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
