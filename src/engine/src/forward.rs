//! One pass through the transformer: rows of tokens in, their last hidden states out, their KV into
//! the pool on the way.

use crate::attention::{KvView, attend};
use crate::compute_threads::ComputeThreads;
use crate::exponential::silu;
use crate::kernel::normalize;
use crate::pool::Pool;
use crate::rotary::{Rotary, rotate};
use crate::weights::Weights;

/// One token to compute.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row<'a> {
    /// The token's id.
    pub(crate) token: u32,
    /// Its position in the sequence.
    pub(crate) position: u32,
    /// Its sequence's slots.
    pub(crate) blocks: &'a [u32],
}

/// The forward pass: the model, its threads, and memory for intermediate numbers.
#[derive(Debug)]
pub(crate) struct Forward {
    /// The model.
    pub(crate) weights: Weights,
    compute_threads: ComputeThreads,
    rotary: Rotary,
    hidden: Vec<f32>,
    normed: Vec<f32>,
    qkv: Vec<f32>,
    mixed: Vec<f32>,
    product: Vec<f32>,
    angles: Vec<f32>,
}

impl Forward {
    /// Ready for a first pass.
    pub(crate) fn new(weights: Weights, compute_threads: ComputeThreads) -> Self {
        let config = &weights.config;
        let rotary = Rotary::new(config.head_dim, config.theta, config.scaling);
        let empty = Vec::new;
        Self {
            rotary,
            hidden: empty(),
            normed: empty(),
            qkv: empty(),
            mixed: empty(),
            product: empty(),
            angles: empty(),
            weights,
            compute_threads,
        }
    }

    /// Computes all rows. A row sees the pool's KV before its position, and the rows of its sequence in this pass.
    /// `on_layer` is called when all KV of a layer is in the pool.
    pub(crate) fn pass(&mut self, rows: &[Row<'_>], pool: &mut Pool, on_layer: &mut dyn FnMut(u32, &Pool)) {
        let weights = &self.weights;
        let dim = weights.config.dim;
        self.hidden.resize(rows.len() * dim, 0.0);
        self.angles.clear();
        for (row, hidden) in rows.iter().zip(self.hidden.chunks_exact_mut(dim)) {
            weights.embedding.copy_row(row.token as usize, hidden);
            self.rotary.angles(row.position, &mut self.angles);
        }
        for n in 0..weights.layers.len() {
            let at = u32::try_from(n).expect("layers are counted in 32 bits");
            self.keys_and_values(n, rows, pool);
            on_layer(at, pool);
            self.mix(n, rows, pool);
            self.feed_forward(n);
        }
    }

    /// The logits of some rows of the last pass, row after row.
    pub(crate) fn logits(&mut self, rows: &[usize], logits: &mut Vec<f32>) {
        let config = &self.weights.config;
        let picked: Vec<f32> =
            rows.iter().flat_map(|row| &self.hidden[row * config.dim..][..config.dim]).copied().collect();
        normalize(&picked, &self.weights.norm, config.epsilon, &mut self.normed);
        self.weights.head().multiply(&self.compute_threads, &self.normed, logits);
    }

    fn keys_and_values(&mut self, n: usize, rows: &[Row<'_>], pool: &mut Pool) {
        let (config, layer) = (&self.weights.config, &self.weights.layers[n]);
        let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        normalize(&self.hidden, &layer.attention_norm, config.epsilon, &mut self.normed);
        layer.qkv.multiply(&self.compute_threads, &self.normed, &mut self.qkv);
        let angles = self.angles.chunks_exact(config.head_dim);
        for ((row, qkv), angles) in rows.iter().zip(self.qkv.chunks_exact_mut(q + 2 * kv)).zip(angles) {
            rotate(&mut qkv[..q + kv], config.head_dim, angles);
            let (keys, values) = qkv[q..].split_at(kv);
            let layer = u32::try_from(n).expect("layers are counted in 32 bits");
            pool.store(layer, (row.blocks, row.position), (keys, values));
        }
    }

    fn mix(&mut self, n: usize, rows: &[Row<'_>], pool: &Pool) {
        let config = &self.weights.config;
        let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        self.mixed.resize(rows.len() * q, 0.0);
        let qkv = &self.qkv;
        self.compute_threads.for_rows(&mut self.mixed, q, |row, out| {
            let queries = &qkv[row * (q + 2 * kv)..][..q];
            let Row { position, blocks, .. } = rows[row];
            let layer = u32::try_from(n).expect("layers are counted in 32 bits");
            attend(queries, config.heads(), KvView { pool, layer, blocks, len: position as usize + 1 }, out);
        });
        self.weights.layers[n].output.multiply(&self.compute_threads, &self.mixed, &mut self.product);
        add(&mut self.hidden, &self.product);
    }

    fn feed_forward(&mut self, n: usize) {
        let (config, layer) = (&self.weights.config, &self.weights.layers[n]);
        normalize(&self.hidden, &layer.ffn_norm, config.epsilon, &mut self.normed);
        layer.gate_up.multiply(&self.compute_threads, &self.normed, &mut self.product);
        self.mixed.clear();
        for row in self.product.chunks_exact(2 * config.ffn_dim) {
            let (gate, up) = row.split_at(config.ffn_dim);
            self.mixed.extend(gate.iter().zip(up).map(|(gate, up)| silu(*gate) * up));
        }
        layer.down.multiply(&self.compute_threads, &self.mixed, &mut self.product);
        add(&mut self.hidden, &self.product);
    }
}

fn add(to: &mut [f32], what: &[f32]) {
    for (to, what) in to.iter_mut().zip(what) {
        *to += what;
    }
}
