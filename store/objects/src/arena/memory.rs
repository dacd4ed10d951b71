//! Mapped memory, and the rooms in it that values live in.
//!
//! A [`ArenaMemory`] owns its slots: nothing else reads or writes them while it lives. An exclusive holder may write
//! (`&mut`), shared holders (`&`) only read. The borrow checker keeps readers and writers apart.
#![allow(unsafe_code, reason = "maps memory and lends slices of it; each block is argued")]

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use super::PAGE_BYTES;
use super::classes::classes_of;
use super::slabs::{Extent, Slabs};

/// A private mapping of zeroes.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: `base` points to memory that this struct owns until it is dropped; it has no affinity to a thread.
unsafe impl Send for Mapping {}
// SAFETY: a shared `Mapping` gives no access by itself; slices are made by rooms, whose ranges are disjoint.
unsafe impl Sync for Mapping {}

impl Mapping {
    #[cfg(not(miri))]
    pub(super) fn new(bytes: usize) -> io::Result<Self> {
        use rustix::mm::{Advice, MapFlags, ProtFlags};
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a fresh anonymous mapping at an address that the kernel chooses touches no other memory.
        let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, access, flags) }?;
        // SAFETY: the range is ours and mapped. Advice that the kernel does not take changes nothing.
        let _ = unsafe { rustix::mm::madvise(base, bytes, Advice::LinuxHugepage) };
        let base = NonNull::new(base.cast()).expect("a mapping is never at address zero");
        Ok(Self { base, bytes })
    }

    #[cfg(miri)]
    pub(super) fn new(bytes: usize) -> io::Result<Self> {
        let layout = std::alloc::Layout::from_size_align(bytes, 64).map_err(io::Error::other)?;
        // SAFETY: the layout is of more than zero bytes, for an arena has at least one page.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) });
        Ok(Self { base: base.ok_or(io::ErrorKind::OutOfMemory)?, bytes })
    }

    /// Has the kernel find memory for a range of it. Concurrent writes to the range are allowed.
    #[cfg(not(miri))]
    pub(super) fn populate(&self, start: usize, bytes: usize) -> io::Result<()> {
        let from = self.at(start, bytes).cast();
        // SAFETY: the range is in the mapping. The call changes no byte: it does what a first write does beside writing.
        let populate = || unsafe { rustix::mm::madvise(from, bytes, rustix::mm::Advice::LinuxPopulateWrite) };
        Ok(rustix::io::retry_on_intr(populate)?)
    }

    #[cfg(miri)]
    pub(super) fn populate(&self, _start: usize, _bytes: usize) -> io::Result<()> {
        Ok(())
    }

    /// Where it is.
    #[cfg(test)]
    pub(super) fn address(&self) -> usize {
        self.base.as_ptr().addr()
    }

    fn at(&self, start: usize, bytes: usize) -> *mut u8 {
        assert!(start + bytes <= self.bytes, "{bytes} bytes at {start} of an arena of {}", self.bytes);
        // SAFETY: inside the mapping, or one past its end when `bytes` is 0.
        unsafe { self.base.as_ptr().add(start) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and rooms hold the arena: none is left. It fails only for a range that
        // is not a mapping.
        #[cfg(not(miri))]
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        #[cfg(miri)]
        {
            let layout = std::alloc::Layout::from_size_align(self.bytes, 64).expect("checked when made");
            // SAFETY: allocated in `new` with this layout.
            unsafe { std::alloc::dealloc(self.base.as_ptr(), layout) };
        }
    }
}

/// The slots of a value; most values have one.
#[derive(Debug)]
enum Extents {
    One(Extent),
    Several(Box<[Extent]>),
}

/// The place of one value: zeroed or old bytes when taken, whole pages first.
#[derive(Debug)]
pub(crate) struct ArenaMemory {
    slabs: Arc<Slabs>,
    extents: Extents,
    bytes: u32,
}

impl ArenaMemory {
    /// Room for `bytes` of the entry `owner`.
    ///
    /// # Errors
    /// The class that neither the shard nor the pool has; what was taken is given back.
    pub(crate) fn take(slabs: &Arc<Slabs>, bytes: u32, owner: u32) -> Result<Self, u8> {
        let mut classes = classes_of(bytes as usize);
        let first = classes.next();
        let mut rest = classes.peekable();
        if let (Some(class), None) = (first, rest.peek()) {
            let extent = slabs.take(class, owner).ok_or(class)?;
            return Ok(Self { slabs: Arc::clone(slabs), extents: Extents::One(extent), bytes });
        }
        let mut taken = Vec::with_capacity(bytes as usize / PAGE_BYTES + 2);
        for class in first.into_iter().chain(rest) {
            let Some(extent) = slabs.take(class, owner) else {
                taken.iter().for_each(|extent| slabs.free(extent));
                return Err(class);
            };
            taken.push(extent);
        }
        let extents = Extents::Several(taken.into_boxed_slice());
        Ok(Self { slabs: Arc::clone(slabs), extents, bytes })
    }

    fn extents(&self) -> &[Extent] {
        match &self.extents {
            Extents::One(extent) => std::slice::from_ref(extent),
            Extents::Several(extents) => extents,
        }
    }

    /// Bytes of the value.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes as usize
    }

    /// Bytes of the slots that it has.
    pub(crate) fn slot_bytes(&self) -> u64 {
        self.extents().iter().map(|extent| extent.bytes() as u64).sum()
    }

    /// The entries that live in the page of its first slot, its own included.
    pub(crate) fn page_mates(&self) -> Vec<u32> {
        self.extents().first().map(|extent| self.slabs.page_mates(extent)).unwrap_or_default()
    }

    /// Bytes of metadata on the heap.
    pub(crate) fn metadata_bytes(&self) -> usize {
        let several = match &self.extents {
            Extents::One(_) => 0,
            Extents::Several(extents) => size_of_val(&**extents),
        };
        size_of::<Self>() + 16 + several
    }

    /// The value, in order.
    pub(crate) fn slices(&self) -> impl Iterator<Item = &[u8]> {
        let mut left = self.bytes();
        self.extents().iter().map(move |extent| {
            let bytes = extent.bytes().min(left);
            left -= bytes;
            let from = self.slabs.arena.map.at(extent.start(), bytes);
            // SAFETY: inside the mapping (checked by `at`), which lives as long as `slabs` and so as `self`,
            // and initialised, for it began as zeroes. The slot is this room's alone until it is dropped: the
            // slabs give a slot out once until it is freed, and only `drop` frees it. `&self` excludes the
            // `&mut self` that writing takes.
            unsafe { std::slice::from_raw_parts(from, bytes) }
        })
    }

    /// The value, in order, to be written.
    pub(crate) fn slices_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let this = &*self;
        let mut left = this.bytes();
        this.extents().iter().map(move |extent| {
            let bytes = extent.bytes().min(left);
            left -= bytes;
            let to = this.slabs.arena.map.at(extent.start(), bytes);
            // SAFETY: as in `slices`; `&mut self`, held for the life of the iterator's items, excludes every
            // other access, and the extents of one room do not overlap.
            unsafe { std::slice::from_raw_parts_mut(to, bytes) }
        })
    }
}

impl Drop for ArenaMemory {
    fn drop(&mut self) {
        for extent in self.extents() {
            self.slabs.free(extent);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Arena, CLASSES};
    use super::*;
    use baton_types::Rng;

    fn fill(room: &mut ArenaMemory, seed: u8) {
        room.slices_mut().for_each(|slice| slice.fill(seed));
    }

    fn holds(room: &ArenaMemory, seed: u8) -> bool {
        room.slices().map(<[u8]>::len).sum::<usize>() == room.bytes()
            && room.slices().all(|slice| slice.iter().all(|byte| *byte == seed))
    }

    #[test]
    fn rooms_never_overlap_and_everything_comes_back() {
        let arena = Arena::new(8).unwrap();
        let slabs = [Slabs::new(Arc::clone(&arena)), Slabs::new(Arc::clone(&arena))];
        let mut rng = Rng::new(5);
        let mut rooms: Vec<(ArenaMemory, u8)> = Vec::new();
        let rounds: u32 = if cfg!(miri) { 60 } else { 4_000 };
        for round in 0..rounds {
            let top = 1 << rng.below(21);
            let bytes = u32::try_from(rng.below(top) + 1).unwrap();
            let seed = u8::try_from(round % 251).unwrap();
            match ArenaMemory::take(&slabs[(round % 2) as usize], bytes, round) {
                Ok(mut room) => {
                    fill(&mut room, seed);
                    rooms.push((room, seed));
                }
                Err(class) => assert!(usize::from(class) < CLASSES.len()),
            }
            if rng.chance_permille(600) && !rooms.is_empty() {
                let at = usize::try_from(rng.below(rooms.len() as u64)).unwrap();
                let (room, seed) = rooms.swap_remove(at);
                assert!(holds(&room, seed), "somebody else wrote here");
            }
            if rooms.len() > 60 {
                rooms.drain(..30);
            }
        }
        assert!(rooms.iter().all(|(room, seed)| holds(room, *seed)));
        rooms.clear();
        assert_eq!((arena.used_bytes(), arena.free_pages()), (0, 8), "all pages are back");
    }

    #[test]
    fn memory_of_one_size_becomes_memory_of_another() {
        let arena = Arena::new(2).unwrap();
        let slabs = Slabs::new(Arc::clone(&arena));
        for bytes in [64, 4_096, 96 << 10, 1 << 20] {
            let mut rooms = Vec::new();
            while let Ok(room) = ArenaMemory::take(&slabs, bytes, 1) {
                rooms.push(room);
            }
            let stored = rooms.len() as u64 * u64::from(bytes);
            assert!(stored * 10 > arena.capacity_bytes() * 8, "{bytes}: {} rooms", rooms.len());
            assert_eq!(slabs.pages(), 2);
        }
        assert_eq!(slabs.pages(), 0);
    }

    #[test]
    fn what_does_not_fit_takes_nothing() {
        let arena = Arena::new(3).unwrap();
        let slabs = Slabs::new(Arc::clone(&arena));
        assert!(ArenaMemory::take(&slabs, 3 << 20, 1).is_ok());
        assert_eq!(ArenaMemory::take(&slabs, (3 << 20) + 1, 1).map(|_| ()), Err(0));
        assert_eq!(arena.used_bytes(), 0);
        let empty = ArenaMemory::take(&slabs, 0, 1).unwrap();
        assert_eq!((empty.slices().count(), arena.used_bytes()), (0, 0));
    }
}
