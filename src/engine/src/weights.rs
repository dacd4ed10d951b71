//! The numbers of a model, laid out for the kernels, wherever they come from.

use xxhash_rust::xxh3::Xxh3;

use crate::BuildError;
use crate::config::ModelConfig;
use crate::kernel::Matrix;

/// Gives tensors by their Hugging Face names.
pub(crate) trait Source {
    /// The numbers of a tensor in the given shape.
    ///
    /// # Errors
    /// Names the tensor that is missing or shaped otherwise.
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, BuildError>;
}

/// One layer. Matrices that take the same input are one, output after output.
#[derive(Debug)]
pub(crate) struct Layer {
    /// Scales before attention.
    pub(crate) attention_norm: Vec<f32>,
    /// Queries, keys and values.
    pub(crate) qkv: Matrix,
    /// Back from the heads.
    pub(crate) output: Matrix,
    /// Scales before the feed-forward part.
    pub(crate) ffn_norm: Vec<f32>,
    /// Gate, then up.
    pub(crate) gate_up: Matrix,
    /// Back down.
    pub(crate) down: Matrix,
}

/// A whole model.
#[derive(Debug)]
pub(crate) struct Weights {
    /// Its shape.
    pub(crate) config: ModelConfig,
    /// Token by token.
    pub(crate) embedding: Matrix,
    /// In order.
    pub(crate) layers: Vec<Layer>,
    /// Scales before the output matrix.
    pub(crate) norm: Vec<f32>,
    head: Option<Matrix>,
}

impl Weights {
    /// Collects all tensors of a model of this shape.
    ///
    /// # Errors
    /// The source's.
    pub(crate) fn collect(config: ModelConfig, source: &mut dyn Source) -> Result<Self, BuildError> {
        let vocab = [config.vocab_tokens, config.dim];
        let embedding = matrix(source, &[("model.embed_tokens.weight", vocab[0])], vocab[1])?;
        let layers = (0..config.layers).map(|n| layer(&config, n, source)).collect::<Result<_, _>>()?;
        let norm = source.tensor("model.norm.weight", &[config.dim])?;
        let head = match config.tied {
            true => None,
            false => Some(matrix(source, &[("lm_head.weight", vocab[0])], vocab[1])?),
        };
        Ok(Self { config, embedding, layers, norm, head })
    }

    /// From the last norm to logits.
    pub(crate) fn head(&self) -> &Matrix {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    /// A digest of shape and numbers.
    pub(crate) fn digest(&self) -> String {
        let mut hash = Xxh3::new();
        hash.update(format!("{:?}", self.config).as_bytes());
        hash.update(self.embedding.as_bytes());
        for layer in &self.layers {
            hash.update(bytemuck::cast_slice(&layer.attention_norm));
            hash.update(bytemuck::cast_slice(&layer.ffn_norm));
            for matrix in [&layer.qkv, &layer.output, &layer.gate_up, &layer.down] {
                hash.update(matrix.as_bytes());
            }
        }
        hash.update(bytemuck::cast_slice(&self.norm));
        hash.update(self.head().as_bytes());
        format!("{:032x}", hash.digest128())
    }
}

fn layer(config: &ModelConfig, n: usize, source: &mut dyn Source) -> Result<Layer, BuildError> {
    let name = |part: &str| format!("model.layers.{n}.{part}.weight");
    let (dim, ffn) = (config.dim, config.ffn_dim);
    let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let projections =
        [(name("self_attn.q_proj"), q), (name("self_attn.k_proj"), kv), (name("self_attn.v_proj"), kv)];
    let gates = [(name("mlp.gate_proj"), ffn), (name("mlp.up_proj"), ffn)];
    Ok(Layer {
        attention_norm: source.tensor(&name("input_layernorm"), &[dim])?,
        qkv: matrix(source, &projections, dim)?,
        output: matrix(source, &[(name("self_attn.o_proj"), dim)], q)?,
        ffn_norm: source.tensor(&name("post_attention_layernorm"), &[dim])?,
        gate_up: matrix(source, &gates, dim)?,
        down: matrix(source, &[(name("mlp.down_proj"), dim)], ffn)?,
    })
}

/// One matrix of several tensors that take the same input.
fn matrix<N: AsRef<str>>(
    source: &mut dyn Source,
    tensors: &[(N, usize)],
    inputs: usize,
) -> Result<Matrix, BuildError> {
    let mut numbers = Vec::new();
    for (name, outputs) in tensors {
        let tensor = source.tensor(name.as_ref(), &[*outputs, inputs])?;
        if numbers.is_empty() {
            numbers = tensor;
        } else {
            numbers.extend_from_slice(&tensor);
        }
    }
    Ok(Matrix::new(tensors.iter().map(|(_, outputs)| outputs).sum(), inputs, &numbers))
}
