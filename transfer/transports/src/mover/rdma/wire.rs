//! Records that the two ends of a path exchange over TCP before, beside and after the data.
//!
//! A record is its length (4 bytes), a kind (1) and fields; texts and lists are preceded by their length (2).
//! Numbers are little-endian. Nothing is believed: a record has at most [`RECORD_BYTES_MAX`] bytes, and one
//! that is short, long or of an unknown kind ends the connection.

use std::io::{self, Read, Write};

use crate::mover::PeerId;

/// The largest record.
const RECORD_BYTES_MAX: usize = 4_096;
const MAGIC: u32 = 0x4d52_5442;
const VERSION: u16 = 1;

/// One end's queue pairs and how to reach them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct End {
    pub device: String,
    /// The place of the device among the node's: which of a window's keys is for this path.
    pub device_index: u16,
    pub gid: [u8; 16],
    pub lid: u16,
    pub infiniband: bool,
    pub mtu_code: u8,
    pub reads_out: u8,
    pub reads_in: u8,
    /// Number and first packet number of each.
    pub queue_pairs: Vec<(u32, u32)>,
}

/// A record that the two ends of a path exchange over TCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Record {
    /// Asks for a path.
    Hello { to_epoch: u64, from: PeerId, session: u128, end: End },
    /// It is there.
    Welcome { end: End },
    /// Another life lives here.
    Stale { epoch: u64 },
    /// It cannot be; whether because the two do not fit together, and why.
    Refused { invalid: bool, text: String },
    /// Asks to end this connection's path.
    Close,
    /// The path has ended: its queue pairs are destroyed.
    Closed,
    /// The path has failed at the other end.
    Broken { text: String },
    /// Asks, on a connection of its own, to end the path of this session.
    Fence { to_epoch: u64, session: u128 },
}

struct WireWriter(Vec<u8>);

impl WireWriter {
    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn text(self, text: &str) -> Self {
        let most = text.len().min(1_024);
        let end = (0..=most).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        let length = u16::try_from(end).expect("at most 1,024");
        self.bytes(&length.to_le_bytes()).bytes(&text.as_bytes()[..end])
    }

    fn end(self, end: &End) -> Self {
        let count = u16::try_from(end.queue_pairs.len()).expect("at most 16 queue pairs");
        let flags = [u8::from(end.infiniband), end.mtu_code, end.reads_out, end.reads_in];
        let out = self.text(&end.device).bytes(&end.device_index.to_le_bytes()).bytes(&end.gid);
        let out = out.bytes(&end.lid.to_le_bytes()).bytes(&flags).bytes(&count.to_le_bytes());
        end.queue_pairs
            .iter()
            .fold(out, |out, (number, first)| out.bytes(&number.to_le_bytes()).bytes(&first.to_le_bytes()))
    }
}

struct WireReader<'a>(&'a [u8]);

impl WireReader<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn byte(&mut self) -> Option<u8> {
        self.array::<1>().map(|one| one[0])
    }

    fn two(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn four(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn eight(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Option<String> {
        let length = usize::from(self.two()?);
        let (text, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        String::from_utf8(text.to_vec()).ok()
    }

    fn end(&mut self) -> Option<End> {
        let (device, device_index, gid) = (self.text()?, self.two()?, self.array()?);
        let (lid, infiniband) = (self.two()?, self.byte()? != 0);
        let (mtu_code, reads_out, reads_in) = (self.byte()?, self.byte()?, self.byte()?);
        let count = self.two()?;
        let queue_pairs = (0..count).map(|_| Some((self.four()?, self.four()?))).collect::<Option<_>>()?;
        Some(End { device, device_index, gid, lid, infiniband, mtu_code, reads_out, reads_in, queue_pairs })
    }

    fn opening(&mut self) -> Option<()> {
        (self.four()? == MAGIC && self.two()? == VERSION).then_some(())
    }
}

impl Record {
    fn encode(&self) -> Vec<u8> {
        let kind = |kind: u8| WireWriter(vec![0, 0, 0, 0, kind]);
        let opening = |code: u8| kind(code).bytes(&MAGIC.to_le_bytes()).bytes(&VERSION.to_le_bytes());
        let out = match self {
            Self::Hello { to_epoch, from, session, end } => {
                let out = opening(1).bytes(&to_epoch.to_le_bytes()).text(&from.address);
                out.bytes(&from.epoch.to_le_bytes()).bytes(&session.to_le_bytes()).end(end)
            }
            Self::Welcome { end } => kind(2).end(end),
            Self::Stale { epoch } => kind(3).bytes(&epoch.to_le_bytes()),
            Self::Refused { invalid, text } => kind(4).bytes(&[u8::from(*invalid)]).text(text),
            Self::Close => kind(5),
            Self::Closed => kind(6),
            Self::Broken { text } => kind(7).text(text),
            Self::Fence { to_epoch, session } => {
                opening(8).bytes(&to_epoch.to_le_bytes()).bytes(&session.to_le_bytes())
            }
        };
        let mut bytes = out.0;
        let length = u32::try_from(bytes.len() - 4).expect("texts and lists are bounded");
        bytes[..4].copy_from_slice(&length.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut read = WireReader(bytes);
        let record = match read.byte()? {
            1 => {
                read.opening()?;
                let to_epoch = read.eight()?;
                let from = PeerId { address: read.text()?, epoch: read.eight()? };
                let session = read.array().map(u128::from_le_bytes)?;
                Self::Hello { to_epoch, from, session, end: read.end()? }
            }
            2 => Self::Welcome { end: read.end()? },
            3 => Self::Stale { epoch: read.eight()? },
            4 => Self::Refused { invalid: read.byte()? != 0, text: read.text()? },
            5 => Self::Close,
            6 => Self::Closed,
            7 => Self::Broken { text: read.text()? },
            8 => {
                read.opening()?;
                Self::Fence { to_epoch: read.eight()?, session: read.array().map(u128::from_le_bytes)? }
            }
            _ => return None,
        };
        read.0.is_empty().then_some(record)
    }

    /// Writes it.
    pub(super) fn send(&self, mut to: impl Write) -> io::Result<()> {
        to.write_all(&self.encode())
    }

    /// Reads one.
    pub(super) fn receive(mut from: impl Read) -> io::Result<Self> {
        let mut length = [0; 4];
        from.read_exact(&mut length)?;
        let length = usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX);
        let wrong = || {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "what it says is not of this protocol; check its port and release",
            )
        };
        if length > RECORD_BYTES_MAX {
            return Err(wrong());
        }
        let mut bytes = vec![0; length];
        from.read_exact(&mut bytes)?;
        Self::decode(&bytes).ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end() -> End {
        End {
            device: "mlx5_0".into(),
            device_index: 3,
            gid: [7; 16],
            lid: 9,
            infiniband: true,
            mtu_code: 5,
            reads_out: 16,
            reads_in: 8,
            queue_pairs: vec![(1, 2), (3, 4)],
        }
    }

    fn all() -> Vec<Record> {
        let from = PeerId { address: "10.0.0.1:7000".into(), epoch: 5 };
        vec![
            Record::Hello { to_epoch: 6, from, session: 7, end: end() },
            Record::Welcome { end: end() },
            Record::Stale { epoch: 8 },
            Record::Refused { invalid: true, text: "no".into() },
            Record::Close,
            Record::Closed,
            Record::Broken { text: "port down".into() },
            Record::Fence { to_epoch: 1, session: 2 },
        ]
    }

    #[test]
    fn records_come_back_as_they_were() {
        let mut wire = Vec::new();
        for record in all() {
            record.send(&mut wire).unwrap();
        }
        let mut read = wire.as_slice();
        for record in all() {
            assert_eq!(Record::receive(&mut read).unwrap(), record);
        }
        assert!(Record::receive(&mut read).is_err());
    }

    #[test]
    fn short_long_and_strange_records_are_refused() {
        for record in all() {
            let bytes = record.encode()[4..].to_vec();
            for cut in 0..bytes.len() {
                assert_eq!(Record::decode(&bytes[..cut]), None, "{record:?} cut at {cut}");
            }
            assert_eq!(Record::decode(&[bytes, vec![0]].concat()), None);
        }
        assert_eq!(Record::decode(&[99]), None);
        assert!(Record::receive(&u32::MAX.to_le_bytes()[..]).is_err());
        let http = *b"GET / HTTP/1.1\r\n\r\n";
        assert!(Record::receive(&http[..]).is_err());
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let mut wire = Vec::new();
        Record::Broken { text: "é".repeat(2_000) }.send(&mut wire).unwrap();
        let Record::Broken { text } = Record::receive(wire.as_slice()).unwrap() else { panic!() };
        assert_eq!(text, "é".repeat(512));
    }
}
