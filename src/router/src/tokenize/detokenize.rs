//! Tokens to text, one at a time, as the whole would read.

use std::sync::Arc;

use super::table::push_utf8;
use super::{Tokenization, Vocabulary};

/// Tokens that may wait for the rest of a character before they are shown as they are: what a decoder
/// is asked to decode again is bounded by it.
const MAX_WAITING: usize = 12;

/// Tokens at a prompt's end that an answer's text is decoded after. Some of them may have no text.
pub(crate) const PROMPT_TAIL: usize = 16;

/// The state of one answer's text. A token costs the same at any place of it.
#[derive(Debug)]
pub(crate) struct Detokenizer {
    skip_special: bool,
    /// Special tokens that are written all the same, ascending.
    seen: Arc<[u32]>,
    /// Bytes of an unfinished character.
    pending: Vec<u8>,
    /// For vocabularies with a decoder: tokens that the next one's text depends on,
    pub(super) window: Vec<u32>,
    /// of which these have been shown,
    shown_tokens: usize,
    /// and their text's length.
    shown_bytes: usize,
}

impl Detokenizer {
    /// Leaves special tokens out, or writes their names.
    pub(crate) fn new(skip_special: bool) -> Self {
        Self::seeing(skip_special, Arc::default())
    }

    /// A detokenizer that writes the special tokens in `seen`, which ascends.
    pub(crate) fn seeing(skip_special: bool, seen: Arc<[u32]>) -> Self {
        let (pending, window) = (Vec::new(), Vec::new());
        Self { skip_special, seen, pending, window, shown_tokens: 0, shown_bytes: 0 }
    }

    /// This detokenizer after a prompt that ends with `tail`, which is not shown. Decoders read a text's beginning
    /// otherwise than the rest: many take a space away there.
    pub(crate) fn after(mut self, with: &Tokenization, tail: &[u32]) -> Self {
        // One character whose beginning is cut off would spoil all that stand beside it in bytes.
        let is_cut = |token: &&u32| with.table.bytes(**token).first().is_some_and(|byte| byte & 0xc0 == 0x80);
        let mut text = String::new();
        for &token in tail.iter().skip_while(is_cut) {
            if self.leaves_out(with, token) {
                continue;
            }
            push_utf8(&mut self.pending, with.table.bytes(token), &mut text);
            if !with.table_decodes {
                self.window.push(token);
            }
        }
        if !with.table_decodes {
            // Each byte of an unfinished character is a token. The answer may complete it.
            self.shown_tokens = self.window.len().saturating_sub(self.pending.len());
            self.pending.clear();
            self.shown_bytes = decode(with, &self.window[..self.shown_tokens]).len();
        }
        self
    }

    /// Whether the token has no text: a special one that is not written, or one outside the vocabulary.
    fn leaves_out(&self, with: &Tokenization, token: u32) -> bool {
        let hidden = self.skip_special && with.table.is_special(token);
        token as usize >= with.table.len() || hidden && self.seen.binary_search(&token).is_err()
    }

    /// Takes in a token and appends the text that is whole with it.
    pub(crate) fn push(&mut self, with: &Tokenization, token: u32, out: &mut String) {
        // Such a token must not wait either: twelve of them would show half of the character after them.
        if self.leaves_out(with, token) {
            return;
        }
        if with.table_decodes {
            push_utf8(&mut self.pending, with.table.bytes(token), out);
            return;
        }
        self.window.push(token);
        let text = decode(with, &self.window);
        let unfinished = text.len() <= self.shown_bytes || text.ends_with(char::REPLACEMENT_CHARACTER);
        if unfinished && self.window.len() - self.shown_tokens < MAX_WAITING {
            return;
        }
        out.push_str(text.get(self.shown_bytes..).unwrap_or_default());
        self.window.drain(..self.shown_tokens);
        self.shown_tokens = self.window.len();
        self.shown_bytes = decode(with, &self.window).len();
    }

    /// The text is over: appends what was waited for.
    pub(crate) fn finish(&mut self, with: &Tokenization, out: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
        if self.window.len() > self.shown_tokens {
            let text = decode(with, &self.window);
            out.push_str(text.get(self.shown_bytes..).unwrap_or_default());
            self.shown_tokens = self.window.len();
            self.shown_bytes = text.len();
        }
    }
}

/// The text of tokens, of which none is left out.
fn decode(with: &Tokenization, tokens: &[u32]) -> String {
    let Vocabulary::Folder(folder) = &with.vocabulary else { return String::new() };
    // A decoder that fails on a token has no text for it.
    folder.encoder.reference().decode(tokens, false).unwrap_or_default()
}
