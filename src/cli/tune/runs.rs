//! Doing runs: those that are not known, on all threads, each written down as soon as it is done.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Error, Result, anyhow};
use baton_sim::metrics::Collector;
use baton_sim::tune::RunTally;
use baton_sim::{RunResult, Setup, TraceWorkload, World};
use baton_traces::{Extra, Trace};
use rayon::prelude::*;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::ledger::RunLedger;
use crate::cli::{cluster, replay};
use crate::config::Config;

/// A run to do, and the stretch of it that counts.
#[derive(Clone)]
pub struct CountedRun {
    /// Cluster and policy.
    pub config: Config,
    /// Added to the seed of the configuration.
    pub seed: u64,
    /// Factor on the load.
    pub load: f64,
    /// Requests count that are offered from here up to there, in the trace's own time, ms. All that comes before is part of
    /// the run: it fills the caches. So is what arrives within the longest TTFT after it: requests that still wait have
    /// to share the nodes with that.
    pub part_ms: (f64, f64),
}

/// Does runs over one trace.
pub struct RunDriver {
    trace: Arc<Trace>,
    speed: f64,
    digest: u128,
    ledger: RunLedger,
    pool: rayon::ThreadPool,
}

impl RunDriver {
    /// A runner that knows what the file of `state` has, with this many threads (one a processor where none is given).
    ///
    /// # Errors
    /// As [`RunLedger::open`].
    pub fn new(trace: Trace, speed: f64, state: Option<&Path>, threads: Option<usize>) -> Result<Self> {
        let threads = threads.unwrap_or(0);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        Ok(Self {
            digest: digest(&trace),
            trace: Arc::new(trace),
            speed,
            ledger: RunLedger::open(state)?,
            pool: pool.map_err(|e| anyhow!("tune: {e}"))?,
        })
    }

    /// Speed-up of the trace.
    pub const fn speed(&self) -> f64 {
        self.speed
    }

    /// The tallies of these runs, in order.
    ///
    /// # Errors
    /// A configuration that cannot be, or a state file that cannot be written.
    pub fn tallies(&mut self, round: &str, runs: &[CountedRun]) -> Result<Vec<RunTally>> {
        let setups: Result<Vec<Setup>> = runs.iter().map(|run| self.setup(run)).collect();
        let setups = setups?;
        let keys: Vec<String> = runs.iter().zip(&setups).map(|(run, setup)| self.key(run, setup)).collect();
        let mut open: Vec<usize> = Vec::new();
        for at in 0..runs.len() {
            if self.ledger.get(&keys[at]).is_none() && open.iter().all(|other| keys[*other] != keys[at]) {
                open.push(at);
            }
        }
        note!("tune: {round}: {} runs, {} of them known", runs.len(), runs.len() - open.len());
        let rows = open.iter().map(|at| self.rows(&runs[*at]) as u64).sum();
        let bar = replay::progress(rows);
        let done: Result<Vec<RunTally>> = self.pool.install(|| {
            let one = |at: &usize| {
                let tally = self.run(&runs[*at], setups[*at].clone())?.1;
                bar.inc(self.rows(&runs[*at]) as u64);
                self.ledger.write(&keys[*at], &tally)?;
                Ok(tally)
            };
            open.par_iter().map(one).collect()
        });
        bar.finish_and_clear();
        for (at, tally) in open.iter().zip(done?) {
            self.ledger.add(keys[*at].clone(), tally);
        }
        Ok(keys.iter().filter_map(|key| self.ledger.get(key)).cloned().collect())
    }

    /// Every figure of a run, for a page.
    ///
    /// # Errors
    /// As [`RunDriver::tallies`].
    pub fn result(&self, run: &CountedRun) -> Result<RunResult> {
        let mut setup = self.setup(run)?;
        setup.sample_us = 1_000_000;
        let scheduler = &setup.scheduler;
        let (policy, mode) = (scheduler.policy.name(), scheduler.effective_admission().name());
        let (seed, speed) = (setup.seed, self.speed * run.load);
        Ok(self.run(run, setup)?.0.result((policy, mode), speed, seed))
    }

    fn setup(&self, run: &CountedRun) -> Result<Setup> {
        let mut setup = cluster::setup(&run.config, run.config.scheduler.seed.wrapping_add(run.seed))?;
        setup.scheduler.block_tokens = self.trace.block_tokens;
        (setup.keep_outcomes, setup.sample_us) = (true, 0);
        setup.validate().map_err(Error::msg)?;
        Ok(setup)
    }

    fn run(&self, run: &CountedRun, setup: Setup) -> Result<(Collector, RunTally)> {
        let classes = setup.scheduler.classes.clone();
        let names = classes.iter().map(|class| class.name.clone()).collect();
        let workload = TraceWorkload::new(Arc::clone(&self.trace), self.speed * run.load)
            .with_classes(names)
            .limited(self.rows(run));
        let mut world = World::new(setup, Box::new(workload)).map_err(Error::msg)?;
        world.run().map_err(Error::msg)?;
        let metrics = world.into_metrics();
        let mut tally = RunTally::of(&metrics.outcomes, &classes, self.part_us(run));
        tally.refusals =
            metrics.refusals_by_reason().into_iter().map(|(name, count)| (name.to_owned(), count)).collect();
        Ok((metrics, tally))
    }

    /// Rows of the trace that arrive before the end of a run's part, or within the longest TTFT after it.
    #[expect(clippy::cast_precision_loss, reason = "objectives are far below 2^53 µs")]
    fn rows(&self, run: &CountedRun) -> usize {
        let records = &self.trace.records;
        let first_ms = records.first().map_or(0.0, |record| record.timestamp_ms);
        let longest_us = run.config.scheduler.classes.iter().map(|class| class.ttft_us).max().unwrap_or(0);
        let end_ms = run.part_ms.1 + longest_us as f64 / 1000.0 * self.speed * run.load;
        records.partition_point(|record| record.timestamp_ms - first_ms < end_ms)
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive times")]
    fn part_us(&self, run: &CountedRun) -> (u64, u64) {
        let us = |ms: f64| (ms * 1000.0 / (self.speed * run.load)) as u64;
        (us(run.part_ms.0), us(run.part_ms.1))
    }

    /// A digest of all that a run comes from, this program's version among it.
    fn key(&self, run: &CountedRun, setup: &Setup) -> String {
        let text = format!(
            "{} {:x} {} {:?} {} {setup:?}",
            env!("CARGO_PKG_VERSION"),
            self.digest,
            self.speed * run.load,
            self.part_us(run),
            self.rows(run)
        );
        format!("{:032x}", xxh3_128(text.as_bytes()))
    }
}

/// A digest of a trace, as far as a run reads it.
fn digest(trace: &Trace) -> u128 {
    let mut hasher = Xxh3::new();
    hasher.update(&trace.block_tokens.to_le_bytes());
    for record in &trace.records {
        hasher.update(&record.timestamp_ms.to_bits().to_le_bytes());
        for number in [record.input_length, record.output_length, record.hash_ids.len() as u64] {
            hasher.update(&number.to_le_bytes());
        }
        record.hash_ids.iter().for_each(|id| hasher.update(&id.to_le_bytes()));
        let read = |extra: &Extra| {
            let objectives = (extra.slo_ttft_ms, extra.slo_tbt_ms);
            format!("{:?}{:?}{:?}{objectives:?};", extra.class, extra.tenant, extra.cancel_after_ms)
        };
        hasher.update(record.extra.as_ref().map_or(String::new(), |extra| read(extra)).as_bytes());
    }
    hasher.digest128()
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_sim::tune;
    use baton_traces::{Dialect, Record};

    /// One row a second: those of the 5 s of TTFT after the part are there, at twice the pace 10 s of the trace.
    #[test]
    fn requests_that_wait_at_the_end_of_a_part_meet_those_that_follow() {
        let record = |at: u64| Record {
            timestamp_ms: f64::from(u32::try_from(at).expect("small")) * 1000.0,
            input_length: 512,
            output_length: 2,
            hash_ids: vec![at],
            extra: None,
        };
        let trace = Trace {
            block_tokens: 512,
            assumptions: Vec::new(),
            dialect: Dialect::Mooncake,
            records: (0..100).map(record).collect(),
        };
        let mut config = Config::default();
        config.scheduler.classes[0].ttft_us = 5_000_000;
        let mut driver = RunDriver::new(trace, 2.0, None, Some(1)).expect("a driver");
        let run =
            |end_ms: f64| CountedRun { config: config.clone(), seed: 0, load: 1.0, part_ms: (0.0, end_ms) };
        assert_eq!([10_000.0, 99_000.0].map(|end_ms| driver.rows(&run(end_ms))), [20, 100]);
        let tallies = driver.tallies("test", &[run(10_000.0)]).expect("a run");
        assert_eq!(tune::total(&tallies, None), [10, 10], "the others do not count");
    }
}
