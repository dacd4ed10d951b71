//! `--require`: conditions that a run must meet, for use in CI.

use anyhow::{Context as _, Result, bail, ensure};
use baton_sim::RunResult;
use serde_json::Value;

/// One condition, such as `goodput>=0.95` or `ttft_s.p99<30`.
#[derive(Clone, Debug, PartialEq)]
pub struct Requirement {
    text: String,
    path: Vec<String>,
    comparison: Comparison,
    bound: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparison {
    AtLeast,
    AtMost,
    Above,
    Below,
}

const COMPARISONS: [(&str, Comparison); 4] = [
    (">=", Comparison::AtLeast),
    ("<=", Comparison::AtMost),
    (">", Comparison::Above),
    ("<", Comparison::Below),
];

/// Figures that can be required: every plain number of a run in the JSON report.
const FIGURES: [&str; 37] = [
    "block_hit_ratio",
    "cancelled",
    "completed",
    "cpu_s",
    "e2e_ok",
    "failed",
    "fetched_bytes",
    "goodput",
    "handoff_bytes",
    "in_slo",
    "input_tokens",
    "input_tokens_in_slo",
    "itl_ms_mean",
    "lent_bytes",
    "oscillation_index",
    "output_tokens",
    "preemptions",
    "prefill_busy_s",
    "prefill_prediction_error",
    "prompts_outside_profile",
    "readmitted",
    "readmitted_in_slo",
    "refusals",
    "rejected",
    "replications",
    "requests",
    "retries",
    "role_changes",
    "second_tries",
    "second_tries_admitted",
    "saves",
    "strides_outside_profile",
    "tbt_ok",
    "token_hit_ratio",
    "ttft_ok",
    "wasted_prefill_tokens",
    "worst_lateness_s",
];

/// Summaries, each with these parts.
const SUMMARIES: [&str; 3] = ["ttft_s", "tbt_ms", "retry_after_s"];
const PARTS: [&str; 5] = ["mean", "p50", "p90", "p99", "max"];

/// Checks a figure's name, so that a slip is found before any work.
fn known(path: &[String]) -> Result<()> {
    let plain = |name: &str| path.len() == 1 && FIGURES.contains(&name);
    let part = |name: &str| path.len() == 2 && SUMMARIES.contains(&name) && PARTS.contains(&path[1].as_str());
    let name = path.join(".");
    if plain(&path[0]) || part(&path[0]) {
        return Ok(());
    }
    let all = FIGURES.into_iter().chain(SUMMARIES);
    let meant =
        baton_types::nearest(&path[0], all).map(|k| format!("; did you mean {k}?")).unwrap_or_default();
    bail!("no figure is called {name}{meant} (a summary takes a part: ttft_s.p99)")
}

impl std::str::FromStr for Requirement {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            format!("cannot read {text:?}; write FIGURE>=NUMBER, for example goodput>=0.95 (also <=, >, <)")
        };
        let (sign, comparison) =
            COMPARISONS.into_iter().find(|(sign, _)| text.contains(sign)).with_context(wrong)?;
        let (figure, bound) = text.split_once(sign).with_context(wrong)?;
        let bound = bound.trim().parse::<f64>().ok().filter(|b| b.is_finite()).with_context(wrong)?;
        let figure = figure.trim();
        ensure!(!figure.is_empty(), wrong());
        let path: Vec<String> = figure.split('.').map(str::to_owned).collect();
        known(&path)?;
        Ok(Self { text: text.to_owned(), path, comparison, bound })
    }
}

impl Requirement {
    /// Whether a run meets it; if not, what was measured.
    pub fn check(&self, run: &RunResult) -> Result<()> {
        let value = serde_json::to_value(run)?;
        let found = self.path.iter().try_fold(&value, |v, key| v.get(key));
        let Some(measured) = found.and_then(Value::as_f64) else {
            bail!("--require {}: {} ×{} measured nothing of that name", self.text, run.policy, run.speed);
        };
        let met = match self.comparison {
            Comparison::AtLeast => measured >= self.bound,
            Comparison::AtMost => measured <= self.bound,
            Comparison::Above => measured > self.bound,
            Comparison::Below => measured < self.bound,
        };
        ensure!(met, "--require {}: {} ×{} measured {measured:.4}", self.text, run.policy, run.speed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_read_strictly() {
        let r: Requirement = "goodput >= 0.95".parse().expect("readable");
        assert_eq!((r.path.len(), r.comparison), (1, Comparison::AtLeast));
        let r: Requirement = "ttft_s.p99<30".parse().expect("readable");
        assert_eq!((r.path.len(), r.comparison), (2, Comparison::Below));
        for wrong in
            ["goodput", "goodput>=", ">=3", "goodput>=x", "goodput>=NaN", "ttft_s>3", "goodput.p99>3"]
        {
            assert!(wrong.parse::<Requirement>().is_err(), "{wrong}");
        }
        assert!(
            "godput>=1"
                .parse::<Requirement>()
                .is_err_and(|e| e.to_string().contains("did you mean goodput?"))
        );
    }

    #[test]
    fn every_figure_that_can_be_required_is_one_of_a_run() {
        let trace = std::sync::Arc::new(baton_traces::synth::like(
            baton_traces::synth::PublishedTrace::Conversation,
            1,
        ));
        let setup =
            crate::cli::cluster::setup(&crate::config::Config::default(), 1).expect("the default cluster");
        let workload = baton_sim::TraceWorkload::new(trace, 1.0).limited(20);
        let mut world = baton_sim::World::new(setup, Box::new(workload)).expect("a world");
        world.run().expect("a clean run");
        let run = world.into_metrics().result(("baton", "slo"), 1.0, 1);
        let value = serde_json::to_value(&run).expect("a run is JSON");
        for figure in FIGURES {
            assert!(value[figure].is_number(), "{figure} is no number of a run");
        }
        for (summary, part) in SUMMARIES.iter().flat_map(|s| PARTS.map(|p| (s, p))) {
            assert!(value[*summary].get(part).is_some(), "{summary}.{part}");
        }
    }
}
