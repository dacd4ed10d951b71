//! One publisher's feed on its way into the index, and whether what we knew of it before is still true.

use baton_events::{Batch, EpochReason, Feed};

use crate::index::Position;

/// Batches that are kept at most until it is known whether the engine is the one that was followed.
const KEPT_BATCHES_MAX: usize = 16_384;

/// A step to apply to the index.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Forget what the publisher held.
    Clear,
    /// Take this in.
    Apply(Batch),
}

/// Follows on: at once, or after it was seen that a snapshot still holds.
///
/// After a warm start the publisher repeats what it has kept. If the batch with our position's number was announced
/// at our position's time, it is the same life of the same engine, and what comes after that batch is all that is
/// missing. Anything else means another life, or a hole: then the snapshot is void and what came is taken in.
#[derive(Debug)]
pub(crate) struct Follow {
    /// The position to find again, while it is looked for.
    expected: Option<Position>,
    kept: Vec<Batch>,
}

impl Follow {
    pub(crate) const fn new(expected: Option<Position>) -> Self {
        Self { expected, kept: Vec::new() }
    }

    /// Whether the index still answers by a snapshot that nobody confirmed.
    pub(crate) const fn is_warm(&self) -> bool {
        self.expected.is_some()
    }

    pub(crate) fn take(&mut self, feed: Feed) -> Vec<Step> {
        match feed {
            Feed::Cleared { why: EpochReason::Started, .. } if self.expected.is_some() => Vec::new(),
            Feed::Cleared { .. } => {
                self.expected = None;
                self.kept.clear();
                vec![Step::Clear]
            }
            Feed::Batch { batch, .. } => match self.expected {
                None => vec![Step::Apply(batch)],
                Some(expected) => self.compare(expected, batch),
            },
        }
    }

    fn compare(&mut self, expected: Position, batch: Batch) -> Vec<Step> {
        let sequence = batch.sequence;
        if sequence == expected.sequence && batch.time_us == expected.time_us {
            // The kept batches are in the snapshot already.
            *self = Self::new(None);
            return Vec::new();
        }
        let goes_on = self.kept.is_empty() && sequence == expected.sequence.wrapping_add(1);
        if goes_on && batch.time_us >= expected.time_us {
            *self = Self::new(None);
            return vec![Step::Apply(batch)];
        }
        self.kept.push(batch);
        if sequence < expected.sequence && self.kept.len() < KEPT_BATCHES_MAX {
            return Vec::new();
        }
        self.give_up()
    }

    /// Nothing comes at the moment: what came is all that there was to repeat, so our position is not in it.
    pub(crate) fn silence(&mut self) -> Vec<Step> {
        if self.kept.is_empty() { Vec::new() } else { self.give_up() }
    }

    fn give_up(&mut self) -> Vec<Step> {
        let kept = std::mem::take(&mut self.kept);
        self.expected = None;
        std::iter::once(Step::Clear).chain(kept.into_iter().map(Step::Apply)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(sequence: u64, time_us: u64) -> Batch {
        Batch { sequence, time_us, dp_rank: None, events: Vec::new() }
    }

    fn feed(sequence: u64, time_us: u64) -> Feed {
        Feed::Batch { epoch: 1, batch: batch(sequence, time_us) }
    }

    fn warm() -> Follow {
        let mut follow = Follow::new(Some(Position { sequence: 5, time_us: 500 }));
        assert_eq!(follow.take(Feed::Cleared { epoch: 1, why: EpochReason::Started }), []);
        assert!(follow.is_warm());
        follow
    }

    #[test]
    fn a_snapshot_of_the_same_life_stays_and_only_the_news_is_taken() {
        for first in [0, 3, 5] {
            let mut follow = warm();
            for sequence in first..=5 {
                assert_eq!(follow.take(feed(sequence, sequence * 100)), []);
            }
            assert!(!follow.is_warm());
            assert_eq!(follow.take(feed(6, 600)), [Step::Apply(batch(6, 600))]);
        }
        let mut follow = warm();
        assert_eq!(follow.take(feed(6, 600)), [Step::Apply(batch(6, 600))], "the very next one");
    }

    #[test]
    fn another_life_or_a_hole_voids_it() {
        let mut follow = warm();
        assert_eq!(follow.take(feed(4, 400)), []);
        let all = [Step::Clear, Step::Apply(batch(4, 400)), Step::Apply(batch(5, 501))];
        assert_eq!(follow.take(feed(5, 501)), all, "the same number at another time");
        assert_eq!(warm().take(feed(7, 700)), [Step::Clear, Step::Apply(batch(7, 700))], "a hole");
        assert_eq!(warm().take(feed(6, 400)), [Step::Clear, Step::Apply(batch(6, 400))], "time went back");
        let mut follow = warm();
        assert_eq!(follow.take(Feed::Cleared { epoch: 2, why: EpochReason::Restarted }), [Step::Clear]);
        assert_eq!(follow.take(feed(0, 1)), [Step::Apply(batch(0, 1))]);
    }

    #[test]
    fn a_new_life_that_has_not_come_as_far_is_known_by_its_silence() {
        let mut follow = warm();
        assert_eq!(follow.silence(), [], "nothing came at all: the engine may still be on its way");
        assert_eq!(follow.take(feed(0, 900)), []);
        assert_eq!(follow.silence(), [Step::Clear, Step::Apply(batch(0, 900))]);
        assert_eq!(follow.take(feed(1, 901)), [Step::Apply(batch(1, 901))]);
    }

    #[test]
    fn what_is_kept_has_a_bound() {
        let mut follow = Follow::new(Some(Position { sequence: 1 << 40, time_us: 0 }));
        let steps: Vec<usize> =
            (0..KEPT_BATCHES_MAX as u64).map(|sequence| follow.take(feed(sequence, 1)).len()).collect();
        assert_eq!(steps.last(), Some(&(KEPT_BATCHES_MAX + 1)));
        assert_eq!(steps.iter().sum::<usize>(), KEPT_BATCHES_MAX + 1);
    }
}
