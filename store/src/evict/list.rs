//! Several linked lists over one slab: a block is in at most one, and leaves it in constant time
//! without anyone knowing which.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

/// Marks a block that is in no list.
const OUT: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Link {
    newer: u32,
    older: u32,
}

/// Rings with a sentinel each: places `0..lists` are sentinels, block `b` has place `lists + b`.
/// A sentinel's `older` is the newest block, its `newer` the oldest.
#[derive(Debug, Default)]
pub(super) struct Lists {
    links: Vec<Link>,
    lists: usize,
    /// Bit for each of the first 64 lists that may have blocks; cleared lazily.
    occupied: u64,
    len: usize,
}

impl Lists {
    /// `lists` empty lists. Only the first 64 can be asked for by [`Lists::oldest_of_lowest`].
    pub(super) fn new(lists: usize) -> Self {
        let links = (0..lists as u32).map(|own| Link { newer: own, older: own }).collect();
        Self { links, lists, occupied: 0, len: 0 }
    }

    /// Blocks in all lists.
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// Whether `block` is in a list.
    pub(super) fn contains(&self, block: u32) -> bool {
        self.links.get(self.lists + block as usize).is_some_and(|link| link.newer != OUT)
    }

    /// Puts `block`, which is in no list, in as the newest of `list`.
    pub(super) fn push_newest(&mut self, list: usize, block: u32) {
        assert!(list < self.lists, "only a sentinel heads a list");
        let place = self.lists + block as usize;
        if self.links.len() <= place {
            self.links.resize(place + 1, Link { newer: OUT, older: OUT });
        }
        assert!(self.links[place].newer == OUT, "a block is in one list");
        let newest = self.links[list].older;
        self.links[place] = Link { newer: list as u32, older: newest };
        self.links[newest as usize].newer = place as u32;
        self.links[list].older = place as u32;
        self.occupied |= bit(list);
        self.len += 1;
    }

    /// Takes `block` out of the list that it is in.
    pub(super) fn unlink(&mut self, block: u32) {
        let place = self.lists + block as usize;
        let Link { newer, older } = self.links[place];
        assert!(newer != OUT, "the block is in a list");
        self.links[newer as usize].older = older;
        self.links[older as usize].newer = newer;
        self.links[place] = Link { newer: OUT, older: OUT };
        self.len -= 1;
    }

    /// The oldest block of `list`.
    pub(super) fn oldest(&self, list: usize) -> Option<u32> {
        (self.links[list].newer as usize).checked_sub(self.lists).map(|block| block as u32)
    }

    /// The oldest block of the first list below `end` that has any.
    pub(super) fn oldest_of_lowest(&mut self, end: usize) -> Option<u32> {
        loop {
            let list = self.occupied.trailing_zeros() as usize;
            if list >= end.min(64) {
                return None;
            }
            let oldest = self.oldest(list);
            if oldest.is_some() {
                return oldest;
            }
            self.occupied &= !(1 << list);
        }
    }

    /// Moves list `l` behind the newest of list `to(l)` for every `l` below `end`, in ascending
    /// order; `to(l) ≤ l`, ascending too.
    pub(super) fn merge(&mut self, end: usize, to: impl Fn(usize) -> usize) {
        for list in 0..end {
            let target = to(list);
            debug_assert!(target <= list, "lists move down");
            if target != list && self.oldest(list).is_some() {
                self.append(target, list);
            }
        }
    }

    /// The blocks of `list`, oldest first.
    pub(super) fn iter(&self, list: usize) -> impl Iterator<Item = u32> + '_ {
        core::iter::successors(self.oldest(list), |&block| {
            let newer = self.links[self.lists + block as usize].newer as usize;
            newer.checked_sub(self.lists).map(|block| block as u32)
        })
    }

    /// Audits the rings: both directions agree and the count is right.
    pub(super) fn check(&self) -> Result<(), String> {
        let mut seen = 0;
        for list in 0..self.lists {
            let mut place = list;
            loop {
                let newer = self.links[place].newer as usize;
                if self.links[newer].older as usize != place {
                    return Err(format!("list {list} is broken between places {place} and {newer}"));
                }
                if newer == list {
                    break;
                }
                seen += 1;
                if self.occupied & bit(list) != bit(list) || seen > self.len {
                    return Err(format!("list {list} has blocks that are not counted"));
                }
                place = newer;
            }
        }
        if seen == self.len { Ok(()) } else { Err(format!("{seen} blocks in lists, {} counted", self.len)) }
    }

    /// Makes all of `from`, which has some, newer than all of `target`.
    pub(super) fn append(&mut self, target: usize, from: usize) {
        assert!(target != from && self.oldest(from).is_some(), "a list with blocks joins another");
        let Link { newer: oldest, older: newest } = self.links[from];
        let target_newest = self.links[target].older;
        self.links[target_newest as usize].newer = oldest;
        self.links[oldest as usize].older = target_newest;
        self.links[newest as usize].newer = target as u32;
        self.links[target].older = newest;
        self.links[from] = Link { newer: from as u32, older: from as u32 };
        self.occupied |= bit(target);
    }
}

/// The bit of a list, if it has one.
const fn bit(list: usize) -> u64 {
    if list < 64 { 1 << list } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use proptest::prelude::*;

    #[test]
    fn the_lowest_list_gives_its_oldest() {
        let mut lists = Lists::new(3);
        lists.push_newest(2, 0);
        lists.push_newest(1, 1);
        lists.push_newest(1, 2);
        assert_eq!(lists.oldest_of_lowest(3), Some(1));
        lists.unlink(1);
        lists.unlink(2);
        assert_eq!(lists.oldest_of_lowest(2), None);
        assert_eq!(lists.oldest_of_lowest(3), Some(0));
        assert!(lists.contains(0) && !lists.contains(1) && !lists.contains(77));
    }

    proptest! {
        #[test]
        fn lists_behave_as_vectors(ops in proptest::collection::vec((0u8..4, 0usize..4, 0u32..12), 0..120)) {
            let mut lists = Lists::new(4);
            let mut naive = vec![Vec::new(); 4];
            for (op, list, block) in ops {
                let within = naive.iter().any(|l: &Vec<u32>| l.contains(&block));
                match op {
                    0 | 1 if !within => {
                        lists.push_newest(list, block);
                        naive[list].push(block);
                    }
                    2 if within => {
                        lists.unlink(block);
                        naive.iter_mut().for_each(|l| l.retain(|&b| b != block));
                    }
                    3 => {
                        lists.merge(4, |l| l / 2);
                        for l in 1..4 {
                            let moved = core::mem::take(&mut naive[l]);
                            naive[l / 2].extend(moved);
                        }
                    }
                    _ => {}
                }
                prop_assert_eq!(lists.check(), Ok(()));
                for (l, expected) in naive.iter().enumerate() {
                    prop_assert_eq!(&lists.iter(l).collect::<Vec<_>>(), expected);
                }
                let lowest = naive.iter().find_map(|l| l.first().copied());
                prop_assert_eq!(lists.oldest_of_lowest(4), lowest);
            }
        }
    }
}
