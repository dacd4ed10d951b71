//! Puts and gets of large values beside plain copies into and out of the same kind of memory.

use std::time::Instant;

use super::{Effort, Figure, cpu_ns, median};
use crate::{Clock, Existing, Key, ObjectStore, PutOptions, StoreConfig};

const SIZES: [usize; 4] = [64 << 10, 256 << 10, 1 << 20, 4 << 20];
/// Bytes of a round, if there is so much memory.
const ROUND_BYTES: usize = 512 << 20;
const REPLACE: PutOptions =
    PutOptions { existing: Existing::Replace, only_if_present: false, ttl_us: None, checksum: None };

/// A stage of the run: what is copied where.
struct Bench {
    store: ObjectStore,
    /// Memory of the arena for plain copies.
    plain: ObjectStore,
    source: Vec<u8>,
    into: Vec<u8>,
    bytes: usize,
    names: Vec<String>,
}

/// Bytes a second of processor time, one beside the other by rounds, and their ratio.
///
/// # Errors
/// What the system says about the memory.
pub fn copies(effort: Effort, tell: &mut dyn FnMut(&str)) -> Result<Vec<Figure>, String> {
    let mut figures = Vec::new();
    for bytes in SIZES {
        tell(&format!("copies of {} KiB", bytes >> 10));
        let mut bench = Bench::new(effort, bytes)?;
        let label = |what: &str| format!("{what} {} KiB", bytes >> 10);
        // Once over all, so that every page is there.
        bench.puts();
        bench.copies_in();
        let (copied, put, ratio) = bench.compare(effort, Bench::copies_in, Bench::puts);
        figures.push(Figure::new(label("memcpy in"), "GB/s", copied));
        figures.push(Figure::new(label("put"), "GB/s", put));
        figures.push(Figure::new(label("put of memcpy"), "ratio", ratio).least(0.85));
        let (copied, got, ratio) = bench.compare(effort, Bench::copies_out, Bench::gets);
        figures.push(Figure::new(label("memcpy out"), "GB/s", copied));
        figures.push(Figure::new(label("get"), "GB/s", got));
        figures.push(Figure::new(label("get of memcpy"), "ratio", ratio).least(0.85));
    }
    Ok(figures)
}

impl Bench {
    fn new(effort: Effort, bytes: usize) -> Result<Self, String> {
        let config = StoreConfig {
            capacity_bytes: effort.memory_bytes,
            value_max_bytes: effort.memory_bytes / 2,
            // The memory of plain copies stays reserved as long as the run takes.
            write_lease_us: 600_000_000,
            ..StoreConfig::default()
        };
        let store = ObjectStore::new(&config, Clock::machine())?;
        let plain = ObjectStore::new(&config, Clock::machine())?;
        let half = usize::try_from(effort.memory_bytes / 2).unwrap_or(usize::MAX).min(256 << 20);
        let source = (0..half).map(|at| u8::try_from(at % 251).expect("below 251")).collect();
        let names = (0..half / bytes).map(|n| format!("copies:{bytes}:{n:08}")).collect();
        Ok(Self { store, plain, source, into: vec![0; bytes], bytes, names })
    }

    /// Median rates of two loops that take turns, and the median of their ratios.
    #[expect(clippy::cast_precision_loss, reason = "figures for a report")]
    fn compare(&mut self, effort: Effort, one: fn(&mut Self), other: fn(&mut Self)) -> (f64, f64, f64) {
        let (mut ones, mut others, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        let start = Instant::now();
        while ones.is_empty() || start.elapsed() < effort.each * 2 {
            let mut rate = |run: fn(&mut Self)| {
                let (start, mut bytes) = (cpu_ns(), 0);
                // Long enough for the ticks of the clock.
                while bytes == 0 || bytes < ROUND_BYTES.min(self.source.len() * 4) {
                    run(self);
                    bytes += self.source.len();
                }
                bytes as f64 / (cpu_ns() - start).max(1) as f64
            };
            let (first, second) = (rate(one), rate(other));
            ratios.push(second / first);
            ones.push(first);
            others.push(second);
        }
        (median(&mut ones), median(&mut others), median(&mut ratios))
    }

    fn puts(&mut self) {
        for (name, value) in self.names.iter().zip(self.source.chunks_exact(self.bytes)) {
            let stored = self.store.put(Key::anonymous(name.as_bytes()), value, REPLACE);
            assert!(stored.is_ok(), "half of the memory takes half of the memory: {stored:?}");
        }
    }

    fn gets(&mut self) {
        for name in &self.names {
            let got = self.store.get_into(Key::anonymous(name.as_bytes()), &mut self.into);
            assert_eq!(got, Ok(Some(self.bytes)), "it was put and fits");
            std::hint::black_box(&mut self.into);
        }
    }

    fn copies_in(&mut self) {
        let key = Key::anonymous(b"plain");
        // What was there goes first: else both do not fit.
        let _ = self.plain.remove(key);
        let bytes = (self.names.len() * self.bytes) as u64;
        let mut ticket = self.plain.reserve(key, bytes, REPLACE).expect("half of the memory is free");
        let mut source = &self.source[..];
        while ticket.left() > 0 {
            let piece = self.bytes;
            let copied = ticket.fill_with(|place| {
                let bytes = place.len().min(piece);
                place[..bytes].copy_from_slice(&source[..bytes]);
                source = &source[bytes..];
                Ok(bytes)
            });
            assert!(matches!(copied, Ok(Ok(_))), "the lease is long: {copied:?}");
        }
        ticket.seal().expect("all of it was written");
    }

    fn copies_out(&mut self) {
        let reading = self.plain.get(Key::anonymous(b"plain")).expect("it was put");
        let into = &mut self.into;
        let copied = reading.visit(|slices| {
            for slice in slices {
                for piece in slice.chunks(into.len()) {
                    into[..piece.len()].copy_from_slice(piece);
                    std::hint::black_box(&mut *into);
                }
            }
        });
        assert!(copied.is_ok(), "its lease runs");
    }
}
