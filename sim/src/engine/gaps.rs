//! Token gaps of one engine, shared by all sequences of its batch: a log of runs, each an
//! arithmetic series, and marks that say where a sequence's own gaps begin.

use std::collections::VecDeque;

use super::PS_PER_US;

/// A run of steps: the first takes `first_ps`, each later one `delta_ps` more.
#[derive(Clone, Copy, Debug)]
struct Run {
    steps: u64,
    first_ps: u64,
    delta_ps: u64,
}

/// Where a sequence's gaps begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GapMark {
    run: u64,
    /// Stall before the next step that was over before the sequence joined, ps.
    stall_ps: u64,
    skip_first: bool,
}

impl GapMark {
    /// The first step gave the first token: it is not a gap.
    pub const fn skip_first_step(&mut self) {
        self.skip_first = true;
    }

    /// The run that it points at.
    #[must_use]
    pub const fn at(&self) -> u64 {
        self.run
    }
}

/// The log of token gaps. [`GapLog::forget_before`] drops the runs that no sequence needs.
#[derive(Clone, Debug, Default)]
pub struct GapLog {
    runs: VecDeque<Run>,
    /// Number of the first run kept.
    base: u64,
    /// When the latest step ended, ps: the next gap begins there.
    last_end_ps: u64,
}

/// Gaps of one sequence, summed up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GapSummary {
    /// How many.
    pub count: u64,
    /// Their mean, µs.
    pub mean_us: u64,
    /// Mean of the longest tenth (at least one): the paper's TBT, µs.
    pub worst_tenth_us: u64,
    /// The longest, µs.
    pub max_us: u64,
}

impl GapLog {
    /// A mark at the next step, for a sequence that joins at `now_ps`.
    #[must_use]
    pub fn mark(&self, now_ps: u64) -> GapMark {
        GapMark {
            run: self.base + self.runs.len() as u64,
            stall_ps: now_ps.saturating_sub(self.last_end_ps),
            skip_first: false,
        }
    }

    /// When the latest step ended, ps.
    #[must_use]
    pub const fn last_step_end_ps(&self) -> u64 {
        self.last_end_ps
    }

    /// Logs `steps` steps over `span`: the first takes `first_ps`, each later one `delta_ps` more than
    /// the one before. The time since the end of the previous step is a stall: it counts in the first gap.
    pub fn steps(&mut self, span: (u64, u64), steps: u64, first_ps: u64, delta_ps: u64) {
        let stall_ps = span.0.saturating_sub(self.last_end_ps);
        self.last_end_ps = span.1;
        if stall_ps > 0 {
            self.runs.push_back(Run { steps: 1, first_ps: first_ps + stall_ps, delta_ps: 0 });
            if steps == 1 {
                return;
            }
            self.runs.push_back(Run { steps: steps - 1, first_ps: first_ps + delta_ps, delta_ps });
        } else {
            self.runs.push_back(Run { steps, first_ps, delta_ps });
        }
    }

    /// Drops the runs before `oldest`, or all runs when it is `None`.
    pub fn forget_before(&mut self, oldest: Option<u64>) {
        let keep_from = oldest.unwrap_or(self.base + self.runs.len() as u64);
        while self.base < keep_from && self.runs.pop_front().is_some() {
            self.base += 1;
        }
    }

    /// Appends the gaps since `mark`, µs.
    pub fn collect(&self, mark: &GapMark, gaps_us: &mut Vec<u32>) {
        let skip = usize::try_from(mark.run.saturating_sub(self.base)).unwrap_or(usize::MAX);
        let (mut first_run, mut drop_step) = (true, u64::from(mark.skip_first));
        for run in self.runs.iter().skip(skip) {
            let stall = if first_run { mark.stall_ps.min(run.first_ps) } else { 0 };
            first_run = false;
            for step in drop_step..run.steps {
                let ps = run.first_ps + step * run.delta_ps - if step == 0 { stall } else { 0 };
                gaps_us.push(u32::try_from(ps / PS_PER_US).unwrap_or(u32::MAX));
            }
            drop_step = drop_step.saturating_sub(run.steps);
        }
    }

    /// Sums up the gaps since `mark`; `scratch` is reused from call to call.
    pub fn summary(&self, mark: &GapMark, scratch: &mut Vec<u32>) -> GapSummary {
        scratch.clear();
        self.collect(mark, scratch);
        summarise(scratch)
    }
}

/// Mean, longest tenth and longest of gaps in µs; reorders them.
#[must_use]
pub fn summarise(gaps: &mut [u32]) -> GapSummary {
    let count = gaps.len();
    if count == 0 {
        return GapSummary::default();
    }
    let sum: u64 = gaps.iter().map(|g| u64::from(*g)).sum();
    let worst = count.div_ceil(10);
    let (_, _, _) = gaps.select_nth_unstable_by(worst - 1, |a, b| b.cmp(a));
    let top: u64 = gaps[..worst].iter().map(|g| u64::from(*g)).sum();
    GapSummary {
        count: count as u64,
        mean_us: sum / count as u64,
        worst_tenth_us: top / worst as u64,
        max_us: u64::from(gaps[..worst].iter().copied().max().unwrap_or(0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000 * PS_PER_US;

    /// Appends steps that begin `stall_ps` after the last one ended.
    fn steps(log: &mut GapLog, stall_ps: u64, steps: u64, (first_ps, delta_ps): (u64, u64)) {
        let start_ps = log.last_end_ps + stall_ps;
        let took_ps = steps * first_ps + delta_ps * steps * (steps - 1) / 2;
        log.steps((start_ps, start_ps + took_ps), steps, first_ps, delta_ps);
    }

    #[test]
    fn the_longest_tenth_is_a_mean_and_stalls_count() {
        let mut log = GapLog::default();
        let mark = log.mark(0);
        steps(&mut log, 0, 19, (10 * MS, 0));
        steps(&mut log, 90 * MS, 1, (10 * MS, 0));
        let s = log.summary(&mark, &mut Vec::new());
        assert_eq!((s.count, s.max_us, s.worst_tenth_us), (20, 100_000, 55_000));
        assert_eq!(s.mean_us, (19 * 10_000 + 100_000) / 20);
    }

    #[test]
    fn a_sequence_sees_only_its_own_gaps() {
        let mut log = GapLog::default();
        let early = log.mark(0);
        steps(&mut log, 0, 2, (10 * MS, MS));
        let mut late = log.mark(log.last_end_ps + 50 * MS);
        late.skip_first_step();
        steps(&mut log, 50 * MS, 3, (20 * MS, MS));
        assert_eq!(log.summary(&late, &mut Vec::new()).count, 2, "its first step gave its first token");
        assert_eq!(log.summary(&early, &mut Vec::new()).max_us, 70_000);
        let joined = GapMark { skip_first: false, ..late };
        assert_eq!(
            log.summary(&joined, &mut Vec::new()).max_us,
            22_000,
            "the stall was over before it joined"
        );
        let midway = GapMark { stall_ps: late.stall_ps - 7 * MS, ..joined };
        assert_eq!(log.summary(&midway, &mut Vec::new()).max_us, 27_000, "it waited for the last 7 ms of it");
    }

    #[test]
    fn forgetting_keeps_what_marks_need() {
        let mut log = GapLog::default();
        steps(&mut log, 0, 1, (MS, 0));
        let mark = log.mark(log.last_end_ps);
        steps(&mut log, 0, 4, (2 * MS, 0));
        log.forget_before(Some(mark.at()));
        assert_eq!(log.summary(&mark, &mut Vec::new()).count, 4);
        log.forget_before(None);
        assert_eq!(log.runs.len(), 0);
        assert_eq!(log.mark(0).at(), 2);
    }

    #[test]
    fn runs_may_be_told_whole_or_in_parts() {
        let (mut whole, mut parts) = (GapLog::default(), GapLog::default());
        let marks = [whole.mark(3), parts.mark(3)];
        steps(&mut whole, 5, 7, (10 * MS, MS));
        let mut first_ps = 10 * MS;
        for (stall_ps, n) in [(5, 1), (0, 4), (0, 2)] {
            steps(&mut parts, stall_ps, n, (first_ps, MS));
            first_ps += n * MS;
        }
        let (mut a, mut b) = (Vec::new(), Vec::new());
        whole.collect(&marks[0], &mut a);
        parts.collect(&marks[1], &mut b);
        assert_eq!((a.len(), &a), (7, &b));
    }
}
