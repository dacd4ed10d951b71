//! Objects of several parts: found when all are there, evicted together.

use super::tiers::{over_parts, read, settle};
use super::{content, key, pass, small, with};
use baton_objects::{
    AdmissionRule, LowerConfig, ObjectStore, PutOptions, Refusal, SsdConfig, StoreConfig, stem,
};
use baton_types::Rng;

fn of_parts(rule: &str, mib: u64) -> ObjectStore {
    spread(rule, mib, 2)
}

fn spread(rule: &str, mib: u64, shards: usize) -> ObjectStore {
    let config = StoreConfig {
        capacity_bytes: mib << 20,
        value_max_bytes: 1 << 20,
        shards,
        room_wait_us: 0,
        parts: Some(rule.parse().unwrap()),
        ..StoreConfig::default()
    };
    with(&config).0
}

fn rank(rank: u32, block: u64) -> String {
    format!("llama@4@{rank}@{block:x}@bfloat16")
}

fn put(store: &ObjectStore, name: &str, bytes: usize) {
    store.put(key(name), &content(7, bytes), PutOptions::REPLACE).unwrap();
}

fn is_found(store: &ObjectStore, name: &str) -> bool {
    let there = store.exists(key(name));
    assert_eq!(store.get(key(name)).is_some(), there);
    assert_eq!(store.stat(key(name)).is_some(), there);
    assert_eq!(store.get_into(key(name), &mut []).unwrap().is_some(), there);
    assert_eq!(store.verify(key(name)).is_ok(), there);
    there
}

#[test]
fn no_part_is_found_before_all_are_there() {
    let store = of_parts("world", 16);
    for at in 0..4 {
        assert!((0..4).all(|other| !is_found(&store, &rank(other, 1))), "{at} of 4");
        put(&store, &rank(at, 1), 1_000);
    }
    assert!((0..4).all(|at| is_found(&store, &rank(at, 1))));
    assert!(store.stats().incomplete > 0);
    put(&store, &rank(3, 2), 1_000);
    put(&store, "llama@1@0@1@bfloat16", 1_000);
    let listed = || {
        let mut keys: Vec<_> = store.list(0, 10_000).0.into_iter().map(|listed| listed.key).collect();
        keys.sort_unstable();
        keys.into_iter().map(|key| String::from_utf8(key).unwrap()).collect::<Vec<_>>()
    };
    let mut readable: Vec<String> = (0..4).map(|at| rank(at, 1)).collect();
    readable.insert(0, "llama@1@0@1@bfloat16".into());
    assert_eq!(listed(), readable);
    store.remove(key(&rank(2, 1))).unwrap();
    assert!((0..4).all(|at| !is_found(&store, &rank(at, 1))));
    assert_eq!(store.put(key(&rank(0, 1)), b"other", PutOptions::default()), Err(Refusal::Exists));
    put(&store, &rank(2, 1), 500);
    assert!((0..4).all(|at| is_found(&store, &rank(at, 1))), "whole again");
    store.check();
}

#[test]
fn a_part_that_ends_takes_the_object_out_of_sight() {
    let config = StoreConfig { parts: Some("tp_rank=2".parse().unwrap()), ..StoreConfig::default() };
    let (store, hand) = with(&config);
    put(&store, "m@tp_rank:0@ab", 10);
    let ttl = PutOptions { ttl_us: Some(1_000), ..PutOptions::REPLACE };
    store.put(key("m@tp_rank:1@ab"), b"ends", ttl).unwrap();
    assert!(is_found(&store, "m@tp_rank:0@ab"));
    pass(&hand, 1_000);
    assert!(!is_found(&store, "m@tp_rank:0@ab"));
    store.check();
}

#[test]
fn without_a_rule_each_key_is_an_object() {
    let (store, _) = small(8);
    put(&store, &rank(0, 1), 1_000);
    assert!(is_found(&store, &rank(0, 1)));
}

#[test]
fn what_is_left_after_evictions_is_whole() {
    // In one shard, so that nothing hangs on the hash, which is another in each process.
    let store = spread("world", 32, 1);
    let mut rng = Rng::new(3);
    for block in 0..600 {
        // Parts of two classes.
        for at in 0..4 {
            put(&store, &rank(at, block), 60_000 + usize::try_from(rng.below(10_000)).unwrap());
        }
        if rng.chance_permille(300) {
            let _ = store.get(key(&rank(1, rng.below(block + 1))));
        }
        if block % 50 == 0 {
            store.check();
        }
    }
    let stats = store.stats();
    assert!(stats.evicted > 1_000, "{stats:?}");
    let whole = (0..600).filter(|block| (0..4).all(|at| is_found(&store, &rank(at, *block)))).count();
    // A part put while an earlier part is being evicted is useless until it is evicted too. The test thus finds 60 or
    // more whole objects of the 129 that would fit.
    assert!(whole > 60 && whole as u64 * 4 + 8 >= stats.keys, "{whole} objects in {} keys", stats.keys);
    store.check();
}

#[test]
fn memory_is_used_as_well_as_without_parts() {
    let [parts, alone] = [Some("world".parse().unwrap()), None].map(|parts| {
        let config = StoreConfig {
            capacity_bytes: 64 << 20,
            value_max_bytes: 1 << 20,
            shards: 2,
            parts,
            ..StoreConfig::default()
        };
        let (store, _) = with(&config);
        for block in 0..1_000 {
            (0..4).for_each(|at| put(&store, &rank(at, block), 65_000));
        }
        let whole = (0..1_000).filter(|block| (0..4).all(|at| is_found(&store, &rank(at, *block)))).count();
        store.check();
        whole
    });
    assert!(parts > 220 && parts + 10 > alone, "{parts} objects, {alone} of keys by themselves");
}

#[test]
fn eviction_leaves_an_object_of_which_a_part_is_read_or_pinned() {
    let store = of_parts("world", 8);
    (0..2).for_each(|block| (0..4).for_each(|at| put(&store, &rank(at, block), 100_000)));
    let reading = store.get(key(&rank(2, 0))).unwrap();
    store.pin(key(&rank(1, 1))).unwrap();
    for block in 2..200 {
        (0..4).for_each(|at| put(&store, &rank(at, block), 100_000));
    }
    assert!((0..4).all(|at| is_found(&store, &rank(at, 0)) && is_found(&store, &rank(at, 1))));
    assert!(reading.to_vec().unwrap() == content(7, 100_000));
    drop(reading);
    store.unpin(key(&rank(1, 1))).unwrap();
    for block in 200..1_500 {
        (0..4).for_each(|at| put(&store, &rank(at, block), 100_000));
    }
    assert!((0..4).all(|at| !is_found(&store, &rank(at, 0)) && !is_found(&store, &rank(at, 1))));
    store.check();
}

#[test]
fn full_of_held_objects_a_put_is_refused_and_nothing_breaks() {
    let store = of_parts("world", 16);
    let mut block = 0;
    let refusal = 'full: loop {
        for at in 0..4 {
            if let Err(refusal) = store.put(key(&rank(at, block)), &content(1, 100_000), PutOptions::REPLACE)
            {
                break 'full refusal;
            }
            if at == 0 {
                store.pin(key(&rank(0, block))).unwrap();
            }
        }
        block += 1;
    };
    assert!(matches!(refusal, Refusal::Full { .. }), "{refusal:?}");
    assert!(
        block > 10 && (0..block).all(|block| is_found(&store, &rank(3, block))),
        "one pin holds all parts"
    );
    store.check();
}

#[test]
fn parts_below_count_and_one_that_is_missing_there_hides_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    let open = || {
        let ssd =
            SsdConfig { admit: AdmissionRule::First, ..SsdConfig::new(dir.path().to_owned(), 64 << 20) };
        let lower = LowerConfig { ssd: Some(ssd), ..LowerConfig::default() };
        over_parts(lower, Some("world".parse().unwrap())).0
    };
    let store = open();
    for block in 0..40 {
        (0..4).for_each(|at| put(&store, &rank(at, block), 100_000));
        settle(&store);
    }
    let is_whole = |store: &ObjectStore, block| {
        (0..4).all(|at| read(store, &rank(at, block)) == Some(content(7, 100_000)))
    };
    assert!((0..40).all(|block| is_whole(&store, block)), "{:?}", store.lower_stats());
    store.remove(key(&rank(1, 3))).unwrap();
    let is_gone = |store: &ObjectStore| {
        (0..4).all(|at| {
            let name = rank(at, 3);
            !store.exists(key(&name)) && !store.is_below(key(&name)) && read(store, &name).is_none()
        })
    };
    assert!(is_gone(&store));
    store.check();
    drop(store);
    let store = open();
    assert!(is_gone(&store), "after a restart too");
    assert!((4..40).all(|block| is_whole(&store, block)));
    put(&store, &rank(1, 3), 100_000);
    assert!(is_whole(&store, 3), "one part in memory, three below");
    store.check();
}

#[test]
fn histories_of_parts_agree_with_a_naive_model() {
    for seed in 0..6 {
        let mut rng = Rng::fork(seed, 5);
        // Large enough that nothing is evicted: so the model knows what is there.
        let store = of_parts("tp_rank=3,pp_rank=2", 64);
        let mut there = std::collections::BTreeSet::new();
        let name = |block: u64, part: u64| format!("m@tp_rank:{}@pp_rank:{}@{block}", part % 3, part / 3);
        for _ in 0..4_000 {
            let (block, part) = (rng.below(20), rng.below(6));
            match rng.below(10) {
                0..6 => {
                    put(&store, &name(block, part), 100);
                    there.insert((block, part));
                }
                6 => {
                    let removed = store.remove(key(&name(block, part)));
                    assert_eq!(removed.is_ok(), there.remove(&(block, part)));
                }
                _ => {
                    let whole = (0..6).all(|part| there.contains(&(block, part)));
                    assert_eq!(is_found(&store, &name(block, part)), whole);
                }
            }
        }
        store.check();
    }
}

#[test]
fn a_stem_is_one_for_all_parts() {
    let stems: std::collections::BTreeSet<_> = (0..4).map(|at| stem(rank(at, 9).as_bytes())).collect();
    assert_eq!(stems.len(), 1);
}
