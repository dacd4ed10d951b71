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
struct Seat {
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
    seats: Vec<Seat>,
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
        let seat = self.seats.get_mut(id.index())?;
        if let Some(left_us) = seat.left_us.take() {
            self.left.remove(&(left_us, id));
        }
        seat.epoch = Epoch(seat.epoch.max(past).0.saturating_add(1));
        Some((id, seat.epoch))
    }

    /// A number for a name that has none.
    fn assign(&mut self, name: &str, now_us: u64) -> Option<InstanceId> {
        let owner = Some(name.to_owned());
        let id = if let Some(id) = self.free.pop_first() {
            let seat = &mut self.seats[id.index()];
            // A message of this same microsecond may concern the previous owner.
            (seat.owner, seat.since_us) = (owner, now_us.saturating_add(1));
            id
        } else if self.seats.len() < MAX_INSTANCES {
            let id = InstanceId(u32::try_from(self.seats.len()).ok()?);
            self.seats.push(Seat { owner, epoch: Epoch(0), since_us: 0, left_us: None });
            id
        } else {
            return None;
        };
        self.by_name.insert(name.to_owned(), id);
        Some(id)
    }

    /// The owner of a number left: it is remembered for a while.
    pub(super) fn leave(&mut self, id: InstanceId, now_us: u64) {
        let Some(seat) = self.seats.get_mut(id.index()).filter(|s| s.owner.is_some() && s.left_us.is_none())
        else {
            return;
        };
        seat.left_us = Some(now_us);
        self.left.insert((now_us, id));
    }

    /// Whether some name left so long ago that it should be forgotten.
    pub(super) fn overdue(&self, now_us: u64) -> bool {
        let over = |left_us: u64| left_us.saturating_add(REMEMBERED_US) <= now_us;
        now_us >= self.look_at_us && self.left.first().is_some_and(|(left_us, _)| over(*left_us))
    }

    /// Forgets the names that left too long ago, but for those whose numbers are `spoken_of`; hands them out.
    pub(super) fn forget(&mut self, now_us: u64, spoken_of: &BTreeSet<InstanceId>) -> Vec<String> {
        let until_us = now_us.saturating_sub(REMEMBERED_US);
        let late = self.left.iter().take_while(|(left_us, _)| *left_us <= until_us);
        let over: Vec<_> = late.filter(|(_, id)| !spoken_of.contains(id)).copied().collect();
        self.look_at_us = now_us.saturating_add(LOOK_EVERY_US);
        over.into_iter().filter_map(|seat| self.forget_one(seat)).collect()
    }

    /// Forgets the name that left first of those whose numbers are not `spoken_of`, however lately that was.
    pub(super) fn forget_oldest(&mut self, spoken_of: &BTreeSet<InstanceId>) -> Option<String> {
        let oldest = self.left.iter().find(|(_, id)| !spoken_of.contains(id)).copied()?;
        self.forget_one(oldest)
    }

    fn forget_one(&mut self, (left_us, id): (u64, InstanceId)) -> Option<String> {
        self.left.remove(&(left_us, id));
        let seat = self.seats.get_mut(id.index())?;
        seat.left_us = None;
        self.past = self.past.max(seat.epoch);
        self.free.insert(id);
        let name = seat.owner.take()?;
        self.by_name.remove(&name);
        Some(name)
    }

    /// Whether a name that is not remembered finds no number.
    pub(super) fn is_full(&self, name: &str) -> bool {
        self.seats.len() >= MAX_INSTANCES && self.free.is_empty() && !self.by_name.contains_key(name)
    }

    /// The number of a name that is remembered.
    pub(super) fn of(&self, name: &str) -> Option<InstanceId> {
        self.by_name.get(name).copied()
    }

    /// The name that had the number at a time, µs, if it is still known.
    pub(super) fn owner(&self, id: InstanceId, at_us: u64) -> Option<&str> {
        let seat = self.seats.get(id.index()).filter(|seat| seat.since_us <= at_us)?;
        seat.owner.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::Rng;

    const NOBODY: BTreeSet<InstanceId> = BTreeSet::new();

    #[test]
    fn who_comes_back_soon_has_its_number_in_a_new_life() {
        let mut seats = InstanceIds::default();
        assert_eq!(seats.take("a", 0), Some((InstanceId(0), Epoch(1))));
        assert_eq!(seats.take("b", 0), Some((InstanceId(1), Epoch(1))));
        seats.leave(InstanceId(0), 5);
        assert_eq!(seats.forget(REMEMBERED_US + 4, &NOBODY), [""; 0]);
        assert_eq!(seats.take("c", 6), Some((InstanceId(2), Epoch(1))), "a's number is still its own");
        assert_eq!(seats.take("a", 7), Some((InstanceId(0), Epoch(2))));
        assert!(!seats.overdue(u64::MAX), "all are here");
    }

    #[test]
    fn who_left_long_ago_is_forgotten_unless_something_speaks_of_it() {
        let mut seats = InstanceIds::default();
        let (a, b) = (InstanceId(0), InstanceId(1));
        (0..3).for_each(|_| assert_eq!(seats.take("a", 0).map(|(id, _)| id), Some(a)));
        seats.take("b", 0);
        seats.leave(a, 10);
        seats.leave(b, 20);
        assert!(!seats.overdue(REMEMBERED_US + 9) && seats.overdue(REMEMBERED_US + 10));
        assert_eq!(seats.forget(REMEMBERED_US + 20, &BTreeSet::from([a])), ["b"]);
        assert!(!seats.overdue(REMEMBERED_US + 21), "not looked for all the time");
        let later_us = 2 * REMEMBERED_US;
        assert!(seats.overdue(later_us) && seats.of("a") == Some(a) && seats.of("b").is_none());
        assert_eq!(seats.forget(later_us, &NOBODY), ["a"]);
        // The epoch is above every life of both names, whichever has the number.
        assert_eq!(seats.take("b", later_us), Some((a, Epoch(4))));
        assert_eq!(seats.take("c", later_us), Some((b, Epoch(4))));
        assert_eq!((seats.owner(a, later_us), seats.owner(a, later_us + 1)), (None, Some("b")));
    }

    #[test]
    fn where_all_numbers_are_taken_the_longest_gone_makes_room() {
        let mut seats = InstanceIds::default();
        let name = |at: usize| format!("n{at}");
        (0..MAX_INSTANCES).for_each(|at| assert!(seats.take(&name(at), 0).is_some()));
        assert!(seats.is_full("new") && !seats.is_full("n7") && seats.take("new", 1).is_none());
        assert_eq!(seats.forget_oldest(&NOBODY), None, "all are here");
        [9, 7, 8].into_iter().zip(1..).for_each(|(at, us)| seats.leave(InstanceId(at), us));
        assert_eq!(seats.forget_oldest(&BTreeSet::from([InstanceId(9)])).as_deref(), Some("n7"));
        assert_eq!(seats.take("new", 4), Some((InstanceId(7), Epoch(2))));
        assert_eq!(seats.take("n9", 4), Some((InstanceId(9), Epoch(2))), "who was spared is as it was");
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
            let (mut seats, mut naive) = (InstanceIds::default(), Naive::default());
            let mut rng = Rng::fork(seed, 11);
            let mut now_us = 0;
            for _ in 0..300 {
                now_us += rng.below(REMEMBERED_US / 4);
                let name = format!("n{}", rng.below(12));
                let spoken_of: BTreeSet<InstanceId> =
                    (0..3).map(|_| InstanceId(u32::try_from(rng.below(12)).unwrap())).collect();
                match rng.below(4) {
                    0 | 1 => {
                        // A name is here once at a time, as the fleet has it.
                        if let Some(life) = naive.last(&name).filter(|life| life.3.is_none()) {
                            life.3 = Some(now_us);
                            seats.leave(life.1, now_us);
                        }
                        let life = seats.take(&name, now_us).unwrap();
                        naive.took(&name, life);
                    }
                    2 => {
                        if let Some(life) = naive.last(&name).filter(|life| life.3.is_none()) {
                            life.3 = Some(now_us);
                            seats.leave(life.1, now_us);
                        }
                    }
                    _ => {
                        for name in seats.forget(now_us, &spoken_of) {
                            let life = naive.last(&name).unwrap().clone();
                            assert!(!spoken_of.contains(&life.1), "{name} was forgotten, seed {seed}");
                            assert!(life.3.is_some_and(|left| left + REMEMBERED_US <= now_us));
                            assert!(naive.forgotten.insert(name), "forgotten twice");
                            reused += 1;
                        }
                    }
                }
                let numbers: BTreeSet<InstanceId> = naive.lives.iter().map(|life| life.1).collect();
                assert!(numbers.len() <= 12, "no more numbers than names at a time");
                for (name, id) in &seats.by_name {
                    assert_eq!(naive.last(name).map(|life| life.1), Some(*id));
                }
                let known = seats.by_name.len();
                assert_eq!(known + seats.free.len(), seats.seats.len(), "each number is somebody's or free");
            }
        }
        assert!(reused > 500, "{reused} names were forgotten");
    }
}
