//! Error codes of answers, one byte each.

use crate::mover::Fault;

pub(super) const STALE: u8 = 1;
pub(super) const INVALID: u8 = 2;
pub(super) const CORRUPT: u8 = 3;
pub(super) const UNKNOWN: u8 = 4;

/// The fault of a code; none for 0.
pub(super) fn fault_of(code: u8, window: u64) -> Option<Fault> {
    match code {
        0 => None,
        STALE => Some(Fault::Stale(format!("window {window} is closed"))),
        INVALID => Some(Fault::Invalid(format!("window {window} does not grant this range or direction"))),
        CORRUPT => Some(Fault::Corrupt("what has landed differs from what was sent".into())),
        _ => Some(Fault::Path("the peer does not know the memory that was named".into())),
    }
}
