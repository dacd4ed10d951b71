//! The work of a node for its requests: a pure core, stepped by live nodes and by the simulator.
//!
//! A *leg* is one node's share of a request: it computes the prompt (a prefill leg), takes KV from a
//! prefill and decodes (a decode leg), or does both (a prefill leg that stays). [`Legs`] holds all legs
//! of one node. A driver says what has happened ([`Input`]) and carries out what it answers
//! ([`Effect`]); KV, engines and networks are the driver's.
//!
//! The rules that live here and nowhere else:
//!
//! - prefills are opened in the conductor's order, [`LegsConfig::ahead_tokens`] ahead of the engine; one
//!   that finds no room waits, and nothing overtakes it;
//! - decode legs that find no room wait, and are tried again in order whenever room came back;
//! - KV that the conductor saw elsewhere is fetched only where it is still missing here;
//! - a prefill computes once its node's cache and its fetch have brought all that they will bring;
//! - decoding begins on the conductor's word, and only where all KV is;
//! - where an answer outgrows its room and there is none, the youngest gives its KV up: so the oldest
//!   always comes to its end, and makes room for the others;
//! - KV whose hand-off failed is kept for another one, for [`STRANDED_LEASE_US`] at most.
//!
//! Every leg is in exactly one state of [`Leg`]. A step takes the old state and gives the new one, so
//! that what belongs to a state cannot outlive it.
#![no_std]
extern crate alloc;

mod leg;
pub mod pairs;
mod set;
#[cfg(test)]
mod tests;

pub use leg::{
    AwaitedTransfer, Complete, ComputingPrefill, Leg, LoadSource, LoadingPrefill, PinnedPrefill,
    QueuedPrefill, Work,
};
pub use set::Legs;

use baton_types::{FetchPlan, RequestId};

/// How long KV whose hand-off failed is kept without a word from the conductor, µs.
pub const STRANDED_LEASE_US: u64 = 8_000_000;

/// Engine passes for whose prompts blocks are pinned and brought ahead. A prompt behind them looks
/// later, and finds what those before it computed; with one pass alone, a prompt that would only fill
/// up another's last pass would delay it.
const PASSES_AHEAD: u64 = 2;

/// Blocks asked for when an answer outgrows its room; one alone where these are not free.
const GROW_BLOCKS: u32 = 4;

/// The capacity of a node, as far as its legs are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LegsConfig {
    /// Tokens of a KV block.
    pub block_tokens: u32,
    /// Blocks of the engine's pool.
    pub pool_blocks: u64,
    /// Prompt tokens of prefills that may be open: pinned, and not computed yet.
    pub ahead_tokens: u64,
}

impl LegsConfig {
    /// The configuration of a node whose engine computes `pass_tokens` at once.
    #[must_use]
    pub const fn new(block_tokens: u32, pool_blocks: u64, pass_tokens: u64) -> Self {
        Self { block_tokens, pool_blocks, ahead_tokens: PASSES_AHEAD.saturating_mul(pass_tokens) }
    }
}

/// An event at a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// The conductor orders a prefill. Any earlier leg of the request here has been released before.
    Prefill {
        /// The request that the leg serves.
        request: RequestId,
        /// The work that it requires of the node.
        work: Work,
        /// Whether it is decoded here, too.
        stays: bool,
        /// KV to fetch, where it is still missing.
        fetch: Option<FetchPlan>,
        /// Its place: the lowest is opened first, among equals the first to come.
        order: u64,
    },
    /// The conductor orders room for KV that a prefill elsewhere will send. Any earlier leg of the request here has
    /// been released before. The core asks for the room at once, unless a leg whose KV is offered waits for some.
    Expect {
        /// The request that the leg serves.
        request: RequestId,
        /// The work that it requires of the node.
        work: Work,
    },
    /// The prefill's node offers the KV: from now on the leg keeps its room, or gets some before legs without an offer.
    Offered {
        /// The request that the leg serves.
        request: RequestId,
    },
    /// Answers [`Effect::Withdraw`]: the room is free.
    Withdrawn {
        /// The request that had it.
        request: RequestId,
        /// The request that needs it.
        to: RequestId,
    },
    /// Room may have come back: decode legs that wait for some are tried again.
    RoomFreed,
    /// The engine or the queue may have moved on: the next prefill is opened if it is time.
    OpenNext,
    /// Answers [`Effect::Open`]: its blocks are pinned.
    Opened {
        /// The request that the leg serves.
        request: RequestId,
        /// Leading blocks that need no computing.
        cached_blocks: u32,
        /// Whether some of them have yet to become readable.
        waits: bool,
    },
    /// Answers [`Effect::Open`]: there is no room.
    NoRoom {
        /// The request that the leg serves.
        request: RequestId,
    },
    /// Answers [`Effect::Fetch`]: it is over, or never began.
    FetchEnded {
        /// The request that the leg serves.
        request: RequestId,
        /// Leading blocks that need no computing now.
        cached_blocks: u32,
    },
    /// The node's cache says how a pinned prompt stands.
    Cached {
        /// The request that the leg serves.
        request: RequestId,
        /// Leading blocks that need no computing.
        cached_blocks: u32,
        /// Whether some of them have yet to become readable.
        waits: bool,
    },
    /// The engine has computed a prompt.
    Computed {
        /// The request that the leg serves.
        request: RequestId,
    },
    /// A hand-off of a prefill leg is over.
    HandedOff {
        /// The request that the leg serves.
        request: RequestId,
        /// Whether all KV is at its decode node, verified.
        ok: bool,
        /// Time of the report, µs; starts the lease of KV whose hand-off failed.
        now_us: u64,
    },
    /// The conductor orders another hand-off of KV that is complete here.
    HandOff {
        /// The request that the leg serves.
        request: RequestId,
    },
    /// All KV that was expected is here, verified.
    Landed {
        /// The request that the leg serves.
        request: RequestId,
    },
    /// The conductor orders decoding.
    StartDecode {
        /// The request that the leg serves.
        request: RequestId,
    },
    /// The next token of an answer has no place: it outgrew its room.
    Starved {
        /// The request that the leg serves.
        request: RequestId,
    },
    /// Answers [`Effect::Grow`]: there is no room.
    NotGrown {
        /// The request that the leg serves.
        request: RequestId,
        /// The blocks that it asked for.
        blocks: u32,
    },
    /// The answer is complete, or the engine gave the request up.
    Ended {
        /// The request that the leg serves.
        request: RequestId,
    },
    /// The conductor takes a request back.
    Release {
        /// The request that the leg serves.
        request: RequestId,
    },
    /// Time passes.
    Tick {
        /// The current time, µs.
        now_us: u64,
    },
}

/// A task for the driver; tasks are to be done in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Pin the blocks of the prompt that are here, and reserve the others with room for an answer.
    /// Answered by [`Input::Opened`] or [`Input::NoRoom`] before any other input.
    Open {
        /// The request that the leg serves.
        request: RequestId,
        /// Blocks for the answer.
        room_blocks: u32,
    },
    /// Bring blocks from elsewhere. Answered by [`Input::FetchEnded`].
    Fetch {
        /// The request that the leg serves.
        request: RequestId,
        /// Leading blocks that are here.
        have_blocks: u32,
        /// The blocks held elsewhere.
        plan: FetchPlan,
    },
    /// Tell the conductor that a fetch is over.
    Fetched {
        /// The request that the leg serves.
        request: RequestId,
        /// Whether it brought blocks, or none was missing by then.
        ok: bool,
    },
    /// Give the prompt to the engine.
    Compute {
        /// The request that the leg serves.
        request: RequestId,
        /// Leading tokens that need no computing.
        cached_tokens: u64,
    },
    /// Seal the blocks of the prompt: all of their KV is here.
    Seal {
        /// The request that the leg serves.
        request: RequestId,
    },
    /// Take back the room of a decode leg whose KV nobody has offered; until the next [`Effect::Admit`] its KV is not
    /// let in. Answered by [`Input::Withdrawn`], or by [`Input::Offered`] where its KV is offered by now.
    Withdraw {
        /// The request that has the room.
        request: RequestId,
        /// A request whose KV is offered and that needs the room.
        to: RequestId,
    },
    /// Let the KV of a prefill elsewhere in.
    Admit {
        /// The request that the leg serves.
        request: RequestId,
    },
    /// Send KV that is complete here to its decode node.
    Send {
        /// The request that the leg serves.
        request: RequestId,
    },
    /// Decode, with the KV that has landed. A prompt that was computed here is decoded without this.
    Decode {
        /// The request that the leg serves.
        request: RequestId,
    },
    /// Reserve `blocks` more blocks for an answer. If they are not free, the driver answers with [`Input::NotGrown`]
    /// before any other input.
    Grow {
        /// The request that the leg serves.
        request: RequestId,
        /// The blocks to add.
        blocks: u32,
    },
    /// The leg is over: take back what the engine does for it and what the cache holds for it.
    Close {
        /// The request that the leg serves.
        request: RequestId,
        /// The resources that it held.
        held: LegHoldings,
    },
    /// An order could not be carried out; the conductor has to know. The leg is closed next, if there is one
    /// that the order fits.
    Fail {
        /// The request that the leg serves.
        request: RequestId,
        /// The cause, for the conductor.
        why: LegFailure,
    },
}

/// The resources of a leg that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LegHoldings {
    /// Whether blocks are pinned or reserved for it.
    pub blocks: bool,
    /// Whether the engine knows it.
    pub engine: bool,
}

/// Why a leg failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LegFailure {
    /// The prompt is larger than the whole pool.
    TooLarge {
        /// Blocks that it needs.
        needed_blocks: u64,
    },
    /// There is no room, and nothing here that would make some.
    NoRoom,
    /// KV ran short, and it gave its own up for older requests.
    GaveWay,
    /// The order to decode came before its KV.
    NotReady,
    /// Its KV is not here, or has left.
    NothingToSend,
}
