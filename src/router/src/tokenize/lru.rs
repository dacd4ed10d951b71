//! A cache bounded in bytes that drops what was not asked for the longest.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

const NONE: u32 = u32::MAX;

/// Keys are hashes already: their low half is taken as it is.
#[derive(Default)]
pub(crate) struct TakeHash(u64);

impl Hasher for TakeHash {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }
    fn write_u128(&mut self, value: u128) {
        self.0 = value as u64;
    }
}

struct Slot<V> {
    key: u128,
    value: V,
    weight_bytes: usize,
    newer: u32,
    older: u32,
}

/// Values by key, newest to oldest in a list threaded through the slots.
pub(crate) struct Lru<V> {
    slots: Vec<Slot<V>>,
    free: Vec<u32>,
    at: HashMap<u128, u32, BuildHasherDefault<TakeHash>>,
    newest: u32,
    oldest: u32,
    capacity_bytes: usize,
    used_bytes: usize,
}

impl<V: Clone + Default> Lru<V> {
    pub(crate) fn new(capacity_bytes: usize) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            at: HashMap::default(),
            newest: NONE,
            oldest: NONE,
            capacity_bytes,
            used_bytes: 0,
        }
    }

    /// The value, which becomes the newest.
    pub(crate) fn get(&mut self, key: u128) -> Option<V> {
        let at = *self.at.get(&key)?;
        self.unlink(at);
        self.link(at);
        Some(self.slots[at as usize].value.clone())
    }

    /// Inserts a value as the newest, in place of one with the same key, and evicts the oldest until all fit. A value
    /// of more than an eighth of the capacity is not kept.
    pub(crate) fn put(&mut self, key: u128, value: V, weight_bytes: usize) {
        if let Some(&at) = self.at.get(&key) {
            self.remove(at);
        }
        if weight_bytes > self.capacity_bytes / 8 {
            return;
        }
        while self.used_bytes + weight_bytes > self.capacity_bytes {
            self.remove(self.oldest);
        }
        let slot = Slot { key, value, weight_bytes, newer: NONE, older: NONE };
        let at = if let Some(at) = self.free.pop() {
            self.slots[at as usize] = slot;
            at
        } else {
            self.slots.push(slot);
            (self.slots.len() - 1) as u32
        };
        self.at.insert(key, at);
        self.used_bytes += weight_bytes;
        self.link(at);
    }

    fn remove(&mut self, at: u32) {
        self.unlink(at);
        let slot = &mut self.slots[at as usize];
        slot.value = V::default();
        self.used_bytes -= slot.weight_bytes;
        self.at.remove(&slot.key);
        self.free.push(at);
    }

    fn unlink(&mut self, at: u32) {
        let (newer, older) = (self.slots[at as usize].newer, self.slots[at as usize].older);
        match newer {
            NONE => self.newest = older,
            _ => self.slots[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            _ => self.slots[older as usize].newer = newer,
        }
    }

    fn link(&mut self, at: u32) {
        let before = self.newest;
        self.slots[at as usize].newer = NONE;
        self.slots[at as usize].older = before;
        match before {
            NONE => self.oldest = at,
            _ => self.slots[before as usize].newer = at,
        }
        self.newest = at;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_holds_what_a_list_sorted_by_use_holds(ops in proptest::collection::vec((0u128..12, any::<bool>(), 1usize..20), 0..200)) {
            let mut lru = Lru::new(80);
            // Oldest first.
            let mut list: Vec<(u128, usize)> = Vec::new();
            for (key, put, weight) in ops {
                let known = list.iter().position(|entry| entry.0 == key);
                if put {
                    known.map(|at| list.remove(at));
                    lru.put(key, weight, weight);
                    if weight <= 10 {
                        while list.iter().map(|entry| entry.1).sum::<usize>() + weight > 80 {
                            list.remove(0);
                        }
                        list.push((key, weight));
                    }
                } else {
                    let expected = known.map(|at| list.remove(at));
                    list.extend(expected);
                    prop_assert_eq!(lru.get(key), expected.map(|entry| entry.1));
                }
                prop_assert_eq!(lru.used_bytes, list.iter().map(|entry| entry.1).sum::<usize>());
                prop_assert!(lru.slots.len() <= 13, "slots are used again");
            }
        }
    }
}
