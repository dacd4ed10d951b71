//! Errors of the wire: one struct, whose kind names the remedy and whose stage names the place.

use std::io;

/// The remedy for an error. There is one kind per remedy, not one per cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Full or not ready for the moment: the same call may succeed a little later.
    Retry,
    /// The call, the configuration or the pairing is wrong: repeating it cannot help.
    Invalid,
    /// The peer cannot be reached, or has stopped answering: try another peer.
    Unavailable,
    /// The bytes differ from those sent: nothing of this flight may be used; start again.
    Corrupt,
    /// The connection or the flight is over: start again where the work is still wanted.
    Closed,
    /// One side broke the protocol or its own promise: report it.
    Bug,
}

impl Kind {
    /// Every kind, in the order of its number on the wire.
    pub const ALL: [Self; 6] =
        [Self::Retry, Self::Invalid, Self::Unavailable, Self::Corrupt, Self::Closed, Self::Bug];

    const fn remedy(self) -> &'static str {
        match self {
            Self::Retry => "try again shortly",
            Self::Invalid => "fix the call or the configuration",
            Self::Unavailable => "try another peer",
            Self::Corrupt => "discard the flight and start anew",
            Self::Closed => "start anew if still wanted",
            Self::Bug => "report it",
        }
    }

    pub(crate) fn number(self) -> u8 {
        match self {
            Self::Retry => 0,
            Self::Invalid => 1,
            Self::Unavailable => 2,
            Self::Corrupt => 3,
            Self::Closed => 4,
            Self::Bug => 5,
        }
    }

    pub(crate) fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }
}

/// Where in a transfer it went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Checking the configuration, or listening on the address.
    Bind,
    /// Reaching the peer.
    Connect,
    /// Agreeing on version, fingerprint and medium.
    Handshake,
    /// Asking the receiver to take a flight.
    Offer,
    /// Moving slices.
    Send,
    /// Waiting for the receiver to confirm what it got.
    Acknowledge,
    /// Closing a flight.
    Finish,
    /// Asking for blocks and reading them.
    Fetch,
    /// Answering a peer.
    Serve,
}

impl Stage {
    fn name(self) -> &'static str {
        match self {
            Self::Bind => "bind",
            Self::Connect => "connect",
            Self::Handshake => "handshake",
            Self::Offer => "offer",
            Self::Send => "send",
            Self::Acknowledge => "acknowledge",
            Self::Finish => "finish",
            Self::Fetch => "fetch",
            Self::Serve => "serve",
        }
    }
}

/// A failed transfer: the remedy, the place, and what happened in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {text} ({})", .stage.name(), .kind.remedy())]
pub struct TransportError {
    /// The remedy.
    pub kind: Kind,
    /// The place.
    pub stage: Stage,
    /// The event, with the values involved.
    pub text: String,
}

impl TransportError {
    pub(crate) fn new(kind: Kind, stage: Stage, text: impl Into<String>) -> Self {
        Self { kind, stage, text: text.into() }
    }

    /// A stream failed while `doing` something: an end of the stream is [`Kind::Closed`].
    pub(crate) fn from_io(error: &io::Error, stage: Stage, doing: &str) -> Self {
        let kind = match error.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::NotConnected => Kind::Closed,
            _ => Kind::Unavailable,
        };
        let text = match error.kind() {
            io::ErrorKind::UnexpectedEof => format!("the peer closed the connection while {doing}"),
            _ => format!("{doing}: {error}"),
        };
        Self::new(kind, stage, text)
    }

    pub(crate) fn at(mut self, stage: Stage) -> Self {
        self.stage = stage;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_survive_the_wire() {
        for kind in Kind::ALL {
            assert_eq!(Kind::from_number(kind.number()), Some(kind));
        }
        assert_eq!(Kind::from_number(6), None);
    }

    #[test]
    fn an_error_names_stage_and_remedy() {
        let error = TransportError::new(Kind::Unavailable, Stage::Connect, "10.0.0.1:7 does not answer");
        assert_eq!(error.to_string(), "connect: 10.0.0.1:7 does not answer (try another peer)");
    }

    #[test]
    fn an_early_end_is_closed() {
        let end = io::Error::from(io::ErrorKind::UnexpectedEof);
        assert_eq!(TransportError::from_io(&end, Stage::Send, "reading").kind, Kind::Closed);
        let other = io::Error::from(io::ErrorKind::PermissionDenied);
        assert_eq!(TransportError::from_io(&other, Stage::Send, "reading").kind, Kind::Unavailable);
    }
}
