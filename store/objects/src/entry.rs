//! Entries of keys, and their table. It grows by pieces, so that growth copies nothing.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::arena::ArenaMemory;

/// No entry.
pub(crate) const NONE: u32 = u32::MAX;

/// Entries of one piece of the table.
const PIECE: usize = 256;

/// A room that its writer shares with the store, which takes it away when the writer's lease has run out.
pub(crate) type PendingRoom = Arc<Mutex<Option<ArenaMemory>>>;

/// The state of an entry, with its bytes.
#[derive(Debug)]
pub(crate) enum State {
    /// Free; `next` is the next free one.
    Vacant,
    /// Reserved and being written.
    Pending(PendingRoom),
    /// Complete and readable.
    Sealed(Arc<ArenaMemory>),
    /// Removed or replaced while leased: only those who read it already still do.
    Leaving(Arc<ArenaMemory>),
}

/// One key's record.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) key: Box<[u8]>,
    pub(crate) place: u64,
    /// Number of this value in its shard, never used again; 0 for a vacant entry.
    pub(crate) generation: u64,
    pub(crate) state: State,
    /// When it is gone; `u64::MAX` is never.
    pub(crate) expires_us: u64,
    /// Until when its writer, or the last of its readers, is waited for.
    pub(crate) lease_us: u64,
    /// Until when it is kept, if there is anything else to evict.
    pub(crate) soft_pin_us: u64,
    /// CRC-32C of the value, if known.
    pub(crate) checksum: Option<u32>,
    pub(crate) bytes: u32,
    pub(crate) tenant: u32,
    pub(crate) readers: u32,
    pub(crate) hard_pins: u32,
    /// Its neighbours in the queue of its class, and in that of its tenant.
    pub(crate) links: [Link; 2],
    pub(crate) class: u8,
    /// Reads since it was put, as far as the tiers below count them.
    pub(crate) touches: u8,
    /// Read since the hand passed.
    pub(crate) visited: bool,
}

/// Where an entry stands in a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) previous: u32,
    pub(crate) next: u32,
    pub(crate) linked: bool,
}

impl Link {
    const NOWHERE: Self = Self { previous: NONE, next: NONE, linked: false };
}

impl Entry {
    fn vacant() -> Self {
        Self {
            key: Box::default(),
            place: 0,
            generation: 0,
            state: State::Vacant,
            expires_us: u64::MAX,
            lease_us: 0,
            soft_pin_us: 0,
            checksum: None,
            bytes: 0,
            tenant: 0,
            readers: 0,
            hard_pins: 0,
            links: [Link::NOWHERE; 2],
            class: 0,
            touches: 0,
            visited: false,
        }
    }

    /// Whether eviction must leave it alone at `now_us`; `pressing`, when nothing else is left that could go.
    pub(crate) fn is_held(&self, now_us: u64, pressing: bool) -> bool {
        let softly = !pressing && self.soft_pin_us > now_us && !self.is_expired(now_us);
        self.hard_pins > 0 || softly || self.is_leased(now_us)
    }

    /// Whether it is in a queue.
    pub(crate) fn is_linked(&self) -> bool {
        self.links.iter().any(|link| link.linked)
    }

    /// Whether a reader holds an unexpired lease on it.
    pub(crate) fn is_leased(&self, now_us: u64) -> bool {
        self.readers > 0 && self.lease_us > now_us
    }

    /// Whether its time to live is over. A hard pin keeps it alive.
    pub(crate) fn is_expired(&self, now_us: u64) -> bool {
        self.expires_us <= now_us && self.hard_pins == 0
    }

    pub(crate) fn sealed(&self) -> Option<&Arc<ArenaMemory>> {
        if let State::Sealed(room) = &self.state { Some(room) } else { None }
    }

    fn metadata_bytes(&self) -> usize {
        let beside = match &self.state {
            State::Vacant => 0,
            State::Sealed(room) | State::Leaving(room) => room.metadata_bytes(),
            State::Pending(_) => size_of::<Mutex<Option<ArenaMemory>>>() + 16,
        };
        // The allocator rounds a key up to 16 bytes.
        beside + self.key.len().next_multiple_of(16)
    }
}

/// Entries by number. Numbers of freed entries are used again, generations are not.
#[derive(Debug)]
pub(crate) struct Entries {
    pieces: Vec<Box<[Entry]>>,
    vacant: u32,
    live: usize,
}

impl Entries {
    pub(crate) fn new() -> Self {
        Self { pieces: Vec::new(), vacant: NONE, live: 0 }
    }

    /// How many are not vacant.
    pub(crate) fn live(&self) -> usize {
        self.live
    }

    /// Numbers that were ever used are below this.
    pub(crate) fn end(&self) -> u32 {
        u32::try_from(self.pieces.len() * PIECE).expect("keys are bounded below 2^30 a shard")
    }

    pub(crate) fn at(&self, number: u32) -> &Entry {
        &self.pieces[number as usize / PIECE][number as usize % PIECE]
    }

    pub(crate) fn at_mut(&mut self, number: u32) -> &mut Entry {
        &mut self.pieces[number as usize / PIECE][number as usize % PIECE]
    }

    /// A vacant entry, to be filled at once.
    pub(crate) fn take(&mut self) -> u32 {
        if self.vacant == NONE {
            let first = self.end();
            let mut piece: Box<[Entry]> = (0..PIECE).map(|_| Entry::vacant()).collect();
            for (entry, next) in piece.iter_mut().zip(first + 1..) {
                entry.links[0].next = next;
            }
            piece[PIECE - 1].links[0].next = NONE;
            self.pieces.push(piece);
            self.vacant = first;
        }
        let number = self.vacant;
        self.vacant = self.at(number).links[0].next;
        self.live += 1;
        self.at_mut(number).links[0].next = NONE;
        number
    }

    /// Makes an entry vacant and returns what it was.
    pub(crate) fn free(&mut self, number: u32) -> Entry {
        let vacant = self.vacant;
        let entry = std::mem::replace(self.at_mut(number), Entry::vacant());
        assert!(entry.generation != 0 && !entry.is_linked(), "an entry is freed once, and out of its queue");
        self.at_mut(number).links[0].next = vacant;
        self.vacant = number;
        self.live -= 1;
        entry
    }

    /// Bytes that the table and what hangs on it take. Visits every entry.
    pub(crate) fn metadata_bytes(&self) -> usize {
        let each = self.pieces.iter().flatten().map(Entry::metadata_bytes).sum::<usize>();
        each + self.pieces.len() * PIECE * size_of::<Entry>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_and_an_entry_is_small() {
        let mut entries = Entries::new();
        let numbers: Vec<u32> = (0..600).map(|_| entries.take()).collect();
        assert_eq!((entries.live(), entries.end()), (600, 768));
        for (number, generation) in numbers.iter().zip(1..) {
            entries.at_mut(*number).generation = generation;
        }
        assert_eq!(entries.free(300).generation, numbers.iter().position(|n| *n == 300).unwrap() as u64 + 1);
        assert_eq!((entries.take(), entries.live()), (300, 600));
        assert!(size_of::<Entry>() <= 128, "{}", size_of::<Entry>());
    }
}
