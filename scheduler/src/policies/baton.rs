//! Baton's own policy: the earliest first token among the candidates that keep every promise.

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

/// The predicted TTFT plus the delay that it causes to the requests that wait there.
#[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
pub(super) fn score(conductor: &Conductor, candidate: &Candidate, instance: &Instance) -> f64 {
    let plan = &candidate.plan;
    // A decode instance saves the hand-off, but that gives it no advantage over a prefill instance: among equals the
    // prefill goes to the prefill pool, and decode steps stay short.
    let aside_us = if instance.spec.role == Role::Decode { conductor.first_step_us() + 1 } else { 0 };
    (candidate.ttft_us - plan.work_us + plan.burden_us() + candidate.behind_us + aside_us) as f64
}
