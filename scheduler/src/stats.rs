//! Counters of the conductor's decisions, as plain integers. The exporter names them.

use alloc::vec::Vec;
use baton_types::InstanceId;
use serde::{Deserialize, Serialize};

use crate::conductor::{Conductor, LATEST_US};
use crate::{AdmissionMode, Decision, RejectReason};

/// Counters since the start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SchedulerStats {
    /// Requests seen.
    pub arrived: u64,
    /// Requests placed.
    pub admitted: u64,
    /// Requests that finished.
    pub finished: u64,
    /// Requests that clients cancelled.
    pub cancelled: u64,
    /// Requests that could not be served after being admitted.
    pub failed: u64,
    /// Requests that were preempted for older ones when KV ran short.
    #[serde(default)]
    pub preempted: u64,
    /// Placements repeated after a loss.
    pub retried: u64,
    /// Refusals by reason, in the order of [`RejectReason`].
    pub rejected: [u64; 8],
    /// Refused requests for which a place was kept for when they come back.
    #[serde(default)]
    pub tickets_given: u64,
    /// Of those, let in when they came.
    #[serde(default)]
    pub tickets_used: u64,
    /// Of those, refused although they came in time.
    #[serde(default)]
    pub tickets_broken: u64,
    /// Of those, never seen again in time.
    #[serde(default)]
    pub tickets_expired: u64,
    /// Admitted though they will be late, so that a cache holds their prefix.
    #[serde(default)]
    pub admitted_cold: u64,
    /// What each shadow mode would have refused, with how many it judged.
    pub shadow: Vec<(AdmissionMode, u64, u64)>,
    /// Prompt tokens computed for requests that were refused later.
    pub wasted_prefill_tokens: u64,
    /// Prompt tokens taken from caches.
    pub cached_tokens: u64,
    /// Prompt tokens computed.
    pub prefilled_tokens: u64,
    /// Fetches that ended.
    pub fetches: u64,
    /// Fetches that failed.
    pub fetches_failed: u64,
    /// Fetches that store instances served.
    pub lent_fetches: u64,
    /// Copies made ahead of demand.
    pub replications: u64,
    /// Chains copied to store instances because their last holder was about to lose them.
    pub saves: u64,
    /// Roles that the forecast changed.
    #[serde(default)]
    pub role_changes: u64,
    /// Blocks that instances announced and the index did not take: it was at its memory bound.
    #[serde(default)]
    pub index_refused_blocks: u64,
    /// Inputs that did not fit the state and were ignored.
    pub stale_inputs: u64,
    #[serde(skip)]
    pub(crate) last_decision: Option<Decision>,
}

impl SchedulerStats {
    /// Whether all counters can go on: what was read may be anything.
    pub(crate) fn is_sound(&self) -> bool {
        // A counter that is missing in the list is an error of the compiler.
        macro_rules! all_counters {
            ($($counter:ident)*) => {{
                let Self { $($counter,)* rejected, shadow, last_decision: _ } = self;
                let of_modes = shadow.iter().flat_map(|(_, refused, judged)| [refused, judged]);
                [$($counter),*].into_iter().chain(rejected).chain(of_modes)
            }};
        }
        all_counters!(
            arrived admitted finished cancelled failed preempted retried
            tickets_given tickets_used tickets_broken tickets_expired admitted_cold wasted_prefill_tokens cached_tokens prefilled_tokens
            fetches fetches_failed lent_fetches replications saves role_changes index_refused_blocks stale_inputs
        )
        .all(|count| *count <= LATEST_US)
    }

    /// Refusals in all.
    #[must_use]
    pub fn rejected_total(&self) -> u64 {
        self.rejected.iter().sum()
    }

    pub(crate) const fn count_rejection(&mut self, reason: RejectReason) {
        self.rejected[reason as usize] += 1;
    }

    pub(crate) fn count_shadow(&mut self, mode: AdmissionMode, refused: bool) {
        let at = self.shadow.iter().position(|(m, ..)| *m == mode).unwrap_or_else(|| {
            self.shadow.push((mode, 0, 0));
            self.shadow.len() - 1
        });
        self.shadow[at].1 += u64::from(refused);
        self.shadow[at].2 += 1;
    }
}

/// The load of one instance, for status pages and bug reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceLoad {
    /// The instance.
    pub instance: InstanceId,
    /// Prefill backlog, µs.
    pub backlog_us: u64,
    /// Prefills held back.
    pub waiting: u32,
    /// Prefills sent.
    pub dispatched: u32,
    /// Decodes promised.
    pub decodes: u32,
    /// Decodes running.
    pub running: u32,
    /// KV tokens promised to decodes.
    pub reserved_tokens: u64,
    /// Predicted step time with the running decodes, µs.
    pub step_us: u64,
    /// Rate of its network link as learnt from flights, out of it and into it, bytes/s.
    pub link_bytes_per_s: [u64; 2],
}

/// The public part of the state, in instance order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Live requests.
    pub requests: u64,
    /// Every instance.
    pub instances: Vec<InstanceLoad>,
}

impl Conductor {
    /// Counters since the start.
    #[must_use]
    pub const fn stats(&self) -> &SchedulerStats {
        &self.stats
    }

    /// Loads of every living instance.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let small = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "step times are positive and small"
        )]
        let load = |i: &crate::fleet::Instance| {
            let (batch, context, _) = i.decode.now();
            InstanceLoad {
                instance: i.spec.id,
                backlog_us: i.backlog_us(self.now_us),
                waiting: small(i.prefill.waiting().len()),
                dispatched: small(i.prefill.dispatched().len()),
                decodes: i.decode.all().0,
                running: i.decode.running(),
                reserved_tokens: i.decode.reserved_tokens(),
                step_us: i.spec.profile.decode_us(batch, context) as u64,
                link_bytes_per_s: [&i.prefill.outbound, &i.inbound]
                    .map(|link| link.bytes_per_s(i.spec.net_bytes_per_s)),
            }
        };
        Snapshot { requests: self.requests.len() as u64, instances: self.fleet.iter().map(load).collect() }
    }

    /// Mean absolute relative error of the prefill predictions, per instance in order.
    #[must_use]
    pub fn prefill_errors(&self) -> Vec<(InstanceId, f64)> {
        self.fleet.iter().map(|i| (i.spec.id, i.prefill_residual.mean_error())).collect()
    }
}
