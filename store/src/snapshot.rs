//! The whole state in one sorted value, for the admin page, golden tests and bug reports.

use crate::config::StoreConfig;
use crate::input::Owner;
use crate::lifecycle::{NONE, Slot};
use crate::stats::StoreStats;
use crate::store::Store;
use alloc::vec::Vec;
use baton_types::{BlockKey, Tier};
use serde::Serialize;

/// Everything that a store knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StoreSnapshot {
    /// Its configuration.
    pub config: StoreConfig,
    /// Its counters.
    pub stats: StoreStats,
    /// Open holds, by owner.
    pub owners: Vec<OwnerSnapshot>,
    /// Known blocks, by key.
    pub blocks: Vec<BlockSnapshot>,
    /// Tickets not answered yet.
    pub offloads_under_way: Vec<u64>,
}

/// One open hold.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct OwnerSnapshot {
    /// The owner of the hold.
    pub owner: Owner,
    /// Blocks that it pins, from the root.
    pub pinned_blocks: u32,
    /// Private slots.
    pub room_blocks: u32,
    /// Leading blocks of its chain known to be readable in HBM.
    pub sealed_blocks: u32,
    /// Whether it only reads.
    pub reads_only: bool,
}

/// One block.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct BlockSnapshot {
    /// Its name.
    pub key: BlockKey,
    /// The block that it continues.
    pub parent: Option<BlockKey>,
    /// Tiers with a readable copy.
    pub readable_in: Vec<Tier>,
    /// Tiers with a slot that waits for its bytes.
    pub filling_in: Vec<Tier>,
    /// Owners that hold it.
    pub pins: u32,
}

impl Store {
    /// The whole state, sorted; takes time in proportion to it.
    #[must_use]
    pub fn snapshot(&self) -> StoreSnapshot {
        let mut owners: Vec<_> = self
            .holds
            .iter()
            .map(|hold| OwnerSnapshot {
                owner: hold.owner,
                pinned_blocks: hold.blocks.len() as u32,
                room_blocks: hold.room,
                sealed_blocks: hold.sealed,
                reads_only: hold.reads_only,
            })
            .collect();
        owners.sort_unstable();
        let mut blocks: Vec<_> = self.table.numbers().map(|number| self.block_snapshot(number)).collect();
        blocks.sort_unstable();
        StoreSnapshot {
            config: self.config.clone(),
            stats: self.stats(),
            owners,
            blocks,
            offloads_under_way: self.tickets.iter().map(|ticket| ticket.number).collect(),
        }
    }

    fn block_snapshot(&self, number: u32) -> BlockSnapshot {
        let block = &self.table[number];
        let tiers_that_are = |slot| {
            let with = Tier::LOCAL.into_iter().filter(move |tier| block.slots[tier.index()] == slot);
            with.collect()
        };
        BlockSnapshot {
            key: block.key,
            parent: (block.parent != NONE).then(|| self.table[block.parent].key),
            readable_in: tiers_that_are(Slot::Ready),
            filling_in: tiers_that_are(Slot::Filling),
            pins: block.pins,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Input;
    use alloc::vec;
    use baton_types::RequestId;

    #[test]
    fn a_snapshot_is_sorted_and_tells_where_everything_is() {
        let mut store = Store::new(StoreConfig::default()).unwrap();
        let chain = [BlockKey(9), BlockKey(3)];
        for owner in [RequestId(8), RequestId(2)] {
            store.step(0, Input::Open { owner, chain: &chain, room_blocks: 1 }, &mut Vec::new());
        }
        store.step(0, Input::Seal { owner: RequestId(8), upto_blocks: 1 }, &mut Vec::new());
        let snapshot = store.snapshot();
        assert_eq!(
            snapshot.owners.iter().map(|o| (o.owner.0, o.sealed_blocks)).collect::<Vec<_>>(),
            [(2, 0), (8, 1)]
        );
        let leaf = &snapshot.blocks[0];
        assert_eq!((leaf.key, leaf.parent, leaf.pins), (chain[1], Some(chain[0]), 2));
        assert_eq!((&leaf.readable_in, &leaf.filling_in), (&vec![], &vec![Tier::Hbm]));
        assert_eq!(snapshot.blocks[1].readable_in, [Tier::Hbm]);
        assert_eq!(snapshot.stats.tiers[0].reserved_blocks, 3);
    }
}
