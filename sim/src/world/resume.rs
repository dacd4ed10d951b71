//! A decode died in the middle of its answer: what left for the client is part of the prompt now,
//! and the answer goes on from there.

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
        extend(&mut live.keys, live.id, live.prompt_tokens, block_tokens);
        let (router, input) = (live.router, live.emitted(live.streamed_tokens));
        self.send(router, input);
    }
}

/// Names the full blocks from the end of `keys` to the end of the prompt, as the service does. They keep their names
/// when the prompt grows again.
fn extend(keys: &mut Vec<BlockKey>, id: RequestId, prompt_tokens: u64, block_tokens: u64) {
    let mut hasher = ChainHasher::new(OWN_SEED, &id.0.to_le_bytes());
    for block in keys.len() as u64..prompt_tokens / block_tokens {
        keys.push(hasher.push_id(block));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extended(id: u64, prompt_tokens: u64) -> Vec<BlockKey> {
        let mut keys = vec![BlockKey(1), BlockKey(2)];
        extend(&mut keys, RequestId(id), prompt_tokens, 100);
        keys
    }

    #[test]
    fn full_blocks_are_named_keep_their_names_and_nobody_else_has_them() {
        let (short, long) = (extended(7, 450), extended(7, 610));
        assert_eq!((short.len(), long.len()), (4, 6), "the last is partial");
        assert_eq!(short[..], long[..4]);
        let other = extended(8, 450);
        assert!(short[2..].iter().all(|key| !other[2..].contains(key)));
        assert_eq!(extended(7, 200).len(), 2, "nothing to add");
    }
}
