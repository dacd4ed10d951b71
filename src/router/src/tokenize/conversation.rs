//! A chat's messages as a template gets them: made ready the way vLLM makes them ready, so that one chat is one prompt.

use minijinja::Value;
use minijinja::value::Serde;
use serde_json::value::RawValue;

use crate::chat::{Chat, ChatError, Message, Pairs};

/// A marker at the end of a message that the answer continues, to find its position in the rendered text.
pub(super) const GOES_ON: &str = "BATON_GOES_ON_FROM_HERE ";

/// The features of the API that a template supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TemplateStyle {
    /// It goes through a message's content part by part.
    pub(super) parts: bool,
    /// It knows the role `developer`.
    pub(super) developer: bool,
}

impl TemplateStyle {
    pub(super) fn of(source: &str) -> Self {
        let developer = source.contains("\"developer\"") || source.contains("'developer'");
        Self { parts: goes_through_content(source), developer }
    }
}

/// Whether a loop of a template goes through a message's content. `content` is that of a message, whatever it was set from.
fn goes_through_content(source: &str) -> bool {
    let tags =
        || source.split("{%").skip(1).filter_map(|rest| rest.split_once("%}")).map(|(tag, _)| trimmed(tag));
    let loops = || tags().filter_map(|tag| tag.strip_prefix("for ")?.split_once(" in "));
    // The name of a loop's list is its first word: filters, slices and conditions follow.
    let bare = |text: &str| text.trim().split(['|', ' ', ':']).next().unwrap_or_default().to_owned();
    let plain = |text: &str| {
        let text = bare(text);
        text.split_once('[')
            .filter(|(_, rest)| rest.starts_with(|c: char| c.is_ascii_digit()))
            .map_or(text.clone(), |(name, _)| name.to_owned())
    };
    let mut lists = vec!["messages".to_owned()];
    for tag in tags() {
        if let Some((name, value)) = tag.strip_prefix("set ").and_then(|rest| rest.split_once('='))
            && (lists.contains(&plain(value)) || value.trim().starts_with("messages["))
        {
            lists.push(name.trim().to_owned());
        }
    }
    let of_messages = |of: &str| lists.contains(&plain(of)) || of.trim().starts_with("messages[");
    let each: Vec<&str> = loops().filter(|(_, of)| of_messages(of)).map(|(name, _)| name.trim()).collect();
    loops().any(|(_, of)| {
        let of = bare(of);
        let content = |name: &&str| {
            of == format!("{name}.content")
                || of == format!("{name}['content']")
                || of == format!("{name}[\"content\"]")
        };
        of == "content" || each.iter().any(content)
    })
}

fn trimmed(tag: &str) -> &str {
    tag.trim_matches(|c: char| c.is_whitespace() || matches!(c, '-' | '+'))
}

/// The messages, in the order in which the template gets them.
pub(super) fn messages(chat: &Chat<'_>, style: TemplateStyle) -> Result<Vec<Value>, ChatError> {
    let turned = !style.developer && chat.messages.iter().any(|message| message.role == "developer");
    let role = |message: &Message<'_>| match message.role.as_ref() {
        "developer" if turned => "system".to_owned(),
        role => role.to_owned(),
    };
    let system: Vec<usize> =
        (0..chat.messages.len()).filter(|&at| role(&chat.messages[at]) == "system").collect();
    // Templates that know no developer want one system message, at the start.
    let merged = turned && system != [0];
    let mut list = Vec::with_capacity(chat.messages.len());
    if merged {
        let texts = system.iter().filter_map(|&at| chat.messages[at].content.as_deref());
        let text = texts.filter(|text| !text.is_empty()).collect::<Vec<_>>().join("\n\n");
        list.push(object(vec![("role", Value::from("system")), ("content", Value::from(text))]));
    }
    let last = chat.messages.len().saturating_sub(1);
    for (at, message) in chat.messages.iter().enumerate() {
        if merged && system.contains(&at) {
            continue;
        }
        let role = role(message);
        let goes_on = chat.continues && at == last;
        let mut fields =
            vec![("role", Value::from(role.as_str())), ("content", content(message, style, goes_on))];
        more(message, turned, &mut fields)?;
        list.push(object(fields));
    }
    Ok(list)
}

fn object(fields: Vec<(&'static str, Value)>) -> Value {
    Value::from(Serde(Pairs(fields)))
}

/// A message's content: its text, or a list of its parts. One without content has none of either.
fn content(message: &Message<'_>, style: TemplateStyle, goes_on: bool) -> Value {
    let mut text = message.content.as_deref().unwrap_or_default().to_owned();
    let end = if goes_on { GOES_ON } else { "" };
    if !style.parts || message.role == "tool" {
        text.push_str(end);
        return Value::from(text);
    }
    let (mut from, count) = (0, message.parts.len());
    let part = |(at, length): (usize, &usize)| {
        let mut piece = text.get(from..from + length).unwrap_or_default().to_owned();
        from += length + 1;
        piece.push_str(if at + 1 == count { end } else { "" });
        object(vec![("type", Value::from("text")), ("text", Value::from(piece))])
    };
    message.parts.iter().enumerate().map(part).collect::<Vec<_>>().into()
}

/// Further fields of a message for the template: calls, the id of the call that a tool answers, reasoning, and names.
fn more(
    message: &Message<'_>,
    turned: bool,
    fields: &mut Vec<(&'static str, Value)>,
) -> Result<(), ChatError> {
    // Of a name that is there twice, the last.
    let of = |name: &str| message.rest.iter().rev().find(|(known, _)| known == name).map(|(_, raw)| *raw);
    let said = |name: &str| of(name).filter(|raw| raw.get() != "null");
    match message.role.as_ref() {
        "assistant" => {
            if let Some(reasoning) = said("reasoning").or_else(|| said("reasoning_content")) {
                let reasoning = parsed(reasoning)?;
                fields.extend(
                    ["thinking", "reasoning", "reasoning_content"].map(|name| (name, reasoning.clone())),
                );
            }
            if let Some(calls) = said("tool_calls") {
                let calls = tool_calls(calls)?;
                if !calls.is_empty() {
                    fields.push(("tool_calls", calls.into()));
                }
            }
        }
        "tool" => {
            if let Some(id) = of("tool_call_id") {
                fields.push(("tool_call_id", parsed(id)?));
            }
        }
        "developer" if !turned => fields.push(("tools", of("tools").map_or(Ok(Value::from(())), parsed)?)),
        _ => {}
    }
    for name in ["name", "task"] {
        if let Some(raw) = of(name).filter(|raw| raw.get().starts_with('"')) {
            fields.push((name, parsed(raw)?));
        }
    }
    Ok(())
}

fn parsed(raw: &RawValue) -> Result<Value, ChatError> {
    serde_json::from_str(raw.get()).map_err(|error| ChatError::messages(error.to_string()))
}

/// Calls of a message, each with its arguments as an object: they arrive as text, and templates need the object.
/// Arguments that are no object have been in the conversation for a while, so they count as none.
fn tool_calls(raw: &RawValue) -> Result<Vec<Value>, ChatError> {
    let calls: Vec<serde_json::Map<String, serde_json::Value>> = serde_json::from_str(raw.get())
        .map_err(|_| ChatError::messages("tool_calls is a list of calls, which are objects"))?;
    let call = |mut call: serde_json::Map<String, serde_json::Value>| {
        let is_function = call.get("type").is_none_or(|kind| kind == "function");
        let function = call.get_mut("function").and_then(serde_json::Value::as_object_mut);
        let Some(function) = function.filter(|_| is_function) else {
            return Err(ChatError::messages(
                "a call among tool_calls is one of type \"function\" with a function",
            ));
        };
        let arguments = match function.get("arguments") {
            Some(serde_json::Value::String(text)) => serde_json::from_str(text).unwrap_or_default(),
            Some(other) => other.clone(),
            None => serde_json::Value::Null,
        };
        let arguments = if arguments.is_object() { arguments } else { serde_json::json!({}) };
        function.insert("arguments".into(), arguments);
        Ok(Value::from(Serde(call)))
    };
    calls.into_iter().map(call).collect()
}

/// A chat that its answer goes on from, cut where its last message ends.
pub(super) fn cut(text: &str, last: &Message<'_>, style: TemplateStyle) -> Result<String, ChatError> {
    let whole = last.content.as_deref().unwrap_or_default();
    let length = last.parts.last().copied().filter(|_| style.parts).unwrap_or(whole.len());
    let wanted = whole[whole.len() - length..].trim();
    let mark = GOES_ON.trim_end();
    let Some(at) = text.rfind(mark).filter(|_| text.contains(wanted)) else {
        let why = "continue_final_message: the chat template does not show the last message as it is";
        return Err(ChatError { param: "continue_final_message", message: why.into() });
    };
    let whole = text[at..].starts_with(GOES_ON);
    Ok(if whole { text[..at].to_owned() } else { text[..at].trim_end().to_owned() })
}
