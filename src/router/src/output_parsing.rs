//! Parses an answer's text as it arrives into reasoning, content and calls.

use std::sync::Arc;

use crate::reasoning::ReasoningSplitter;
use crate::tools::{Offer, Reader};

/// A piece of an answer, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Reasoning(String),
    Content(String),
    /// A call begins.
    Call {
        index: usize,
        id: String,
        name: String,
    },
    /// More of the call's arguments, which together are JSON.
    Arguments {
        index: usize,
        text: String,
    },
}

/// Pieces since they were last taken; what belongs together is one piece.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    list: Vec<Part>,
    has_content: bool,
}

impl Parts {
    pub(crate) fn reasoning(&mut self, text: &str) {
        match self.list.last_mut() {
            _ if text.is_empty() => {}
            Some(Part::Reasoning(before)) => before.push_str(text),
            _ => self.list.push(Part::Reasoning(text.to_owned())),
        }
    }

    pub(crate) fn content(&mut self, text: &str) {
        match self.list.last_mut() {
            _ if text.is_empty() => return,
            Some(Part::Content(before)) => before.push_str(text),
            _ => self.list.push(Part::Content(text.to_owned())),
        }
        self.has_content = true;
    }

    pub(crate) fn call(&mut self, index: usize, id: String, name: String) {
        self.list.push(Part::Call { index, id, name });
    }

    pub(crate) fn arguments(&mut self, index: usize, more: &str) {
        match self.list.last_mut() {
            _ if more.is_empty() => {}
            Some(Part::Arguments { index: of, text }) if *of == index => text.push_str(more),
            _ => self.list.push(Part::Arguments { index, text: more.to_owned() }),
        }
    }
}

/// How a call's answers are to be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct OutputPlan {
    /// Tools that were offered, where calls are looked for.
    pub(crate) offer: Option<Arc<Offer>>,
    /// Reasoning is separated from content; true when the prompt has opened it.
    pub(crate) reasoning: Option<bool>,
    /// Engines are asked to hold what follows reasoning to JSON.
    pub(crate) is_json: bool,
    /// Reasoning is separated and not shown.
    pub(crate) hides_reasoning: bool,
    /// Special tokens that are seen here though they are not shown, ascending.
    pub(crate) seen: Arc<[u32]>,
}

impl OutputPlan {
    /// Whether an answer's text is all that it says.
    pub(crate) fn is_plain(&self) -> bool {
        self.offer.is_none() && self.reasoning.is_none()
    }
}

/// Reads one answer.
#[derive(Debug)]
pub(crate) struct OutputParser {
    reasoning: Option<ReasoningSplitter>,
    hides_reasoning: bool,
    reader: Option<Reader>,
    parts: Parts,
    /// Reused for what comes after reasoning.
    rest: String,
}

impl OutputParser {
    pub(crate) fn new(plan: &OutputPlan) -> Self {
        Self {
            reasoning: plan.reasoning.map(|opened| ReasoningSplitter::new(opened, plan.is_json)),
            hides_reasoning: plan.hides_reasoning,
            reader: plan.offer.clone().map(Reader::new),
            parts: Parts::default(),
            rest: String::new(),
        }
    }

    /// Takes in a piece of text.
    pub(crate) fn push(&mut self, text: &str) {
        let Some(reasoning) = &mut self.reasoning else { return self.push_content(text) };
        let mut rest = std::mem::take(&mut self.rest);
        rest.clear();
        reasoning.push(text, &mut self.parts, &mut rest);
        self.push_content(&rest);
        self.rest = rest;
    }

    /// The answer is over. One that says nothing has empty content.
    pub(crate) fn finish(&mut self) {
        if let Some(mut reasoning) = self.reasoning.take() {
            let mut rest = String::new();
            reasoning.finish(&mut self.parts, &mut rest);
            self.push_content(&rest);
        }
        if let Some(reader) = &mut self.reader {
            reader.finish(&mut self.parts);
        }
        if !self.parts.has_content && !self.has_calls() {
            self.parts.list.push(Part::Content(String::new()));
        }
    }

    fn push_content(&mut self, text: &str) {
        match &mut self.reader {
            Some(reader) => reader.push(text, &mut self.parts),
            None => self.parts.content(text),
        }
    }

    /// Whether it makes a call.
    pub(crate) fn has_calls(&self) -> bool {
        self.reader.as_ref().is_some_and(|reader| reader.calls() > 0)
    }

    /// The parts since the last call.
    pub(crate) fn take(&mut self) -> Vec<Part> {
        let mut parts = std::mem::take(&mut self.parts.list);
        parts.retain(|part| !self.hides_reasoning || !matches!(part, Part::Reasoning(_)));
        parts
    }
}

/// All that an answer says.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) reasoning: Option<String>,
    pub(crate) content: Option<String>,
    /// Id, name and arguments.
    pub(crate) calls: Vec<(String, String, String)>,
}

impl Message {
    pub(crate) fn of(parts: Vec<Part>) -> Self {
        let mut message = Self::default();
        for part in parts {
            match part {
                Part::Reasoning(text) => message.reasoning.get_or_insert_default().push_str(&text),
                Part::Content(text) => message.content.get_or_insert_default().push_str(&text),
                Part::Call { id, name, .. } => message.calls.push((id, name, String::new())),
                Part::Arguments { index, text } => {
                    if let Some(call) = message.calls.get_mut(index) {
                        call.2.push_str(&text);
                    }
                }
            }
        }
        message
    }
}
