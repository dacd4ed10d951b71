//! The trace that a call belongs to, from W3C Trace Context's header `traceparent`.

use http::HeaderMap;

/// The parent of a call's span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceParent {
    /// The whole trace; never 0.
    pub trace_id: u128,
    /// The caller's span; never 0.
    pub span_id: u64,
    /// Whether the caller records its own spans.
    pub sampled: bool,
}

impl TraceParent {
    /// Reads the header's value. `None` when it breaks the standard in any way: such a value is to be
    /// treated as if it had not been sent.
    #[must_use]
    pub fn parse(value: &str) -> Option<Self> {
        let bytes = value.as_bytes();
        let dashes = [2, 35, 52].iter().all(|&at| bytes.get(at) == Some(&b'-'));
        if !dashes || bytes.len() < 55 {
            return None;
        }
        let version = hex(&bytes[..2])?;
        // Later versions may add fields, the first one may not; 255 is kept free.
        let ends_well = match version {
            0 => bytes.len() == 55,
            0xff => false,
            _ => bytes.len() == 55 || bytes[55] == b'-',
        };
        let trace_id = hex(&bytes[3..35]).filter(|&id| ends_well && id != 0)?;
        let span_id = hex(&bytes[36..52]).filter(|&id| id != 0)?;
        let flags = hex(&bytes[53..55])?;
        Some(Self { trace_id, span_id: u64::try_from(span_id).ok()?, sampled: flags & 1 == 1 })
    }

    /// The parent that a call's headers name; none when they name several.
    pub(crate) fn read(headers: &HeaderMap) -> Option<Self> {
        let mut named = headers.get_all("traceparent").iter();
        let only = named.next().filter(|_| named.next().is_none())?;
        Self::parse(only.to_str().ok()?)
    }
}

/// At most 32 digits, lower case only, as the standard has it.
fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |number: u128, &digit| {
        let value = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(number << 4 | u128::from(value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_parent_is_read() {
        let parent = TraceParent::parse(GOOD).unwrap();
        assert_eq!(parent.trace_id, 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c);
        assert_eq!((parent.span_id, parent.sampled), (0xb7ad_6b71_6920_3331, true));
        let flags = |flags: &str| TraceParent::parse(&format!("{}{flags}", &GOOD[..53])).map(|p| p.sampled);
        assert_eq!([flags("00"), flags("02"), flags("03")], [Some(false), Some(false), Some(true)]);
        // A later version with more in it is read as far as it is known.
        assert_eq!(TraceParent::parse(&format!("cc{}-more", &GOOD[2..])), Some(parent));
    }

    #[test]
    fn whatever_breaks_the_standard_is_ignored() {
        let wrong = [
            String::new(),
            GOOD[..54].into(),
            format!("{GOOD}-more"),
            format!("{GOOD}0"),
            format!("cc{}0", &GOOD[2..]),
            format!("ff{}", &GOOD[2..]),
            GOOD.to_uppercase(),
            GOOD.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            GOOD.replace("b7ad6b7169203331", &"0".repeat(16)),
            GOOD.replace('-', "_"),
            GOOD.replace("b7ad", "b7aé"),
            GOOD.replace("-01", "-0g"),
            format!(" {GOOD}"),
        ];
        for value in wrong {
            assert_eq!(TraceParent::parse(&value), None, "{value:?}");
        }
    }

    #[test]
    fn two_parents_are_none() {
        let mut headers = HeaderMap::new();
        assert_eq!(TraceParent::read(&headers), None);
        headers.append("traceparent", GOOD.parse().unwrap());
        assert_eq!(TraceParent::read(&headers), TraceParent::parse(GOOD));
        headers.append("traceparent", GOOD.parse().unwrap());
        assert_eq!(TraceParent::read(&headers), None);
    }
}
