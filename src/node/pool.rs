//! The engine's KV as others see it: the transports, and the cache.

#![allow(unsafe_code, reason = "the engine works in memory that transports reach; the rule is argued below")]

use std::ops::Range;
use std::sync::Arc;

use baton_engine::{Engine, KvMemory};
use baton_tiers::{Hold, HoldRefusal, KvCache, Pool};
use baton_transports::mover::{Location, Memory, OwnedMemory, Pages};
use baton_transports::{Piece, SlicePosition};
use baton_types::RequestId;

use super::job::Job;

/// Registered memory as an engine's pool.
#[derive(Debug)]
struct RegisteredMemory(OwnedMemory);

impl KvMemory for RegisteredMemory {
    fn size(&self) -> usize {
        self.0.size()
    }

    fn bytes(&self, range: Range<usize>) -> &[u8] {
        self.0.bytes(range)
    }

    fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        self.0.bytes_mut(range)
    }
}

/// The engine's pool as transports see it: hand-offs leave from it, and land in it, without another copy.
#[derive(Clone, Debug)]
pub(super) struct KvMap {
    pub(super) memory: Arc<Memory>,
    layer_bytes: u64,
    block_bytes: u64,
}

impl KvMap {
    /// Puts the pool of an engine on which nothing has started into memory that transports reach.
    ///
    /// # Errors
    /// The bytes that cannot be had, and the system's words.
    pub(super) fn place(engine: &mut dyn Engine) -> Result<Self, (usize, std::io::Error)> {
        let shape = engine.shape();
        let (layer_bytes, block_bytes) = (shape.layer_bytes as u64, shape.block_bytes() as u64);
        let bytes = shape.block_bytes() * shape.blocks as usize;
        let memory =
            Memory::shared(bytes, Pages::Ordinary, Location::Anywhere).map_err(|error| (bytes, error))?;
        // SAFETY: the engine's thread has the only view. A block's slot belongs to one request at a time. Transports
        // read it once the engine reports a layer as computed. From then on the engine does not write to it until the
        // slot belongs to another request. Transports write to it before that thread learns that all KV has landed. The
        // thread that takes a slot away waits for a copy into it (`Links::forget`).
        let owned = unsafe { OwnedMemory::new(Arc::clone(&memory)) };
        engine.kv_mut().place(Box::new(RegisteredMemory(owned)));
        Ok(Self { memory, layer_bytes, block_bytes })
    }

    /// Where a layer of the block in `slot` begins.
    pub(super) fn layer_at(&self, slot: u32, layer: u32) -> u64 {
        u64::from(slot) * self.block_bytes + u64::from(layer) * self.layer_bytes
    }

    /// Where a piece of a slice belongs, for a request whose blocks lie in these slots.
    pub(super) fn piece_at(&self, slots: &[u32], piece: &Piece) -> Option<u64> {
        let SlicePosition { block, layer } = piece.at;
        let slot = slots.get(block as usize)?;
        Some(self.layer_at(*slot, layer) + u64::from(piece.offset))
    }
}

/// The pool as the cache sees it: whole blocks by slot.
pub(super) struct EnginePool<'a>(pub(super) &'a mut dyn Engine);

impl Pool for EnginePool<'_> {
    fn read(&self, slot: u32, out: &mut [u8]) {
        out.copy_from_slice(self.0.kv().block(slot));
    }

    fn write(&mut self, slot: u32, bytes: &[u8]) {
        self.0.kv_mut().block_mut(slot).copy_from_slice(bytes);
    }
}

/// Opens a job's hold with `room_blocks` beside those of its chain. A chain that contradicts what the
/// cache knows is served without it.
pub(super) fn open(
    cache: &mut KvCache,
    request: u64,
    job: &mut Job,
    room_blocks: u32,
) -> Result<Hold, HoldRefusal> {
    let owner = RequestId(request);
    match cache.open(owner, &job.chain, room_blocks) {
        Err(HoldRefusal::Misfit { .. }) => {
            let named = u32::try_from(std::mem::take(&mut job.chain).len()).unwrap_or(u32::MAX);
            cache.open(owner, &[], room_blocks.saturating_add(named))
        }
        answer => answer,
    }
}
