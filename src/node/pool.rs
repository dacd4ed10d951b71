//! The engine's KV as the cache sees it: whole blocks by slot.

use baton_engine::Engine;
use baton_tiers::{Hold, KvCache, Pool, Refused};
use baton_types::RequestId;

use super::job::Job;

/// See the module.
pub(super) struct EnginePool<'a>(pub(super) &'a mut dyn Engine);

impl Pool for EnginePool<'_> {
    fn read(&self, slot: u32, out: &mut [u8]) {
        let layer_bytes = self.0.shape().layer_bytes;
        for (layer, bytes) in (0u32..).zip(out.chunks_exact_mut(layer_bytes)) {
            bytes.copy_from_slice(self.0.view().layer(slot, layer));
        }
    }

    fn write(&mut self, slot: u32, bytes: &[u8]) {
        let layer_bytes = self.0.shape().layer_bytes;
        for (layer, bytes) in (0u32..).zip(bytes.chunks_exact(layer_bytes)) {
            self.0.write_layer(slot, layer, bytes);
        }
    }
}

/// Opens a job's hold with `room_blocks` beside those of its chain. A chain that contradicts what the
/// cache knows is served without it.
pub(super) fn open(
    cache: &mut KvCache,
    request: u64,
    job: &mut Job,
    room_blocks: u32,
) -> Result<Hold, Refused> {
    let owner = RequestId(request);
    match cache.open(owner, &job.chain, room_blocks) {
        Err(Refused::Misfit { .. }) => {
            let named = u32::try_from(std::mem::take(&mut job.chain).len()).unwrap_or(u32::MAX);
            cache.open(owner, &[], room_blocks.saturating_add(named))
        }
        answer => answer,
    }
}
