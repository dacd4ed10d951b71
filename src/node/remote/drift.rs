//! How far what was predicted of an engine's cache is from what the engine found in it.
//!
//! An index that follows announcements may drift from the truth without a sign. A block that went unannounced stays
//! expected for ever. A block whose announcement was lost is never found. The engine's count of cached tokens reveals
//! it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Prefills that are looked at together.
const WINDOW: usize = 16;
/// Share of the tokens, of a hundred, by which both may differ: news are a moment late.
const SHARE_PERCENT: u64 = 20;
/// Between two times that all is learnt anew: where that does not help, it shall not harm either.
const PAUSE: Duration = Duration::from_secs(30);

/// Compares predicted and found cached tokens of the latest prefills.
#[derive(Debug, Default)]
pub(super) struct Drift {
    latest: VecDeque<(u64, u64)>,
    learnt: Option<Instant>,
}

impl Drift {
    /// Takes one prefill in: prompt tokens that were expected in the cache, and that the engine found there. Whether
    /// all should be learnt anew.
    pub(super) fn note(&mut self, expected: u64, found: u64, now: Instant) -> bool {
        if self.latest.len() == WINDOW {
            self.latest.pop_front();
        }
        self.latest.push_back((expected, found));
        let resting = self.learnt.is_some_and(|at| now.saturating_duration_since(at) < PAUSE);
        if self.latest.len() < WINDOW || resting {
            return false;
        }
        let sum = |of: fn(&(u64, u64)) -> u64| self.latest.iter().map(of).sum::<u64>();
        let (off, all) = (sum(|(e, f)| e.abs_diff(*f)), sum(|(e, f)| *e.max(f)));
        let drifted = off * 100 > all * SHARE_PERCENT;
        if drifted {
            self.latest.clear();
            self.learnt = Some(now);
        }
        drifted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_agrees_or_nearly_does_is_left_alone() {
        let (mut drift, now) = (Drift::default(), Instant::now());
        assert!((0..100).all(|at| !drift.note(1600, 1600 - at % 3 * 100, now)));
        assert!((0..100).all(|_| !drift.note(0, 0, now)), "nothing is cached, as was expected");
    }

    #[test]
    fn either_way_of_being_wrong_is_found_within_a_window() {
        for (expected, found) in [(1600, 0), (0, 1600), (1600, 1200)] {
            let (mut drift, now) = (Drift::default(), Instant::now());
            let told: Vec<bool> = (0..WINDOW).map(|_| drift.note(expected, found, now)).collect();
            assert_eq!(told.iter().position(|told| *told), Some(WINDOW - 1), "{expected} {found}");
        }
        // A few that are right do not hide many that are wrong.
        let (mut drift, now) = (Drift::default(), Instant::now());
        assert!((0..3 * WINDOW).any(|at| drift.note(1600, if at % 3 == 0 { 0 } else { 1600 }, now)));
    }

    #[test]
    fn what_does_not_help_is_not_done_again_and_again() {
        let (mut drift, now) = (Drift::default(), Instant::now());
        let times = |drift: &mut Drift, at: Instant| (0..200).filter(|_| drift.note(1600, 0, at)).count();
        assert_eq!(times(&mut drift, now), 1);
        assert_eq!(times(&mut drift, now + PAUSE / 2), 0);
        assert_eq!(times(&mut drift, now + PAUSE), 1);
    }
}
