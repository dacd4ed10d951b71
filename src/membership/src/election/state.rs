//! The election as one candidate sees it: facts in, orders out, no clock and no network.
//!
//! Safety rests on one inequality. etcd counts a lease from when it handles a grant or a renewal, and that is never
//! before the candidate asked. So the candidate counts from when it asked, subtracts a margin for clocks that do not
//! run alike and for what is under way when the time is up, and acts only before that moment. Whatever is late, lost
//! or frozen can only make it stop earlier.

/// How long things last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Asked for when a lease is granted; etcd may give more.
    pub ttl_us: u64,
    /// How long before its lease can end a leader stops acting.
    pub margin_us: u64,
    /// Between two renewals.
    pub renew_every_us: u64,
    /// Before trying again what failed.
    pub retry_us: u64,
}

impl Settings {
    /// A lease of `ttl_us`, renewed four times in its life, with a fifth of it for a margin.
    #[must_use]
    pub const fn with_ttl(ttl_us: u64) -> Self {
        Self { ttl_us, margin_us: ttl_us / 5, renew_every_us: ttl_us / 4, retry_us: ttl_us / 20 }
    }

    /// A description of what is wrong with the settings, if anything.
    #[must_use]
    pub fn fault(&self) -> Option<&'static str> {
        if self.ttl_us < 1_000_000 {
            return Some("a lease lasts whole seconds; give a TTL of at least 1000000 µs");
        }
        if self.margin_us == 0 || self.margin_us >= self.ttl_us / 2 {
            return Some("the margin is more than nothing and less than half the TTL");
        }
        if self.renew_every_us == 0 || self.renew_every_us > (self.ttl_us - self.margin_us) / 2 {
            return Some("a lease is renewed at least twice before its holder must stop; renew more often");
        }
        (self.retry_us == 0).then_some("a pause of nothing is none; give at least 1 µs")
    }
}

/// An input of the election. A fact about a lease that is no longer ours changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// etcd gave the lease that was asked for at `sent_us`.
    Granted {
        /// Its number.
        lease: u64,
        /// How long it lasts from when etcd handled the request.
        ttl_us: u64,
        /// When it was asked for, by this candidate's clock.
        sent_us: u64,
    },
    /// It gave none, or nobody knows.
    GrantFailed,
    /// etcd renewed the lease, asked at `sent_us`.
    Renewed {
        /// The lease.
        lease: u64,
        /// How long it lasts from when etcd handled the request.
        ttl_us: u64,
        /// When it was asked for, by this candidate's clock.
        sent_us: u64,
    },
    /// It did not, or nobody knows.
    RenewFailed {
        /// The lease.
        lease: u64,
    },
    /// etcd no longer knows the lease.
    LeaseGone {
        /// The lease.
        lease: u64,
    },
    /// The key stands under our lease.
    Won {
        /// The lease.
        lease: u64,
        /// The revision at which the key came into being.
        token: u64,
    },
    /// The key stands under another's.
    Held {
        /// Our lease.
        lease: u64,
        /// The other's token.
        token: u64,
    },
    /// Nobody knows what became of the attempt.
    CampaignFailed {
        /// Under which lease.
        lease: u64,
    },
    /// Somebody holds the key, seen while watching.
    SeenHeld {
        /// Under which lease.
        lease: u64,
        /// With which token.
        token: u64,
    },
    /// Nobody holds the key, seen while watching, as of this revision.
    SeenVacant {
        /// The store's.
        revision: u64,
    },
    /// A deadline has come.
    TimerFired,
    /// Give up for good.
    Resign,
}

/// An action to carry out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Ask for a lease.
    Grant {
        /// Its duration, µs.
        ttl_us: u64,
    },
    /// Renew it.
    Renew {
        /// The lease.
        lease: u64,
    },
    /// Create the key under the lease unless there is one.
    Campaign {
        /// The lease.
        lease: u64,
    },
    /// Give the lease back, and with it the key.
    Revoke {
        /// The lease.
        lease: u64,
    },
    /// We lead, until the next such effect or until [`Election::acts_until_us`].
    Elected {
        /// Our token.
        token: u64,
    },
    /// We are no longer the leader.
    Deposed {
        /// The token that ended.
        token: u64,
        /// The reason.
        why: EndReason,
    },
}

/// Why a leadership ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// The lease could not be renewed in time.
    TimeUp,
    /// etcd has ended the lease.
    LeaseGone,
    /// The key is gone or another's though the lease lasts: somebody deleted it.
    Ousted,
    /// It was given up.
    Resigned,
}

/// A lease that is ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HeldLease {
    id: u64,
    /// Before this it cannot have ended.
    lasts_until_us: u64,
    renew_at_us: u64,
    renewing: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Without a lease; asks for one at this time.
    Idle { grant_at_us: u64 },
    /// Asked for a lease.
    Granting,
    /// Has a lease and wants the key; tries at this time, if not trying.
    Candidate { campaign_at_us: u64, campaigning: bool },
    /// Has the key.
    Leading { token: u64 },
    /// The candidate has resigned for good.
    Resigned,
}

/// One candidate's state in the election.
#[derive(Clone, Debug)]
pub struct Election {
    settings: Settings,
    phase: Phase,
    lease: Option<HeldLease>,
    now_us: u64,
    /// The revision at which the key was last seen vacant.
    vacant_at: u64,
    /// The last token of our own.
    last_token: u64,
}

impl Election {
    /// A candidate that asks for a lease as soon as it is stepped.
    #[must_use]
    pub const fn new(settings: Settings) -> Self {
        let phase = Phase::Idle { grant_at_us: 0 };
        Self { settings, phase, lease: None, now_us: 0, vacant_at: 0, last_token: 0 }
    }

    /// Our token, if we lead and may act at `now_us`. It depends on no other process, so a delay elsewhere cannot make
    /// it wrong.
    #[cfg(test)]
    pub fn may_act(&self, now_us: u64) -> Option<u64> {
        let until_us = self.acts_until_us()?;
        match self.phase {
            Phase::Leading { token } if now_us < until_us => Some(token),
            _ => None,
        }
    }

    /// When we have to stop acting unless the lease is renewed; `None` while we do not lead.
    #[must_use]
    pub fn acts_until_us(&self) -> Option<u64> {
        let Phase::Leading { .. } = self.phase else { return None };
        Some(self.lease?.lasts_until_us.saturating_sub(self.settings.margin_us))
    }

    /// The token of our leadership, whether or not its time is up.
    #[must_use]
    pub const fn token(&self) -> Option<u64> {
        match self.phase {
            Phase::Leading { token } => Some(token),
            _ => None,
        }
    }

    /// Whether it has been given up and nothing is left to do.
    #[must_use]
    pub const fn resigned(&self) -> bool {
        matches!(self.phase, Phase::Resigned)
    }

    /// When it wants to be stepped even if nothing happens.
    #[must_use]
    pub fn next_deadline_us(&self) -> Option<u64> {
        let own = match self.phase {
            Phase::Idle { grant_at_us } => Some(grant_at_us),
            Phase::Candidate { campaign_at_us, campaigning: false } => Some(campaign_at_us),
            _ => None,
        };
        let lease = self.lease.iter().flat_map(|lease| {
            let renew = (!lease.renewing).then_some(lease.renew_at_us);
            [renew, Some(lease.lasts_until_us.saturating_sub(self.settings.margin_us))]
        });
        lease.flatten().chain(own).min()
    }

    /// Takes one fact at `now_us` and says what to do about it.
    pub fn step(&mut self, now_us: u64, input: Input, effects: &mut Vec<Effect>) {
        self.now_us = self.now_us.max(now_us);
        self.expire(effects);
        match input {
            Input::Granted { lease, ttl_us, sent_us } => self.granted(lease, sent_us + ttl_us, effects),
            Input::GrantFailed => {
                if self.phase == Phase::Granting {
                    self.idle(self.settings.retry_us);
                }
            }
            Input::Renewed { lease, ttl_us, sent_us } => self.renewed(lease, Some(sent_us + ttl_us)),
            Input::RenewFailed { lease } => self.renewed(lease, None),
            Input::LeaseGone { lease } => self.lease_gone(lease, effects),
            Input::Won { lease, token } => self.won(lease, token, effects),
            Input::Held { lease, token } => self.held(lease, token),
            Input::CampaignFailed { lease } => self.campaign_again(lease, self.settings.retry_us),
            Input::SeenHeld { lease, token } => self.seen_held(lease, token, effects),
            Input::SeenVacant { revision } => self.seen_vacant(revision, effects),
            Input::TimerFired => {}
            Input::Resign => self.resign(effects),
        }
        self.due(effects);
        self.check();
    }

    /// Every promise about the whole state; panics with the one that does not hold.
    pub fn check(&self) {
        let with_lease = matches!(self.phase, Phase::Candidate { .. } | Phase::Leading { .. });
        assert_eq!(
            with_lease,
            self.lease.is_some(),
            "a candidate and a leader have a lease, nobody else: {self:?}"
        );
        if let Phase::Leading { token } = self.phase {
            assert_eq!(token, self.last_token, "a leader's token is its last: {self:?}");
            assert!(
                self.acts_until_us().is_some_and(|until| until > self.now_us),
                "whose time is up does not lead: {self:?}"
            );
        }
    }

    const fn idle(&mut self, pause_us: u64) {
        self.phase = Phase::Idle { grant_at_us: self.now_us + pause_us };
        self.lease = None;
    }

    /// Drops a lease that is too near its end to be of use.
    fn expire(&mut self, effects: &mut Vec<Effect>) {
        let Some(lease) = self.lease else { return };
        if self.now_us < lease.lasts_until_us.saturating_sub(self.settings.margin_us) {
            return;
        }
        self.depose(EndReason::TimeUp, effects);
        effects.push(Effect::Revoke { lease: lease.id });
        self.idle(0);
    }

    fn depose(&self, why: EndReason, effects: &mut Vec<Effect>) {
        if let Phase::Leading { token } = self.phase {
            effects.push(Effect::Deposed { token, why });
        }
    }

    fn granted(&mut self, id: u64, lasts_until_us: u64, effects: &mut Vec<Effect>) {
        let in_time = self.now_us < lasts_until_us.saturating_sub(self.settings.margin_us);
        if self.phase != Phase::Granting || !in_time {
            effects.push(Effect::Revoke { lease: id });
            if self.phase == Phase::Granting {
                self.idle(self.settings.retry_us);
            }
            return;
        }
        let renew_at_us = self.now_us + self.settings.renew_every_us;
        self.lease = Some(HeldLease { id, lasts_until_us, renew_at_us, renewing: false });
        self.phase = Phase::Candidate { campaign_at_us: self.now_us, campaigning: false };
    }

    fn renewed(&mut self, id: u64, lasts_until_us: Option<u64>) {
        let Some(lease) = self.lease.as_mut().filter(|lease| lease.id == id) else { return };
        lease.renewing = false;
        let pause_us = match lasts_until_us {
            Some(until_us) => {
                lease.lasts_until_us = lease.lasts_until_us.max(until_us);
                self.settings.renew_every_us
            }
            None => self.settings.retry_us,
        };
        lease.renew_at_us = self.now_us + pause_us;
    }

    fn lease_gone(&mut self, id: u64, effects: &mut Vec<Effect>) {
        if self.lease.is_some_and(|lease| lease.id == id) {
            self.depose(EndReason::LeaseGone, effects);
            self.idle(self.settings.retry_us);
        }
    }

    fn won(&mut self, id: u64, token: u64, effects: &mut Vec<Effect>) {
        let ours = self.lease.is_some_and(|lease| lease.id == id);
        let Phase::Candidate { .. } = self.phase else { return };
        // A token that does not grow is an etcd that forgot: such a leader would be refused by every fence.
        if ours && token > self.last_token {
            self.last_token = token;
            self.phase = Phase::Leading { token };
            effects.push(Effect::Elected { token });
        } else if ours {
            self.campaign_again(id, self.settings.ttl_us);
        }
    }

    fn held(&mut self, id: u64, token: u64) {
        // The holder of that time is known to be gone: do not wait for a watch that has fired already.
        let gone = self.vacant_at > token;
        self.campaign_again(id, if gone { 0 } else { self.settings.ttl_us });
    }

    fn campaign_again(&mut self, id: u64, pause_us: u64) {
        if let (Phase::Candidate { .. }, Some(lease)) = (self.phase, self.lease)
            && lease.id == id
        {
            let campaign_at_us = self.now_us + pause_us;
            self.phase = Phase::Candidate { campaign_at_us, campaigning: false };
        }
    }

    fn seen_held(&mut self, id: u64, token: u64, effects: &mut Vec<Effect>) {
        if self.phase == (Phase::Leading { token: self.last_token }) && token > self.last_token {
            self.ousted(effects);
        } else if let Some(lease) = self.lease
            && lease.id == id
        {
            // An attempt whose answer is still to come, or was lost, has succeeded.
            self.won(id, token, effects);
        }
    }

    fn seen_vacant(&mut self, revision: u64, effects: &mut Vec<Effect>) {
        self.vacant_at = self.vacant_at.max(revision);
        match self.phase {
            Phase::Leading { token } if revision > token => self.ousted(effects),
            Phase::Candidate { campaigning: false, .. } => {
                self.phase = Phase::Candidate { campaign_at_us: self.now_us, campaigning: false };
            }
            _ => {}
        }
    }

    fn ousted(&mut self, effects: &mut Vec<Effect>) {
        self.depose(EndReason::Ousted, effects);
        effects.extend(self.lease.map(|lease| Effect::Revoke { lease: lease.id }));
        self.idle(self.settings.retry_us);
    }

    fn resign(&mut self, effects: &mut Vec<Effect>) {
        self.depose(EndReason::Resigned, effects);
        effects.extend(self.lease.take().map(|lease| Effect::Revoke { lease: lease.id }));
        self.phase = Phase::Resigned;
    }

    /// Does what the time has come for.
    fn due(&mut self, effects: &mut Vec<Effect>) {
        if let Some(lease) =
            self.lease.as_mut().filter(|lease| !lease.renewing && lease.renew_at_us <= self.now_us)
        {
            lease.renewing = true;
            effects.push(Effect::Renew { lease: lease.id });
        }
        match self.phase {
            Phase::Idle { grant_at_us } if grant_at_us <= self.now_us => {
                self.phase = Phase::Granting;
                effects.push(Effect::Grant { ttl_us: self.settings.ttl_us });
            }
            Phase::Candidate { campaign_at_us, campaigning: false } if campaign_at_us <= self.now_us => {
                let lease = self.lease.expect("a candidate has a lease: check() says so after every step");
                self.phase = Phase::Candidate { campaign_at_us, campaigning: true };
                effects.push(Effect::Campaign { lease: lease.id });
            }
            _ => {}
        }
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
