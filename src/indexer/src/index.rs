//! The holders of each block: a pure state machine from events to answers.
//!
//! Blocks are named in each context (tenant, model, adapter, block size, salt) by RFC 1527's rolling XXH3 hash of
//! their tokens, whatever the engine itself calls them; a table gives the holders of a name. Beside it each stream
//! keeps the engine's own names, because removals and children come by those. A prompt is looked up block by block:
//! one table access a block, until nobody holds the next.

mod orphans;
mod prefix;
mod stream;
mod table;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use baton_events::Batch;
use baton_events::hash::Rolling;
use serde::{Deserialize, Serialize};

use crate::contract::{Lookup, Registration};
use crate::error::{IndexerError, Kind};
pub use prefix::PrefixMatch;
use prefix::{Cursor, MEDIA};
use stream::Stream;
pub(crate) use stream::{Entry, Place};
pub(crate) use table::ContextId;
use table::Tables;

/// The properties that separate blocks with the same tokens.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Context {
    /// The cache's tenant.
    #[serde(rename = "tenant_id")]
    pub tenant: String,
    /// The model.
    pub model: String,
    /// The adapter; empty for the base model.
    #[serde(rename = "lora_name")]
    pub lora: String,
    /// Tokens of a block.
    #[serde(rename = "block_size")]
    pub block_tokens: u32,
    /// The registration's salt, the request's, or `registration/request` where there are both.
    #[serde(rename = "cache_salt")]
    pub salt: String,
}

/// A followed publisher, as long as it is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub(crate) u32);

/// Bounds of an index, and the seed of its names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexLimits {
    /// Seed of the rolling hashes; peers and callers of `/query_by_hash` use the same.
    pub seed: u64,
    /// Publishers at most.
    pub max_streams: usize,
    /// Blocks of one publisher at most, some 100 bytes each; further ones are ignored and counted.
    pub max_blocks: usize,
    /// Blocks of one publisher that wait for their parent at most; the oldest make room.
    pub max_orphans: usize,
    /// Contexts at most; blocks of further ones are followed but not found.
    pub max_contexts: usize,
}

impl Default for IndexLimits {
    fn default() -> Self {
        Self { seed: 0, max_streams: 1024, max_blocks: 16 << 20, max_orphans: 1 << 16, max_contexts: 4096 }
    }
}

/// Plain counts of a stream since it was added, of blocks unless they say otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Held now, under the engine's names.
    pub blocks: u64,
    /// Waiting for their parent now; held, but not found by tokens.
    pub orphans: u64,
    /// Events taken in.
    pub events: u64,
    /// Waiting ones whose parent came.
    pub adopted: u64,
    /// Waiting ones that were given up to make room.
    pub abandoned: u64,
    /// Not taken because a bound was reached.
    pub over_capacity: u64,
    /// Of another size than registered, or with tokens that do not fit their number.
    pub odd_size: u64,
    /// Of another tenant or model, or of a medium or cache group that does not count.
    pub elsewhere: u64,
    /// Not nameable by tokens: behind a picture, or without tokens.
    pub unnamed: u64,
    /// Removed without having been held.
    pub unknown_removed: u64,
}

/// Where a stream stands: the last batch that is in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// Its number.
    pub sequence: u64,
    /// When the engine announced it, in microseconds since 1970: no two lives of an engine share one.
    pub time_us: u64,
}

/// The blocks of every followed publisher.
#[derive(Debug)]
pub struct Index {
    limits: IndexLimits,
    tables: Tables,
    streams: Vec<Option<Stream>>,
}

impl Index {
    /// An empty index.
    #[must_use]
    pub fn new(limits: IndexLimits) -> Self {
        Self { limits, tables: Tables::new(limits.max_contexts), streams: Vec::new() }
    }

    /// Its bounds.
    #[must_use]
    pub const fn limits(&self) -> &IndexLimits {
        &self.limits
    }

    /// Adds a publisher that holds nothing yet. Its key must not be there; the caller sees to that.
    ///
    /// # Errors
    /// `Full` where `max_streams` are there.
    pub fn add(&mut self, registration: Registration) -> Result<StreamId, IndexerError> {
        let free = self.streams.iter().position(Option::is_none);
        let at = free.unwrap_or(self.streams.len());
        if at >= self.limits.max_streams {
            let message =
                format!("{at} publishers are registered, the most that are followed; unregister one");
            return Err(IndexerError::new(Kind::Full, message));
        }
        if free.is_none() {
            self.streams.push(None);
        }
        let id = StreamId(u32::try_from(at).expect("max_streams is far below 2^32"));
        self.streams[at] = Some(Stream::new(id, registration, &self.limits));
        Ok(id)
    }

    /// Forgets a publisher and all that it holds.
    pub fn remove(&mut self, id: StreamId) {
        self.clear(id);
        if let Some(slot) = self.streams.get_mut(id.0 as usize) {
            *slot = None;
        }
        self.tables.drop_empty();
    }

    /// Forgets a publisher's blocks, because its cache is gone or no longer known.
    pub fn clear(&mut self, id: StreamId) {
        if let (Some(stream), tables) = self.stream(id) {
            stream.clear(tables);
        }
    }

    /// Takes a batch in. Total: what cannot be followed is counted.
    pub fn apply(&mut self, id: StreamId, batch: &Batch) {
        if let (Some(stream), tables) = self.stream(id) {
            stream.apply(batch, tables);
        }
    }

    fn stream(&mut self, id: StreamId) -> (Option<&mut Stream>, &mut Tables) {
        (self.streams.get_mut(id.0 as usize).and_then(Option::as_mut), &mut self.tables)
    }

    fn streams(&self) -> impl Iterator<Item = &Stream> {
        self.streams.iter().flatten()
    }

    pub(crate) fn peek(&self, id: StreamId) -> Option<&Stream> {
        self.streams.get(id.0 as usize)?.as_ref()
    }

    /// Every publisher that is followed.
    pub fn ids(&self) -> impl Iterator<Item = StreamId> {
        self.streams().map(|stream| stream.id)
    }

    /// The counts of one publisher.
    #[must_use]
    pub fn counts(&self, id: StreamId) -> Counts {
        self.peek(id).map(Stream::counts).unwrap_or_default()
    }

    /// Where a publisher's stream stands; `None` before its first batch.
    #[must_use]
    pub fn position(&self, id: StreamId) -> Option<Position> {
        self.peek(id)?.position
    }

    /// Contexts with the number of blocks that somebody holds in each, sorted.
    #[must_use]
    pub fn contexts(&self) -> Vec<(&Context, usize)> {
        let mut all: Vec<_> = self.tables.sizes().collect();
        all.sort_unstable();
        all
    }

    pub(crate) fn context(&self, id: ContextId) -> Option<&Context> {
        self.tables.context(id)
    }

    /// The holders of a prompt, and how much of it each has: every rank of every instance of the tenant that serves the model in blocks
    /// of this size, those that hold nothing included, sorted. Only whole blocks are looked at.
    #[must_use]
    pub fn match_tokens(&self, lookup: &Lookup, tokens: &[u32]) -> BTreeMap<&str, PrefixMatch> {
        let mut cursors = self.cursors(lookup);
        if let Some(table) = self.tables.find(&lookup.context) {
            let mut chain = Rolling::new(self.limits.seed);
            for block in tokens.chunks_exact(lookup.context.block_tokens as usize) {
                let holders = table.holders(chain.push(block));
                // Both are sorted by stream, and a prompt's holders are few.
                let held = |stream: StreamId| {
                    let at = holders.binary_search_by_key(&stream, |holder| holder.stream).ok()?;
                    Some(holders[at].held.map(|names| names > 0))
                };
                let mut going = false;
                for (stream, cursor) in &mut cursors {
                    going |= !cursor.stopped() && cursor.step(held(stream.id));
                }
                if !going {
                    break;
                }
            }
        }
        summary(&cursors, lookup.context.block_tokens)
    }

    /// Matches by names of blocks: the engines' own, or the standard ones.
    #[must_use]
    pub fn match_hashes(&self, lookup: &Lookup, hashes: &[u64]) -> BTreeMap<&str, PrefixMatch> {
        let table = self.tables.find(&lookup.context);
        let context = self.tables.id(&lookup.context);
        let mut cursors = self.cursors(lookup);
        for (stream, cursor) in &mut cursors {
            for hash in hashes {
                let own = stream.held(*hash, context, &lookup.context);
                let standard = || table.and_then(|table| table.held(*hash, stream.id));
                if !cursor.step(own.or_else(standard)) {
                    break;
                }
            }
        }
        summary(&cursors, lookup.context.block_tokens)
    }

    fn cursors(&self, lookup: &Lookup) -> Vec<(&Stream, Cursor)> {
        let wanted = |stream: &&Stream| {
            let told = &stream.registration;
            told.tenant == lookup.context.tenant
                && told.model == lookup.context.model
                && told.block_tokens == lookup.context.block_tokens
                && lookup.instance.as_ref().is_none_or(|instance| *instance == told.instance)
        };
        self.streams().filter(wanted).map(|stream| (stream, Cursor::default())).collect()
    }

    /// Puts back what a publisher held when it was written down; it must have been added just now.
    pub(crate) fn restore(
        &mut self,
        id: StreamId,
        position: Option<Position>,
        contexts: &[Context],
        entries: impl ExactSizeIterator<Item = (u64, Entry)>,
    ) {
        let ids: Vec<Place> = contexts.iter().map(|context| self.tables.place(context.clone())).collect();
        let (Some(stream), tables) = self.stream(id) else { return };
        stream.position = position;
        stream.restore(&ids, entries, tables);
    }

    /// Checks every invariant of the whole state: the tables hold what the streams hold, and nothing else.
    ///
    /// # Errors
    /// The invariant that does not hold.
    pub fn check(&self) -> Result<(), String> {
        let mut expected = Tables::new(usize::MAX);
        self.tables.copy_contexts_into(&mut expected);
        for stream in self.streams() {
            stream.check(&self.limits)?;
            stream.publish_all(&mut expected);
        }
        expected.same_blocks(&self.tables)
    }
}

/// Cursors by instance: the furthest of its ranks in each medium, and each rank's own.
fn summary<'a>(cursors: &[(&'a Stream, Cursor)], block_tokens: u32) -> BTreeMap<&'a str, PrefixMatch> {
    let mut all: BTreeMap<&str, PrefixMatch> = BTreeMap::new();
    for (stream, cursor) in cursors {
        let tokens = |blocks: u32| u64::from(blocks) * u64::from(block_tokens);
        let matched = all.entry(&stream.registration.instance).or_default();
        for medium in 0..MEDIA {
            matched.media[medium] = matched.media[medium].max(tokens(cursor.reached[medium]));
        }
        matched.longest = matched.longest.max(tokens(cursor.blocks));
        matched.ranks.insert(stream.registration.dp_rank, tokens(cursor.blocks));
    }
    all
}
