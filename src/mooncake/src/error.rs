//! Errors of this crate, by remedy.

/// The remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The request makes no sense: change it.
    Invalid,
    /// The peer speaks the format of another release: run the pinned one.
    Release,
    /// The peer is not there, is silent or went away: try again.
    Unavailable,
    /// The peer understood and said no, with this code of its own.
    Refused(i32),
    /// Bytes are not what they should be: nothing of them was used.
    Corrupt,
    /// There is no such object.
    Absent,
}

/// An error of this crate: the stage, the peer, the failure and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("mooncake: {stage}{}: {message}", of_peer(.peer))]
pub struct MooncakeError {
    /// The remedy.
    pub kind: Kind,
    /// The stage in which it failed.
    pub stage: &'static str,
    /// The other end.
    pub peer: String,
    /// The failure and the remedy.
    pub message: String,
}

impl MooncakeError {
    pub(crate) fn new(kind: Kind, stage: &'static str, peer: &str, message: impl Into<String>) -> Self {
        Self { kind, stage, peer: peer.to_owned(), message: message.into() }
    }

    pub(crate) fn invalid(stage: &'static str, message: impl Into<String>) -> Self {
        Self::new(Kind::Invalid, stage, "", message)
    }

    pub(crate) fn corrupt(stage: &'static str, message: impl Into<String>) -> Self {
        Self::new(Kind::Corrupt, stage, "", message)
    }

    /// The error with the peer's name, where a codec could not know it.
    pub(crate) fn named(mut self, peer: &str) -> Self {
        if self.peer.is_empty() {
            peer.clone_into(&mut self.peer);
        }
        self
    }
}

/// The other end, where it is known.
fn of_peer(peer: &str) -> String {
    if peer.is_empty() { String::new() } else { format!(" ({peer})") }
}

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, MooncakeError>;
