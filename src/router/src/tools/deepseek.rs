//! Reads the text after DeepSeek's mark: calls between marks of their own. V3 and R1 write them as `function`, mark,
//! name, and arguments in a code fence; V3.1 as name, mark, arguments.

use super::draft::Draft;
use super::fixed::FixedText;
use super::value::{Dialect, Step, Value};

/// Before all calls.
pub(super) const CALLS_BEGIN: &str = "<｜tool▁calls▁begin｜>";
/// After them.
pub(super) const CALLS_END: &str = "<｜tool▁calls▁end｜>";
/// Before one call.
pub(super) const CALL_BEGIN: &str = "<｜tool▁call▁begin｜>";
/// After it.
pub(super) const CALL_END: &str = "<｜tool▁call▁end｜>";
/// Between its kind and its name, or its name and its arguments.
pub(super) const SEPARATOR: &str = "<｜tool▁sep｜>";
/// The fence that V3 puts around the arguments.
const FENCE: &str = "```json";
const FENCE_END: &str = "```";
/// Longest name with the mark after it.
const MAX_NAME_BYTES: usize = 256;

#[derive(Debug)]
pub(super) struct DeepSeek {
    at: DeepseekState,
    word: String,
    fenced: bool,
}

#[derive(Debug)]
enum DeepseekState {
    Begin(FixedText),
    /// Up to the separator.
    First,
    /// Up to the line's end.
    Name,
    Fence(FixedText),
    Arguments {
        raw: String,
        value: Value,
        begun: bool,
    },
    FenceEnd(FixedText),
    End(FixedText),
    /// Up to the next call's mark, or the last mark.
    Next,
}

impl DeepSeek {
    pub(super) fn new() -> Self {
        Self { at: DeepseekState::Begin(FixedText::new(CALL_BEGIN)), word: String::new(), fenced: false }
    }

    /// Whether all was read but for marks at the end.
    pub(super) fn is_closing(&self) -> bool {
        matches!(self.at, DeepseekState::FenceEnd(_) | DeepseekState::End(_) | DeepseekState::Next)
    }

    pub(super) fn push(&mut self, c: char, draft: &mut Draft) -> Step {
        let (step, then) = match &mut self.at {
            DeepseekState::Begin(mark) => (mark.push(c), DeepseekState::First),
            DeepseekState::Fence(mark) => (mark.push(c), arguments()),
            DeepseekState::FenceEnd(mark) => (mark.push(c), DeepseekState::End(FixedText::new(CALL_END))),
            DeepseekState::End(mark) => (mark.push(c), DeepseekState::Next),
            DeepseekState::First => return self.first(c),
            DeepseekState::Name => return self.name(c),
            DeepseekState::Arguments { .. } => return self.arguments(c, draft),
            DeepseekState::Next => return self.next(c),
        };
        self.after(step, then)
    }

    fn after(&mut self, step: Step, then: DeepseekState) -> Step {
        if step != Step::Done {
            return step;
        }
        self.at = then;
        Step::More
    }

    fn first(&mut self, c: char) -> Step {
        self.word.push(c);
        if self.word.len() > MAX_NAME_BYTES {
            return Step::Broken;
        }
        let Some(first) = self.word.strip_suffix(SEPARATOR) else { return Step::More };
        self.fenced = first.trim() == "function";
        if self.fenced {
            self.word.clear();
            self.at = DeepseekState::Name;
        } else {
            self.word = first.trim().to_owned();
            self.at = arguments();
        }
        Step::More
    }

    fn name(&mut self, c: char) -> Step {
        if c == '\n' {
            self.word = self.word.trim().to_owned();
            self.at = DeepseekState::Fence(FixedText::new(FENCE));
            return Step::More;
        }
        self.word.push(c);
        if self.word.len() > MAX_NAME_BYTES { Step::Broken } else { Step::More }
    }

    fn arguments(&mut self, c: char, draft: &mut Draft) -> Step {
        let DeepseekState::Arguments { raw, value, begun } = &mut self.at else { return Step::Broken };
        if !*begun {
            if matches!(c, ' ' | '\t' | '\n' | '\r') {
                return Step::More;
            }
            if c != '{' {
                return Step::Broken;
            }
            *begun = true;
            draft.name(std::mem::take(&mut self.word));
        }
        let step = value.push(c, raw);
        draft.arguments(raw);
        if step != Step::Done {
            return step;
        }
        draft.end();
        let fence = || DeepseekState::FenceEnd(FixedText::new(FENCE_END));
        self.at = if self.fenced { fence() } else { DeepseekState::End(FixedText::new(CALL_END)) };
        Step::More
    }

    fn next(&mut self, c: char) -> Step {
        if self.word.is_empty() && c.is_whitespace() {
            return Step::More;
        }
        self.word.push(c);
        if self.word == CALLS_END {
            return Step::Done;
        }
        if self.word == CALL_BEGIN {
            self.word.clear();
            self.at = DeepseekState::First;
        } else if !CALL_BEGIN.starts_with(&self.word) && !CALLS_END.starts_with(&self.word) {
            return Step::Broken;
        }
        Step::More
    }
}

fn arguments() -> DeepseekState {
    DeepseekState::Arguments { raw: String::new(), value: Value::new(Dialect::Json), begun: false }
}
