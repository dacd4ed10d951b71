//! Registered memory by address, and how many calls use it.
//!
//! A range ends in two steps. [`Ranges::retire`] closes it to new users; [`Range::wait_unused`] waits for those that
//! it has. Until [`Ranges::forget`] a retired range is still known, so that a caller that gave up waiting can try
//! again, and nothing else is registered over memory that is still in use.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A registered range, with what its owner keeps about it.
#[derive(Debug)]
pub(crate) struct Range<T> {
    kept: T,
    users: Mutex<u32>,
    left: Condvar,
}

impl<T> Deref for Range<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.kept
    }
}

/// Counts one user of a range for as long as it lives: the range is not unregistered meanwhile.
#[derive(Debug)]
pub(crate) struct Use<T>(Arc<Range<T>>);

impl<T> Use<T> {
    fn of(range: &Arc<Range<T>>) -> Self {
        *range.users() += 1;
        Self(range.clone())
    }

    /// Whether both use the same range.
    pub(crate) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl<T> Deref for Use<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0.kept
    }
}

impl<T> Drop for Use<T> {
    fn drop(&mut self) {
        let mut users = self.0.users();
        *users -= 1;
        if *users == 0 {
            self.0.left.notify_all();
        }
    }
}

impl<T> Range<T> {
    fn users(&self) -> MutexGuard<'_, u32> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nothing uses it; false when something still does after `limit`.
    pub(crate) fn wait_unused(&self, limit: Duration) -> bool {
        let waited = self.left.wait_timeout_while(self.users(), limit, |users| *users > 0);
        *waited.unwrap_or_else(PoisonError::into_inner).0 == 0
    }
}

/// How far a claimed range is.
enum Stage<T> {
    /// Its addresses are taken; nothing finds it yet.
    Claimed,
    /// Calls find it.
    Open(Arc<Range<T>>),
    /// New calls no longer find it, but a running one may still use it.
    Retired(Arc<Range<T>>),
}

struct Claim<T> {
    bytes: u64,
    stage: Stage<T>,
}

/// By first address; none overlap.
pub(crate) struct Ranges<T> {
    claims: Mutex<BTreeMap<u64, Claim<T>>>,
}

impl<T> Default for Ranges<T> {
    fn default() -> Self {
        Self { claims: Mutex::default() }
    }
}

impl<T> Ranges<T> {
    fn claims(&self) -> MutexGuard<'_, BTreeMap<u64, Claim<T>>> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the addresses free of others while the memory is made known.
    ///
    /// # Errors
    /// When they overlap a range, also one that is being unregistered.
    pub(crate) fn claim(&self, address: u64, bytes: u64) -> Result<(), String> {
        let mut claims = self.claims();
        let before = claims.range(..address.saturating_add(bytes)).next_back();
        if let Some((start, known)) = before.filter(|(start, known)| *start + known.bytes > address) {
            let leaving = matches!(known.stage, Stage::Retired(_));
            let why = if leaving { ", which is not unregistered yet" } else { "" };
            let known = known.bytes;
            return Err(format!("{bytes} bytes at {address:#x} overlap {known} at {start:#x}{why}"));
        }
        claims.insert(address, Claim { bytes, stage: Stage::Claimed });
        Ok(())
    }

    /// Opens a claimed range to calls.
    pub(crate) fn fill(&self, address: u64, kept: T) {
        let range = Arc::new(Range { kept, users: Mutex::new(0), left: Condvar::new() });
        if let Some(claim) = self.claims().get_mut(&address) {
            claim.stage = Stage::Open(range);
        }
    }

    /// Gives up a claim that was never filled.
    pub(crate) fn drop(&self, address: u64) {
        self.claims().remove(&address);
    }

    /// How many ranges there are.
    pub(crate) fn count(&self) -> usize {
        self.claims().len()
    }

    /// The length of the open range that starts there.
    pub(crate) fn bytes_at(&self, address: u64) -> Option<u64> {
        let claims = self.claims();
        claims.get(&address).filter(|claim| matches!(claim.stage, Stage::Open(_))).map(|claim| claim.bytes)
    }

    /// Closes the range that starts at `address` to new users. Finds one that was retired before, too.
    pub(crate) fn retire(&self, address: u64) -> Option<Arc<Range<T>>> {
        let mut claims = self.claims();
        let claim = claims.get_mut(&address)?;
        let (Stage::Open(range) | Stage::Retired(range)) = &claim.stage else { return None };
        let range = range.clone();
        claim.stage = Stage::Retired(range.clone());
        Some(range)
    }

    /// Frees the addresses of a retired range that nothing uses.
    pub(crate) fn forget(&self, address: u64, range: &Arc<Range<T>>) {
        let mut claims = self.claims();
        // Another thread may have forgotten it first, and the addresses may be registered anew since.
        let same = claims.get(&address).is_some_and(
            |claim| matches!(&claim.stage, Stage::Retired(retired) if Arc::ptr_eq(retired, range)),
        );
        if same {
            claims.remove(&address);
        }
    }

    /// The range that an address is in, kept from ending meanwhile; where in it, and how many bytes there are from
    /// there on.
    pub(crate) fn find(&self, address: u64) -> Option<(Use<T>, u64, u64)> {
        let claims = self.claims();
        let (start, claim) = claims.range(..=address).next_back()?;
        let Stage::Open(range) = &claim.stage else { return None };
        let at = address - start;
        let bytes = claim.bytes.checked_sub(at).filter(|bytes| *bytes > 0)?;
        // Counted under the lock under which a range is retired, so that the one who retires it sees every user.
        Some((Use::of(range), at, bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_found_in_their_range_only() {
        let ranges = Ranges::default();
        ranges.claim(1_000, 4_096).unwrap();
        assert!(ranges.find(1_000).is_none(), "not yet filled");
        assert!(ranges.retire(1_000).is_none(), "not yet filled");
        ranges.fill(1_000, ());
        ranges.claim(1_000 + 4_096, 10).unwrap();
        for (at, bytes) in [(1_000, 1), (999, 2), (5_095, 1), (0, 9_000)] {
            assert!(ranges.claim(at, bytes).unwrap_err().contains("overlap"), "{at}");
        }
        assert_eq!((ranges.count(), ranges.bytes_at(1_000), ranges.bytes_at(999)), (2, Some(4_096), None));
        let (_, at, bytes) = ranges.find(5_000).unwrap();
        assert_eq!((at, bytes), (4_000, 96));
        assert!(ranges.find(999).is_none() && ranges.find(9_000).is_none());
        assert!(ranges.retire(1_001).is_none());
    }

    #[test]
    fn a_range_in_use_is_waited_for() {
        let ranges = Ranges::default();
        ranges.claim(1, 8).unwrap();
        ranges.fill(1, ());
        let using = ranges.find(1).unwrap().0;
        let range = ranges.retire(1).unwrap();
        assert!(!range.wait_unused(Duration::from_millis(5)));
        let waiting = std::thread::spawn({
            let range = range.clone();
            move || range.wait_unused(Duration::from_secs(60))
        });
        drop(using);
        assert!(waiting.join().unwrap());
    }

    #[test]
    fn a_range_that_is_still_in_use_can_be_retired_again_and_nothing_takes_its_place() {
        let ranges = Ranges::default();
        ranges.claim(1, 8).unwrap();
        ranges.fill(1, ());
        let using = ranges.find(1).unwrap().0;
        let first = ranges.retire(1).unwrap();
        assert!(!first.wait_unused(Duration::ZERO));
        assert!(ranges.find(1).is_none(), "no new user");
        assert!(ranges.claim(4, 1).unwrap_err().contains("not unregistered yet"));
        let again = ranges.retire(1).expect("it can be tried again");
        drop(using);
        assert!(again.wait_unused(Duration::ZERO));
        ranges.forget(1, &again);
        assert!(ranges.retire(1).is_none());
        ranges.claim(1, 8).unwrap();
        ranges.fill(1, ());
        ranges.forget(1, &first);
        assert!(ranges.find(1).is_some(), "another range of the same address is not forgotten");
    }
}
