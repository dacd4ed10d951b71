//! S3-FIFO (Yang et al., SOSP 2023), fitted to pins and prefixes: a short trial queue, a long main
//! queue, and a memory of names that failed the trial.
//!
//! Two differences. A pinned block is in no queue; it comes back as the newest of its queue, or of
//! the main one if it was used twice while on trial. A block with children still in the tier has
//! proven its use by them and gets another turn.

use super::list::Lists;
use super::{Facts, Order};
use alloc::string::String;
use alloc::vec::Vec;

/// The trial queue.
const TRIAL: usize = 0;
/// The main queue.
const MAIN: usize = 1;
/// Turns given out in search of one victim before the next in line is taken as it is.
const MAX_TURNS: u32 = 64;
/// Uses that count at most.
const MAX_USES: u8 = 3;

/// The state of a block's copy in the tier.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    known: bool,
    main: bool,
    uses: u8,
}

/// Queue state beside the lists themselves.
#[derive(Debug)]
pub(super) struct S3Fifo {
    marks: Vec<Mark>,
    trial_len: usize,
    trial_target: usize,
    /// Names by their low bits; a newer one takes the place of an older.
    ghosts: Vec<u64>,
}

impl Order for S3Fifo {
    /// The trial queue aims at a tenth of the slots.
    fn new(capacity: u64) -> Self {
        let ghosts = if capacity == 0 { 0 } else { capacity.next_power_of_two() as usize };
        let trial_target = usize::try_from(capacity / 10).unwrap_or(usize::MAX).max(1);
        Self { marks: Vec::new(), trial_len: 0, trial_target, ghosts: alloc::vec![0; ghosts] }
    }

    fn lists(&self) -> usize {
        MAIN + 1
    }

    fn rest(&mut self, lists: &mut Lists, block: u32, facts: Facts) {
        if self.marks.len() <= block as usize {
            self.marks.resize(block as usize + 1, Mark::default());
        }
        let returns = self.is_ghost(facts.hash);
        let mark = &mut self.marks[block as usize];
        if mark.known {
            mark.uses = (mark.uses + 1).min(MAX_USES);
            mark.main |= mark.uses >= 2;
        } else {
            *mark = Mark { known: true, main: returns, uses: 0 };
        }
        let queue = if mark.main { MAIN } else { TRIAL };
        self.trial_len += usize::from(queue == TRIAL);
        lists.push_newest(queue, block);
    }

    fn lifted(&mut self, block: u32) {
        if !self.marks[block as usize].main {
            assert!(self.trial_len > 0, "blocks on trial are counted");
            self.trial_len -= 1;
        }
    }

    /// One that failed the trial is remembered by name.
    fn forget(&mut self, block: u32, hash: u64) {
        let Some(mark) = self.marks.get_mut(block as usize) else { return };
        let failed = mark.known && !mark.main;
        *mark = Mark::default();
        if failed && !self.ghosts.is_empty() {
            let place = hash as usize & (self.ghosts.len() - 1);
            self.ghosts[place] = hash;
        }
    }

    fn next(&mut self, lists: &mut Lists, is_leaf: &dyn Fn(u32) -> bool) -> Option<u32> {
        let mut turns = 0;
        loop {
            let main = lists.oldest(MAIN);
            let from_trial = self.trial_len > self.trial_target || main.is_none();
            let block = if from_trial { lists.oldest(TRIAL).or(main)? } else { main? };
            let mark = &mut self.marks[block as usize];
            if turns == MAX_TURNS || (is_leaf(block) && (!mark.main || mark.uses == 0)) {
                return Some(block);
            }
            turns += 1;
            if mark.main {
                mark.uses = mark.uses.saturating_sub(1);
            } else {
                *mark = Mark { known: true, main: true, uses: 0 };
                self.trial_len -= 1;
            }
            lists.unlink(block);
            lists.push_newest(MAIN, block);
        }
    }

    fn keeps_its_place(&self) -> bool {
        true
    }

    /// Audits the length of the trial queue and who is in which.
    fn check(&self, lists: &Lists) -> Result<(), String> {
        let trial = lists.iter(TRIAL).filter(|&block| !self.marks[block as usize].main).count();
        let main = lists.iter(MAIN).filter(|&block| self.marks[block as usize].main).count();
        let strayed = lists.iter(TRIAL).count() != trial || lists.iter(MAIN).count() != main;
        if strayed || trial != self.trial_len {
            return Err(alloc::format!(
                "s3fifo: {trial} on trial, {} counted, strayed {strayed}",
                self.trial_len
            ));
        }
        Ok(())
    }
}

impl S3Fifo {
    fn is_ghost(&self, hash: u64) -> bool {
        let place = hash as usize & self.ghosts.len().wrapping_sub(1);
        self.ghosts.get(place).is_some_and(|&name| name == hash && hash != 0)
    }
}

#[cfg(test)]
mod tests {
    use crate::evict::{Eviction, Facts, RestingBlocks};

    fn rest(resting: &mut RestingBlocks, block: u32) {
        resting.rest(block, Facts { hash: u64::from(block) + 1, ..Facts::default() });
    }

    fn evict(resting: &mut RestingBlocks, is_leaf: impl Fn(u32) -> bool) -> u32 {
        let block = resting.victim(is_leaf).unwrap();
        resting.lift(block);
        resting.forget(block, u64::from(block) + 1);
        assert_eq!(resting.check(), Ok(()));
        block
    }

    #[test]
    fn a_scan_passes_through_the_trial_queue_and_leaves_used_blocks_alone() {
        let mut resting = RestingBlocks::new(Eviction::S3Fifo, 10);
        for _ in 0..3 {
            rest(&mut resting, 0);
            resting.lift(0);
        }
        rest(&mut resting, 0);
        for block in 1..30 {
            rest(&mut resting, block);
            if resting.len() == 10 {
                assert_ne!(evict(&mut resting, |_| true), 0);
            }
        }
        assert!(resting.contains(0));
    }

    #[test]
    fn a_name_that_failed_the_trial_comes_back_into_the_main_queue() {
        let mut resting = RestingBlocks::new(Eviction::S3Fifo, 10);
        rest(&mut resting, 4);
        assert_eq!(evict(&mut resting, |_| true), 4);
        rest(&mut resting, 4);
        for block in 5..9 {
            rest(&mut resting, block);
        }
        let order = [0; 3].map(|_| evict(&mut resting, |_| true));
        assert_eq!(order, [5, 6, 7]);
    }

    #[test]
    fn a_block_with_children_gets_another_turn_but_not_for_ever() {
        let mut resting = RestingBlocks::new(Eviction::S3Fifo, 10);
        for block in 0..3 {
            rest(&mut resting, block);
        }
        assert_eq!(evict(&mut resting, |block| block != 0), 1);
        assert_eq!(resting.victim(|_| false).map(|block| resting.contains(block)), Some(true));
        assert_eq!(resting.check(), Ok(()));
    }
}
