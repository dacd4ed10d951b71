//! Notices between engines: a name and a message, as Mooncake has them.

/// A notice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Note {
    /// The sender or the purpose.
    pub name: String,
    /// The content.
    pub msg: String,
}

impl Note {
    /// As bytes: the length of the name, the name, the message.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let name = self.name.as_bytes();
        let length = u32::try_from(name.len()).unwrap_or(u32::MAX);
        [&length.to_le_bytes(), name, self.msg.as_bytes()].concat()
    }

    /// From bytes; what no engine of ours has made is all message.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let split = || {
            let (length, rest) = bytes.split_first_chunk::<4>()?;
            rest.split_at_checked(usize::try_from(u32::from_le_bytes(*length)).ok()?)
        };
        let (name, msg) = split().unwrap_or((b"", bytes));
        Self { name: text(name), msg: text(msg) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_come_back_and_anything_else_is_a_message() {
        let note = Note { name: "agent".into(), msg: "done".into() };
        assert_eq!(Note::decode(&note.encode()), note);
        assert_eq!(Note::decode(&Note::default().encode()), Note::default());
        for other in [b"abc".as_slice(), b"\xff\xff\xff\xffabc"] {
            assert_eq!(Note::decode(other).name, "");
        }
    }
}
