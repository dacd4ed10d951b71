//! How a put comes by its memory: from its shard, from the others, and at last from what is pinned softly.

use super::{ObjectStore, RETRY_AFTER_US};
use crate::arena::PAGE_BYTES;
use crate::refusal::Refusal;
use crate::shard::{Request, ReservedMemory, Stop};

/// Times that a tenant's values make way for one put, a few in each shard.
const QUOTA_ROUNDS: usize = 1024;

impl ObjectStore {
    pub(super) fn begin(&self, shard: usize, request: &Request<'_>) -> Result<ReservedMemory, Refusal> {
        let (others, mut request) = (self.inner.shards.len(), *request);
        let (mut helped, mut quota_rounds) = (0, QUOTA_ROUNDS);
        // A large value may need a page of each of many shards; each round frees at least one.
        let mut rounds = 2 * others + request.bytes as usize / PAGE_BYTES;
        loop {
            // Apart from the match: its shard is asked again there.
            let begun = self.shard(shard).begin(&request);
            match begun {
                Ok(begun) => return Ok(begun),
                Err(Stop::Refused(refusal)) => return Err(refusal),
                Err(Stop::NoQuota(cost)) => {
                    quota_rounds -= 1;
                    if quota_rounds == 0 || !self.make_way_in_quota(shard, &request, cost) {
                        return Err(Refusal::OverQuota { retry_after_us: RETRY_AFTER_US });
                    }
                    continue;
                }
                Err(Stop::NoRoom) => {}
            }
            let give = |n: usize| self.shard((shard + 1 + n) % others).give(request.now_us, request.pressing);
            let giver = (0..others - 1).map(|n| (helped + n) % (others - 1)).find(|n| give(*n));
            rounds -= 1;
            match giver {
                Some(giver) if rounds > 0 => helped = giver + 1,
                None if !request.pressing && rounds > 0 => request.pressing = true,
                _ => return Err(Refusal::Full { retry_after_us: RETRY_AFTER_US }),
            }
        }
    }

    /// Evicts a tenant's entries in any shard, soft pins last. Returns whether anything went.
    fn make_way_in_quota(&self, shard: usize, request: &Request<'_>, cost: u64) -> bool {
        let others = self.inner.shards.len();
        let evict = |n: usize, pressing: bool| {
            let mut shard = self.shard((shard + n) % others);
            shard.evict_of(request.key.tenant, cost, request.now_us, pressing)
        };
        (0..others).any(|n| evict(n, false)) || (0..others).any(|n| evict(n, true))
    }
}
