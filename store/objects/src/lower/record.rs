//! The header before a value on the SSD. It names the value's key.

use super::FoundValue;

const VERSION: u8 = 1;
const HAS_CHECKSUM: u8 = 1;
/// Version, flags, lengths of tenant and key, checksum.
const FIXED_BYTES: usize = 12;

/// Length of the header of a value. None when it would be too long.
pub(super) fn header_bytes(tenant: &str, key: &[u8]) -> Option<usize> {
    let bytes = FIXED_BYTES + tenant.len() + key.len();
    (bytes <= baton_tiers::HEADER_MAX_BYTES).then_some(bytes)
}

/// The header of a value. None when it would be too long.
pub(super) fn header(tenant: &str, key: &[u8], checksum: Option<u32>) -> Option<Vec<u8>> {
    let tenant_bytes = u16::try_from(tenant.len()).ok()?;
    let key_bytes = u16::try_from(key.len()).ok()?;
    let mut header = vec![VERSION, if checksum.is_some() { HAS_CHECKSUM } else { 0 }, 0, 0];
    header.extend_from_slice(&tenant_bytes.to_le_bytes());
    header.extend_from_slice(&key_bytes.to_le_bytes());
    header.extend_from_slice(&checksum.unwrap_or(0).to_le_bytes());
    header.extend_from_slice(tenant.as_bytes());
    header.extend_from_slice(key);
    header_bytes(tenant, key).map(|_| header)
}

/// Tenant and key that a header names.
pub(super) fn names(header: &[u8]) -> Option<(&str, &[u8])> {
    let short =
        |at: usize| header.get(at..at + 2).map(|two| usize::from(u16::from_le_bytes([two[0], two[1]])));
    let (tenant_bytes, key_bytes) = (short(4)?, short(6)?);
    if header[0] != VERSION {
        return None;
    }
    let rest = header.get(FIXED_BYTES..FIXED_BYTES + tenant_bytes + key_bytes)?;
    let (tenant, key) = rest.split_at(tenant_bytes);
    Some((std::str::from_utf8(tenant).ok()?, key))
}

/// The value, if it is that key's and has the checksum that it had when it was put.
pub(super) fn open(header: &[u8], value: Vec<u8>, tenant: &str, key: &[u8]) -> Option<FoundValue> {
    if names(header)? != (tenant, key) {
        return None;
    }
    let sum = u32::from_le_bytes(header[8..FIXED_BYTES].try_into().expect("four bytes"));
    let checksum = (header[1] & HAS_CHECKSUM != 0).then_some(sum);
    let good = checksum.is_none_or(|expected| crate::checksum(&value) == expected);
    good.then_some(FoundValue { value, checksum })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_opened_under_its_own_key_only_and_only_whole() {
        let sum = Some(crate::checksum(b"value"));
        let mut header = header("team", b"key", sum).unwrap();
        header.resize(64, 0);
        let read = |tenant: &str, key: &[u8], value: &[u8]| open(&header, value.to_vec(), tenant, key);
        assert_eq!(
            read("team", b"key", b"value").unwrap(),
            FoundValue { value: b"value".to_vec(), checksum: sum }
        );
        assert!(read("team", b"keyx", b"value").is_none() && read("tea", b"mkey", b"value").is_none());
        assert!(read("team", b"key", b"valuf").is_none());
        assert!(open(&header[..10], Vec::new(), "team", b"key").is_none());
        assert!(self::header(&"x".repeat(4_000), &[0; 1_024], None).is_none());
        let mut newer = header.clone();
        newer[0] = 2;
        assert!(names(&newer).is_none() && names(&[]).is_none());
    }
}
