//! The engine that computes: a Llama-architecture transformer on the CPU.

use std::path::Path;

use crate::checkpoint;
use crate::compute_threads::ComputeThreads;
use crate::forward::{Forward, Row};
use crate::pool::{Pool, layer_bytes};
use crate::roster::{Chunk, Roster};
use crate::sampler::{Draw, Sampler, logprob};
use crate::seeded::{SeededSource, SeededSpec};
use crate::weights::Weights;
use crate::{
    BuildError, Engine, Event, KvPool, KvShape, KvSink, ModelCard, PoolSpec, Sequence, SequenceId,
    StartError, StepTarget,
};

/// Rows whose logits are kept at a time.
const LOGIT_ROWS: usize = 32;

/// A real transformer on the CPU over a paged KV pool of 32-bit floats.
///
/// Its numbers are equal to the bit however a sequence is cut into passes, beside whatever others,
/// over whichever slots, on however many threads and wherever its KV was computed. Weights, KV and
/// sums are `f32`; see `kernel.rs` for the order of operations.
#[derive(Debug)]
pub struct Builtin {
    shape: KvShape,
    pool: Pool,
    roster: Roster<()>,
    forward: Forward,
    sampler: Sampler,
    logits: Vec<f32>,
}

/// The purpose of a row's logits.
#[derive(Clone, Copy)]
enum Want {
    /// The logprob of the prompt's next token, which is at this position.
    Prompt(usize),
    /// The next token.
    Draw,
}

impl Builtin {
    /// A model whose weights follow from a seed.
    ///
    /// # Errors
    /// Names what does not fit together in either spec.
    pub fn seeded(spec: &SeededSpec, pool: PoolSpec) -> Result<Self, BuildError> {
        let weights = Weights::collect(spec.config()?, &mut SeededSource(spec.seed))?;
        Self::new(spec.name.clone(), weights, spec.end_tokens(), pool)
    }

    /// The model of a Hugging Face folder: `config.json` (`LlamaForCausalLM`) with
    /// `model.safetensors` or `model.safetensors.index.json` and its parts, in f32, f16 or bf16.
    /// Its name is the folder's.
    ///
    /// # Errors
    /// Names the file, and in it the field or tensor, that is missing, broken or not supported.
    pub fn load(folder: &Path, pool: PoolSpec) -> Result<Self, BuildError> {
        let loaded = checkpoint::load(folder)?;
        Self::new(loaded.name, loaded.weights, loaded.end_tokens, pool)
    }

    fn new(name: String, weights: Weights, end_tokens: Vec<u32>, pool: PoolSpec) -> Result<Self, BuildError> {
        pool.validate()?;
        let token_bytes = 2 * weights.config.kv_heads * weights.config.head_dim * size_of::<f32>();
        let layer_bytes = layer_bytes(&pool, weights.config.layers, token_bytes)?;
        let narrow = |n: usize| u32::try_from(n).expect("model counts are bounded when read");
        let config = &weights.config;
        let shape = KvShape {
            layers: narrow(config.layers),
            kv_heads: narrow(config.kv_heads),
            head_dim: narrow(config.head_dim),
            dtype: "f32",
            block_tokens: pool.block_tokens,
            layer_bytes,
            blocks: pool.blocks,
        };
        let model = ModelCard {
            name,
            revision: weights.digest(),
            vocab_tokens: narrow(config.vocab_tokens),
            end_tokens,
            max_model_tokens: config.max_model_tokens,
        };
        let compute_threads = ComputeThreads::new(pool.threads)?;
        Ok(Self {
            pool: Pool::new(&shape),
            shape,
            roster: Roster::new(pool, model),
            forward: Forward::new(weights, compute_threads),
            sampler: Sampler::default(),
            logits: Vec::new(),
        })
    }

    /// The logits of the token after `tokens`: for comparing with other implementations. It needs an
    /// engine without sequences and overwrites slots from 0 on.
    ///
    /// # Errors
    /// As [`Engine::start`] for a sequence of these tokens.
    pub fn logits(&mut self, tokens: &[u32]) -> Result<Vec<f32>, StartError> {
        let blocks: Vec<u32> = (0..self.shape.blocks).collect();
        let len = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        if !self.roster.is_empty() {
            return Err(StartError("engine logits: there are sequences; stop them first".into()));
        }
        self.roster.admits(&Sequence {
            id: SequenceId(u64::MAX),
            tokens: tokens.to_vec(),
            prompt_tokens: len,
            computed_tokens: 0,
            blocks: blocks.clone(),
            sampling: std::sync::Arc::default(),
            leaves: false,
            order: 0,
        })?;
        let row = |(position, token): (u32, &u32)| Row { token: *token, position, blocks: &blocks };
        let rows: Vec<Row<'_>> = (0..len).zip(tokens).map(row).collect();
        self.forward.pass(&rows, &mut self.pool, &mut |_, _| ());
        self.forward.logits(&[rows.len() - 1], &mut self.logits);
        Ok(self.logits.clone())
    }

    /// Runs the transformer over all chunks and shows each layer to the sink.
    fn compute(&mut self, chunks: &[Chunk], sink: &mut dyn KvSink) {
        let roster = &self.roster;
        let rows: Vec<Row<'_>> = chunks
            .iter()
            .flat_map(|chunk| {
                let sequence = &roster.entry(chunk.id).sequence;
                chunk.tokens.clone().map(|position| Row {
                    token: sequence.tokens[position as usize],
                    position,
                    blocks: &sequence.blocks,
                })
            })
            .collect();
        self.forward.pass(&rows, &mut self.pool, &mut |layer, pool| {
            for chunk in chunks {
                let sequence = &roster.entry(chunk.id).sequence;
                if sequence.leaves {
                    sink.layer_computed(chunk.id, layer, chunk.tokens.clone(), (&sequence.blocks, &pool.kv));
                }
            }
        });
    }

    /// Which rows of the pass need logits, for which chunk and for what.
    fn wants(&self, chunks: &[Chunk]) -> Vec<(usize, usize, Want)> {
        let mut wants = Vec::new();
        let mut first_row = 0;
        for (n, chunk) in chunks.iter().enumerate() {
            let sequence = &self.roster.entry(chunk.id).sequence;
            let rows = first_row..first_row + chunk.tokens.len();
            first_row = rows.end;
            if sequence.sampling.prompt_logprobs.is_some() {
                let next = chunk.tokens.clone().map(|position| position + 1);
                let inside = next.zip(rows.clone()).filter(|(next, _)| *next < sequence.prompt_tokens);
                wants.extend(inside.map(|(next, row)| (row, n, Want::Prompt(next as usize))));
            }
            if chunk.draws {
                wants.push((rows.end - 1, n, Want::Draw));
            }
        }
        wants
    }

    /// Draws the next token of the chunk's sequence from `logits`.
    fn draw(&mut self, chunk: &Chunk, logits: &[f32], events: &mut Vec<Event>) {
        self.roster.computed(chunk, events);
        let sequence = &self.roster.entry(chunk.id).sequence;
        let token = self.sampler.draw(
            logits,
            &Draw {
                sampling: &sequence.sampling,
                tokens: &sequence.tokens,
                prompt_tokens: sequence.prompt_tokens as usize,
                end_tokens: &self.roster.model().end_tokens,
            },
        );
        let logprob = sequence.sampling.logprobs.map(|top| logprob(logits, token, top));
        self.roster.drawn(chunk.id, token, logprob, events);
    }
}

impl Engine for Builtin {
    fn shape(&self) -> &KvShape {
        &self.shape
    }

    fn model(&self) -> &ModelCard {
        self.roster.model()
    }

    fn start(&mut self, sequence: Sequence) -> Result<(), StartError> {
        self.roster.admits(&sequence)?;
        self.roster.start(sequence, ());
        Ok(())
    }

    fn extend(&mut self, id: SequenceId, blocks: &[u32]) {
        self.roster.extend(id, blocks);
    }

    fn stop(&mut self, id: SequenceId) {
        self.roster.stop(id);
    }

    fn set_step_target(&mut self, target: Option<StepTarget>) {
        self.roster.set_step_target(target);
    }

    fn step(&mut self, events: &mut Vec<Event>, sink: &mut dyn KvSink) -> bool {
        let chunks = self.roster.plan(events);
        if chunks.is_empty() {
            return false;
        }
        self.compute(&chunks, sink);
        let wants = self.wants(&chunks);
        for chunk in chunks.iter().filter(|chunk| !chunk.draws) {
            self.roster.computed(chunk, events);
        }
        let mut logits = std::mem::take(&mut self.logits);
        for wants in wants.chunks(LOGIT_ROWS) {
            let rows: Vec<usize> = wants.iter().map(|(row, ..)| *row).collect();
            self.forward.logits(&rows, &mut logits);
            let width = self.forward.weights.head().outputs();
            for ((_, n, want), logits) in wants.iter().zip(logits.chunks_exact(width)) {
                match want {
                    Want::Draw => self.draw(&chunks[*n], logits, events),
                    Want::Prompt(next) => {
                        let entry = self.roster.entry_mut(chunks[*n].id);
                        let top = entry.sequence.sampling.prompt_logprobs.unwrap_or(0);
                        entry.prompt_logprobs.push(logprob(logits, entry.sequence.tokens[*next], top));
                    }
                }
            }
        }
        self.logits = logits;
        self.roster.starve(events);
        true
    }

    fn kv(&self) -> &KvPool {
        &self.pool.kv
    }

    fn kv_mut(&mut self) -> &mut KvPool {
        &mut self.pool.kv
    }

    fn load(&self) -> (u32, u32) {
        self.roster.load()
    }
}
