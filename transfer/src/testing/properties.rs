//! Random runs in the naive world.

use alloc::vec::Vec;

use super::world::{Chances, Scale, World};
use crate::{MoverConfig, RailSpec};

extern crate std;

/// Small slices, and time limits that suit a world of microseconds.
pub(super) fn config() -> MoverConfig {
    let rail = RailSpec {
        path_slices: 16,
        path_bytes: 48 << 10,
        path_bytes_min: 16 << 10,
        queue_us: 30,
        ..RailSpec::default()
    };
    MoverConfig {
        slice_bytes: 4_096,
        slice_bytes_max: 16_384,
        max_slices: 200,
        spread_bytes: 8_192,
        backoff_min_us: 500,
        backoff_max_us: 20_000,
        silent_us: 20_000,
        probe_us: 10_000,
        stuck_us: 400_000,
        grace_us: 10_000,
        batch_limit_us: 5_000_000,
        turn_us: 2_000,
        max_paths: 10,
        rails: [rail].into(),
        ..MoverConfig::default()
    }
}

pub(super) fn everything() -> Chances {
    Chances {
        reset: 4,
        freeze: 1,
        delay: 4,
        duplicate: 20,
        damage: 2,
        full: 5,
        closed_door: 100,
        unknown: 150,
        rebirth: 1,
        cancel: 15,
        revoke: 5,
        hurry: 100,
    }
}

const SCALE: Scale = Scale { peers: 12, places: 8, rails: 4, bytes_per_us: 1_000 };

fn slices_wanted() -> u64 {
    let wanted =
        std::env::var("BATON_SLICES").ok().map(|text| text.parse().expect("BATON_SLICES is a number"));
    wanted.unwrap_or(300_000)
}

#[test]
fn every_byte_is_right_and_every_batch_ends_once_whatever_breaks() {
    let runs = 12;
    for seed in 0..runs {
        let mut world = World::new(seed, config(), SCALE, everything());
        world.run(slices_wanted() / runs);
        let stats = world.core.stats();
        std::println!("seed {seed}: {:?} in {} virtual s, {stats:?}", world.ends, world.now_us / 1_000_000);
        for how in ["done", "failed", "cancelled"] {
            assert!(world.ends.get(how).is_some_and(|&count| count > 20), "{how}: {:?}", world.ends);
        }
        assert!(stats.unfenced > 0 && stats.damaged_slices > 0 && stats.refused_slices > 0, "{stats:?}");
        assert!(stats.paths_broken > 20 && stats.paths_evicted > 0 && stats.probes > 0, "{stats:?}");
    }
}

#[test]
fn a_sound_world_moves_everything() {
    let mut world = World::new(5, config(), SCALE, Chances::default());
    world.run(20_000);
    assert_eq!(world.ends.keys().copied().collect::<Vec<_>>(), ["done"]);
    let stats = world.core.stats();
    assert_eq!((stats.repeated_slices, stats.paths_broken, stats.ignored_inputs), (0, 0, 0));
}

#[test]
fn equal_seeds_give_equal_effects() {
    let run = || {
        let mut world = World::new(3, config(), SCALE, everything());
        world.journal = Some(Vec::new());
        world.run(20_000);
        (world.journal.take().unwrap(), world.core.snapshot())
    };
    let (first, second) = (run(), run());
    assert!(first.0.len() > 20_000);
    assert!(first == second, "same seed, other effects");
}

#[test]
fn many_peers_share_few_paths_and_none_starves() {
    let bounded = MoverConfig { max_peers: 1_280, max_paths: 256, ..config() };
    let scale = Scale { peers: 10_000, places: 2, rails: 2, bytes_per_us: 1_000 };
    let mut world = World::new(9, bounded, scale, Chances::default());
    world.load = 900;
    world.submitting = false;
    let mut peer = 10;
    while peer < 10_000 {
        // Ten peers never rest; the others come one after the other.
        for busy in 0..10 {
            if world.live() < world.load && world.has_place(busy) {
                world.submit(busy);
            }
        }
        if world.live() < world.load && world.has_place(peer) {
            world.submit(peer);
            peer += 1;
        } else {
            world.turn();
        }
    }
    while world.live() > 0 {
        world.turn();
    }
    world.finish();
    assert_eq!(world.ends.keys().copied().collect::<Vec<_>>(), ["done"], "{:?}", world.ends);
    let stats = world.core.stats();
    assert!(stats.peers <= 1_280 && stats.paths <= 256, "{stats:?}");
    assert!(world.longest_us < 1_000_000, "the longest waited {} us", world.longest_us);
}
