//! The inputs of the conductor: facts, in the past tense.

use alloc::boxed::Box;
use baton_types::{CacheEvent, Epoch, InstanceId, RequestId, Role};
use serde::{Deserialize, Serialize};

use crate::{InstanceSpec, PeerPlacement, Request, SchedulerConfig, Ticket};

/// One fact.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Input {
    /// An instance is ready to serve, in a new epoch.
    InstanceJoined(InstanceSpec),
    /// An instance takes no new work; its present work continues.
    InstanceDrained {
        /// Which one.
        instance: InstanceId,
    },
    /// A draining instance takes new work again; its cache and what was learnt of it are kept.
    InstanceResumed {
        /// Which one.
        instance: InstanceId,
    },
    /// A living instance has another role from now on. Work that was sent to it continues there; waiting work is placed
    /// again.
    RoleChanged {
        /// Which one.
        instance: InstanceId,
        /// Its new role.
        role: Role,
    },
    /// The operator changed the settings. Those in force stay, and the input counts as stale,
    /// unless [`Conductor::can_change`](crate::Conductor::can_change) allows the new ones.
    PolicyChanged(Box<SchedulerConfig>),
    /// An instance was lost with everything that it held.
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
    /// An engine or store error ended one prefill (or lost its KV before the hand-off) on a living instance. The
    /// request starts over, elsewhere if possible.
    PrefillFailed {
        /// Which request.
        request: RequestId,
    },
    /// The engine of one leg takes nothing new for a while, and refused it. The request is placed again, and no retry is
    /// counted. Nothing is sent to that instance meanwhile.
    LegRefused {
        /// Which request.
        request: RequestId,
        /// The instance of that engine.
        instance: InstanceId,
        /// Tokens that its client has, in all.
        emitted_tokens: u32,
        /// How long the engine takes nothing new, µs. A minute at most is believed.
        busy_us: u64,
    },
    /// The decode instance holds and has verified the whole KV of the request.
    HandoffFinished {
        /// Which request.
        request: RequestId,
    },
    /// The KV could not be handed to the decode instance, which released its room.
    HandoffFailed {
        /// Which request.
        request: RequestId,
    },
    /// A fetch ended, successfully or not; the prefill recomputes what is missing.
    FetchFinished {
        /// Which request.
        request: RequestId,
        /// Whether the blocks arrived.
        ok: bool,
    },
    /// The length of an answer when its decode instance was lost. It is reported before that loss, so that the next
    /// placement counts the emitted tokens as prompt.
    TokensEmitted {
        /// Which request.
        request: RequestId,
        /// Tokens that its client has, in all.
        emitted_tokens: u32,
    },
    /// A decode died or stalled on a living instance. The request is placed again, elsewhere if possible, with the
    /// emitted tokens as part of its prompt.
    DecodeFailed {
        /// Which request.
        request: RequestId,
        /// Tokens that its client has, in all.
        emitted_tokens: u32,
    },
    /// A decode instance ran short of KV and released this request's KV for an older request, or released the room for
    /// its KV in transfer. The request waits here until there is room again.
    Preempted {
        /// Which request.
        request: RequestId,
        /// Tokens that its client has, in all.
        emitted_tokens: u32,
    },
    /// An answer has become longer than the room that was reserved for it.
    RoomOutgrown {
        /// Which request.
        request: RequestId,
        /// Tokens that its client has, in all.
        emitted_tokens: u32,
    },
    /// The last token was emitted.
    DecodeFinished {
        /// Which request.
        request: RequestId,
        /// Tokens emitted in all.
        output_tokens: u32,
        /// When the first token of its last attempt came, µs; 0 where that is not known.
        #[serde(default)]
        first_us: u64,
        /// The mean of the longest tenth of its token gaps, µs; 0 where that is not known.
        #[serde(default)]
        tbt_us: u64,
    },
    /// A replication ended.
    ReplicateFinished {
        /// The instance that should hold the copy.
        to: InstanceId,
    },
    /// Another router placed a request, or sent it. Its load counts here, and no order is given for it.
    PeerPlaced(Box<PeerPlacement>),
    /// Another router took the place of a request that waits here for one with a better claim.
    PeerDisplaced {
        /// Which request.
        request: RequestId,
    },
    /// A refused client of another router was asked to return, and a place is kept for it.
    PeerTicket(Box<Ticket>),
    /// That client has returned.
    PeerTicketTaken {
        /// The name on the ticket.
        name: u64,
    },
    /// Time passed; see `Conductor::next_deadline`.
    TimerFired,
}
