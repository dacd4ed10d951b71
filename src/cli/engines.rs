//! Which engine the nodes run, from the command line; the same words for `up` and `node`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Error, Result, bail};
use baton_engine::{PoolSpec, SeededSpec, TimedSpec};
use baton_remote::{Dialect, Sample};
use baton_router::Tokenization;
use baton_types::CostProfile;

use crate::node::EngineChoice;

/// Prompt tokens of a pass where nothing is said: small, for a processor computes them.
const PASS_TOKENS: u32 = 512;

/// Requests at a time where nothing is said.
const MAX_RUNNING: u32 = 64;

/// In place of a folder: a token for each byte, as stand-ins of servers have it.
const BYTES: &str = "bytes";

/// The properties of the tokens, from a model's folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vocabulary {
    /// Number of tokens.
    pub tokens: u32,
    /// Tokens that end an answer.
    pub ends: Vec<u32>,
    /// Texts, with the tokens that they have.
    pub sample: Arc<Sample>,
}

/// How prompts become tokens, as a model's folder has it.
///
/// # Errors
/// Names the file of the folder that cannot be read.
pub fn tokenization_in(folder: &Path) -> Result<Tokenization> {
    if folder == Path::new(BYTES) {
        return Ok(Tokenization::bytes());
    }
    Tokenization::folder(folder).context("tokenizer")
}

/// The properties of the tokens that nodes need.
///
/// # Errors
/// When a text cannot be tokenised.
pub fn vocabulary_of(read: &Tokenization) -> Result<Vocabulary> {
    let baton_router::Sample { text, tokens, messages, chat_tokens } =
        read.sample().map_err(Error::msg).context("tokenizer: its sample")?;
    let sample = Arc::new(Sample { text, tokens, messages: messages.to_owned(), chat_tokens });
    Ok(Vocabulary { tokens: read.vocab_tokens(), ends: read.end_tokens(), sample })
}

/// The error for a server without a tokenizer: its answers would be those to other prompts.
pub fn needs_model(dialect: Dialect) -> String {
    format!(
        "--engine {} needs --model: the Hugging Face folder of the model that the server serves, with tokenizer.json and \
         its chat template (--model {BYTES}: a token for each byte, for stand-ins of servers)",
        dialect.name()
    )
}

/// The engines of nodes.
#[derive(Clone, Debug, clap::Args)]
pub struct Engines {
    /// builtin: a real transformer on the CPU; timed: keeps the time of a cost profile; zero: takes no time;
    /// vllm, sglang, openai (`baton node` only): a server of that kind at --url
    #[arg(long, default_value = "builtin", value_parser = ["builtin", "timed", "zero", "vllm", "sglang", "openai"])]
    engine: String,
    /// Hugging Face folder with the model's weights and tokenizer; timed and zero use only the tokenizer [default: a small
    /// model from a seed; servers need one]
    #[arg(long)]
    model: Option<PathBuf>,
    /// Seed of the small model's weights
    #[arg(long, default_value_t = 1)]
    model_seed: u64,
    /// Cost profile of an engine that is not measured at its start: a shipped one's name or a file
    #[arg(long, default_value = "llama3-70b-8xa100")]
    profile: String,
    /// A timed engine takes this many times what its profile says
    #[arg(long, default_value_t = 1.0)]
    time_scale: f64,
    /// Tokens in a KV block [default: 16; `baton up -c FILE`: the file's scheduler.block_tokens]
    #[arg(long)]
    pub block_tokens: Option<u32>,
    /// KV blocks of each node's pool
    #[arg(long, default_value_t = 2048)]
    blocks: u32,
    /// KV blocks of each node's DRAM tier
    #[arg(long, default_value_t = 4096)]
    pub dram_blocks: u64,
    /// KV blocks of each node's SSD tier; 0 for none
    #[arg(long, default_value_t = 8192)]
    pub ssd_blocks: u64,
    /// Prompt tokens that an engine computes in one pass at most [default: 512; of a server what it says, else 8192]
    #[arg(long)]
    pub pass_tokens: Option<u32>,
    /// Requests that an engine runs at a time at most [default: 64; of a server what it says, else as many as its KV holds]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_running: Option<u32>,
}

impl Engines {
    /// Tokens in a KV block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens.unwrap_or(crate::config::BLOCK_TOKENS)
    }

    /// The engine, as a node builds it.
    ///
    /// # Errors
    /// Names the profile that cannot be read.
    pub fn choice(&self) -> Result<EngineChoice> {
        if let Some(dialect) = self.dialect() {
            bail!(
                "a node of this program cannot be a {} server: `baton node --engine {} --url URL` \
                attaches one that runs",
                dialect.name(),
                self.engine
            );
        }
        let pool = PoolSpec {
            block_tokens: self.block_tokens(),
            blocks: self.blocks,
            pass_tokens: self.pass_tokens.unwrap_or(PASS_TOKENS),
            max_running: self.max_running.unwrap_or(MAX_RUNNING),
            threads: None,
        };
        Ok(match (self.engine.as_str(), &self.model) {
            ("timed", _) => {
                let profile = self.profile()?;
                self.timed(TimedSpec { time_scale: self.time_scale, ..TimedSpec::new(profile) }, pool)?
            }
            ("zero", _) => self.timed(TimedSpec::zero_work(), pool)?,
            (_, Some(folder)) => EngineChoice::Checkpoint { folder: folder.clone(), pool },
            (_, None) => EngineChoice::Seeded {
                spec: SeededSpec { seed: self.model_seed, ..SeededSpec::default() },
                pool,
            },
        })
    }

    /// An engine without weights. It uses only the tokenizer of the model's folder.
    fn timed(&self, spec: TimedSpec, pool: PoolSpec) -> Result<EngineChoice> {
        let vocab_tokens = match &self.model {
            Some(folder) => tokenization_in(folder)?.vocab_tokens(),
            None => spec.vocab_tokens,
        };
        Ok(EngineChoice::Timed { spec: Box::new(TimedSpec { vocab_tokens, ..spec }), pool })
    }

    /// The kind of server that computes, if it is none of this program's engines.
    #[must_use]
    pub fn dialect(&self) -> Option<Dialect> {
        match self.engine.as_str() {
            "vllm" => Some(Dialect::Vllm),
            "sglang" => Some(Dialect::Sglang),
            "openai" => Some(Dialect::Plain),
            _ => None,
        }
    }

    /// The cost profile that was named.
    ///
    /// # Errors
    /// Names the profile that cannot be read.
    pub fn profile(&self) -> Result<CostProfile> {
        Ok(baton_sim::profiles::find(&self.profile)?)
    }

    /// The properties of the tokens of a server of this kind, from the model's folder.
    ///
    /// # Errors
    /// Says that there is none, or names the file of the folder that cannot be read.
    pub fn vocabulary(&self, dialect: Dialect) -> Result<Vocabulary> {
        let folder = self.model.as_ref().with_context(|| needs_model(dialect))?;
        vocabulary_of(&tokenization_in(folder)?)
    }

    /// How prompts become tokens, as the engine's model has it.
    ///
    /// # Errors
    /// Names the file of the folder that cannot be read.
    pub fn tokenization(&self) -> Result<Tokenization> {
        match &self.model {
            Some(folder) if self.dialect().is_none() => tokenization_in(folder),
            _ => Ok(Tokenization::bytes()),
        }
    }

    /// Names the tokens that the engine's own model has, as [`crate::conductor::tokenizer_name`] does; empty where it has
    /// none, or where its folder has weights alone.
    ///
    /// # Errors
    /// Names the file of the folder that cannot be read.
    pub fn tokenizer_name(&self) -> Result<String> {
        match &self.model {
            Some(folder) if self.dialect().is_none() && folder.join("tokenizer.json").exists() => {
                let sample = vocabulary_of(&tokenization_in(folder)?)?.sample;
                Ok(crate::conductor::tokenizer_name(&sample.tokens, sample.chat_tokens.as_deref()))
            }
            _ => Ok(String::new()),
        }
    }

    /// In a few words, for a person.
    #[must_use]
    pub fn words(&self) -> String {
        match (self.engine.as_str(), &self.model) {
            ("timed", _) => format!("a timed engine by {}", self.profile),
            ("zero", _) => "an engine that takes no time".into(),
            ("vllm" | "sglang" | "openai", _) => format!("a server of kind {}", self.engine),
            (_, Some(folder)) => format!("the built-in engine with {}", folder.display()),
            (_, None) => {
                format!("the built-in engine with a small model of random weights (seed {})", self.model_seed)
            }
        }
    }

    /// These options again, for a process that is started.
    #[must_use]
    pub fn arguments(&self) -> Vec<String> {
        let mut words = Vec::new();
        let mut word = |name: &str, value: String| words.push(format!("--{name}={value}"));
        word("engine", self.engine.clone());
        if let Some(folder) = &self.model {
            word("model", folder.display().to_string());
        }
        word("model-seed", self.model_seed.to_string());
        word("profile", self.profile.clone());
        word("time-scale", self.time_scale.to_string());
        word("block-tokens", self.block_tokens().to_string());
        word("blocks", self.blocks.to_string());
        word("dram-blocks", self.dram_blocks.to_string());
        word("ssd-blocks", self.ssd_blocks.to_string());
        if let Some(tokens) = self.pass_tokens {
            word("pass-tokens", tokens.to_string());
        }
        if let Some(most) = self.max_running {
            word("max-running", most.to_string());
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;
    use serde_json::json;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        engines: Engines,
    }

    /// They ignored the folder silently and had one token a byte.
    #[test]
    fn engines_without_weights_have_the_tokens_of_the_folder() {
        let tokenizer = json!({"version": "1.0", "added_tokens": [], "normalizer": null, "truncation": null, "padding": null,
            "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2}, "unk_token": "?"}});
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let path = folder.path().to_str().unwrap();
        for engine in ["timed", "zero"] {
            let line = |model: &[&str]| {
                Line::parse_from([&["baton", "--engine", engine][..], model].concat()).engines
            };
            let tokens = |engines: &Engines| match engines.choice().unwrap() {
                EngineChoice::Timed { spec, .. } => {
                    (spec.vocab_tokens, engines.tokenization().unwrap().vocab_tokens())
                }
                other => panic!("{other:?}"),
            };
            let (bytes, words) = (line(&[]), line(&["--model", path]));
            assert_eq!((tokens(&bytes), tokens(&words)), ((512, 512), (3, 3)), "{engine}");
            assert_eq!(bytes.tokenizer_name().unwrap(), "");
            assert_ne!(words.tokenizer_name().unwrap(), "");
            assert!(
                line(&["--model", "nowhere"])
                    .choice()
                    .is_err_and(|why| format!("{why:#}").contains("nowhere"))
            );
        }
    }
}
