//! Cost of eviction: writes at the mark beside writes into free space, look-ups beside a writer that evicts.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use baton_types::Rng;

use super::{Effort, Figure, elapsed_ns, median, percentile_us};
use crate::{Clock, Key, ObjectStore, PutOptions, StoreConfig};

const VALUE_BYTES: usize = 64 << 10;

/// Both.
///
/// # Errors
/// The system's error about the memory.
pub fn pressure(effort: Effort, report: &mut dyn FnMut(&str)) -> Result<Vec<Figure>, String> {
    let config = StoreConfig {
        capacity_bytes: effort.memory_bytes,
        value_max_bytes: 1 << 20,
        ..StoreConfig::default()
    };
    let store = ObjectStore::new(&config, Clock::machine())?;
    let value = vec![3; VALUE_BYTES];
    report("writes into free space and at the mark");
    let mut figures = writes(effort, &store, &value);
    report("look-ups beside a writer that evicts");
    figures.extend(lookups(effort, &store, &value));
    Ok(figures)
}

fn put(store: &ObjectStore, number: u64, value: &[u8]) {
    let stored = store.put(Key::anonymous(&number.to_le_bytes()), value, PutOptions::REPLACE);
    assert!(stored.is_ok(), "there is always something to evict: {stored:?}");
}

/// Puts `range`; returns microseconds a put.
#[expect(clippy::cast_precision_loss, reason = "figures for a report")]
fn timed(store: &ObjectStore, range: std::ops::Range<u64>, value: &[u8]) -> f64 {
    let (start, count) = (Instant::now(), range.end - range.start);
    range.for_each(|number| put(store, number, value));
    start.elapsed().as_secs_f64() * 1e6 / count as f64
}

fn writes(effort: Effort, store: &ObjectStore, value: &[u8]) -> Vec<Figure> {
    let fits = effort.memory_bytes / VALUE_BYTES as u64;
    let (batch, mut next) = (fits / 4, 0);
    let (mut free, mut full, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    // Once over everything, so that every page is there.
    timed(store, 0..2 * fits, value);
    next += 2 * fits;
    let start = Instant::now();
    while ratios.is_empty() || start.elapsed() < effort.each * 2 {
        full.push(timed(store, next..next + batch, value));
        next += batch;
        let (listed, _) = store.list(0, 100_000);
        for one in &listed {
            let _ = store.remove(Key { tenant: one.tenant, bytes: &one.key });
        }
        free.push(timed(store, next..next + batch, value));
        next += batch;
        ratios.push(full[full.len() - 1] / free[free.len() - 1]);
        timed(store, next..next + fits, value);
        next += fits;
    }
    vec![
        Figure::new("put 64 KiB into free space", "us", median(&mut free)),
        Figure::new("put 64 KiB at the mark", "us", median(&mut full)),
        Figure::new("put at the mark of put into free", "ratio", median(&mut ratios)).most(1.5),
    ]
}

fn lookups(effort: Effort, store: &ObjectStore, value: &[u8]) -> Vec<Figure> {
    // Keys that stay: pinned.
    let known: Vec<[u8; 8]> = (0..1_000u64).map(|n| (n | 1 << 60).to_le_bytes()).collect();
    for name in &known {
        let stored = store.put(Key::anonymous(name), b"stays", PutOptions::REPLACE);
        let pinned = store.pin(Key::anonymous(name));
        assert!(stored.is_ok() && pinned.is_ok(), "a small value has room");
    }
    let look = |rng: &mut Rng, samples: &mut Vec<u64>| {
        let name = known[usize::try_from(rng.below(1_000)).expect("small")];
        let mut into = [0; 8];
        let begun = Instant::now();
        let got = store.get_into(Key::anonymous(&name), &mut into);
        samples.push(elapsed_ns(begun));
        assert_eq!(got, Ok(Some(5)), "a pinned value stays");
    };
    let (mut rng, over) = (Rng::new(2), AtomicBool::new(false));
    let mut run = |samples: &mut Vec<u64>| {
        let start = Instant::now();
        while start.elapsed() < effort.each {
            look(&mut rng, samples);
        }
    };
    let (mut quiet, mut beside) = (Vec::new(), Vec::new());
    // The other core is as busy in both: with copies that evict nothing, then with puts that do.
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let mut elsewhere = vec![0; VALUE_BYTES];
            while !over.load(Ordering::Relaxed) {
                elsewhere.copy_from_slice(value);
                std::hint::black_box(&mut elsewhere);
            }
        });
        run(&mut quiet);
        over.store(true, Ordering::Relaxed);
    });
    over.store(false, Ordering::Relaxed);
    let before = store.stats().evicted;
    std::thread::scope(|threads| {
        threads.spawn(|| {
            (1u64 << 40..).take_while(|_| !over.load(Ordering::Relaxed)).for_each(|n| put(store, n, value));
        });
        run(&mut beside);
        over.store(true, Ordering::Relaxed);
    });
    assert!(store.stats().evicted > before, "the writer evicts");
    let (alone, evicting) = (percentile_us(&mut quiet, 990), percentile_us(&mut beside, 990));
    vec![
        Figure::new("look-up p99, other core busy", "us", alone),
        Figure::new("look-up p99, other core evicting", "us", evicting),
        Figure::new("look-up p99 while evicting of quiet", "ratio", evicting / alone).most(1.5),
    ]
}
