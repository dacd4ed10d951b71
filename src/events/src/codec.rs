//! Event batches on the wire: every dialect read into one [`Batch`], two of them written.

mod decode;
mod draft;
mod encode;
mod field;
#[cfg(test)]
mod tests;

pub use decode::{decode, sequence_of};
pub use encode::{Form, Speaker, encode};

/// The limits of a batch; one beyond them is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a batch.
    pub batch_bytes: usize,
    /// Events of a batch.
    pub events: usize,
    /// Block hashes of a batch.
    pub blocks: usize,
    /// Token ids of a batch.
    pub tokens: usize,
    /// Bytes of one text: a salt, a name.
    pub text_bytes: usize,
}

impl Default for Limits {
    /// Wide enough for any snapshot of our own publisher.
    fn default() -> Self {
        Self { batch_bytes: 64 << 20, events: 1 << 20, blocks: 1 << 20, tokens: 1 << 25, text_bytes: 4096 }
    }
}
