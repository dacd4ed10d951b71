//! Finds marks in a text that comes in pieces, and holds back what could become one.

/// Whitespace before a mark belongs to it; more than this is text.
const MAX_LEAD_BYTES: usize = 64;

/// Text that could be the beginning of a mark, with the whitespace before it.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    held: String,
}

impl Marks {
    /// Takes in a character and appends to `out` what is no part of a mark. Some when it completes one
    /// of `marks`, none of which begins another: what is held is then that mark with what leads it.
    /// Whitespace may lead a mark, and `separator` where there is one.
    pub(crate) fn push(
        &mut self,
        c: char,
        marks: &[&str],
        separator: Option<char>,
        out: &mut String,
    ) -> Option<usize> {
        if self.held.is_empty() && !leads(c, separator) && !marks.iter().any(|mark| mark.starts_with(c)) {
            out.push(c);
            return None;
        }
        self.held.push(c);
        let bare = |text: &str| text.trim_start_matches(|c| leads(c, separator)).len();
        let mut from = 0;
        loop {
            let rest = &self.held[from..];
            let mark = &rest[rest.len() - bare(rest)..];
            if rest.len() - mark.len() <= MAX_LEAD_BYTES && marks.iter().any(|whole| whole.starts_with(mark))
            {
                break;
            }
            match rest.chars().next() {
                Some(first) => from += first.len_utf8(),
                None => break,
            }
        }
        out.extend(self.held.drain(..from));
        let mark = &self.held[self.held.len() - bare(&self.held)..];
        marks.iter().position(|whole| *whole == mark)
    }

    /// Whether nothing is held back.
    pub(crate) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Takes the text that is held back.
    pub(crate) fn take(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

fn leads(c: char, separator: Option<char>) -> bool {
    c.is_whitespace() || Some(c) == separator
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The text before the first mark, the mark's number, and the text that is held back.
    fn run(text: &str, marks: &[&str]) -> (String, Option<usize>, String) {
        let (mut watch, mut out) = (Marks::default(), String::new());
        for c in text.chars() {
            if let Some(found) = watch.push(c, marks, None, &mut out) {
                return (out, Some(found), watch.take());
            }
        }
        (out, None, watch.take())
    }

    #[test]
    fn whitespace_before_a_mark_belongs_to_it() {
        assert_eq!(run("a \n<x>b", &["<x>", "<y>"]), ("a".to_owned(), Some(0), " \n<x>".to_owned()));
        assert_eq!(run("a b <<y>", &["<x>", "<y>"]), ("a b <".to_owned(), Some(1), "<y>".to_owned()));
        assert_eq!(run("a <", &["<x>"]), ("a".to_owned(), None, " <".to_owned()));
        assert_eq!(run("a < b", &["<x>"]), ("a < b".to_owned(), None, String::new()));
    }

    proptest! {
        #[test]
        fn nothing_is_lost_and_the_first_mark_is_found(text in "[ab< ]{0,200}") {
            let marks = ["<ab", "ba<a"];
            let (shown, found, held) = run(&text, &marks);
            let first = marks.iter().enumerate().filter_map(|(at, mark)| Some((text.find(mark)? + mark.len(), at))).min();
            prop_assert_eq!(found, first.map(|(_, at)| at));
            let end = first.map_or(text.len(), |(end, _)| end);
            prop_assert_eq!(format!("{shown}{held}"), &text[..end]);
            prop_assert!(held.len() <= MAX_LEAD_BYTES + 4);
            if let Some(at) = found {
                prop_assert_eq!(held.trim_start(), marks[at]);
            }
        }
    }
}
