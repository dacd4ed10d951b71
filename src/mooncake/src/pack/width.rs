//! How many bytes the lengths of containers take in one message.

/// The width of lengths: the smallest that the longest container of the message allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    One,
    Two,
    Four,
    Eight,
}

/// Where the width is in the meta byte.
const SHIFT: u8 = 3;

impl Width {
    pub(super) const fn for_length(longest: usize) -> Self {
        match longest as u64 {
            0..=0xff => Self::One,
            0x100..=0xffff => Self::Two,
            0x1_0000..=0xffff_ffff => Self::Four,
            _ => Self::Eight,
        }
    }

    pub(super) const fn of_meta(meta: u8) -> Self {
        match (meta >> SHIFT) & 3 {
            0 => Self::One,
            1 => Self::Two,
            2 => Self::Four,
            _ => Self::Eight,
        }
    }

    /// The meta byte that contains this width alone.
    pub(super) const fn meta(self) -> u8 {
        (self as u8) << SHIFT
    }

    pub(super) const fn bytes(self) -> usize {
        1 << (self as u8)
    }
}
