//! JSON by hand: text into a reused buffer, and a bound on how deep a body nests.

use std::io::Write;

/// How deep a body may nest: what serde_json itself goes down to.
pub(crate) const MAX_DEPTH: usize = 120;

const HEX: &[u8; 16] = b"0123456789abcdef";

/// Bytes that a JSON string cannot hold as they are.
const ESCAPED: [bool; 256] = {
    let mut table = [false; 256];
    let mut at = 0;
    while at < 0x20 {
        table[at] = true;
        at += 1;
    }
    table[b'"' as usize] = true;
    table[b'\\' as usize] = true;
    table[0x7f] = true;
    table
};

/// Appends `text` as the inside of a JSON string, without the quotes.
pub(crate) fn escape(out: &mut Vec<u8>, text: &str) {
    let bytes = text.as_bytes();
    let mut from = 0;
    for (at, &byte) in bytes.iter().enumerate() {
        if !ESCAPED[usize::from(byte)] {
            continue;
        }
        out.extend_from_slice(&bytes[from..at]);
        from = at + 1;
        match byte {
            b'"' => out.extend_from_slice(b"\\\""),
            b'\\' => out.extend_from_slice(b"\\\\"),
            b'\n' => out.extend_from_slice(b"\\n"),
            b'\r' => out.extend_from_slice(b"\\r"),
            b'\t' => out.extend_from_slice(b"\\t"),
            _ => {
                out.extend_from_slice(b"\\u00");
                out.push(HEX[usize::from(byte >> 4)]);
                out.push(HEX[usize::from(byte & 15)]);
            }
        }
    }
    out.extend_from_slice(&bytes[from..]);
}

/// Appends `text` as a JSON string.
pub(crate) fn string(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    escape(out, text);
    out.push(b'"');
}

/// Appends a whole number.
pub(crate) fn integer(out: &mut Vec<u8>, mut value: u64) {
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

/// Appends a logprob. JSON knows no infinity: an impossible token has −9999.
pub(crate) fn logprob(out: &mut Vec<u8>, value: f32) {
    let value = if value.is_finite() { value } else { -9999.0 };
    write!(out, "{value:?}").expect("a Vec takes every byte");
}

/// Appends `items` as a JSON array of small numbers.
pub(crate) fn byte_array(out: &mut Vec<u8>, items: &[u8]) {
    out.push(b'[');
    for (at, &item) in items.iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        integer(out, u64::from(item));
    }
    out.push(b']');
}

/// Whether arrays and objects nest deeper than [`MAX_DEPTH`]; strings do not count.
pub(crate) fn too_deep(body: &[u8]) -> bool {
    openings(body) > MAX_DEPTH && depth(body) > MAX_DEPTH
}

/// How many brackets and braces open anywhere, text included. Counted in bytes a run at a time, which the compiler
/// turns into one instruction for many: a long prompt is mostly this.
fn openings(body: &[u8]) -> usize {
    let of = |run: &[u8]| run.iter().fold(0u8, |sum, &byte| sum + u8::from(byte == b'[' || byte == b'{'));
    body.chunks(usize::from(u8::MAX)).map(|run| usize::from(of(run))).sum()
}

fn depth(body: &[u8]) -> usize {
    let (mut depth, mut deepest, mut at) = (0usize, 0, 0);
    while at < body.len() {
        match body[at] {
            b'[' | b'{' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            b'"' => at = string_end(body, at),
            _ => {}
        }
        at += 1;
    }
    deepest
}

/// Where the string that opens at `start` closes, or the last byte when it does not.
fn string_end(body: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while let Some(found) = body.get(at..).and_then(|rest| memchr::memchr2(b'"', b'\\', rest)) {
        at += found;
        if body[at] == b'"' {
            return at;
        }
        at += 2;
    }
    body.len().saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn strings_are_read_back_as_they_were(text in any::<String>()) {
            let mut out = Vec::new();
            string(&mut out, &text);
            prop_assert_eq!(serde_json::from_slice::<String>(&out).unwrap(), text);
        }

        #[test]
        fn numbers_are_read_back_as_they_were(whole in any::<u64>(), real in any::<f32>()) {
            let mut out = Vec::new();
            integer(&mut out, whole);
            prop_assert_eq!(serde_json::from_slice::<u64>(&out).unwrap(), whole);
            out.clear();
            logprob(&mut out, real);
            let read: f32 = serde_json::from_slice(&out).unwrap();
            prop_assert_eq!(read, if real.is_finite() { real } else { -9999.0 });
        }

        #[test]
        fn depth_of_any_bytes_is_found_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(depth(&bytes) <= bytes.len());
        }
    }

    #[test]
    fn depth_counts_structure_and_not_text() {
        assert_eq!(depth(br#"{"a":[1,{"b":"[[[[\"[[["}]}"#), 3);
        let deep = "[".repeat(MAX_DEPTH + 1);
        assert!(too_deep(deep.as_bytes()));
        assert!(!too_deep("[".repeat(MAX_DEPTH).as_bytes()));
        assert!(!too_deep("[]".repeat(MAX_DEPTH * 2).as_bytes()));
        assert!(!too_deep(format!("[\"{deep}\"]").as_bytes()));
        assert!(!too_deep(format!("[\"\\\"{deep}").as_bytes()), "a string that does not end");
        assert_eq!(openings("[{".repeat(1000).as_bytes()), 2000);
    }
}
