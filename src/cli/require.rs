//! `--require`: conditions that a run must meet, for use in CI.

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

/// Figures that can be required besides those of the JSON report.
const KNOWN: [&str; 12] = [
    "goodput",
    "in_slo",
    "completed",
    "rejected",
    "failed",
    "ttft_s.mean",
    "ttft_s.p99",
    "tbt_ms.mean",
    "tbt_ms.p99",
    "block_hit_ratio",
    "token_hit_ratio",
    "oscillation_index",
];

impl std::str::FromStr for Requirement {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("cannot read {text:?}; write FIGURE>=NUMBER, for example goodput>=0.95 (also <=, >, <)");
        let (sign, comparison) = COMPARISONS.into_iter().find(|(sign, _)| text.contains(sign)).ok_or_else(wrong)?;
        let (figure, bound) = text.split_once(sign).ok_or_else(wrong)?;
        let bound = bound.trim().parse::<f64>().ok().filter(|b| b.is_finite()).ok_or_else(wrong)?;
        let figure = figure.trim();
        if figure.is_empty() {
            return Err(wrong());
        }
        let path: Vec<String> = figure.split('.').map(str::to_owned).collect();
        let requirement = Self { text: text.to_owned(), path, comparison, bound };
        Ok(requirement)
    }
}

impl Requirement {
    /// Whether a run meets it; if not, what was measured.
    pub fn check(&self, run: &RunResult) -> Result<(), String> {
        let value = serde_json::to_value(run).map_err(|e| e.to_string())?;
        let found = self.path.iter().try_fold(&value, |v, key| v.get(key));
        let Some(measured) = found.and_then(Value::as_f64) else {
            let figure = self.path.join(".");
            let meant = baton_types::nearest(&figure, KNOWN).map(|k| format!("; did you mean {k}?")).unwrap_or_default();
            return Err(format!("--require {}: no figure is called {figure}{meant}", self.text));
        };
        let met = match self.comparison {
            Comparison::AtLeast => measured >= self.bound,
            Comparison::AtMost => measured <= self.bound,
            Comparison::Above => measured > self.bound,
            Comparison::Below => measured < self.bound,
        };
        if met {
            return Ok(());
        }
        Err(format!("--require {}: {} ×{} measured {measured:.4}", self.text, run.policy, run.speed))
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
        for wrong in ["goodput", "goodput>=", ">=3", "goodput>=x", "goodput>=NaN"] {
            assert!(wrong.parse::<Requirement>().is_err(), "{wrong}");
        }
    }
}
