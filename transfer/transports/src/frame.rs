//! A frame: a header of 40 bytes, little endian, and a body.
//!
//! | at | bytes | what |
//! |---|---|---|
//! | 0 | 1 | kind |
//! | 1 | 3 | zero |
//! | 4 | 4 | size of the body |
//! | 8 | 4, 4, 8 | three numbers, whose meaning the kind says |
//! | 24 | 8 | checksum over bytes 0..24 and the body |
//! | 32 | 4 | low half of the checksum over bytes 0..32 |
//! | 36 | 4 | zero |
//!
//! The header has a checksum of its own so that a damaged length is found before it is acted upon. All
//! checksums are CRC-64/NVME.

use crc_fast::{CrcAlgorithm, Digest};

use crate::error::{Kind, Stage, TransportError};

/// Size of a header.
pub(crate) const HEADER_BYTES: usize = 40;
/// Largest body of a frame that carries no KV.
pub(crate) const CONTROL_BYTES_MAX: u32 = 64 << 10;

/// The checksum of a block's bytes: CRC-64/NVME, as a tier keeps it and as fetches carry it.
pub fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::crc64_nvme(bytes)
}

/// [`checksum`] of bytes that come in parts.
#[derive(Clone, Debug)]
pub struct Checksum(Digest);

impl Default for Checksum {
    fn default() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc64Nvme))
    }
}

impl Checksum {
    /// Adds the next part.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all parts so far.
    pub fn value(&self) -> u64 {
        self.0.finalize()
    }
}

/// The meaning of a frame. Brackets list its three numbers `a`, `b` and `c` where the kind uses them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameKind {
    /// The dialer's greeting. Body: see `message`.
    Hello = 1,
    /// The listener's: go on.
    Welcome = 2,
    /// Not like this, or not now. [1: retry]
    Refused = 3,
    /// Will you take this hand-off?
    Offer = 4,
    /// Yes. [blocks held already] Body: the window to write the slices into; empty where none are to come.
    Accepted = 5,
    /// [-, -, bytes of the window's stream that have been taken out]
    Ack = 7,
    /// All is sent. [-, -, slices]
    Finish = 8,
    /// All has landed. [-, -, slices]
    Done = 9,
    /// The hand-off has failed, and with it the connection.
    Failed = 10,
    /// Give me these blocks. [epoch, priority, milliseconds to the deadline]
    Want = 11,
    /// The holder has sent all its blocks. [-, -, blocks]
    End = 13,
    /// A note for the receiver's program besides the KV: at most once in a hand-off, before its slices.
    Note = 14,
    /// More bytes are in the window. [-, -, bytes of the stream so far] Body, in a hand-off: their checksum, and the
    /// positions of the slices that begin among them; in a fetch none.
    Moved = 15,
    /// These of the blocks wanted are here. [blocks, -, -] Body: key, size and checksum of each.
    Held = 16,
    /// Write them here. Body: a window.
    Lent = 17,
    /// Prove that you have the cluster's key, as I will. Body: a number. Instead of any other beginning.
    Challenge = 32,
    /// Prove that you have it first. Body: another number.
    Answer = 33,
    /// I have it: the dialer's, and after that the listener's. Body: the proof.
    Proof = 34,
}

impl FrameKind {
    fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Hello,
            2 => Self::Welcome,
            3 => Self::Refused,
            4 => Self::Offer,
            5 => Self::Accepted,
            7 => Self::Ack,
            8 => Self::Finish,
            9 => Self::Done,
            10 => Self::Failed,
            11 => Self::Want,
            13 => Self::End,
            14 => Self::Note,
            15 => Self::Moved,
            16 => Self::Held,
            17 => Self::Lent,
            32 => Self::Challenge,
            33 => Self::Answer,
            34 => Self::Proof,
            _ => return None,
        })
    }
}

/// The header of a frame, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: FrameKind,
    pub(crate) body_bytes: u32,
    pub(crate) a: u32,
    pub(crate) b: u32,
    pub(crate) c: u64,
    pub(crate) checksum: u64,
}

impl Header {
    /// A header without body and checksum: [`Header::seal`] sets both.
    pub(crate) fn new(kind: FrameKind, a: u32, b: u32, c: u64) -> Self {
        Self { kind, body_bytes: 0, a, b, c, checksum: 0 }
    }

    /// The header of the frame with this body.
    ///
    /// # Panics
    /// Never for bodies within the limits, which are below 4 GiB.
    pub(crate) fn seal(mut self, body: &[u8]) -> Self {
        self.body_bytes = u32::try_from(body.len()).expect("bodies are bounded far below 4 GiB");
        self.checksum = self.checksum_with(body);
        self
    }

    /// The checksum that a frame with this header and body should carry.
    pub(crate) fn checksum_with(&self, body: &[u8]) -> u64 {
        let mut sum = Checksum::default();
        sum.add(&self.front());
        sum.add(body);
        sum.value()
    }

    fn front(&self) -> [u8; 24] {
        let mut front = [0; 24];
        front[0] = self.kind as u8;
        front[4..8].copy_from_slice(&self.body_bytes.to_le_bytes());
        front[8..12].copy_from_slice(&self.a.to_le_bytes());
        front[12..16].copy_from_slice(&self.b.to_le_bytes());
        front[16..24].copy_from_slice(&self.c.to_le_bytes());
        front
    }

    /// As it goes over the stream.
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..24].copy_from_slice(&self.front());
        bytes[24..32].copy_from_slice(&self.checksum.to_le_bytes());
        let check = checksum(&bytes[..32]);
        bytes[32..36].copy_from_slice(&check.to_le_bytes()[..4]);
        bytes
    }

    /// Back from the stream.
    ///
    /// # Errors
    /// [`Kind::Corrupt`] where the header's own checksum does not match, else [`Kind::Bug`] for what no
    /// Baton writes.
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES], stage: Stage) -> Result<Self, TransportError> {
        if checksum(&bytes[..32]).to_le_bytes()[..4] != bytes[32..36] || bytes[36..] != [0; 4] {
            let text = "the checksum of a frame header does not match";
            return Err(TransportError::new(Kind::Corrupt, stage, text));
        }
        let strange = |what: String| TransportError::new(Kind::Bug, stage, what);
        let kind = FrameKind::from_number(bytes[0])
            .ok_or_else(|| strange(format!("unknown kind of frame {}", bytes[0])))?;
        if bytes[1..4] != [0; 3] {
            return Err(strange(format!("unknown flags {:?} in a frame header", &bytes[1..4])));
        }
        Ok(Self {
            kind,
            body_bytes: u32_at(bytes, 4),
            a: u32_at(bytes, 8),
            b: u32_at(bytes, 12),
            c: u64_at(bytes, 16),
            checksum: u64_at(bytes, 24),
        })
    }
}

/// The little-endian number at `at`. The caller has checked the length.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("a range of 4 bytes"))
}

/// The little-endian number at `at`. The caller has checked the length.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("a range of 8 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Header {
        Header::new(FrameKind::Moved, 7, 3, u64::MAX - 1).seal(b"some layer")
    }

    #[test]
    fn the_checksum_is_the_published_one() {
        assert_eq!(checksum(b"123456789"), 0xae8b_1486_0a79_9888);
    }

    #[test]
    fn headers_survive_the_wire() {
        for number in 0..=u8::MAX {
            let Some(kind) = FrameKind::from_number(number) else { continue };
            assert_eq!(kind as u8, number);
            let header = Header { kind, ..sample() };
            assert_eq!(Header::decode(&header.encode(), Stage::Send), Ok(header));
        }
    }

    #[test]
    fn every_flipped_bit_of_a_header_is_found() {
        let good = sample().encode();
        for bit in 0..HEADER_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            let kind = Header::decode(&bad, Stage::Send).unwrap_err().kind;
            assert_eq!(kind, Kind::Corrupt, "bit {bit}");
        }
    }

    #[test]
    fn the_checksum_covers_position_and_body() {
        let header = sample();
        assert_eq!(header.checksum, header.checksum_with(b"some layer"));
        assert_ne!(header.checksum, header.checksum_with(b"some Layer"));
        assert_ne!(header.checksum, Header { a: 8, ..header }.checksum_with(b"some layer"));
    }
}
