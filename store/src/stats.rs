//! Counters of the store, as plain integers.

use serde::Serialize;

/// One tier's slots now, and its traffic since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TierStats {
    /// All slots.
    pub capacity_blocks: u64,
    /// Slots that hold readable bytes.
    pub used_blocks: u64,
    /// Those of them that an owner holds.
    pub pinned_blocks: u64,
    /// Slots that bytes are on their way to, and private room.
    pub reserved_blocks: u64,
    /// Blocks that an owner found here at best when it asked.
    pub hit_blocks: u64,
    /// Readable copies given up to make room, or because their parent went.
    pub evicted_blocks: u64,
    /// Copies that arrived here from a faster tier.
    pub offloaded_blocks: u64,
    /// Copies that were ordered and failed or were called off.
    pub offload_failed_blocks: u64,
    /// Blocks brought up to HBM from here.
    pub onboarded_blocks: u64,
}

/// The store's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StoreStats {
    /// By tier, fastest first.
    pub tiers: [TierStats; 3],
    /// Different blocks known now, in any tier.
    pub blocks: u64,
    /// Holds open now.
    pub owners: u64,
    /// Holds granted.
    pub opened: u64,
    /// Holds refused for want of room.
    pub refused: u64,
    /// Blocks that an owner asked for and found nowhere.
    pub missed_blocks: u64,
    /// Blocks that an owner asked for while another was filling them: computed once, not twice.
    pub shared_fill_blocks: u64,
    /// Blocks that left the node for good.
    pub lost_blocks: u64,
    /// Blocks that could not be brought up and had to be computed.
    pub onboard_failed_blocks: u64,
    /// Inputs about an owner or a ticket that has ended.
    pub stale_inputs: u64,
    /// Holds asked for by an owner that has one.
    pub double_opens: u64,
}

/// The leading readable blocks of a chain, by the fastest tier of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Hits {
    /// In HBM.
    pub hbm: u32,
    /// In DRAM at best.
    pub dram: u32,
    /// On flash only.
    pub ssd: u32,
    /// Blocks in any tier.
    pub total: u32,
}

impl Hits {
    /// Counts one more leading block, readable from `tier`.
    pub(crate) fn add(&mut self, tier: usize) {
        *[&mut self.hbm, &mut self.dram, &mut self.ssd][tier] += 1;
        self.total += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_add_up_by_tier() {
        let mut hits = Hits::default();
        [0, 0, 1, 2].into_iter().for_each(|tier| hits.add(tier));
        assert_eq!(hits, Hits { hbm: 2, dram: 1, ssd: 1, total: 4 });
    }
}
