//! Counters and histograms by service class, and counters by tenant: a set of series for each that a request named.

use std::collections::BTreeMap;

use baton_scheduler::{Prediction, PredictionPath, PredictionTarget, ServedRequest};
use metrics::{Counter, Histogram, Key, Label, Recorder as _};
use metrics_exporter_prometheus::PrometheusRecorder;

use super::METADATA;
use super::bounded::BoundedSeries;

/// Classes with series of their own at most: twice the maximum of a configuration, as the exporter keeps the series of
/// classes that a change of policy removed.
const MAX_CLASSES: usize = 2048;
/// Tenants with series of their own at most: without API keys a client may name any.
const MAX_TENANTS: usize = 256;

/// How a request ended, judged by its objectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SloOutcome {
    /// It completed within all objectives.
    InSlo,
    /// Its first token came after its TTFT objective: its own, else the class's `ttft_us`.
    LateTtft,
    /// It completed, its first token was in time, and its TBT is above its objective.
    LateTbt,
    /// It completed, its tokens were in time, and its last one came after the class's `e2e_us`.
    LateE2e,
    /// The conductor refused it.
    Refused,
    /// It was admitted and could not be served.
    Failed,
    /// Its client ended it before it was late.
    Cancelled,
}

impl SloOutcome {
    /// All of them, in the order of their numbers.
    pub(crate) const ALL: [Self; 7] = [
        Self::InSlo,
        Self::LateTtft,
        Self::LateTbt,
        Self::LateE2e,
        Self::Refused,
        Self::Failed,
        Self::Cancelled,
    ];

    /// The value of the label `outcome`.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::InSlo => "in_slo",
            Self::LateTtft => "late_ttft",
            Self::LateTbt => "late_tbt",
            Self::LateE2e => "late_e2e",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// The series of every class that was counted.
#[derive(Default)]
pub(super) struct ByClass {
    classes: BoundedSeries<ClassSeries, MAX_CLASSES>,
    tenants: BoundedSeries<OutcomeCounters, MAX_TENANTS>,
}

/// A counter of each outcome.
type OutcomeCounters = [Counter; SloOutcome::ALL.len()];

/// Every outcome begins at zero: a rate of an outcome that never happened is 0 rather than absent.
fn outcome_counters(recorder: &PrometheusRecorder, name: &'static str, of: &Label) -> OutcomeCounters {
    SloOutcome::ALL.map(|outcome| {
        let labels = vec![of.clone(), Label::new("outcome", outcome.name())];
        let counter = recorder.register_counter(&Key::from_parts(name, labels), &METADATA);
        counter.increment(0);
        counter
    })
}

struct ClassSeries {
    outcomes: OutcomeCounters,
    /// Prompt and output tokens of requests in SLO.
    tokens: [Counter; 2],
    ttft: Histogram,
    tbt: Histogram,
    predictions: BTreeMap<(PredictionPath, PredictionTarget), PredictionSeries>,
}

/// How one kind of prediction held on one path.
struct PredictionSeries {
    ratio: Histogram,
    /// Within the most that was predicted, and beyond it.
    covered: [Counter; 2],
}

impl PredictionSeries {
    /// Both counts begin at zero: a share of requests within what was predicted is 0 rather than absent.
    fn new(
        recorder: &PrometheusRecorder,
        class: &str,
        (path, target): (PredictionPath, PredictionTarget),
    ) -> Self {
        let labels = || {
            vec![
                Label::new("class", class.to_owned()),
                Label::new("path", path.name()),
                Label::new("target", target.name()),
            ]
        };
        let ratio = Key::from_parts("baton_prediction_error_ratio", labels());
        let counter = |covered: &'static str| {
            let mut labels = labels();
            labels.push(Label::new("covered", covered));
            let key = Key::from_parts("baton_prediction_covered_total", labels);
            let counter = recorder.register_counter(&key, &METADATA);
            counter.increment(0);
            counter
        };
        Self {
            ratio: recorder.register_histogram(&ratio, &METADATA),
            covered: ["true", "false"].map(counter),
        }
    }
}

impl ClassSeries {
    fn new(recorder: &PrometheusRecorder, class: &str) -> Self {
        let label = || Label::new("class", class.to_owned());
        let histogram = |name: &'static str| {
            recorder.register_histogram(&Key::from_parts(name, vec![label()]), &METADATA)
        };
        let outcomes = outcome_counters(recorder, "baton_slo_requests_total", &label());
        let tokens = ["prompt", "output"].map(|kind| {
            let key = Key::from_parts("baton_slo_tokens_total", vec![label(), Label::new("kind", kind)]);
            let counter = recorder.register_counter(&key, &METADATA);
            counter.increment(0);
            counter
        });
        Self {
            outcomes,
            tokens,
            ttft: histogram("baton_ttft_seconds"),
            tbt: histogram("baton_request_tbt_seconds"),
            predictions: BTreeMap::new(),
        }
    }
}

impl ByClass {
    fn series<T>(
        &self,
        recorder: &PrometheusRecorder,
        class: &str,
        act: impl FnOnce(&mut ClassSeries, &str) -> T,
    ) -> T {
        self.classes.with(class, |class| ClassSeries::new(recorder, class), act)
    }

    /// Shows a class before its first request, so that the first one is an increase for Prometheus.
    pub(super) fn show(&self, recorder: &PrometheusRecorder, class: &str) {
        self.series(recorder, class, |_, _| ());
    }

    /// Counts a request of a class, and of a tenant if it names one, that has ended.
    pub(super) fn ended(
        &self,
        recorder: &PrometheusRecorder,
        (class, tenant): (&str, Option<&str>),
        outcome: SloOutcome,
    ) {
        self.series(recorder, class, |series, _| series.outcomes[outcome as usize].increment(1));
        let Some(tenant) = tenant else { return };
        let new = |tenant: &str| {
            let label = Label::new("tenant", tenant.to_owned());
            outcome_counters(recorder, "baton_tenant_requests_total", &label)
        };
        self.tenants.with(tenant, new, |counters, _| counters[outcome as usize].increment(1));
    }

    /// Counts the prompt and output tokens of a request in SLO.
    pub(super) fn in_slo(&self, recorder: &PrometheusRecorder, class: &str, tokens: [u64; 2]) {
        self.series(recorder, class, |series, _| {
            series.tokens.iter().zip(tokens).for_each(|(counter, tokens)| counter.increment(tokens));
        });
    }

    pub(super) fn first_token(&self, recorder: &PrometheusRecorder, class: &str, ttft_us: u64) {
        self.series(recorder, class, |series, _| series.ttft.record(ttft_us as f64 / 1e6));
    }

    pub(super) fn request_tbt(&self, recorder: &PrometheusRecorder, class: &str, tbt_us: u64) {
        self.series(recorder, class, |series, _| series.tbt.record(tbt_us as f64 / 1e6));
    }

    pub(super) fn predicted(
        &self,
        recorder: &PrometheusRecorder,
        class: &str,
        prediction: &Prediction,
        served: &ServedRequest,
    ) {
        self.series(recorder, class, |series, class| {
            for outcome in prediction.outcomes(served) {
                let of = (prediction.path, outcome.target);
                let new = || PredictionSeries::new(recorder, class, of);
                let series = series.predictions.entry(of).or_insert_with(new);
                series.ratio.record(outcome.ratio);
                let [within, beyond] = &series.covered;
                (if outcome.covered { within } else { beyond }).increment(1);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use metrics_exporter_prometheus::PrometheusBuilder;

    #[test]
    fn each_outcome_has_a_series_from_the_first_count_and_classes_are_bounded() {
        let (by_class, recorder) = (ByClass::default(), PrometheusBuilder::new().build_recorder());
        assert_eq!(SloOutcome::ALL.map(|outcome| outcome as usize), [0, 1, 2, 3, 4, 5, 6]);
        for at in 0..MAX_CLASSES + 10 {
            by_class.ended(&recorder, (&format!("c{at}"), None), SloOutcome::LateTbt);
        }
        by_class.ended(&recorder, ("c0", Some("acme")), SloOutcome::InSlo);
        by_class.show(&recorder, "c0");
        let page = recorder.handle().render();
        let count = |class: &str, outcome: &str| {
            let series = format!("baton_slo_requests_total{{class=\"{class}\",outcome=\"{outcome}\"}} ");
            page.lines().find_map(|line| line.strip_prefix(&series)?.parse::<u64>().ok())
        };
        for (outcome, expected) in [
            ("in_slo", 1),
            ("late_ttft", 0),
            ("late_tbt", 1),
            ("late_e2e", 0),
            ("refused", 0),
            ("failed", 0),
            ("cancelled", 0),
        ] {
            assert_eq!(count("c0", outcome), Some(expected), "{outcome}");
        }
        assert_eq!(count("other", "late_tbt"), Some(10));
        assert!(
            page.contains("baton_tenant_requests_total{tenant=\"acme\",outcome=\"in_slo\"} 1\n"),
            "{page}"
        );
        by_class.in_slo(&recorder, "c0", [7, 2]);
        by_class.in_slo(&recorder, "c0", [5, 1]);
        let page = recorder.handle().render();
        for (class, kind, tokens) in [("c0", "prompt", 12), ("c0", "output", 3), ("c1", "output", 0)] {
            let line = format!("baton_slo_tokens_total{{class=\"{class}\",kind=\"{kind}\"}} {tokens}\n");
            assert!(page.contains(&line), "{line} is missing: {page}");
        }
        let prediction = Prediction {
            path: PredictionPath::Remote,
            ttft_us: 1_000,
            ttft_most_us: 2_000,
            decode_start_us: 1_000,
            decode_start_most_us: 2_000,
            tbt_us: 80,
            tbt_most_us: 90,
            output_tokens: 10,
            output_tokens_most: 20,
        };
        for ttft_us in [1_050, 2_000, 2_001] {
            let served =
                ServedRequest { ttft_us, tbt_us: Some(90), decode_start_us: None, output_tokens: 21 };
            by_class.predicted(&recorder, "one more", &prediction, &served);
        }
        let page = recorder.handle().render();
        let of = |target: &str| format!("class=\"other\",path=\"remote\",target=\"{target}\"");
        for (target, within, beyond) in [("ttft", 2, 1), ("tbt", 3, 0), ("output_tokens", 0, 3)] {
            for (covered, expected) in [("true", within), ("false", beyond)] {
                let labels = format!("{},covered=\"{covered}\"", of(target));
                let line = format!("baton_prediction_covered_total{{{labels}}} {expected}");
                assert!(page.contains(&line), "{line} is missing: {page}");
            }
        }
        let covered = page.lines().filter(|line| line.starts_with("baton_prediction_covered_total"));
        assert_eq!(covered.count(), 6, "two of each target that was measured");
        assert!(page.contains(&format!("baton_prediction_error_ratio_count{{{}}} 3", of("tbt"))), "{page}");
        assert!(!page.contains(&of("decode_start")), "nothing was measured");
        assert_eq!(by_class.classes.len(), MAX_CLASSES + 1);
    }

    #[test]
    fn each_tenant_has_every_outcome_and_tenants_are_bounded() {
        let (by_class, recorder) = (ByClass::default(), PrometheusBuilder::new().build_recorder());
        for at in 0..MAX_TENANTS + 10 {
            by_class.ended(&recorder, ("c", Some(&format!("t{at}"))), SloOutcome::Refused);
        }
        by_class.ended(&recorder, ("c", Some("t0")), SloOutcome::InSlo);
        let page = recorder.handle().render();
        for (tenant, outcome, count) in
            [("t0", "in_slo", 1), ("t0", "refused", 1), ("t1", "failed", 0), ("other", "refused", 10)]
        {
            let line =
                format!("baton_tenant_requests_total{{tenant=\"{tenant}\",outcome=\"{outcome}\"}} {count}\n");
            assert!(page.contains(&line), "{line} is missing");
        }
        assert_eq!(by_class.tenants.len(), MAX_TENANTS + 1);
    }
}
