//! The one mapping that holds all values, cut into pages that shards take and give back.
//!
//! A page belongs to one size class of one shard while anything lives in it, and returns to the common pool
//! when its last slot is freed. So memory of one size can always become memory of another, and nothing grows.

mod ahead;
mod classes;
mod memory;
mod slabs;

use parking_lot::{Condvar, Mutex};
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ahead::PrefaultThread;
use memory::Mapping;

pub(crate) use classes::{CLASSES, classes_of};
pub(crate) use memory::ArenaMemory;
pub(crate) use slabs::Slabs;

/// Bytes of a page: the largest extent of a value.
pub(crate) const PAGE_BYTES: usize = 1 << 20;

/// All pages, and the free ones.
#[derive(Debug)]
pub(crate) struct Arena {
    map: Mapping,
    free: Mutex<Vec<u32>>,
    pages: u32,
    /// The thread that touches pages before their first use, if there is one.
    ahead: OnceLock<PrefaultThread>,
    /// Bytes of slots in use.
    used_bytes: AtomicU64,
    /// Threads that wait for room.
    waiting: AtomicUsize,
    freed: (Mutex<u64>, Condvar),
}

impl Arena {
    /// Maps `pages` pages; they are touched shortly before they are used, or when they are.
    ///
    /// # Errors
    /// When the system does not give the address range.
    pub(crate) fn new(pages: u32) -> io::Result<Arc<Self>> {
        let map = Mapping::new(pages as usize * PAGE_BYTES)?;
        let arena = Arc::new(Self {
            map,
            free: Mutex::new((0..pages).rev().collect()),
            pages,
            ahead: OnceLock::new(),
            used_bytes: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            freed: (Mutex::new(0), Condvar::new()),
        });
        ahead::start(&arena);
        Ok(arena)
    }

    pub(crate) fn capacity_bytes(&self) -> u64 {
        u64::from(self.pages) * PAGE_BYTES as u64
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Pages that no class has.
    pub(crate) fn free_pages(&self) -> usize {
        self.free.lock().len()
    }

    /// Pages that a class has.
    fn taken_pages(&self) -> u32 {
        self.taken_beside(self.free_pages())
    }

    fn taken_beside(&self, free: usize) -> u32 {
        self.pages - u32::try_from(free).expect("pages are counted in 32 bits")
    }

    fn take_page(&self) -> Option<u32> {
        let (page, free) = {
            let mut pages = self.free.lock();
            (pages.pop(), pages.len())
        };
        if let Some(ahead) = self.ahead.get() {
            ahead.taken(self.taken_beside(free), self.pages);
        }
        page
    }

    fn give_page(&self, page: u32) {
        self.free.lock().push(page);
    }

    fn count_taken(&self, bytes: usize) {
        self.used_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn count_freed(&self, bytes: usize) {
        self.used_bytes.fetch_sub(bytes as u64, Ordering::Relaxed);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            *self.freed.0.lock() += 1;
            self.freed.1.notify_all();
        }
    }

    /// Waits until something was freed, or `at_most`.
    pub(crate) fn wait_for_room(&self, at_most: Duration) {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut turn = self.freed.0.lock();
        // A wake-up between the caller's check and this wait is lost, so waits are short.
        self.freed.1.wait_for(&mut turn, at_most);
        drop(turn);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}
