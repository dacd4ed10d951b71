//! The policy that several conductors share: in etcd, followed by each, written by the one that leads.
//!
//! Each conductor checks it as a whole against its own configuration and puts it into force between two decisions, or
//! not at all. Without one, or after it was taken back, each follows its own file.

use std::path::PathBuf;
use std::sync::Arc;

use baton_membership::{Kind, MembershipError, Permit, Policies, Policy, PolicyFollower};
use tokio::sync::{Mutex, MutexGuard};
use tokio_util::sync::CancellationToken;

use crate::conductor::{Inbox, Lead, PolicyChange, PolicyOutcome, PolicyRefusal, Question};
use crate::config::Config;
use crate::metrics::Metrics;
use crate::policy::PolicyError;

impl From<MembershipError> for PolicyRefusal {
    fn from(error: MembershipError) -> Self {
        let why = error.to_string();
        match error.kind {
            Kind::Invalid => Self::Wrong(PolicyError::Cluster(error)),
            Kind::Conflict => Self::Conflict(why),
            // A write whose answer was lost may have been carried out.
            Kind::Unavailable | Kind::TimedOut => Self::NotNow(format!(
                "{why}; the policy in force goes on. Send it again when etcd answers: baton_policy_version tells \
                 whether it was taken all the same"
            )),
            Kind::Denied | Kind::Compacted | Kind::LeaseLost | Kind::Corrupt => Self::NotNow(why),
        }
    }
}

/// Reads and writes the policy that several conductors share. Clones share one state.
#[derive(Clone)]
pub(super) struct SharedPolicy {
    policies: Policies,
    lead: Lead,
    following: Arc<PolicyFollower>,
    /// The version that this conductor follows; 0 for its own file. Locked while another comes into force.
    in_force: Arc<Mutex<u64>>,
}

impl SharedPolicy {
    /// Begins to follow.
    pub(super) fn new(policies: Policies, lead: Lead) -> Self {
        let following = Arc::new(policies.follow());
        Self { policies, lead, following, in_force: Arc::default() }
    }

    /// The latest version, if there is one.
    pub(super) fn version(&self) -> Option<u64> {
        self.following.latest().borrow().as_ref().map(|policy| policy.version)
    }

    /// The version that this conductor follows, 0 for its own file. It follows no other until this is dropped.
    pub(super) async fn in_force(&self) -> MutexGuard<'_, u64> {
        self.in_force.lock().await
    }

    /// Leave to make policies at this moment.
    fn permit(&self) -> Result<Permit, PolicyRefusal> {
        self.lead.permit().map_err(PolicyRefusal::NotNow)
    }

    /// Whether this conductor may make policies at this moment.
    ///
    /// # Errors
    /// Another leads; and who, if that is known.
    pub(super) fn may_write(&self) -> Result<(), PolicyRefusal> {
        self.permit().map(drop)
    }

    /// Makes `text` the policy of all, in place of that version or of any; its own version.
    ///
    /// # Errors
    /// Another leads, somebody else was quicker, or etcd does not take it.
    pub(super) async fn put(&self, text: &str, in_place_of: Option<u64>) -> Result<u64, PolicyRefusal> {
        let permit = self.permit()?;
        let version = match in_place_of {
            Some(version) => version,
            None => self.policies.get().await?.map_or(0, |now| now.version),
        };
        Ok(self.policies.put_as_leader(text, version, permit).await?)
    }

    /// Makes it the one before that version, or before any, again; what is in force then, in a line.
    ///
    /// # Errors
    /// As [`Self::put`], or there is none before.
    pub(super) async fn rollback(&self, version: Option<u64>) -> Result<PolicyOutcome, PolicyRefusal> {
        let now = self.policies.rollback(version, Some(self.permit()?)).await?;
        let change = match &now {
            Some(policy) => format!("the cluster's policy is version {}, as before the last", policy.version),
            None => "the cluster has no policy any more; each conductor follows its own file".to_owned(),
        };
        Ok(PolicyOutcome { revision: now.map_or(0, |policy| policy.version), changes: vec![change] })
    }

    /// Puts each new policy into force until `stop` is cancelled. `own` is the configuration that the conductor was
    /// started with, and its file.
    pub(super) async fn follow(
        self,
        own: (Config, Option<PathBuf>),
        (inbox, metrics): (Inbox, Metrics),
        stop: CancellationToken,
    ) {
        let (mut latest, mut seen) = (self.following.latest(), None);
        loop {
            let policy = latest.borrow_and_update().clone();
            if policy != seen {
                let mut in_force = self.in_force.lock().await;
                if adopt(policy.as_ref(), &own, &inbox).await {
                    *in_force = policy.as_ref().map_or(0, |policy| policy.version);
                    metrics.policy_version(*in_force);
                }
                seen = policy;
            }
            tokio::select! {
                changed = latest.changed() => if changed.is_err() { return },
                () = stop.cancelled() => return,
            }
        }
    }
}

/// Puts a policy into force, or the conductor's own where there is none. Whether it is in force.
async fn adopt(policy: Option<&Policy>, (own, path): &(Config, Option<PathBuf>), inbox: &Inbox) -> bool {
    let Some(now) = inbox.ask(Question::Config).await else { return false };
    let config = match (policy, path) {
        // Of its own file, keys may have changed since the start.
        (Some(policy), _) => crate::policy::under(&now, &policy.text),
        (None, Some(path)) => crate::config::load(path).map_err(PolicyError::from),
        (None, None) => Ok(Config { scheduler: own.scheduler.clone(), ..*now }),
    };
    let applied = match config {
        Ok(config) => {
            let change = Box::new(PolicyChange::confirmed(config));
            inbox.ask(|reply| Question::Policy(change, reply)).await
        }
        Err(why) => Some(Err(PolicyRefusal::Wrong(why))),
    };
    let version = policy.map_or(0, |policy| policy.version);
    match applied {
        Some(Ok(PolicyOutcome { changes, .. })) => {
            let changes = if changes.is_empty() { "nothing".to_owned() } else { changes.join("; ") };
            tracing::info!(version, changes, "the cluster's policy is in force");
            true
        }
        Some(Err(why)) => {
            tracing::error!(version, %why, "the cluster's policy NOT applied; the policy in force goes on");
            false
        }
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_membership::Stage;

    #[test]
    fn only_what_is_wrong_with_a_policy_is_its_authors_fault() {
        let not_made = |kind| {
            PolicyRefusal::from(MembershipError { kind, stage: Stage::Write, text: "so it is".into() })
        };
        assert!(
            matches!(not_made(Kind::Invalid), PolicyRefusal::Wrong(why) if why.to_string().contains("so it is"))
        );
        assert!(matches!(not_made(Kind::Conflict), PolicyRefusal::Conflict(_)));
        for kind in [Kind::Denied, Kind::Corrupt, Kind::LeaseLost, Kind::Compacted] {
            assert!(
                matches!(not_made(kind), PolicyRefusal::NotNow(why) if why.contains("so it is")),
                "{kind:?}"
            );
        }
        for kind in [Kind::Unavailable, Kind::TimedOut] {
            let PolicyRefusal::NotNow(why) = not_made(kind) else { panic!("{kind:?} passes") };
            assert!(why.contains("so it is") && why.contains("Send it again"), "{why}");
        }
    }
}
