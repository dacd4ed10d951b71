//! Calls as a list of Python's: `[weather(city="Ulm", days=2), now()]`.

use super::draft::Draft;
use super::value::{Dialect, Step, Value};

/// Longest name of a function or an argument.
const MAX_NAME_BYTES: usize = 256;

/// Reads such a list, which has one call at least.
#[derive(Debug)]
pub(super) struct PythonList {
    at: PythonState,
    /// The name that is being read.
    word: String,
    function: String,
    /// Arguments as JSON, without the part that was handed on.
    raw: String,
    name_sent: bool,
}

#[derive(Debug)]
enum PythonState {
    Open,
    /// In a function's name; true once it has a character, and once it is over.
    Function {
        begun: bool,
        over: bool,
    },
    Argument {
        begun: bool,
        over: bool,
    },
    Value(Value),
    AfterValue,
    AfterCall,
}

impl PythonList {
    pub(super) fn new() -> Self {
        Self {
            at: PythonState::Open,
            word: String::new(),
            function: String::new(),
            raw: String::new(),
            name_sent: false,
        }
    }

    /// Whether all was read but for what closes the list.
    pub(super) fn is_closing(&self) -> bool {
        matches!(self.at, PythonState::AfterCall)
    }

    pub(super) fn push(&mut self, c: char, draft: &mut Draft) -> Step {
        if let PythonState::Value(value) = &mut self.at {
            let step = value.push(c, &mut self.raw);
            self.push_arguments(draft);
            return match step {
                Step::Done => self.go_on(PythonState::AfterValue),
                Step::Past => {
                    self.at = PythonState::AfterValue;
                    self.push(c, draft)
                }
                step => step,
            };
        }
        if matches!(c, ' ' | '\t' | '\n' | '\r') {
            if let PythonState::Function { begun: true, over }
            | PythonState::Argument { begun: true, over, .. } = &mut self.at
            {
                *over = true;
            }
            return Step::More;
        }
        match self.at {
            PythonState::Open if c == '[' => self.go_on(PythonState::Function { begun: false, over: false }),
            PythonState::Function { begun: true, .. } if c == '(' => self.open_call(),
            PythonState::Function { begun, over: false } if in_name(c, begun, true) => {
                self.in_word(c, PythonState::Function { begun: true, over: false })
            }
            // Python takes a comma after the last argument.
            PythonState::Argument { begun: false, .. } | PythonState::AfterValue if c == ')' => {
                self.close_call(draft)
            }
            PythonState::Argument { begun: true, .. } if c == '=' => self.open_value(draft),
            PythonState::Argument { begun, over: false } if in_name(c, begun, false) => {
                self.in_word(c, PythonState::Argument { begun: true, over: false })
            }
            PythonState::AfterValue if c == ',' => {
                self.go_on(PythonState::Argument { begun: false, over: false })
            }
            PythonState::AfterCall if c == ',' => {
                self.go_on(PythonState::Function { begun: false, over: false })
            }
            PythonState::AfterCall if c == ']' => Step::Done,
            _ => Step::Broken,
        }
    }

    fn go_on(&mut self, at: PythonState) -> Step {
        self.at = at;
        Step::More
    }

    fn in_word(&mut self, c: char, at: PythonState) -> Step {
        self.word.push(c);
        if self.word.len() > MAX_NAME_BYTES { Step::Broken } else { self.go_on(at) }
    }

    fn open_call(&mut self) -> Step {
        self.function = std::mem::take(&mut self.word);
        self.raw.push('{');
        self.name_sent = false;
        self.go_on(PythonState::Argument { begun: false, over: false })
    }

    /// With its first argument it is sure to be a call.
    fn open_value(&mut self, draft: &mut Draft) -> Step {
        self.raw.push_str(if self.name_sent { ", \"" } else { "\"" });
        self.raw.push_str(&std::mem::take(&mut self.word));
        self.raw.push_str("\": ");
        self.push_name(draft);
        self.push_arguments(draft);
        self.go_on(PythonState::Value(Value::new(Dialect::Python)))
    }

    fn push_name(&mut self, draft: &mut Draft) {
        if !self.name_sent {
            self.name_sent = true;
            draft.name(std::mem::take(&mut self.function));
        }
    }

    fn push_arguments(&mut self, draft: &mut Draft) {
        draft.arguments(&mut self.raw);
    }

    fn close_call(&mut self, draft: &mut Draft) -> Step {
        self.raw.push('}');
        self.push_name(draft);
        self.push_arguments(draft);
        draft.end();
        self.go_on(PythonState::AfterCall)
    }
}

/// Names are Python's; those of functions may have dots and dashes, as tools do.
fn in_name(c: char, begun: bool, function: bool) -> bool {
    c == '_' || c.is_alphabetic() || (begun && (c.is_alphanumeric() || (function && matches!(c, '.' | '-'))))
}
