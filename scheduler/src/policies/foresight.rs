//! As `baton`, told of what is to come: how much better a policy could be that guesses everything right.

use super::{Choice, FetchRule, Policy, QueueLocation, Ties, baton};
use crate::AdmissionMode;

pub(super) const POLICY: Policy = Policy {
    choice: Choice::Least { score: baton::score, ties: Ties::Warmest },
    fetch: FetchRule::Sooner,
    queueing: QueueLocation::ByInstance,
    admission: AdmissionMode::Slo,
    foresees: true,
};
