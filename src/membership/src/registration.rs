//! One's own entry in the directory: written under a lease, renewed, written again when the lease was lost.

use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::backoff::Backoff;
use crate::error::{Kind, MembershipError, Result, Stage};
use crate::etcd::{Act, Condition, Entry, Etcd, Outcome};
use crate::member::Member;
use crate::source::{check_cluster, members_prefix};

/// How long giving back the lease may take when the process ends.
const LEAVE_WITHIN: Duration = Duration::from_secs(2);
/// Renewals in the life of a lease.
const RENEWALS: u64 = 4;
/// Shortest lease: etcd counts in seconds.
const TTL_US_MIN: u64 = 1_000_000;

/// How one's registration stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegistrationState {
    /// Not, for this reason; it is being tried again.
    No {
        /// The latest failure.
        why: String,
    },
    /// Yes, in this life.
    Yes {
        /// The life's number: greater than that of any earlier life of this name.
        epoch: u64,
    },
    /// A later process has taken the name. Final: two with one name would drive each other out for ever.
    Superseded {
        /// The other's life.
        epoch: u64,
    },
    /// Given up on purpose. Final.
    Left,
}

/// A registration that is being kept. Nothing of it waits for etcd but [`Registration::leave`]. Dropping it lets go
/// without a word: the lease then ends by itself.
#[derive(Debug)]
pub struct Registration {
    standing: watch::Receiver<RegistrationState>,
    stop: CancellationToken,
    task: Option<JoinHandle<()>>,
    _dropped: DropGuard,
}

impl Registration {
    /// Begins to register `member` in `cluster` under a lease of `ttl_us`, in whole seconds; must be called in a
    /// tokio runtime. The member's epoch is chosen here: greater than that of every earlier life of its name.
    ///
    /// # Errors
    /// When it can never work.
    pub fn start(etcd: &Etcd, cluster: &str, member: Member, ttl_us: u64) -> Result<Self> {
        check_cluster(cluster)?;
        member.validate()?;
        if ttl_us < TTL_US_MIN {
            let text = format!("a registration of {ttl_us} µs; give at least {TTL_US_MIN}");
            return Err(MembershipError::invalid(text));
        }
        let key = format!("{}{}", members_prefix(cluster), member.name);
        let (standings, standing) = watch::channel(RegistrationState::No { why: "not yet".to_owned() });
        let (stop, dropped) = (CancellationToken::new(), CancellationToken::new());
        let keeper = Keeper { etcd: etcd.clone(), key, ttl_us, member, standings, epoch: 0, written: false };
        let (told, gone) = (stop.clone(), dropped.clone());
        let task = tokio::spawn(async move {
            tokio::select! {
                () = keeper.keep(told) => {}
                () = gone.cancelled() => {}
            }
        });
        Ok(Self { standing, stop, task: Some(task), _dropped: dropped.drop_guard() })
    }

    /// How it stands; never waits.
    #[must_use]
    pub fn standing(&self) -> watch::Receiver<RegistrationState> {
        self.standing.clone()
    }

    /// Takes the entry back, so that others see it gone at once. Gives up telling etcd after two seconds.
    pub async fn leave(mut self) {
        self.stop.cancel();
        if let Some(task) = self.task.take() {
            // The task is bounded by itself; that it was cancelled or failed leaves nothing to do here.
            let _ = task.await;
        }
    }
}

/// Keeps the entry.
struct Keeper {
    etcd: Etcd,
    key: String,
    ttl_us: u64,
    member: Member,
    standings: watch::Sender<RegistrationState>,
    /// Of this life; final once it was written.
    epoch: u64,
    written: bool,
}

/// Why one lease's keeping ended.
enum LeaseEnd {
    /// To be tried again.
    Failed(MembershipError),
    /// Another has the name.
    Superseded(u64),
    /// The owner has stopped it.
    Stopped,
}

impl From<MembershipError> for LeaseEnd {
    fn from(error: MembershipError) -> Self {
        Self::Failed(error)
    }
}

impl Keeper {
    async fn keep(mut self, stop: CancellationToken) {
        let mut backoff = Backoff::new(&self.key);
        loop {
            let mut lease = 0;
            let ended = self.one_lease(&mut lease, &stop, &mut backoff).await;
            let last = match &ended {
                LeaseEnd::Failed(error) => {
                    tracing::warn!(key = self.key, why = %error, "not registered; trying again");
                    RegistrationState::No { why: error.to_string() }
                }
                LeaseEnd::Superseded(epoch) => {
                    tracing::error!(
                        key = self.key,
                        epoch,
                        "another process has this name; give each its own"
                    );
                    RegistrationState::Superseded { epoch: *epoch }
                }
                LeaseEnd::Stopped => RegistrationState::Left,
            };
            if lease != 0 {
                // If it cannot be revoked, the lease expires by itself.
                let _ = tokio::time::timeout(LEAVE_WITHIN, self.etcd.revoke(lease)).await;
            }
            self.standings.send_replace(last);
            if !matches!(ended, LeaseEnd::Failed(_)) {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(backoff.pause()) => {}
                () = stop.cancelled() => {}
            }
        }
    }

    /// Takes a lease, writes the entry and renews both until something ends it.
    async fn one_lease(
        &mut self,
        lease: &mut u64,
        stop: &CancellationToken,
        backoff: &mut Backoff,
    ) -> LeaseEnd {
        let granted = tokio::select! {
            granted = self.etcd.grant(self.ttl_us) => granted,
            () = stop.cancelled() => return LeaseEnd::Stopped,
        };
        let granted = match granted {
            Ok(granted) => granted,
            Err(error) => return error.into(),
        };
        *lease = granted.id;
        let mut good_until = tokio::time::Instant::now() + Duration::from_micros(granted.ttl_us);
        let every = Duration::from_micros(granted.ttl_us / RENEWALS);
        let mut pause = Duration::ZERO;
        loop {
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = stop.cancelled() => return LeaseEnd::Stopped,
            }
            let begun = tokio::time::Instant::now();
            let renewed = tokio::select! {
                renewed = self.renew(*lease) => renewed,
                () = stop.cancelled() => return LeaseEnd::Stopped,
            };
            match renewed {
                Ok(ttl) => {
                    backoff.worked();
                    good_until = begun + ttl;
                    pause = every;
                }
                Err(LeaseEnd::Failed(error)) if error.kind.passes() && begun < good_until => {
                    self.standings.send_if_modified(|standing| {
                        let no = RegistrationState::No { why: error.to_string() };
                        // One missed renewal is no news: the entry stands as long as the lease does.
                        let news = !matches!(standing, RegistrationState::Yes { .. }) && *standing != no;
                        if news {
                            *standing = no;
                        }
                        news
                    });
                    pause = backoff.pause().min(every);
                }
                Err(ended) => return ended,
            }
        }
    }

    /// Renews the lease and sees to it that the entry stands under it as it should.
    async fn renew(&mut self, lease: u64) -> std::result::Result<Duration, LeaseEnd> {
        let renewed = self.etcd.renew(lease).await?;
        let (current, revision) = self.etcd.get(&self.key).await?;
        let mut seen = current;
        let mut revision = revision;
        // Somebody else may write in between, once or twice; then the next renewal sees to it.
        for _ in 0..3 {
            let Some(value) = self.needed(lease, seen.as_ref(), revision)? else {
                let epoch = self.epoch;
                let _ = self.standings.send_if_modified(|standing| {
                    let yes = RegistrationState::Yes { epoch };
                    std::mem::replace(standing, yes.clone()) != yes
                });
                return Ok(Duration::from_micros(renewed.ttl_us));
            };
            let at = seen.as_ref().map_or(0, |entry| entry.mod_revision);
            let condition = Condition::Modified { key: self.key.clone(), revision: at };
            let put = Act::Put { value: value.clone().into(), lease };
            match self.etcd.act(&self.key, &[condition], put).await? {
                Outcome::Done { revision: done } => {
                    self.written = true;
                    let key = self.key.clone();
                    seen = Some(Entry {
                        key,
                        value: value.into(),
                        create_revision: 0,
                        mod_revision: done,
                        lease,
                    });
                    revision = done;
                }
                Outcome::Refused { current, revision: now } => {
                    seen = current;
                    revision = now;
                }
            }
        }
        let text = format!("{}: others keep writing it; give each process its own name", self.key);
        Err(MembershipError::new(Kind::Conflict, Stage::Write, text).into())
    }

    /// The value that has to be written, given the present one. `None` if the present one is right.
    ///
    /// The epoch of a life is the store's revision when it looked and then was the first to write: every later life
    /// looks after that, so its number is greater.
    fn needed(
        &mut self,
        lease: u64,
        seen: Option<&Entry>,
        revision: u64,
    ) -> std::result::Result<Option<Vec<u8>>, LeaseEnd> {
        if !self.written {
            self.epoch = revision;
        }
        if let Some(entry) = seen.filter(|entry| entry.lease != lease) {
            let theirs = Member::from_json(&entry.value).map_or(0, |member| member.epoch);
            if theirs > self.epoch {
                return Err(LeaseEnd::Superseded(theirs));
            }
        }
        let value = Member { epoch: self.epoch, ..self.member.clone() }.to_json();
        let stands = seen.is_some_and(|entry| entry.lease == lease && entry.value == value);
        Ok((!stands).then_some(value))
    }
}
