//! What the conductor is told: facts in the past tense.

use baton_types::{CacheEvent, Epoch, InstanceId, RequestId};

use crate::{InstanceSpec, Request};

/// One fact.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// An instance is ready to serve, in a new epoch.
    InstanceJoined(InstanceSpec),
    /// An instance takes no new work; what it has goes on.
    InstanceDrained {
        /// Which one.
        instance: InstanceId,
    },
    /// An instance is gone with everything it held.
    InstanceLost {
        /// Which one.
        instance: InstanceId,
        /// The life that ended; a message about another life is ignored (I12).
        epoch: Epoch,
    },
    /// A client's request, parsed and hashed.
    RequestArrived(Request),
    /// The client left.
    RequestCancelled {
        /// Which request.
        request: RequestId,
    },
    /// An instance's cache changed.
    Cache(CacheEvent),
    /// A prefill ended; its KV is complete on that instance.
    PrefillFinished {
        /// Which request.
        request: RequestId,
        /// Engine time that the prefill took, from its first pass to its last, µs.
        compute_us: u64,
        /// Prompt tokens that the engine took from its cache.
        cached_tokens: u64,
    },
    /// The decode instance holds and has verified the whole KV of the request.
    HandoffFinished {
        /// Which request.
        request: RequestId,
    },
    /// The KV could not be handed to the decode instance, which gave its room back.
    HandoffFailed {
        /// Which request.
        request: RequestId,
    },
    /// A fetch ended, for better or worse; the prefill recomputes what is missing.
    FetchFinished {
        /// Which request.
        request: RequestId,
        /// Whether the blocks arrived.
        ok: bool,
    },
    /// How far an answer had come when its decode instance was lost; told before that loss, so that
    /// the next placement counts what was emitted as prompt.
    TokensEmitted {
        /// Which request.
        request: RequestId,
        /// Tokens that its client has, in all.
        emitted_tokens: u32,
    },
    /// The last token left.
    DecodeFinished {
        /// Which request.
        request: RequestId,
        /// Tokens emitted in all.
        output_tokens: u32,
    },
    /// A replication ended.
    ReplicateFinished {
        /// The instance that should hold the copy.
        to: InstanceId,
    },
    /// Another router placed a request (its loads count here, its fate is not ours).
    PeerPlaced {
        /// The request, as the peer saw it; its chain may be empty.
        request: Request,
        /// Where it prefills.
        prefill: InstanceId,
        /// Where it decodes.
        decode: InstanceId,
        /// Prefill work that the peer predicted, µs.
        work_us: u64,
    },
    /// Time passed; see `Conductor::next_deadline`.
    TimerFired,
}
