//! KV on its way out: each layer leaves as soon as it is computed, block by block.

use std::collections::BTreeMap;
use std::ops::Range;

use baton_engine::{KvSink, KvView, SequenceId};
use baton_transports::SliceAt;
use bytes::Bytes;
use tokio::sync::mpsc;

/// Where a sequence's KV leaves.
pub(super) struct Outlet {
    /// To the flight's task. What waits there is bounded by the sequence's own KV.
    pub slices: mpsc::UnboundedSender<(SliceAt, Bytes)>,
    /// Tokens that the peer needs.
    pub tokens: u32,
    pub block_tokens: u32,
}

impl Outlet {
    /// Sends every layer of the blocks before `upto`.
    pub(super) fn send_blocks(&self, slots: &[u32], layers: u32, upto: usize, view: &dyn KvView) {
        for (block, slot) in (0u32..).zip(&slots[..upto.min(slots.len())]) {
            for layer in 0..layers {
                self.send(SliceAt { block, layer }, view.layer(*slot, layer));
            }
        }
    }

    fn send(&self, at: SliceAt, bytes: &[u8]) {
        // A flight that is over does not take any more; its end is told separately.
        let _ = self.slices.send((at, Bytes::copy_from_slice(bytes)));
    }
}

/// Shows computed layers to the outlets.
pub(super) struct Sink<'a> {
    pub outlets: &'a mut BTreeMap<SequenceId, Outlet>,
}

impl KvSink for Sink<'_> {
    fn layer_computed(&mut self, id: SequenceId, layer: u32, tokens: Range<u32>, at: (&[u32], &dyn KvView)) {
        let Some(outlet) = self.outlets.get(&id) else { return };
        let (slots, view) = at;
        let size = outlet.block_tokens;
        // A block leaves when its last token is there; the tail when the last of all is.
        let upto = if tokens.end >= outlet.tokens { outlet.tokens.div_ceil(size) } else { tokens.end / size };
        for block in tokens.start / size..upto {
            if let Some(slot) = slots.get(block as usize) {
                outlet.send(SliceAt { block, layer }, view.layer(*slot, layer));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Flat;

    impl KvView for Flat {
        fn layer(&self, _block: u32, _layer: u32) -> &[u8] {
            &[7; 4]
        }
    }

    /// However a prompt is cut into chunks, each block of each layer leaves exactly once.
    #[test]
    fn every_block_leaves_once_however_it_was_cut() {
        for total in 1u32..40 {
            for chunk in 1u32..17 {
                for start in 0..total {
                    let (slices, mut taken) = mpsc::unbounded_channel();
                    let outlet = Outlet { slices, tokens: total, block_tokens: 4 };
                    outlet.send_blocks(&[0; 10], 2, (start / 4) as usize, &Flat);
                    let mut outlets = BTreeMap::from([(SequenceId(1), outlet)]);
                    let mut sink = Sink { outlets: &mut outlets };
                    let mut at = start;
                    while at < total {
                        let end = (at + chunk).min(total);
                        for layer in 0..2 {
                            sink.layer_computed(SequenceId(1), layer, at..end, (&[0; 10], &Flat));
                        }
                        at = end;
                    }
                    let mut sent: Vec<(u32, u32)> = Vec::new();
                    while let Ok((at, _)) = taken.try_recv() {
                        sent.push((at.block, at.layer));
                    }
                    sent.sort_unstable();
                    let every: Vec<_> = (0..total.div_ceil(4)).flat_map(|b| [(b, 0), (b, 1)]).collect();
                    assert_eq!(sent, every, "{total} tokens from {start} in chunks of {chunk}");
                }
            }
        }
    }
}
