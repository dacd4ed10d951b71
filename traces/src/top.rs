//! The prefixes that are reused most, found in one pass and bounded memory.

use serde::Serialize;

use crate::seen::IdMap;

/// Blocks whose reuse is counted at a time.
const MOST_COUNTED: usize = 1 << 17;
/// A prefix is reported at its longest: a block is passed over where one that follows it is reused
/// at least this often (in percent) as well.
const SAME_PREFIX_PERCENT: u64 = 80;

/// A prefix that several rows begin with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct TopPrefix {
    /// Tokens of the prefix.
    pub tokens: u64,
    /// Rows that found it in a cache that never forgets.
    pub hits: u64,
    /// Tokens saved: `hits` times `tokens`.
    pub saved_tokens: u64,
    /// Id of its last block.
    pub last_block_id: u64,
}

#[derive(Debug, Clone, Copy)]
struct Count {
    hits: u64,
    depth: u32,
    parent: Option<u64>,
}

/// Counts how often each block is found. When too many are counted, the rarer half is dropped;
/// hence a count may be too low, never too high.
#[derive(Debug, Default)]
pub(crate) struct TopPrefixes {
    counts: IdMap<Count>,
}

impl TopPrefixes {
    /// Takes in the leading blocks that a row found.
    pub(crate) fn add(&mut self, found: &[u64]) {
        let mut parent = None;
        for (&id, depth) in found.iter().zip(1u32..) {
            let count = self.counts.entry(id).or_insert(Count { hits: 0, depth, parent });
            count.hits += 1;
            parent = Some(id);
        }
        if self.counts.len() > MOST_COUNTED {
            self.drop_rarer_half();
        }
    }

    fn drop_rarer_half(&mut self) {
        let mut hits: Vec<u64> = self.counts.values().map(|count| count.hits).collect();
        let middle = hits.len() / 2;
        let (_, median, _) = hits.select_nth_unstable(middle);
        let median = *median;
        self.counts.retain(|_, count| count.hits > median);
    }

    /// The `most` prefixes that save most tokens.
    pub(crate) fn top(&self, most: usize, block_tokens: u32) -> Vec<TopPrefix> {
        let mut passed_over: IdMap<()> = IdMap::default();
        for count in self.sorted() {
            if let Some(parent) = count.1.parent.filter(|id| self.is_same_prefix(*id, count.1)) {
                passed_over.insert(parent, ());
            }
        }
        let mut prefixes: Vec<TopPrefix> = self
            .sorted()
            .into_iter()
            .filter(|(id, count)| count.hits > 1 && !passed_over.contains_key(id))
            .map(|(id, count)| {
                let tokens = u64::from(count.depth) * u64::from(block_tokens);
                TopPrefix {
                    tokens,
                    hits: count.hits,
                    saved_tokens: tokens.saturating_mul(count.hits),
                    last_block_id: id,
                }
            })
            .collect();
        prefixes.sort_by_key(|p| (std::cmp::Reverse(p.saved_tokens), p.last_block_id));
        prefixes.truncate(most);
        prefixes
    }

    fn is_same_prefix(&self, parent: u64, child: Count) -> bool {
        self.counts.get(&parent).is_some_and(|p| child.hits * 100 >= p.hits * SAME_PREFIX_PERCENT)
    }

    fn sorted(&self) -> Vec<(u64, Count)> {
        let mut all: Vec<(u64, Count)> = self.counts.iter().map(|(id, count)| (*id, *count)).collect();
        all.sort_unstable_by_key(|(id, _)| *id);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_named_once_at_its_longest() {
        let mut prefixes = TopPrefixes::default();
        (0..10).for_each(|_| prefixes.add(&[1, 2, 3]));
        (0..4).for_each(|_| prefixes.add(&[1, 7]));
        let top = prefixes.top(9, 100);
        assert_eq!(top[0], TopPrefix { tokens: 300, hits: 10, saved_tokens: 3000, last_block_id: 3 });
        assert!(top.iter().any(|p| p.last_block_id == 1 && p.hits == 14));
        assert!(top.iter().all(|p| p.last_block_id != 2));
    }

    #[test]
    fn memory_is_bounded_and_the_frequent_survive() {
        let mut prefixes = TopPrefixes::default();
        for i in 0..400_000u64 {
            prefixes.add(&[1, 1000 + i]);
        }
        assert!(prefixes.counts.len() <= MOST_COUNTED);
        assert_eq!(prefixes.top(1, 512)[0].hits, 400_000);
    }
}
