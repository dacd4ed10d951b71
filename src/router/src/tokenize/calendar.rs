//! Dates for chat templates: UTC, and the directives that templates use.

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// Year, month from 1 and day from 1 of a day counted from 1970-01-01.
fn date(days: u64) -> (u64, usize, u64) {
    let (mut year, mut left) = (1970, days);
    loop {
        let length = if leap(year) { 366 } else { 365 };
        if left < length {
            break;
        }
        left -= length;
        year += 1;
    }
    let mut month = 1;
    loop {
        let length = month_days(year, month);
        if left < length {
            return (year, month, left + 1);
        }
        left -= length;
        month += 1;
    }
}

fn leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn month_days(year: u64, month: usize) -> u64 {
    match month {
        2 if leap(year) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Writes the time, in seconds since 1970, as `format` says; fails with a directive it does not know.
pub(crate) fn format_utc(seconds: u64, format: &str) -> Result<String, char> {
    let days = seconds / 86_400;
    let (year, month, day) = date(days);
    let (hour, minute, second) = (seconds / 3_600 % 24, seconds / 60 % 60, seconds % 60);
    let month_name = MONTHS[month - 1];
    let day_name = DAYS[((days + 3) % 7) as usize];
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next().ok_or('%')?;
        let padded = directive != '-';
        if !padded {
            directive = chars.next().ok_or('-')?;
        }
        let number = |value: u64| if padded { format!("{value:02}") } else { value.to_string() };
        out.push_str(&match directive {
            'Y' => year.to_string(),
            'y' => number(year % 100),
            'm' => number(month as u64),
            'd' => number(day),
            'H' => number(hour),
            'I' => number((hour + 11) % 12 + 1),
            'M' => number(minute),
            'S' => number(second),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'B' => month_name.to_owned(),
            'b' => month_name[..3].to_owned(),
            'A' => day_name.to_owned(),
            'a' => day_name[..3].to_owned(),
            '%' => "%".to_owned(),
            other => return Err(other),
        });
    }
    Ok(out)
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
        assert_eq!(format_utc(0, "%Q"), Err('Q'));
    }
}
