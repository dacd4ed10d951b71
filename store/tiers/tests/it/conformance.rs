//! What every tier must do, run on each.

use baton_tiers::{Dram, FileTier, Tier, TierError, block_checksum};
use baton_types::BlockKey;
use proptest::prelude::*;
use std::collections::BTreeMap;

const BLOCK_BYTES: usize = 5_000;
const CAPACITY_BLOCKS: u32 = 4;

fn tiers() -> [(&'static str, Box<dyn Tier>); 2] {
    let file = FileTier::create(None, CAPACITY_BLOCKS, BLOCK_BYTES, 1).expect("a temporary file");
    [("dram", Box::new(Dram::new(CAPACITY_BLOCKS, BLOCK_BYTES))), ("file", Box::new(file))]
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
    for (name, mut tier) in tiers() {
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
    for (name, mut tier) in tiers() {
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
    for (name, mut tier) in tiers() {
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
        [Box::new(Dram::new(0, 8)), Box::new(FileTier::create(None, 0, 8, 0).unwrap())];
    for mut tier in none {
        assert!(matches!(tier.put(BlockKey(1), &[0; 8]), Err(TierError::Full)));
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
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_tier_is_a_bounded_map(ops in proptest::collection::vec(op(), 1..60)) {
        for (name, mut tier) in tiers() {
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
