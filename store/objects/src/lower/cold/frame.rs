//! The bytes of an object in the bucket: whose value it is, the value, and what vouches for both.

use std::hash::Hasher as _;

use super::super::{FoundValue, record};
use crate::arena::ArenaMemory;
use crate::reading::copy_out;

const MAGIC: &[u8; 8] = b"BATONKV1";
/// Magic, lengths of header and value, checksum of what precedes the value.
const FIXED_BYTES: usize = 20;

/// The first bytes of an object that say whose value it is.
#[cfg(feature = "resp")]
pub(super) const HEAD_MAX_BYTES: usize = FIXED_BYTES + baton_tiers::HEADER_MAX_BYTES;

/// Bytes of the object of a value. None when its header would be too long.
pub(crate) fn total_bytes(tenant: &str, key: &[u8], value_bytes: usize) -> Option<u64> {
    Some((FIXED_BYTES + record::header_bytes(tenant, key)? + value_bytes) as u64)
}

/// A value as it is written.
pub(super) struct SealedFrame {
    pub(super) bytes: Vec<u8>,
    pub(super) digest: u64,
}

/// Copies a value out of memory. None when memory has not kept it as it was put, or its header would be too long.
pub(super) fn seal(
    tenant: &str,
    key: &[u8],
    room: &ArenaMemory,
    checksum: Option<u32>,
) -> Option<SealedFrame> {
    let start = FIXED_BYTES + record::header_bytes(tenant, key)?;
    let mut bytes = vec![0; start + room.bytes()];
    copy_out(room, 0, &mut bytes[start..]);
    let value = &bytes[start..];
    let (found, digest) = (crate::checksum(value), digest_of([value]));
    if checksum.is_some_and(|expected| expected != found) {
        return None;
    }
    let header = record::header(tenant, key, Some(found))?;
    let length = |bytes: usize| u32::try_from(bytes).ok().map(u32::to_le_bytes);
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&length(header.len())?);
    bytes[12..16].copy_from_slice(&length(room.bytes())?);
    bytes[FIXED_BYTES..start].copy_from_slice(&header);
    let head = head_checksum(&bytes[..16], &header);
    bytes[16..FIXED_BYTES].copy_from_slice(&head.to_le_bytes());
    Some(SealedFrame { bytes, digest })
}

/// The value of a key, if `bytes` is exactly the frame that was written for it.
pub(super) fn open(bytes: &[u8], tenant: &str, key: &[u8]) -> Option<FoundValue> {
    let (fixed, rest) = bytes.split_first_chunk::<FIXED_BYTES>()?;
    let number = |at: usize| u32::from_le_bytes(fixed[at..at + 4].try_into().expect("four bytes"));
    let (header_bytes, value_bytes, head) = (number(8), number(12), number(16));
    let (header, value) = rest.split_at_checked(usize::try_from(header_bytes).ok()?)?;
    let whole = fixed[..8] == *MAGIC
        && value.len() == usize::try_from(value_bytes).ok()?
        && head_checksum(&fixed[..16], header) == head;
    let found = whole.then(|| record::open(header, value.to_vec(), tenant, key)).flatten()?;
    // One without a checksum was not written here.
    found.checksum.is_some().then_some(found)
}

/// Tenant and key that the first bytes of an object name, if they are as they were written.
#[cfg(feature = "resp")]
pub(super) fn names(head: &[u8]) -> Option<(String, Vec<u8>)> {
    let (fixed, rest) = head.split_first_chunk::<FIXED_BYTES>()?;
    let number = |at: usize| u32::from_le_bytes(fixed[at..at + 4].try_into().expect("four bytes"));
    let header = rest.get(..usize::try_from(number(8)).ok()?)?;
    let whole = fixed[..8] == *MAGIC && head_checksum(&fixed[..16], header) == number(16);
    let (tenant, key) = whole.then(|| record::names(header)).flatten()?;
    Some((tenant.to_owned(), key.to_vec()))
}

fn head_checksum(fixed: &[u8], header: &[u8]) -> u32 {
    crate::checksum(&[fixed, header].concat())
}

/// The hash of a value by which equal ones are known.
pub(super) fn digest_of<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> u64 {
    let mut hash = xxhash_rust::xxh3::Xxh3Default::new();
    pieces.into_iter().for_each(|piece| hash.write(piece));
    hash.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{Arena, Slabs};

    fn room(value: &[u8]) -> ArenaMemory {
        let slabs = Slabs::new(Arena::new(4).unwrap());
        let mut room = ArenaMemory::take(&slabs, u32::try_from(value.len()).unwrap(), 0).unwrap();
        let mut left = value;
        for slice in room.slices_mut() {
            let (now, later) = left.split_at(slice.len().min(left.len()));
            slice[..now.len()].copy_from_slice(now);
            left = later;
        }
        room
    }

    #[test]
    fn a_value_is_opened_under_its_own_key_only_and_only_whole() {
        let value: Vec<u8> = (0..=255).collect();
        let sealed = seal("team", b"key", &room(&value), None).unwrap();
        assert_eq!(sealed.bytes.len() as u64, total_bytes("team", b"key", value.len()).unwrap());
        assert_eq!(sealed.digest, digest_of([&value[..100], &value[100..]]));
        let found = open(&sealed.bytes, "team", b"key").unwrap();
        assert_eq!((&found.value, found.checksum), (&value, Some(crate::checksum(&value))));
        assert!(
            open(&sealed.bytes, "tea", b"mkey").is_none() && open(&sealed.bytes, "team", b"kez").is_none()
        );
        for at in 0..sealed.bytes.len() {
            for bit in 0..8 {
                let mut damaged = sealed.bytes.clone();
                damaged[at] ^= 1 << bit;
                assert!(open(&damaged, "team", b"key").is_none(), "bit {bit} of byte {at}");
            }
            assert!(open(&sealed.bytes[..at], "team", b"key").is_none(), "cut at {at}");
        }
        assert!(open(&[&sealed.bytes[..], b"x"].concat(), "team", b"key").is_none());
    }

    #[cfg(feature = "resp")]
    #[test]
    fn the_first_bytes_name_the_key_unless_they_are_damaged() {
        let longest = vec![7; 2_000];
        for (tenant, key) in [("team", b"key".as_slice()), ("", &longest)] {
            let sealed = seal(tenant, key, &room(&[9; 100]), None).unwrap().bytes;
            let (head, named) = (sealed.len() - 100, Some((tenant.to_owned(), key.to_vec())));
            assert_eq!((names(&sealed), names(&sealed[..head])), (named.clone(), named));
            assert!(head <= HEAD_MAX_BYTES && names(&sealed[..head - 1]).is_none());
            for at in 0..head {
                let mut damaged = sealed.clone();
                damaged[at] ^= 4;
                assert!(names(&damaged).is_none(), "byte {at}");
            }
        }
    }

    #[test]
    fn what_memory_has_not_kept_is_not_written() {
        let good = crate::checksum(b"value");
        assert!(seal("", b"k", &room(b"value"), Some(good)).is_some());
        assert!(seal("", b"k", &room(b"valuf"), Some(good)).is_none());
        assert!(seal("", b"", &room(b""), Some(0)).is_some(), "no bytes at all are a value, too");
    }
}
