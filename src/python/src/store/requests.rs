//! The arguments of calls.

use crate::raw::Span;

/// A value to be put.
#[derive(Debug)]
pub enum PutValue<'a> {
    /// From memory of the engine, piece by piece.
    Spans(Vec<Span>),
    /// From bytes of the caller's.
    Bytes(&'a [u8]),
}

impl PutValue<'_> {
    /// The pieces, in order.
    pub(super) fn pieces(&self) -> Box<dyn Iterator<Item = &[u8]> + '_> {
        match self {
            Self::Spans(spans) => Box::new(spans.iter().map(Span::held)),
            Self::Bytes(bytes) => Box::new(std::iter::once(*bytes)),
        }
    }

    /// Number of bytes.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Spans(spans) => spans.iter().map(|span| span.bytes() as u64).sum(),
            Self::Bytes(bytes) => bytes.len() as u64,
        }
    }
}

/// Which values a get takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GetMode {
    /// Those that fill their parts.
    Exact,
    /// Shorter ones too.
    UpTo,
}
