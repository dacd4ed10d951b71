use super::*;
use proptest::prelude::*;

const S: u64 = 1_000_000;

fn settings() -> Settings {
    Settings::with_ttl(10 * S)
}

/// A candidate and what it wanted last.
struct LoneCandidate {
    election: Election,
    effects: Vec<Effect>,
}

impl LoneCandidate {
    fn new() -> Self {
        let mut alone = Self { election: Election::new(settings()), effects: Vec::new() };
        assert_eq!(alone.step(0, Input::TimerFired), [Effect::Grant { ttl_us: 10 * S }]);
        alone
    }

    /// With lease 7, asked for at 0 and granted at 1 s.
    fn candidate() -> Self {
        let mut alone = Self::new();
        let granted = Input::Granted { lease: 7, ttl_us: 10 * S, sent_us: 0 };
        assert_eq!(alone.step(S, granted), [Effect::Campaign { lease: 7 }]);
        alone
    }

    /// Elected at 1 s with token 50.
    fn leader() -> Self {
        let mut alone = Self::candidate();
        assert_eq!(alone.step(S, Input::Won { lease: 7, token: 50 }), [Effect::Elected { token: 50 }]);
        alone
    }

    fn step(&mut self, now_us: u64, input: Input) -> Vec<Effect> {
        self.effects.clear();
        self.election.step(now_us, input, &mut self.effects);
        self.effects.clone()
    }
}

#[test]
fn a_leader_may_act_until_a_margin_before_its_lease_can_end() {
    let alone = LoneCandidate::leader();
    // Counted from when the lease was asked for, not from when the answer came.
    assert_eq!(alone.election.acts_until_us(), Some(8 * S));
    assert_eq!(alone.election.may_act(8 * S - 1), Some(50));
    assert_eq!(alone.election.may_act(8 * S), None);
}

#[test]
fn renewals_count_from_when_they_were_asked_and_never_shorten() {
    let mut alone = LoneCandidate::leader();
    assert_eq!(alone.step(3 * S + S / 2, Input::TimerFired), [Effect::Renew { lease: 7 }]);
    assert_eq!(alone.step(4 * S, Input::TimerFired), [], "one renewal at a time");
    alone.step(5 * S, Input::Renewed { lease: 7, ttl_us: 10 * S, sent_us: 3 * S + S / 2 });
    assert_eq!(alone.election.acts_until_us(), Some(11 * S + S / 2));
    alone.step(5 * S, Input::Renewed { lease: 7, ttl_us: 2 * S, sent_us: 3 * S });
    assert_eq!(alone.election.acts_until_us(), Some(11 * S + S / 2));
    alone.step(5 * S, Input::Renewed { lease: 8, ttl_us: 90 * S, sent_us: 5 * S });
    assert_eq!(alone.election.acts_until_us(), Some(11 * S + S / 2), "not our lease");
}

#[test]
fn a_leader_that_cannot_renew_steps_down_and_starts_anew() {
    let mut alone = LoneCandidate::leader();
    alone.step(3 * S + S / 2, Input::TimerFired);
    assert_eq!(alone.step(4 * S, Input::RenewFailed { lease: 7 }), []);
    assert_eq!(
        alone.step(4 * S + S / 2, Input::TimerFired),
        [Effect::Renew { lease: 7 }],
        "tried again soon"
    );
    let down = [
        Effect::Deposed { token: 50, why: EndReason::TimeUp },
        Effect::Revoke { lease: 7 },
        Effect::Grant { ttl_us: 10 * S },
    ];
    assert_eq!(alone.step(8 * S, Input::TimerFired), down);
    // A late renewal changes nothing.
    assert_eq!(alone.step(8 * S, Input::Renewed { lease: 7, ttl_us: 10 * S, sent_us: 7 * S }), []);
    assert_eq!(alone.election.may_act(8 * S), None);
}

#[test]
fn a_frozen_leader_knows_before_it_is_stepped() {
    let mut alone = LoneCandidate::leader();
    assert_eq!(alone.election.may_act(60 * S), None);
    let woken = alone.step(60 * S, Input::Renewed { lease: 7, ttl_us: 10 * S, sent_us: 2 * S });
    assert_eq!(woken[0], Effect::Deposed { token: 50, why: EndReason::TimeUp });
}

#[test]
fn an_election_that_is_won_too_late_is_not_taken() {
    let mut alone = LoneCandidate::candidate();
    let late = alone.step(9 * S, Input::Won { lease: 7, token: 50 });
    assert_eq!(late, [Effect::Revoke { lease: 7 }, Effect::Grant { ttl_us: 10 * S }]);
    let mut alone = LoneCandidate::new();
    let late = alone.step(9 * S, Input::Granted { lease: 7, ttl_us: 10 * S, sent_us: 0 });
    assert_eq!(late, [Effect::Revoke { lease: 7 }], "no use in a lease that is all but over");
}

#[test]
fn who_waits_tries_again_when_the_key_is_seen_vacant() {
    let mut alone = LoneCandidate::candidate();
    assert_eq!(alone.step(2 * S, Input::Held { lease: 7, token: 40 }), []);
    assert_eq!(alone.step(2 * S, Input::SeenHeld { lease: 3, token: 40 }), []);
    assert_eq!(alone.step(2 * S, Input::SeenVacant { revision: 45 }), [Effect::Campaign { lease: 7 }]);
    assert_eq!(alone.step(2 * S, Input::SeenVacant { revision: 45 }), [], "one attempt at a time");
    // The answer is older than what was seen since: try at once.
    let again = alone.step(3 * S, Input::Held { lease: 7, token: 44 });
    assert_eq!(again, [Effect::Renew { lease: 7 }, Effect::Campaign { lease: 7 }][1..]);
    assert_eq!(alone.step(3 * S, Input::CampaignFailed { lease: 7 }), []);
    let later = alone.step(3 * S + S / 2, Input::TimerFired);
    assert_eq!(later, [Effect::Renew { lease: 7 }, Effect::Campaign { lease: 7 }]);
}

#[test]
fn an_attempt_whose_answer_was_lost_is_found_out_by_watching() {
    let mut alone = LoneCandidate::candidate();
    alone.step(S, Input::CampaignFailed { lease: 7 });
    let seen = alone.step(S, Input::SeenHeld { lease: 7, token: 50 });
    assert_eq!(seen, [Effect::Elected { token: 50 }]);
}

#[test]
fn a_leader_whose_key_is_gone_or_anothers_steps_down() {
    for (seen, ousted) in [
        (Input::SeenVacant { revision: 49 }, false),
        (Input::SeenVacant { revision: 51 }, true),
        (Input::SeenHeld { lease: 7, token: 50 }, false),
        (Input::SeenHeld { lease: 3, token: 40 }, false),
        (Input::SeenHeld { lease: 3, token: 60 }, true),
        (Input::LeaseGone { lease: 3 }, false),
        (Input::LeaseGone { lease: 7 }, true),
    ] {
        let mut alone = LoneCandidate::leader();
        alone.step(2 * S, seen);
        assert_eq!(alone.election.may_act(2 * S), (!ousted).then_some(50), "{seen:?}");
    }
}

#[test]
fn a_token_that_does_not_grow_is_not_led_with() {
    let mut alone = LoneCandidate::leader();
    alone.step(2 * S, Input::LeaseGone { lease: 7 });
    alone.step(3 * S, Input::TimerFired);
    let granted = Input::Granted { lease: 8, ttl_us: 10 * S, sent_us: 3 * S };
    assert_eq!(alone.step(3 * S, granted), [Effect::Campaign { lease: 8 }]);
    assert_eq!(alone.step(3 * S, Input::Won { lease: 8, token: 50 }), [], "etcd has forgotten");
    assert_eq!(alone.election.may_act(3 * S), None);
}

#[test]
fn who_resigns_stops_at_once_and_for_good() {
    let mut alone = LoneCandidate::leader();
    let left = alone.step(2 * S, Input::Resign);
    assert_eq!(left, [Effect::Deposed { token: 50, why: EndReason::Resigned }, Effect::Revoke { lease: 7 }]);
    assert!(alone.election.resigned() && alone.election.next_deadline_us().is_none());
    assert_eq!(alone.step(3 * S, Input::SeenVacant { revision: 90 }), []);
    let mut alone = LoneCandidate::new();
    alone.step(S, Input::Resign);
    let late = alone.step(2 * S, Input::Granted { lease: 7, ttl_us: 10 * S, sent_us: 0 });
    assert_eq!(late, [Effect::Revoke { lease: 7 }], "what came too late is given back");
}

#[test]
fn settings_that_cannot_keep_a_lease_are_refused() {
    assert_eq!(settings().fault(), None);
    let with = |change: fn(&mut Settings)| {
        let mut settings = settings();
        change(&mut settings);
        settings.fault().expect("wrong")
    };
    assert!(with(|s| s.ttl_us = 1).contains("whole seconds"));
    assert!(with(|s| s.margin_us = 0).contains("margin"));
    assert!(with(|s| s.margin_us = 6 * S).contains("margin"));
    assert!(with(|s| s.renew_every_us = 5 * S).contains("renew more often"));
    assert!(with(|s| s.retry_us = 0).contains("pause"));
}

/// etcd and several candidates over a network that delays, loses and freezes; an oracle that sees all of it.
mod world {
    use super::*;
    use baton_types::Rng;
    use std::collections::BTreeMap;

    const TTL: u64 = 2 * S;

    /// A message in transit.
    enum Letter {
        /// To etcd.
        Request { from: usize, sent_us: u64, effect: Effect },
        /// To a candidate.
        Answer { to: usize, input: Input },
    }

    struct Candidate {
        election: Election,
        /// Steps nothing before this.
        frozen_until_us: u64,
        /// Its clock runs so many millionths faster than etcd's.
        drift_ppm: i64,
        waiting: Vec<Input>,
    }

    pub(super) struct World {
        rng: Rng,
        now_us: u64,
        candidates: Vec<Candidate>,
        letters: BTreeMap<(u64, u64), Letter>,
        count: u64,
        revision: u64,
        leases: BTreeMap<u64, u64>,
        /// Lease and token of the key.
        key: Option<(u64, u64)>,
        cut_until_us: u64,
        pub(super) elected: Vec<u64>,
        pub(super) acted: u64,
        calm: bool,
    }

    impl World {
        pub(super) fn new(seed: u64) -> Self {
            let mut rng = Rng::new(seed);
            let count = 2 + rng.below(3);
            let candidates = (0..count).map(|_| Candidate {
                election: Election::new(Settings::with_ttl(TTL)),
                frozen_until_us: 0,
                drift_ppm: i64::try_from(rng.below(20_001)).expect("small") - 10_000,
                waiting: Vec::new(),
            });
            Self {
                candidates: candidates.collect(),
                rng,
                now_us: 0,
                letters: BTreeMap::new(),
                count: 0,
                revision: 1,
                leases: BTreeMap::new(),
                key: None,
                cut_until_us: 0,
                elected: Vec::new(),
                acted: 0,
                calm: false,
            }
        }

        /// A candidate's clock; all begin together.
        fn clock_of(&self, at: usize) -> u64 {
            let drift =
                i64::try_from(self.now_us).expect("short runs") * self.candidates[at].drift_ppm / 1_000_000;
            self.now_us.saturating_add_signed(drift)
        }

        fn post(&mut self, letter: Letter) {
            let lost = !self.calm && (self.now_us < self.cut_until_us || self.rng.chance_permille(50));
            let mut delay_us = self.rng.below(20_000);
            if !self.calm && self.rng.chance_permille(30) {
                delay_us = self.rng.below(3 * TTL);
            }
            self.count += 1;
            let letter = match letter {
                // A lost message is reported as a failure some time later, as for a call that timed out.
                Letter::Request { from, effect, .. } if lost => match failure(effect) {
                    Some(input) => Letter::Answer { to: from, input },
                    None => return,
                },
                Letter::Answer { to, input } if lost => match failed(input) {
                    Some(input) => Letter::Answer { to, input },
                    None => return,
                },
                letter => letter,
            };
            let delay_us = if lost { TTL / 2 } else { delay_us };
            self.letters.insert((self.now_us + delay_us, self.count), letter);
        }

        pub(super) fn run(&mut self, until_us: u64, calm: bool) {
            self.calm = calm;
            while self.now_us < until_us {
                self.now_us += 1 + self.rng.below(4000);
                self.expire();
                if !calm {
                    self.trouble();
                }
                while let Some(entry) = self.letters.first_entry().filter(|e| e.key().0 <= self.now_us) {
                    match entry.remove() {
                        Letter::Request { from, sent_us, effect } => self.serve(from, sent_us, effect),
                        Letter::Answer { to, input } => self.candidates[to].waiting.push(input),
                    }
                }
                for at in 0..self.candidates.len() {
                    self.live(at);
                }
                self.judge();
            }
        }

        fn trouble(&mut self) {
            if self.rng.chance_permille(1) {
                let at = usize::try_from(self.rng.below(self.candidates.len() as u64)).expect("small");
                self.candidates[at].frozen_until_us = self.now_us + self.rng.below(3 * TTL);
            }
            if self.rng.chance_permille(1) {
                self.cut_until_us = self.now_us + self.rng.below(2 * TTL);
            }
        }

        /// etcd ends leases late, never early.
        fn expire(&mut self) {
            let late_us = self.rng.below(300_000);
            let ended = self.leases.iter().find(|(_, end)| **end + late_us <= self.now_us).map(|(id, _)| *id);
            if let Some(id) = ended {
                self.end(id);
            }
        }

        fn end(&mut self, id: u64) {
            self.leases.remove(&id);
            if self.key.is_some_and(|(lease, _)| lease == id) {
                self.key = None;
                self.revision += 1;
                self.feed(Input::SeenVacant { revision: self.revision });
            }
        }

        /// Reports an event of the watch. Now and then it gets lost.
        fn feed(&mut self, input: Input) {
            for to in 0..self.candidates.len() {
                self.post(Letter::Answer { to, input });
            }
        }

        fn serve(&mut self, from: usize, sent_us: u64, effect: Effect) {
            let input = match effect {
                Effect::Grant { ttl_us } => {
                    self.count += 1;
                    self.leases.insert(self.count, self.now_us + ttl_us);
                    Input::Granted { lease: self.count, ttl_us, sent_us }
                }
                Effect::Renew { lease } => match self.leases.get_mut(&lease) {
                    Some(end) => {
                        *end = self.now_us + TTL;
                        Input::Renewed { lease, ttl_us: TTL, sent_us }
                    }
                    None => Input::LeaseGone { lease },
                },
                Effect::Campaign { lease } if !self.leases.contains_key(&lease) => Input::LeaseGone { lease },
                Effect::Campaign { lease } => match self.key {
                    None => {
                        self.revision += 1;
                        self.key = Some((lease, self.revision));
                        self.feed(Input::SeenHeld { lease, token: self.revision });
                        Input::Won { lease, token: self.revision }
                    }
                    Some((held, token)) if held == lease => Input::Won { lease, token },
                    Some((_, token)) => Input::Held { lease, token },
                },
                Effect::Revoke { lease } => return self.end(lease),
                Effect::Elected { .. } | Effect::Deposed { .. } => unreachable!("not for etcd"),
            };
            self.post(Letter::Answer { to: from, input });
        }

        fn live(&mut self, at: usize) {
            if self.now_us < self.candidates[at].frozen_until_us {
                return;
            }
            let now_us = self.clock_of(at);
            let candidate = &mut self.candidates[at];
            let due = candidate.election.next_deadline_us().is_some_and(|deadline| deadline <= now_us);
            let mut inputs = std::mem::take(&mut candidate.waiting);
            inputs.extend(due.then_some(Input::TimerFired));
            let mut effects = Vec::new();
            inputs.into_iter().for_each(|input| candidate.election.step(now_us, input, &mut effects));
            for effect in effects {
                match effect {
                    Effect::Elected { token } => {
                        assert!(self.elected.last().is_none_or(|last| *last < token), "tokens grow");
                        self.elected.push(token);
                    }
                    Effect::Deposed { .. } => {}
                    effect => self.post(Letter::Request { from: at, sent_us: now_us, effect }),
                }
            }
        }

        /// Nobody acts but the one who has the key, and its lease lasts.
        fn judge(&mut self) {
            for at in 0..self.candidates.len() {
                // A frozen one too: it may look at its clock at any moment and act.
                let Some(token) = self.candidates[at].election.may_act(self.clock_of(at)) else { continue };
                let (lease, held) = self.key.unwrap_or_else(|| panic!("{token} acts and nobody leads"));
                assert_eq!(token, held, "an old leader acts");
                let end = self.leases[&lease];
                assert!(
                    self.now_us < end,
                    "{token} acts at {} after its lease may end at {end}",
                    self.now_us
                );
                self.acted += 1;
            }
        }

        pub(super) fn leaders(&self) -> usize {
            let acts = |at: &usize| self.candidates[*at].election.may_act(self.clock_of(*at)).is_some();
            (0..self.candidates.len()).filter(acts).count()
        }
    }

    fn failure(effect: Effect) -> Option<Input> {
        match effect {
            Effect::Grant { .. } => Some(Input::GrantFailed),
            Effect::Renew { lease } => Some(Input::RenewFailed { lease }),
            Effect::Campaign { lease } => Some(Input::CampaignFailed { lease }),
            _ => None,
        }
    }

    fn failed(answer: Input) -> Option<Input> {
        match answer {
            Input::Granted { .. } => Some(Input::GrantFailed),
            Input::Renewed { lease, .. } | Input::LeaseGone { lease } => Some(Input::RenewFailed { lease }),
            Input::Won { lease, .. } | Input::Held { lease, .. } => Some(Input::CampaignFailed { lease }),
            _ => None,
        }
    }
}

#[test]
fn whatever_is_late_lost_or_frozen_two_never_act_and_someone_leads_in_the_end() {
    let mut elections = 0;
    for seed in 0..300 {
        let mut world = world::World::new(seed);
        world.run(60 * S, false);
        world.run(75 * S, true);
        assert_eq!(world.leaders(), 1, "seed {seed}: once it is calm, one leads");
        assert!(world.acted > 0, "seed {seed}");
        elections += world.elected.len();
    }
    assert!(elections > 900, "leaders changed only {elections} times: the trouble is too mild");
}

proptest! {
    /// Whatever comes in whatever order, the machine's promises hold and it asks for one thing at a time.
    #[test]
    fn any_inputs_keep_every_promise(inputs in prop::collection::vec((0..5 * S, 0..12u8, 1..4u64, 1..60u64), 1..200)) {
        let mut election = Election::new(settings());
        let (mut now, mut effects) = (0, Vec::new());
        for (pause, which, lease, token) in inputs {
            now += pause;
            let sent_us = now.saturating_sub(token * S / 10);
            let input = match which {
                0 => Input::Granted { lease, ttl_us: 10 * S, sent_us },
                1 => Input::GrantFailed,
                2 | 3 => Input::Renewed { lease, ttl_us: 10 * S, sent_us },
                4 => Input::RenewFailed { lease },
                5 => Input::LeaseGone { lease },
                6 => Input::Won { lease, token },
                7 => Input::Held { lease, token },
                8 => Input::CampaignFailed { lease },
                9 => Input::SeenHeld { lease, token },
                10 => Input::SeenVacant { revision: token },
                _ => Input::TimerFired,
            };
            effects.clear();
            election.step(now, input, &mut effects);
            prop_assert!(effects.len() <= 5, "{:?}", effects);
            let acts = election.may_act(now);
            prop_assert_eq!(acts, election.token(), "who leads after a step may act at that moment");
            if let Some(at) = election.next_deadline_us() {
                election.step(at.max(now), Input::TimerFired, &mut effects);
                now = at.max(now);
            }
        }
    }
}
