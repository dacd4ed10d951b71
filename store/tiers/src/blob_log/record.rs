//! Records that the log takes, and the results that it reports.

use crate::tier::TierError;
use std::fmt;

/// Where a value's bytes come from while it is written.
pub trait Source: Send {
    /// Fills `into` with the bytes from `offset` on. The range is inside the value.
    fn copy(&self, offset: usize, into: &mut [u8]);
}

/// A value to be kept.
pub struct Record {
    /// Its name; two values of one name are not kept at once.
    pub name: u64,
    /// The caller's number for this very value; every result about the value carries it.
    pub tag: u64,
    /// Data for the next reader, at most [`HEADER_MAX_BYTES`](super::HEADER_MAX_BYTES); it comes back padded with
    /// zeros.
    pub header: Vec<u8>,
    /// Length of the value.
    pub bytes: u32,
    /// Its bytes.
    pub source: Box<dyn Source>,
}

impl fmt::Debug for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Record").field("name", &self.name).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// A value that rests in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listing {
    /// Its name.
    pub name: u64,
    /// Its number.
    pub tag: u64,
    /// Its length.
    pub bytes: u32,
}

/// Why a value is not kept.
#[derive(Debug)]
pub enum PutError {
    /// It takes more than a quarter of the file, or its header is too long.
    TooLarge,
    /// Everything else is being written.
    Full,
    /// Another value of that name is there.
    SameName,
    /// It was removed before it lasted.
    Removed,
    /// The disk did not take it.
    Failed(TierError),
}

/// Why a read found nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlobReadError {
    /// No value has that name.
    Absent,
    /// It is not as it was written, and is given up.
    Damaged,
    /// The disk did not give it; it may the next time.
    Failed,
}

/// A result of the log.
#[derive(Debug)]
pub enum BlobLogEvent {
    /// The value lasts from now on.
    Kept(Listing),
    /// The value is not there, and why.
    NotKept(Listing, PutError),
    /// The result of a read: header and value, or the reason.
    Got(u64, Result<(Vec<u8>, Vec<u8>), BlobReadError>),
    /// The values removed under this number cannot reappear.
    Removed(u64),
    /// A value went, for room or because it is damaged.
    Dropped(Listing),
}
