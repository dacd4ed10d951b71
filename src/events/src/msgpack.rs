//! The part of `MessagePack` that event batches use, read without trust and without copies.
//!
//! Written here because a batch is mostly integers: reading them straight into the token list is several times
//! as fast as building a tree of values first, and every length is checked before anything is allocated.

mod read;
mod write;

pub(crate) use read::{Reader, ValueKind};
pub(crate) use write::Writer;
