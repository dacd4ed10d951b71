//! The outputs of the conductor: orders, in the imperative.

use alloc::boxed::Box;
use alloc::vec::Vec;
use baton_types::{BlockHash, FetchPlan, InstanceId, RequestId, Role};
use serde::{Deserialize, Serialize};

use crate::{Decision, Input};

/// One order to the driver.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Effect {
    /// Send the request's prefill to an instance.
    StartPrefill {
        /// Which request.
        request: RequestId,
        /// Where it prefills.
        instance: InstanceId,
        /// Where it decodes; the KV is handed off layer by layer. Equal to `instance` when the
        /// prefill is local.
        decode: InstanceId,
        /// Blocks to bring from another instance first.
        fetch: Option<FetchPlan>,
        /// Output tokens for which room is reserved on the decode instance.
        room_tokens: u32,
        /// The prefills of an instance begin in ascending order of this key (ties: in order of arrival there). A
        /// prefill that has begun is not overtaken.
        order: u64,
    },
    /// Begin decoding: the KV is there.
    StartDecode {
        /// Which request.
        request: RequestId,
        /// The decode instance.
        instance: InstanceId,
    },
    /// Hand the KV, complete on `from`, to another decode instance than first planned.
    Handoff {
        /// Which request.
        request: RequestId,
        /// The holder.
        from: InstanceId,
        /// The new decode instance.
        to: InstanceId,
        /// Output tokens for which room is reserved there.
        room_tokens: u32,
    },
    /// Copy a popular chain ahead of demand.
    Replicate {
        /// A holder.
        from: InstanceId,
        /// The instance that should hold it too.
        to: InstanceId,
        /// The chain from its root.
        chain: Vec<BlockHash>,
    },
    /// Release everything that the request holds on an instance: queue place, pins, room.
    Release {
        /// Which request.
        request: RequestId,
        /// The instance that lets go of it.
        instance: InstanceId,
    },
    /// Refuse the request.
    Reject(Rejection),
    /// The request cannot be served although it was admitted.
    Fail {
        /// Which request.
        request: RequestId,
        /// What failed last, for the error's text.
        stage: FailStage,
    },
    /// An instance has another role from now on, because the demand of the last minutes asks for it.
    ChangeRole {
        /// Which one.
        instance: InstanceId,
        /// Its new role.
        role: Role,
    },
    /// The arithmetic of one decision.
    Explain(Decision),
    /// Give this fact to every other router.
    Share(Box<Input>),
}

/// What ended an admitted request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailStage {
    /// Its prefill instance was lost once more than it may be retried.
    PrefillLost,
    /// Its decode instance was lost once more than it may be retried.
    DecodeLost,
    /// Its prefill failed on a living instance once more than it may be retried.
    PrefillFailed,
    /// Its decode failed on a living instance once more than it may be retried.
    DecodeFailed,
    /// Its KV reached no decode instance.
    HandoffFailed,
    /// After a loss or failure no instance that serves now could take it.
    NoPlacement,
}

impl FailStage {
    /// Every stage, in the order of reports.
    pub const ALL: [Self; 6] = [
        Self::PrefillLost,
        Self::DecodeLost,
        Self::PrefillFailed,
        Self::DecodeFailed,
        Self::HandoffFailed,
        Self::NoPlacement,
    ];

    /// The word used in errors and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::PrefillLost => "prefill_lost",
            Self::DecodeLost => "decode_lost",
            Self::PrefillFailed => "prefill_failed",
            Self::DecodeFailed => "decode_failed",
            Self::HandoffFailed => "handoff_failed",
            Self::NoPlacement => "no_placement",
        }
    }
}

impl core::fmt::Display for FailStage {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
    }
}

/// A refusal, with what the client needs to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rejection {
    /// Which request.
    pub request: RequestId,
    /// Which predicate failed.
    pub reason: RejectReason,
    /// Retry-After, µs: when the same request is predicted to be admitted; 0 where a retry is useless.
    pub retry_after_us: u64,
    /// Best TTFT that any placement was predicted to give, µs; none where there is no placement.
    pub predicted_ttft_us: Option<u64>,
    /// Prefill work already spent on it, tokens: nonzero only for refusals after the prefill.
    pub wasted_tokens: u64,
}

/// Why a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RejectReason {
    /// No placement is predicted to meet the TTFT objective.
    Ttft,
    /// Decode load would break the TBT objective.
    Tbt,
    /// No decode instance has room for the KV.
    Room,
    /// The conductor's queue is full (I9).
    QueueFull,
    /// No instance can serve it at all.
    NoInstance,
    /// The prompt, or it and the answer that its client asks for, exceeds what any instance can hold.
    TooLong,
    /// It would displace more requests than it is worth; or it waited, and one of a better claim took its place.
    Costly,
    /// Its objectives cannot be met here even with every instance idle.
    #[serde(rename = "objective_unreachable")]
    Unreachable,
}

impl RejectReason {
    /// Every reason, in the order of the counters.
    pub const ALL: [Self; 8] = [
        Self::Ttft,
        Self::Tbt,
        Self::Room,
        Self::QueueFull,
        Self::NoInstance,
        Self::TooLong,
        Self::Costly,
        Self::Unreachable,
    ];

    /// The word used in errors, headers and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ttft => "ttft",
            Self::Tbt => "tbt",
            Self::Room => "room",
            Self::QueueFull => "queue_full",
            Self::NoInstance => "no_instance",
            Self::TooLong => "too_long",
            Self::Costly => "costly",
            Self::Unreachable => "objective_unreachable",
        }
    }
}
