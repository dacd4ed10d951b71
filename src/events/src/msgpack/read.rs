//! A reader: a cursor that never goes past the end and never allocates by an announced length alone.

use crate::error::EventError;

type ReadResult<T> = Result<T, EventError>;

/// The type of the next value, by its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ValueKind {
    Nil,
    Bool,
    Integer,
    Float,
    Text,
    Bytes,
    Array,
    Map,
    Other,
}

/// How an unsigned integer of at most 32 bits lies in the eight bytes from its mark on.
#[derive(Clone, Copy)]
struct Shape {
    shift: u8,
    /// Bytes with the mark; 0 for anything else.
    length: u8,
    mask: u32,
}

impl Shape {
    const OTHER: Self = Self { shift: 0, length: 0, mask: 0 };
}

/// The shape behind each mark.
const SHAPES: [Shape; 256] = {
    let mut shapes = [Shape::OTHER; 256];
    let mut small = 0;
    while small < 0x80 {
        shapes[small] = Shape { shift: 56, length: 1, mask: 0x7f };
        small += 1;
    }
    shapes[0xcc] = Shape { shift: 48, length: 2, mask: 0xff };
    shapes[0xcd] = Shape { shift: 40, length: 3, mask: 0xffff };
    shapes[0xce] = Shape { shift: 24, length: 5, mask: u32::MAX };
    shapes
};

/// A cursor over one message.
#[derive(Clone, Debug)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Bytes not read yet.
    pub(crate) const fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn wrong(&self, wanted: &str, found: u8) -> EventError {
        let at = self.at.saturating_sub(1);
        EventError::decode(format!("byte {at} is 0x{found:02x}, which starts no {wanted}"))
    }

    fn byte(&mut self) -> ReadResult<u8> {
        let byte = self.bytes.get(self.at).copied();
        let byte = byte.ok_or_else(|| EventError::decode(format!("cut off after {} bytes", self.at)))?;
        self.at += 1;
        Ok(byte)
    }

    fn take(&mut self, length: usize) -> ReadResult<&'a [u8]> {
        if length > self.left() {
            let message = format!("{length} bytes are announced at byte {}, {} follow", self.at, self.left());
            return Err(EventError::decode(message));
        }
        let taken = &self.bytes[self.at..self.at + length];
        self.at += length;
        Ok(taken)
    }

    fn big_endian(&mut self, length: usize) -> ReadResult<u64> {
        Ok(self.take(length)?.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    /// The kind of the next value; nothing is consumed.
    pub(crate) fn peek(&self) -> ReadResult<ValueKind> {
        let byte = self.bytes.get(self.at).copied();
        let byte = byte.ok_or_else(|| EventError::decode(format!("cut off after {} bytes", self.at)))?;
        Ok(match byte {
            0x00..=0x7f | 0xcc..=0xd3 | 0xe0..=0xff => ValueKind::Integer,
            0x80..=0x8f | 0xde | 0xdf => ValueKind::Map,
            0x90..=0x9f | 0xdc | 0xdd => ValueKind::Array,
            0xa0..=0xbf | 0xd9..=0xdb => ValueKind::Text,
            0xc0 => ValueKind::Nil,
            0xc2 | 0xc3 => ValueKind::Bool,
            0xc4..=0xc6 => ValueKind::Bytes,
            0xca | 0xcb => ValueKind::Float,
            _ => ValueKind::Other,
        })
    }

    /// Consumes a nil if one is next.
    pub(crate) fn nil(&mut self) -> ReadResult<bool> {
        let there = self.peek()? == ValueKind::Nil;
        self.at += usize::from(there);
        Ok(there)
    }

    /// Items of the array that starts here: never more than bytes are left.
    pub(crate) fn array(&mut self) -> ReadResult<usize> {
        let first = self.byte()?;
        let items = match first {
            0x90..=0x9f => u64::from(first & 0x0f),
            0xdc => self.big_endian(2)?,
            0xdd => self.big_endian(4)?,
            other => return Err(self.wrong("array", other)),
        };
        self.items(items, 1)
    }

    /// Pairs of the map that starts here: never more than half the bytes that are left.
    pub(crate) fn map(&mut self) -> ReadResult<usize> {
        let first = self.byte()?;
        let pairs = match first {
            0x80..=0x8f => u64::from(first & 0x0f),
            0xde => self.big_endian(2)?,
            0xdf => self.big_endian(4)?,
            other => return Err(self.wrong("map", other)),
        };
        self.items(pairs, 2)
    }

    fn items(&self, items: u64, bytes_each: usize) -> ReadResult<usize> {
        let room = self.left() / bytes_each;
        match usize::try_from(items) {
            Ok(items) if items <= room => Ok(items),
            _ => {
                let message = format!("{items} items are announced at byte {}, {room} can follow", self.at);
                Err(EventError::decode(message))
            }
        }
    }

    /// A string or a byte string.
    pub(crate) fn raw(&mut self) -> ReadResult<&'a [u8]> {
        let first = self.byte()?;
        let length = match first {
            0xa0..=0xbf => u64::from(first & 0x1f),
            0xc4 | 0xd9 => self.big_endian(1)?,
            0xc5 | 0xda => self.big_endian(2)?,
            0xc6 | 0xdb => self.big_endian(4)?,
            other => return Err(self.wrong("string", other)),
        };
        self.take(usize::try_from(length).unwrap_or(usize::MAX))
    }

    /// A string or byte string of UTF-8.
    pub(crate) fn text(&mut self) -> ReadResult<&'a str> {
        let at = self.at;
        let raw = self.raw()?;
        std::str::from_utf8(raw).map_err(|_| EventError::decode(format!("the text at byte {at} is no UTF-8")))
    }

    /// An integer of any width and sign, as its 64 bits: a hash that one engine writes signed and another
    /// unsigned is the same hash.
    pub(crate) fn bits(&mut self) -> ReadResult<u64> {
        let first = self.byte()?;
        Ok(match first {
            0x00..=0x7f => u64::from(first),
            0xe0..=0xff => i64::from(first.cast_signed()).cast_unsigned(),
            0xcc => self.big_endian(1)?,
            0xcd => self.big_endian(2)?,
            0xce => self.big_endian(4)?,
            0xcf | 0xd3 => self.big_endian(8)?,
            0xd0 => self.signed(1)?,
            0xd1 => self.signed(2)?,
            0xd2 => self.signed(4)?,
            other => return Err(self.wrong("integer", other)),
        })
    }

    fn signed(&mut self, length: usize) -> ReadResult<u64> {
        let unused = 64 - 8 * length;
        let value = self.big_endian(length)? << unused;
        Ok((value.cast_signed() >> unused).cast_unsigned())
    }

    /// An integer of 0..2^32.
    pub(crate) fn word(&mut self) -> ReadResult<u32> {
        let at = self.at;
        let bits = self.bits()?;
        u32::try_from(bits)
            .map_err(|_| EventError::decode(format!("the integer at byte {at} is outside 0..2^32")))
    }

    /// Appends `count` integers of 0..2^32.
    pub(crate) fn words(&mut self, count: usize, into: &mut Vec<u32>) -> ReadResult<()> {
        into.reserve(count);
        for _ in 0..count {
            // Token ids mix widths at random, so a branch on the width is guessed wrong every other time: eight
            // bytes are taken at once and the width decides by how much they are shifted.
            let ahead = self.bytes.get(self.at..self.at + 8).and_then(|bytes| bytes.try_into().ok());
            let shape = ahead.map_or(Shape::OTHER, |bytes: [u8; 8]| SHAPES[usize::from(bytes[0])]);
            let word = if shape.length == 0 {
                self.word()?
            } else {
                self.at += usize::from(shape.length);
                let bits = ahead.map_or(0, u64::from_be_bytes) >> shape.shift;
                #[expect(clippy::cast_possible_truncation, reason = "the mask leaves 32 bits at most")]
                let word = bits as u32 & shape.mask;
                word
            };
            into.push(word);
        }
        Ok(())
    }

    /// A number, integer or not.
    pub(crate) fn float(&mut self) -> ReadResult<f64> {
        match self.peek()? {
            ValueKind::Float if self.byte()? == 0xca => {
                let bits = self.big_endian(4)?;
                Ok(f64::from(f32::from_bits(u32::try_from(bits).unwrap_or_default())))
            }
            ValueKind::Float => Ok(f64::from_bits(self.big_endian(8)?)),
            #[expect(clippy::cast_precision_loss, reason = "a time stamp needs no more than 2^53")]
            _ => Ok(self.bits()? as f64),
        }
    }

    /// Passes over one value, however it nests: no recursion, so no depth is too deep.
    pub(crate) fn skip(&mut self) -> ReadResult<()> {
        let mut open = 1u64;
        while open > 0 {
            open -= 1;
            open += self.skip_one()?;
        }
        Ok(())
    }

    /// Passes over one value's head and own bytes; returns the values that it holds.
    fn skip_one(&mut self) -> ReadResult<u64> {
        match self.peek()? {
            ValueKind::Array => return Ok(self.array()? as u64),
            ValueKind::Map => return Ok(2 * self.map()? as u64),
            ValueKind::Integer => drop(self.bits()?),
            ValueKind::Float => drop(self.float()?),
            ValueKind::Text | ValueKind::Bytes => drop(self.raw()?),
            ValueKind::Nil | ValueKind::Bool => drop(self.byte()?),
            ValueKind::Other => {
                let first = self.byte()?;
                let length = match first {
                    0xc7 => self.big_endian(1)? + 1,
                    0xc8 => self.big_endian(2)? + 1,
                    0xc9 => self.big_endian(4)? + 1,
                    0xd4..=0xd8 => (1 << (first - 0xd4)) + 1,
                    other => return Err(self.wrong("value", other)),
                };
                self.take(usize::try_from(length).unwrap_or(usize::MAX))?;
            }
        }
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::msgpack::Writer;
    use proptest::prelude::*;

    #[test]
    fn every_width_of_an_integer_is_read_and_a_sign_keeps_its_bits() {
        let cases: [(&[u8], u64); 9] = [
            (&[0x7f], 127),
            (&[0xff], u64::MAX),
            (&[0xcc, 200], 200),
            (&[0xcd, 1, 0], 256),
            (&[0xce, 0, 1, 0, 0], 65_536),
            (&[0xcf, 128, 0, 0, 0, 0, 0, 0, 1], (1 << 63) + 1),
            (&[0xd0, 0x80], (-128i64).cast_unsigned()),
            (&[0xd1, 0xff, 0x00], (-256i64).cast_unsigned()),
            (&[0xd2, 0xff, 0xff, 0, 0], (-65_536i64).cast_unsigned()),
        ];
        for (bytes, value) in cases {
            let mut reader = Reader::new(bytes);
            assert_eq!((reader.bits(), reader.left()), (Ok(value), 0), "{bytes:02x?}");
        }
    }

    #[test]
    fn lengths_are_believed_only_as_far_as_bytes_follow() {
        let array = Reader::new(&[0xdd, 0xff, 0xff, 0xff, 0xff, 1]).array().unwrap_err();
        assert!(array.message.contains("4294967295 items"), "{array}");
        assert!(Reader::new(&[0xdf, 0, 0, 0, 2, 1, 1]).map().is_err());
        assert!(Reader::new(&[0xc6, 0xff, 0xff, 0xff, 0xff]).raw().is_err());
        assert!(Reader::new(&[]).peek().is_err());
        assert_eq!(Reader::new(&[0xdc, 0, 1, 5]).array(), Ok(1));
    }

    #[test]
    fn a_word_outside_its_range_is_refused_by_name() {
        let mut words = Vec::new();
        assert!(Reader::new(&[0xff]).words(1, &mut words).unwrap_err().message.contains("outside 0..2^32"));
        assert!(Reader::new(&[0xcf, 0, 0, 0, 1, 0, 0, 0, 0]).word().is_err());
        Reader::new(&[5, 0xcd, 1, 2, 0xce, 0, 1, 0, 0, 0xcc, 200]).words(4, &mut words).unwrap();
        assert_eq!(words, [5, 258, 65_536, 200]);
    }

    #[test]
    fn anything_is_skipped_and_nesting_costs_no_stack() {
        let mut deep = vec![0x91; 1 << 20];
        deep.push(0xc0);
        let mut reader = Reader::new(&deep);
        assert_eq!((reader.skip(), reader.left()), (Ok(()), 0));
        let mixed = [0x84, 0xa1, b'a', 0xc3, 1, 0xca, 0, 0, 0, 0, 2, 0xd5, 1, 2, 3, 3, 0xc7, 1, 9, 9, 0x2a];
        let mut reader = Reader::new(&mixed);
        reader.skip().unwrap();
        assert_eq!(reader.bits(), Ok(42), "what follows is where it should be");
        assert!(Reader::new(&[0xc1]).skip().is_err(), "0xc1 is never used");
    }

    #[test]
    fn numbers_of_either_kind_are_times() {
        assert_eq!(Reader::new(&[0xca, 0x3f, 0xc0, 0, 0]).float(), Ok(1.5));
        assert_eq!(Reader::new(&[0xcb, 0x3f, 0xf8, 0, 0, 0, 0, 0, 0]).float(), Ok(1.5));
        assert_eq!(Reader::new(&[7]).float(), Ok(7.0));
        assert!(Reader::new(&[0xa1, b'x']).float().is_err());
        assert!(Reader::new(&[0xa1, 0xff]).text().unwrap_err().message.contains("UTF-8"));
    }

    proptest! {
        #[test]
        fn words_and_bits_come_back_as_written(
            words in proptest::collection::vec(any::<u32>(), 0..50), bits in any::<u64>(), small in 0u32..300
        ) {
            let mut writer = Writer::default();
            words.iter().for_each(|word| writer.unsigned(u64::from(*word)));
            writer.unsigned(bits);
            writer.unsigned(u64::from(small));
            let bytes = writer.finish();
            let (mut reader, mut read) = (Reader::new(&bytes), Vec::new());
            reader.words(words.len(), &mut read).unwrap();
            prop_assert_eq!(read, words);
            prop_assert_eq!(reader.bits(), Ok(bits));
            prop_assert_eq!(reader.word(), Ok(small));
            prop_assert_eq!(reader.left(), 0);
        }

        #[test]
        fn no_bytes_make_it_panic_or_go_on_for_ever(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut reader = Reader::new(&bytes);
            while reader.left() > 0 && reader.skip().is_ok() {}
            let mut words = Vec::new();
            let _ = Reader::new(&bytes).words(bytes.len(), &mut words);
            prop_assert!(words.len() <= bytes.len());
        }
    }
}
