//! Answers of `/v1/completions`: vLLM's, and those of engines like it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use baton_types::TokenLogprob;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::answer::{Progress, finish_of, most_likely, stream_error};
use crate::error::{RemoteError, Stage};
use crate::prompt::Prompt;
use crate::request::{Counts, Token};

/// Before the prompt that an engine was given, where it repeats it.
const ECHO: &[u8] = b"\"prompt_token_ids\":";

/// Before a token's id, where an engine was asked to name tokens by id.
const ID_PREFIX: &str = "token_id:";

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<Value>,
    object: Option<String>,
    kv_transfer_params: Option<Box<RawValue>>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    index: u32,
    token_ids: Option<Vec<u32>>,
    prompt_token_ids: Option<Vec<u32>>,
    logprobs: Option<Logprobs>,
    prompt_logprobs: Option<Vec<Option<PromptTop>>>,
    finish_reason: Option<String>,
    #[serde(default)]
    text: Option<String>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<u64>,
}

/// The two shapes of logprobs that are about: OpenAI's for completions, and a list of contents.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Logprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Option<Vec<Option<Top>>>,
    content: Option<Vec<Content>>,
}

/// Logprobs by token; one that is null is none that JSON can say.
type Top = BTreeMap<String, Option<f32>>;

#[derive(Deserialize)]
struct Content {
    id: Option<u32>,
    logprob: f32,
    #[serde(default)]
    top_logprobs: Vec<TopContent>,
}

#[derive(Deserialize)]
struct TopContent {
    id: Option<u32>,
    logprob: f32,
}

type PromptTop = BTreeMap<String, PromptLogprob>;

#[derive(Deserialize)]
struct PromptLogprob {
    logprob: f32,
}

/// Reads the events of one answer.
pub(crate) struct Reader {
    pub(crate) stage: Stage,
    pub(crate) prompt: Prompt,
    /// How many of the likeliest tokens are wanted beside each logprob, when logprobs are.
    pub(crate) logprobs: Option<u8>,
    pub(crate) prompt_logprobs: Option<u8>,
    /// Whether the engine has reported cached tokens before. vLLM leaves out a count of 0: from then on none means 0.
    pub(crate) counts_cached: Arc<AtomicBool>,
}

/// An answer in one piece.
pub(crate) struct WholeAnswer {
    pub(crate) progress: Progress,
    pub(crate) kv_transfer_params: Option<Box<RawValue>>,
}

impl Reader {
    /// Reads the content of an event. Anything but the answer to this very prompt is an error.
    pub(crate) fn event(&self, data: &[u8]) -> Result<Progress, RemoteError> {
        Ok(self.whole(data)?.progress)
    }

    /// Reads an answer in one piece.
    pub(crate) fn whole(&self, data: &[u8]) -> Result<WholeAnswer, RemoteError> {
        let without = self.without_echo(data);
        let data = without.as_deref().unwrap_or(data);
        let chunk: Chunk = serde_json::from_slice(data)
            .map_err(|error| self.bug(format!("the engine's answer cannot be read: {error}")))?;
        // Older versions say it at the top.
        if chunk.error.is_some() || chunk.object.as_deref() == Some("error") {
            let value: Value = serde_json::from_slice(data).unwrap_or_default();
            return Err(stream_error(&value, self.stage));
        }
        let mut progress = Progress::default();
        if chunk.choices.len() > 1 || chunk.choices.iter().any(|choice| choice.index != 0) {
            return Err(self.bug("the engine gives several answers to one prompt"));
        }
        if let Some(choice) = chunk.choices.into_iter().next() {
            self.choice(choice, &mut progress)?;
        }
        if let Some(usage) = chunk.usage {
            progress.counts = self.counts(&usage)?;
        }
        let kv_transfer_params = chunk.kv_transfer_params.filter(|params| params.get() != "null");
        Ok(WholeAnswer { progress, kv_transfer_params })
    }

    /// The answer without the engine's copy of our prompt, which it repeats as we write it. Parsing that copy number by
    /// number takes longer than all the rest. Within a text the quotes around the name would be escaped, so only the
    /// field itself matches.
    fn without_echo(&self, data: &[u8]) -> Option<Vec<u8>> {
        // A digit and what follows it for each id: most events of a stream have no room for that.
        if data.len() < ECHO.len() + 2 * self.prompt.len() {
            return None;
        }
        let name = data.windows(ECHO.len()).position(|bytes| bytes == ECHO)? + ECHO.len();
        let at = name + data[name..].iter().position(|byte| *byte != b' ')?;
        if data[at..].starts_with(b"null") {
            return None;
        }
        let rest = data[at..].strip_prefix(&*self.prompt.json())?;
        Some([&data[..at], b"null", rest].concat())
    }

    fn bug(&self, text: impl Into<String>) -> RemoteError {
        RemoteError::bug(self.stage, text)
    }

    fn choice(&self, choice: Choice, progress: &mut Progress) -> Result<(), RemoteError> {
        if let Some(prompt) = &choice.prompt_token_ids
            && *prompt != *self.prompt
        {
            let text = format!("the engine answers a prompt of {} tokens that is not ours", prompt.len());
            return Err(self.bug(text).remedy("let the engine take token ids as they are"));
        }
        if let Some(list) = &choice.prompt_logprobs {
            progress.prompt_logprobs = Some(self.prompt_logs(list)?);
        }
        progress.tokens = self.tokens(&choice)?;
        if let Some(word) = &choice.finish_reason {
            progress.finish = Some(finish_of(word, self.stage)?);
        }
        Ok(())
    }

    fn counts(&self, usage: &Usage) -> Result<Counts, RemoteError> {
        let ours = self.prompt.len() as u64;
        if let Some(theirs) = usage.prompt_tokens.filter(|theirs| *theirs != ours) {
            let text = format!("the engine counts {theirs} tokens in our prompt of {ours}");
            return Err(self.bug(text).remedy("use an engine that takes token ids as they are"));
        }
        let cached_tokens = usage.prompt_tokens_details.as_ref().and_then(|details| details.cached_tokens);
        if cached_tokens.is_some() {
            self.counts_cached.store(true, Ordering::Relaxed);
        }
        let counts_cached = self.counts_cached.load(Ordering::Relaxed);
        Ok(Counts {
            prompt_tokens: usage.prompt_tokens,
            answer_tokens: usage.completion_tokens,
            cached_tokens: cached_tokens.or_else(|| counts_cached.then_some(0)),
        })
    }

    fn tokens(&self, choice: &Choice) -> Result<Vec<Token>, RemoteError> {
        let empty = Logprobs::default();
        let logs = choice.logprobs.as_ref().unwrap_or(&empty);
        let named = match &logs.content {
            Some(content) => content.iter().map(|one| one.id).collect(),
            None => logs.tokens.iter().map(|name| id_of(name)).collect::<Vec<_>>(),
        };
        let ids: Vec<u32> = match (&choice.token_ids, named.iter().copied().collect::<Option<Vec<u32>>>()) {
            (Some(ids), _) => ids.clone(),
            (None, Some(ids)) if !ids.is_empty() => ids,
            (None, _) if choice.text.as_deref().unwrap_or("").is_empty() => Vec::new(),
            (None, _) => {
                return Err(self.bug("the engine does not tell the ids of the tokens that it draws").remedy(
                    "use an engine with return_token_ids (vLLM 0.10.2 or later), or one that names tokens by id in logprobs",
                ));
            }
        };
        if self.logprobs.is_none() {
            return Ok(ids.into_iter().map(|id| Token { id, logprob: None }).collect());
        }
        if named.len() != ids.len() {
            let text = format!("{} logprobs came for {} tokens", named.len(), ids.len());
            return Err(self.bug(text));
        }
        Ok(ids
            .into_iter()
            .enumerate()
            .map(|(at, id)| Token { id, logprob: self.logprob(logs, at) })
            .collect())
    }

    fn logprob(&self, logs: &Logprobs, at: usize) -> Option<TokenLogprob> {
        let count = self.logprobs?;
        if let Some(content) = &logs.content {
            let one = content.get(at)?;
            let top = one.top_logprobs.iter().filter_map(|top| Some((top.id?, top.logprob))).collect();
            return Some(TokenLogprob { logprob: one.logprob, top: most_likely(top, count) });
        }
        let logprob = logs.token_logprobs.get(at).copied().flatten()?;
        let top = logs.top_logprobs.as_ref().and_then(|tops| tops.get(at)?.as_ref());
        let top = top.map(|top| top.iter().filter_map(|(name, log)| Some((id_of(name)?, (*log)?))).collect());
        Some(TokenLogprob { logprob, top: most_likely(top.unwrap_or_default(), count) })
    }

    fn prompt_logs(&self, list: &[Option<PromptTop>]) -> Result<Vec<TokenLogprob>, RemoteError> {
        if list.len() != self.prompt.len() {
            let text = format!("{} prompt logprobs came for {} tokens", list.len(), self.prompt.len());
            return Err(self.bug(text));
        }
        let count = self.prompt_logprobs.unwrap_or(0);
        let mut logs = Vec::with_capacity(list.len().saturating_sub(1));
        for (one, token) in list.iter().zip(self.prompt.iter()).skip(1) {
            let one = one.as_ref().ok_or_else(|| self.bug("a token of the prompt has no logprob"))?;
            let all: Vec<(u32, f32)> =
                one.iter().filter_map(|(id, log)| Some((id.parse().ok()?, log.logprob))).collect();
            let own = all.iter().find(|(id, _)| id == token);
            let (_, logprob) =
                *own.ok_or_else(|| self.bug(format!("token {token} of the prompt has no logprob")))?;
            logs.push(TokenLogprob { logprob, top: most_likely(all, count) });
        }
        Ok(logs)
    }
}

fn id_of(name: &str) -> Option<u32> {
    name.strip_prefix(ID_PREFIX)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use baton_types::Finish;

    use super::*;
    use crate::error::Kind;

    fn reader(prompt: &[u32], logprobs: Option<u8>) -> Reader {
        Reader {
            stage: Stage::Stream,
            prompt: prompt.to_vec().into(),
            logprobs,
            prompt_logprobs: logprobs,
            counts_cached: Arc::default(),
        }
    }

    fn ids(progress: &Progress) -> Vec<u32> {
        progress.tokens.iter().map(|token| token.id).collect()
    }

    /// The events of vllm_completions_stream.sse, vLLM 0.32.
    const SEEN: [&str; 3] = [
        r#"{"id":"cmpl-b75de08fdfc2a5c9","object":"text_completion","created":1795229821,"model":"tiny","choices":[{"index":0,"text":" lat","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":[90,308,369,359,363,353],"token_ids":[1489]}]}"#,
        r#"{"id":"cmpl-b75de08fdfc2a5c9","object":"text_completion","created":1795229821,"model":"tiny","choices":[{"index":0,"text":" bu","logprobs":null,"finish_reason":"length","stop_reason":null,"prompt_token_ids":null,"token_ids":[770]}]}"#,
        r#"{"id":"cmpl-b75de08fdfc2a5c9","object":"text_completion","created":1795229821,"model":"tiny","choices":[],"usage":{"prompt_tokens":6,"total_tokens":12,"completion_tokens":6},"system_fingerprint":"vllm-0.32.0-537e498c"}"#,
    ];

    #[test]
    fn recorded_events_are_read() {
        let reader = reader(&[90, 308, 369, 359, 363, 353], None);
        let first = reader.event(SEEN[0].as_bytes()).unwrap();
        assert_eq!((ids(&first), first.finish), (vec![1489], None));
        assert_eq!(reader.event(SEEN[1].as_bytes()).unwrap().finish, Some(Finish::Length));
        let last = reader.event(SEEN[2].as_bytes()).unwrap();
        assert_eq!((last.counts.prompt_tokens, last.counts.answer_tokens), (Some(6), Some(6)));
        assert_eq!((last.counts.cached_tokens, last.tokens.len()), (None, 0));
    }

    /// A miss looked like an engine that counts nothing.
    #[test]
    fn an_engine_that_has_counted_cached_tokens_leaves_out_only_a_count_of_zero() {
        let reader = reader(&[1, 2], None);
        let cached = |details: &str| {
            let usage = format!(r#"{{"usage":{{"prompt_tokens":2,"completion_tokens":1{details}}}}}"#);
            reader.event(usage.as_bytes()).unwrap().counts.cached_tokens
        };
        assert_eq!(cached(""), None);
        assert_eq!(cached(r#","prompt_tokens_details":{"cached_tokens":1}"#), Some(1));
        assert_eq!((cached(""), cached(r#","prompt_tokens_details":null"#)), (Some(0), Some(0)));
    }

    #[test]
    fn another_prompt_is_noticed() {
        let other = reader(&[90, 308, 369, 359, 363, 354], None);
        assert_eq!(other.event(SEEN[0].as_bytes()).unwrap_err().kind, Kind::Bug);
        assert!(reader(&[1], None).event(SEEN[2].as_bytes()).unwrap_err().text.contains("counts 6"));
    }

    #[test]
    fn a_prompt_that_is_repeated_is_compared_however_it_is_written() {
        let prompt = [90, 308, 369, 359, 363, 353];
        let list = "[90,308,369,359,363,353]";
        assert!(SEEN[0].contains(list));
        assert!(reader(&prompt, None).without_echo(SEEN[0].as_bytes()).is_some(), "the quick way");
        for spaced in
            ["[90, 308,369,359,363,353]", "[ 90,308,369,359,363,\n353 ]", " [90,308,369,359,363,353]", "null"]
        {
            let read = reader(&prompt, None).event(SEEN[0].replace(list, spaced).as_bytes()).unwrap();
            assert_eq!(ids(&read), vec![1489], "{spaced}");
        }
        for other in [
            "[90,308,369,359,363]",
            "[90,308,369,359,363,353,7]",
            "[90,308,369,359,363,3530]",
            "[90,308,369,359,363,353",
            "[90,308,369,359,363,\"353\"]",
            "[90,308,369,359,363,-353]",
            "{}",
            "[]",
        ] {
            let error = reader(&prompt, None).event(SEEN[0].replace(list, other).as_bytes()).unwrap_err();
            assert_eq!(error.kind, Kind::Bug, "{other}");
        }
        // A text that looks like it.
        let said = SEEN[0].replace("\" lat\"", r#""\"prompt_token_ids\":[1]""#);
        assert_eq!(ids(&reader(&prompt, None).event(said.as_bytes()).unwrap()), vec![1489]);
    }

    #[test]
    fn a_prefill_says_where_its_blocks_are() {
        // The first case of pd_nixl.json, without what is not read.
        let seen = r#"{"choices":[{"index":0,"text":" router","logprobs":null,"finish_reason":"length","token_ids":[354]}],
            "usage":{"prompt_tokens":2,"total_tokens":3,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":1}},
            "kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1]]}}"#;
        let whole = reader(&[7, 8], None).whole(seen.as_bytes()).unwrap();
        assert_eq!(
            whole.kv_transfer_params.unwrap().get(),
            r#"{"do_remote_prefill":true,"remote_block_ids":[[1]]}"#
        );
        assert_eq!(whole.progress.counts.cached_tokens, Some(1));
        let without = seen.replace("\"kv_transfer_params\":{", "\"kv_transfer_params\":null,\"x\":{");
        assert!(reader(&[7, 8], None).whole(without.as_bytes()).unwrap().kv_transfer_params.is_none());
    }

    #[test]
    fn logprobs_come_in_two_shapes() {
        let openai = r#"{"choices":[{"text":"ab","token_ids":[5,6],"logprobs":{"text_offset":[0,1],
            "tokens":["token_id:5","token_id:6"],"token_logprobs":[-0.5,-0.25],
            "top_logprobs":[{"token_id:4":-0.1,"token_id:5":-0.5,"token_id:9":null},{"token_id:6":-0.25}]}}]}"#;
        let read = reader(&[1], Some(1)).event(openai.as_bytes()).unwrap();
        assert_eq!(read.tokens[0].logprob, Some(TokenLogprob { logprob: -0.5, top: vec![(4, -0.1)] }));
        assert_eq!(read.tokens[1].logprob, Some(TokenLogprob { logprob: -0.25, top: vec![(6, -0.25)] }));
        let unasked =
            reader(&[1], None).event(openai.replace("\"token_ids\":[5,6],", "").as_bytes()).unwrap();
        assert_eq!(ids(&unasked), [5, 6]);
        let content = r#"{"choices":[{"text":"a","logprobs":{"content":[{"id":5,"token":"a","logprob":-0.5,
            "top_logprobs":[{"id":5,"logprob":-0.5},{"id":9,"logprob":-0.75}]}]}}]}"#;
        let read = reader(&[1], Some(2)).event(content.as_bytes()).unwrap();
        assert_eq!(read.tokens[0].id, 5);
        assert_eq!(read.tokens[0].logprob.as_ref().unwrap().top, vec![(5, -0.5), (9, -0.75)]);
    }

    #[test]
    fn text_without_ids_is_an_error_with_a_remedy() {
        let error = reader(&[1], None).event(br#"{"choices":[{"text":"hello"}]}"#).unwrap_err();
        assert!(error.remedy.contains("return_token_ids"), "{error}");
        let nothing =
            reader(&[1], None).event(br#"{"choices":[{"text":"","finish_reason":"stop"}]}"#).unwrap();
        assert_eq!((nothing.tokens.len(), nothing.finish), (0, Some(Finish::Stop)));
    }

    #[test]
    fn fewer_logprobs_than_tokens_are_an_error() {
        let one = r#"{"choices":[{"token_ids":[5,6],"logprobs":{"tokens":["token_id:5"],"token_logprobs":[-0.5]}}]}"#;
        assert!(
            reader(&[1], Some(0)).event(one.as_bytes()).unwrap_err().text.contains("1 logprobs came for 2")
        );
    }

    #[test]
    fn prompt_logprobs_are_found_by_token() {
        let seen = r#"{"choices":[{"text":"","token_ids":[3],"logprobs":{"tokens":["token_id:3"],"token_logprobs":[-1.0]},
            "prompt_logprobs":[null,{"8":{"logprob":-2.0,"rank":3,"decoded_token":"x"},"4":{"logprob":-0.5,"rank":1}}]}]}"#;
        let read = reader(&[7, 8], Some(1)).event(seen.as_bytes()).unwrap();
        assert_eq!(read.prompt_logprobs, Some(vec![TokenLogprob { logprob: -2.0, top: vec![(4, -0.5)] }]));
        assert!(reader(&[7, 9], Some(1)).event(seen.as_bytes()).is_err());
        assert!(reader(&[7, 8, 9], Some(1)).event(seen.as_bytes()).is_err());
    }

    #[test]
    fn errors_come_in_two_shapes() {
        for text in [
            r#"{"error":{"message":"too long","code":400}}"#,
            r#"{"object":"error","message":"too long","code":400}"#,
        ] {
            let error = reader(&[1], None).event(text.as_bytes()).unwrap_err();
            assert_eq!((error.kind, error.text.ends_with("too long")), (Kind::Invalid, true), "{error}");
        }
        assert!(reader(&[1], None).event(br#"{"error":null,"choices":[]}"#).is_ok());
    }

    #[test]
    fn several_answers_and_unreadable_ones_are_errors() {
        for bad in [
            r#"{"choices":[{"index":1}]}"#,
            r#"{"choices":[{},{}]}"#,
            "{",
            "[]",
            r#"{"choices":[{"token_ids":[-1]}]}"#,
        ] {
            assert_eq!(reader(&[1], None).event(bad.as_bytes()).unwrap_err().kind, Kind::Bug, "{bad}");
        }
    }
}
