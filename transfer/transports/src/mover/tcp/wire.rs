//! Frames, after the greetings: a head of 32 bytes, a body, and for some a tail of 16.
//!
//! | at | bytes | what |
//! |---|---|---|
//! | 0 | 1 | kind |
//! | 1 | 1 | bit 0: verify |
//! | 2 | 1 | code of a fault |
//! | 3 | 1 | zero |
//! | 4 | 4 | bytes of the body, or asked for |
//! | 8 | 8, 8 | window and first byte in it |
//! | 24 | 4 | number of the request on this connection |
//! | 28 | 4 | low half of the checksum over bytes 0..28 |
//!
//! A tail: the sum over the body (8 bytes), the code of a fault that came up on the way (1), zeros.

use crate::mover::Fault;
use crate::mover::greeting::field;

pub(super) const HEAD_BYTES: usize = 32;
pub(super) const TAIL_BYTES: usize = 16;
/// Body of a refusal, at most.
pub(super) const TEXT_BYTES_MAX: usize = 512;
/// Bytes that are summed at a time, while they are in the cache.
pub(super) const CHUNK_BYTES: u32 = 256 << 10;
/// Bytes that go by one call where nothing is summed, and that one frame has at most when it stands for several
/// slices.
pub(super) const STRIDE_BYTES: u32 = 1 << 20;

/// Bytes of a body that are sent or landed at a time, and that a permit is held for: at most a stride.
pub(super) fn step_bytes(verify: bool, stride: u32) -> u32 {
    if verify { CHUNK_BYTES } else { stride }
}

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The body belongs into the window. With a tail when it is to be verified.
    Write = 1,
    /// Send what is there.
    Read = 2,
    /// The body is for the program.
    Notice = 3,
    /// A sign of life, please.
    Probe = 4,
    /// All that was to be acknowledged is done, up to this number, but for what was refused before.
    Acked = 16,
    /// This one failed: code and text.
    Refused = 17,
    /// The bytes requested. Always with a tail.
    Data = 18,
    /// The connection ends because of this: code and text.
    Bye = 19,
}

/// A head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) kind: Kind,
    pub(super) verify: bool,
    pub(super) code: u8,
    pub(super) bytes: u32,
    pub(super) window: u64,
    pub(super) at: u64,
    pub(super) number: u32,
}

impl Head {
    pub(super) fn new(kind: Kind, number: u32) -> Self {
        Self { kind, verify: false, code: 0, bytes: 0, window: 0, at: 0, number }
    }

    pub(super) fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut head = [0; HEAD_BYTES];
        head[0] = self.kind as u8;
        head[1] = u8::from(self.verify);
        head[2] = self.code;
        head[4..8].copy_from_slice(&self.bytes.to_le_bytes());
        head[8..16].copy_from_slice(&self.window.to_le_bytes());
        head[16..24].copy_from_slice(&self.at.to_le_bytes());
        head[24..28].copy_from_slice(&self.number.to_le_bytes());
        let sum = check(&head[..28]);
        head[28..].copy_from_slice(&sum);
        head
    }

    /// None for what is no head: the stream is out of step or foreign.
    pub(super) fn decode(head: &[u8; HEAD_BYTES]) -> Option<Self> {
        use Kind as K;
        let kinds = [K::Write, K::Read, K::Notice, K::Probe, K::Acked, K::Refused, K::Data, K::Bye];
        let kind = kinds.into_iter().find(|kind| *kind as u8 == head[0])?;
        (field(head, 28) == check(&head[..28])).then(|| Self {
            kind,
            verify: head[1] & 1 == 1,
            code: head[2],
            bytes: u32::from_le_bytes(field(head, 4)),
            window: u64::from_le_bytes(field(head, 8)),
            at: u64::from_le_bytes(field(head, 16)),
            number: u32::from_le_bytes(field(head, 24)),
        })
    }
}

fn check(bytes: &[u8]) -> [u8; 4] {
    field(&crate::checksum(bytes).to_le_bytes(), 0)
}

/// A tail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tail {
    pub(super) sum: u64,
    pub(super) code: u8,
}

impl Tail {
    pub(super) fn encode(self) -> [u8; TAIL_BYTES] {
        let mut tail = [0; TAIL_BYTES];
        tail[..8].copy_from_slice(&self.sum.to_le_bytes());
        tail[8] = self.code;
        tail
    }

    pub(super) fn decode(tail: &[u8; TAIL_BYTES]) -> Self {
        Self { sum: u64::from_le_bytes(field(tail, 0)), code: tail[8] }
    }
}

/// The sum over a body is made of those of its chunks, in order.
pub(super) fn fold(sum: u64, chunk: u64) -> u64 {
    sum.rotate_left(17) ^ chunk
}

/// A fault as code and text.
pub(super) fn code_of(fault: &Fault) -> (u8, &str) {
    match fault {
        Fault::Path(text) => (1, text),
        Fault::Silent(text) => (2, text),
        Fault::Stale(text) => (3, text),
        Fault::Invalid(text) => (4, text),
        Fault::Corrupt(text) => (5, text),
    }
}

/// And back.
pub(super) fn fault_of(code: u8, text: String) -> Fault {
    match code {
        2 => Fault::Silent(text),
        3 => Fault::Stale(text),
        4 => Fault::Invalid(text),
        5 => Fault::Corrupt(text),
        _ => Fault::Path(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_come_back_and_damage_is_seen() {
        let head = Head { verify: true, bytes: 7, window: u64::MAX, at: 9, ..Head::new(Kind::Write, 11) };
        assert_eq!(Head::decode(&head.encode()), Some(head));
        for at in 0..HEAD_BYTES {
            let mut damaged = head.encode();
            damaged[at] ^= 1;
            assert_eq!(Head::decode(&damaged), None, "byte {at}");
        }
    }

    #[test]
    fn faults_come_back() {
        let text = || "why".to_owned();
        for fault in [
            Fault::Path(text()),
            Fault::Silent(text()),
            Fault::Stale(text()),
            Fault::Invalid(text()),
            Fault::Corrupt(text()),
        ] {
            let (code, why) = code_of(&fault);
            assert_eq!(fault_of(code, why.into()), fault);
        }
    }
}
