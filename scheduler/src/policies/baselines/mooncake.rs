//! Algorithm 1 of the Mooncake paper.

use crate::AdmissionMode;
use crate::conductor::Conductor;
use crate::fleet::Instance;
use crate::placement::Candidate;
use crate::policies::{Choice, FetchRule, Policy, QueueLocation, Ties};

pub(in crate::policies) const POLICY: Policy = Policy {
    choice: Choice::Least { score, ties: Ties::First },
    fetch: FetchRule::Threshold,
    queueing: QueueLocation::AtEngines,
    admission: AdmissionMode::None,
    foresees: false,
};

/// TTFT = transfer + queue + prefill.
#[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
pub(super) fn score(_: &Conductor, candidate: &Candidate, _: &Instance) -> f64 {
    (candidate.plan.load_us + candidate.queue_us + candidate.plan.burden_us()) as f64
}
