//! A window on its receiving side: what the peer has written, in the order in which it comes.

use std::sync::Arc;

use super::{DataPlane, LentWindow};
use crate::arena::Loan;
use crate::frame::Checksum;
use crate::mover::{Memory, RemoteSegment};
use crate::receiver::SlicePosition;

/// A ring of registered memory that one peer may write to. Its bytes are a stream: byte `n` of the stream is at `n`
/// modulo the window's size.
pub(crate) struct ReceiveWindow {
    plane: Arc<DataPlane>,
    /// Taken only at the end.
    loan: Option<Loan>,
    segment: RemoteSegment,
    /// Bytes of the stream that have been taken out.
    taken: u64,
}

/// A range of the stream that does not wrap: where it is in the memory, and how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stretch {
    pub(crate) at: u64,
    pub(crate) bytes: u64,
}

impl ReceiveWindow {
    pub(super) fn new(plane: Arc<DataPlane>, loan: Loan, segment: RemoteSegment) -> Self {
        Self { plane, loan: Some(loan), segment, taken: 0 }
    }

    /// The window in the words of the wire.
    pub(crate) fn lent(&self) -> LentWindow {
        LentWindow { peer: self.plane.me.clone(), segment: self.segment.clone() }
    }

    /// Its memory.
    pub(crate) fn memory(&self) -> &Arc<Memory> {
        self.loan().memory()
    }

    /// Bytes of the stream that have been taken out so far.
    pub(crate) fn taken(&self) -> u64 {
        self.taken
    }

    /// Takes what is there up to byte `upto` of the stream: one stretch, or two where it wraps. None where the peer
    /// cannot have written so much.
    pub(crate) fn take(&mut self, upto: u64) -> Option<Vec<Stretch>> {
        let size = self.segment.bytes;
        let mut left = upto.checked_sub(self.taken).filter(|bytes| (1..=size).contains(bytes))?;
        let mut stretches = Vec::with_capacity(2);
        while left > 0 {
            let at = self.taken % size;
            let bytes = left.min(size - at);
            stretches.push(Stretch { at: self.loan().at() + at, bytes });
            self.taken += bytes;
            left -= bytes;
        }
        Some(stretches)
    }

    fn loan(&self) -> &Loan {
        self.loan.as_ref().expect("taken only when dropped")
    }
}

impl Drop for ReceiveWindow {
    fn drop(&mut self) {
        // Revoking waits for a copy under way: not on a thread of the runtime, where there is one.
        let (plane, loan, window) = (self.plane.clone(), self.loan.take(), self.segment.window);
        let close = move || {
            plane.mover.revoke(window);
            drop(loan);
        };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(close)),
            Err(_) => close(),
        }
    }
}

/// A part of one slice, in a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The slice.
    pub at: SlicePosition,
    /// The piece's first byte, counted from the start of the slice.
    pub offset: u32,
    /// Its length.
    pub bytes: u32,
    /// Where it is in the window's memory.
    pub(crate) from: u64,
}

/// Pieces of slices that have arrived in a window, in the order in which the sender wrote them. They have to be
/// copied to where they belong; what lies there afterwards is what the sender's checksum is compared with.
#[derive(Debug)]
pub struct ArrivedPieces {
    pub(crate) memory: Arc<Memory>,
    pub(crate) pieces: Vec<Piece>,
}

impl ArrivedPieces {
    /// Copies every piece to its place in `to`, which `place` knows, and gives the checksum of the copies.
    ///
    /// # Errors
    /// The first that `place` gives.
    ///
    /// # Panics
    /// Where a place is not inside the memory.
    pub fn copy_to<E>(&self, to: &Memory, place: impl Fn(&Piece) -> Result<u64, E>) -> Result<u64, E> {
        let mut sum = Checksum::default();
        for piece in &self.pieces {
            let at = place(piece)?;
            Memory::copy(&self.memory, piece.from, to, at, piece.bytes.into());
            to.add_to(&mut sum, at, piece.bytes.into());
        }
        Ok(sum.value())
    }

    /// Copies every piece out and hands it to `take`, and gives the checksum of the copies.
    ///
    /// # Errors
    /// The first that `take` gives.
    pub fn read<E>(&self, mut take: impl FnMut(&Piece, &[u8]) -> Result<(), E>) -> Result<u64, E> {
        let (mut sum, mut copy) = (Checksum::default(), Vec::new());
        for piece in &self.pieces {
            copy.resize(piece.bytes as usize, 0);
            self.memory.read(piece.from, &mut copy);
            sum.add(&copy);
            take(piece, &copy)?;
        }
        Ok(sum.value())
    }
}
