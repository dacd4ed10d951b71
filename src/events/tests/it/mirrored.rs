//! Captured streams through the mirror: our names of what the engines held in the end.

use baton_events::{Change, EngineHash, ExtraKey, Mirror, MirrorConfig};
use baton_types::{BlockHash, BlockKey, CacheChange, ChainHasher, Tier};
use std::collections::{BTreeMap, BTreeSet};

use crate::captures::batches;

const SEED: u64 = 5;

fn root(salt: Option<&str>) -> BlockKey {
    ChainHasher::new(SEED, salt.unwrap_or("").as_bytes()).parent()
}

fn mirror() -> Mirror {
    let config = MirrorConfig { chain_seed: SEED, block_tokens: 32, ..MirrorConfig::default() };
    Mirror::new(
        config,
        Box::new(|lineage| match lineage.extra {
            [] => Some(root(None)),
            [ExtraKey::Text(salt)] => Some(root(Some(salt))),
            _ => None,
        }),
    )
}

/// The blocks that the engine held in the end: copies of blocks under its own names, each with our name computed from
/// all tokens of its chain.
fn truth(name: &str) -> BTreeSet<BlockHash> {
    let mut chains: BTreeMap<EngineHash, BlockKey> = BTreeMap::new();
    let mut copies: BTreeMap<EngineHash, i32> = BTreeMap::new();
    for (batch, _) in batches(name) {
        for event in batch.events {
            match event.change {
                Change::Stored(stored) => {
                    let salt = stored.extra.first().map(|extra| &extra.keys[0]);
                    let salt =
                        salt.map(|key| if let ExtraKey::Text(salt) = key { salt.as_str() } else { "" });
                    let start = stored.parent.map_or_else(|| root(salt), |parent| chains[&parent]);
                    let mut hasher = ChainHasher::resume(SEED, start);
                    for (hash, tokens) in stored.hashes.iter().zip(stored.tokens.chunks(32)) {
                        chains.insert(*hash, hasher.push_tokens(tokens));
                        *copies.entry(*hash).or_default() += 1;
                    }
                }
                Change::Removed(removed) => {
                    removed.hashes.iter().for_each(|hash| *copies.get_mut(hash).unwrap() -= 1);
                }
                _ => copies.clear(),
            }
        }
    }
    copies.iter().filter(|(_, n)| **n > 0).map(|(hash, _)| chains[hash].short()).collect()
}

#[test]
fn the_index_ends_with_what_the_engine_holds() {
    for (name, blocks) in
        [("vllm_int.json", 3), ("vllm_sha256cbor.json", 3), ("vllm_extra.json", 12), ("sglang.json", 3)]
    {
        let (mut mirror, mut changes) = (mirror(), Vec::new());
        for (batch, _) in batches(name) {
            mirror.apply(&batch, &mut changes);
            mirror.check().unwrap();
        }
        let mut held = BTreeSet::new();
        for change in changes {
            match change {
                CacheChange::Stored { hashes, tier, .. } => {
                    assert_eq!(tier, Tier::Hbm);
                    held.extend(hashes);
                }
                CacheChange::Removed { hashes, .. } => hashes.iter().for_each(|h| assert!(held.remove(h))),
                CacheChange::Cleared => held.clear(),
            }
        }
        assert_eq!(held, truth(name), "{name}");
        assert_eq!(held.len(), blocks, "{name}");
    }
}

#[test]
fn two_copies_are_gone_when_both_are_removed() {
    let all = batches("sglang.json");
    let evicting =
        all.iter().position(|(batch, _)| matches!(batch.events[0].change, Change::Removed(_))).unwrap();
    let (mut mirror, mut changes) = (mirror(), Vec::new());
    all[..evicting].iter().for_each(|(batch, _)| mirror.apply(batch, &mut changes));
    changes.clear();
    let (batch, _) = &all[evicting];
    mirror.apply_event(&batch.events[0], &mut changes);
    let gone = |changes: &[CacheChange]| -> usize {
        changes
            .iter()
            .map(|c| if let CacheChange::Removed { hashes, .. } = c { hashes.len() } else { 0 })
            .sum()
    };
    assert_eq!(gone(&changes), 1, "of four removed blocks three have another copy");
    changes.clear();
    mirror.apply_event(&batch.events[1], &mut changes);
    assert_eq!(gone(&changes), 3);
}
