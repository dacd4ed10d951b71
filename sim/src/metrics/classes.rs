//! Figures by service class.

use baton_scheduler::{PathFigures, PredictionLedger, ServedRequest};
use baton_types::SloClass;
use serde::Serialize;

use super::{LatencySummary, Outcome, Samples, Status};

/// The figures of one service class. Each request counts once, in its own class, when it ends.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClassResult {
    /// Name of the class.
    pub name: String,
    /// `target_permille` of the class, 0–1: the share of the admitted requests that should have their first token in time.
    /// Rejected requests and late gaps do not count in it, but they do in `in_slo`.
    pub target: f64,
    /// Requests offered: completed, rejected, failed and cancelled ones.
    pub requests: u64,
    /// Requests that got all their tokens.
    pub completed: u64,
    /// Requests in SLO.
    pub in_slo: u64,
    /// Completed requests beyond the TTFT objective.
    pub late_ttft: u64,
    /// Completed requests with their first token in time, beyond the TBT objective.
    pub late_tbt: u64,
    /// Completed requests with their tokens in time, beyond the E2E objective.
    pub late_e2e: u64,
    /// Requests refused for good.
    pub rejected: u64,
    /// Requests admitted that could not be served.
    pub failed: u64,
    /// Requests whose client left.
    pub cancelled: u64,
    /// `in_slo` over `requests` without the cancelled ones, as a service counts it; none without a request.
    pub attained: Option<f64>,
    /// Share of completed requests with their first token in time, which `target` is for; none without a request.
    pub ttft_attained: Option<f64>,
    /// Time to first token of completed requests.
    pub ttft_s: LatencySummary,
    /// How predictions for its completed requests held, for each path that had one.
    pub predictions: Vec<PathFigures>,
}

/// Counts of one class.
#[derive(Clone, Debug, Default)]
struct ClassCounts {
    completed: u64,
    in_slo: u64,
    late_ttft: u64,
    late_tbt: u64,
    late_e2e: u64,
    rejected: u64,
    failed: u64,
    cancelled: u64,
    ttft_us: Samples,
    predictions: PredictionLedger,
}

/// Counts requests by service class as they end.
#[derive(Clone, Debug)]
pub struct ClassCounter {
    classes: Vec<(SloClass, ClassCounts)>,
}

impl ClassCounter {
    /// A counter of no request, for `classes` (at least one).
    #[must_use]
    pub fn new(classes: &[SloClass]) -> Self {
        Self { classes: classes.iter().map(|c| (c.clone(), ClassCounts::default())).collect() }
    }

    /// Counts a request that ended; one of an unknown class counts in the last.
    pub fn ended(&mut self, outcome: &Outcome) {
        let last = self.classes.len() - 1;
        let (class, counts) = &mut self.classes[usize::from(outcome.class).min(last)];
        match outcome.status {
            Status::Completed => {
                counts.completed += 1;
                // The first objective that it missed, as a service counts it.
                *match outcome.keeps(class) {
                    [false, ..] => &mut counts.late_ttft,
                    [true, false, _] => &mut counts.late_tbt,
                    [true, true, false] => &mut counts.late_e2e,
                    [true, true, true] => &mut counts.in_slo,
                } += 1;
                counts.ttft_us.push(outcome.ttft_us);
                if let Some(prediction) = &outcome.prediction {
                    counts.predictions.observe(prediction, &served(outcome));
                }
            }
            Status::Rejected => counts.rejected += 1,
            Status::Failed | Status::TimedOut => counts.failed += 1,
            Status::Cancelled => counts.cancelled += 1,
        }
    }

    /// The figures of each class, in the order of the classes.
    #[must_use]
    pub fn results(&self) -> Vec<ClassResult> {
        let result = |(class, n): &(SloClass, ClassCounts)| ClassResult {
            name: class.name.clone(),
            target: f64::from(class.target_permille) / 1000.0,
            requests: n.completed + n.rejected + n.failed + n.cancelled,
            completed: n.completed,
            in_slo: n.in_slo,
            late_ttft: n.late_ttft,
            late_tbt: n.late_tbt,
            late_e2e: n.late_e2e,
            rejected: n.rejected,
            failed: n.failed,
            cancelled: n.cancelled,
            attained: share(n.in_slo, n.completed + n.rejected + n.failed),
            ttft_attained: share(n.completed - n.late_ttft, n.completed),
            ttft_s: n.ttft_us.figures(1e6).0,
            predictions: n.predictions.figures(),
        };
        self.classes.iter().map(result).collect()
    }
}

#[expect(clippy::cast_precision_loss, reason = "a share for a report")]
pub(super) fn share(part: u64, all: u64) -> Option<f64> {
    (all > 0).then(|| part as f64 / all as f64)
}

/// What predictions are compared with.
fn served(outcome: &Outcome) -> ServedRequest {
    // An answer of one token has no gap and no decode.
    let decodes = outcome.gaps.count > 0;
    ServedRequest {
        ttft_us: outcome.ttft_us,
        tbt_us: decodes.then_some(outcome.gaps.worst_tenth_us),
        decode_start_us: decodes.then_some(outcome.decode_start_us),
        output_tokens: outcome.output_tokens,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::RequestObjectives;

    #[test]
    fn an_answer_that_ends_late_is_not_in_slo() {
        let classes = [0, 5_000_000].map(|e2e_us| SloClass { e2e_us, ..SloClass::default() });
        let mut counter = ClassCounter::new(&classes);
        for (class, end_us) in [(0, 9_000_000), (1, 6_000_000), (1, 6_000_001)] {
            let answer = Outcome::of_class(class, Status::Completed, (1, 1));
            // It was refused at first: the time counts from the offer that was let in.
            counter.ended(&Outcome { offer_us: 1_000_000, end_us, ..answer });
        }
        let counts = |r: &ClassResult| [r.completed, r.in_slo, r.late_ttft, r.late_tbt, r.late_e2e];
        let results = counter.results();
        assert_eq!((counts(&results[0]), counts(&results[1])), ([1, 1, 0, 0, 0], [2, 1, 0, 0, 1]));
    }

    #[test]
    fn a_request_that_names_objectives_is_judged_by_them() {
        let class = SloClass { ttft_us: 1_000, tbt_us: 100, ..SloClass::default() };
        let own = |ttft_us, tbt_us| RequestObjectives { ttft_us, tbt_us };
        let kept = |objectives, measured| {
            let mut counter = ClassCounter::new(std::slice::from_ref(&class));
            counter.ended(&Outcome { objectives, ..Outcome::of_class(0, Status::Completed, measured) });
            let [r] = &counter.results()[..] else { panic!("one class") };
            [r.in_slo, r.late_ttft, r.late_tbt]
        };
        assert_eq!(kept(own(Some(500), None), (501, 100)), [0, 1, 0]);
        assert_eq!(kept(own(None, Some(50)), (1_000, 51)), [0, 0, 1]);
        assert_eq!(kept(own(Some(2_000), Some(200)), (2_000, 200)), [1, 0, 0]);
        let late_us = |objectives| {
            Outcome { objectives, ..Outcome::of_class(0, Status::Completed, (1_200, 1)) }.late_us(&class)
        };
        assert_eq!([late_us(own(None, None)), late_us(own(Some(700), None))], [200, 500]);
    }

    #[test]
    fn each_request_counts_once_in_its_class_by_that_classes_objectives() {
        let class = |name: &str, ttft_us, target_permille| SloClass {
            name: name.into(),
            ttft_us,
            tbt_us: 100,
            target_permille,
            ..SloClass::default()
        };
        let mut counter = ClassCounter::new(&[class("chat", 1_000_000, 995), class("batch", 9_000_000, 900)]);
        for (class, status, ttft_us, tbt_us) in [
            (0, Status::Completed, 1_000_000, 100),
            (0, Status::Completed, 2_000_000, 100),
            (0, Status::Completed, 3_000_000, 101),
            (0, Status::Rejected, 0, 0),
            (1, Status::Completed, 2_000_000, 100),
            (1, Status::Completed, 1_000_000, 101),
            (1, Status::Failed, 9, 9),
            (1, Status::TimedOut, 9, 9),
            (7, Status::Cancelled, 9, 9),
        ] {
            counter.ended(&Outcome::of_class(class, status, (ttft_us, tbt_us)));
        }
        let results = counter.results();
        let counts = |r: &ClassResult| {
            [r.requests, r.completed, r.in_slo, r.late_ttft, r.late_tbt, r.rejected, r.failed, r.cancelled]
        };
        assert_eq!(counts(&results[0]), [4, 3, 1, 2, 0, 1, 0, 0], "late by its first objective alone");
        assert_eq!(counts(&results[1]), [5, 2, 1, 0, 1, 0, 2, 1]);
        assert_eq!((results[0].attained, results[1].attained), (Some(0.25), Some(0.25)), "not the cancelled");
        assert_eq!((results[0].ttft_attained, results[1].ttft_attained), (Some(1.0 / 3.0), Some(1.0)));
        assert_eq!((results[0].name.as_str(), results[1].name.as_str()), ("chat", "batch"));
        assert_eq!((results[0].target, results[1].target), (0.995, 0.9));
        assert_eq!((results[0].ttft_s.p50, results[0].ttft_s.p90), (Some(2.0), Some(3.0)));
        assert_eq!(results[1].ttft_s.p90, Some(2.0), "of completed requests alone");
    }
}
