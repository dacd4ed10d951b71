//! Reasoning before an answer, between `<think>` and `</think>`.

use crate::output_parsing::Parts;
use crate::tools::marks::Marks;

/// Whether reasoning is separated from content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningParser {
    /// It is not.
    #[default]
    None,
    /// Text between `<think>` and `</think>` at the answer's beginning is its reasoning. The opening tag may also be
    /// the prompt's end.
    Think,
}

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

impl ReasoningParser {
    /// The names of the values in a configuration.
    pub const NAMES: [&str; 2] = ["none", "think"];

    /// The one of that name; the error says which there are.
    pub fn from_name(name: &str) -> Result<Self, String> {
        match name {
            "none" => Ok(Self::None),
            "think" => Ok(Self::Think),
            _ => Err(format!("{name:?} is not a reasoning parser; use one of {}", Self::NAMES.join(", "))),
        }
    }

    /// How an answer to `prompt` is read: `None` as content, else whether the prompt has opened its
    /// reasoning.
    pub(crate) fn reasoning(self, prompt: &str) -> Option<bool> {
        (self == Self::Think).then(|| prompt.trim_end().ends_with(OPEN))
    }

    /// Texts that have to be seen even where they are special tokens.
    pub(crate) fn seen(self) -> &'static [&'static str] {
        match self {
            Self::None => &[],
            Self::Think => &[OPEN, CLOSE],
        }
    }
}

/// Separates one answer's reasoning from the rest. Whitespace around the tags belongs to them.
#[derive(Debug)]
pub(crate) struct ReasoningSplitter {
    at: ReasoningState,
    /// The prompt has opened it.
    opened: bool,
    /// The answer after it is JSON.
    is_json: bool,
    marks: Marks,
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReasoningState {
    /// Before anything but whitespace.
    Start,
    Reasoning {
        begun: bool,
    },
    Content {
        begun: bool,
    },
}

impl ReasoningSplitter {
    pub(crate) fn new(opened: bool, is_json: bool) -> Self {
        Self { at: ReasoningState::Start, opened, is_json, marks: Marks::default(), text: String::new() }
    }

    /// Takes in a piece of text, and appends to `rest` what is no reasoning.
    pub(crate) fn push(&mut self, piece: &str, parts: &mut Parts, rest: &mut String) {
        for (at, c) in piece.char_indices() {
            if self.at == (ReasoningState::Content { begun: true }) {
                rest.push_str(&piece[at..]);
                return;
            }
            self.one(c, parts, rest);
        }
    }

    fn one(&mut self, c: char, parts: &mut Parts, rest: &mut String) {
        match self.at {
            ReasoningState::Start => {
                self.text.clear();
                let found = self.marks.push(c, &[OPEN], None, &mut self.text);
                if found.is_some() {
                    self.marks.take();
                    self.at = ReasoningState::Reasoning { begun: false };
                } else if !self.text.is_empty() {
                    self.no_tag(parts, rest);
                }
            }
            ReasoningState::Reasoning { begun } => {
                if !begun && self.marks.is_empty() && c.is_whitespace() {
                    return;
                }
                self.at = ReasoningState::Reasoning { begun: true };
                self.text.clear();
                let found = self.marks.push(c, &[CLOSE], None, &mut self.text);
                parts.reasoning(&self.text);
                if found.is_some() {
                    self.marks.take();
                    self.at = ReasoningState::Content { begun: false };
                }
            }
            ReasoningState::Content { .. } => {
                if !c.is_whitespace() {
                    self.at = ReasoningState::Content { begun: true };
                    rest.push(c);
                }
            }
        }
    }

    /// The answer does not begin with a tag.
    fn no_tag(&mut self, parts: &mut Parts, rest: &mut String) {
        let text = std::mem::take(&mut self.text) + &self.marks.take();
        // An engine that does not know of reasoning holds the answer to JSON from its first token on.
        let begins_json = self.is_json && text.trim_start().starts_with(['{', '[']);
        if self.opened && !begins_json {
            self.at = ReasoningState::Reasoning { begun: false };
            for c in text.chars() {
                self.one(c, parts, rest);
            }
        } else {
            self.at = ReasoningState::Content { begun: true };
            rest.push_str(&text);
        }
    }

    /// The answer is over.
    pub(crate) fn finish(&mut self, parts: &mut Parts, rest: &mut String) {
        if self.at == ReasoningState::Start {
            self.no_tag(parts, rest);
        }
        let held = self.marks.take();
        match self.at {
            ReasoningState::Reasoning { .. } => parts.reasoning(&held),
            ReasoningState::Start | ReasoningState::Content { .. } => rest.push_str(&held),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output_parsing::{Message, OutputParser, OutputPlan};
    use proptest::prelude::*;

    fn read(pieces: &[&str], opened: bool) -> (Option<String>, Option<String>) {
        let mut output = OutputParser::new(&OutputPlan { reasoning: Some(opened), ..OutputPlan::default() });
        let mut parts = Vec::new();
        for piece in pieces {
            output.push(piece);
            parts.append(&mut output.take());
        }
        output.finish();
        parts.append(&mut output.take());
        let message = Message::of(parts);
        (message.reasoning, message.content)
    }

    #[test]
    fn reasoning_is_what_stands_between_the_tags() {
        let some = |text: &str| Some(text.to_owned());
        for (text, opened, reasoning, content) in [
            ("<think>\nwhy\n</think>\n\nso", false, some("why"), some("so")),
            ("\n<think>why</think>so </think>", false, some("why"), some("so </think>")),
            ("why\n</think>\n\nso <think>", true, some("why"), some("so <think>")),
            ("<think>why</think>so", true, some("why"), some("so")),
            ("so <think>why</think>", false, None, some("so <think>why</think>")),
            (" <thin", false, None, some(" <thin")),
            ("why < </thin", true, some("why < </thin"), some("")),
            ("<think>\n</think>\n", false, None, some("")),
            ("", true, None, some("")),
        ] {
            assert_eq!(read(&[text], opened), (reasoning, content), "{text:?}");
        }
    }

    #[test]
    fn an_answer_that_is_json_from_its_first_token_has_no_reasoning() {
        let read = |pieces: &[&str]| {
            let plan = OutputPlan { reasoning: Some(true), is_json: true, ..OutputPlan::default() };
            let mut output = OutputParser::new(&plan);
            pieces.iter().for_each(|piece| output.push(piece));
            output.finish();
            let message = Message::of(output.take());
            (message.reasoning, message.content.unwrap())
        };
        assert_eq!(read(&["\n", " {\"a\"", ":1}"]), (None, "\n {\"a\":1}".to_owned()));
        assert_eq!(read(&["[1]"]), (None, "[1]".to_owned()));
        let why = Some("why {".to_owned());
        assert_eq!(read(&["why {</think>\n{}"]), (why.clone(), "{}".to_owned()));
        assert_eq!(read(&["<think>why {</think>{}"]), (why.clone(), "{}".to_owned()));
        // Cut off within the thought.
        assert_eq!(read(&["why {"]), (why, String::new()));
    }

    #[test]
    fn the_prompt_may_open_it() {
        let think = ReasoningParser::Think;
        assert_eq!(think.reasoning("<|assistant|><think>\n"), Some(true));
        assert_eq!(think.reasoning("<|assistant|><think>\n\n</think>\n\n"), Some(false));
        assert_eq!(ReasoningParser::None.reasoning("<think>"), None);
        assert!(ReasoningParser::NAMES.iter().all(|name| ReasoningParser::from_name(name).is_ok()));
        assert!(ReasoningParser::from_name("Think").unwrap_err().contains("none, think"));
    }

    proptest! {
        #[test]
        fn any_split_reads_the_same(
            words in proptest::collection::vec(prop_oneof![Just("<think>"), Just("</think>"), Just("\n"), Just("<"), Just("é a"), Just("</thi")], 0..12),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..8),
            opened in any::<bool>(),
        ) {
            let text = words.concat();
            let mut ends: Vec<usize> = cuts.iter().map(|cut| text.floor_char_boundary(cut.index(text.len() + 1))).collect();
            ends.extend([0, text.len()]);
            ends.sort_unstable();
            let pieces: Vec<&str> = ends.windows(2).map(|ends| &text[ends[0]..ends[1]]).collect();
            prop_assert_eq!(read(&pieces, opened), read(&[&text], opened));
        }
    }
}
