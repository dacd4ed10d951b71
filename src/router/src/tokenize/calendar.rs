//! Dates for chat templates: UTC.

use chrono::DateTime;
use chrono::format::StrftimeItems;

/// Writes the time, in seconds since 1970, as `format` says; none where it has a directive that is not known.
pub(crate) fn format_utc(seconds: u64, format: &str) -> Option<String> {
    let items = StrftimeItems::new(format).parse().ok()?;
    let at = DateTime::from_timestamp(i64::try_from(seconds).ok()?, 0)?;
    Some(at.format_with_items(items.iter()).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        // date -u -d @951827696; date -u -d @1795265640
        assert_eq!(
            format_utc(951_827_696, "%A %d %B %Y %H:%M:%S").unwrap(),
            "Tuesday 29 February 2000 12:34:56"
        );
        assert_eq!(format_utc(1_795_265_640, "%a %-d %b %y %I %p %m%%").unwrap(), "Sat 21 Nov 26 12 PM 11%");
        assert_eq!(format_utc(0, "%Y-%m-%d").unwrap(), "1970-01-01");
        assert_eq!(format_utc(0, "%-H%-I%-M%-S %-m%-y").unwrap(), "01200 170");
        for unknown in ["%Q", "%", "%-"] {
            assert_eq!(format_utc(0, unknown), None, "{unknown}");
        }
    }
}
