//! Runs: stretches of a chain that the same instances hold in the same tiers.

use alloc::vec::Vec;

use baton_types::{BlockHash, InstanceId, Tier};

use super::arena::Extent;

/// A run's name: its place in the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RunId(pub(super) u32);

/// One instance and the tiers it holds a run in, in one word that sorts by instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Holder(u32);

impl Holder {
    const TIERS: u32 = 0b111;

    /// `instance`, in no tier yet.
    pub(super) const fn new(instance: InstanceId) -> Self {
        Self(instance.0 << 3)
    }

    /// The same holder, in `tier` also. `tier` must be local.
    pub(super) const fn with(self, tier: Tier) -> Self {
        Self(self.0 | 1 << tier.index())
    }

    /// The same holder, without `tier`.
    pub(super) const fn without(self, tier: Tier) -> Self {
        Self(self.0 & !(1 << tier.index()))
    }

    /// True when in `tier`.
    pub(super) const fn is_in(self, tier: Tier) -> bool {
        self.0 & (1 << tier.index()) != 0
    }

    /// True when in no tier.
    pub(super) const fn is_nowhere(self) -> bool {
        self.0 & Self::TIERS == 0
    }

    /// Position in [`Tier::LOCAL`] of the fastest tier; 3 when in none.
    #[inline]
    pub(super) const fn fastest(self) -> usize {
        (self.0 & Self::TIERS | 0b1000).trailing_zeros() as usize
    }

    /// The instance.
    #[inline]
    pub(super) const fn instance(self) -> InstanceId {
        InstanceId(self.0 >> 3)
    }
}

const FEW: usize = 6;

/// The holders of a run, sorted by instance; a handful live in the run itself.
#[derive(Clone, Debug)]
pub(super) enum Holders {
    Few { len: u8, list: [Holder; FEW] },
    Many(Vec<Holder>),
}

impl Holders {
    /// No holder.
    pub(super) const NOBODY: Self = Self::Few { len: 0, list: [Holder(0); FEW] };

    /// One holder.
    pub(super) const fn one(holder: Holder) -> Self {
        let mut list = [Holder(0); FEW];
        list[0] = holder;
        Self::Few { len: 1, list }
    }

    #[inline]
    pub(super) fn as_slice(&self) -> &[Holder] {
        match self {
            Self::Few { len, list } => &list[..usize::from(*len).min(FEW)],
            Self::Many(list) => list,
        }
    }

    /// What `instance` holds; in no tier where it is not listed.
    pub(super) fn get(&self, instance: InstanceId) -> Holder {
        match self.find(instance) {
            Ok(at) => self.as_slice()[at],
            Err(_) => Holder::new(instance),
        }
    }

    /// Replaces the entry of the holder's instance, or removes it when the holder is in no tier.
    pub(super) fn set(&mut self, holder: Holder) {
        match (self.find(holder.instance()), holder.is_nowhere()) {
            (Ok(at), false) => self.as_mut_slice()[at] = holder,
            (Ok(at), true) => self.take_off(at),
            (Err(at), false) => self.put_in(at, holder),
            (Err(_), true) => {}
        }
    }

    /// Heap bytes, exactly.
    pub(super) const fn heap_bytes(&self) -> usize {
        match self {
            Self::Few { .. } => 0,
            Self::Many(list) => list.capacity() * size_of::<Holder>(),
        }
    }

    fn find(&self, instance: InstanceId) -> Result<usize, usize> {
        self.as_slice().binary_search_by_key(&instance, |holder| holder.instance())
    }

    fn as_mut_slice(&mut self) -> &mut [Holder] {
        match self {
            Self::Few { len, list } => &mut list[..usize::from(*len)],
            Self::Many(list) => list,
        }
    }

    fn put_in(&mut self, at: usize, holder: Holder) {
        match self {
            Self::Few { len, list } if usize::from(*len) < FEW => {
                list.copy_within(at..usize::from(*len), at + 1);
                list[at] = holder;
                *len += 1;
            }
            Self::Few { list, .. } => {
                let mut many = Vec::with_capacity(FEW * 2);
                many.extend_from_slice(&list[..at]);
                many.push(holder);
                many.extend_from_slice(&list[at..]);
                *self = Self::Many(many);
            }
            Self::Many(list) => {
                if list.len() == list.capacity() {
                    list.reserve_exact(list.len() / 2);
                }
                list.insert(at, holder);
            }
        }
    }

    fn take_off(&mut self, at: usize) {
        match self {
            Self::Few { len, list } => {
                list.copy_within(at + 1..usize::from(*len), at);
                *len -= 1;
            }
            Self::Many(list) => {
                list.remove(at);
                if list.len() <= FEW / 2 {
                    let mut few = [Holder(0); FEW];
                    few[..list.len()].copy_from_slice(list);
                    *self = Self::Few { len: list.len() as u8, list: few };
                }
            }
        }
    }
}

impl PartialEq for Holders {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

/// The knowledge about the block before a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// There is no such block: the run starts a chain.
    Root,
    /// It is the run's `parent`.
    Below,
    /// It was reported in two ways, so some instance misnames blocks. The run joins no other.
    Disputed,
}

/// A run: one cache line, holding all that a lookup needs unless it ends inside the run.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Run {
    /// The first block's hash.
    pub(super) first: u64,
    /// The last block's hash.
    pub(super) last: u64,
    /// The hash of the block before the first, where there is one.
    parent: u64,
    origin: Origin,
    /// Position of the first block; in a vacant run, the next vacant one.
    pub(super) start: u32,
    /// Blocks; zero only while vacant.
    pub(super) len: u16,
    /// Slots owned, of which the first `len` are in use.
    pub(super) reserved: u16,
    /// The holders of all of it, and their tiers.
    pub(super) holders: Holders,
}

impl Run {
    /// A run over the front of `extent`.
    pub(super) fn new(extent: Extent, hashes: &[u64], parent: Option<u64>, holders: Holders) -> Self {
        let (first, last) = (hashes[0], hashes[hashes.len() - 1]);
        Self {
            first,
            last,
            parent: parent.unwrap_or(0),
            origin: if parent.is_some() { Origin::Below } else { Origin::Root },
            start: extent.start,
            len: hashes.len() as u16,
            reserved: extent.len as u16,
            holders,
        }
    }

    /// True when the block of hash `before` is the one before the first.
    pub(super) fn is_below(&self, before: u64) -> bool {
        self.origin == Origin::Below && self.parent == before
    }

    /// The hash of the block before the first, where there is one and it is undisputed.
    pub(super) fn known_parent(&self) -> Option<BlockHash> {
        (self.origin == Origin::Below).then_some(BlockHash(self.parent))
    }

    /// Compares a report about the block before the first with the known one, and notes a difference.
    pub(super) fn check_parent(&mut self, parent: Option<u64>) {
        let agrees = parent.map_or(self.origin == Origin::Root, |parent| self.is_below(parent));
        if !agrees {
            self.origin = Origin::Disputed;
        }
    }

    /// The blocks' slots.
    #[inline]
    pub(super) fn blocks(&self) -> Extent {
        Extent { start: self.start, len: u32::from(self.len) }
    }

    /// All slots owned.
    pub(super) fn extent(&self) -> Extent {
        Extent { start: self.start, len: u32::from(self.reserved) }
    }
}

const SLAB_BITS: u32 = 9;
/// Heap bytes by which the slab grows.
pub(super) const SLAB_BYTES: usize = size_of::<Run>() << SLAB_BITS;
const NONE: u32 = u32::MAX;

/// All runs, in pieces that never move.
#[derive(Debug)]
pub(super) struct Runs {
    pieces: Vec<Vec<Run>>,
    first_vacant: u32,
    live: usize,
    holder_bytes: usize,
}

impl Runs {
    pub(super) const fn new() -> Self {
        Self { pieces: Vec::new(), first_vacant: NONE, live: 0, holder_bytes: 0 }
    }

    /// Runs in use.
    pub(super) const fn len(&self) -> usize {
        self.live
    }

    /// Heap bytes, exactly.
    pub(super) const fn memory_bytes(&self) -> usize {
        self.pieces.len() * SLAB_BYTES + self.pieces.capacity() * size_of::<Vec<Run>>() + self.holder_bytes
    }

    #[inline]
    pub(super) fn get(&self, id: RunId) -> &Run {
        &self.pieces[(id.0 >> SLAB_BITS) as usize][id.0 as usize & ((1 << SLAB_BITS) - 1)]
    }

    pub(super) fn get_mut(&mut self, id: RunId) -> &mut Run {
        &mut self.pieces[(id.0 >> SLAB_BITS) as usize][id.0 as usize & ((1 << SLAB_BITS) - 1)]
    }

    /// Adds a run.
    pub(super) fn add(&mut self, run: Run) -> RunId {
        self.live += 1;
        self.holder_bytes += run.holders.heap_bytes();
        if self.first_vacant != NONE {
            let id = RunId(self.first_vacant);
            self.first_vacant = self.get(id).start;
            *self.get_mut(id) = run;
            return id;
        }
        if self.pieces.last().is_none_or(|piece| piece.len() == 1 << SLAB_BITS) {
            if self.pieces.len() == self.pieces.capacity() {
                self.pieces.reserve_exact(self.pieces.len() / 4 + 4);
            }
            self.pieces.push(Vec::with_capacity(1 << SLAB_BITS));
        }
        let piece = self.pieces.len() - 1;
        self.pieces[piece].push(run);
        RunId((piece << SLAB_BITS | (self.pieces[piece].len() - 1)) as u32)
    }

    /// Removes a run; its id may be given to another one later.
    pub(super) fn remove(&mut self, id: RunId) {
        debug_assert!(self.live(id).is_some(), "{id:?} is given up twice");
        self.live -= 1;
        self.holder_bytes -= self.get(id).holders.heap_bytes();
        let vacant = self.first_vacant;
        let run = self.get_mut(id);
        (run.len, run.reserved, run.start) = (0, 0, vacant);
        run.holders = Holders::NOBODY;
        self.first_vacant = id.0;
    }

    /// Sets the holder entry of one instance; true while the run has a holder.
    pub(super) fn set_holder(&mut self, id: RunId, holder: Holder) -> bool {
        debug_assert!(self.live(id).is_some(), "{id:?} is held after its end");
        let holders = &mut self.get_mut(id).holders;
        let before = holders.heap_bytes();
        holders.set(holder);
        let (after, held) = (holders.heap_bytes(), !holders.as_slice().is_empty());
        self.holder_bytes = self.holder_bytes + after - before;
        held
    }

    /// The run, unless vacant or never used.
    pub(super) fn live(&self, id: RunId) -> Option<&Run> {
        let piece = self.pieces.get((id.0 >> SLAB_BITS) as usize)?;
        piece.get(id.0 as usize & ((1 << SLAB_BITS) - 1)).filter(|run| run.len > 0)
    }

    /// Every run in use, by id.
    pub(super) fn iter(&self) -> impl Iterator<Item = (RunId, &Run)> {
        let ids = (0..self.pieces.len()).flat_map(|piece| {
            (0..self.pieces[piece].len()).map(move |at| RunId((piece << SLAB_BITS | at) as u32))
        });
        ids.filter_map(|id| self.live(id).map(|run| (id, run)))
    }
}
