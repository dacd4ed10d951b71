//! Replies on their way out: text, and values that are sent out of the arena under their leases.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;

use crate::arena::Room;
use crate::reading::Reading;
use crate::refusal::Refusal;

/// Values up to this size are copied into the text: a lease costs more.
const COPIED_MAX_BYTES: usize = 1024;
/// Slices of one system call.
const SLICES_MAX: usize = 64;
/// Unsent bytes from which on no further command is served.
const PENDING_MAX_BYTES: usize = 4 << 20;
/// Unsent pieces from which on no further command is served.
const PIECES_MAX: usize = 1024;

#[derive(Debug)]
enum Piece {
    /// The next bytes of the text.
    Text(usize),
    /// Bytes of a value.
    Value { reading: Reading, from: usize, to: usize },
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    text: Vec<u8>,
    /// Text sent already.
    sent: usize,
    pieces: VecDeque<Piece>,
    pending_bytes: usize,
    /// Whether the client speaks version 3.
    pub(super) third: bool,
}

impl Outgoing {
    fn push(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let before = self.text.len();
        write(&mut self.text);
        let bytes = self.text.len() - before;
        self.pending_bytes += bytes;
        match self.pieces.back_mut() {
            Some(Piece::Text(more)) => *more += bytes,
            _ => self.pieces.push_back(Piece::Text(bytes)),
        }
    }

    fn line(&mut self, kind: u8, text: &[u8]) {
        self.push(|out| {
            out.push(kind);
            out.extend_from_slice(text);
            out.extend_from_slice(b"\r\n");
        });
    }

    fn number(&mut self, kind: u8, number: i64) {
        use std::io::Write as _;
        self.push(|out| {
            out.push(kind);
            write!(out, "{number}\r\n").expect("a vector takes what it is given");
        });
    }

    pub(super) fn simple(&mut self, text: &str) {
        self.line(b'+', text.as_bytes());
    }

    /// An error; it begins with its code in capitals.
    pub(super) fn error(&mut self, text: &str) {
        // A line break would end the reply early.
        self.line(b'-', text.replace(['\r', '\n'], " ").as_bytes());
    }

    pub(super) fn integer(&mut self, number: i64) {
        self.number(b':', number);
    }

    pub(super) fn bulk(&mut self, bytes: &[u8]) {
        self.length(b'$', bytes.len());
        self.push(|out| {
            out.extend_from_slice(bytes);
            out.extend_from_slice(b"\r\n");
        });
    }

    pub(super) fn nothing(&mut self) {
        self.push(|out| out.extend_from_slice(b""));
        if self.third { self.line(b'_', b"") } else { self.line(b'$', b"-1") }
    }

    fn length(&mut self, kind: u8, length: usize) {
        self.number(kind, i64::try_from(length).unwrap_or(i64::MAX));
    }

    pub(super) fn array(&mut self, length: usize) {
        self.length(b'*', length);
    }

    /// A map of so many pairs; in version 2 a list of twice as many.
    pub(super) fn map(&mut self, pairs: usize) {
        if self.third { self.length(b'%', pairs) } else { self.length(b'*', 2 * pairs) }
    }

    /// Bytes `from..to` of a value.
    pub(super) fn value(&mut self, reading: Reading, from: usize, to: usize) -> Result<(), Refusal> {
        let bytes = to - from;
        if bytes <= COPIED_MAX_BYTES {
            let mut copy = [0; COPIED_MAX_BYTES];
            reading.copy_to(from, &mut copy[..bytes])?;
            self.bulk(&copy[..bytes]);
            return Ok(());
        }
        self.length(b'$', bytes);
        self.pieces.push_back(Piece::Value { reading, from, to });
        self.pending_bytes += bytes;
        self.push(|out| out.extend_from_slice(b"\r\n"));
        Ok(())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pending_bytes == 0
    }

    /// Whether so much is unsent that the client has to read first.
    pub(super) fn is_full(&self) -> bool {
        self.pending_bytes > PENDING_MAX_BYTES || self.pieces.len() > PIECES_MAX
    }

    /// Sends once, by `write`, as much as one call takes. Returns what `write` did; an error when a value that was
    /// promised has gone, after which the connection is of no use.
    pub(super) fn write_with(
        &mut self,
        write: impl FnOnce(&[IoSlice<'_>]) -> std::io::Result<usize>,
    ) -> std::io::Result<usize> {
        // The memory of every value that this call may touch is kept while it runs.
        let mut rooms: Vec<Option<Arc<Room>>> = Vec::with_capacity(self.pieces.len().min(SLICES_MAX));
        for piece in self.pieces.iter().take(SLICES_MAX) {
            rooms.push(match piece {
                Piece::Text(_) => None,
                Piece::Value { reading, .. } => Some(reading.hold().map_err(std::io::Error::other)?),
            });
        }
        let mut slices = Vec::with_capacity(SLICES_MAX);
        let mut text_at = self.sent;
        for (piece, room) in self.pieces.iter().zip(&rooms) {
            if slices.len() >= SLICES_MAX {
                break;
            }
            match (piece, room) {
                (Piece::Value { from, to, .. }, Some(room)) => gather(room, *from, *to, &mut slices),
                (Piece::Text(bytes), _) => {
                    slices.push(IoSlice::new(&self.text[text_at..text_at + bytes]));
                    text_at += bytes;
                }
                (Piece::Value { .. }, None) => unreachable!("each value has its room"),
            }
        }
        let sent = write(&slices)?;
        drop(slices);
        self.pass(sent);
        Ok(sent)
    }

    fn pass(&mut self, mut sent: usize) {
        self.pending_bytes -= sent;
        while let Some(piece) = self.pieces.front_mut() {
            let left = match piece {
                Piece::Text(bytes) => {
                    let now = sent.min(*bytes);
                    *bytes -= now;
                    self.sent += now;
                    sent -= now;
                    *bytes
                }
                Piece::Value { from, to, .. } => {
                    let now = sent.min(*to - *from);
                    *from += now;
                    sent -= now;
                    *to - *from
                }
            };
            if left > 0 {
                break;
            }
            self.pieces.pop_front();
        }
        if self.pieces.is_empty() {
            self.sent = 0;
            self.text.clear();
            self.text.shrink_to(64 * 1024);
        }
    }
}

/// Adds bytes `from..to` of a value, as many slices as there is room for; the rest waits for the next call.
fn gather<'a>(room: &'a Room, from: usize, to: usize, slices: &mut Vec<IoSlice<'a>>) {
    let mut start = 0;
    for slice in room.slices() {
        let (first, last) = (from.clamp(start, start + slice.len()), to.min(start + slice.len()));
        if first < last {
            if slices.len() >= SLICES_MAX {
                return;
            }
            slices.push(IoSlice::new(&slice[first - start..last - start]));
        }
        start += slice.len();
    }
}
