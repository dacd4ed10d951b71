//! Tokens to text, one at a time, as the whole would read.

use std::sync::Arc;

use super::table::push_utf8;
use super::{Tokenization, Vocabulary};

/// Tokens that may wait for the rest of a character before they are shown as they are: what a decoder
/// is asked to decode again is bounded by it.
const MAX_WAITING: usize = 12;

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
        let text = self.decode(with);
        let unfinished = text.len() <= self.shown_bytes || text.ends_with(char::REPLACEMENT_CHARACTER);
        if unfinished && self.window.len() - self.shown_tokens < MAX_WAITING {
            return;
        }
        out.push_str(text.get(self.shown_bytes..).unwrap_or_default());
        self.window.drain(..self.shown_tokens);
        self.shown_tokens = self.window.len();
        self.shown_bytes = self.decode(with).len();
    }

    /// The text is over: appends what was waited for.
    pub(crate) fn finish(&mut self, with: &Tokenization, out: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
        if self.window.len() > self.shown_tokens {
            let text = self.decode(with);
            out.push_str(text.get(self.shown_bytes..).unwrap_or_default());
            self.shown_tokens = self.window.len();
            self.shown_bytes = text.len();
        }
    }

    fn decode(&self, with: &Tokenization) -> String {
        let Vocabulary::Folder(folder) = &with.vocabulary else { return String::new() };
        // Special tokens that are not written never came in. A decoder that fails on a token has no text for it.
        folder.encoder.reference().decode(&self.window, false).unwrap_or_default()
    }
}
