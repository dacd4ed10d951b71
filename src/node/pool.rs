//! The engine's KV as the cache sees it: whole blocks by slot.

use baton_engine::Engine;
use baton_tiers::Pool;

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
