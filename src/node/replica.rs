//! Copies ahead of demand: a chain that this node shall hold before anybody asks it for it.

use std::collections::BTreeMap;

use baton_tiers::Pool as _;
use baton_transports::FetchedBlock;
use baton_types::{BlockHash, BlockKey, RequestId};
use baton_wire::v1;

use super::pool::EnginePool;
use super::worker::Worker;

/// Copies under way at a time; a conductor orders one and waits for its end.
const UNDER_WAY: usize = 8;

/// The node's state of copies that have not ended.
#[derive(Default)]
pub(super) struct Replicas {
    /// Leading blocks that were here when a copy was asked for, by the first block that was not.
    heads: BTreeMap<BlockHash, Vec<BlockKey>>,
    /// Bytes that wait for their chain's beginning to come up from slower tiers.
    waiting: BTreeMap<RequestId, WaitingChain>,
    /// Copies that wait no longer, and the first block from which on their bytes are wanted.
    pub(super) ready: Vec<(RequestId, u32)>,
}

/// A chain with a hold, and the bytes of its last blocks.
struct WaitingChain {
    slots: Vec<u32>,
    blocks: Vec<FetchedBlock>,
}

impl Worker {
    pub(super) fn replicate_ordered(&mut self, order: v1::Replicate) {
        let chain = baton_wire::unpack_keys(&order.chain);
        // The node does not fetch the blocks it already has.
        let mut head = self.cache.full_keys(&chain);
        head.truncate(self.cache.lookup(&head).total as usize);
        let rest = chain[head.len()..].to_vec();
        match (order.from, rest.first()) {
            (Some(from), Some(first)) if self.replicas.heads.len() < UNDER_WAY => {
                self.replicas.heads.insert(first.short(), head);
                self.links.replicate(from, rest);
            }
            _ => self.replica_ended(),
        }
    }

    /// A copy ahead of demand arrived, perhaps in part, perhaps not at all.
    pub(super) fn replica(&mut self, chain: &[BlockKey], mut blocks: Vec<FetchedBlock>) {
        let head = chain.first().and_then(|first| self.replicas.heads.remove(&first.short()));
        let block_bytes = self.engine.shape().block_bytes();
        // As far as the holder sent what was ordered, in its order.
        let fits = |(key, block): &(&BlockKey, &FetchedBlock)| {
            block.bytes.len() == block_bytes && BlockKey(block.key).short() == key.short()
        };
        let fitting = chain.iter().zip(&blocks).take_while(fits).count();
        blocks.truncate(fitting);
        let Some(mut keys) = head.filter(|_| !blocks.is_empty()) else { return self.replica_ended() };
        keys.extend(blocks.iter().map(|block| BlockKey(block.key)));
        let owner = self.helper();
        let Ok(hold) = self.cache.open(owner, &keys, 0) else { return self.replica_ended() };
        let waiting = WaitingChain { slots: hold.slots, blocks };
        if hold.waiting && self.replicas.waiting.len() < UNDER_WAY {
            self.replicas.waiting.insert(owner, waiting);
        } else if hold.waiting {
            self.cache.close(owner);
            self.replica_ended();
        } else {
            self.place(owner, hold.readable_blocks, &waiting);
        }
    }

    /// Chains whose beginning has come up get the bytes that waited for it.
    pub(super) fn place_ready_replicas(&mut self) {
        for (owner, readable_blocks) in std::mem::take(&mut self.replicas.ready) {
            if let Some(waiting) = self.replicas.waiting.remove(&owner) {
                self.place(owner, readable_blocks, &waiting);
            }
        }
    }

    /// Writes what is missing behind `readable_blocks`, as far as the bytes are there, and ends the copy.
    fn place(&mut self, owner: RequestId, readable_blocks: u32, waiting: &WaitingChain) {
        let first = waiting.slots.len() - waiting.blocks.len();
        let from = readable_blocks as usize;
        let mut pool = EnginePool(self.engine.as_mut());
        // A beginning that did not come up was not sent: nothing can be built on it.
        if from >= first {
            for (slot, block) in waiting.slots[first..].iter().zip(&waiting.blocks).skip(from - first) {
                pool.write(*slot, &block.bytes);
            }
            let all = u32::try_from(waiting.slots.len()).unwrap_or(u32::MAX);
            // A block that somebody else is filling right now needs no copy.
            let _ = self.cache.seal(owner, all, &mut pool);
        }
        self.cache.close(owner);
        self.replica_ended();
    }

    fn replica_ended(&mut self) {
        let fact = v1::fact::Fact::Replicated(true);
        self.facts.push(v1::Fact { request: 0, attempt: 0, fact: Some(fact) });
    }

    /// The conductor that ordered them is gone.
    pub(super) fn forget_replicas(&mut self) {
        for (owner, _) in std::mem::take(&mut self.replicas.waiting) {
            self.cache.close(owner);
        }
        self.replicas.heads.clear();
        self.replicas.ready.clear();
    }
}
