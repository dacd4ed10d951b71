//! Coming prefixes: what an instance will hold once the prefills that were sent to it, or that wait for it, are over.
//!
//! A node that receives a prompt while it computes another with the same beginning waits for those blocks and computes
//! the rest. The earlier prefill is part of the predicted wait anyway, so a later request finds these blocks when its
//! turn comes.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use baton_types::{BlockHash, InstanceId, RequestId};
use serde::{Deserialize, Serialize};

use crate::estimate::place_among;

/// Most neighbours in the order of chains that are examined on either side.
const NEIGHBOURS: usize = 64;

/// A prefill that was sent, or waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Leader {
    request: RequestId,
    instance: InstanceId,
    /// Leading blocks that it shares with the entry before it.
    common_blocks: usize,
}

/// All prefills that were sent and have not ended, or all that wait, sorted by the prompts' chains.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct PendingPrefixes {
    leaders: Vec<Leader>,
}

impl PendingPrefixes {
    /// Records a prefill; `chain_of` gives the chains of the earlier ones.
    pub(crate) fn begins<'a>(
        &mut self,
        request: RequestId,
        instance: InstanceId,
        chain: &[BlockHash],
        chain_of: impl Fn(RequestId) -> &'a [BlockHash],
    ) {
        debug_assert!(
            self.leaders.iter().all(|one| one.request != request),
            "the prefill of request {request} is under way already"
        );
        let (at, common_blocks, after) = place_among(&self.leaders, chain, |one| chain_of(one.request));
        if let Some(next) = self.leaders.get_mut(at) {
            next.common_blocks = after;
        }
        self.leaders.insert(at, Leader { request, instance, common_blocks });
    }

    /// Removes a prefill that ended or was given up; false when it was not here.
    pub(crate) fn over(&mut self, request: RequestId) -> bool {
        let Some(at) = self.leaders.iter().position(|one| one.request == request) else { return false };
        let gone = self.leaders.remove(at);
        if let Some(next) = self.leaders.get_mut(at) {
            next.common_blocks = next.common_blocks.min(gone.common_blocks);
        }
        true
    }

    /// Calls `each` with every prefill whose instance will hold leading blocks of a chain, that instance, and their
    /// number.
    pub(crate) fn holders<'a>(
        &self,
        chain: &[BlockHash],
        chain_of: impl Fn(RequestId) -> &'a [BlockHash],
        mut each: impl FnMut(RequestId, InstanceId, usize),
    ) {
        let (at, mut before, mut after) = place_among(&self.leaders, chain, |one| chain_of(one.request));
        for one in self.leaders[..at].iter().rev().take(NEIGHBOURS) {
            if before == 0 {
                break;
            }
            each(one.request, one.instance, before);
            before = before.min(one.common_blocks);
        }
        for (nth, one) in self.leaders[at..].iter().take(NEIGHBOURS).enumerate() {
            if nth > 0 {
                after = after.min(one.common_blocks);
            }
            if after == 0 {
                break;
            }
            each(one.request, one.instance, after);
        }
    }

    /// Checks that the entries are exactly the prefills that are `under_way`, each once.
    ///
    /// # Errors
    /// Names the first that should not be here, or says that one is missing.
    pub(crate) fn check(
        &self,
        count: usize,
        under_way: impl Fn(RequestId) -> Option<InstanceId>,
    ) -> Result<(), String> {
        if let Some(one) = self.leaders.iter().find(|one| under_way(one.request) != Some(one.instance)) {
            return Err(format!(
                "I5: the prefill of request {} is not under way on {}",
                one.request, one.instance
            ));
        }
        let mut once: Vec<RequestId> = self.leaders.iter().map(|one| one.request).collect();
        once.sort_unstable();
        once.dedup();
        let known = once.len();
        if known == count && self.leaders.len() == count {
            Ok(())
        } else {
            Err(format!("I5: {known} prefills are known of {count} under way"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeMap;
    use proptest::prelude::*;

    /// Chains over a few documents; equal arguments give equal blocks.
    fn chain(document: u64, shared: u64, own: u64) -> Vec<BlockHash> {
        let names = (0..shared).map(|at| document * 100 + at);
        let last = ((own + 1) << 32) + document * 100 + shared;
        names.chain((own > 0).then_some(last)).map(BlockHash).collect()
    }

    proptest! {
        #[test]
        fn who_will_hold_what_is_what_a_look_at_every_chain_says(
            ops in proptest::collection::vec((0u64..20, 0u32..4, 0u64..3, 0u64..6, 0u64..3), 0..60),
        ) {
            let mut coming = PendingPrefixes::default();
            let mut chains: BTreeMap<u64, (InstanceId, Vec<BlockHash>)> = BTreeMap::new();
            for (id, instance, document, shared, own) in ops {
                let asks = chain(document, shared, own);
                let mut most: BTreeMap<InstanceId, usize> = BTreeMap::new();
                for (at, other) in chains.values() {
                    let common = other.iter().zip(&asks).take_while(|(one, other)| one == other).count();
                    let known = most.entry(*at).or_default();
                    *known = common.max(*known);
                }
                most.retain(|_, blocks| *blocks > 0);
                let mut found: BTreeMap<InstanceId, usize> = BTreeMap::new();
                coming.holders(&asks, |id| &chains[&id.0].1, |_, at, blocks| {
                    let known = found.entry(at).or_default();
                    *known = blocks.max(*known);
                });
                prop_assert_eq!(found, most);
                if chains.contains_key(&id) {
                    coming.over(RequestId(id));
                    chains.remove(&id);
                } else {
                    coming.begins(RequestId(id), InstanceId(instance), &asks, |id| &chains[&id.0].1);
                    chains.insert(id, (InstanceId(instance), asks));
                }
                let under_way = |id: RequestId| chains.get(&id.0).map(|(at, _)| *at);
                prop_assert_eq!(coming.check(chains.len(), under_way), Ok(()));
            }
        }
    }
}
