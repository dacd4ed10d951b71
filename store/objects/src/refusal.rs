//! Why something was not done, and what to do about it.

use std::fmt;

/// Why an operation was refused. The store is unchanged by it, but for [`Refusal::Unconfirmed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The key is empty or longer than [`crate::KEY_MAX_BYTES`].
    Key {
        /// Its length.
        bytes: usize,
    },
    /// The value is larger than this store takes.
    Value {
        /// Its length.
        bytes: u64,
        /// The largest.
        max_bytes: u64,
    },
    /// No such tenant was opened.
    Tenant,
    /// The key holds a value, other bytes where equal ones would have done.
    Exists,
    /// The key holds no value.
    Absent,
    /// Another writer is at it, and this one would not replace what is there.
    Busy {
        /// When its lease ends, from now.
        retry_after_us: u64,
    },
    /// Everything is leased, pinned or being written.
    Full {
        /// When to try again, from now.
        retry_after_us: u64,
    },
    /// The tenant has as much as it may, none of it found evictable.
    OverQuota {
        /// When to try again, from now.
        retry_after_us: u64,
    },
    /// The value is pinned hard.
    Pinned,
    /// The reservation's lease ended and its memory went to somebody else.
    TakenOver,
    /// The read's lease ended and the memory went to somebody else.
    Revoked,
    /// The bytes are not those that the checksum vouches for.
    Corrupt {
        /// Of the checksum given.
        expected: u32,
        /// Of the bytes.
        found: u32,
    },
    /// Done here, but the SSD or the bucket has not confirmed that the older copy is gone.
    Unconfirmed,
    /// Sealed before every byte was written, or written where no byte belongs.
    Unfilled {
        /// Bytes written, each counted once.
        written: u64,
        /// Bytes reserved.
        bytes: u64,
    },
}

impl Refusal {
    /// When to try the same again, if that may help.
    #[must_use]
    pub fn retry_after_us(&self) -> Option<u64> {
        match self {
            Self::Busy { retry_after_us }
            | Self::Full { retry_after_us }
            | Self::OverQuota { retry_after_us } => Some(*retry_after_us),
            Self::TakenOver | Self::Revoked => Some(0),
            Self::Unconfirmed => Some(1_000_000),
            _ => None,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key { bytes } => {
                write!(f, "key of {bytes} bytes; give from 1 to {}", crate::KEY_MAX_BYTES)
            }
            Self::Value { bytes, max_bytes } => {
                write!(f, "value of {bytes} bytes; split it, {max_bytes} is the most")
            }
            Self::Tenant => write!(f, "unknown tenant; open it first"),
            Self::Exists => write!(f, "put: the key holds other bytes; remove it or replace it"),
            Self::Absent => write!(f, "no such key"),
            Self::Busy { retry_after_us } => {
                write!(f, "put: another writer is at this key; try again in {retry_after_us} us")
            }
            Self::Full { retry_after_us } => {
                write!(f, "put: full of leased or pinned data; try again in {retry_after_us} us")
            }
            Self::OverQuota { retry_after_us } => {
                write!(
                    f,
                    "put: the tenant's quota is used up; remove something or try in {retry_after_us} us"
                )
            }
            Self::Pinned => write!(f, "the value is pinned; unpin it first"),
            Self::TakenOver => write!(f, "seal: the reservation ran out and was taken over; put again"),
            Self::Revoked => write!(f, "read: the lease ran out and the memory was reused; read again"),
            Self::Corrupt { expected, found } => {
                write!(f, "checksum {found:08x}, expected {expected:08x}; send the bytes again")
            }
            Self::Unconfirmed => write!(
                f,
                "done here, but the SSD or the bucket has not confirmed that the older copy is gone: it may be back after a \
                 restart; ask again"
            ),
            Self::Unfilled { written, bytes } => {
                write!(f, "seal: {written} of {bytes} bytes were written; write each of them")
            }
        }
    }
}

impl std::error::Error for Refusal {}
