//! `baton replay --bound`: what no scheduler exceeds, and the best run of all policies with all admission modes.

use anyhow::{Error, Result};
use baton_scheduler::{AdmissionMode, PolicyName};
use baton_sim::bound::{BoundResult, UpperBound};
use baton_sim::{RunResult, Setup, TraceWorkload};
use rayon::prelude::*;

use super::replay::{FinishedRun, Job};

const MODES: [AdmissionMode; 5] = [
    AdmissionMode::None,
    AdmissionMode::AtDecode,
    AdmissionMode::Early,
    AdmissionMode::EarlyPredict,
    AdmissionMode::Slo,
];

/// What a run comes from, beside what all runs have in common.
fn identity(job: &Job) -> (f64, PolicyName, AdmissionMode) {
    (job.speed, job.policy, job.setup.scheduler.effective_admission())
}

/// The runs of every policy with every admission mode at the speeds of `jobs`, but those that are there.
pub(super) fn rivals(jobs: &[Job]) -> Vec<Job> {
    let mut all = jobs.to_vec();
    for job in jobs {
        for policy in PolicyName::ALL {
            for mode in MODES {
                let mut rival = job.clone().of(policy);
                rival.setup.scheduler.admission = mode;
                (rival.setup.keep_outcomes, rival.setup.scheduler.explain_every) = (false, 0);
                if all.iter().all(|other| identity(other) != identity(&rival)) {
                    all.push(rival);
                }
            }
        }
    }
    all.split_off(jobs.len())
}

/// Gives each run the bound at its speed and the best run there.
pub(super) fn attach(
    done: &mut [FinishedRun],
    jobs: &[Job],
    workload: impl Fn(&Job) -> (Setup, TraceWorkload) + Sync,
) -> Result<()> {
    let mut speeds: Vec<&Job> = Vec::new();
    for job in jobs {
        if speeds.iter().all(|known| known.speed != job.speed) {
            speeds.push(job);
        }
    }
    let bounds: Result<Vec<(f64, UpperBound)>> = speeds
        .par_iter()
        .map(|job| {
            let (setup, mut workload) = workload(job);
            Ok((job.speed, UpperBound::of(&setup, &mut workload).map_err(Error::msg)?))
        })
        .collect();
    for (speed, bound) in bounds? {
        let mut runs: Vec<&mut RunResult> =
            done.iter_mut().map(|run| &mut run.figures).filter(|run| run.speed == speed).collect();
        let rank = |run: &RunResult| (run.in_slo, run.input_tokens_in_slo);
        let Some(best) = runs.iter().rev().max_by_key(|run| rank(run)).map(|run| (*run).clone()) else {
            continue;
        };
        for run in &mut runs {
            run.bound = Some(BoundResult::new(bound, &best, run));
        }
    }
    Ok(())
}
