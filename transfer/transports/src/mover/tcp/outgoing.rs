//! Frames on their way out: gathered from memory chunk by chunk, summed while hot, sent as the socket takes
//! them.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::stream::Stream;
use super::vectored::GatheredPieces;
use super::wire::{HEAD_BYTES, Head, Kind, TAIL_BYTES, TEXT_BYTES_MAX, Tail, code_of, fold, step_bytes};
use crate::mover::{Direction, Exposure, Fault, Memory, Permit, WindowId};

/// Pieces handed to one call.
const PIECES_MAX: usize = 192;
/// Filler sent where a window closes in the middle of a frame.
static ZEROS: [u8; 16 << 10] = [0; 16 << 10];

/// Where the body of a frame is.
pub(super) enum Body {
    /// There is none.
    None,
    /// In the frame.
    Bytes(Vec<u8>),
    /// In memory that the path owns until the slice has ended.
    Memory(Arc<Memory>, u64),
    /// In a window of ours, looked up anew for each chunk.
    Window(WindowId, u64),
}

struct Frame {
    head: [u8; HEAD_BYTES],
    body: Body,
    body_bytes: u64,
    tailed: bool,
    verify: bool,
    /// Bytes sent, of the whole frame.
    sent: u64,
    /// Bytes of the body that the tail's sum is over so far.
    summed: u64,
    tail: Tail,
}

impl Frame {
    fn bytes(&self) -> u64 {
        HEAD_BYTES as u64 + self.body_bytes + if self.tailed { TAIL_BYTES as u64 } else { 0 }
    }

    /// How much of the body is sent, and where the chunk ends that is next.
    fn chunk(&self, stride: u32) -> (u64, u64) {
        let from = self.sent.saturating_sub(HEAD_BYTES as u64).min(self.body_bytes);
        let chunk = u64::from(step_bytes(self.verify, stride));
        (from, ((from / chunk + 1) * chunk).min(self.body_bytes))
    }
}

/// The result of one send call.
pub(super) struct SendOutcome {
    /// Bytes that the stream has taken.
    pub(super) bytes: u64,
    /// Whether it would take more.
    pub(super) more: bool,
}

/// One range to send, as decided before anything is borrowed.
struct Span {
    frame: usize,
    from: u64,
    bytes: u64,
    source: Source,
}

enum Source {
    Head,
    Body,
    /// By the permit of this number.
    Permitted(usize),
    Zeros,
    /// The tail of this number.
    Tail(usize),
}

/// The content of one send call.
#[derive(Default)]
struct Batch {
    spans: Vec<Span>,
    permits: Vec<Permit>,
    tails: Vec<[u8; TAIL_BYTES]>,
    bytes: u64,
    stride: u32,
}

/// Frames that wait, in order.
#[derive(Default)]
pub(super) struct FrameQueue {
    frames: VecDeque<Frame>,
}

impl FrameQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    pub(super) fn frames(&self) -> usize {
        self.frames.len()
    }

    /// Adds a frame. `head.bytes` says how long the body is, where there is one.
    pub(super) fn push(&mut self, head: &Head, body: Body, tailed: bool) {
        let body_bytes = if matches!(body, Body::None) { 0 } else { u64::from(head.bytes) };
        self.frames.push_back(Frame {
            head: head.encode(),
            body,
            body_bytes,
            tailed,
            verify: head.verify,
            sent: 0,
            summed: 0,
            tail: Tail::default(),
        });
    }

    /// Adds a refusal, or a farewell.
    pub(super) fn push_fault(&mut self, kind: Kind, number: u32, fault: &Fault) {
        let (code, text) = code_of(fault);
        let text = text.as_bytes()[..text.len().min(TEXT_BYTES_MAX)].to_vec();
        let bytes = u32::try_from(text.len()).expect("cut to a few hundred");
        let head = Head { code, bytes, ..Head::new(kind, number) };
        self.push(&head, Body::Bytes(text), false);
    }

    /// One call: sends up to about a stride.
    pub(super) fn send(&mut self, stream: &mut Stream, exposure: &Arc<Exposure>) -> io::Result<SendOutcome> {
        let batch = self.prepare(exposure, stream.stride_bytes());
        let mut gathered = GatheredPieces::default();
        for span in &batch.spans {
            self.gather(span, &batch, &mut gathered);
        }
        match stream.send(&gathered) {
            Ok(sent) => {
                drop(gathered);
                let bytes = sent as u64;
                self.advance(bytes);
                Ok(SendOutcome { bytes, more: bytes == batch.bytes })
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Ok(SendOutcome { bytes: 0, more: false })
            }
            Err(error) => Err(error),
        }
    }

    fn prepare(&mut self, exposure: &Arc<Exposure>, stride: u32) -> Batch {
        let mut batch = Batch { stride, ..Batch::default() };
        for (index, frame) in self.frames.iter_mut().enumerate() {
            if batch.spans.len() + 3 > PIECES_MAX || batch.bytes >= u64::from(stride) {
                break;
            }
            let head = HEAD_BYTES as u64;
            if frame.sent < head {
                batch.add(index, frame.sent, head - frame.sent, Source::Head);
            }
            let (from, end) = frame.chunk(stride);
            if from < end {
                batch.body(index, frame, (from, end), exposure);
            }
            if end < frame.body_bytes {
                break;
            }
            if frame.tailed {
                let from = frame.sent.saturating_sub(head + frame.body_bytes);
                batch.tails.push(frame.tail.encode());
                let number = batch.tails.len() - 1;
                batch.add(index, from, TAIL_BYTES as u64 - from, Source::Tail(number));
            }
        }
        batch
    }

    fn gather<'a>(&'a self, span: &Span, batch: &'a Batch, gathered: &mut GatheredPieces<'a>) {
        let frame = &self.frames[span.frame];
        let size = |bytes: u64| usize::try_from(bytes).expect("parts of frames fit in memory");
        let (from, bytes) = (size(span.from), size(span.bytes));
        match (&span.source, &frame.body) {
            (Source::Head, _) => gathered.plain(&frame.head[from..]),
            (Source::Tail(number), _) => gathered.plain(&batch.tails[*number][from..]),
            (Source::Permitted(number), _) => {
                let permit = &batch.permits[*number];
                gathered.memory(permit.memory(), permit.at() + span.from, bytes);
            }
            (Source::Body, Body::Bytes(body)) => gathered.plain(&body[from..from + bytes]),
            (Source::Body, Body::Memory(memory, at)) => gathered.memory(memory, at + span.from, bytes),
            (Source::Zeros | Source::Body, _) => {
                let mut left = bytes;
                while left > 0 {
                    let piece = left.min(ZEROS.len());
                    gathered.plain(&ZEROS[..piece]);
                    left -= piece;
                }
            }
        }
    }

    fn advance(&mut self, mut sent: u64) {
        while let Some(frame) = self.frames.front_mut() {
            let step = sent.min(frame.bytes() - frame.sent);
            frame.sent += step;
            sent -= step;
            if frame.sent < frame.bytes() {
                break;
            }
            self.frames.pop_front();
        }
    }
}

impl Batch {
    fn add(&mut self, frame: usize, from: u64, bytes: u64, source: Source) {
        self.bytes += bytes;
        self.spans.push(Span { frame, from, bytes, source });
    }

    /// Adds a body up to the end of its chunk, summed. A window closed meanwhile spoils the frame: the reader
    /// gets zeros for the rest and the code in the tail.
    fn body(&mut self, index: usize, frame: &mut Frame, (from, end): (u64, u64), exposure: &Arc<Exposure>) {
        let start = from - from % u64::from(step_bytes(frame.verify, self.stride));
        let sums = frame.verify && frame.summed < end;
        let source = match &frame.body {
            Body::None | Body::Bytes(_) => Source::Body,
            Body::Memory(memory, at) => {
                if sums {
                    frame.tail.sum = fold(frame.tail.sum, memory.checksum(at + start, end - start));
                }
                Source::Body
            }
            Body::Window(..) if frame.tail.code != 0 => Source::Zeros,
            Body::Window(window, at) => {
                match exposure.admit(*window, Direction::Read, at + start, end - start) {
                    Ok(permit) => {
                        if sums {
                            let sum = permit.memory().checksum(permit.at(), end - start);
                            frame.tail.sum = fold(frame.tail.sum, sum);
                        }
                        self.permits.push(permit);
                        // Counted from the start of the chunk, which is where the permit begins.
                        let number = self.permits.len() - 1;
                        frame.summed = end;
                        return self.add(index, from - start, end - from, Source::Permitted(number));
                    }
                    Err(fault) => {
                        frame.tail.code = code_of(&fault).0;
                        Source::Zeros
                    }
                }
            }
        };
        frame.summed = end;
        self.add(index, from, end - from, source);
    }
}
