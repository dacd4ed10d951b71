//! The checksum of an object's bytes: CRC-64/ECMA-182. Mooncake's clients write it, and look at it, where
//! MOONCAKE_STORE_CHECKSUM is set; ours always do.

use crc_fast::CrcAlgorithm;

/// The checksum of `bytes`.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(CrcAlgorithm::Crc64Ecma182, bytes)
}

#[cfg(test)]
mod tests {
    use super::checksum;

    /// Checksums that a real client of 0.3.13.post1 sent for these bytes (MOONCAKE_STORE_CHECKSUM=1), recorded from its
    /// PutEnd.
    #[test]
    fn it_is_the_one_of_real_clients() {
        assert_eq!(checksum(b"123456789"), 0x6c40_df5f_0b49_7347);
        let long: Vec<u8> = (0..=255).cycle().take(9 << 20).collect();
        assert_eq!(checksum(&long), 0xe3f7_e30c_e7c4_aa96);
    }
}
