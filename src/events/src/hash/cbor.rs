//! Canonical CBOR of the few shapes that block hashes are made of.

use super::engine::Tagged;

fn head(into: &mut Vec<u8>, major: u8, count: u64) {
    let mark = major << 5;
    let bytes = count.to_be_bytes();
    match count {
        0..=23 => into.push(mark | bytes[7]),
        24..=0xff => into.extend([mark | 24, bytes[7]]),
        0x100..=0xffff => into.extend([mark | 25, bytes[6], bytes[7]]),
        0x1_0000..=0xffff_ffff => {
            into.push(mark | 26);
            into.extend(&bytes[4..]);
        }
        _ => {
            into.push(mark | 27);
            into.extend(bytes);
        }
    }
}

fn text(into: &mut Vec<u8>, text: &str) {
    head(into, 3, text.len() as u64);
    into.extend(text.as_bytes());
}

/// A text alone: what a root is made of.
pub(super) fn root(into: &mut Vec<u8>, seed: &str) {
    text(into, seed);
}

/// Parent, tokens, extra keys.
pub(super) fn block(into: &mut Vec<u8>, parent: &[u8], tokens: &[u32], extra: &[Tagged<'_>]) {
    head(into, 4, 3);
    head(into, 2, parent.len() as u64);
    into.extend(parent);
    head(into, 4, tokens.len() as u64);
    tokens.iter().for_each(|token| head(into, 0, u64::from(*token)));
    if extra.is_empty() {
        return into.push(0xf6);
    }
    head(into, 4, extra.len() as u64);
    for (tag, value) in extra {
        head(into, 4, 2);
        text(into, tag);
        text(into, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_are_those_of_the_standard() {
        let mut bytes = Vec::new();
        block(&mut bytes, &[7, 8], &[1, 24, 500, 70_000], &[("t", "v")]);
        let known = [
            0x83, 0x42, 7, 8, 0x84, 1, 0x18, 24, 0x19, 1, 0xf4, 0x1a, 0, 1, 0x11, 0x70, 0x81, 0x82, 0x61,
            b't', 0x61, b'v',
        ];
        assert_eq!(bytes, known);
        let (mut none, mut long) = (Vec::new(), Vec::new());
        block(&mut none, &[], &[], &[]);
        assert_eq!(none, [0x83, 0x40, 0x80, 0xf6]);
        head(&mut long, 0, 1 << 32);
        assert_eq!(long, [0x1b, 0, 0, 0, 1, 0, 0, 0, 0]);
    }
}
