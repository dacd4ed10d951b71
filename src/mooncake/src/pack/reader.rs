//! Reads messages of any bytes: what does not fit is an error, and nothing is believed before it is there.

use super::Shape;
use super::width::Width;
use crate::error::{MooncakeError, Result};
use crate::release::other_release;

/// In a meta byte: the literal follows.
const LITERAL_FOLLOWS: u8 = 1 << 2;
/// In a meta byte: how wide the length of the whole message is that follows, if any.
const TOTAL_MASK: u8 = 3;

/// Reads the fields of one message, in order.
#[derive(Debug)]
pub struct Reader<'a> {
    left: &'a [u8],
    width: Width,
    stage: &'static str,
}

impl<'a> Reader<'a> {
    /// Opens a message that should be of `shape`.
    ///
    /// # Errors
    /// When it is of another shape, which is another release, or too short.
    pub fn open(shape: &Shape, bytes: &'a [u8], stage: &'static str) -> Result<Self> {
        let mut reader = Self { left: bytes, width: Width::One, stage };
        let hash = reader.u32()?;
        if hash & !1 != shape.hash() {
            let what = format!("the message is of type {:08x}, not {:08x}", hash & !1, shape.hash());
            return Err(other_release(stage, "", &what));
        }
        if hash & 1 == 1 {
            let meta = reader.u8()?;
            reader.width = Width::of_meta(meta);
            // The total length is not needed: it is known from the transport.
            reader.take(match meta & TOTAL_MASK {
                0 => 0,
                width => 1 << width,
            })?;
            if meta & LITERAL_FOLLOWS != 0 {
                reader.skip_literal()?;
            }
        }
        Ok(reader)
    }

    fn skip_literal(&mut self) -> Result<()> {
        let end = self
            .left
            .iter()
            .position(|byte| *byte == 0)
            .ok_or_else(|| self.short("a literal without end"))?;
        self.left = &self.left[end + 1..];
        Ok(())
    }

    fn short(&self, what: &str) -> MooncakeError {
        MooncakeError::corrupt(
            self.stage,
            format!("the message has {what}; the peer is at fault, nothing was done"),
        )
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let (taken, left) = self.left.split_at_checked(count).ok_or_else(|| self.short("too few bytes"))?;
        self.left = left;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.take(N)?.try_into().expect("so many were taken"))
    }

    /// One byte.
    ///
    /// # Errors
    /// Where the message ends, as do all of these.
    pub fn u8(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    /// Yes or no.
    ///
    /// # Errors
    /// Also for any other byte.
    pub fn bool(&mut self) -> Result<bool> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(self.short("neither yes nor no")),
        }
    }

    /// Four bytes.
    ///
    /// # Errors
    /// Where the message ends.
    pub fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Four bytes with a sign.
    ///
    /// # Errors
    /// Where the message ends.
    pub fn i32(&mut self) -> Result<i32> {
        Ok(i32::from_le_bytes(self.array()?))
    }

    /// Eight bytes.
    ///
    /// # Errors
    /// Where the message ends.
    pub fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Eight bytes with a sign.
    ///
    /// # Errors
    /// Where the message ends.
    pub fn i64(&mut self) -> Result<i64> {
        Ok(i64::from_le_bytes(self.array()?))
    }

    /// The length of a container whose values take `least` bytes each. It cannot claim more values than the remaining
    /// bytes allow.
    ///
    /// # Errors
    /// When more is claimed than is left.
    pub fn length(&mut self, least: usize) -> Result<usize> {
        let mut bytes = [0; 8];
        let width = self.width.bytes();
        bytes[..width].copy_from_slice(self.take(width)?);
        let count = u64::from_le_bytes(bytes);
        let room = (self.left.len() / least.max(1)) as u64;
        if count > room { Err(self.short("a length that nothing follows")) } else { Ok(count as usize) }
    }

    /// Text.
    ///
    /// # Errors
    /// Also when it is not UTF-8.
    pub fn text(&mut self) -> Result<String> {
        let count = self.length(1)?;
        let bytes = self.take(count)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| self.short("text that is not UTF-8"))
    }

    /// A value that need not be there.
    ///
    /// # Errors
    /// What reading the value gives.
    pub fn optional<T>(&mut self, read: impl FnOnce(&mut Self) -> Result<T>) -> Result<Option<T>> {
        if self.bool()? { read(self).map(Some) } else { Ok(None) }
    }

    /// A list whose values take `least` bytes each.
    ///
    /// # Errors
    /// What reading a value gives.
    pub fn list<T>(&mut self, least: usize, mut read: impl FnMut(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let count = self.length(least)?;
        (0..count).map(|_| read(self)).collect()
    }

    /// A value, or the code of an error.
    ///
    /// # Errors
    /// What reading the value gives.
    pub fn expected<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<std::result::Result<T, i32>> {
        if self.bool()? { read(self).map(Ok) } else { self.i32().map(Err) }
    }

    /// The stage that the reader names in its errors.
    pub(crate) fn wrong(&self, what: &str) -> MooncakeError {
        self.short(what)
    }

    /// All has been read.
    ///
    /// # Errors
    /// When it has not.
    pub fn end(&self) -> Result<()> {
        if self.left.is_empty() { Ok(()) } else { Err(self.short("bytes that nobody asked for")) }
    }
}
