//! The cost of NVIDIA Dynamo's KV router.

use crate::AdmissionMode;
use crate::conductor::Conductor;
use crate::fleet::Instance;
use crate::placement::Candidate;
use crate::policies::{Choice, FetchRule, Policy, QueueLocation, Ties};

pub(in crate::policies) const POLICY: Policy = Policy {
    choice: Choice::Least { score, ties: Ties::ByLot },
    fetch: FetchRule::Never,
    queueing: QueueLocation::AtEngines,
    admission: AdmissionMode::None,
    foresees: false,
};

/// Prefill blocks still to compute, less those cached; no decode term in a prefill pool.
#[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^53")]
pub(super) fn score(conductor: &Conductor, candidate: &Candidate, instance: &Instance) -> f64 {
    let block_tokens = f64::from(conductor.config.block_tokens);
    let tokens = instance.prefill.active_tokens() + candidate.plan.new_tokens;
    let decodes = instance.spec.role.decodes();
    let decode_blocks = if decodes { instance.decode.all().1 as f64 / block_tokens } else { 0.0 };
    tokens as f64 / block_tokens + decode_blocks
}
