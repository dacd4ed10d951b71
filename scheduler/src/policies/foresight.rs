//! As `baton`, with knowledge of the future: a bound on what a policy with perfect guesses could gain.

use super::{Choice, FetchRule, Policy, QueueLocation, Ties, baton};
use crate::AdmissionMode;

pub(super) const POLICY: Policy = Policy {
    choice: Choice::Least { score: baton::score, ties: Ties::Warmest },
    fetch: FetchRule::Sooner,
    queueing: QueueLocation::ByInstance,
    admission: AdmissionMode::Slo,
    foresees: true,
};
