//! Messages of real engines (`testdata/`), read and compared with what the engines' own decoder made of them.

use baton_events::{Batch, Change, EngineHash, ExtraKey, Limits, Medium, StoredBlocks, decode, sequence_of};
use serde_json::Value;

use crate::vllm_hashes::{Algorithm, TaggedKey};

pub fn unhex(text: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(digit).collect()
}

fn file(name: &str) -> Value {
    let path = format!("{}/testdata/{name}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

pub fn read(frames: &Value) -> Batch {
    let frames: Vec<Vec<u8>> =
        frames.as_array().unwrap().iter().map(|f| unhex(f.as_str().unwrap())).collect();
    let sequence = sequence_of(&frames[frames.len() - 2]).unwrap();
    decode(sequence, &frames[frames.len() - 1], &Limits::default()).unwrap()
}

/// The batches of a capture, each with what the engine's own decoder made of it, if that was kept.
pub fn batches(name: &str) -> Vec<(Batch, Value)> {
    let file = file(name);
    let live = file["live"].as_array().unwrap();
    live.iter().map(|m| (read(&m["frames_hex"]), m["payload"].clone())).collect()
}

fn hash_of(value: &Value) -> EngineHash {
    match value["hex"].as_str() {
        Some(hex) => EngineHash::Full(unhex(hex).try_into().unwrap()),
        None => {
            let signed = || value.as_i64().map(i64::cast_unsigned);
            EngineHash::Word(value.as_u64().or_else(signed).unwrap())
        }
    }
}

fn hashes_of(value: &Value) -> Vec<EngineHash> {
    value.as_array().unwrap().iter().map(hash_of).collect()
}

fn compare_stored(stored: &StoredBlocks, told: &Value) {
    assert_eq!(stored.hashes, hashes_of(&told["block_hashes"]));
    let parent = &told["parent_block_hash"];
    assert_eq!(stored.parent, (!parent.is_null()).then(|| hash_of(parent)));
    let tokens: Vec<u64> =
        told["token_ids"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap()).collect();
    assert_eq!(stored.tokens.iter().map(|t| u64::from(*t)).collect::<Vec<_>>(), tokens);
    assert_eq!(u64::from(stored.block_tokens), told["block_size"].as_u64().unwrap());
    assert_eq!(stored.tokens.len(), stored.hashes.len() * stored.block_tokens as usize);
    assert_eq!(stored.group.map(u64::from), told["group_idx"].as_u64());
    assert_eq!(stored.attention.as_deref(), told["kv_cache_spec_kind"].as_str());
    assert_eq!(stored.lora.as_deref(), told["lora_name"].as_str());
    let told_extra = told["extra_keys"].as_array().map_or(&[][..], Vec::as_slice);
    let salted: Vec<usize> = (0..told_extra.len()).filter(|at| !told_extra[*at].is_null()).collect();
    assert_eq!(stored.extra.iter().map(|e| e.block).collect::<Vec<_>>(), salted);
}

fn compare(batch: &Batch, told: &Value) {
    assert_eq!(batch.dp_rank, Some(0));
    assert!(batch.time_us.abs_diff((told[0].as_f64().unwrap() * 1e6) as u64) <= 1);
    let events = told[1].as_array().unwrap();
    assert_eq!(batch.events.len(), events.len());
    for (event, told) in batch.events.iter().zip(events) {
        match &event.change {
            Change::Stored(stored) => {
                assert_eq!(told["type"], "BlockStored");
                assert_eq!(stored.medium, Some(Medium::Gpu));
                compare_stored(stored, told);
            }
            Change::Removed(removed) => {
                assert_eq!(told["type"], "BlockRemoved");
                assert_eq!(removed.hashes, hashes_of(&told["block_hashes"]));
                assert_eq!(removed.medium, Some(Medium::Gpu));
            }
            Change::Cleared(medium) => {
                assert_eq!((told["type"].as_str(), medium), (Some("AllBlocksCleared"), &None))
            }
            Change::Unknown(kind) => panic!("{kind} is known to the engine"),
        }
    }
}

#[test]
fn every_captured_batch_is_read_as_the_engine_meant_it() {
    let mut compared = 0;
    for name in ["vllm_int.json", "vllm_sha256cbor.json", "sglang.json"] {
        for (batch, told) in batches(name).iter().filter(|(_, told)| !told.is_null()) {
            compare(batch, told);
            compared += 1;
        }
    }
    assert_eq!(compared, 12 + 12 + 5);
}

#[test]
fn a_session_is_passed_over_and_a_salt_is_kept() {
    let batches = batches("vllm_extra.json");
    let Change::Stored(session) = &batches[0].0.events[0].change else { panic!("stored was announced") };
    assert_eq!((session.hashes.len(), session.extra.as_slice()), (6, &[][..]));
    let Change::Stored(salted) = &batches[2].0.events[0].change else { panic!("stored was announced") };
    assert_eq!(salted.extra.len(), 1);
    assert_eq!(salted.extra[0].block, 0);
    assert!(matches!(salted.extra[0].keys.as_slice(), [ExtraKey::Text(salt)] if salt.starts_with("xxxx")));
    assert_eq!(session.tokens, salted.tokens);
    assert_ne!(session.hashes, salted.hashes, "a salt changes every name");
}

#[test]
fn signed_hashes_are_the_same_bits() {
    let batches = batches("sglang.json");
    let Change::Stored(first) = &batches[0].0.events[0].change else { panic!("stored was announced") };
    assert_eq!(first.hashes[1], EngineHash::Word((-1_358_578_223_158_227_294i64).cast_unsigned()));
    let Change::Stored(second) = &batches[1].0.events[0].change else { panic!("stored was announced") };
    assert_eq!(second.parent, Some(first.hashes[1]), "a parent is found under its signed name too");
}

#[test]
fn a_replay_has_the_bytes_that_were_live_and_an_end_marker() {
    for name in ["vllm_int.json", "vllm_sha256cbor.json"] {
        let file = file(name);
        let replies = file["replay"]["replies_frames_hex"].as_array().unwrap();
        let (end, told) = replies.split_last().unwrap();
        assert_eq!(sequence_of(&unhex(end[2].as_str().unwrap())), Ok(u64::MAX));
        let batches: Vec<Batch> = told.iter().map(read).collect();
        assert_eq!(batches.iter().map(|b| b.sequence).collect::<Vec<_>>(), [9, 10, 11]);
        let live = batches_of(&file);
        assert_eq!(batches, live[9..]);
    }
}

fn batches_of(file: &Value) -> Vec<Batch> {
    file["live"].as_array().unwrap().iter().map(|m| read(&m["frames_hex"])).collect()
}

/// Computes every announced hash anew, and returns how many there were.
fn recomputed(name: &str, algorithm: Algorithm, announced: impl Fn(EngineHash) -> EngineHash) -> usize {
    let root = algorithm.root("0");
    let (mut known, mut checked) = (vec![], 0);
    for (batch, _) in batches(name) {
        for event in batch.events {
            let Change::Stored(stored) = event.change else { continue };
            let full = |hash| known.iter().rev().find(|full| announced(**full) == hash).copied();
            let mut parent =
                stored.parent.map_or(root, |hash| full(hash).expect("its parent came before it"));
            for (at, tokens) in stored.tokens.chunks(stored.block_tokens as usize).enumerate() {
                let salt = stored.extra.iter().find(|extra| extra.block == at).map(|extra| &extra.keys[0]);
                let extra: Vec<TaggedKey<'_>> = match salt {
                    Some(ExtraKey::Text(salt)) => vec![("cache_salt", salt)],
                    _ => vec![],
                };
                parent = algorithm.block(parent, tokens, &extra);
                assert_eq!(announced(parent), stored.hashes[at], "{name}, batch {}", batch.sequence);
                known.push(parent);
                checked += 1;
            }
        }
    }
    checked
}

#[test]
fn what_is_read_of_a_block_is_what_the_engine_named_it_by() {
    let low = |hash: EngineHash| EngineHash::Word(hash.low64());
    assert_eq!(recomputed("vllm_sha256cbor.json", Algorithm::Cbor, |hash| hash), 100);
    assert_eq!(recomputed("vllm_int.json", Algorithm::Pickle, low), 100);
}
