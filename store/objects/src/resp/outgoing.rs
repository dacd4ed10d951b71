//! Replies on their way out: text, and values that are sent out of the arena under their leases.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;

use crate::arena::ArenaMemory;
use crate::lower::BroughtValue;
use crate::reading::Reading;
use crate::refusal::Refusal;

/// Values up to this size are copied into the text: a lease costs more.
const COPIED_MAX_BYTES: usize = 1024;
/// Slices of one system call.
const SLICES_MAX: usize = 64;
/// Unsent bytes of text from which on no further command is served. Values are not copied, and do not count.
const TEXT_MAX_BYTES: usize = 16 << 20;
/// Unsent pieces from which on no further command is served.
const PIECES_MAX: usize = 1 << 16;
/// Text and pieces that are kept room for while nothing is pending.
const TEXT_KEPT_BYTES: usize = 32 * 1024;
const PIECES_KEPT: usize = 128;
/// Bytes that must have gone out before the leases of what waits are renewed, and the part of a lease that must be over.
const RENEW_BYTES: usize = 64 * 1024;
const RENEW_PART: u64 = 4;

#[derive(Debug)]
enum Piece {
    /// The next bytes of the text.
    Text(usize),
    /// Bytes of a value.
    Value { reading: Reading, from: usize, to: usize },
    /// Bytes of a value that memory had no room for.
    Found { found: Arc<BroughtValue>, from: usize, to: usize },
}

/// The owner of a value's bytes while a call sends them.
enum ValueHolder<'a> {
    ArenaMemory(Arc<ArenaMemory>),
    Bytes(&'a [u8]),
    Text,
}

/// The replies that one connection has still to send.
#[derive(Debug, Default)]
pub(super) struct ReplyQueue {
    text: Vec<u8>,
    /// Text sent already.
    sent: usize,
    pieces: VecDeque<Piece>,
    pending_bytes: usize,
    /// Sent since the leases were renewed, and when that was.
    sent_unrenewed: usize,
    renewed_us: u64,
    /// Whether the client speaks version 3.
    pub(super) third: bool,
}

impl ReplyQueue {
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

    /// A value from below that memory had no room for. It is sent from where it is.
    pub(super) fn found(&mut self, found: Arc<BroughtValue>) {
        // A value that had room in memory and has left it was removed or replaced.
        let Some(value) = found.own() else { return self.nothing() };
        let bytes = value.len();
        if bytes <= COPIED_MAX_BYTES {
            return self.bulk(value);
        }
        self.length(b'$', bytes);
        self.pieces.push_back(Piece::Found { found, from: 0, to: bytes });
        self.pending_bytes += bytes;
        self.push(|out| out.extend_from_slice(b"\r\n"));
    }

    /// Bytes of memory that this has, without the values.
    pub(super) fn weight(&self) -> usize {
        self.text.capacity() + self.pieces.capacity() * size_of::<Piece>()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pending_bytes == 0
    }

    /// Whether so much is unsent that the client has to read first.
    pub(super) fn is_full(&self) -> bool {
        self.text.len() > TEXT_MAX_BYTES || self.pieces.len() > PIECES_MAX
    }

    /// Renews the leases of the waiting values, if the client has read on. A client that reads, however slowly, gets
    /// its promised values.
    pub(super) fn renew(&mut self, now_us: u64, lease_us: u64) {
        if self.sent_unrenewed < RENEW_BYTES || now_us < self.renewed_us + lease_us / RENEW_PART {
            return;
        }
        (self.sent_unrenewed, self.renewed_us) = (0, now_us);
        for piece in &self.pieces {
            if let Piece::Value { reading, .. } = piece {
                reading.renew(now_us);
            }
        }
    }

    /// Sends once, by `write`, as much as one call takes. Returns what `write` did; an error when a value that was
    /// promised has gone, after which the connection is of no use.
    pub(super) fn write_with(
        &mut self,
        write: impl FnOnce(&[IoSlice<'_>]) -> std::io::Result<usize>,
    ) -> std::io::Result<usize> {
        // The memory of every value that this call may touch is kept while it runs.
        let mut held = Vec::with_capacity(self.pieces.len().min(SLICES_MAX));
        for piece in self.pieces.iter().take(SLICES_MAX) {
            held.push(match piece {
                Piece::Text(_) => ValueHolder::Text,
                Piece::Value { reading, .. } => {
                    ValueHolder::ArenaMemory(reading.hold().map_err(std::io::Error::other)?)
                }
                Piece::Found { found, .. } => ValueHolder::Bytes(found.own().unwrap_or_default()),
            });
        }
        let mut slices = Vec::with_capacity(SLICES_MAX);
        let mut text_at = self.sent;
        for (piece, held) in self.pieces.iter().zip(&held) {
            if slices.len() >= SLICES_MAX {
                break;
            }
            match (piece, held) {
                (Piece::Text(bytes), _) => {
                    slices.push(IoSlice::new(&self.text[text_at..text_at + bytes]));
                    text_at += bytes;
                }
                (Piece::Value { from, to, .. }, ValueHolder::ArenaMemory(room)) => {
                    gather(room, *from, *to, &mut slices)
                }
                (Piece::Found { from, to, .. }, ValueHolder::Bytes(value)) => {
                    slices.push(IoSlice::new(&value[*from..*to]))
                }
                _ => unreachable!("each value is held as what it is"),
            }
        }
        let sent = write(&slices)?;
        drop(slices);
        drop(held);
        self.pass(sent);
        Ok(sent)
    }

    fn pass(&mut self, mut sent: usize) {
        self.pending_bytes -= sent;
        self.sent_unrenewed += sent;
        while let Some(piece) = self.pieces.front_mut() {
            let left = match piece {
                Piece::Text(bytes) => {
                    let now = sent.min(*bytes);
                    *bytes -= now;
                    self.sent += now;
                    sent -= now;
                    *bytes
                }
                Piece::Value { from, to, .. } | Piece::Found { from, to, .. } => {
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
            self.text.shrink_to(TEXT_KEPT_BYTES);
            self.pieces.shrink_to(PIECES_KEPT);
        } else if self.sent > TEXT_KEPT_BYTES && self.sent > self.text.len() / 2 {
            // A client that always has something to come would else keep all that it ever got.
            self.text.drain(..self.sent);
            self.sent = 0;
        }
    }
}

/// Adds bytes `from..to` of a value, as many slices as there is room for; the rest waits for the next call.
fn gather<'a>(room: &'a ArenaMemory, from: usize, to: usize, slices: &mut Vec<IoSlice<'a>>) {
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
