//! A batch: what of it is still to be posted, what is on its way, and what must be closed before it ends.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::{BatchId, BatchRequest, Direction, Failure, MoverConfig, Op, PathNumber};
use crate::Priority;

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

/// What a batch is at.
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
        self.unposted_bytes -= u64::from(piece.bytes);
        piece.tries = piece.tries.saturating_add(1);
        Some(piece)
    }

    /// Takes a piece back that has to go again.
    pub(crate) fn put_back(&mut self, piece: Piece) {
        self.unposted_bytes += u64::from(piece.bytes);
        self.again.push(piece);
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
    while bytes / u64::from(size) > u64::from(config.slices_per_batch) && size < config.slice_bytes_max {
        size = size.saturating_mul(2).min(config.slice_bytes_max);
    }
    size
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mover::PeerNumber;
    use alloc::vec;

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
}
