//! Writing: reserve, fill, seal.

use crate::arena::ArenaMemory;
use crate::lower::{ForgottenCopies, Origin};
use crate::reading::room_checksum;
use crate::refusal::Refusal;
use crate::shard::{Request, ReservedMemory, SealParams};
use crate::store::{ObjectStore, PutOptions, StoreOutcome};

/// Most gaps that a value may have while it is filled out of order.
const GAPS_MAX: usize = 1024;

/// A reserved value that its writer fills; sealed it can be read, dropped it is gone.
///
/// The reservation has a lease. After its expiry, a writer that waits for this one takes over; some leases later any
/// put may take the memory. Writing and sealing then fail with [`Refusal::TakenOver`]. Writers that replace a value
/// ([`OverwriteRule::Replace`](crate::OverwriteRule)) do not wait: any number may write one key, and the last seal wins.
#[derive(Debug)]
pub struct PutTicket {
    store: ObjectStore,
    shard: usize,
    begun: ReservedMemory,
    bytes: u32,
    options: PutOptions,
    written: Ranges,
    /// The position of the next append.
    cursor: u32,
    sealed: bool,
    /// Where the value comes from.
    origin: Origin,
    /// The size that the value would have in the bucket, bytes.
    object_bytes: Option<u64>,
}

impl PutTicket {
    pub(crate) fn new(
        store: ObjectStore,
        shard: usize,
        begun: ReservedMemory,
        request: &Request<'_>,
    ) -> Self {
        let (bytes, options) = (request.bytes, request.options);
        let written = Ranges::default();
        let origin = Origin::Writer(store.name_of(request.key));
        let object_bytes = store.object_bytes(request.key, bytes);
        Self { store, shard, begun, bytes, options, written, cursor: 0, sealed: false, origin, object_bytes }
    }

    /// The value comes from a tier below.
    pub(crate) fn set_origin(&mut self, origin: Origin) {
        self.origin = origin;
    }

    /// Bytes reserved.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes as usize
    }

    /// Bytes that appends have not reached yet.
    #[must_use]
    pub fn left(&self) -> usize {
        (self.bytes - self.cursor) as usize
    }

    /// Writes after what was appended last.
    ///
    /// # Errors
    /// As [`PutTicket::write_at`].
    pub fn append(&mut self, from: &[u8]) -> Result<(), Refusal> {
        self.write_at(self.cursor as usize, from)?;
        self.cursor += u32::try_from(from.len()).expect("it fitted");
        Ok(())
    }

    /// Writes at byte `offset`; pieces may come in any order.
    ///
    /// # Errors
    /// [`Refusal::TakenOver`]; [`Refusal::Unfilled`] when a byte would be outside the value, or more than a
    /// thousand gaps would be left.
    pub fn write_at(&mut self, offset: usize, from: &[u8]) -> Result<(), Refusal> {
        let end = offset.checked_add(from.len()).filter(|end| *end <= self.bytes());
        let end = end.ok_or_else(|| self.unfilled())?;
        let mut skip = offset;
        let mut from_left = from;
        self.with_room(|room| {
            for slice in room.slices_mut() {
                let at = skip.min(slice.len());
                skip -= at;
                let bytes = from_left.len().min(slice.len() - at);
                let (now, later) = from_left.split_at(bytes);
                slice[at..at + bytes].copy_from_slice(now);
                from_left = later;
                if from_left.is_empty() {
                    break;
                }
            }
        })?;
        self.note(offset, end)
    }

    /// Lets `fill` write the next bytes, some or all of them. It returns how many it wrote, from the start of its
    /// slice. It must not wait. It is not called when nothing is left. The ticket trusts the returned count: bytes
    /// that `fill` did not write would be those of an earlier value.
    ///
    /// # Errors
    /// [`Refusal::TakenOver`]; inside, what `fill` says.
    pub fn fill_with(
        &mut self,
        fill: impl FnOnce(&mut [u8]) -> std::io::Result<usize>,
    ) -> Result<std::io::Result<usize>, Refusal> {
        let mut skip = self.cursor as usize;
        let filled = self.with_room(|room| {
            for slice in room.slices_mut() {
                if skip < slice.len() {
                    let top = slice.len() - skip;
                    return fill(&mut slice[skip..]).map(|bytes| bytes.min(top));
                }
                skip -= slice.len();
            }
            Ok(0)
        })?;
        if let Ok(bytes) = filled {
            let end = self.cursor as usize + bytes;
            self.note(self.cursor as usize, end)?;
            self.cursor = u32::try_from(end).expect("it fitted");
        }
        Ok(filled)
    }

    /// Changes what the seal does: a sender may say so after the value.
    #[cfg(feature = "resp")]
    pub(crate) fn set_options(&mut self, options: PutOptions) {
        self.options = options;
    }

    /// Renews the lease, for a writer that goes on writing.
    ///
    /// # Errors
    /// [`Refusal::TakenOver`].
    pub fn renew(&mut self) -> Result<(), Refusal> {
        let now_us = self.store.now_us();
        self.store.shard(self.shard).renew(&self.begun, now_us)
    }

    fn with_room<R>(&self, write: impl FnOnce(&mut ArenaMemory) -> R) -> Result<R, Refusal> {
        // The store takes the room away only when it gets this lock, so never in the middle of a copy.
        self.begun.room.lock().as_mut().map(write).ok_or(Refusal::TakenOver)
    }

    fn note(&mut self, from: usize, to: usize) -> Result<(), Refusal> {
        let narrow = |at: usize| u32::try_from(at).expect("inside the value");
        if self.written.add(narrow(from), narrow(to)) { Ok(()) } else { Err(self.unfilled()) }
    }

    fn unfilled(&self) -> Refusal {
        Refusal::Unfilled { written: self.written.total(), bytes: u64::from(self.bytes) }
    }

    /// Makes the value readable, without a checksum.
    ///
    /// # Errors
    /// [`Refusal::Unfilled`], [`Refusal::TakenOver`], or what [`PutOptions::existing`] refuses. The reservation
    /// is gone then. [`Refusal::Unconfirmed`]: the value is there, but the SSD has not given up an older one.
    pub fn seal(self) -> Result<StoreOutcome, Refusal> {
        self.finish_waiting(None)
    }

    /// Makes the value readable, if it has the checksum that its sender gave.
    ///
    /// # Errors
    /// [`Refusal::Corrupt`]; else as [`PutTicket::seal`].
    pub fn seal_checked(self, expected: u32) -> Result<StoreOutcome, Refusal> {
        let found = self.with_room(|room| room_checksum(room))?;
        if found != expected {
            return Err(Refusal::Corrupt { expected, found });
        }
        self.finish_waiting(Some(expected))
    }

    /// Makes the value readable, with a checksum of the written bytes if `computed`. The previous value may reappear
    /// after a crash until the returned removals are confirmed.
    #[cfg(feature = "resp")]
    pub(crate) fn seal_unconfirmed(self, computed: bool) -> Result<(StoreOutcome, ForgottenCopies), Refusal> {
        let sum = if computed { Some(self.with_room(|room| room_checksum(room))?) } else { None };
        self.finish(sum)
    }

    fn finish_waiting(self, checksum: Option<u32>) -> Result<StoreOutcome, Refusal> {
        let store = self.store.clone();
        let (stored, forgotten) = self.finish(checksum)?;
        // The result is counted and reported. A bucket never fails a put.
        let _ = store.confirm(&forgotten);
        store.put_confirmed(&forgotten).map(|()| stored)
    }

    /// The digest of the value, where the bucket may have the same and could keep it.
    fn digest(&self) -> Result<Option<u64>, Refusal> {
        match self.origin.writer().zip(self.object_bytes) {
            Some((name, bytes)) => self.with_room(|room| self.store.digest_below(name, bytes, room)),
            None => Ok(None),
        }
    }

    /// Makes the value readable, with this checksum, and waits for nothing.
    pub(crate) fn finish(
        mut self,
        checksum: Option<u32>,
    ) -> Result<(StoreOutcome, ForgottenCopies), Refusal> {
        if self.written.total() != u64::from(self.bytes) {
            return Err(self.unfilled());
        }
        let digest = self.digest()?;
        let now_us = self.store.now_us();
        let sealing = SealParams { options: self.options, checksum, origin: self.origin, digest, now_us };
        let sealed = self.store.shard(self.shard).seal(&self.begun, &sealing);
        self.sealed = true;
        sealed
    }
}

impl Drop for PutTicket {
    fn drop(&mut self) {
        if !self.sealed {
            self.store.shard(self.shard).abandon(&self.begun);
        }
    }
}

/// The ranges of bytes written: those before `start`, and later ranges in order, apart from each other. A writer that
/// goes from start to end, as nearly all do, needs no list.
#[derive(Debug, Default)]
struct Ranges {
    start: u32,
    later: Vec<(u32, u32)>,
}

impl Ranges {
    /// Adds a range. False when there would be too many.
    fn add(&mut self, from: u32, to: u32) -> bool {
        if from <= self.start {
            self.start = self.start.max(to);
            let reached = self.later.partition_point(|(start, _)| *start <= self.start);
            let end = self.later.drain(..reached).map(|(_, end)| end).max();
            self.start = self.start.max(end.unwrap_or(0));
            return true;
        }
        if from == to {
            return true;
        }
        let first = self.later.partition_point(|(_, end)| *end < from);
        let last = self.later.partition_point(|(start, _)| *start <= to);
        let touched = &self.later[first..last];
        let merged = touched.iter().fold((from, to), |(a, b), (c, d)| (a.min(*c), b.max(*d)));
        self.later.splice(first..last, [merged]);
        self.later.len() <= GAPS_MAX
    }

    fn total(&self) -> u64 {
        let later = self.later.iter().map(|(from, to)| u64::from(to - from)).sum::<u64>();
        u64::from(self.start) + later
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn every_byte_counts_once(ranges in proptest::collection::vec((0u32..60, 0u32..20), 0..40)) {
            let mut marks = [false; 80];
            let mut written = Ranges::default();
            for (from, bytes) in ranges {
                proptest::prop_assert!(written.add(from, from + bytes));
                marks[from as usize..(from + bytes) as usize].fill(true);
                let expected = marks.iter().filter(|mark| **mark).count() as u64;
                proptest::prop_assert_eq!(written.total(), expected);
                let apart = written.later.windows(2).all(|pair| pair[0].1 < pair[1].0);
                let apart = apart && written.later.first().is_none_or(|first| first.0 > written.start);
                proptest::prop_assert!(apart, "{:?}", written);
            }
        }
    }

    #[test]
    fn gaps_have_a_bound() {
        let mut written = Ranges::default();
        let gaps = u32::try_from(GAPS_MAX).unwrap();
        assert!((0..gaps).all(|n| written.add(3 * n + 1, 3 * n + 2)));
        assert!(written.add(0, 1), "that closes one");
        assert!(written.add(9 * gaps, 9 * gaps + 1));
        assert!(!written.add(9 * gaps + 5, 9 * gaps + 6));
    }
}
