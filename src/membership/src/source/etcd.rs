//! Members that registered themselves in etcd.

use std::collections::BTreeMap;

use tokio_util::sync::CancellationToken;

use super::FollowFuture;
use crate::directory::{Board, listed};
use crate::error::{MembershipError, Result};
use crate::etcd::{Batch, Entry, Etcd, Event, Follower, Keys, Listing, follow};
use crate::member::Member;
use crate::view::{ListedMember, MEMBERS_MAX, Revision};

/// The members of the cluster that calls itself `cluster`, as [`crate::Registration`] writes them.
#[derive(Clone, Debug)]
pub struct EtcdSource {
    /// The etcd client.
    pub etcd: Etcd,
    /// The cluster's name.
    pub cluster: String,
}

/// Where the members of a cluster stand.
pub(crate) fn members_prefix(cluster: &str) -> String {
    format!("/baton/{cluster}/members/")
}

/// Checks that a cluster's name can be part of a key.
pub(crate) fn check_cluster(cluster: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if !cluster.is_empty() && cluster.len() <= 64 && cluster.chars().all(plain) {
        return Ok(());
    }
    Err(MembershipError::invalid(format!(
        "'{cluster}' is no name of a cluster; give 1 to 64 letters, digits, '-', '_' or '.'"
    )))
}

impl EtcdSource {
    pub(super) fn following(self, board: Board, stop: CancellationToken) -> Result<FollowFuture> {
        check_cluster(&self.cluster)?;
        let keys = Keys::Under(members_prefix(&self.cluster));
        let roster = Roster { board, entries: BTreeMap::new(), more: false, revision: "".into() };
        Ok(Box::pin(follow(self.etcd, keys, MEMBERS_MAX, roster, stop)))
    }
}

/// The state of the keys, and the board that reports it.
struct Roster {
    board: Board,
    entries: BTreeMap<String, Option<ListedMember>>,
    more: bool,
    revision: Revision,
}

impl Roster {
    fn write(&self) {
        let wrong = self.entries.values().filter(|one| one.is_none()).count();
        let members = self.entries.values().flatten().cloned();
        self.board.replace(members, self.revision.clone(), wrong + usize::from(self.more));
    }

    fn put(&mut self, entry: &Entry) {
        if self.entries.len() == MEMBERS_MAX && !self.entries.contains_key(&entry.key) {
            self.more = true;
            return;
        }
        let revision = entry.mod_revision.to_string().into();
        let member = Member::from_json(&entry.value).and_then(|member| listed(member, &revision));
        if let Err(error) = &member {
            tracing::warn!(key = entry.key, why = error.text, "a member that cannot be read is left out");
        }
        self.entries.insert(entry.key.clone(), member.ok());
    }
}

impl Follower for Roster {
    fn listed(&mut self, listing: Listing) {
        self.entries.clear();
        self.more = listing.more;
        listing.entries.iter().for_each(|entry| self.put(entry));
        self.revision = listing.revision.to_string().into();
        self.write();
    }

    fn happened(&mut self, batch: Batch) {
        for event in &batch.events {
            match event {
                Event::Put(entry) => self.put(entry),
                Event::Deleted { key, .. } => {
                    self.entries.remove(key);
                }
            }
        }
        self.revision = batch.revision.to_string().into();
        self.write();
    }

    fn current(&mut self) {
        self.board.fresh();
    }

    fn broke(&mut self, error: &MembershipError) {
        self.board.stale(&error.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, value: &[u8], revision: u64) -> Entry {
        let key = format!("/baton/a/members/{name}");
        Entry { key, value: value.to_vec().into(), create_revision: 1, mod_revision: revision, lease: 1 }
    }

    #[test]
    fn what_cannot_be_read_is_left_out_and_counted_until_it_can() {
        let (board, latest) = Board::new();
        let mut roster = Roster { board, entries: BTreeMap::new(), more: false, revision: "".into() };
        let good = Member::new("a", crate::MemberRole::Both, vec!["a:1".into()]).to_json();
        let entries = vec![entry("a", &good, 3), entry("b", b"no", 4)];
        roster.listed(Listing { entries, revision: 9, more: false });
        let seen = latest.borrow().clone();
        assert_eq!((seen.members.len(), seen.left_out, &*seen.revision), (1, 1, "9"));
        assert_eq!(&*seen.members["a"].revision, "3");
        let other = Member::new("b", crate::MemberRole::Both, vec!["b:1".into()]).to_json();
        let events = vec![
            Event::Put(entry("b", &other, 10)),
            Event::Deleted { key: "/baton/a/members/a".into(), revision: 11 },
        ];
        roster.happened(Batch { events, revision: 11 });
        let seen = latest.borrow().clone();
        assert_eq!((seen.members.keys().next().map(String::as_str), seen.left_out), (Some("b"), 0));
    }

    #[test]
    fn names_of_clusters_are_plain() {
        assert!(check_cluster("prod-1.eu_a").is_ok());
        assert!(check_cluster("").is_err() && check_cluster("a/b").is_err());
        assert!(check_cluster(&"a".repeat(65)).is_err_and(|e| e.text.contains("1 to 64")));
    }
}
