//! What the core is told: facts, in the past tense.

use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::Priority;
use crate::{BatchId, PathNumber, PeerNumber, RailNumber, Ticket};

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// From the peer to this node.
    Read,
    /// From this node to the peer.
    Write,
}

/// One range to move. Where it is, here and there, stays with the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Op {
    /// Which way.
    pub direction: Direction,
    /// How many bytes, at least 1.
    pub bytes: u64,
    /// Where the local memory is: the row of [`crate::MoverConfig::ranks`].
    pub location: u16,
}

/// Ranges that end together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchRequest {
    /// Its name.
    pub batch: BatchId,
    /// With whom.
    pub peer: PeerNumber,
    /// How urgent.
    pub priority: Priority,
    /// When it fails at the latest; never later than [`crate::MoverConfig::batch_limit_us`] from now.
    pub deadline_us: Option<u64>,
    /// Whether a notice goes to the peer's program when all bytes are in place.
    pub notice: bool,
    /// What to move. May be empty where there is a notice.
    pub ops: Vec<Op>,
}

/// A rail over which a peer may be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Which.
    pub rail: RailNumber,
    /// 0 is preferred. A rail of a higher tier is used only while none of a lower one works.
    pub tier: u8,
}

/// Why a slice, a notice, a probe or a path failed; what each means for the others is the port's promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// The path is broken: another may do.
    Path,
    /// No sign of life within the limit: another path may do.
    Silent,
    /// The window is closed, or the peer's life is over: no path will do. Nothing of it lands any more.
    Stale,
    /// The range or the right is wrong: no path will do. Nothing of it lands any more.
    Invalid,
    /// Bytes are not those that were sent: worth one more try.
    Corrupt,
}

/// How certain the end of a path is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PathEnd {
    /// Nothing of it can land any more, at either side.
    Fenced,
    /// Nothing of it can land here; the peer could not be asked.
    PeerUnknown,
}

/// One fact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Input {
    /// A peer may be reached so. Told once for each, before its first batch.
    PeerKnown {
        /// Which.
        peer: PeerNumber,
        /// Over which rails, each named once.
        routes: Vec<Route>,
    },
    /// A life of a peer is over: nothing that was meant for it can be done.
    PeerEnded {
        /// Which.
        peer: PeerNumber,
    },
    /// Someone wants bytes moved.
    Submit(BatchRequest),
    /// Nobody wants them any more.
    Cancel {
        /// Which.
        batch: BatchId,
    },
    /// A path stands.
    PathOpened {
        /// Which.
        path: PathNumber,
    },
    /// A path could not be opened; it is gone.
    PathOpenFailed {
        /// Which.
        path: PathNumber,
        /// Why.
        fault: Fault,
    },
    /// A path went down by itself. Not told before `PathOpened`.
    PathBroken {
        /// Which.
        path: PathNumber,
        /// Why.
        fault: Fault,
    },
    /// The last of a path.
    PathClosed {
        /// Which.
        path: PathNumber,
        /// With what certainty.
        end: PathEnd,
    },
    /// A path that refused a slice takes some again.
    PathRoom {
        /// Which.
        path: PathNumber,
    },
    /// A path was full: the slice has not left.
    PathRefused {
        /// Which path.
        path: PathNumber,
        /// Which slice.
        ticket: Ticket,
    },
    /// All bytes of a slice are where they belong.
    SliceDone {
        /// Over which path.
        path: PathNumber,
        /// Which.
        ticket: Ticket,
    },
    /// A notice was delivered, or a probe answered.
    Notified {
        /// Over which path.
        path: PathNumber,
        /// Which.
        ticket: Ticket,
    },
    /// A slice, a notice or a probe failed.
    Failed {
        /// Over which path.
        path: PathNumber,
        /// Which.
        ticket: Ticket,
        /// Why.
        fault: Fault,
    },
    /// Time has passed.
    TimerFired,
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::fmt::Debug;
    use serde::de::IntoDeserializer;
    use serde::de::value::{Error, StrDeserializer};

    /// A name as it stands in a journal.
    fn read<T: for<'de> Deserialize<'de>>(name: &str) -> Result<T, Error> {
        let name: StrDeserializer<'_, Error> = name.into_deserializer();
        T::deserialize(name)
    }

    fn check<T: for<'de> Deserialize<'de> + PartialEq + Debug>(table: &[(&str, T)]) {
        for (name, value) in table {
            assert_eq!(read::<T>(name).as_ref(), Ok(value));
            assert!(read::<T>(&name.to_uppercase()).is_err(), "{name} has one spelling");
        }
    }

    #[test]
    fn journals_of_old_are_read_by_the_same_names() {
        check(&[("read", Direction::Read), ("write", Direction::Write)]);
        check(&[("fenced", PathEnd::Fenced), ("peer_unknown", PathEnd::PeerUnknown)]);
        check(&[
            ("path", Fault::Path),
            ("silent", Fault::Silent),
            ("stale", Fault::Stale),
            ("invalid", Fault::Invalid),
            ("corrupt", Fault::Corrupt),
        ]);
        assert!(read::<Fault>("fenced").is_err() && read::<Direction>("").is_err());
    }
}
