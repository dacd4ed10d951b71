//! Which blocks are asked for most, and how many instances hold them meanwhile.

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

/// A block's first asks are all looked at for replicas, later ones every so often.
const EVERY: u32 = 8;

/// How often each popular block was asked for, and how widely it was held meanwhile. Memory is
/// bounded (1.5 MiB): a set with no room left counts its least asked block down and gives its place
/// to a newcomer once it is at zero, so a block's count never exceeds what was asked, and a popular
/// one keeps its place.
#[derive(Clone, Debug)]
pub struct Popularity {
    /// Empty until the first block: most tests count nothing.
    sets: Vec<[HotBlock; WAYS]>,
}

#[derive(Clone, Copy, Debug, Default)]
struct HotBlock {
    block: BlockHash,
    /// 0 for a free place.
    asked: u32,
    looks: u32,
    held_sum: u32,
    held_max: u32,
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
    /// Instances that held one of them when it was asked for again, on average.
    pub replicas: f64,
    /// Instances that held the most widely held of them.
    pub replicas_max: u32,
}

impl Popularity {
    /// Nothing counted.
    #[must_use]
    pub const fn new() -> Self {
        Self { sets: Vec::new() }
    }

    /// One request asked for this block; `holders` says how many instances hold a block now.
    #[expect(clippy::cast_possible_truncation, reason = "the low bits name the set")]
    pub fn asked(&mut self, block: BlockHash, holders: impl Fn(BlockHash) -> usize) {
        if self.sets.is_empty() {
            self.sets = vec![[HotBlock::default(); WAYS]; SETS];
        }
        let set = &mut self.sets[block.0 as usize % SETS];
        if let Some(followed) = set.iter_mut().find(|f| f.asked > 0 && f.block == block) {
            followed.asked = followed.asked.saturating_add(1);
            if followed.asked <= EVERY || followed.asked.is_multiple_of(EVERY) {
                followed.look(holders(block));
            }
        } else if let Some(least) = set.iter_mut().min_by_key(|f| f.asked) {
            match least.asked {
                0 => *least = HotBlock { block, asked: 1, ..HotBlock::default() },
                _ => least.asked -= 1,
            }
        }
    }

    /// The most popular blocks with the number of instances that held them. Blocks form groups of ranks
    /// that widen with the rank. Blocks with a count of one are left out.
    #[must_use]
    pub fn ranked(&self) -> Vec<HotBlocks> {
        let mut blocks: Vec<HotBlock> = self.sets.iter().flatten().filter(|f| f.asked > 1).copied().collect();
        blocks.sort_unstable_by_key(|f| std::cmp::Reverse((f.asked, f.block)));
        blocks.truncate(RANKS);
        let mut groups = Vec::new();
        let mut first = 0;
        while first < blocks.len() {
            let next = group_end(first).min(blocks.len());
            groups.push(group(&blocks[first..next], first));
            first = next;
        }
        groups
    }
}

impl HotBlock {
    fn look(&mut self, holders: usize) {
        let holders = u32::try_from(holders).unwrap_or(u32::MAX);
        self.looks = self.looks.saturating_add(1);
        self.held_sum = self.held_sum.saturating_add(holders);
        self.held_max = self.held_max.max(holders);
    }

    fn replicas(&self) -> f64 {
        f64::from(self.held_sum) / f64::from(self.looks.max(1))
    }
}

impl Default for Popularity {
    fn default() -> Self {
        Self::new()
    }
}

/// Where the group that starts at index `first` ends: about an eighth of a decade of ranks later.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "ranks are small"
)]
fn group_end(first: usize) -> usize {
    let widening = 10f64.powf(1.0 / f64::from(GROUPS_PER_DECADE));
    (((first + 1) as f64 * widening) as usize).max(first + 1)
}

#[expect(clippy::cast_precision_loss, reason = "means for a report")]
fn group(blocks: &[HotBlock], first: usize) -> HotBlocks {
    let count = blocks.len() as f64;
    let rank = |index: usize| u32::try_from(index + 1).unwrap_or(u32::MAX);
    HotBlocks {
        first_rank: rank(first),
        last_rank: rank(first + blocks.len() - 1),
        asked: blocks.iter().map(|f| f64::from(f.asked)).sum::<f64>() / count,
        replicas: blocks.iter().map(HotBlock::replicas).sum::<f64>() / count,
        replicas_max: blocks.iter().map(|f| f.held_max).max().unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_follow_how_often_blocks_were_asked_for() {
        let mut popularity = Popularity::new();
        for block in 1..=40u64 {
            (0..=block).for_each(|_| popularity.asked(BlockHash(block), |b| b.0 as usize));
        }
        let groups = popularity.ranked();
        assert_eq!((groups[0].first_rank, groups[0].last_rank), (1, 1));
        assert_eq!((groups[0].asked, groups[0].replicas, groups[0].replicas_max), (41.0, 40.0, 40));
        assert_eq!(groups.last().unwrap().last_rank, 40, "every block has a rank");
        assert!(
            groups.windows(2).all(|g| g[0].last_rank + 1 == g[1].first_rank),
            "no rank twice, none missing"
        );
        assert!(groups.windows(2).all(|g| g[0].asked > g[1].asked));
    }

    #[test]
    fn replicas_are_those_at_the_time_of_asking() {
        let mut popularity = Popularity::new();
        // The first ask adds the block and reads no replica count. Copies appear and vanish later.
        for holders in [0, 1, 2, 3] {
            popularity.asked(BlockHash(5), |_| holders);
        }
        assert_eq!((popularity.ranked()[0].replicas, popularity.ranked()[0].replicas_max), (2.0, 3));
        let looks = std::cell::Cell::new(0);
        for _ in 0..800 {
            popularity.asked(BlockHash(5), |_| {
                looks.set(looks.get() + 1);
                1
            });
        }
        assert!(looks.get() < 110, "{} of 800 asks were looked at", looks.get());
    }

    #[test]
    fn a_flood_of_blocks_asked_for_once_does_not_hide_a_popular_one() {
        let mut popularity = Popularity::new();
        let popular = BlockHash(7);
        let holders = |block: BlockHash| usize::from(block == popular);
        for n in 0..400_000u64 {
            popularity.asked(BlockHash(1_000_000 + n), holders);
            if n % 20 == 0 {
                popularity.asked(popular, holders);
            }
        }
        assert_eq!(popularity.sets.len() * WAYS, 1 << 16, "the table does not grow");
        let first = popularity.ranked()[0];
        assert_eq!((first.first_rank, first.replicas_max), (1, 1), "the popular block is first");
        assert!(first.asked <= 20_000.0 && first.asked > 19_000.0, "{}", first.asked);
    }

    #[test]
    fn nothing_asked_for_twice_is_no_rank() {
        let mut popularity = Popularity::default();
        assert!(popularity.ranked().is_empty());
        popularity.asked(BlockHash(3), |_| 1);
        assert!(popularity.ranked().is_empty());
    }

    #[test]
    fn groups_are_few() {
        let mut popularity = Popularity::new();
        for block in 0..30_000u64 {
            (0..3).for_each(|_| popularity.asked(BlockHash(block), |_| 2));
        }
        let groups = popularity.ranked();
        assert!(groups.len() <= 40, "{} groups", groups.len());
        assert_eq!(groups.last().unwrap().last_rank as usize, RANKS);
    }
}
