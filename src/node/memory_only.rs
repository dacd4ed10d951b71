//! Memory in the shape of an engine's KV, and no engine: what a node has that only lends room.

use baton_engine::{
    Engine, Event, KvPool, KvShape, KvSink, ModelCard, Sequence, SequenceId, StartError, StepTarget,
};
use baton_types::CostProfile;

use super::engine::{EngineChoice, build as build_engine, keeping_profile};
use super::error::EngineError;

/// KV memory without an engine. It starts no sequence; its pages are written by others.
struct MemoryOnlyEngine {
    shape: KvShape,
    model: ModelCard,
    kv: KvPool,
}

/// Memory for `blocks` blocks of the KV that the chosen engine would have. The engine itself is built to learn its
/// shape, and dropped.
///
/// # Errors
/// As the engine's own; and when the memory cannot be had.
pub(super) fn build(
    choice: &EngineChoice,
    blocks: u32,
) -> Result<(Box<dyn Engine>, CostProfile), EngineError> {
    let engine = build_engine(choice)?;
    let profile = keeping_profile(engine.as_ref());
    let (shape, model) = (KvShape { blocks, ..engine.shape().clone() }, engine.model().clone());
    drop(engine);
    Ok((Box::new(MemoryOnlyEngine::new(shape, model)?), profile))
}

impl MemoryOnlyEngine {
    fn new(shape: KvShape, model: ModelCard) -> Result<Self, EngineError> {
        let bytes = shape.block_bytes().checked_mul(shape.blocks as usize);
        let (blocks, block_bytes) = (shape.blocks, shape.block_bytes());
        bytes
            .filter(|bytes| isize::try_from(*bytes).is_ok())
            .ok_or(EngineError::Memory { blocks, block_bytes })?;
        Ok(Self { kv: KvPool::new(&shape), shape, model })
    }
}

impl Engine for MemoryOnlyEngine {
    fn shape(&self) -> &KvShape {
        &self.shape
    }

    fn model(&self) -> &ModelCard {
        &self.model
    }

    fn start(&mut self, _: Sequence) -> Result<(), StartError> {
        Err(StartError("this node has no engine: its role is store".into()))
    }

    fn extend(&mut self, _: SequenceId, _: &[u32]) {}

    fn stop(&mut self, _: SequenceId) {}

    fn set_step_target(&mut self, _: Option<StepTarget>) {}

    fn step(&mut self, _: &mut Vec<Event>, _: &mut dyn KvSink) -> bool {
        false
    }

    fn kv(&self) -> &KvPool {
        &self.kv
    }

    fn kv_mut(&mut self) -> &mut KvPool {
        &mut self.kv
    }

    fn load(&self) -> (u32, u32) {
        (0, 0)
    }
}

#[cfg(test)]
mod tests {
    use baton_engine::{PoolSpec, SeededSpec};

    use super::*;

    #[test]
    fn a_memory_only_engine_has_the_shape_of_its_engine_and_computes_nothing() {
        let choice = EngineChoice::Seeded { spec: SeededSpec::default(), pool: PoolSpec::default() };
        let engine = build_engine(&choice).unwrap();
        let (mut memory, profile) = build(&choice, 7).unwrap();
        profile.validate().unwrap();
        assert_eq!(memory.shape(), &KvShape { blocks: 7, ..engine.shape().clone() });
        assert_eq!(memory.model(), engine.model());
        let (layers, layer_bytes) = (memory.shape().layers, memory.shape().layer_bytes);
        for block in 0..7u8 {
            for layer in 0..layers {
                let value = block * 16 + u8::try_from(layer).unwrap();
                memory.kv_mut().layer_mut(block.into(), layer).fill(value);
            }
        }
        for block in 0..7u8 {
            let value = block * 16 + u8::try_from(layers - 1).unwrap();
            assert!(memory.kv().layer(block.into(), layers - 1).iter().all(|byte| *byte == value));
        }
        assert_eq!((memory.load(), memory.kv().layer(0, 0).len()), ((0, 0), layer_bytes));
    }
}
