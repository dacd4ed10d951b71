//! Why a call failed: what the caller gets as a number, and what the log gets in words.

/// A failure. Codes are those that Mooncake's own package gives for the same.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text} (code {code})")]
pub struct Failure {
    /// Below 0.
    pub code: i32,
    /// The failure and the remedy.
    pub text: String,
}

impl Failure {
    /// Of the transfer engine: anything without a code of its own.
    pub const FAILED: i32 = -1;
    /// Of the transfer engine: no such memory is registered.
    pub const NOT_REGISTERED: i32 = -3;
    /// Transfers, puts or gets are using it.
    pub const IN_USE: i32 = -4;
    /// Of the transfer engine: the range overlaps one that is registered.
    pub const OVERLAPS: i32 = -7;
    /// Of the store: no room.
    pub const FULL: i32 = -200;
    /// Of the store: the key is empty or too long.
    pub const KEY: i32 = -400;
    /// Of the store: an argument is wrong.
    pub const ARGUMENT: i32 = -600;
    /// Of the store: the value is not what was stored.
    pub const DAMAGED: i32 = -701;
    /// Of the store: another writer is at the key.
    pub const BUSY: i32 = -703;
    /// Of the store: no such key, or a value that cannot be used.
    pub const ABSENT: i32 = -704;
    /// Of the store: the server refused or could not be reached.
    pub const SERVER: i32 = -900;

    /// A failure of this code.
    #[must_use]
    pub fn new(code: i32, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }
}
