//! Recovers the values of an earlier life: whole values stay, and the blocks of others go.

use super::{BlobLogCore, Object, Slab, keys};
use crate::index::Entry;

impl<S: Slab> BlobLogCore<S> {
    /// Takes up what is whole, in the order in which it was written.
    pub(super) fn recover(&mut self) {
        let (entries, stale) = self.slab.recovered();
        let (mut heads, parts): (Vec<Entry>, Vec<Entry>) =
            entries.into_iter().partition(|entry| entry.parent.is_none());
        // Numbers go on after those of all that is left, and after the last write of it: they go round, and a new value
        // may not get the number of one of which a block is still on its way out.
        let all = || heads.iter().chain(&parts).chain(&stale);
        let last = all().map(|entry| entry.place.generation + 1).max().unwrap_or(0);
        let after = |entry: &Entry| keys::nonce_after(entry.parent.unwrap_or(entry.key), last);
        self.next_nonce = all().map(after).max().unwrap_or(0);
        for entry in stale.iter().filter(|entry| entry.parent.is_none()) {
            self.leaves(entry.key.short().0, entry.place.slot);
        }
        heads.sort_unstable_by_key(|entry| entry.place.generation);
        for (Entry { key: head, place, .. }, tag) in heads.into_iter().zip(0..) {
            let mut rest = 1..keys::parts(head, self.slab.block_bytes());
            if rest.all(|part| self.slab.place(keys::part(head, part)).is_some()) {
                let name = head.short().0;
                self.objects.insert(name, Object { head, tag, hit: false });
                self.order.push_back((name, tag));
            } else {
                self.stats.incomplete += 1;
                self.slab.remove(head);
                self.leaves(head.short().0, place.slot);
            }
        }
        self.stats.recovered = self.objects.len() as u64;
        for entry in parts {
            let is_of = |object: &Object| {
                Some(object.head) == entry.parent
                    && keys::part_number(entry.key) < keys::parts(object.head, self.slab.block_bytes())
            };
            let parent = entry.parent.map_or(0, |head| head.short().0);
            if !self.objects.get(&parent).is_some_and(is_of) {
                self.slab.remove(entry.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blob_log::{BlobLogEvent, Record, Source};
    use crate::disk::testing::FailingDisk;
    use crate::file::testing::on_disk;
    use crate::layout::Layout;
    use std::sync::Arc;

    struct Zeros;

    impl Source for Zeros {
        fn copy(&self, _: usize, into: &mut [u8]) {
            into.fill(0);
        }
    }

    #[test]
    fn numbers_go_on_after_those_in_use_also_when_they_have_gone_round() {
        let layout = Layout { block_bytes: 600, capacity: 40, fingerprint: 0 };
        for (first, used) in [(0, 3), ((1 << 24) - 1, 2), ((1 << 24) + 4, 7)] {
            let disk = Arc::new(FailingDisk::default());
            let mut core = BlobLogCore::new(on_disk(&disk, layout).unwrap());
            core.next_nonce = first;
            for name in 1..4 {
                core.put(Record { name, tag: name, header: vec![1], bytes: 1_000, source: Box::new(Zeros) });
            }
            let mut kept = 0;
            while kept < 3 {
                core.slab.wait_some();
                core.pump();
                while let Some(done) = core.next_done() {
                    assert!(matches!(done, BlobLogEvent::Kept(_)), "{done:?}");
                    kept += 1;
                }
            }
            drop(core);
            let core = BlobLogCore::new(on_disk(&disk, layout).unwrap());
            let next = core.next_nonce & 0xFF_FFFF;
            assert!(next >= used && next < used + 20, "{first}: {next}");
        }
    }
}
