//! The shapes of messages. A shape spells a literal, and the literal's MD5 is what opens every message: two sides
//! understand each other only when their shapes are the same to the last field.

use md5::{Digest as _, Md5};

/// The shape of one value on the wire.
#[derive(Clone, Copy, Debug)]
pub enum Shape {
    /// Four bytes with a sign; enums of no declared width, and error codes.
    I32,
    /// Eight bytes with a sign.
    I64,
    /// Eight bytes.
    U64,
    /// One byte; enums of that width.
    U8,
    /// One byte, 0 or 1.
    Bool,
    /// No bytes.
    Nothing,
    /// A length and so many bytes.
    Text,
    /// A length and so many values.
    List(&'static Shape),
    /// A byte that indicates whether the value follows.
    Optional(&'static Shape),
    /// A byte that indicates which alternative follows.
    Variant(&'static [Shape]),
    /// A byte that indicates whether the value or an error code follows.
    Expected(&'static Shape),
    /// Fields in order.
    Struct(&'static [Shape]),
    /// Numbers in order, of a struct with this alignment in memory. Its literal contains the alignment.
    Plain(&'static [Shape], u8),
}

/// How the size of an alignment is spelt: this and the size.
const SIZE_BASE: u8 = 129;
/// The end mark of a struct's fields or a variant's alternatives.
const END: u8 = 255;

impl Shape {
    /// The literal of the shape.
    #[must_use]
    pub fn literal(&self) -> Vec<u8> {
        let mut literal = Vec::new();
        self.spell(&mut literal);
        literal
    }

    /// The first word of a message of this shape; its lowest bit is free.
    #[must_use]
    pub fn hash(&self) -> u32 {
        first_word(&self.literal()) & !1
    }

    fn spell(&self, into: &mut Vec<u8>) {
        let one = |into: &mut Vec<u8>, id: u8, inner: &Self| {
            into.push(id);
            inner.spell(into);
        };
        match self {
            Self::I32 => into.push(1),
            Self::I64 => into.push(3),
            Self::U64 => into.push(4),
            Self::U8 => into.push(6),
            Self::Bool => into.push(11),
            Self::Nothing => into.push(250),
            // Text is a list of characters.
            Self::Text => into.extend([128, 12]),
            Self::List(inner) => one(into, 132, inner),
            Self::Optional(inner) => one(into, 133, inner),
            Self::Expected(inner) => {
                one(into, 135, inner);
                Self::I32.spell(into);
            }
            Self::Variant(choices) => {
                into.push(134);
                choices.iter().for_each(|choice| choice.spell(into));
                into.push(END);
            }
            Self::Struct(fields) => {
                into.push(253);
                fields.iter().for_each(|field| field.spell(into));
                into.push(END);
            }
            Self::Plain(fields, align) => {
                into.push(253);
                fields.iter().for_each(|field| field.spell(into));
                into.extend([SIZE_BASE + align, SIZE_BASE + align, END]);
            }
        }
    }
}

/// The first four bytes of the MD5 of `bytes`, as a big-endian number.
#[must_use]
pub fn first_word(bytes: &[u8]) -> u32 {
    let digest = Md5::digest(bytes);
    u32::from_be_bytes([digest[0], digest[1], digest[2], digest[3]])
}
