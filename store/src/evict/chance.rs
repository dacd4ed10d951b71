//! Statistics of returning blocks. For each class and age they count the blocks that were requested again,
//! and the time for which blocks waited. The value of a block's slot follows from them.

use super::ages::{CELLS, width};
use super::ranks::MAX_RANK;
use super::trait_factors::{TraitFactors, span_of};

/// Classes of use.
pub(crate) const CLASSES: usize = 120;
/// Weight of the prior that the traits of a class give, in blocks: it decides while there are few samples.
const PRIOR_BLOCKS: u64 = 3000;
/// Chances and shares are in units of one in this power of two.
const SHIFT: u32 = 24;
const ONE: u64 = 1 << SHIFT;
/// Counts are halved after this many blocks came to rest.
const RESTS_TO_HALVING: u32 = 1 << 18;

/// One class.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClassStats {
    /// Whether a block of it ever came to rest.
    pub rested: bool,
    /// Blocks at rest or gone that may still come back, by cell.
    waiting: [u32; CELLS],
    /// Blocks that came back from each cell.
    pub returns: [u32; CELLS],
    /// Ticks that blocks were in each cell, summed over the blocks.
    pub waited: [u64; CELLS],
}

/// Reuse statistics of all classes.
#[derive(Debug)]
pub(super) struct Chances {
    seen: [ClassStats; CLASSES],
    /// All classes together; its `waiting` is not kept.
    all: ClassStats,
    factors: TraitFactors,
    rests_left: u32,
}

impl ClassStats {
    /// Nothing was seen.
    pub(super) const NOTHING: Self =
        Self { rested: false, waiting: [0; CELLS], returns: [0; CELLS], waited: [0; CELLS] };
}

impl Chances {
    /// Nothing was seen.
    pub(super) const fn new() -> Self {
        Self {
            seen: [ClassStats::NOTHING; CLASSES],
            all: ClassStats::NOTHING,
            factors: TraitFactors::new(),
            rests_left: RESTS_TO_HALVING,
        }
    }

    /// Whether a block of `class` ever came to rest.
    pub(super) const fn is_seen(&self, class: usize) -> bool {
        self.seen[class].rested
    }

    /// Recomputes the weight of each trait of a class.
    pub(super) fn weigh(&mut self) {
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let usual = core::array::from_fn(|cell| self.usual(cell) as f64 / ONE as f64);
        self.factors.fit(&self.seen, &usual);
    }

    /// A block of `class` came to rest.
    pub(super) fn rested(&mut self, class: usize) {
        self.seen[class].waiting[0] += 1;
        self.seen[class].rested = true;
        self.rests_left -= 1;
        if self.rests_left == 0 {
            self.rests_left = RESTS_TO_HALVING;
            for seen in self.seen.iter_mut().chain([&mut self.all]) {
                seen.returns.iter_mut().for_each(|count| *count /= 2);
                seen.waited.iter_mut().for_each(|ticks| *ticks /= 2);
            }
        }
    }

    /// A block of `class` in `cell` was asked for again.
    pub(super) const fn returned(&mut self, class: usize, cell: usize) {
        self.given_up(class, cell);
        self.seen[class].returns[cell] += 1;
        self.all.returns[cell] += 1;
    }

    /// The store gives up recognising a block of `class` in `cell`.
    pub(super) const fn given_up(&mut self, class: usize, cell: usize) {
        let waiting = &mut self.seen[class].waiting[cell];
        // Release builds go on: this is a statistic, and not worth a node.
        debug_assert!(*waiting > 0, "what returns or is given up was waited for");
        *waiting = waiting.saturating_sub(1);
    }

    /// The blocks of group `group` were at the age of `cell` for `ticks`.
    pub(super) fn waited(&mut self, group: usize, cell: usize, ticks: u32) {
        for seen in self.seen.iter_mut().filter(|seen| seen.waiting[group] > 0) {
            let block_ticks = u64::from(seen.waiting[group]) * u64::from(ticks);
            seen.waited[cell] += block_ticks;
            self.all.waited[cell] += block_ticks;
        }
    }

    /// Group `from` joins group `to`.
    pub(super) fn moved(&mut self, from: usize, to: usize) {
        for seen in &mut self.seen {
            seen.waiting[to] += core::mem::take(&mut seen.waiting[from]);
        }
    }

    /// The value of a slot with a block of `class` at each age: the expected returns for each tick that the slot is
    /// kept, in units of 2⁻³², if it is kept for the best time. (This is the largest, over all ends of the wait, of
    /// the chance to return until then divided by the expected length of the wait. The Gittins index orders projects
    /// in the same way.)
    pub(super) fn slot_value(&self, class: usize) -> [u32; CELLS] {
        let times = self.factors.times_usual(class);
        let chances: [u64; CELLS] =
            core::array::from_fn(|cell| self.chance(class, cell, times[span_of(cell)]));
        core::array::from_fn(|from| {
            let (mut left, mut returned, mut ticks, mut best) = (ONE, 0, 0, (0, 1));
            for (cell, chance) in chances.iter().enumerate().skip(from) {
                let gone = (left * chance) >> SHIFT;
                ticks += (left - gone / 2) * u64::from(width(cell));
                returned += gone;
                left -= gone;
                // Fractions compared without dividing: returned < 2^25, ticks < 2^37.
                if returned * best.1 > best.0 * ticks {
                    best = (returned, ticks.max(1));
                }
            }
            ((best.0 << 32) / best.1).min(u64::from(MAX_RANK)) as u32
        })
    }

    /// The chance that a block of `class` that reaches `cell` comes back before it leaves it, where its traits speak
    /// for so many times the usual rate.
    fn chance(&self, class: usize, cell: usize, times_usual: f64) -> u64 {
        let (seen, width) = (&self.seen[class], u64::from(width(cell)));
        let prior = PRIOR_BLOCKS * width;
        let rate = ((u64::from(seen.returns[cell]) << SHIFT) + prior * self.supposed(cell, times_usual))
            / (seen.waited[cell] + prior).max(1);
        // Of x returns expected over the width, about 2x / (2 + x) blocks come back.
        let expected = (rate * width).min(ONE * 8);
        (2 * (expected << SHIFT) / (2 * ONE + expected)).min(ONE)
    }

    /// The rate of return that a class's traits speak for.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rate"
    )]
    fn supposed(&self, cell: usize, times_usual: f64) -> u64 {
        ((self.usual(cell) as f64 * times_usual) as u64).min(ONE * 8)
    }

    /// The rate of return of all classes together, for each tick.
    fn usual(&self, cell: usize) -> u64 {
        (u64::from(self.all.returns[cell]) << SHIFT) / (self.all.waited[cell] + u64::from(width(cell))).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_seen_is_worth_nothing() {
        assert_eq!(Chances::new().slot_value(3), [0; CELLS]);
    }

    /// A hundred thousand blocks of each class wait; those of class 1 all come back from cell 6, class 0 never.
    fn seen() -> Chances {
        let mut chances = Chances::new();
        for class in [0, 1] {
            (0..100_000).for_each(|_| chances.rested(class));
        }
        for cell in [0, 2, 3, 4, 5, 6] {
            chances.waited(0, cell, width(cell));
        }
        chances.moved(0, 6);
        (0..100_000).for_each(|_| chances.returned(1, 6));
        for cell in 7..20 {
            chances.waited(6, cell, width(cell));
        }
        chances
    }

    #[test]
    fn worth_rises_until_the_age_of_return_and_falls_after_it() {
        let chances = seen();
        let (never, always) = (chances.slot_value(0), chances.slot_value(1));
        assert!(always[6] > always[4] && always[4] > always[0] && always[0] > 0);
        assert!(always[6] > 100 * always[8].max(1), "{always:?}");
        assert!(always[0] > 3 * never[0], "{always:?} {never:?}");
        assert_eq!(chances.seen[1].waiting, [0; CELLS]);
    }

    #[test]
    fn a_class_unseen_is_thought_to_be_like_all() {
        let chances = seen();
        let (never, unseen, always) = (chances.slot_value(0), chances.slot_value(9), chances.slot_value(1));
        assert!(never[6] < unseen[6] && unseen[6] < always[6]);
    }

    /// Class 8 shares its uses with class 0 alone, class 9 with class 1.
    #[test]
    fn a_class_unseen_is_thought_to_be_as_its_traits_say() {
        let mut chances = seen();
        let alike = chances.slot_value(8)[6].abs_diff(chances.slot_value(9)[6]);
        (0..10).for_each(|_| chances.weigh());
        assert_eq!(alike, 0);
        assert!(
            chances.slot_value(9)[6] > 3 * chances.slot_value(8)[6],
            "{:?} {:?}",
            chances.slot_value(8),
            chances.slot_value(9)
        );
        assert!(chances.is_seen(1) && !chances.is_seen(9));
    }

    #[test]
    fn what_was_seen_long_ago_counts_half() {
        let mut chances = seen();
        (0..RESTS_TO_HALVING).for_each(|_| chances.rested(5));
        assert_eq!(chances.all.returns[6], 50_000);
        assert_eq!(chances.seen[1].returns[6], 50_000);
    }

    #[test]
    fn counts_at_their_bounds_do_not_overflow() {
        let mut chances = Chances::new();
        chances.seen[0].returns = [RESTS_TO_HALVING * 2; CELLS];
        chances.all.returns = [RESTS_TO_HALVING * 2; CELLS];
        assert!(chances.slot_value(0).iter().all(|&slot_value| slot_value > 1 << 20));
        chances.seen[0].waited = [u64::MAX >> 8; CELLS];
        assert!(chances.slot_value(0)[0] < 1 << 20);
    }
}
