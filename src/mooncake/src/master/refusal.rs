//! The meanings of a master's error codes, with remedies.

use crate::error::{Kind, MooncakeError};

/// An error code of the master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub i32);

impl Code {
    /// There is no such object.
    pub const NO_OBJECT: Self = Self(-704);

    /// The meaning and the remedy.
    const fn meaning(self) -> &'static str {
        match self {
            Self(-10 | -200) => "no segment has room; mount more, or remove objects",
            Self(-101) => "there is no such segment; mount it again",
            Self(-102) => {
                "a segment of this name is mounted; wait until the master forgets it, or take another name"
            }
            Self(-103 | -601) => "the master does not know this client; mount first",
            Self(-400) => "the key cannot be; take another",
            Self(-600) => "the master does not accept the arguments; see its log",
            Self(-702 | -710 | -712) => "the replica is gone; put the object again",
            Self(-703) => "the object is being written; try again",
            Self(-704) => "there is no such object",
            Self(-705) => "there is such an object; remove it first, or take another key",
            Self(-706) => "somebody reads the object; try again when its lease is over, or force it",
            Self(-1010) => "not in the master's present state; try again",
            Self(-1011) => "not in the mode that the master runs in",
            _ => "see the master's log",
        }
    }

    pub(super) fn refusal(self, stage: &'static str, peer: &str) -> MooncakeError {
        let kind = if self == Self::NO_OBJECT { Kind::Absent } else { Kind::Refused(self.0) };
        MooncakeError::new(kind, stage, peer, format!("the master says {}: {}", self.0, self.meaning()))
    }
}
