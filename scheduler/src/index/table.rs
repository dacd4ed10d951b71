//! A hash table from a block's hash to a 32-bit place, grown one small shard at a time.
//!
//! Entries live in buckets of one cache line, so nearly every search reads one line. An entry
//! keeps 32 bits of the hash: enough to find its bucket again, so that neither growth nor removal
//! reads anything else. The caller confirms a candidate by the full hash, which it stores once,
//! at the place. A growth moves one shard, a thousandth of the blocks, so no insert waits long.

use alloc::boxed::Box;
use alloc::vec;

const BUCKET: usize = 8;
const EMPTY: u32 = u32::MAX;

/// What [`Table::entry`] found or did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// The hash was there, at this place.
    Found(u32),
    /// The hash was absent and now has the offered place.
    Added,
    /// The hash is absent, and its shard may not grow as far as it would have to.
    Full,
}

/// Where a hash belongs: its shard, and the part of it that an entry keeps.
#[derive(Clone, Copy)]
struct HomeBucket {
    shard: usize,
    tag: u32,
}

/// Eight entries, filled from the front.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Bucket {
    tags: [u32; BUCKET],
    places: [u32; BUCKET],
}

/// Buckets where an entry is in its home bucket or, where that is full, the next with room.
#[derive(Debug, Default)]
struct Shard {
    buckets: Box<[Bucket]>,
    used: usize,
}

/// The table. Places must stay below `u32::MAX`.
#[derive(Debug)]
pub(super) struct Table {
    shards: Box<[Shard]>,
    shard_bits: u32,
    used: usize,
    buckets: usize,
}

impl Table {
    /// An empty table of `1 << shard_bits` shards; `shard_bits` is 1 to 16.
    pub(super) fn new(shard_bits: u32) -> Self {
        let shards = (0..1usize << shard_bits).map(|_| Shard::default()).collect();
        Self { shards, shard_bits, used: 0, buckets: 0 }
    }

    /// Entries held.
    pub(super) const fn len(&self) -> usize {
        self.used
    }

    /// Heap bytes, exactly.
    pub(super) const fn memory_bytes(&self) -> usize {
        self.buckets * size_of::<Bucket>() + self.shards.len() * size_of::<Shard>()
    }

    /// The place of `hash`, if one of the candidates `is` it.
    #[inline]
    pub(super) fn find(&self, hash: u64, is: impl Fn(u32) -> bool) -> Option<u32> {
        let home = self.home(hash);
        self.shards[home.shard].find(home.tag, is).ok()
    }

    /// Prefetches the buckets of some hashes, so that their cache misses overlap instead of following each other. It
    /// changes nothing but the time of what follows.
    #[inline]
    pub(super) fn warm(&self, hashes: impl Iterator<Item = u64>) {
        let mut seen = 0;
        for hash in hashes {
            let home = self.home(hash);
            let shard = &self.shards[home.shard];
            seen ^= shard.buckets.get(shard.home(home.tag)).map_or(0, |bucket| bucket.places[0]);
        }
        core::hint::black_box(seen);
    }

    /// Finds `hash` or gives it `offered`, growing its shard by at most `room_bytes`.
    #[inline]
    pub(super) fn entry(
        &mut self,
        hash: u64,
        offered: u32,
        room_bytes: usize,
        is: impl Fn(u32) -> bool,
    ) -> Entry {
        let home = self.home(hash);
        let shard = &mut self.shards[home.shard];
        let at = match shard.find(home.tag, is) {
            Ok(found) => return Entry::Found(found),
            Err(at) => at,
        };
        if shard.is_full() {
            return if self.grow_and_add(home, offered, room_bytes) { Entry::Added } else { Entry::Full };
        }
        shard.buckets[at].push(home.tag, offered);
        shard.used += 1;
        self.used += 1;
        Entry::Added
    }

    /// Adds a hash known to be absent, however much the table has to grow.
    pub(super) fn add(&mut self, hash: u64, offered: u32) {
        let home = self.home(hash);
        let shard = &mut self.shards[home.shard];
        if shard.is_full() {
            self.grow_and_add(home, offered, usize::MAX);
            return;
        }
        shard.place(home.tag, offered);
        self.used += 1;
    }

    /// Removes the entry of `hash` at `place`; false if there is none.
    pub(super) fn remove(&mut self, hash: u64, place: u32) -> bool {
        let home = self.home(hash);
        let shard = &mut self.shards[home.shard];
        if !shard.take(home.tag, place) {
            return false;
        }
        self.used -= 1;
        let buckets = buckets_for(shard.used);
        if shard.used * 4 < shard.buckets.len() * BUCKET && buckets < shard.buckets.len() {
            self.buckets = self.buckets + buckets - shard.buckets.len();
            shard.resize(buckets);
        }
        true
    }

    /// Checks the counters against the entries.
    pub(super) fn audit(&self) -> bool {
        let used = |shard: &Shard| shard.buckets.iter().map(Bucket::len).sum::<usize>();
        self.shards.iter().all(|shard| used(shard) == shard.used)
            && self.shards.iter().map(|shard| shard.used).sum::<usize>() == self.used
            && self.shards.iter().map(|shard| shard.buckets.len()).sum::<usize>() == self.buckets
    }

    #[cold]
    fn grow_and_add(&mut self, home: HomeBucket, offered: u32, room_bytes: usize) -> bool {
        let shard = &mut self.shards[home.shard];
        let buckets = buckets_for(shard.used + 1);
        if buckets * size_of::<Bucket>() > room_bytes {
            return false;
        }
        self.buckets = self.buckets + buckets - shard.buckets.len();
        shard.resize(buckets);
        shard.place(home.tag, offered);
        self.used += 1;
        true
    }

    /// Engines may name blocks by weak hashes (counters even), so the bits are spread here.
    #[inline]
    fn home(&self, hash: u64) -> HomeBucket {
        let spread = (hash ^ (hash >> 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let shard = (spread >> (64 - self.shard_bits)) as usize;
        HomeBucket { shard, tag: ((spread << self.shard_bits) >> 32) as u32 }
    }
}

impl Bucket {
    const EMPTY: Self = Self { tags: [0; BUCKET], places: [EMPTY; BUCKET] };

    /// A bit for each entry with that tag; vacant ones may show among them.
    #[inline]
    fn equal(&self, tag: u32) -> u32 {
        let bit = |at: usize| if self.tags[at] == tag { 1 << at } else { 0 };
        core::array::from_fn::<u32, BUCKET, _>(bit).iter().sum()
    }

    #[inline]
    const fn is_full(&self) -> bool {
        self.places[BUCKET - 1] != EMPTY
    }

    #[inline]
    fn len(&self) -> usize {
        let vacant: u32 = self.places.iter().map(|&place| u32::from(place == EMPTY)).sum();
        BUCKET - vacant as usize
    }

    #[inline]
    fn push(&mut self, tag: u32, place: u32) {
        let at = self.len() & (BUCKET - 1);
        self.tags[at] = tag;
        self.places[at] = place;
    }

    /// Removes an entry; the last one takes its place.
    fn pull(&mut self, at: usize) {
        let last = self.len() - 1;
        self.tags[at] = self.tags[last];
        self.places[at] = self.places[last];
        self.tags[last] = 0;
        self.places[last] = EMPTY;
    }
}

impl Shard {
    /// The place, or the bucket where the search ended: a new entry goes there.
    #[inline]
    fn find(&self, tag: u32, is: impl Fn(u32) -> bool) -> Result<u32, usize> {
        let mut at = self.home(tag);
        while let Some(bucket) = self.buckets.get(at) {
            let mut equal = bucket.equal(tag);
            while equal != 0 {
                let place = bucket.places[equal.trailing_zeros() as usize & (BUCKET - 1)];
                if place != EMPTY && is(place) {
                    return Ok(place);
                }
                equal &= equal - 1;
            }
            if !bucket.is_full() {
                break;
            }
            at = self.next(at);
        }
        Err(at)
    }

    /// The home bucket of a tag: the tag scaled to the shard, which may have any size.
    #[inline]
    fn home(&self, tag: u32) -> usize {
        ((u64::from(tag) * self.buckets.len() as u64) >> 32) as usize
    }

    #[inline]
    fn next(&self, at: usize) -> usize {
        if at + 1 == self.buckets.len() { 0 } else { at + 1 }
    }

    /// True when one more would pass seven eighths.
    #[inline]
    fn is_full(&self) -> bool {
        (self.used + 1) * 8 > self.buckets.len() * (BUCKET * 7)
    }

    #[inline]
    fn place(&mut self, tag: u32, place: u32) {
        let mut at = self.home(tag);
        while self.buckets[at].is_full() {
            at = self.next(at);
        }
        self.buckets[at].push(tag, place);
        self.used += 1;
    }

    /// Removes an entry and closes the gap that it leaves in a full bucket, so that searches
    /// still end at the first bucket with room and never meet a tombstone.
    fn take(&mut self, tag: u32, place: u32) -> bool {
        let Some((mut gap, slot)) = self.locate(tag, place) else { return false };
        let mut was_full = self.buckets[gap].is_full();
        self.buckets[gap].pull(slot);
        self.used -= 1;
        let mut at = gap;
        while was_full {
            at = self.next(at);
            if at == gap {
                break;
            }
            was_full = self.buckets[at].is_full();
            let bucket = self.buckets[at];
            let strays = |slot: &usize| {
                let home = self.home(bucket.tags[*slot]);
                self.distance(home, at) >= self.distance(gap, at)
            };
            if let Some(slot) = (0..bucket.len()).find(strays) {
                self.buckets[gap].push(bucket.tags[slot], bucket.places[slot]);
                self.buckets[at].pull(slot);
                gap = at;
            }
        }
        true
    }

    fn locate(&self, tag: u32, place: u32) -> Option<(usize, usize)> {
        let mut at = self.home(tag);
        loop {
            let bucket = self.buckets.get(at)?;
            if let Some(slot) = bucket.places.iter().position(|&other| other == place) {
                return Some((at, slot));
            }
            if !bucket.is_full() {
                return None;
            }
            at = self.next(at);
        }
    }

    /// Buckets from one to another, going up and around.
    fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.buckets.len() - from }
    }

    fn resize(&mut self, buckets: usize) {
        let fresh = vec![Bucket::EMPTY; buckets].into_boxed_slice();
        let old = core::mem::replace(&mut self.buckets, fresh);
        // Tags ascend with their homes, so this reads and writes both in nearly straight lines.
        let mut filled = vec![0u8; buckets];
        let entries = old.iter().flat_map(|bucket| bucket.tags.iter().zip(&bucket.places));
        for (&tag, &place) in entries.filter(|entry| *entry.1 != EMPTY) {
            let mut at = self.home(tag);
            while usize::from(filled[at]) == BUCKET {
                at = self.next(at);
            }
            let slot = usize::from(filled[at]) & (BUCKET - 1);
            self.buckets[at].tags[slot] = tag;
            self.buckets[at].places[slot] = place;
            filled[at] += 1;
        }
    }
}

/// Buckets for `used` entries at about 55 in a hundred, so that growth is by three fifths.
fn buckets_for(used: usize) -> usize {
    (used * 91).div_ceil(50 * BUCKET)
}
