//! A prompt that grows turn by turn, and the ids of its blocks.
//!
//! Dialects without ids, or whose ids do not fall on block borders, describe a prompt as a
//! sequence of pieces (so many tokens of such a source). The builder cuts that sequence into
//! blocks and names every block after all that precedes it, so equal prefixes get equal ids.

use crate::record::SYNTHETIC_ID_BASE;

/// Mixes `value` into `state`; a bijection in `value` for any fixed `state`.
pub(crate) fn mix(state: u64, value: u64) -> u64 {
    let mut z = state.rotate_left(23) ^ value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Mixes a byte string.
pub(crate) fn mix_bytes(state: u64, bytes: &[u8]) -> u64 {
    let mut chunks = bytes.chunks_exact(8);
    let mut out = mix(state, bytes.len() as u64);
    for chunk in &mut chunks {
        out = mix(out, u64::from_le_bytes(chunk.try_into().expect("a chunk of eight")));
    }
    let mut last = [0u8; 8];
    last[..chunks.remainder().len()].copy_from_slice(chunks.remainder());
    mix(out, u64::from_le_bytes(last))
}

/// Moves a hash into the id range of this crate's own ids.
pub(crate) fn own_id(hash: u64) -> u64 {
    SYNTHETIC_ID_BASE | (hash & (SYNTHETIC_ID_BASE - 1))
}

/// Tokens that a text of `bytes` bytes is taken for.
pub(crate) fn tokens_of_bytes(bytes: usize) -> u64 {
    (bytes as u64).div_ceil(BYTES_PER_TOKEN)
}

/// Bytes that a token is taken for where only text is given.
pub(crate) const BYTES_PER_TOKEN: u64 = 4;

/// The prompt so far.
#[derive(Debug, Clone)]
pub(crate) struct Prompt {
    block_tokens: u64,
    full: Vec<u64>,
    /// Digest of every piece so far.
    chain: u64,
    open_tokens: u64,
    /// The one id that makes up the open block, while nothing else was added to it.
    open_id: Option<u64>,
}

impl Prompt {
    pub(crate) fn new(block_tokens: u32, namespace: u64) -> Self {
        Self {
            block_tokens: u64::from(block_tokens.max(1)),
            full: Vec::new(),
            chain: namespace,
            open_tokens: 0,
            open_id: None,
        }
    }

    pub(crate) fn tokens(&self) -> u64 {
        self.full.len() as u64 * self.block_tokens + self.open_tokens
    }

    /// Adds `tokens` tokens that are the ones called `source` and nothing else's.
    pub(crate) fn push(&mut self, source: u64, tokens: u64) {
        let mut offset = 0;
        while offset < tokens {
            let taken = (self.block_tokens - self.open_tokens).min(tokens - offset);
            self.chain = mix(mix(mix(self.chain, source), offset), taken);
            self.open_tokens += taken;
            self.open_id = None;
            offset += taken;
            self.seal_if_full();
        }
    }

    /// Adds a text, cut into runs of one block so that common beginnings stay common.
    pub(crate) fn push_text(&mut self, text: &[u8]) {
        let run = usize::try_from(self.block_tokens.saturating_mul(BYTES_PER_TOKEN)).unwrap_or(usize::MAX);
        for chunk in text.chunks(run) {
            self.push(mix_bytes(0, chunk), tokens_of_bytes(chunk.len()));
        }
    }

    /// Adds blocks that have ids: all full but the last, `tokens` in total. Where they fall on the
    /// block borders of the prompt they keep their ids.
    pub(crate) fn push_ids(&mut self, ids: &[u64], tokens: u64) {
        let mut left = tokens;
        for &id in ids {
            let taken = left.min(self.block_tokens);
            left -= taken;
            if self.open_tokens > 0 || taken == 0 {
                self.push(mix(id, 1), taken);
                continue;
            }
            self.chain = mix(mix(mix(self.chain, mix(id, 1)), 0), taken);
            self.open_tokens = taken;
            self.open_id = Some(id);
            self.seal_if_full();
        }
        // Tokens beyond the ids are shared with no other row: their name follows from the tokens before them.
        self.push(mix(self.chain, 2), left);
    }

    /// Forgets everything after the first `tokens`, down to a block border.
    pub(crate) fn keep(&mut self, tokens: u64) {
        if tokens >= self.tokens() {
            return;
        }
        let blocks = usize::try_from(tokens / self.block_tokens).unwrap_or(usize::MAX);
        self.full.truncate(blocks);
        self.chain = self.full.iter().fold(0x6b65_6570, |c, &id| mix(c, id));
        self.open_tokens = 0;
        self.open_id = None;
    }

    /// Ids of every block, the last one partial or not.
    pub(crate) fn ids(&self) -> Vec<u64> {
        let mut ids = Vec::with_capacity(self.full.len() + 1);
        ids.extend_from_slice(&self.full);
        if self.open_tokens > 0 {
            ids.push(self.open_block_id());
        }
        ids
    }

    fn open_block_id(&self) -> u64 {
        self.open_id.unwrap_or_else(|| own_id(self.chain))
    }

    fn seal_if_full(&mut self) {
        if self.open_tokens == self.block_tokens {
            self.full.push(self.open_block_id());
            self.open_tokens = 0;
            self.open_id = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ids_on_block_borders_are_kept() {
        let mut prompt = Prompt::new(4, 0);
        prompt.push_ids(&[7, 8, 9], 10);
        assert_eq!(prompt.ids(), [7, 8, 9]);
        assert_eq!(prompt.tokens(), 10);
        prompt.push(55, 2);
        let grown = prompt.ids();
        assert_eq!(grown[..2], [7, 8]);
        assert_ne!(grown[2], 9, "the partial block now holds other tokens");
    }

    #[test]
    fn equal_text_prefixes_share_ids_and_others_do_not() {
        let ids = |text: &[u8]| {
            let mut prompt = Prompt::new(4, 0);
            prompt.push_text(text);
            prompt.ids()
        };
        let (a, b) = (ids(b"0123456789abcdefXXXX"), ids(b"0123456789abcdefYYYY"));
        assert_eq!(a[0], b[0]);
        assert_ne!(a[1], b[1]);
    }

    proptest! {
        #[test]
        fn two_prompts_share_ids_exactly_as_far_as_their_tokens_agree(
            pieces in proptest::collection::vec((0u64..3, 1u64..9), 1..12),
            cut in 0usize..12,
            block in 1u32..7,
        ) {
            let build = |pieces: &[(u64, u64)]| {
                let mut prompt = Prompt::new(block, 0);
                pieces.iter().for_each(|&(source, n)| prompt.push(source, n));
                prompt
            };
            let cut = cut.min(pieces.len() - 1);
            let mut other = pieces.clone();
            other[cut].0 += 100;
            let (a, b) = (build(&pieces), build(&other));
            let shared: u64 = pieces[..cut].iter().map(|p| p.1).sum();
            let equal = a.ids().iter().zip(b.ids()).take_while(|(x, y)| **x == *y).count() as u64;
            prop_assert_eq!(equal, shared / u64::from(block));
            prop_assert_eq!(a.ids().len() as u64, a.tokens().div_ceil(u64::from(block)));
        }

        #[test]
        fn keeping_a_prefix_keeps_its_ids(tokens in 1u64..60, keep in 0u64..70, block in 1u32..7) {
            let mut prompt = Prompt::new(block, 3);
            prompt.push(9, tokens);
            let before = prompt.ids();
            prompt.keep(keep);
            prop_assert!(before.starts_with(&prompt.ids()));
            prop_assert!(prompt.tokens() <= tokens.min(keep) || keep >= tokens);
        }
    }
}
