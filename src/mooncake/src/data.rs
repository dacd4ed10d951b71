//! The data protocol of segments over TCP, second version: a request names a range of addresses, and a status reports
//! the result. The first version has no statuses, so lost data would go unnoticed. Baton therefore rejects it.

mod client;
mod server;

pub use client::{DataClient, DataTimes};
pub use server::{DataSettings, serve_data};

use crate::error::{MooncakeError, Result};

/// Bytes of a request's head.
pub const HEAD_BYTES: usize = 24;
/// Bytes of a status.
pub const STATUS_BYTES: usize = 8;
/// In an opcode: the second version.
const VERSION_TWO: u8 = 0x80;
/// The upper half of a status.
const STATUS_MAGIC: u64 = 0x4d43_5456 << 32;
/// Bytes that are read or written at once.
const PIECE_BYTES: usize = 256 << 10;

/// The operation on a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Its bytes are sent to the caller.
    Read,
    /// The caller sends bytes for it.
    Write,
}

/// One request: what is done with which range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The operation.
    pub action: Action,
    /// First address.
    pub address: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// Whether a status is wanted: the second version.
    pub wants_status: bool,
}

impl Request {
    /// The head as it is sent.
    #[must_use]
    pub fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut head = [0; HEAD_BYTES];
        head[..8].copy_from_slice(&self.bytes.to_le_bytes());
        head[8..16].copy_from_slice(&self.address.to_le_bytes());
        head[16] = if self.wants_status { VERSION_TWO } else { 0 } | u8::from(self.action == Action::Write);
        head
    }

    /// Reads a head; its last bytes mean nothing.
    ///
    /// # Errors
    /// For what is no action.
    pub fn decode(head: &[u8; HEAD_BYTES]) -> Result<Self> {
        let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"));
        let action = match head[16] & !VERSION_TWO {
            0 => Action::Read,
            1 => Action::Write,
            _ => {
                let message = format!("opcode {:#04x} is neither a read nor a write", head[16]);
                return Err(MooncakeError::invalid("data request", message));
            }
        };
        Ok(Self { action, address: word(8), bytes: word(0), wants_status: head[16] & VERSION_TWO != 0 })
    }
}

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It is done, or its bytes follow.
    Done,
    /// The range is not, or no longer, a segment's.
    Rejected,
    /// Anything else that a peer may say.
    Other(u32),
}

impl Status {
    /// The status as it is sent.
    #[must_use]
    pub fn encode(self) -> [u8; STATUS_BYTES] {
        let code = match self {
            Self::Done => 0,
            Self::Rejected => 1,
            Self::Other(code) => code,
        };
        (STATUS_MAGIC | u64::from(code)).to_le_bytes()
    }

    /// Reads a status.
    ///
    /// # Errors
    /// When it is none: the peer speaks the first version, and what it sent are bytes of the range.
    pub fn decode(bytes: [u8; STATUS_BYTES]) -> Result<Self> {
        let word = u64::from_le_bytes(bytes);
        if word >> 32 != STATUS_MAGIC >> 32 {
            let message =
                "no status came back: the peer speaks the first version of the protocol, or another one";
            return Err(MooncakeError::corrupt("data status", message));
        }
        Ok(match word as u32 {
            0 => Self::Done,
            1 => Self::Rejected,
            code => Self::Other(code),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn other_opcodes_are_refused() {
        let mut head = Request { action: Action::Write, address: 1, bytes: 2, wants_status: true }.encode();
        for opcode in [2, 0x7f, 0x82, 0xff] {
            head[16] = opcode;
            assert!(Request::decode(&head).is_err(), "{opcode:#x}");
        }
    }

    #[test]
    fn padding_means_nothing() {
        let request = Request { action: Action::Read, address: 7, bytes: 9, wants_status: true };
        let mut head = request.encode();
        head[17..].fill(0xaa);
        assert_eq!(Request::decode(&head).unwrap(), request);
    }

    #[test]
    fn payload_is_no_status() {
        assert!(Status::decode([0; 8]).is_err());
        assert_eq!(Status::decode([0, 0, 0, 0, 0x56, 0x54, 0x43, 0x4d]).unwrap(), Status::Done);
        assert_eq!(Status::decode([9, 0, 0, 0, 0x56, 0x54, 0x43, 0x4d]).unwrap(), Status::Other(9));
    }

    proptest! {
        #[test]
        fn any_head_is_read_or_refused(head: [u8; HEAD_BYTES], status: [u8; STATUS_BYTES]) {
            if let Ok(request) = Request::decode(&head) {
                prop_assert_eq!(&request.encode()[..17], &head[..17]);
            }
            if let Ok(read) = Status::decode(status) {
                prop_assert_eq!(read.encode(), status);
            }
        }
    }
}
