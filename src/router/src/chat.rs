//! Chats as clients send them, and how the built-in vocabulary's model reads them.

use std::borrow::Cow;
use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, Serializer};
use serde_json::value::RawValue;

/// One message; what is neither role nor content is kept for the template.
#[derive(Debug)]
pub(crate) struct Message<'a> {
    pub(crate) role: Cow<'a, str>,
    pub(crate) content: Option<Cow<'a, str>>,
    /// Lengths of the content's parts, which have a line end between them; one where it is a string.
    pub(crate) parts: Vec<usize>,
    pub(crate) rest: Vec<(Cow<'a, str>, &'a RawValue)>,
}

/// All that goes into a prompt.
#[derive(Debug)]
pub(crate) struct Chat<'a> {
    pub(crate) messages: &'a [Message<'a>],
    pub(crate) tools: Option<&'a RawValue>,
    pub(crate) template_kwargs: Option<&'a RawValue>,
    pub(crate) documents: Option<&'a RawValue>,
    pub(crate) reasoning_effort: Option<&'a str>,
    pub(crate) add_generation_prompt: bool,
    /// The last message is left open, and the answer goes on from it.
    pub(crate) continues: bool,
}

impl<'a> Chat<'a> {
    /// One of messages alone, which an answer is to follow.
    pub(crate) const fn plain(messages: &'a [Message<'a>]) -> Self {
        Self {
            messages,
            tools: None,
            template_kwargs: None,
            documents: None,
            reasoning_effort: None,
            add_generation_prompt: true,
            continues: false,
        }
    }
}

/// Why a chat has no prompt, and the field at fault.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ChatError {
    pub(crate) param: &'static str,
    pub(crate) message: String,
}

impl ChatError {
    pub(crate) fn template(error: &minijinja::Error) -> Self {
        let message = error.detail().map_or_else(|| error.to_string(), str::to_owned);
        Self { param: "messages", message: format!("the chat template refuses these messages: {message}") }
    }

    pub(crate) fn messages(message: impl Into<String>) -> Self {
        Self { param: "messages", message: message.into() }
    }

    pub(crate) fn kwargs(message: &str) -> Self {
        Self { param: "chat_template_kwargs", message: format!("tools or chat_template_kwargs: {message}") }
    }
}

/// A map whose keys stay in order.
pub(crate) struct Pairs<K>(pub(crate) Vec<(K, minijinja::Value)>);

impl<K: Serialize> Serialize for Pairs<K> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

impl<'de> Deserialize<'de> for Message<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MessageVisitor)
    }
}

/// Members of a message beside role and content at most: engines know a handful.
const MAX_MEMBERS: usize = 64;

struct MessageVisitor;

impl<'de> Visitor<'de> for MessageVisitor {
    type Value = Message<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a message, which is an object with role and content")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Message<'de>, A::Error> {
        let (mut role, mut content, mut rest) = (None, None, Vec::new());
        let mut parts = Vec::new();
        while let Some(Text(name)) = map.next_key::<Text<'de>>()? {
            match name.as_ref() {
                "role" => role = Some(map.next_value::<Text<'de>>()?.0),
                "content" => {
                    let read = map.next_value::<Option<Content<'de>>>()?;
                    (content, parts) = read.map_or((None, Vec::new()), |read| (Some(read.0), read.1));
                }
                _ if rest.len() == MAX_MEMBERS => {
                    return Err(de::Error::custom(format_args!(
                        "a message has more than {MAX_MEMBERS} members"
                    )));
                }
                _ => rest.push((name, map.next_value::<&'de RawValue>()?)),
            }
        }
        let role = role.ok_or_else(|| de::Error::missing_field("role"))?;
        Ok(Message { role, content, parts, rest })
    }
}

/// A string, borrowed from the body where it has no escapes.
#[derive(Debug)]
pub(crate) struct Text<'a>(pub(crate) Cow<'a, str>);

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(TextVisitor)
    }
}

struct TextVisitor;

impl<'de> Visitor<'de> for TextVisitor {
    type Value = Text<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Text<'de>, E> {
        Ok(Text(Cow::Borrowed(text)))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Text<'de>, E> {
        Ok(Text(Cow::Owned(text.to_owned())))
    }
}

/// Content: a string, or a list of parts of which each is text, with their lengths.
struct Content<'a>(Cow<'a, str>, Vec<usize>);

impl<'de> Deserialize<'de> for Content<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ContentVisitor)
    }
}

struct ContentVisitor;

impl<'de> Visitor<'de> for ContentVisitor {
    type Value = Content<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of content parts")
    }

    fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Content<'de>, E> {
        Ok(Content(Cow::Borrowed(text), vec![text.len()]))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Content<'de>, E> {
        Ok(Content(Cow::Owned(text.to_owned()), vec![text.len()]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Content<'de>, A::Error> {
        let (mut whole, mut lengths): (Option<Cow<'de, str>>, _) = (None, Vec::new());
        while let Some(Part(text)) = parts.next_element()? {
            lengths.push(text.len());
            whole = Some(match whole {
                None => text,
                Some(mut before) => {
                    let joined = before.to_mut();
                    joined.push('\n');
                    joined.push_str(&text);
                    before
                }
            });
        }
        Ok(Content(whole.unwrap_or_default(), lengths))
    }
}

struct Part<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for Part<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PartVisitor)
    }
}

struct PartVisitor;

impl<'de> Visitor<'de> for PartVisitor {
    type Value = Part<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a content part of type text")
    }

    fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Part<'de>, E> {
        Ok(Part(Cow::Borrowed(text)))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Part<'de>, E> {
        Ok(Part(Cow::Owned(text.to_owned())))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Part<'de>, A::Error> {
        let mut found = None;
        while let Some(Text(name)) = map.next_key::<Text<'de>>()? {
            match name.as_ref() {
                "text" | "refusal" => found = Some(map.next_value::<Text<'de>>()?.0),
                "type" => {
                    let Text(kind) = map.next_value()?;
                    if !matches!(kind.as_ref(), "text" | "input_text" | "output_text" | "refusal") {
                        let message =
                            format!("content parts of type {kind:?} are not served here, only text");
                        return Err(de::Error::custom(message));
                    }
                }
                _ => {
                    map.next_value::<de::IgnoredAny>()?;
                }
            }
        }
        found.map(Part).ok_or_else(|| de::Error::missing_field("text"))
    }
}

/// The chat in ChatML, for the built-in vocabulary: tools come first, as a system message of their
/// own, then each message between its marks.
pub(crate) fn render_plain(chat: &Chat<'_>) -> String {
    let room: usize = chat.messages.iter().map(|m| m.content.as_ref().map_or(0, |c| c.len()) + 48).sum();
    let mut out = String::with_capacity(room + 64 + chat.tools.map_or(0, |tools| tools.get().len()));
    out.push_str("<|begin|>");
    if let Some(tools) = chat.tools {
        out.push_str("<|im_start|>system\nTools, as JSON:\n");
        out.push_str(tools.get());
        out.push_str("<|im_end|>\n");
    }
    for message in chat.messages {
        out.push_str("<|im_start|>");
        out.push_str(&message.role);
        out.push('\n');
        out.push_str(message.content.as_deref().unwrap_or_default());
        for (name, value) in &message.rest {
            if value.get() != "null" {
                out.push_str("\n<");
                out.push_str(name);
                out.push('>');
                out.push_str(value.get());
            }
        }
        out.push_str("<|im_end|>\n");
    }
    if chat.continues {
        out.truncate(out.len() - "<|im_end|>\n".len());
    } else if chat.add_generation_prompt {
        out.push_str("<|im_start|>assistant\n");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(json: &str) -> Result<Vec<Message<'_>>, String> {
        serde_json::from_str(json).map_err(|e| e.to_string())
    }

    #[test]
    fn content_is_text_or_parts_of_text() {
        let json = r#"[{"role":"user","content":[{"type":"text","text":"a\n"},{"text":"b","type":"text"}]},
            {"role":"assistant","content":null,"tool_calls":[]}, {"content":"c","role":"tool","tool_call_id":"x"}]"#;
        let read = messages(json).unwrap();
        assert_eq!(read[0].content.as_deref(), Some("a\n\nb"));
        assert_eq!((read[1].content.as_deref(), read[1].rest.len()), (None, 1));
        assert_eq!(read[2].rest[0].1.get(), "\"x\"");
    }

    #[test]
    fn what_is_not_text_is_refused_by_name() {
        let error =
            messages(r#"[{"role":"user","content":[{"type":"image_url","image_url":{}}]}]"#).unwrap_err();
        assert!(error.contains("image_url") && error.contains("line 1"), "{error}");
        assert!(messages(r#"[{"content":"x"}]"#).unwrap_err().contains("missing field `role`"));
        assert!(messages(r#"[{"role":"user","content":5}]"#).unwrap_err().contains("a string or a list"));
        assert!(messages(r#"[{"role":"user","content":[{"type":"text"}]}]"#).unwrap_err().contains("text"));
    }

    #[test]
    fn the_built_in_model_reads_chatml() {
        let read = messages(r#"[{"role":"user","content":"hi"}]"#).unwrap();
        let mut chat = Chat::plain(&read);
        assert_eq!(render_plain(&chat), "<|begin|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
        let tools: &RawValue = serde_json::from_str("[{}]").unwrap();
        chat.tools = Some(tools);
        chat.add_generation_prompt = false;
        let expected =
            "<|begin|><|im_start|>system\nTools, as JSON:\n[{}]<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n";
        assert_eq!(render_plain(&chat), expected);
    }
}
