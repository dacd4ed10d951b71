//! Changes of the index: runs are created, cut where holders differ and joined where they no longer do.

use baton_types::{BlockHash, InstanceId, Tier};

use super::PrefixIndex;
use super::arena::{CHUNK_BYTES, CHUNK_SLOTS, Extent};
use super::run::{Holder, Holders, Run, RunId};
use super::table::Entry;

/// An insert of at most this many blocks behind a run's end looks like decoding, and more will follow.
const DECODED_BLOCKS: usize = 2;
/// Fewest and most slots reserved for them.
const SET_ASIDE: (usize, usize) = (8, 64);

/// Blocks whose buckets are read ahead of their use.
pub(super) const WARMED: usize = 32;

/// The progress of an insert.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Step {
    /// Blocks that this step handled; zero means that there is no room.
    pub(super) blocks: usize,
    /// Those of them that are new to the instance.
    pub(super) added: usize,
    /// The block before the next one, if known.
    pub(super) last: Option<u64>,
    /// Its position, if it has one.
    pub(super) last_at: Option<u32>,
}

impl Step {
    /// Nothing done yet, below `parent`.
    pub(super) fn start(parent: Option<BlockHash>, parent_at: Option<u32>) -> Self {
        Self { blocks: 0, added: 0, last: parent.map(|hash| hash.0), last_at: parent_at }
    }

    fn to(blocks: &[BlockHash], added: usize, start: u32) -> Self {
        let last = blocks.last().map(|hash| hash.0);
        Self { blocks: blocks.len(), added, last, last_at: Some(start + blocks.len() as u32 - 1) }
    }
}

/// A place for new blocks.
struct Site {
    extent: Extent,
    /// The run that owns the extent already.
    behind: Option<RunId>,
    /// Slots to reserve even if they are not filled now.
    kept: u32,
}

impl PrefixIndex {
    /// Makes the instance a holder of the known blocks at `position` that `rest` starts with.
    pub(super) fn join(
        &mut self,
        position: u32,
        rest: &[BlockHash],
        before: Step,
        (instance, tier): (InstanceId, Tier),
    ) -> Step {
        let (id, offset) = self.reach(position, before.last);
        let run = self.runs.get(id);
        let known = &self.arena.hashes(run.blocks())[offset..];
        let blocks = known.iter().zip(rest).take_while(|(known, hash)| **known == hash.0).count();
        let holder = run.holders.get(instance);
        if holder.is_in(tier) {
            return Step::to(&rest[..blocks], 0, position);
        }
        if self.room_bytes() == 0 {
            return Step::default();
        }
        let id = self.isolate(id, offset, offset + blocks);
        let mut added = 0;
        if holder.is_nowhere() {
            added = blocks;
            self.holdings.link(instance, id, &self.runs);
            self.holdings.add_blocks(instance, blocks);
        }
        self.runs.set_holder(id, holder.with(tier));
        self.merge_around(id);
        Step::to(&rest[..blocks], added, position)
    }

    /// The run and offset of a block that, by the caller, follows `before`.
    ///
    /// A run must never contain the first block of another chain. Where the run contradicts `before` it is cut, and
    /// stays cut.
    fn reach(&mut self, position: u32, before: Option<u64>) -> (RunId, usize) {
        let id = self.owner(position);
        let run = self.runs.get_mut(id);
        let offset = (position - run.start) as usize;
        if offset == 0 {
            run.check_parent(before);
            return (id, 0);
        }
        if before == Some(self.arena.hash(position - 1)) {
            return (id, offset);
        }
        let tail = self.split(id, offset as u16);
        self.runs.get_mut(tail).check_parent(before);
        (tail, 0)
    }

    /// Adds blocks without a holder, as far as `rest` starts with such and room lasts.
    pub(super) fn append(
        &mut self,
        rest: &[BlockHash],
        before: Step,
        (instance, tier): (InstanceId, Tier),
    ) -> Step {
        let holder = Holder::new(instance).with(tier);
        let room_bytes = self.room_bytes();
        if room_bytes == 0 {
            return Step::default();
        }
        let Some(site) = self.site(rest.len(), before, holder, room_bytes) else {
            return Step::default();
        };
        let filled = self.fill(site.extent, rest, self.room_bytes());
        match site.behind {
            Some(id) => self.lengthen(id, filled as u16),
            None => self.settle(&site, filled as u32, before, holder),
        }
        if filled == 0 {
            return Step::default();
        }
        self.holdings.add_blocks(instance, filled);
        Step::to(&rest[..filled], filled, site.extent.start)
    }

    /// Finds room for `want` blocks: behind the run that they continue, if it has reserved slots.
    fn site(&mut self, want: usize, before: Step, holder: Holder, room_bytes: usize) -> Option<Site> {
        let mut set_aside = 0;
        if let (Some(last), Some(position)) = (before.last, before.last_at) {
            let id = self.owner(position);
            let run = self.runs.get(id);
            if run.last == last && run.holders.as_slice() == [holder] {
                if run.reserved > run.len {
                    let start = run.start + u32::from(run.len);
                    let len = u32::from(run.reserved - run.len);
                    return Some(Site { extent: Extent { start, len }, behind: Some(id), kept: len });
                }
                if want <= DECODED_BLOCKS {
                    set_aside = (usize::from(run.len) * 2).clamp(SET_ASIDE.0, SET_ASIDE.1);
                }
            }
        }
        let may_grow = room_bytes > CHUNK_BYTES;
        let extent = self.arena.take(want.max(set_aside).min(CHUNK_SLOTS), may_grow)?;
        Some(Site { extent, behind: None, kept: set_aside as u32 })
    }

    /// Writes and registers new blocks; stops at the first known one or where room ends.
    fn fill(&mut self, extent: Extent, rest: &[BlockHash], room_bytes: usize) -> usize {
        let mut left_bytes = room_bytes;
        for (filled, hash) in rest.iter().enumerate().take(extent.len as usize) {
            if filled > 0 && filled.is_multiple_of(WARMED) {
                self.blocks.warm(rest[filled..].iter().take(WARMED).map(|hash| hash.0));
            }
            let position = extent.start + filled as u32;
            let before = self.blocks.memory_bytes();
            let arena = &self.arena;
            // Slots of this extent that no run owns yet count as known too: a repeated hash.
            let entry = self.blocks.entry(hash.0, position, left_bytes, |at| arena.hash(at) == hash.0);
            if entry != Entry::Added {
                return filled;
            }
            left_bytes = left_bytes.saturating_sub(self.blocks.memory_bytes() - before);
            self.arena.set_hash(position, hash.0);
        }
        rest.len().min(extent.len as usize)
    }

    fn lengthen(&mut self, id: RunId, blocks: u16) {
        let run = self.runs.get_mut(id);
        run.len += blocks;
        run.last = self.arena.hash(run.start + u32::from(run.len) - 1);
    }

    /// Makes a run of the filled front of a site and releases the rest.
    fn settle(&mut self, site: &Site, filled: u32, before: Step, holder: Holder) {
        let Extent { start, len } = site.extent;
        let kept = if filled == 0 { 0 } else { filled.max(site.kept.min(len)) };
        if filled > 0 {
            let extent = Extent { start, len: kept };
            self.add_run(extent, filled, before.last, Holders::one(holder));
        }
        self.arena.release(Extent { start: start + kept, len: len - kept });
    }

    /// Makes the blocks of `hashes` from `position` on, in chain order or against it, a run of their own; returns their
    /// number.
    pub(super) fn carve(&mut self, position: u32, hashes: &[BlockHash]) -> (RunId, usize) {
        let id = self.owner(position);
        let run = self.runs.get(id);
        let offset = (position - run.start) as usize;
        let known = self.arena.hashes(run.blocks());
        let agree = |pair: &(&u64, &BlockHash)| *pair.0 == pair.1.0;
        let onward = known[offset..].iter().zip(hashes).take_while(agree).count();
        let back = known[..=offset].iter().rev().zip(hashes).take_while(agree).count();
        if onward >= back {
            (self.isolate(id, offset, offset + onward), onward)
        } else {
            (self.isolate(id, offset + 1 - back, offset + 1), back)
        }
    }

    /// Sets a run's holder to fewer tiers; the run ends with its last holder.
    pub(super) fn withdraw(&mut self, id: RunId, holder: Holder) {
        if holder.is_nowhere() {
            let blocks = usize::from(self.runs.get(id).len);
            self.holdings.unlink(holder.instance());
            self.holdings.drop_blocks(holder.instance(), blocks);
        }
        if self.runs.set_holder(id, holder) {
            self.merge_around(id);
        } else {
            self.drop_run(id);
        }
    }

    fn drop_run(&mut self, id: RunId) {
        let run = self.runs.get(id);
        let (first, blocks, extent) = (run.first, run.blocks(), run.extent());
        for (position, &hash) in (blocks.start..).zip(self.arena.hashes(blocks)) {
            let offset = (position - blocks.start) as usize;
            if offset.is_multiple_of(WARMED) {
                let ahead = &self.arena.hashes(blocks)[offset..];
                self.blocks.warm(ahead.iter().take(WARMED).copied());
            }
            let known = self.blocks.remove(hash, position);
            debug_assert!(known, "every block of a run is in the table");
        }
        self.heads.remove(first, id.0);
        self.arena.release(extent);
        self.runs.remove(id);
    }

    /// Cuts a run so that its blocks `from..to` are a run of their own.
    fn isolate(&mut self, id: RunId, from: usize, to: usize) -> RunId {
        debug_assert!(from < to && to <= usize::from(self.runs.get(id).len), "a piece of {id:?} itself");
        if to < usize::from(self.runs.get(id).len) {
            self.split(id, to as u16);
        }
        if from == 0 { id } else { self.split(id, from as u16) }
    }

    /// Cuts a run in two before block `at`, which is inside it; gives the second part.
    fn split(&mut self, id: RunId, at: u16) -> RunId {
        let run = self.runs.get_mut(id);
        debug_assert!(0 < at && at < run.len, "{id:?} is cut inside");
        let start = run.start + u32::from(at);
        let extent = Extent { start, len: u32::from(run.reserved - at) };
        let len = u32::from(run.len - at);
        (run.len, run.reserved) = (at, at);
        run.last = self.arena.hash(start - 1);
        let (parent, holders) = (run.last, run.holders.clone());
        self.add_run(extent, len, Some(parent), holders)
    }

    fn add_run(&mut self, extent: Extent, len: u32, parent: Option<u64>, holders: Holders) -> RunId {
        let hashes = self.arena.hashes(Extent { start: extent.start, len });
        let first = hashes[0];
        let id = self.runs.add(Run::new(extent, hashes, parent, holders));
        self.arena.own(extent, id);
        self.heads.add(first, id.0);
        for holder in self.runs.get(id).holders.as_slice() {
            self.holdings.link(holder.instance(), id, &self.runs);
        }
        id
    }

    /// Joins a run to its neighbours in the arena where they are one chain with equal holders.
    fn merge_around(&mut self, id: RunId) {
        let extent = self.runs.get(id).extent();
        if let Some(after) = self.arena.owner_after(extent).filter(|&after| self.is_continued(id, after)) {
            self.absorb(id, after);
        }
        let before = self.arena.owner_before(extent.start);
        if let Some(before) = before.filter(|&before| self.is_continued(before, id)) {
            self.absorb(before, id);
        }
    }

    fn is_continued(&self, left: RunId, right: RunId) -> bool {
        let (left, right) = (self.runs.get(left), self.runs.get(right));
        left.len == left.reserved && right.is_below(left.last) && left.holders == right.holders
    }

    fn absorb(&mut self, left: RunId, right: RunId) {
        debug_assert!(
            left != right && self.is_continued(left, right),
            "{left:?} does not go on in {right:?}"
        );
        let run = self.runs.get(right);
        let (first, last, len, extent) = (run.first, run.last, run.len, run.extent());
        for holder in run.holders.as_slice() {
            self.holdings.unlink(holder.instance());
        }
        self.heads.remove(first, right.0);
        self.runs.remove(right);
        self.arena.own(extent, left);
        let run = self.runs.get_mut(left);
        run.last = last;
        run.len += len;
        run.reserved += extent.len as u16;
    }
}
