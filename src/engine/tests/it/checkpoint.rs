//! Hugging Face folders, and the numbers of what is loaded from them against the reference.

use std::collections::BTreeMap;
use std::path::Path;

use baton_engine::{Builtin, Engine, PoolSpec, SequenceId};
use baton_types::{Rng, Sampling};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::play::{play, pool, sequence, text};
use crate::reference::{Shape, Stretch, Tensors, logits};

const SHAPE: Shape = Shape {
    layers: 3,
    dim: 24,
    heads: 6,
    kv_heads: 2,
    head_dim: 10,
    ffn_dim: 300,
    vocab: 77,
    theta: 500.0,
    stretch: Stretch::Linear(2.0),
};

fn config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": SHAPE.dim,
        "num_attention_heads": SHAPE.heads, "num_key_value_heads": SHAPE.kv_heads, "head_dim": SHAPE.head_dim,
        "num_hidden_layers": SHAPE.layers, "intermediate_size": SHAPE.ffn_dim, "vocab_size": SHAPE.vocab,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": SHAPE.theta,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "eos_token_id": 3,
        "tie_word_embeddings": false,
    })
}

/// Names and shapes of all tensors.
fn shapes() -> Vec<(String, Vec<usize>)> {
    let (q, kv) = (SHAPE.heads * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim);
    let mut all = vec![
        ("model.embed_tokens.weight".to_owned(), vec![SHAPE.vocab, SHAPE.dim]),
        ("model.norm.weight".to_owned(), vec![SHAPE.dim]),
        ("lm_head.weight".to_owned(), vec![SHAPE.vocab, SHAPE.dim]),
    ];
    let parts = [
        ("input_layernorm", vec![SHAPE.dim]),
        ("self_attn.q_proj", vec![q, SHAPE.dim]),
        ("self_attn.k_proj", vec![kv, SHAPE.dim]),
        ("self_attn.v_proj", vec![kv, SHAPE.dim]),
        ("self_attn.o_proj", vec![SHAPE.dim, q]),
        ("post_attention_layernorm", vec![SHAPE.dim]),
        ("mlp.gate_proj", vec![SHAPE.ffn_dim, SHAPE.dim]),
        ("mlp.up_proj", vec![SHAPE.ffn_dim, SHAPE.dim]),
        ("mlp.down_proj", vec![SHAPE.dim, SHAPE.ffn_dim]),
    ];
    for n in 0..SHAPE.layers {
        let named =
            |(part, shape): &(&str, Vec<usize>)| (format!("model.layers.{n}.{part}.weight"), shape.clone());
        all.extend(parts.iter().map(named));
    }
    all
}

/// Random tensors whose numbers all three types hold exactly.
fn tensors(seed: u64) -> Tensors {
    let mut rng = Rng::new(seed);
    let number = |rng: &mut Rng, at: f32| at + (rng.below(129) as f32 - 64.0) / 128.0;
    shapes()
        .into_iter()
        .map(|(name, shape)| {
            let at = if shape.len() == 1 { 1.0 } else { 0.0 };
            let scale = if shape.len() == 1 { 1.0 } else { 0.5 };
            let count = shape.iter().product();
            (name, (0..count).map(|_| number(&mut rng, at) * scale).collect())
        })
        .collect()
}

fn encode(numbers: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F16 => numbers.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect(),
        Dtype::BF16 => numbers.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect(),
        _ => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

/// Writes one file of the tensors whose names `keep`.
fn write_file(at: &Path, tensors: &Tensors, dtype: Dtype, keep: impl Fn(&str) -> bool) {
    let shapes: BTreeMap<_, _> = shapes().into_iter().collect();
    let bytes: Vec<(&String, Vec<u8>)> = tensors
        .iter()
        .filter(|(name, _)| keep(name))
        .map(|(name, numbers)| (name, encode(numbers, dtype)))
        .collect();
    let views = bytes
        .iter()
        .map(|(name, bytes)| (*name, TensorView::new(dtype, shapes[*name].clone(), bytes).unwrap()));
    std::fs::write(at, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn folder(config: &Value, tensors: &Tensors, dtype: Dtype) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    write_file(&folder.path().join("model.safetensors"), tensors, dtype, |_| true);
    folder
}

fn load(folder: &TempDir) -> Result<Builtin, String> {
    Builtin::load(folder.path(), pool(7)).map_err(|e| e.to_string())
}

/// Compares logits after some lengths of a random text.
fn compare(shape: &Shape, config: &Value, tensors: &Tensors, seed: u64) {
    let mut engine = load(&folder(config, tensors, Dtype::F32)).unwrap();
    let tokens: Vec<u32> = text(&mut Rng::new(seed), 50).iter().map(|t| t % 77).collect();
    let want = logits(shape, tensors, &tokens);
    for len in [1, 2, 17, 50] {
        let got = engine.logits(&tokens[..len]).unwrap();
        let want = &want[len - 1];
        let spread = want.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        for (token, (got, want)) in got.iter().zip(want).enumerate() {
            let off = (f64::from(*got) - want).abs() / spread;
            assert!(off < 2e-5, "token {token} after {len}: {got}, not {want}");
        }
    }
}

#[test]
fn logits_are_those_of_the_textbook() {
    for (seed, tied) in [(1, false), (2, true), (3, false)] {
        let mut tensors = tensors(seed);
        let mut config = config();
        config["tie_word_embeddings"] = json!(tied);
        if tied {
            tensors.remove("lm_head.weight");
        }
        compare(&SHAPE, &config, &tensors, seed);
    }
}

#[test]
fn stretched_frequencies_are_those_of_the_textbook() {
    // Waves of 6 to 900 tokens: some are kept, some stretched, some between.
    let stretch = Stretch::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 64.0 };
    let mut config = config();
    config["rope_scaling"] = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
    compare(&Shape { stretch, ..SHAPE }, &config, &tensors(9), 9);
}

#[test]
fn logits_are_not_asked_for_beside_sequences() {
    let mut engine = load(&folder(&config(), &tensors(1), Dtype::F32)).unwrap();
    engine.start(sequence(1, vec![1], Sampling::default(), vec![0])).unwrap();
    assert!(engine.logits(&[1]).unwrap_err().0.contains("stop them first"));
    engine.stop(SequenceId(1));
    assert!(engine.logits(&[77]).unwrap_err().0.contains("token 77"));
    assert_eq!(engine.logits(&[1]).unwrap().len(), 77);
}

#[test]
fn logprobs_are_those_of_the_textbook() {
    let tensors = tensors(4);
    let mut engine = load(&folder(&config(), &tensors, Dtype::F32)).unwrap();
    let tokens: Vec<u32> = text(&mut Rng::new(4), 20).iter().map(|t| t % 77).collect();
    let sampling =
        Sampling { prompt_logprobs: Some(0), logprobs: Some(77), max_tokens: 1, ..Sampling::default() };
    engine.start(sequence(1, tokens.clone(), sampling, (0..20).collect())).unwrap();
    let outcome = play(&mut engine).remove(&1).unwrap();
    let want: Vec<Vec<f64>> = logits(&SHAPE, &tensors, &tokens)
        .into_iter()
        .map(|logits| {
            let sum: f64 = logits.iter().map(|x| x.exp()).sum();
            logits.iter().map(|x| x - sum.ln()).collect()
        })
        .collect();
    assert_eq!(outcome.prompt.len(), 19);
    let close = |bits: u32, want: f64| (f64::from(f32::from_bits(bits)) - want).abs() < 1e-4;
    for (n, got) in outcome.prompt.iter().enumerate() {
        assert!(close(got[0], want[n][tokens[n + 1] as usize]), "prompt token {}", n + 1);
    }
    let (_, token, top) = &outcome.answer[0];
    assert!(close(top[0], want[19][*token as usize]));
    let top: Vec<(u32, u32)> = top[1..].chunks(2).map(|pair| (pair[0], pair[1])).collect();
    assert_eq!(top.len(), 77);
    assert!(top.iter().all(|(token, bits)| close(*bits, want[19][*token as usize])));
    assert!(top.windows(2).all(|two| f32::from_bits(two[0].1) >= f32::from_bits(two[1].1)));
}

#[test]
fn all_types_and_shards_give_the_same_model() {
    let tensors = tensors(5);
    let want = load(&folder(&config(), &tensors, Dtype::F32)).unwrap();
    for dtype in [Dtype::F16, Dtype::BF16] {
        let got = load(&folder(&config(), &tensors, dtype)).unwrap();
        assert_eq!(got.model().revision, want.model().revision, "{dtype:?}");
    }
    let parts = folder(&config(), &tensors, Dtype::F32);
    std::fs::remove_file(parts.path().join("model.safetensors")).unwrap();
    let part = |name: &str| if name.contains("layers.1") { "b.safetensors" } else { "a.safetensors" };
    for file in ["a.safetensors", "b.safetensors"] {
        write_file(&parts.path().join(file), &tensors, Dtype::F32, |name| part(name) == file);
    }
    let map: BTreeMap<_, _> = tensors.keys().map(|name| (name.clone(), part(name))).collect();
    let index = json!({"weight_map": map}).to_string();
    std::fs::write(parts.path().join("model.safetensors.index.json"), index).unwrap();
    let got = load(&parts).unwrap();
    assert_eq!(got.model().revision, want.model().revision);
    let other = load(&folder(&config(), &self::tensors(6), Dtype::F32)).unwrap();
    assert_ne!(other.model().revision, want.model().revision);
}

#[test]
fn the_card_says_what_the_folder_says() {
    let folder = folder(&config(), &tensors(7), Dtype::BF16);
    std::fs::write(folder.path().join("generation_config.json"), r#"{"eos_token_id": [3, 5]}"#).unwrap();
    let engine = load(&folder).unwrap();
    let card = engine.model();
    assert_eq!(card.end_tokens, [3, 5]);
    assert_eq!((card.vocab_tokens, card.max_model_tokens), (77, 128));
    assert_eq!(card.name, folder.path().file_name().unwrap().to_string_lossy());
    assert_eq!(engine.shape().block_bytes(), 3 * 2 * 4 * 20 * 4);
}

#[test]
fn what_is_missing_or_misshapen_is_named() {
    let error = |config: &Value, tensors: &Tensors, dtype| load(&folder(config, tensors, dtype)).unwrap_err();
    let tensors = tensors(8);
    let mut less = tensors.clone();
    less.remove("model.layers.2.mlp.up_proj.weight");
    assert!(error(&config(), &less, Dtype::F32).contains("model.layers.2.mlp.up_proj.weight"));
    let mut other = config();
    other["intermediate_size"] = json!(299);
    let told = error(&other, &tensors, Dtype::F32);
    assert!(told.contains("gate_proj") && told.contains("300") && told.contains("299"), "{told}");
    assert!(error(&config(), &tensors, Dtype::I32).contains("I32"));
    let mut biased = config();
    biased["attention_bias"] = json!(true);
    assert!(error(&biased, &tensors, Dtype::F32).contains("attention_bias"));
    let empty = tempfile::tempdir().unwrap();
    let told = load(&empty).unwrap_err();
    assert!(told.contains("config.json") && told.contains("give the folder of a model"), "{told}");
    let broken = folder(&config(), &tensors, Dtype::F32);
    std::fs::write(broken.path().join("model.safetensors"), [1, 2, 3]).unwrap();
    let told = load(&broken).unwrap_err();
    assert!(told.contains("model.safetensors") && told.contains("fetch it again"), "{told}");
    std::fs::remove_file(broken.path().join("model.safetensors")).unwrap();
    assert!(load(&broken).unwrap_err().contains("index.json"));
    let whole = folder(&config(), &tensors, Dtype::F32);
    let none = PoolSpec { blocks: 0, ..pool(1) };
    assert!(Builtin::load(whole.path(), none).unwrap_err().0.contains("blocks"));
}
