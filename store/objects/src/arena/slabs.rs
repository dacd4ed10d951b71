//! Slots of one shard: which page is of which class, which slot is free, who lives in it.
//!
//! Taking and freeing are O(1). The lock is a leaf: nothing else is locked under it but the pool of pages.

use parking_lot::Mutex;
use std::sync::Arc;

use super::classes::CLASSES;
use super::{Arena, PAGE_BYTES};

/// No entry: a free slot.
pub(super) const NOBODY: u32 = u32::MAX;

/// An owned slot. It is neither copied nor made elsewhere: two live ones never overlap.
#[derive(Debug)]
pub(super) struct Extent {
    /// Page of the arena.
    page: u32,
    /// Place of the page in this shard's list.
    local: u32,
    slot: u16,
    class: u8,
}

impl Extent {
    /// First byte in the arena.
    pub(super) fn start(&self) -> usize {
        self.page as usize * PAGE_BYTES + usize::from(self.slot) * self.bytes()
    }

    /// Bytes of the slot.
    pub(super) fn bytes(&self) -> usize {
        CLASSES[usize::from(self.class)]
    }
}

/// One page of a class.
#[derive(Debug)]
struct Page {
    page: u32,
    class: u8,
    live: u32,
    /// Freed slots; those from `owners.len()` on were never used.
    free: Vec<u16>,
    /// The entry in each slot ever used.
    owners: Vec<u32>,
    /// Place in the list of pages with room, if there.
    with_room: Option<u32>,
}

#[derive(Debug, Default)]
struct State {
    pages: Vec<Option<Page>>,
    vacant: Vec<u32>,
    /// Pages with a free slot, by class.
    with_room: [Vec<u32>; CLASSES.len()],
}

/// The slots of one shard.
#[derive(Debug)]
pub(crate) struct Slabs {
    pub(super) arena: Arc<Arena>,
    state: Mutex<State>,
}

fn slots_of(class: u8) -> usize {
    PAGE_BYTES / CLASSES[usize::from(class)]
}

impl Slabs {
    pub(crate) fn new(arena: Arc<Arena>) -> Arc<Self> {
        Arc::new(Self { arena, state: Mutex::default() })
    }

    /// A free slot of `class` for `owner`; none when this shard has none and the pool has no page.
    pub(super) fn take(&self, class: u8, owner: u32) -> Option<Extent> {
        let extent = self.state.lock().take(class, owner, &self.arena)?;
        self.arena.count_taken(extent.bytes());
        Some(extent)
    }

    /// Frees a slot; a page that is empty then goes back to the pool.
    pub(super) fn free(&self, extent: &Extent) {
        self.state.lock().free(extent, &self.arena);
        self.arena.count_freed(extent.bytes());
    }

    /// The entries that live in the page of `extent`, its own included.
    pub(super) fn page_mates(&self, extent: &Extent) -> Vec<u32> {
        let state = self.state.lock();
        let page = state.pages[extent.local as usize].as_ref().expect("a page with a live slot is there");
        page.owners.iter().copied().filter(|owner| *owner != NOBODY).collect()
    }

    /// Pages that this shard has.
    #[cfg(test)]
    pub(crate) fn pages(&self) -> usize {
        self.state.lock().pages.iter().flatten().count()
    }

    /// Bytes that the tables take.
    pub(crate) fn metadata_bytes(&self) -> usize {
        let state = self.state.lock();
        let tables = state.pages.iter().flatten().map(|p| p.free.capacity() * 2 + p.owners.capacity() * 4);
        tables.sum::<usize>() + state.pages.capacity() * size_of::<Option<Page>>()
    }
}

impl State {
    fn take(&mut self, class: u8, owner: u32, arena: &Arena) -> Option<Extent> {
        let local = match self.with_room[usize::from(class)].last() {
            Some(local) => *local,
            None => self.open(class, arena)?,
        };
        let page = self.pages[local as usize].as_mut().expect("a listed page is there");
        let slot = match page.free.pop() {
            Some(slot) => slot,
            None => {
                page.owners.push(NOBODY);
                u16::try_from(page.owners.len() - 1).expect("at most 16384 slots")
            }
        };
        page.owners[usize::from(slot)] = owner;
        page.live += 1;
        let extent = Extent { page: page.page, local, slot, class };
        if page.live as usize == slots_of(class) {
            self.unlist(local);
        }
        Some(extent)
    }

    fn open(&mut self, class: u8, arena: &Arena) -> Option<u32> {
        let page = arena.take_page()?;
        let fresh = Page { page, class, live: 0, free: Vec::new(), owners: Vec::new(), with_room: None };
        let local = match self.vacant.pop() {
            Some(local) => local,
            None => {
                self.pages.push(None);
                u32::try_from(self.pages.len() - 1).expect("pages are counted in 32 bits")
            }
        };
        self.pages[local as usize] = Some(fresh);
        self.list(local);
        Some(local)
    }

    fn free(&mut self, extent: &Extent, arena: &Arena) {
        let page = self.pages[extent.local as usize].as_mut().expect("a page with a live slot is there");
        assert!(page.owners[usize::from(extent.slot)] != NOBODY, "a slot is freed once");
        page.owners[usize::from(extent.slot)] = NOBODY;
        page.free.push(extent.slot);
        page.live -= 1;
        if page.with_room.is_none() {
            self.list(extent.local);
        }
        let page = self.pages[extent.local as usize].as_ref().expect("looked at above");
        if page.live == 0 {
            let number = page.page;
            self.unlist(extent.local);
            self.pages[extent.local as usize] = None;
            self.vacant.push(extent.local);
            arena.give_page(number);
        }
    }

    fn list(&mut self, local: u32) {
        let page = self.pages[local as usize].as_mut().expect("a listed page is there");
        let list = &mut self.with_room[usize::from(page.class)];
        page.with_room = Some(u32::try_from(list.len()).expect("pages are counted in 32 bits"));
        list.push(local);
    }

    fn unlist(&mut self, local: u32) {
        let page = self.pages[local as usize].as_mut().expect("a listed page is there");
        let (Some(at), class) = (page.with_room.take(), page.class) else { return };
        let list = &mut self.with_room[usize::from(class)];
        list.swap_remove(at as usize);
        if let Some(moved) = list.get(at as usize) {
            self.pages[*moved as usize].as_mut().expect("a listed page is there").with_room = Some(at);
        }
    }
}
