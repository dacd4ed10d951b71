//! The fields of a body that the router reads; all others are left alone and go along unread.

use std::borrow::Cow;
use std::fmt;

use serde::de::{
    self, Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde_json::value::RawValue;

use crate::chat::{Message, Text};
use crate::engine_body::Entry;
use crate::error::ApiError;
use crate::json;

/// Fields that change what an answer is or says, that are not served, and what to do instead. Left unread, their wish would be
/// passed over in silence.
pub(crate) const UNSERVED: &[(&str, &str)] = &[
    ("chat_template", "the operator's template is used; leave it out"),
    ("return_token_strs", "tokens are returned by number; leave it out"),
    ("logprob_token_ids", "use logprobs and top_logprobs"),
    ("return_token_offsets", "text_offset of logprobs says where tokens begin"),
    ("return_prompt_text", "ask /tokenize, then /detokenize"),
    ("return_mm_kwargs", "prompts are text or token ids; leave it out"),
    ("return_hidden_states", "answers are text and tokens; leave it out"),
    ("return_routed_experts", "answers are text and tokens; leave it out"),
    ("routed_experts_prompt_start", "answers are text and tokens; leave it out"),
    ("return_text_in_logprobs", "logprobs name tokens by their text; leave it out"),
    ("use_beam_search", "answers are drawn token by token; leave it out"),
    ("length_penalty", "it belongs to beam search; leave it out"),
    ("truncate_prompt_tokens", "prompts are served whole; shorten the prompt"),
    ("truncation_side", "prompts are served whole; shorten the prompt"),
    ("prompt_embeds", "prompts are text or token ids; leave it out"),
    ("input_embeds", "prompts are text or token ids; leave it out"),
    ("stop_regex", "use stop"),
    ("functions", "use tools"),
    ("function_call", "use tool_choice"),
    ("logits_processors", "code of clients is not run; leave it out"),
    ("custom_logit_processor", "code of clients is not run; leave it out"),
    ("lora_path", "adapters are the operator's to choose; leave it out"),
];

/// Null, false, nothing, or the number that counts as nothing.
fn is_empty_value(value: &RawValue) -> bool {
    let text = value.get();
    let empty = |open: char, close: char| {
        text.strip_prefix(open)
            .and_then(|rest| rest.strip_suffix(close))
            .is_some_and(|rest| rest.trim().is_empty())
    };
    matches!(text, "null" | "false" | "\"\"" | "0" | "1.0" | "\"none\"") || empty('[', ']') || empty('{', '}')
}

macro_rules! fields {
    ($($name:ident: $kind:ty,)*) => {
        /// The fields of a body; `null` counts as absent.
        #[derive(Debug, Default)]
        pub(crate) struct Fields<'a> {
            $(pub(crate) $name: Option<$kind>,)*
            /// A field that is there and is served nowhere.
            pub(crate) unserved: Option<&'static str>,
            /// All fields, in order.
            pub(crate) entries: Vec<Entry<'a>>,
        }

        /// The fields that are read, for the page of parameters.
        #[cfg(test)]
        pub(crate) const READ: &[&str] = &[$(stringify!($name),)*];

        impl<'a> Fields<'a> {
            /// Reads the value of `name`. If it cannot be read, `at` keeps the field's name.
            fn read<A: MapAccess<'a>>(
                &mut self,
                name: &str,
                map: &mut A,
                at: &mut Option<&'static str>,
            ) -> Result<(), A::Error> {
                match name {
                    $(stringify!($name) => {
                        *at = Some(stringify!($name));
                        self.$name = map.next_value()?;
                    })*
                    _ => match UNSERVED.iter().find(|(known, _)| *known == name) {
                        Some((known, _)) => {
                            let value = map.next_value::<&'a RawValue>()?;
                            self.unserved = self.unserved.or((!is_empty_value(value)).then_some(*known));
                        }
                        None => drop(map.next_value::<IgnoredAny>()?),
                    },
                }
                *at = None;
                Ok(())
            }
        }
    };
}

fields! {
    model: Text<'a>,
    priority: &'a RawValue,
    messages: Vec<Message<'a>>,
    prompt: PromptField<'a>,
    tokens: Vec<u32>,
    stream: bool,
    stream_options: StreamOptions,
    max_tokens: u32,
    max_completion_tokens: u32,
    min_tokens: u32,
    n: u32,
    best_of: u32,
    echo: bool,
    suffix: Text<'a>,
    temperature: f32,
    top_p: f32,
    top_k: i64,
    min_p: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    repetition_penalty: f32,
    logit_bias: LogitBias,
    seed: i64,
    stop: StopField,
    stop_token_ids: Vec<u32>,
    include_stop_str_in_output: bool,
    no_stop_trim: bool,
    ignore_eos: bool,
    logprobs: Logprobs,
    top_logprobs: u32,
    prompt_logprobs: u32,
    return_token_ids: bool,
    return_tokens_as_token_ids: bool,
    skip_special_tokens: bool,
    add_special_tokens: bool,
    add_generation_prompt: bool,
    continue_final_message: bool,
    chat_template_kwargs: &'a RawValue,
    documents: &'a RawValue,
    reasoning_effort: Text<'a>,
    include_reasoning: bool,
    separate_reasoning: bool,
    tools: &'a RawValue,
    tool_choice: &'a RawValue,
    parallel_tool_calls: bool,
    response_format: &'a RawValue,
    user: Text<'a>,
    prompt_cache_key: Text<'a>,
    previous_response_id: Text<'a>,
    cache_salt: Text<'a>,
    service_tier: Text<'a>,
}

/// The fields of `stream_options`.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(default, expecting = "an object")]
pub(crate) struct StreamOptions {
    pub(crate) include_usage: Option<bool>,
    pub(crate) continuous_usage_stats: Option<bool>,
}

/// Reads a body's fields. The error for an unreadable field names its position.
pub(crate) fn read(body: &[u8]) -> Result<Fields<'_>, ApiError> {
    if json::too_deep(body) {
        let message =
            format!("the body nests deeper than {} arrays and objects; send it flatter", json::MAX_DEPTH);
        return Err(ApiError::new(400, message).code("too_deep"));
    }
    let mut at = None;
    let mut reader = serde_json::Deserializer::from_slice(body);
    let read = BodySeed { at: &mut at, body }
        .deserialize(&mut reader)
        .and_then(|fields| reader.end().map(|()| fields));
    read.map_err(|error| {
        if error.is_data() {
            let error = in_plain_words(&error.to_string());
            let mut answer = ApiError::new(
                400,
                match at {
                    Some(name) => format!("{name}: {error}"),
                    None => format!("the body cannot be read: {error}"),
                },
            );
            answer.param = at;
            answer.code("invalid_value")
        } else {
            ApiError::new(400, format!("the body is not JSON: {error}")).code("invalid_json")
        }
    })
}

/// Translates the types in an error from Rust's words into JSON's.
fn in_plain_words(error: &str) -> String {
    let words = [
        ("expected u32", "expected a whole number, not below 0"),
        ("expected i64", "expected a whole number"),
        ("expected f32", "expected a number"),
        ("expected a boolean", "expected true or false"),
        ("expected a sequence", "expected an array"),
        ("expected a map", "expected an object"),
        ("type: sequence,", "type: an array,"),
        ("type: map,", "type: an object,"),
        ("type: floating point ", "type: number "),
    ];
    words.into_iter().fold(error.to_owned(), |text, (rust, plain)| text.replace(rust, plain))
}

/// Fields of one body at most: each takes memory.
const MAX_FIELDS: usize = 1_024;

struct BodySeed<'s> {
    at: &'s mut Option<&'static str>,
    body: &'s [u8],
}

impl<'de> DeserializeSeed<'de> for BodySeed<'_> {
    type Value = Fields<'de>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Fields<'de>, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for BodySeed<'_> {
    type Value = Fields<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
        let mut fields = Fields::default();
        while let Some(Text(name)) = map.next_key::<Text<'de>>()? {
            if fields.entries.len() == MAX_FIELDS {
                return Err(de::Error::custom(format_args!(
                    "it has more than {MAX_FIELDS} fields; send fewer"
                )));
            }
            fields.entries.push(Entry::new(name.clone(), self.body));
            fields.read(&name, &mut map, self.at)?;
        }
        Ok(fields)
    }
}

/// Prompts of one call that are read at most; fewer may be asked for.
const MAX_PROMPTS: usize = 4_096;
const TOO_MANY_PROMPTS: &str = "more prompts than any call may have";

/// `prompt`: one or several, as text or as tokens.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PromptField<'a> {
    Text(Cow<'a, str>),
    Texts(Vec<Cow<'a, str>>),
    Tokens(Vec<u32>),
    Batches(Vec<Vec<u32>>),
}

impl<'de> Deserialize<'de> for PromptField<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptVisitor)
    }
}

struct PromptVisitor;

impl<'de> Visitor<'de> for PromptVisitor {
    type Value = PromptField<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a list of strings, a list of token ids or a list of such lists")
    }

    fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<PromptField<'de>, E> {
        Ok(PromptField::Text(Cow::Borrowed(text)))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<PromptField<'de>, E> {
        Ok(PromptField::Text(Cow::Owned(text.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<PromptField<'de>, A::Error> {
        let Some(first) = list.next_element::<Element<'de>>()? else {
            return Err(de::Error::custom("the list of prompts is empty"));
        };
        match first {
            Element::Text(first) => {
                let mut texts = vec![first];
                while let Some(Text(text)) = list.next_element()? {
                    if texts.len() == MAX_PROMPTS {
                        return Err(de::Error::custom(TOO_MANY_PROMPTS));
                    }
                    texts.push(text);
                }
                Ok(PromptField::Texts(texts))
            }
            Element::Token(first) => Ok(PromptField::Tokens(rest_of(first, list, usize::MAX)?)),
            Element::Tokens(first) => Ok(PromptField::Batches(rest_of(first, list, MAX_PROMPTS)?)),
        }
    }
}

fn rest_of<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(
    first: T,
    mut list: A,
    most: usize,
) -> Result<Vec<T>, A::Error> {
    let mut all = vec![first];
    while let Some(next) = list.next_element()? {
        if all.len() == most {
            return Err(de::Error::custom(TOO_MANY_PROMPTS));
        }
        all.push(next);
    }
    Ok(all)
}

enum Element<'a> {
    Text(Cow<'a, str>),
    Token(u32),
    Tokens(Vec<u32>),
}

impl<'de> Deserialize<'de> for Element<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ElementVisitor)
    }
}

struct ElementVisitor;

impl<'de> Visitor<'de> for ElementVisitor {
    type Value = Element<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a token id or a list of token ids")
    }

    fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Element<'de>, E> {
        Ok(Element::Text(Cow::Borrowed(text)))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Element<'de>, E> {
        Ok(Element::Text(Cow::Owned(text.to_owned())))
    }

    fn visit_u64<E: de::Error>(self, token: u64) -> Result<Element<'de>, E> {
        let token = u32::try_from(token).map_err(|_| E::custom(format!("{token} is no token id")))?;
        Ok(Element::Token(token))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Element<'de>, A::Error> {
        let mut tokens = Vec::new();
        while let Some(token) = list.next_element()? {
            tokens.push(token);
        }
        Ok(Element::Tokens(tokens))
    }
}

/// `stop`: none, one or several strings.
#[derive(Debug, serde::Deserialize)]
#[serde(untagged, expecting = "stop is a string or a list of strings")]
pub(crate) enum StopField {
    One(String),
    Several(Vec<String>),
}

/// `logprobs`: yes or no for chats, how many for completions.
#[derive(Clone, Copy, Debug, serde::Deserialize)]
#[serde(untagged, expecting = "logprobs is true or false for chats, a small number for completions")]
pub(crate) enum Logprobs {
    Flag(bool),
    Top(u32),
}

/// `logit_bias`, by ascending token; of one named twice, the last.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct LogitBias(pub(crate) Vec<(u32, f32)>);

impl<'de> Deserialize<'de> for LogitBias {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let map: std::collections::BTreeMap<Text<'de>, f32> = Deserialize::deserialize(deserializer)?;
        let mut by_token = std::collections::BTreeMap::new();
        for (Text(name), bias) in map {
            let token: u32 =
                name.parse().map_err(|_| de::Error::custom(format!("{name:?} is no token id")))?;
            by_token.insert(token, bias);
        }
        Ok(Self(by_token.into_iter().collect()))
    }
}

impl PartialEq for Text<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl Eq for Text<'_> {}

impl PartialOrd for Text<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Text<'_> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.cmp(&other.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn prompt(json: &str) -> Result<PromptField<'static>, String> {
        let body = format!("{{\"prompt\": {json}}}");
        let body: &'static str = body.leak();
        read(body.as_bytes()).map(|fields| fields.prompt.unwrap()).map_err(|e| e.message.into_owned())
    }

    #[test]
    fn a_value_of_another_type_is_said_in_the_types_of_json() {
        for (body, said) in [
            (r#"{"messages":5}"#, "messages: invalid type: integer `5`, expected an array"),
            (r#"{"messages":{}}"#, "messages: invalid type: an object, expected an array"),
            (r#"{"stream":"yes"}"#, "stream: invalid type: string \"yes\", expected true or false"),
            (
                r#"{"stream_options":true}"#,
                "stream_options: invalid type: boolean `true`, expected an object",
            ),
            (r#"{"logit_bias":[1]}"#, "logit_bias: invalid type: an array, expected an object"),
            (r#"{"n":1.5}"#, "n: invalid type: number `1.5`, expected a whole number, not below 0"),
        ] {
            let error = read(body.as_bytes()).expect_err("another type").message;
            assert!(error.starts_with(said), "{error}");
        }
    }

    #[test]
    fn the_page_of_parameters_says_what_is_read_and_what_is_refused() {
        let page = include_str!("../../../docs/parameters.md");
        let rows: std::collections::BTreeMap<&str, &str> = page
            .lines()
            .filter_map(|line| line.strip_prefix("| `")?.split_once("` | "))
            .map(|(name, rest)| (name, rest.split(" | ").next().unwrap()))
            .collect();
        for name in READ {
            assert_eq!(rows.get(name), Some(&"read"), "{name}");
        }
        for (name, remedy) in UNSERVED {
            assert_eq!(rows.get(name), Some(&format!("400: {remedy}").as_str()), "{name}");
            let error = crate::call::check_served(&read(format!("{{\"{name}\": [1]}}").as_bytes()).unwrap())
                .unwrap_err();
            assert_eq!((error.status, error.param), (400, Some(*name)));
        }
        for (name, said) in rows {
            let known = READ.contains(&name) || UNSERVED.iter().any(|(known, _)| *known == name);
            assert_eq!(known, said != "passed on", "{name}: {said}");
        }
    }

    #[test]
    fn prompts_have_four_shapes() {
        assert_eq!(prompt("\"a\\n\"").unwrap(), PromptField::Text("a\n".into()));
        assert_eq!(prompt("[\"a\",\"b\"]").unwrap(), PromptField::Texts(vec!["a".into(), "b".into()]));
        assert_eq!(prompt("[1,2]").unwrap(), PromptField::Tokens(vec![1, 2]));
        assert_eq!(prompt("[[1],[]]").unwrap(), PromptField::Batches(vec![vec![1], vec![]]));
        for (bad, why) in [
            ("[]", "empty"),
            ("[1,\"a\"]", "a whole number, not below 0"),
            ("[-1]", "token id"),
            ("{}", "a string"),
            ("[4294967296]", "token id"),
        ] {
            let error = prompt(bad).unwrap_err();
            assert!(error.contains(why) && error.starts_with("prompt:"), "{bad}: {error}");
        }
    }

    #[test]
    fn what_is_many_is_not_read_to_its_end() {
        let many = |one: &str, count: usize| vec![one; count].join(",");
        for one in ["\"a\"", "[1]"] {
            assert!(prompt(&format!("[{}]", many(one, MAX_PROMPTS))).is_ok());
            let error = prompt(&format!("[{}]", many(one, MAX_PROMPTS + 1))).unwrap_err();
            assert!(error.contains("more prompts"), "{error}");
        }
        assert!(prompt(&format!("[{}]", many("1", MAX_PROMPTS + 1))).is_ok(), "tokens of one prompt");
        let members = |count: usize| {
            let members: String = (0..count).map(|at| format!(",\"x{at}\":1")).collect();
            read(format!("{{\"messages\":[{{\"role\":\"user\"{members}}}]}}").as_bytes())
                .map(|_| ())
                .map_err(|e| e.message)
        };
        assert!(members(64).is_ok());
        assert!(members(65).unwrap_err().contains("more than 64 members"));
    }

    #[test]
    fn mistakes_are_told_with_their_place() {
        let error = read(b"{\"n\": 1,\n \"max_tokens\": \"five\"}").unwrap_err();
        assert_eq!(error.param, Some("max_tokens"));
        assert!(error.message.contains("line 2 column"), "{}", error.message);
        let error = read(b"{\"n\": 1,,}").unwrap_err();
        assert_eq!(error.code.as_deref(), Some("invalid_json"));
        assert!(error.message.contains("line 1 column 9"), "{}", error.message);
        assert_eq!(read(b"[1]").unwrap_err().code.as_deref(), Some("invalid_value"));
        assert_eq!(read(b"{} x").unwrap_err().code.as_deref(), Some("invalid_json"));
        let deep = format!("{{\"x\":{}1{}}}", "[".repeat(500), "]".repeat(500));
        assert_eq!(read(deep.as_bytes()).unwrap_err().code.as_deref(), Some("too_deep"));
    }

    #[test]
    fn unknown_fields_and_nulls_are_let_through() {
        let fields =
            read(br#"{"n":null,"stop":null,"x":{"y":[1,{}]},"seed":-1,"logit_bias":{"9":1,"10":-2.5}}"#)
                .unwrap();
        assert!(fields.n.is_none() && fields.stop.is_none());
        assert_eq!(fields.seed, Some(-1));
        assert_eq!(fields.logit_bias, Some(LogitBias(vec![(9, 1.0), (10, -2.5)])));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Err(error) = read(&bytes) {
                prop_assert_eq!(error.status, 400);
            }
        }

        #[test]
        fn any_json_like_text_is_read_or_refused(
            text in r#"\{("(messages|prompt|stop|logit_bias|tools|n)":(\[|\]|\{|\}|"[a-z\\]"|,|:|null|1|-2\.5e3|true){0,6},?){0,4}\}"#
        ) {
            if let Err(error) = read(text.as_bytes()) {
                prop_assert_eq!(error.status, 400);
            }
        }
    }
}
