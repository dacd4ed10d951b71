//! Server-sent events out of an answer's body, each within a bound.

use bytes::{Buf as _, Bytes, BytesMut};
use http_body::Body;
use http_body_util::BodyExt as _;

use crate::error::{RemoteError, Stage};

/// The events of a stream, in order.
pub(crate) struct Events<B> {
    body: B,
    buffer: BytesMut,
    /// No line end is before this place of the buffer.
    searched: usize,
    /// The data of the event that is being read, once there is any.
    data: Option<BytesMut>,
    ended: bool,
    event_bytes: usize,
}

impl<B: Body<Data = bytes::Bytes> + Unpin> Events<B>
where
    B::Error: std::fmt::Display,
{
    pub(crate) fn new(body: B, event_bytes: usize) -> Self {
        Self { body, buffer: BytesMut::new(), searched: 0, data: None, ended: false, event_bytes }
    }

    /// The data of the next event, or `None` at the end of the body. Bytes that were read are kept when the future is
    /// dropped.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, RemoteError> {
        loop {
            while let Some(line) = self.line()? {
                if let Some(event) = self.take(line)? {
                    return Ok(Some(event));
                }
            }
            if self.ended {
                // An event that its empty line does not end is incomplete.
                return if self.data.is_some() || !self.buffer.is_empty() {
                    Err(broken("within an event"))
                } else {
                    Ok(None)
                };
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Some(bytes) = frame.data_ref() {
                        self.buffer.extend_from_slice(bytes);
                    }
                }
                Some(Err(error)) => return Err(broken(&error.to_string())),
                None => self.ended = true,
            }
        }
    }

    /// The next whole line, without its end, where it lies: vLLM's first event repeats the prompt, hundreds of kilobytes.
    fn line(&mut self) -> Result<Option<BytesMut>, RemoteError> {
        let Some(at) = memchr::memchr(b'\n', &self.buffer[self.searched..]) else {
            self.searched = self.buffer.len();
            return self.within(self.buffer.len()).map(|()| None);
        };
        let end = self.searched + at;
        self.within(end)?;
        let mut line = self.buffer.split_to(end);
        self.buffer.advance(1);
        self.searched = 0;
        if line.last() == Some(&b'\r') {
            line.truncate(line.len() - 1);
        }
        Ok(Some(line))
    }

    /// Takes a line in; an empty one completes the event.
    fn take(&mut self, mut line: BytesMut) -> Result<Option<Bytes>, RemoteError> {
        if line.is_empty() {
            return Ok(self.data.take().map(BytesMut::freeze));
        }
        // Comments keep the connection alive; the other fields of events mean nothing here.
        if line.starts_with(b"data:") {
            line.advance(if line.starts_with(b"data: ") { 6 } else { 5 });
            let data = match self.data.take() {
                None => line,
                Some(mut data) => {
                    data.extend_from_slice(b"\n");
                    data.extend_from_slice(&line);
                    data
                }
            };
            let bytes = data.len();
            self.data = Some(data);
            self.within(bytes)?;
        }
        Ok(None)
    }

    fn within(&self, bytes: usize) -> Result<(), RemoteError> {
        if bytes <= self.event_bytes {
            return Ok(());
        }
        let text = format!("an event of the stream is longer than {} bytes", self.event_bytes);
        Err(RemoteError::bug(Stage::Stream, text)
            .remedy("raise the bound, or start SGLang with --incremental-streaming-output"))
    }
}

fn broken(how: &str) -> RemoteError {
    RemoteError::retry(Stage::Stream, format!("the stream broke off before its end ({how})")).cut_off()
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;
    use crate::fuzz::Pieces;

    fn read(parts: &[&[u8]], most: usize) -> (Vec<String>, Option<RemoteError>) {
        let parts = Pieces(parts.iter().map(|part| Bytes::copy_from_slice(part)).collect());
        let mut events = Events::new(parts, most);
        let mut found = Vec::new();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            loop {
                match events.next().await {
                    Ok(Some(event)) => found.push(String::from_utf8(event.into()).unwrap()),
                    Ok(None) => return (found, None),
                    Err(error) => return (found, Some(error)),
                }
            }
        })
    }

    #[test]
    fn events_are_told_apart() {
        let text =
            b"data: a\n\n: a comment\r\ndata:b\r\ndata: c\r\n\r\nevent: x\nid: 3\n\n\ndata: [DONE]\n\n";
        assert_eq!(read(&[text], 100), (vec!["a".into(), "b\nc".into(), "[DONE]".into()], None));
        assert_eq!(read(&[], 100), (vec![], None));
    }

    #[test]
    fn a_stream_that_stops_within_an_event_is_an_error() {
        for text in [&b"data: a\n\ndata: b\n"[..], b"data: a\n\ndata: b", b"data: a\n\nda"] {
            let (found, error) = read(&[text], 100);
            assert_eq!(found, ["a"]);
            assert!(error.unwrap().text.contains("broke off"));
        }
    }

    #[test]
    fn an_event_has_a_bound_however_it_comes() {
        let long = vec![b'x'; 101];
        for parts in [
            vec![b"data: ".to_vec(), long.clone()],
            vec![b"data: ".to_vec(), vec![b'x'; 60], b"\ndata: ".to_vec(), vec![b'x'; 60], b"\n".to_vec()],
            vec![long],
        ] {
            let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
            assert!(read(&parts, 100).1.unwrap().text.contains("longer than 100"));
        }
    }

    proptest! {
        #[test]
        fn it_does_not_matter_where_the_bytes_are_cut(cuts in prop::collection::vec(0usize..60, 0..8)) {
            let text = b"data: one\n\ndata: two\r\ndata: 2\r\n\r\n: no\ndata: three\n\n";
            let mut cuts = cuts;
            cuts.sort_unstable();
            let mut parts: Vec<&[u8]> = Vec::new();
            let mut from = 0;
            for cut in cuts.into_iter().map(|cut| cut.min(text.len())) {
                parts.push(&text[from..cut]);
                from = cut;
            }
            parts.push(&text[from..]);
            prop_assert_eq!(read(&parts, 100).0, vec!["one", "two\n2", "three"]);
        }
    }
}
