//! Random histories of values on a disk that loses, tears and reorders unflushed writes, with a crash after every
//! step. Every value that was reported as kept comes back whole. No value that was reported as removed ever does.
//! Nothing comes back in part or with another's bytes, and no block is lost.

use super::{BlobLogCore, BlobLogEvent, Listing, Record, Slab, Source};
use crate::aligned::{AlignedBuffer, PAGE_BYTES};
use crate::disk::testing::FailingDisk;
use crate::index::{Entry, Place};
use crate::io_sequencer::crash::device::Device;
use crate::io_sequencer::crash::open;
use crate::io_sequencer::{Answer, IoCompletion, IoSequencer, Order};
use crate::layout::Layout;
use crate::recover::{Beginning, OpenedFile};
use crate::slot_table::SlotTable;
use crate::tier::TierError;
use baton_types::{BlockKey, Rng};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

const BLOCK_BYTES: usize = 600;
/// Names in use.
const NAMES: u64 = 7;

fn content(name: u64, tag: u64, bytes: usize) -> Vec<u8> {
    let mut rng = Rng::new(name ^ tag << 8);
    (0..bytes).map(|_| rng.below(256) as u8).collect()
}

struct Bytes(Vec<u8>);

impl Source for Bytes {
    fn copy(&self, offset: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.0[offset..offset + into.len()]);
    }
}

/// The slab file with the failing disk below it, one step at a time.
#[derive(Debug)]
struct SteppedFile {
    layout: Layout,
    sequencer: IoSequencer,
    slot_table: SlotTable,
    device: Device,
    recovered: (Vec<Entry>, Vec<Entry>),
    ended: VecDeque<IoCompletion>,
    freed: VecDeque<u32>,
    next_number: u64,
    writes: BTreeSet<u64>,
    is_off: bool,
    /// Index pages that the start gave up.
    lost_pages: u64,
}

impl SteppedFile {
    fn over(layout: Layout, opened: OpenedFile, device: Device) -> Self {
        let slot_table = SlotTable::new(layout, opened.places, &opened.entries, &opened.stale);
        let mut sequencer = IoSequencer::new(opened.header, opened.index, true);
        opened.stale.iter().for_each(|entry| sequencer.take(Order::Remove(entry.place)));
        let (ended, freed, writes) = (VecDeque::new(), VecDeque::new(), BTreeSet::new());
        let lost_pages = match opened.beginning {
            Beginning::Recovered { lost_pages, .. } => lost_pages,
            _ => 0,
        };
        let (recovered, next_number, is_off) = ((opened.entries, opened.stale), 0, false);
        Self {
            layout,
            sequencer,
            slot_table,
            device,
            recovered,
            ended,
            freed,
            next_number,
            writes,
            is_off,
            lost_pages,
        }
    }

    /// Starts the log on a disk image as the real tier finds it.
    fn start(image: &FailingDisk, layout: Layout, life: u64, garbles_from: u64) -> Self {
        let opened = open(image, layout, life);
        let bytes = std::mem::take(&mut image.state.lock().expect("no test panics here").bytes);
        Self::over(layout, opened, Device::new(bytes, garbles_from))
    }

    fn settle(&mut self) {
        loop {
            let ops = self.sequencer.next_ops();
            let answers = self.sequencer.next_answers();
            if ops.is_empty() && answers.is_empty() {
                return;
            }
            ops.into_iter().for_each(|op| self.device.submit(op));
            for answer in answers {
                match answer {
                    Answer::Done(done) => {
                        if self.writes.remove(&done.number) && done.outcome.is_err() {
                            self.slot_table.failed();
                        }
                        self.ended.push_back(done);
                    }
                    Answer::Freed { slot, epoch } => {
                        if self.slot_table.freed(slot, epoch) {
                            self.freed.push_back(slot);
                        }
                    }
                    Answer::Off => self.is_off = true,
                    Answer::Spare(_) | Answer::Stalled => {}
                }
            }
        }
    }

    fn device_acts(&mut self, rng: &mut Rng, may_fail: bool) {
        if let Some(done) = self.device.complete_any(rng, may_fail) {
            self.sequencer.completed(done.token, done.result, done.buffer);
        }
        self.settle();
    }

    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }
}

impl Slab for SteppedFile {
    fn block_bytes(&self) -> usize {
        BLOCK_BYTES
    }

    fn capacity_blocks(&self) -> usize {
        self.slot_table.capacity() as usize
    }

    fn used_blocks(&self) -> usize {
        self.slot_table.in_use()
    }

    fn recovered(&mut self) -> (Vec<Entry>, Vec<Entry>) {
        std::mem::take(&mut self.recovered)
    }

    fn place(&self, key: BlockKey) -> Option<Place> {
        self.slot_table.place(key)
    }

    fn takes_write(&self) -> bool {
        self.slot_table.has_free() && self.writes.len() < 4
    }

    fn takes_read(&self) -> bool {
        true
    }

    fn buffer(&mut self) -> AlignedBuffer {
        AlignedBuffer::new(self.layout.stride_bytes())
    }

    fn recycle(&mut self, _: AlignedBuffer) {}

    fn write(
        &mut self,
        (key, parent): (BlockKey, Option<BlockKey>),
        checksum: u64,
        buffer: AlignedBuffer,
    ) -> Result<(u64, Place), TierError> {
        let place = self.slot_table.reserve(checksum).ok_or(TierError::Full)?;
        let number = self.number();
        self.writes.insert(number);
        self.sequencer.take(Order::Write { number, entry: Entry { key, parent, place }, buffer });
        Ok((number, place))
    }

    fn read(&mut self, key: BlockKey) -> Option<u64> {
        let place = self.slot_table.place(key)?;
        let (number, buffer) = (self.number(), self.buffer());
        self.sequencer.take(Order::Read { number, key, place, buffer });
        Some(number)
    }

    fn peek(&mut self, key: BlockKey) -> Option<u64> {
        let place = self.slot_table.place(key)?;
        let number = self.number();
        self.sequencer.take(Order::Peek { number, place, buffer: AlignedBuffer::new(PAGE_BYTES) });
        Some(number)
    }

    fn next_done(&mut self) -> Option<IoCompletion> {
        self.ended.pop_front()
    }

    fn next_freed(&mut self) -> Option<u32> {
        self.freed.pop_front()
    }

    fn commit(&mut self, key: BlockKey, place: Place) -> bool {
        self.slot_table.commit(key, place)
    }

    fn discard(&mut self, place: Place) {
        let order = self.slot_table.discard(place);
        self.sequencer.take(order);
    }

    fn remove(&mut self, key: BlockKey) -> bool {
        let order = self.slot_table.place(key).and_then(|_| self.slot_table.remove(key.short()));
        let was_there = order.is_some();
        order.into_iter().for_each(|order| self.sequencer.take(order));
        was_there
    }

    fn is_lost(&self) -> bool {
        false
    }

    fn is_off(&self) -> bool {
        self.is_off
    }
}

/// The state of a name.
#[derive(Clone, Debug, Default)]
struct NameKnowledge {
    /// The last value reported as kept, without any later report about it.
    must: Option<u64>,
    /// Values that may come back.
    may: BTreeSet<u64>,
}

struct World {
    layout: Layout,
    rng: Rng,
    core: BlobLogCore<SteppedFile>,
    known: BTreeMap<u64, NameKnowledge>,
    lengths: BTreeMap<u64, usize>,
    /// Values being written: name by tag.
    putting: BTreeMap<u64, u64>,
    /// The values that each removal takes away.
    removing: BTreeMap<u64, (u64, Vec<u64>)>,
    /// Reads under way: the name, and what it might be when it was asked for.
    reading: BTreeMap<u64, (u64, BTreeSet<u64>)>,
    next_tag: u64,
    next_token: u64,
    life: u64,
    seen: BTreeMap<&'static str, u64>,
}

impl World {
    fn new(capacity: u32, seed: u64) -> Self {
        let layout = Layout { block_bytes: BLOCK_BYTES, capacity, fingerprint: 3 };
        // In every other history the index is old or new, sector by sector: then nothing may be lost.
        let garbles_from = if seed.is_multiple_of(2) { layout.slot_offset(0) } else { 8192 };
        let core = BlobLogCore::new(SteppedFile::start(&FailingDisk::default(), layout, 1, garbles_from));
        Self {
            layout,
            rng: Rng::new(seed),
            core,
            known: BTreeMap::new(),
            lengths: BTreeMap::new(),
            putting: BTreeMap::new(),
            removing: BTreeMap::new(),
            reading: BTreeMap::new(),
            next_tag: 1_000,
            next_token: 0,
            life: 2,
            seen: BTreeMap::new(),
        }
    }

    fn count(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    fn act(&mut self) {
        match self.rng.below(100) {
            0..25 => self.put(),
            25..36 => self.remove(),
            36..44 => self.get(),
            _ => self.core.slab.device_acts(&mut self.rng, true),
        }
        self.poll_events();
    }

    fn put(&mut self) {
        let (name, tag) = (self.rng.below(NAMES), self.next_tag);
        self.next_tag += 1;
        let top = [30, 700, 2_000, 3_000][self.rng.below(4) as usize];
        let bytes = self.rng.below(top) as usize;
        self.known.entry(name).or_default().may.insert(tag);
        self.lengths.insert(tag, bytes);
        self.putting.insert(tag, name);
        let header: Vec<u8> = [name, tag].iter().flat_map(|word| word.to_le_bytes()).collect();
        let source = Box::new(Bytes(content(name, tag, bytes)));
        self.core.put(Record { name, tag, header, bytes: bytes as u32, source });
    }

    fn remove(&mut self) {
        let (name, token) = (self.rng.below(NAMES), self.next_token);
        self.next_token += 1;
        let known = self.known.entry(name).or_default();
        known.must = None;
        // Everything that was ever put under this name, be it dropped, replaced or being written.
        self.removing.insert(token, (name, known.may.iter().copied().collect()));
        self.core.remove(name, token);
    }

    fn get(&mut self) {
        let (name, token) = (self.rng.below(NAMES), self.next_token);
        self.next_token += 1;
        let may = self.known.get(&name).map(|known| known.may.clone()).unwrap_or_default();
        self.reading.insert(token, (name, may));
        self.core.get(name, token, false);
    }

    fn poll_events(&mut self) {
        self.core.slab.settle();
        self.core.pump();
        self.core.slab.settle();
        while let Some(done) = self.core.next_done() {
            self.on_event(done);
        }
    }

    fn on_event(&mut self, done: BlobLogEvent) {
        match done {
            BlobLogEvent::Kept(Listing { name, tag, .. }) => {
                self.putting.remove(&tag);
                self.known.entry(name).or_default().must = Some(tag);
                self.count("kept");
            }
            BlobLogEvent::NotKept(Listing { tag, .. }, why) => {
                self.putting.remove(&tag);
                self.count(match why {
                    super::PutError::TooLarge => "too large",
                    super::PutError::Full => "full",
                    super::PutError::SameName => "same name",
                    super::PutError::Removed => "cancelled",
                    super::PutError::Failed(_) => "failed",
                });
            }
            BlobLogEvent::Got(token, found) => {
                let (name, may) = self.reading.remove(&token).expect("asked once, answered once");
                if let Ok((header, value)) = found {
                    let tag = self.tag_of(name, &header, &value);
                    assert!(may.contains(&tag), "what was removed before was read");
                    self.count("read");
                }
            }
            BlobLogEvent::Removed(token) => {
                let (name, tags) = self.removing.remove(&token).expect("asked once, answered once");
                let known = self.known.entry(name).or_default();
                tags.iter().for_each(|tag| _ = known.may.remove(tag));
                self.count("removed");
            }
            BlobLogEvent::Dropped(Listing { name, tag, .. }) => {
                let known = self.known.entry(name).or_default();
                known.must = known.must.filter(|must| *must != tag);
                self.count("dropped");
            }
        }
    }

    /// Which value these bytes are; that they are one at all is what is tested.
    fn tag_of(&self, name: u64, header: &[u8], value: &[u8]) -> u64 {
        let word = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        assert_eq!(word(0), name, "another's bytes");
        let tag = word(8);
        assert_eq!(value, content(name, tag, self.lengths[&tag]), "torn");
        tag
    }

    /// Cuts the power in a copy of the world and looks at what is left.
    fn crash(&mut self) -> (BlobLogCore<SteppedFile>, BTreeMap<u64, u64>) {
        let device = self.core.slab.device.after_power_cut(&mut self.rng);
        let image = FailingDisk::with(device.lasting().to_vec());
        let garbles_from = self.core.slab.device.garbles_from();
        let mut core = BlobLogCore::new(SteppedFile::start(&image, self.layout, self.life, garbles_from));
        let may_lose = core.slab.lost_pages > 0 && garbles_from < self.layout.slot_offset(0);
        let mut found = BTreeMap::new();
        for name in 0..NAMES {
            core.get(name, name, false);
        }
        let mut answers = 0;
        for _ in 0..100_000 {
            core.slab.settle();
            core.slab.device_acts(&mut self.rng, false);
            core.pump();
            while let Some(done) = core.next_done() {
                let BlobLogEvent::Got(name, value) = done else { panic!("{done:?} after a start") };
                answers += 1;
                if let Ok((header, value)) = value {
                    found.insert(name, self.tag_of(name, &header, &value));
                }
            }
            if answers == NAMES {
                break;
            }
        }
        assert_eq!(answers, NAMES, "every read ends");
        assert_eq!(found.len(), core.objects.len(), "what is listed can be read");
        for (name, tag) in &found {
            assert!(self.known[name].may.contains(tag), "a removed value came back: {name} {tag}");
        }
        for (name, known) in &self.known {
            if let Some(tag) = known.must.filter(|_| !may_lose) {
                assert_eq!(found.get(name), Some(&tag), "a kept value is lost: {name} {known:?}");
            }
        }
        self.count("crashed");
        (core, found)
    }

    fn live_on(&mut self, (core, found): (BlobLogCore<SteppedFile>, BTreeMap<u64, u64>)) {
        self.core = core;
        self.known.clear();
        for (name, tag) in found {
            self.known.insert(name, NameKnowledge { must: Some(tag), may: BTreeSet::from([tag]) });
        }
        // The keeper numbers what it found anew; here the first numbers go on to be used.
        for object in self.core.objects.values_mut() {
            let known = &self.known[&object.head.short().0];
            object.tag = known.must.expect("set above");
        }
        let tags: BTreeMap<u64, u64> = self.core.objects.iter().map(|(name, o)| (*name, o.tag)).collect();
        for (name, tag) in &mut self.core.order {
            *tag = tags[name];
        }
        self.putting.clear();
        self.removing.clear();
        self.reading.clear();
        // A value being removed may reappear until its removal is reported.
        let slab = &self.core.slab;
        for slot in self.core.leaving.keys() {
            let at = slab.layout.slot_offset(*slot) as usize;
            let word =
                |at: usize| u64::from_le_bytes(slab.device.lasting()[at..at + 8].try_into().expect("eight"));
            self.known.entry(word(at + 8)).or_default().may.insert(word(at + 16));
        }
        self.life += 1;
        self.poll_events();
        self.count("lived on");
    }

    /// Everything is removed on a disk that is well again: every block is free.
    fn end(mut self) -> BTreeMap<&'static str, u64> {
        self.rest();
        for name in 0..NAMES {
            let token = self.next_token;
            self.next_token += 1;
            self.removing.insert(token, (name, Vec::new()));
            self.core.remove(name, token);
        }
        self.rest();
        assert!(self.removing.is_empty() && self.putting.is_empty() && self.reading.is_empty());
        let slab = &self.core.slab;
        assert_eq!((slab.slot_table.in_use(), slab.slot_table.draining(), self.core.owed_blocks), (0, 0, 0));
        assert!(self.core.puts.is_empty() && self.core.gets.is_empty() && self.core.jobs.is_empty());
        self.known.values_mut().for_each(|known| *known = NameKnowledge::default());
        let (_, found) = self.crash();
        assert!(found.is_empty());
        self.seen
    }

    fn rest(&mut self) {
        for _ in 0..20_000 {
            self.poll_events();
            if self.core.slab.sequencer.is_idle() && self.core.jobs.is_empty() {
                return;
            }
            self.core.slab.device_acts(&mut self.rng, false);
        }
        panic!("it never comes to rest");
    }
}

fn play(capacity: u32, seed: u64, steps: u64) -> BTreeMap<&'static str, u64> {
    let mut world = World::new(capacity, seed);
    for _ in 0..steps {
        world.act();
        let left = world.crash();
        if world.core.slab.is_off || world.rng.below(60) == 0 {
            world.live_on(left);
        }
    }
    // A disk that was stalled goes on with the next start.
    let left = world.crash();
    world.live_on(left);
    world.end()
}

fn play_all(histories: u64, steps: u64) {
    let mut seen: BTreeMap<&'static str, u64> = BTreeMap::new();
    for seed in 0..histories {
        let capacity = [5, 9, 16, 24, 80][seed as usize % 5];
        for (name, count) in play(capacity, seed, steps) {
            *seen.entry(name).or_default() += count;
        }
    }
    assert!(seen["crashed"] >= histories * steps, "{seen:?}");
    let corners =
        ["kept", "too large", "same name", "cancelled", "failed", "read", "removed", "dropped", "lived on"];
    assert!(corners.iter().all(|corner| seen.get(corner).is_some_and(|count| *count > 10)), "{seen:?}");
}

#[test]
fn more_than_ten_thousand_power_cuts_leave_whole_values_and_no_removed_one() {
    play_all(30, 350);
}

#[test]
#[ignore = "minutes: fifty times as many"]
fn half_a_million_power_cuts_leave_whole_values_and_no_removed_one() {
    play_all(500, 1_050);
}
