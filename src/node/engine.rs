//! Which engine a node runs, and what its passes cost here: measured at the start, so that the
//! conductor's predictions are about this machine.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use baton_engine::{
    Builtin, Engine, Event, KvPool, KvSink, PoolSpec, SeededSpec, Sequence, SequenceId, TimedEngine,
    TimedSpec,
};
use baton_types::{CostProfile, DecodeCost, FitReport, PrefillCost, Sampling, ValidRange};
use baton_wire::v1;
use parking_lot::Mutex;

use super::error::EngineError;

/// Profiles that this process has measured, by model and pool.
static MEASURED: Mutex<Vec<(String, PoolSpec, CostProfile)>> = Mutex::new(Vec::new());

/// The engine that computes.
#[derive(Clone, Debug)]
pub enum EngineChoice {
    /// The built-in transformer with weights from a seed.
    Seeded {
        /// Its shape and seed.
        spec: SeededSpec,
        /// Its KV pool.
        pool: PoolSpec,
    },
    /// The built-in transformer with a checkpoint's weights.
    Checkpoint {
        /// The Hugging Face folder.
        folder: PathBuf,
        /// Its KV pool.
        pool: PoolSpec,
    },
    /// Keeps time by a profile and computes nothing.
    Timed {
        /// The cost profile and model that it simulates.
        spec: Box<TimedSpec>,
        /// Its KV pool.
        pool: PoolSpec,
    },
}

impl EngineChoice {
    const fn pool(&self) -> &PoolSpec {
        match self {
            Self::Seeded { pool, .. } | Self::Checkpoint { pool, .. } | Self::Timed { pool, .. } => pool,
        }
    }

    /// Prompt tokens of one pass at most.
    #[must_use]
    pub const fn pass_tokens(&self) -> u32 {
        self.pool().pass_tokens
    }

    /// Requests that it runs at a time at most.
    #[must_use]
    pub const fn max_running(&self) -> u32 {
        self.pool().max_running
    }

    /// Rate at which KV leaves and arrives, for predictions, bytes/s: loopback's, conservatively.
    #[must_use]
    pub const fn net_bytes_per_s(&self) -> u64 {
        1_000_000_000
    }

    /// Rate between its DRAM tier and its pool, for predictions, bytes/s.
    #[must_use]
    pub const fn host_bytes_per_s(&self) -> u64 {
        4_000_000_000
    }
}

pub(crate) fn build(choice: &EngineChoice) -> Result<Box<dyn Engine>, EngineError> {
    let engine: Box<dyn Engine> = match choice {
        EngineChoice::Seeded { spec, pool } => Box::new(Builtin::seeded(spec, pool.clone())?),
        EngineChoice::Checkpoint { folder, pool } => Box::new(Builtin::load(folder, pool.clone())?),
        EngineChoice::Timed { spec, pool } => Box::new(TimedEngine::new((**spec).clone(), pool.clone())?),
    };
    Ok(engine)
}

/// Builds the engine and says what its passes cost.
pub(super) fn build_and_calibrate(
    choice: &EngineChoice,
) -> Result<(Box<dyn Engine>, CostProfile), EngineError> {
    let mut engine = build(choice)?;
    let profile = match choice {
        EngineChoice::Timed { spec, .. } => timed_profile(spec, engine.as_ref()),
        _ => {
            // Nodes of one process are alike: the first one measures, undisturbed by the others.
            let revision = engine.model().revision.clone();
            let mut known = MEASURED.lock();
            match known.iter().find(|(of, pool, _)| *of == revision && pool == choice.pool()) {
                Some((_, _, profile)) => profile.clone(),
                None => {
                    let profile = calibrate(engine.as_mut())?;
                    known.push((revision, choice.pool().clone(), profile.clone()));
                    profile
                }
            }
        }
    };
    Ok((engine, profile))
}

/// The costs of moving and keeping KV of `engine` on a node that computes nothing.
pub(super) fn keeping_profile(engine: &dyn Engine) -> CostProfile {
    let shape = engine.shape();
    CostProfile {
        name: "none".into(),
        source: "a node without an engine".into(),
        kv_bytes_per_token: (shape.block_bytes() as u64 / u64::from(shape.block_tokens)).max(1),
        ..TimedSpec::zero_work().profile
    }
}

/// A timed engine costs what its profile says, in the pace that it keeps.
fn timed_profile(spec: &TimedSpec, engine: &dyn Engine) -> CostProfile {
    let mut profile = spec.profile.clone();
    let scale = spec.time_scale;
    let all = |values: &mut Vec<f64>| values.iter_mut().for_each(|v| *v *= scale);
    all(&mut profile.prefill.knots_us);
    all(&mut profile.decode.base_us);
    all(&mut profile.decode.context_ps_per_token);
    profile.prefill.attention_ps_per_pair *= scale;
    profile.shared_us *= scale;
    let shape = engine.shape();
    profile.kv_bytes_per_token = (shape.block_bytes() as u64 / u64::from(shape.block_tokens)).max(1);
    profile
}

struct NullSink;

impl KvSink for NullSink {
    fn layer_computed(&mut self, _: SequenceId, _: u32, _: std::ops::Range<u32>, _: (&[u32], &KvPool)) {}
}

/// Measures a few passes and makes a cost profile of them. Takes a fraction of a second.
///
/// # Errors
/// When the pool is too small for even the shortest pass.
fn calibrate(engine: &mut dyn Engine) -> Result<CostProfile, EngineError> {
    let shape = engine.shape().clone();
    let most = (shape.blocks / 2 * shape.block_tokens).min(engine.model().max_model_tokens / 2).max(2);
    // The first pass pays for cold caches and pages.
    time_prefill(engine, 8.min(most - 1))?;
    let mut knots: Vec<(u32, f64)> = vec![(0, 0.0)];
    for tokens in [1u32, 16, 64, 128, 256] {
        if tokens < most {
            let us = time_prefill(engine, tokens)?;
            let floor = knots.last().map_or(0.0, |k| k.1);
            knots.push((tokens, us.max(floor)));
        }
    }
    let per_pair_ps = attention_ps(&knots);
    // The formula adds attention to the knots: they hold the rest.
    for (tokens, us) in &mut knots {
        *us = (*us - per_pair_ps * f64::from(*tokens) * f64::from(*tokens) / 2e6).max(0.0);
    }
    (1..knots.len()).for_each(|at| knots[at].1 = knots[at].1.max(knots[at - 1].1));
    let (batches, base_us) = decode_costs(engine, most)?;
    let slope = vec![per_pair_ps; batches.len()];
    Ok(CostProfile {
        name: "built-in".into(),
        source: "measured at the node's start".into(),
        kv_bytes_per_token: (shape.block_bytes() as u64 / u64::from(shape.block_tokens)).max(1),
        kv_capacity_tokens: u64::from(shape.blocks) * u64::from(shape.block_tokens),
        layers: shape.layers,
        shared_us: 0.0,
        fit: FitReport::default(),
        valid: ValidRange::default(),
        prefill: PrefillCost {
            knots_tokens: knots.iter().map(|k| k.0).collect(),
            knots_us: knots.iter().map(|k| k.1).collect(),
            attention_ps_per_pair: per_pair_ps,
        },
        decode: DecodeCost { batches, base_us, context_ps_per_token: slope },
    })
}

fn sequence(engine: &dyn Engine, id: u64, tokens: u32, max_tokens: u32) -> Sequence {
    let shape = engine.shape();
    let blocks = (tokens + max_tokens).div_ceil(shape.block_tokens);
    let first = u32::try_from(id).unwrap_or(0) * blocks;
    Sequence {
        id: SequenceId(id),
        tokens: (0..tokens).map(|at| 1 + at % (engine.model().vocab_tokens - 1).clamp(1, 200)).collect(),
        prompt_tokens: tokens,
        computed_tokens: 0,
        blocks: (first..first + blocks).collect(),
        sampling: Arc::new(Sampling {
            temperature: 0.0,
            max_tokens,
            ignore_eos: true,
            ..Sampling::default()
        }),
        leaves: false,
        order: id,
    }
}

fn run_out(engine: &mut dyn Engine) -> f64 {
    let mut events: Vec<Event> = Vec::new();
    let started = Instant::now();
    while engine.step(&mut events, &mut NullSink) {
        events.clear();
    }
    started.elapsed().as_secs_f64() * 1e6
}

fn time_prefill(engine: &mut dyn Engine, tokens: u32) -> Result<f64, EngineError> {
    engine.start(sequence(engine, 0, tokens, 1)).map_err(EngineError::Start)?;
    Ok(run_out(engine))
}

/// The cost of a (query, key) pair, ps: the time of the longest prompt beyond twice the time of its half.
fn attention_ps(knots: &[(u32, f64)]) -> f64 {
    let [.., half, long] = knots else { return 0.0 };
    if long.0 != 2 * half.0 {
        return 0.0;
    }
    let pairs = f64::from(long.0) * f64::from(long.0) / 4.0;
    ((long.1 - 2.0 * half.1).max(0.0) * 1e6 / pairs).min(1e9)
}

fn decode_costs(engine: &mut dyn Engine, most: u32) -> Result<(Vec<u32>, Vec<f64>), EngineError> {
    const STEPS: u32 = 8;
    let (mut batches, mut base_us): (Vec<u32>, Vec<f64>) = (Vec::new(), Vec::new());
    for batch in [1u32, 4, 16] {
        if batch * (STEPS + 1) >= most {
            break;
        }
        for id in 0..u64::from(batch) {
            engine.start(sequence(engine, id, 1, STEPS)).map_err(EngineError::Start)?;
        }
        let step_us = run_out(engine) / f64::from(STEPS);
        base_us.push(step_us.max(base_us.last().copied().unwrap_or(0.0)));
        batches.push(batch);
    }
    if batches.is_empty() {
        return Err(EngineError::Pool(most));
    }
    Ok((batches, base_us))
}

/// The properties that must be equal for two nodes to share KV.
pub(super) fn fingerprint(engine: &dyn Engine) -> v1::Fingerprint {
    let (shape, model) = (engine.shape(), engine.model());
    v1::Fingerprint {
        model: model.name.clone(),
        revision: model.revision.clone(),
        dtype: shape.dtype.into(),
        layers: shape.layers,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        block_tokens: shape.block_tokens,
        block_bytes: shape.block_bytes() as u64,
        vocab_tokens: model.vocab_tokens,
        engine: "baton".into(),
        tokenizer: String::new(),
    }
}

/// The fingerprint as one number, for the transport's handshake.
pub(super) fn digest(print: &v1::Fingerprint) -> u64 {
    let words = format!("{print:?}");
    baton_types::ChainHasher::new(0, words.as_bytes()).parent().short().0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_calibrated_profile_is_valid_and_says_that_more_costs_more() {
        let choice = EngineChoice::Seeded { spec: SeededSpec::default(), pool: PoolSpec::default() };
        let (_, profile) = build_and_calibrate(&choice).unwrap();
        profile.validate().unwrap();
        assert!(profile.prefill_us(256, 0) > profile.prefill_us(16, 0));
        assert!(profile.decode_us(16, 0) >= profile.decode_us(1, 0));
    }
}
