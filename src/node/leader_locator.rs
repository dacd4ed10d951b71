//! Finds the conductor that a node attaches to: a fixed one, or the one that leads.

use baton_membership::{Fence, Leader};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::watch;

/// Where a conductor that does not lead says who does: metadata of its refusal.
pub(crate) const LEADER_METADATA: &str = "baton-leader";

/// The leader, as reported from elsewhere.
pub type Leaders = watch::Receiver<Option<Leader>>;

/// Finds the conductor that a node attaches to.
pub(super) struct LeaderLocator {
    configured: String,
    leaders: Option<Leaders>,
    /// Lets no leader in that is older than one it has followed.
    fence: Fence,
    /// Where the last refusal pointed to; good for one try.
    pointed: Mutex<Option<String>>,
    refused_orders: AtomicU64,
}

/// A conductor to attach to.
pub(super) struct ChosenConductor {
    pub(super) address: String,
    /// Of its leadership; 0 where nobody elects.
    token: u64,
}

impl LeaderLocator {
    /// A locator of the conductor at `configured`, or of the leader that `leaders` reports.
    pub(super) fn new(configured: String, leaders: Option<Leaders>) -> Self {
        Self {
            configured,
            leaders,
            fence: Fence::new(),
            pointed: Mutex::new(None),
            refused_orders: AtomicU64::new(0),
        }
    }

    /// Waits until there is one.
    pub(super) async fn choose(&self) -> ChosenConductor {
        let Some(mut leaders) = self.leaders.clone() else {
            let address = self.pointed.lock().take().unwrap_or_else(|| self.configured.clone());
            return ChosenConductor { address, token: 0 };
        };
        let known =
            |leader: &Option<Leader>| leader.as_ref().is_some_and(|one| self.fence.pass(one.token).is_ok());
        let leader = leaders.wait_for(known).await.ok().and_then(|leader| leader.clone());
        // The sender of leaders is gone: the process is ending.
        let Some(leader) = leader else { return std::future::pending().await };
        ChosenConductor { address: leader.member.addresses[0].clone(), token: leader.token }
    }

    /// Resolves when another leads than `chosen`; never where nobody elects.
    pub(super) async fn replaced(&self, chosen: &ChosenConductor) {
        let Some(mut leaders) = self.leaders.clone() else { return std::future::pending().await };
        let other = |leader: &Option<Leader>| leader.as_ref().is_some_and(|one| one.token > chosen.token);
        if leaders.wait_for(other).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Lets the orders of the leadership `token` pass, and from then on none of an older one.
    ///
    /// # Errors
    /// The newer token that this node has seen: the sender of the order is no longer the leader.
    pub(super) fn check_fencing_token(&self, token: u64) -> Result<(), u64> {
        let elected =
            self.leaders.as_ref().map(|leaders| leaders.borrow().as_ref().map_or(0, |one| one.token));
        // A conductor that nobody elects has none; who follows an election knows better.
        if token == 0 && elected.is_none() {
            return Ok(());
        }
        // One older than what was seen already changes nothing.
        let _ = self.fence.pass(elected.unwrap_or(0));
        self.fence.pass(token).inspect_err(|_| {
            self.refused_orders.fetch_add(1, Ordering::Relaxed);
        })
    }

    /// How often [`Self::check_fencing_token`] said no.
    pub(super) fn refused_orders(&self) -> u64 {
        self.refused_orders.load(Ordering::Relaxed)
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
        let locator = LeaderLocator::new(String::new(), Some(leaders));
        let soon = std::time::Duration::from_millis(20);
        assert!(tokio::time::timeout(soon, locator.choose()).await.is_err(), "nobody leads");
        sender.send_replace(leader("b", 7));
        let chosen = locator.choose().await;
        assert_eq!(chosen.address, "http://b:1");
        sender.send_replace(leader("a", 5));
        assert!(
            tokio::time::timeout(soon, locator.replaced(&chosen)).await.is_err(),
            "an older leader is none"
        );
        assert!(tokio::time::timeout(soon, locator.choose()).await.is_err());
        sender.send_replace(leader("c", 9));
        locator.replaced(&chosen).await;
        assert_eq!(locator.choose().await.address, "http://c:1");
    }

    #[test]
    fn orders_of_an_older_leader_are_refused_as_soon_as_a_newer_is_known_of() {
        let (sender, leaders) = watch::channel(leader("a", 5));
        let locator = LeaderLocator::new(String::new(), Some(leaders));
        assert_eq!(locator.check_fencing_token(5), Ok(()));
        assert_eq!(locator.check_fencing_token(0), Err(5), "who follows an election takes nobody without");
        sender.send_replace(leader("b", 7));
        assert_eq!(
            locator.check_fencing_token(5),
            Err(7),
            "told by the election, before any word of the newer itself"
        );
        sender.send_replace(leader("a", 5));
        assert_eq!(
            (locator.check_fencing_token(5), locator.check_fencing_token(7)),
            (Err(7), Ok(())),
            "what is known is not forgotten"
        );
        assert_eq!(
            (locator.check_fencing_token(9), locator.check_fencing_token(8)),
            (Ok(()), Err(9)),
            "told by an order, before the election"
        );
        assert_eq!(locator.refused_orders(), 4);
        let configured = LeaderLocator::new("http://told:1".into(), None);
        assert_eq!(
            (
                configured.check_fencing_token(0),
                configured.check_fencing_token(3),
                configured.check_fencing_token(2)
            ),
            (Ok(()), Ok(()), Err(3))
        );
        assert_eq!(
            configured.check_fencing_token(0),
            Ok(()),
            "an operator who has done with elections is obeyed"
        );
    }

    #[tokio::test]
    async fn who_was_told_a_conductor_goes_once_where_that_one_points() {
        let locator = LeaderLocator::new("http://told:1".into(), None);
        let mut status = tonic::Status::unavailable("it does not lead");
        status.metadata_mut().insert(LEADER_METADATA, "http://leader:1".parse().expect("metadata"));
        locator.refused(&status);
        assert_eq!(locator.choose().await.address, "http://leader:1");
        assert_eq!(locator.choose().await.address, "http://told:1");
        locator.refused(&status);
        locator.refused(&tonic::Status::unavailable("gone"));
        assert_eq!(locator.choose().await.address, "http://told:1");
    }
}
