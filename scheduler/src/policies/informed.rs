//! As `baton`, with the lengths of answers and the arrivals of the near future. It is a heuristic and no bound: others have
//! more requests in SLO on some loads.

use super::{Choice, FetchRule, Policy, QueueLocation, Ties, baton};
use crate::AdmissionMode;

pub(super) const POLICY: Policy = Policy {
    choice: Choice::Least { score: baton::score, ties: Ties::Warmest },
    fetch: FetchRule::Sooner,
    queueing: QueueLocation::ByInstance,
    admission: AdmissionMode::Slo,
    foresees: true,
};
