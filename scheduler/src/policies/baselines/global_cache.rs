//! All caches as one: Algorithm 1, fetching every longer prefix.

use super::mooncake;
use crate::AdmissionMode;
use crate::policies::{Choice, FetchRule, Policy, QueueLocation, Ties};

pub(in crate::policies) const POLICY: Policy = Policy {
    choice: Choice::Least { score: mooncake::score, ties: Ties::First },
    fetch: FetchRule::Longer,
    queueing: QueueLocation::AtEngines,
    admission: AdmissionMode::None,
    foresees: false,
};
