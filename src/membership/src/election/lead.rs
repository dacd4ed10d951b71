//! The election in a process: carries out the decisions of [`super::state`], and reports the leader.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::state::{Effect, Election, EndReason, Input, Settings};
use crate::clock::now_us;
use crate::error::{Kind, MembershipError, Result};
use crate::etcd::{Act, Batch, Condition, Entry, Etcd, Event, Follower, Keys, Listing, Outcome, follow};
use crate::member::Member;
use crate::source::check_cluster;

/// Facts that may wait: one for each open call, and those of the watch.
const FACTS: usize = 64;
/// How long giving back a lease may take when the process ends.
const RESIGN_WITHIN: Duration = Duration::from_secs(2);

/// The key that the leader of a cluster holds.
pub(crate) fn leader_key(cluster: &str) -> String {
    format!("/baton/{cluster}/leader")
}

/// A candidate, and its terms.
#[derive(Clone, Debug)]
pub struct Candidacy {
    /// The name of the cluster.
    pub cluster: String,
    /// The leader's entry for the others: its name, and as first address the one where nodes attach.
    pub member: Member,
    /// The lease.
    pub settings: Settings,
}

impl Candidacy {
    /// `member` stands in `cluster` under a lease of `ttl_us`.
    #[must_use]
    pub fn new(cluster: impl Into<String>, member: Member, ttl_us: u64) -> Self {
        Self { cluster: cluster.into(), member, settings: Settings::with_ttl(ttl_us) }
    }
}

/// Leave to act as the leader, for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permit {
    /// The fencing token: shown with every order, for [`super::Fence`].
    pub token: u64,
    /// Actions under it must begin before this time, by [`crate::clock::now_us`].
    pub until_us: u64,
}

/// The state from which permits are given.
#[derive(Debug, Default)]
struct Seat {
    permit: Option<Permit>,
    /// Leadership was given up: no further permit is given.
    left: bool,
}

impl Seat {
    fn permit_at(&self, now_us: u64) -> Option<Permit> {
        self.permit.filter(|permit| !self.left && now_us < permit.until_us)
    }
}

/// How the candidate stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Another leads, or nobody.
    Waiting,
    /// It led with this token until just now.
    Deposed {
        /// The token that ended.
        token: u64,
        /// The reason.
        why: EndReason,
    },
    /// It leads with this token, as long as [`Leadership::permit`] says so.
    Leading {
        /// The fencing token.
        token: u64,
    },
    /// It has given up for good.
    Resigned,
}

/// The leader, as etcd last reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leader {
    /// The leading member; its epoch is the token.
    pub member: Member,
    /// The fencing token.
    pub token: u64,
}

impl Leader {
    fn read(entry: &Entry) -> Result<Self> {
        let member = Member::from_json(&entry.value)?;
        let token = entry.create_revision;
        Ok(Self { member: Member { epoch: token, ..member }, token })
    }
}

/// A candidate, and perhaps the leader. Dropping it lets go without a word: the lease then ends by itself.
#[derive(Debug)]
pub struct Leadership {
    seat: Arc<Mutex<Seat>>,
    standing: watch::Receiver<Standing>,
    leader: watch::Receiver<Option<Leader>>,
    facts: mpsc::Sender<Input>,
    task: Mutex<Option<JoinHandle<()>>>,
    _stop: DropGuard,
}

impl Leadership {
    /// Begins to stand for election; must be called in a tokio runtime.
    ///
    /// # Errors
    /// When the candidacy can never work.
    pub fn start(etcd: &Etcd, candidacy: Candidacy) -> Result<Self> {
        check_cluster(&candidacy.cluster)?;
        candidacy.member.validate()?;
        if let Some(fault) = candidacy.settings.fault() {
            return Err(MembershipError::invalid(format!("election: {fault}")));
        }
        let (facts, inbox) = mpsc::channel(FACTS);
        let (standings, standing) = watch::channel(Standing::Waiting);
        let (leaders, leader) = watch::channel(None);
        let seat = Arc::new(Mutex::new(Seat::default()));
        let stop = CancellationToken::new();
        let key = leader_key(&candidacy.cluster);
        let observer = Observer { leaders, facts: Some(facts.clone()) };
        tokio::spawn(follow(etcd.clone(), Keys::One(key.clone()), 1, observer, stop.clone()));
        let candidate = Candidate {
            etcd: etcd.clone(),
            key,
            value: candidacy.member.to_json().into(),
            time_limit: Duration::from_micros(candidacy.settings.renew_every_us),
            facts: facts.clone(),
            seat: seat.clone(),
            standings,
        };
        let running = candidate.run(Election::new(candidacy.settings), inbox, stop.clone());
        let task = Mutex::new(Some(tokio::spawn(running)));
        Ok(Self { seat, standing, leader, facts, task, _stop: stop.drop_guard() })
    }

    /// Leave to act, if we lead and our lease cannot have ended. Never waits and asks nobody: ask before each act.
    #[must_use]
    pub fn permit(&self) -> Option<Permit> {
        let seat = self.seat.lock();
        seat.permit_at(now_us())
    }

    /// As [`Leadership::permit`], at a moment that the caller has just read from [`crate::clock::now_us`].
    #[must_use]
    pub fn permit_at(&self, now_us: u64) -> Option<Permit> {
        self.seat.lock().permit_at(now_us)
    }

    /// Our standing. The channel reports changes but not the passing of time: [`Leadership::permit`] detects an expiry
    /// first.
    #[must_use]
    pub fn standing(&self) -> watch::Receiver<Standing> {
        self.standing.clone()
    }

    /// The leader, as last reported; for redirects.
    #[must_use]
    pub fn leader(&self) -> watch::Receiver<Option<Leader>> {
        self.leader.clone()
    }

    /// Stops acting at once, and lets another lead as soon as etcd has the resignation. Gives up after two seconds.
    pub async fn resign(&self) {
        self.seat.lock().left = true;
        let task = self.task.lock().take();
        if let Some(task) = task
            && self.facts.send(Input::Resign).await.is_ok()
        {
            // The task is bounded by itself; that it was cancelled or failed leaves nothing to do here.
            let _ = task.await;
        }
    }
}

/// The leader, for processes that are no candidates.
#[derive(Debug)]
pub struct Leaders {
    latest: watch::Receiver<Option<Leader>>,
    _stop: DropGuard,
}

impl Leaders {
    /// Begins to follow who leads `cluster`; must be called in a tokio runtime.
    ///
    /// # Errors
    /// When the cluster's name cannot be one.
    pub fn follow(etcd: &Etcd, cluster: &str) -> Result<Self> {
        check_cluster(cluster)?;
        let (leaders, latest) = watch::channel(None);
        let stop = CancellationToken::new();
        let observer = Observer { leaders, facts: None };
        tokio::spawn(follow(etcd.clone(), Keys::One(leader_key(cluster)), 1, observer, stop.clone()));
        Ok(Self { latest, _stop: stop.drop_guard() })
    }

    /// The leader, as last reported; it may have changed since.
    #[must_use]
    pub fn latest(&self) -> watch::Receiver<Option<Leader>> {
        self.latest.clone()
    }
}

/// Reports the leader, and passes the events of the watch to the candidate.
struct Observer {
    leaders: watch::Sender<Option<Leader>>,
    facts: Option<mpsc::Sender<Input>>,
}

impl Observer {
    fn seen(&self, entry: Option<&Entry>, revision: u64) {
        let leader = entry.map(Leader::read).transpose();
        if let Err(error) = &leader {
            tracing::warn!(why = error.text, "the leader's key cannot be read");
        }
        let leader = leader.unwrap_or(None);
        self.leaders.send_if_modified(|known| {
            let news = *known != leader;
            *known = leader;
            news
        });
        let fact = match entry {
            Some(entry) => Input::SeenHeld { lease: entry.lease, token: entry.create_revision },
            None => Input::SeenVacant { revision },
        };
        // A fact that finds no room is made up for by the candidate's own attempts.
        let _ = self.facts.as_ref().map(|facts| facts.try_send(fact));
    }
}

impl Follower for Observer {
    fn listed(&mut self, listing: Listing) {
        self.seen(listing.entries.first(), listing.revision);
    }

    fn happened(&mut self, batch: Batch) {
        match batch.events.last() {
            Some(Event::Put(entry)) => self.seen(Some(entry), entry.mod_revision),
            Some(Event::Deleted { revision, .. }) => self.seen(None, *revision),
            None => {}
        }
    }

    fn broke(&mut self, error: &MembershipError) {
        tracing::debug!(why = error.text, "who leads cannot be followed for now");
    }
}

/// Carries out the election's effects.
struct Candidate {
    etcd: Etcd,
    key: String,
    value: bytes::Bytes,
    /// A call that takes longer has failed.
    time_limit: Duration,
    facts: mpsc::Sender<Input>,
    seat: Arc<Mutex<Seat>>,
    standings: watch::Sender<Standing>,
}

impl Candidate {
    async fn run(self, mut election: Election, mut inbox: mpsc::Receiver<Input>, stop: CancellationToken) {
        let mut effects = Vec::new();
        let mut input = Input::TimerFired;
        loop {
            election.step(now_us(), input, &mut effects);
            self.publish(&election);
            if election.resigned() {
                return self.leave(&effects).await;
            }
            for effect in effects.drain(..) {
                self.carry_out(effect);
            }
            let wait_us = election.next_deadline_us().map_or(u64::MAX, |at| at.saturating_sub(now_us()));
            // Tokio's clock stands still in a sleep of the machine, ours does not: look again now and then.
            let wait = Duration::from_micros(wait_us.min(1_000_000));
            input = tokio::select! {
                fact = inbox.recv() => fact.expect("this holds a sender of its own"),
                () = tokio::time::sleep(wait) => Input::TimerFired,
                () = stop.cancelled() => {
                    self.seat.lock().left = true;
                    return;
                }
            };
        }
    }

    fn publish(&self, election: &Election) {
        let permit = election.token().zip(election.acts_until_us());
        self.seat.lock().permit = permit.map(|(token, until_us)| Permit { token, until_us });
    }

    /// Gives back what is held; a lease that is still being granted ends by itself.
    async fn leave(&self, effects: &[Effect]) {
        for effect in effects {
            if let Effect::Revoke { lease } = effect
                && !matches!(tokio::time::timeout(RESIGN_WITHIN, self.etcd.revoke(*lease)).await, Ok(Ok(())))
            {
                tracing::warn!(key = self.key, "resigned, but etcd was not told: the lease ends by itself");
            }
        }
        self.standings.send_replace(Standing::Resigned);
    }

    fn carry_out(&self, effect: Effect) {
        match effect {
            Effect::Grant { ttl_us } => self.grant(ttl_us),
            Effect::Renew { lease } => self.renew(lease),
            Effect::Campaign { lease } => self.campaign(lease),
            Effect::Revoke { lease } => self.revoke(lease),
            Effect::Elected { token } => {
                tracing::info!(key = self.key, token, "elected: this conductor leads");
                self.standings.send_replace(Standing::Leading { token });
            }
            Effect::Deposed { token, why } => {
                tracing::warn!(key = self.key, token, ?why, "deposed: this conductor no longer leads");
                self.standings.send_replace(Standing::Deposed { token, why });
            }
        }
    }

    /// Makes a call beside the loop; of each kind at most one is under way, but for leases being given back.
    fn aside(&self, call: impl Future<Output = Option<Input>> + Send + 'static, late: Option<Input>) {
        let (facts, time_limit) = (self.facts.clone(), self.time_limit);
        tokio::spawn(async move {
            let fact = tokio::time::timeout(time_limit, call).await.unwrap_or(late);
            if let Some(fact) = fact {
                // The loop may have ended; then nobody wants to know.
                let _ = facts.send(fact).await;
            }
        });
    }

    fn grant(&self, ttl_us: u64) {
        let etcd = self.etcd.clone();
        let call = async move {
            let sent_us = now_us();
            Some(match etcd.grant(ttl_us).await {
                Ok(lease) => Input::Granted { lease: lease.id, ttl_us: lease.ttl_us, sent_us },
                Err(error) => {
                    tracing::warn!(why = %error, "no lease to stand for election with; trying again");
                    Input::GrantFailed
                }
            })
        };
        self.aside(call, Some(Input::GrantFailed));
    }

    fn renew(&self, lease: u64) {
        let etcd = self.etcd.clone();
        let call = async move {
            let sent_us = now_us();
            Some(match etcd.renew(lease).await {
                Ok(renewed) => Input::Renewed { lease, ttl_us: renewed.ttl_us, sent_us },
                Err(error) if error.kind == Kind::LeaseLost => Input::LeaseGone { lease },
                Err(error) => {
                    tracing::warn!(why = %error, "the lease of this candidate was not renewed; trying again");
                    Input::RenewFailed { lease }
                }
            })
        };
        self.aside(call, Some(Input::RenewFailed { lease }));
    }

    fn campaign(&self, lease: u64) {
        let (etcd, key, value) = (self.etcd.clone(), self.key.clone(), self.value.clone());
        let call = async move {
            let vacant = [Condition::Created { key: key.clone(), revision: 0 }];
            let outcome = etcd.act(&key, &vacant, Act::Put { value, lease }).await;
            Some(match outcome {
                Ok(Outcome::Done { revision }) => Input::Won { lease, token: revision },
                Ok(Outcome::Refused { current: Some(held), .. }) if held.lease == lease => {
                    Input::Won { lease, token: held.create_revision }
                }
                Ok(Outcome::Refused { current: Some(held), .. }) => {
                    Input::Held { lease, token: held.create_revision }
                }
                Ok(Outcome::Refused { current: None, .. }) => Input::CampaignFailed { lease },
                Err(error) if error.kind == Kind::LeaseLost => Input::LeaseGone { lease },
                Err(error) => {
                    tracing::warn!(why = %error, "nobody knows whether this candidate was elected; trying again");
                    Input::CampaignFailed { lease }
                }
            })
        };
        self.aside(call, Some(Input::CampaignFailed { lease }));
    }

    fn revoke(&self, lease: u64) {
        let etcd = self.etcd.clone();
        let call = async move {
            if let Err(error) = etcd.revoke(lease).await {
                tracing::debug!(why = %error, "a lease is left to end by itself");
            }
            None
        };
        self.aside(call, None);
    }
}
