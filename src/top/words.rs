//! Numbers as people read them, always with their unit.

use std::time::Duration;

/// A time in seconds: `850 us`, `12.5 ms`, `3.2 s`; `-` if unknown, `>` beyond the last bucket.
pub(super) fn seconds(value: Option<f64>) -> String {
    match value {
        None => "-".into(),
        Some(value) if value.is_infinite() => "> 2 min".into(),
        Some(value) if value < 0.001 => format!("{:.0} us", value * 1e6),
        Some(value) if value < 1.0 => format!("{:.1} ms", value * 1e3),
        Some(value) => format!("{value:.1} s"),
    }
}

/// A time given in microseconds, in words.
pub(super) fn micros(us: u64) -> String {
    seconds(Some(us as f64 / 1e6))
}

/// A time since something: `42s`, `3:07`, `5:03:07`.
pub(super) fn clock(us: u64) -> String {
    let seconds = us / 1_000_000;
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, s) => format!("{s}s"),
        (0, m, s) => format!("{m}:{s:02}"),
        (h, m, s) => format!("{h}:{m:02}:{s:02}"),
    }
}

/// A ratio: `1.04`; beyond the last bucket `> 8`.
pub(super) fn ratio(value: Option<f64>) -> String {
    match value {
        None => "-".into(),
        Some(value) if value.is_infinite() => "> 8".into(),
        Some(value) => format!("{value:.2}"),
    }
}

/// A share in per cent, never rounded up to all of it.
pub(super) fn share(value: Option<f64>) -> String {
    match value {
        None => "-".into(),
        Some(value) if value >= 1.0 => "100 %".into(),
        Some(value) => format!("{:.1} %", (value * 1000.0).floor() / 10.0),
    }
}

/// Bytes: `17 B`, `4.2 MB`, `1.3 GB`.
pub(super) fn bytes(count: u64) -> String {
    let (count, units) = (count as f64, ["B", "kB", "MB", "GB", "TB"]);
    let step = if count < 1.0 { 0 } else { (count.log10() / 3.0) as usize }.min(units.len() - 1);
    let shown = count / 1000f64.powi(i32::try_from(step).unwrap_or(0));
    if step == 0 { format!("{shown:.0} B") } else { format!("{shown:.1} {}", units[step]) }
}

/// A rate: two digits that mean something.
pub(super) fn rate(value: f64) -> String {
    if value >= 100.0 { format!("{value:.0}/s") } else { format!("{value:.1}/s") }
}

/// How long percentiles reach back.
pub(super) fn window(over: Option<Duration>) -> String {
    over.map_or_else(|| "since the start".into(), |over| format!("last {:.0} s", over.as_secs_f64()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_carry_the_unit_that_suits_them() {
        assert_eq!(seconds(None), "-");
        assert_eq!(seconds(Some(0.00085)), "850 us");
        assert_eq!(seconds(Some(0.0125)), "12.5 ms");
        assert_eq!(seconds(Some(3.21)), "3.2 s");
        assert_eq!(seconds(Some(f64::INFINITY)), "> 2 min");
        assert_eq!((clock(42_900_000), clock(187_000_000)), ("42s".into(), "3:07".into()));
        assert_eq!(clock(18_187_000_000), "5:03:07");
        let last = crate::metrics::TIME_BUCKETS.last().copied();
        assert_eq!(last, Some(120.0), "beyond the last bucket is more than two minutes");
        assert_eq!(crate::metrics::RATIO_BUCKETS.last().copied(), Some(8.0), "and a ratio above 8");
    }

    #[test]
    fn shares_are_never_flattered() {
        assert_eq!(share(Some(0.9999)), "99.9 %");
        assert_eq!(share(Some(1.0)), "100 %");
        assert_eq!((share(Some(0.0)), share(None)), ("0.0 %".into(), "-".into()));
    }

    #[test]
    fn sizes_and_rates_are_short() {
        assert_eq!((bytes(0), bytes(17), bytes(999)), ("0 B".into(), "17 B".into(), "999 B".into()));
        assert_eq!((bytes(4_200_000), bytes(1_300_000_000)), ("4.2 MB".into(), "1.3 GB".into()));
        assert_eq!((rate(3.04), rate(1234.5), rate(0.0)), ("3.0/s".into(), "1234/s".into(), "0.0/s".into()));
        assert_eq!((ratio(Some(1.037)), ratio(Some(f64::INFINITY))), ("1.04".into(), "> 8".into()));
        assert_eq!(
            (window(None), window(Some(Duration::from_secs(60)))),
            ("since the start".into(), "last 60 s".into())
        );
    }
}
