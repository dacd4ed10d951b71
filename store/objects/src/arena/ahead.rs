//! Memory that is touched before it is needed.
//!
//! A put into pages that were never touched waits while the kernel finds and clears them, which takes longer than the
//! copy of the value. A thread does that ahead of the puts, by a part of the arena: what a store never comes to use
//! is not taken from the machine, and the start waits for nothing.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Weak};

use super::{Arena, PAGE_BYTES};

/// How far ahead of the pages in use pages are touched: a part of the arena, and a most.
const AHEAD_PART: u32 = 16;
const AHEAD_MAX_PAGES: u32 = 1024;
/// Pages of one call, so that the arena can end soon.
const STEP_PAGES: u32 = 16;

/// A thread that touches memory before puts need it.
#[derive(Debug)]
pub(super) struct PrefaultThread {
    /// Pages to have ahead of those in use.
    pages: u32,
    /// Pages from the arena's start on that were touched. The pool gives out what came back first, and then fresh
    /// pages in order: so fresh pages are never before these.
    touched: AtomicU32,
    /// Ends the thread when it is dropped.
    wake: SyncSender<()>,
}

impl PrefaultThread {
    /// So many pages are in use now.
    pub(super) fn taken(&self, taken: u32, all: u32) {
        let touched = self.touched.load(Ordering::Relaxed);
        if touched < all && touched < taken + self.pages.div_ceil(2) {
            // One that is awake already looks again before it sleeps.
            let _ = self.wake.try_send(());
        }
    }
}

/// Starts the thread, unless the arena is too small for one. Where the system has no thread left, or no such call
/// (Linux before 5.14), pages are touched when they are first used.
pub(super) fn start(arena: &Arc<Arena>) {
    let pages = (arena.pages / AHEAD_PART).min(AHEAD_MAX_PAGES);
    if pages == 0 || cfg!(miri) {
        return;
    }
    let (wake, woken) = sync_channel(1);
    let weak = Arc::downgrade(arena);
    let thread = std::thread::Builder::new().name("objects-touch".into());
    if thread.spawn(move || run(&weak, &woken)).is_ok() {
        let ahead = PrefaultThread { pages, touched: AtomicU32::new(0), wake };
        arena.ahead.get_or_init(|| ahead).taken(0, arena.pages);
    }
}

fn run(arena: &Weak<Arena>, woken: &Receiver<()>) {
    while woken.recv().is_ok() {
        // The arena is held for one call at a time: it may end in between.
        while let Some(arena) = arena.upgrade() {
            match touch(&arena) {
                Ok(true) => {}
                Ok(false) => break,
                Err(_) => return,
            }
        }
    }
}

/// Touches some pages. False when there are enough.
fn touch(arena: &Arena) -> std::io::Result<bool> {
    let Some(ahead) = arena.ahead.get() else { return Ok(false) };
    let from = ahead.touched.load(Ordering::Relaxed);
    let wanted = (arena.taken_pages() + ahead.pages).min(arena.pages);
    let pages = wanted.saturating_sub(from).min(STEP_PAGES);
    if pages == 0 {
        return Ok(false);
    }
    arena.map.populate(from as usize * PAGE_BYTES, pages as usize * PAGE_BYTES)?;
    ahead.touched.store(from + pages, Ordering::Relaxed);
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::super::Slabs;
    use super::super::memory::ArenaMemory;
    use super::*;
    use std::os::unix::fs::FileExt as _;
    use std::time::{Duration, Instant};

    /// Whether the kernel has memory behind the last bytes of a page.
    fn is_there(arena: &Arena, page: usize) -> bool {
        let address = arena.map.address() + (page + 1) * PAGE_BYTES - 1;
        let mut entry = [0; 8];
        let map = std::fs::File::open("/proc/self/pagemap").unwrap();
        map.read_exact_at(&mut entry, (address / 4096 * 8) as u64).unwrap();
        u64::from_le_bytes(entry) >> 63 == 1
    }

    fn until(what: &str, mut is_so: impl FnMut() -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !is_so() {
            assert!(Instant::now() < end, "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "the kernel's page map is not Miri's")]
    fn pages_are_there_before_they_are_used_and_not_long_before() {
        let arena = Arena::new(256).unwrap();
        until("a sixteenth is there at the start", || is_there(&arena, 15));
        assert!(!is_there(&arena, 40), "the rest is not");
        let slabs = Slabs::new(Arc::clone(&arena));
        let mut rooms: Vec<ArenaMemory> =
            (0..100).map(|n| ArenaMemory::take(&slabs, 1 << 20, n).unwrap()).collect();
        // The thread sleeps while half of what it is to have is there.
        until("what comes next is there, though nobody wrote yet", || is_there(&arena, 107));
        assert!(!is_there(&arena, 140));
        // Freed pages are used again first, so no further page comes from the system.
        for round in 0..300 {
            rooms.pop();
            rooms.push(ArenaMemory::take(&slabs, 1 << 20, round).unwrap());
        }
        assert!(!is_there(&arena, 140));
        rooms.extend((100..256).map(|n| ArenaMemory::take(&slabs, 1 << 20, n).unwrap()));
        until("and at last all", || is_there(&arena, 255));
    }

    #[test]
    fn the_thread_ends_with_the_arena() {
        let arena = Arena::new(64).unwrap();
        let weak = Arc::downgrade(&arena);
        drop(arena);
        until("nothing holds it", || weak.strong_count() == 0);
        let (wake, woken) = sync_channel(1);
        wake.try_send(()).unwrap();
        drop(wake);
        run(&weak, &woken);
    }
}
