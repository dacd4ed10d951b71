//! The inputs of the network.

use crate::network::{LinkId, PathLinks, Priority, TransferId};

/// A producer that makes a flight's bytes while it flies: a prefill, layer by layer.
///
/// All but the last `last_bytes` appear at an even rate from the start of the flight until
/// `produced_until_us`; the last (one layer) appear at that moment. No byte leaves before it appears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProducerPace {
    /// When the last layer is computed.
    pub produced_until_us: u64,
    /// Bytes that can leave only after that; more than the flight's bytes counts as all of them.
    pub last_bytes: u64,
}

/// A transfer to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferRequest {
    /// Its name: not that of a flight in progress.
    pub transfer: TransferId,
    /// The links that it holds together.
    pub links: PathLinks,
    /// How much to move; a transfer of nothing finishes at once.
    pub bytes: u64,
    /// Its share against others.
    pub priority: Priority,
    /// Its producer, when the bytes are not all there yet.
    pub paced: Option<ProducerPace>,
    /// When to give up. A flight that lands at that very microsecond has landed.
    pub deadline_us: Option<u64>,
    /// The most that it may take, for example what one queue pair carries.
    pub rate_cap_bytes_per_s: Option<u64>,
}

/// A fact that the core acts on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// Bytes are to move.
    Start(TransferRequest),
    /// The requester no longer needs this transfer.
    Cancel {
        /// The transfer to cancel.
        transfer: TransferId,
    },
    /// The producer runs late or early. Bytes that the old schedule had produced by now count as
    /// produced; the rest follows evenly until the new moment.
    Repace {
        /// Which; a flight that was never paced is left as it is.
        transfer: TransferId,
        /// The new schedule.
        paced: ProducerPace,
    },
    /// A link was lost: its flights fail, and new ones are refused.
    LinkDown {
        /// The link that was lost.
        link: LinkId,
    },
    /// A link is back.
    LinkUp {
        /// The link that is back.
        link: LinkId,
    },
    /// A link's rate was measured or set anew.
    SetRate {
        /// The link that was measured.
        link: LinkId,
        /// Its rate from now on; 0 stalls its flights.
        bytes_per_s: u64,
    },
    /// The time of `next_deadline` came.
    TimerFired,
}
