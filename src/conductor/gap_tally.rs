//! The token gaps of one answer, as far as its TBT needs them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The gaps between the tokens that a client was given. Exact, and bounded: it keeps as many of the longest gaps as a
/// tenth of the longest answer that the request allows.
#[derive(Debug)]
pub(crate) struct GapTally {
    /// The longest gaps, µs; the shortest of them on top.
    longest: BinaryHeap<Reverse<u32>>,
    /// Maximum length of `longest`.
    keep: usize,
    /// Number of gaps.
    count: usize,
    /// When the client was given the latest token, µs.
    last_us: Option<u64>,
}

impl GapTally {
    /// No gaps yet, of an answer that has at most `max_tokens` tokens.
    pub(crate) fn new(max_tokens: u32) -> Self {
        let keep = (max_tokens as usize).saturating_sub(1).div_ceil(10).max(1);
        Self { longest: BinaryHeap::new(), keep, count: 0, last_us: None }
    }

    /// The client is given a token.
    pub(crate) fn token(&mut self, now_us: u64) {
        let Some(last_us) = self.last_us.replace(now_us) else { return };
        let gap_us = u32::try_from(now_us.saturating_sub(last_us)).unwrap_or(u32::MAX);
        self.count += 1;
        if self.longest.len() < self.keep {
            self.longest.push(Reverse(gap_us));
        } else if let Some(mut shortest) = self.longest.peek_mut()
            && gap_us > shortest.0
        {
            *shortest = Reverse(gap_us);
        }
    }

    /// Number of gaps.
    pub(crate) const fn count(&self) -> usize {
        self.count
    }

    /// TBT as in the reports: the mean of the longest tenth of the gaps, at least one gap, µs. `None` for an answer of
    /// one token.
    pub(crate) fn tbt_us(&self) -> Option<u64> {
        // Of an engine that gave more tokens than asked, the mean is of the gaps that were kept.
        let worst = self.count.div_ceil(10).min(self.longest.len());
        if worst == 0 {
            return None;
        }
        let mut gaps: Vec<u32> = self.longest.iter().map(|gap| gap.0).collect();
        gaps.select_nth_unstable_by(worst - 1, |a, b| b.cmp(a));
        Some(gaps[..worst].iter().map(|gap| u64::from(*gap)).sum::<u64>() / worst as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::Rng;

    #[test]
    fn it_is_the_mean_of_the_longest_tenth_for_every_length_of_answer() {
        let mut rng = Rng::new(7);
        for tokens in (1..120).chain([1_000, 4_097]) {
            for allowed in [tokens, tokens + 1, 3 * tokens] {
                let (mut tally, mut gaps, mut now_us) = (GapTally::new(allowed), Vec::new(), 5);
                tally.token(now_us);
                for _ in 1..tokens {
                    let gap_us = rng.below(1_000) as u32;
                    now_us += u64::from(gap_us);
                    tally.token(now_us);
                    gaps.push(gap_us);
                }
                assert!(tally.longest.len() <= (allowed as usize).div_ceil(10), "bounded");
                // As `summarise` of sim/src/engine/gaps.rs.
                gaps.sort_unstable_by(|a, b| b.cmp(a));
                let worst = gaps.len().div_ceil(10);
                let sum: u64 = gaps.iter().take(worst).map(|gap| u64::from(*gap)).sum();
                let expected = sum.checked_div(worst as u64);
                assert_eq!(tally.tbt_us(), expected, "{tokens} of {allowed} tokens");
            }
        }
    }

    #[test]
    fn tokens_beyond_those_asked_for_cost_no_memory() {
        let mut tally = GapTally::new(1);
        (0..100).for_each(|at| tally.token(at * at));
        assert_eq!((tally.longest.len(), tally.tbt_us()), (1, Some(99 * 99 - 98 * 98)));
        assert_eq!(GapTally::new(0).tbt_us(), None);
    }
}
