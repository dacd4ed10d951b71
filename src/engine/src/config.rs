//! The shape of a Llama-architecture model, read from `config.json`.

use serde_json::Value;

use crate::BuildError;
use crate::attention::Heads;
use crate::rotary::Scaling;

/// The shape of a model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ModelConfig {
    /// Number of layers.
    pub(crate) layers: usize,
    /// Width of the residual stream.
    pub(crate) dim: usize,
    /// Query heads.
    pub(crate) heads: usize,
    /// Key and value heads.
    pub(crate) kv_heads: usize,
    /// Numbers in a head.
    pub(crate) head_dim: usize,
    /// Width of the feed-forward part.
    pub(crate) ffn_dim: usize,
    /// Tokens in the vocabulary.
    pub(crate) vocab_tokens: usize,
    /// Longest text, tokens.
    pub(crate) max_model_tokens: u32,
    /// Added to the mean square in norms.
    pub(crate) epsilon: f32,
    /// Base of the rotary frequencies.
    pub(crate) theta: f64,
    /// Scaling of the rotary frequencies.
    pub(crate) scaling: Scaling,
    /// Whether the output matrix is the embedding.
    pub(crate) tied: bool,
}

impl ModelConfig {
    /// The heads.
    pub(crate) fn heads(&self) -> Heads {
        Heads { queries: self.heads, kv: self.kv_heads, dim: self.head_dim }
    }

    /// Checks that the numbers fit together.
    ///
    /// # Errors
    /// Names the rule that is broken.
    pub(crate) fn validate(&self) -> Result<(), BuildError> {
        let rules = [
            (self.layers == 0, "it has no layers"),
            (self.dim == 0 || self.ffn_dim == 0, "a width is 0"),
            (self.heads == 0 || self.kv_heads == 0, "it has no heads"),
            (
                self.kv_heads > 0 && !self.heads.is_multiple_of(self.kv_heads),
                "heads are no multiple of kv heads",
            ),
            (self.head_dim == 0 || !self.head_dim.is_multiple_of(2), "the head dimension is 0 or odd"),
            (self.vocab_tokens < 2, "its vocabulary has fewer than 2 tokens"),
            (self.max_model_tokens < 2, "it has room for fewer than 2 tokens"),
            (!(self.epsilon.is_finite() && self.epsilon >= 0.0), "the norm's epsilon is not a small number"),
            (!(self.theta.is_finite() && self.theta > 0.0), "the rotary base is not positive"),
        ];
        match rules.iter().find(|(broken, _)| *broken) {
            Some((_, rule)) => Err(BuildError(format!("model shape: {rule}; correct its configuration"))),
            None => Ok(()),
        }
    }

    /// Reads a Hugging Face `config.json`.
    ///
    /// # Errors
    /// Names the field that is missing, or that asks for what this engine does not do.
    pub(crate) fn read(json: &Value) -> Result<Self, BuildError> {
        supported(json)?;
        let count = |key: &str| {
            let number = json[key].as_u64().and_then(|n| usize::try_from(n).ok());
            number.filter(|n| *n <= MOST).ok_or_else(|| wrong(key, "must be a whole number"))
        };
        let (dim, heads) = (count("hidden_size")?, count("num_attention_heads")?);
        let or = |key: &str, default: usize| if json[key].is_null() { Ok(default) } else { count(key) };
        let config = Self {
            layers: count("num_hidden_layers")?,
            dim,
            heads,
            kv_heads: or("num_key_value_heads", heads)?,
            head_dim: or("head_dim", dim / heads.max(1))?,
            ffn_dim: count("intermediate_size")?,
            vocab_tokens: count("vocab_size")?,
            max_model_tokens: u32::try_from(or("max_position_embeddings", 2048)?).unwrap_or(u32::MAX),
            epsilon: number(json, "rms_norm_eps", Some(1e-6))? as f32,
            theta: theta(json)?,
            scaling: scaling(json)?,
            tied: json["tie_word_embeddings"].as_bool().unwrap_or(false),
        };
        config.validate()?;
        Ok(config)
    }
}

/// Above this a count is a mistake, and products of two counts could overflow.
const MOST: usize = 1 << 24;

fn wrong(key: &str, rule: &str) -> BuildError {
    BuildError(format!("config.json: {key} {rule}"))
}

/// A number, or `default` where the field is missing.
fn number(json: &Value, key: &str, default: Option<f64>) -> Result<f64, BuildError> {
    match &json[key] {
        Value::Null => default.ok_or_else(|| wrong(key, "is missing")),
        value => value.as_f64().ok_or_else(|| wrong(key, "must be a number")),
    }
}

/// Refuses what would be computed wrongly.
fn supported(json: &Value) -> Result<(), BuildError> {
    let names = json["architectures"].as_array().into_iter().flatten();
    let mut names = names.filter_map(Value::as_str).peekable();
    if names.peek().is_some() && !names.any(|name| name == "LlamaForCausalLM") {
        return Err(wrong("architectures", "must name LlamaForCausalLM, the only one supported"));
    }
    let kind = json["model_type"].as_str().unwrap_or("llama");
    if kind != "llama" {
        return Err(wrong("model_type", &format!("is {kind}; only llama is supported")));
    }
    for key in ["attention_bias", "mlp_bias"] {
        if json[key].as_bool() == Some(true) {
            return Err(wrong(key, "is true; checkpoints with biases are not supported"));
        }
    }
    let activation = json["hidden_act"].as_str().unwrap_or("silu");
    if activation != "silu" {
        return Err(wrong("hidden_act", &format!("is {activation}; only silu is supported")));
    }
    if !json["quantization_config"].is_null() {
        return Err(wrong("quantization_config", "is set; only f32, f16 and bf16 weights are supported"));
    }
    Ok(())
}

/// Where the rotary settings are: newer checkpoints keep them together under `rope_parameters`.
fn rotary(json: &Value) -> &Value {
    let older = &json["rope_scaling"];
    let says_nothing = older.is_null() || older.as_object().is_some_and(serde_json::Map::is_empty);
    if says_nothing { &json["rope_parameters"] } else { older }
}

/// The base of the rotary frequencies. Readers differ about which of two to take: two that differ are refused.
fn theta(json: &Value) -> Result<f64, BuildError> {
    let (inside, beside) = (&rotary(json)["rope_theta"], &json["rope_theta"]);
    if !inside.is_null() && !beside.is_null() && inside != beside {
        let why = format!("is {beside}, and {inside} among the rotary settings; leave one of them out");
        return Err(wrong("rope_theta", &why));
    }
    let place = if inside.is_null() { json } else { rotary(json) };
    number(place, "rope_theta", Some(10_000.0))
}

fn scaling(json: &Value) -> Result<Scaling, BuildError> {
    let place = rotary(json);
    let kind = place["rope_type"].as_str().or_else(|| place["type"].as_str()).unwrap_or("default");
    let factor = || match number(place, "factor", None)? {
        factor if factor.is_finite() && factor > 0.0 => Ok(factor),
        _ => Err(wrong("rope_scaling.factor", "must be above 0")),
    };
    match kind {
        "default" => Ok(Scaling::None),
        "linear" => Ok(Scaling::Linear { factor: factor()? }),
        "llama3" => {
            let (low, high) =
                (number(place, "low_freq_factor", None)?, number(place, "high_freq_factor", None)?);
            if low >= high {
                return Err(wrong("rope_scaling", "needs low_freq_factor below high_freq_factor"));
            }
            let original_tokens = number(place, "original_max_position_embeddings", None)?;
            Ok(Scaling::Llama3 { factor: factor()?, low, high, original_tokens })
        }
        other => {
            Err(wrong("rope_scaling", &format!("is {other}; only default, linear and llama3 are supported")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn plain() -> Value {
        json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_attention_heads": 2,
               "num_hidden_layers": 1, "intermediate_size": 16, "vocab_size": 32, "rms_norm_eps": 1e-5})
    }

    #[test]
    fn what_is_left_out_has_the_usual_values() {
        let config = ModelConfig::read(&plain()).unwrap();
        assert_eq!((config.kv_heads, config.head_dim, config.max_model_tokens), (2, 4, 2048));
        assert_eq!((config.theta, config.scaling, config.tied), (10_000.0, Scaling::None, false));
    }

    #[test]
    fn rotary_settings_are_found_in_both_places() {
        let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_theta": 5e5});
        let mut json = plain();
        json["rope_parameters"] = llama3.clone();
        let newer = ModelConfig::read(&json).unwrap();
        let mut json = plain();
        json["rope_scaling"] = llama3;
        json["rope_theta"] = json!(5e5);
        assert_eq!(newer, ModelConfig::read(&json).unwrap());
        assert_eq!(newer.theta, 5e5);
        assert!(matches!(newer.scaling, Scaling::Llama3 { .. }));
        json["rope_scaling"] = json!({"type": "linear", "factor": 2});
        assert_eq!(ModelConfig::read(&json).unwrap().scaling, Scaling::Linear { factor: 2.0 });
    }

    #[test]
    fn rotary_settings_that_readers_take_differently_are_read_as_the_newest_or_refused() {
        let mut json = plain();
        json["rope_scaling"] = json!({"rope_type": "linear", "factor": 2, "rope_theta": 7e4});
        assert_eq!(ModelConfig::read(&json).unwrap().theta, 7e4, "the one inside");
        json["rope_theta"] = json!(1e4);
        assert!(ModelConfig::read(&json).unwrap_err().0.contains("rope_theta"));
        let mut json = plain();
        json["rope_scaling"] = json!({});
        json["rope_parameters"] = json!({"rope_type": "linear", "factor": 4, "rope_theta": 5e5});
        let config = ModelConfig::read(&json).unwrap();
        assert_eq!((config.theta, config.scaling), (5e5, Scaling::Linear { factor: 4.0 }));
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let cases = [
            ("architectures", json!(["MixtralForCausalLM"])),
            ("model_type", json!("qwen2")),
            ("attention_bias", json!(true)),
            ("mlp_bias", json!(true)),
            ("hidden_act", json!("gelu")),
            ("quantization_config", json!({"bits": 4})),
            ("rope_scaling", json!({"rope_type": "yarn", "factor": 2})),
            ("factor", json!(null)),
            ("hidden_size", json!("wide")),
            ("vocab_size", json!(null)),
            ("rms_norm_eps", json!("small")),
            ("num_attention_heads", json!(u64::MAX)),
        ];
        for (key, value) in cases {
            let mut json = plain();
            json["rope_scaling"] = json!({"rope_type": "linear", "factor": 2});
            if key == "factor" {
                json["rope_scaling"]["factor"] = value;
            } else {
                json[key] = value;
            }
            let error = ModelConfig::read(&json).unwrap_err().0;
            assert!(error.contains(key), "{key}: {error}");
        }
        let mut json = plain();
        json["num_key_value_heads"] = json!(3);
        assert!(ModelConfig::read(&json).unwrap_err().0.contains("multiple"));
    }
}
