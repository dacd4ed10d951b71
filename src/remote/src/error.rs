//! Errors of a remote engine. The kind determines the remedy, the side is the one at fault, and the stage is the place.

use std::borrow::Cow;

/// The remedy for an error. There is one kind per remedy, not one per cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// This attempt failed: the same request may succeed anew, on this engine later or on another one now.
    Retry,
    /// The request or a setting is wrong: repeating it cannot help.
    Invalid,
    /// The engine cannot be reached or is not ready: send nothing until its health says otherwise.
    Unavailable,
    /// The call is over because one side ended it.
    Closed,
    /// The engine, or this crate, broke the protocol: report it.
    Bug,
}

/// The side that is charged with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The request as the client sent it.
    Client,
    /// The engine, or the way to it.
    Engine,
    /// Baton: its settings, or how it used the engine.
    Us,
}

/// Where it went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Reading the settings.
    Settings,
    /// Opening a connection.
    Connect,
    /// Asking the engine what it is.
    Probe,
    /// Asking whether it is well.
    Health,
    /// Reading its load.
    Load,
    /// Drawing one token to see that it works.
    Canary,
    /// Comparing its tokens of a text with ours.
    Vocabulary,
    /// Making the engine's request out of the client's.
    Prepare,
    /// The prefill leg.
    Prefill,
    /// Checking what the prefill leg hands to the decode leg.
    Handoff,
    /// Starting a decode leg or a whole request, up to its first token.
    Start,
    /// Tokens after the first.
    Stream,
}

impl Stage {
    /// The stage as one word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Settings => "settings",
            Self::Connect => "connect",
            Self::Probe => "probe",
            Self::Health => "health",
            Self::Load => "load",
            Self::Canary => "canary",
            Self::Vocabulary => "tokenizer",
            Self::Prepare => "prepare",
            Self::Prefill => "prefill",
            Self::Handoff => "handoff",
            Self::Start => "start",
            Self::Stream => "stream",
        }
    }
}

/// A failed call: the remedy by kind and in words, the side, the place, and what happened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {text}{}", .stage.name(), clause(.remedy))]
pub struct RemoteError {
    /// The remedy.
    pub kind: Kind,
    /// The side that is charged.
    pub side: Side,
    /// The stage in which it failed.
    pub stage: Stage,
    /// The engine's HTTP status, where it gave one.
    pub status: Option<u16>,
    /// A description of the failure, with the values involved.
    pub text: String,
    /// The operator's action; empty when none is needed.
    pub remedy: Cow<'static, str>,
    /// The engine had the request when the connection to it broke.
    pub cut_off: bool,
    /// How long the engine takes nothing new, µs, where that is why it refused the request.
    pub busy_us: Option<u64>,
}

impl RemoteError {
    pub(crate) fn new(kind: Kind, side: Side, stage: Stage, text: impl Into<String>) -> Self {
        let (text, remedy) = (text.into(), Cow::Borrowed(remedy_of(kind, stage)));
        Self { kind, side, stage, status: None, text, remedy, cut_off: false, busy_us: None }
    }

    /// The engine said what it should not.
    pub(crate) fn bug(stage: Stage, text: impl Into<String>) -> Self {
        Self::new(Kind::Bug, Side::Engine, stage, text)
    }

    /// The engine failed at this attempt.
    pub(crate) fn retry(stage: Stage, text: impl Into<String>) -> Self {
        Self::new(Kind::Retry, Side::Engine, stage, text)
    }

    /// The client's request cannot be served as it is.
    pub(crate) fn invalid(stage: Stage, text: impl Into<String>) -> Self {
        Self::new(Kind::Invalid, Side::Client, stage, text)
    }

    /// Baton is set up, or was used, in a way that cannot work.
    pub(crate) fn ours(stage: Stage, text: impl Into<String>) -> Self {
        Self::new(Kind::Invalid, Side::Us, stage, text)
    }

    pub(crate) fn remedy(mut self, remedy: impl Into<Cow<'static, str>>) -> Self {
        self.remedy = remedy.into();
        self
    }

    pub(crate) const fn status(mut self, status: u16) -> Self {
        self.status = Some(status);
        self
    }

    /// The engine had the request.
    pub(crate) const fn cut_off(mut self) -> Self {
        self.cut_off = true;
        self
    }

    /// The engine takes nothing new for so long.
    pub(crate) const fn busy(mut self, busy_us: u64) -> Self {
        self.busy_us = Some(busy_us);
        self
    }

    /// This error at another stage. An unreachable engine keeps its stage wherever the call came from.
    pub(crate) fn at(mut self, stage: Stage) -> Self {
        if self.stage != Stage::Connect {
            if self.remedy == remedy_of(self.kind, self.stage) {
                self.remedy = Cow::Borrowed(remedy_of(self.kind, stage));
            }
            self.stage = stage;
        }
        self
    }
}

/// A remedy as it follows the text.
fn clause(remedy: &str) -> String {
    if remedy.is_empty() { String::new() } else { format!("; {remedy}") }
}

/// The operator's action for an error without further details. A request that failed is retried elsewhere without an
/// operator, and the text says why a request cannot be served.
const fn remedy_of(kind: Kind, stage: Stage) -> &'static str {
    match (kind, stage) {
        (
            Kind::Retry | Kind::Invalid,
            Stage::Prepare | Stage::Prefill | Stage::Handoff | Stage::Start | Stage::Stream,
        ) => "",
        (Kind::Invalid, _) => "see whether the engine is what its settings say",
        (Kind::Retry | Kind::Unavailable, _) => "see whether the engine runs, and its log",
        (Kind::Closed, _) => "nothing, unless it was not meant to end",
        (Kind::Bug, _) => "report it with the engine's version",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_stage_cause_and_remedy() {
        let error = RemoteError::retry(Stage::Prefill, "the engine is full").status(429);
        assert_eq!(error.to_string(), "prefill: the engine is full");
        assert_eq!((error.kind, error.side, error.status), (Kind::Retry, Side::Engine, Some(429)));
        let error = RemoteError::ours(Stage::Settings, "no port").remedy("give a port").at(Stage::Probe);
        assert_eq!(error.to_string(), "probe: no port; give a port");
        let probed = RemoteError::retry(Stage::Start, "it broke off").at(Stage::Canary);
        assert_eq!(probed.to_string(), "canary: it broke off; see whether the engine runs, and its log");
        assert_eq!(RemoteError::retry(Stage::Connect, "refused").at(Stage::Canary).stage, Stage::Connect);
    }
}
