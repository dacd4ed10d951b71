//! The counters: each is what the orders and the ends, counted one by one, say.

use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;

use super::properties::{config, everything};
use super::world::{Chances, Scale, World};
use crate::Priority;
use crate::*;

/// A journal, counted.
#[derive(Debug, Default)]
struct Tally {
    posts: u64,
    posted_bytes: u64,
    /// Posts of a range that was posted before.
    again: u64,
    opens: u64,
    closes: u64,
    probes: u64,
    notices: u64,
    done: u64,
    done_bytes: u64,
    failed: u64,
    cancelled: u64,
    refused: u64,
    unfenced: u64,
}

impl Tally {
    fn of(journal: &[Effect]) -> Self {
        let mut tally = Self::default();
        let mut seen = BTreeMap::new();
        for effect in journal {
            tally.add(effect);
            if let Effect::Post { batch, op, at, .. } = *effect {
                let times = seen.entry((batch, op, at)).or_insert(0u64);
                tally.again += u64::from(*times > 0);
                *times += 1;
            }
        }
        tally
    }

    fn add(&mut self, effect: &Effect) {
        match *effect {
            Effect::Post { bytes, .. } => {
                self.posts += 1;
                self.posted_bytes += u64::from(bytes);
            }
            Effect::OpenPath { .. } => self.opens += 1,
            Effect::ClosePath { .. } => self.closes += 1,
            Effect::Probe { .. } => self.probes += 1,
            Effect::Notify { .. } => self.notices += 1,
            Effect::Done { bytes, .. } => {
                self.done += 1;
                self.done_bytes += bytes;
            }
            Effect::Failed { remote_fenced, .. } => {
                self.failed += 1;
                self.unfenced += u64::from(!remote_fenced);
            }
            Effect::Cancelled { remote_fenced, .. } => {
                self.cancelled += 1;
                self.unfenced += u64::from(!remote_fenced);
            }
            Effect::Refused { .. } => self.refused += 1,
            Effect::PeerRefused { .. } | Effect::PeerForgotten { .. } => {}
        }
    }
}

const SCALE: Scale = Scale { peers: 6, places: 8, rails: 3, bytes_per_us: 1_000 };

fn counted(seed: u64, chances: Chances, slices: u64) -> (Tally, MoverStats) {
    let mut world = World::new(seed, config(), SCALE, chances);
    world.journal = Some(Vec::new());
    world.run(slices);
    (Tally::of(&world.journal.take().unwrap()), world.core.stats())
}

#[test]
fn counters_are_what_the_orders_and_the_ends_say_whatever_breaks() {
    for seed in 20..24 {
        let (tally, stats) = counted(seed, everything(), 12_000);
        let ends = (tally.done, tally.failed, tally.cancelled, tally.refused, tally.unfenced);
        let told = (stats.done, stats.failed, stats.cancelled, stats.refused, stats.unfenced);
        assert_eq!(told, ends, "seed {seed}");
        assert_eq!(stats.submitted, stats.done + stats.failed + stats.cancelled, "all have ended");
        assert_eq!((stats.probes, stats.notices), (tally.probes, tally.notices), "seed {seed}");
        assert_eq!(stats.paths_opened + stats.opens_failed, tally.opens, "each is answered: {stats:?}");
        assert_eq!(stats.paths, stats.paths_opened - tally.closes, "what was opened is open or closed");
        // A moved slice was posted once. A slice was posted again because the core repeated it, a peer refused it, or
        // a path dropped it.
        assert!(stats.moved_slices <= tally.posts && stats.moved_bytes <= tally.posted_bytes);
        assert!(tally.again > 0 && tally.again <= stats.repeated_slices + stats.refused_slices, "{stats:?}");
        assert!(stats.moved_bytes >= tally.done_bytes && tally.done_bytes > 0);
        assert!(stats.paths_evicted + stats.paths_broken <= tally.closes, "each is closed: {stats:?}");
        assert_eq!(stats.clock_regressions, 0);
    }
}

#[test]
fn in_a_sound_world_every_slice_is_counted_once() {
    let (tally, stats) = counted(30, Chances::default(), 8_000);
    assert_eq!((stats.moved_slices, stats.moved_bytes), (tally.posts, tally.posted_bytes));
    assert_eq!(tally.posted_bytes, tally.done_bytes, "what was done is what was posted");
    assert_eq!(
        (tally.again, stats.repeated_slices, stats.damaged_slices, stats.refused_slices),
        (0, 0, 0, 0)
    );
    assert_eq!((stats.failed, stats.cancelled, stats.unfenced, stats.opens_failed), (0, 0, 0, 0));
}

/// A core with an open path, one slice on it, and the names of these.
fn busy() -> (MoverCore, PathNumber, SliceTicket) {
    let mut core = MoverCore::new(MoverConfig::default());
    let mut effects = Vec::new();
    let (peer, route) = (PeerNumber(1), Route { rail: RailNumber(0), tier: 0 });
    core.step(10, Input::PeerKnown { peer, routes: vec![route] }, &mut effects);
    core.step(10, Input::Submit(request(1, peer)), &mut effects);
    let [Effect::OpenPath { path, .. }] = effects[..] else { panic!("{effects:?}") };
    core.step(10, Input::PathOpened { path }, &mut effects);
    let Some(&Effect::Post { ticket, .. }) = effects.last() else { panic!("{effects:?}") };
    (core, path, ticket)
}

fn request(batch: u64, peer: PeerNumber) -> BatchRequest {
    let ops = vec![Op { direction: Direction::Write, bytes: 5_000, location: 0 }];
    let (batch, priority) = (BatchId(batch), Priority::Fetch);
    BatchRequest { batch, peer, priority, deadline_us: None, notice: false, ops }
}

#[test]
fn what_names_nothing_known_is_counted_and_changes_nothing() {
    let (core, path, ticket) = busy();
    let (no_path, no_ticket) = (PathNumber(path.0 + 1), SliceTicket(ticket.0 ^ (1 << 40)));
    let (peer, fault) = (PeerNumber(1), Fault::Path);
    let strangers = [
        Input::PeerKnown { peer, routes: vec![] },
        Input::PeerEnded { peer: PeerNumber(2) },
        Input::Cancel { batch: BatchId(2) },
        Input::PathOpened { path },
        Input::PathOpened { path: no_path },
        Input::PathOpenFailed { path, fault },
        Input::PathOpenFailed { path: no_path, fault },
        Input::PathBroken { path: no_path, fault },
        Input::PathClosed { path: no_path, end: PathEnd::Fenced },
        Input::PathRoom { path: no_path },
        Input::PathRefused { path, ticket: no_ticket },
        Input::PathRefused { path: no_path, ticket },
        Input::SliceDone { path, ticket: no_ticket },
        Input::SliceDone { path: no_path, ticket },
        Input::Notified { path, ticket: no_ticket },
        Input::Failed { path, ticket: no_ticket, fault },
        Input::Failed { path: no_path, ticket, fault: Fault::Corrupt },
    ];
    for input in strangers {
        let (mut core, mut effects, before) = (core.clone(), Vec::new(), core.snapshot());
        core.step(10, input.clone(), &mut effects);
        let mut after = core.snapshot();
        assert_eq!(after.stats.ignored_inputs, before.stats.ignored_inputs + 1, "{input:?}");
        after.stats.ignored_inputs -= 1;
        assert_eq!((after, effects), (before, vec![]), "{input:?}");
        core.check().unwrap();
    }
}

/// How much one counter is more than before.
type Counter = fn(&MoverStats) -> u64;

#[test]
fn each_fact_moves_its_own_counter() {
    let (core, path, ticket) = busy();
    let failed = |fault| Input::Failed { path, ticket, fault };
    let broken = Input::PathBroken { path, fault: Fault::Path };
    let table: [(Input, u64, Counter, &[u64]); 8] = [
        (Input::SliceDone { path, ticket }, 20, |s| s.moved_slices, &[1, 0]),
        (Input::SliceDone { path, ticket }, 20, |s| s.moved_bytes, &[5_000, 0]),
        (failed(Fault::Corrupt), 20, |s| s.damaged_slices, &[1, 0]),
        (failed(Fault::Path), 20, |s| s.repeated_slices, &[1, 0]),
        (failed(Fault::Invalid), 20, |s| s.failed, &[1, 0]),
        (Input::PathRefused { path, ticket }, 20, |s| s.refused_slices, &[1, 0]),
        (broken, 20, |s| s.paths_broken, &[1, 0]),
        (Input::Submit(request(1, PeerNumber(1))), 5, |s| s.refused + s.clock_regressions, &[2, 2]),
    ];
    for (input, at_us, counter, grows) in table {
        let (mut core, mut before) = (core.clone(), counter(&core.stats()));
        for (turn, &by) in grows.iter().enumerate() {
            core.step(at_us, input.clone(), &mut Vec::new());
            let now = counter(&core.stats());
            assert_eq!(now - before, by, "{input:?}, told {} times", turn + 1);
            before = now;
        }
        core.check().unwrap();
    }
}

#[test]
fn a_slice_that_went_twice_has_moved_once() {
    let (mut core, path, ticket) = busy();
    let mut feed = |at_us, input| {
        let mut effects = Vec::new();
        core.step(at_us, input, &mut effects);
        (effects, core.stats())
    };
    feed(20, Input::Failed { path, ticket, fault: Fault::Path });
    feed(30, Input::PathClosed { path, end: PathEnd::Fenced });
    let (effects, _) = feed(100_000, Input::TimerFired);
    let [Effect::OpenPath { path, .. }] = effects[..] else { panic!("{effects:?}") };
    let (effects, _) = feed(100_010, Input::PathOpened { path });
    let [Effect::Probe { ticket, .. }] = effects[..] else { panic!("{effects:?}") };
    let (effects, _) = feed(100_020, Input::Notified { path, ticket });
    let [Effect::Post { ticket, bytes: 5_000, .. }] = effects[..] else { panic!("{effects:?}") };
    let (effects, stats) = feed(100_030, Input::SliceDone { path, ticket });
    assert!(matches!(effects[..], [Effect::Done { bytes: 5_000, took_us: 100_020, .. }]), "{effects:?}");
    assert_eq!((stats.moved_slices, stats.moved_bytes, stats.repeated_slices), (1, 5_000, 1));
    assert_eq!((stats.paths_opened, stats.paths_broken, stats.probes, stats.done), (2, 1, 1, 1));
}

#[test]
fn what_there_is_now_follows_a_batch_from_its_start_to_its_end() {
    let now = |core: &MoverCore| {
        let stats = core.stats();
        [stats.peers, stats.live_batches, stats.paths, stats.outstanding_slices, stats.outstanding_bytes]
    };
    assert_eq!(now(&MoverCore::new(MoverConfig::default())), [0; 5]);
    let (mut core, path, ticket) = busy();
    assert_eq!(now(&core), [1, 1, 1, 1, 5_000]);
    core.step(20, Input::SliceDone { path, ticket }, &mut Vec::new());
    assert_eq!(now(&core), [1, 0, 1, 0, 0]);
    core.step(30, Input::PeerEnded { peer: PeerNumber(1) }, &mut Vec::new());
    assert_eq!(now(&core), [1, 0, 1, 0, 0], "a path that closes is there until it has closed");
    core.step(40, Input::PathClosed { path, end: PathEnd::Fenced }, &mut Vec::new());
    assert_eq!(now(&core), [1, 0, 0, 0, 0]);
}
