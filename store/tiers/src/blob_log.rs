//! Values of any length in the slab file, cut into its blocks.
//!
//! A value's first block, its head, carries a header of the caller's, with a checksum of its own, and the first bytes; the other blocks name the
//! head as the block that they continue. The head is written last, and a value counts only while every block of it
//! is there: after a crash one that is not whole is as if it had never been put. Which value it is stands in the keys
//! of the blocks, so a start reads the file's index and no block.

#[cfg(test)]
mod crash;
mod get;
mod keys;
mod put;
mod record;
mod recover;

use crate::aligned::AlignedBuffer;
use crate::file::{FileOptions, FileTier, IoChoice, Speed, layout_in, pass_by, unlink};
use crate::index::{Entry, Place};
use crate::io_sequencer::IoCompletion;
use crate::recover::{Beginning, FlashError};
use crate::tier::TierError;
use baton_types::BlockKey;
use get::GetOp;
use put::PutOp;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

pub use keys::HEADER_MAX_BYTES;
pub use record::{BlobLogEvent, BlobReadError, Listing, PutError, Record, Source};

/// Values with more blocks than this part of the file are not kept.
const LARGEST_PART: usize = 4;
/// Values being written, and read, at a time.
const PUTS_MAX: usize = 64;
const GETS_MAX: usize = 64;

/// The log's interface to the file below it. [`FileTier`] implements it; the crash tests have another implementation.
pub(crate) trait Slab: fmt::Debug {
    /// The size of a block.
    fn block_bytes(&self) -> usize;
    /// How many blocks may rest there.
    fn capacity_blocks(&self) -> usize;
    /// Blocks that rest there and places reserved.
    fn used_blocks(&self) -> usize;
    /// The entries of an earlier life, and the outdated entries being removed because another of the same name is
    /// newer. Called once, before any other method.
    fn recovered(&mut self) -> (Vec<Entry>, Vec<Entry>);
    /// Where a block rests.
    fn place(&self, key: BlockKey) -> Option<Place>;
    /// Whether another write may start.
    fn takes_write(&self) -> bool;
    /// Whether another read may start.
    fn takes_read(&self) -> bool;
    /// A buffer for a write.
    fn buffer(&mut self) -> AlignedBuffer;
    /// Takes a buffer back.
    fn recycle(&mut self, buffer: AlignedBuffer);
    /// Starts to write a block.
    fn write(
        &mut self,
        keys: (BlockKey, Option<BlockKey>),
        checksum: u64,
        buffer: AlignedBuffer,
    ) -> Result<(u64, Place), TierError>;
    /// Starts to read a block.
    fn read(&mut self, key: BlockKey) -> Option<u64>;
    /// Starts to read the first page of a block, of which nothing is verified.
    fn peek(&mut self, key: BlockKey) -> Option<u64>;
    /// A job that ended.
    fn next_done(&mut self) -> Option<IoCompletion>;
    /// A slot whose last entry is gone for good.
    fn next_freed(&mut self) -> Option<u32>;
    /// Lists a block that was written.
    fn commit(&mut self, key: BlockKey, place: Place) -> bool;
    /// Gives up a block that was written and not listed.
    fn discard(&mut self, place: Place);
    /// Gives up a listed block.
    fn remove(&mut self, key: BlockKey) -> bool;
    /// Whether the file's thread is gone, so that no job ends.
    fn is_lost(&self) -> bool;
    /// Whether writing has stopped for good.
    fn is_off(&self) -> bool;
}

/// Options for opening a [`BlobLog`].
#[derive(Clone, Debug)]
pub struct BlobLogOptions<'a> {
    /// The folder of the file.
    pub dir: &'a Path,
    /// Blocks in the file.
    pub capacity_blocks: u32,
    /// The size of each, a multiple of 4096 lest space is wasted.
    pub block_bytes: usize,
    /// Stands for everything that gives names and headers their meaning.
    pub fingerprint: u64,
    /// How the disk is read and written.
    pub io: IoChoice,
}

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlobLogStats {
    /// Values that rest there.
    pub values: u64,
    /// Blocks in use, bytes.
    pub used_bytes: u64,
    /// Bytes of blocks written.
    pub written_bytes: u64,
    /// Values that came back at the start.
    pub recovered: u64,
    /// Values that were not whole at the start, and went.
    pub incomplete: u64,
    /// Values dropped for room.
    pub evicted: u64,
    /// Values dropped because a block was not as stored.
    pub corrupt: u64,
    /// Reads and writes that the disk refused.
    pub io_errors: u64,
}

/// A value that rests there.
#[derive(Debug)]
struct Object {
    head: BlockKey,
    tag: u64,
    /// Read since eviction passed by.
    hit: bool,
}

/// Deletions of one key that the disk has not confirmed.
#[derive(Debug, Default)]
struct PendingRemoval {
    /// Heads whose slots are not free for good, and values that were removed while they were written.
    heads: u32,
    /// Those that wait until there is none.
    waiting: Vec<u64>,
}

#[derive(Clone, Copy, Debug)]
enum Job {
    Put { id: u64, key: BlockKey, place: Place },
    Get { id: u64, part: u32 },
}

/// The logic of the log over any file.
#[derive(Debug)]
pub(crate) struct BlobLogCore<S> {
    slab: S,
    objects: BTreeMap<u64, Object>,
    /// Names and tags, the one written longest ago first; some have gone.
    order: VecDeque<(u64, u64)>,
    puts: BTreeMap<u64, PutOp>,
    gets: BTreeMap<u64, GetOp>,
    jobs: BTreeMap<u64, Job>,
    next_id: u64,
    next_nonce: u64,
    /// Blocks of values being written that have no place yet.
    owed_blocks: usize,
    /// Heads on their way out: name by slot.
    leaving: BTreeMap<u32, u64>,
    /// Pending deletions by name, with the removals that wait for them.
    deleting: BTreeMap<u64, PendingRemoval>,
    done: VecDeque<BlobLogEvent>,
    stats: BlobLogStats,
    /// Reads and writes of blocks that ended.
    ended: u64,
}

impl<S: Slab> BlobLogCore<S> {
    /// Takes up what rests in `slab`.
    pub(crate) fn new(slab: S) -> Self {
        let mut core = Self {
            slab,
            objects: BTreeMap::new(),
            order: VecDeque::new(),
            puts: BTreeMap::new(),
            gets: BTreeMap::new(),
            jobs: BTreeMap::new(),
            next_id: 0,
            next_nonce: 0,
            owed_blocks: 0,
            leaving: BTreeMap::new(),
            deleting: BTreeMap::new(),
            done: VecDeque::new(),
            stats: BlobLogStats::default(),
            ended: 0,
        };
        core.recover();
        // Handles the slots freed by the disk's trial, so that no later caller gets them as its own.
        core.pump();
        core
    }

    pub(crate) fn takes_put(&self) -> bool {
        self.puts.len() < PUTS_MAX
    }

    pub(crate) fn takes_get(&self) -> bool {
        self.gets.len() < GETS_MAX
    }

    pub(crate) fn bytes_of(&self, name: u64) -> Option<u32> {
        self.objects.get(&name).map(|object| keys::value_bytes(object.head))
    }

    pub(crate) fn listings(&self) -> impl Iterator<Item = Listing> + '_ {
        self.objects.values().map(|object| keys::listing(object.head, object.tag))
    }

    pub(crate) fn stats(&self) -> BlobLogStats {
        let used = self.slab.used_blocks() as u64 * self.slab.block_bytes() as u64;
        BlobLogStats { values: self.objects.len() as u64, used_bytes: used, ..self.stats }
    }

    /// Hears what ended and starts what can be started. Never waits.
    pub(crate) fn pump(&mut self) {
        while let Some(done) = self.slab.next_done() {
            self.ended += 1;
            match self.jobs.remove(&done.number) {
                Some(Job::Put { id, key, place }) => self.block_written(id, (key, place), done),
                Some(Job::Get { id, part }) => self.block_read(id, part, done),
                None => self.slab.recycle(done.buffer),
            }
        }
        while let Some(slot) = self.slab.next_freed() {
            if let Some(name) = self.leaving.remove(&slot) {
                self.delete_confirmed(name);
            }
        }
        self.read_on();
        self.write_on();
    }

    pub(crate) fn next_done(&mut self) -> Option<BlobLogEvent> {
        self.done.pop_front()
    }

    /// Removes a value. [`BlobLogEvent::Removed`] reports when it cannot reappear.
    pub(crate) fn remove(&mut self, name: u64, token: u64) {
        self.take_down(name);
        if let Some((id, put)) = self.puts.iter_mut().find(|(_, put)| put.name() == name && !put.cancelled) {
            // Its head may be on its way to the disk at this moment.
            put.cancelled = true;
            let id = *id;
            self.deleting.entry(name).or_default().heads += 1;
            self.try_finish(id);
        }
        // Reports the removal once no head of that name is left to be freed.
        match self.deleting.get_mut(&name) {
            Some(deleting) => deleting.waiting.push(token),
            None => self.done.push_back(BlobLogEvent::Removed(token)),
        }
    }

    /// A head is on its way out.
    fn leaves(&mut self, name: u64, slot: u32) {
        self.leaving.insert(slot, name);
        self.deleting.entry(name).or_default().heads += 1;
    }

    /// A head of this name cannot come back.
    fn delete_confirmed(&mut self, name: u64) {
        let Some(deleting) = self.deleting.get_mut(&name) else { return };
        deleting.heads -= 1;
        if deleting.heads == 0 {
            let waiting = self.deleting.remove(&name).map(|deleting| deleting.waiting).unwrap_or_default();
            self.done.extend(waiting.into_iter().map(BlobLogEvent::Removed));
        }
    }

    /// Gives up a value's blocks, the head first.
    fn take_down(&mut self, name: u64) {
        let Some(object) = self.objects.remove(&name) else { return };
        if let Some(place) = self.slab.place(object.head) {
            self.slab.remove(object.head);
            self.leaves(name, place.slot);
        }
        for part in 1..keys::parts(object.head, self.slab.block_bytes()) {
            self.slab.remove(keys::part(object.head, part));
        }
        if self.order.len() > 2 * self.objects.len() + 64 {
            let objects = &self.objects;
            self.order.retain(|(name, tag)| objects.get(name).is_some_and(|object| object.tag == *tag));
        }
    }

    /// Drops the value written longest ago that was not read since. False when there is none.
    fn evict(&mut self) -> bool {
        for _ in 0..2 * self.order.len() {
            let Some((name, tag)) = self.order.pop_front() else { return false };
            let Some(object) = self.objects.get_mut(&name).filter(|object| object.tag == tag) else {
                continue;
            };
            if std::mem::take(&mut object.hit) {
                self.order.push_back((name, tag));
                continue;
            }
            let gone = keys::listing(object.head, tag);
            self.take_down(name);
            self.stats.evicted += 1;
            self.done.push_back(BlobLogEvent::Dropped(gone));
            return true;
        }
        false
    }
}

/// Values of any length in one preallocated file that outlives the process.
///
/// One thread uses it: it asks, calls [`BlobLog::wait`] and takes the results from [`BlobLog::next_done`]. A value
/// reported as kept survives a kill or a power cut, until it is removed, evicted or damaged.
#[derive(Debug)]
pub struct BlobLog {
    core: BlobLogCore<FileTier>,
    dir: PathBuf,
}

impl BlobLog {
    /// Opens the file or makes it, and tries the disk out.
    ///
    /// # Errors
    /// [`FlashError`] says what stands against it; the file is then as it was, unless the trial failed.
    pub fn open(options: &BlobLogOptions<'_>) -> Result<(Self, Option<Speed>), FlashError> {
        let mut tier = FileTier::open(&FileOptions {
            dir: Some(options.dir),
            capacity_blocks: options.capacity_blocks,
            block_bytes: options.block_bytes,
            fingerprint: options.fingerprint,
            io: options.io,
        })?;
        let speed = tier.try_out().map_err(|why| FlashError::Io(std::io::Error::other(why)))?;
        Ok((Self { core: BlobLogCore::new(tier), dir: options.dir.to_owned() }, speed))
    }

    /// Size and number of the blocks of the file in a folder, if a log with this fingerprint left one there. Changes
    /// nothing.
    #[must_use]
    pub fn blocks_in(dir: &Path, fingerprint: u64) -> Option<(usize, u32)> {
        let layout = layout_in(dir).filter(|layout| layout.fingerprint == fingerprint)?;
        Some((layout.block_bytes, layout.capacity))
    }

    /// Marks the file in a folder, if there is one, as passed by: what it holds may be older than what its owner has
    /// done without it, so the next [`BlobLog::open`] empties it. True when there is one.
    ///
    /// # Errors
    /// The mark may not be there after a power cut.
    pub fn pass_by(dir: &Path) -> io::Result<bool> {
        pass_by(dir)
    }

    /// Unlinks the file, so that no later start finds its content. This process can still read it.
    ///
    /// # Errors
    /// The file may be there after a power cut.
    pub fn give_up(&mut self) -> io::Result<()> {
        unlink(&self.dir)
    }

    /// How it began, and how the disk is used.
    #[must_use]
    pub fn beginning(&self) -> (&Beginning, &str) {
        (self.core.slab.beginning(), self.core.slab.device())
    }

    /// Whether the disk failed so often that the log has stopped writing.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.core.slab.is_off() || self.core.slab.is_lost()
    }

    /// Length of the value of this name.
    #[must_use]
    pub fn bytes_of(&self, name: u64) -> Option<u32> {
        self.core.bytes_of(name)
    }

    /// Everything that rests there, by name.
    pub fn listings(&self) -> impl Iterator<Item = Listing> + '_ {
        self.core.listings()
    }

    /// The log's counters.
    #[must_use]
    pub fn stats(&self) -> BlobLogStats {
        self.core.stats()
    }

    /// Reads and writes of blocks that ended so far: a disk that is asked and ends none is in trouble.
    #[must_use]
    pub fn ended(&self) -> u64 {
        self.core.ended
    }

    /// Whether another value may be put.
    #[must_use]
    pub fn takes_put(&self) -> bool {
        self.core.takes_put()
    }

    /// Whether another value may be read.
    #[must_use]
    pub fn takes_get(&self) -> bool {
        self.core.takes_get()
    }

    /// Begins to keep a value: [`BlobLogEvent::Kept`] or [`BlobLogEvent::NotKept`] follows.
    pub fn put(&mut self, record: Record) {
        self.core.put(record);
    }

    /// Begins to read a value, or its header alone: [`BlobLogEvent::Got`] follows.
    pub fn get(&mut self, name: u64, token: u64, header_only: bool) {
        self.core.get(name, token, header_only);
    }

    /// Takes a value away: [`BlobLogEvent::Removed`] follows once it cannot come back.
    pub fn remove(&mut self, name: u64, token: u64) {
        self.core.remove(name, token);
    }

    /// Names after this one, in their order, at most so many.
    #[must_use]
    pub fn names_after(&self, name: Option<u64>, most: usize) -> Vec<u64> {
        let from = name.map_or(std::ops::Bound::Unbounded, std::ops::Bound::Excluded);
        self.core
            .objects
            .range((from, std::ops::Bound::Unbounded))
            .take(most)
            .map(|(name, _)| *name)
            .collect()
    }

    /// Goes on with what can go on. Never waits.
    pub fn pump(&mut self) {
        self.core.pump();
    }

    /// Whether a read or a write is under way: [`BlobLog::wait`] would end.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        !self.is_off() && self.core.slab.under_way() > 0
    }

    /// Waits until the disk has done something, if anything is under way.
    pub fn wait(&mut self) {
        if self.is_waiting() {
            self.core.slab.wait_some();
        }
        self.core.pump();
    }

    /// The next result, if there is one.
    pub fn next_done(&mut self) -> Option<BlobLogEvent> {
        self.core.next_done()
    }
}
