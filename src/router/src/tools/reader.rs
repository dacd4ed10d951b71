//! Goes through an answer's text, and separates calls from text.

use std::sync::Arc;

use super::deepseek::DeepSeek;
use super::draft::Draft;
use super::fixed::FixedText;
use super::marks::Marks;
use super::mistral::Mistral;
use super::object::Object;
use super::offer::ForcedFormat;
use super::python::PythonList;
use super::value::Step;
use super::{Offer, ToolFormat};
use crate::output_parsing::Parts;

/// Text that may be a call and has no name yet, at most: more is no call.
const MAX_HELD_BYTES: usize = 256 << 10;
/// Calls of one answer at most; what follows them is text.
const MAX_CALLS: usize = 128;
/// Longest name of a function.
const MAX_NAME_BYTES: usize = 256;

/// Reads one answer.
#[derive(Debug)]
pub(crate) struct Reader {
    offer: Arc<Offer>,
    marks: Marks,
    /// Nothing but calls and whitespace so far: one may begin without a mark.
    bare: bool,
    body: Option<Body>,
    draft: Draft,
    /// The text since a call may have begun, until that is certain.
    held: String,
    /// A call is under way whose name was handed on.
    committed: bool,
    /// The call under way is not wanted.
    unwanted: bool,
    calls: usize,
    /// Reused for text that is no part of a call.
    text: String,
}

/// The body of a call: after a mark, or from an opening bracket on.
#[derive(Debug)]
enum Body {
    Tagged { object: Object, end: Option<FixedText> },
    Object(Object),
    Mistral(Mistral),
    Python(PythonList),
    DeepSeek(DeepSeek),
}

impl Body {
    fn new(offer: &Offer, marked: bool) -> Self {
        // A list of objects, as Mistral's is.
        let format = if offer.forced.is_some() {
            ToolFormat::Mistral
        } else {
            offer.format.unwrap_or(ToolFormat::Hermes)
        };
        match format {
            ToolFormat::Hermes => Self::Tagged { object: Object::new(false), end: None },
            ToolFormat::Llama3Json => Self::Object(Object::new(!marked)),
            ToolFormat::Mistral => Self::Mistral(Mistral::new()),
            ToolFormat::Pythonic => Self::Python(PythonList::new()),
            ToolFormat::DeepSeek => Self::DeepSeek(DeepSeek::new()),
        }
    }

    fn push(&mut self, c: char, draft: &mut Draft) -> Step {
        match self {
            Self::Tagged { end: Some(end), .. } => end.push(c),
            Self::Tagged { object, end } => match object.push(c, draft) {
                Step::Done => {
                    *end = Some(FixedText::new("</tool_call>"));
                    Step::More
                }
                step => step,
            },
            Self::Object(object) => object.push(c, draft),
            Self::Mistral(calls) => calls.push(c, draft),
            Self::Python(calls) => calls.push(c, draft),
            Self::DeepSeek(calls) => calls.push(c, draft),
        }
    }

    /// Whether all was read but for what closes it.
    fn is_closing(&self) -> bool {
        match self {
            Self::Tagged { end, .. } => end.is_some(),
            Self::Object(_) => false,
            Self::Mistral(calls) => calls.is_closing(),
            Self::Python(calls) => calls.is_closing(),
            Self::DeepSeek(calls) => calls.is_closing(),
        }
    }
}

impl Reader {
    pub(crate) fn new(offer: Arc<Offer>) -> Self {
        let bare = offer.opener().is_some();
        Self {
            offer,
            marks: Marks::default(),
            bare,
            body: None,
            draft: Draft::default(),
            held: String::new(),
            committed: false,
            unwanted: false,
            calls: 0,
            text: String::new(),
        }
    }

    /// Number of calls that were handed on so far.
    pub(crate) fn calls(&self) -> usize {
        self.calls
    }

    /// Takes in a piece of the answer.
    pub(crate) fn push(&mut self, piece: &str, parts: &mut Parts) {
        if let Some(ForcedFormat::Arguments(name)) = &self.offer.forced {
            if self.calls == 0 && !piece.is_empty() {
                self.calls = 1;
                parts.call(0, self.offer.call_id(), name.clone());
            }
            return parts.arguments(0, piece);
        }
        for c in piece.chars() {
            self.one(c, parts);
        }
        self.push_arguments(parts);
    }

    /// The answer is over: what is held back is text, but for what closes a call or follows the last one.
    pub(crate) fn finish(&mut self, parts: &mut Parts) {
        let held = std::mem::take(&mut self.held);
        let closing = self.body.as_ref().is_some_and(Body::is_closing);
        if self.body.take().is_some() && !closing {
            parts.content(&held);
        }
        let rest = self.marks.take();
        if self.calls == 0 || !rest.trim().is_empty() {
            parts.content(&rest);
        }
        self.committed = false;
    }

    fn one(&mut self, c: char, parts: &mut Parts) {
        if self.body.is_some() {
            return self.in_body(c, parts);
        }
        if self.bare && self.offer.opener() == Some(c) {
            self.begin(false);
            return self.in_body(c, parts);
        }
        // Llama puts semicolons between calls.
        let several = self.bare && self.calls > 0 && self.offer.format == Some(ToolFormat::Llama3Json);
        let separator = several.then_some(';');
        self.text.clear();
        let found = self.marks.push(c, self.offer.marks(), separator, &mut self.text);
        parts.content(&self.text);
        self.bare &= !self.marks.is_empty();
        if found.is_some() {
            self.begin(true);
        }
    }

    fn begin(&mut self, marked: bool) {
        self.held = self.marks.take();
        self.bare = !marked;
        self.body = Some(Body::new(&self.offer, marked));
    }

    fn in_body(&mut self, c: char, parts: &mut Parts) {
        let Some(body) = &mut self.body else { return };
        let mut step = body.push(c, &mut self.draft);
        if let Some(name) = self.draft.take_name()
            && !self.commit(name, parts)
        {
            step = Step::Broken;
            self.draft = Draft::default();
        }
        match step {
            Step::More if self.committed || self.held.len() < MAX_HELD_BYTES => {
                if !self.committed {
                    self.held.push(c);
                }
                self.end_if_complete(parts);
            }
            Step::Done => {
                self.end_if_complete(parts);
                self.body = None;
                self.held.clear();
                self.bare = self.offer.opener().is_some();
            }
            // The text is no call, or no longer part of one.
            _ => {
                self.push_arguments(parts);
                self.committed = false;
                self.body = None;
                self.bare = false;
                parts.content(&std::mem::take(&mut self.held));
                self.one(c, parts);
            }
        }
    }

    /// Hands on that a call is made; false when it cannot be one.
    fn commit(&mut self, name: String, parts: &mut Parts) -> bool {
        let marked = !self.bare;
        let plain =
            !name.trim().is_empty() && name.len() <= MAX_NAME_BYTES && !name.contains(char::is_control);
        let offered = marked || self.offer.names.contains(&name);
        self.unwanted = self.offer.one_only && self.calls > 0;
        if !plain || !offered || (self.calls == MAX_CALLS && !self.unwanted) {
            return false;
        }
        self.committed = true;
        self.held.clear();
        if !self.unwanted {
            parts.call(self.calls, self.offer.call_id(), name);
            self.calls += 1;
        }
        true
    }

    fn push_arguments(&mut self, parts: &mut Parts) {
        let new_arguments = self.draft.new_arguments();
        if self.committed && !self.unwanted {
            parts.arguments(self.calls - 1, new_arguments);
        }
        new_arguments.clear();
    }

    fn end_if_complete(&mut self, parts: &mut Parts) {
        if self.draft.take_end() {
            self.push_arguments(parts);
            self.committed = false;
        }
    }
}
