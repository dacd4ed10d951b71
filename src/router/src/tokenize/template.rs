//! Chat templates: Jinja as model folders bring it, with what Hugging Face's renderer adds.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};

use super::conversation::{self, TemplateStyle};
use crate::chat::{Chat, ChatError, Pairs};
use crate::tools::ToolFormat;

/// Instructions that a rendering may take: thousands of messages, and a fraction of a second.
const FUEL: u64 = 5_000_000;
/// Bytes of JSON that one rendering may write. Fuel does not count them, and each `tojson` of a text that is JSON already
/// doubles its backslashes.
const MOST_JSON: usize = 16 << 20;

/// Bytes of JSON that a rendering has written so far.
struct JsonTally(usize);

/// Texts of the special tokens that templates refer to.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpecialTexts {
    pub(crate) bos: Option<String>,
    pub(crate) eos: Option<String>,
    pub(crate) unk: Option<String>,
    pub(crate) pad: Option<String>,
}

pub(crate) struct Template {
    environment: Environment<'static>,
    has_tools: bool,
    /// Of the template for chats without tools, and of the other one.
    styles: [TemplateStyle; 2],
    /// The format in which the model writes calls, as far as this template shows it.
    pub(crate) tool_format: Option<ToolFormat>,
    /// Whether it can write the time into a chat.
    pub(crate) uses_time: bool,
    texts: SpecialTexts,
}

impl Template {
    /// `with_tools` is used in place of `source` for chats that have tools.
    pub(crate) fn new(
        source: String,
        with_tools: Option<String>,
        texts: SpecialTexts,
    ) -> Result<Self, String> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|e| e.to_string())?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(100);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", to_json);
        let has_tools = with_tools.is_some();
        let styles = [TemplateStyle::of(&source), TemplateStyle::of(with_tools.as_ref().unwrap_or(&source))];
        let tool_format = ToolFormat::detect(with_tools.as_ref().unwrap_or(&source));
        let uses_time = source.contains("strftime_now");
        for (name, source) in [("chat", Some(source)), ("tools", with_tools)] {
            if let Some(source) = source {
                let source = without_generation_tags(&source);
                environment.add_template_owned(name, source).map_err(|e| format!("chat template: {e:#}"))?;
            }
        }
        Ok(Self { environment, has_tools, styles, tool_format, uses_time, texts })
    }

    /// The chat as the model reads it. The work is bounded, and so is the memory, unless the template joins a text with
    /// itself again and again: only the operator can bring such a template.
    pub(crate) fn render(&self, chat: &Chat<'_>) -> Result<String, ChatError> {
        let tools = chat.tools.map(|tools| parse(tools.get())).transpose()?;
        let with_tools = tools.is_some() && self.has_tools;
        let styles = self.styles[usize::from(with_tools)];
        let messages = conversation::messages(chat, styles)?;
        let documents = chat.documents.map(|documents| parse(documents.get())).transpose()?;
        let mut context: Vec<(String, Value)> = vec![
            ("messages".into(), messages.into()),
            ("tools".into(), tools.unwrap_or_else(|| Value::from(()))),
            ("documents".into(), documents.unwrap_or_else(|| Value::from(()))),
        ];
        let texts = [
            ("bos_token", &self.texts.bos),
            ("eos_token", &self.texts.eos),
            ("unk_token", &self.texts.unk),
            ("pad_token", &self.texts.pad),
        ];
        let known = texts.into_iter().filter_map(|(name, text)| Some((name.into(), text.as_deref()?.into())));
        context.extend(known);
        if let Some(more) = chat.template_kwargs {
            let more = parse(more.get())?;
            let keys = more.try_iter().map_err(|_| ChatError::kwargs("is an object"))?;
            for key in keys {
                let value = more.get_item(&key).map_err(|e| ChatError::kwargs(&e.to_string()))?;
                context.push((key.to_string(), value));
            }
        }
        if let Some(effort) = chat.reasoning_effort {
            let open = !context.iter().any(|(name, _)| name == "enable_thinking");
            context.extend(open.then(|| ("enable_thinking".into(), (effort != "none").into())));
            context.push(("reasoning_effort".into(), effort.into()));
        }
        context
            .push(("add_generation_prompt".into(), (chat.add_generation_prompt && !chat.continues).into()));
        let name = if with_tools { "tools" } else { "chat" };
        let template = self.environment.get_template(name).map_err(|e| ChatError::template(&e))?;
        let render = || template.render(Value::from(Serde(Pairs(context))));
        // The renderer panics on some inputs, for example on a `reverse` of nothing. That must not end this process.
        let text = std::panic::catch_unwind(std::panic::AssertUnwindSafe(render))
            .map_err(|_| ChatError::messages("the chat template cannot be used on these messages"))?
            .map_err(|e| ChatError::template(&e))?;
        match chat.messages.last().filter(|_| chat.continues) {
            Some(last) => conversation::cut(&text, last, styles),
            None => Ok(text),
        }
    }
}

fn parse(json: &str) -> Result<Value, ChatError> {
    serde_json::from_str(json).map_err(|e| ChatError::kwargs(&e.to_string()))
}

/// Training-only marks, which are no part of a prompt.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let Some(close) = rest[open + 2..].find("%}").map(|at| open + at + 4) else { break };
        let word = rest[open + 2..close - 2].trim_matches(['-', '+', ' ', '\n', '\t']);
        if !matches!(word, "generation" | "endgeneration") {
            out.push_str(&rest[..close]);
            rest = &rest[close..];
            continue;
        }
        let (before, mut after) = (&rest[..open], &rest[close..]);
        let trims_before = rest[open + 2..].starts_with('-');
        let trims_after = rest[..close - 2].ends_with('-');
        out.push_str(if trims_before { before.trim_end() } else { before });
        after = if trims_after { after.trim_start() } else { after.strip_prefix('\n').unwrap_or(after) };
        rest = after;
    }
    out.push_str(rest);
    out
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// The date in UTC, for the directives that templates use.
fn strftime_now(format: &str) -> Result<String, Error> {
    let now =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |now| now.as_secs());
    super::calendar::format_utc(now, format).ok_or_else(|| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now: unknown directive in {format:?}"))
    })
}

/// JSON as Python's `json.dumps(value, ensure_ascii=False)` writes it.
fn to_json(state: &mut State<'_, '_>, value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent").ok().flatten();
    let sorted: Option<bool> = kwargs.get("sort_keys").ok().flatten();
    let _: Option<bool> = kwargs.get("ensure_ascii").ok().flatten();
    let _: Option<Value> = kwargs.get("separators").ok().flatten();
    kwargs.assert_all_used()?;
    let mut out = Vec::new();
    let style = Style { indent: indent.map(|width| width.min(16)), sorted: sorted.unwrap_or(false) };
    style.write(&mut out, value, 0)?;
    let written = state.get_or_insert_extension(JsonTally(0));
    written.0 += out.len();
    if written.0 > MOST_JSON {
        return Err(too_much_json());
    }
    Ok(Value::from_safe_string(String::from_utf8(out).expect("written from strings")))
}

fn too_much_json() -> Error {
    Error::new(ErrorKind::InvalidOperation, "tojson: more than 16 MiB of JSON")
}

struct Style {
    indent: Option<usize>,
    sorted: bool,
}

impl Style {
    fn write(&self, out: &mut Vec<u8>, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > crate::json::MAX_DEPTH {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: the value nests too deep"));
        }
        if out.len() > MOST_JSON {
            return Err(too_much_json());
        }
        match value.kind() {
            ValueKind::Undefined | ValueKind::None => out.extend_from_slice(b"null"),
            ValueKind::String => python_string(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list(out, b"[]", (depth, items.len()), |out, at| {
                    self.write(out, &items[at], depth + 1)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort_by_key(ToString::to_string);
                }
                self.list(out, b"{}", (depth, keys.len()), |out, at| {
                    python_string(out, &keys[at].to_string());
                    out.extend_from_slice(b": ");
                    self.write(out, &value.get_item(&keys[at])?, depth + 1)
                })?;
            }
            ValueKind::Bool | ValueKind::Number => {
                let text = serde_json::to_string(value)
                    .map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
                out.extend_from_slice(text.as_bytes());
            }
            _ => return Err(Error::new(ErrorKind::BadSerialization, "tojson: not a JSON value")),
        }
        Ok(())
    }

    fn list(
        &self,
        out: &mut Vec<u8>,
        brackets: &[u8; 2],
        (depth, length): (usize, usize),
        mut item: impl FnMut(&mut Vec<u8>, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(brackets[0]);
        for at in 0..length {
            if at > 0 {
                out.extend_from_slice(if self.indent.is_some() { b"," } else { b", " });
            }
            self.line(out, depth + 1);
            item(out, at)?;
        }
        if length > 0 {
            self.line(out, depth);
        }
        out.push(brackets[1]);
        Ok(())
    }

    fn line(&self, out: &mut Vec<u8>, depth: usize) {
        if let Some(width) = self.indent {
            out.push(b'\n');
            out.extend(std::iter::repeat_n(b' ', width * depth));
        }
    }
}

/// Python leaves U+007F as it is, and knows short names for two more control characters.
fn python_string(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    for piece in text.split_inclusive(['\u{7f}', '\u{8}', '\u{c}']) {
        let last = piece.chars().next_back().filter(|c| matches!(c, '\u{7f}' | '\u{8}' | '\u{c}'));
        let plain = last.map_or(piece, |_| &piece[..piece.len() - 1]);
        crate::json::escape(out, plain);
        match last {
            Some('\u{8}') => out.extend_from_slice(b"\\b"),
            Some('\u{c}') => out.extend_from_slice(b"\\f"),
            Some(_) => out.push(0x7f),
            None => {}
        }
    }
    out.push(b'"');
}
