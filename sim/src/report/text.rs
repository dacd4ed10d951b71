//! Text for a page: escaped, and numbers as people read them.

/// Text that cannot leave its element or attribute.
#[must_use]
pub(super) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            // Control characters and marks that reorder text would hide what a name is.
            c if c.is_control() || is_bidi_mark(c) => safe.push('\u{FFFD}'),
            c => safe.push(c),
        }
    }
    safe
}

const fn is_bidi_mark(c: char) -> bool {
    matches!(c, '\u{200E}' | '\u{200F}' | '\u{061C}' | '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}')
}

/// A count with its thousands apart: `12,031`.
#[must_use]
pub(super) fn count(n: u64) -> String {
    grouped(&n.to_string())
}

/// A figure with `decimals` places and its thousands apart; a dash for what is no number.
#[must_use]
pub(super) fn fixed(value: f64, decimals: usize) -> String {
    if !value.is_finite() {
        return "–".into();
    }
    let text = format!("{value:.decimals$}");
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    grouped(whole) + rest
}

/// A share as a percentage with one place: `95.2 %`.
#[must_use]
pub(super) fn percent(share: f64) -> String {
    fixed(share * 100.0, 1) + " %"
}

/// A figure as short as an axis needs it: `0.05`, `20`, `1.5k`, `3M`.
#[must_use]
pub(super) fn short(value: f64) -> String {
    let (scaled, suffix) = match value.abs() {
        v if v >= 1e9 => (value / 1e9, "G"),
        v if v >= 1e6 => (value / 1e6, "M"),
        v if v >= 1e3 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    if scaled != 0.0 && scaled.abs() < 1e-3 {
        return format!("{scaled:.0e}");
    }
    trimmed(scaled, 3) + suffix
}

/// A place in a drawing: one decimal, and none where it is zero.
#[must_use]
pub(super) fn coordinate(value: f64) -> String {
    trimmed(value, 1)
}

/// `part` of `whole`; nothing of nothing.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "a share for a page")]
pub(super) fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

fn trimmed(value: f64, decimals: usize) -> String {
    let text = format!("{value:.decimals$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    if text == "-0" { "0".into() } else { text.into() }
}

fn grouped(digits: &str) -> String {
    let (sign, digits) = digits.strip_prefix('-').map_or(("", digits), |rest| ("-", rest));
    let mut text = String::from(sign);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_leaves_its_element() {
        assert_eq!(escape("<a href=\"x\">'&'"), "&lt;a href=&quot;x&quot;&gt;&#39;&amp;&#39;");
        assert_eq!(escape("a\u{202E}b\u{0}c\u{2069}"), "a\u{FFFD}b\u{FFFD}c\u{FFFD}");
        assert_eq!(escape("ü → ✓"), "ü → ✓");
    }

    #[test]
    fn numbers_read_well() {
        assert_eq!([count(0), count(999), count(1000), count(1_234_567)], ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([fixed(1234.567, 1), fixed(-1000.0, 0), fixed(f64::NAN, 2)], ["1,234.6", "-1,000", "–"]);
        assert_eq!([percent(0.9521), percent(1.0)], ["95.2 %", "100.0 %"]);
        assert_eq!([short(0.05), short(20.0), short(1500.0), short(3e6)], ["0.05", "20", "1.5k", "3M"]);
        assert_eq!([short(0.0), short(0.0001), short(100.0)], ["0", "1e-4", "100"]);
        assert_eq!([coordinate(12.04), coordinate(7.25), coordinate(-0.01)], ["12", "7.2", "0"]);
        assert_eq!((share(1, 4), share(1, 0)), (Some(0.25), None));
    }
}
