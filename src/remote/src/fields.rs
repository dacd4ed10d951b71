//! The client's body, field by field: which fields are Baton's, which are dropped or refused, and which go along.
//!
//! Values that go along are the client's bytes, never parsed and written anew.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::{RawValue, to_raw_value};

use crate::error::{RemoteError, Stage};
use crate::prompt::Prompt;
use crate::request::Request;

/// Fields of a body, at most.
const MAX_FIELDS: usize = 512;

/// vLLM's field of further fields: it takes those that name KV from there as well.
const MORE: &str = "vllm_xargs";

/// The treatment of a field in the client's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Baton writes it itself, on every leg, from what it has read and checked.
    Ours,
    /// Baton's front door serves it; no engine hears of it.
    Served,
    /// It names KV, places or connections: clients have no say in it.
    Private,
    /// It would change what Baton relies on; a request that has it is refused, unless it is null, false or empty.
    Refused,
}

/// The fields that do not go along. Every other field goes to the engine as the client sent it, on each leg.
pub const FIELDS: &[(&str, Rule)] = &[
    ("model", Rule::Ours),
    ("prompt", Rule::Ours),
    ("messages", Rule::Ours),
    ("tokens", Rule::Ours),
    ("text", Rule::Ours),
    ("input_ids", Rule::Ours),
    ("sampling_params", Rule::Ours),
    ("max_tokens", Rule::Ours),
    ("max_completion_tokens", Rule::Ours),
    ("max_new_tokens", Rule::Ours),
    ("min_tokens", Rule::Ours),
    ("min_new_tokens", Rule::Ours),
    ("temperature", Rule::Ours),
    ("top_p", Rule::Ours),
    ("top_k", Rule::Ours),
    ("min_p", Rule::Ours),
    ("presence_penalty", Rule::Ours),
    ("frequency_penalty", Rule::Ours),
    ("repetition_penalty", Rule::Ours),
    ("logit_bias", Rule::Ours),
    ("seed", Rule::Ours),
    ("sampling_seed", Rule::Ours),
    ("stop_token_ids", Rule::Ours),
    ("ignore_eos", Rule::Ours),
    ("logprobs", Rule::Ours),
    ("top_logprobs", Rule::Ours),
    ("prompt_logprobs", Rule::Ours),
    ("return_logprob", Rule::Ours),
    ("logprob_start_len", Rule::Ours),
    ("top_logprobs_num", Rule::Ours),
    ("token_ids_logprob", Rule::Ours),
    ("logprob_token_ids", Rule::Ours),
    ("return_text_in_logprobs", Rule::Ours),
    ("stream", Rule::Ours),
    ("return_hidden_states", Rule::Ours),
    ("return_token_ids", Rule::Ours),
    ("return_tokens_as_token_ids", Rule::Ours),
    ("stream_options", Rule::Served),
    ("stream_interval", Rule::Served),
    ("stop", Rule::Served),
    ("stop_regex", Rule::Served),
    ("include_stop_str_in_output", Rule::Served),
    ("no_stop_trim", Rule::Served),
    ("skip_special_tokens", Rule::Served),
    ("spaces_between_special_tokens", Rule::Served),
    ("n", Rule::Served),
    ("best_of", Rule::Served),
    ("echo", Rule::Served),
    ("tools", Rule::Served),
    ("tool_choice", Rule::Served),
    ("parallel_tool_calls", Rule::Served),
    ("functions", Rule::Served),
    ("function_call", Rule::Served),
    ("chat_template", Rule::Served),
    ("chat_template_kwargs", Rule::Served),
    ("add_generation_prompt", Rule::Served),
    ("continue_final_message", Rule::Served),
    ("add_special_tokens", Rule::Served),
    ("documents", Rule::Served),
    ("truncation_side", Rule::Served),
    ("kv_transfer_params", Rule::Private),
    ("ec_transfer_params", Rule::Private),
    ("bootstrap_host", Rule::Private),
    ("bootstrap_port", Rule::Private),
    ("bootstrap_room", Rule::Private),
    ("bootstrap_pair_key", Rule::Private),
    ("decode_tp_size", Rule::Private),
    ("rid", Rule::Private),
    ("request_id", Rule::Private),
    ("data_parallel_rank", Rule::Private),
    ("routed_dp_rank", Rule::Private),
    ("disagg_prefill_dp_rank", Rule::Private),
    ("data_parallel_rank_decode", Rule::Private),
    ("background", Rule::Private),
    ("session_id", Rule::Private),
    ("conversation_id", Rule::Private),
    ("session_params", Rule::Refused),
    ("suffix", Rule::Refused),
    ("truncate_prompt_tokens", Rule::Refused),
    ("use_beam_search", Rule::Refused),
    ("prompt_embeds", Rule::Refused),
    ("input_embeds", Rule::Refused),
    ("mm_payload", Rule::Refused),
    ("custom_logit_processor", Rule::Refused),
    ("image_data", Rule::Refused),
    ("video_data", Rule::Refused),
    ("audio_data", Rule::Refused),
];

/// The rule of a field; `None` when it goes along.
#[must_use]
pub fn rule(name: &str) -> Option<Rule> {
    FIELDS.iter().find(|(known, _)| *known == name).map(|(_, rule)| *rule)
}

/// A client's body as it came, or empty. Clones share it and its fields, which the first leg reads for all.
#[derive(Clone, Debug, Default)]
pub struct ClientBody(Arc<SharedBody>);

#[derive(Debug, Default)]
struct SharedBody {
    bytes: Bytes,
    read: OnceLock<Result<Client, RemoteError>>,
}

impl From<Bytes> for ClientBody {
    fn from(bytes: Bytes) -> Self {
        Self(Arc::new(SharedBody { bytes, read: OnceLock::new() }))
    }
}

impl ClientBody {
    /// The body as it came.
    #[must_use]
    pub fn bytes(&self) -> &Bytes {
        &self.0.bytes
    }

    /// Whether the engine gets this field from the client, with a value that is not null. A body that cannot be read
    /// has no fields.
    #[must_use]
    pub fn sets(&self, name: &str) -> bool {
        self.read().as_ref().is_ok_and(|client| client.along.sets(name))
    }

    fn read(&self) -> &Result<Client, RemoteError> {
        self.0.read.get_or_init(|| Body::of_client(&self.0.bytes))
    }
}

/// A JSON object as it is written: names in order, each once, values in their own bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Body(Fields<Value>);

/// A value of a body.
#[derive(Clone, Debug)]
enum Value {
    /// Shared by the legs that the client's body is read for.
    Raw(Arc<RawValue>),
    /// Written when the body is.
    Tokens(Prompt),
}

/// Names in order, each once.
#[derive(Clone, Debug)]
struct Fields<V>(Vec<(String, V)>);

impl<V> Default for Fields<V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<V> Fields<V> {
    /// Sets a field; the last value counts, in the first one's place.
    fn set(&mut self, name: String, value: V) {
        match self.0.iter_mut().find(|(known, _)| *known == name) {
            Some((_, old)) => *old = value,
            None => self.0.push((name, value)),
        }
    }
}

impl Body {
    /// The fields of a client's body that go along. An empty body has none.
    pub(crate) fn of_client(body: &[u8]) -> Result<Client, RemoteError> {
        if body.is_empty() {
            return Ok(Client::default());
        }
        // The prompt is among them, and is not copied.
        let Fields::<&RawValue>(fields) = serde_json::from_slice(body).map_err(|error| {
            RemoteError::invalid(Stage::Prepare, format!("the body is not a JSON object: {error}"))
        })?;
        let mut client = Client::default();
        for (name, value) in fields {
            match rule(&name) {
                Some(Rule::Refused) if !is_nothing(value) => {
                    let text = format!("{name} cannot be served by an engine behind Baton");
                    return Err(
                        RemoteError::invalid(Stage::Prepare, text).remedy(format!("leave {name} out"))
                    );
                }
                Some(Rule::Ours) if name == "seed" => client.seeded = value.get() != "null",
                Some(_) => {}
                None if name == MORE => client.along.set_raw(name, without_private(value)?),
                None => client.along.set_raw(name, value.to_owned()),
            }
        }
        Ok(client)
    }

    /// Sets a field; the last value counts, in the first one's place.
    pub(crate) fn set(&mut self, name: &str, value: &(impl Serialize + ?Sized)) -> Result<(), RemoteError> {
        let raw = to_raw_value(value).map_err(|error| {
            RemoteError::new(crate::Kind::Bug, crate::Side::Us, Stage::Prepare, format!("{name}: {error}"))
        })?;
        self.set_raw(name, raw);
        Ok(())
    }

    pub(crate) fn set_raw(&mut self, name: impl Into<String>, value: impl Into<Arc<RawValue>>) {
        self.0.set(name.into(), Value::Raw(value.into()));
    }

    fn sets(&self, name: &str) -> bool {
        let raw = |value: &Value| matches!(value, Value::Raw(raw) if raw.get() != "null");
        self.0.0.iter().any(|(known, value)| known == name && raw(value))
    }

    /// Sets a field to a list of token ids.
    pub(crate) fn set_tokens(&mut self, name: &str, ids: &Prompt) {
        self.0.set(name.to_owned(), Value::Tokens(ids.clone()));
    }

    /// Drops every field but those of `names`.
    pub(crate) fn keep(&mut self, names: &[&str]) {
        self.0.0.retain(|(name, _)| names.contains(&name.as_str()));
    }

    /// Takes a field of a client out; `None` when it is not there or says nothing.
    pub(crate) fn take(&mut self, name: &str) -> Option<Arc<RawValue>> {
        let named = |(known, value): &(String, Value)| known == name && matches!(value, Value::Raw(_));
        let at = self.0.0.iter().position(named)?;
        match self.0.0.remove(at) {
            (_, Value::Raw(value)) => (!is_nothing(&value)).then_some(value),
            (_, Value::Tokens(_)) => None,
        }
    }

    /// The body to send. Token ids are sent from where they lie, and not copied.
    pub(crate) fn written(&self) -> Result<WrittenBody, RemoteError> {
        let mut parts = VecDeque::new();
        let mut out = Vec::new();
        for (at, (name, value)) in self.0.0.iter().enumerate() {
            out.push(if at == 0 { b'{' } else { b',' });
            serde_json::to_writer(&mut out, name).map_err(|error| {
                RemoteError::new(crate::Kind::Bug, crate::Side::Us, Stage::Prepare, error.to_string())
            })?;
            out.push(b':');
            match value {
                Value::Raw(raw) => out.extend_from_slice(raw.get().as_bytes()),
                Value::Tokens(ids) => {
                    parts.push_back(std::mem::take(&mut out).into());
                    parts.push_back(ids.json());
                }
            }
        }
        if self.0.0.is_empty() {
            out.push(b'{');
        }
        out.push(b'}');
        parts.push_back(out.into());
        Ok(WrittenBody(parts))
    }
}

/// A body in the parts that it is sent in.
#[derive(Clone, Debug, Default)]
pub(crate) struct WrittenBody(VecDeque<Bytes>);

impl From<Bytes> for WrittenBody {
    fn from(bytes: Bytes) -> Self {
        Self(VecDeque::from([bytes]))
    }
}

impl http_body::Body for WrittenBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(|part| Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.iter().map(|part| part.len() as u64).sum())
    }
}

/// The part of a client's body that goes to the engine.
#[derive(Clone, Debug, Default)]
pub(crate) struct Client {
    /// Fields that go along.
    pub(crate) along: Body,
    /// The client wants these very draws: its seed goes along. Without it engines draw as they like, which is faster.
    pub(crate) seeded: bool,
}

impl Client {
    /// The part of a request that goes to its engine.
    pub(crate) fn of(request: &Request) -> Result<Self, RemoteError> {
        let mut client = request.body.read().clone()?;
        if let Some(salt) = &request.salt {
            client.along.set("cache_salt", &**salt)?;
        }
        Ok(client)
    }
}

/// An object of fields without those in which clients have no say; anything else is the engine's to refuse.
fn without_private(value: &RawValue) -> Result<Box<RawValue>, RemoteError> {
    let Ok(mut fields) = serde_json::from_str::<Fields<&RawValue>>(value.get()) else {
        return Ok(value.to_owned());
    };
    let before = fields.0.len();
    fields.0.retain(|(name, _)| rule(name) != Some(Rule::Private));
    if fields.0.len() == before {
        return Ok(value.to_owned());
    }
    to_raw_value(&fields).map_err(|error| RemoteError::invalid(Stage::Prepare, format!("{MORE}: {error}")))
}

/// Null, false, or empty.
fn is_nothing(value: &RawValue) -> bool {
    let text = value.get().trim();
    let inside = |open: char, close: char| text.strip_prefix(open).and_then(|text| text.strip_suffix(close));
    let empty = inside('[', ']').or_else(|| inside('{', '}')).is_some_and(|inside| inside.trim().is_empty());
    empty || matches!(text, "null" | "false" | "\"\"")
}

impl Serialize for Body {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Raw(raw) => raw.serialize(serializer),
            Self::Tokens(ids) => ids[..].serialize(serializer),
        }
    }
}

impl<V: Serialize> Serialize for Fields<V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Fields<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Reader<V> {
            type Value = Fields<V>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<V>, A::Error> {
                let mut fields = Fields::default();
                while let Some((name, value)) = map.next_entry::<String, V>()? {
                    fields.set(name, value);
                    if fields.0.len() > MAX_FIELDS {
                        return Err(A::Error::custom(format_args!("more than {MAX_FIELDS} fields")));
                    }
                }
                Ok(fields)
            }
        }
        deserializer.deserialize_map(Reader(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    impl WrittenBody {
        /// The bytes that an engine reads.
        pub(crate) fn flat(self) -> Vec<u8> {
            let exact = http_body::Body::size_hint(&self).exact();
            let flat = Vec::from(self.0).concat();
            assert_eq!(exact, Some(flat.len() as u64));
            flat
        }
    }

    fn along(body: &str) -> String {
        let client = Body::of_client(body.as_bytes()).unwrap();
        String::from_utf8(client.along.written().unwrap().flat()).unwrap()
    }

    #[test]
    fn a_salt_takes_the_place_of_the_clients_and_other_fields_stay_as_they_are() {
        let asked = |body: &'static str, salt: Option<&str>| Request {
            id: "r".into(),
            tokens: vec![1].into(),
            sampling: std::sync::Arc::default(),
            body: Bytes::from_static(body.as_bytes()).into(),
            salt: salt.map(std::sync::Arc::from),
        };
        let along = |body, salt| {
            let client = Client::of(&asked(body, salt)).unwrap();
            String::from_utf8(client.along.written().unwrap().flat()).unwrap()
        };
        let body = r#"{"prompt":"x","cache_salt":"mine","big":1e400,"vendor":1.10}"#;
        assert_eq!(along(body, Some("ab")), r#"{"cache_salt":"ab","big":1e400,"vendor":1.10}"#);
        assert_eq!(along(body, None), r#"{"cache_salt":"mine","big":1e400,"vendor":1.10}"#);
        assert_eq!(along("", Some("ab")), r#"{"cache_salt":"ab"}"#);
    }

    #[test]
    fn both_legs_read_a_body_once() {
        let body = ClientBody::from(Bytes::from_static(br#"{"vendor":1e400,"none":null,"seed":1}"#));
        let read = |body: &ClientBody| match &body.read().as_ref().unwrap().along.0.0[0].1 {
            Value::Raw(raw) => raw.clone(),
            Value::Tokens(_) => panic!("nobody set tokens"),
        };
        assert!(Arc::ptr_eq(&read(&body), &read(&body.clone())));
        assert!(body.sets("vendor"));
        assert!(!body.sets("none") && !body.sets("seed") && !body.sets("absent"));
        assert!(!ClientBody::default().sets("vendor"));
        let broken = ClientBody::from(Bytes::from_static(br#"{"vendor":"#));
        assert!(!broken.sets("vendor") && broken.read().is_err());
    }

    #[test]
    fn the_page_of_parameters_says_what_an_engine_gets() {
        let page = include_str!("../../../docs/parameters.md");
        let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
        let mut seen = 0;
        for row in rows {
            let cells: Vec<&str> = row.trim_end_matches(" |").split(" | ").collect();
            let [name, door, vllm, ..] = cells[..] else { panic!("{row}") };
            let name = name.trim_end_matches('`');
            let rule = rule(name);
            let fits = match vllm {
                "as sent" => rule.is_none(),
                "written by Baton" => rule == Some(Rule::Ours),
                "-" => rule.is_some() || door.starts_with("400"),
                _ => true,
            };
            assert!(fits, "{row}: {rule:?}");
            seen += 1;
        }
        assert!(seen > 60);
    }

    #[test]
    fn each_field_has_one_rule() {
        let names: BTreeSet<&str> = FIELDS.iter().map(|(name, _)| *name).collect();
        assert_eq!(names.len(), FIELDS.len());
    }

    #[test]
    fn unknown_fields_go_along_byte_for_byte() {
        let body = r#"{"priority":-3,"vendor":{"b":1.10,"a":[1e400,"\u00e9"]},"model":"x","guided_json":{"type": "object"},"cache_salt":"s"}"#;
        assert_eq!(
            along(body),
            r#"{"priority":-3,"vendor":{"b":1.10,"a":[1e400,"\u00e9"]},"guided_json":{"type": "object"},"cache_salt":"s"}"#
        );
    }

    #[test]
    fn ours_served_and_private_fields_never_go_along() {
        for (name, rule) in FIELDS {
            let value = if *rule == Rule::Refused { "null" } else { "1" };
            assert_eq!(along(&format!("{{\"{name}\":{value}}}")), "{}", "{name}");
        }
    }

    #[test]
    fn what_cannot_be_served_is_refused_by_name() {
        for (name, _) in FIELDS.iter().filter(|(_, rule)| *rule == Rule::Refused) {
            let error = Body::of_client(format!("{{\"{name}\":[1]}}").as_bytes()).unwrap_err();
            assert!(error.text.contains(name) && error.remedy.contains(name), "{error}");
            for nothing in ["null", "false", "\"\"", "[]", "{ }"] {
                assert_eq!(along(&format!("{{\"{name}\":{nothing}}}")), "{}");
            }
            assert!(
                Body::of_client(format!("{{\"{name}\":\" \"}}").as_bytes()).is_err(),
                "a space is something"
            );
        }
    }

    #[test]
    fn fields_in_which_clients_have_no_say_do_not_go_along_within_another_field() {
        for (name, rule) in FIELDS.iter().filter(|(_, rule)| *rule == Rule::Private) {
            let body = format!(r#"{{"vllm_xargs":{{"{name}":"x","mine":[1.10]}}}}"#);
            assert_eq!(along(&body), r#"{"vllm_xargs":{"mine":[1.10]}}"#, "{rule:?}");
            assert_eq!(along(&format!(r#"{{"vllm_xargs":{{"{name}":{{}}}}}}"#)), r#"{"vllm_xargs":{}}"#);
            // Escapes name the same field.
            let escaped = format!("\\u{:04x}{}", u32::from(name.as_bytes()[0]), &name[1..]);
            assert_eq!(along(&format!(r#"{{"vllm_xargs":{{"{escaped}":1}}}}"#)), r#"{"vllm_xargs":{}}"#);
        }
        for as_it_is in [r#"{"vllm_xargs":{"mine": 1}}"#, r#"{"vllm_xargs":[1]}"#, r#"{"vllm_xargs":7}"#] {
            assert_eq!(along(as_it_is), as_it_is);
        }
    }

    #[test]
    fn seeds_are_noticed_and_bad_bodies_refused() {
        let seeded = |body: &str| Body::of_client(body.as_bytes()).unwrap().seeded;
        assert!(seeded(r#"{"seed":0}"#) && !seeded(r#"{"seed":null}"#) && !seeded("{}") && !seeded(""));
        for body in ["[]", "{", "3", r#"{"a":}"#, "\u{0}"] {
            assert_eq!(Body::of_client(body.as_bytes()).unwrap_err().stage, Stage::Prepare);
        }
        let many: Vec<String> = (0..=MAX_FIELDS).map(|at| format!("\"f{at}\":1")).collect();
        assert!(Body::of_client(format!("{{{}}}", many.join(",")).as_bytes()).is_err());
    }

    #[test]
    fn a_field_given_twice_is_sent_once() {
        assert_eq!(along(r#"{"a":1,"b":2,"a":3}"#), r#"{"a":3,"b":2}"#);
        let mut body = Body::default();
        body.set("a", &1).unwrap();
        body.set("a", "x").unwrap();
        assert_eq!(body.take("a").unwrap().get(), "\"x\"");
        assert!(body.take("a").is_none());
    }

    #[test]
    fn token_ids_are_a_value_like_any_other() {
        let mut body = Body::default();
        body.set("a", &1).unwrap();
        body.set_tokens("prompt", &vec![7, 80_000].into());
        body.set("z\"", "x").unwrap();
        assert_eq!(&*body.written().unwrap().flat(), br#"{"a":1,"prompt":[7,80000],"z\"":"x"}"#);
        assert_eq!(serde_json::to_vec(&body).unwrap(), body.written().unwrap().flat());
        assert_eq!(&*Body::default().written().unwrap().flat(), b"{}");
    }

    proptest! {
        #[test]
        fn bytes_of_any_kind_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(client) = Body::of_client(&bytes) {
                let written = client.along.written().unwrap().flat();
                prop_assert!(serde_json::from_slice::<serde_json::Value>(&written).is_ok());
            }
        }
    }
}
