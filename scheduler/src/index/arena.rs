//! Where block hashes live: fixed-size chunks cut into extents, one extent for each run of blocks.
//!
//! A block keeps its position for life, so a position is a stable name and splitting a run moves
//! nothing. Free extents are kept in lists by size, threaded through the free space itself, and
//! join their free neighbours at once. When no extent is long enough a shorter one will do,
//! because a run may be cut anywhere: so free space is never lost to fragmentation.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;

use super::run::RunId;

/// Slots in a chunk; no extent, and so no run, is longer.
pub(super) const CHUNK_SLOTS: usize = 1 << CHUNK_BITS;
const CHUNK_BITS: u32 = 13;
/// Heap bytes of one chunk.
pub(super) const CHUNK_BYTES: usize = CHUNK_SLOTS * (size_of::<u64>() + size_of::<u32>());

const NONE: u32 = u32::MAX;
/// Marks the first and last owner word of a free extent; the rest of the word is its length.
const FREE: u32 = 1 << 31;
const CLASSES: usize = 64;
const EXACT_CLASSES: usize = 32;

/// A piece of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    /// Position of the first slot.
    pub(super) start: u32,
    /// Slots.
    pub(super) len: u32,
}

#[derive(Debug)]
struct Chunk {
    hashes: Box<[u64; CHUNK_SLOTS]>,
    owners: Box<[u32; CHUNK_SLOTS]>,
}

/// The chunks and their free space.
#[derive(Debug)]
pub(super) struct Arena {
    chunks: Vec<Chunk>,
    first_free: [u32; CLASSES],
    stocked: u64,
    free: usize,
}

impl Arena {
    pub(super) const fn new() -> Self {
        Self { chunks: Vec::new(), first_free: [NONE; CLASSES], stocked: 0, free: 0 }
    }

    /// Heap bytes, exactly.
    pub(super) const fn memory_bytes(&self) -> usize {
        self.chunks.len() * CHUNK_BYTES + self.chunks.capacity() * size_of::<Chunk>()
    }

    /// Free slots.
    pub(super) const fn free_slots(&self) -> usize {
        self.free
    }

    /// All slots.
    pub(super) const fn slots(&self) -> usize {
        self.chunks.len() << CHUNK_BITS
    }

    /// The hash at a position.
    #[inline]
    pub(super) fn hash(&self, position: u32) -> u64 {
        self.chunks[chunk_of(position)].hashes[slot_of(position)]
    }

    /// Writes the hash of a position that the caller owns.
    #[inline]
    pub(super) fn set_hash(&mut self, position: u32, hash: u64) {
        self.chunks[chunk_of(position)].hashes[slot_of(position)] = hash;
    }

    /// The hashes of an extent.
    #[inline]
    pub(super) fn hashes(&self, extent: Extent) -> &[u64] {
        let from = slot_of(extent.start);
        &self.chunks[chunk_of(extent.start)].hashes[from..from + extent.len as usize]
    }

    /// The run that owns a position, if any does.
    ///
    /// Answers for owned positions and for the first and last of a free extent.
    #[inline]
    pub(super) fn owner(&self, position: u32) -> Option<RunId> {
        let owner = self.chunks[chunk_of(position)].owners[slot_of(position)];
        (owner & FREE == 0).then_some(RunId(owner))
    }

    /// The run that owns the slot just before `start`, within the same chunk.
    pub(super) fn owner_before(&self, start: u32) -> Option<RunId> {
        if slot_of(start) == 0 { None } else { self.owner(start - 1) }
    }

    /// The run that owns the slot just after `extent`, within the same chunk.
    pub(super) fn owner_after(&self, extent: Extent) -> Option<RunId> {
        let after = extent.start + extent.len;
        if slot_of(after) == 0 { None } else { self.owner(after) }
    }

    /// Gives all of an extent to a run.
    pub(super) fn own(&mut self, extent: Extent, run: RunId) {
        debug_assert!(run.0 & FREE == 0, "a run's name must not look like free space");
        let from = slot_of(extent.start);
        self.chunks[chunk_of(extent.start)].owners[from..from + extent.len as usize].fill(run.0);
    }

    /// Takes an extent of at most `want` slots (at least one), or `None` where that needs a new
    /// chunk and `may_grow` is false. Until it is owned or released its owners are undefined.
    pub(super) fn take(&mut self, want: usize, may_grow: bool) -> Option<Extent> {
        let want = want.clamp(1, CHUNK_SLOTS);
        let fitting = self.stocked & (u64::MAX << fitting_class(want));
        let class = if fitting != 0 {
            fitting.trailing_zeros()
        } else if self.stocked != 0 && (self.is_loose() || !may_grow) {
            CLASSES as u32 - 1 - self.stocked.leading_zeros()
        } else if may_grow {
            self.grow();
            CLASSES as u32 - 1
        } else {
            return None;
        };
        let found = self.unlist(self.first_free[class as usize]);
        let taken = Extent { start: found.start, len: found.len.min(want as u32) };
        self.list(Extent { start: taken.start + taken.len, len: found.len - taken.len });
        debug_assert!((1..=want as u32).contains(&taken.len), "a listed extent has a slot at least");
        Some(taken)
    }

    /// Releases an extent; it joins free neighbours in its chunk.
    pub(super) fn release(&mut self, extent: Extent) {
        if extent.len == 0 {
            return;
        }
        let Extent { mut start, mut len } = extent;
        debug_assert!(slot_of(start) + len as usize <= CHUNK_SLOTS, "an extent lies in one chunk");
        let after = start + len;
        if slot_of(after) != 0 && self.owner_word(after) & FREE != 0 {
            len += self.unlist(after).len;
        }
        if slot_of(start) != 0 && self.owner_word(start - 1) & FREE != 0 {
            let before = self.owner_word(start - 1) & !FREE;
            start -= before;
            len += self.unlist(start).len;
        }
        self.list(Extent { start, len });
    }

    /// Free extents in the order of their lists, for the audit.
    pub(super) fn free_extents(&self) -> impl Iterator<Item = Extent> + '_ {
        self.first_free.iter().flat_map(move |&first| {
            let next =
                move |&at: &u32| Some((self.hash(at) & u64::from(u32::MAX)) as u32).filter(|&n| n != NONE);
            core::iter::successors((first != NONE).then_some(first), next)
                .map(|start| Extent { start, len: self.owner_word(start) & !FREE })
        })
    }

    /// Whether so much is free, if in small pieces, that runs should be cut instead of adding memory.
    const fn is_loose(&self) -> bool {
        self.free * 8 > self.slots()
    }

    fn grow(&mut self) {
        let hashes = boxed::<u64>();
        let owners = boxed::<u32>();
        if self.chunks.len() == self.chunks.capacity() {
            self.chunks.reserve_exact(self.chunks.len() / 4 + 4);
        }
        self.chunks.push(Chunk { hashes, owners });
        let start = (self.chunks.len() - 1) << CHUNK_BITS;
        self.list(Extent { start: start as u32, len: CHUNK_SLOTS as u32 });
    }

    fn owner_word(&self, position: u32) -> u32 {
        self.chunks[chunk_of(position)].owners[slot_of(position)]
    }

    fn set_owner_word(&mut self, position: u32, word: u32) {
        self.chunks[chunk_of(position)].owners[slot_of(position)] = word;
    }

    /// Puts a free extent at the front of its list; the first hash word holds (previous, next).
    fn list(&mut self, extent: Extent) {
        if extent.len == 0 {
            return;
        }
        let class = class_of(extent.len as usize);
        let next = self.first_free[class];
        self.set_hash(extent.start, link(NONE, next));
        if next != NONE {
            self.set_hash(next, link(extent.start, self.hash(next) as u32));
        }
        self.first_free[class] = extent.start;
        self.stocked |= 1 << class;
        self.set_owner_word(extent.start, FREE | extent.len);
        self.set_owner_word(extent.start + extent.len - 1, FREE | extent.len);
        self.free += extent.len as usize;
        debug_assert!(self.free <= self.slots(), "more slots are free than there are");
    }

    fn unlist(&mut self, start: u32) -> Extent {
        debug_assert!(self.owner_word(start) & FREE != 0, "only free space is listed");
        let len = self.owner_word(start) & !FREE;
        let class = class_of(len as usize);
        let (previous, next) = ((self.hash(start) >> 32) as u32, self.hash(start) as u32);
        if next != NONE {
            self.set_hash(next, link(previous, self.hash(next) as u32));
        }
        if previous != NONE {
            self.set_hash(previous, link((self.hash(previous) >> 32) as u32, next));
        } else {
            self.first_free[class] = next;
            if next == NONE {
                self.stocked &= !(1 << class);
            }
        }
        self.free -= len as usize;
        Extent { start, len }
    }
}

fn boxed<T: Copy + Default>() -> Box<[T; CHUNK_SLOTS]> {
    let slots: Box<[T]> = vec![T::default(); CHUNK_SLOTS].into_boxed_slice();
    slots.try_into().unwrap_or_else(|_| unreachable!("the slice was made with that length"))
}

const fn link(previous: u32, next: u32) -> u64 {
    (previous as u64) << 32 | next as u64
}

const fn chunk_of(position: u32) -> usize {
    (position >> CHUNK_BITS) as usize
}

const fn slot_of(position: u32) -> usize {
    position as usize & (CHUNK_SLOTS - 1)
}

/// Sizes up to 32 have a class each, larger ones four classes to a doubling.
const fn class_of(size: usize) -> usize {
    if size <= EXACT_CLASSES {
        return size - 1;
    }
    let log2 = size.ilog2() as usize;
    let class = EXACT_CLASSES + (log2 - 5) * 4 + ((size >> (log2 - 2)) & 3);
    if class < CLASSES { class } else { CLASSES - 1 }
}

/// The first class whose every extent is at least `size` long (the last one, if none is).
const fn fitting_class(size: usize) -> usize {
    if size <= EXACT_CLASSES {
        return size - 1;
    }
    let class = class_of(size) + 1;
    if class < CLASSES { class } else { CLASSES - 1 }
}
