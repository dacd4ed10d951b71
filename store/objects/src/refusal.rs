//! Why something was not done, and what to do about it.

/// Why an operation was refused. The store is unchanged by it, but for [`Refusal::Unconfirmed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The key is empty or longer than [`crate::KEY_MAX_BYTES`].
    #[error("key of {bytes} bytes; give from 1 to {max}", max = crate::KEY_MAX_BYTES)]
    Key {
        /// Its length.
        bytes: usize,
    },
    /// The value is larger than this store takes.
    #[error("value of {bytes} bytes; split it, {max_bytes} is the most")]
    Value {
        /// Its length.
        bytes: u64,
        /// The largest.
        max_bytes: u64,
    },
    /// No such tenant was opened.
    #[error("unknown tenant; open it first")]
    Tenant,
    /// The key holds a value, other bytes where equal ones would have done.
    #[error("put: the key holds other bytes; remove it or replace it")]
    Exists,
    /// The key holds no value.
    #[error("no such key")]
    Absent,
    /// Another writer is at it, and this one would not replace what is there.
    #[error("put: another writer is at this key; try again in {retry_after_us} us")]
    Busy {
        /// When its lease ends, from now.
        retry_after_us: u64,
    },
    /// Everything is leased, pinned or being written.
    #[error("put: full of leased or pinned data; try again in {retry_after_us} us")]
    Full {
        /// When to try again, from now.
        retry_after_us: u64,
    },
    /// The tenant has as much as it may, none of it found evictable.
    #[error("put: the tenant's quota is used up; remove something or try in {retry_after_us} us")]
    OverQuota {
        /// When to try again, from now.
        retry_after_us: u64,
    },
    /// The value is pinned hard.
    #[error("the value is pinned; unpin it first")]
    Pinned,
    /// The reservation's lease ended and another writer took its memory.
    #[error("seal: the reservation ran out and was taken over; put again")]
    TakenOver,
    /// The read's lease ended and another value took its memory.
    #[error("read: the lease ran out and the memory was reused; read again")]
    Revoked,
    /// The bytes are not those that the checksum vouches for.
    #[error("checksum {found:08x}, expected {expected:08x}; send the bytes again")]
    Corrupt {
        /// Of the checksum given.
        expected: u32,
        /// Of the bytes.
        found: u32,
    },
    /// Done here, but the SSD or the bucket has not confirmed that the older copy is gone.
    #[error(
        "done here, but the SSD or the bucket has not confirmed that the older copy is gone: it may be back after a \
         restart; ask again"
    )]
    Unconfirmed,
    /// Sealed before every byte was written, or written where no byte belongs.
    #[error("seal: {written} of {bytes} bytes were written; write each of them")]
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
