//! Invariants of a shard, and the size of its tables.

use super::{Shard, slot_bytes};
use crate::entry::{Entry, State};

impl Shard {
    /// Checks every entry against the tables. Returns the bytes of slots in use.
    ///
    /// # Panics
    /// When an invariant is broken.
    pub(crate) fn check(&self) -> u64 {
        let mut counts = [0usize; 5];
        let mut used_bytes = 0;
        for number in 0..self.entries.end() {
            let entry = self.entries.at(number);
            let [sealed, pending, leaving, linked, expiring] = &mut counts;
            *linked += usize::from(entry.is_linked());
            *expiring += usize::from(entry.expires_us != u64::MAX);
            match &entry.state {
                State::Vacant => assert!(entry.generation == 0 && !entry.is_linked(), "vacant is empty"),
                State::Pending(_) => *pending += 1,
                State::Leaving(_) => *leaving += 1,
                State::Sealed(room) => {
                    *sealed += 1;
                    assert_eq!(room.bytes(), entry.bytes as usize, "a value has its length");
                    assert_eq!(room.slot_bytes(), slot_bytes(entry.bytes), "a value has its slots");
                    let queued = entry.links.map(|link| link.linked);
                    assert_eq!(queued, [entry.hard_pins == 0; 2], "all but the pinned are in both queues");
                    self.check_found(number, entry);
                }
            }
            used_bytes += if entry.generation == 0 { 0 } else { slot_bytes(entry.bytes) };
            assert!(entry.generation < self.next_generation, "generations are given out in order");
        }
        let queued: usize = self.queues.iter().map(|queue| queue.len() as usize).sum();
        let of_tenants: usize = self.by_tenant.iter().map(|queue| queue.len() as usize).sum();
        assert_eq!(queued, of_tenants, "queues of classes and of tenants hold the same");
        let tables = [self.sealed.len(), self.pending.len(), self.leaving_live, queued, self.expiring];
        assert_eq!(counts, tables, "sealed, pending, leaving, linked, expiring");
        assert_eq!(counts[..3].iter().sum::<usize>(), self.entries.live(), "live entries");
        used_bytes
    }

    fn check_found(&self, number: u32, entry: &Entry) {
        let key = crate::Key { tenant: baton_types::TenantId(entry.tenant), bytes: &entry.key };
        assert_eq!(self.find(&key, entry.place), Some(number), "a sealed key leads to its entry");
    }

    /// Bytes of everything but values. Visits every entry.
    pub(crate) fn metadata_bytes(&self) -> usize {
        let tables = self.sealed.allocation_size() + self.pending.allocation_size();
        self.entries.metadata_bytes() + tables + self.slabs.metadata_bytes() + self.leaving.capacity() * 16
    }
}
