//! Patterns of `SCAN … MATCH`: `*`, `?`, `[a-z]`, `[^a]`, `\` before a character that means itself.

/// Whether the whole of `text` is as `pattern` says. The work is bounded by the product of their lengths.
pub(super) fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut pos) = (0, 0);
    // Where to come back to: after the last star, and what it takes in by then.
    let mut star: Option<(usize, usize)> = None;
    loop {
        if pattern.get(at) == Some(&b'*') {
            at += 1;
            star = Some((at, pos));
            continue;
        }
        if at == pattern.len() && pos == text.len() {
            return true;
        }
        let next = text.get(pos).and_then(|byte| one(&pattern[at..], *byte));
        match (next, &mut star) {
            (Some(length), _) => {
                at += length;
                pos += 1;
            }
            (None, Some((after, taken))) if *taken < text.len() => {
                *taken += 1;
                (at, pos) = (*after, *taken);
            }
            _ => return false,
        }
    }
}

/// How much of the pattern stands for `byte`; none when it does not.
fn one(pattern: &[u8], byte: u8) -> Option<usize> {
    match pattern {
        [] => None,
        [b'?', ..] => Some(1),
        [b'\\', literal, ..] => (*literal == byte).then_some(2),
        [b'[', rest @ ..] => set(rest, byte),
        [literal, ..] => (*literal == byte).then_some(1),
    }
}

/// Matches a set, after its bracket. A set without an end takes in the rest.
fn set(rest: &[u8], byte: u8) -> Option<usize> {
    let negated = rest.first() == Some(&b'^');
    let (mut at, mut found) = (usize::from(negated), false);
    while let Some(first) = rest.get(at).filter(|byte| **byte != b']') {
        match (first, rest.get(at + 1), rest.get(at + 2)) {
            (b'\\', Some(literal), _) => {
                found |= *literal == byte;
                at += 2;
            }
            (low, Some(b'-'), Some(high)) if *high != b']' => {
                found |= (*low.min(high)..=*low.max(high)).contains(&byte);
                at += 3;
            }
            _ => {
                found |= *first == byte;
                at += 1;
            }
        }
    }
    let end = (at + 1).min(rest.len());
    (found != negated).then_some(1 + end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_mean_what_clients_expect() {
        let yes = [
            ("*", ""),
            ("*", "abc"),
            ("a*c", "abbc"),
            ("a?c", "abc"),
            ("[a-c]x", "bx"),
            ("[^a]x", "bx"),
            ("\\*", "*"),
            ("**b*", "ab"),
            ("k:*:z*", "k:1:2:z9"),
            ("[\\]]", "]"),
        ];
        yes.iter().for_each(|(p, t)| assert!(matches(p.as_bytes(), t.as_bytes()), "{p} {t}"));
        let no =
            [("", "a"), ("a", ""), ("a*c", "abd"), ("?", ""), ("[a-c]", "d"), ("[^a]", "a"), ("\\*", "a")];
        no.iter().for_each(|(p, t)| assert!(!matches(p.as_bytes(), t.as_bytes()), "{p} {t}"));
    }

    fn naive(pattern: &[u8], text: &[u8]) -> bool {
        match pattern.split_first() {
            None => text.is_empty(),
            Some((b'*', rest)) => (0..=text.len()).any(|at| naive(rest, &text[at..])),
            Some((b'?', rest)) => !text.is_empty() && naive(rest, &text[1..]),
            Some((byte, rest)) => text.first() == Some(byte) && naive(rest, &text[1..]),
        }
    }

    proptest::proptest! {
        #[test]
        fn stars_take_in_anything(pattern in "[ab*?]{0,8}", text in "[ab]{0,10}") {
            let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
            proptest::prop_assert_eq!(matches(pattern, text), naive(pattern, text));
        }

        #[test]
        fn nothing_panics(pattern in proptest::collection::vec(0u8..=255, 0..12), text in "[a-z]{0,5}") {
            matches(&pattern, text.as_bytes());
        }
    }
}
