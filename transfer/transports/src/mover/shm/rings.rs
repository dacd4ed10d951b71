//! The shared pages of a path: a ring of requests, a ring of answers, and places for notices. One process
//! writes each word and the other reads it; both copy out what they read before they look at it.
#![allow(unsafe_code, reason = "atomics in memory that two processes share; the block is argued")]

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use crate::mover::greeting::field;
use crate::mover::port::NOTICE_BYTES_MAX;
use crate::mover::{Location, Memory, Pages};

const REQUEST_BYTES: u64 = 64;
const ANSWER_BYTES: u64 = 32;
/// Words lie apart, so that each process has its lines for itself.
const WORD_APART: u64 = 256;
const RINGS_AT: u64 = 4_096;
/// Slots for notices: a path has at most this many of them in flight.
pub(super) const NOTICES: u32 = 64;
/// Entries beyond the slices: notices, probes and one admission.
const SPARE: u32 = 2 * NOTICES;
/// Slices outstanding, at most: bounds what a stranger makes us map.
pub(super) const OUTSTANDING_MAX: u32 = 1 << 16;

#[derive(Clone, Copy)]
enum Word {
    RingRequest,
    Answered,
    ServerAsleep,
    OpenerAsleep,
}

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Copy from the segment into the window.
    Write = 1,
    /// A sign of life.
    Probe = 2,
    /// Take the notice in the place that `segment` names.
    Notice = 3,
    /// May `at` bytes of this window be read, and where are they?
    Admit = 4,
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) kind: Kind,
    pub(super) verify: bool,
    pub(super) bytes: u32,
    pub(super) window: u64,
    pub(super) at: u64,
    pub(super) segment: u32,
    pub(super) segment_at: u64,
    pub(super) number: u32,
}

/// An answer. `segment`, `slot` and `at` answer an admission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) number: u32,
    pub(super) code: u8,
    pub(super) segment: u32,
    pub(super) slot: u32,
    pub(super) at: u64,
}

/// Threads of the opener's process that sleep and must be woken for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sleeper {
    /// No sleeper: a thread is polling.
    Nobody = 0,
    /// The I/O thread, by the path's bell.
    Thread = 1,
    /// A caller, by the bell of its queue.
    Caller = 2,
}

/// The shared pages of one path.
pub(super) struct Rings {
    memory: Arc<Memory>,
    entries: u32,
}

fn entries(outstanding: u32) -> u32 {
    (outstanding.min(OUTSTANDING_MAX) + SPARE).next_power_of_two()
}

fn layout_bytes(entries: u32) -> usize {
    let notices = u64::from(NOTICES) * NOTICE_BYTES_MAX as u64;
    let bytes = RINGS_AT + u64::from(entries) * (REQUEST_BYTES + ANSWER_BYTES) + notices;
    usize::try_from(bytes).expect("a few MiB")
}

impl Rings {
    /// Makes them for so many slices.
    pub(super) fn create(outstanding: u32) -> io::Result<Self> {
        let entries = entries(outstanding);
        let memory = Memory::shared(layout_bytes(entries), Pages::Ordinary, Location::Anywhere)?;
        Ok(Self { memory, entries })
    }

    /// Maps those that a peer has made.
    pub(super) fn adopt(file: OwnedFd, outstanding: u32) -> io::Result<Self> {
        let entries = entries(outstanding);
        Ok(Self { memory: Memory::foreign(file, layout_bytes(entries), Location::Anywhere)?, entries })
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.memory.file().expect("made as a file")
    }

    fn word(&self, word: Word) -> &AtomicU32 {
        let at = self.memory.address(word as u64 * WORD_APART, 4);
        // SAFETY: inside the mapping (`address` checks), which `self` keeps alive; aligned, for mappings
        // start at pages and words lie multiples of 256 apart. Both processes use it as an atomic only.
        unsafe { AtomicU32::from_ptr(at.cast()) }
    }

    fn request_at(&self, number: u32) -> u64 {
        RINGS_AT + u64::from(number & (self.entries - 1)) * REQUEST_BYTES
    }

    fn answer_at(&self, number: u32) -> u64 {
        let answers = RINGS_AT + u64::from(self.entries) * REQUEST_BYTES;
        answers + u64::from(number & (self.entries - 1)) * ANSWER_BYTES
    }

    fn notice_at(&self, place: u32) -> u64 {
        let notices = RINGS_AT + u64::from(self.entries) * (REQUEST_BYTES + ANSWER_BYTES);
        notices + u64::from(place % NOTICES) * NOTICE_BYTES_MAX as u64
    }

    /// Puts a request into the ring; [`Rings::publish_requests`] shows it. There is always room: the opener has at most as many
    /// requests outstanding as there are entries.
    pub(super) fn put(&self, request: &Request) {
        let mut entry = [0; REQUEST_BYTES as usize];
        entry[0] = request.kind as u8;
        entry[1] = u8::from(request.verify);
        entry[4..8].copy_from_slice(&request.bytes.to_le_bytes());
        entry[8..16].copy_from_slice(&request.window.to_le_bytes());
        entry[16..24].copy_from_slice(&request.at.to_le_bytes());
        entry[24..32].copy_from_slice(&request.segment_at.to_le_bytes());
        entry[32..36].copy_from_slice(&request.segment.to_le_bytes());
        self.memory.write(self.request_at(request.number), &entry);
    }

    /// Shows the requests before `next`; true when the server sleeps and must be woken.
    pub(super) fn publish_requests(&self, next: u32) -> bool {
        self.word(Word::RingRequest).store(next, Ordering::Release);
        self.wakes(Word::ServerAsleep) != 0
    }

    /// The number up to which the opener has asked. None when it exceeds the number of entries, which is impossible
    /// for an honest opener.
    pub(super) fn requested(&self, served: u32) -> Option<u32> {
        let requested = self.word(Word::RingRequest).load(Ordering::Acquire);
        (requested.wrapping_sub(served) <= self.entries).then_some(requested)
    }

    /// Request number `number`; `None` for what is none.
    pub(super) fn request(&self, number: u32) -> Option<Request> {
        let mut entry = [0; REQUEST_BYTES as usize];
        self.memory.read(self.request_at(number), &mut entry);
        let kinds = [Kind::Write, Kind::Probe, Kind::Notice, Kind::Admit];
        let kind = kinds.into_iter().find(|kind| *kind as u8 == entry[0])?;
        Some(Request {
            kind,
            verify: entry[1] == 1,
            bytes: u32::from_le_bytes(field(&entry, 4)),
            window: u64::from_le_bytes(field(&entry, 8)),
            at: u64::from_le_bytes(field(&entry, 16)),
            segment_at: u64::from_le_bytes(field(&entry, 24)),
            segment: u32::from_le_bytes(field(&entry, 32)),
            number,
        })
    }

    /// Puts the next answer into the ring. The caller then wakes the sleeper: see [`Rings::take_sleeper`].
    pub(super) fn answer(&self, answer: &Answer) {
        let mut entry = [0; ANSWER_BYTES as usize];
        entry[..4].copy_from_slice(&answer.number.to_le_bytes());
        entry[4] = answer.code;
        entry[8..12].copy_from_slice(&answer.segment.to_le_bytes());
        entry[12..16].copy_from_slice(&answer.slot.to_le_bytes());
        entry[16..24].copy_from_slice(&answer.at.to_le_bytes());
        self.memory.write(self.answer_at(answer.number), &entry);
        self.word(Word::Answered).store(answer.number.wrapping_add(1), Ordering::Release);
    }

    /// Threads that sleep though there are answers, and must be woken; taken to be awake from here on.
    pub(super) fn take_sleeper(&self) -> Sleeper {
        match self.wakes(Word::OpenerAsleep) {
            1 => Sleeper::Thread,
            2 => Sleeper::Caller,
            _ => Sleeper::Nobody,
        }
    }

    /// How far the server has answered.
    pub(super) fn answered(&self) -> u32 {
        self.word(Word::Answered).load(Ordering::Acquire)
    }

    /// Answer number `number`.
    pub(super) fn answer_to(&self, number: u32) -> Answer {
        let mut entry = [0; ANSWER_BYTES as usize];
        self.memory.read(self.answer_at(number), &mut entry);
        Answer {
            number: u32::from_le_bytes(field(&entry, 0)),
            code: entry[4],
            segment: u32::from_le_bytes(field(&entry, 8)),
            slot: u32::from_le_bytes(field(&entry, 12)),
            at: u64::from_le_bytes(field(&entry, 16)),
        }
    }

    pub(super) fn put_notice(&self, place: u32, bytes: &[u8]) {
        self.memory.write(self.notice_at(place), bytes);
    }

    /// The notice in a place; `None` for one that is too long.
    pub(super) fn notice(&self, place: u32, bytes: u32) -> Option<Vec<u8>> {
        let bytes = usize::try_from(bytes).ok().filter(|bytes| *bytes <= NOTICE_BYTES_MAX)?;
        let mut notice = vec![0; bytes];
        self.memory.read(self.notice_at(place), &mut notice);
        Some(notice)
    }

    /// The server says that it sleeps, or does not. It looks for requests once more after saying so.
    pub(super) fn server_sleeps(&self, sleeps: bool) {
        self.set_word(Word::ServerAsleep, u32::from(sleeps));
    }

    /// As above, for the opener and answers.
    pub(super) fn opener_sleeps(&self, sleeper: Sleeper) {
        self.set_word(Word::OpenerAsleep, sleeper as u32);
    }

    fn set_word(&self, word: Word, value: u32) {
        self.word(word).store(value, Ordering::Relaxed);
        // Pairs with the one in `wakes`: either the other end sees the word, or we see its entry.
        fence(Ordering::SeqCst);
    }

    /// The threads to wake, as the other end has said; returned once.
    fn wakes(&self, word: Word) -> u32 {
        fence(Ordering::SeqCst);
        let word = self.word(word);
        if word.load(Ordering::Relaxed) == 0 { 0 } else { word.swap(0, Ordering::Relaxed) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no memory with a file")]
    fn both_ends_see_the_same() {
        let ours = Rings::create(10).unwrap();
        let theirs = Rings::adopt(ours.file().try_clone_to_owned().unwrap(), 10).unwrap();
        for number in (u32::MAX - 300..=u32::MAX).chain(0..300) {
            let request = Request {
                kind: Kind::Write,
                verify: number % 2 == 0,
                bytes: number,
                window: u64::MAX - 1,
                at: 3,
                segment: 4,
                segment_at: 5,
                number,
            };
            theirs.server_sleeps(number % 3 == 0);
            ours.put(&request);
            assert_eq!(ours.publish_requests(number.wrapping_add(1)), number % 3 == 0);
            assert_eq!(theirs.requested(number), Some(number.wrapping_add(1)));
            assert_eq!(theirs.request(number), Some(request));
            let answer = Answer { number, code: 2, segment: 7, slot: 8, at: 9 };
            let who = [Sleeper::Nobody, Sleeper::Thread, Sleeper::Caller][number as usize % 3];
            ours.opener_sleeps(who);
            theirs.answer(&answer);
            assert_eq!((theirs.take_sleeper(), theirs.take_sleeper()), (who, Sleeper::Nobody));
            assert_eq!(ours.answered(), number.wrapping_add(1));
            assert_eq!(ours.answer_to(number), answer);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no memory with a file")]
    fn what_cannot_be_is_refused() {
        let rings = Rings::create(10).unwrap();
        assert_eq!(rings.request(0), None, "zeros are no request");
        rings.publish_requests(257);
        assert_eq!(rings.requested(0), None, "more than there are entries");
        assert!(rings.notice(3, 4_097).is_none());
        assert!(Rings::adopt(rings.file().try_clone_to_owned().unwrap(), 100_000).is_err());
    }
}
