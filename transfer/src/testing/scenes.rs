//! Built scenes: one rule each, seen in the effects.

use alloc::vec;
use alloc::vec::Vec;

use super::properties::config;
use super::world::{Chances, Scale, World};
use crate::Priority;
use crate::*;

/// A core, and what it has ordered and not been answered.
struct ScriptedDriver {
    core: MoverCore,
    now_us: u64,
    effects: Vec<Effect>,
}

const PEER: PeerNumber = PeerNumber(1);

impl ScriptedDriver {
    fn new(config: MoverConfig) -> Self {
        Self { core: MoverCore::new(config), now_us: 1_000, effects: Vec::new() }
    }

    /// With one peer, over so many rails, each with its tier.
    fn with_rails(tiers: &[u8]) -> Self {
        let config = MoverConfig { rails: vec![RailSpec::default(); tiers.len()], ..MoverConfig::default() };
        let mut driver = Self::new(config);
        driver.know(PEER, tiers);
        driver
    }

    fn know(&mut self, peer: PeerNumber, tiers: &[u8]) {
        let route = |(rail, &tier)| Route { rail: RailNumber(rail), tier };
        self.feed(Input::PeerKnown { peer, routes: (0..).zip(tiers).map(route).collect() });
    }

    fn feed(&mut self, input: Input) {
        self.core.step(self.now_us, input, &mut self.effects);
        self.core.check().unwrap();
    }

    fn submit(&mut self, batch: u64, bytes: u64) {
        self.submit_as(batch, bytes, Priority::Fetch, false);
    }

    fn submit_as(&mut self, batch: u64, bytes: u64, priority: Priority, notice: bool) {
        let op = Op { direction: Direction::Write, bytes, location: 0 };
        let (batch, ops) = (BatchId(batch), vec![op]);
        self.feed(Input::Submit(BatchRequest {
            batch,
            peer: PEER,
            priority,
            deadline_us: None,
            notice,
            ops,
        }));
    }

    fn take(&mut self) -> Vec<Effect> {
        core::mem::take(&mut self.effects)
    }

    /// Opens what is asked for, and says what that was.
    fn open_all(&mut self) -> Vec<(PathNumber, RailNumber)> {
        let mut opened = Vec::new();
        let mut kept = Vec::new();
        while let Some(effect) = (!self.effects.is_empty()).then(|| self.effects.remove(0)) {
            match effect {
                Effect::OpenPath { path, rail, .. } => {
                    opened.push((path, rail));
                    self.feed(Input::PathOpened { path });
                }
                other => kept.push(other),
            }
        }
        self.effects = kept;
        opened
    }

    /// The slices ordered since the last call.
    fn posts(&mut self) -> Vec<(PathNumber, SliceTicket, BatchId)> {
        let effects = self.take();
        let post = |effect| match effect {
            Effect::Post { path, ticket, batch, .. } => Some((path, ticket, batch)),
            _ => None,
        };
        effects.into_iter().filter_map(post).collect()
    }

    fn done(&mut self, (path, ticket, _): (PathNumber, SliceTicket, BatchId)) {
        self.now_us += 10;
        self.feed(Input::SliceDone { path, ticket });
    }

    /// Lets time pass, stepping when the core asks for it.
    fn pass(&mut self, us: u64) {
        let until_us = self.now_us + us;
        while let Some(at_us) = self.core.next_deadline().filter(|&at_us| at_us <= until_us) {
            self.now_us = self.now_us.max(at_us);
            self.feed(Input::TimerFired);
        }
        self.now_us = until_us;
    }
}

fn ends(effects: &[Effect]) -> Vec<&Effect> {
    let is_end = |effect: &&Effect| {
        matches!(effect, Effect::Done { .. } | Effect::Failed { .. } | Effect::Cancelled { .. })
    };
    effects.iter().filter(is_end).collect()
}

#[test]
fn a_batch_is_cut_posted_and_done_and_its_notice_goes_last_and_once() {
    let mut driver = ScriptedDriver::with_rails(&[0]);
    driver.submit_as(1, 200_000, Priority::Fetch, true);
    driver.open_all();
    let posts = driver.posts();
    assert_eq!(posts.len(), 4);
    for &post in &posts {
        assert_eq!(driver.take(), [], "neither notice nor end before the last slice");
        driver.done(post);
    }
    let effects = driver.take();
    let [Effect::Notify { path, ticket, .. }] = effects[..] else { panic!("{effects:?}") };
    driver.feed(Input::Notified { path, ticket });
    assert!(matches!(driver.take()[..], [Effect::Done { bytes: 200_000, .. }]));
    driver.done(posts[0]);
    driver.feed(Input::Notified { path, ticket });
    assert_eq!(driver.take(), []);
    assert_eq!(driver.core.stats().ignored_inputs, 2);
}

#[test]
fn a_path_that_dies_leaves_its_slices_to_the_other_and_the_end_waits_for_its_fence() {
    let mut driver = ScriptedDriver::with_rails(&[0, 0]);
    driver.submit(1, 16 << 20);
    let opened = driver.open_all();
    assert_eq!(opened.len(), 2, "so much is worth two paths");
    let posts = driver.posts();
    let dead = opened[0].0;
    let (lost, kept): (Vec<_>, Vec<_>) = posts.into_iter().partition(|post| post.0 == dead);
    assert!(!lost.is_empty() && !kept.is_empty());
    driver.feed(Input::PathBroken { path: dead, fault: Fault::Path });
    kept.into_iter().for_each(|post| driver.done(post));
    let mut again = driver.posts();
    assert!(again.iter().all(|post| post.0 == opened[1].0));
    while let Some(post) = again.pop() {
        driver.done(post);
        assert_eq!(ends(&driver.effects), Vec::<&Effect>::new());
        again.extend(driver.posts());
    }
    // Every byte is there, and still it has not ended.
    assert_eq!(driver.core.done_bytes(BatchId(1)), Some(16 << 20));
    driver.feed(Input::PathClosed { path: dead, end: PathEnd::Fenced });
    assert!(matches!(ends(&driver.take())[..], [Effect::Done { .. }]));
}

#[test]
fn what_the_peer_cannot_vouch_for_fails_a_write() {
    let mut driver = ScriptedDriver::with_rails(&[0]);
    driver.submit(1, 1_000);
    driver.open_all();
    let path = driver.posts()[0].0;
    driver.feed(Input::PathBroken { path, fault: Fault::Path });
    driver.feed(Input::PathClosed { path, end: PathEnd::PeerUnknown });
    let effects = driver.take();
    let [Effect::Failed { failure, remote_fenced: false, .. }] = ends(&effects)[..] else { panic!() };
    assert_eq!(*failure, Failure { stage: Stage::Fence, reason: Reason::PeerUnknown });
    assert!(alloc::format!("{failure}").contains("revoke"));
}

#[test]
fn a_silent_path_is_probed_and_then_broken_within_two_seconds() {
    let mut driver = ScriptedDriver::with_rails(&[0]);
    driver.submit(1, 1_000);
    driver.open_all();
    driver.take();
    driver.pass(499_999);
    assert_eq!(driver.take(), []);
    driver.pass(1);
    let effects = driver.take();
    let [Effect::Probe { path, ticket }] = effects[..] else { panic!("{effects:?}") };
    driver.feed(Input::Notified { path, ticket });
    driver.pass(500_000);
    assert!(matches!(driver.take()[..], [Effect::Probe { .. }]), "alive, but still owing");
    driver.pass(1_000_000);
    assert!(matches!(driver.take()[0], Effect::ClosePath { path: closed } if closed == path));
}

#[test]
fn a_path_that_answers_and_moves_nothing_is_given_up_too() {
    let mut driver = ScriptedDriver::with_rails(&[0]);
    driver.submit(1, 1_000);
    driver.open_all();
    driver.take();
    let mut closed = false;
    for _ in 0..60 {
        driver.pass(100_000);
        for effect in driver.take() {
            match effect {
                Effect::Probe { path, ticket } => driver.feed(Input::Notified { path, ticket }),
                Effect::ClosePath { .. } => closed = true,
                _ => {}
            }
        }
    }
    assert!(closed);
}

#[test]
fn a_broken_route_rests_longer_each_time_and_is_probed_before_it_is_used() {
    let mut driver = ScriptedDriver::with_rails(&[0]);
    driver.submit(1, 1_000);
    let mut rests = Vec::new();
    for _ in 0..5 {
        let effects = driver.take();
        let [Effect::OpenPath { path, .. }] = effects[..] else { panic!("{effects:?}") };
        let failed_us = driver.now_us;
        driver.feed(Input::PathOpenFailed { path, fault: Fault::Silent });
        while driver.effects.is_empty() {
            driver.pass(1_000);
        }
        rests.push(driver.now_us - failed_us);
    }
    assert!(rests.is_sorted() && rests[4] > 8 * rests[0], "{rests:?}");
    driver.open_all();
    let effects = driver.take();
    let [Effect::Probe { path, ticket }] = effects[..] else { panic!("{effects:?}") };
    driver.feed(Input::Notified { path, ticket });
    assert_eq!(driver.posts().len(), 1);
}

#[test]
fn a_peer_that_cannot_be_reached_fails_its_batches() {
    let mut driver = ScriptedDriver::with_rails(&[0, 1]);
    driver.submit(1, 1_000);
    let mut opens = 0;
    loop {
        let effects = driver.take();
        if let [Effect::Failed { failure, .. }] = ends(&effects)[..] {
            let reason = Reason::Fault(Fault::Silent);
            assert_eq!(*failure, Failure { stage: Stage::Connect, reason });
            break;
        }
        for effect in effects {
            if let Effect::OpenPath { path, .. } = effect {
                opens += 1;
                driver.feed(Input::PathOpenFailed { path, fault: Fault::Silent });
            }
        }
        driver.pass(1_000);
    }
    assert_eq!(opens, 12, "six times each of two routes");
}

#[test]
fn a_better_tier_is_used_again_when_it_opens() {
    let mut driver = ScriptedDriver::with_rails(&[0, 1]);
    driver.submit(1, 1_000);
    let effects = driver.take();
    let [Effect::OpenPath { path, rail: RailNumber(0), .. }] = effects[..] else { panic!("{effects:?}") };
    driver.feed(Input::PathOpenFailed { path, fault: Fault::Silent });
    assert!(matches!(driver.open_all()[..], [(_, RailNumber(1))]));
    let post = driver.posts()[0];
    driver.done(post);
    assert!(matches!(ends(&driver.take())[..], [Effect::Done { .. }]));
    driver.pass(1_000_000);
    driver.submit(2, 1_000);
    let mut good = None;
    for effect in driver.take() {
        if let Effect::OpenPath { path, rail: RailNumber(0), .. } = effect {
            driver.feed(Input::PathOpened { path });
            good = Some(path);
        }
    }
    let effects = driver.take();
    let [Effect::Probe { path, ticket }] = effects[..] else { panic!("{effects:?}") };
    assert_eq!(Some(path), good);
    driver.feed(Input::Notified { path, ticket });
    driver.submit(3, 1_000);
    assert_eq!(driver.posts()[0].0, path);
}

#[test]
fn near_rails_are_preferred_until_they_are_congested() {
    let rails = vec![RailSpec::default(); 2];
    let ranks = vec![vec![1, 0]];
    let mut driver =
        ScriptedDriver::new(MoverConfig { rails, ranks, spread_bytes: 1, ..MoverConfig::default() });
    driver.know(PEER, &[0, 0]);
    driver.submit(1, 600_000);
    let opened = driver.open_all();
    assert_eq!(opened[0].1, RailNumber(1), "the near one first");
    let on = |posts: &[(PathNumber, SliceTicket, BatchId)], rail: u8| {
        let path = opened.iter().find(|(_, other)| other.0 == rail).map(|(path, _)| *path);
        posts.iter().filter(|post| Some(post.0) == path).count()
    };
    for post in driver.posts() {
        driver.done(post);
    }
    driver.take();
    driver.submit(2, 65_536);
    let alone = driver.posts();
    assert_eq!((on(&alone, 0), on(&alone, 1)), (0, 1));
    driver.submit(3, 4 << 20);
    let many = driver.posts();
    assert!(on(&many, 0) > 5 && on(&many, 1) > on(&many, 0), "{} {}", on(&many, 0), on(&many, 1));
}

#[test]
fn a_refused_slice_fails_its_batch_and_leaves_the_path_to_others() {
    let mut driver = ScriptedDriver::with_rails(&[0]);
    driver.submit(1, 1_000);
    driver.submit(2, 1_000);
    driver.open_all();
    let posts = driver.posts();
    let (path, ticket, batch) = posts[0];
    driver.feed(Input::Failed { path, ticket, fault: Fault::Stale });
    let effects = driver.take();
    let [Effect::Failed { batch: failed, failure, remote_fenced: true }] = effects[..] else { panic!() };
    assert_eq!((failed, failure.reason), (batch, Reason::Fault(Fault::Stale)));
    driver.done(posts[1]);
    assert!(matches!(driver.take()[..], [Effect::Done { .. }]));
}

#[test]
fn a_life_that_is_over_takes_its_batches_with_it() {
    let mut driver = ScriptedDriver::with_rails(&[0]);
    driver.submit(1, 1_000);
    let effects = driver.take();
    let [Effect::OpenPath { path, .. }] = effects[..] else { panic!("{effects:?}") };
    driver.feed(Input::PathOpenFailed { path, fault: Fault::Stale });
    assert!(matches!(driver.take()[..], [Effect::Failed { remote_fenced: true, .. }]));
    driver.submit(2, 1_000);
    assert!(matches!(driver.take()[..], [Effect::Refused { refusal: Refusal::PeerEnded, .. }]));
    driver.feed(Input::PeerEnded { peer: PeerNumber(77) });
    assert_eq!(driver.core.stats().ignored_inputs, 1);
}

#[test]
fn bounds_refuse_and_name_what_is_full() {
    let bounds = MoverConfig { max_batches: 2, max_ops_per_batch: 3, max_ops: 4, ..MoverConfig::default() };
    let mut driver = ScriptedDriver::new(bounds);
    let refused = |driver: &mut ScriptedDriver, batch: u64, peer: PeerNumber, ops: &[u64]| {
        let op = |&bytes: &u64| Op { direction: Direction::Read, bytes, location: 0 };
        let (batch, ops) = (BatchId(batch), ops.iter().map(op).collect());
        let request =
            BatchRequest { batch, peer, priority: Priority::Offload, deadline_us: None, notice: false, ops };
        driver.take();
        driver.feed(Input::Submit(request));
        driver.take().into_iter().find_map(|effect| match effect {
            Effect::Refused { refusal, .. } => Some(refusal),
            _ => None,
        })
    };
    assert_eq!(refused(&mut driver, 1, PEER, &[1]), Some(Refusal::PeerUnknown));
    driver.know(PEER, &[0]);
    assert_eq!(refused(&mut driver, 1, PEER, &[]), Some(Refusal::Empty));
    assert_eq!(refused(&mut driver, 1, PEER, &[5, 0]), Some(Refusal::Empty));
    assert_eq!(refused(&mut driver, 1, PEER, &[1; 4]), Some(Refusal::TooManyOps));
    assert_eq!(refused(&mut driver, 1, PEER, &[u64::MAX, 2]), Some(Refusal::TooLarge));
    assert_eq!(refused(&mut driver, 1, PEER, &[1; 3]), None);
    assert_eq!(refused(&mut driver, 1, PEER, &[1]), Some(Refusal::Duplicate));
    let full = |bound, limit| Some(Refusal::Full { bound, limit });
    assert_eq!(refused(&mut driver, 2, PEER, &[1; 2]), full(BoundKind::Ops, 4));
    assert_eq!(refused(&mut driver, 2, PEER, &[1]), None);
    assert_eq!(refused(&mut driver, 3, PEER, &[1]), full(BoundKind::Batches, 2));
}

#[test]
fn a_cancelled_batch_waits_for_what_is_on_its_way_but_not_for_ever() {
    let mut driver = ScriptedDriver::with_rails(&[0]);
    driver.submit(1, 1_000);
    driver.submit(2, 1_000);
    driver.open_all();
    let posts = driver.posts();
    driver.feed(Input::Cancel { batch: BatchId(1) });
    driver.feed(Input::Cancel { batch: BatchId(2) });
    assert_eq!(driver.take(), []);
    driver.done(posts[0]);
    assert_eq!(driver.take(), [Effect::Cancelled { batch: BatchId(1), remote_fenced: true }]);
    let mut closed = None;
    for _ in 0..12 {
        driver.pass(100_000);
        for effect in driver.take() {
            match effect {
                Effect::Probe { path, ticket } => driver.feed(Input::Notified { path, ticket }),
                Effect::ClosePath { path } => closed = Some(path),
                other => panic!("{other:?}"),
            }
        }
    }
    driver.feed(Input::PathClosed { path: closed.unwrap(), end: PathEnd::Fenced });
    assert_eq!(driver.take(), [Effect::Cancelled { batch: BatchId(2), remote_fenced: true }]);
}

#[test]
fn a_deadline_fails_what_has_no_path() {
    let mut driver = ScriptedDriver::with_rails(&[0]);
    driver.submit(1, 1_000);
    driver.take();
    driver.pass(60_000_000);
    let effects = driver.take();
    let [Effect::Failed { failure, .. }] = ends(&effects)[..] else { panic!("{effects:?}") };
    assert_eq!(*failure, Failure { stage: Stage::Connect, reason: Reason::Deadline });
}

#[test]
fn every_priority_has_its_share_of_one_path_and_the_lowest_its_floor() {
    let scale = Scale { peers: 1, places: 400, rails: 1, bytes_per_us: 1_000 };
    let mut world = World::new(1, config(), scale, Chances::default());
    world.submitting = false;
    for turn in 0..400 {
        world.submit_whole(0, Priority::ALL[turn % 4]);
    }
    while world.ends.get("done").is_none_or(|&done| done < 100) {
        world.turn();
    }
    let sent = world.posted_by_priority;
    let total: u64 = sent.iter().sum();
    assert!(sent.is_sorted_by(|a, b| a >= b), "{sent:?}");
    assert!(sent[0] * 100 > total * 50 && sent[3] * 100 >= total * 4, "{sent:?}");
    while world.live() > 0 {
        world.turn();
    }
    world.finish();
}

#[test]
fn two_sound_rails_carry_about_the_same() {
    let scale = Scale { peers: 4, places: 16, rails: 2, bytes_per_us: 1_000 };
    let mut world = World::new(2, config(), scale, Chances::default());
    world.run(10_000);
    let [one, two] = world.posted_by_rail[..] else { panic!() };
    assert!(one * 2 > two && two * 2 > one, "{one} {two}");
}

#[test]
fn time_that_goes_back_stands_still() {
    let mut driver = ScriptedDriver::with_rails(&[0]);
    driver.now_us = 10;
    driver.submit(1, 1_000);
    assert_eq!(driver.core.stats().clock_regressions, 1);
    assert_eq!(driver.core.snapshot().now_us, 1_000);
}
