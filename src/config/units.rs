//! Settings as people write them: `ttft = "2s"` for `ttft_us = 2000000`, `max_body = "64MiB"`, `target = 0.995`.
//!
//! A file is rewritten, number for number and on the same lines, before it is read. So errors keep their lines, and
//! everything that is printed or shared has one form.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::LazyLock;

use schemars::generate::SchemaSettings;
use serde_json::Value;
use toml::de::{DeTable, DeValue};

use super::{Config, ConfigError, TextPosition};

/// What the end of a setting's name says of its value, and how to write that value without it.
const UNITS: [(&str, UnitKind); 3] =
    [("_us", UnitKind::Time), ("_bytes", UnitKind::Size), ("_permille", UnitKind::Share)];

#[derive(Clone, Copy, Debug)]
enum UnitKind {
    /// In µs.
    Time,
    /// In bytes.
    Size,
    /// In thousandths.
    Share,
}

/// The names of all settings.
static SETTINGS: LazyLock<BTreeSet<String>> = LazyLock::new(|| {
    let mut names = BTreeSet::new();
    let schema = SchemaSettings::draft2020_12().into_generator().into_root_schema_for::<Config>();
    collect(&schema.to_value(), &mut names);
    names
});

/// Whether a word is the name of a setting: only those are repeated from a file.
pub fn is_setting(word: &str) -> bool {
    SETTINGS.contains(word)
}

fn collect(schema: &Value, names: &mut BTreeSet<String>) {
    match schema {
        Value::Object(fields) => {
            let settings = fields.get("properties").and_then(Value::as_object);
            names.extend(settings.into_iter().flat_map(|settings| settings.keys().cloned()));
            fields.values().for_each(|field| collect(field, names));
        }
        Value::Array(list) => list.iter().for_each(|entry| collect(entry, names)),
        _ => {}
    }
}

/// A file with every setting under its own name, as a number. One that is no TOML stays as it is.
///
/// # Errors
/// The line and the name of a value that is none, or of a setting that is given twice; never the value, which may be a
/// secret in the wrong place.
pub fn plain(text: &str) -> Result<String, ConfigError> {
    let mut edits = Vec::new();
    if let Ok(file) = DeTable::parse(text) {
        rewrite(file.get_ref(), text, &mut edits)?;
    }
    edits.sort_by_key(|(span, _): &(Range<usize>, String)| span.start);
    let mut plain = text.to_owned();
    for (span, number) in edits.into_iter().rev() {
        plain.replace_range(span, &number);
    }
    Ok(plain)
}

/// An error about a setting outside its bounds, with name and numbers as the file has them: `target = 1.5` for
/// `target_permille = 1500`. Any other error stays as it is.
pub fn as_written(error: ConfigError, file: &str) -> ConfigError {
    let text = error.to_string();
    let written = || {
        let (setting, bounds) = text.rsplit_once(" is outside ")?;
        let (path, number) = setting.rsplit_once(" = ")?;
        let (place, name) = path.rsplit_once('.')?;
        let (low, high) = bounds.split_once("..=")?;
        let mut edits = Vec::new();
        rewrite(DeTable::parse(file).ok()?.get_ref(), file, &mut edits).ok()?;
        edits.chunks_exact(2).find(|edit| edit[0].1 == name && edit[1].1 == number)?;
        let (_, remedy) = short(name)?;
        let [(short, number), (_, low), (_, high)] = [number, low, high].map(|number| readable(name, number));
        let setting = format!("{place}.{short}");
        Some(ConfigError::OutsideInUnits { setting, value: number, low, high, remedy })
    };
    written().unwrap_or(error)
}

/// Collects two edits for each setting with a unit: its name, then its number.
fn rewrite(
    table: &DeTable<'_>,
    text: &str,
    edits: &mut Vec<(Range<usize>, String)>,
) -> Result<(), ConfigError> {
    for (key, value) in table {
        let name: &str = key.get_ref();
        if let Some((setting, quantity)) = meant(name) {
            let wrong = |message: String| {
                let line = text[..key.span().start].matches('\n').count() + 1;
                let position = TextPosition { line, column: None, setting: Some(name.to_owned()) };
                ConfigError::Syntax { position: Some(position), message }
            };
            if table.keys().any(|other| *other.get_ref() == setting) {
                return Err(wrong(format!("it is {setting}, which is given too: take one of them out")));
            }
            let number = quantity.read(value.get_ref());
            let number = number.ok_or_else(|| wrong(quantity.example().to_owned()))?;
            edits.extend([(key.span(), setting), (value.span(), number.to_string())]);
        } else {
            inside(value.get_ref(), text, edits)?;
        }
    }
    Ok(())
}

fn inside(
    value: &DeValue<'_>,
    text: &str,
    edits: &mut Vec<(Range<usize>, String)>,
) -> Result<(), ConfigError> {
    match value {
        DeValue::Table(table) => rewrite(table, text, edits),
        DeValue::Array(list) => list.iter().try_for_each(|entry| inside(entry.get_ref(), text, edits)),
        _ => Ok(()),
    }
}

/// The setting that a name without the unit stands for.
fn meant(name: &str) -> Option<(String, UnitKind)> {
    let mut all = UNITS.iter().map(|(end, quantity)| (format!("{name}{end}"), *quantity));
    all.find(|(setting, _)| !is_setting(name) && is_setting(setting))
}

/// The name of a setting without its unit, and what to give there.
pub fn short(setting: &str) -> Option<(&str, &'static str)> {
    UNITS.iter().find_map(|(end, quantity)| Some((setting.strip_suffix(end)?, quantity.example())))
}

impl UnitKind {
    const fn example(self) -> &'static str {
        match self {
            Self::Time => "give a time with its unit, such as \"2s\", \"50ms\" or \"1h 30m\"",
            Self::Size => "give a size with its unit, such as \"64MiB\" or \"4GiB\"",
            Self::Share => "give a share, such as 0.995 or \"99.5%\"",
        }
    }

    /// A number as it may be written in a file, exact.
    fn written(self, number: u64) -> String {
        match self {
            Self::Time if number >= 3_600_000_000 && number.is_multiple_of(3_600_000_000) => {
                format!("\"{}h\"", number / 3_600_000_000)
            }
            Self::Time if number == 0 || number >= 1_000_000 => {
                format!("\"{}s\"", decimal(number / 1_000_000, number % 1_000_000, 6))
            }
            Self::Time => format!("\"{}ms\"", decimal(number / 1000, number % 1000, 3)),
            Self::Size => {
                let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
                let unit = units.iter().find(|(_, bits)| number > 0 && number.is_multiple_of(1 << bits));
                let (name, bits) = unit.copied().unwrap_or(("B", 0));
                format!("\"{}{name}\"", number >> bits)
            }
            Self::Share => decimal(number / 1000, number % 1000, 3),
        }
    }

    fn read(self, value: &DeValue<'_>) -> Option<i64> {
        match (self, value) {
            (Self::Time, DeValue::String(text)) => {
                let time = humantime::parse_duration(text).ok()?;
                // A nanosecond more would be lost.
                time.subsec_nanos().is_multiple_of(1000).then(|| i64::try_from(time.as_micros()).ok())?
            }
            (Self::Size, DeValue::String(text)) => i64::try_from(size(text).ok()?).ok(),
            (Self::Share, DeValue::String(text)) => thousandths(text.strip_suffix('%')?.trim_end(), 10.0),
            (Self::Share, DeValue::Float(share)) => thousandths(share.as_str(), 1000.0),
            (Self::Share, DeValue::Integer(share)) => thousandths(share.as_str(), 1000.0),
            _ => None,
        }
    }
}

/// A setting and its number as people write them: `ttft` and `"1.5s"` for `ttft_us` and 1,500,000; as they are where
/// neither has a unit.
pub fn readable(setting: &str, number: &str) -> (String, String) {
    let unit = UNITS.iter().find_map(|(end, unit)| {
        let name = setting.strip_suffix(end).filter(|name| meant(name).is_some())?;
        Some((name, unit.written(number.parse().ok()?)))
    });
    unit.map_or_else(|| (setting.to_owned(), number.to_owned()), |(name, text)| (name.to_owned(), text))
}

/// A number with as few decimals as it takes.
fn decimal(whole: u64, rest: u64, digits: usize) -> String {
    let text = format!("{whole}.{rest:0digits$}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// A share in whole thousandths.
fn thousandths(text: &str, factor: f64) -> Option<i64> {
    let share = text.parse::<f64>().ok()? * factor;
    let whole = share.round();
    #[expect(clippy::cast_possible_truncation, reason = "in this range all are whole numbers")]
    ((share - whole).abs() < 1e-6 && (0.0..=1e6).contains(&whole)).then_some(whole as i64)
}

/// A size as people write it: `64MiB`, `4GiB`, `1000000`.
///
/// # Errors
/// What to give, in words.
pub fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let factor = match text[digits.len()..].trim() {
        "" | "B" => Some(1),
        "KiB" => Some(1u64 << 10),
        "MiB" => Some(1 << 20),
        "GiB" => Some(1 << 30),
        "TiB" => Some(1 << 40),
        _ => None,
    };
    let bytes = digits.parse::<u64>().ok().zip(factor).and_then(|(n, factor)| n.checked_mul(factor));
    bytes.ok_or_else(|| "give a size such as 64MiB, 4GiB or 1000000".into())
}

#[cfg(test)]
mod tests {
    use super::super::parse;
    use super::*;

    #[test]
    fn what_is_written_with_a_unit_is_read_as_the_same_number() {
        for (setting, number, written) in [
            ("ttft_us", 1_500_000, ("ttft", "\"1.5s\"")),
            ("ttft_us", 7_200_000_000u64, ("ttft", "\"2h\"")),
            ("ttft_us", 90_000_001, ("ttft", "\"90.000001s\"")),
            ("tbt_us", 50_000, ("tbt", "\"50ms\"")),
            ("tbt_us", 1_001, ("tbt", "\"1.001ms\"")),
            ("decode_duration_us", 0, ("decode_duration", "\"0s\"")),
            ("target_permille", 995, ("target", "0.995")),
            ("balancing_threshold_permille", 1300, ("balancing_threshold", "1.3")),
            ("headroom_permille", 0, ("headroom", "0")),
            ("max_body_bytes", 64 << 20, ("max_body", "\"64MiB\"")),
            ("max_body_bytes", 1025, ("max_body", "\"1025B\"")),
            ("max_retries", 2, ("max_retries", "2")),
        ] {
            let (name, text) = readable(setting, &number.to_string());
            assert_eq!((name.as_str(), text.as_str()), written);
            assert_eq!(plain(&format!("{name} = {text}")), Ok(format!("{setting} = {number}")));
        }
        assert_eq!(readable("name", "\"fast\""), ("name".into(), "\"fast\"".into()));
    }

    #[test]
    fn a_setting_may_be_written_with_its_unit() {
        let words = parse(
            "service.drain = \"1m 30s\"\nservice.max_body = \"8MiB\" # 8 MiB\n\
             [[scheduler.classes]]\nttft = \"2s\"\n'tbt' = \"50ms\"\ntarget = 0.99\nheadroom = \"2.5%\"\n\
             [[scheduler.classes]]\nname = \"batch\"\nttft = \"1h\"\ntarget_permille = 900\n",
        );
        let numbers = parse(
            "service.drain_us = 90_000_000\nservice.max_body_bytes = 8_388_608\n\
             [[scheduler.classes]]\nttft_us = 2_000_000\ntbt_us = 50_000\ntarget_permille = 990\n\
             headroom_permille = 25\n\
             [[scheduler.classes]]\nname = \"batch\"\nttft_us = 3_600_000_000\ntarget_permille = 900\n",
        );
        assert_eq!(words.expect("units").scheduler.classes, numbers.expect("numbers").scheduler.classes);
    }

    #[test]
    fn a_value_that_is_none_is_named_by_its_place_and_not_repeated() {
        for (line, why) in [
            ("ttft = \"hunter2\"", "line 3, ttft: give a time with its unit"),
            ("ttft = 2", "line 3, ttft: give a time with its unit"),
            ("ttft = \"1ns\"", "line 3, ttft: give a time with its unit"),
            ("ttft = \"2s\"\nttft_us = 5", "line 3, ttft: it is ttft_us, which is given too"),
            ("target = \"0.9\"", "line 3, target: give a share"),
            ("target = 0.99951", "line 3, target: give a share"),
            ("target = -0.5", "line 3, target: give a share"),
            ("\ntft = \"2s\"", "line 4, column 1: unknown field `tft`"),
            ("ttft = \"2s\"\ntbt_us = \"x\"", "line 4, column 10, tbt_us"),
            ("target = 1.5", "target = 1.5 is outside 0.5..=0.999; give a share"),
            ("target = 99", "target = 99 is outside 0.5..=0.999; give a share, such as 0.995 or \"99.5%\""),
            ("target_permille = 1500", "target_permille = 1500 is outside 500..=999"),
            ("tttf = \"2s\"", "did you mean `ttft`?"),
            ("tttf_us = 2000000", "did you mean `ttft_us`?"),
        ] {
            let error =
                parse(&format!("# one\n[[scheduler.classes]]\n{line}\n")).expect_err(line).to_string();
            assert!(error.contains(why) && !error.contains("hunter2"), "{line}: {error}");
        }
        let error = parse("service.heartbeat = \"1ms\"").expect_err("too short").to_string();
        assert!(error.starts_with("service.heartbeat = \"1ms\" is outside \"10ms\"..=\"60s\""), "{error}");
        let error = parse("service.max_bdy = \"8MiB\"").expect_err("no such setting").to_string();
        assert!(error.contains("did you mean `max_body`?"), "{error}");
        let error = parse("service.max_body = \"64MB\"").expect_err("no such unit").to_string();
        assert!(error.contains("line 1, max_body: give a size with its unit"), "{error}");
    }

    #[test]
    fn a_file_without_units_stays_as_it_is() {
        for text in ["", "# nothing", "scheduler = 5", "no TOML", "[scheduler]\nseed = 7 # \u{e9}\n"] {
            assert_eq!(plain(text).expect(text), text);
        }
    }

    #[test]
    fn no_name_without_its_unit_is_a_setting_itself() {
        for name in SETTINGS.iter() {
            for (end, _) in UNITS {
                let short = name.strip_suffix(end).unwrap_or_default();
                assert!(!SETTINGS.contains(short), "{short} and {name}");
                let meant: Vec<&String> = SETTINGS
                    .iter()
                    .filter(|n| UNITS.iter().any(|(e, _)| format!("{short}{e}") == **n))
                    .collect();
                assert!(short.is_empty() || meant.len() == 1, "{short} would be any of {meant:?}");
            }
        }
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        assert_eq!(size("4GiB"), Ok(4 << 30));
        assert_eq!((size("10"), size("3 MiB"), size("7B")), (Ok(10), Ok(3 << 20), Ok(7)));
        for bad in ["", "GiB", "4GB", "-1", "99999999TiB", "1.5GiB"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }
}
