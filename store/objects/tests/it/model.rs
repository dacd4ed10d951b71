//! Random histories beside a naive model: what may be read, what must be, and what never is.

use std::collections::{BTreeMap, VecDeque};

use super::{content, key, pass, small};
use baton_objects::{
    ObjectStore, OverwriteRule, PutOptions, PutTicket, Reading, Refusal, StoreOutcome, checksum,
};
use baton_types::Rng;

/// The model's state of a key: the value that was sealed last and when it ends. Memory may evict it.
#[derive(Clone, Debug)]
struct ModelEntry {
    seed: u64,
    bytes: usize,
    ends_us: u64,
    pins: u32,
}

struct Writer {
    ticket: PutTicket,
    name: String,
    seed: u64,
    begun_us: u64,
    options: PutOptions,
}

struct Reader {
    reading: Reading,
    seed: u64,
    bytes: usize,
    begun_us: u64,
}

#[derive(Default)]
struct Model {
    keys: BTreeMap<String, ModelEntry>,
    writers: VecDeque<Writer>,
    readers: VecDeque<Reader>,
    /// Writers that went without a word: key and begin.
    crashed: Vec<(String, u64)>,
    now_us: u64,
    counts: BTreeMap<&'static str, u32>,
}

const NAMES: u64 = 40;

impl Model {
    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn options(rng: &mut Rng) -> PutOptions {
        let existing =
            [OverwriteRule::Same, OverwriteRule::Keep, OverwriteRule::Replace, OverwriteRule::Replace];
        PutOptions {
            existing: existing[usize::try_from(rng.below(4)).unwrap()],
            only_if_present: rng.chance_permille(30),
            ttl_us: rng.chance_permille(200).then(|| 1 + rng.below(3_000_000)),
            checksum: None,
        }
    }

    fn reserve(&mut self, store: &ObjectStore, rng: &mut Rng) {
        let name = format!("key {}", rng.below(NAMES));
        let top = 1 << rng.below(21);
        // Few seeds and sizes for a key, so that equal values meet.
        let (seed, bytes) = (rng.below(3), usize::try_from(rng.below(top)).unwrap() / 1000 * 1000);
        let options = Self::options(rng);
        let begun = self.writers.iter().map(|w| (&w.name, w.begun_us));
        let mut begun = begun.chain(self.crashed.iter().map(|(name, begun_us)| (name, *begun_us)));
        let beside = begun.any(|(other, begun_us)| *other == name && self.now_us < begun_us + 2_000_000);
        let writing = beside && options.existing != OverwriteRule::Replace;
        match store.try_reserve(key(&name), bytes as u64, options) {
            Ok(mut ticket) => {
                assert!(!writing, "two writers, and one of them would not replace");
                ticket.append(&content(seed, bytes)).unwrap();
                self.writers.push_back(Writer { ticket, name, seed, begun_us: self.now_us, options });
                self.count(if beside { "rivals" } else { "reserved" });
            }
            Err(Refusal::Busy { retry_after_us }) => {
                assert!(writing && retry_after_us <= 2_000_000);
                self.count("busy");
            }
            Err(Refusal::Full { .. }) => self.count("full"),
            Err(Refusal::Exists) => assert!(self.keys.contains_key(&name)),
            Err(Refusal::Pinned) => assert!(self.keys[&name].pins > 0),
            Err(Refusal::Absent) => assert!(options.only_if_present),
            Err(other) => panic!("{other:?}"),
        }
    }

    fn seal(&mut self, rng: &mut Rng) {
        let Some(writer) = self.writers.pop_front() else { return };
        if rng.chance_permille(100) {
            // A writer that crashed: its ticket is never dropped.
            std::mem::forget(writer.ticket);
            self.crashed.push((writer.name, writer.begun_us));
            return self.count("crashed");
        }
        let bytes = writer.ticket.bytes();
        match writer.ticket.seal_checked(checksum(&content(writer.seed, bytes))) {
            Ok(StoreOutcome::New { .. }) => {
                let pins = 0;
                let ends_us = writer.options.ttl_us.map_or(u64::MAX, |ttl| self.now_us + ttl);
                let known = ModelEntry { seed: writer.seed, bytes, ends_us, pins };
                if let Some(old) = self.keys.insert(writer.name, known) {
                    // It may have been evicted meanwhile; pinned it cannot have been.
                    assert_eq!(old.pins, 0, "a pinned value was replaced");
                }
                self.count("sealed");
            }
            Ok(StoreOutcome::Unchanged { .. }) => {
                let known = self.keys.get_mut(&writer.name).expect("equal to what is there");
                assert_eq!(known.bytes, bytes);
                assert!(known.seed == writer.seed || bytes == 0);
                known.ends_us = writer.options.ttl_us.map_or(u64::MAX, |ttl| self.now_us + ttl);
                self.count("unchanged");
            }
            Err(Refusal::TakenOver) => {
                assert!(self.now_us >= writer.begun_us + 2_000_000, "taken over before its time");
                self.count("taken over");
            }
            Err(Refusal::Exists) => assert!(writer.options.existing != OverwriteRule::Replace),
            Err(Refusal::Pinned) => assert!(self.keys[&writer.name].pins > 0),
            Err(other) => panic!("{other:?}"),
        }
    }

    fn open(&mut self, store: &ObjectStore, rng: &mut Rng) {
        let name = format!("key {}", rng.below(NAMES));
        let Some(reading) = store.get(key(&name)) else {
            if let Some(known) = self.keys.remove(&name) {
                assert_eq!(known.pins, 0, "a pinned value was lost");
            }
            return self.count("missed");
        };
        let known = self.keys.get(&name).unwrap_or_else(|| panic!("{name} was removed or never there"));
        assert!(known.ends_us > self.now_us || known.pins > 0, "{name} has expired");
        let (seed, bytes) = (known.seed, known.bytes);
        assert_eq!(reading.to_vec().unwrap(), content(seed, bytes), "{name}");
        self.readers.push_back(Reader { reading, seed, bytes, begun_us: self.now_us });
        self.count("read");
    }

    fn close(&mut self, rng: &mut Rng) {
        let Some(reader) = self.readers.pop_front() else { return };
        match reader.reading.to_vec() {
            Ok(value) => assert_eq!(value, content(reader.seed, reader.bytes), "a held value has changed"),
            Err(Refusal::Revoked) => {
                assert!(self.now_us >= reader.begun_us + 30_000_000, "revoked before its time");
                self.count("revoked");
            }
            Err(other) => panic!("{other:?}"),
        }
        if rng.chance_permille(50) {
            std::mem::forget(reader.reading);
        }
    }

    fn change(&mut self, store: &ObjectStore, rng: &mut Rng) {
        let name = format!("key {}", rng.below(NAMES));
        let held = self.keys.get(&name).is_some_and(|known| known.pins > 0);
        match rng.below(4) {
            0 => match store.remove(key(&name)) {
                Ok(()) => assert!(self.keys.remove(&name).is_some() && !held),
                Err(refusal) => assert_eq!(refusal == Refusal::Pinned, held),
            },
            1 if self.keys.values().filter(|known| known.pins > 0).count() < 4 => {
                if store.pin(key(&name)).is_ok() {
                    self.keys.get_mut(&name).expect("it can be read").pins += 1;
                    self.count("pinned");
                }
            }
            2 => {
                assert_eq!(store.unpin(key(&name)).is_ok(), held);
                if let Some(known) = self.keys.get_mut(&name) {
                    known.pins = known.pins.saturating_sub(1);
                }
            }
            _ => {
                if store.set_ttl(key(&name), Some(400_000)).is_ok() {
                    self.keys.get_mut(&name).expect("it can be read").ends_us = self.now_us + 400_000;
                }
            }
        }
    }
}

#[test]
fn random_histories_agree_with_the_model() {
    let mut seen: BTreeMap<&'static str, u32> = BTreeMap::new();
    for seed in 0..12 {
        let mut rng = Rng::fork(seed, 77);
        let (store, hand) = small(6);
        let mut model = Model::default();
        for step in 0..3_000 {
            match rng.below(10) {
                0..3 => model.reserve(&store, &mut rng),
                3..6 => model.seal(&mut rng),
                6..8 => model.open(&store, &mut rng),
                8 => model.close(&mut rng),
                _ => model.change(&store, &mut rng),
            }
            let us = if rng.chance_permille(2) { 31_000_000 } else { rng.below(200_000) };
            pass(&hand, us);
            model.now_us += us;
            while model.readers.len() > 5 {
                model.close(&mut rng);
            }
            while model.writers.len() > 3 {
                model.seal(&mut rng);
            }
            if step % 100 == 0 {
                store.check();
            }
        }
        model.readers.clear();
        model.writers.clear();
        store.check();
        for (what, count) in model.counts {
            *seen.entry(what).or_default() += count;
        }
        assert!(store.stats().evicted > 0);
    }
    let corners = [
        "busy",
        "crashed",
        "full",
        "missed",
        "pinned",
        "read",
        "revoked",
        "rivals",
        "sealed",
        "taken over",
        "unchanged",
    ];
    corners.iter().for_each(|corner| assert!(seen.get(corner) > Some(&0), "{corner}: {seen:?}"));
}
