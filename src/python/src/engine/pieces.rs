//! From addresses to ops: neighbours are joined, and what lies in several ranges is divided at their ends.

use baton_transports::mover::published::PublishedSegments;
use baton_transports::mover::{Direction, Op};

use super::{RegisteredRange, region};
use crate::Failure;
use crate::ranges::{Ranges, Use};

/// Pieces that one call may have.
const PIECES_MAX: usize = 1 << 20;

/// Bytes between an address here and an address there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The local address.
    pub local: u64,
    /// The remote address.
    pub remote: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// The failure that an address is not registered here.
pub(super) fn unregistered(address: u64) -> Failure {
    Failure::new(Failure::FAILED, format!("{address:#x} is not registered here; register it first"))
}

/// The reason why pieces are no ops.
#[derive(Debug, thiserror::Error)]
pub(super) enum PlanError {
    /// A local address, or the number of pieces.
    #[error(transparent)]
    Here(#[from] Failure),
    /// The peer's answer does not have this address.
    #[error("{0:#x} is not memory that it has registered")]
    There(u64),
}

impl From<PlanError> for Failure {
    fn from(error: PlanError) -> Self {
        match error {
            PlanError::Here(failure) => failure,
            PlanError::There(_) => Self::new(Self::FAILED, error.to_string()),
        }
    }
}

/// The ops for pieces, with what keeps their memory registered meanwhile.
pub(super) fn plan(
    pieces: &[Piece],
    way: Direction,
    ranges: &Ranges<RegisteredRange>,
    published: &PublishedSegments,
) -> Result<(Vec<Op>, Vec<Use<RegisteredRange>>), PlanError> {
    if pieces.len() > PIECES_MAX {
        let text = format!("{} pieces in one call; give at most {PIECES_MAX}", pieces.len());
        return Err(Failure::new(Failure::FAILED, text).into());
    }
    let (mut ops, mut used): (Vec<Op>, Vec<Use<RegisteredRange>>) = (Vec::new(), Vec::new());
    for piece in joined(pieces) {
        let mut done = 0;
        while done < piece.bytes {
            let (from, to) = (piece.local.saturating_add(done), piece.remote.saturating_add(done));
            let (range, at, held) = ranges.find(from).ok_or_else(|| unregistered(from))?;
            let place = published.find(to).ok_or(PlanError::There(to))?;
            let bytes = (piece.bytes - done).min(held).min(place.bytes);
            let (local, remote) = (region(&range, at), place.segment);
            ops.push(Op { direction: way, local, remote, remote_at: place.at, bytes });
            done += bytes;
            if used.last().is_none_or(|last| !last.same(&range)) {
                used.push(range);
            }
        }
    }
    Ok((ops, used))
}

/// The pieces with neighbours on both sides joined into one. Empty ones are left out.
fn joined(pieces: &[Piece]) -> Vec<Piece> {
    let mut joined: Vec<Piece> = Vec::with_capacity(pieces.len());
    for piece in pieces.iter().filter(|piece| piece.bytes > 0) {
        match joined.last_mut() {
            Some(last)
                if last.local.checked_add(last.bytes) == Some(piece.local)
                    && last.remote.checked_add(last.bytes) == Some(piece.remote)
                    && last.bytes.checked_add(piece.bytes).is_some() =>
            {
                last.bytes += piece.bytes;
            }
            _ => joined.push(*piece),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(local: u64, remote: u64, bytes: u64) -> Piece {
        Piece { local, remote, bytes }
    }

    #[test]
    fn neighbours_on_both_sides_are_one() {
        let given =
            [piece(0, 100, 10), piece(10, 110, 5), piece(15, 120, 5), piece(9, 9, 0), piece(20, 125, 1)];
        assert_eq!(joined(&given), [piece(0, 100, 15), piece(15, 120, 6)]);
        let far = [piece(u64::MAX, 0, 1), piece(0, 1, 1)];
        assert_eq!(joined(&far), far);
    }
}
