//! When what is due.

use alloc::collections::BTreeSet;

/// The object whose timer is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// The batch in this slot: its deadline, or the end of its grace.
    Batch(u32),
    /// The path in this slot: silence, or a probe not answered.
    Path(u32),
    /// The peer in this slot: a route has rested, or takes long to open.
    Peer(u32),
    /// A path has been held for its turn while peers wait.
    Turn,
}

/// Timers in order of time. Each owner keeps when its own is due, and has one at most.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timers {
    due: BTreeSet<(u64, Timer)>,
}

impl Timers {
    /// Sets, moves or (with none) clears the timer of which `kept` is the owner's note.
    pub(crate) fn set(&mut self, timer: Timer, kept: &mut Option<u64>, at_us: Option<u64>) {
        if *kept == at_us {
            return;
        }
        if let Some(old_us) = *kept {
            let removed = self.due.remove(&(old_us, timer));
            assert!(removed, "a timer stands where its owner's note says");
        }
        if let Some(at_us) = at_us {
            let added = self.due.insert((at_us, timer));
            assert!(added, "an owner has one timer at most");
        }
        *kept = at_us;
    }

    pub(crate) fn first_us(&self) -> Option<u64> {
        self.due.first().map(|&(at_us, _)| at_us)
    }

    /// Takes the first that is due; its owner must clear its note.
    pub(crate) fn pop_due(&mut self, now_us: u64) -> Option<Timer> {
        if self.first_us()? > now_us {
            return None;
        }
        self.due.pop_first().map(|(_, timer)| timer)
    }

    pub(crate) fn holds(&self, timer: Timer, at_us: u64) -> bool {
        self.due.contains(&(at_us, timer))
    }

    pub(crate) fn len(&self) -> usize {
        self.due.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;
    use baton_types::Rng;

    /// All owners that the tests know, and for each its note.
    struct Owners {
        timers: Timers,
        notes: Vec<(Timer, Option<u64>)>,
    }

    impl Owners {
        fn new() -> Self {
            let slots = (0..8).flat_map(|slot| [Timer::Batch(slot), Timer::Path(slot), Timer::Peer(slot)]);
            let notes = slots.chain([Timer::Turn]).map(|timer| (timer, None)).collect();
            Self { timers: Timers::default(), notes }
        }

        fn set(&mut self, owner: usize, at_us: Option<u64>) {
            let (timer, kept) = &mut self.notes[owner];
            self.timers.set(*timer, kept, at_us);
            assert_eq!(*kept, at_us, "the note says when");
        }

        /// The earliest timer, found by a linear scan.
        fn first(&self) -> Option<(u64, Timer)> {
            self.notes.iter().filter_map(|&(timer, at_us)| Some((at_us?, timer))).min()
        }
    }

    #[test]
    fn behaves_as_a_look_at_every_owner_s_note() {
        let (mut owners, mut rng) = (Owners::new(), Rng::new(7));
        let mut now_us = 0;
        for _ in 0..20_000 {
            let owner = rng.below(owners.notes.len() as u64) as usize;
            match rng.below(4) {
                0 => owners.set(owner, None),
                1 | 2 => owners.set(owner, Some(now_us + rng.below(40))),
                _ => {
                    now_us += rng.below(8);
                    let first = owners.first().filter(|&(at_us, _)| at_us <= now_us);
                    assert_eq!(owners.timers.pop_due(now_us), first.map(|(_, timer)| timer));
                    if let Some((_, due)) = first {
                        owners.notes.iter_mut().find(|(timer, _)| *timer == due).unwrap().1 = None;
                    }
                }
            }
            let noted = owners.notes.iter().filter(|(_, at_us)| at_us.is_some()).count();
            assert_eq!(owners.timers.len(), noted, "each owner has one at most");
            assert_eq!(owners.timers.first_us(), owners.first().map(|(at_us, _)| at_us));
            let (timer, kept) = owners.notes[owner];
            assert!(kept.is_none_or(|at_us| owners.timers.holds(timer, at_us)));
        }
    }

    #[test]
    fn nothing_is_due_early_and_all_is_due_at_its_time() {
        let mut owners = Owners::new();
        owners.set(0, Some(100));
        assert_eq!(owners.timers.pop_due(99), None);
        assert_eq!(owners.timers.first_us(), Some(100), "what is not due stays");
        assert_eq!(owners.timers.pop_due(100), Some(Timer::Batch(0)));
        assert_eq!((owners.timers.pop_due(u64::MAX), owners.timers.first_us()), (None, None));
    }

    #[test]
    fn a_timer_that_is_moved_is_due_only_at_its_new_time() {
        let mut owners = Owners::new();
        for at_us in [50, 10, 70, 70] {
            owners.set(1, Some(at_us));
            assert_eq!((owners.timers.len(), owners.timers.first_us()), (1, Some(at_us)));
        }
        assert!(!owners.timers.holds(Timer::Path(0), 50) && owners.timers.holds(Timer::Path(0), 70));
        owners.set(1, None);
        owners.set(1, None);
        assert_eq!(owners.timers.len(), 0);
    }

    #[test]
    fn at_one_time_batches_come_first_then_paths_peers_and_turns() {
        let (mut timers, mut rng) = (Timers::default(), Rng::new(3));
        let order =
            [Timer::Batch(1), Timer::Batch(9), Timer::Path(0), Timer::Path(4), Timer::Peer(0), Timer::Turn];
        for _ in 0..50 {
            let mut set = order.to_vec();
            while !set.is_empty() {
                let timer = set.swap_remove(rng.below(set.len() as u64) as usize);
                timers.set(timer, &mut None, Some(5));
            }
            let popped: Vec<Timer> = core::iter::from_fn(|| timers.pop_due(5)).collect();
            assert_eq!(popped, vec![order[0], order[1], order[2], order[3], order[4], order[5]]);
        }
    }
}
