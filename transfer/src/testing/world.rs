//! A naive world for the core: peers with memory, and links that do everything a transport may do wrong.
//!
//! The world fills every range of a batch so that each byte differs from those of any other batch. When the core
//! reports a batch's end, the world overwrites its ranges at once, as a program would that reuses its memory. A byte
//! that lands after the core has promised silence shows up when the world checks the range.

use alloc::collections::{BTreeMap, BTreeSet, BinaryHeap};
use alloc::vec;
use alloc::vec::Vec;
use core::cmp::Reverse;

use baton_types::Rng;

use crate::Priority;
use crate::*;

mod programs;

/// Bytes of one place of a batch, here and at its peer.
pub(crate) const PLACE_BYTES: usize = 64 << 10;

/// How bad the world is, in thousandths.
#[derive(Clone, Debug, Default)]
pub(crate) struct Chances {
    /// A slice breaks its path.
    pub(crate) reset: u32,
    /// A slice freezes its path: the path delivers nothing until it closes.
    pub(crate) freeze: u32,
    /// A slice comes very late.
    pub(crate) delay: u32,
    /// The transport reports an end twice.
    pub(crate) duplicate: u32,
    /// A slice comes damaged.
    pub(crate) damage: u32,
    /// A path is full.
    pub(crate) full: u32,
    /// A path cannot be opened.
    pub(crate) closed_door: u32,
    /// A path ends without a word from the peer.
    pub(crate) unknown: u32,
    /// With a submission, some peer starts a new life.
    pub(crate) rebirth: u32,
    /// With a submission, some batch is cancelled.
    pub(crate) cancel: u32,
    /// With a submission, some window is revoked.
    pub(crate) revoke: u32,
    /// A batch has a deadline that it may not meet.
    pub(crate) hurry: u32,
}

/// How big it is.
#[derive(Clone, Debug)]
pub(crate) struct Scale {
    pub(crate) peers: usize,
    /// Batches that one peer may have at once.
    pub(crate) places: usize,
    pub(crate) rails: u8,
    /// How fast a path carries, bytes in a microsecond.
    pub(crate) bytes_per_us: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    Opened(u32, bool),
    Lands(Landing),
    /// A slice ends, by its number.
    Ends(u64, SliceOutcome),
    /// A notice gets there: path, ticket, batch.
    Noticed(u32, u64, u64),
    ProbeAnswered(u32, u64),
    Breaks(u32),
    Closed(u32, bool),
    Room(u32),
    Submits,
}

/// The outcome that the transport reports for a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum SliceOutcome {
    Done,
    Broken,
    Damaged,
    Stale,
}

/// Bytes that get to where they belong: by place, for a transport knows of no batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Landing {
    slice: u64,
    path: u32,
    /// Names the window.
    batch: u64,
    direction: Direction,
    here: usize,
    peer: usize,
    life: u32,
    there: usize,
    bytes: u32,
}

#[derive(Clone, Copy, Debug)]
struct SentSlice {
    landing: Landing,
    ticket: u64,
    reported: bool,
}

#[derive(Debug, Default)]
struct Link {
    peer: usize,
    life: u32,
    free_us: u64,
    frozen: bool,
    closing: bool,
    /// No byte of it can land on this side.
    closed: bool,
    /// No byte of it can land on the peer's side.
    fenced: bool,
    full: bool,
    /// Slices of which something may land.
    slices: BTreeSet<u64>,
}

#[derive(Clone, Debug)]
struct Range {
    direction: Direction,
    at: usize,
    bytes: usize,
}

#[derive(Clone, Debug)]
struct Job {
    peer: usize,
    life: u32,
    here: usize,
    there: usize,
    ranges: Vec<Range>,
    priority: Priority,
    notice: bool,
    noticed: u32,
    submitted_us: u64,
}

struct Peer {
    number: PeerNumber,
    life: u32,
    known: bool,
    memory: Vec<u8>,
    free: Vec<usize>,
    guards: Guards,
}

/// A place whose last batch has ended, and what must stay in it.
type Guards = BTreeMap<usize, u8>;

pub(crate) struct World {
    pub(crate) core: MoverCore,
    pub(crate) now_us: u64,
    pub(crate) chances: Chances,
    /// Every effect, where they are to be compared.
    pub(crate) journal: Option<Vec<Effect>>,
    pub(crate) ends: BTreeMap<&'static str, u64>,
    pub(crate) posted: u64,
    pub(crate) posted_by_priority: [u64; 4],
    pub(crate) posted_by_rail: Vec<u64>,
    pub(crate) longest_us: u64,
    /// Keep so many batches alive.
    pub(crate) load: usize,
    scale: Scale,
    rng: Rng,
    happenings: BinaryHeap<Reverse<(u64, u64, Happening)>>,
    sequence: u64,
    peers: Vec<Peer>,
    next_number: u32,
    links: BTreeMap<u32, Link>,
    rails_of: BTreeMap<u32, u8>,
    sent: BTreeMap<u64, SentSlice>,
    revoked: BTreeSet<u64>,
    jobs: BTreeMap<u64, Job>,
    next_job: u64,
    memory: Vec<u8>,
    free: Vec<usize>,
    guards: Guards,
    poison: u8,
    steps: u64,
    pub(crate) submitting: bool,
}

/// The byte of a batch at a place of it.
pub(super) fn byte(batch: u64, at: usize) -> u8 {
    let mixed = batch.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
    (mixed as u8) ^ (at as u8).wrapping_mul(167) ^ ((at >> 8) as u8).wrapping_mul(29)
}

impl World {
    pub(crate) fn new(seed: u64, config: MoverConfig, scale: Scale, chances: Chances) -> Self {
        let mut config = MoverConfig { seed, ..config };
        config.rails = vec![config.rails[0]; usize::from(scale.rails)];
        let here = (scale.peers * scale.places).min(4_096);
        let peer = |index: usize| Peer {
            number: PeerNumber(index as u32),
            life: 0,
            known: false,
            memory: vec![0; scale.places * PLACE_BYTES],
            free: (0..scale.places).collect(),
            guards: Guards::new(),
        };
        Self {
            core: MoverCore::new(config),
            now_us: 0,
            chances,
            journal: None,
            ends: BTreeMap::new(),
            posted: 0,
            posted_by_priority: [0; 4],
            posted_by_rail: vec![0; usize::from(scale.rails)],
            longest_us: 0,
            load: 32,
            rng: Rng::fork(seed, 77),
            happenings: BinaryHeap::new(),
            sequence: 0,
            peers: (0..scale.peers).map(peer).collect(),
            next_number: scale.peers as u32,
            links: BTreeMap::new(),
            rails_of: BTreeMap::new(),
            sent: BTreeMap::new(),
            revoked: BTreeSet::new(),
            jobs: BTreeMap::new(),
            next_job: 0,
            memory: vec![0; here * PLACE_BYTES],
            free: (0..here).collect(),
            guards: Guards::new(),
            poison: 0,
            steps: 0,
            submitting: true,
            scale,
        }
    }

    pub(crate) fn has_place(&self, peer: usize) -> bool {
        !self.free.is_empty() && !self.peers[peer].free.is_empty()
    }

    pub(crate) fn live(&self) -> usize {
        self.jobs.len()
    }

    /// Runs until so many slices were posted, then heals and waits for the rest to end.
    pub(crate) fn run(&mut self, slices: u64) {
        self.happens(1, Happening::Submits);
        while self.posted < slices {
            self.turn();
        }
        self.chances = Chances::default();
        self.submitting = false;
        while !self.jobs.is_empty() || !self.happenings.is_empty() {
            self.turn();
        }
        self.finish();
    }

    /// Everything has ended: nothing is left over, and what had to stay has stayed.
    pub(crate) fn finish(&mut self) {
        self.core.check().unwrap();
        let stats = self.core.stats();
        assert_eq!((stats.outstanding_slices, stats.outstanding_bytes, stats.live_batches), (0, 0, 0));
        assert_eq!(stats.waiting_peers, 0);
        for place in 0..self.memory.len() / PLACE_BYTES {
            self.look_here(place);
        }
        for peer in 0..self.peers.len() {
            for place in 0..self.scale.places {
                self.look_there(peer, place);
            }
        }
    }

    /// The next thing that happens, or the core's time.
    pub(crate) fn turn(&mut self) {
        let next = self.happenings.peek().map(|Reverse((at_us, ..))| *at_us);
        let due = self.core.next_deadline();
        if due.is_some_and(|due| next.is_none_or(|next| due < next)) {
            self.now_us = self.now_us.max(due.unwrap());
            return self.feed(Input::TimerFired);
        }
        let Some(Reverse((at_us, _, happening))) = self.happenings.pop() else {
            panic!("nothing will happen any more: {:?}", self.core.snapshot());
        };
        self.now_us = self.now_us.max(at_us);
        self.happen(happening);
    }

    fn happens(&mut self, in_us: u64, happening: Happening) {
        self.sequence += 1;
        self.happenings.push(Reverse((self.now_us + in_us, self.sequence, happening)));
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Opened(path, well) => self.opened(path, well),
            Happening::Lands(landing) => self.lands(landing),
            Happening::Ends(slice, reported) => self.ends(slice, reported),
            Happening::Noticed(path, ticket, batch) => self.noticed(path, ticket, batch),
            Happening::ProbeAnswered(path, ticket) => {
                if self.links.get(&path).is_some_and(|link| !link.frozen && !link.closed) {
                    self.feed(Input::Notified { path: PathNumber(path), ticket: SliceTicket(ticket) });
                }
            }
            Happening::Breaks(path) => self.breaks(path),
            Happening::Closed(path, known) => self.closed(path, known),
            Happening::Room(path) => {
                if let Some(link) = self.links.get_mut(&path) {
                    link.full = false;
                    self.feed(Input::PathRoom { path: PathNumber(path) });
                }
            }
            Happening::Submits => self.submits(),
        }
    }

    pub(crate) fn feed(&mut self, input: Input) {
        let mut effects = Vec::new();
        self.core.step(self.now_us, input, &mut effects);
        self.steps += 1;
        if self.steps.is_multiple_of(4_096) {
            self.core.check().unwrap();
        }
        if let Some(journal) = &mut self.journal {
            journal.extend(effects.iter().cloned());
        }
        for effect in effects {
            self.carry_out(effect);
        }
    }

    fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::OpenPath { path, peer, rail } => self.open(path.0, peer, rail.0),
            Effect::ClosePath { path } => self.close(path.0),
            Effect::Post { path, ticket, batch, op, at, bytes } => {
                self.post((path.0, ticket.0), (batch.0, op as usize), at, bytes);
            }
            Effect::Probe { path, ticket } => self.happens(20, Happening::ProbeAnswered(path.0, ticket.0)),
            Effect::Notify { path, ticket, batch } => self.notify(path.0, ticket.0, batch.0),
            Effect::Done { batch, .. } => {
                self.is_right(batch.0);
                self.ended(batch.0, "done", true);
            }
            Effect::Failed { batch, remote_fenced, .. } => self.ended(batch.0, "failed", remote_fenced),
            Effect::Cancelled { batch, remote_fenced } => self.ended(batch.0, "cancelled", remote_fenced),
            Effect::Refused { batch, refusal } => {
                assert!(!matches!(refusal, Refusal::Duplicate | Refusal::Empty), "{refusal}");
                self.ended(batch.0, "refused", true);
            }
            Effect::PeerRefused { peer } | Effect::PeerForgotten { peer } => {
                let index = self.peers.iter().position(|known| known.number == peer);
                if let Some(index) = index {
                    self.peers[index].known = false;
                    self.peers[index].number = PeerNumber(self.next_number);
                    self.next_number += 1;
                }
            }
        }
    }
}

/// The part of the world that simulates links.
impl World {
    fn open(&mut self, path: u32, peer: PeerNumber, rail: u8) {
        self.rails_of.insert(path, rail);
        if let Some(index) = self.peers.iter().position(|known| known.number == peer) {
            let link = Link { peer: index, life: self.peers[index].life, ..Link::default() };
            assert!(self.links.insert(path, link).is_none(), "a path's number is not used twice");
        }
        let well = !self.rng.chance_permille(self.chances.closed_door);
        let in_us = 20 + self.rng.below(300);
        self.happens(in_us, Happening::Opened(path, well));
    }

    fn opened(&mut self, path: u32, well: bool) {
        let number = PathNumber(path);
        let stale = self.links.get(&path).is_none_or(|link| self.peers[link.peer].life != link.life);
        if stale || !well {
            self.links.remove(&path);
            let fault = if stale { Fault::Stale } else { Fault::Silent };
            return self.feed(Input::PathOpenFailed { path: number, fault });
        }
        self.feed(Input::PathOpened { path: number });
    }

    fn close(&mut self, path: u32) {
        let link = self.links.get_mut(&path).expect("a path that is closed was opened");
        assert!(!core::mem::replace(&mut link.closing, true), "a path is closed once");
        let known = !self.rng.chance_permille(self.chances.unknown);
        let in_us = 10 + self.rng.below(5_000);
        self.happens(in_us, Happening::Closed(path, known));
    }

    fn closed(&mut self, path: u32, known: bool) {
        let link = self.links.get_mut(&path).expect("closes once");
        (link.closed, link.fenced) = (true, known);
        for slice in core::mem::take(&mut link.slices) {
            self.ends(slice, SliceOutcome::Broken);
            let late = !known && self.rng.chance_permille(500);
            if let Some(sent) = self.sent.remove(&slice).filter(|_| late) {
                // A copy sits before the peer's memory for a long time.
                let late_us = self.rng.below(100_000);
                self.happens(late_us, Happening::Lands(sent.landing));
            }
        }
        let end = if known { PathEnd::Fenced } else { PathEnd::PeerUnknown };
        self.feed(Input::PathClosed { path: PathNumber(path), end });
    }

    fn breaks(&mut self, path: u32) {
        let Some(link) = self.links.get(&path).filter(|link| !link.closing && !link.closed) else { return };
        let slices: Vec<u64> = link.slices.iter().copied().collect();
        if self.rng.chance_permille(500) {
            return self.feed(Input::PathBroken { path: PathNumber(path), fault: Fault::Path });
        }
        for slice in slices {
            self.ends(slice, SliceOutcome::Broken);
        }
    }

    fn post(&mut self, (path, ticket): (u32, u64), (batch, op): (u64, usize), at: u64, bytes: u32) {
        let job = self.jobs.get(&batch).expect("nothing is posted of a batch that has ended");
        let range = &job.ranges[op];
        assert!(at as usize + bytes as usize <= range.bytes, "a slice is inside its op");
        let link = self.links.get_mut(&path).expect("nothing is posted on a path that is not open");
        assert_eq!((job.peer, job.life), (link.peer, link.life), "a slice goes to its own peer");
        assert!(!link.closing && !link.closed, "nothing is posted on a path that closes");
        self.posted += 1;
        self.posted_by_priority[job.priority.index()] += u64::from(bytes);
        self.posted_by_rail[usize::from(self.rails_of[&path])] += 1;
        let first = range.at + at as usize;
        let landing = Landing {
            slice: self.posted,
            path,
            batch,
            direction: range.direction,
            here: job.here * PLACE_BYTES + first,
            peer: job.peer,
            life: job.life,
            there: job.there * PLACE_BYTES + first,
            bytes,
        };
        if link.full || self.rng.chance_permille(self.chances.full) {
            if !core::mem::replace(&mut link.full, true) {
                self.happens(500, Happening::Room(path));
            }
            return self.feed(Input::PathRefused { path: PathNumber(path), ticket: SliceTicket(ticket) });
        }
        link.slices.insert(landing.slice);
        self.sent.insert(landing.slice, SentSlice { landing, ticket, reported: false });
        self.fate(landing);
    }

    /// Draws what becomes of a slice.
    fn fate(&mut self, landing: Landing) {
        let (chances, Landing { path, bytes, slice, .. }) = (self.chances.clone(), landing);
        let wire_us = u64::from(bytes) / self.scale.bytes_per_us + 1;
        let link = self.links.get_mut(&path).expect("posted on it");
        link.free_us = link.free_us.max(self.now_us) + wire_us;
        let mut in_us = link.free_us - self.now_us + 10;
        if self.rng.chance_permille(chances.freeze) {
            link.frozen = true;
        }
        if self.rng.chance_permille(chances.delay) {
            in_us += self.rng.below(900_000);
        }
        if self.rng.chance_permille(chances.reset) {
            let part = self.rng.below(u64::from(bytes)) as u32;
            self.happens(in_us / 2, Happening::Lands(Landing { bytes: part, ..landing }));
            self.happens(in_us / 2 + 1, Happening::Breaks(path));
            // More of it may come until the path has closed.
            let more_us = in_us + self.rng.below(5_000);
            return self.happens(more_us, Happening::Lands(landing));
        }
        if self.rng.chance_permille(chances.damage) {
            self.happens(in_us, Happening::Ends(slice, SliceOutcome::Damaged));
            return self.happens(in_us + 300, Happening::Lands(landing));
        }
        self.happens(in_us, Happening::Lands(landing));
        self.happens(in_us, Happening::Ends(slice, SliceOutcome::Done));
    }

    /// Bytes get to where they belong, if nothing that was promised keeps them away.
    fn lands(&mut self, landing: Landing) {
        let Landing { slice, path, batch, here, there, .. } = landing;
        let link = &self.links[&path];
        let over = if link.closed {
            link.fenced || landing.direction == Direction::Read
        } else {
            !self.sent.contains_key(&slice)
        };
        if over || self.revoked.contains(&batch) || self.peers[landing.peer].life != landing.life {
            return;
        }
        let count = landing.bytes as usize;
        let theirs = &mut self.peers[landing.peer].memory[there..there + count];
        if link.closed {
            let first = there % PLACE_BYTES;
            return theirs.iter_mut().zip(first..).for_each(|(to, at)| *to = byte(batch, at));
        }
        let ours = &mut self.memory[here..here + count];
        match landing.direction {
            Direction::Read => ours.copy_from_slice(theirs),
            Direction::Write => theirs.copy_from_slice(ours),
        }
    }

    fn ends(&mut self, slice: u64, reported: SliceOutcome) {
        let Some(sent) = self.sent.get_mut(&slice).filter(|sent| !sent.reported) else { return };
        let Landing { path, batch, peer, life, .. } = sent.landing;
        let link = self.links.get_mut(&path).expect("it was posted there");
        if reported != SliceOutcome::Broken && (link.frozen || link.closed || self.peers[peer].life != life) {
            return;
        }
        let reported = if reported == SliceOutcome::Done && self.revoked.contains(&batch) {
            SliceOutcome::Stale
        } else {
            reported
        };
        sent.reported = true;
        let ticket = SliceTicket(sent.ticket);
        if matches!(reported, SliceOutcome::Done | SliceOutcome::Stale) {
            link.slices.remove(&slice);
            self.sent.remove(&slice);
        }
        let path = PathNumber(path);
        let failed = |fault| Input::Failed { path, ticket, fault };
        let input = match reported {
            SliceOutcome::Done => Input::SliceDone { path, ticket },
            SliceOutcome::Broken => failed(Fault::Path),
            SliceOutcome::Damaged => failed(Fault::Corrupt),
            SliceOutcome::Stale => failed(Fault::Stale),
        };
        if self.rng.chance_permille(self.chances.duplicate) {
            self.feed(input.clone());
        }
        self.feed(input);
    }

    fn notify(&mut self, path: u32, ticket: u64, batch: u64) {
        self.is_right(batch);
        let in_us = 10 + self.rng.below(50);
        self.happens(in_us, Happening::Noticed(path, ticket, batch));
    }

    fn noticed(&mut self, path: u32, ticket: u64, batch: u64) {
        if self.links.get(&path).is_none_or(|link| link.frozen || link.closed) {
            return;
        }
        if let Some(job) = self.jobs.get_mut(&batch) {
            job.noticed += 1;
        }
        self.feed(Input::Notified { path: PathNumber(path), ticket: SliceTicket(ticket) });
    }
}
