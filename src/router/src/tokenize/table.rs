//! Tokens to bytes by table, and bytes to text as they come in.

/// The bytes of each token, for vocabularies whose text is the tokens' bytes in a row.
#[derive(Debug, Default)]
pub(crate) struct TokenTable {
    bytes: Vec<u8>,
    ends: Vec<u32>,
    special: Vec<bool>,
}

impl TokenTable {
    /// `entries` holds each token's bytes and whether it is special, by id without gaps.
    pub(crate) fn new<'a>(entries: impl Iterator<Item = (std::borrow::Cow<'a, [u8]>, bool)>) -> Self {
        let mut table = Self::default();
        for (bytes, special) in entries {
            table.bytes.extend_from_slice(&bytes);
            table.ends.push(u32::try_from(table.bytes.len()).unwrap_or(u32::MAX));
            table.special.push(special);
        }
        table
    }

    /// Ids from 0 up to here have an entry.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Bytes of the longest token.
    pub(crate) fn longest(&self) -> usize {
        let starts = std::iter::once(&0).chain(&self.ends);
        self.ends.iter().zip(starts).map(|(end, start)| (end - start) as usize).max().unwrap_or(0)
    }

    /// The token's own bytes; none for an id outside the vocabulary.
    pub(crate) fn bytes(&self, token: u32) -> &[u8] {
        let at = token as usize;
        let Some(&end) = self.ends.get(at) else { return &[] };
        let start = if at == 0 { 0 } else { self.ends[at - 1] };
        &self.bytes[start as usize..end as usize]
    }

    /// Whether the token is left out of text.
    pub(crate) fn is_special(&self, token: u32) -> bool {
        self.special.get(token as usize).copied().unwrap_or(false)
    }
}

/// Appends the text of `bytes` after what `pending` holds, keeps an unfinished character there, and
/// puts U+FFFD where no character can come of the bytes. In pieces or at once, the text is the same.
pub(crate) fn push_utf8(pending: &mut Vec<u8>, bytes: &[u8], out: &mut String) {
    if pending.is_empty() {
        let kept = push_whole(bytes, out);
        pending.extend_from_slice(&bytes[bytes.len() - kept..]);
        return;
    }
    pending.extend_from_slice(bytes);
    let kept = push_whole(pending, out);
    pending.drain(..pending.len() - kept);
}

/// Appends all but an unfinished character at the end, whose bytes are counted.
fn push_whole(bytes: &[u8], out: &mut String) -> usize {
    let mut rest = bytes;
    loop {
        match std::str::from_utf8(rest) {
            Ok(text) => {
                out.push_str(text);
                return 0;
            }
            Err(error) => {
                let (good, bad) = rest.split_at(error.valid_up_to());
                out.push_str(std::str::from_utf8(good).expect("valid up to here, as just found"));
                let Some(length) = error.error_len() else { return bad.len() };
                out.push(char::REPLACEMENT_CHARACTER);
                rest = &bad[length..];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn text_does_not_depend_on_how_its_bytes_come(
            pieces in proptest::collection::vec(proptest::collection::vec(prop_oneof![any::<u8>(), 0xc0u8..0xf5, 0x80u8..0xc0], 0..5), 0..12),
        ) {
            let (mut pending, mut out) = (Vec::new(), String::new());
            for piece in &pieces {
                push_utf8(&mut pending, piece, &mut out);
                prop_assert!(pending.len() < 4);
            }
            if !pending.is_empty() {
                out.push(char::REPLACEMENT_CHARACTER);
            }
            prop_assert_eq!(out, String::from_utf8_lossy(&pieces.concat()).into_owned());
        }
    }

    #[test]
    fn a_character_is_never_split() {
        let (mut pending, mut out) = (Vec::new(), String::new());
        for byte in "é€😀".bytes() {
            push_utf8(&mut pending, &[byte], &mut out);
        }
        assert_eq!((out.as_str(), pending.len()), ("é€😀", 0));
    }

    #[test]
    fn ids_outside_the_vocabulary_have_no_bytes() {
        let table =
            TokenTable::new([(b"a".as_slice().into(), false), (b"<x>".as_slice().into(), true)].into_iter());
        assert_eq!((table.bytes(0), table.bytes(1), table.bytes(2)), (&b"a"[..], &b"<x>"[..], &b""[..]));
        assert_eq!((table.longest(), TokenTable::default().longest()), (3, 0));
        assert!(table.is_special(1) && !table.is_special(0) && !table.is_special(9));
    }
}
