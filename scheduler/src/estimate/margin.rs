//! The part of a request's slack that is not promised, so that the request is in time although predictions err.
//!
//! A request's slack is its objective less its own prefill: the longest time that it may wait. Its scale is its slack, or
//! its own time where that is longer: a prompt that takes nine of its ten seconds on a slow link errs by parts of nine.
//! For each admitted request the estimator measures by which part of its scale its first token came later than promised.
//! The margin of a class on a path is a quantile of these parts: no more than the class's target share of requests
//! overshoots it. This is split conformal prediction (Vovk, Gammerman, Shafer 2005) over a window that fades. A margin is
//! at most the slack, so on an idle cluster it costs a request nothing.

use alloc::boxed::Box;
use alloc::vec::Vec;
use baton_types::{ClassId, Role};
use serde::{Deserialize, Serialize};

use super::excess::ExcessSamples;
use super::needs::NeedEstimator;

/// Histogram of overshoots in hundredths of the scale. The first bin counts requests in time, the last one everything
/// from its value on. A margin beyond a third of the slack would not help: a request that is so late waits for
/// something other than its turn, for example for room to decode.
const BINS: usize = 31;
/// Each observation multiplies the weight of the earlier ones by this: about a thousand of them count.
const FADE: f64 = 1.0 - 1.0 / 1024.0;
/// The least margin, because a quiet hour does not show how late requests are under load.
const LEAST: usize = 4;
/// The least margin of steps, for the same reason: answers that are promised a step now end beside others that come later.
const LEAST_STEP: usize = 8;
/// Paths to a first token: by a prefill instance, on a decode instance, on an instance of both roles.
const PATHS: usize = 3;
/// Bins for steps, whose margin is at most half of their slack: beyond, they are not long because of the batch.
const STEP_BINS: usize = 51;

/// What the errors about a first token are measured by: the request's slack, or its own time where that is longer, µs.
pub(crate) fn scale_us(slack_us: u64, own_us: u64) -> u64 {
    slack_us.max(own_us)
}

/// Overshoots of the requests of one class on one path.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct OvershootHistogram {
    weights: Box<[f64]>,
    total: f64,
    margin_percent: u64,
}

impl OvershootHistogram {
    fn new(bins: usize, least: usize) -> Self {
        Self { weights: alloc::vec![0.0; bins].into(), total: 0.0, margin_percent: least as u64 }
    }

    /// What was read may be anything.
    fn is_sound(&self, bins: usize) -> bool {
        let bounded = |weight: &f64| (0.0..=f64::from(u32::MAX)).contains(weight);
        self.weights.len() == bins && self.margin_percent < bins as u64 && self.weights.iter().all(bounded)
    }

    /// Counts an overshoot of a scale; the margin is at least `least`.
    fn observe(&mut self, (over_us, scale_us): (u64, u64), target_permille: u32, least: usize) {
        let percent = over_us.saturating_mul(100).div_ceil(scale_us.max(1));
        self.weights.iter_mut().for_each(|weight| *weight *= FADE);
        self.total = self.total * FADE + 1.0;
        let bin = usize::try_from(percent).unwrap_or(usize::MAX).min(self.weights.len() - 1);
        self.weights[bin] += 1.0;
        let mut may_be_late = self.total * f64::from(1000 - target_permille.min(1000)) / 1000.0;
        let beyond = |weight: &f64| {
            may_be_late -= weight;
            may_be_late < 0.0
        };
        let late = self.weights.iter().skip(least).rev().position(beyond);
        self.margin_percent = late.map_or(least, |at| self.weights.len() - 1 - at) as u64;
    }
}

/// The latest served requests of one class on one path.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct PathSamples {
    /// First tokens beside the order of service.
    pub first_tokens: ExcessSamples,
    /// Starts of decodes beside the order of service.
    pub decode_starts: ExcessSamples,
    /// TBT beside the step of the batch.
    pub gaps: ExcessSamples,
}

impl PathSamples {
    fn is_sound(&self) -> bool {
        [&self.first_tokens, &self.decode_starts, &self.gaps].into_iter().all(ExcessSamples::is_sound)
    }
}

/// Overshoots of the requests of one class.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct ClassMargins {
    /// Of first tokens, by path.
    first_tokens: [OvershootHistogram; PATHS],
    /// Of decode steps.
    steps: OvershootHistogram,
    /// Times beside what placements expected of them, by path.
    #[serde(default)]
    samples: [PathSamples; PATHS],
    /// What the requests of its band and of higher ones need of a decode instance.
    #[serde(default)]
    needs: NeedEstimator,
}

impl ClassMargins {
    fn new() -> Self {
        Self {
            first_tokens: core::array::from_fn(|_| OvershootHistogram::new(BINS, LEAST)),
            steps: OvershootHistogram::new(STEP_BINS, LEAST_STEP),
            samples: core::array::from_fn(|_| PathSamples::default()),
            needs: NeedEstimator::default(),
        }
    }

    fn is_sound(&self) -> bool {
        self.first_tokens.iter().all(|path| path.is_sound(BINS))
            && self.steps.is_sound(STEP_BINS)
            && self.samples.iter().all(PathSamples::is_sound)
            && self.needs.is_sound()
    }
}

/// The margins of each class and path.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MarginEstimator {
    classes: Vec<ClassMargins>,
}

impl MarginEstimator {
    pub(crate) fn new(classes: usize) -> Self {
        Self { classes: (0..classes.max(1)).map(|_| ClassMargins::new()).collect() }
    }

    const fn path(role: Role) -> usize {
        match role {
            Role::Prefill | Role::Store => 0,
            Role::Decode => 1,
            Role::Both => 2,
        }
    }

    /// An unknown class counts as the first, as at admission.
    const fn slot(&self, class: ClassId) -> usize {
        if class.index() < self.classes.len() { class.index() } else { 0 }
    }

    /// The part of a slack that is not promised to a request of that class on an instance of that role, µs.
    pub(crate) fn of_slack_us(&self, class: ClassId, role: Role, slack_us: u64) -> u64 {
        slack_us / 100 * self.percent(class, role)
    }

    /// What is not promised, µs, to a request of that class on an instance of that role that has so much slack and takes so
    /// long itself, µs.
    pub(crate) fn of_wait_us(&self, class: ClassId, role: Role, (slack_us, own_us): (u64, u64)) -> u64 {
        self.of_slack_us(class, role, scale_us(slack_us, own_us)).min(slack_us)
    }

    /// The part of the slack that is not promised to a request of that class on an instance of that role, per cent.
    pub(crate) fn percent(&self, class: ClassId, role: Role) -> u64 {
        self.classes[self.slot(class)].first_tokens[Self::path(role)].margin_percent
    }

    /// What the requests of that class's band and of higher ones need.
    pub(crate) fn needs(&self, class: ClassId) -> &NeedEstimator {
        &self.classes[self.slot(class)].needs
    }

    /// Counts a request that needs so much room, and has so much context in the mean, tokens, for these classes.
    pub(crate) fn note_need(
        &mut self,
        classes: impl Iterator<Item = usize>,
        (room_tokens, context_tokens): (u64, u64),
    ) {
        for at in classes {
            self.classes[at].needs.note(room_tokens, context_tokens);
        }
    }

    /// Records that a first token came `over_us` after the promised time, for a request of that scale, µs.
    pub(crate) fn observe(
        &mut self,
        (class, role): (ClassId, Role),
        over_us: u64,
        scale_us: u64,
        target_permille: u32,
    ) {
        let at = self.slot(class);
        let overshoot = (over_us, scale_us);
        self.classes[at].first_tokens[Self::path(role)].observe(overshoot, target_permille, LEAST);
    }

    /// The part of the slack of a decode step that is not promised to a request of that class, µs.
    #[expect(clippy::cast_precision_loss, reason = "a percentage")]
    pub(crate) fn of_step_slack_us(&self, class: ClassId, slack_us: f64) -> f64 {
        slack_us / 100.0 * self.classes[self.slot(class)].steps.margin_percent as f64
    }

    /// Records that the steps of a request were this much longer than promised, where that is too long.
    pub(crate) fn observe_step(&mut self, class: ClassId, over_us: u64, slack_us: u64, target_permille: u32) {
        let at = self.slot(class);
        self.classes[at].steps.observe((over_us, slack_us), target_permille, LEAST_STEP);
    }

    /// The latest served requests of that class on the path of that role.
    pub(crate) fn samples(&self, class: ClassId, role: Role) -> &PathSamples {
        &self.classes[self.slot(class)].samples[Self::path(role)]
    }

    /// As [`Self::samples`], to add to them.
    pub(crate) fn samples_mut(&mut self, class: ClassId, role: Role) -> &mut PathSamples {
        let at = self.slot(class);
        &mut self.classes[at].samples[Self::path(role)]
    }

    /// Follows a change of the classes: a class of the same name keeps what was learnt.
    pub(crate) fn reclass(&mut self, old: &[alloc::string::String], new: &[alloc::string::String]) {
        let learnt = core::mem::replace(self, Self::new(new.len()));
        for (at, name) in new.iter().enumerate() {
            let before = old.iter().position(|o| o == name).and_then(|o| learnt.classes.get(o));
            before.into_iter().for_each(|before| self.classes[at].clone_from(before));
        }
    }

    /// Whether the estimator has an entry for each of `classes` classes, and each is one that it could have learnt.
    pub(crate) fn knows(&self, classes: usize) -> bool {
        self.classes.len() == classes && self.classes.iter().all(ClassMargins::is_sound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::String;
    use proptest::prelude::*;

    const CLASS: ClassId = ClassId(0);

    #[test]
    fn each_path_has_a_margin_of_its_own_that_is_never_nothing() {
        let mut margins = MarginEstimator::new(1);
        let of = |margins: &MarginEstimator, role| margins.of_slack_us(CLASS, role, 10_000);
        (0..2_000).for_each(|_| margins.observe((CLASS, Role::Prefill), 0, 10_000, 995));
        assert_eq!(of(&margins, Role::Prefill), 400);
        (0..20).for_each(|_| margins.observe((CLASS, Role::Prefill), 900, 10_000, 995));
        assert_eq!((of(&margins, Role::Prefill), of(&margins, Role::Decode)), (900, 400));
        (0..6_000).for_each(|_| margins.observe((CLASS, Role::Prefill), 0, 10_000, 995));
        assert_eq!(of(&margins, Role::Prefill), 400, "what was is forgotten");
    }

    #[test]
    fn a_request_that_takes_most_of_its_time_itself_is_measured_by_that_and_loses_no_more_than_its_slack() {
        let mut margins = MarginEstimator::new(1);
        (0..2_000).for_each(|_| margins.observe((CLASS, Role::Prefill), 900, 9_000, 995));
        let of = |slack_us, own_us| margins.of_wait_us(CLASS, Role::Prefill, (slack_us, own_us));
        assert_eq!([of(9_000, 1_000), of(1_000, 9_000), of(500, 9_500), of(0, 9_000)], [900, 900, 500, 0]);
    }

    #[test]
    fn a_margin_is_bounded_and_an_unknown_class_is_the_first() {
        let mut margins = MarginEstimator::new(2);
        (0..50).for_each(|_| margins.observe((CLASS, Role::Both), u64::MAX, 0, 995));
        assert_eq!(margins.of_slack_us(ClassId(9), Role::Both, 1_000), 300);
        assert_eq!(margins.of_slack_us(ClassId(1), Role::Both, 1_000), 40);
    }

    #[test]
    fn margins_follow_their_class_by_name() {
        let mut margins = MarginEstimator::new(2);
        (0..50).for_each(|_| margins.observe((ClassId(1), Role::Both), 200, 1_000, 995));
        let names = |all: &[&str]| all.iter().map(|n| String::from(*n)).collect::<Vec<_>>();
        margins.reclass(&names(&["a", "b"]), &names(&["b", "c", "a"]));
        let of = |class| margins.of_slack_us(ClassId(class), Role::Both, 1_000);
        assert_eq!((of(0), of(1), of(2)), (200, 40, 40));
        assert!(margins.knows(3) && !margins.knows(2));
    }

    #[test]
    fn histograms_that_nobody_could_have_learnt_are_not_known() {
        let with = |change: fn(&mut OvershootHistogram)| {
            let mut margins = MarginEstimator::new(2);
            change(&mut margins.classes[1].first_tokens[2]);
            margins.knows(2)
        };
        assert!(with(|_| {}));
        assert!(!with(|histogram| histogram.margin_percent = u64::MAX / 99));
        assert!(!with(|histogram| histogram.weights = Box::new([])));
        assert!(!with(|histogram| histogram.weights[3] = f64::NAN));
        let with_step = |change: fn(&mut OvershootHistogram)| {
            let mut margins = MarginEstimator::new(2);
            change(&mut margins.classes[1].steps);
            margins.knows(2)
        };
        assert!(with_step(|_| {}));
        assert!(!with_step(|histogram| histogram.margin_percent = 51));
        assert!(!with_step(|histogram| histogram.weights[50] = -1.0));
    }

    #[test]
    fn steps_have_a_margin_of_their_class_alone_that_is_never_nothing() {
        let mut margins = MarginEstimator::new(2);
        let of = |margins: &MarginEstimator, class| margins.of_step_slack_us(ClassId(class), 1_000.0);
        let is_least = |margin: f64| (margin - 80.0).abs() < 1e-9;
        assert!(is_least(of(&margins, 0)));
        (0..2_000).for_each(|_| margins.observe_step(CLASS, 0, 1_000, 995));
        assert!(is_least(of(&margins, 0)));
        (0..20).for_each(|_| margins.observe_step(CLASS, 250, 1_000, 995));
        assert!((of(&margins, 0) - 250.0).abs() < 1e-9 && is_least(of(&margins, 1)));
        (0..20).for_each(|_| margins.observe_step(CLASS, u64::MAX, 0, 995));
        assert!((of(&margins, 0) - 500.0).abs() < 1e-9, "at most half");
        let names = |all: &[&str]| all.iter().map(|n| String::from(*n)).collect::<Vec<_>>();
        margins.reclass(&names(&["a", "b"]), &names(&["b", "a"]));
        assert!((of(&margins, 1) - 500.0).abs() < 1e-9 && is_least(of(&margins, 0)));
        (0..9_000).for_each(|_| margins.observe_step(ClassId(1), 0, 1_000, 995));
        assert!(is_least(of(&margins, 1)), "what was is forgotten");
    }

    proptest! {
        /// The margin covers all but the target's share of observations that repeat.
        #[test]
        fn the_target_share_is_within_the_margin(
            percents in proptest::collection::vec(0u64..30, 20..60), target_permille in 500u32..1000,
        ) {
            let mut margins = MarginEstimator::new(1);
            for _ in 0..4_000 / percents.len() {
                for percent in &percents {
                    margins.observe((CLASS, Role::Prefill), *percent, 100, target_permille);
                }
            }
            let margin = margins.of_slack_us(CLASS, Role::Prefill, 100);
            let beyond = percents.iter().filter(|p| **p > margin).count() as f64 / percents.len() as f64;
            let target = f64::from(1000 - target_permille) / 1000.0;
            prop_assert!(beyond <= target + 0.03, "{beyond} beyond {margin} %");
            let less = percents.iter().filter(|p| **p + 1 > margin).count() as f64 / percents.len() as f64;
            prop_assert!(margin == LEAST as u64 || less >= target - 0.03, "{margin} % is more than is needed");
        }
    }
}
