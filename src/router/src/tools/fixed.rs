//! A fixed text that must come next.

use super::value::Step;

/// Reads the text, after whitespace.
#[derive(Debug)]
pub(super) struct FixedText {
    text: &'static str,
    at: usize,
}

impl FixedText {
    pub(super) fn new(text: &'static str) -> Self {
        Self { text, at: 0 }
    }

    pub(super) fn push(&mut self, c: char) -> Step {
        if self.at == 0 && c.is_whitespace() {
            return Step::More;
        }
        if !self.text[self.at..].starts_with(c) {
            return Step::Broken;
        }
        self.at += c.len_utf8();
        if self.at == self.text.len() { Step::Done } else { Step::More }
    }
}
