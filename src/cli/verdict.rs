//! One line that says which run did best, and whether it would have on another day.

use baton_sim::RunResult;
use baton_sim::interval::{self, BLOCKS};

/// For each speed with several runs, a line: the best by requests in SLO, and the interval of its lead over the next.
pub fn lines(runs: &[RunResult]) -> String {
    let mut speeds: Vec<f64> = Vec::new();
    for run in runs {
        if !speeds.contains(&run.speed) {
            speeds.push(run.speed);
        }
    }
    speeds.into_iter().filter_map(|speed| line(runs, speed)).collect()
}

fn line(runs: &[RunResult], speed: f64) -> Option<String> {
    let mut ranked: Vec<&RunResult> = runs.iter().filter(|run| run.speed == speed).collect();
    ranked.sort_by_key(|run| std::cmp::Reverse(run.in_slo));
    let [best, next, ..] = ranked[..] else { return None };
    let (share, names) = (100.0 * best.goodput, [name(best), name(next)]);
    if best.in_slo == next.in_slo {
        let equal = ranked.iter().filter(|run| run.in_slo == best.in_slo).count();
        return Some(format!("verdict at ×{speed}: {equal} runs have equally many in SLO, {share:.1} %\n"));
    }
    let lead = interval::difference(&best.series, &next.series, best.seed);
    let points = |share: f64| format!("{:+.2}", 100.0 * share);
    let judgement = if lead.excludes_zero() { "best by more than chance" } else { "best within chance" };
    Some(format!(
        "verdict at ×{speed}: {} is {judgement} with {share:.1} % in SLO, {} points on {} (95 % of draws of {BLOCKS} time blocks: {} to {})\n",
        names[0],
        points(lead.figure),
        names[1],
        points(lead.low),
        points(lead.high),
    ))
}

/// What a run is called beside others of its speed.
fn name(run: &RunResult) -> String {
    let parts = [run.nodes(), run.policy.clone(), run.admission.clone()];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", ")
}
