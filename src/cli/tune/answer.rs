//! What `baton tune` says in the end.

use baton_sim::interval::FigureInterval;
use baton_sim::tune::{self, RunTally};
use baton_types::SloClass;
use serde::Serialize;

use crate::cli::table;

/// A class before and after, on the part that nothing was tuned on.
#[derive(Clone, Debug, Serialize)]
pub struct ClassAnswer {
    pub name: String,
    /// Share that should be in SLO.
    pub target: f64,
    /// Share in SLO with the configuration at hand.
    pub now: FigureInterval,
    /// Share in SLO with the tuned one.
    pub tuned: FigureInterval,
}

/// The tuned configuration where something is different.
#[derive(Clone, Debug, Serialize)]
pub struct ScenarioAnswer {
    pub scenario: String,
    /// Each class with its share in SLO.
    pub classes: Vec<(String, FigureInterval)>,
    /// Why there is no such configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nothing: Option<String>,
}

/// Everything that was found. The names are relied upon by scripts; all shares are of the held-out part.
#[derive(Clone, Debug, Serialize)]
pub struct TuneAnswer {
    /// In one sentence.
    pub sentence: String,
    /// Whether not even all nodes keep the targets, where the fewest that do were asked for.
    pub too_few_nodes: bool,
    /// Nodes by role, such as `12P4D`.
    pub nodes: String,
    /// Nodes by role of the configuration at hand.
    pub nodes_now: String,
    /// GPUs in all, where they are known.
    pub gpus: Option<u32>,
    /// Settings that are different.
    pub changes: Vec<String>,
    /// What was better on the part to tune on, and in the held-out part by no more than chance: it is not changed.
    pub left_out: Vec<String>,
    pub classes: Vec<ClassAnswer>,
    /// Requests in SLO for each node, relative to the configuration at hand.
    pub gain: FigureInterval,
    /// Whether the gain is more than chance.
    pub more_than_chance: bool,
    /// Requests in SLO a minute for each GPU (for each node where its GPUs are not known): now, and tuned.
    pub goodput_per_minute: [f64; 2],
    /// Whether the tuned configuration meets all targets.
    pub meets_targets: bool,
    /// Factor of the load up to which it does.
    pub headroom: Option<f64>,
    /// What most requests that are not in SLO lack just beyond that load.
    pub next_bottleneck: Option<String>,
    pub what_if: Vec<ScenarioAnswer>,
    /// Requests that were tuned on, and that were held out.
    pub requests: [u64; 2],
    /// Runs that the search asked for.
    pub trials: usize,
}

/// Each class of the runs, before and after.
pub fn classes(classes: &[SloClass], now: &[RunTally], tuned: &[RunTally], seed: u64) -> Vec<ClassAnswer> {
    let answer = |(at, class): (usize, &SloClass)| ClassAnswer {
        name: class.name.clone(),
        target: target(class),
        now: tune::share(now, Some(at), seed),
        tuned: tune::share(tuned, Some(at), seed),
    };
    classes.iter().enumerate().map(answer).collect()
}

/// The share of a class's requests that should be in SLO.
pub fn target(class: &SloClass) -> f64 {
    f64::from(class.target_permille) / 1000.0
}

/// Whether every class has its target share in SLO.
pub fn meets(runs: &[RunTally], classes: &[SloClass]) -> bool {
    classes.iter().enumerate().all(|(at, class)| {
        let [offered, in_slo] = tune::total(runs, Some(at));
        u128::from(in_slo) * 1000 >= u128::from(offered) * u128::from(class.target_permille)
    })
}

/// What most requests that were not served in SLO lacked.
pub fn bottleneck(run: &RunTally) -> Option<&'static str> {
    const PREFILL: &str = "prefill time";
    const STEPS: &str = "decode step time";
    let word = |reason: &str| match reason {
        "tbt" => STEPS,
        "room" => "decode KV room",
        "too_long" | "objective_unreachable" => "objectives that no idle node keeps",
        "queue_full" | "no_instance" => "nodes",
        _ => PREFILL,
    };
    let mut lacks: Vec<(&str, u64)> = vec![(PREFILL, run.late_ttft), (STEPS, run.late_tbt + run.late_e2e)];
    for (reason, count) in &run.refusals {
        let word = word(reason);
        match lacks.iter_mut().find(|(known, _)| *known == word) {
            Some((_, sum)) => *sum += count,
            None => lacks.push((word, *count)),
        }
    }
    lacks
        .into_iter()
        .rev()
        .max_by_key(|(_, count)| *count)
        .filter(|(_, count)| *count > 0)
        .map(|(word, _)| word)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn interval(of: &FigureInterval) -> String {
    format!("{:.1} to {:.1} %", 100.0 * of.low, 100.0 * of.high)
}

/// The answer in one sentence.
pub fn sentence(answer: &TuneAnswer) -> String {
    let class = |class: &ClassAnswer| {
        format!("{} {} in SLO (now {})", class.name, percent(class.tuned.figure), percent(class.now.figure))
    };
    let classes: Vec<String> = answer.classes.iter().map(class).collect();
    let same = answer.nodes == answer.nodes_now && answer.changes.is_empty();
    let mut what = match answer.too_few_nodes {
        true => "not even all nodes keep every target in both parts; ".to_owned(),
        false => String::new(),
    };
    what.push_str(&answer.nodes);
    if same {
        what.push_str(" as it is");
    }
    for change in answer.changes.iter().filter(|change| !change.starts_with("cluster.pools")) {
        // `scheduler.classes[0].priority: 0 -> 1` is said as `classes[0].priority 1`.
        if let Some((key, (_, new))) =
            change.split_once(": ").and_then(|(k, v)| Some((k, v.split_once(" -> ")?)))
        {
            what.push_str(&format!(", {} {new}", key.trim_start_matches("scheduler.")));
        }
    }
    let goodput = match answer.more_than_chance {
        _ if same => "nothing is better by more than chance".to_owned(),
        true => format!("{:+.1} % goodput per GPU ({})", 100.0 * answer.gain.figure, interval(&answer.gain)),
        false => format!(
            "goodput per GPU within chance of the present one ({:+.1} %, {})",
            100.0 * answer.gain.figure,
            interval(&answer.gain)
        ),
    };
    let head = match answer.headroom {
        Some(load) if load >= tune::LOADS.1 => format!("×{load} head-room or more"),
        Some(load) if load >= 1.0 => format!("×{load:.2} head-room"),
        Some(load) => format!("the targets are met up to ×{load:.2} of this load"),
        None => "the targets are not met at an eighth of this load either".into(),
    };
    let next =
        answer.next_bottleneck.as_ref().map(|what| format!(", next bottleneck {what}")).unwrap_or_default();
    format!("{what}: {}; {goodput}; {head}{next}", classes.join(", "))
}

/// The tables below the sentence.
pub fn tables(answer: &TuneAnswer) -> String {
    let mut classes =
        table::with_header(&["class", "target", "now", "95 % of draws", "tuned", "95 % of draws"], 1..);
    for class in &answer.classes {
        classes.add_row([
            class.name.clone(),
            percent(class.target),
            percent(class.now.figure),
            interval(&class.now),
            percent(class.tuned.figure),
            interval(&class.tuned),
        ]);
    }
    let mut text = format!("{classes}\n");
    let unit = if answer.gpus.is_some() { "GPU" } else { "node" };
    let [now, tuned] = answer.goodput_per_minute;
    text.push_str(&format!("requests in SLO a minute for each {unit}: {tuned:.2} (now {now:.2})\n"));
    if !answer.changes.is_empty() {
        text.push_str(&format!("changed: {}\n", answer.changes.join("; ")));
    }
    if !answer.left_out.is_empty() {
        let left_out = answer.left_out.join("; ");
        text.push_str(&format!("left out, since the held-out part does not bear it out: {left_out}\n"));
    }
    for scenario in &answer.what_if {
        if let Some(why) = &scenario.nothing {
            text.push_str(&format!("what if {}: {why}\n", scenario.scenario));
            continue;
        }
        let shares: Vec<String> = scenario
            .classes
            .iter()
            .map(|(name, share)| format!("{name} {} ({})", percent(share.figure), interval(share)))
            .collect();
        text.push_str(&format!("what if {}: {}\n", scenario.scenario, shares.join(", ")));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(offered: u64, in_slo: u64) -> RunTally {
        RunTally { blocks: vec![vec![[offered, in_slo]]; 12], ..RunTally::default() }
    }

    #[test]
    fn a_target_is_met_to_the_request() {
        let class = SloClass { target_permille: 990, ..SloClass::default() };
        assert!(meets(&[run(100, 99)], std::slice::from_ref(&class)));
        assert!(!meets(&[run(1000, 989)], &[class]));
    }

    #[test]
    fn the_bottleneck_is_what_most_requests_lack() {
        let mut tally = RunTally { late_tbt: 5, ..RunTally::default() };
        assert_eq!(bottleneck(&RunTally::default()), None);
        assert_eq!(bottleneck(&tally), Some("decode step time"));
        tally.refusals = vec![("ttft".into(), 3), ("costly".into(), 3), ("room".into(), 4)];
        assert_eq!(bottleneck(&tally), Some("prefill time"));
        tally.refusals[2].1 = 7;
        assert_eq!(bottleneck(&tally), Some("decode KV room"));
    }
}
