//! Which blocks are asked for most, and how many instances end up holding them.

use baton_types::BlockHash;
use serde::Serialize;

/// Sets of the table of counts; a block has its place in one of them.
const SETS: usize = 1 << 14;
/// Blocks that a set follows.
const WAYS: usize = 4;
/// Ranks reported.
const RANKS: usize = 10_000;
/// Groups of ranks per factor of ten.
const GROUPS_PER_DECADE: i32 = 8;

/// How often each popular block was asked for. Memory is bounded (1 MiB): a set with no room left
/// counts its least asked block down and gives its place to a newcomer once it is at zero, so a
/// block's count never exceeds what was asked, and a popular one keeps its place.
#[derive(Clone, Debug)]
pub struct Popularity {
    /// Empty until the first block: most tests count nothing.
    sets: Vec<[(BlockHash, u32); WAYS]>,
}

/// Blocks of neighbouring popularity.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct HotBlocks {
    /// The most popular of them, counted from 1.
    pub first_rank: u32,
    /// The least popular of them.
    pub last_rank: u32,
    /// Requests that asked for one of them, on average.
    pub asked: f64,
    /// Instances that hold one of them at the end, on average.
    pub replicas: f64,
    /// Instances that hold the most widely held of them.
    pub replicas_max: u32,
}

impl Popularity {
    /// Nothing counted.
    #[must_use]
    pub const fn new() -> Self {
        Self { sets: Vec::new() }
    }

    /// One request asked for this block.
    #[expect(clippy::cast_possible_truncation, reason = "the low bits name the set")]
    pub fn asked(&mut self, block: BlockHash) {
        if self.sets.is_empty() {
            self.sets = vec![[(BlockHash(0), 0); WAYS]; SETS];
        }
        let set = &mut self.sets[block.0 as usize % SETS];
        if let Some((_, count)) = set.iter_mut().find(|(held, count)| *held == block && *count > 0) {
            *count = count.saturating_add(1);
        } else if let Some(least) = set.iter_mut().min_by_key(|(_, count)| *count) {
            match least.1 {
                0 => *least = (block, 1),
                _ => least.1 -= 1,
            }
        }
    }

    /// The most popular blocks with how many instances hold them, by groups of ranks that widen with
    /// the rank; blocks asked for once are nobody's favourite and are left out.
    #[must_use]
    pub fn ranked(&self, holders: impl Fn(BlockHash) -> usize) -> Vec<HotBlocks> {
        let mut blocks: Vec<(u32, BlockHash)> =
            self.sets.iter().flatten().filter(|(_, count)| *count > 1).map(|(block, count)| (*count, *block)).collect();
        blocks.sort_unstable_by(|a, b| b.cmp(a));
        blocks.truncate(RANKS);
        let mut groups = Vec::new();
        let mut first = 0;
        while first < blocks.len() {
            let next = group_end(first).min(blocks.len());
            groups.push(group(&blocks[first..next], first, &holders));
            first = next;
        }
        groups
    }
}

impl Default for Popularity {
    fn default() -> Self {
        Self::new()
    }
}

/// Where the group that starts at index `first` ends: about an eighth of a decade of ranks later.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "ranks are small")]
fn group_end(first: usize) -> usize {
    let widening = 10f64.powf(1.0 / f64::from(GROUPS_PER_DECADE));
    (((first + 1) as f64 * widening) as usize).max(first + 1)
}

#[expect(clippy::cast_precision_loss, reason = "means for a report")]
fn group(blocks: &[(u32, BlockHash)], first: usize, holders: &impl Fn(BlockHash) -> usize) -> HotBlocks {
    let count = blocks.len() as f64;
    let held: Vec<u32> = blocks.iter().map(|(_, block)| u32::try_from(holders(*block)).unwrap_or(u32::MAX)).collect();
    let rank = |index: usize| u32::try_from(index + 1).unwrap_or(u32::MAX);
    HotBlocks {
        first_rank: rank(first),
        last_rank: rank(first + blocks.len() - 1),
        asked: blocks.iter().map(|(asked, _)| f64::from(*asked)).sum::<f64>() / count,
        replicas: held.iter().map(|n| f64::from(*n)).sum::<f64>() / count,
        replicas_max: held.iter().copied().max().unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_follow_how_often_blocks_were_asked_for() {
        let mut popularity = Popularity::new();
        for block in 1..=40u64 {
            (0..=block).for_each(|_| popularity.asked(BlockHash(block)));
        }
        let groups = popularity.ranked(|block| block.0 as usize);
        assert_eq!((groups[0].first_rank, groups[0].last_rank), (1, 1));
        assert_eq!((groups[0].asked, groups[0].replicas, groups[0].replicas_max), (41.0, 40.0, 40));
        assert_eq!(groups.last().unwrap().last_rank, 40, "every block has a rank");
        assert!(groups.windows(2).all(|g| g[0].last_rank + 1 == g[1].first_rank), "no rank twice, none missing");
        assert!(groups.windows(2).all(|g| g[0].asked > g[1].asked));
    }

    #[test]
    fn a_flood_of_blocks_asked_for_once_does_not_hide_a_popular_one() {
        let mut popularity = Popularity::new();
        let popular = BlockHash(7);
        for n in 0..400_000u64 {
            popularity.asked(BlockHash(1_000_000 + n));
            if n % 20 == 0 {
                popularity.asked(popular);
            }
        }
        assert_eq!(popularity.sets.len() * WAYS, 1 << 16, "the table does not grow");
        let first = popularity.ranked(|block| usize::from(block == popular))[0];
        assert_eq!((first.first_rank, first.replicas_max), (1, 1), "the popular block is first");
        assert!(first.asked <= 20_000.0 && first.asked > 19_000.0, "{}", first.asked);
    }

    #[test]
    fn nothing_asked_for_twice_is_no_rank() {
        let mut popularity = Popularity::default();
        assert!(popularity.ranked(|_| 1).is_empty());
        popularity.asked(BlockHash(3));
        assert!(popularity.ranked(|_| 1).is_empty());
    }

    #[test]
    fn groups_are_few() {
        let mut popularity = Popularity::new();
        for block in 0..30_000u64 {
            (0..3).for_each(|_| popularity.asked(BlockHash(block)));
        }
        let groups = popularity.ranked(|_| 2);
        assert!(groups.len() <= 40, "{} groups", groups.len());
        assert_eq!(groups.last().unwrap().last_rank as usize, RANKS);
    }
}
