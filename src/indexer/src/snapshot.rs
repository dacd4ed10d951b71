//! The snapshot format: what an index knows, stream by stream, each part with a checksum of its own.
//!
//! All numbers are little endian. A header (`BATONIDX`, version, seed of the names), then one *section* a stream:
//! a kind, the bytes that follow, their XXH3-64, and the bytes: lengths and JSON of registration, position and
//! contexts, then 24 bytes a block. An end section says how many streams there were, so what stops early is not
//! mistaken for whole. A section is right or refused by itself: a reader that was cut off keeps the ones it has.

use baton_types::Tier;
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::contract::Registration;
use crate::error::IndexerError;
use crate::index::{Context, ContextId, Entry, Index, Place, Position, StreamId};

/// First bytes of a snapshot.
const MAGIC: &[u8; 8] = b"BATONIDX";
/// The version written; others are not read.
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 20;
const FRAME_BYTES: usize = 17;
const STREAM: u8 = 1;
const END: u8 = 2;
/// Bytes of a section at most: room for 32 Mi blocks.
const SECTION_BYTES_MAX: u64 = (32 << 20) * BLOCK_BYTES as u64;
/// Room made at most for bytes that have not come.
const RESERVED_BYTES: usize = 256 << 10;
/// Bytes of the JSON before the blocks at most.
const ABOUT_BYTES_MAX: usize = 64 << 20;
const BLOCK_BYTES: usize = 24;
/// Places that are no context.
const UNKNOWN: u16 = u16::MAX;
const NOWHERE: u16 = u16::MAX - 1;

/// The first bytes of a snapshot of names with this seed.
#[must_use]
pub fn header(seed: u64) -> Bytes {
    let mut bytes = BytesMut::with_capacity(HEADER_BYTES);
    bytes.put_slice(MAGIC);
    bytes.put_u32_le(VERSION);
    bytes.put_u64_le(seed);
    bytes.freeze()
}

/// The last bytes of a snapshot of so many streams.
#[must_use]
pub fn footer(streams: u64) -> Bytes {
    let mut bytes = framed();
    bytes.put_u64_le(streams);
    finish(bytes, END)
}

#[derive(Serialize, Deserialize)]
struct StreamHeader {
    registration: serde_json::Value,
    position: Option<Position>,
    contexts: Vec<Context>,
    blocks: usize,
}

/// Writes one stream as a section; `None` if it is no longer there.
#[must_use]
pub fn section(index: &Index, id: StreamId) -> Option<Bytes> {
    let stream = index.peek(id)?;
    let (mut contexts, mut local) = (Vec::new(), hashbrown::HashMap::new());
    let mut blocks = BytesMut::with_capacity(stream.entries().len() * BLOCK_BYTES);
    for (name, entry) in stream.entries() {
        let place = match entry.place.context() {
            Some(id) => *local.entry(id.0).or_insert_with(|| {
                contexts.extend(index.context(id).cloned());
                u16::try_from(contexts.len() - 1).expect("contexts are fewer than 2^16")
            }),
            None if entry.place == Place::UNKNOWN => UNKNOWN,
            None => NOWHERE,
        };
        blocks.put_u64_le(name);
        blocks.put_u64_le(entry.key);
        blocks.put_u16_le(place);
        entry.held.iter().for_each(|copies| blocks.put_u16_le(*copies));
    }
    let about = StreamHeader {
        registration: serde_json::to_value(&stream.registration).expect("a registration is plain data"),
        position: stream.position,
        contexts,
        blocks: stream.entries().len(),
    };
    let about = serde_json::to_vec(&about).expect("it is plain data with text keys");
    let mut bytes = framed();
    bytes.put_u32_le(u32::try_from(about.len()).ok()?);
    bytes.put_slice(&about);
    bytes.put_slice(&blocks);
    Some(finish(bytes, STREAM))
}

/// Room for a frame, filled in at the end.
fn framed() -> BytesMut {
    BytesMut::zeroed(FRAME_BYTES)
}

fn finish(mut bytes: BytesMut, kind: u8) -> Bytes {
    let (frame, payload) = bytes.split_at_mut(FRAME_BYTES);
    frame[0] = kind;
    frame[1..9].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    frame[9..].copy_from_slice(&xxh3_64(payload).to_le_bytes());
    bytes.freeze()
}

/// One stream of a snapshot, read.
#[derive(Debug)]
pub struct Section {
    /// The publisher.
    pub registration: Registration,
    /// Where its stream stood.
    pub position: Option<Position>,
    contexts: Vec<Context>,
    blocks: Bytes,
}

impl Section {
    /// Blocks in it.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.blocks.len() / BLOCK_BYTES
    }

    /// Adds the stream and its blocks to an index that does not have it.
    ///
    /// # Errors
    /// `Full` as of [`Index::add`].
    pub fn restore(self, index: &mut Index) -> Result<StreamId, IndexerError> {
        let id = index.add(self.registration)?;
        let entries = self.blocks.chunks_exact(BLOCK_BYTES).map(block);
        index.restore(id, self.position, &self.contexts, entries);
        Ok(id)
    }

    fn read(mut payload: Bytes) -> Result<Self, IndexerError> {
        let short = || IndexerError::corrupt("snapshot: a section is shorter than it says; get it again");
        let length = payload.try_get_u32_le().map_err(|_| short())? as usize;
        if length > payload.len() || length > ABOUT_BYTES_MAX {
            return Err(short());
        }
        let about: StreamHeader = serde_json::from_slice(&payload.split_to(length))
            .map_err(|e| IndexerError::corrupt(format!("snapshot: what a section is about: {e}")))?;
        let registration = about.registration.to_string();
        let (registration, _) = Registration::parse(registration.as_bytes())
            .map_err(|e| IndexerError::corrupt(format!("snapshot: a registration: {e}")))?;
        if about.blocks.checked_mul(BLOCK_BYTES) != Some(payload.len()) {
            return Err(short());
        }
        Ok(Self { registration, position: about.position, contexts: about.contexts, blocks: payload })
    }
}

fn block(bytes: &[u8]) -> (u64, Entry) {
    let mut bytes = bytes;
    let (name, key, place) = (bytes.get_u64_le(), bytes.get_u64_le(), bytes.get_u16_le());
    let held: [u16; Tier::LOCAL.len()] = std::array::from_fn(|_| bytes.get_u16_le());
    let place = match place {
        UNKNOWN => Place::UNKNOWN,
        NOWHERE => Place::NOWHERE,
        local => Place::in_context(ContextId(local)),
    };
    (name, Entry { key, place, held })
}

/// Reads a snapshot as it comes, in pieces of any size.
#[derive(Debug)]
pub struct Reader {
    seed: u64,
    waiting: BytesMut,
    begun: bool,
    ended: bool,
    /// Sections read, and what the end section must say.
    streams: u64,
}

impl Reader {
    /// A reader for an index whose names have this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { seed, waiting: BytesMut::new(), begun: false, ended: false, streams: 0 }
    }

    /// Takes bytes in.
    pub fn push(&mut self, bytes: &[u8]) {
        self.waiting.extend_from_slice(bytes);
    }

    /// The next stream, once all of it is there.
    ///
    /// # Errors
    /// Says whether the bytes are foreign, of a newer version, of another seed, or corrupt.
    pub fn next_section(&mut self) -> Result<Option<Section>, IndexerError> {
        if !self.begun {
            if self.waiting.len() < HEADER_BYTES {
                return Ok(None);
            }
            self.read_header()?;
        }
        let Some(frame) = self.waiting.get(..FRAME_BYTES) else { return Ok(None) };
        let mut frame = frame;
        let (kind, length, checksum) = (frame.get_u8(), frame.get_u64_le(), frame.get_u64_le());
        if self.ended || !(STREAM..=END).contains(&kind) || length > SECTION_BYTES_MAX {
            return Err(IndexerError::corrupt("snapshot: corrupt: no section begins here; get it again"));
        }
        let whole = FRAME_BYTES + usize::try_from(length).expect("it is below the bound of a section");
        if self.waiting.len() < whole {
            // The length is only announced, so memory grows with the bytes that arrive.
            self.waiting.reserve((whole - self.waiting.len()).min(RESERVED_BYTES));
            return Ok(None);
        }
        let mut payload = self.waiting.split_to(whole).freeze();
        payload.advance(FRAME_BYTES);
        if xxh3_64(&payload) != checksum {
            let message =
                format!("snapshot: corrupt: section {} fails its checksum; get it again", self.streams);
            return Err(IndexerError::corrupt(message));
        }
        if kind == END {
            return self.read_end(payload).map(|()| None);
        }
        self.streams += 1;
        Section::read(payload).map(Some)
    }

    fn read_header(&mut self) -> Result<(), IndexerError> {
        let mut header = self.waiting.split_to(HEADER_BYTES);
        if header.split_to(MAGIC.len()) != MAGIC[..] {
            let message = "snapshot: foreign: this is no snapshot of an indexer; name another file or URL";
            return Err(IndexerError::invalid(message));
        }
        let (version, seed) = (header.get_u32_le(), header.get_u64_le());
        if version != VERSION {
            let age = if version > VERSION { "newer" } else { "older" };
            let message = format!(
                "snapshot: {age}: version {version}, this program reads {VERSION}; use the program that wrote it"
            );
            return Err(IndexerError::invalid(message));
        }
        if seed != self.seed {
            let message = format!(
                "snapshot: foreign: its names have the seed {seed}, ours {}; start with the same --hash-seed",
                self.seed
            );
            return Err(IndexerError::invalid(message));
        }
        self.begun = true;
        Ok(())
    }

    fn read_end(&mut self, mut payload: Bytes) -> Result<(), IndexerError> {
        let told = payload.try_get_u64_le().unwrap_or(u64::MAX);
        if told != self.streams || !payload.is_empty() {
            let message = format!("snapshot: corrupt: {} streams came of {told}; get it again", self.streams);
            return Err(IndexerError::corrupt(message));
        }
        self.ended = true;
        Ok(())
    }

    /// Whether the end was read.
    #[must_use]
    pub const fn is_whole(&self) -> bool {
        self.ended
    }

    /// That nothing is missing and nothing is too much, after the last piece.
    ///
    /// # Errors
    /// Says that it was truncated, or goes on after its end.
    pub fn finish(&self) -> Result<(), IndexerError> {
        if !self.ended {
            let message = format!("snapshot: truncated after {} streams; get it again", self.streams);
            return Err(IndexerError::corrupt(message));
        }
        if self.waiting.is_empty() {
            return Ok(());
        }
        Err(IndexerError::corrupt("snapshot: corrupt: it goes on after its end; get it again"))
    }
}
