//! A call as a JSON object: `{"name": ..., "arguments": {...}}`, in any order.

use super::draft::Draft;
use super::value::{Dialect, Step, Value};

/// Reads one such object; `parameters` is `arguments` by another name.
#[derive(Debug)]
pub(super) struct Object {
    /// Whether keys that no call has make it something else.
    strict: bool,
    at: ObjectState,
    /// The key or value that is being read, as JSON, without the part that was handed on.
    raw: String,
    name: Option<String>,
    /// Whole arguments that wait for the name.
    arguments: Option<String>,
    has_arguments: bool,
    name_sent: bool,
}

#[derive(Debug)]
enum ObjectState {
    Open,
    KeyOrClose,
    NextKey,
    Key(Value),
    Colon(Field),
    Begin(Field),
    Inside(Field, Value),
    AfterValue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Name,
    Arguments,
    Other,
}

impl Object {
    /// With `strict`, an object with other keys than a call's is none.
    pub(super) fn new(strict: bool) -> Self {
        Self {
            strict,
            at: ObjectState::Open,
            raw: String::new(),
            name: None,
            arguments: None,
            has_arguments: false,
            name_sent: false,
        }
    }

    pub(super) fn push(&mut self, c: char, draft: &mut Draft) -> Step {
        let space = matches!(c, ' ' | '\t' | '\n' | '\r');
        match &mut self.at {
            ObjectState::Key(value) => match value.push(c, &mut self.raw) {
                Step::Done => self.key_over(),
                step => step,
            },
            ObjectState::Inside(..) => self.inside(c, draft),
            _ if space => Step::More,
            ObjectState::Open if c == '{' => self.go_on(ObjectState::KeyOrClose),
            ObjectState::KeyOrClose | ObjectState::NextKey if c == '"' => self.begin_key(c),
            ObjectState::AfterValue if c == ',' => self.go_on(ObjectState::NextKey),
            ObjectState::KeyOrClose | ObjectState::AfterValue if c == '}' => self.close(draft),
            ObjectState::Colon(field) if c == ':' => {
                let field = *field;
                self.go_on(ObjectState::Begin(field))
            }
            ObjectState::Begin(field) => {
                let field = *field;
                self.begin(field, c, draft)
            }
            _ => Step::Broken,
        }
    }

    fn go_on(&mut self, at: ObjectState) -> Step {
        self.at = at;
        Step::More
    }

    fn begin_key(&mut self, c: char) -> Step {
        let mut value = Value::new(Dialect::Json);
        value.push(c, &mut self.raw);
        self.go_on(ObjectState::Key(value))
    }

    fn key_over(&mut self) -> Step {
        let raw = std::mem::take(&mut self.raw);
        // Half a pair that stands for one character is JSON and no text.
        let Ok(key) = serde_json::from_str::<String>(&raw) else { return Step::Broken };
        let field = match key.as_str() {
            "name" if self.name.is_none() => Field::Name,
            "arguments" | "parameters" if !self.has_arguments => Field::Arguments,
            "name" | "arguments" | "parameters" => return Step::Broken,
            "id" | "type" => Field::Other,
            _ if self.strict => return Step::Broken,
            _ => Field::Other,
        };
        self.go_on(ObjectState::Colon(field))
    }

    fn begin(&mut self, field: Field, c: char, draft: &mut Draft) -> Step {
        let fits = match field {
            Field::Name => c == '"',
            Field::Arguments => matches!(c, '{' | '"' | 'n'),
            Field::Other => true,
        };
        if !fits {
            return Step::Broken;
        }
        if field == Field::Arguments {
            self.has_arguments = true;
            if c == '{'
                && let Some(name) = self.name.clone()
            {
                self.name_sent = true;
                draft.name(name);
            }
        }
        self.at = ObjectState::Inside(field, Value::new(Dialect::Json));
        self.inside(c, draft)
    }

    fn inside(&mut self, c: char, draft: &mut Draft) -> Step {
        let ObjectState::Inside(field, value) = &mut self.at else { return Step::Broken };
        let field = *field;
        let step = value.push(c, &mut self.raw);
        match field {
            Field::Other => self.raw.clear(),
            Field::Arguments if self.name_sent => draft.arguments(&mut self.raw),
            _ => {}
        }
        match step {
            Step::More | Step::Broken => step,
            Step::Done => self.value_over(field, draft),
            Step::Past => match self.value_over(field, draft) {
                Step::More => self.push(c, draft),
                step => step,
            },
        }
    }

    fn value_over(&mut self, field: Field, draft: &mut Draft) -> Step {
        self.at = ObjectState::AfterValue;
        let raw = std::mem::take(&mut self.raw);
        match field {
            Field::Name => {
                let Ok(name) = serde_json::from_str::<String>(&raw) else { return Step::Broken };
                if let Some(arguments) = self.arguments.take() {
                    self.name_sent = true;
                    draft.whole(name.clone(), arguments);
                }
                self.name = Some(name);
            }
            Field::Arguments if !self.name_sent => {
                let Some(arguments) = as_object(raw) else { return Step::Broken };
                match &self.name {
                    Some(name) => {
                        self.name_sent = true;
                        draft.whole(name.clone(), arguments);
                    }
                    None => self.arguments = Some(arguments),
                }
            }
            _ => {}
        }
        Step::More
    }

    fn close(&mut self, draft: &mut Draft) -> Step {
        let Some(name) = self.name.take() else { return Step::Broken };
        if !self.name_sent {
            draft.whole(name, "{}".to_owned());
        }
        draft.end();
        Step::Done
    }
}

/// Arguments as an object's JSON: some models write them as a string, or `null` for none.
fn as_object(raw: String) -> Option<String> {
    match raw.as_bytes().first() {
        Some(b'{') => Some(raw),
        Some(b'n') => Some("{}".to_owned()),
        _ => {
            let text: String = serde_json::from_str(&raw).ok()?;
            Some(if text.trim().is_empty() { "{}".to_owned() } else { text })
        }
    }
}
