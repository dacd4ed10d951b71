//! Random histories on a disk that loses, tears and reorders what was not flushed, with a crash at
//! every point: every block that was reported lasting comes back, no other bytes ever do, and no
//! slot is lost.

pub(crate) mod device;

use super::{Answer, IoCompletion, IoSequencer, Order};
use crate::aligned::AlignedBuffer;
use crate::checksum::block_checksum;
use crate::disk::Disk;
use crate::disk::testing::FailingDisk;
use crate::index::{Entry, Place};
use crate::layout::Layout;
use crate::recover::{Beginning, FoundHeader, OpenedFile, begin, look, recover};
use crate::slot_table::SlotTable;
use crate::tier::TierError;
use baton_types::{BlockKey, Rng};
use device::Device;
use std::collections::{BTreeMap, BTreeSet};

const BLOCK_BYTES: usize = 600;
/// Keys in use: more than slots.
const KEYS: u64 = 12;

fn key(number: u64) -> BlockKey {
    BlockKey(u128::from(number) << 64 | u128::from(number + 1))
}

/// The content of the `version`th put of a key.
fn content(key: BlockKey, version: u64) -> Vec<u8> {
    let mut rng = Rng::new(key.short().0 ^ version << 8);
    (0..BLOCK_BYTES).map(|_| rng.below(256) as u8).collect()
}

/// The state of a key.
#[derive(Clone, Debug, Default)]
struct KeyKnowledge {
    /// The version that was reported lasting and was not removed since.
    must: Option<u64>,
    /// Versions that the file may still tell of.
    may: BTreeSet<u64>,
}

/// A write under way.
#[derive(Clone, Copy, Debug)]
struct Writing {
    key: BlockKey,
    version: u64,
    place: Place,
    is_of_this_life: bool,
}

struct World {
    layout: Layout,
    rng: Rng,
    device: Device,
    sequencer: IoSequencer,
    slot_table: SlotTable,
    known: BTreeMap<BlockKey, KeyKnowledge>,
    /// Versions by slot and generation, for answers about slots.
    versions: BTreeMap<(u32, u64), (BlockKey, u64)>,
    /// Blocks whose slots drain.
    leaving: BTreeMap<u32, (BlockKey, u64)>,
    writing: BTreeMap<u64, Writing>,
    reading: BTreeMap<u64, (BlockKey, Option<u64>)>,
    next_number: u64,
    next_version: u64,
    next_life: u64,
    /// The first version of this life: earlier ones are gone once one of its own is lasting.
    first_version: u64,
    is_off: bool,
    seen: BTreeMap<&'static str, u64>,
}

/// Opens what is on a disk, as a start of the real tier does.
pub(crate) fn open(image: &FailingDisk, layout: Layout, incarnation: u64) -> OpenedFile {
    match look(image, &layout).expect("the disk answers") {
        FoundHeader::Usable(header) => recover(image, header).expect("the disk answers"),
        FoundHeader::Unusable(sequence, reason) => {
            assert_eq!(reason, None, "a crash leaves nothing that is not ours");
            image.write_at(&vec![0; layout.file_bytes() as usize], 0).expect("it has room");
            let header = crate::layout::Header { layout, incarnation, sequence };
            begin(image, header, Beginning::New).expect("the disk answers")
        }
    }
}

fn versions_of(
    opened: &OpenedFile,
    device: &Device,
    known: &BTreeMap<BlockKey, KeyKnowledge>,
) -> Vec<(Entry, u64)> {
    let mut found = Vec::new();
    for entry in &opened.entries {
        let from = opened.header.layout.slot_offset(entry.place.slot) as usize;
        let bytes = &device.lasting()[from..from + BLOCK_BYTES];
        let may = &known.get(&entry.key).expect("a key that was never put came back").may;
        let version = may.iter().copied().find(|&version| content(entry.key, version) == bytes);
        let version = version.unwrap_or_else(|| panic!("torn or foreign bytes: {entry:?}, may be {may:?}"));
        assert_eq!(entry.place.checksum, block_checksum(entry.key, bytes));
        found.push((*entry, version));
    }
    found
}

/// End of the headers: a sector of a header is old or new, never neither.
const HEADERS_END: u64 = 8192;

/// Whether all that must be there is, and nothing else. An index page with a sector that is neither old nor new is given
/// up, and what it lists with it.
fn check(opened: &OpenedFile, found: &[(Entry, u64)], known: &BTreeMap<BlockKey, KeyKnowledge>) -> bool {
    let is_given_up = matches!(opened.beginning, Beginning::Recovered { lost_pages: 1.., .. });
    let by_key: BTreeMap<BlockKey, u64> =
        found.iter().map(|(entry, version)| (entry.key, *version)).collect();
    assert_eq!(by_key.len(), found.len(), "a key came back twice");
    for (key, known) in known {
        if let Some(version) = known.must.filter(|_| !is_given_up) {
            assert_eq!(by_key.get(key), Some(&version), "a lasting block is lost: {key:?} {known:?}");
        }
    }
    let slots: BTreeSet<u32> = opened.entries.iter().chain(&opened.stale).map(|e| e.place.slot).collect();
    assert_eq!(slots.len(), opened.entries.len() + opened.stale.len(), "a slot has two tenants");
    is_given_up
}

impl World {
    fn new(capacity: u32, seed: u64) -> Self {
        let layout = Layout { block_bytes: BLOCK_BYTES, capacity, fingerprint: 3 };
        let image = FailingDisk::default();
        let opened = open(&image, layout, 1);
        let bytes = std::mem::take(&mut image.state.lock().expect("no test panics here").bytes);
        Self {
            layout,
            rng: Rng::new(seed),
            // In every other history the index is old or new, sector by sector: then nothing may be lost.
            device: Device::new(
                bytes,
                if seed.is_multiple_of(2) { layout.slot_offset(0) } else { HEADERS_END },
            ),
            slot_table: SlotTable::new(layout, opened.places, &opened.entries, &opened.stale),
            sequencer: IoSequencer::new(opened.header, opened.index, true),
            known: BTreeMap::new(),
            versions: BTreeMap::new(),
            leaving: BTreeMap::new(),
            writing: BTreeMap::new(),
            reading: BTreeMap::new(),
            next_number: 0,
            next_version: 0,
            next_life: 2,
            first_version: 0,
            is_off: false,
            seen: BTreeMap::new(),
        }
    }

    fn count(&mut self, name: &'static str) {
        *self.seen.entry(name).or_default() += 1;
    }

    /// One action, and what follows from it.
    fn act(&mut self) {
        match self.rng.below(100) {
            0..35 => self.put(),
            35..50 => self.remove(),
            50..58 => self.read(),
            58 => self.clear(),
            _ => self.device_acts(true),
        }
        self.pump();
    }

    fn pump(&mut self) {
        loop {
            let ops = self.sequencer.next_ops();
            let answers = self.sequencer.next_answers();
            if ops.is_empty() && answers.is_empty() {
                return;
            }
            ops.into_iter().for_each(|op| self.device.submit(op));
            answers.into_iter().for_each(|answer| self.on_answer(answer));
        }
    }

    fn device_acts(&mut self, may_fail: bool) {
        if let Some(done) = self.device.complete_any(&mut self.rng, may_fail) {
            self.sequencer.completed(done.token, done.result, done.buffer);
        }
    }

    fn put(&mut self) {
        let mut key = key(self.rng.below(KEYS));
        // One that is on its way out is likely to be wanted again.
        if let Some((leaving, _)) = self.leaving.values().next().filter(|_| self.rng.below(3) == 0) {
            key = *leaving;
        }
        let busy = self.writing.values().any(|writing| writing.key == key && writing.is_of_this_life);
        if busy || self.slot_table.place(key).is_some() {
            return;
        }
        let (version, number) = (self.next_version, self.next_number);
        let bytes = content(key, version);
        let Some(place) = self.slot_table.reserve(block_checksum(key, &bytes)) else { return };
        (self.next_version, self.next_number) = (version + 1, number + 1);
        let mut buffer = AlignedBuffer::new(self.layout.stride_bytes());
        buffer[..BLOCK_BYTES].copy_from_slice(&bytes);
        self.known.entry(key).or_default().may.insert(version);
        self.versions.insert((place.slot, place.generation), (key, version));
        self.writing.insert(number, Writing { key, version, place, is_of_this_life: true });
        self.sequencer.take(Order::Write { number, entry: Entry { key, parent: None, place }, buffer });
    }

    fn remove(&mut self) {
        let key = key(self.rng.below(KEYS));
        let Some(place) = self.slot_table.place(key) else { return };
        let order = self.slot_table.remove(key.short()).expect("it has a place");
        self.known.entry(key).or_default().must = None;
        self.leaving.insert(place.slot, self.versions[&(place.slot, place.generation)]);
        self.sequencer.take(order);
        self.count("removed");
    }

    fn read(&mut self) {
        let key = key(self.rng.below(KEYS));
        let Some(place) = self.slot_table.place(key) else { return };
        let must = self.known[&key].must;
        self.reading.insert(self.next_number, (key, must));
        let buffer = AlignedBuffer::new(self.layout.stride_bytes());
        self.sequencer.take(Order::Read { number: self.next_number, key, place, buffer });
        self.next_number += 1;
    }

    fn clear(&mut self) {
        self.slot_table.clear();
        self.known.values_mut().for_each(|known| known.must = None);
        self.writing.values_mut().for_each(|writing| writing.is_of_this_life = false);
        self.leaving.clear();
        self.first_version = self.next_version;
        self.next_life += 1;
        self.sequencer.take(Order::Clear(self.next_life));
        self.count("cleared");
    }

    fn on_answer(&mut self, answer: Answer) {
        match answer {
            Answer::Done(IoCompletion { number, outcome, buffer }) => match self.reading.remove(&number) {
                Some((key, version)) => self.was_read(key, version, outcome, &buffer),
                None => self.was_written(number, outcome),
            },
            Answer::Freed { slot, epoch } => {
                if self.slot_table.freed(slot, epoch)
                    && let Some((key, version)) = self.leaving.remove(&slot)
                {
                    self.known.entry(key).or_default().may.remove(&version);
                }
                self.count("freed");
            }
            Answer::Spare(_) => {}
            Answer::Stalled => self.count("stalled"),
            Answer::Off => self.is_off = true,
        }
    }

    fn was_read(
        &mut self,
        key: BlockKey,
        version: Option<u64>,
        outcome: Result<u64, TierError>,
        bytes: &[u8],
    ) {
        match outcome {
            Ok(_) => {
                let version = version.expect("only blocks that rest there are read");
                assert_eq!(bytes[..BLOCK_BYTES], content(key, version));
                self.count("read");
            }
            Err(error) => assert!(matches!(error, TierError::Io(_)), "{error}"),
        }
    }

    fn was_written(&mut self, number: u64, outcome: Result<u64, TierError>) {
        let Some(writing) = self.writing.remove(&number) else { panic!("a write ended twice") };
        let Writing { key, version, place, is_of_this_life } = writing;
        if !is_of_this_life {
            return;
        }
        if outcome.is_err() {
            self.slot_table.failed();
            self.leaving.insert(place.slot, (key, version));
            return self.count("write failed");
        }
        assert!(self.slot_table.commit(key, place));
        self.known.entry(key).or_default().must = Some(version);
        let first = self.first_version;
        self.known.values_mut().for_each(|known| known.may.retain(|&version| version >= first));
        self.count("lasting");
    }

    /// Cuts the power, in a copy of the world, and looks at what is left.
    fn crash(&mut self) -> (Device, OpenedFile, Vec<(Entry, u64)>) {
        let device = self.device.after_power_cut(&mut self.rng);
        let image = FailingDisk::with(device.lasting().to_vec());
        let opened = open(&image, self.layout, self.next_life);
        let bytes = std::mem::take(&mut image.state.lock().expect("no test panics here").bytes);
        let device = Device::new(bytes, self.device.garbles_from());
        let found = versions_of(&opened, &device, &self.known);
        if check(&opened, &found, &self.known) {
            assert_eq!(device.garbles_from(), HEADERS_END, "a crash alone costs no page");
            self.count("given up");
        }
        self.count("crashed");
        (device, opened, found)
    }

    /// Goes on from what a power cut left.
    fn live_on(&mut self, (device, opened, found): (Device, OpenedFile, Vec<(Entry, u64)>)) {
        let of = |entry: &Entry| self.versions[&(entry.place.slot, entry.place.generation)];
        let left: Vec<_> = opened.stale.iter().map(|entry| (entry.place, of(entry))).collect();
        self.known.clear();
        self.leaving.clear();
        (self.first_version, self.is_off) = (0, false);
        for (entry, version) in &found {
            let may = BTreeSet::from([*version]);
            self.known.insert(entry.key, KeyKnowledge { must: Some(*version), may });
        }
        self.slot_table = SlotTable::new(self.layout, opened.places, &opened.entries, &opened.stale);
        self.sequencer = IoSequencer::new(opened.header, opened.index, true);
        for (place, (key, version)) in left {
            self.known.entry(key).or_default().may.insert(version);
            self.leaving.insert(place.slot, (key, version));
            self.sequencer.take(Order::Remove(place));
            self.count("stale");
        }
        (self.writing, self.reading) = (BTreeMap::new(), BTreeMap::new());
        self.device = device;
        self.pump();
    }

    /// With a disk that is well again everything comes to rest, and no slot is missing.
    fn come_to_rest(&mut self) {
        for round in 0.. {
            self.pump();
            if self.sequencer.is_idle() {
                break;
            }
            self.device_acts(false);
            assert!(round < 10_000, "it never comes to rest");
        }
        assert!(self.writing.is_empty() && self.reading.is_empty());
        assert_eq!(self.slot_table.in_use(), self.slot_table.committed());
    }

    /// Everything is removed: every slot is free, and stays so over a restart.
    fn end(mut self) -> BTreeMap<&'static str, u64> {
        self.come_to_rest();
        // A stalled sequencer goes on with the next order.
        while self.writing.is_empty() && self.slot_table.committed() == 0 {
            self.put();
        }
        self.come_to_rest();
        for number in 0..KEYS {
            if let Some(order) = self.slot_table.remove(key(number).short()) {
                self.sequencer.take(order);
            }
        }
        self.known.values_mut().for_each(|known| known.must = None);
        self.come_to_rest();
        assert_eq!((self.slot_table.in_use(), self.slot_table.draining()), (0, 0), "a slot is lost");
        let (_, opened, found) = self.crash();
        assert_eq!((found.len(), opened.stale.len()), (0, 0));
        self.seen
    }
}

/// A history with a crash after each of `steps`; after one of forty it goes on from there.
fn play(capacity: u32, seed: u64, steps: u64) -> BTreeMap<&'static str, u64> {
    let mut world = World::new(capacity, seed);
    for _ in 0..steps {
        world.act();
        let left = world.crash();
        if world.is_off || world.rng.below(40) == 0 {
            world.live_on(left);
        }
    }
    if world.is_off {
        let left = world.crash();
        world.live_on(left);
    }
    world.end()
}

fn play_all(histories: u64, steps: u64) {
    let mut seen: BTreeMap<&'static str, u64> = BTreeMap::new();
    for seed in 0..histories {
        let capacity = [1, 3, 6, 9, 70][seed as usize % 5];
        for (name, count) in play(capacity, seed, steps) {
            *seen.entry(name).or_default() += count;
        }
    }
    assert!(seen["crashed"] >= histories * steps, "{seen:?}");
    let corners = ["removed", "read", "cleared", "freed", "stalled", "write failed", "lasting"];
    assert!(corners.iter().all(|corner| seen.get(corner).is_some_and(|&count| count > 50)), "{seen:?}");
    assert!(seen.get("given up").is_some_and(|&count| count > 2), "{seen:?}");
}

#[test]
fn more_than_ten_thousand_power_cuts_lose_nothing_that_was_reported_lasting() {
    play_all(60, 400);
}

#[test]
#[ignore = "a minute or more: a hundred times as many"]
fn millions_of_power_cuts_lose_nothing_that_was_reported_lasting() {
    play_all(2000, 1200);
}
