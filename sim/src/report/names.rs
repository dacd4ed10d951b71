//! Names of runs, and the line styles that distinguish them in drawings.

use crate::metrics::RunResult;

use super::text::escape;

/// Colours of the palette in the style sheet.
const COLOURS: usize = 10;
/// Dash patterns of the style sheet.
const DASHES: usize = 5;

/// A short name for each run: its policy and, where speeds differ, its speed; nodes, admission, seed
/// and place only where runs would have the same name without them.
#[must_use]
pub(super) fn labels(runs: &[RunResult]) -> Vec<String> {
    let speeds = runs.windows(2).any(|w| w[0].speed.to_bits() != w[1].speed.to_bits());
    let base = |run: &RunResult| match speeds {
        true => format!("{} · ×{}", run.policy, run.speed),
        false => run.policy.clone(),
    };
    let mut names: Vec<String> = runs.iter().map(base).collect();
    set_apart(&mut names, |at| runs[at].nodes());
    set_apart(&mut names, |at| runs[at].admission.clone());
    set_apart(&mut names, |at| format!("seed {}", runs[at].seed));
    set_apart(&mut names, |at| format!("#{}", at + 1));
    names
}

/// Appends `part` to each name that another run shares, if the two runs differ in it.
fn set_apart(names: &mut [String], part: impl Fn(usize) -> String) {
    let before = names.to_vec();
    let twins = |at: usize| {
        (0..before.len())
            .filter(move |other| *other != at)
            .filter(|other| before[*other] == before[at])
            .collect::<Vec<_>>()
    };
    for (at, name) in names.iter_mut().enumerate() {
        if twins(at).into_iter().any(|other| part(other) != part(at)) {
            *name = format!("{name} · {}", part(at));
        }
    }
}

/// Classes of a run's line: its own, its colour and its dashes. The pairs repeat after 50 runs.
#[must_use]
pub(super) fn stroke(run: usize) -> String {
    format!("r{run} k{} d{}", run % COLOURS, (run + run / COLOURS) % DASHES)
}

/// A short piece of a run's line with its name.
#[must_use]
pub(super) fn key(run: usize, label: &str) -> String {
    format!(
        "<svg class=\"key\" viewBox=\"0 0 26 8\" aria-hidden=\"true\"><path class=\"line {}\" d=\"M1,4 25,4\"/></svg>{}",
        stroke(run),
        escape(label)
    )
}

/// Switches for the runs drawn, and the rules that hide what is switched off.
#[must_use]
pub(super) fn switches(labels: &[String]) -> String {
    if labels.len() < 2 {
        return String::new();
    }
    let rule = |run: usize| format!("body:has(#run{run}:not(:checked)) .r{run}{{display:none}}");
    let switch = |(run, label): (usize, &String)| {
        let key = key(run, label).replace(&format!("\"line r{run} "), "\"line ");
        format!("<label><input type=\"checkbox\" id=\"run{run}\" checked>{key}</label>")
    };
    let rules: String = (0..labels.len()).map(rule).collect();
    let boxes: String = labels.iter().enumerate().map(switch).collect();
    format!("<style>{rules}</style><nav class=\"runs\" aria-label=\"Runs shown\"><b>Runs</b>{boxes}</nav>")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fifty_runs_look_different() {
        let mut looks: Vec<String> =
            (0..50).map(|r| stroke(r).split_once(' ').unwrap().1.to_owned()).collect();
        looks.sort();
        looks.dedup();
        assert_eq!(looks.len(), 50);
    }

    #[test]
    fn a_switched_off_run_keeps_its_switch() {
        let html = switches(&["a".into(), "b".into()]);
        let (rules, boxes) = html.split_once("</style>").unwrap();
        assert!(rules.contains("#run1") && rules.contains(".r1{"));
        assert!(!boxes.contains("r1 "), "a key in the switches must not vanish with its run: {boxes}");
    }
}
