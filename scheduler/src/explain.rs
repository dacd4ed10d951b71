//! Decision records: every candidate with its terms, so that an operator can see why a request went where it went.

use alloc::vec::Vec;
use baton_types::{InstanceId, RequestId};
use serde::{Deserialize, Serialize};

/// One candidate's arithmetic, µs and tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CandidateTerms {
    /// The instance.
    pub instance: InstanceId,
    /// Predicted wait behind the present work, µs.
    pub queue_us: u64,
    /// Predicted time to fetch or onboard blocks, µs; none where that is impossible.
    pub load_us: Option<u64>,
    /// Predicted time to compute the rest, µs; none where the decodes there leave no room for it.
    pub compute_us: Option<u64>,
    /// Prompt tokens that need no computing.
    pub cached_tokens: u64,
    /// The holder that blocks would come from.
    pub fetch_from: Option<InstanceId>,
    /// Predicted TTFT, µs; none where no first token is possible.
    pub ttft_us: Option<u64>,
    /// The score that the policy minimised; none where no first token is possible.
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
    /// All candidates, in instance order.
    pub candidates: Vec<CandidateTerms>,
}
