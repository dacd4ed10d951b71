//! Wire format of the answer: a count, then for each range its address, length, window and ways in, then a checksum.

use std::collections::BTreeMap;

use crate::mover::{Fault, RemoteSegment, WindowId};

/// Ranges that one process publishes, at most.
pub(super) const RANGES_MAX: usize = 65_536;
/// Bytes of an answer's body, at most.
pub(super) const BODY_BYTES_MAX: u64 = 64 << 20;
/// Ways into one window, at most.
const WAYS_MAX: usize = 4;
const SUM_BYTES: usize = 8;

/// By first address.
pub(super) type Records = BTreeMap<u64, RemoteSegment>;

/// Whether the format can express a range: its ways in are few and short.
pub(super) fn is_encodable(segment: &RemoteSegment) -> bool {
    let short = |(name, key): &(String, Vec<u8>)| name.len() <= 32 && key.len() <= 200;
    segment.access.len() <= WAYS_MAX && segment.access.iter().all(short)
}

/// As bytes. Every record is tellable.
pub(super) fn encode(records: &Records) -> Vec<u8> {
    let mut body = Vec::with_capacity(records.len() * 40 + 16);
    let count = u32::try_from(records.len()).expect("bounded when they were published");
    body.extend_from_slice(&count.to_le_bytes());
    for (address, segment) in records {
        for number in [*address, segment.bytes, segment.window.0] {
            body.extend_from_slice(&number.to_le_bytes());
        }
        body.push(u8::try_from(segment.access.len()).expect("tellable"));
        for (name, key) in &segment.access {
            body.push(u8::try_from(name.len()).expect("tellable"));
            body.extend_from_slice(name.as_bytes());
            body.extend_from_slice(&u16::try_from(key.len()).expect("tellable").to_le_bytes());
            body.extend_from_slice(key);
        }
    }
    let sum = crate::checksum(&body);
    body.extend_from_slice(&sum.to_le_bytes());
    body
}

/// From bytes.
///
/// # Errors
/// [`Fault::Invalid`] for anything else than what [`encode`] makes of ranges that do not overlap.
pub(super) fn decode(body: &[u8]) -> Result<Records, Fault> {
    let wrong = || Fault::Invalid("what it publishes cannot be read; run the same release".into());
    let (told, sum) = body.split_at_checked(body.len().saturating_sub(SUM_BYTES)).ok_or_else(wrong)?;
    if sum != crate::checksum(told).to_le_bytes() {
        return Err(wrong());
    }
    let mut rest = Rest(told);
    read(&mut rest).filter(|_| rest.0.is_empty()).ok_or_else(wrong)
}

fn read(rest: &mut Rest<'_>) -> Option<Records> {
    let count = usize::try_from(u32::from_le_bytes(rest.take()?)).ok()?;
    let (mut records, mut free_from) = (Records::new(), 0);
    if count > RANGES_MAX {
        return None;
    }
    for _ in 0..count {
        let (address, bytes) = (u64::from_le_bytes(rest.take()?), u64::from_le_bytes(rest.take()?));
        let window = WindowId(u64::from_le_bytes(rest.take()?));
        if address < free_from || bytes == 0 {
            return None;
        }
        free_from = address.checked_add(bytes)?;
        let [ways] = rest.take()?;
        let access = (0..ways).map(|_| way(rest)).collect::<Option<Vec<_>>>()?;
        records.insert(address, RemoteSegment { window, bytes, access });
    }
    Some(records)
}

fn way(rest: &mut Rest<'_>) -> Option<(String, Vec<u8>)> {
    let [length] = rest.take()?;
    let name = rest.some(usize::from(length))?;
    let length = u16::from_le_bytes(rest.take()?);
    let key = rest.some(usize::from(length))?;
    Some((String::from_utf8(name.to_vec()).ok()?, key.to_vec()))
}

struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn some(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(taken)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.some(N)?.try_into().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> Records {
        let access = vec![("tcp".into(), Vec::new()), ("rdma".into(), vec![1, 2, 3])];
        let segment = |window| RemoteSegment { window: WindowId(window), bytes: 100, access: access.clone() };
        Records::from([(4_096, segment(7)), (8_192, segment(u64::MAX))])
    }

    #[test]
    fn they_come_back_and_damage_is_seen() {
        let body = encode(&records());
        assert_eq!(decode(&body).unwrap(), records());
        assert_eq!(decode(&encode(&Records::new())).unwrap(), Records::new());
        for at in 0..body.len() {
            let mut damaged = body.clone();
            damaged[at] ^= 1;
            assert!(decode(&damaged).is_err(), "byte {at}");
            assert!(decode(&body[..at]).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn nonsense_with_a_good_checksum_is_refused() {
        let signed = |mut told: Vec<u8>| {
            told.extend_from_slice(&crate::checksum(&told).to_le_bytes());
            decode(&told)
        };
        let one = |address: u64, bytes: u64| {
            let numbers = [address, bytes, 1].map(u64::to_le_bytes).concat();
            [numbers, vec![0]].concat()
        };
        let many =
            |count: u32, records: &[Vec<u8>]| [count.to_le_bytes().to_vec(), records.concat()].concat();
        assert!(signed(many(1, &[one(0, 10)])).is_ok());
        assert!(signed(many(2, &[one(0, 10)])).is_err(), "fewer than told");
        assert!(signed(many(1, &[one(0, 10), one(10, 10)])).is_err(), "more than told");
        assert!(signed(many(2, &[one(0, 10), one(9, 10)])).is_err(), "overlapping");
        assert!(signed(many(1, &[one(0, 0)])).is_err(), "empty");
        assert!(signed(many(1, &[one(u64::MAX, 2)])).is_err(), "beyond the end");
        assert!(signed(many(u32::MAX, &[])).is_err(), "too many");
    }
}
