//! What each policy minimises. Lower is better; every score is finite.

use super::Candidate;
use crate::conductor::Conductor;
use crate::fleet::Instance;
use crate::{PolicyName, Request};

impl Conductor {
    /// The policy's score of a candidate.
    #[expect(clippy::cast_precision_loss, reason = "token and time counts are far below 2^53")]
    pub(crate) fn score(&self, candidate: &Candidate, instance: &Instance, request: &Request) -> f64 {
        let plan = &candidate.plan;
        match self.config.policy {
            PolicyName::Random | PolicyName::RoundRobin => 0.0,
            PolicyName::LeastLoaded => candidate.queue_us as f64,
            PolicyName::LocalCache => (candidate.queue_us + plan.burden_us()) as f64,
            // Algorithm 1: TTFT = transfer + queue + prefill.
            PolicyName::GlobalCache | PolicyName::Mooncake => {
                (plan.load_us + candidate.queue_us + plan.burden_us()) as f64
            }
            // Prefill blocks still to compute, less those cached; no decode term in a prefill pool.
            PolicyName::Dynamo | PolicyName::DynamoWspt => {
                let tokens = instance.prefill.active_tokens() + request.prompt_tokens - plan.cached_tokens;
                let decode_blocks = if instance.spec.role.decodes() {
                    instance.decode.all().1 as f64 / f64::from(self.config.block_tokens)
                } else {
                    0.0
                };
                tokens as f64 / f64::from(self.config.block_tokens) + decode_blocks
            }
            PolicyName::Lmetric => {
                let tokens = instance.prefill.active_tokens() + plan.new_tokens;
                let batch =
                    instance.prefill.dispatched().len() as u64 + u64::from(instance.decode.running()) + 1;
                (tokens * batch) as f64
            }
            PolicyName::Baton | PolicyName::Foresight => candidate.score,
        }
    }
}
