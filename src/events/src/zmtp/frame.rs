//! Frames: a byte of flags, a length of one byte or eight, a body.

use bytes::{Buf as _, Bytes, BytesMut};

use super::WireLimits;
use crate::error::{EventError, Kind, Stage};

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// One frame as it came.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) command: bool,
    pub(super) more: bool,
    pub(super) body: Bytes,
}

/// Takes the next frame out of `buffer`; `None` until it is whole.
///
/// `used_bytes` are those of the same message before it; the length is judged before its bytes are waited for.
pub(super) fn take(
    buffer: &mut BytesMut,
    used_bytes: usize,
    limits: &WireLimits,
) -> Result<Option<Frame>, EventError> {
    let Some(&flags) = buffer.first() else { return Ok(None) };
    let broken = |message: String| EventError::new(Kind::Corrupt, Stage::Receive, message);
    if flags & !(MORE | LONG | COMMAND) != 0 || flags & (MORE | COMMAND) == MORE | COMMAND {
        return Err(broken(format!("0x{flags:02x} starts no ZMTP frame")));
    }
    let (head, length) = if flags & LONG == 0 {
        let Some(&length) = buffer.get(1) else { return Ok(None) };
        (2, u64::from(length))
    } else {
        let Some(bytes) = buffer.get(1..9) else { return Ok(None) };
        (9, bytes.iter().fold(0, |length, byte| length << 8 | u64::from(*byte)))
    };
    let room = limits.message_bytes.saturating_sub(used_bytes);
    let length = usize::try_from(length).ok().filter(|length| *length <= room);
    let length = length.ok_or_else(|| {
        broken(format!("a frame is longer than the {} bytes that a message may have", limits.message_bytes))
    })?;
    if buffer.len() < head + length {
        return Ok(None);
    }
    buffer.advance(head);
    let body = buffer.split_to(length).freeze();
    Ok(Some(Frame { command: flags & COMMAND != 0, more: flags & MORE != 0, body }))
}

/// Appends a message of `frames`.
pub(super) fn put_message(buffer: &mut BytesMut, frames: &[&[u8]]) {
    for (at, body) in frames.iter().enumerate() {
        let more = if at + 1 < frames.len() { MORE } else { 0 };
        put(buffer, more, body);
    }
}

/// Appends a command: its name, then `body`.
pub(super) fn put_command(buffer: &mut BytesMut, name: &str, body: &[u8]) {
    let length = u8::try_from(name.len()).expect("names of commands are short");
    let whole = [&[length], name.as_bytes(), body].concat();
    put(buffer, COMMAND, &whole);
}

fn put(buffer: &mut BytesMut, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(length) => buffer.extend_from_slice(&[flags, length]),
        Err(_) => {
            buffer.extend_from_slice(&[flags | LONG]);
            buffer.extend_from_slice(&(body.len() as u64).to_be_bytes());
        }
    }
    buffer.extend_from_slice(body);
}

/// A command's name and what follows it.
pub(super) fn command(body: &Bytes) -> Option<(&[u8], Bytes)> {
    let (&length, rest) = body.split_first()?;
    let name = rest.get(..usize::from(length))?;
    Some((name, body.slice(1 + usize::from(length)..)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: WireLimits = WireLimits { message_bytes: 1000, frames: 4 };

    fn all(mut buffer: BytesMut) -> Result<Vec<Frame>, EventError> {
        let mut found = Vec::new();
        while let Some(frame) = take(&mut buffer, 0, &LIMITS)? {
            found.push(frame);
        }
        Ok(found)
    }

    #[test]
    fn a_length_is_judged_before_its_bytes_are_there() {
        let mut huge = BytesMut::from(&[LONG, 0x7f, 0, 0, 0, 0, 0, 0, 0][..]);
        assert!(take(&mut huge, 0, &LIMITS).unwrap_err().message.contains("longer than the 1000"));
        let mut second = BytesMut::from(&[0, 200][..]);
        assert_eq!(take(&mut second, 800, &LIMITS), Ok(None));
        assert!(take(&mut second, 801, &LIMITS).is_err(), "what came before counts");
    }

    #[test]
    fn flags_that_are_none_are_refused() {
        for flags in [8, 0x80, MORE | COMMAND] {
            assert!(take(&mut BytesMut::from(&[flags, 0][..]), 0, &LIMITS).is_err(), "{flags}");
        }
    }

    #[test]
    fn a_command_has_a_name() {
        let mut buffer = BytesMut::new();
        put_command(&mut buffer, "PING", &[0, 7]);
        let frame = take(&mut buffer, 0, &LIMITS).unwrap().unwrap();
        assert!(frame.command && buffer.is_empty());
        assert_eq!(command(&frame.body), Some((&b"PING"[..], Bytes::from_static(&[0, 7]))));
        assert_eq!(command(&Bytes::from_static(&[9, b'x'])), None);
    }

    proptest! {
        #[test]
        fn frames_come_back_however_the_bytes_arrive(
            bodies in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..400), 1..5), cut in any::<prop::sample::Index>()
        ) {
            let frames: Vec<&[u8]> = bodies.iter().map(Vec::as_slice).collect();
            let mut whole = BytesMut::new();
            put_message(&mut whole, &frames);
            let read = all(whole.clone()).unwrap();
            prop_assert_eq!(read.iter().map(|f| f.body.to_vec()).collect::<Vec<_>>(), bodies.clone());
            prop_assert!(read.iter().enumerate().all(|(at, f)| f.more == (at + 1 < bodies.len())));
            whole.truncate(cut.index(whole.len()));
            prop_assert!(all(whole).unwrap().len() < bodies.len());
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = all(BytesMut::from(bytes.as_slice()));
        }
    }
}
