//! Tables of runs for the terminal.

use baton_scheduler::{PredictionFigures, PredictionTarget};
use baton_sim::RunResult;
use baton_sim::metrics::{ClassResult, TenantResult};
use comfy_table::{CellAlignment, Table, presets::UTF8_BORDERS_ONLY};

/// An empty table; the columns of `figures` are aligned to the right.
pub fn with_header(header: &[&str], figures: impl std::ops::RangeBounds<usize>) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_BORDERS_ONLY).set_header(header.to_vec());
    for (_, column) in table.column_iter_mut().enumerate().filter(|(at, _)| figures.contains(at)) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// A table of these rows.
fn filled<R: Into<comfy_table::Row>>(
    header: &[&str],
    figures: impl std::ops::RangeBounds<usize>,
    rows: impl Iterator<Item = R>,
) -> String {
    let mut table = with_header(header, figures);
    table.add_rows(rows);
    table.to_string()
}

/// Runs side by side; below, why requests were refused, where a run has more than one service class, a row for each
/// class of each run, where its requests name tenants, a row for each of the largest, and where it has a bound, a row for
/// each run beside that.
pub fn report(runs: &[RunResult]) -> String {
    let mut tables = vec![self::runs(runs)];
    tables.extend(runs.iter().filter_map(|run| refusals(run, runs)));
    if runs.iter().any(|run| run.classes.len() > 1) {
        tables.push(classes(runs));
    }
    if runs.iter().any(|run| !run.tenants.is_empty()) {
        tables.push(tenants(runs));
    }
    if runs.iter().any(|run| run.bound.is_some()) {
        tables.push(bounds(runs));
    }
    tables.join("\n")
}

/// A run's policy, with its nodes where runs differ in them.
fn name(run: &RunResult, runs: &[RunResult]) -> String {
    let sweep = runs.iter().any(|other| other.nodes() != run.nodes());
    if sweep { format!("{} {}", run.nodes(), run.policy) } else { run.policy.clone() }
}

/// Runs side by side.
fn runs(runs: &[RunResult]) -> String {
    let left = any_left(runs);
    let mut header = vec!["policy", "admission", "speed", "done", "refused", "failed"];
    header.extend(left.then_some("cancelled"));
    header.extend(["in SLO", "tokens in SLO", "TTFT mean", "p50", "p90", "p99"]);
    header.extend(["TBT mean", "p99", "hit", "CPU"]);
    filled(&header, 2.., runs.iter().map(|run| row(run, name(run, runs), left)))
}

/// Whether a client left in some run: cancelled requests have a column then.
fn any_left(runs: &[RunResult]) -> bool {
    runs.iter().any(|run| run.cancelled > 0)
}

/// Why a run refused requests, most first; none where it refused none.
fn refusals(run: &RunResult, runs: &[RunResult]) -> Option<String> {
    let mut reasons = run.refusals_by_reason.clone();
    reasons.retain(|(_, count)| *count > 0);
    reasons.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let each: Vec<String> = reasons.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    let [policy, admission, speed] = run_cells(run, runs);
    (!each.is_empty()).then(|| format!("refusals of {policy}, {admission} at {speed}: {}", each.join(", ")))
}

/// Service classes, run by run.
fn classes(runs: &[RunResult]) -> String {
    let left = any_left(runs);
    let mut header = vec!["policy", "admission", "speed", "class", "requests", "in SLO", "target"];
    header.extend(["late TTFT", "late TBT", "late E2E", "refused"]);
    header.extend(left.then_some("cancelled"));
    header.extend(["TTFT p50", "p90"]);
    let rows = runs
        .iter()
        .flat_map(|run| run.classes.iter().map(move |class| class_row(run_cells(run, runs), class, left)));
    filled(&header, 4.., rows)
}

/// A run's first cells in a table of its parts: policy, admission, speed.
fn run_cells(run: &RunResult, runs: &[RunResult]) -> [String; 3] {
    [name(run, runs), run.admission.clone(), format!("×{}", run.speed)]
}

fn class_row(run: [String; 3], class: &ClassResult, left: bool) -> Vec<String> {
    let mut cells = Vec::from(run);
    cells.extend([
        class.name.clone(),
        class.requests.to_string(),
        percent(class.attained),
        percent(Some(class.target)),
        class.late_ttft.to_string(),
        class.late_tbt.to_string(),
        class.late_e2e.to_string(),
        class.rejected.to_string(),
    ]);
    cells.extend(left.then(|| class.cancelled.to_string()));
    cells.extend([seconds(class.ttft_s.p50), seconds(class.ttft_s.p90)]);
    cells
}

/// The tenants with the most requests, run by run.
fn tenants(runs: &[RunResult]) -> String {
    let header = [
        "policy",
        "admission",
        "speed",
        "tenant",
        "requests",
        "in SLO",
        "prompt tokens in SLO",
        "refused",
        "failed",
        "TTFT p50",
        "p90",
    ];
    let row = |[policy, admission, speed]: [String; 3], (title, tenant): (String, TenantResult)| {
        [
            policy,
            admission,
            speed,
            title,
            tenant.requests.to_string(),
            percent(tenant.attained),
            tenant.input_tokens_in_slo.to_string(),
            tenant.rejected.to_string(),
            tenant.failed.to_string(),
            seconds(tenant.ttft_s.p50),
            seconds(tenant.ttft_s.p90),
        ]
    };
    let rows = runs.iter().flat_map(|run| {
        let tenants = TenantResult::rows(&run.tenants, TenantResult::SHOWN).into_iter();
        tenants.map(move |tenant| row(run_cells(run, runs), tenant))
    });
    filled(&header, 4.., rows)
}

/// How well predictions held: a row for each class, path and prediction of each run.
pub fn calibration(runs: &[RunResult]) -> String {
    let header = [
        "policy",
        "speed",
        "class",
        "path",
        "prediction",
        "requests",
        "median error",
        "bias",
        "p90",
        "within",
        "target",
    ];
    let mut table = with_header(&header, 5..);
    for run in runs {
        for class in &run.classes {
            for path in &class.predictions {
                let names: [&str; 4] =
                    [&run.policy, &format!("×{}", run.speed), &class.name, path.path.name()];
                for (target, figures) in path.all() {
                    table.add_row(prediction_row(&names, target, figures));
                }
            }
        }
    }
    table.to_string()
}

/// Runs beside the bound and the best run known.
fn bounds(runs: &[RunResult]) -> String {
    let header = [
        "policy",
        "admission",
        "speed",
        "in SLO",
        "upper bound",
        "gap",
        "best run",
        "of",
        "gap",
        "tokens in SLO",
        "upper bound",
        "best run",
    ];
    filled(&header, 2.., runs.iter().filter_map(bound_row))
}

fn bound_row(run: &RunResult) -> Option<Vec<String>> {
    let bound = run.bound.as_ref()?;
    let gap = |requests: u64| format!("{requests} ({})", share(requests, run.requests));
    let tokens = |tokens: u64| share(tokens, run.input_tokens);
    Some(vec![
        run.policy.clone(),
        run.admission.clone(),
        format!("×{}", run.speed),
        run.in_slo.to_string(),
        bound.in_slo.to_string(),
        gap(bound.gap_to_bound),
        bound.witness.in_slo.to_string(),
        format!("{}, {}", bound.witness.policy, bound.witness.admission),
        gap(bound.gap_to_witness),
        tokens(run.input_tokens_in_slo),
        tokens(bound.input_tokens_in_slo),
        tokens(bound.witness.input_tokens_in_slo),
    ])
}

fn prediction_row(names: &[&str; 4], target: PredictionTarget, figures: &PredictionFigures) -> Vec<String> {
    let signed = |error: Option<f64>| error.map_or_else(|| "–".into(), |e| format!("{:+.1} %", 100.0 * e));
    let names = names.iter().map(|name| (*name).to_owned());
    let figures = [
        target.words().to_owned(),
        figures.requests.to_string(),
        percent(figures.median_error),
        signed(figures.bias),
        signed(figures.p90),
        percent(figures.covered),
        percent(Some(figures.target)),
    ];
    names.chain(figures).collect()
}

fn seconds(value: Option<f64>) -> String {
    value.map_or_else(|| "–".into(), |v| format!("{v:.2} s"))
}

#[expect(clippy::cast_precision_loss, reason = "a share for a table")]
fn share(part: u64, whole: u64) -> String {
    percent((whole > 0).then(|| part as f64 / whole as f64))
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "–".into(), |share| format!("{:.1} %", 100.0 * share))
}

fn row(run: &RunResult, name: String, left: bool) -> Vec<String> {
    let millis = |v: Option<f64>| v.map_or_else(|| "–".into(), |v| format!("{v:.1} ms"));
    let mut cells = vec![
        name,
        run.admission.clone(),
        format!("×{}", run.speed),
        run.completed.to_string(),
        run.rejected.to_string(),
        run.failed.to_string(),
    ];
    cells.extend(left.then(|| run.cancelled.to_string()));
    cells.extend([
        format!("{} ({})", run.in_slo, share(run.in_slo, run.requests)),
        share(run.input_tokens_in_slo, run.input_tokens),
        seconds(run.ttft_s.mean),
        seconds(run.ttft_s.p50),
        seconds(run.ttft_s.p90),
        seconds(run.ttft_s.p99),
        millis(run.tbt_ms.mean),
        millis(run.tbt_ms.p99),
        percent(Some(run.block_hit_ratio)),
        format!("{:.2} s", run.cpu_s),
    ]);
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_nothing_is_a_dash() {
        assert_eq!([share(0, 0), share(0, 4), share(1, 4)], ["–", "0.0 %", "25.0 %"]);
    }

    #[test]
    fn predictions_that_were_not_made_are_dashes() {
        let names = ["baton", "×1", "default", "local"];
        let none = prediction_row(
            &names,
            PredictionTarget::Tbt,
            &PredictionFigures { target: 0.9, ..PredictionFigures::default() },
        );
        assert_eq!(none[4..], ["TBT", "0", "–", "–", "–", "–", "90.0 %"]);
        let some =
            PredictionFigures { bias: Some(-0.051), covered: Some(0.9), ..PredictionFigures::default() };
        let some = prediction_row(&names, PredictionTarget::Ttft, &some);
        assert_eq!((some[7].as_str(), some[9].as_str()), ("-5.1 %", "90.0 %"));
    }
}
