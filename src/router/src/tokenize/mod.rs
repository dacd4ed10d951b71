//! Text to tokens and back, as the engine's own tokenizer does it.

mod calendar;
mod conversation;
mod detokenize;
mod encoder;
mod folder;
mod least;
mod lru;
mod prompt;
mod sample;
mod splitter;
mod table;
pub(crate) mod template;

use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(crate) use detokenize::{Detokenizer, PROMPT_TAIL};
pub use prompt::{Lineage, Prompt};
pub(crate) use prompt::{from_tokens, session_number};
pub use sample::Sample;

use crate::aside::is_in_background;
use crate::chat::{Chat, ChatError, render_plain};
use crate::tools::ToolFormat;
use folder::{Folder, LoadedFolder};
use prompt::{PartLookup, PrefixCache};
use splitter::{Mark, Splitter};
use table::TokenTable;
use tokio::sync::Semaphore;

/// Special tokens of the built-in vocabulary, from 256 on.
const BUILT_IN_MARKS: [&str; 4] = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"];
const BEGIN: u32 = 256;
/// Tokens of the built-in vocabulary: bytes, marks, and room that has no text.
const BUILT_IN_TOKENS: u32 = 512;
/// Default for the maximum size of the prefix cache.
const CACHE_BYTES: usize = 64 << 20;
/// A prompt with more than this to be tokenised does not hold up other calls of the same thread.
const ASIDE_BYTES: usize = 16 << 10;
/// `ASIDE_BYTES` where the fast encoder is in use.
const FAST_ASIDE_BYTES: usize = 64 << 10;
/// `ASIDE_BYTES` for the built-in vocabulary, which takes as long for this much.
const BUILT_IN_ASIDE_BYTES: usize = 256 << 10;

/// Why a model folder cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: {message}; give the folder of a model with tokenizer.json, or none for the built-in bytes", .file.display())]
pub struct LoadError {
    file: PathBuf,
    message: String,
}

impl LoadError {
    pub(crate) fn new(file: &Path, message: impl Into<String>) -> Self {
        Self { file: file.to_owned(), message: message.into() }
    }
}

/// A vocabulary with its chat template and a cache of tokenised prefixes.
pub struct Tokenization {
    vocabulary: Vocabulary,
    table: TokenTable,
    table_decodes: bool,
    /// Bytes of text that a token stands for at most, where that is known.
    longest_token_bytes: Option<usize>,
    splitter: Splitter,
    cache: PrefixCache,
    /// As many prompts are tokenised aside at once as there are cores; others wait for their turn.
    turns: Arc<Semaphore>,
}

/// A prompt whose known parts have been looked up.
struct PartialPrompt {
    ranges: Vec<std::ops::Range<usize>>,
    known: PartLookup,
    add_special_tokens: bool,
}

impl PartialPrompt {
    fn missing_bytes(&self) -> usize {
        self.known.missing().map(|at| self.ranges[at].len()).sum()
    }
}

fn turns() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(std::thread::available_parallelism().map_or(1, std::num::NonZero::get)))
}

enum Vocabulary {
    Bytes,
    Folder(Box<Folder>),
}

impl Tokenization {
    /// The built-in vocabulary: a token for each byte, and four marks (`<|begin|>` 256, `<|end|>` 257,
    /// `<|im_start|>` 258, `<|im_end|>` 259) among 512 tokens. Its chats are ChatML.
    #[must_use]
    pub fn bytes() -> Self {
        let byte = |byte: u8| (vec![byte].into(), false);
        let marks = BUILT_IN_MARKS.iter().map(|mark| (mark.as_bytes().into(), true));
        let rest =
            (0..BUILT_IN_TOKENS as usize - 256 - BUILT_IN_MARKS.len()).map(|_| (Vec::new().into(), true));
        let mark = |(at, text): (usize, &&str)| Mark {
            text: (*text).to_owned(),
            token: 256 + at as u32,
            cuts: true,
        };
        let table = TokenTable::new((0..=255).map(byte).chain(marks).chain(rest));
        Self {
            vocabulary: Vocabulary::Bytes,
            longest_token_bytes: Some(table.longest()),
            table,
            table_decodes: true,
            splitter: Splitter::new(BUILT_IN_MARKS.iter().enumerate().map(mark).collect()),
            cache: PrefixCache::new(CACHE_BYTES),
            turns: turns(),
        }
    }

    /// The vocabulary and chat template in a folder as Hugging Face lays it out: `tokenizer.json`, and
    /// if there `tokenizer_config.json` and `chat_template.jinja`.
    pub fn folder(path: &Path) -> Result<Self, LoadError> {
        let LoadedFolder { folder, table, table_decodes, longest_token_bytes, splitter } =
            folder::load(path)?;
        Ok(Self {
            vocabulary: Vocabulary::Folder(Box::new(folder)),
            table,
            table_decodes,
            longest_token_bytes,
            splitter,
            cache: PrefixCache::new(CACHE_BYTES),
            turns: turns(),
        })
    }

    /// This tokenization with a prefix cache of at most `capacity_bytes`.
    #[cfg(test)]
    fn with_cache_bytes(mut self, capacity_bytes: usize) -> Self {
        self.cache = PrefixCache::new(capacity_bytes);
        self
    }

    /// Ids are below this.
    #[must_use]
    pub fn vocab_tokens(&self) -> u32 {
        match &self.vocabulary {
            Vocabulary::Bytes => BUILT_IN_TOKENS,
            Vocabulary::Folder(folder) => folder.vocab_tokens,
        }
    }

    /// As many tokens as a text of so many bytes has at least, by the longest token that there is.
    pub(crate) fn least_tokens(&self, text_bytes: usize) -> usize {
        self.longest_token_bytes.map_or(0, |longest| text_bytes.div_ceil(longest))
    }

    /// Tokens that end an answer as far as the tokenizer knows.
    #[must_use]
    pub fn end_tokens(&self) -> Vec<u32> {
        match &self.vocabulary {
            Vocabulary::Bytes => vec![257, 259],
            Vocabulary::Folder(folder) => folder.end_token.into_iter().collect(),
        }
    }

    /// Parts of prompts that were found in the cache, and that were not.
    #[must_use]
    pub fn cache_counts(&self) -> (u64, u64) {
        self.cache.counts()
    }

    /// The chat as the model reads it.
    pub(crate) fn render(&self, chat: &Chat<'_>) -> Result<String, ChatError> {
        match &self.vocabulary {
            Vocabulary::Bytes => Ok(render_plain(chat)),
            Vocabulary::Folder(folder) => match &folder.template {
                Some(template) => template.render(chat),
                None => Err(ChatError {
                    param: "messages",
                    message: "the model has no chat template; use /v1/completions".to_owned(),
                }),
            },
        }
    }

    /// Whether a chat may read otherwise tomorrow.
    fn uses_time(&self) -> bool {
        match &self.vocabulary {
            Vocabulary::Bytes => false,
            Vocabulary::Folder(folder) => folder.template.as_ref().is_some_and(|one| one.uses_time),
        }
    }

    /// The format in which the model writes tool calls, as far as its chat template shows it.
    pub(crate) fn tool_format(&self) -> Option<ToolFormat> {
        match &self.vocabulary {
            Vocabulary::Bytes => Some(ToolFormat::Hermes),
            Vocabulary::Folder(folder) => folder.template.as_ref()?.tool_format,
        }
    }

    /// The special tokens whose text is one of `texts`, ascending.
    pub(crate) fn special_tokens(&self, texts: &[&str]) -> Vec<u32> {
        let Vocabulary::Folder(folder) = &self.vocabulary else { return Vec::new() };
        let ids = texts.iter().filter_map(|text| folder.encoder.reference().token_to_id(text));
        let mut found: Vec<u32> = ids.filter(|&id| self.table.is_special(id)).collect();
        found.sort_unstable();
        found
    }

    /// The prompt that `text` is, with the tokens that the tokenizer puts around a text when `add_special_tokens`.
    /// Only what no earlier prompt began with is tokenised, and much of it aside from this thread.
    pub(crate) async fn prompt(
        self: &Arc<Self>,
        text: String,
        add_special_tokens: bool,
        lineage: Lineage,
    ) -> Result<Prompt, String> {
        let begun = self.begin(&text, add_special_tokens, &lineage);
        let limit = match &self.vocabulary {
            Vocabulary::Bytes => BUILT_IN_ASIDE_BYTES,
            Vocabulary::Folder(folder) if folder.encoder.is_fast() => FAST_ASIDE_BYTES,
            Vocabulary::Folder(_) => ASIDE_BYTES,
        };
        if begun.missing_bytes() <= limit || is_in_background() {
            return self.complete(&text, begun, &lineage);
        }
        let turn = Arc::clone(&self.turns).acquire_owned().await.map_err(|e| e.to_string())?;
        let this = Arc::clone(self);
        let aside = tokio::task::spawn_blocking(move || {
            let prompt = this.complete(&text, begun, &lineage);
            drop(turn);
            prompt
        });
        aside.await.map_err(|e| format!("tokenising stopped: {e}"))?
    }

    /// Like `prompt`, but on this thread and without waiting.
    pub fn prompt_now(
        &self,
        text: &str,
        add_special_tokens: bool,
        lineage: &Lineage,
    ) -> Result<Prompt, String> {
        self.complete(text, self.begin(text, add_special_tokens, lineage), lineage)
    }

    /// Looks up what is known of the prompt.
    fn begin(&self, text: &str, add_special_tokens: bool, lineage: &Lineage) -> PartialPrompt {
        let ranges = self.splitter.parts(text);
        let parts: Vec<&str> = ranges.iter().map(|range| &text[range.clone()]).collect();
        let known = self.cache.look_up(&parts, self.affixes(add_special_tokens).0, lineage);
        PartialPrompt { ranges, known, add_special_tokens }
    }

    /// Tokenises the rest.
    fn complete(&self, text: &str, begun: PartialPrompt, lineage: &Lineage) -> Result<Prompt, String> {
        let PartialPrompt { ranges, known, add_special_tokens } = begun;
        let encode = |at: usize| self.encode_part(&text[ranges[at].clone()]);
        let fresh: Result<Vec<Vec<u32>>, String> = known.missing().map(encode).collect();
        Ok(known.assemble(&self.cache, fresh?, self.affixes(add_special_tokens), lineage))
    }

    fn affixes(&self, add_special_tokens: bool) -> (&[u32], &[u32]) {
        match &self.vocabulary {
            _ if !add_special_tokens => (&[], &[]),
            Vocabulary::Bytes => (&[BEGIN], &[]),
            Vocabulary::Folder(folder) => (&folder.affixes.0, &folder.affixes.1),
        }
    }

    fn encode_part(&self, text: &str) -> Result<Vec<u32>, String> {
        match &self.vocabulary {
            Vocabulary::Bytes => Ok(self.encode_bytes(text)),
            Vocabulary::Folder(folder) => folder.encoder.encode(text),
        }
    }

    fn encode_bytes(&self, text: &str) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(text.len());
        let mut from = 0;
        while let Some((at, mark)) = self.splitter.next(text, from) {
            tokens.extend(text.as_bytes()[from..at].iter().map(|&byte| u32::from(byte)));
            tokens.push(mark.token);
            from = at + mark.text.len();
        }
        tokens.extend(text.as_bytes()[from..].iter().map(|&byte| u32::from(byte)));
        tokens
    }

    /// The text of `tokens`; special ones are left out or written by name.
    #[must_use]
    pub fn decode(&self, tokens: &[u32], skip_special: bool) -> String {
        let mut detokenizer = Detokenizer::new(skip_special);
        let mut out = String::new();
        for &token in tokens {
            detokenizer.push(self, token, &mut out);
        }
        detokenizer.finish(self, &mut out);
        out
    }

    /// The token's own bytes; none for one without text.
    pub(crate) fn token_bytes(&self, token: u32) -> &[u8] {
        self.table.bytes(token)
    }
}

#[cfg(test)]
mod tests;
