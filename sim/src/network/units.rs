//! The units inside the core: nanoseconds, and *grains* of 10⁻¹² byte.
//!
//! A rate of one grain a nanosecond is a thousandth of a byte a second, so a rate rounded down to
//! a whole number of them loses less than a microsecond in a day at any rate above 87 MB/s.

/// Grains in a byte.
pub(crate) const GRAINS_PER_BYTE: u128 = 1_000_000_000_000;
/// Grains a nanosecond in one byte a second.
const RATE_PER_BYTE_PER_S: u64 = 1_000;
/// Nanoseconds in a microsecond.
const NS_PER_US: u64 = 1_000;
/// Above this a rate is cut: a petabyte a second, in bytes a second.
pub(crate) const MAX_BYTES_PER_S: u64 = 1_000_000_000_000_000;
/// A time that never comes, and a rate that nothing limits.
pub(crate) const NEVER: u64 = u64::MAX;
/// See [`NEVER`].
pub(crate) const UNLIMITED: u64 = u64::MAX;

/// Microseconds as nanoseconds; past the year 2554 it stops.
pub(crate) const fn ns(us: u64) -> u64 {
    us.saturating_mul(NS_PER_US)
}

/// Nanoseconds as microseconds, rounded up.
pub(crate) const fn us_ceil(ns: u64) -> u64 {
    ns.div_ceil(NS_PER_US)
}

/// Bytes a second as grains a nanosecond.
pub(crate) const fn rate(bytes_per_s: u64) -> u64 {
    let bounded = if bytes_per_s > MAX_BYTES_PER_S { MAX_BYTES_PER_S } else { bytes_per_s };
    bounded * RATE_PER_BYTE_PER_S
}

/// Grains a nanosecond as bytes a second, rounded down.
#[cfg(test)]
pub(crate) const fn bytes_per_s(rate: u64) -> u64 {
    rate / RATE_PER_BYTE_PER_S
}

/// Bytes as grains.
pub(crate) const fn grains(bytes: u64) -> u128 {
    bytes as u128 * GRAINS_PER_BYTE
}

/// Whole bytes in `grains`.
pub(crate) fn whole_bytes(grains: u128) -> u64 {
    u64::try_from(grains / GRAINS_PER_BYTE).unwrap_or(u64::MAX)
}

/// The first moment at which `amount` grains have flowed at `rate` since `from_ns`.
pub(crate) fn after(from_ns: u64, amount: u128, rate: u64) -> u64 {
    if rate == 0 {
        return NEVER;
    }
    let wait = amount.div_ceil(u128::from(rate));
    from_ns.saturating_add(u64::try_from(wait).unwrap_or(NEVER))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_a_second_takes_a_second_a_byte() {
        assert_eq!(after(0, grains(3), rate(1)), 3_000_000_000);
        assert_eq!(after(5, grains(0), rate(1)), 5);
        assert_eq!(after(5, grains(1), 0), NEVER);
    }

    #[test]
    fn rounding_is_up_for_times_and_down_for_bytes() {
        assert_eq!(us_ceil(ns(7)), 7);
        assert_eq!(us_ceil(ns(7) + 1), 8);
        assert_eq!(whole_bytes(grains(2) - 1), 1);
        assert_eq!(after(0, 10, 3), 4);
    }

    #[test]
    fn extremes_saturate() {
        assert_eq!(ns(u64::MAX), NEVER);
        assert_eq!(bytes_per_s(rate(u64::MAX)), MAX_BYTES_PER_S);
        assert_eq!(after(u64::MAX - 1, grains(u64::MAX), 1), NEVER);
        assert_eq!(whole_bytes(grains(u64::MAX)), u64::MAX);
    }
}
