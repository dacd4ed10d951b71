//! A value as it is stored: a head of 24 bytes, then the bytes that were given.
//!
//! | at | bytes | what |
//! |---|---|---|
//! | 0 | 4 | `BTV1` |
//! | 4 | 4 | zero |
//! | 8 | 8 | how many bytes follow |
//! | 16 | 8 | CRC-64 of them |

use crc_fast::{CrcAlgorithm, Digest};

pub(super) const HEAD_BYTES: usize = 24;
const MAGIC: [u8; 8] = *b"BTV1\0\0\0\0";

/// A checksum over pieces.
pub(super) struct Sum(Digest);

impl Sum {
    pub(super) fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc64Nvme))
    }

    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(super) fn end(self) -> u64 {
        self.0.finalize()
    }
}

/// A head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) bytes: u64,
    pub(super) sum: u64,
}

impl Head {
    pub(super) fn encode(self) -> [u8; HEAD_BYTES] {
        let mut head = [0; HEAD_BYTES];
        head[..8].copy_from_slice(&MAGIC);
        head[8..16].copy_from_slice(&self.bytes.to_le_bytes());
        head[16..].copy_from_slice(&self.sum.to_le_bytes());
        head
    }

    /// None for a value that something else has stored.
    pub(super) fn decode(head: &[u8; HEAD_BYTES]) -> Option<Self> {
        let number = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"));
        (head[..8] == MAGIC).then(|| Self { bytes: number(8), sum: number(16) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_come_back_and_others_are_refused() {
        let head = Head { bytes: 5, sum: u64::MAX };
        assert_eq!(Head::decode(&head.encode()), Some(head));
        for at in 0..8 {
            let mut other = head.encode();
            other[at] ^= 1;
            assert_eq!(Head::decode(&other), None);
        }
    }

    #[test]
    fn a_sum_over_pieces_is_that_of_the_whole() {
        let of = |pieces: &[&[u8]]| {
            let mut sum = Sum::new();
            pieces.iter().for_each(|piece| sum.add(piece));
            sum.end()
        };
        assert_eq!(of(&[b"one ", b"", b"whole"]), of(&[b"one whole"]));
        assert_ne!(of(&[b"one whole"]), of(&[b"one whale"]));
    }
}
