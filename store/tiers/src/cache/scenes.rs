//! Scenes: single promises of the cache, played out.

use super::testing::{BLOCK_BYTES, Bench, chain, content, owner};
use super::{BlockReadError, Hold, HoldRefusal, Misuse, Notice};
use crate::file::FileTier;
use baton_store::{Offload, StoreStats};
use baton_types::{BlockKey, CacheChange, Tier};

const A: [u64; 3] = [1, 2, 3];

fn through() -> Bench {
    Bench::new([8, 16, 32], Offload::WriteThrough)
}

fn ready(number: u64, readable_blocks: u32) -> Notice {
    Notice::Ready { owner: owner(number), readable_blocks }
}

fn readies(notices: &[Notice]) -> Vec<&Notice> {
    notices.iter().filter(|notice| matches!(notice, Notice::Ready { .. })).collect()
}

#[test]
fn a_second_turn_computes_only_what_is_new() {
    let mut bench = through();
    assert_eq!(bench.serve(1, &A), 0);
    assert_eq!(bench.serve(2, &[1, 2, 3, 4]), 3);
    assert_eq!(bench.serve(3, &[1, 2, 9]), 2);
}

#[test]
fn a_hold_addresses_chain_and_room() {
    let mut bench = through();
    bench.serve(1, &[1, 2]);
    let Hold { slots, readable_blocks, waiting } = bench.open(2, &A, 2);
    assert_eq!((slots.len(), readable_blocks, waiting), (5, 2, false));
    let more = bench.cache.grow(owner(2), 3).unwrap();
    let distinct: std::collections::BTreeSet<_> = slots.iter().chain(&more).collect();
    assert_eq!(distinct.len(), 8, "the whole pool, each slot once");
    let none_left = HoldRefusal::NoRoom { needed_blocks: 1, available_blocks: 0 };
    assert_eq!(bench.cache.grow(owner(2), 1), Err(none_left));
    assert_eq!(bench.cache.open(owner(3), &chain(&[1, 2, 7]), 0), Err(none_left));
    assert_eq!(bench.cache.open(owner(2), &chain(&A), 0), Err(HoldRefusal::AlreadyOpen));
    assert_eq!(bench.cache.grow(owner(3), 1), Err(HoldRefusal::NotOpen));
    assert!(bench.cache.close(owner(2)) && !bench.cache.close(owner(2)));
    bench.quiet();
    assert_eq!(bench.hits(&A), (2, 0, 0), "what was not sealed is gone");
}

#[test]
fn evicted_blocks_come_back_from_host_memory() {
    let mut bench = Bench::new([8, 16, 0], Offload::WriteThrough);
    bench.serve(1, &A);
    bench.displace();
    assert_eq!(bench.hits(&A), (0, 3, 0));
    let hold = bench.open(2, &A, 0);
    assert!(hold.waiting && hold.readable_blocks == 0);
    assert_eq!(readies(&bench.quiet()), [&ready(2, 3)]);
    let slots: Vec<_> = chain(&A).iter().map(|&key| bench.cache.address(key).unwrap()).collect();
    assert_eq!(slots, hold.slots);
}

/// Names go over the wire short. A cache that holds a block knows its whole name and its parent.
#[test]
fn blocks_below_the_pool_are_known_by_short_names() {
    let mut bench = Bench::new([8, 16, 0], Offload::WriteThrough);
    bench.serve(1, &A);
    bench.displace();
    assert_eq!(bench.hits(&A), (0, 3, 0));
    let (whole, unknown) = (chain(&A), BlockKey(999));
    let short = |key: &BlockKey| BlockKey(u128::from(key.short().0));
    let asked: Vec<BlockKey> = whole.iter().map(short).chain([unknown]).collect();
    assert_eq!(bench.cache.full_keys(&asked), whole, "as far as they are known");
    assert_eq!(bench.cache.ancestors(whole[2]), whole[..2]);
    assert_eq!((bench.cache.ancestors(whole[0]), bench.cache.ancestors(unknown)), (vec![], vec![]));
    assert_eq!(bench.cache.read_for_peer(owner(9), &whole[1..]), Ok(0), "a reader starts at the root");
    assert!(bench.cache.close(owner(9)));
    assert_eq!(bench.cache.read_for_peer(owner(9), &whole), Ok(3));
    assert!(bench.cache.close(owner(9)));
}

#[test]
fn evicted_blocks_come_back_from_flash_without_host_memory_between() {
    let mut bench = Bench::new([8, 0, 16], Offload::WriteThrough);
    bench.serve(1, &A);
    bench.displace();
    assert_eq!(bench.hits(&A), (0, 0, 3));
    assert_eq!(bench.serve(2, &A), 3);
    assert_eq!(bench.cache.stats().store.tiers[2].onboarded_blocks, 3);
}

#[test]
fn copies_are_made_ahead_of_eviction() {
    let mut bench = Bench::new([8, 16, 0], Offload::OnEvict);
    for number in 0..8 {
        bench.serve(number, &[number]);
    }
    for number in 10..15 {
        bench.serve(number, &[number]);
    }
    assert!((0..8).all(|number| bench.serve(20 + number, &[number]) == 1), "none was lost");
    assert!(bench.cache.stats().store.tiers[1].offloaded_blocks >= 5);
}

#[test]
fn a_damaged_copy_is_computed_again_and_its_neighbours_live() {
    let mut bench = Bench::new([8, 16, 0], Offload::WriteThrough);
    bench.serve(1, &A);
    for lost in 0..3 {
        bench.displace();
        assert_eq!(bench.hits(&A), (0, 3, 0), "new copies were made");
        bench.cache.dram.damage(chain(&A)[lost]);
        bench.open(2, &A, 0);
        assert_eq!(readies(&bench.quiet()), [&ready(2, lost as u32)]);
        let there: Vec<bool> = chain(&A).iter().map(|&key| bench.is_ready(key, Tier::Dram)).collect();
        assert_eq!(there, [0, 1, 2].map(|at| at != lost), "only the damaged one was dropped");
        let hold: Vec<_> = chain(&A).iter().map(|&key| (bench.cache.address(key).unwrap(), key)).collect();
        hold.into_iter().for_each(|(slot, key)| bench.fill(slot, key));
        bench.cache.seal(owner(2), 3, &mut bench.memory).unwrap();
        bench.cache.close(owner(2));
        bench.quiet();
        assert_eq!(bench.cache.stats().integrity_rejects, lost as u64 + 1);
    }
}

#[test]
fn a_damaged_copy_in_host_memory_is_replaced_by_the_one_on_flash() {
    let mut bench = through();
    bench.serve(1, &A);
    bench.displace();
    assert_eq!(bench.hits(&A), (0, 3, 0));
    assert!(chain(&A).iter().all(|&key| bench.is_ready(key, Tier::Ssd)));
    bench.damage_dram(0);
    assert_eq!(bench.serve(2, &A), 3);
    assert_eq!(bench.cache.stats().integrity_rejects, 1);
}

#[test]
fn a_disk_that_fails_or_lies_costs_the_cache_and_nothing_else() {
    type Break = fn(&mut crate::disk::testing::SickState);
    let breaks: [(Break, u64); 3] = [
        (|state| state.fail_reads = 1, 0),
        (|state| state.flip_reads = 1, 1),
        (|state| state.bytes.truncate(4_100), 0),
    ];
    for (break_it, rejects) in breaks {
        let mut bench = Bench::new([8, 0, 16], Offload::WriteThrough);
        bench.serve(1, &A);
        bench.displace();
        break_it(&mut bench.disk.state.lock().unwrap());
        assert!(bench.serve(2, &A) < 3, "those before the bad one, at most");
        assert_eq!(bench.cache.stats().integrity_rejects, rejects);
        assert_eq!(bench.serve(3, &A), 3, "computed and cached again");
    }
}

#[test]
fn a_disk_that_fails_its_trial_is_not_used_and_said_to_be_off() {
    let disk = std::sync::Arc::new(crate::disk::testing::FailingDisk::default());
    disk.state.lock().unwrap().lose_all_writes = true;
    let healthy = Bench::new([8, 0, 16], Offload::WriteThrough);
    assert!(healthy.cache.flash().speed.is_some() && !healthy.cache.flash().is_off);
    let mut bench = Bench::over(healthy.cache.config().store.clone(), disk);
    let flash = bench.cache.flash();
    assert!(flash.is_off && flash.words.contains("off, for it failed its trial"), "{flash:?}");
    bench.serve(1, &A);
    assert_eq!(bench.serve(2, &A), 3, "HBM goes on");
    bench.displace();
    assert_eq!(bench.hits(&A), (0, 0, 0));
}

#[test]
fn what_flash_kept_of_whole_chains_comes_back_and_the_rest_makes_room() {
    let mut bench = Bench::new([8, 0, 16], Offload::WriteThrough);
    bench.serve(1, &A);
    bench.serve(2, &[1, 2, 9]);
    bench.serve(3, &[7, 8]);
    bench.restart();
    let told = bench.quiet();
    assert!(
        told.iter()
            .all(|notice| matches!(notice, Notice::Changed(CacheChange::Stored { tier: Tier::Ssd, .. })))
    );
    assert_eq!(
        (bench.hits(&A), bench.hits(&[1, 2, 9]), bench.hits(&[7, 8])),
        ((0, 0, 3), (0, 0, 3), (0, 0, 2))
    );
    assert_eq!(bench.serve(1, &A), 3);
    let lost = chain(&A)[1].short();
    assert!(bench.cache.file.as_mut().is_some_and(|file| crate::tier::Tier::remove(file, lost)));
    bench.restart();
    let flash = bench.cache.flash();
    assert_eq!((flash.recovered_blocks, flash.dropped_blocks), (3, 2), "{flash:?}");
    bench.quiet();
    assert_eq!((bench.hits(&A), bench.hits(&[7, 8])), ((0, 0, 1), (0, 0, 2)));
    bench.restart();
    assert_eq!(bench.cache.flash().dropped_blocks, 0, "they were removed for good");
}

#[test]
fn a_full_disk_fails_the_copy_and_the_cache_goes_on() {
    let mut bench = Bench::new([8, 0, 16], Offload::WriteThrough);
    bench.disk.state.lock().unwrap().fail_writes = 3;
    bench.serve(1, &A);
    assert_eq!(bench.hits(&A), (3, 0, 0));
    let stats = bench.cache.stats();
    assert_eq!(stats.store.tiers[2].offload_failed_blocks, 3);
    assert_eq!(stats.store.tiers[2].used_blocks + stats.store.tiers[2].reserved_blocks, 0);
    bench.serve(2, &A);
    bench.displace();
    assert_eq!(bench.hits(&A), (0, 0, 3), "the next rest tries again");
}

#[test]
fn a_lost_write_is_found_out_when_it_is_read() {
    let mut bench = Bench::new([8, 0, 16], Offload::WriteThrough);
    bench.disk.state.lock().unwrap().lose_writes = 1;
    bench.serve(1, &[1]);
    bench.displace();
    assert_eq!(bench.serve(2, &[1]), 0);
}

#[test]
fn a_dead_disk_thread_is_a_failing_disk() {
    let mut bench = Bench::new([8, 0, 16], Offload::WriteThrough);
    bench.serve(1, &A);
    bench.displace();
    bench.disk.state.lock().unwrap().panic_on_read = true;
    assert_eq!(bench.serve(2, &A), 0);
    assert_eq!(bench.serve(3, &[7]), 0);
    assert_eq!(bench.serve(4, &[1, 2, 3, 4]), 3, "HBM goes on");
}

#[test]
fn who_waits_for_another_owner_is_told_when_it_seals() {
    let mut bench = through();
    let first = bench.open(1, &A, 0);
    let second = bench.open(2, &[1, 2, 9], 0);
    assert!(!first.waiting && second.waiting);
    assert_eq!(first.slots[..2], second.slots[..2]);
    assert_eq!(bench.cache.seal(owner(2), 3, &mut bench.memory), Err(Misuse::NotYours { position: 0 }));
    assert_eq!(readies(&bench.quiet()), Vec::<&Notice>::new());
    for (&key, &slot) in chain(&A).iter().zip(&first.slots) {
        bench.fill(slot, key);
    }
    bench.cache.seal(owner(1), 1, &mut bench.memory).unwrap();
    assert_eq!(readies(&bench.quiet()), Vec::<&Notice>::new(), "one of two");
    bench.cache.seal(owner(1), 2, &mut bench.memory).unwrap();
    assert_eq!(readies(&bench.quiet()), [&ready(2, 2)]);
    assert_eq!(bench.cache.seal(owner(7), 1, &mut bench.memory), Err(Misuse::NotOpen));
}

#[test]
fn who_inherits_is_told_from_where_to_compute() {
    let mut bench = through();
    let first = bench.open(1, &A, 0);
    bench.open(2, &A, 0);
    bench.fill(first.slots[0], chain(&A)[0]);
    bench.cache.seal(owner(1), 1, &mut bench.memory).unwrap();
    bench.cache.close(owner(1));
    assert!(bench.cache.is_busy());
    assert_eq!(readies(&bench.quiet()), [&ready(2, 1)]);
}

/// The second owner's load ends first and the first owner's fails: nothing readable may lie
/// beyond what the second then has to compute.
#[test]
fn a_load_does_not_count_before_what_precedes_it() {
    let mut bench = Bench::new([8, 0, 16], Offload::WriteThrough);
    bench.serve(1, &A);
    bench.displace();
    bench.open(2, &[1], 0);
    bench.disk.state.lock().unwrap().fail_reads = 1;
    bench.cache.poll(&mut bench.memory);
    bench.open(3, &A, 0);
    let notices = bench.quiet();
    assert_eq!(readies(&notices), [&ready(2, 0)], "3 waits for 2 to compute");
    assert_eq!(bench.hits(&A).0, 0);
    bench.cache.close(owner(2));
    assert_eq!(readies(&bench.quiet()), [&ready(3, 0)]);
    assert!(chain(&A).iter().all(|&key| !bench.is_ready(key, Tier::Hbm)));
}

#[test]
fn an_owner_that_goes_during_its_load_leaves_it_to_the_next() {
    let mut bench = Bench::new([8, 0, 16], Offload::WriteThrough);
    bench.serve(1, &A);
    bench.displace();
    bench.open(2, &A, 0);
    bench.cache.poll(&mut bench.memory);
    bench.open(3, &[1, 2], 0);
    bench.cache.close(owner(2));
    assert_eq!(readies(&bench.quiet()), [&ready(3, 2)]);
}

#[test]
fn generated_blocks_are_adopted_in_place() {
    let mut bench = through();
    bench.serve(1, &A);
    let before = bench.cache.stats().store;
    let hold = bench.open(2, &A, 4);
    let whole = chain(&[1, 2, 3, 4, 5]);
    bench.fill(hold.slots[3], whole[3]);
    bench.fill(hold.slots[4], whole[4]);
    let adopted = bench.cache.adopt(owner(2), &whole, &hold.slots[..5], &mut bench.memory);
    assert_eq!(adopted, Ok(2));
    let notices = bench.quiet();
    let stored = CacheChange::Stored {
        parent: Some(whole[2].short()),
        hashes: vec![whole[3].short(), whole[4].short()],
        tier: Tier::Hbm,
    };
    assert!(notices.contains(&Notice::Changed(stored)), "{notices:?}");
    assert_eq!(bench.cache.address(whole[4]), Some(hold.slots[4]), "nothing was copied");
    let stats = bench.cache.stats();
    let StoreStats { opened, missed_blocks, tiers, .. } = stats.store;
    assert_eq!((opened, missed_blocks), (before.opened + 1, before.missed_blocks), "one request");
    assert_eq!(tiers[0].hit_blocks, before.tiers[0].hit_blocks + 3);
    assert_eq!(tiers[0].reserved_blocks, 0);
    assert_eq!(bench.serve(3, &[1, 2, 3, 4, 5, 6]), 5, "the next turn finds them");
}

#[test]
fn blocks_known_already_are_not_adopted_twice() {
    let mut bench = through();
    bench.serve(1, &[1, 2, 3]);
    let hold = bench.open(2, &[1, 2], 1);
    let whole = chain(&A);
    bench.fill(hold.slots[2], whole[2]);
    assert_eq!(bench.cache.adopt(owner(2), &whole, &hold.slots, &mut bench.memory), Ok(1));
    bench.quiet();
    assert_ne!(bench.cache.address(whole[2]), Some(hold.slots[2]));
    let filler = bench.open(3, &[1, 2, 3, 4], 0);
    let hold = bench.open(4, &[1, 2, 3], 1);
    let whole = chain(&[1, 2, 3, 4]);
    let adopted = bench.cache.adopt(owner(4), &whole, &hold.slots, &mut bench.memory);
    assert_eq!(adopted, Ok(0), "another owner fills it");
    assert_eq!(bench.cache.address(whole[3]), Some(filler.slots[3]));
}

#[test]
fn only_what_is_held_and_sealed_can_be_adopted() {
    let mut bench = through();
    let memory = &mut bench.memory;
    assert_eq!(bench.cache.adopt(owner(1), &[], &[], memory), Err(Misuse::NotOpen));
    let whole = chain(&A);
    let hold = bench.cache.open(owner(1), &whole[..2], 1).unwrap();
    let unsealed = bench.cache.adopt(owner(1), &whole, &hold.slots, memory);
    assert_eq!(unsealed, Err(Misuse::NotYours { position: 0 }));
    bench.serve(2, &A[..2]);
    for slots in [[0, 1, 7], [1, 0, 2]] {
        bench.open(3, &A[..2], 1);
        let adopted = bench.cache.adopt(owner(3), &whole, &slots, &mut bench.memory);
        assert_eq!(adopted, Err(Misuse::WrongSlots), "{slots:?}");
        bench.quiet();
    }
    assert_eq!(bench.cache.stats().store.owners, 0);
}

#[test]
fn peers_read_from_every_tier() {
    let mut bench = through();
    bench.serve(1, &A);
    bench.displace();
    bench.serve(2, &A[..1]);
    assert_eq!(bench.cache.read_for_peer(owner(3), &chain(&[1, 2, 3, 4])), Ok(3));
    assert_eq!(bench.cache.read_for_peer(owner(3), &[]), Err(HoldRefusal::AlreadyOpen));
    let mut out = [0; BLOCK_BYTES];
    for key in chain(&A) {
        let checksum = bench.cache.read_block(key, &bench.memory, &mut out).unwrap();
        assert_eq!((checksum, out), (crate::block_checksum(key, &content(key)), content(key)));
    }
    assert_eq!(bench.cache.read_block(BlockKey(5), &bench.memory, &mut out), Err(BlockReadError::Absent));
    let short = bench.cache.read_block(BlockKey(5), &bench.memory, &mut [0; 3]);
    assert_eq!(short, Err(BlockReadError::WrongLength));
    bench.damage_dram(0);
    bench.damage_dram(1);
    bench.damage_dram(2);
    for key in chain(&A) {
        bench.cache.read_block(key, &bench.memory, &mut out).expect("flash has it");
        assert_eq!(out, content(key));
    }
    bench.disk.state.lock().unwrap().fail_reads = 1;
    let key = chain(&A)[2];
    assert_eq!(bench.cache.read_block(key, &bench.memory, &mut out), Err(BlockReadError::Unreadable));
    assert!(bench.cache.close(owner(3)));
    bench.audit();
}

#[test]
fn contradictory_chains_are_refused() {
    let mut bench = through();
    bench.serve(1, &A);
    let a = chain(&A);
    let twin = BlockKey(a[0].0 ^ 1 << 100);
    let stranger = BlockKey(77);
    let refused = |bench: &mut Bench, chain: &[BlockKey]| match bench.cache.open(owner(2), chain, 0) {
        Err(HoldRefusal::Misfit { position }) => position,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(&mut bench, &[a[1]]), 0);
    assert_eq!(refused(&mut bench, &[stranger, a[0]]), 1);
    assert_eq!(refused(&mut bench, &[stranger, BlockKey(78), stranger]), 2);
    assert_eq!(refused(&mut bench, &[twin]), 0, "the same 64-bit name");
    bench.audit();
}

#[test]
fn clear_forgets_all_while_transfers_are_under_way() {
    let mut bench = Bench::new([8, 0, 16], Offload::WriteThrough);
    for round in 0..20 {
        let hold = bench.open(1, &A, 1);
        for (&key, &slot) in chain(&A).iter().zip(&hold.slots) {
            bench.fill(slot, key);
        }
        bench.cache.seal(owner(1), 3, &mut bench.memory).unwrap();
        bench.cache.clear();
        assert_eq!(bench.hits(&A), (0, 0, 0), "round {round}");
        bench.audit();
    }
    assert!(bench.quiet().contains(&Notice::Changed(CacheChange::Cleared)));
    bench.serve(2, &A);
    bench.displace();
    assert_eq!(bench.serve(3, &A), 3);
}

#[test]
fn what_an_earlier_hold_had_under_way_does_not_count_for_the_next() {
    let mut bench = Bench::new([8, 0, 16], Offload::WriteThrough);
    let b = [7, 8];
    bench.serve(1, &A);
    bench.serve(2, &b);
    bench.displace();
    bench.disk.state.lock().unwrap().is_held = true;
    bench.open(3, &A, 0);
    bench.cache.poll(&mut bench.memory);
    bench.cache.close(owner(3));
    bench.open(3, &b, 0);
    bench.cache.poll(&mut bench.memory);
    assert_eq!(bench.cache.file.as_ref().map(FileTier::jobs), Some(5));
    bench.disk.state.lock().unwrap().is_held = false;
    assert_eq!(readies(&bench.quiet()), [&ready(3, 2)]);
    assert_eq!(bench.hits(&A), (0, 0, 3));
}

#[test]
fn copies_called_off_while_they_wait_do_not_fail_the_others() {
    let mut bench = Bench::new([80, 0, 128], Offload::WriteThrough);
    let path: Vec<u64> = (0..80).collect();
    let hold = bench.open(1, &path, 0);
    for (&key, &slot) in chain(&path).iter().zip(&hold.slots) {
        bench.fill(slot, key);
    }
    bench.disk.state.lock().unwrap().is_held = true;
    bench.cache.seal(owner(1), 80, &mut bench.memory).unwrap();
    assert_eq!(bench.cache.file.as_ref().map(FileTier::jobs), Some(64), "as many as may be under way");
    bench.cache.close(owner(1));
    bench.open(2, &[], 5);
    bench.disk.state.lock().unwrap().is_held = false;
    bench.quiet();
    bench.cache.close(owner(2));
    bench.displace();
    assert_eq!(bench.hits(&path), (0, 0, 75));
}

#[test]
fn a_copy_whose_source_went_under_way_is_not_believed() {
    let mut bench = Bench::new([8, 0, 16], Offload::WriteThrough);
    let hold = bench.open(1, &A, 0);
    for (&key, &slot) in chain(&A).iter().zip(&hold.slots) {
        bench.fill(slot, key);
    }
    bench.disk.state.lock().unwrap().is_held = true;
    bench.cache.seal(owner(1), 3, &mut bench.memory).unwrap();
    bench.cache.close(owner(1));
    bench.open(2, &[], 6);
    assert_eq!(bench.hits(&A), (2, 0, 0), "one was evicted");
    bench.disk.state.lock().unwrap().is_held = false;
    bench.quiet();
    assert!(!bench.is_ready(chain(&A)[2], Tier::Ssd) && bench.is_ready(chain(&A)[1], Tier::Ssd));
}
