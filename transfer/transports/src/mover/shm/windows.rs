//! Which windows are open, in a page that peers read: a reader looks before and after it copies, and what it
//! copied counts only when the window was open both times.
#![allow(unsafe_code, reason = "atomics in memory that processes share; the block is argued")]

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::mover::{Fault, Location, Memory, Pages, WindowId};

/// Windows that peers may read at a time.
const SLOTS: u32 = 1 << 16;
const SHUT: u64 = 0;

/// The table, as its owner or a peer maps it.
pub(super) struct Table {
    memory: Arc<Memory>,
}

impl Table {
    fn create() -> io::Result<Self> {
        let bytes = usize::try_from(SLOTS).expect("a usize has 32 bits") * 8;
        Ok(Self { memory: Memory::shared(bytes, Pages::Ordinary, Location::Anywhere)? })
    }

    /// Maps that of a peer.
    pub(super) fn adopt(file: OwnedFd) -> io::Result<Self> {
        let bytes = usize::try_from(SLOTS).expect("a usize has 32 bits") * 8;
        Ok(Self { memory: Memory::foreign(file, bytes, Location::Anywhere)? })
    }

    fn slot(&self, slot: u32) -> &AtomicU64 {
        let at = self.memory.address(u64::from(slot % SLOTS) * 8, 8);
        // SAFETY: inside the mapping (`address` checks), which `self` keeps alive; aligned, for mappings
        // start at pages. All processes use it as an atomic only.
        unsafe { AtomicU64::from_ptr(at.cast()) }
    }

    /// Whether the window is open. After a copy, what was copied before is ordered before this look.
    pub(super) fn open(&self, slot: u32, window: u64) -> bool {
        fence(Ordering::SeqCst);
        let open = self.slot(slot).load(Ordering::SeqCst) == mark(window);
        fence(Ordering::SeqCst);
        open
    }
}

/// A window's mark is never that of a slot that is shut.
fn mark(window: u64) -> u64 {
    window.wrapping_add(1).max(1)
}

/// The table of this node, with its free slots.
pub(super) struct Windows {
    table: Table,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    slots: BTreeMap<u64, u32>,
    free: Vec<u32>,
    used: u32,
}

impl Windows {
    pub(super) fn create() -> io::Result<Self> {
        Ok(Self { table: Table::create()?, state: Mutex::default() })
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.table.memory.file().expect("made as a file")
    }

    /// Shows a window as open, and says in which slot.
    pub(super) fn show(&self, window: WindowId) -> Result<u32, Fault> {
        let mut state = self.state();
        if let Some(slot) = state.slots.get(&window.0) {
            return Ok(*slot);
        }
        let slot = match state.free.pop() {
            Some(slot) => slot,
            None if state.used < SLOTS => {
                state.used += 1;
                state.used - 1
            }
            None => return Err(Fault::Invalid(format!("{SLOTS} windows are read already; close some"))),
        };
        state.slots.insert(window.0, slot);
        self.table.slot(slot).store(mark(window.0), Ordering::SeqCst);
        Ok(slot)
    }

    /// Shuts a window: no read that ends from now on counts.
    pub(super) fn shut(&self, window: WindowId) {
        let mut state = self.state();
        if let Some(slot) = state.slots.remove(&window.0) {
            self.table.slot(slot).store(SHUT, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            state.free.push(slot);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no memory with a file")]
    fn a_slot_used_again_is_not_the_old_window() {
        let windows = Windows::create().unwrap();
        let theirs = Table::adopt(windows.file().try_clone_to_owned().unwrap()).unwrap();
        let slot = windows.show(WindowId(5)).unwrap();
        assert_eq!(windows.show(WindowId(5)), Ok(slot));
        assert!(theirs.open(slot, 5) && !theirs.open(slot, 6));
        windows.shut(WindowId(5));
        windows.shut(WindowId(5));
        assert!(!theirs.open(slot, 5));
        assert_eq!(windows.show(WindowId(6)), Ok(slot));
        assert!(theirs.open(slot, 6) && !theirs.open(slot, 5));
    }

    #[test]
    #[cfg_attr(miri, ignore = "65,536 windows take Miri too long")]
    fn a_full_table_says_so() {
        let windows = Windows::create().unwrap();
        for window in 0..u64::from(SLOTS) {
            windows.show(WindowId(window)).unwrap();
        }
        assert!(matches!(windows.show(WindowId(u64::MAX)), Err(Fault::Invalid(_))));
    }
}
