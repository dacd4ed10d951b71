//! Unpredictable numbers, for names that no other process may have and for rights that none may guess.

/// Such a number, from the system's randomness.
pub(crate) fn random() -> u64 {
    let [drawn, ..] = halves();
    drawn
}

/// A random number of 128 bits.
pub(crate) fn random_128() -> u128 {
    let [high, low] = halves();
    u128::from(high) << 64 | u128::from(low)
}

fn halves() -> [u64; 2] {
    let drawn = crate::guard::challenge();
    [0, 8].map(|at| u64::from_le_bytes(drawn[at..at + 8].try_into().expect("eight bytes")))
}
