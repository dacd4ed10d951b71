//! The paged KV pool: `[block][layer][key | value][slot][kv head × dim]`, so that a block is one
//! contiguous range of bytes and so is each of its layers.

use std::ops::Range;

use crate::KvShape;

/// How much KV an engine holds and how much it takes on in one pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSpec {
    /// Tokens in a block, at least 1.
    pub block_tokens: u32,
    /// Blocks in the pool, at least 1. Also the bound on sequences.
    pub blocks: u32,
    /// Prompt tokens that one pass computes at most, at least 1.
    pub pass_tokens: u32,
    /// Sequences that run at the same time at most, at least 1; held and starved ones do not count.
    pub max_running: u32,
    /// Threads that compute; `None` for the caller's own alone. A timed engine has no use for them.
    pub threads: Option<u32>,
}

impl Default for PoolSpec {
    fn default() -> Self {
        Self { block_tokens: 16, blocks: 1024, pass_tokens: 512, max_running: 64, threads: None }
    }
}

/// Why an engine could not be made: what is wrong, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BuildError(pub String);

impl PoolSpec {
    /// Checks the bounds.
    ///
    /// # Errors
    /// Names the field that is out of bounds.
    pub fn validate(&self) -> Result<(), BuildError> {
        let fields = [
            ("block_tokens", self.block_tokens),
            ("blocks", self.blocks),
            ("pass_tokens", self.pass_tokens),
            ("max_running", self.max_running),
            ("threads", self.threads.unwrap_or(1)),
        ];
        match fields.iter().find(|(_, value)| *value == 0) {
            Some((name, _)) => Err(BuildError(format!("engine pool: {name} must be at least 1"))),
            None => Ok(()),
        }
    }
}

/// The bytes of one layer of a block, from those of one token's keys and values.
///
/// # Errors
/// When all blocks together would not fit into any memory.
pub(crate) fn layer_bytes(pool: &PoolSpec, layers: usize, token_bytes: usize) -> Result<usize, BuildError> {
    let layer = (pool.block_tokens as usize).checked_mul(token_bytes);
    let all = layer.and_then(|bytes| bytes.checked_mul(layers)?.checked_mul(pool.blocks as usize));
    match (layer, all) {
        (Some(layer), Some(all)) if isize::try_from(all).is_ok() => Ok(layer),
        _ => Err(BuildError("engine pool: more bytes than there can be; ask for fewer blocks".into())),
    }
}

/// Where in a pool the KV of one layer lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// Tokens in a block.
    pub(crate) block_tokens: usize,
    /// Numbers of one token's keys in one layer.
    pub(crate) kv_dim: usize,
    layers: usize,
}

impl Layout {
    const fn layer_floats(&self) -> usize {
        2 * self.block_tokens * self.kv_dim
    }

    /// Where a layer of a block begins.
    pub(crate) const fn layer_at(&self, block: u32, layer: u32) -> usize {
        (block as usize * self.layers + layer as usize) * self.layer_floats()
    }

    /// How far behind a token's keys its values lie.
    pub(crate) const fn values_after(&self) -> usize {
        self.block_tokens * self.kv_dim
    }
}

/// The memory of a pool. While a caller uses a range, no other reads or writes it. Transfers also access the memory:
/// they read computed blocks, and write to blocks that the engine does not read yet.
pub trait KvMemory: Send + Sync + std::fmt::Debug {
    /// How many bytes there are.
    fn size(&self) -> usize;
    /// Reads a range. Its start is aligned as the whole memory is, at least to four bytes.
    ///
    /// # Panics
    /// Where it is not inside.
    fn bytes(&self, range: Range<usize>) -> &[u8];
    /// Writes a range.
    ///
    /// # Panics
    /// Where it is not inside.
    fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8];
}

/// Memory of this process alone; of numbers, for their alignment.
#[derive(Debug)]
struct Heap(Vec<f32>);

impl KvMemory for Heap {
    fn size(&self) -> usize {
        size_of_val(self.0.as_slice())
    }

    fn bytes(&self, range: Range<usize>) -> &[u8] {
        &bytemuck::cast_slice(&self.0)[range]
    }

    fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.0)[range]
    }
}

/// The bytes of all blocks, by block and layer.
#[derive(Debug)]
pub struct KvPool {
    memory: Box<dyn KvMemory>,
    layers: usize,
    layer_bytes: usize,
}

impl KvPool {
    /// A pool of zeros in the given shape, in memory of this process alone.
    #[must_use]
    pub fn new(shape: &KvShape) -> Self {
        let bytes = shape.block_bytes() * shape.blocks as usize;
        let memory = Box::new(Heap(vec![0.0; bytes.div_ceil(size_of::<f32>())]));
        Self { memory, layers: shape.layers as usize, layer_bytes: shape.layer_bytes }
    }

    /// Places the pool in this memory, block after block and layer after layer. Its content is not copied, so this is
    /// for an engine on which no sequence has started.
    ///
    /// # Panics
    /// Where the memory is too small.
    pub fn place(&mut self, memory: Box<dyn KvMemory>) {
        let size = memory.size();
        assert!(size >= self.memory.size(), "a memory of {size} bytes is too small for the pool");
        self.memory = memory;
    }

    /// A layer of a block.
    #[must_use]
    pub fn layer(&self, block: u32, layer: u32) -> &[u8] {
        self.memory.bytes(self.range(block, layer))
    }

    /// All layers of a block.
    #[must_use]
    pub fn block(&self, block: u32) -> &[u8] {
        self.memory.bytes(self.block_range(block))
    }

    /// All layers of a block, to be written.
    pub fn block_mut(&mut self, block: u32) -> &mut [u8] {
        let range = self.block_range(block);
        self.memory.bytes_mut(range)
    }

    /// A layer of a block, to be written.
    pub fn layer_mut(&mut self, block: u32, layer: u32) -> &mut [u8] {
        let range = self.range(block, layer);
        self.memory.bytes_mut(range)
    }

    fn block_range(&self, block: u32) -> Range<usize> {
        let bytes = self.layers * self.layer_bytes;
        block as usize * bytes..(block as usize + 1) * bytes
    }

    fn range(&self, block: u32, layer: u32) -> Range<usize> {
        let at = (block as usize * self.layers + layer as usize) * self.layer_bytes;
        at..at + self.layer_bytes
    }
}

/// A pool of numbers.
#[derive(Debug)]
pub(crate) struct Pool {
    /// The layout of a block.
    pub(crate) layout: Layout,
    /// The memory of the blocks.
    pub(crate) kv: KvPool,
}

impl Pool {
    /// A pool of zeros in the given shape, whose `dtype` must be `f32`.
    pub(crate) fn new(shape: &KvShape) -> Self {
        debug_assert_eq!(shape.dtype, "f32");
        let layout = Layout {
            block_tokens: shape.block_tokens as usize,
            kv_dim: (shape.kv_heads * shape.head_dim) as usize,
            layers: shape.layers as usize,
        };
        Self { layout, kv: KvPool::new(shape) }
    }

    /// So many numbers from `at` on.
    pub(crate) fn floats(&self, at: usize, count: usize) -> &[f32] {
        let size = size_of::<f32>();
        bytemuck::cast_slice(self.kv.memory.bytes(at * size..(at + count) * size))
    }

    /// Stores one token's keys and values.
    pub(crate) fn store(&mut self, layer: u32, (blocks, position): (&[u32], u32), kv: (&[f32], &[f32])) {
        let slot = position as usize % self.layout.block_tokens;
        let block = blocks[position as usize / self.layout.block_tokens];
        let keys = self.layout.layer_at(block, layer) + slot * self.layout.kv_dim;
        self.put(keys, kv.0);
        self.put(keys + self.layout.values_after(), kv.1);
    }

    fn put(&mut self, at: usize, numbers: &[f32]) {
        let size = size_of::<f32>();
        let range = at * size..(at + numbers.len()) * size;
        self.kv.memory.bytes_mut(range).copy_from_slice(bytemuck::cast_slice(numbers));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> KvShape {
        KvShape {
            layers: 2,
            kv_heads: 1,
            head_dim: 2,
            dtype: "f32",
            block_tokens: 4,
            layer_bytes: 4 * 2 * 2 * 4,
            blocks: 3,
        }
    }

    #[test]
    fn a_layer_is_keys_then_values_by_slot() {
        let mut pool = Pool::new(&shape());
        pool.store(1, (&[2, 0], 5), (&[1.0, 2.0], &[3.0, 4.0]));
        let floats: &[f32] = bytemuck::cast_slice(pool.kv.layer(0, 1));
        assert_eq!(floats[2..4], [1.0, 2.0]);
        assert_eq!(floats[8 + 2..8 + 4], [3.0, 4.0]);
        let all = pool.floats(0, 3 * 2 * 16);
        assert_eq!(all.iter().filter(|x| **x != 0.0).count(), 4);
    }

    #[test]
    fn what_is_written_is_read_back() {
        let mut pool = KvPool::new(&shape());
        let bytes: Vec<u8> = (0..shape().layer_bytes).map(|i| u8::try_from(i).unwrap()).collect();
        pool.layer_mut(1, 0).copy_from_slice(&bytes);
        assert_eq!(pool.layer(1, 0), bytes);
        assert!(pool.layer(1, 1).iter().all(|b| *b == 0));
        pool.place(Box::new(Heap(vec![0.0; 3 * 2 * 16])));
        assert!(pool.layer(1, 0).iter().all(|b| *b == 0));
    }

    #[test]
    #[should_panic(expected = "too small for the pool")]
    fn a_pool_does_not_lie_in_too_little_memory() {
        KvPool::new(&shape()).place(Box::new(Heap(vec![0.0; 3 * 2 * 16 - 1])));
    }

    #[test]
    fn a_zero_bound_is_named() {
        let spec = PoolSpec { pass_tokens: 0, ..PoolSpec::default() };
        assert!(spec.validate().unwrap_err().0.contains("pass_tokens"));
        assert!(PoolSpec::default().validate().is_ok());
    }
}
