//! Errors of this crate, by remedy.

/// The remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The request or the file says something that cannot be meant: change it.
    Invalid,
    /// It contradicts what is registered: unregister that first.
    Conflict,
    /// A bound is reached: raise it, or ask for less.
    Full,
    /// The peer or the disk does not answer: try again.
    Unavailable,
    /// Bytes are not what was written: get them again.
    Corrupt,
}

/// An error of this crate: one line for a person, with the stage and the remedy in it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct IndexerError {
    /// The remedy.
    pub kind: Kind,
    /// The failure and the remedy.
    pub message: String,
}

impl IndexerError {
    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(Kind::Invalid, message)
    }

    pub(crate) fn corrupt(message: impl Into<String>) -> Self {
        Self::new(Kind::Corrupt, message)
    }

    /// The HTTP status that says the same.
    pub(crate) const fn status(&self) -> u16 {
        match self.kind {
            Kind::Invalid => 400,
            Kind::Conflict => 409,
            Kind::Full | Kind::Unavailable => 503,
            Kind::Corrupt => 500,
        }
    }
}
