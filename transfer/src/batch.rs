//! A batch: what of it is still to be posted, what is on its way, and what must be closed before it ends.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::Priority;
use crate::{BatchId, BatchRequest, Direction, Failure, MoverConfig, Op, PathNumber};

/// A range of one op that goes as one slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) op: u32,
    pub(crate) at: u64,
    pub(crate) bytes: u32,
    /// Times that it was posted.
    pub(crate) tries: u8,
    /// Whether it came damaged once.
    pub(crate) damaged: bool,
}

/// How a batch is to end, once it can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Done,
    Failed(Failure),
    Cancelled,
}

/// The phase of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Moving,
    /// All bytes are in place and no late one can come; the notice waits for a path.
    Noticing,
    /// The notice is on its way.
    Noticed,
    /// Waits for the last of its slices and of the paths in doubt.
    Ending(End),
}

#[derive(Clone, Debug)]
pub(crate) struct Batch {
    pub(crate) id: BatchId,
    pub(crate) peer: u32,
    pub(crate) priority: Priority,
    pub(crate) ops: Vec<Op>,
    pub(crate) notice: bool,
    pub(crate) deadline_us: u64,
    pub(crate) submitted_us: u64,
    pub(crate) slice_bytes: u32,
    pub(crate) bytes: u64,
    pub(crate) done_bytes: u64,
    /// Bytes that are neither done nor outstanding.
    pub(crate) unposted_bytes: u64,
    /// Where cutting goes on: the op, and the first byte of it.
    cursor: (u32, u64),
    /// Cut pieces that must be posted again.
    again: Vec<Piece>,
    /// Slices and notices on their way.
    pub(crate) outstanding: u32,
    /// Paths that held slices of it when they broke, and have not closed; and whether one was a write.
    pub(crate) doubts: BTreeMap<PathNumber, bool>,
    pub(crate) remote_fenced: bool,
    pub(crate) phase: Phase,
    /// Whether it stands in its peer's queue.
    pub(crate) queued: bool,
    pub(crate) timer_us: Option<u64>,
}

impl Batch {
    pub(crate) fn new(request: BatchRequest, peer: u32, config: &MoverConfig, now_us: u64) -> Self {
        let bytes = request.ops.iter().fold(0, |sum: u64, op| sum.saturating_add(op.bytes));
        let limit_us = now_us.saturating_add(config.batch_limit_us);
        Self {
            id: request.batch,
            peer,
            priority: request.priority,
            slice_bytes: slice_bytes(bytes, config),
            bytes,
            ops: request.ops,
            notice: request.notice,
            deadline_us: request.deadline_us.map_or(limit_us, |at| at.min(limit_us)),
            submitted_us: now_us,
            done_bytes: 0,
            unposted_bytes: bytes,
            cursor: (0, 0),
            again: Vec::new(),
            outstanding: 0,
            doubts: BTreeMap::new(),
            remote_fenced: true,
            phase: Phase::Moving,
            queued: false,
            timer_us: None,
        }
    }

    /// The piece that goes next.
    pub(crate) fn next_piece(&self) -> Option<Piece> {
        if let Some(&piece) = self.again.last() {
            return Some(piece);
        }
        let (op, at) = self.cursor;
        let left = self.ops.get(op as usize)?.bytes - at;
        let bytes = u32::try_from(left).map_or(self.slice_bytes, |left| left.min(self.slice_bytes));
        Some(Piece { op, at, bytes, tries: 0, damaged: false })
    }

    /// Takes that piece out.
    pub(crate) fn take_piece(&mut self) -> Option<Piece> {
        let mut piece = self.next_piece()?;
        if self.again.pop().is_none() {
            let (op, at) = self.cursor;
            let end = at + u64::from(piece.bytes);
            let whole = end == self.ops[op as usize].bytes;
            self.cursor = if whole { (op + 1, 0) } else { (op, end) };
        }
        assert!(piece.bytes > 0, "a slice has bytes, for ops without any are refused");
        assert!(
            u64::from(piece.bytes) <= self.unposted_bytes,
            "I7: a slice is cut from bytes not yet posted"
        );
        self.unposted_bytes -= u64::from(piece.bytes);
        piece.tries = piece.tries.saturating_add(1);
        Some(piece)
    }

    /// Takes a piece back that has to go again.
    pub(crate) fn put_back(&mut self, piece: Piece) {
        self.unposted_bytes += u64::from(piece.bytes);
        assert!(self.counts_once(), "I7: bytes that are done or unposted are not put back");
        self.again.push(piece);
    }

    /// Whether no byte counts both as done and as unposted (I7); those outstanding make up the rest.
    pub(crate) fn counts_once(&self) -> bool {
        self.done_bytes + self.unposted_bytes <= self.bytes
    }

    /// Drops what has not been posted.
    pub(crate) fn drop_unposted(&mut self) {
        self.unposted_bytes = 0;
        self.again = Vec::new();
        self.cursor = (u32::MAX, 0);
    }

    /// Whether the op at this place writes at the peer.
    pub(crate) fn writes(&self, op: u32) -> bool {
        self.ops[op as usize].direction == Direction::Write
    }
}

/// The smallest size that cuts `bytes` into few enough slices.
fn slice_bytes(bytes: u64, config: &MoverConfig) -> u32 {
    let mut size = config.slice_bytes;
    while bytes.div_ceil(u64::from(size)) > u64::from(config.slices_per_batch)
        && size < config.slice_bytes_max
    {
        size = size.saturating_mul(2).min(config.slice_bytes_max);
    }
    size
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PeerNumber;
    use alloc::vec;
    use baton_types::Rng;

    fn batch(ops: &[u64]) -> Batch {
        let op = |&bytes: &u64| Op { direction: Direction::Read, bytes, location: 0 };
        let request = BatchRequest {
            batch: BatchId(1),
            peer: PeerNumber(0),
            priority: Priority::Fetch,
            deadline_us: None,
            notice: false,
            ops: ops.iter().map(op).collect(),
        };
        Batch::new(request, 0, &MoverConfig::default(), 0)
    }

    #[test]
    fn pieces_cover_every_byte_once_and_come_back_first() {
        let mut batch = batch(&[100_000, 1, 65_536]);
        let mut got = vec![];
        let first = batch.take_piece().unwrap();
        batch.put_back(first);
        assert_eq!(batch.next_piece(), Some(first));
        while let Some(piece) = batch.take_piece() {
            got.push((piece.op, piece.at, piece.bytes, piece.tries));
        }
        assert_eq!(got, [(0, 0, 65_536, 2), (0, 65_536, 34_464, 1), (1, 0, 1, 1), (2, 0, 65_536, 1)]);
        assert_eq!(batch.unposted_bytes, 0);
    }

    #[test]
    fn slices_grow_with_the_batch_up_to_a_bound() {
        assert_eq!(batch(&[1 << 20]).slice_bytes, 64 << 10);
        assert_eq!(batch(&[16 << 20]).slice_bytes, 64 << 10);
        assert_eq!(batch(&[64 << 20]).slice_bytes, 256 << 10);
        assert_eq!(batch(&[1 << 36]).slice_bytes, 1 << 20);
    }

    fn request(rng: &mut Rng, most_ops: u64, most_bytes: u64) -> BatchRequest {
        let mut op = |_| Op {
            direction: if rng.chance_permille(500) { Direction::Read } else { Direction::Write },
            bytes: 1 + rng.below(most_bytes),
            location: 0,
        };
        let ops: Vec<Op> = (0..most_ops).map(&mut op).collect();
        BatchRequest { ops, ..asked() }
    }

    fn asked() -> BatchRequest {
        let (batch, peer, priority) = (BatchId(1), PeerNumber(0), Priority::Fetch);
        BatchRequest { batch, peer, priority, deadline_us: None, notice: false, ops: vec![] }
    }

    /// Which bytes are posted, looked up piece by piece: op and place, then the end and the tries.
    type PostedBytes = BTreeMap<(u32, u64), Piece>;

    fn check_coverage(batch: &Batch, posted: &PostedBytes) {
        let mut end = (0, 0);
        for (&(op, at), piece) in posted {
            assert!((op, at) >= end, "bytes were posted twice at {op}+{at}");
            end = (op, at + u64::from(piece.bytes));
            assert!(end.1 <= batch.ops[op as usize].bytes, "a piece leaves its op");
            assert!((1..=batch.slice_bytes).contains(&piece.bytes));
        }
        let sum: u64 = posted.values().map(|piece| u64::from(piece.bytes)).sum();
        assert_eq!(batch.unposted_bytes, batch.bytes - sum);
    }

    #[test]
    fn whatever_is_taken_and_put_back_each_byte_is_posted_once() {
        let config = MoverConfig { slice_bytes: 4_096, slice_bytes_max: 10_000, ..MoverConfig::default() };
        for seed in 0..60 {
            let mut rng = Rng::new(seed);
            let ops = 1 + rng.below(12);
            let mut batch = Batch::new(request(&mut rng, ops, 40_000), 0, &config, 0);
            let (mut posted, mut tries) = (PostedBytes::new(), BTreeMap::new());
            let mut time_limit = 200;
            while batch.unposted_bytes > 0 {
                let expected = batch.next_piece();
                let piece = batch.take_piece().unwrap();
                assert_eq!(expected.map(|next| (next.op, next.at)), Some((piece.op, piece.at)));
                let tried = tries.entry((piece.op, piece.at)).or_insert(0u8);
                *tried += 1;
                assert_eq!(piece.tries, *tried);
                assert_eq!(posted.insert((piece.op, piece.at), piece), None);
                if time_limit > 0 && rng.chance_permille(500) {
                    time_limit -= 1;
                    let nth = rng.below(posted.len() as u64) as usize;
                    let back = *posted.iter().nth(nth).unwrap().0;
                    batch.put_back(posted.remove(&back).unwrap());
                }
                check_coverage(&batch, &posted);
            }
            assert_eq!((batch.next_piece(), batch.take_piece()), (None, None));
            assert!(tries.values().all(|&tried| tried > 0) && tries.len() == posted.len());
        }
    }

    #[test]
    fn what_is_dropped_is_not_posted_and_what_is_on_its_way_is_not_counted() {
        let mut batch = batch(&[200_000, 7]);
        let (first, _) = (batch.take_piece().unwrap(), batch.take_piece());
        batch.put_back(first);
        batch.drop_unposted();
        assert_eq!((batch.unposted_bytes, batch.next_piece(), batch.take_piece()), (0, None, None));
    }

    #[test]
    fn a_piece_keeps_its_damage_and_its_tries_stop_at_the_top() {
        let mut batch = batch(&[10]);
        let piece = Piece { tries: u8::MAX - 1, damaged: true, ..batch.take_piece().unwrap() };
        batch.put_back(piece);
        let last = batch.take_piece().unwrap();
        assert_eq!(last, Piece { tries: u8::MAX, ..piece });
        batch.put_back(last);
        assert_eq!(batch.take_piece(), Some(last), "counts no further");
    }

    #[test]
    fn an_op_of_more_than_four_gib_is_cut_to_its_last_byte() {
        let bytes = (5 << 30) + 3;
        let mut batch = batch(&[bytes]);
        let mut end = 0;
        while let Some(piece) = batch.take_piece() {
            assert_eq!(piece.at, end, "pieces follow each other");
            end += u64::from(piece.bytes);
        }
        assert_eq!(end, bytes);
    }

    #[test]
    fn an_end_is_never_later_than_the_limit() {
        let config = MoverConfig { batch_limit_us: 1_000, ..MoverConfig::default() };
        let deadline = |deadline_us, now_us| {
            let batch = Batch::new(BatchRequest { deadline_us, ..asked() }, 0, &config, now_us);
            (batch.deadline_us, batch.submitted_us)
        };
        assert_eq!(deadline(None, 50), (1_050, 50));
        assert_eq!(deadline(Some(1_049), 50), (1_049, 50));
        assert_eq!(deadline(Some(1_051), 50), (1_050, 50));
        assert_eq!(deadline(Some(3), 50), (3, 50), "a time that is over is not moved");
        assert_eq!(deadline(None, u64::MAX - 1), (u64::MAX, u64::MAX - 1));
    }

    #[test]
    fn a_batch_begins_with_all_to_do_and_nothing_in_doubt() {
        let batch = batch(&[5, 6]);
        assert_eq!((batch.bytes, batch.unposted_bytes, batch.done_bytes), (11, 11, 0));
        assert_eq!((batch.phase, batch.outstanding, batch.queued), (Phase::Moving, 0, false));
        assert!(batch.doubts.is_empty() && batch.remote_fenced && batch.timer_us.is_none());
        let empty = Batch::new(asked(), 0, &MoverConfig::default(), 0);
        assert_eq!((empty.bytes, empty.next_piece()), (0, None));
    }

    #[test]
    fn only_writes_write() {
        let mut rng = Rng::new(2);
        let asked = request(&mut rng, 40, 9);
        let writes: Vec<bool> = asked.ops.iter().map(|op| op.direction == Direction::Write).collect();
        assert!(writes.contains(&true) && writes.contains(&false));
        let batch = Batch::new(asked, 0, &MoverConfig::default(), 0);
        assert!((0..40).map(|op| batch.writes(op)).eq(writes));
    }

    #[test]
    fn slices_are_the_smallest_that_are_few_enough() {
        let mut rng = Rng::new(21);
        for _ in 0..4_000 {
            let least = 4_096 + rng.below(100_000) as u32;
            let most = least + rng.below(u64::from(least) * 300) as u32;
            let few = 1 + rng.below(300);
            let magnitude = 1 + rng.below(34);
            let bytes = 1 + rng.below(1 << magnitude);
            let config = MoverConfig {
                slice_bytes: least,
                slice_bytes_max: most,
                slices_per_batch: few as u32,
                ..MoverConfig::default()
            };
            let size = slice_bytes(bytes, &config);
            let slices = |size: u32| bytes.div_ceil(u64::from(size));
            assert!((least..=most).contains(&size), "{size} of {least} to {most}");
            assert!(slices(size) <= few || size == most, "{bytes} in slices of {size}: more than {few}");
            assert!(size == least || slices(size.div_ceil(2)) > few, "{bytes}: {size} is too large");
        }
    }

    #[test]
    fn a_batch_of_one_byte_more_gets_larger_slices() {
        let config = MoverConfig::default();
        let fit = u64::from(config.slices_per_batch) * u64::from(config.slice_bytes);
        assert_eq!(slice_bytes(fit, &config), config.slice_bytes);
        assert_eq!(slice_bytes(fit + 1, &config), config.slice_bytes * 2);
        let huge = MoverConfig { slice_bytes: 1 << 30, slice_bytes_max: 1 << 30, ..config };
        assert_eq!(slice_bytes(u64::MAX, &huge), 1 << 30);
    }
}
