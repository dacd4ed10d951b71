//! A client's body for engines: without what they get as tokens.

use std::borrow::Cow;
use std::collections::BTreeMap;

use bytes::Bytes;
use serde_json::value::RawValue;

/// Fields that the router makes tokens of: the prompt, which may be most of a body, and what went into it.
pub const IN_THE_TOKENS: [&str; 9] =
    ["messages", "prompt", "tokens", "text", "input_ids", "tools", "functions", "documents", "chat_template"];

/// Fields that are for the front door alone: which class a call has is decided here.
const NOT_FOR_ENGINES: [&str; 1] = ["priority"];

/// Whether a field is left out of what engines get.
fn is_left_out(name: &str) -> bool {
    IN_THE_TOKENS.contains(&name) || NOT_FOR_ENGINES.contains(&name)
}

/// A field of a body: its name, and where that begins, which is not known of a name with escapes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Entry<'a> {
    pub(crate) name: Cow<'a, str>,
    pub(crate) at: Option<usize>,
}

impl<'a> Entry<'a> {
    /// The field with this name, which has just been read from `body`.
    pub(crate) fn new(name: Cow<'a, str>, body: &[u8]) -> Self {
        let at = match &name {
            Cow::Borrowed(name) => (name.as_ptr() as usize).checked_sub(body.as_ptr() as usize),
            Cow::Owned(_) => None,
        };
        Self { name, at: at.filter(|at| *at > 0 && *at < body.len()) }
    }
}

/// The body without the fields that became tokens. Others keep their own bytes; of a name that stands twice the last
/// value counts, as for the router. The body was read as an object with these entries; it is not read again, for most of
/// it is prompt.
pub(crate) fn without_prompt(body: &[u8], entries: &[Entry<'_>]) -> Bytes {
    let mut kept: BTreeMap<&str, &[u8]> = BTreeMap::new();
    for (number, Entry { name, at }) in entries.iter().enumerate() {
        if is_left_out(name) {
            continue;
        }
        // From its quotation mark to the next field's, or to the brace at the end.
        let end = match entries.get(number + 1) {
            Some(next) => next.at.map(|at| at - 1),
            None => body.iter().rposition(|byte| *byte == b'}'),
        };
        let field = at.zip(end).and_then(|(at, end)| body.get(at - 1..end));
        let Some(field) = field else { return read_again(body) };
        let field = field.trim_ascii_end();
        kept.insert(name.as_ref(), field.strip_suffix(b",").unwrap_or(field).trim_ascii_end());
    }
    let mut out = Vec::with_capacity(2 + kept.values().map(|field| field.len() + 1).sum::<usize>());
    out.push(b'{');
    for field in kept.values() {
        if out.len() > 1 {
            out.push(b',');
        }
        out.extend_from_slice(field);
    }
    out.push(b'}');
    out.into()
}

/// The body, which is an object, with one more field: `"name":value`.
pub(crate) fn with_field(body: &[u8], field: &str) -> Bytes {
    let end = body.iter().rposition(|byte| *byte == b'}').unwrap_or(body.len());
    let comma = if body[..end].trim_ascii_end().ends_with(b"{") { "" } else { "," };
    [&body[..end], comma.as_bytes(), field.as_bytes(), b"}"].concat().into()
}

/// Strips the fields of a body in which some field's position is unknown.
fn read_again(body: &[u8]) -> Bytes {
    let mut fields: BTreeMap<String, &RawValue> = serde_json::from_slice(body).unwrap_or_default();
    fields.retain(|name, _| !is_left_out(name));
    serde_json::to_vec(&fields).map_or_else(|_| Bytes::from_static(b"{}"), Bytes::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields;
    use proptest::prelude::*;

    fn of(body: &str) -> String {
        let fields = fields::read(body.as_bytes()).unwrap();
        String::from_utf8(without_prompt(body.as_bytes(), &fields.entries).to_vec()).unwrap()
    }

    #[test]
    fn what_became_tokens_stays_and_the_rest_goes_along_in_its_own_bytes() {
        let body = r#"{"model":"m","messages":[{"role":"user","content":"a \"b\""}],"vendor":{"b":1.10,"a":[1e400,"\u00e9"]},"tools":[],"seed": 7}"#;
        assert_eq!(of(body), r#"{"model":"m","seed": 7,"vendor":{"b":1.10,"a":[1e400,"\u00e9"]}}"#);
        assert_eq!(of(r#"{"a":1,"priority":5,"prior\u0069ty":6}"#), r#"{"a":1}"#, "it is for the front door");
        assert_eq!(of(" { \"prompt\" : \"}\" , \"a\" : 1 ,\n \"b\":\"x,\" } \n"), r#"{"a" : 1,"b":"x,"}"#);
        assert_eq!(of(r#"{"m\u0065ssages":[],"a":1,"a":2}"#), r#"{"a":2}"#);
        assert_eq!((of("{}"), of(r#"{"prompt":"x"}"#)), ("{}".to_owned(), "{}".to_owned()));
    }

    proptest! {
        /// However a body is spaced, ordered and escaped: what comes out says what a reader of all of it would keep.
        #[test]
        fn it_says_what_a_reader_of_the_whole_body_keeps(
            fields in prop::collection::vec((0usize..6, 0usize..5, any::<bool>()), 0..8),
            space in "[ \n\t]{0,2}",
        ) {
            const NAMES: [&str; 6] = ["messages", "prompt", "vendor", "x\\u0079", "v", "tools"];
            const VALUES: [&str; 5] = ["[]", "{\"}\":\",\"}", "\"a\\\"b\"", "null", "1.50"];
            let one = |&(name, value, wide): &(usize, usize, bool)| {
                // The router reads some of these names, and wants lists there.
                let value = if NAMES[name] == "vendor" || NAMES[name] == "v" { value } else { 0 };
                let gap = if wide { space.as_str() } else { "" };
                let value = if NAMES[name] == "prompt" { "\"p\"" } else { VALUES[value] };
                format!("{gap}\"{}\"{gap}:{gap}{value}{gap}", NAMES[name])
            };
            let body = format!("{space}{{{}}}{space}", fields.iter().map(one).collect::<Vec<_>>().join(","));
            let read: serde_json::Value = serde_json::from_str(&of(&body)).unwrap();
            let again: serde_json::Value = serde_json::from_slice(&read_again(body.as_bytes())).unwrap();
            prop_assert_eq!(read, again, "{}", body);
        }
    }
}
