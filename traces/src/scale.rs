//! Changing a trace: faster, a window of it, repeated, multiplied.

use std::collections::HashSet;

use baton_types::Rng;

use crate::error::{RowFault, Stage, TraceError};
use crate::prompt::{mix, own_id};
use crate::record::{Extra, Record, SYNTHETIC_ID_BASE, Trace};

/// Ids below this are renamed by an offset, so that they stay dense.
const DENSE_IDS: u64 = 1 << 40;
/// Copies and rounds whose ids are kept apart.
const MOST_COPIES: u64 = 4_000;

/// The changes, in the order in which they are applied. The default changes nothing.
#[derive(Debug, Clone, PartialEq)]
pub struct Scale {
    /// Keep rows that arrive in this window (`from <= t < to`); its start becomes 0.
    pub window_ms: Option<(f64, f64)>,
    /// Divide times and delays by this.
    pub speed: f64,
    /// Multiply prompts (not outputs) by this; prefixes are stretched alike, so hit ratios stay.
    pub prompt_factor: u32,
    /// Every row becomes this many, each copy with blocks and sessions of its own: as many tenants
    /// with the same habits. The rate grows as much; combine with `speed` to keep it.
    pub copies: u32,
    /// Replace arrivals by a Poisson process of this rate.
    pub poisson_per_s: Option<f64>,
    /// Play the trace this many times, one after another.
    pub repeat: u32,
    /// Later rounds share no block with earlier ones.
    pub fresh_rounds: bool,
    /// Stop after this many rows.
    pub max_rows: Option<u64>,
    /// Seed of the Poisson process.
    pub seed: u64,
}

impl Default for Scale {
    fn default() -> Self {
        Self {
            window_ms: None,
            speed: 1.0,
            prompt_factor: 1,
            copies: 1,
            poisson_per_s: None,
            repeat: 1,
            fresh_rounds: false,
            max_rows: None,
            seed: 0,
        }
    }
}

impl Scale {
    fn check(&self) -> Result<(), TraceError> {
        let refuse = |problem: &str, remedy: &str| {
            Err(RowFault::new(Stage::Scale, "scale", problem, remedy).at("(options)".as_ref(), None))
        };
        if !(self.speed.is_finite() && self.speed > 0.0) {
            return refuse("the speed is not above 0", "give a factor such as 2 or 0.5");
        }
        if self.poisson_per_s.is_some_and(|rate| !rate.is_finite() || rate <= 0.0) {
            return refuse("the rate is not above 0", "give requests per second");
        }
        if self.window_ms.is_some_and(|(from, to)| !(from >= 0.0 && from < to)) {
            return refuse("the window is empty", "give a start and a later end");
        }
        if self.repeat == 0 || self.copies == 0 || self.prompt_factor == 0 {
            return refuse("a factor of 0 leaves nothing", "give at least 1");
        }
        if u64::from(self.copies) * u64::from(self.repeat) > MOST_COPIES || self.prompt_factor > 1000 {
            return refuse(
                "more than 4,000 copies and rounds, or prompts over 1,000 times",
                "give smaller factors",
            );
        }
        Ok(())
    }
}

/// Changes rows as they stream by.
///
/// Feed every row of the trace to [`Scaler::push`], then call [`Scaler::end_round`]; as long as that
/// returns true, feed the trace again from its start.
pub struct Scaler {
    scale: Scale,
    block_tokens: u64,
    rng: Rng,
    round: u32,
    round_offset_ms: f64,
    last_ms: f64,
    first_of_round_ms: Option<f64>,
    rows_of_round: u64,
    poisson_ms: f64,
    given: u64,
    in_window: HashSet<String>,
}

impl Scaler {
    /// Fails where the changes make no sense together.
    pub fn new(scale: &Scale, block_tokens: u32) -> Result<Self, TraceError> {
        scale.check()?;
        Ok(Self {
            rng: Rng::fork(scale.seed, 0x7363_616c),
            scale: scale.clone(),
            block_tokens: u64::from(block_tokens.max(1)),
            round: 0,
            round_offset_ms: 0.0,
            last_ms: 0.0,
            first_of_round_ms: None,
            rows_of_round: 0,
            poisson_ms: 0.0,
            given: 0,
            in_window: HashSet::new(),
        })
    }

    /// Changes one row and appends what becomes of it to `out`.
    pub fn push(&mut self, mut record: Record, out: &mut Vec<Record>) {
        if let Some((from, to)) = self.scale.window_ms {
            if record.timestamp_ms < from || record.timestamp_ms >= to {
                return;
            }
            record.timestamp_ms -= from;
            self.cut_dependencies(&mut record);
        }
        record.timestamp_ms /= self.scale.speed;
        if let Some(delay) = record.extra.as_mut().and_then(|extra| extra.delay_ms.as_mut()) {
            *delay /= self.scale.speed;
        }
        self.stretch_prompt(&mut record);
        self.first_of_round_ms.get_or_insert(record.timestamp_ms);
        for copy in 0..self.scale.copies {
            if self.scale.max_rows.is_some_and(|most| self.given >= most) {
                return;
            }
            let mut row = record.clone();
            self.rename(&mut row, copy);
            row.timestamp_ms = self.arrival(record.timestamp_ms);
            self.last_ms = row.timestamp_ms;
            self.rows_of_round += 1;
            self.given += 1;
            out.push(row);
        }
    }

    /// Ends a round. True where the trace must be fed once more.
    #[expect(clippy::cast_precision_loss, reason = "row counts are below 2^53")]
    pub fn end_round(&mut self) -> bool {
        self.round += 1;
        let full = self.scale.max_rows.is_some_and(|most| self.given >= most);
        if self.round >= self.scale.repeat || self.rows_of_round == 0 || full {
            return false;
        }
        let first = self.first_of_round_ms.take().unwrap_or(0.0) + self.round_offset_ms;
        let span = self.last_ms - first;
        let gap = span / self.rows_of_round as f64;
        self.round_offset_ms += span + gap;
        self.rows_of_round = 0;
        self.in_window.clear();
        true
    }

    /// Drops dependencies on rows outside the window.
    fn cut_dependencies(&mut self, record: &mut Record) {
        let Some(extra) = record.extra.as_mut() else {
            return;
        };
        extra.wait_for.retain(|name| self.in_window.contains(name));
        if let Some(name) = &extra.request_id {
            self.in_window.insert(name.clone());
        }
    }

    fn arrival(&mut self, at_ms: f64) -> f64 {
        match self.scale.poisson_per_s {
            Some(rate) => {
                self.poisson_ms += -(1.0 - self.rng.unit()).ln() * 1000.0 / rate;
                self.poisson_ms
            }
            None => at_ms + self.round_offset_ms,
        }
    }

    /// Every block becomes as many as the factor says, the tail as many as its tokens need.
    fn stretch_prompt(&self, record: &mut Record) {
        let factor = u64::from(self.scale.prompt_factor);
        if factor == 1 {
            return;
        }
        record.input_length = record.input_length.saturating_mul(factor);
        let wanted = usize::try_from(record.input_length.div_ceil(self.block_tokens)).unwrap_or(usize::MAX);
        let parts =
            record.hash_ids.iter().flat_map(|&id| (0..factor).map(move |part| part_id(id, factor, part)));
        record.hash_ids = parts.take(wanted).collect();
    }

    /// Gives a copy (or a fresh round) ids and names of its own.
    fn rename(&self, record: &mut Record, copy: u32) {
        let id_round = if self.scale.fresh_rounds { self.round } else { 0 };
        let id_copy = u64::from(id_round) * u64::from(self.scale.copies) + u64::from(copy);
        if id_copy > 0 {
            record.hash_ids.iter_mut().for_each(|id| *id = copy_id(*id, id_copy));
        }
        let name_copy = u64::from(self.round) * u64::from(self.scale.copies) + u64::from(copy);
        if name_copy > 0
            && let Some(extra) = record.extra.as_mut()
        {
            rename_all(extra, name_copy);
        }
    }
}

fn rename_all(extra: &mut Extra, copy: u64) {
    let names = [&mut extra.request_id, &mut extra.session_id, &mut extra.parent];
    let single = names.into_iter().filter_map(Option::as_mut);
    single.chain(&mut extra.wait_for).for_each(|name| name.push_str(&format!("~{copy}")));
}

/// The id of a block in another copy of the tree.
fn copy_id(id: u64, copy: u64) -> u64 {
    let (base, index) =
        if id >= SYNTHETIC_ID_BASE { (SYNTHETIC_ID_BASE, id - SYNTHETIC_ID_BASE) } else { (0, id) };
    if index < DENSE_IDS && id < 2 * SYNTHETIC_ID_BASE {
        base + index + copy * DENSE_IDS
    } else {
        own_id(mix(id, copy))
    }
}

/// The id of one part of a stretched block.
fn part_id(id: u64, factor: u64, part: u64) -> u64 {
    if id < DENSE_IDS / 1024 { id * factor + part } else { own_id(mix(mix(id, factor), part)) }
}

/// Changes a trace in memory.
pub fn apply(trace: &Trace, scale: &Scale) -> Result<Trace, TraceError> {
    let mut scaler = Scaler::new(scale, trace.block_tokens)?;
    let mut records = Vec::new();
    loop {
        for record in &trace.records {
            scaler.push(record.clone(), &mut records);
        }
        if !scaler.end_round() {
            break;
        }
    }
    Ok(Trace {
        block_tokens: trace.block_tokens,
        records,
        assumptions: trace.assumptions.clone(),
        dialect: trace.dialect,
    })
}

/// Gives rows of one instant times of their own: evenly, in their order, from it to the next instant.
///
/// For traces whose times are rounded, as Mooncake's conversations are (to 3 s): which of ten rows that arrive at
/// once is served first is chance, and none arrived so. Rows of the last instant are as far apart as those before.
pub fn spread(trace: &mut Trace) {
    let rows = &mut trace.records;
    let (mut start, mut step) = (0, 0.0);
    while start < rows.len() {
        let at = rows[start].timestamp_ms;
        let many = rows[start..].iter().take_while(|row| row.timestamp_ms <= at).count();
        #[expect(clippy::cast_precision_loss, reason = "row counts are below 2^53")]
        let place = |n: usize| n as f64;
        if let Some(next) = rows.get(start + many) {
            step = (next.timestamp_ms - at) / place(many);
        }
        for (n, row) in rows[start..start + many].iter_mut().enumerate() {
            row.timestamp_ms = at + place(n) * step;
        }
        start += many;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::summary::{SummaryOptions, summarise};
    use crate::synth::{Kind, PublishedTrace, Workload, like, workload};
    use proptest::prelude::*;

    fn base() -> Trace {
        workload(&Workload { requests: 300, closed_loop: true, ..Workload::new(Kind::Agents, 3) }).unwrap()
    }

    fn hit_ratio(trace: &Trace) -> f64 {
        summarise(trace, &SummaryOptions::default()).unbounded.block_hit_ratio
    }

    #[test]
    fn the_default_changes_nothing() {
        assert_eq!(apply(&base(), &Scale::default()).unwrap(), base());
    }

    #[test]
    fn speed_divides_times_and_delays() {
        let (before, after) = (base(), apply(&base(), &Scale { speed: 4.0, ..Scale::default() }).unwrap());
        assert!((after.span_ms() * 4.0 - before.span_ms()).abs() < 1e-6);
        let delays = |t: &Trace| t.records.iter().filter_map(Record::delay_ms).sum::<f64>();
        assert!((delays(&after) * 4.0 - delays(&before)).abs() < 1e-3);
    }

    #[test]
    fn rows_of_one_instant_are_spread_to_the_next() {
        let at = |times: &[f64]| {
            let mut trace = base();
            trace.records.truncate(times.len());
            trace.records.iter_mut().zip(times).for_each(|(row, at)| row.timestamp_ms = *at);
            let names = |t: &Trace| t.records.iter().map(|r| r.hash_ids.clone()).collect::<Vec<_>>();
            let before = names(&trace);
            spread(&mut trace);
            assert_eq!(names(&trace), before, "no row overtakes another");
            trace.records.iter().map(|r| r.timestamp_ms).collect::<Vec<_>>()
        };
        let rounded = [0.0, 0.0, 0.0, 3000.0, 6000.0, 6000.0, 12000.0, 12000.0];
        assert_eq!(at(&rounded), [0.0, 1000.0, 2000.0, 3000.0, 6000.0, 9000.0, 12000.0, 15000.0]);
        assert_eq!(at(&[1.5, 2.5, 7.0]), [1.5, 2.5, 7.0], "times of their own stay");
        assert_eq!(at(&[4.0, 4.0]), [4.0, 4.0], "one instant tells no distance");
        assert!(at(&[]).is_empty());
    }

    #[test]
    fn a_window_keeps_exactly_its_rows() {
        let trace = base();
        let (from, to) = (10_000.0, 30_000.0);
        let cut = apply(&trace, &Scale { window_ms: Some((from, to)), ..Scale::default() }).unwrap();
        let wanted: Vec<f64> = trace
            .records
            .iter()
            .map(|r| r.timestamp_ms)
            .filter(|t| (from..to).contains(t))
            .map(|t| t - from)
            .collect();
        assert_eq!(cut.records.iter().map(|r| r.timestamp_ms).collect::<Vec<_>>(), wanted);
    }

    #[test]
    fn copies_multiply_rows_and_keep_the_hit_ratio() {
        let trace = like(PublishedTrace::Synthetic, 2);
        let tripled = apply(&trace, &Scale { copies: 3, ..Scale::default() }).unwrap();
        assert_eq!(tripled.records.len(), 3 * trace.records.len());
        assert!((hit_ratio(&tripled) - hit_ratio(&trace)).abs() < 1e-12);
        let summary = summarise(&tripled, &SummaryOptions::default());
        assert_eq!(
            summary.distinct_blocks,
            3 * summarise(&trace, &SummaryOptions::default()).distinct_blocks
        );
    }

    #[test]
    fn a_second_round_hits_all_unless_it_is_fresh() {
        let trace = like(PublishedTrace::Synthetic, 2);
        let blocks: usize = trace.records.iter().map(|r| r.hash_ids.len()).sum();
        let twice = apply(&trace, &Scale { repeat: 2, ..Scale::default() }).unwrap();
        let expected = (hit_ratio(&trace) * blocks as f64 + blocks as f64) / (2 * blocks) as f64;
        assert!((hit_ratio(&twice) - expected).abs() < 1e-9);
        let fresh = apply(&trace, &Scale { repeat: 2, fresh_rounds: true, ..Scale::default() }).unwrap();
        assert!((hit_ratio(&fresh) - hit_ratio(&trace)).abs() < 1e-12);
        assert!(fresh.records.is_sorted_by(|a, b| a.timestamp_ms <= b.timestamp_ms));
    }

    #[test]
    fn poisson_arrivals_have_the_rate() {
        let trace = apply(
            &like(PublishedTrace::Conversation, 1),
            &Scale { poisson_per_s: Some(20.0), ..Scale::default() },
        )
        .unwrap();
        let rate = trace.records.len() as f64 * 1000.0 / trace.span_ms();
        assert!((rate - 20.0).abs() < 1.0, "{rate}");
    }

    #[test]
    fn nonsense_is_refused() {
        for scale in [
            Scale { speed: 0.0, ..Scale::default() },
            Scale { copies: 0, ..Scale::default() },
            Scale { repeat: 5000, ..Scale::default() },
            Scale { window_ms: Some((5.0, 5.0)), ..Scale::default() },
            Scale { poisson_per_s: Some(f64::NAN), ..Scale::default() },
        ] {
            assert!(apply(&base(), &scale).is_err(), "{scale:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn rows_stay_sorted_and_covered(speed in 0.1f64..9.0, factor in 1u32..5, copies in 1u32..4, repeat in 1u32..4, fresh: bool) {
            let scale = Scale { speed, prompt_factor: factor, copies, repeat, fresh_rounds: fresh, ..Scale::default() };
            let trace = apply(&base(), &scale).unwrap();
            prop_assert_eq!(trace.records.len() as u32, 300 * copies * repeat);
            prop_assert!(trace.records.is_sorted_by(|a, b| a.timestamp_ms <= b.timestamp_ms));
            for record in &trace.records {
                prop_assert_eq!(record.hash_ids.len() as u64, record.input_length.div_ceil(512));
            }
        }
    }
}
