//! Errors of this crate: one struct, whose kind is the remedy and whose stage is the place.

/// The remedy for an error. There is one kind per remedy, not one per cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The source cannot be reached or has no quorum: try again later, or another endpoint. A write that failed so
    /// may have been carried out all the same.
    Unavailable,
    /// No answer in time; otherwise as [`Kind::Unavailable`].
    TimedOut,
    /// Name, password, token or rights are wrong: give others.
    Denied,
    /// The call or the configuration is wrong: repeating it cannot help.
    Invalid,
    /// The asked-for history is no longer kept: list anew.
    Compacted,
    /// The lease has ended: take a new one and register again.
    LeaseLost,
    /// Somebody else was there first: read what is there and decide anew.
    Conflict,
    /// The response cannot be read: check which program wrote it.
    Corrupt,
}

impl Kind {
    /// Whether the same call may succeed a little later without anybody's doing.
    #[must_use]
    pub const fn passes(self) -> bool {
        matches!(self, Self::Unavailable | Self::TimedOut)
    }
}

/// Where it went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Checking what was configured.
    Configure,
    /// Reaching the source.
    Connect,
    /// Showing who we are.
    Authenticate,
    /// Reading or listing.
    Read,
    /// Writing a key.
    Write,
    /// Taking, renewing or giving back a lease.
    Lease,
    /// Following changes.
    Watch,
}

impl Stage {
    const fn name(self) -> &'static str {
        match self {
            Self::Configure => "configure",
            Self::Connect => "connect",
            Self::Authenticate => "authenticate",
            Self::Read => "read",
            Self::Write => "write",
            Self::Lease => "lease",
            Self::Watch => "watch",
        }
    }
}

/// A failed look at, or change of, the cluster's membership.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("membership, {}: {text}", .stage.name())]
pub struct MembershipError {
    /// The remedy.
    pub kind: Kind,
    /// The place.
    pub stage: Stage,
    /// A description of the failure, with the values involved.
    pub text: String,
}

impl MembershipError {
    pub(crate) fn new(kind: Kind, stage: Stage, text: impl Into<String>) -> Self {
        Self { kind, stage, text: text.into() }
    }

    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self::new(Kind::Invalid, Stage::Configure, text)
    }
}

/// The result of most calls of this crate.
pub type Result<T> = std::result::Result<T, MembershipError>;
