//! Tasks for a driver of pairs.

use baton_scheduler::{Effect as Order, FailStage, Rejection};
use baton_types::{FetchPlan, InstanceId, RequestId};

use super::Phase;

/// Why an attempt did not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Its leg says why.
    Leg,
    /// Its KV did not reach the decode instance.
    Handoff,
    /// Its instance was lost.
    Lost,
    /// The lost instance held a leg that the request did not need any longer.
    LostBehind,
    /// A stage took longer than it may.
    Late(Phase),
}

/// The prefill leg of a new attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillOrder {
    /// The request.
    pub request: RequestId,
    /// The attempt.
    pub attempt: u32,
    /// The prefill instance.
    pub instance: InstanceId,
    /// Where its KV goes; the prefill instance itself where it is decoded, or where the prefill draws all of the
    /// answer.
    pub decode: InstanceId,
    /// KV to bring first.
    pub fetch: Option<FetchPlan>,
    /// Tokens of the answer for which there has to be room where it is decoded.
    pub room_tokens: u32,
    /// Its place in the node's queue.
    pub order: u64,
    /// Tokens that its client has already, as part of the prompt.
    pub given_tokens: u32,
}

/// A task for the driver; tasks are to be done in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Something that concerns no pair: the driver's own.
    Order(Order),
    /// A request is in another stage, or in the same one of another attempt.
    Entered {
        /// The request.
        request: RequestId,
        /// The stage.
        phase: Phase,
        /// The attempt; of one that waits the next one.
        attempt: u32,
        /// Where it is prefilled, and where it is decoded.
        legs: [Option<InstanceId>; 2],
    },
    /// Order the prefill leg of a new attempt.
    Prefill(PrefillOrder),
    /// Order the decode leg of a new attempt: KV comes from elsewhere. It is ordered together with the prefill or the
    /// hand-off, so that there is room when the KV is ready.
    Expect {
        /// The request.
        request: RequestId,
        /// The attempt.
        attempt: u32,
        /// The decode instance.
        instance: InstanceId,
        /// Tokens for which it keeps room.
        room_tokens: u32,
        /// As in [`PrefillOrder`], when it was prefilled.
        given_tokens: u32,
    },
    /// Order decoding.
    Decode {
        /// The request.
        request: RequestId,
        /// The attempt.
        attempt: u32,
        /// The decode instance, which holds the KV.
        instance: InstanceId,
    },
    /// Order another hand-off of KV that is complete.
    Handoff {
        /// The request.
        request: RequestId,
        /// The attempt.
        attempt: u32,
        /// The instance that holds the KV.
        from: InstanceId,
        /// The instance that gets it.
        to: InstanceId,
    },
    /// Take a leg back.
    Release {
        /// The request.
        request: RequestId,
        /// The attempt.
        attempt: u32,
        /// The instance that holds the leg.
        instance: InstanceId,
    },
    /// The client is promised an answer.
    Admitted {
        /// The request.
        request: RequestId,
    },
    /// An attempt has ended early. Its consequences come next.
    Blame {
        /// The request.
        request: RequestId,
        /// The cause, for logs and metrics.
        cause: Cause,
    },
    /// A stage took longer than it may.
    Late {
        /// The request.
        request: RequestId,
        /// The attempt.
        attempt: u32,
        /// The stage.
        phase: Phase,
    },
    /// The request is refused, and over. Its client has nothing of its answer yet.
    Refuse(Rejection),
    /// The request is refused, and its client has the beginning of its answer: that fails.
    CutShort(Rejection),
    /// The request failed, and is over.
    Fail {
        /// The request.
        request: RequestId,
        /// The stage that failed last.
        stage: FailStage,
        /// Attempts so far.
        attempts: u32,
    },
    /// The request was in engines that died, and is over: it may be what they died of.
    Condemn {
        /// The request.
        request: RequestId,
    },
    /// The request's time is over, and so is the request.
    GiveUp {
        /// The request.
        request: RequestId,
        /// The stage that it was in.
        phase: Phase,
        /// Whether the client's time limit ended.
        impatient: bool,
    },
    /// The request is over; its client has all that it gets.
    Ended {
        /// The request.
        request: RequestId,
    },
}
