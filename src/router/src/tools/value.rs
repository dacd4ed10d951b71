//! One value of JSON, or of Python's literals, read character by character and written as JSON.

use std::fmt::Write;

/// The result of reading one character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Taken in; more is to come.
    More,
    /// Taken in; that was all.
    Done,
    /// All was there before this character, which is not a part of it.
    Past,
    /// This cannot be read; the character was not taken in.
    Broken,
}

/// How values are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// As in RFC 8259, but that line ends and their like may stand in strings as they are.
    Json,
    /// Literals of strings, numbers, truth values, `None`, lists and dictionaries with strings as keys.
    Python,
}

/// Reads one value. Nests no deeper than the bodies that clients may send.
#[derive(Debug)]
pub(crate) struct Value {
    dialect: Dialect,
    /// The closing bracket of each list and object that is open.
    open: Vec<char>,
    at: ValueState,
}

#[derive(Clone, Copy, Debug)]
enum ValueState {
    Value,
    ValueOrClose,
    Key,
    KeyOrClose,
    Colon,
    AfterValue,
    Text { quote: char, key: bool, escape: Escape },
    Word { rest: &'static str, said: &'static str },
    Number(Number),
}

#[derive(Clone, Copy, Debug)]
enum Escape {
    No,
    Slash,
    Digits { left: u8, code: u32 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Whole,
    Point,
    Fraction,
    Exponent,
    Sign,
    Power,
}

impl Number {
    fn first(c: char) -> Option<Self> {
        match c {
            '-' => Some(Self::Minus),
            '0' => Some(Self::Zero),
            '1'..='9' => Some(Self::Whole),
            _ => None,
        }
    }

    fn next(self, c: char) -> Option<Self> {
        match (self, c) {
            (Self::Minus, _) => Self::first(c).filter(|next| *next != Self::Minus),
            (Self::Whole, '0'..='9') => Some(Self::Whole),
            (Self::Zero | Self::Whole, '.') => Some(Self::Point),
            (Self::Point | Self::Fraction, '0'..='9') => Some(Self::Fraction),
            (Self::Zero | Self::Whole | Self::Fraction, 'e' | 'E') => Some(Self::Exponent),
            (Self::Exponent, '+' | '-') => Some(Self::Sign),
            (Self::Exponent | Self::Sign | Self::Power, '0'..='9') => Some(Self::Power),
            _ => None,
        }
    }

    fn whole(self) -> bool {
        matches!(self, Self::Zero | Self::Whole | Self::Fraction | Self::Power)
    }
}

impl Value {
    pub(crate) fn new(dialect: Dialect) -> Self {
        Self { dialect, open: Vec::new(), at: ValueState::Value }
    }

    /// Takes in a character and appends what it comes to as JSON; joined, that is the value. Only a
    /// number at the top, which nothing closes, ends as [`Step::Past`].
    pub(crate) fn push(&mut self, c: char, out: &mut String) -> Step {
        match self.at {
            ValueState::Text { quote, key, escape } => return self.text(c, (quote, key, escape), out),
            ValueState::Word { rest, said } => return self.word(c, rest, said, out),
            ValueState::Number(number) => match number.next(c) {
                Some(next) => {
                    self.at = ValueState::Number(next);
                    out.push(c);
                    return Step::More;
                }
                None if !number.whole() => return Step::Broken,
                None if self.open.is_empty() => return Step::Past,
                None => self.at = ValueState::AfterValue,
            },
            _ => {}
        }
        if matches!(c, ' ' | '\t' | '\n' | '\r') {
            // A value that has not begun contains no space.
            if !self.open.is_empty() {
                out.push(c);
            }
            return Step::More;
        }
        match self.at {
            ValueState::ValueOrClose | ValueState::KeyOrClose | ValueState::AfterValue
                if self.open.last() == Some(&c) =>
            {
                out.push(c);
                self.open.pop();
                self.value_over()
            }
            ValueState::Value | ValueState::ValueOrClose => self.begin(c, out),
            ValueState::Key | ValueState::KeyOrClose if self.is_quote(c) => self.begin_text(c, true, out),
            ValueState::Colon if c == ':' => self.go_on(c, ValueState::Value, out),
            ValueState::AfterValue if c == ',' => {
                let next = if self.open.last() == Some(&']') { ValueState::Value } else { ValueState::Key };
                self.go_on(c, next, out)
            }
            _ => Step::Broken,
        }
    }

    fn go_on(&mut self, c: char, at: ValueState, out: &mut String) -> Step {
        out.push(c);
        self.at = at;
        Step::More
    }

    fn value_over(&mut self) -> Step {
        self.at = ValueState::AfterValue;
        if self.open.is_empty() { Step::Done } else { Step::More }
    }

    fn is_quote(&self, c: char) -> bool {
        c == '"' || (c == '\'' && self.dialect == Dialect::Python)
    }

    fn begin(&mut self, c: char, out: &mut String) -> Step {
        let close = match c {
            '[' => Some((']', ValueState::ValueOrClose)),
            '{' => Some(('}', ValueState::KeyOrClose)),
            _ => None,
        };
        if let Some((close, at)) = close {
            if self.open.len() == crate::json::MAX_DEPTH {
                return Step::Broken;
            }
            self.open.push(close);
            return self.go_on(c, at, out);
        }
        if self.is_quote(c) {
            return self.begin_text(c, false, out);
        }
        if let Some(number) = Number::first(c) {
            return self.go_on(c, ValueState::Number(number), out);
        }
        let (rest, said) = match (self.dialect, c) {
            (Dialect::Json, 't') | (Dialect::Python, 'T') => ("rue", "true"),
            (Dialect::Json, 'f') | (Dialect::Python, 'F') => ("alse", "false"),
            (Dialect::Json, 'n') => ("ull", "null"),
            (Dialect::Python, 'N') => ("one", "null"),
            _ => return Step::Broken,
        };
        self.at = ValueState::Word { rest, said };
        Step::More
    }

    fn begin_text(&mut self, quote: char, key: bool, out: &mut String) -> Step {
        self.go_on('"', ValueState::Text { quote, key, escape: Escape::No }, out)
    }

    fn word(&mut self, c: char, rest: &'static str, said: &'static str, out: &mut String) -> Step {
        match rest.strip_prefix(c) {
            None => Step::Broken,
            Some("") => {
                out.push_str(said);
                self.value_over()
            }
            Some(rest) => {
                self.at = ValueState::Word { rest, said };
                Step::More
            }
        }
    }

    fn text(&mut self, c: char, (quote, key, escape): (char, bool, Escape), out: &mut String) -> Step {
        let escape = match (escape, self.dialect) {
            (Escape::No, _) if c == quote => {
                out.push('"');
                if key {
                    self.at = ValueState::Colon;
                    return Step::More;
                }
                return self.value_over();
            }
            (Escape::No, Dialect::Json) if c == '\\' => {
                out.push(c);
                Some(Escape::Slash)
            }
            (Escape::No, Dialect::Python) if c == '\\' => Some(Escape::Slash),
            (Escape::No, _) => {
                push_escaped(c, out);
                Some(Escape::No)
            }
            (Escape::Slash, Dialect::Json) => json_escape(c, out),
            (Escape::Slash, Dialect::Python) => Some(python_escape(c, out)),
            (Escape::Digits { left, code }, dialect) => digit(c, left, code).map(|(left, code)| {
                if dialect == Dialect::Json {
                    out.push(c);
                }
                Escape::Digits { left, code }
            }),
        };
        let escape = match (escape, self.dialect) {
            (None, _) => return Step::Broken,
            (Some(Escape::Digits { left: 0, .. }), Dialect::Json) => Escape::No,
            (Some(Escape::Digits { left: 0, code }), Dialect::Python) => {
                if !push_code(code, out) {
                    return Step::Broken;
                }
                Escape::No
            }
            (Some(escape), _) => escape,
        };
        self.at = ValueState::Text { quote, key, escape };
        Step::More
    }
}

fn digit(c: char, left: u8, code: u32) -> Option<(u8, u32)> {
    let digit = c.to_digit(16)?;
    Some((left - 1, (code << 4) | digit))
}

fn json_escape(c: char, out: &mut String) -> Option<Escape> {
    let next = match c {
        '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => Escape::No,
        'u' => Escape::Digits { left: 4, code: 0 },
        _ => return None,
    };
    out.push(c);
    Some(next)
}

/// As Python reads it: an escape that it does not know stays as it is.
fn python_escape(c: char, out: &mut String) -> Escape {
    let said = match c {
        'n' | 't' | 'r' | 'b' | 'f' => {
            out.push('\\');
            out.push(c);
            return Escape::No;
        }
        'x' => return Escape::Digits { left: 2, code: 0 },
        'u' => return Escape::Digits { left: 4, code: 0 },
        'U' => return Escape::Digits { left: 8, code: 0 },
        '\n' => return Escape::No,
        '\\' | '"' | '\'' => c,
        'a' => '\u{7}',
        'v' => '\u{b}',
        '0' => '\0',
        _ => {
            out.push_str("\\\\");
            c
        }
    };
    push_escaped(said, out);
    Escape::No
}

/// Half a pair that stands for one character goes into JSON as it is; a number too large is refused.
fn push_code(code: u32, out: &mut String) -> bool {
    match char::from_u32(code) {
        Some(c) => push_escaped(c, out),
        None if code <= 0xffff => push_hex(code, out),
        None => return false,
    }
    true
}

fn push_escaped(c: char, out: &mut String) {
    match c {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        '\0'..='\u{1f}' => push_hex(u32::from(c), out),
        _ => out.push(c),
    }
}

fn push_hex(code: u32, out: &mut String) {
    write!(out, "\\u{code:04x}").expect("a String takes every character");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(text: &str, dialect: Dialect) -> (Option<Step>, String) {
        let (mut value, mut out) = (Value::new(dialect), String::new());
        for (at, c) in text.char_indices() {
            match value.push(c, &mut out) {
                Step::More => {}
                Step::Done => return (Some(Step::Done).filter(|_| at + c.len_utf8() == text.len()), out),
                step => return (Some(step), out),
            }
        }
        (None, out)
    }

    #[test]
    fn python_becomes_json() {
        for (python, json) in [
            (r#"'it''"#, None),
            (r#"'say "hi"'"#, Some(r#""say \"hi\"""#)),
            (r#""it's""#, Some(r#""it's""#)),
            (
                r"'a\n\\\'\x41\u00e9\d\
'",
                Some(r#""a\n\\'Aé\\d""#),
            ),
            (
                "[1, -2.5e3, True, None, {'a': [], \"b\": False}]",
                Some(r#"[1, -2.5e3, true, null, {"a": [], "b": false}]"#),
            ),
            (r"'\ud83d\ude00'", Some(r#""\ud83d\ude00""#)),
            (r"'\Uffffffff'", None),
            ("{1: 2}", None),
            ("true", None),
            ("[1,]", None),
            ("f'x'", None),
            ("[01]", None),
        ] {
            let (step, out) = run(python, Dialect::Python);
            assert_eq!((step == Some(Step::Done)).then_some(out.as_str()), json, "{python}");
        }
    }

    #[test]
    fn numbers_end_where_they_are_over_and_depth_is_bounded() {
        assert_eq!(run("-1.5e+3,", Dialect::Json), (Some(Step::Past), "-1.5e+3".to_owned()));
        assert_eq!(run("-,", Dialect::Json).0, Some(Step::Broken));
        let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
        assert_eq!(run(&nested(crate::json::MAX_DEPTH), Dialect::Json).0, Some(Step::Done));
        assert_eq!(run(&nested(crate::json::MAX_DEPTH + 1), Dialect::Json).0, Some(Step::Broken));
        assert_eq!(run("\"a\nb\"", Dialect::Json), (Some(Step::Done), "\"a\\nb\"".to_owned()));
    }

    fn any_json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            any::<f64>().prop_map(Into::into),
            any::<String>().prop_map(Into::into),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
                proptest::collection::btree_map("[a\"\\\\é\n]{0,3}", inner, 0..4)
                    .prop_map(|map| map.into_iter().collect::<serde_json::Map<_, _>>().into()),
            ]
        })
    }

    proptest! {
        #[test]
        fn json_comes_out_as_it_went_in(value in any_json(), pretty in any::<bool>()) {
            let text = if pretty { serde_json::to_string_pretty(&value) } else { serde_json::to_string(&value) }.unwrap();
            let (step, out) = run(&text, Dialect::Json);
            prop_assert_eq!(&out, &text);
            prop_assert_eq!(step, if value.is_number() { None } else { Some(Step::Done) });
        }

        #[test]
        fn what_is_let_through_is_json(text in r#"[\[\]{}"':,0-9.eE+\\ntrufalsTFN x-]{0,24}"#, python in any::<bool>()) {
            let (step, out) = run(&text, if python { Dialect::Python } else { Dialect::Json });
            if step == Some(Step::Done) {
                prop_assert!(serde_json::from_str::<serde::de::IgnoredAny>(&out).is_ok(), "{} gave {}", text, out);
            }
        }

        #[test]
        fn json_is_taken_as_serde_takes_it(text in r#"[\[{]["a0-9:,\[\]{}. -]{0,12}"#) {
            let (step, _) = run(&text, Dialect::Json);
            prop_assert_eq!(step == Some(Step::Done), serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok() && !text.ends_with(' '));
        }
    }
}
