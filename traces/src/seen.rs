//! Sets and maps of block ids, made to stay small for tens of millions of rows.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

use crate::prompt::mix;
use crate::record::SYNTHETIC_ID_BASE;

/// Hashes a block id (or a page of them) in a few instructions.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |state, byte| mix(state, u64::from(*byte)));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = mix(self.0, value);
    }
}

/// A map keyed by block ids.
pub(crate) type IdMap<V> = HashMap<u64, V, BuildHasherDefault<IdHasher>>;

const PAGE_BITS: u32 = 16;
const PAGE_WORDS: usize = 1 << (PAGE_BITS - 6);
const DENSE_IDS: u64 = 1 << 32;
/// Copies of a trace (see the scale module) number their ids from multiples of this.
const COPY_IDS: u64 = 1 << 40;
const DENSE_IDS_OF_COPY: u64 = 1 << 24;

/// Whether ids near this one are likely to be in use too. A hash rarely looks like that.
fn is_dense(id: u64) -> bool {
    let of_copy = id < 2 * SYNTHETIC_ID_BASE && id % COPY_IDS < DENSE_IDS_OF_COPY;
    id < DENSE_IDS || (SYNTHETIC_ID_BASE..SYNTHETIC_ID_BASE + DENSE_IDS).contains(&id) || of_copy
}

/// Ids seen so far: a bit each where ids are small numbers given out in order (as trace files have
/// them), an entry of a hash set each where they are hashes.
#[derive(Debug, Default)]
pub(crate) struct SeenIds {
    pages: IdMap<Box<[u64; PAGE_WORDS]>>,
    sparse: HashSet<u64, BuildHasherDefault<IdHasher>>,
    count: u64,
}

impl SeenIds {
    /// Remembers `id`; true where it is new.
    pub(crate) fn insert(&mut self, id: u64) -> bool {
        let dense = is_dense(id);
        let new = if dense {
            let page = self.pages.entry(id >> PAGE_BITS).or_insert_with(|| Box::new([0; PAGE_WORDS]));
            let at = (id & ((1 << PAGE_BITS) - 1)) as usize;
            let mask = 1u64 << (at & 63);
            let new = page[at >> 6] & mask == 0;
            page[at >> 6] |= mask;
            new
        } else {
            self.sparse.insert(id)
        };
        self.count += u64::from(new);
        new
    }

    /// Distinct ids remembered.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Memory in use, near enough to plan by.
    pub(crate) fn bytes(&self) -> u64 {
        let pages = self.pages.len() * (PAGE_WORDS * 8 + 16) + self.pages.capacity() * 17;
        (pages + self.sparse.capacity() * 9) as u64
    }
}

/// A map that forgets: it holds the ids used among the last `most` to `2 * most` distinct ones.
#[derive(Debug)]
pub(crate) struct RecentIds<V> {
    young: IdMap<V>,
    old: IdMap<V>,
    most: usize,
    forgotten: bool,
}

impl<V: Copy> RecentIds<V> {
    pub(crate) fn new(most: usize) -> Self {
        Self { young: IdMap::default(), old: IdMap::default(), most: most.max(1), forgotten: false }
    }

    /// The value of `id`; makes it recent.
    pub(crate) fn get(&mut self, id: u64) -> Option<V> {
        if let Some(value) = self.young.get(&id) {
            return Some(*value);
        }
        let value = self.old.remove(&id)?;
        self.put(id, value);
        Some(value)
    }

    pub(crate) fn put(&mut self, id: u64, value: V) {
        if self.young.len() >= self.most && !self.young.contains_key(&id) {
            self.forgotten |= !self.old.is_empty();
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(id, value);
    }

    /// Whether anything was ever forgotten.
    pub(crate) fn has_forgotten(&self) -> bool {
        self.forgotten
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn seen_ids_are_a_set(ids in proptest::collection::vec(
            prop_oneof![0u64..200, Just(u64::MAX), SYNTHETIC_ID_BASE..SYNTHETIC_ID_BASE + 90, any::<u64>()], 0..300)) {
            let (mut seen, mut naive) = (SeenIds::default(), HashSet::new());
            for id in ids {
                prop_assert_eq!(seen.insert(id), naive.insert(id));
            }
            prop_assert_eq!(seen.count(), naive.len() as u64);
        }

        #[test]
        fn recent_ids_never_lose_the_last_ones_used(ids in proptest::collection::vec(0u64..60, 1..200), most in 1usize..20) {
            let mut recent = RecentIds::new(most);
            for (at, &id) in ids.iter().enumerate() {
                let mut last: Vec<u64> = Vec::new();
                for &earlier in ids[..at].iter().rev() {
                    if last.len() < most && !last.contains(&earlier) {
                        last.push(earlier);
                    }
                }
                let known = recent.get(id);
                if last.contains(&id) {
                    prop_assert_eq!(known, Some(id * 2));
                }
                recent.put(id, id * 2);
                prop_assert!(recent.young.len() + recent.old.len() <= 2 * most);
            }
        }
    }

    #[test]
    fn dense_ids_cost_about_a_bit() {
        let mut seen = SeenIds::default();
        (0..1_000_000).for_each(|id| assert!(seen.insert(id)));
        assert!(seen.bytes() < 200_000, "{} bytes", seen.bytes());
    }
}
