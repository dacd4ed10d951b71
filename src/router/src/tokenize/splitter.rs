//! Where a text may be cut so that its parts tokenise as the whole does: before special tokens.

use std::ops::Range;

/// A part is at least this long before it is cut off, so that many small ones cost no entries.
const MIN_PART_BYTES: usize = 64;

/// Finds the marks (special tokens, as text) of a vocabulary.
#[derive(Debug, Default)]
pub(crate) struct Splitter {
    /// Longest first, so that the first that fits is the one that counts.
    marks: Vec<Mark>,
    first: FirstByte,
}

#[derive(Debug, Clone)]
pub(crate) struct Mark {
    pub(crate) text: String,
    pub(crate) token: u32,
    /// Whether a text may be cut before it.
    pub(crate) cuts: bool,
}

#[derive(Debug, Default)]
enum FirstByte {
    #[default]
    None,
    One(char),
    Any(Box<[bool; 256]>),
}

impl Splitter {
    pub(crate) fn new(mut marks: Vec<Mark>) -> Self {
        marks.retain(|mark| !mark.text.is_empty());
        marks.sort_by(|a, b| b.text.len().cmp(&a.text.len()).then_with(|| a.text.cmp(&b.text)));
        let mut table = [false; 256];
        for mark in &marks {
            table[usize::from(mark.text.as_bytes()[0])] = true;
        }
        let firsts = table.iter().filter(|&&set| set).count();
        let only = marks.first().and_then(|mark| mark.text.chars().next());
        let first = match only {
            None => FirstByte::None,
            Some(one) if firsts == 1 && one.is_ascii() => FirstByte::One(one),
            Some(_) => FirstByte::Any(Box::new(table)),
        };
        Self { marks, first }
    }

    /// The first mark at or after `from`, and where it begins.
    pub(crate) fn next(&self, text: &str, mut from: usize) -> Option<(usize, &Mark)> {
        loop {
            let at = from
                + match &self.first {
                    FirstByte::None => None,
                    FirstByte::One(one) => text[from..].find(*one),
                    FirstByte::Any(table) => {
                        text.as_bytes()[from..].iter().position(|&b| table[usize::from(b)])
                    }
                }?;
            let rest = &text.as_bytes()[at..];
            if let Some(mark) = self.marks.iter().find(|mark| rest.starts_with(mark.text.as_bytes())) {
                return Some((at, mark));
            }
            from = at + 1;
            while !text.is_char_boundary(from) {
                from += 1;
            }
        }
    }

    /// The marks before which a text is cut, up to a few dozen.
    pub(crate) fn cutting_texts(&self) -> impl Iterator<Item = &str> {
        self.marks.iter().filter(|mark| mark.cuts).map(|mark| mark.text.as_str()).take(32)
    }

    /// The parts of `text`, in order and without gaps. Texts with a common beginning have the parts
    /// that end in it in common, too.
    pub(crate) fn parts(&self, text: &str) -> Vec<Range<usize>> {
        let (mut parts, mut start, mut from) = (Vec::new(), 0, 0);
        while let Some((at, mark)) = self.next(text, from) {
            if mark.cuts && at - start >= MIN_PART_BYTES {
                parts.push(start..at);
                start = at;
            }
            from = at + mark.text.len();
        }
        if start < text.len() {
            parts.push(start..text.len());
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn splitter(marks: &[&str]) -> Splitter {
        let mark =
            |(at, text): (usize, &&str)| Mark { text: (*text).to_owned(), token: at as u32, cuts: true };
        Splitter::new(marks.iter().enumerate().map(mark).collect())
    }

    #[test]
    fn the_longest_mark_counts() {
        let splitter = splitter(&["<a>", "<a><b>", "é"]);
        let found = |text: &str| splitter.next(text, 0).map(|(at, mark)| (at, mark.text.clone()));
        assert_eq!(found("x<a><b>"), Some((1, "<a><b>".to_owned())));
        assert_eq!(found("ê<<a>"), Some((3, "<a>".to_owned())));
        assert_eq!(found("èé"), Some((2, "é".to_owned())));
        assert_eq!(found("<b>"), None);
        assert!(Splitter::default().next("<a>", 0).is_none());
    }

    proptest! {
        #[test]
        fn parts_cover_the_text_and_begin_with_marks(text in "(<a>|<b|[a-z]{0,40}|é){0,40}") {
            let splitter = splitter(&["<a>"]);
            let parts = splitter.parts(&text);
            prop_assert_eq!(parts.iter().map(|part| &text[part.clone()]).collect::<String>(), text.as_str());
            prop_assert!(parts.iter().skip(1).all(|part| text[part.clone()].starts_with("<a>")));
            prop_assert!(parts.iter().rev().skip(1).all(|part| part.len() >= MIN_PART_BYTES));
        }

        #[test]
        fn a_longer_text_keeps_the_parts_of_its_beginning(a in "(<a>|[a-z]{0,40}){0,40}", b in "(<a>|[a-z]{0,40}){0,20}") {
            let splitter = splitter(&["<a>"]);
            let (short, long) = (splitter.parts(&a), splitter.parts(&format!("{a}<a>{b}")));
            let kept = short.len().saturating_sub(1);
            prop_assert_eq!(&short[..kept], &long[..kept]);
        }
    }
}
