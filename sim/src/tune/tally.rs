//! What a search keeps of a run: requests offered and in SLO, by block of time and class.

use serde::{Deserialize, Serialize};

use crate::interval::{BLOCKS, FigureInterval, block_of, bootstrap};
use crate::metrics::{Outcome, Status};
use baton_types::SloClass;

/// By how much a request in SLO beyond its class's target counts, beside one that the target asks for.
const BEYOND_TARGET: f64 = 0.01;

/// Requests offered and in SLO of a run, or of a stretch of one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunTally {
    /// By block of time, then by class: requests offered, and those in SLO.
    pub blocks: Vec<Vec<[u64; 2]>>,
    /// Completed beyond the TTFT objective.
    pub late_ttft: u64,
    /// Completed beyond the TBT objective.
    pub late_tbt: u64,
    /// Completed beyond the E2E objective.
    #[serde(default)]
    pub late_e2e: u64,
    /// Admitted and not served.
    pub failed: u64,
    /// Refusals of the whole run by reason.
    pub refusals: Vec<(String, u64)>,
}

impl RunTally {
    /// Counts the requests that were first offered in `from_us..to_us`.
    #[must_use]
    pub fn of(outcomes: &[Outcome], classes: &[SloClass], (from_us, to_us): (u64, u64)) -> Self {
        let mut tally = Self { blocks: vec![vec![[0; 2]; classes.len()]; BLOCKS], ..Self::default() };
        for outcome in outcomes.iter().filter(|o| (from_us..to_us).contains(&o.first_offer_us)) {
            let at = usize::from(outcome.class).min(classes.len() - 1);
            let block = block_of(outcome.first_offer_us - from_us, to_us - from_us);
            let completed = outcome.status == Status::Completed;
            let late @ [late_ttft, late_tbt, late_e2e] =
                outcome.keeps(&classes[at]).map(|kept| completed && !kept);
            let counts = &mut tally.blocks[block][at];
            counts[0] += 1;
            counts[1] += u64::from(completed && late == [false; 3]);
            tally.late_ttft += u64::from(late_ttft);
            tally.late_tbt += u64::from(late_tbt);
            tally.late_e2e += u64::from(late_e2e);
            tally.failed += u64::from(matches!(outcome.status, Status::Failed | Status::TimedOut));
        }
        tally
    }
}

/// Requests offered and in SLO of the drawn blocks, over runs (of several seeds): of one class, or of all.
fn count(runs: &[RunTally], class: Option<usize>, drawn: &[usize]) -> [u64; 2] {
    let mut sum = [0; 2];
    for block in runs.iter().flat_map(|run| drawn.iter().map(|at| &run.blocks[*at])) {
        for (_, counts) in block.iter().enumerate().filter(|(at, _)| class.is_none_or(|class| class == *at)) {
            sum = [sum[0] + counts[0], sum[1] + counts[1]];
        }
    }
    sum
}

#[expect(clippy::cast_precision_loss, reason = "counts for a share")]
fn ratio([offered, in_slo]: [u64; 2]) -> Option<f64> {
    (offered > 0).then(|| in_slo as f64 / offered as f64)
}

/// Requests offered and in SLO: of one class, or of all.
#[must_use]
pub fn total(runs: &[RunTally], class: Option<usize>) -> [u64; 2] {
    count(runs, class, &(0..BLOCKS).collect::<Vec<_>>())
}

/// The share in SLO, with its interval over time blocks: of one class, or of all.
#[must_use]
pub fn share(runs: &[RunTally], class: Option<usize>, seed: u64) -> FigureInterval {
    bootstrap(BLOCKS, seed, |drawn| ratio(count(runs, class, drawn)))
}

/// By how much, relatively, `one` has more requests in SLO than `other`, over the same time blocks.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "counts for a share")]
pub fn gain(one: &[RunTally], other: &[RunTally], seed: u64) -> FigureInterval {
    bootstrap(BLOCKS, seed, |drawn| {
        let ([offered, one], [_, other]) = (count(one, None, drawn), count(other, None, drawn));
        (offered > 0).then(|| one as f64 / other.max(1) as f64 - 1.0)
    })
}

/// How good runs are, higher is better: first by what the classes lack to their target shares, all told, then by all
/// requests in SLO.
#[must_use]
pub fn merit(runs: &[RunTally], targets: &[f64]) -> f64 {
    merit_of(runs, targets, &(0..BLOCKS).collect::<Vec<_>>())
}

/// Whether each class has its target share in SLO; one without requests does.
pub(super) fn met(runs: &[RunTally], targets: &[f64]) -> Vec<bool> {
    let meets =
        |(class, target): (usize, &f64)| ratio(total(runs, Some(class))).is_none_or(|share| share >= *target);
    targets.iter().enumerate().map(meets).collect()
}

fn merit_of(runs: &[RunTally], targets: &[f64], drawn: &[usize]) -> f64 {
    let missing = |(class, target): (usize, &f64)| {
        ratio(count(runs, Some(class), drawn)).map_or(0.0, |share| (target - share).max(0.0))
    };
    BEYOND_TARGET * ratio(count(runs, None, drawn)).unwrap_or(0.0)
        - targets.iter().enumerate().map(missing).sum::<f64>()
}

/// Whether `one` has more merit than `other` by more than chance, over the same time blocks.
#[must_use]
pub fn is_better(one: &[RunTally], other: &[RunTally], targets: &[f64], seed: u64) -> bool {
    let more = |drawn: &[usize]| merit_of(one, targets, drawn) - merit_of(other, targets, drawn);
    bootstrap(BLOCKS, seed, |drawn| Some(more(drawn))).low > 0.0
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A run with these shares of 1,200 requests of each class in SLO, evenly in time.
    pub(in crate::tune) fn even(shares: &[f64]) -> RunTally {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "shares of a hundred")]
        let counts = |share: &f64| [100, (share * 100.0).round() as u64];
        let block: Vec<[u64; 2]> = shares.iter().map(counts).collect();
        RunTally { blocks: vec![block; BLOCKS], ..RunTally::default() }
    }

    fn outcome(class: u16, status: Status, at_us: u64, ttft_us: u64) -> Outcome {
        Outcome { first_offer_us: at_us, ..Outcome::of_class(class, status, (ttft_us, 0)) }
    }

    #[test]
    fn requests_count_where_they_were_offered_and_only_in_the_stretch() {
        let class = |ttft_us| SloClass { ttft_us, ..SloClass::default() };
        let outcomes = [
            outcome(0, Status::Completed, 99, 5),
            outcome(0, Status::Completed, 100, 5),
            outcome(0, Status::Completed, 100, 50),
            outcome(1, Status::Completed, 219, 50),
            outcome(1, Status::Rejected, 219, 0),
            outcome(1, Status::TimedOut, 160, 0),
            outcome(1, Status::Completed, 220, 5),
        ];
        let tally = RunTally::of(&outcomes, &[class(10), class(100)], (100, 220));
        assert_eq!(tally.blocks[0], [[2, 1], [0, 0]]);
        assert_eq!(tally.blocks[6], [[0, 0], [1, 0]]);
        assert_eq!(tally.blocks[11], [[0, 0], [2, 1]]);
        assert_eq!((tally.late_ttft, tally.late_tbt, tally.failed), (1, 0, 1));
        let runs = [tally];
        assert_eq!([total(&runs, None), total(&runs, Some(1))], [[5, 2], [3, 1]]);
    }

    #[test]
    fn draws_without_a_request_of_a_class_say_nothing_about_it() {
        let mut rare = even(&[0.9, 0.0]);
        rare.blocks.iter_mut().for_each(|block| block[1] = [0, 0]);
        rare.blocks[7][1] = [2, 2];
        assert_eq!(share(&[rare], Some(1), 1), FigureInterval { figure: 1.0, low: 1.0, high: 1.0 });
    }

    #[test]
    fn a_target_that_is_missed_counts_before_all_other_requests() {
        let targets = [0.99, 0.95];
        let of = |shares: &[f64]| merit(&[even(shares)], &targets);
        // Short of one target by two points is worse than of none, however many the other class has.
        assert!(of(&[0.99, 0.95]) > of(&[0.97, 1.0]));
        assert!(of(&[0.90, 0.80]) > of(&[0.80, 0.85]));
        // With both met, more requests in SLO are better.
        assert!(of(&[1.0, 0.96]) > of(&[0.99, 0.96]));
        // A class without requests lacks nothing.
        let mut one = even(&[0.99, 0.0]);
        one.blocks.iter_mut().for_each(|block| block[1] = [0, 0]);
        assert!((merit(&[one], &targets) - 0.0099).abs() < 1e-12);
    }

    #[test]
    fn better_is_what_is_so_in_nearly_every_draw() {
        let (more, less) = ([even(&[0.97])], [even(&[0.96])]);
        assert!(is_better(&more, &less, &[0.95], 1) && !is_better(&less, &more, &[0.95], 1));
        assert!(!is_better(&more, &more, &[0.95], 1), "equal");
        // All of it is in the first of twelve blocks, which many draws leave out.
        let mut once = less.clone();
        once[0].blocks[0][0][1] = 100;
        assert!(merit(&once, &[0.95]) > merit(&less, &[0.95]) && !is_better(&once, &less, &[0.95], 1));
        // A class that comes to its target outweighs requests of another one.
        let (raised, flat) = ([even(&[0.95, 0.5])], [even(&[0.5, 1.0])]);
        assert!(is_better(&raised, &flat, &[0.95, 0.4], 1));
    }

    #[test]
    fn runs_that_are_even_in_time_have_no_spread() {
        let (good, base) = ([even(&[0.9]), even(&[0.8])], [even(&[0.5])]);
        let share = share(&good, Some(0), 1);
        assert!((share.figure - 0.85).abs() < 1e-12 && (share.high - share.low).abs() < 1e-12, "{share:?}");
        // Two runs beside one: seeds are compared as they are, so give both sides as many.
        let gain = gain(&good[..1], &base, 1);
        assert!((gain.figure - 0.8).abs() < 1e-12 && (gain.low - 0.8).abs() < 1e-12, "{gain:?}");
    }
}
