//! The index against a naive model that keeps whole prefixes, and the paths that blocks take into it.

use baton_events::hash::Rolling;
use baton_events::{
    BlockExtra, Change, EngineHash, Event, ExtraKey, Medium, RemovedBlocks, Source, StoredBlocks,
};
use proptest::prelude::*;
use std::collections::BTreeMap;

use super::*;

const SIZE: u32 = 2;

fn registration(instance: &str, dp_rank: u32) -> Registration {
    let json = format!(
        r#"{{"endpoint":"tcp://h:1","type":"vLLM","modelname":"m","instance_id":"{instance}","block_size":{SIZE},
        "dp_rank":{dp_rank}}}"#
    );
    Registration::parse(json.as_bytes()).unwrap().0
}

fn lookup(salt: &str) -> Lookup {
    let json = format!(r#"{{"model":"m","block_size":{SIZE},"token_ids":[],"cache_salt":"{salt}"}}"#);
    Lookup::by_tokens(json.as_bytes()).unwrap().0
}

fn tokens(prefix: &[u32]) -> Vec<u32> {
    prefix.iter().flat_map(|symbol| [*symbol, 77]).collect()
}

/// The engine's name of a prefix, which differs from any standard hash.
fn name(prefix: &[u32]) -> EngineHash {
    let mut chain = Rolling::new(999);
    EngineHash::Word(prefix.iter().map(|symbol| chain.push(&[*symbol])).last().unwrap())
}

fn medium(at: usize) -> Medium {
    [Medium::Gpu, Medium::Cpu, Medium::Disk][at].clone()
}

fn stored(prefix: &[u32], from: usize, at: usize) -> StoredBlocks {
    StoredBlocks {
        hashes: (from + 1..=prefix.len()).map(|n| name(&prefix[..n])).collect(),
        parent: (from > 0).then(|| name(&prefix[..from])),
        tokens: tokens(&prefix[from..]),
        block_tokens: SIZE,
        medium: Some(medium(at)),
        ..StoredBlocks::default()
    }
}

fn apply(index: &mut Index, id: StreamId, change: Change) {
    let batch = Batch { sequence: 0, time_us: 0, dp_rank: None, events: vec![Event::from(change)] };
    index.apply(id, &batch);
    index.check().unwrap();
}

fn index() -> (Index, StreamId) {
    let mut index = Index::new(IndexLimits { max_orphans: 1000, ..IndexLimits::default() });
    let id = index.add(registration("a", 0)).unwrap();
    (index, id)
}

fn longest(index: &Index, salt: &str, prefix: &[u32]) -> u64 {
    index.match_tokens(&lookup(salt), &tokens(prefix))["a"].longest
}

fn remove(prefix: &[u32], at: usize) -> Change {
    Change::Removed(RemovedBlocks { hashes: vec![name(prefix)], medium: Some(medium(at)), group: None })
}

#[test]
fn a_child_before_its_parent_is_found_once_the_parent_is_there() {
    let (mut index, id) = index();
    apply(&mut index, id, Change::Stored(stored(&[1, 2, 3, 4], 3, 0)));
    apply(&mut index, id, Change::Stored(stored(&[1, 2, 3], 1, 0)));
    assert_eq!((longest(&index, "", &[1, 2, 3, 4]), index.counts(id).orphans), (0, 3));
    apply(&mut index, id, remove(&[1, 2, 3], 0));
    apply(&mut index, id, Change::Stored(stored(&[1], 0, 0)));
    assert_eq!(longest(&index, "", &[1, 2, 3, 4]), 4, "what left while it waited is a hole");
    assert_eq!((index.counts(id).orphans, index.counts(id).adopted), (0, 3));
    apply(&mut index, id, Change::Stored(stored(&[1, 2, 3], 2, 1)));
    let matched = &index.match_tokens(&lookup(""), &tokens(&[1, 2, 3, 4]))["a"];
    assert_eq!((matched.longest, matched.media), (6, [4, 6, 0]), "from the host there is no way back");
}

#[test]
fn salts_adapters_and_tenants_share_nothing_and_pictures_are_not_found() {
    let (mut index, id) = index();
    let with = |keys: Vec<ExtraKey>, symbol: u32| {
        let extra = vec![BlockExtra { block: 0, keys }];
        Change::Stored(StoredBlocks { extra, ..stored(&[symbol, symbol], 0, 0) })
    };
    apply(&mut index, id, with(vec![ExtraKey::Text("s".into())], 1));
    let tagged = ExtraKey::List(vec![ExtraKey::Text("cache_salt".into()), ExtraKey::Text("t".into())]);
    apply(&mut index, id, with(vec![tagged], 2));
    apply(&mut index, id, with(vec![ExtraKey::Bytes(vec![1])], 3));
    let lora = StoredBlocks { lora: Some("l".into()), ..stored(&[4, 4], 0, 0) };
    apply(&mut index, id, Change::Stored(lora));
    let found = |salt: &str| [1, 2, 3, 4].map(|symbol| longest(&index, salt, &[symbol, symbol]));
    assert_eq!((found(""), found("s"), found("t")), ([0; 4], [4, 0, 0, 0], [0, 4, 0, 0]));
    let mut adapted = lookup("");
    adapted.context.lora = "l".into();
    assert_eq!(index.match_tokens(&adapted, &tokens(&[4, 4]))["a"].longest, 4);
    let mut elsewhere = lookup("s");
    elsewhere.context.tenant = "other".into();
    assert!(index.match_tokens(&elsewhere, &tokens(&[1])).is_empty());
    assert_eq!(index.counts(id).unnamed, 2);
}

#[test]
fn hashes_are_the_engines_own_or_the_standard_ones() {
    let (mut index, id) = index();
    let prefix = [5, 6, 7];
    apply(&mut index, id, Change::Stored(stored(&prefix, 0, 1)));
    let own: Vec<u64> = (1..=3).map(|n| name(&prefix[..n]).low64()).collect();
    let mut chain = Rolling::new(0);
    let standard: Vec<u64> = tokens(&prefix).chunks(2).map(|block| chain.push(block)).collect();
    for hashes in [own, standard] {
        let matched = &index.match_hashes(&lookup(""), &hashes)["a"];
        assert_eq!((matched.longest, matched.media), (6, [0, 6, 0]));
        assert_eq!(
            index.match_hashes(&lookup(""), &hashes[1..])["a"].longest,
            4,
            "a chain may start anywhere"
        );
        assert_eq!(index.match_hashes(&lookup("x"), &hashes)["a"].longest, 0);
    }
}

#[test]
fn a_store_that_tells_no_tokens_is_found_by_standard_hashes() {
    let (mut index, id) = index();
    let mut chain = Rolling::new(0);
    let hashes = tokens(&[8, 9]).chunks(2).map(|block| EngineHash::Word(chain.push(block))).collect();
    let told =
        StoredBlocks { hashes, block_tokens: SIZE, medium: Some(Medium::Cpu), ..StoredBlocks::default() };
    let source = Some(Box::new(Source { tenant: Some("default".into()), ..Source::default() }));
    let event = Event { change: Change::Stored(told.clone()), source };
    index.apply(id, &Batch { sequence: 0, time_us: 0, dp_rank: None, events: vec![event] });
    assert_eq!(longest(&index, "", &[8, 9]), 4);
    let source = Some(Box::new(Source { tenant: Some("rival".into()), ..Source::default() }));
    let event = Event { change: Change::Cleared(None), source };
    index.apply(id, &Batch { sequence: 1, time_us: 0, dp_rank: None, events: vec![event] });
    assert_eq!((longest(&index, "", &[8, 9]), index.counts(id).elsewhere), (4, 1), "another tenant's news");
}

#[test]
fn bounds_hold_and_are_counted() {
    let limits = IndexLimits { max_streams: 1, max_blocks: 2, max_orphans: 2, max_contexts: 1, seed: 0 };
    let mut index = Index::new(limits);
    let id = index.add(registration("a", 0)).unwrap();
    assert_eq!(index.add(registration("b", 0)).unwrap_err().kind, Kind::Full);
    apply(&mut index, id, Change::Stored(stored(&[1, 2, 3], 0, 0)));
    assert_eq!((longest(&index, "", &[1, 2, 3]), index.counts(id).over_capacity), (4, 1));
    apply(&mut index, id, Change::Stored(stored(&[4, 5, 6, 7], 1, 0)));
    assert_eq!((index.counts(id).orphans, index.counts(id).abandoned), (0, 3), "more than may wait");
    let salted = vec![BlockExtra { block: 0, keys: vec![ExtraKey::Text("s".into())] }];
    apply(&mut index, id, Change::Cleared(None));
    apply(&mut index, id, Change::Stored(StoredBlocks { extra: salted, ..stored(&[1], 0, 0) }));
    assert_eq!(longest(&index, "s", &[1]), 2, "an empty context makes room");
    index.remove(id);
    assert_eq!(index.contexts().len(), 0);
    index.check().unwrap();
}

/// Copies of each prefix in each medium, by stream.
type Model = [BTreeMap<Vec<u32>, [u32; MEDIA]>; 3];

#[derive(Clone, Debug)]
enum Act {
    Store { prefix: Vec<u32>, from: usize, at: usize },
    Remove { prefix: Vec<u32>, at: usize },
    Clear(Option<usize>),
    Reborn,
}

fn acts() -> impl Strategy<Value = (usize, Act)> {
    let prefix = || proptest::collection::vec(0u32..3, 1..6);
    let act = prop_oneof![
        8 => (prefix(), 0usize..5, 0..MEDIA).prop_map(|(prefix, from, at)| {
            let from = from % prefix.len();
            Act::Store { prefix, from, at }
        }),
        8 => (prefix(), 0..MEDIA).prop_map(|(prefix, at)| Act::Remove { prefix, at }),
        1 => proptest::option::of(0..MEDIA).prop_map(Act::Clear),
        1 => Just(Act::Reborn),
    ];
    (0usize..3, act)
}

/// The expected result of the cursor, computed the slow way.
fn expected(model: &BTreeMap<Vec<u32>, [u32; MEDIA]>, prompt: &[u32]) -> (u64, [u64; MEDIA]) {
    let (mut medium, mut blocks, mut reached) = (0, 0, [0; MEDIA]);
    for length in 1..=prompt.len() {
        let copies = model.get(&prompt[..length]).copied().unwrap_or_default();
        while medium < MEDIA && copies[medium] == 0 {
            medium += 1;
        }
        if medium == MEDIA {
            break;
        }
        blocks = length as u64;
        reached[medium] = blocks * u64::from(SIZE);
    }
    (blocks * u64::from(SIZE), reached)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn it_finds_what_a_naive_model_finds(
        history in proptest::collection::vec(acts(), 1..40),
        prompts in proptest::collection::vec(proptest::collection::vec(0u32..3, 1..6), 8),
    ) {
        let mut index = Index::new(IndexLimits::default());
        let ranks = [("a", 0), ("a", 1), ("b", 0)];
        let ids = ranks.map(|(instance, rank)| index.add(registration(instance, rank)).unwrap());
        let mut model = Model::default();
        for (who, act) in history {
            let held = &mut model[who];
            match act {
                Act::Store { prefix, from, at } => {
                    let from = if held.contains_key(&prefix[..from]) { from } else { 0 };
                    for length in from + 1..=prefix.len() {
                        held.entry(prefix[..length].to_vec()).or_default()[at] += 1;
                    }
                    apply(&mut index, ids[who], Change::Stored(stored(&prefix, from, at)));
                }
                Act::Remove { prefix, at } => {
                    if let Some(copies) = held.get_mut(&prefix) {
                        copies[at] = copies[at].saturating_sub(1);
                        if *copies == [0; MEDIA] { held.remove(&prefix); }
                    }
                    apply(&mut index, ids[who], remove(&prefix, at));
                }
                Act::Clear(None) => {
                    held.clear();
                    apply(&mut index, ids[who], Change::Cleared(None));
                }
                Act::Clear(Some(at)) => {
                    held.values_mut().for_each(|copies| copies[at] = 0);
                    held.retain(|_, copies| *copies != [0; MEDIA]);
                    apply(&mut index, ids[who], Change::Cleared(Some(medium(at))));
                }
                Act::Reborn => {
                    held.clear();
                    index.clear(ids[who]);
                }
            }
        }
        index.check().unwrap();
        for prompt in prompts {
            let found = index.match_tokens(&lookup(""), &tokens(&prompt));
            let names: Vec<u64> = (1..=prompt.len()).map(|n| name(&prompt[..n]).low64()).collect();
            prop_assert_eq!(&found, &index.match_hashes(&lookup(""), &names));
            let told = [0, 1, 2].map(|who| expected(&model[who], &prompt));
            prop_assert_eq!((found["a"].ranks[&0], found["a"].ranks[&1]), (told[0].0, told[1].0));
            prop_assert_eq!(found["a"].longest, told[0].0.max(told[1].0));
            let best: Vec<u64> = (0..MEDIA).map(|at| told[0].1[at].max(told[1].1[at])).collect();
            prop_assert_eq!(found["a"].media.to_vec(), best);
            prop_assert_eq!((found["b"].longest, found["b"].media), told[2]);
        }
    }
}
