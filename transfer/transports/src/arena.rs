//! Ranges of one registered memory, lent for as long as a hand-off needs them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::mover::Memory;

/// Ranges start at multiples of this: a page, for devices and for huge copies.
const ALIGN_BYTES: u64 = 4096;

/// A memory from which ranges are lent, first fit. Neighbours that are free become one again, so nothing is
/// lost to fragments once they are given back.
#[derive(Debug)]
pub(crate) struct Arena {
    memory: Arc<Memory>,
    /// Free ranges: start and length.
    free: Mutex<BTreeMap<u64, u64>>,
}

/// A range on loan; it goes back when dropped.
#[derive(Debug)]
pub(crate) struct Loan {
    arena: Arc<Arena>,
    at: u64,
    bytes: u64,
}

impl Arena {
    pub(crate) fn new(memory: Arc<Memory>) -> Arc<Self> {
        let whole = memory.bytes() as u64 / ALIGN_BYTES * ALIGN_BYTES;
        Arc::new(Self { memory, free: Mutex::new(BTreeMap::from([(0, whole)])) })
    }

    /// Room for `bytes`; none where no free range is so long.
    pub(crate) fn lend(self: &Arc<Self>, bytes: u64) -> Option<Loan> {
        let bytes = bytes.max(1).checked_next_multiple_of(ALIGN_BYTES)?;
        let mut free = self.free();
        let (at, length) =
            free.iter().map(|(at, length)| (*at, *length)).find(|(_, length)| *length >= bytes)?;
        free.remove(&at);
        if length > bytes {
            free.insert(at + bytes, length - bytes);
        }
        Some(Loan { arena: self.clone(), at, bytes })
    }

    /// Bytes that are free.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.free().values().sum()
    }

    /// Bytes on loan.
    pub(crate) fn lent_bytes(&self) -> u64 {
        let whole = self.memory.bytes() as u64 / ALIGN_BYTES * ALIGN_BYTES;
        whole - self.free_bytes()
    }

    fn free(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Loan {
    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.arena.memory
    }

    /// How long it is: at least as much as was asked for.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Its first byte in the memory.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        let mut free = self.arena.free();
        let (mut at, mut bytes) = (self.at, self.bytes);
        if let Some((&before, &length)) = free.range(..at).next_back()
            && before + length == at
        {
            free.remove(&before);
            (at, bytes) = (before, bytes + length);
        }
        if let Some(length) = free.remove(&(self.at + self.bytes)) {
            bytes += length;
        }
        free.insert(at, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mover::Location;
    use proptest::prelude::*;

    fn arena(pages: usize) -> Arc<Arena> {
        Arena::new(Memory::private(pages * 4096, Location::Anywhere).unwrap())
    }

    #[test]
    fn what_is_too_long_is_not_lent_and_what_comes_back_is_whole_again() {
        let arena = arena(4);
        assert!(arena.lend(4 * 4096 + 1).is_none() && arena.lend(u64::MAX).is_none());
        let loans: Vec<Loan> = (0..4).map(|_| arena.lend(1).unwrap()).collect();
        assert!(arena.lend(1).is_none());
        drop(loans);
        assert_eq!(arena.lend(4 * 4096).unwrap().at(), 0);
    }

    proptest! {
        /// Loans never overlap under any sequence of loans and returns, and all of the memory comes back.
        #[test]
        fn loans_do_not_overlap(steps in prop::collection::vec((0u64..30_000, 0usize..8), 1..200)) {
            let arena = arena(64);
            let mut out: Vec<Loan> = Vec::new();
            for (bytes, leave) in steps {
                if leave < 3 && !out.is_empty() {
                    out.swap_remove(leave % out.len());
                } else if let Some(loan) = arena.lend(bytes) {
                    let end = loan.at + loan.bytes;
                    prop_assert!(loan.bytes >= bytes && end <= 64 * 4096);
                    prop_assert!(out.iter().all(|other| end <= other.at || other.at + other.bytes <= loan.at));
                    out.push(loan);
                }
                let lent: u64 = out.iter().map(|loan| loan.bytes).sum();
                prop_assert_eq!(lent, arena.lent_bytes());
            }
            out.clear();
            prop_assert_eq!(arena.free().len(), 1);
        }
    }
}
