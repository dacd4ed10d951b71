//! What can go wrong, by remedy.

/// The remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// What was asked cannot be meant: ask differently.
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

/// An error of this crate: where it happened, with whom, what, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("mooncake: {stage}{}: {message}", of_peer(.peer))]
pub struct MooncakeError {
    /// The remedy.
    pub kind: Kind,
    /// What was being done.
    pub stage: &'static str,
    /// The other end.
    pub peer: String,
    /// What happened, and what to do.
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

    /// The same with the peer's name, where a codec could not know it.
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

/// What this crate gives back.
pub type Result<T> = std::result::Result<T, MooncakeError>;
