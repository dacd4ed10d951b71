//! KV on its way out: each layer leaves as soon as it is computed, block by block.

use std::collections::BTreeMap;
use std::ops::Range;

use baton_engine::{KvSink, KvView, SequenceId};
use baton_transports::SliceAt;
use bytes::Bytes;
use tokio::sync::mpsc;

/// Where a sequence's KV leaves.
pub(super) struct Outlet {
    /// To the flight's task.
    pub slices: mpsc::UnboundedSender<(SliceAt, Bytes)>,
    /// Of a hand-off that waits for its turn: the blocks of each layer that are ready. They stay in the pool until then.
    pub waiting: Option<Vec<u32>>,
    pub attempt: u32,
    /// Tokens that the peer needs.
    pub tokens: u32,
    pub block_tokens: u32,
}

impl Outlet {
    /// Sends every layer of the blocks before `upto`, or notes that they are ready.
    pub(super) fn send_blocks(&mut self, slots: &[u32], upto: usize, (layers, view): (u32, &dyn KvView)) {
        let upto = u32::try_from(upto.min(slots.len())).unwrap_or(u32::MAX);
        for layer in 0..layers {
            self.layer_ready(layer, 0..upto, (slots, view));
        }
    }

    /// The hand-off has its turn: what is ready leaves, and from now on all as soon as it is ready.
    pub(super) fn depart(&mut self, slots: &[u32], view: &dyn KvView) {
        for (layer, upto) in (0u32..).zip(self.waiting.take().unwrap_or_default()) {
            self.layer_ready(layer, 0..upto, (slots, view));
        }
    }

    /// Whether everything is ready, and waits.
    pub(super) fn is_ready(&self) -> bool {
        let blocks = self.tokens.div_ceil(self.block_tokens);
        self.waiting.as_ref().is_some_and(|layers| layers.iter().all(|upto| *upto >= blocks))
    }

    fn layer_ready(&mut self, layer: u32, blocks: Range<u32>, (slots, view): (&[u32], &dyn KvView)) {
        if let Some(waiting) = &mut self.waiting {
            if let Some(ready) = waiting.get_mut(layer as usize) {
                *ready = blocks.end.max(*ready);
            }
            return;
        }
        for block in blocks {
            if let Some(slot) = slots.get(block as usize) {
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
        let Some(outlet) = self.outlets.get_mut(&id) else { return };
        let size = outlet.block_tokens;
        // A block leaves when its last token is there; the tail when the last of all is.
        let upto = if tokens.end >= outlet.tokens { outlet.tokens.div_ceil(size) } else { tokens.end / size };
        outlet.layer_ready(layer, tokens.start / size..upto, at);
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

    /// Sends a prompt of `total` tokens, `start` of them cached, in chunks; the turn comes after so many, at once if 0.
    /// Which blocks of which layers have left.
    fn sent(total: u32, (start, chunk): (u32, u32), turn: u32) -> Vec<(u32, u32)> {
        let (slices, mut taken) = mpsc::unbounded_channel();
        let waiting = (turn > 0).then(|| vec![0; 2]);
        let mut outlet = Outlet { slices, waiting, attempt: 1, tokens: total, block_tokens: 4 };
        outlet.send_blocks(&[0; 10], (start / 4) as usize, (2, &Flat));
        let mut outlets = BTreeMap::from([(SequenceId(1), outlet)]);
        let (mut at, mut chunks) = (start, 0);
        while at < total {
            let end = (at + chunk).min(total);
            for layer in 0..2 {
                let mut sink = Sink { outlets: &mut outlets };
                sink.layer_computed(SequenceId(1), layer, at..end, (&[0; 10], &Flat));
            }
            (at, chunks) = (end, chunks + 1);
            let outlet = outlets.get_mut(&SequenceId(1)).unwrap();
            if turn > 0 && chunks <= turn {
                assert!(taken.is_empty(), "nothing is copied before its turn");
                assert_eq!(outlet.is_ready(), at == total);
                if chunks == turn || at == total {
                    outlet.depart(&[0; 10], &Flat);
                    assert!(!outlet.is_ready());
                }
            }
        }
        let mut sent = Vec::new();
        while let Ok((at, _)) = taken.try_recv() {
            sent.push((at.block, at.layer));
        }
        sent.sort_unstable();
        sent
    }

    /// However a prompt is cut into chunks, and whenever its turn comes, each block of each layer leaves exactly once.
    #[test]
    fn every_block_leaves_once_however_it_was_cut() {
        for total in 1u32..40 {
            let every: Vec<_> = (0..total.div_ceil(4)).flat_map(|b| [(b, 0), (b, 1)]).collect();
            for chunk in 1u32..17 {
                for start in 0..total {
                    for turn in 0..4 {
                        let sent = sent(total, (start, chunk), turn);
                        assert_eq!(
                            sent, every,
                            "{total} tokens from {start}, chunks of {chunk}, turn {turn}"
                        );
                    }
                }
            }
        }
    }
}
