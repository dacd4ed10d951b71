//! Behaviour that every tier must have, tested on each.

use baton_tiers::{Dram, FileOptions, FileTier, IoChoice, Tier, TierError, block_checksum};
use baton_types::BlockKey;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

const BLOCK_BYTES: usize = 5_000;
const CAPACITY_BLOCKS: u32 = 4;

fn file(dir: Option<&Path>, io: IoChoice, capacity_blocks: u32) -> FileTier {
    let options = FileOptions { dir, capacity_blocks, block_bytes: BLOCK_BYTES, fingerprint: 1, io };
    FileTier::open(&options).expect("the file is free")
}

/// The file in its kinds: io_uring or threads, for good or for now.
fn tiers(dir: &Path) -> [(&'static str, Box<dyn Tier>); 4] {
    let dir = dir.join(format!("{:?}", Instant::now()));
    [
        ("dram", Box::new(Dram::new(CAPACITY_BLOCKS, BLOCK_BYTES))),
        ("file", Box::new(file(None, IoChoice::Auto, CAPACITY_BLOCKS))),
        ("threads", Box::new(file(None, IoChoice::Threads, CAPACITY_BLOCKS))),
        ("lasting", Box::new(file(Some(&dir), IoChoice::Auto, CAPACITY_BLOCKS))),
    ]
}

fn block(fill: u8) -> Vec<u8> {
    (0..BLOCK_BYTES).map(|at| fill ^ (at % 251) as u8).collect()
}

fn get(tier: &mut dyn Tier, key: BlockKey) -> Result<Vec<u8>, TierError> {
    let mut out = vec![0xAA; BLOCK_BYTES];
    let checksum = tier.get(key, &mut out)?;
    assert_eq!(checksum, block_checksum(key, &out));
    Ok(out)
}

#[test]
fn what_is_put_is_what_is_got() {
    let dir = tempfile::tempdir().unwrap();
    for (name, mut tier) in tiers(dir.path()) {
        assert_eq!((tier.capacity_blocks(), tier.block_bytes(), tier.len_blocks()), (4, BLOCK_BYTES, 0));
        tier.put(BlockKey(1), &block(1)).unwrap();
        tier.put(BlockKey(2), &block(2)).unwrap();
        tier.put(BlockKey(1), &block(3)).unwrap();
        assert_eq!(tier.len_blocks(), 2, "{name}");
        assert_eq!(get(&mut *tier, BlockKey(1)).unwrap(), block(3), "{name}: the last put counts");
        assert_eq!(get(&mut *tier, BlockKey(2)).unwrap(), block(2), "{name}");
        assert!(tier.remove(BlockKey(1).short()) && !tier.remove(BlockKey(1).short()), "{name}");
        assert!(matches!(get(&mut *tier, BlockKey(1)), Err(TierError::Absent)), "{name}");
    }
}

#[test]
fn a_full_tier_says_so_and_keeps_what_it_has() {
    let dir = tempfile::tempdir().unwrap();
    for (name, mut tier) in tiers(dir.path()) {
        for key in 0..4 {
            tier.put(BlockKey(key), &block(key as u8)).unwrap();
        }
        assert!(matches!(tier.put(BlockKey(9), &block(9)), Err(TierError::Full)), "{name}");
        tier.put(BlockKey(3), &block(8)).expect("in place of the older copy");
        tier.remove(BlockKey(0).short());
        tier.put(BlockKey(9), &block(9)).unwrap();
        for (key, fill) in [(1, 1), (2, 2), (3, 8), (9, 9)] {
            assert_eq!(get(&mut *tier, BlockKey(key)).unwrap(), block(fill), "{name}");
        }
    }
}

#[test]
fn wrong_sizes_and_shared_names_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (name, mut tier) in tiers(dir.path()) {
        assert!(matches!(tier.put(BlockKey(1), &[0; 7]), Err(TierError::WrongLength { .. })), "{name}");
        tier.put(BlockKey(1), &block(1)).unwrap();
        assert!(matches!(tier.get(BlockKey(1), &mut [0; 7]), Err(TierError::WrongLength { .. })), "{name}");
        let twin = BlockKey(1 | 1 << 64);
        assert!(matches!(tier.put(twin, &block(2)), Err(TierError::SameShortName)), "{name}");
        assert!(matches!(get(&mut *tier, twin), Err(TierError::Absent)), "{name}");
        assert_eq!(get(&mut *tier, BlockKey(1)).unwrap(), block(1), "{name}");
    }
}

#[test]
fn a_tier_of_no_places_is_always_full() {
    let none: [Box<dyn Tier>; 2] =
        [Box::new(Dram::new(0, BLOCK_BYTES)), Box::new(file(None, IoChoice::Auto, 0))];
    for mut tier in none {
        assert!(matches!(tier.put(BlockKey(1), &[0; BLOCK_BYTES]), Err(TierError::Full)));
        assert_eq!((tier.capacity_blocks(), tier.len_blocks()), (0, 0));
    }
}

#[derive(Clone, Debug)]
enum Op {
    Put(u128, u8),
    Get(u128),
    Remove(u128),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (0u128..7, any::<u8>()).prop_map(|(key, fill)| Op::Put(key, fill)),
        (0u128..7).prop_map(Op::Get),
        (0u128..7).prop_map(Op::Remove),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_tier_is_a_bounded_map(ops in proptest::collection::vec(op(), 1..60)) {
        let dir = tempfile::tempdir().unwrap();
        for (name, mut tier) in tiers(dir.path()) {
            let mut model: BTreeMap<u128, u8> = BTreeMap::new();
            for op in &ops {
                match *op {
                    Op::Put(key, fill) => {
                        let fits = model.len() < CAPACITY_BLOCKS as usize || model.contains_key(&key);
                        prop_assert_eq!(tier.put(BlockKey(key), &block(fill)).is_ok(), fits, "{}", name);
                        if fits {
                            model.insert(key, fill);
                        }
                    }
                    Op::Get(key) => {
                        let got = get(&mut *tier, BlockKey(key)).ok();
                        prop_assert_eq!(got, model.get(&key).map(|&fill| block(fill)), "{}", name);
                    }
                    Op::Remove(key) => {
                        let was_there = model.remove(&key).is_some();
                        prop_assert_eq!(tier.remove(BlockKey(key).short()), was_there, "{}", name);
                    }
                }
                prop_assert_eq!(tier.len_blocks(), model.len(), "{}", name);
            }
        }
    }
}
