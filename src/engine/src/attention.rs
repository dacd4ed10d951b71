//! Attention of one query row over a sequence's paged keys and values.
//!
//! Positions are taken in ascending order, whatever slots hold them: scores first, then their
//! largest, then the weights and their sum, then the weighted values. So the result depends on the
//! position and the KV alone.

use crate::exponential::exp;
use crate::kernel::{dots, tree};
use crate::pool::{Layout, Pool};

/// Heads of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    /// Query heads.
    pub(crate) queries: usize,
    /// Key and value heads; each serves as many query heads.
    pub(crate) kv: usize,
    /// Numbers in a head.
    pub(crate) dim: usize,
}

/// A sequence's KV of one layer, up to a position.
#[derive(Clone, Copy)]
pub(crate) struct KvView<'a> {
    /// The pool.
    pub(crate) pool: &'a Pool,
    /// The layer.
    pub(crate) layer: u32,
    /// The sequence's slots.
    pub(crate) blocks: &'a [u32],
    /// Positions to attend to.
    pub(crate) len: usize,
}

impl KvView<'_> {
    /// The runs of rows that hold one head of `dim` numbers, block by block: each starts with that head and its
    /// rows are `kv_dim` apart. `values` instead of keys on demand.
    fn runs(&self, (head_at, dim): (usize, usize), values: bool) -> impl Iterator<Item = (&[f32], usize)> {
        let layout: Layout = self.pool.layout;
        self.blocks.iter().enumerate().map_while(move |(n, block)| {
            let tokens = self.len.saturating_sub(n * layout.block_tokens).min(layout.block_tokens);
            let part = if values { layout.values_after() } else { 0 };
            let at = layout.layer_at(*block, self.layer) + part + head_at;
            (tokens > 0).then(|| (self.pool.floats(at, (tokens - 1) * layout.kv_dim + dim), tokens))
        })
    }
}

/// Computes the attention of `queries` (all heads of one row) over the past, into `out` of the same shape.
pub(crate) fn attend(queries: &[f32], heads: Heads, past: KvView<'_>, out: &mut [f32]) {
    let group = heads.queries / heads.kv;
    let stride = past.pool.layout.kv_dim;
    #[expect(clippy::cast_precision_loss, reason = "heads are far below 2^24 numbers")]
    let scale = 1.0 / (heads.dim as f32).sqrt();
    let scaled: Vec<f32> = queries.iter().map(|x| x * scale).collect();
    let mut weights = Vec::with_capacity(past.len);
    for (head, (query, out)) in
        scaled.chunks_exact(heads.dim).zip(out.chunks_exact_mut(heads.dim)).enumerate()
    {
        let part = (head / group * heads.dim, heads.dim);
        weights.clear();
        for (keys, tokens) in past.runs(part, false) {
            add_scores(query, keys, (stride, tokens), &mut weights);
        }
        let sum = soften(&mut weights);
        out.fill(0.0);
        let mut weights = weights.as_slice();
        for (values, tokens) in past.runs(part, true) {
            let (now, later) = weights.split_at(tokens);
            weights = later;
            add_weighted(values, stride, now, out);
        }
        out.iter_mut().for_each(|x| *x /= sum);
    }
}

/// Appends a query's scores with the keys of `tokens` rows, four rows at a time to keep the
/// processor's adders busy.
fn add_scores(query: &[f32], keys: &[f32], (stride, tokens): (usize, usize), scores: &mut Vec<f32>) {
    let key = |t: usize| &keys[t * stride..][..query.len()];
    let mut t = 0;
    while t + 4 <= tokens {
        scores.extend_from_slice(&dots(query, [key(t), key(t + 1), key(t + 2), key(t + 3)]));
        t += 4;
    }
    scores.extend((t..tokens).map(|t| dots(query, [key(t)])[0]));
}

/// Replaces scores by the exponentials of their distance from the largest; gives their sum.
fn soften(scores: &mut [f32]) -> f32 {
    let mut most = [f32::NEG_INFINITY; 8];
    let (eights, rest) = scores.as_chunks::<8>();
    for eight in eights {
        for lane in 0..8 {
            most[lane] = if eight[lane] > most[lane] { eight[lane] } else { most[lane] };
        }
    }
    let most = most.iter().chain(rest).fold(f32::NEG_INFINITY, |a, b| if *b > a { *b } else { a });
    let mut sums = [0.0; 8];
    let (eights, rest) = scores.as_chunks_mut::<8>();
    for eight in eights {
        for lane in 0..8 {
            eight[lane] = exp(eight[lane] - most);
            sums[lane] += eight[lane];
        }
    }
    for (sum, score) in sums.iter_mut().zip(rest) {
        *score = exp(*score - most);
        *sum += *score;
    }
    tree(&sums)
}

/// Adds rows of values times their weights, in order. Common head sizes keep the sums in registers.
fn add_weighted(values: &[f32], stride: usize, weights: &[f32], out: &mut [f32]) {
    let (strips, rest) = out.as_chunks_mut::<32>();
    let done = strips.len() * 32;
    for (n, strip) in strips.iter_mut().enumerate() {
        let mut sums = *strip;
        for (t, weight) in weights.iter().enumerate() {
            let row: &[f32; 32] =
                values[t * stride + n * 32..][..32].try_into().expect("a slice of 32 numbers");
            for lane in 0..32 {
                sums[lane] += weight * row[lane];
            }
        }
        *strip = sums;
    }
    for (t, weight) in weights.iter().enumerate() {
        for (total, value) in rest.iter_mut().zip(&values[t * stride + done..]) {
            *total += weight * value;
        }
    }
}
