//! Registered memory by address.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_transports::mover::{Memory, WindowId};

/// A registered range.
#[derive(Debug)]
pub(super) struct Range {
    pub(super) memory: Arc<Memory>,
    pub(super) window: WindowId,
    users: Mutex<u32>,
    left: Condvar,
}

/// That a transfer from here uses a range.
#[derive(Debug)]
pub(super) struct Use(Arc<Range>);

impl Use {
    fn of(range: &Arc<Range>) -> Self {
        *range.users() += 1;
        Self(range.clone())
    }

    /// Whether both use the same range.
    pub(super) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Deref for Use {
    type Target = Range;

    fn deref(&self) -> &Range {
        &self.0
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        let mut users = self.0.users();
        *users -= 1;
        if *users == 0 {
            self.0.left.notify_all();
        }
    }
}

impl Range {
    fn users(&self) -> MutexGuard<'_, u32> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no transfer uses it; false when one still does after `limit`.
    pub(super) fn wait_unused(&self, limit: Duration) -> bool {
        let waited = self.left.wait_timeout_while(self.users(), limit, |users| *users > 0);
        *waited.unwrap_or_else(PoisonError::into_inner).0 == 0
    }
}

/// A claimed range, and the memory once it is known to all.
struct Claim {
    bytes: u64,
    range: Option<Arc<Range>>,
}

/// By first address; none overlap.
#[derive(Default)]
pub(super) struct Ranges {
    claims: Mutex<BTreeMap<u64, Claim>>,
}

impl Ranges {
    fn claims(&self) -> MutexGuard<'_, BTreeMap<u64, Claim>> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the addresses free of others while the memory is made known.
    pub(super) fn claim(&self, address: u64, bytes: u64) -> Result<(), String> {
        let mut claims = self.claims();
        let before = claims.range(..address.saturating_add(bytes)).next_back();
        if let Some((start, known)) = before.filter(|(start, known)| *start + known.bytes > address) {
            let known = known.bytes;
            return Err(format!("register: {bytes} bytes at {address:#x} overlap {known} at {start:#x}"));
        }
        claims.insert(address, Claim { bytes, range: None });
        Ok(())
    }

    pub(super) fn fill(&self, address: u64, memory: Arc<Memory>, window: WindowId) {
        let (users, left) = (Mutex::new(0), Condvar::new());
        if let Some(claim) = self.claims().get_mut(&address) {
            claim.range = Some(Arc::new(Range { memory, window, users, left }));
        }
    }

    pub(super) fn drop(&self, address: u64) {
        self.claims().remove(&address);
    }

    /// Takes off the range that starts at `address`.
    pub(super) fn take(&self, address: u64) -> Option<Arc<Range>> {
        let mut claims = self.claims();
        let range = claims.get(&address)?.range.clone()?;
        claims.remove(&address);
        Some(range)
    }

    /// The range that an address is in, kept from ending meanwhile; where in it, and how many bytes there are from
    /// there on.
    pub(super) fn find(&self, address: u64) -> Option<(Use, u64, u64)> {
        let claims = self.claims();
        let (start, claim) = claims.range(..=address).next_back()?;
        let (at, range) = (address - start, claim.range.as_ref()?);
        let bytes = claim.bytes.checked_sub(at).filter(|bytes| *bytes > 0)?;
        // Counted under the lock under which a range is taken off, so that whoever takes it off sees it.
        Some((Use::of(range), at, bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_transports::mover::Location;

    #[test]
    fn addresses_are_found_in_their_range_only() {
        let ranges = Ranges::default();
        let memory = Memory::private(4_096, Location::Anywhere).unwrap();
        ranges.claim(1_000, 4_096).unwrap();
        assert!(ranges.find(1_000).is_none(), "not yet filled");
        ranges.fill(1_000, memory.clone(), WindowId(1));
        ranges.claim(1_000 + 4_096, 10).unwrap();
        for (at, bytes) in [(1_000, 1), (999, 2), (5_095, 1), (0, 9_000)] {
            assert!(ranges.claim(at, bytes).unwrap_err().contains("overlap"), "{at}");
        }
        let (_, at, bytes) = ranges.find(5_000).unwrap();
        assert_eq!((at, bytes), (4_000, 96));
        assert!(ranges.find(999).is_none() && ranges.find(9_000).is_none());
        assert!(ranges.take(1_001).is_none() && ranges.take(1_000).is_some() && ranges.take(1_000).is_none());
    }

    #[test]
    fn a_range_in_use_is_waited_for() {
        let ranges = Ranges::default();
        ranges.claim(1, 8).unwrap();
        ranges.fill(1, Memory::private(8, Location::Anywhere).unwrap(), WindowId(1));
        let using = ranges.find(1).unwrap().0;
        let range = ranges.take(1).unwrap();
        assert!(!range.wait_unused(Duration::from_millis(5)));
        let waiting = std::thread::spawn({
            let range = range.clone();
            move || range.wait_unused(Duration::from_secs(60))
        });
        drop(using);
        assert!(waiting.join().unwrap());
    }
}
