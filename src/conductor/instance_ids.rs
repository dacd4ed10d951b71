//! Which instance has which number: a name that left for good is forgotten in the end, and its number used again.
//!
//! A number goes to another name only once no state refers to it. The new owner's epoch is above those of all earlier
//! lives. A late message therefore belongs to a life that has ended, and its epoch identifies it (I12).

use std::collections::{BTreeMap, BTreeSet};

use baton_types::{Epoch, InstanceId};

/// Instances that one conductor knows at a time: attached ones, and those that left not long ago (I9).
pub(super) const MAX_INSTANCES: usize = 4096;
/// How long a name that left is remembered: who comes back sooner has its number and its counters.
pub(super) const REMEMBERED_US: u64 = 600_000_000;
/// Between two looks at names that should be forgotten and of which something still speaks.
const LOOK_EVERY_US: u64 = 1_000_000;

/// One number.
#[derive(Debug)]
struct NumberEntry {
    /// The name that has the number, or had it until it left. `None` once the name is forgotten.
    owner: Option<String>,
    /// The owner's life; the last one where it left.
    epoch: Epoch,
    /// Messages about the number from before this time, µs, concern another name.
    since_us: u64,
    /// When its owner left, µs; `None` while it is here.
    left_us: Option<u64>,
}

/// The numbers, dense from zero.
#[derive(Debug, Default)]
pub(super) struct InstanceIds {
    entries: Vec<NumberEntry>,
    by_name: BTreeMap<String, InstanceId>,
    /// Remembered ones whose owners left, the longest gone first.
    left: BTreeSet<(u64, InstanceId)>,
    /// Forgotten ones.
    free: BTreeSet<InstanceId>,
    /// Above all lives of names that were forgotten.
    past: Epoch,
    look_at_us: u64,
}

impl InstanceIds {
    /// Gives a name a number and an epoch: its own number if it is remembered, else the lowest that is free, else a
    /// new one. `None`: there is none left, unless some name is [forgotten](Self::forget).
    pub(super) fn take(&mut self, name: &str, now_us: u64) -> Option<(InstanceId, Epoch)> {
        let id = match self.by_name.get(name) {
            Some(id) => *id,
            None => self.assign(name, now_us)?,
        };
        let past = self.past;
        let entry = self.entries.get_mut(id.index())?;
        if let Some(left_us) = entry.left_us.take() {
            self.left.remove(&(left_us, id));
        }
        entry.epoch = Epoch(entry.epoch.max(past).0.saturating_add(1));
        Some((id, entry.epoch))
    }

    /// A number for a name that has none.
    fn assign(&mut self, name: &str, now_us: u64) -> Option<InstanceId> {
        let owner = Some(name.to_owned());
        let id = if let Some(id) = self.free.pop_first() {
            let entry = &mut self.entries[id.index()];
            // A message of this same microsecond may concern the previous owner.
            (entry.owner, entry.since_us) = (owner, now_us.saturating_add(1));
            id
        } else if self.entries.len() < MAX_INSTANCES {
            let id = InstanceId(u32::try_from(self.entries.len()).ok()?);
            self.entries.push(NumberEntry { owner, epoch: Epoch(0), since_us: 0, left_us: None });
            id
        } else {
            return None;
        };
        self.by_name.insert(name.to_owned(), id);
        Some(id)
    }

    /// The owner of a number left: it is remembered for a while.
    pub(super) fn leave(&mut self, id: InstanceId, now_us: u64) {
        let Some(entry) =
            self.entries.get_mut(id.index()).filter(|s| s.owner.is_some() && s.left_us.is_none())
        else {
            return;
        };
        entry.left_us = Some(now_us);
        self.left.insert((now_us, id));
    }

    /// Whether some name left so long ago that it should be forgotten.
    pub(super) fn overdue(&self, now_us: u64) -> bool {
        let over = |left_us: u64| left_us.saturating_add(REMEMBERED_US) <= now_us;
        now_us >= self.look_at_us && self.left.first().is_some_and(|(left_us, _)| over(*left_us))
    }

    /// Forgets the names that left too long ago, but for those whose numbers are `referenced_instances`; hands them out.
    pub(super) fn forget(&mut self, now_us: u64, referenced_instances: &BTreeSet<InstanceId>) -> Vec<String> {
        let until_us = now_us.saturating_sub(REMEMBERED_US);
        let late = self.left.iter().take_while(|(left_us, _)| *left_us <= until_us);
        let over: Vec<_> = late.filter(|(_, id)| !referenced_instances.contains(id)).copied().collect();
        self.look_at_us = now_us.saturating_add(LOOK_EVERY_US);
        over.into_iter().filter_map(|entry| self.forget_one(entry)).collect()
    }

    /// Forgets the name that left first of those whose numbers are not `referenced_instances`, however lately that was.
    pub(super) fn forget_oldest(&mut self, referenced_instances: &BTreeSet<InstanceId>) -> Option<String> {
        let oldest = self.left.iter().find(|(_, id)| !referenced_instances.contains(id)).copied()?;
        self.forget_one(oldest)
    }

    fn forget_one(&mut self, (left_us, id): (u64, InstanceId)) -> Option<String> {
        self.left.remove(&(left_us, id));
        let entry = self.entries.get_mut(id.index())?;
        entry.left_us = None;
        self.past = self.past.max(entry.epoch);
        self.free.insert(id);
        let name = entry.owner.take()?;
        self.by_name.remove(&name);
        Some(name)
    }

    /// Whether a name that is not remembered finds no number.
    pub(super) fn is_full(&self, name: &str) -> bool {
        self.entries.len() >= MAX_INSTANCES && self.free.is_empty() && !self.by_name.contains_key(name)
    }

    /// The number of a name that is remembered.
    pub(super) fn of(&self, name: &str) -> Option<InstanceId> {
        self.by_name.get(name).copied()
    }

    /// The name that had the number at a time, µs, if it is still known.
    pub(super) fn owner(&self, id: InstanceId, at_us: u64) -> Option<&str> {
        let entry = self.entries.get(id.index()).filter(|entry| entry.since_us <= at_us)?;
        entry.owner.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::Rng;

    const NOBODY: BTreeSet<InstanceId> = BTreeSet::new();

    #[test]
    fn who_comes_back_soon_has_its_number_in_a_new_life() {
        let mut entries = InstanceIds::default();
        assert_eq!(entries.take("a", 0), Some((InstanceId(0), Epoch(1))));
        assert_eq!(entries.take("b", 0), Some((InstanceId(1), Epoch(1))));
        entries.leave(InstanceId(0), 5);
        assert_eq!(entries.forget(REMEMBERED_US + 4, &NOBODY), [""; 0]);
        assert_eq!(entries.take("c", 6), Some((InstanceId(2), Epoch(1))), "a's number is still its own");
        assert_eq!(entries.take("a", 7), Some((InstanceId(0), Epoch(2))));
        assert!(!entries.overdue(u64::MAX), "all are here");
    }

    #[test]
    fn who_left_long_ago_is_forgotten_unless_something_speaks_of_it() {
        let mut entries = InstanceIds::default();
        let (a, b) = (InstanceId(0), InstanceId(1));
        (0..3).for_each(|_| assert_eq!(entries.take("a", 0).map(|(id, _)| id), Some(a)));
        entries.take("b", 0);
        entries.leave(a, 10);
        entries.leave(b, 20);
        assert!(!entries.overdue(REMEMBERED_US + 9) && entries.overdue(REMEMBERED_US + 10));
        assert_eq!(entries.forget(REMEMBERED_US + 20, &BTreeSet::from([a])), ["b"]);
        assert!(!entries.overdue(REMEMBERED_US + 21), "not looked for all the time");
        let later_us = 2 * REMEMBERED_US;
        assert!(entries.overdue(later_us) && entries.of("a") == Some(a) && entries.of("b").is_none());
        assert_eq!(entries.forget(later_us, &NOBODY), ["a"]);
        // The epoch is above every life of both names, whichever has the number.
        assert_eq!(entries.take("b", later_us), Some((a, Epoch(4))));
        assert_eq!(entries.take("c", later_us), Some((b, Epoch(4))));
        assert_eq!((entries.owner(a, later_us), entries.owner(a, later_us + 1)), (None, Some("b")));
    }

    #[test]
    fn where_all_numbers_are_taken_the_longest_gone_makes_room() {
        let mut entries = InstanceIds::default();
        let name = |at: usize| format!("n{at}");
        (0..MAX_INSTANCES).for_each(|at| assert!(entries.take(&name(at), 0).is_some()));
        assert!(entries.is_full("new") && !entries.is_full("n7") && entries.take("new", 1).is_none());
        assert_eq!(entries.forget_oldest(&NOBODY), None, "all are here");
        [9, 7, 8].into_iter().zip(1..).for_each(|(at, us)| entries.leave(InstanceId(at), us));
        assert_eq!(entries.forget_oldest(&BTreeSet::from([InstanceId(9)])).as_deref(), Some("n7"));
        assert_eq!(entries.take("new", 4), Some((InstanceId(7), Epoch(2))));
        assert_eq!(entries.take("n9", 4), Some((InstanceId(9), Epoch(2))), "who was spared is as it was");
    }

    /// The reference for [`InstanceIds`]: a list of all lives, searched in full.
    #[derive(Default)]
    struct Naive {
        /// Name, number, epoch, when it left.
        lives: Vec<(String, InstanceId, Epoch, Option<u64>)>,
        forgotten: BTreeSet<String>,
    }

    impl Naive {
        fn last(&mut self, name: &str) -> Option<&mut (String, InstanceId, Epoch, Option<u64>)> {
            self.lives.iter_mut().rev().find(|life| life.0 == name)
        }

        fn took(&mut self, name: &str, (id, epoch): (InstanceId, Epoch)) {
            let known = self.lives.iter().rev().find(|l| l.0 == name && !self.forgotten.contains(name));
            if let Some(known) = known {
                assert_eq!(known.1, id, "a name that is remembered keeps its number");
            }
            for (other, number, before, left) in &self.lives {
                assert!(
                    (*number != id && other != name) || *before < epoch,
                    "{other} {before:?}: an older life"
                );
                let here = left.is_none() && other != name;
                assert!(!here || *number != id, "{name} has the number of {other}, which is here");
            }
            self.forgotten.remove(name);
            self.lives.push((name.to_owned(), id, epoch, None));
        }
    }

    #[test]
    fn no_life_is_ever_taken_for_another() {
        let mut reused = 0;
        for seed in 0..40 {
            let (mut entries, mut naive) = (InstanceIds::default(), Naive::default());
            let mut rng = Rng::fork(seed, 11);
            let mut now_us = 0;
            for _ in 0..300 {
                now_us += rng.below(REMEMBERED_US / 4);
                let name = format!("n{}", rng.below(12));
                let referenced_instances: BTreeSet<InstanceId> =
                    (0..3).map(|_| InstanceId(u32::try_from(rng.below(12)).unwrap())).collect();
                match rng.below(4) {
                    0 | 1 => {
                        // A name is here once at a time, as the fleet has it.
                        if let Some(life) = naive.last(&name).filter(|life| life.3.is_none()) {
                            life.3 = Some(now_us);
                            entries.leave(life.1, now_us);
                        }
                        let life = entries.take(&name, now_us).unwrap();
                        naive.took(&name, life);
                    }
                    2 => {
                        if let Some(life) = naive.last(&name).filter(|life| life.3.is_none()) {
                            life.3 = Some(now_us);
                            entries.leave(life.1, now_us);
                        }
                    }
                    _ => {
                        for name in entries.forget(now_us, &referenced_instances) {
                            let life = naive.last(&name).unwrap().clone();
                            assert!(
                                !referenced_instances.contains(&life.1),
                                "{name} was forgotten, seed {seed}"
                            );
                            assert!(life.3.is_some_and(|left| left + REMEMBERED_US <= now_us));
                            assert!(naive.forgotten.insert(name), "forgotten twice");
                            reused += 1;
                        }
                    }
                }
                let numbers: BTreeSet<InstanceId> = naive.lives.iter().map(|life| life.1).collect();
                assert!(numbers.len() <= 12, "no more numbers than names at a time");
                for (name, id) in &entries.by_name {
                    assert_eq!(naive.last(name).map(|life| life.1), Some(*id));
                }
                let known = entries.by_name.len();
                assert_eq!(
                    known + entries.free.len(),
                    entries.entries.len(),
                    "each number is somebody's or free"
                );
            }
        }
        assert!(reused > 500, "{reused} names were forgotten");
    }
}
