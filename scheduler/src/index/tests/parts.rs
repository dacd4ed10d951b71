//! The parts of the index, each against something simpler.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use baton_types::{InstanceId, Rng, Tier};
use proptest::prelude::*;

use super::super::arena::{Arena, CHUNK_SLOTS, Extent};
use super::super::holdings::Holdings;
use super::super::run::{Holder, Holders, Run, RunId, Runs};
use super::super::table::{Entry, Table};

#[test]
fn the_arena_cuts_joins_and_runs_out() {
    let mut arena = Arena::new();
    assert_eq!(arena.take(5, false), None);
    let whole = arena.take(CHUNK_SLOTS * 2, true).unwrap();
    assert_eq!((whole.len as usize, arena.free_slots()), (CHUNK_SLOTS, 0));
    arena.own(whole, RunId(0));
    arena.release(whole);
    let pieces: Vec<Extent> = (1..100).map(|len| arena.take(len, false).unwrap()).collect();
    pieces.iter().for_each(|&piece| arena.own(piece, RunId(9)));
    pieces.iter().step_by(2).for_each(|&piece| arena.release(piece));
    let cut = arena.take(40, false).unwrap();
    assert_eq!(cut.len, 40, "a longer extent is cut to size");
    arena.own(cut, RunId(9));
    arena.release(cut);
    pieces.iter().skip(1).step_by(2).for_each(|&piece| arena.release(piece));
    assert_eq!(arena.free_slots(), CHUNK_SLOTS);
    assert_eq!(arena.free_extents().count(), 1, "all free space is one extent again");
}

#[test]
fn a_table_takes_weak_hashes_and_refuses_without_room() {
    let mut table = Table::new(2);
    for hash in 0..2_000u64 {
        assert_eq!(
            table.entry(hash << 20, hash as u32, usize::MAX, |at| u64::from(at) == hash),
            Entry::Added
        );
    }
    let found = table.entry(7 << 20, 5_000, usize::MAX, |at| at == 7);
    assert_eq!((found, table.len()), (Entry::Found(7), 2_000));
    assert!(table.memory_bytes() <= 2_000 * 15, "{} bytes", table.memory_bytes());
    for hash in 2_000..4_000u64 {
        if table.entry(hash << 20, hash as u32, 0, |at| u64::from(at) == hash) == Entry::Full {
            assert!(hash < 3_900 && table.audit());
            return;
        }
    }
    panic!("a table without room took two thousand more");
}

#[test]
fn a_table_shrinks_when_emptied() {
    let mut table = Table::new(3);
    (0..5_000u64).for_each(|hash| table.add(hash, hash as u32));
    let full_bytes = table.memory_bytes();
    assert!((0..5_000u64).all(|hash| table.remove(hash, hash as u32)));
    assert!(!table.remove(1, 1), "gone is gone");
    assert_eq!(table.len(), 0);
    assert!(table.memory_bytes() * 8 < full_bytes && table.audit());
}

#[test]
fn holders_tell_tiers_apart() {
    let holder = Holder::new(InstanceId(65_535)).with(Tier::Ssd);
    assert_eq!((holder.instance(), holder.fastest()), (InstanceId(65_535), 2));
    let holder = holder.with(Tier::Hbm);
    assert!(holder.is_in(Tier::Hbm) && holder.is_in(Tier::Ssd) && !holder.is_in(Tier::Dram));
    assert_eq!(holder.fastest(), 0);
    let nowhere = holder.without(Tier::Hbm).without(Tier::Ssd);
    assert!(nowhere.is_nowhere() && nowhere.fastest() == 3);
}

#[test]
fn runs_hand_out_vacant_ids_again() {
    let mut runs = Runs::new();
    let run = |start| {
        let holder = Holder::new(InstanceId(1)).with(Tier::Hbm);
        Run::new(Extent { start, len: 4 }, &[7, 8], None, Holders::one(holder))
    };
    let ids: Vec<RunId> = (0..1_500).map(|start| runs.add(run(start))).collect();
    let grown_bytes = runs.memory_bytes();
    ids.iter().step_by(2).for_each(|&id| runs.remove(id));
    assert_eq!((runs.len(), runs.iter().count()), (750, 750));
    assert!(runs.live(ids[0]).is_none() && runs.live(ids[1]).is_some() && runs.live(RunId(9_999)).is_none());
    let again: BTreeSet<RunId> = (0..750).map(|start| runs.add(run(start))).collect();
    assert!(again.iter().all(|id| ids.contains(id)), "no new ids while vacant ones are left");
    assert_eq!(runs.memory_bytes(), grown_bytes);
}

#[test]
fn a_disputed_parent_stays_disputed() {
    let holder = Holder::new(InstanceId(1)).with(Tier::Hbm);
    let mut run = Run::new(Extent { start: 0, len: 1 }, &[7], Some(3), Holders::one(holder));
    run.check_parent(Some(3));
    assert!(run.is_below(3) && !run.is_below(0));
    run.check_parent(None);
    assert!(!run.is_below(3));
    run.check_parent(Some(3));
    assert!(!run.is_below(3), "whom to believe is not known");
    let mut root = Run::new(Extent { start: 0, len: 1 }, &[7], None, Holders::one(holder));
    root.check_parent(None);
    assert!(!root.is_below(0), "a root is below nothing, not below the hash 0");
}

#[test]
fn lists_by_instance_stay_short_while_runs_come_and_go() {
    let (mut holdings, mut runs) = (Holdings::default(), Runs::new());
    let one = InstanceId(3);
    let run =
        || Run::new(Extent { start: 0, len: 1 }, &[7], None, Holders::one(Holder::new(one).with(Tier::Hbm)));
    let kept = runs.add(run());
    holdings.link(one, kept, &runs);
    for _ in 0..10_000 {
        let id = runs.add(run());
        holdings.link(one, id, &runs);
        holdings.unlink(one);
        runs.remove(id);
    }
    assert_eq!(holdings.memory_bytes(), holdings.recounted_bytes());
    let list = holdings.take_runs(one);
    assert!(list.len() < 64 && list.contains(&kept), "{} names", list.len());
    assert_eq!(holdings.take_runs(InstanceId(99)), Vec::new());
    assert_eq!(holdings.memory_bytes(), holdings.recounted_bytes());
}

proptest! {
    #[test]
    fn any_use_of_a_table_matches_a_map(
        bits in 0u32..4,
        shift in 0u32..40,
        steps in proptest::collection::vec((0u64..300, any::<bool>()), 1..900),
    ) {
        // Bits of zero would ask for a shift by 64; one shard bit is the least.
        let (mut table, mut map) = (Table::new(bits + 1), BTreeMap::new());
        for (at, (key, put)) in (0u32..).zip(steps) {
            let hash = key << shift;
            if put {
                let known = map.clone();
                let is = |place| known.get(&hash) == Some(&place);
                match table.entry(hash, at, usize::MAX, is) {
                    Entry::Found(place) => prop_assert_eq!(map.get(&hash), Some(&place)),
                    Entry::Added => prop_assert_eq!(map.insert(hash, at), None),
                    Entry::Full => prop_assert!(false, "room was without end"),
                }
            } else {
                let place = map.remove(&hash);
                prop_assert_eq!(table.remove(hash, place.unwrap_or(1 << 30)), place.is_some());
            }
            prop_assert!(table.audit());
            prop_assert_eq!(table.len(), map.len());
        }
        for key in 0..300u64 {
            let hash = key << shift;
            let expected = map.get(&hash).copied();
            prop_assert_eq!(table.find(hash, |place| expected == Some(place)), expected);
        }
    }

    #[test]
    fn any_use_of_holders_matches_a_map(steps in proptest::collection::vec((0u32..20, 0u32..8), 1..200)) {
        let (mut holders, mut map) = (Holders::NOBODY, BTreeMap::new());
        for (instance, mask) in steps {
            let tiers = Tier::LOCAL.into_iter().filter(|tier| mask >> tier.index() & 1 == 1);
            let holder = tiers.fold(Holder::new(InstanceId(instance)), Holder::with);
            holders.set(holder);
            map.insert(instance, holder);
            map.retain(|_, holder| !holder.is_nowhere());
            prop_assert_eq!(holders.as_slice(), map.values().copied().collect::<Vec<_>>());
            prop_assert_eq!(holders.get(InstanceId(7)), map.get(&7).copied().unwrap_or(Holder::new(InstanceId(7))));
            prop_assert!(holders.heap_bytes() == 0 || map.len() > 3);
            prop_assert!(holders.clone() == holders);
        }
    }

    #[test]
    fn any_use_of_an_arena_gives_each_slot_to_one(
        seed in any::<u64>(),
        sizes in proptest::collection::vec(1usize..600, 1..200),
    ) {
        let (mut arena, mut taken, mut rng) = (Arena::new(), Vec::<Extent>::new(), Rng::new(seed));
        let mut peak = 0;
        for size in sizes {
            let extent = arena.take(size, true).unwrap();
            prop_assert!(extent.len >= 1 && extent.len as usize <= size);
            arena.own(extent, RunId(extent.start));
            taken.push(extent);
            while rng.chance_permille(450) && !taken.is_empty() {
                let gone = taken.swap_remove(rng.below(taken.len() as u64) as usize);
                prop_assert_eq!(arena.owner(gone.start), Some(RunId(gone.start)));
                arena.release(gone);
            }
            let used: usize = taken.iter().map(|extent| extent.len as usize).sum();
            peak = peak.max(used);
            prop_assert_eq!(arena.slots(), used + arena.free_slots());
            let mut all: Vec<Extent> = taken.iter().copied().chain(arena.free_extents()).collect();
            all.sort_unstable_by_key(|extent| extent.start);
            let joined = all.windows(2).all(|pair| pair[0].start + pair[0].len == pair[1].start);
            prop_assert!(joined, "extents overlap or leave a gap: {:?}", all);
        }
        prop_assert!(arena.slots() <= peak + peak / 4 + 2 * CHUNK_SLOTS, "{} for {peak}", arena.slots());
    }
}
