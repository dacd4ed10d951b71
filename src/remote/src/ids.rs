//! Names that are used once: of requests at engines, of transfers, and of rooms.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Longest part of the client's id that an engine's id repeats.
const KEPT_CHARS: usize = 96;

/// Where this process starts to count. Two processes that start near each other are unlikely, and their names differ
/// in 63 bits.
static COUNTER: LazyLock<AtomicU64> = LazyLock::new(|| AtomicU64::new(rand::random()));

/// A number that no other call in this process gets, and that another process hardly gets: each step of the counter
/// is mixed by a bijection of the 63-bit numbers.
pub(crate) fn fresh63() -> u64 {
    mix63(COUNTER.fetch_add(1, Ordering::Relaxed) & MASK)
}

const MASK: u64 = (1 << 63) - 1;

/// Odd factors and shifted sums of a number with itself are bijections, so the whole is one.
const fn mix63(number: u64) -> u64 {
    let mut mixed = number & MASK;
    mixed ^= mixed >> 32;
    mixed = mixed.wrapping_mul(0x9E37_79B9_7F4A_7C15) & MASK;
    mixed ^= mixed >> 29;
    mixed = mixed.wrapping_mul(0xD6E8_FEB8_6659_FD93) & MASK;
    mixed ^ (mixed >> 32)
}

/// The name under which an engine knows a leg: the request's id as far as a header may hold it, and a suffix of its own.
pub(crate) fn leg_id(request: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':');
    let kept: String = request.chars().take(KEPT_CHARS).map(|c| if plain(c) { c } else { '_' }).collect();
    format!("{kept}-{:016x}", fresh63())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn numbers_do_not_repeat_and_stay_within_63_bits() {
        let numbers: BTreeSet<u64> = (0..100_000).map(|_| fresh63()).collect();
        assert_eq!(numbers.len(), 100_000);
        assert!(numbers.iter().all(|number| *number <= MASK));
        let neighbours: BTreeSet<u64> = (0..100_000).map(|at| mix63(MASK - at)).collect();
        assert_eq!(neighbours.len(), 100_000);
    }

    #[test]
    fn ids_fit_a_header_and_differ() {
        let id = leg_id("a b\r\nX: é/1");
        assert!(id.starts_with("a_b__X:___1-"), "{id}");
        assert!(leg_id(&"x".repeat(10_000)).len() < 128);
        assert_ne!(leg_id("a"), leg_id("a"));
    }
}
