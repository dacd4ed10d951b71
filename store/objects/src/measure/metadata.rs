//! Small operations of one thread in a full store: how many a second, how long each, what a key weighs.

use std::time::Instant;

use baton_types::Rng;

use super::{Effort, Figure, cpu_ns, elapsed_ns, percentile_us};
use crate::{Clock, Key, ObjectStore, PutOptions, StoreConfig};

/// Bytes of a value.
const VALUE_BYTES: usize = 1024;

/// Puts, looks, pins and gets in turn, with every put evicting; a second of the rates is one of processor time.
///
/// # Errors
/// The system's error about the memory.
#[expect(clippy::cast_precision_loss, reason = "figures for a report")]
pub fn metadata(effort: Effort, report: &mut dyn FnMut(&str)) -> Result<Vec<Figure>, String> {
    report("metadata: filling");
    let config = StoreConfig {
        capacity_bytes: effort.memory_bytes,
        value_max_bytes: 1 << 20,
        keys_max: effort.memory_bytes / 128,
        ..StoreConfig::default()
    };
    let store = ObjectStore::new(&config, Clock::machine())?;
    let mut next = 0;
    while store.stats().evicted == 0 {
        (0..1_000).for_each(|_| put(&store, &mut next));
    }
    let full = store.stats().keys;
    let mut figures =
        vec![Figure::new("metadata a key", "bytes", store.metadata_bytes() as f64 / full as f64).most(250.0)];
    let mut rng = Rng::new(1);
    for (what, put_in, bar) in
        [("operations, one in 8 an evicting put", 8, Some(1e6)), ("evicting puts", 1, None)]
    {
        report(&format!("metadata: {what}"));
        let (mut done, start, begun) = (0u64, Instant::now(), cpu_ns());
        while start.elapsed() < effort.each {
            (0..1_000).for_each(|_| one(&store, &mut rng, &mut next, put_in));
            done += 1_000;
        }
        let rate = done as f64 * 1e9 / (cpu_ns() - begun).max(1) as f64;
        let figure = Figure::new(what, "1/s a core", rate);
        figures.push(if let Some(bar) = bar { figure.least(bar) } else { figure });
    }
    let (mut samples, start) = (Vec::new(), Instant::now());
    while start.elapsed() < effort.each {
        let begun = Instant::now();
        one(&store, &mut rng, &mut next, 8);
        samples.push(elapsed_ns(begun));
    }
    figures.push(Figure::new("operation p50", "us", percentile_us(&mut samples, 500)));
    figures.push(Figure::new("operation p99", "us", percentile_us(&mut samples, 990)).most(20.0));
    Ok(figures)
}

fn name_of(number: u64) -> [u8; 40] {
    let mut name = *b"kv@model@tp0@pp0@                       ";
    let mut rng = Rng::new(number);
    name[24..32].copy_from_slice(&rng.next_u64().to_be_bytes());
    name[32..].copy_from_slice(&number.to_be_bytes());
    name
}

fn put(store: &ObjectStore, next: &mut u64) {
    let options = PutOptions::REPLACE;
    let stored = store.put(Key::anonymous(&name_of(*next)), &[7; VALUE_BYTES], options);
    assert!(stored.is_ok(), "there is always something to evict: {stored:?}");
    *next += 1;
}

/// One in `put_in` puts a new key; the others look at, pin for a moment or get what is likely there.
fn one(store: &ObjectStore, rng: &mut Rng, next: &mut u64, put_in: u64) {
    if rng.below(put_in) == 0 {
        return put(store, next);
    }
    let name = name_of(next.saturating_sub(1 + rng.below(100_000)));
    let key = Key::anonymous(&name);
    match rng.below(3) {
        0 => assert!(std::hint::black_box(store.stat(key)).is_none_or(|stat| stat.bytes > 0)),
        1 => assert!(std::hint::black_box(store.pin_softly(key, 1)).is_ok() || *next > 0),
        _ => drop(std::hint::black_box(store.get(key))),
    }
}
