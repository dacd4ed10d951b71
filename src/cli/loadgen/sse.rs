//! Server-sent events as they come in, in pieces of any size.

use anyhow::{Result, ensure};

/// Longest line that is taken in, bytes.
const MAX_LINE_BYTES: usize = 1 << 20;

/// Cuts a byte stream into the payloads of its `data:` lines.
///
/// An event here is one `data:` line, as completion APIs send them; comments and other fields are
/// passed over.
#[derive(Debug, Default)]
pub struct EventReader {
    partial: Vec<u8>,
}

impl EventReader {
    /// Takes in the next piece and calls `each` with every payload that it completes. An error for a
    /// line longer than 1 MiB; nothing more may be fed then.
    pub fn push(&mut self, mut piece: &[u8], mut each: impl FnMut(&[u8])) -> Result<()> {
        while let Some(end) = piece.iter().position(|b| *b == b'\n') {
            let (line, rest) = (&piece[..end], &piece[end + 1..]);
            piece = rest;
            if self.partial.is_empty() {
                payload(line, &mut each);
            } else {
                self.partial.extend_from_slice(line);
                payload(&self.partial, &mut each);
                self.partial.clear();
            }
        }
        ensure!(
            self.partial.len() + piece.len() <= MAX_LINE_BYTES,
            "an event line is longer than {MAX_LINE_BYTES} bytes"
        );
        self.partial.extend_from_slice(piece);
        Ok(())
    }
}

fn payload(line: &[u8], each: &mut impl FnMut(&[u8])) {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    if let Some(data) = line.strip_prefix(b"data:") {
        each(data.strip_prefix(b" ").unwrap_or(data));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8], piece: usize) -> Vec<String> {
        let (mut reader, mut seen) = (EventReader::default(), Vec::new());
        for part in text.chunks(piece) {
            reader.push(part, |data| seen.push(String::from_utf8_lossy(data).into_owned())).unwrap();
        }
        seen
    }

    #[test]
    fn events_do_not_depend_on_how_the_stream_is_cut() {
        let text = b": keep-alive\n\ndata: {\"a\":1}\r\n\r\nevent: x\ndata:two\n\ndata: [DONE]\n\n";
        for piece in 1..text.len() {
            assert_eq!(read(text, piece), ["{\"a\":1}", "two", "[DONE]"], "in pieces of {piece}");
        }
    }

    #[test]
    fn an_event_without_its_end_is_none() {
        assert_eq!(read(b"data: whole\n\ndata: ha", 5), ["whole"]);
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let (mut reader, piece) = (EventReader::default(), vec![b'x'; 1 << 16]);
        let refused = (0..17).any(|_| reader.push(&piece, |_| {}).is_err());
        assert!(refused, "more than 1 MiB of one line was kept");
    }
}
