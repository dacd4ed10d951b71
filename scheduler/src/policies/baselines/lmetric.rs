//! LMetric: outstanding prefill tokens times batch size.

use crate::AdmissionMode;
use crate::conductor::Conductor;
use crate::fleet::Instance;
use crate::placement::Candidate;
use crate::policies::{Choice, FetchRule, Policy, QueueLocation, Ties};

pub(in crate::policies) const POLICY: Policy = Policy {
    choice: Choice::Least { score, ties: Ties::First },
    fetch: FetchRule::Never,
    queueing: QueueLocation::AtEngines,
    admission: AdmissionMode::None,
    foresees: false,
};

#[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^53")]
fn score(_: &Conductor, candidate: &Candidate, instance: &Instance) -> f64 {
    let tokens = instance.prefill.active_tokens() + candidate.plan.new_tokens;
    let batch = instance.prefill.dispatched().len() as u64 + u64::from(instance.decode.running()) + 1;
    (tokens * batch) as f64
}
