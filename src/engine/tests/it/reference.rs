//! A textbook transformer in double precision, written for being read: the judge of the numbers.

use std::collections::BTreeMap;

/// The properties of a model that the reference needs.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Number of layers.
    pub layers: usize,
    /// Width of the hidden state.
    pub dim: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Numbers in a head.
    pub head_dim: usize,
    /// Width of the feed-forward part.
    pub ffn_dim: usize,
    /// Number of tokens in the vocabulary.
    pub vocab: usize,
    /// Rotary base.
    pub theta: f64,
    /// How frequencies are stretched.
    pub stretch: Stretch,
}

/// How frequencies are stretched to longer texts.
#[derive(Clone, Copy, Debug)]
pub enum Stretch {
    /// All by a factor.
    Linear(f64),
    /// Those of long waves only.
    Llama3 {
        /// By this.
        factor: f64,
        /// Waves longer than the first context over this.
        low: f64,
        /// Not at all waves shorter than the first context over this.
        high: f64,
        /// The first context.
        original: f64,
    },
}

fn frequency(shape: &Shape, i: usize) -> f64 {
    let plain = shape.theta.powf(-(2.0 * i as f64) / shape.head_dim as f64);
    match shape.stretch {
        Stretch::Linear(factor) => plain / factor,
        Stretch::Llama3 { factor, low, high, original } => {
            let wave = 2.0 * std::f64::consts::PI / plain;
            if wave < original / high {
                plain
            } else if wave > original / low {
                plain / factor
            } else {
                let smooth = (original / wave - low) / (high - low);
                (1.0 - smooth) * plain / factor + smooth * plain
            }
        }
    }
}

/// Tensors by name, row after row.
pub type Tensors = BTreeMap<String, Vec<f32>>;

fn times(weights: &[f32], x: &[f64]) -> Vec<f64> {
    weights.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()).collect()
}

fn norm(weights: &[f32], x: &[f64]) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weights).map(|(x, w)| x / (mean + 1e-5).sqrt() * f64::from(*w)).collect()
}

fn turn(x: &mut [f64], shape: &Shape, position: usize) {
    let half = shape.head_dim / 2;
    for head in x.chunks_exact_mut(shape.head_dim) {
        for i in 0..half {
            let angle = position as f64 * frequency(shape, i);
            let (a, b) = (head[i], head[i + half]);
            head[i] = a * angle.cos() - b * angle.sin();
            head[i + half] = b * angle.cos() + a * angle.sin();
        }
    }
}

fn softmax(x: &mut [f64]) {
    let most = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    x.iter_mut().for_each(|x| *x = (*x - most).exp());
    let sum: f64 = x.iter().sum();
    x.iter_mut().for_each(|x| *x /= sum);
}

fn attend(shape: &Shape, query: &[f64], keys: &[Vec<f64>], values: &[Vec<f64>]) -> Vec<f64> {
    let mut out = Vec::new();
    for head in 0..shape.heads {
        let at = head / (shape.heads / shape.kv_heads) * shape.head_dim;
        let query = &query[head * shape.head_dim..][..shape.head_dim];
        let score = |key: &Vec<f64>| {
            let key = &key[at..at + shape.head_dim];
            query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>() / (shape.head_dim as f64).sqrt()
        };
        let mut weights: Vec<f64> = keys.iter().map(score).collect();
        softmax(&mut weights);
        let value = |d: usize| weights.iter().zip(values).map(|(w, v)| w * v[at + d]).sum::<f64>();
        out.extend((0..shape.head_dim).map(value));
    }
    out
}

/// The logits after each token.
pub fn logits(shape: &Shape, tensors: &Tensors, tokens: &[u32]) -> Vec<Vec<f64>> {
    let weights = |name: &str| tensors[name].as_slice();
    let embedding = weights("model.embed_tokens.weight");
    let row = |token: &u32| &embedding[*token as usize * shape.dim..][..shape.dim];
    let mut xs: Vec<Vec<f64>> =
        tokens.iter().map(|t| row(t).iter().map(|x| f64::from(*x)).collect()).collect();
    for n in 0..shape.layers {
        let layer = |part: &str| weights(&format!("model.layers.{n}.{part}.weight")).to_vec();
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (position, x) in xs.iter_mut().enumerate() {
            let normed = norm(&layer("input_layernorm"), x);
            let mut query = times(&layer("self_attn.q_proj"), &normed);
            let mut key = times(&layer("self_attn.k_proj"), &normed);
            turn(&mut query, shape, position);
            turn(&mut key, shape, position);
            keys.push(key);
            values.push(times(&layer("self_attn.v_proj"), &normed));
            let mixed = attend(shape, &query, &keys, &values);
            let back = times(&layer("self_attn.o_proj"), &mixed);
            x.iter_mut().zip(back).for_each(|(x, b)| *x += b);
            let normed = norm(&layer("post_attention_layernorm"), x);
            let gate = times(&layer("mlp.gate_proj"), &normed);
            let up = times(&layer("mlp.up_proj"), &normed);
            let inner: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            let down = times(&layer("mlp.down_proj"), &inner);
            x.iter_mut().zip(down).for_each(|(x, d)| *x += d);
        }
    }
    let head = tensors.get("lm_head.weight").map_or(embedding, Vec::as_slice);
    xs.iter().map(|x| times(head, &norm(weights("model.norm.weight"), x))).collect()
}
