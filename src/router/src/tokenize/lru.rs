//! A cache bounded in bytes that drops what was not asked for the longest.

use lru::LruCache;

/// Values by key, each with its bytes.
pub(crate) struct Lru<V> {
    held: LruCache<u128, (V, usize)>,
    capacity_bytes: usize,
    used_bytes: usize,
}

impl<V: Clone> Lru<V> {
    pub(crate) fn new(capacity_bytes: usize) -> Self {
        Self { held: LruCache::unbounded(), capacity_bytes, used_bytes: 0 }
    }

    /// The value, which becomes the newest.
    pub(crate) fn get(&mut self, key: u128) -> Option<V> {
        self.held.get(&key).map(|(value, _)| value.clone())
    }

    /// Inserts a value as the newest, in place of one with the same key, and evicts the oldest until all fit. A value
    /// of more than an eighth of the capacity is not kept.
    pub(crate) fn put(&mut self, key: u128, value: V, weight_bytes: usize) {
        if let Some((_, freed_bytes)) = self.held.pop(&key) {
            self.used_bytes -= freed_bytes;
        }
        if weight_bytes > self.capacity_bytes / 8 {
            return;
        }
        while self.used_bytes + weight_bytes > self.capacity_bytes {
            let Some((_, (_, freed_bytes))) = self.held.pop_lru() else { break };
            self.used_bytes -= freed_bytes;
        }
        self.held.put(key, (value, weight_bytes));
        self.used_bytes += weight_bytes;
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
                prop_assert_eq!(lru.held.len(), list.len());
            }
        }
    }
}
