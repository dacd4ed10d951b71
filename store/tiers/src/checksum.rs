//! Checksum of a block's bytes at rest and on the wire.

use baton_types::BlockKey;
use crc_fast::{CrcAlgorithm, Digest};

/// The CRC-64/NVME of a block's key followed by its bytes: bytes that rest under the wrong key
/// are as wrong as damaged ones.
#[must_use]
pub fn block_checksum(key: BlockKey, bytes: &[u8]) -> u64 {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    digest.update(&key.0.to_le_bytes());
    digest.update(bytes);
    digest.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published check value of this CRC is that of the nine digits. The key is sixteen of
    /// the bytes, so any message can be split at that place.
    #[test]
    fn it_is_the_nvme_polynomial_over_key_and_bytes() {
        let digits = b"123456789";
        assert_eq!(crc_fast::checksum(CrcAlgorithm::Crc64Nvme, digits), 0xAE8B_1486_0A79_9888);
        let message: Vec<u8> = (0..99).collect();
        let key = BlockKey(u128::from_le_bytes(message[..16].try_into().unwrap()));
        let whole = crc_fast::checksum(CrcAlgorithm::Crc64Nvme, &message);
        assert_eq!(block_checksum(key, &message[16..]), whole);
    }

    #[test]
    fn every_bit_and_the_key_count() {
        let bytes = vec![7u8; 300];
        let good = block_checksum(BlockKey(1), &bytes);
        assert_ne!(block_checksum(BlockKey(2), &bytes), good);
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(block_checksum(BlockKey(1), &damaged), good, "bit {bit}");
        }
    }
}
