//! Whom a node attaches to: the conductor that it was told, or the one that leads.

use baton_membership::{Fence, Leader};
use parking_lot::Mutex;
use tokio::sync::watch;

/// Where a conductor that does not lead says who does: metadata of its refusal.
pub(crate) const LEADER_METADATA: &str = "baton-leader";

/// Who leads, as told from elsewhere.
pub type Leaders = watch::Receiver<Option<Leader>>;

/// See the module.
pub(super) struct Whom {
    told: String,
    leaders: Option<Leaders>,
    /// Lets no leader in that is older than one it has followed.
    fence: Fence,
    /// Where the last refusal pointed to; good for one try.
    pointed: Mutex<Option<String>>,
}

/// A conductor to attach to.
pub(super) struct Chosen {
    pub(super) address: String,
    /// Of its leadership; 0 where nobody elects.
    token: u64,
}

impl Whom {
    /// The conductor at `told`, or whoever leads by `leaders`.
    pub(super) fn new(told: String, leaders: Option<Leaders>) -> Self {
        Self { told, leaders, fence: Fence::new(), pointed: Mutex::new(None) }
    }

    /// Waits until there is one.
    pub(super) async fn choose(&self) -> Chosen {
        let Some(mut leaders) = self.leaders.clone() else {
            let address = self.pointed.lock().take().unwrap_or_else(|| self.told.clone());
            return Chosen { address, token: 0 };
        };
        let known =
            |leader: &Option<Leader>| leader.as_ref().is_some_and(|one| self.fence.pass(one.token).is_ok());
        let told = leaders.wait_for(known).await.ok().and_then(|leader| leader.clone());
        // Nobody tells any more: the process is ending.
        let Some(leader) = told else { return std::future::pending().await };
        Chosen { address: leader.member.addresses[0].clone(), token: leader.token }
    }

    /// Resolves when another leads than `chosen`; never where nobody elects.
    pub(super) async fn replaced(&self, chosen: &Chosen) {
        let Some(mut leaders) = self.leaders.clone() else { return std::future::pending().await };
        let other = |leader: &Option<Leader>| leader.as_ref().is_some_and(|one| one.token > chosen.token);
        if leaders.wait_for(other).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Remembers where a refusal points to, if it does.
    pub(super) fn refused(&self, status: &tonic::Status) {
        let leader = status.metadata().get(LEADER_METADATA).and_then(|value| value.to_str().ok());
        *self.pointed.lock() = leader.map(str::to_owned);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_membership::{Member, MemberRole};

    fn leader(name: &str, token: u64) -> Option<Leader> {
        let member = Member::new(name, MemberRole::Conductor, vec![format!("http://{name}:1")]);
        Some(Leader { member, token })
    }

    #[tokio::test]
    async fn the_leader_is_waited_for_followed_and_never_exchanged_for_an_older() {
        let (sender, leaders) = watch::channel(None);
        let whom = Whom::new(String::new(), Some(leaders));
        let soon = std::time::Duration::from_millis(20);
        assert!(tokio::time::timeout(soon, whom.choose()).await.is_err(), "nobody leads");
        sender.send_replace(leader("b", 7));
        let chosen = whom.choose().await;
        assert_eq!(chosen.address, "http://b:1");
        sender.send_replace(leader("a", 5));
        assert!(tokio::time::timeout(soon, whom.replaced(&chosen)).await.is_err(), "an older leader is none");
        assert!(tokio::time::timeout(soon, whom.choose()).await.is_err());
        sender.send_replace(leader("c", 9));
        whom.replaced(&chosen).await;
        assert_eq!(whom.choose().await.address, "http://c:1");
    }

    #[tokio::test]
    async fn who_was_told_a_conductor_goes_once_where_that_one_points() {
        let whom = Whom::new("http://told:1".into(), None);
        let mut status = tonic::Status::unavailable("it does not lead");
        status.metadata_mut().insert(LEADER_METADATA, "http://leader:1".parse().expect("metadata"));
        whom.refused(&status);
        assert_eq!(whom.choose().await.address, "http://leader:1");
        assert_eq!(whom.choose().await.address, "http://told:1");
        whom.refused(&status);
        whom.refused(&tonic::Status::unavailable("gone"));
        assert_eq!(whom.choose().await.address, "http://told:1");
    }
}
