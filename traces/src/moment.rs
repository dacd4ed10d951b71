//! Times as written, turned into milliseconds after the start of the trace.

use chrono::{DateTime, NaiveDateTime};

use crate::error::RowFault;
use crate::flat::Stamp;
use crate::options::TimeUnit;

/// Milliseconds of a stamp: after the start of the trace, or since 1970 where it is a date.
pub(crate) fn stamp_ms(stamp: &Stamp, unit: TimeUnit) -> Result<f64, RowFault> {
    let absolute_ms = match stamp {
        Stamp::Number(number) => number * unit.in_ms(),
        Stamp::Text(text) => iso_ms(text).ok_or_else(|| {
            RowFault::parse(
                format!("{text:?} is not a time"),
                "write a number, or a date like 2023-11-16 18:17:03.98",
            )
        })?,
    };
    if absolute_ms.is_finite() {
        Ok(absolute_ms)
    } else {
        Err(RowFault::parse("the time is not finite", "fix or remove the row"))
    }
}

/// Unit of a number that can only be a date: seconds, ms, us or ns since 1970.
pub(crate) fn epoch_unit(number: f64) -> Option<TimeUnit> {
    match number {
        n if n >= 1e17 => Some(TimeUnit::Nanoseconds),
        n if n >= 1e14 => Some(TimeUnit::Microseconds),
        n if n >= 1e11 => Some(TimeUnit::Milliseconds),
        n if n >= 1e9 => Some(TimeUnit::Seconds),
        _ => None,
    }
}

/// Milliseconds since 1970 of an ISO 8601 date and time; `Z`, an offset, or none (taken as UTC).
pub(crate) fn iso_ms(text: &str) -> Option<f64> {
    let text = text.trim().replacen(['T', 't'], " ", 1);
    let with_offset = |format| DateTime::parse_from_str(&text, format).map(|at| at.to_utc());
    let in_utc = |format| NaiveDateTime::parse_from_str(&text, format).map(|at| at.and_utc());
    let at = in_utc("%F %H:%M:%S%.f")
        .or_else(|_| with_offset("%F %H:%M:%S%.f%#z"))
        .or_else(|_| in_utc("%F %H:%M"))
        .or_else(|_| with_offset("%F %H:%M%#z"))
        .ok()?;
    #[expect(clippy::cast_precision_loss, reason = "seconds since 1970 need no more than 53 bits")]
    Some(at.timestamp() as f64 * 1000.0 + f64::from(at.timestamp_subsec_nanos()) / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_dates() {
        assert_eq!(iso_ms("1970-01-01T00:00:00Z"), Some(0.0));
        assert_eq!(iso_ms("2000-03-01 00:00:00"), Some(951_868_800_000.0));
        assert_eq!(iso_ms("2024-02-29T12:00:00+02:00"), Some(1_709_200_800_000.0));
        assert_eq!(iso_ms("2023-11-16 18:17:03.9799600"), Some(1_700_158_623_979.96));
        assert_eq!(iso_ms("2024-05-01T00:00:00-0530"), Some(1_714_541_400_000.0));
        assert_eq!(iso_ms(" 2023-11-16t18:17 "), Some(1_700_158_620_000.0));
        assert_eq!(iso_ms("2023-11-16 18:17z"), Some(1_700_158_620_000.0));
        assert_eq!(iso_ms("2023-1-6 8:7:3.5 +01"), Some(1_672_988_823_500.0));
        assert_eq!(iso_ms("2016-12-31T23:59:60.5Z"), Some(1_483_228_800_500.0));
        for wrong in ["", "2023-13-01 00:00:00", "2023-11-16", "18:17:03", "2023-11-16 25:00:00", "é"] {
            assert_eq!(iso_ms(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn stamps_are_scaled_and_nonsense_is_refused() {
        assert_eq!(stamp_ms(&Stamp::Number(1.5), TimeUnit::Seconds).unwrap(), 1500.0);
        assert!(stamp_ms(&Stamp::Text("soon".into()), TimeUnit::Seconds).is_err());
        assert!(stamp_ms(&Stamp::Number(f64::NAN), TimeUnit::Seconds).is_err());
        assert!(stamp_ms(&Stamp::Number(f64::MAX), TimeUnit::Seconds).is_err());
    }

    #[test]
    fn dates_give_away_their_unit() {
        assert_eq!(epoch_unit(1.7e9), Some(TimeUnit::Seconds));
        assert_eq!(epoch_unit(1.7e12), Some(TimeUnit::Milliseconds));
        assert_eq!(epoch_unit(1.7e15), Some(TimeUnit::Microseconds));
        assert_eq!(epoch_unit(1.7e18), Some(TimeUnit::Nanoseconds));
        assert_eq!(epoch_unit(3.5e6), None);
    }
}
