//! Decision records: every candidate with its terms, so that "why there?" has an answer.

use alloc::vec::Vec;
use baton_types::{InstanceId, RequestId};
use serde::{Deserialize, Serialize};

/// One candidate's arithmetic, µs and tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CandidateTerms {
    /// The instance.
    pub instance: InstanceId,
    /// Predicted wait behind work already there, µs.
    pub queue_us: u64,
    /// Predicted time to bring blocks (fetch or onboard), µs; none where they cannot be brought.
    pub load_us: Option<u64>,
    /// Predicted time to compute the rest, µs; none where it cannot be computed beside what decodes there.
    pub compute_us: Option<u64>,
    /// Prompt tokens that need no computing.
    pub cached_tokens: u64,
    /// The holder that blocks would come from.
    pub fetch_from: Option<InstanceId>,
    /// Predicted TTFT, µs; none where there would be no first token.
    pub ttft_us: Option<u64>,
    /// What the policy minimised; none where there would be no first token.
    pub score: Option<f64>,
    /// Whether the placement keeps every promise.
    pub feasible: bool,
}

/// One decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decision {
    /// Which request.
    pub request: RequestId,
    /// When, µs.
    pub at_us: u64,
    /// The winner; `None` when the request was refused.
    pub chosen: Option<InstanceId>,
    /// Everything that was considered, in instance order.
    pub candidates: Vec<CandidateTerms>,
}
