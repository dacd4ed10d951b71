//! Stop strings: finds the first one to end in a text that comes in pieces, and holds back what
//! could still become one.

/// Watches a text for up to a few stop strings.
///
/// The answer ends at the first byte at which the text ends with a stop string; when two end there,
/// the longer one counts. How the text is cut into pieces makes no difference.
#[derive(Clone, Debug, Default)]
pub(crate) struct StopWatch {
    stops: Vec<Stop>,
    held: String,
    keep_stop: bool,
}

#[derive(Clone, Debug)]
struct Stop {
    text: Box<str>,
    /// For each length matched, the longest shorter one that the text also ends with.
    fallback: Vec<usize>,
    matched: usize,
}

impl Stop {
    fn new(text: &str) -> Self {
        let bytes = text.as_bytes();
        let mut fallback = vec![0; bytes.len() + 1];
        let mut matched = 0;
        for at in 1..bytes.len() {
            while matched > 0 && bytes[at] != bytes[matched] {
                matched = fallback[matched];
            }
            if bytes[at] == bytes[matched] {
                matched += 1;
            }
            fallback[at + 1] = matched;
        }
        Self { text: text.into(), fallback, matched: 0 }
    }

    /// Takes in a byte; whether the text now ends with this stop string.
    fn push(&mut self, byte: u8) -> bool {
        let bytes = self.text.as_bytes();
        while self.matched > 0 && bytes[self.matched] != byte {
            self.matched = self.fallback[self.matched];
        }
        if bytes[self.matched] == byte {
            self.matched += 1;
        }
        self.matched == bytes.len()
    }
}

impl StopWatch {
    /// `stops` are not empty strings; `keep_stop` leaves the one found in the text.
    pub(crate) fn new(stops: &[String], keep_stop: bool) -> Self {
        Self { stops: stops.iter().map(|stop| Stop::new(stop)).collect(), held: String::new(), keep_stop }
    }

    /// Takes in a piece of text and appends to `out` what can be shown now. When a stop string was found it is given back:
    /// `out` then has the last of the text, and nothing may be pushed after it.
    pub(crate) fn push(&mut self, text: &str, out: &mut String) -> Option<&str> {
        if self.stops.is_empty() {
            out.push_str(text);
            return None;
        }
        for (at, byte) in text.bytes().enumerate() {
            let mut found: Option<(usize, usize)> = None;
            for (which, stop) in self.stops.iter_mut().enumerate() {
                if stop.push(byte) {
                    found = found.max(Some((stop.text.len(), which)));
                }
            }
            if let Some((length, which)) = found {
                self.held.push_str(&text[..=at]);
                let keep = if self.keep_stop { self.held.len() } else { self.held.len() - length };
                out.push_str(&self.held[..keep]);
                self.held.clear();
                return self.stops.get(which).map(|stop| &*stop.text);
            }
        }
        self.held.push_str(text);
        let open = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let shown = self.held.len() - open;
        out.push_str(&self.held[..shown]);
        self.held.drain(..shown);
        None
    }

    /// The text is over: appends what was held back.
    pub(crate) fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The text up to the first place that ends with a stop string, tried byte by byte.
    fn naive(text: &str, stops: &[String], keep_stop: bool) -> (String, bool) {
        for end in 0..=text.len() {
            let longest = stops
                .iter()
                .filter(|s| text.as_bytes()[..end].ends_with(s.as_bytes()))
                .map(String::len)
                .max();
            if let Some(length) = longest {
                return (text[..if keep_stop { end } else { end - length }].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    fn run(pieces: &[String], stops: &[String], keep_stop: bool) -> (String, bool) {
        let mut watch = StopWatch::new(stops, keep_stop);
        let mut out = String::new();
        for piece in pieces {
            if let Some(found) = watch.push(piece, &mut out) {
                assert!(stops.iter().any(|stop| stop == found));
                return (out, true);
            }
        }
        watch.finish(&mut out);
        (out, false)
    }

    proptest! {
        #[test]
        fn stops_are_found_as_a_naive_search_finds_them(
            pieces in proptest::collection::vec("[abé]{0,4}", 0..12),
            stops in proptest::collection::vec("[abé]{1,4}", 1..4),
            keep_stop in any::<bool>(),
        ) {
            let whole = pieces.concat();
            prop_assert_eq!(run(&pieces, &stops, keep_stop), naive(&whole, &stops, keep_stop));
        }

        #[test]
        fn no_more_is_held_back_than_could_become_a_stop(
            pieces in proptest::collection::vec("[ab]{0,3}", 0..12),
            stop in "[ab]{1,5}",
        ) {
            let mut watch = StopWatch::new(std::slice::from_ref(&stop), false);
            let mut out = String::new();
            for piece in &pieces {
                if watch.push(piece, &mut out).is_some() {
                    break;
                }
                prop_assert!(watch.held.len() < stop.len());
                prop_assert!(stop.starts_with(watch.held.as_str()));
            }
        }
    }

    #[test]
    fn a_stop_across_pieces_never_shows() {
        let mut watch = StopWatch::new(&["D".to_owned(), "END".to_owned()], false);
        let mut out = String::new();
        assert_eq!(watch.push("one E", &mut out), None);
        assert_eq!(out, "one ");
        assert_eq!(watch.push("N", &mut out), None);
        assert_eq!(watch.push("D two", &mut out), Some("END"), "the longer of two that end there");
        assert_eq!(out, "one ");
    }
}
