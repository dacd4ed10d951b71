//! A decode died in the middle of its answer: what left for the client is part of the prompt now,
//! and the answer goes on from there.

use std::ops::Range;

use baton_types::{BlockKey, ChainHasher, RequestId};

use super::World;
use crate::engine::LostDecode;

/// Seed of the names of blocks that hold generated tokens: no other request has them.
const OWN_SEED: u64 = 0x0B5E_55ED;

impl World {
    /// Takes in how far a decode came. Its pair receives this before the loss, so that the next placement
    /// counts the emitted tokens.
    pub(crate) fn interrupted(&mut self, lost: LostDecode) {
        let block_tokens = u64::from(self.setup.scheduler.block_tokens);
        let live = &mut self.live[lost.slot as usize];
        live.streamed_tokens += lost.emitted_tokens;
        live.gaps_us.extend(lost.gaps_us);
        if lost.emitted_tokens > 0 {
            live.last_token_us = lost.last_token_us;
        }
        if live.streamed_tokens == 0 {
            return;
        }
        live.prompt_tokens = live.asked_tokens + u64::from(live.streamed_tokens);
        let whole = usize::try_from(live.asked_tokens / block_tokens).unwrap_or(usize::MAX);
        live.keys.truncate(whole);
        let upto = usize::try_from(live.prompt_tokens / block_tokens).unwrap_or(usize::MAX);
        let own = own_blocks(live.id, live.keys.len()..upto);
        live.keys.extend(own);
        let (router, input) = (live.router, live.emitted(live.streamed_tokens));
        self.send(router, input);
    }
}

/// The names of a request's blocks of generated tokens, at these positions of its chain: the first is the first full
/// block that its trace does not name. They keep their names when the prompt grows again. A service names them by their
/// tokens, which a simulated answer has not.
pub fn own_blocks(id: RequestId, positions: Range<usize>) -> Vec<BlockKey> {
    let mut hasher = ChainHasher::new(OWN_SEED, &id.0.to_le_bytes());
    positions.map(|block| hasher.push_id(block as u64)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_blocks_are_named_keep_their_names_and_nobody_else_has_them() {
        let (short, long) = (own_blocks(RequestId(7), 2..4), own_blocks(RequestId(7), 2..6));
        assert_eq!((short.len(), long.len()), (2, 4));
        assert_eq!(short[..], long[..2]);
        assert!(own_blocks(RequestId(8), 2..4).iter().all(|key| !short.contains(key)));
        assert_eq!(own_blocks(RequestId(7), 2..2), [], "nothing to add");
    }
}
