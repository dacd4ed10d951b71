//! Baton's own: the soonest first token of those that keep every promise.

use baton_types::Role;

use super::{Choice, FetchRule, Policy, QueueLocation, Ties};
use crate::AdmissionMode;
use crate::conductor::Conductor;
use crate::fleet::Instance;
use crate::placement::Candidate;

pub(super) const POLICY: Policy = Policy {
    choice: Choice::Least { score, ties: Ties::Warmest },
    fetch: FetchRule::Sooner,
    queueing: QueueLocation::ByInstance,
    admission: AdmissionMode::Slo,
    foresees: false,
};

/// The predicted TTFT, and the time by which those who wait there come later.
#[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
pub(super) fn score(conductor: &Conductor, candidate: &Candidate, instance: &Instance) -> f64 {
    let plan = &candidate.plan;
    // That a decode instance spares the hand-off says nothing for it beside one that is there to prefill: among equals
    // what is new goes to the pool, and steps stay short.
    let aside_us = if instance.spec.role == Role::Decode { conductor.first_step_us() + 1 } else { 0 };
    (candidate.ttft_us - plan.work_us + plan.burden_us() + candidate.behind_us + aside_us) as f64
}
