//! What an earlier life left: whole values stay, the blocks of others go.

use super::{Keeper, Object, Slab, keys};
use crate::index::Entry;

impl<S: Slab> Keeper<S> {
    /// Takes up what is whole, in the order in which it was written.
    pub(super) fn recover(&mut self) {
        let (entries, stale) = self.slab.recovered();
        let (mut heads, parts): (Vec<Entry>, Vec<Entry>) =
            entries.into_iter().partition(|entry| entry.parent.is_none());
        for entry in stale.iter().filter(|entry| entry.parent.is_none()) {
            self.next_nonce = self.next_nonce.max(keys::nonce(entry.key) + 1);
            self.leaves(entry.key.short().0, entry.place.slot);
        }
        heads.sort_unstable_by_key(|entry| entry.place.generation);
        for (Entry { key: head, place, .. }, tag) in heads.into_iter().zip(0..) {
            // The number goes on after the last one in use.
            self.next_nonce = self.next_nonce.max(keys::nonce(head) + 1);
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
