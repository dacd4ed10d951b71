//! Scenes: public rules played on a small store, across policies and tier shapes.

use crate::testing::{Rig, keys, owner};
use crate::{Effect, Eviction, Hits, Input, Offload, StoreConfig, StoreSnapshot};
use alloc::vec;
use alloc::vec::Vec;
use baton_types::{BlockHash, Tier};

const SHAPES: [[u64; 3]; 4] = [[8, 0, 0], [8, 8, 0], [8, 0, 8], [8, 8, 8]];
const OFFLOADS: [Offload; 3] = [Offload::Off, Offload::WriteThrough, Offload::OnEvict];

fn rig_of([hbm_blocks, dram_blocks, ssd_blocks]: [u64; 3], eviction: Eviction, offload: Offload) -> Rig {
    let ssd_second_touch = false;
    Rig::with(StoreConfig { hbm_blocks, dram_blocks, ssd_blocks, eviction, offload, ssd_second_touch })
}

fn tickets(effects: &[Effect]) -> Vec<u64> {
    let ticket = |effect: &Effect| match effect {
        Effect::Offload { ticket, .. } => Some(*ticket),
        _ => None,
    };
    effects.iter().filter_map(ticket).collect()
}

/// Answers every copy ordered, and those ordered in turn, with success.
fn settle(rig: &mut Rig, effects: &[Effect]) {
    let mut due = tickets(effects);
    while let Some(ticket) = due.pop() {
        due.extend(tickets(&rig.offloaded(ticket, true)));
    }
}

fn serve_settled(rig: &mut Rig, number: u64, chain: &[u128]) {
    let effects = rig.serve(number, chain);
    settle(rig, &effects);
}

/// Pushes everything unpinned out of HBM.
fn displace(rig: &mut Rig, hbm_blocks: u32) {
    let effects = rig.open(999, &[], hbm_blocks);
    assert!(matches!(effects[0], Effect::Opened { .. }), "{effects:?}");
    rig.close(999);
}

fn grow(rig: &mut Rig, number: u64, room_blocks: u32) -> Vec<Effect> {
    rig.step(Input::GrowRoom { owner: owner(number), room_blocks })
}

fn used(rig: &Rig) -> [u64; 3] {
    rig.store.stats().tiers.map(|tier| tier.used_blocks)
}

fn reserved(rig: &Rig) -> [u64; 3] {
    rig.store.stats().tiers.map(|tier| tier.reserved_blocks)
}

fn opened(of: u64, [hbm, dram, ssd]: [u32; 3], pending: u32, reserved: u32) -> Effect {
    Effect::Opened { owner: owner(of), hbm, dram, ssd, pending, reserved }
}

fn inherited(of: u64, blocks: u32) -> Effect {
    Effect::Inherited { owner: owner(of), blocks }
}

fn onboard(of: u64, dram_blocks: u32, ssd_blocks: u32) -> Effect {
    Effect::Onboard { owner: owner(of), dram_blocks, ssd_blocks }
}

#[test]
fn write_through_leaves_a_copy_in_every_tier_and_each_is_lost_on_its_own() {
    let mut rig = Rig::new([4, 4, 8], Offload::WriteThrough);
    serve_settled(&mut rig, 1, &[1, 2]);
    assert_eq!((used(&rig), rig.hits(&[1, 2])), ([2, 2, 2], (2, 0, 0)));
    displace(&mut rig, 4);
    assert_eq!((used(&rig), rig.hits(&[1, 2])), ([0, 2, 2], (0, 2, 0)));
    serve_settled(&mut rig, 2, &[11, 12, 13, 14]);
    assert_eq!((used(&rig), rig.hits(&[1, 2])), ([4, 4, 6], (0, 0, 2)));
    assert_eq!(rig.store.stats().lost_blocks, 0);
}

#[test]
fn on_evict_moves_single_blocks_down_tier_by_tier_oldest_first_and_loses_none_before_all_are_full() {
    let mut rig = Rig::new([8, 8, 8], Offload::OnEvict);
    for key in 1..=20 {
        serve_settled(&mut rig, 1, &[key]);
    }
    let tier = |rig: &Rig, key| match rig.hits(&[key]) {
        (1, 0, 0) => 0,
        (0, 1, 0) => 1,
        (0, 0, 1) => 2,
        _ => 3,
    };
    let places: Vec<_> = (1..=20).map(|key| tier(&rig, key)).collect();
    assert!(places.is_sorted_by(|older, newer| older >= newer), "{places:?}");
    assert_eq!((places[0], places[19], rig.store.stats().lost_blocks), (2, 0, 0));
    for key in 21..=60 {
        serve_settled(&mut rig, 1, &[key]);
    }
    let places: Vec<_> = (1..=60).map(|key| tier(&rig, key)).collect();
    assert!(places.is_sorted_by(|older, newer| older >= newer), "{places:?}");
    let lost = places.iter().filter(|&&place| place == 3).count() as u64;
    assert_eq!(rig.store.stats().lost_blocks, lost);
    assert!((36..=40).contains(&lost), "three tiers of eight hold about 24 of 60, not {}", 60 - lost);
}

#[test]
fn without_offload_the_lower_tiers_stay_empty_whatever_their_size() {
    for policy in Eviction::ALL {
        let mut rig = rig_of([4, 4, 4], policy, Offload::Off);
        for first in [10, 20, 30] {
            let effects = rig.serve(1, &[first, first + 1, first + 2, first + 3]);
            assert_eq!(tickets(&effects), [0; 0]);
        }
        assert_eq!((used(&rig), rig.store.stats().lost_blocks), ([4, 0, 0], 8), "{policy:?}");
    }
}

#[test]
fn a_chain_on_flash_is_brought_up_counted_and_copied_to_dram_again() {
    let mut rig = Rig::new([4, 4, 8], Offload::WriteThrough);
    serve_settled(&mut rig, 1, &[1, 2]);
    serve_settled(&mut rig, 2, &[11, 12, 13, 14]);
    assert_eq!(rig.hits(&[1, 2]), (0, 0, 2));
    assert_eq!(rig.open(3, &[1, 2, 3], 0)[..2], [opened(3, [0, 0, 2], 0, 1), onboard(3, 0, 2)]);
    let effects = rig.onboarded(3, true);
    let hashes = vec![BlockHash(1), BlockHash(2)];
    assert_eq!(effects[0], Effect::Stored { parent: None, hashes, tier: Tier::Hbm });
    settle(&mut rig, &effects);
    rig.close(3);
    let stats = rig.store.stats();
    assert_eq!(stats.tiers.map(|tier| tier.onboarded_blocks), [0, 0, 2]);
    displace(&mut rig, 4);
    assert_eq!(rig.hits(&[1, 2]), (0, 2, 0), "a use brings them back to DRAM");
}

#[test]
fn tickets_may_end_in_any_order() {
    let mut rig = Rig::new([8, 8, 0], Offload::WriteThrough);
    assert_eq!(tickets(&rig.serve(1, &[1, 2])), [0]);
    assert_eq!(tickets(&rig.serve(2, &[1, 2, 3])), [1]);
    let hashes = vec![BlockHash(3)];
    let stored = Effect::Stored { parent: Some(BlockHash(2)), hashes, tier: Tier::Dram };
    assert_eq!(rig.offloaded(1, true), [stored]);
    assert_eq!((used(&rig), reserved(&rig)), ([3, 1, 0], [0, 2, 0]));
    assert_eq!(rig.store.snapshot().offloads_under_way, [0]);
    rig.offloaded(0, true);
    displace(&mut rig, 8);
    assert_eq!(rig.hits(&[1, 2, 3]), (0, 3, 0));
    assert_eq!(rig.offloaded(1, true), [], "each ends once");
    assert_eq!(rig.store.stats().stale_inputs, 1);
}

#[test]
fn a_copy_whose_parents_copy_failed_goes_with_the_parent() {
    let mut rig = Rig::new([8, 8, 0], Offload::WriteThrough);
    rig.serve(1, &[1, 2]);
    rig.serve(2, &[1, 2, 3]);
    rig.offloaded(1, true);
    rig.offloaded(0, false);
    assert_eq!((rig.hits(&[1, 2, 3]), reserved(&rig)), ((3, 0, 0), [0; 3]));
    displace(&mut rig, 8);
    assert_eq!((used(&rig), rig.store.stats().blocks), ([0; 3], 0));
    assert_eq!(rig.store.stats().tiers[1].offload_failed_blocks, 2);
}

#[test]
fn a_copy_of_an_evicted_block_never_arrives_even_if_its_place_was_taken_again() {
    let mut rig = Rig::new([8, 8, 0], Offload::WriteThrough);
    rig.serve(1, &[1, 2]);
    displace(&mut rig, 8);
    assert_eq!(rig.hits(&[1, 2]), (0, 0, 0));
    assert_eq!(reserved(&rig), [0, 2, 0], "the driver may still be writing there");
    assert_eq!(tickets(&rig.serve(2, &[7, 8])), [1]);
    assert_eq!(rig.offloaded(0, true), []);
    assert_eq!((used(&rig), reserved(&rig)), ([2, 0, 0], [0, 2, 0]));
    rig.offloaded(1, true);
    assert_eq!((used(&rig), rig.store.stats().tiers[1].offload_failed_blocks), ([2, 2, 0], 2));
}

#[test]
fn after_clear_nothing_of_the_holders_is_left_and_all_slots_are_free() {
    for shape in SHAPES {
        let mut rig = Rig::new(shape, Offload::WriteThrough);
        serve_settled(&mut rig, 1, &[1, 2]);
        rig.open(2, &[1, 2, 3], 2);
        rig.read(3, &[1, 2]);
        assert_eq!(rig.step(Input::Clear), [Effect::Cleared]);
        assert_eq!((used(&rig), reserved(&rig), rig.store.pinned_total()), ([0; 3], [0; 3], 0));
        assert_eq!((rig.seal(2, 3), rig.onboarded(2, true), rig.close(2), rig.close(3)), Default::default());
        assert_eq!(rig.store.stats().stale_inputs, 4);
        assert_eq!(rig.open(2, &[1], 7), [opened(2, [0; 3], 0, 8)], "{shape:?}");
    }
}

#[test]
fn what_a_reader_holds_stays_under_pressure_and_may_go_after() {
    for policy in Eviction::ALL {
        let mut rig = rig_of([8, 0, 0], policy, Offload::Off);
        rig.serve(1, &[1, 2, 3]);
        rig.read(9, &[1, 2, 3]);
        for key in 100..140 {
            rig.serve(2, &[key, key + 1000]);
            assert_eq!(rig.hits(&[1, 2, 3]), (3, 0, 0), "{policy:?}");
        }
        let (needed_blocks, free_or_evictable_blocks) = (6, 5);
        let refused = Effect::Refused { owner: owner(3), needed_blocks, free_or_evictable_blocks };
        assert_eq!(rig.open(3, &[], 6), [refused]);
        rig.close(9);
        displace(&mut rig, 8);
        assert_eq!(rig.hits(&[1, 2, 3]), (0, 0, 0));
    }
}

#[test]
fn what_a_reader_holds_in_dram_stays_there_while_others_pass() {
    for policy in Eviction::ALL {
        let mut rig = rig_of([4, 4, 0], policy, Offload::WriteThrough);
        serve_settled(&mut rig, 1, &[1, 2]);
        displace(&mut rig, 4);
        assert_eq!(rig.read(9, &[1, 2, 3]), [opened(9, [0, 2, 0], 0, 0)]);
        for key in 100..120 {
            serve_settled(&mut rig, 2, &[key, key + 1000]);
            assert_eq!(rig.hits(&[1, 2]), (0, 2, 0), "{policy:?}");
        }
        assert_eq!(rig.store.stats().tiers[1].pinned_blocks, 2);
        rig.close(9);
        assert_eq!(rig.store.stats().tiers[1].pinned_blocks, 0);
    }
}

#[test]
fn room_grows_to_the_last_slot_and_not_beyond() {
    for shape in SHAPES {
        let mut rig = Rig::new(shape, Offload::OnEvict);
        rig.serve(1, &[1, 2]);
        rig.open(2, &[7], 1);
        let refused = |of, needed_blocks, free_or_evictable_blocks| {
            [Effect::GrowRefused { owner: owner(of), needed_blocks, free_or_evictable_blocks }]
        };
        assert_eq!(grow(&mut rig, 2, 7), refused(2, 7, 6));
        assert_eq!(grow(&mut rig, 2, u32::MAX), refused(2, u64::from(u32::MAX), 6));
        assert_eq!(rig.hits(&[1, 2]), (2, 0, 0), "{shape:?}");
        assert_eq!(grow(&mut rig, 2, 6)[0], Effect::Grown { owner: owner(2), room_blocks: 7 });
        assert_eq!(grow(&mut rig, 2, 1), refused(2, 1, 0));
        assert_eq!(grow(&mut rig, 2, 0), [Effect::Grown { owner: owner(2), room_blocks: 7 }]);
        assert_eq!(grow(&mut rig, 5, 1), refused(5, 1, 0));
        assert_eq!(rig.store.stats().stale_inputs, 1, "only the unknown owner");
        rig.close(2);
        assert_eq!(reserved(&rig)[0], 0);
    }
}

/// A history that ends with `extra` inputs that must leave no trace, then goes on.
fn refused_on_the_way(shape: [u64; 3], eviction: Eviction, offload: Offload, extra: bool) -> Vec<Effect> {
    let mut rig = rig_of(shape, eviction, offload);
    serve_settled(&mut rig, 1, &[1, 2, 3]);
    serve_settled(&mut rig, 1, &[1, 2, 4]);
    serve_settled(&mut rig, 1, &[20, 21]);
    rig.open(2, &[1, 2], 2);
    if extra {
        let before = rig.store.snapshot();
        assert!(matches!(rig.open(3, &[1, 2, 3, 30, 31, 32, 33, 34], 1)[..], [Effect::Refused { .. }]));
        assert!(matches!(grow(&mut rig, 2, 9)[..], [Effect::GrowRefused { .. }]));
        assert!(matches!(rig.open(2, &[20], 0)[..], [Effect::AlreadyOpen { .. }]));
        let mut after = rig.store.snapshot();
        assert_eq!((after.stats.refused, after.stats.double_opens), (1, 1));
        (after.stats.refused, after.stats.double_opens) = (0, 0);
        assert_eq!(before, after, "{shape:?} {eviction:?} {offload:?}");
    }
    let mut effects = rig.seal(2, 2);
    for key in 40..60 {
        effects.extend(rig.serve(4, &[key]));
    }
    effects.extend(rig.close(2));
    effects
}

#[test]
fn a_refusal_changes_nothing_now_or_later() {
    for shape in SHAPES {
        for (eviction, offload) in Eviction::ALL.into_iter().flat_map(|e| OFFLOADS.map(|o| (e, o))) {
            let without = refused_on_the_way(shape, eviction, offload, false);
            assert_eq!(refused_on_the_way(shape, eviction, offload, true), without);
            assert!(without.iter().any(|effect| matches!(effect, Effect::Removed { .. })));
        }
    }
}

#[test]
fn a_fill_passes_down_a_line_of_three_owners() {
    let mut rig = Rig::new([8, 0, 0], Offload::Off);
    rig.open(1, &[1, 2, 3], 0);
    rig.read(8, &[1, 2, 3]);
    assert_eq!(rig.open(2, &[1, 2, 3], 0), [opened(2, [0; 3], 3, 0)]);
    assert_eq!(rig.open(3, &[1, 2, 3, 4], 0), [opened(3, [0; 3], 3, 1)]);
    assert_eq!(rig.close(1), [inherited(2, 3)]);
    assert_eq!(rig.seal(2, 1).len(), 1);
    assert_eq!(rig.close(2), [inherited(3, 2)], "what was sealed is no duty any more");
    assert_eq!(rig.seal(3, 3).len(), 1);
    assert_eq!(rig.close(3), []);
    assert_eq!((rig.hits(&[1, 2, 3, 4]), reserved(&rig)), ((3, 0, 0), [0; 3]));
}

#[test]
fn a_line_of_owners_that_all_leave_leaves_nothing() {
    let mut rig = Rig::new([8, 0, 0], Offload::Off);
    (1..=3).for_each(|number| drop(rig.open(number, &[1, 2, 3], 0)));
    assert_eq!(rig.close(2), [], "who waits in the middle may leave");
    assert_eq!(rig.close(1), [inherited(3, 3)]);
    assert_eq!(rig.close(3), []);
    assert_eq!((rig.store.stats().blocks, reserved(&rig)), (0, [0; 3]));
}

#[test]
fn a_load_that_fails_in_the_second_hands_is_computed_by_the_third() {
    let mut rig = Rig::new([8, 8, 0], Offload::WriteThrough);
    serve_settled(&mut rig, 1, &[1, 2]);
    displace(&mut rig, 8);
    (3..=5).for_each(|number| drop(rig.open(number, &[1, 2], 0)));
    assert_eq!(rig.close(3), [onboard(4, 2, 0)]);
    assert_eq!(rig.onboarded(3, true), [], "the first owner's order went with it");
    assert_eq!(rig.onboarded(4, false), [Effect::OnboardFailed { owner: owner(4), blocks: 2 }]);
    assert_eq!(rig.close(4), [inherited(5, 2)]);
    rig.seal(5, 2);
    assert_eq!(rig.hits(&[1, 2]), (2, 0, 0));
    assert_eq!(rig.store.stats().onboard_failed_blocks, 2);
}

#[test]
fn a_second_close_is_counted_and_the_name_may_be_used_again() {
    for shape in SHAPES {
        let mut rig = Rig::new(shape, Offload::WriteThrough);
        rig.open(1, &[1, 2], 1);
        rig.seal(1, 2);
        rig.close(1);
        let mut before = rig.store.snapshot();
        assert_eq!((rig.close(1), rig.close(77)), (vec![], vec![]));
        before.stats.stale_inputs += 2;
        assert_eq!(rig.store.snapshot(), before, "{shape:?}");
        assert_eq!(rig.open(1, &[1, 2], 0), [opened(1, [2, 0, 0], 0, 0)]);
    }
}

#[test]
fn a_lookup_counts_the_leading_blocks_only_each_in_its_fastest_tier() {
    let mut rig = Rig::new([4, 3, 8], Offload::WriteThrough);
    serve_settled(&mut rig, 1, &[1, 2, 3]);
    assert_eq!(rig.hits(&[1, 9, 3]), (1, 0, 0), "a hole ends it");
    assert_eq!(rig.hits(&[2, 3]), (0, 0, 0), "no chain begins in the middle");
    assert_eq!(rig.hits(&[1, 3]), (1, 0, 0), "3 continues 2");
    assert_eq!((rig.hits(&[]), rig.hits(&[1, 2, 3, 4])), ((0, 0, 0), (3, 0, 0)));
    rig.open(2, &[], 3);
    assert_eq!(rig.hits(&[1, 2, 3]), (1, 2, 0));
    serve_settled(&mut rig, 3, &[50]);
    assert_eq!(rig.hits(&[1, 2, 3]), (0, 2, 1), "each tier gave up its oldest");
    let hits = rig.store.lookup(&keys(&[1, 2, 3, 4]));
    assert_eq!(hits, Hits { hbm: 0, dram: 2, ssd: 1, total: 3 });
}

#[test]
fn length_aware_gives_up_a_deep_leaf_before_an_older_root() {
    let left_after_one = |policy| {
        let mut rig = rig_of([8, 0, 0], policy, Offload::Off);
        rig.serve(1, &[20]);
        rig.serve(1, &[1, 2, 3, 4, 5, 6, 7]);
        rig.open(2, &[], 1);
        (rig.hits(&[20]).0, rig.hits(&[1, 2, 3, 4, 5, 6, 7]).0)
    };
    assert_eq!(left_after_one(Eviction::LengthAware), (1, 6));
    assert_eq!(left_after_one(Eviction::Lru), (0, 7));
}

#[test]
fn s3fifo_keeps_a_used_chain_through_a_scan_that_sweeps_lru() {
    let left_after_scan = |policy| {
        let mut rig = rig_of([20, 0, 0], policy, Offload::Off);
        for _ in 0..3 {
            rig.serve(1, &[1, 2]);
        }
        (100..200).for_each(|key| drop(rig.serve(1, &[key])));
        rig.hits(&[1, 2]).0
    };
    assert_eq!((left_after_scan(Eviction::S3Fifo), left_after_scan(Eviction::Lru)), (2, 0));
}

#[test]
fn reuse_learns_who_comes_back_and_keeps_their_blocks_through_scans() {
    let hits_at_the_end = |policy| {
        let mut rig = rig_of([24, 0, 0], policy, Offload::Off);
        let mut hits = 0;
        for round in 0..80u128 {
            rig.wait_us(30_000_000);
            let chain = [1_000 + round % 2, 2_000 + round % 2];
            hits += if round < 40 { 0 } else { rig.hits(&chain).0 };
            rig.serve(1, &chain);
            for scan in 0..2 {
                let from = 10_000 + (2 * round + scan) * 10;
                rig.serve(2, &core::array::from_fn::<u128, 10, _>(|at| from + at as u128));
            }
        }
        hits
    };
    assert_eq!(hits_at_the_end(Eviction::Lru), 0, "forty other blocks between two uses");
    assert_eq!(hits_at_the_end(Eviction::Reuse), 80, "every block of the chains that return");
}

#[test]
fn lfu_keeps_the_popular_for_a_while_and_lets_it_go_once_it_is_forgotten() {
    let mut rig = rig_of([4, 0, 0], Eviction::Lfu, Offload::Off);
    (0..10).for_each(|_| drop(rig.serve(1, &[1])));
    (100..112).for_each(|key| drop(rig.serve(1, &[key])));
    assert_eq!(rig.hits(&[1]).0, 1, "three times its tier has passed");
    (200..500).for_each(|key| drop(rig.serve(1, &[key])));
    assert_eq!(rig.hits(&[1]).0, 0, "its count was halved until it was nobody's");
}

#[test]
fn flash_is_spared_what_nobody_asked_for_again() {
    for second_touch in [false, true] {
        let (hbm_blocks, dram_blocks, ssd_blocks, ssd_second_touch) = (2, 2, 16, second_touch);
        let config =
            StoreConfig { hbm_blocks, dram_blocks, ssd_blocks, ssd_second_touch, ..Default::default() };
        let mut rig = Rig::with(config);
        for key in [1, 1, 2, 3, 4, 5, 6, 7, 8] {
            serve_settled(&mut rig, 1, &[key]);
        }
        assert_eq!(rig.hits(&[1]), (0, 0, 1), "asked for twice");
        assert_eq!(rig.hits(&[2]), (0, 0, u32::from(!second_touch)), "asked for once");
    }
}

/// A fixed, busy history; gives the blocks asked for, the tries to open, and the end.
fn busy_history(shape: [u64; 3], eviction: Eviction, offload: Offload) -> (u64, u64, StoreSnapshot) {
    let mut rig = rig_of(shape, eviction, offload);
    let (mut asked, mut tries, mut state) = (0, 0, 7u64);
    for _ in 0..300 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let draw = |shift: u32, below: u64| (state >> shift) % below;
        let (number, root) = (draw(33, 3), u128::from(draw(40, 5)) * 10 + 1);
        let chain: Vec<u128> = (root..=root + u128::from(draw(50, 5))).collect();
        let effects = if draw(45, 4) == 0 { rig.read(number, &chain) } else { rig.open(number, &chain, 0) };
        tries += 1;
        asked += u64::from(matches!(effects[0], Effect::Opened { .. })) * chain.len() as u64;
        match draw(55, 4) {
            0 => drop(rig.onboarded(number, true)),
            1 => drop(rig.seal(number, 2)),
            2 => drop(rig.close(number)),
            _ => settle(&mut rig, &effects),
        }
    }
    (asked, tries, rig.store.snapshot())
}

#[test]
fn every_block_asked_for_is_counted_once_as_hit_shared_or_missed() {
    for shape in SHAPES {
        for (eviction, offload) in Eviction::ALL.into_iter().flat_map(|e| OFFLOADS.map(|o| (e, o))) {
            let (asked, tries, StoreSnapshot { stats, .. }) = busy_history(shape, eviction, offload);
            let hit: u64 = stats.tiers.iter().map(|tier| tier.hit_blocks).sum();
            assert_eq!(hit + stats.missed_blocks + stats.shared_fill_blocks, asked, "{shape:?} {eviction:?}");
            assert_eq!(stats.opened + stats.refused + stats.double_opens, tries, "{shape:?} {eviction:?}");
            assert!(hit > 0 && stats.missed_blocks > 0 && stats.shared_fill_blocks > 0);
        }
    }
}

#[test]
fn snapshots_are_sorted_and_equal_after_equal_histories() {
    for (eviction, offload) in Eviction::ALL.into_iter().flat_map(|e| OFFLOADS.map(|o| (e, o))) {
        let (_, _, snapshot) = busy_history([8, 8, 8], eviction, offload);
        assert!(snapshot.owners.is_sorted_by(|a, b| a.owner < b.owner));
        assert!(snapshot.blocks.is_sorted_by(|a, b| a.key < b.key));
        assert!(snapshot.offloads_under_way.is_sorted_by(|a, b| a < b));
        assert_eq!(snapshot.blocks.len() as u64, snapshot.stats.blocks);
        let pins: u32 = snapshot.blocks.iter().map(|block| block.pins).sum();
        assert_eq!(pins, snapshot.owners.iter().map(|owner| owner.pinned_blocks).sum::<u32>());
        assert_eq!(busy_history([8, 8, 8], eviction, offload).2, snapshot);
    }
}
