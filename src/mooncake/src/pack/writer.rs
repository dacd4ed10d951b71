//! Writes messages.

use super::Shape;
use super::width::Width;

/// Writes the fields of one message, in order.
pub struct Writer {
    bytes: Vec<u8>,
    width: Width,
    longest: usize,
}

/// A message of `shape`, whose fields `fields` writes; it is asked twice where a container is too long for the
/// shortest kind of length.
pub fn pack(shape: &Shape, fields: impl Fn(&mut Writer)) -> Vec<u8> {
    let first = attempt(shape, Width::One, &fields);
    let wanted = Width::for_length(first.longest);
    let written = if wanted == Width::One { first } else { attempt(shape, wanted, &fields) };
    written.bytes
}

fn attempt(shape: &Shape, width: Width, fields: &impl Fn(&mut Writer)) -> Writer {
    let mut writer = Writer { bytes: Vec::new(), width, longest: 0 };
    match width.meta() {
        0 => writer.bytes.extend(shape.hash().to_le_bytes()),
        meta => {
            writer.bytes.extend((shape.hash() | 1).to_le_bytes());
            writer.bytes.push(meta);
        }
    }
    fields(&mut writer);
    writer
}

impl Writer {
    /// One byte.
    pub fn u8(&mut self, value: u8) {
        self.bytes.push(value);
    }

    /// Yes or no.
    pub fn bool(&mut self, value: bool) {
        self.u8(u8::from(value));
    }

    /// Four bytes with a sign.
    pub fn i32(&mut self, value: i32) {
        self.bytes.extend(value.to_le_bytes());
    }

    /// Eight bytes.
    pub fn u64(&mut self, value: u64) {
        self.bytes.extend(value.to_le_bytes());
    }

    /// Eight bytes with a sign.
    pub fn i64(&mut self, value: i64) {
        self.bytes.extend(value.to_le_bytes());
    }

    /// A length and the bytes of `value`.
    pub fn text(&mut self, value: &str) {
        self.length(value.len());
        self.bytes.extend(value.as_bytes());
    }

    /// The length of a list; its values follow.
    pub fn length(&mut self, count: usize) {
        self.longest = self.longest.max(count);
        // The other bytes are wanted, and written, at the second attempt.
        self.bytes.extend(&(count as u64).to_le_bytes()[..self.width.bytes()]);
    }

    /// Whether a value follows, and the value.
    pub fn optional<T>(&mut self, value: Option<&T>, write: impl Fn(&mut Self, &T)) {
        self.bool(value.is_some());
        if let Some(value) = value {
            write(self, value);
        }
    }
}
