//! The bytes of an object in the bucket: whose value it is, the value, and what vouches for both.

use std::hash::Hasher as _;

use super::super::{Found, record};
use crate::arena::Room;
use crate::reading::copy_out;

const MAGIC: &[u8; 8] = b"BATONKV1";
/// Magic, lengths of header and value, checksum of what precedes the value.
const FIXED_BYTES: usize = 20;

/// Bytes of the object of a value. None when its header would be too long.
pub(crate) fn total_bytes(tenant: &str, key: &[u8], value_bytes: usize) -> Option<u64> {
    Some((FIXED_BYTES + record::header_bytes(tenant, key)? + value_bytes) as u64)
}

/// A value as it is written.
pub(super) struct Sealed {
    pub(super) bytes: Vec<u8>,
    pub(super) digest: u64,
}

/// Copies a value out of memory. None when memory has not kept it as it was put, or its header would be too long.
pub(super) fn seal(tenant: &str, key: &[u8], room: &Room, checksum: Option<u32>) -> Option<Sealed> {
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
    Some(Sealed { bytes, digest })
}

/// The value of a key, if these are the bytes that were written for it, all of them and no more.
pub(super) fn open(bytes: &[u8], tenant: &str, key: &[u8]) -> Option<Found> {
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

fn head_checksum(fixed: &[u8], header: &[u8]) -> u32 {
    crate::checksum(&[fixed, header].concat())
}

/// The hash of a value by which equal ones are known.
pub(super) fn digest_of<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> u64 {
    let mut hash = xxhash_rust::xxh3::Xxh3Default::new();
    pieces.into_iter().for_each(|piece| hash.write(piece));
    hash.finish()
}
