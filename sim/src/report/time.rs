//! Charts over the time of the runs.

use crate::metrics::{Bin, RunResult};

use super::axis::Axis;
use super::lines::{Chart, Line};
use super::text::share;

/// Points of one line when few runs are drawn.
const MAX_POINTS: usize = 200;
/// Points of one chart's lines together.
const MAX_CHART_POINTS: usize = 1300;
/// Microseconds in a second.
const MICROS: f64 = 1e6;

/// A unit that keeps the numbers of an axis small, and its seconds.
#[must_use]
pub(super) fn unit(span_s: f64) -> (&'static str, f64) {
    match span_s {
        s if s > 4.0 * 3600.0 => ("hours", 3600.0),
        s if s > 300.0 => ("minutes", 60.0),
        _ => ("seconds", 1.0),
    }
}

/// One point in time of one run.
struct Moment {
    /// Its middle, seconds.
    at_s: f64,
    /// How long it is, seconds.
    wide_s: f64,
    /// The counts in it.
    bin: Bin,
}

/// Some figure of a moment; `None` where there was nothing to measure.
type Figure = fn(&RunResult, &Moment) -> Option<f64>;

/// The description of one chart.
struct Plan {
    title: &'static str,
    note: &'static str,
    unit: &'static str,
    figure: Figure,
    /// Whether the offered load is its ground.
    ground: bool,
    /// Whether its axis ends at one whole.
    share: bool,
}

const PLANS: [Plan; 6] = [
    Plan {
        title: "Goodput: requests in SLO per second",
        note: "By the time of the offer. The shaded ground is what was offered to the first run; the distance \
            to it is what was refused or late.",
        unit: "/s",
        figure: |_, m| asked(m).then(|| rate(m.bin.in_slo, m)),
        ground: true,
        share: false,
    },
    Plan {
        title: "Refusals per second",
        note: "Every refusal counts, also of clients that came back later.",
        unit: "/s",
        figure: |_, m| asked(m).then(|| rate(m.bin.rejected, m)),
        ground: false,
        share: false,
    },
    Plan {
        title: "Hit ratio: prompt blocks reused",
        note: "Of completed requests, by the time of the offer.",
        unit: "",
        figure: |_, m| share(m.bin.hit_blocks, m.bin.blocks),
        ground: false,
        share: true,
    },
    Plan {
        title: "Mean TTFT, seconds",
        note: "Of completed requests, by the time of the offer.",
        unit: " s",
        figure: |_, m| share(m.bin.ttft_us, m.bin.completed).map(|us| us / MICROS),
        ground: false,
        share: false,
    },
    Plan {
        title: "Prefill backlog per prefill instance, seconds",
        note: "Work placed and not yet computed, by the conductor's prediction.",
        unit: " s",
        figure: |r, m| per_instance(m.bin.backlog_us, m, prefills(r)).map(|us| us / MICROS),
        ground: false,
        share: false,
    },
    Plan {
        title: "Decode batch per decode instance",
        note: "Requests decoding. Where this swings against the backlog, load oscillates.",
        unit: "",
        figure: |r, m| per_instance(m.bin.batch, m, decodes(r)),
        ground: false,
        share: false,
    },
];

/// All charts over time.
#[must_use]
pub(super) fn figures(runs: &[RunResult], labels: &[String]) -> String {
    let most = (MAX_CHART_POINTS / runs.len().max(1)).clamp(40, MAX_POINTS);
    let moments: Vec<Vec<Moment>> = runs.iter().map(|run| moments(run, most)).collect();
    PLANS.iter().map(|plan| chart(plan, runs, labels, &moments).figure()).collect()
}

fn chart(plan: &Plan, runs: &[RunResult], labels: &[String], moments: &[Vec<Moment>]) -> Chart {
    let span_s = moments.iter().filter_map(|m| m.last()).map(|m| m.at_s + m.wide_s / 2.0).fold(0.0, f64::max);
    let (unit, per) = unit(span_s);
    let line = |run: usize| Line {
        run,
        label: labels[run].clone(),
        points: moments[run]
            .iter()
            .map(|m| (plan.figure)(&runs[run], m).map(|y| (m.at_s / per, y)))
            .collect(),
    };
    let lines: Vec<Line> = (0..runs.len()).map(line).collect();
    let offered = |m: &Moment| (m.at_s / per, rate(m.bin.arrived, m));
    let ground: Vec<(f64, f64)> =
        if plan.ground { moments.first().into_iter().flatten().map(offered).collect() } else { Vec::new() };
    let ys = lines.iter().flat_map(|l| &l.points).flatten().chain(&ground).map(|p| p.1);
    let highest = ys.filter(|y| y.is_finite()).fold(0.0, f64::max);
    Chart {
        title: plan.title.into(),
        note: plan.note.into(),
        x_name: format!("time, {unit}"),
        y_unit: plan.unit,
        x: Axis::up_to(span_s / per),
        y: if plan.share { Axis::up_to(1.0) } else { Axis::linear(highest) },
        ground,
        bounds: Vec::new(),
        lines,
    }
}

/// The run's bins, of which neighbours are put together until at most `most` are left.
#[expect(clippy::cast_precision_loss, reason = "times for an axis")]
fn moments(run: &RunResult, most: usize) -> Vec<Moment> {
    let together = run.series.bins.len().div_ceil(most).max(1);
    let bin_s = run.series.bin_us as f64 / MICROS;
    let moment = |(at, bins): (usize, &[Bin])| {
        let wide_s = bins.len() as f64 * bin_s;
        Moment { at_s: (at * together) as f64 * bin_s + wide_s / 2.0, wide_s, bin: Bin::sum(bins) }
    };
    run.series.bins.chunks(together).enumerate().map(moment).collect()
}

/// Whether any request arrived, completed or was refused. A chart would show the time after the last
/// request as zero goodput; it leaves that time out.
const fn asked(moment: &Moment) -> bool {
    moment.bin.arrived + moment.bin.completed + moment.bin.rejected > 0
}

#[expect(clippy::cast_precision_loss, reason = "a rate for a drawing")]
fn rate(n: u64, moment: &Moment) -> f64 {
    n as f64 / moment.wide_s
}

#[expect(clippy::cast_precision_loss, reason = "a mean for a drawing")]
fn per_instance(sum: u64, moment: &Moment, instances: usize) -> Option<f64> {
    let samples = moment.bin.ticks as f64 * instances as f64;
    (samples > 0.0).then(|| sum as f64 / samples)
}

fn prefills(run: &RunResult) -> usize {
    run.instances.iter().filter(|i| i.role.prefills()).count()
}

fn decodes(run: &RunResult) -> usize {
    run.instances.iter().filter(|i| i.role.decodes()).count()
}
