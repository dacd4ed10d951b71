//! Reads the text after Mistral's mark: a list of objects, or since tokenizer version 11 a name, an optional id, and
//! arguments.

use super::draft::Draft;
use super::object::Object;
use super::value::{Dialect, Step, Value};

/// Before the arguments.
pub(super) const ARGUMENTS: &str = "[ARGS]";
/// Between name and id, in one version.
pub(super) const CALL_ID: &str = "[CALL_ID]";
/// Longest name, and longest text between it and the arguments.
const MAX_NAME_BYTES: usize = 256;

#[derive(Debug)]
pub(super) struct Mistral {
    at: MistralState,
}

#[derive(Debug)]
enum MistralState {
    Begin,
    /// Before an object of the list; true when it may be over.
    Item(Object),
    AfterItem,
    /// In a name, or in what stands between it and the arguments.
    Name(String),
    Mark {
        name: String,
        mark: String,
    },
    Arguments {
        raw: String,
        value: Value,
        name: Option<String>,
    },
}

impl Mistral {
    pub(super) fn new() -> Self {
        Self { at: MistralState::Begin }
    }

    /// Whether all was read but for what closes the list.
    pub(super) fn is_closing(&self) -> bool {
        matches!(self.at, MistralState::AfterItem)
    }

    pub(super) fn push(&mut self, c: char, draft: &mut Draft) -> Step {
        match &mut self.at {
            MistralState::Begin | MistralState::AfterItem if c.is_whitespace() => Step::More,
            MistralState::Begin if c == '[' => self.go_on(MistralState::Item(Object::new(false))),
            MistralState::Begin if in_name(c) => self.go_on(MistralState::Name(c.to_string())),
            MistralState::Item(object) => match object.push(c, draft) {
                Step::Done => self.go_on(MistralState::AfterItem),
                step => step,
            },
            MistralState::AfterItem if c == ',' => self.go_on(MistralState::Item(Object::new(false))),
            MistralState::AfterItem if c == ']' => Step::Done,
            MistralState::Name(name) => {
                if in_name(c) && name.len() < MAX_NAME_BYTES {
                    name.push(c);
                    return Step::More;
                }
                let name = std::mem::take(name);
                match c {
                    '[' => self.go_on(MistralState::Mark { name, mark: c.to_string() }),
                    _ => self.begin_arguments(name, c, draft),
                }
            }
            MistralState::Mark { name, mark } => {
                mark.push(c);
                if mark.ends_with(ARGUMENTS) && (mark == ARGUMENTS || mark.starts_with(CALL_ID)) {
                    let (name, raw) = (std::mem::take(name), String::new());
                    return self.go_on(arguments(name, raw));
                }
                let begins = |whole: &str| whole.starts_with(&**mark) || mark.starts_with(whole);
                let fits = begins(ARGUMENTS) || begins(CALL_ID);
                if fits && mark.len() <= MAX_NAME_BYTES { Step::More } else { Step::Broken }
            }
            MistralState::Arguments { .. } => self.arguments(c, draft),
            _ => Step::Broken,
        }
    }

    fn go_on(&mut self, at: MistralState) -> Step {
        self.at = at;
        Step::More
    }

    fn begin_arguments(&mut self, name: String, c: char, draft: &mut Draft) -> Step {
        self.at = arguments(name, String::new());
        self.arguments(c, draft)
    }

    fn arguments(&mut self, c: char, draft: &mut Draft) -> Step {
        let MistralState::Arguments { raw, value, name } = &mut self.at else { return Step::Broken };
        if let Some(known) = name {
            if matches!(c, ' ' | '\t' | '\n' | '\r') {
                return Step::More;
            }
            if c != '{' {
                return Step::Broken;
            }
            draft.name(std::mem::take(known));
            *name = None;
        }
        let step = value.push(c, raw);
        draft.arguments(raw);
        if step == Step::Done {
            draft.end();
        }
        step
    }
}

fn arguments(name: String, raw: String) -> MistralState {
    MistralState::Arguments { raw, value: Value::new(Dialect::Json), name: Some(name) }
}

fn in_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')
}
