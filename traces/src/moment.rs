//! Times as written, turned into milliseconds after the start of the trace.

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
    let text = text.trim();
    let (date, rest) = text.split_once(['T', 't', ' '])?;
    let mut parts = date.split('-');
    let (year, month, day) = (
        parts.next()?.parse::<i64>().ok()?,
        parts.next()?.parse::<i64>().ok()?,
        parts.next()?.parse::<i64>().ok()?,
    );
    let in_range = (1..=12).contains(&month) && (1..=31).contains(&day) && (0..10_000).contains(&year);
    if parts.next().is_some() || !in_range {
        return None;
    }
    let (time, offset_min) = split_offset(rest)?;
    let mut fields = time.split(':');
    let hour: f64 = fields.next()?.parse().ok()?;
    let minute: f64 = fields.next()?.parse().ok()?;
    let second: f64 = fields.next().unwrap_or("0").parse().ok()?;
    let valid = (0.0..24.0).contains(&hour) && (0.0..60.0).contains(&minute);
    if fields.next().is_some() || !valid || !(0.0..61.0).contains(&second) {
        return None;
    }
    #[expect(clippy::cast_precision_loss, reason = "days and minutes are small")]
    let whole_min = (days_since_1970(year, month, day) * 1440 - offset_min) as f64;
    Some((whole_min + hour * 60.0 + minute) * 60_000.0 + second * 1000.0)
}

/// Splits `18:17:03+02:00` into the time and the minutes east of UTC.
fn split_offset(text: &str) -> Option<(&str, i64)> {
    let text = text.trim_end();
    if let Some(time) = text.strip_suffix(['Z', 'z']) {
        return Some((time.trim_end(), 0));
    }
    let Some(at) = text.rfind(['+', '-']) else {
        return Some((text, 0));
    };
    let (time, offset) = text.split_at(at);
    let digits = offset[1..].replace(':', "");
    let (hours, minutes) = match digits.len() {
        2 => (digits.parse::<i64>().ok()?, 0),
        4 => (digits.get(..2)?.parse().ok()?, digits.get(2..)?.parse::<i64>().ok()?),
        _ => return None,
    };
    let sign = if offset.starts_with('-') { -1 } else { 1 };
    Some((time.trim_end(), sign * (hours * 60 + minutes)))
}

/// Days from 1970-01-01 in the Gregorian calendar: whole years before, leap days among them, then
/// the days of this year.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    const BEFORE_MONTH: [i64; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
    let leaps_before = |y: i64| (y - 1) / 4 - (y - 1) / 100 + (y - 1) / 400;
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let month_index = usize::try_from(month - 1).unwrap_or(0).min(11);
    (year - 1970) * 365 + leaps_before(year) - leaps_before(1970)
        + BEFORE_MONTH[month_index]
        + i64::from(is_leap && month > 2)
        + day
        - 1
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
