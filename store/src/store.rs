//! The store itself: its parts, and the step that routes inputs to the rules.

use crate::capacity::Capacity;
use crate::config::{ConfigError, Offload, StoreConfig};
use crate::effect::Effect;
use crate::evict::RestingBlocks;
use crate::evict::reuse::Reuse;
use crate::input::Input;
use crate::lifecycle::{HBM, NONE, TIERS};
use crate::pin::HoldTable;
use crate::stats::{Hits, StoreStats};
use crate::table::Table;
use crate::tiering::CopyTicket;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use baton_types::{BlockHash, BlockKey, Tier};

/// The share of a tier that `OnEvict` keeps copied ahead: one in this many slots.
const AHEAD_DIVISOR: u64 = 8;
/// Frequencies are halved once this many blocks per slot were asked for.
const TOUCHES_PER_SLOT: u64 = 8;

/// One tier of the node.
#[derive(Debug)]
pub(crate) struct TierState {
    /// Its slots.
    pub space: Capacity,
    /// Its evictable blocks.
    pub resting: RestingBlocks,
    /// The next slower tier with any slots.
    pub next: Option<usize>,
    /// Slots to keep free or condemned.
    pub ahead: u64,
    /// Blocks that left in this step.
    pub removed: Vec<BlockHash>,
    /// Blocks to copy to `next`, with their generations, chosen in this step.
    pub outgoing: Vec<(u32, u32)>,
}

/// The blocks of one node, and the owners that hold them.
///
/// Contract: [`Store::step`] is total and never blocks. Effects follow from the configuration and
/// the inputs alone. Every grant is bounded by the capacities, so no queue here grows without end.
#[derive(Debug)]
pub struct Store {
    pub(crate) config: StoreConfig,
    pub(crate) table: Table,
    pub(crate) tiers: [TierState; TIERS],
    pub(crate) holds: HoldTable,
    pub(crate) tickets: VecDeque<CopyTicket>,
    pub(crate) next_ticket: u64,
    pub(crate) counts: StoreStats,
    pub(crate) age: u16,
    /// Statistics of reuse, where the policy uses them.
    pub(crate) reuse: Option<Reuse>,
    touches_left: u64,
    now_us: u64,
    /// Reused between steps.
    pub(crate) scratch: Vec<u32>,
}

impl Store {
    /// An empty store.
    ///
    /// # Errors
    /// As [`StoreConfig::validate`].
    pub fn new(config: StoreConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let tiers = tiers_of(&config);
        Ok(Self {
            reuse: reuse_of(&config, &tiers),
            tiers,
            touches_left: touches_between_halvings(&config),
            config,
            table: Table::default(),
            holds: HoldTable::default(),
            tickets: VecDeque::new(),
            next_ticket: 0,
            counts: StoreStats::default(),
            age: 0,
            now_us: 0,
            scratch: Vec::new(),
        })
    }

    /// Takes a fact in and appends what follows from it to `effects`. `now_us` never goes back.
    pub fn step(&mut self, now_us: u64, input: Input<'_>, effects: &mut Vec<Effect>) {
        debug_assert!(now_us >= self.now_us, "I11: time never goes back");
        self.now_us = now_us.max(self.now_us);
        self.learn();
        match input {
            Input::Open { owner, chain, room_blocks } => self.open(owner, chain, room_blocks, effects),
            Input::Read { owner, chain } => self.read(owner, chain, effects),
            Input::OnboardDone { owner, ok } => self.onboard_done(owner, ok, effects),
            Input::OnboardCutShort { owner, good_blocks, next_is_lost } => {
                self.onboard_cut_short(owner, (good_blocks, next_is_lost), effects);
            }
            Input::OffloadDone { ticket, ok } => self.offload_done(ticket, ok, effects),
            Input::Seal { owner, upto_blocks } => self.seal(owner, upto_blocks, effects),
            Input::GrowRoom { owner, room_blocks } => self.grow_room(owner, room_blocks, effects),
            Input::Close { owner } => self.close(owner, effects),
            Input::Recovered { blocks } => self.recovered(blocks, effects),
            Input::Clear => self.clear(effects),
        }
        self.condemn_ahead();
        self.send_tickets(effects);
        self.send_removed(effects);
        self.assert_settled();
    }

    /// Asserts the invariants that are cheap to check after each step. [`Store::check`] audits the rest.
    fn assert_settled(&self) {
        assert!(self.scratch.is_empty(), "the scratch is empty between steps");
        for tier in &self.tiers {
            let resting = tier.resting.len();
            assert!(resting as u64 <= tier.space.used(), "I4: only readable blocks rest");
            assert!(tier.resting.condemned_len() <= resting, "condemned blocks rest");
            assert!(tier.outgoing.is_empty(), "a copy that was chosen has its ticket");
        }
    }

    /// When the store wants to be woken without an input: never, it has no timers.
    #[must_use]
    pub const fn next_deadline(&self) -> Option<u64> {
        None
    }

    /// The leading readable blocks of `chain`. Changes nothing, not even the order of eviction.
    #[must_use]
    pub fn lookup(&self, chain: &[BlockKey]) -> Hits {
        let mut hits = Hits::default();
        let mut parent = NONE;
        for &key in chain {
            let Some(block) = self.table.find_under(parent, key) else { break };
            let Some(tier) = self.table[block].readable() else { break };
            hits.add(tier);
            parent = block;
        }
        hits
    }

    /// The counters, and the gauges as they are now.
    #[must_use]
    pub fn stats(&self) -> StoreStats {
        let mut stats = self.counts;
        for (counted, tier) in stats.tiers.iter_mut().zip(&self.tiers) {
            counted.capacity_blocks = tier.space.capacity();
            counted.used_blocks = tier.space.used();
            counted.reserved_blocks = tier.space.reserved();
            counted.pinned_blocks = tier.space.used() - tier.resting.len() as u64;
        }
        stats.blocks = self.table.len() as u64;
        stats.owners = self.holds.len() as u64;
        stats
    }

    /// The configuration in force.
    #[must_use]
    pub const fn config(&self) -> &StoreConfig {
        &self.config
    }

    /// Counts `touches` blocks asked for, and halves all frequencies when it is time.
    pub(crate) fn count_touches(&mut self, touches: usize) {
        self.touches_left = self.touches_left.saturating_sub(touches as u64);
        if self.touches_left == 0 {
            self.touches_left = touches_between_halvings(&self.config);
            self.age = self.age.wrapping_add(1);
            self.tiers.iter_mut().for_each(|tier| tier.resting.halve());
        }
    }

    /// Where the policy goes by it: time passes for what waits to be asked for, and the order follows.
    fn learn(&mut self) {
        let Some(reuse) = &mut self.reuse else { return };
        let tiers = &mut self.tiers;
        let mut change = |change: &_| tiers.iter_mut().for_each(|tier| tier.resting.change(change));
        reuse.advance(self.now_us, &mut change);
        reuse.value(&mut change);
    }

    fn clear(&mut self, effects: &mut Vec<Effect>) {
        self.table.clear();
        self.holds.clear();
        self.tickets.clear();
        self.tiers = tiers_of(&self.config);
        self.reuse = reuse_of(&self.config, &self.tiers);
        effects.push(Effect::Cleared);
    }

    fn send_removed(&mut self, effects: &mut Vec<Effect>) {
        for (state, tier) in self.tiers.iter_mut().zip(Tier::LOCAL) {
            if !state.removed.is_empty() {
                let hashes = core::mem::take(&mut state.removed);
                effects.push(Effect::Removed { hashes, tier });
            }
        }
    }
}

fn tiers_of(config: &StoreConfig) -> [TierState; TIERS] {
    let capacities = config.capacities();
    core::array::from_fn(|tier| {
        let next = (tier + 1..TIERS).find(|&slower| capacities[slower] > 0);
        let copies_ahead = config.offload == Offload::OnEvict && next.is_some();
        TierState {
            space: Capacity::new(capacities[tier]),
            resting: RestingBlocks::new(config.eviction, capacities[tier]),
            next: if config.offload == Offload::Off { None } else { next },
            ahead: if copies_ahead { capacities[tier].div_ceil(AHEAD_DIVISOR) } else { 0 },
            removed: Vec::new(),
            outgoing: Vec::new(),
        }
    })
}

fn reuse_of(config: &StoreConfig, tiers: &[TierState; TIERS]) -> Option<Reuse> {
    let slots = config.capacities().iter().sum();
    tiers[HBM].resting.learns().then(|| Reuse::new(slots))
}

const fn touches_between_halvings(config: &StoreConfig) -> u64 {
    let [hbm, dram, ssd] = config.capacities();
    (hbm + dram + ssd) * TOUCHES_PER_SLOT
}

const _: () = assert!(HBM == Tier::Hbm.index(), "tiers are numbered as in Tier::LOCAL");

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::RequestId;

    #[test]
    fn a_store_that_cannot_work_is_not_made() {
        assert!(Store::new(StoreConfig { hbm_blocks: 0, ..StoreConfig::default() }).is_err());
    }

    #[test]
    fn lookup_changes_nothing() {
        let config = StoreConfig { hbm_blocks: 2, offload: Offload::Off, ..StoreConfig::default() };
        let mut store = Store::new(config).unwrap();
        let mut effects = Vec::new();
        for (owner, key) in [(1, 10), (2, 20)] {
            let (owner, chain) = (RequestId(owner), [BlockKey(key)]);
            store.step(0, Input::Open { owner, chain: &chain, room_blocks: 0 }, &mut effects);
            store.step(0, Input::Seal { owner, upto_blocks: 1 }, &mut effects);
            store.step(0, Input::Close { owner }, &mut effects);
        }
        assert_eq!(store.lookup(&[BlockKey(10), BlockKey(11)]), Hits { hbm: 1, total: 1, ..Hits::default() });
        let chain = [BlockKey(30)];
        store.step(1, Input::Open { owner: RequestId(3), chain: &chain, room_blocks: 0 }, &mut effects);
        assert_eq!(store.lookup(&[BlockKey(10)]).total, 0, "the lookup did not make it newer");
        assert_eq!(store.lookup(&[BlockKey(20)]).total, 1);
        assert_eq!(store.lookup(&chain).total, 0, "I2: not sealed");
        assert_eq!(store.next_deadline(), None);
    }

    #[test]
    fn clear_forgets_owners_blocks_and_tickets() {
        let mut store =
            Store::new(StoreConfig { offload: Offload::WriteThrough, ..StoreConfig::default() }).unwrap();
        let mut effects = Vec::new();
        let (owner, chain) = (RequestId(1), [BlockKey(10)]);
        store.step(0, Input::Open { owner, chain: &chain, room_blocks: 5 }, &mut effects);
        store.step(0, Input::Seal { owner, upto_blocks: 1 }, &mut effects);
        effects.clear();
        store.step(1, Input::Clear, &mut effects);
        assert_eq!(effects, [Effect::Cleared]);
        store.step(2, Input::OffloadDone { ticket: 0, ok: true }, &mut effects);
        store.step(2, Input::Close { owner }, &mut effects);
        assert_eq!(effects.len(), 1);
        let stats = store.stats();
        assert_eq!((stats.blocks, stats.owners, stats.stale_inputs), (0, 0, 2));
        assert_eq!(stats.tiers.map(|t| t.used_blocks + t.reserved_blocks), [0; 3]);
        assert_eq!(store.check(), Ok(()));
    }
}
