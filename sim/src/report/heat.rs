//! Heat maps: how busy each instance was over time.

use baton_types::Role;

use crate::metrics::{RunResult, Series};

use super::text::{coordinate, escape, fixed, percent};

/// Steps of the colour scale; a value below half a step is not drawn.
pub(super) const LEVELS: usize = 8;
/// Level of what exceeds the whole.
const OVER: usize = LEVELS + 1;
/// Cells of all heat maps of a page together: they are most of its size.
const MAX_CELLS: usize = 15_000;
/// Rows of one heat map; of a larger cluster neighbours share a row.
const MAX_ROWS: usize = 48;
/// Columns of one heat map.
const MAX_COLUMNS: usize = 160;

const WIDTH: f64 = 480.0;
const LEFT: f64 = 46.0;
const RIGHT: f64 = 44.0;
const ROW: f64 = 12.0;
const GAP: f64 = 10.0;
const BOTTOM: f64 = 36.0;

/// One row: its name and how busy it was in each column, as a share.
struct Row {
    name: String,
    shares: Vec<f64>,
}

/// The rows of one pool.
struct Block {
    what: &'static str,
    rows: Vec<Row>,
}

/// How much of a heat map may be drawn.
#[derive(Clone, Copy)]
struct CellLimits {
    rows: usize,
    columns: usize,
}

/// The heat map of a run, when the page shows `drawn` of them.
#[must_use]
pub(super) fn figure(at: usize, run: &RunResult, label: &str, drawn: usize) -> String {
    let room = CellLimits { rows: (MAX_CELLS / drawn.max(1) / 60).clamp(4, MAX_ROWS), columns: 0 };
    let series = &run.series;
    let rows = shown_rows(run, room.rows);
    let room =
        CellLimits { columns: (MAX_CELLS / drawn.max(1) / rows.max(1)).clamp(24, MAX_COLUMNS), ..room };
    let blocks = [prefill_block(run, room), decode_block(run, room)];
    let name = escape(label);
    let head =
        format!("<figure class=\"r{at}\"><figcaption><h3>{name}</h3><p>{}</p></figcaption>", balance(run));
    if blocks.iter().all(|b| b.rows.is_empty()) {
        let why = if run.instances.is_empty() {
            "nothing measured"
        } else {
            "kept for clusters of up to 256 instances only"
        };
        return format!("{head}<p class=\"none\">Load over time: {why}.</p></figure>");
    }
    let columns = blocks.iter().flat_map(|b| &b.rows).map(|r| r.shares.len()).max().unwrap_or(1).max(1);
    head + &drawing(&blocks, columns, span_s(series), &name) + "</figure>"
}

/// Rows that a run's pools take.
fn shown_rows(run: &RunResult, most: usize) -> usize {
    let of = |p: fn(Role) -> bool| run.instances.iter().filter(|i| p(i.role)).count().min(most);
    of(Role::prefills) + of(Role::decodes)
}

#[expect(clippy::cast_precision_loss, reason = "a time for an axis")]
fn span_s(series: &Series) -> f64 {
    series.bins.len() as f64 * series.bin_us as f64 / 1e6
}

/// Busy share of every instance that prefilled or was there to.
fn prefill_block(run: &RunResult, room: CellLimits) -> Block {
    let rows = &run.series.prefill_us;
    let worked = |at: usize| rows.get(at).is_some_and(|r| !r.is_empty());
    let of: Vec<usize> =
        numbers(run).filter(|at| run.instances[*at].role.prefills() || worked(*at)).collect();
    #[expect(clippy::cast_precision_loss, reason = "a time for a share")]
    let whole = |_| run.series.bin_us as f64;
    let mut rows = grouped(&of, rows, run.series.bins.len(), room, whole);
    // Passes that several prefills shared count in each one's span: a full bin may look overfull.
    rows.iter_mut().flat_map(|row| &mut row.shares).for_each(|share| *share = share.min(1.0));
    Block { what: "prefill", rows }
}

/// Mean step time of every instance that decodes, over the tightest objective.
fn decode_block(run: &RunResult, room: CellLimits) -> Block {
    let tightest_us = run.objectives.iter().map(|o| o.tbt_ms * 1e3).fold(f64::INFINITY, f64::min);
    let of: Vec<usize> = numbers(run).filter(|at| run.instances[*at].role.decodes()).collect();
    #[expect(clippy::cast_precision_loss, reason = "a share for a page")]
    let whole = |bin: usize| run.series.bins.get(bin).map_or(0.0, |b| b.ticks as f64) * tightest_us;
    Block {
        what: "decode",
        rows: grouped(&of, &run.series.decode_step_us, run.series.bins.len(), room, whole),
    }
}

/// Places of the instances whose load over time was kept.
fn numbers(run: &RunResult) -> impl Iterator<Item = usize> {
    0..run.instances.len().min(run.series.prefill_us.len())
}

/// Rows of shares: neighbours share a row, and bins a column, where there is no room for all.
fn grouped(
    of: &[usize],
    sums: &[Vec<u32>],
    bins: usize,
    room: CellLimits,
    whole: impl Fn(usize) -> f64,
) -> Vec<Row> {
    let together = of.len().div_ceil(room.rows).max(1);
    let width = bins.div_ceil(room.columns).max(1);
    let row = |members: &[usize]| {
        let (first, last) = (members[0], members[members.len() - 1]);
        let name = if first == last { first.to_string() } else { format!("{first}–{last}") };
        let share = |from: usize| {
            let span = from..(from + width).min(bins);
            let sum = |at: &usize| {
                sums.get(*at)
                    .map_or(0.0, |r| span.clone().filter_map(|b| r.get(b)).map(|us| f64::from(*us)).sum())
            };
            let all: f64 = span.clone().map(&whole).sum::<f64>();
            #[expect(clippy::cast_precision_loss, reason = "a share for a page")]
            let all = all * members.len() as f64;
            if all > 0.0 { members.iter().map(sum).sum::<f64>() / all } else { 0.0 }
        };
        Row { name, shares: (0..bins).step_by(width).map(share).collect() }
    };
    of.chunks(together).map(row).collect()
}

/// How evenly prefill work fell on the instances, in a sentence.
fn balance(run: &RunResult) -> String {
    let busy: Vec<f64> =
        run.instances.iter().filter(|i| i.role.prefills()).map(|i| i.prefill_busy_s).collect();
    let all: f64 = busy.iter().sum();
    if all <= 0.0 {
        return "No prefill work.".into();
    }
    #[expect(clippy::cast_precision_loss, reason = "a mean")]
    let mean = all / busy.len() as f64;
    let most = busy.iter().copied().fold(0.0, f64::max);
    let least = busy.iter().copied().fold(f64::INFINITY, f64::min);
    format!(
        "Prefill time of {} instances: {} s the busiest, {} s the mean, {} s the least busy; busiest over \
         mean {}.",
        busy.len(),
        fixed(most, 0),
        fixed(mean, 0),
        fixed(least, 0),
        fixed(most / mean, 2)
    )
}

fn drawing(blocks: &[Block], columns: usize, span_s: f64, name: &str) -> String {
    let mut body = String::new();
    let mut top = 14.0;
    for block in blocks.iter().filter(|b| !b.rows.is_empty()) {
        body += &draw_block(block, columns, top);
        top += rows_height(block) + GAP + 14.0;
    }
    let bottom = top - GAP - 14.0;
    body += &draw_time(span_s, bottom);
    format!(
        "<svg class=\"heat\" viewBox=\"0 0 {WIDTH} {}\" role=\"img\" aria-label=\"Load of each instance over \
         time: {name}\" \
         data-span=\"{span_s}\" data-columns=\"{columns}\">{body}</svg>",
        coordinate(bottom + BOTTOM)
    )
}

#[expect(clippy::cast_precision_loss, reason = "a row's place")]
fn rows_height(block: &Block) -> f64 {
    block.rows.len() as f64 * ROW
}

fn draw_block(block: &Block, columns: usize, top: f64) -> String {
    let (wide, high) = (WIDTH - LEFT - RIGHT, rows_height(block));
    let mut svg = format!(
        "<text class=\"pool\" x=\"{LEFT}\" y=\"{}\">{}</text><text class=\"pool end\" x=\"{WIDTH}\" \
         y=\"{0}\">mean</text>",
        top - 4.0,
        block.what
    );
    for (at, row) in block.rows.iter().enumerate() {
        #[expect(clippy::cast_precision_loss, reason = "a row's place")]
        let y = coordinate(top + (at as f64 + 0.5) * ROW);
        let odd = if at % 2 == 1 { " odd" } else { "" };
        #[expect(clippy::cast_precision_loss, reason = "a mean")]
        let mean = row.shares.iter().sum::<f64>() / row.shares.len().max(1) as f64;
        put!(
            svg,
            "<text class=\"row{odd}\" x=\"{}\" y=\"{y}\" dy=\".35em\">{}</text><text class=\"row end{odd}\" \
             x=\"{WIDTH}\" y=\"{y}\" dy=\".35em\">{}</text>",
            LEFT - 6.0,
            row.name,
            percent(mean).replace(' ', "")
        );
    }
    let rows = block.rows.len();
    put!(
        svg,
        "<svg class=\"cells {}\" x=\"{LEFT}\" y=\"{top}\" width=\"{wide}\" height=\"{high}\" viewBox=\"0 0 \
         {columns} {rows}\" \
         preserveAspectRatio=\"none\" data-rows=\"{}\"><path class=\"bed\" d=\"M0,0H{columns}V{rows}H0Z\"/><g \
         transform=\"translate(0 .5)\">{}</g></svg>",
        block.what,
        block.rows.iter().map(|r| r.name.as_str()).collect::<Vec<_>>().join(","),
        cells(&block.rows)
    );
    svg
}

/// One path a level; cells of a level side by side are one stroke through the middle of their row.
fn cells(rows: &[Row]) -> String {
    let mut paths = vec![String::new(); OVER + 1];
    for (y, row) in rows.iter().enumerate() {
        let levels: Vec<usize> = row.shares.iter().map(|s| level(*s)).collect();
        let mut from = 0;
        for run in levels.chunk_by(|a, b| a == b) {
            if run[0] > 0 {
                put!(paths[run[0]], "M{from},{y}h{}", run.len());
            }
            from += run.len();
        }
    }
    let drawn = paths.iter().enumerate().filter(|(_, d)| !d.is_empty());
    drawn.map(|(level, d)| format!("<path class=\"h{level}\" d=\"{d}\"/>")).collect()
}

/// The step of the colour scale for a share.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a level from 0 to 9"
)]
fn level(share: f64) -> usize {
    match share {
        s if !s.is_finite() || s <= 0.0 => 0,
        s if s > 1.02 => OVER,
        s => ((s * LEVELS as f64).round() as usize).min(LEVELS),
    }
}

fn draw_time(span_s: f64, bottom: f64) -> String {
    let (unit, per) = super::time::unit(span_s);
    let axis = super::axis::Axis::up_to(span_s / per);
    let wide = WIDTH - LEFT - RIGHT;
    let mut svg = String::new();
    for (value, name) in axis.ticks() {
        let x = coordinate(LEFT + axis.at(value) * wide);
        put!(svg, "<text class=\"x\" x=\"{x}\" y=\"{}\">{name}</text>", coordinate(bottom + 15.0));
    }
    let middle = coordinate(LEFT + wide / 2.0);
    svg + &format!(
        "<text class=\"x name\" x=\"{middle}\" y=\"{}\">time, {unit}</text>",
        coordinate(bottom + 31.0)
    )
}

/// The legend of the colours of heat maps.
#[must_use]
pub(super) fn scale() -> String {
    let mut svg = String::from(
        "<svg class=\"heat scale\" viewBox=\"0 0 330 34\" role=\"img\" aria-label=\"Colours from idle to over \
         100 %\">",
    );
    for level in 0..=OVER {
        #[expect(clippy::cast_precision_loss, reason = "a step's place")]
        let x = 1.0 + level as f64 * 30.0 + if level == OVER { 8.0 } else { 0.0 };
        let class = if level == 0 { "bed".into() } else { format!("h{level}") };
        let name = match level {
            0 => "0".into(),
            OVER => "over".into(),
            #[expect(clippy::cast_precision_loss, reason = "a step's name")]
            l => format!("{}%", fixed(l as f64 * 100.0 / LEVELS as f64, 0)),
        };
        put!(
            svg,
            "<path class=\"{class} step\" d=\"M{x},6h28\"/><text class=\"x\" x=\"{}\" y=\"28\">{name}</text>",
            x + 14.0
        );
    }
    svg + "</svg>"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_of_a_level_are_one_stroke() {
        let rows = [
            Row { name: "0".into(), shares: vec![0.5, 0.5, 0.0, 1.0] },
            Row { name: "1".into(), shares: vec![2.0] },
        ];
        assert_eq!(
            cells(&rows),
            "<path class=\"h4\" d=\"M0,0h2\"/><path class=\"h8\" d=\"M3,0h1\"/><path class=\"h9\" \
             d=\"M0,1h1\"/>"
        );
    }

    #[test]
    fn levels_cover_every_share() {
        assert_eq!(
            [0.0, 0.05, 0.07, 0.5, 1.0, 1.01, 1.5, f64::NAN, -1.0].map(level),
            [0, 0, 1, 4, 8, 8, 9, 0, 0]
        );
    }

    #[test]
    fn a_large_cluster_shares_rows_and_columns() {
        let sums = vec![vec![50u32; 300]; 100];
        let of: Vec<usize> = (0..100).collect();
        let rows = grouped(&of, &sums, 300, CellLimits { rows: 40, columns: 100 }, |_| 100.0);
        assert_eq!((rows.len(), rows[0].shares.len()), (34, 100));
        assert_eq!((rows[0].name.as_str(), rows[33].name.as_str()), ("0–2", "99"));
        assert!(rows.iter().flat_map(|r| &r.shares).all(|s| (s - 0.5).abs() < 1e-9), "shares are means");
    }
}
