//! The states of one leg. Each is a type of its own, and a step consumes it: none is `Copy`.

use baton_types::{FetchPlan, blocks_for};

use crate::{LegHoldings, LegsConfig};

/// The work that a leg requires of its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Tokens whose KV there must be before decoding.
    pub prompt_tokens: u64,
    /// Blocks of them that have names.
    pub named_blocks: u32,
    /// Tokens to come for which room was promised.
    pub room_tokens: u32,
}

impl Work {
    /// Tokens in `blocks` leading blocks that need no computing: the last token is always computed.
    pub(crate) fn tokens_of(self, blocks: u32, config: &LegsConfig) -> u64 {
        (u64::from(blocks) * u64::from(config.block_tokens)).min(self.prompt_tokens.saturating_sub(1))
    }

    /// Blocks that the prompt fills.
    pub(crate) fn prompt_blocks(self, config: &LegsConfig) -> u64 {
        blocks_for(self.prompt_tokens, config.block_tokens)
    }

    /// Blocks to reserve beside the named ones: what the prompt and the promised room need, each in whole
    /// blocks as the conductor counts them, as far as the pool can hold it at all. An answer that outgrows the pool ends there whatever was reserved.
    pub(crate) fn room_blocks(self, stays: bool, config: &LegsConfig) -> u32 {
        let room_tokens = if stays { u64::from(self.room_tokens) } else { 0 };
        let named = u64::from(self.named_blocks);
        let all = self.prompt_blocks(config) + blocks_for(room_tokens, config.block_tokens);
        let wanted = all.min(config.pool_blocks).saturating_sub(named);
        u32::try_from(wanted).unwrap_or(u32::MAX)
    }
}

/// A prefill that waits for its turn to be opened; nothing is held for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuedPrefill {
    pub(crate) work: Work,
    pub(crate) stays: bool,
    pub(crate) fetch: Option<FetchPlan>,
    /// The conductor's order, then arrival.
    pub(crate) place: (u64, u64),
}

/// A prefill whose blocks are pinned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedPrefill {
    pub(crate) work: Work,
    pub(crate) stays: bool,
    /// Leading blocks that need no computing.
    pub(crate) cached_blocks: u32,
}

/// What a pinned prefill waits for before it computes. A fetch comes second: how much is missing is known once the
/// node's own cache has brought what it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadSource {
    /// The node's cache is to make some of its blocks readable; then the blocks of the plan are fetched, if they are
    /// missing still.
    Cache(Option<FetchPlan>),
    /// Blocks are being fetched.
    Fetch(FetchPlan),
}

impl LoadSource {
    pub(crate) const fn plan(self) -> Option<FetchPlan> {
        match self {
            Self::Cache(plan) => plan,
            Self::Fetch(plan) => Some(plan),
        }
    }
}

/// A pinned prefill of which some blocks are being brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadingPrefill {
    pub(crate) pinned: PinnedPrefill,
    pub(crate) source: LoadSource,
}

/// A pinned prefill that its engine computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComputingPrefill {
    pub(crate) pinned: PinnedPrefill,
    /// When its hand-off failed, µs, if it has: it began with the first layers.
    pub(crate) failed_us: Option<u64>,
}

/// A prefill that is computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Complete {
    /// Its KV leaves.
    Leaves,
    /// Its hand-off failed at this time, µs; the conductor says what shall become of it.
    Stranded(u64),
}

/// The KV that a decode leg waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AwaitedTransfer {
    pub(crate) work: Work,
    /// Whether the prefill's node has offered it. Until then the leg's room is lent: legs whose KV is offered go first.
    pub(crate) offered: bool,
}

/// Where a leg is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leg {
    /// A prefill in the queue.
    Queued(QueuedPrefill),
    /// A prefill whose blocks are pinned, and some on their way.
    Loading(LoadingPrefill),
    /// A prefill in the engine.
    Computing(ComputingPrefill),
    /// A prefill that is over: its KV is here, whole.
    Held(Complete),
    /// A decode leg without room.
    WaitingForRoom(AwaitedTransfer),
    /// A decode leg with room whose KV has not come yet, not all of it at least.
    Expecting(AwaitedTransfer),
    /// A decode leg whose KV is here, whole.
    Landed,
    /// The engine decodes.
    Decoding {
        /// Whether the prompt was computed here.
        local: bool,
    },
}

impl QueuedPrefill {
    pub(crate) const fn opened(self, cached_blocks: u32) -> LoadingPrefill {
        let pinned = PinnedPrefill { work: self.work, stays: self.stays, cached_blocks };
        LoadingPrefill { pinned, source: LoadSource::Cache(self.fetch) }
    }
}

impl PinnedPrefill {
    /// Leading tokens that need no computing.
    pub(crate) fn cached_tokens(&self, config: &LegsConfig) -> u64 {
        self.work.tokens_of(self.cached_blocks, config)
    }
}

impl LoadingPrefill {
    /// Tokens that its engine has to compute if all comes that is being brought.
    pub(crate) fn open_tokens(&self, config: &LegsConfig) -> u64 {
        let fetched_blocks = self.source.plan().map_or(0, |plan| plan.blocks);
        let expected_blocks = self.pinned.cached_blocks.max(fetched_blocks);
        self.pinned.work.prompt_tokens - self.pinned.work.tokens_of(expected_blocks, config)
    }

    /// Blocks that its cache did not bring are fetched.
    pub(crate) const fn fetching(self, plan: FetchPlan) -> Self {
        Self { source: LoadSource::Fetch(plan), ..self }
    }

    /// All is here that will be: on to the engine.
    pub(crate) const fn complete(self) -> ComputingPrefill {
        ComputingPrefill { pinned: self.pinned, failed_us: None }
    }
}

impl ComputingPrefill {
    /// Tokens that its engine has yet to compute.
    pub(crate) fn open_tokens(&self, config: &LegsConfig) -> u64 {
        self.pinned.work.prompt_tokens - self.pinned.cached_tokens(config)
    }

    pub(crate) const fn computed(self) -> Complete {
        match self.failed_us {
            Some(since_us) => Complete::Stranded(since_us),
            None => Complete::Leaves,
        }
    }
}

impl Leg {
    /// Tokens of an open prefill that its engine has yet to compute.
    pub(crate) fn open_tokens(&self, config: &LegsConfig) -> u64 {
        match self {
            Self::Loading(loading) => loading.open_tokens(config),
            Self::Computing(computing) => computing.open_tokens(config),
            Self::Queued(_) | Self::Held(_) | Self::WaitingForRoom(_) => 0,
            Self::Expecting(_) | Self::Landed | Self::Decoding { .. } => 0,
        }
    }

    /// The resources that it holds at its node.
    #[must_use]
    pub const fn held(&self) -> LegHoldings {
        match self {
            Self::Queued(_) | Self::WaitingForRoom(_) => LegHoldings { blocks: false, engine: false },
            Self::Loading(_) | Self::Expecting(_) | Self::Landed => {
                LegHoldings { blocks: true, engine: false }
            }
            // A prefill that is over waits in its engine until its KV has left.
            Self::Computing(_) | Self::Held(_) | Self::Decoding { .. } => {
                LegHoldings { blocks: true, engine: true }
            }
        }
    }

    /// Whether its KV leaves, or has to, for another node.
    #[must_use]
    pub const fn leaves(&self) -> bool {
        match self {
            Self::Queued(q) => !q.stays,
            Self::Loading(l) => !l.pinned.stays,
            Self::Computing(c) => !c.pinned.stays,
            Self::Held(_) => true,
            Self::WaitingForRoom(_) | Self::Expecting(_) | Self::Landed | Self::Decoding { .. } => false,
        }
    }
}
