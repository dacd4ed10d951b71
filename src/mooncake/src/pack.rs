//! The encoding of Mooncake's messages: a hash of the type, then the fields in order, all little-endian.

mod reader;
mod shape;
mod width;
mod writer;

pub use reader::Reader;
pub use shape::{Shape, first_word};
pub use writer::{Writer, pack};

#[cfg(test)]
mod tests;
