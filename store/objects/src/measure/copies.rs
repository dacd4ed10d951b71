//! Puts and gets of large values beside plain copies into and out of places such as theirs: not all in a row.

use std::time::Instant;

use super::{Effort, Figure, cpu_ns, median};
use crate::{Clock, Key, ObjectStore, PutOptions, PutTicket, Reading, StoreConfig};

const SIZES: [usize; 4] = [64 << 10, 256 << 10, 1 << 20, 4 << 20];
/// Rounds of each, on however slow a machine.
const ROUNDS_MIN: usize = 3;
/// Bytes of a round, if there is so much memory.
const ROUND_BYTES: usize = 512 << 20;

/// Goes over all values once; returns the processor time of what counts, ns.
type Pass = fn(&mut Bench) -> u64;

/// A stage of the run: what is copied where.
struct Bench {
    store: ObjectStore,
    /// Another, for plain copies into and out of the same kind of places.
    plain: ObjectStore,
    source: Vec<u8>,
    into: Vec<u8>,
    bytes: usize,
    names: Vec<String>,
}

/// Bytes a second of processor time, one beside the other by rounds, and their ratio.
///
/// # Errors
/// The system's error about the memory.
pub fn copies(effort: Effort, report: &mut dyn FnMut(&str)) -> Result<Vec<Figure>, String> {
    let mut figures = Vec::new();
    for bytes in SIZES {
        report(&format!("copies of {} KiB", bytes >> 10));
        let mut bench = Bench::new(effort, bytes)?;
        let label = |what: &str| format!("{what} {} KiB", bytes >> 10);
        // Once over all, so that every page is there; plain copies have two sets of places, one after the other.
        bench.puts();
        bench.copies_in();
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
        let part = usize::try_from(effort.memory_bytes / 3).unwrap_or(usize::MAX).min(256 << 20);
        let source = (0..part).map(|at| u8::try_from(at % 251).expect("below 251")).collect();
        let names = (0..part / bytes).map(|n| format!("copies:{bytes}:{n:08}")).collect();
        Ok(Self { store, plain, source, into: vec![0; bytes], bytes, names })
    }

    /// Median rates of two loops that take turns, and the median of their ratios.
    #[expect(clippy::cast_precision_loss, reason = "figures for a report")]
    fn compare(&mut self, effort: Effort, one: Pass, other: Pass) -> (f64, f64, f64) {
        let (mut ones, mut others, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        let start = Instant::now();
        while ones.len() < ROUNDS_MIN || start.elapsed() < effort.each * 2 {
            let mut rate = |run: Pass| {
                let (mut ns, mut bytes) = (0, 0);
                // Long enough for the ticks of the clock.
                while bytes == 0 || bytes < ROUND_BYTES.min(self.source.len() * 2) {
                    ns += run(self);
                    bytes += self.source.len();
                }
                bytes as f64 / ns.max(1) as f64
            };
            let (first, second) = (rate(one), rate(other));
            ratios.push(second / first);
            ones.push(first);
            others.push(second);
        }
        (median(&mut ones), median(&mut others), median(&mut ratios))
    }

    fn puts(&mut self) -> u64 {
        let start = cpu_ns();
        for (name, value) in self.names.iter().zip(self.source.chunks_exact(self.bytes)) {
            let stored = self.store.put(Key::anonymous(name.as_bytes()), value, PutOptions::REPLACE);
            assert!(stored.is_ok(), "a third of the memory has room: {stored:?}");
        }
        cpu_ns() - start
    }

    fn gets(&mut self) -> u64 {
        let start = cpu_ns();
        for name in &self.names {
            let got = self.store.get_into(Key::anonymous(name.as_bytes()), &mut self.into);
            assert_eq!(got, Ok(Some(self.bytes)), "it was put and fits");
            std::hint::black_box(&mut self.into);
        }
        cpu_ns() - start
    }

    /// Copies into places such as puts get: only the copies count.
    fn copies_in(&mut self) -> u64 {
        let reserve = |name: &String| {
            let key = Key::anonymous(name.as_bytes());
            self.plain
                .reserve(key, self.bytes as u64, PutOptions::REPLACE)
                .expect("two thirds of the memory have room")
        };
        let mut tickets: Vec<PutTicket> = self.names.iter().map(reserve).collect();
        let start = cpu_ns();
        for (ticket, value) in tickets.iter_mut().zip(self.source.chunks_exact(self.bytes)) {
            let mut left = value;
            while ticket.left() > 0 {
                let copied = ticket.fill_with(|place| {
                    let (now, later) = left.split_at(place.len());
                    place.copy_from_slice(now);
                    left = later;
                    Ok(now.len())
                });
                assert!(matches!(copied, Ok(Ok(_))), "the lease is long: {copied:?}");
            }
        }
        let spent = cpu_ns() - start;
        for ticket in tickets {
            ticket.seal().expect("all of it was written");
        }
        spent
    }

    /// Copies out of such places.
    fn copies_out(&mut self) -> u64 {
        let open = |name: &String| self.plain.get(Key::anonymous(name.as_bytes())).expect("it was put");
        let readings: Vec<Reading> = self.names.iter().map(open).collect();
        let into = &mut self.into;
        let start = cpu_ns();
        for reading in &readings {
            let copied = reading.visit(|slices| {
                let mut at = 0;
                for slice in slices {
                    into[at..at + slice.len()].copy_from_slice(slice);
                    at += slice.len();
                }
            });
            assert!(copied.is_ok(), "its lease runs");
            std::hint::black_box(&mut *into);
        }
        cpu_ns() - start
    }
}
