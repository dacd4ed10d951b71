//! The policy that several conductors share: in etcd, followed by each, written by the one that leads.
//!
//! Each conductor checks it as a whole against its own configuration and puts it into force between two decisions, or
//! not at all. Without one, or after it was taken back, each follows its own file.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use baton_membership::{Kind, MembershipError, Permit, Policies, Policy, PolicyFollower};
use tokio::sync::{MappedMutexGuard, Mutex, MutexGuard};
use tokio_util::sync::CancellationToken;

use crate::conductor::{Inbox, Lead, PolicyChange, PolicyOutcome, PolicyRefusal, Question};
use crate::config::Config;
use crate::metrics::Metrics;
use crate::policy::PolicyError;

/// Between two tries to put a policy into force that is refused: what live requests rely on passes with them.
pub(super) const TRY_AGAIN: Duration = Duration::from_secs(1);

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

/// The policy that this conductor follows, and what it does not.
#[derive(Debug, Default)]
struct FollowedPolicy {
    /// 0 for its own file.
    version: u64,
    /// The cluster's version where it is refused here, and why.
    refused: Option<(u64, String)>,
}

impl FollowedPolicy {
    /// A conflict because of a version that is not followed here: reading what is in force again does not help.
    fn explained(&self, refusal: PolicyRefusal) -> PolicyRefusal {
        match (refusal, &self.refused) {
            (PolicyRefusal::Conflict(_), Some((version, why))) => PolicyRefusal::Conflict(format!(
                "version {version} is the cluster's policy, and this conductor does not apply it: {why}. It tries again every \
                 second; baton config rollback takes it back"
            )),
            (refusal, _) => refusal,
        }
    }
}

/// Reads and writes the policy that several conductors share. Clones share one state.
#[derive(Clone)]
pub(super) struct SharedPolicy {
    policies: Policies,
    lead: Lead,
    following: Arc<PolicyFollower>,
    /// Locked while another comes into force.
    in_force: Arc<Mutex<FollowedPolicy>>,
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
    pub(super) async fn in_force(&self) -> MappedMutexGuard<'_, u64> {
        MutexGuard::map(self.in_force.lock().await, |followed| &mut followed.version)
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
        match self.policies.put_as_leader(text, version, permit).await {
            Ok(version) => Ok(version),
            Err(error) => Err(self.in_force.lock().await.explained(error.into())),
        }
    }

    /// Makes it the one before that version, or before any, again; what is in force then, in a line.
    ///
    /// # Errors
    /// As [`Self::put`], or there is none before.
    pub(super) async fn rollback(&self, version: Option<u64>) -> Result<PolicyOutcome, PolicyRefusal> {
        let now = match self.policies.rollback(version, Some(self.permit()?)).await {
            Ok(now) => now,
            Err(error) => return Err(self.in_force.lock().await.explained(error.into())),
        };
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
            let mut followed = self.in_force.lock().await;
            let again = policy == seen;
            if !again || followed.refused.is_some() {
                let version = policy.as_ref().map_or(0, |policy| policy.version);
                match adopt(policy.as_ref(), &own, &inbox).await {
                    Some(Ok(changes)) => {
                        tracing::info!(version, changes, "the cluster's policy is in force");
                        *followed = FollowedPolicy { version, refused: None };
                        metrics.policy_version(version);
                    }
                    Some(Err(why)) => {
                        if !again {
                            tracing::error!(version, %why, "the cluster's policy NOT applied; the policy in force goes on");
                        }
                        followed.refused = Some((version, why.to_string()));
                    }
                    None => return,
                }
                seen = policy;
            }
            let refused = followed.refused.is_some();
            drop(followed);
            tokio::select! {
                changed = latest.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(TRY_AGAIN), if refused => {}
                () = stop.cancelled() => return,
            }
        }
    }
}

/// Puts a policy into force, or the conductor's own where there is none; what that changes. None when the conductor is gone.
async fn adopt(
    policy: Option<&Policy>,
    (own, path): &(Config, Option<PathBuf>),
    inbox: &Inbox,
) -> Option<Result<String, PolicyRefusal>> {
    let now = inbox.ask(Question::Config).await?;
    let config = match (policy, path) {
        // Of its own file, keys may have changed since the start.
        (Some(policy), _) => crate::policy::under(&now, &policy.text),
        (None, Some(path)) => crate::config::load(path).map_err(PolicyError::from),
        (None, None) => Ok(Config { scheduler: own.scheduler.clone(), ..*now }),
    };
    let change = match config {
        Ok(config) => Box::new(PolicyChange::confirmed(config)),
        Err(why) => return Some(Err(why.into())),
    };
    let applied = inbox.ask(|reply| Question::Policy(change, reply)).await?;
    Some(applied.map(|PolicyOutcome { changes, .. }| match changes.is_empty() {
        true => "nothing".to_owned(),
        false => changes.join("; "),
    }))
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
