//! The outputs of the core: orders to the driver, and the results of batches.

use core::fmt;

use crate::{BatchId, Fault, PathNumber, PeerNumber, RailNumber, SliceTicket};

/// One order to the driver, or one answer to the submitter of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Open a path; answer with `PathOpened` or `PathOpenFailed`.
    OpenPath {
        /// The number of the new path.
        path: PathNumber,
        /// To this peer.
        peer: PeerNumber,
        /// Over this rail.
        rail: RailNumber,
    },
    /// Close a path; `PathClosed` follows.
    ClosePath {
        /// The path to close.
        path: PathNumber,
    },
    /// Move one slice.
    Post {
        /// Over this path.
        path: PathNumber,
        /// Names this slice in the driver's answer.
        ticket: SliceTicket,
        /// Of this batch.
        batch: BatchId,
        /// Index of the op in [`crate::BatchRequest::ops`].
        op: u32,
        /// First byte, counted from the start of the op.
        at: u64,
        /// Number of bytes.
        bytes: u32,
    },
    /// Ask for a sign of life.
    Probe {
        /// Over this path.
        path: PathNumber,
        /// Names this probe in the driver's answer.
        ticket: SliceTicket,
    },
    /// Send the batch's notice.
    Notify {
        /// Over this path.
        path: PathNumber,
        /// Names this notice in the driver's answer.
        ticket: SliceTicket,
        /// The batch that is complete.
        batch: BatchId,
    },
    /// A batch ended: every byte is in place, its notice is delivered, and no byte of it can land later.
    Done {
        /// As in [`BatchRequest`](crate::BatchRequest).
        batch: BatchId,
        /// Number of bytes that it moved.
        bytes: u64,
        /// Time from the submission to this end, µs.
        took_us: u64,
    },
    /// A batch failed. None of its bytes can land here after this.
    Failed {
        /// As in [`BatchRequest`](crate::BatchRequest).
        batch: BatchId,
        /// The stage that failed, and the cause.
        failure: Failure,
        /// Whether nothing of it can land at the peer either. If not, the owner of the window must revoke it
        /// before its memory is used for something else.
        remote_fenced: bool,
    },
    /// A batch was cancelled. None of its bytes can land here after this.
    Cancelled {
        /// As in [`BatchRequest`](crate::BatchRequest).
        batch: BatchId,
        /// As in `Failed`.
        remote_fenced: bool,
    },
    /// A batch was not taken: nothing of it was or will be done.
    Refused {
        /// As in [`BatchRequest`](crate::BatchRequest).
        batch: BatchId,
        /// The rule or bound that it breaks.
        refusal: Refusal,
    },
    /// A peer was not taken in: there are too many with work.
    PeerRefused {
        /// As in [`crate::Input::PeerKnown`].
        peer: PeerNumber,
    },
    /// A peer without work was dropped to make room. To use it again, send `PeerKnown` with a new number.
    PeerForgotten {
        /// The number that is no longer valid.
        peer: PeerNumber,
    },
}

/// The stage in which a batch failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// Reaching the peer.
    Connect,
    /// Moving slices.
    Move,
    /// Making sure that nothing can land late.
    Fence,
    /// Sending the notice to the peer's program.
    Notify,
}

impl Stage {
    const fn name(self) -> &'static str {
        match self {
            Self::Connect => "connecting",
            Self::Move => "moving",
            Self::Fence => "fencing",
            Self::Notify => "notifying",
        }
    }
}

/// Why a batch failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Its time was over.
    Deadline,
    /// The last fault, after all tries that were worth it.
    Fault(Fault),
    /// The peer could not say whether late bytes of a write can still land.
    PeerUnknown,
}

impl Reason {
    /// The cause, and what to do.
    const fn text(self) -> &'static str {
        match self {
            Self::Deadline => "its deadline passed: allow more time or send less",
            Self::Fault(Fault::Path) => "every try broke: see the paths to this peer",
            Self::Fault(Fault::Silent) => "the peer was silent: see whether it lives",
            Self::Fault(Fault::Stale) => "the window is closed or the peer has restarted: ask it anew",
            Self::Fault(Fault::Invalid) => "the peer grants no such range: see the window's description",
            Self::Fault(Fault::Corrupt) => "bytes were damaged on the way, twice: see the device",
            Self::PeerUnknown => "late bytes may land at the peer: its owner must revoke the window",
        }
    }
}

/// At what and why a batch failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
#[error("{}: {}", .stage.name(), .reason.text())]
pub struct Failure {
    /// The stage that the batch had reached.
    pub stage: Stage,
    /// The cause; its text in `Display` says what to do.
    pub reason: Reason,
}

/// Which bound is met.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BoundKind {
    /// Batches at once.
    Batches,
    /// Ops of all batches at once.
    Ops,
    /// Peers with work at once.
    Peers,
}

impl fmt::Display for BoundKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Batches => "batches",
            Self::Ops => "ops",
            Self::Peers => "peers",
        })
    }
}

/// Why a batch was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
pub enum Refusal {
    /// A limit is reached. A retry succeeds once a batch has ended.
    #[error("full: {limit} {bound} at once; try again later")]
    Full {
        /// The quantity that the limit counts.
        bound: BoundKind,
        /// The configured limit.
        limit: u64,
    },
    /// Nothing to move and nobody to notify, or an op of no bytes.
    #[error("nothing to move: leave out ops of no bytes")]
    Empty,
    /// More ops than a batch may have.
    #[error("too many ops in one batch: split it")]
    TooManyOps,
    /// More bytes than a batch may have: [`crate::MoverConfig::slices_per_batch_max`] slices.
    #[error("too many bytes in one batch: split it")]
    TooLarge,
    /// A batch of this name lives.
    #[error("a batch of this name lives: take another name")]
    Duplicate,
    /// The peer was not announced with `PeerKnown`, or has no route.
    #[error("no route to the peer is known: tell of one first")]
    PeerUnknown,
    /// The peer's life is over.
    #[error("the peer has restarted: ask it for its windows anew")]
    PeerEnded,
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;
    use alloc::format;
    use alloc::string::{String, ToString};

    const STAGES: [(Stage, &str); 4] = [
        (Stage::Connect, "connecting: "),
        (Stage::Move, "moving: "),
        (Stage::Fence, "fencing: "),
        (Stage::Notify, "notifying: "),
    ];

    /// Each reason, a word that says what happened, and one that says what to do.
    const REASONS: [(Reason, &str, &str); 7] = [
        (Reason::Deadline, "deadline", "allow more time"),
        (Reason::Fault(Fault::Path), "broke", "see the paths"),
        (Reason::Fault(Fault::Silent), "silent", "see whether it lives"),
        (Reason::Fault(Fault::Stale), "closed", "ask it anew"),
        (Reason::Fault(Fault::Invalid), "no such range", "see the window's description"),
        (Reason::Fault(Fault::Corrupt), "damaged", "see the device"),
        (Reason::PeerUnknown, "late bytes", "revoke the window"),
    ];

    /// A cause, then what to do about it.
    fn has_remedy(text: &str) -> bool {
        let parts = text.split_once([':', ';']);
        parts.is_some_and(|(cause, remedy)| !cause.trim().is_empty() && remedy.trim().contains(' '))
    }

    #[test]
    fn every_failure_names_its_stage_its_cause_and_a_remedy_and_none_is_like_another() {
        let mut texts = BTreeSet::new();
        for (stage, at) in STAGES {
            for (reason, cause, remedy) in REASONS {
                let text = Failure { stage, reason }.to_string();
                let why = text.strip_prefix(at).unwrap_or_else(|| panic!("{text} does not begin with {at}"));
                assert!(why.contains(cause) && why.contains(remedy) && has_remedy(why), "{text}");
                assert!(why.find(cause) < why.find(remedy), "first the cause: {text}");
                assert!(texts.insert(text));
            }
        }
        assert_eq!(texts.len(), 28);
    }

    #[test]
    fn every_refusal_names_its_cause_and_a_remedy_and_none_is_like_another() {
        let full = |bound| Refusal::Full { bound, limit: 37 };
        let table = [
            (full(BoundKind::Batches), "37 batches", "later"),
            (full(BoundKind::Ops), "37 ops", "later"),
            (full(BoundKind::Peers), "37 peers", "later"),
            (Refusal::Empty, "nothing to move", "leave out"),
            (Refusal::TooManyOps, "too many ops", "split"),
            (Refusal::TooLarge, "too many bytes", "split"),
            (Refusal::Duplicate, "this name lives", "another name"),
            (Refusal::PeerUnknown, "no route", "tell of one"),
            (Refusal::PeerEnded, "restarted", "anew"),
        ];
        let mut texts = BTreeSet::new();
        for (refusal, cause, remedy) in table {
            let text = refusal.to_string();
            assert!(text.contains(cause) && text.contains(remedy) && has_remedy(&text), "{text}");
            assert!(texts.insert(text));
        }
    }

    #[test]
    fn texts_stay_on_one_line_and_show_no_names_of_types() {
        let failures = STAGES.iter().flat_map(|&(stage, _)| {
            REASONS
                .iter()
                .map(move |&(reason, ..)| (format!("{:?}", (stage, reason)), Failure { stage, reason }))
        });
        for (names, failure) in failures {
            let text: String = failure.to_string();
            let shown =
                names.split(['(', ')', ',', ' ']).find(|name| !name.is_empty() && text.contains(name));
            assert_eq!(shown, None, "{text}");
            assert!(text.len() < 100 && !text.contains('\n') && !text.ends_with('.'), "{text}");
        }
    }
}
