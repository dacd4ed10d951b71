//! KV on its way out: each layer leaves as soon as it is computed, block by block, from where it lies.

use std::collections::BTreeMap;
use std::ops::Range;

use baton_engine::{KvPool, KvSink, SequenceId};
use baton_transports::SlicePosition;
use tokio::sync::mpsc;

/// A slice that is ready, and the slot of its block.
pub(super) type ReadySlice = (SlicePosition, u32);

/// Where a sequence's KV leaves.
pub(super) struct KvStream {
    /// Sends to the flight's task. Positions wait there, not bytes: at most one per layer of each of the request's
    /// blocks.
    pub slices: mpsc::UnboundedSender<ReadySlice>,
    /// Tokens that the peer needs.
    pub tokens: u32,
    pub block_tokens: u32,
}

impl KvStream {
    /// Sends every layer of the blocks before `upto`.
    pub(super) fn send_blocks(&self, slots: &[u32], upto: usize, layers: u32) {
        let upto = u32::try_from(upto.min(slots.len())).unwrap_or(u32::MAX);
        for layer in 0..layers {
            self.layer_ready(layer, 0..upto, slots);
        }
    }

    fn layer_ready(&self, layer: u32, blocks: Range<u32>, slots: &[u32]) {
        for block in blocks {
            if let Some(slot) = slots.get(block as usize) {
                // A flight that is over ignores it. The report of its end is separate.
                let _ = self.slices.send((SlicePosition { block, layer }, *slot));
            }
        }
    }
}

/// Shows computed layers to the outlets.
pub(super) struct Sink<'a> {
    pub kv_streams: &'a BTreeMap<SequenceId, KvStream>,
}

impl KvSink for Sink<'_> {
    fn layer_computed(
        &mut self,
        id: SequenceId,
        layer: u32,
        tokens: Range<u32>,
        (slots, _): (&[u32], &KvPool),
    ) {
        let Some(kv_stream) = self.kv_streams.get(&id) else { return };
        let size = kv_stream.block_tokens;
        // A block leaves when its last token is there; the tail when the last of all is.
        let upto =
            if tokens.end >= kv_stream.tokens { kv_stream.tokens.div_ceil(size) } else { tokens.end / size };
        kv_stream.layer_ready(layer, tokens.start / size..upto, slots);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use baton_engine::KvShape;

    /// Sends a prompt of `total` tokens, `start` of them cached, in chunks. Which blocks of which layers have left.
    fn sent(total: u32, start: u32, chunk: u32) -> Vec<(u32, u32)> {
        let shape = KvShape {
            layers: 2,
            kv_heads: 1,
            head_dim: 1,
            dtype: "f32",
            block_tokens: 4,
            layer_bytes: 32,
            blocks: 1,
        };
        let (pool, slots) = (KvPool::new(&shape), [7; 10]);
        let (slices, mut taken) = mpsc::unbounded_channel();
        let kv_stream = KvStream { slices, tokens: total, block_tokens: 4 };
        kv_stream.send_blocks(&slots, (start / 4) as usize, 2);
        let kv_streams = BTreeMap::from([(SequenceId(1), kv_stream)]);
        let mut at = start;
        while at < total {
            let end = (at + chunk).min(total);
            for layer in 0..2 {
                let mut sink = Sink { kv_streams: &kv_streams };
                sink.layer_computed(SequenceId(1), layer, at..end, (&slots, &pool));
            }
            at = end;
        }
        let mut sent = Vec::new();
        while let Ok((at, slot)) = taken.try_recv() {
            assert_eq!(slot, 7);
            sent.push((at.block, at.layer));
        }
        sent.sort_unstable();
        sent
    }

    /// However a prompt is cut into chunks, each block of each layer leaves exactly once.
    #[test]
    fn every_block_leaves_once_however_it_was_cut() {
        for total in 1u32..40 {
            let every: Vec<_> = (0..total.div_ceil(4)).flat_map(|b| [(b, 0), (b, 1)]).collect();
            for chunk in 1u32..17 {
                for start in 0..total {
                    let sent = sent(total, start, chunk);
                    assert_eq!(sent, every, "{total} tokens from {start}, chunks of {chunk}");
                }
            }
        }
    }
}
