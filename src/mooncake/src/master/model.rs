//! The master's messages: structs, their shapes, and how to write and read them.

use std::fmt;

use crate::error::Result;
use crate::pack::{Reader, Shape, Writer};
use crate::region::random;

/// A name that nobody else has: of a client, of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Uuid(pub u64, pub u64);

pub(super) const UUID: Shape = Shape::Plain(&[Shape::U64, Shape::U64], 8);
pub(super) const SEGMENT: Shape =
    Shape::Struct(&[UUID, Shape::Text, Shape::U64, Shape::U64, Shape::Text, Shape::Text, Shape::Text]);
const BUFFER: Shape = Shape::Struct(&[Shape::U64, Shape::U64, Shape::Text, Shape::Text]);
const IN_MEMORY: Shape = Shape::Struct(&[BUFFER]);
const ON_DISK: Shape = Shape::Struct(&[Shape::Text, Shape::U64]);
const ON_LOCAL_DISK: Shape = Shape::Struct(&[UUID, Shape::U64, Shape::Text]);
const IN_FILE_SYSTEM: Shape = Shape::Struct(&[Shape::Text, Shape::U64, Shape::U64, Shape::U64, Shape::I32]);
pub(super) const REPLICA: Shape = Shape::Struct(&[
    Shape::U64,
    Shape::Variant(&[IN_MEMORY, IN_MEMORY, ON_DISK, ON_LOCAL_DISK, IN_FILE_SYSTEM]),
    Shape::I32,
]);
pub(super) const OBJECT: Shape = Shape::Struct(&[Shape::Text, Shape::Optional(&Shape::U64)]);
pub(super) const PLACING: Shape = Shape::Struct(&[
    Shape::U64,
    Shape::U64,
    Shape::U64,
    Shape::U8,
    Shape::Optional(&Shape::U64),
    Shape::Bool,
    Shape::List(&Shape::Text),
    Shape::Text,
    Shape::List(&Shape::Text),
    Shape::Bool,
    Shape::U8,
    Shape::Text,
    Shape::Optional(&Shape::List(&Shape::Text)),
]);

/// The replica is whole and may be read.
const COMPLETE: i32 = 3;

impl Uuid {
    /// A new one.
    #[must_use]
    pub fn new() -> Self {
        Self(random(), random())
    }

    pub(super) fn write(self, to: &mut Writer) {
        to.u64(self.0);
        to.u64(self.1);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self> {
        Ok(Self(from.u64()?, from.u64()?))
    }
}

impl Default for Uuid {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.0, self.1)
    }
}

/// Memory that a client lends to the master.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountedSegment {
    /// The segment's id.
    pub id: Uuid,
    /// Its name, by which clients may prefer it.
    pub name: String,
    /// Its first address.
    pub base: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// Where its owner answers handshakes, HOST:PORT.
    pub endpoint: String,
}

impl MountedSegment {
    pub(super) fn write(&self, to: &mut Writer) {
        self.id.write(to);
        to.text(&self.name);
        to.u64(self.base);
        to.u64(self.bytes);
        to.text(&self.endpoint);
        to.text("tcp");
        // Which machine it is on: only those that are asked to spread replicas by it want to know.
        to.text("");
    }
}

/// Where the bytes of a replica are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the memory of a segment.
    Memory {
        /// Number of bytes.
        bytes: u64,
        /// The first one's address.
        address: u64,
        /// The protocol by which peers reach the segment.
        protocol: String,
        /// Where the segment's owner answers handshakes.
        endpoint: String,
    },
    /// Somewhere that is not read here, in a word.
    Elsewhere(&'static str),
}

/// One copy of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replica {
    /// The replica's id.
    pub id: u64,
    /// The replica's place.
    pub place: Place,
    /// How far it has come, in the master's numbers.
    pub status: i32,
}

impl Replica {
    /// Whether it is whole.
    #[must_use]
    pub const fn complete(&self) -> bool {
        self.status == COMPLETE
    }

    /// The fewest bytes that one takes.
    pub(super) const LEAST_BYTES: usize = 8 + 1 + 4;

    pub(super) fn read(from: &mut Reader<'_>) -> Result<Self> {
        Ok(Self { id: from.u64()?, place: Place::read(from)?, status: from.i32()? })
    }
}

impl Place {
    fn read(from: &mut Reader<'_>) -> Result<Self> {
        let elsewhere = match from.u8()? {
            0 => {
                let (bytes, address) = (from.u64()?, from.u64()?);
                return Ok(Self::Memory { bytes, address, protocol: from.text()?, endpoint: from.text()? });
            }
            1 => {
                from.u64()?;
                from.u64()?;
                from.text()?;
                from.text()?;
                "on a drive that is reached over a fabric"
            }
            2 => {
                from.text()?;
                from.u64()?;
                "in a file"
            }
            3 => {
                Uuid::read(from)?;
                from.u64()?;
                from.text()?;
                "on a client's disk"
            }
            4 => {
                from.text()?;
                from.u64()?;
                from.u64()?;
                from.u64()?;
                from.i32()?;
                "in a distributed file system"
            }
            _ => return Err(from.wrong("a replica of a kind that there is not")),
        };
        Ok(Self::Elsewhere(elsewhere))
    }
}

/// Where an object is, and for how long that is promised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// Its copies.
    pub replicas: Vec<Replica>,
    /// How long none of them is evicted.
    pub lease_ms: u64,
    /// The checksum of its bytes, if its writer gave one.
    pub checksum: Option<u64>,
}

pub(super) const LOCATED: Shape =
    Shape::Struct(&[Shape::List(&REPLICA), Shape::U64, Shape::Optional(&Shape::U64)]);

impl Located {
    pub(super) fn read(from: &mut Reader<'_>) -> Result<Self> {
        Ok(Self {
            replicas: from.list(Replica::LEAST_BYTES, Replica::read)?,
            lease_ms: from.u64()?,
            checksum: from.optional(Reader::u64)?,
        })
    }
}

/// How an object is to be placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementOptions {
    /// Copies in memory.
    pub replicas: u64,
    /// The segment that is preferred, or nothing.
    pub preferred_segment: String,
}

impl Default for PlacementOptions {
    fn default() -> Self {
        Self { replicas: 1, preferred_segment: String::new() }
    }
}

impl PlacementOptions {
    pub(super) fn write(&self, to: &mut Writer) {
        to.u64(self.replicas);
        // None on drives that are reached over a fabric, none in a distributed file system.
        to.u64(0);
        to.u64(0);
        // Soft pin as it is, for as long as the master likes; no hard pin.
        to.u8(0);
        to.optional(None::<&u64>, |to, time| to.u64(*time));
        to.bool(false);
        to.length(0);
        to.text(&self.preferred_segment);
        to.length(0);
        // Not on this machine rather than on others; data of no particular kind; no machine named; no group.
        to.bool(false);
        to.u8(0);
        to.text("");
        to.bool(false);
    }
}

/// The state of a client at the master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It lives, and its segments are known.
    Known,
    /// Its segments are forgotten: it is to mount them again.
    Forgotten,
    /// Anything else that a master may say.
    Other(i32),
}

impl Standing {
    pub(super) const fn of(status: i32) -> Self {
        match status {
            1 => Self::Known,
            2 => Self::Forgotten,
            other => Self::Other(other),
        }
    }
}
