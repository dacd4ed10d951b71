//! The KV of a model by its `config.json`: what no request can measure.

use std::path::Path;

use anyhow::{Context as _, Result, anyhow};
use serde_json::Value;

/// Layers, and the KV of a token over all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvFacts {
    /// Transformer layers.
    pub layers: u32,
    /// Bytes of KV for one token.
    pub kv_bytes_per_token: u64,
}

/// Reads a Hugging Face folder: keys and values of every layer in the weights' type, or the compressed KV of
/// multi-head latent attention.
///
/// # Errors
/// Names the file, and the field that is missing.
pub fn read(folder: &Path) -> Result<KvFacts> {
    let path = folder.join("config.json");
    let named = || path.display().to_string();
    let text = std::fs::read_to_string(&path).with_context(named)?;
    let json: Value = serde_json::from_str(&text).with_context(named)?;
    facts(&json).map_err(|field| {
        anyhow!("{}: no usable {field}; give --layers and --kv-bytes-per-token", path.display())
    })
}

fn facts(json: &Value) -> Result<KvFacts, &'static str> {
    // Models that also take pictures have their text part apart.
    let text = if json["text_config"].is_object() { &json["text_config"] } else { json };
    let count = |name: &'static str| text[name].as_u64().filter(|n| (1..=1 << 24).contains(n)).ok_or(name);
    let layers = count("num_hidden_layers")?;
    let kind = ["torch_dtype", "dtype"].iter().find_map(|name| text[name].as_str().or(json[name].as_str()));
    let bytes = match kind {
        Some("float32") => 4,
        Some("float16" | "bfloat16") | None => 2,
        Some(_) => return Err("torch_dtype"),
    };
    let numbers = match count("kv_lora_rank") {
        Ok(rank) => rank + count("qk_rope_head_dim")?,
        Err(_) => {
            let heads = count("num_attention_heads")?;
            let width = count("head_dim").or_else(|_| count("hidden_size").map(|all| all / heads))?;
            2 * count("num_key_value_heads").unwrap_or(heads) * width
        }
    };
    let layers = u32::try_from(layers).expect("bounded above");
    Ok(KvFacts { layers, kv_bytes_per_token: u64::from(layers) * numbers * bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn kv_follows_from_the_shape() {
        let llama = json!({"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
            "hidden_size": 8192, "torch_dtype": "bfloat16"});
        assert_eq!(facts(&llama), Ok(KvFacts { layers: 80, kv_bytes_per_token: 327_680 }));
        let latent = json!({"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64});
        assert_eq!(facts(&latent).unwrap().kv_bytes_per_token, 61 * 576 * 2);
        let inside = json!({"text_config": {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}, "dtype": "float32"});
        assert_eq!(facts(&inside).unwrap().kv_bytes_per_token, 2 * 2 * 4 * 8 * 4);
        assert_eq!(facts(&json!({"num_hidden_layers": 2})), Err("num_attention_heads"));
        assert_eq!(facts(&json!({})), Err("num_hidden_layers"));
    }

    #[test]
    fn a_folder_without_a_configuration_is_named() {
        assert!(read(Path::new("nowhere")).unwrap_err().to_string().contains("nowhere/config.json"));
    }
}
