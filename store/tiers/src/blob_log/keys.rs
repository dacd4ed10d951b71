//! Content of the keys of a value's blocks.
//!
//! A head: the value's name, its length, the length of its header, and a number that distinguishes this writing of it
//! from others. The other blocks: a mixture of name, number and position, so that no two blocks have one name.

use super::Listing;
use baton_types::BlockKey;

/// A header is padded to a multiple of this.
const UNIT_BYTES: usize = 16;
/// Bytes before a header: its checksum.
const SEAL_BYTES: usize = 8;
/// Longest header.
pub const HEADER_MAX_BYTES: usize = 255 * UNIT_BYTES - SEAL_BYTES;
/// Numbers of writings go round after so many.
const NONCE_BITS: u32 = 24;
const NONCE_MASK: u64 = (1 << NONCE_BITS) - 1;

fn mix(mut number: u64) -> u64 {
    // The finaliser of a well-known generator: every bit of the input moves every bit of the output.
    number = (number ^ (number >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    number = (number ^ (number >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ (number >> 31)
}

/// A header with room for its checksum.
pub(super) fn unsealed(header: &[u8]) -> Vec<u8> {
    [&[0; SEAL_BYTES], header].concat()
}

/// Puts the checksum before a header, of the header as it will be padded and of this very writing.
pub(super) fn seal(head: BlockKey, header: &mut Vec<u8>) {
    header.resize(header_bytes(head), 0);
    let sum = sum(head, &header[SEAL_BYTES..]);
    header[..SEAL_BYTES].copy_from_slice(&sum.to_le_bytes());
}

/// The header, if it is the one that was sealed for this head.
pub(super) fn open(head: BlockKey, sealed: &[u8]) -> Option<Vec<u8>> {
    let (seal, header) = sealed.split_at_checked(SEAL_BYTES)?;
    (seal == sum(head, header).to_le_bytes()).then(|| header.to_vec())
}

fn sum(head: BlockKey, header: &[u8]) -> u64 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
    digest.update(&head.0.to_le_bytes());
    digest.update(header);
    digest.finalize()
}

/// The key of a head. None when the header is too long or the value's length is the largest number.
pub(super) fn head(name: u64, bytes: u32, header_bytes: usize, nonce: u64) -> Option<BlockKey> {
    let units = header_bytes.div_ceil(UNIT_BYTES) as u64;
    if units > 255 || bytes == u32::MAX {
        return None;
    }
    let high = u64::from(bytes) << 32 | units << NONCE_BITS | (nonce & NONCE_MASK);
    Some(BlockKey(u128::from(high) << 64 | u128::from(name)))
}

/// The key of a block after the head; `part` counts from 1.
pub(super) fn part(head: BlockKey, part: u32) -> BlockKey {
    let (high, name) = ((head.0 >> 64) as u64, head.short().0);
    let low = mix(name ^ mix(high ^ u64::from(part).rotate_left(40)));
    BlockKey(u128::from(part) << 96 | u128::from(high as u32) << 64 | u128::from(low))
}

/// The position of a block after the head.
pub(super) fn part_number(part: BlockKey) -> u32 {
    (part.0 >> 96) as u32
}

pub(super) fn value_bytes(head: BlockKey) -> u32 {
    (head.0 >> 96) as u32
}

pub(super) fn header_bytes(head: BlockKey) -> usize {
    ((head.0 >> (64 + NONCE_BITS)) & 255) as usize * UNIT_BYTES
}

fn nonce(head: BlockKey) -> u64 {
    (head.0 >> 64) as u64 & NONCE_MASK
}

/// The number from `from` on that comes after this head's. Numbers go round: one that is less than half way ahead is
/// taken for ahead.
pub(super) fn nonce_after(head: BlockKey, from: u64) -> u64 {
    let ahead = nonce(head).wrapping_sub(from) & NONCE_MASK;
    if ahead <= NONCE_MASK / 2 { from + ahead + 1 } else { from }
}

/// How many blocks a value has, its head included.
pub(super) fn parts(head: BlockKey, block_bytes: usize) -> u32 {
    let all = header_bytes(head) as u64 + u64::from(value_bytes(head));
    all.div_ceil(block_bytes as u64).max(1) as u32
}

pub(super) fn listing(head: BlockKey, tag: u64) -> Listing {
    Listing { name: head.short().0, tag, bytes: value_bytes(head) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::is_trial;
    use std::collections::BTreeSet;

    #[test]
    fn a_head_says_what_it_was_made_of_and_none_is_a_trial_s() {
        let key = head(77, 1 << 20, 33, 0x0100_0005).unwrap();
        assert_eq!((key.short().0, value_bytes(key), header_bytes(key), nonce(key)), (77, 1 << 20, 48, 5));
        assert_eq!((parts(key, 65_536), parts(head(1, 0, 0, 0).unwrap(), 4096)), (17, 1));
        let last = head(u64::MAX, u32::MAX - 1, HEADER_MAX_BYTES + SEAL_BYTES, u64::MAX).unwrap();
        assert!(!is_trial(last) && !is_trial(part(last, 1 << 20)));
        assert!(
            head(1, u32::MAX, 0, 0).is_none() && head(1, 1, HEADER_MAX_BYTES + SEAL_BYTES + 1, 0).is_none()
        );
    }

    #[test]
    fn a_header_is_opened_for_its_own_head_alone() {
        let key = head(77, 100, 20, 1).unwrap();
        let mut header = unsealed(b"twelve bytes");
        seal(key, &mut header);
        assert_eq!(open(key, &header).unwrap(), b"twelve bytes\0\0\0\0\0\0\0\0\0\0\0\0");
        assert!(open(head(77, 100, 20, 2).unwrap(), &header).is_none(), "another writing of the same name");
        for bit in 0..header.len() * 8 {
            header[bit / 8] ^= 1 << (bit % 8);
            assert!(open(key, &header).is_none(), "bit {bit}");
            header[bit / 8] ^= 1 << (bit % 8);
        }
        assert!(open(key, &header[..7]).is_none());
    }

    #[test]
    fn blocks_of_values_have_names_of_their_own() {
        let heads = (0..20).flat_map(|name| (0..20).map(move |nonce| head(name, 100, 16, nonce).unwrap()));
        let parts = heads.flat_map(|head| (1..20).map(move |number| part(head, number)));
        let names: BTreeSet<u64> = parts.map(|part| part.short().0).collect();
        assert_eq!(names.len(), 20 * 20 * 19);
    }
}
