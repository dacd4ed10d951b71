//! How long it takes to write and read a snapshot: `cargo run --release -p baton-indexer --example warm -- BLOCKS`.

use std::time::Instant;

use baton_events::{Batch, Change, EngineHash, Event, Medium, StoredBlocks};
use baton_indexer::snapshot::{Reader, footer, header, section};
use baton_indexer::{Index, IndexLimits, Lookup, Registration};

const STREAMS: u64 = 8;
const CHAIN: u64 = 64;
const SIZE: u64 = 16;

fn main() {
    let blocks: u64 = std::env::args().nth(1).and_then(|count| count.parse().ok()).unwrap_or(1_000_000);
    let mut index = Index::new(IndexLimits::default());
    let began = Instant::now();
    let mut bytes = header(0).to_vec();
    for stream in 0..STREAMS {
        let json = format!(
            r#"{{"endpoint":"tcp://h:1","type":"vLLM","modelname":"m","instance_id":"i{stream}","block_size":{SIZE},
            "dp_rank":0}}"#
        );
        let (registration, _) = Registration::parse(json.as_bytes()).expect("it is whole");
        let id = index.add(registration).expect("there is room");
        for chain in 0..blocks / STREAMS / CHAIN {
            let first = (stream << 40) + chain * CHAIN;
            let tokens = (0..CHAIN * SIZE).map(|at| (first * 31 + at) as u32);
            let stored = StoredBlocks {
                hashes: (0..CHAIN)
                    .map(|at| EngineHash::Word((first + at).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
                    .collect(),
                tokens: tokens.collect(),
                block_tokens: SIZE as u32,
                medium: Some(Medium::Gpu),
                ..StoredBlocks::default()
            };
            let events = vec![Event::from(Change::Stored(stored))];
            index.apply(id, &Batch { sequence: chain, time_us: chain, dp_rank: None, events });
        }
    }
    println!("applied {blocks} blocks in {:.2} s", began.elapsed().as_secs_f64());
    let began = Instant::now();
    for id in index.ids() {
        bytes.extend_from_slice(&section(&index, id).expect("it is there"));
    }
    bytes.extend_from_slice(&footer(STREAMS));
    println!("written {} MB in {:.2} s", bytes.len() >> 20, began.elapsed().as_secs_f64());
    drop(index);
    let began = Instant::now();
    let (mut index, mut reader) = (Index::new(IndexLimits::default()), Reader::new(0));
    for piece in bytes.chunks(4 << 20) {
        reader.push(piece);
        while let Some(section) = reader.next_section().expect("it was written just now") {
            section.restore(&mut index).expect("there is room");
        }
    }
    reader.finish().expect("it is whole");
    let held: u64 = index.ids().map(|id| index.counts(id).blocks).sum();
    println!("warm: {held} blocks in {:.2} s", began.elapsed().as_secs_f64());
    query(&index);
}

fn query(index: &Index) {
    let json = format!(r#"{{"model":"m","block_size":{SIZE},"token_ids":[]}}"#);
    let (lookup, _, _) = Lookup::by_tokens(json.as_bytes()).expect("it is whole");
    let tokens: Vec<u32> = (0..(CHAIN * SIZE) as u32).collect();
    let (began, times) = (Instant::now(), 10_000);
    let found: u64 = (0..times).map(|_| index.match_tokens(&lookup, &tokens)["i0"].longest).sum();
    let us = began.elapsed().as_secs_f64() * 1e6 / f64::from(times);
    println!(
        "query of {} tokens, {} found: {us:.1} us",
        tokens.len(),
        found / u64::try_from(times).unwrap_or(1)
    );
}
