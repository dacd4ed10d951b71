//! How long first tokens and steps take, where a placement's own figures say too little. The order of service has only
//! the requests that have arrived: later ones overtake, and engines err. The step of a batch says nothing of the prompts
//! that will share its steps, and a client feels the longest ones.
//!
//! The *excess* of a request is by how much it takes longer than its placement expects, in parts of its own scale: its
//! slack for a first token, the expected step for steps. A request that is placed is compared with served ones of its
//! kind: those that waited for as much work and had as much work of their own, within a factor of two; those whose
//! step was expected to be as long, within a quarter. The median of their excess corrects the prediction, and a quantile
//! bounds it (conformal prediction by categories: Vovk, Gammerman, Shafer 2005). The load changes, so that what was seen
//! is not what comes. So the level of that quantile moves until the bound holds for the share that is wanted (adaptive
//! conformal inference: Gibbs, Candès 2021).

use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

use super::margin::scale_us;
use crate::prediction::MOST_PERMILLE;

/// Requests of a kind that are kept: of 64 half are forgotten too late in a load that changes, 16 have no tenth.
const KEPT: usize = 32;
/// A kind with fewer is not asked, but one that is wider.
const LEAST: usize = 8;
/// How far the level moves with each request: two hundred are what it remembers.
const LEVEL_STEP: f64 = 1.0 / 200.0;
/// Waits below this are of one kind, µs.
const SMALL_US: u64 = 10_000;
/// Kinds by doublings of a wait, from 10 ms to 3 minutes and beyond.
const OCTAVES: u16 = 16;
/// The kind of all.
const ALL: KindNumber = OCTAVES * (OCTAVES + 1);
/// An excess is kept in millionths of its scale, and within 64 of them.
const WHOLE: f64 = 1e6;
const MOST_EXCESS: i32 = 64_000_000;

/// Kinds of requests, by number.
type KindNumber = u16;

/// A figure of a request as its placement sees it.
pub(crate) trait Outlook {
    /// What the placement expects, µs.
    fn expected_us(&self) -> u64;
    /// The scale of its excess, µs.
    fn scale_us(&self) -> u64;
    /// Its kinds, the narrowest first.
    fn kinds(&self) -> impl Iterator<Item = KindNumber>;
}

/// A first token as a placement sees it, µs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WaitOutlook {
    /// For work that goes before it.
    pub queue_us: u64,
    /// Its own prefill, and what follows until the first token.
    pub own_us: u64,
    /// What that leaves of its objective.
    pub slack_us: u64,
    /// When it comes by the order of service, from the request's arrival.
    pub by_order_us: u64,
}

impl Outlook for WaitOutlook {
    fn expected_us(&self) -> u64 {
        self.by_order_us
    }

    fn scale_us(&self) -> u64 {
        scale_us(self.slack_us, self.own_us).max(1)
    }

    /// By wait and own work, by own work, and all.
    fn kinds(&self) -> impl Iterator<Item = KindNumber> {
        let octave = |us: u64| (us / SMALL_US + 1).ilog2().min(u32::from(OCTAVES) - 1) as u16;
        let own = octave(self.own_us);
        [own * OCTAVES + octave(self.queue_us), OCTAVES * OCTAVES + own, ALL].into_iter()
    }
}

/// The steps of an answer as its placement sees them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepOutlook {
    /// The step of its batch, µs.
    pub step_us: u64,
}

impl Outlook for StepOutlook {
    fn expected_us(&self) -> u64 {
        self.step_us
    }

    fn scale_us(&self) -> u64 {
        self.step_us.max(1)
    }

    /// By four parts of a doubling of the step, and all.
    fn kinds(&self) -> impl Iterator<Item = KindNumber> {
        // Below 4 µs there are no parts, and no engine.
        let us = self.step_us.max(4);
        let doublings = us.ilog2();
        #[expect(clippy::cast_possible_truncation, reason = "less than 4 times 64")]
        let part = (u64::from(doublings) * 4 + ((us >> (doublings - 2)) & 3)) as KindNumber;
        [part, ALL].into_iter()
    }
}

/// The excess of the latest requests of a kind, the oldest first.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct KindSamples {
    kind: KindNumber,
    excess: Vec<i32>,
}

/// The latest served requests of a class on a path.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ExcessSamples {
    /// In the order of their numbers.
    kinds: Vec<KindSamples>,
    level: f64,
}

impl Default for ExcessSamples {
    fn default() -> Self {
        Self { kinds: Vec::new(), level: f64::from(MOST_PERMILLE) / 1000.0 }
    }
}

impl ExcessSamples {
    fn place(&self, kind: KindNumber) -> Result<usize, usize> {
        self.kinds.binary_search_by_key(&kind, |samples| samples.kind)
    }

    /// What is to be expected, µs, and what is not exceeded as often as [`MOST_PERMILLE`] says. None while too few were
    /// served.
    pub(crate) fn predict(&self, outlook: &impl Outlook) -> Option<(u64, u64)> {
        let known = |kind| self.place(kind).ok().map(|at| &self.kinds[at].excess);
        let samples = outlook.kinds().filter_map(known).find(|samples| samples.len() >= LEAST)?;
        let mut sorted = [i32::MAX; KEPT];
        let sorted = &mut sorted[..samples.len()];
        sorted.copy_from_slice(samples);
        sorted.sort_unstable();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a few dozen"
        )]
        let at = libm::ceil(self.level * sorted.len() as f64) as usize - 1;
        let us = |excess: i32| {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_precision_loss,
                reason = "at most 64 times a time, which is far below 2^53 µs"
            )]
            let more_us = (outlook.scale_us() as f64 * f64::from(excess) / WHOLE) as i64;
            outlook.expected_us().saturating_add_signed(more_us).max(1)
        };
        Some((us(sorted[(sorted.len() - 1) / 2]), us(sorted[at])))
    }

    /// Records what was measured, µs, where `most_us` was predicted not to be exceeded.
    pub(crate) fn observe(&mut self, outlook: &impl Outlook, measured_us: u64, most_us: u64) {
        #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
        let (over_us, scale_us) =
            (measured_us as f64 - outlook.expected_us() as f64, outlook.scale_us() as f64);
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a cast to i32 has its bounds for all that is beyond"
        )]
        let excess = (over_us / scale_us * WHOLE) as i32;
        for kind in outlook.kinds() {
            let at = self.place(kind).unwrap_or_else(|at| {
                self.kinds.insert(at, KindSamples { kind, excess: Vec::with_capacity(KEPT) });
                at
            });
            let samples = &mut self.kinds[at].excess;
            if samples.len() == KEPT {
                samples.remove(0);
            }
            samples.push(excess.clamp(-MOST_EXCESS, MOST_EXCESS));
            assert!(samples.len() <= KEPT, "more samples of a kind are kept than there are places");
        }
        let wanted = f64::from(MOST_PERMILLE) / 1000.0;
        let kept = f64::from(u8::from(measured_us <= most_us));
        self.level = (self.level + LEVEL_STEP * (wanted - kept)).clamp(0.5, 1.0);
    }

    /// What was read may be anything.
    pub(crate) fn is_sound(&self) -> bool {
        let bounded = |samples: &KindSamples| {
            samples.kind <= ALL
                && (1..=KEPT).contains(&samples.excess.len())
                && samples.excess.iter().all(|excess| (-MOST_EXCESS..=MOST_EXCESS).contains(excess))
        };
        self.kinds.is_sorted_by(|one, next| one.kind < next.kind)
            && self.kinds.iter().all(bounded)
            && (0.5..=1.0).contains(&self.level)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn outlook(queue_us: u64, own_us: u64) -> WaitOutlook {
        WaitOutlook { queue_us, own_us, slack_us: 30_000_000 - own_us, by_order_us: queue_us + own_us }
    }

    #[test]
    fn nothing_is_predicted_before_there_is_enough_to_compare_with() {
        let mut waits = ExcessSamples::default();
        for at in 0..LEAST {
            assert_eq!(waits.predict(&outlook(0, 1_000_000)), None, "{at}");
            waits.observe(&outlook(0, 1_000_000), 1_200_000, 2_000_000);
        }
        let near = |us: u64, expected_us: u64| us.abs_diff(expected_us) < 40;
        let (predicted_us, most_us) = waits.predict(&outlook(0, 1_000_000)).unwrap();
        assert!(near(predicted_us, 1_200_000) && predicted_us == most_us, "{predicted_us} {most_us}");
        // Of its narrowest kind there is none, but of its own work there are enough.
        let (predicted_us, _) = waits.predict(&outlook(7_000_000, 1_000_000)).unwrap();
        assert!(near(predicted_us, 8_200_000), "{predicted_us}");
    }

    /// Short requests are in time, long ones are overtaken: each is compared with those of its own kind.
    #[test]
    fn a_request_is_compared_with_its_like() {
        let mut waits = ExcessSamples::default();
        for at in 0..400 {
            let most_us = if at % 10 == 0 { 1_000_000 } else { 1_200_000 };
            waits.observe(&outlook(1_000_000, 100_000), 1_100_000, most_us);
            let long_us = 9_000_000 + at % 10 * 1_000_000;
            waits.observe(&outlook(5_000_000, 4_000_000), long_us, 17_500_000);
        }
        let near = |us: u64, expected_us: u64| us.abs_diff(expected_us) < 50;
        let (predicted_us, most_us) = waits.predict(&outlook(1_000_000, 100_000)).unwrap();
        assert!(near(predicted_us, 1_100_000) && near(most_us, 1_100_000), "{predicted_us} {most_us}");
        let (predicted_us, most_us) = waits.predict(&outlook(5_000_000, 4_000_000)).unwrap();
        assert!((12_000_000..14_500_000).contains(&predicted_us), "{predicted_us}");
        assert!((16_000_000..=18_000_001).contains(&most_us), "{most_us}");
        assert_eq!(waits.kinds.len(), 5, "two narrow kinds, two by their own work, and all");
    }

    /// The steps of a small batch take half as much again, those of a large one as long as expected.
    #[test]
    fn steps_are_compared_with_steps_that_were_expected_to_be_as_long() {
        let mut gaps = ExcessSamples::default();
        for _ in 0..20 {
            gaps.observe(&StepOutlook { step_us: 20_000 }, 30_000, 40_000);
            gaps.observe(&StepOutlook { step_us: 50_000 }, 50_000, 60_000);
        }
        let of = |step_us| gaps.predict(&StepOutlook { step_us }).unwrap();
        assert_eq!((of(20_000), of(50_000)), ((30_000, 30_000), (50_000, 50_000)));
        assert_eq!(of(20_400).0, 30_600, "of the same kind");
        assert_eq!(of(30_000), (30_000, 45_000), "there is none like it: of all");
        let kind = |step_us| StepOutlook { step_us }.kinds().next().unwrap();
        assert!([0, 1, 7, 20_000, u64::MAX].map(kind).is_sorted() && kind(u64::MAX) < ALL);
        assert!(kind(20_000) < kind(20_480) && kind(20_480) == kind(24_575) && kind(24_575) < kind(24_576));
    }

    #[test]
    fn what_nobody_could_have_learnt_is_not_sound() {
        let with = |change: fn(&mut ExcessSamples)| {
            let mut waits = ExcessSamples::default();
            waits.observe(&outlook(0, 1_000), 5_000, 9_000);
            change(&mut waits);
            waits.is_sound()
        };
        assert!(with(|_| {}));
        assert!(!with(|waits| waits.level = f64::NAN));
        assert!(!with(|waits| waits.level = 0.4));
        assert!(!with(|waits| waits.kinds[0].excess[0] = i32::MIN));
        assert!(!with(|waits| waits.kinds[0].excess = Vec::new()));
        assert!(!with(|waits| waits.kinds[0].excess = alloc::vec![0; KEPT + 1]));
        assert!(!with(|waits| waits.kinds[2].kind += 1));
        assert!(!with(|waits| waits.kinds.swap(0, 1)));
        assert!(with(|waits| waits.kinds[0].excess = alloc::vec![0; KEPT]));
    }

    /// Any times, the last bits too.
    fn times() -> impl Strategy<Value = u64> {
        prop_oneof![0u64..100_000, 0u64..60_000_000, Just(0), Just(1 << 52)]
    }

    /// All that were served, oldest first, each with its excess.
    fn naive(served: &[(WaitOutlook, u64)], level: f64, outlook: &WaitOutlook) -> Option<(u64, u64)> {
        let excess = |(outlook, came_us): &(WaitOutlook, u64)| {
            let excess = (*came_us as f64 - outlook.by_order_us as f64) / outlook.scale_us() as f64 * WHOLE;
            (excess as i64).clamp(i64::from(-MOST_EXCESS), i64::from(MOST_EXCESS))
        };
        (0..3).find_map(|width| {
            let of_kind = served
                .iter()
                .rev()
                .filter(|(other, _)| other.kinds().nth(width) == outlook.kinds().nth(width));
            let mut like: Vec<i64> = of_kind.take(KEPT).map(excess).collect();
            like.sort_unstable();
            let us = |share: f64| {
                let excess = like[(share * like.len() as f64).ceil() as usize - 1];
                let more_us = (outlook.scale_us() as f64 * excess as f64 / WHOLE) as i64;
                outlook.by_order_us.saturating_add_signed(more_us).max(1)
            };
            (like.len() >= LEAST).then(|| (us(0.5), us(level)))
        })
    }

    proptest! {
        #[test]
        fn each_is_compared_with_the_latest_of_its_kind(
            all in proptest::collection::vec((times(), times(), times(), any::<bool>()), 0..300),
            (queue_us, own_us, slack_us) in (times(), times(), times()),
        ) {
            let (mut waits, mut served) = (ExcessSamples::default(), Vec::new());
            for (queue_us, own_us, came_us, kept) in all {
                let outlook = WaitOutlook { queue_us, own_us, slack_us, by_order_us: queue_us + own_us };
                waits.observe(&outlook, came_us, if kept { u64::MAX } else { 0 });
                served.push((outlook, came_us));
                prop_assert!(waits.is_sound());
            }
            let outlook = WaitOutlook { queue_us, own_us, slack_us, by_order_us: queue_us + own_us };
            prop_assert_eq!(waits.predict(&outlook), naive(&served, waits.level, &outlook));
        }

        /// The bound holds for its share of a long run, also while waits grow by half of their spread in a thousand requests.
        #[test]
        fn the_bound_holds_as_often_as_it_should(
            seed in any::<u64>(), spread_us in 100_000u64..20_000_000, drift_permille in 0u64..500,
        ) {
            let mut rng = baton_types::Rng::new(seed);
            let (mut held, mut judged) = (0u32, 0u32);
            // Of several runs together: one alone is off by a hundredth now and then.
            for _ in 0..4 {
                let mut waits = ExcessSamples::default();
                for at in 0..3_000 {
                    let outlook = outlook(rng.next_u64() % 5_000_000, rng.next_u64() % 3_000_000);
                    let came_us = outlook.by_order_us + rng.next_u64() % spread_us + at * spread_us / 1_000 * drift_permille / 1_000;
                    let most_us = waits.predict(&outlook).map_or(outlook.by_order_us, |(_, most_us)| most_us);
                    if at >= 500 {
                        (held, judged) = (held + u32::from(came_us <= most_us), judged + 1);
                    }
                    waits.observe(&outlook, came_us, most_us);
                }
            }
            let share = f64::from(held) / f64::from(judged);
            prop_assert!((0.86..0.94).contains(&share), "{share}");
        }
    }
}
