//! The policy in force, as text that every conductor follows: one key, written under comparison.

use bytes::Bytes;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::election::{Permit, leader_key};
use crate::error::{Kind, MembershipError, Result, Stage};
use crate::etcd::{Act, Batch, Condition, Entry, Etcd, Event, Follower, Keys, Listing, Outcome, follow};
use crate::source::check_cluster;

/// Longest policy, bytes.
pub const POLICY_BYTES_MAX: usize = 256 << 10;

/// A policy and its version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// TOML; the program that applies it checks it.
    pub text: String,
    /// Grows with every change; the revision of etcd at which it was written.
    pub version: u64,
}

/// The policy of one cluster.
#[derive(Clone, Debug)]
pub struct Policies {
    etcd: Etcd,
    cluster: String,
    key: String,
    /// Where the policy is that was in force before.
    before: String,
}

impl Policies {
    /// That of `cluster`.
    ///
    /// # Errors
    /// When the cluster's name cannot be one.
    pub fn new(etcd: &Etcd, cluster: &str) -> Result<Self> {
        check_cluster(cluster)?;
        let key = format!("/baton/{cluster}/policy");
        let before = format!("/baton/{cluster}/policy-before");
        Ok(Self { etcd: etcd.clone(), cluster: cluster.to_owned(), key, before })
    }

    /// The policy in force, if one was ever written.
    ///
    /// # Errors
    /// When etcd cannot be read, or holds something else under the key.
    pub async fn get(&self) -> Result<Option<Policy>> {
        let (entry, _) = self.etcd.get(&self.key).await?;
        entry.map(|entry| read(&entry)).transpose()
    }

    /// Writes `text` if the policy in force is still of `version`, 0 for none; the version that it got.
    ///
    /// # Errors
    /// [`Kind::Conflict`] when it is of another version: read that one, and decide anew.
    pub async fn put(&self, text: &str, version: u64) -> Result<u64> {
        self.write(Some(text), version, None).await
    }

    /// As [`Policies::put`], and only while the leader that `permit` was given to still has the key: a write that
    /// was late is not carried out after another was elected.
    ///
    /// # Errors
    /// [`Kind::Conflict`] also when another leads, or nobody.
    pub async fn put_as_leader(&self, text: &str, version: u64, permit: Permit) -> Result<u64> {
        self.write(Some(text), version, Some(permit.token)).await
    }

    /// Puts the policy before the one in force into force again, if that is of `version` or none is given; once more takes
    /// that back. The policy that it is now, none where none was in force before. With a permit only while its leader
    /// still has the key.
    ///
    /// # Errors
    /// [`Kind::Conflict`] where there never was another, or somebody else was quicker.
    pub async fn rollback(&self, version: Option<u64>, permit: Option<Permit>) -> Result<Option<Policy>> {
        let version = match version {
            Some(version) => version,
            None => self.get().await?.map_or(0, |policy| policy.version),
        };
        let before = self.etcd.get(&self.before).await?.0.map(|entry| read(&entry)).transpose()?;
        if before.is_none() && version == 0 {
            let why = "policy: there is none before the one in force; write one";
            return Err(MembershipError::new(Kind::Conflict, Stage::Write, why));
        }
        let text = before.map(|policy| policy.text);
        let version = self.write(text.as_deref(), version, permit.map(|permit| permit.token)).await?;
        Ok(text.map(|text| Policy { text, version }))
    }

    /// Writes the policy, or takes it away, and keeps the one in force as the one before.
    async fn write(&self, text: Option<&str>, version: u64, token: Option<u64>) -> Result<u64> {
        let bytes = text.map_or(0, str::len);
        if bytes > POLICY_BYTES_MAX {
            let why = format!("a policy of {bytes} bytes, at most {POLICY_BYTES_MAX}; shorten it");
            return Err(MembershipError::new(Kind::Invalid, Stage::Write, why));
        }
        // Whether it is the one of `version` is what the condition says.
        let (now, _) = self.etcd.get(&self.key).await?;
        let mut conditions = vec![Condition::Modified { key: self.key.clone(), revision: version }];
        conditions
            .extend(token.map(|revision| Condition::Created { key: leader_key(&self.cluster), revision }));
        let put = |value: Bytes| Act::Put { value, lease: 0 };
        let policy = text.map_or(Act::Delete, |text| put(Bytes::copy_from_slice(text.as_bytes())));
        let before = now.map_or(Act::Delete, |entry| put(entry.value));
        let acts = vec![(self.key.as_str(), policy), (self.before.as_str(), before)];
        match self.etcd.act_on_all(&conditions, acts).await? {
            Outcome::Done { revision } => Ok(revision),
            Outcome::Refused { current, .. } => {
                let now = current.map_or(0, |entry| entry.mod_revision);
                let why = match now == version {
                    true => "this conductor no longer leads; leave it to the one that does".to_owned(),
                    false => format!("version {now} is in force, not {version}; read it and decide anew"),
                };
                Err(MembershipError::new(Kind::Conflict, Stage::Write, format!("policy: {why}")))
            }
        }
    }

    /// Begins to follow the policy in force; must be called in a tokio runtime. While etcd cannot be read the last
    /// one stays.
    #[must_use]
    pub fn follow(&self) -> PolicyFollower {
        let (policies, latest) = watch::channel(None);
        let stop = CancellationToken::new();
        let reader = Reader { policies };
        tokio::spawn(follow(self.etcd.clone(), Keys::One(self.key.clone()), 1, reader, stop.clone()));
        PolicyFollower { latest, _stop: stop.drop_guard() }
    }
}

/// The policy in force, followed until this is dropped.
#[derive(Debug)]
pub struct PolicyFollower {
    latest: watch::Receiver<Option<Policy>>,
    _stop: DropGuard,
}

impl PolicyFollower {
    /// The latest policy.
    #[must_use]
    pub fn latest(&self) -> watch::Receiver<Option<Policy>> {
        self.latest.clone()
    }
}

fn read(entry: &Entry) -> Result<Policy> {
    let wrong = |why: &str| {
        let text = format!("policy at revision {}: {why}; write it anew", entry.mod_revision);
        MembershipError::new(Kind::Corrupt, Stage::Read, text)
    };
    if entry.value.len() > POLICY_BYTES_MAX {
        return Err(wrong("too long"));
    }
    let text = std::str::from_utf8(&entry.value).map_err(|_| wrong("no text"))?.to_owned();
    Ok(Policy { text, version: entry.mod_revision })
}

struct Reader {
    policies: watch::Sender<Option<Policy>>,
}

impl Reader {
    fn seen(&self, entry: Option<&Entry>) {
        match entry.map(read).transpose() {
            Ok(policy) => {
                self.policies.send_if_modified(|known| {
                    let news = *known != policy;
                    *known = policy;
                    news
                });
            }
            Err(error) => tracing::warn!(why = error.text, "the policy cannot be read; the one before stays"),
        }
    }
}

impl Follower for Reader {
    fn listed(&mut self, listing: Listing) {
        self.seen(listing.entries.first());
    }

    fn happened(&mut self, batch: Batch) {
        match batch.events.last() {
            Some(Event::Put(entry)) => self.seen(Some(entry)),
            Some(Event::Deleted { .. }) => self.seen(None),
            None => {}
        }
    }

    fn broke(&mut self, error: &MembershipError) {
        tracing::warn!(why = %error, "the policy cannot be followed for now; the last one stays");
    }
}
