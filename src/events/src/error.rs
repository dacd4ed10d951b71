//! Errors with another engine's events: one struct, whose kind is the remedy and whose stage is the place.

/// The remedy for an error. There is one kind per remedy, not one per cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The call or the configuration is wrong: repeating it cannot help.
    Invalid,
    /// The peer cannot be reached, or has stopped answering: try again later.
    Unavailable,
    /// The peer sent what is no event: ignore the message, and report it if it goes on.
    Corrupt,
    /// The connection is over: connect anew where it is still wanted.
    Closed,
}

/// Where it went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Checking the configuration, or listening on an address.
    Bind,
    /// Reaching the publisher.
    Connect,
    /// Agreeing on version and socket type.
    Handshake,
    /// Reading frames.
    Receive,
    /// Writing frames.
    Send,
    /// Asking for batches again.
    Replay,
    /// Reading a batch out of bytes.
    Decode,
}

impl Stage {
    /// The word used in messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bind => "bind",
            Self::Connect => "connect",
            Self::Handshake => "handshake",
            Self::Receive => "receive",
            Self::Send => "send",
            Self::Replay => "replay",
            Self::Decode => "decode",
        }
    }
}

/// An error of this crate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kv events, {}: {message}", .stage.name())]
pub struct EventError {
    /// The remedy.
    pub kind: Kind,
    /// The place.
    pub stage: Stage,
    /// A description of the failure, for a person.
    pub message: String,
}

impl EventError {
    pub(crate) fn new(kind: Kind, stage: Stage, message: impl Into<String>) -> Self {
        Self { kind, stage, message: message.into() }
    }

    /// An error in the bytes of a batch.
    pub(crate) fn decode(message: impl Into<String>) -> Self {
        Self::new(Kind::Corrupt, Stage::Decode, message)
    }

    /// An error of a socket: closed by the peer, or unreachable.
    pub(crate) fn io(stage: Stage, error: &std::io::Error) -> Self {
        let kind = match error.kind() {
            std::io::ErrorKind::UnexpectedEof
            | std::io::ErrorKind::BrokenPipe
            | std::io::ErrorKind::ConnectionReset
            | std::io::ErrorKind::ConnectionAborted => Kind::Closed,
            _ => Kind::Unavailable,
        };
        Self::new(kind, stage, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_where_and_a_lost_connection_is_told_from_an_unreachable_peer() {
        let error = EventError::decode("no batch");
        assert_eq!(error.to_string(), "kv events, decode: no batch");
        let lost = std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
        assert_eq!(EventError::io(Stage::Receive, &lost).kind, Kind::Closed);
        let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        assert_eq!(EventError::io(Stage::Connect, &refused).kind, Kind::Unavailable);
    }
}
