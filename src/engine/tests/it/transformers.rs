//! The built-in engine against Hugging Face transformers: small checkpoints whose weights follow from
//! a formula are made here and by `scripts/transformers_check.py`, which had transformers 5.23.0 on
//! torch 2.15.0 compute what `transformers.json` keeps of their logits and greedy continuations.

use std::collections::BTreeMap;

use baton_engine::{Builtin, Engine};
use baton_types::Sampling;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::play::{blocks_of, play, pool, sequence};

/// Tensors by name: shape, and bytes as stored.
type StoredTensors = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

/// Some ten times what was measured, with the rounding of the kept digits: see `docs/engine.md`.
const TOLERANCE: f64 = 1e-5;

/// The cases of the fixture.
fn cases() -> Vec<Value> {
    let fixture: Value = serde_json::from_str(include_str!("transformers.json")).unwrap();
    let cases = fixture["cases"].as_array().unwrap().clone();
    assert_eq!(cases.len(), 3);
    cases
}

/// The texts of a case, none of them empty.
fn texts(case: &Value) -> &[Value] {
    let texts = case["texts"].as_array().unwrap();
    assert!(texts.len() >= 3);
    texts
}

/// A list of token numbers.
fn tokens(list: &Value) -> Vec<u32> {
    list.as_array().unwrap().iter().map(|n| u32::try_from(n.as_u64().unwrap()).unwrap()).collect()
}

fn fnv(bytes: &[u8]) -> u64 {
    let step = |digest: u64, byte: &u8| (digest ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// The stream of draws with a name: splitmix64 from the name's FNV-1a.
fn draws(name: &str) -> impl Iterator<Item = u64> + use<> {
    let start = fnv(name.as_bytes());
    (1u64..).map(move |n| {
        let z = start.wrapping_add(n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

/// The numbers of a tensor of a case, in double precision and then rounded, as the script has them.
fn numbers(case: &str, name: &str, shape: &[usize]) -> Vec<f32> {
    let units = draws(&format!("{case}/{name}")).map(|draw| (draw >> 40) as f64 / 8_388_608.0 - 1.0);
    let number = |unit: f64| match shape {
        [_] => 1.0 + 0.25 * unit,
        _ if name.contains("embed_tokens") => 0.125 * unit,
        _ => unit * (3.0 / shape[1] as f64).sqrt(),
    };
    units.take(shape.iter().product()).map(|unit| number(unit) as f32).collect()
}

/// Names and shapes of the tensors of a model with this `config.json`.
fn shapes(config: &Value) -> Vec<(String, Vec<usize>)> {
    let count = |key: &str| usize::try_from(config[key].as_u64().unwrap()).unwrap();
    let (dim, ffn, head_dim) = (count("hidden_size"), count("intermediate_size"), count("head_dim"));
    let (q, kv) = (count("num_attention_heads") * head_dim, count("num_key_value_heads") * head_dim);
    let embedding = vec![count("vocab_size"), dim];
    let mut all = vec![
        ("model.embed_tokens.weight".to_owned(), embedding.clone()),
        ("model.norm.weight".to_owned(), vec![dim]),
    ];
    if config["tie_word_embeddings"] == false {
        all.push(("lm_head.weight".to_owned(), embedding));
    }
    let parts = [
        ("input_layernorm", vec![dim]),
        ("post_attention_layernorm", vec![dim]),
        ("self_attn.q_proj", vec![q, dim]),
        ("self_attn.k_proj", vec![kv, dim]),
        ("self_attn.v_proj", vec![kv, dim]),
        ("self_attn.o_proj", vec![dim, q]),
        ("mlp.gate_proj", vec![ffn, dim]),
        ("mlp.up_proj", vec![ffn, dim]),
        ("mlp.down_proj", vec![dim, ffn]),
    ];
    for n in 0..count("num_hidden_layers") {
        let named =
            |(part, shape): &(&str, Vec<usize>)| (format!("model.layers.{n}.{part}.weight"), shape.clone());
        all.extend(parts.iter().map(named));
    }
    all
}

/// The type of a case's weights.
fn dtype(case: &Value) -> Dtype {
    match case["dtype"].as_str().unwrap() {
        "F32" => Dtype::F32,
        "BF16" => Dtype::BF16,
        other => panic!("the fixture has weights in {other}"),
    }
}

/// All tensors of a case.
fn stored(case: &Value) -> StoredTensors {
    let encode = |numbers: Vec<f32>| match dtype(case) {
        Dtype::BF16 => numbers.into_iter().flat_map(|x| half::bf16::from_f32(x).to_le_bytes()).collect(),
        _ => numbers.into_iter().flat_map(f32::to_le_bytes).collect(),
    };
    let of_case = case["name"].as_str().unwrap();
    let tensor = |(name, shape): (String, Vec<usize>)| {
        let bytes: Vec<u8> = encode(numbers(of_case, &name, &shape));
        (name, (shape, bytes))
    };
    shapes(&case["config"]).into_iter().map(tensor).collect()
}

/// A checkpoint folder of the weights of a case, with any `config.json`.
fn folder(case: &Value, config: &Value) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let stored = stored(case);
    let view = |(shape, bytes)| TensorView::new(dtype(case), Vec::clone(shape), bytes).unwrap();
    let views = stored.iter().map(|(name, (shape, bytes))| (name, view((shape, bytes))));
    let file = safetensors::serialize(views, None).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
    folder
}

fn load(case: &Value, config: &Value) -> Builtin {
    Builtin::load(folder(case, config).path(), pool(7)).unwrap()
}

/// The largest difference of the engine's logits from the kept ones, relative to the largest of them.
fn off(engine: &mut Builtin, text: &Value) -> f64 {
    let logits = engine.logits(&tokens(&text["tokens"])).unwrap();
    let want: Vec<f64> = text["logits"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
    assert_eq!(want.len(), 16);
    let got = logits.iter().step_by(logits.len() / want.len());
    let most = want.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    got.zip(&want).fold(0.0, |off, (got, want)| (f64::from(*got) - want).abs().max(off)) / most
}

#[test]
fn weights_are_those_that_transformers_had() {
    for case in cases() {
        let bytes: Vec<u8> = stored(&case).into_values().flat_map(|(_, bytes)| bytes).collect();
        assert_eq!(format!("{:016x}", fnv(&bytes)), case["weights"], "{}", case["name"]);
    }
}

#[test]
fn logits_are_those_of_transformers() {
    for case in cases() {
        let mut engine = load(&case, &case["config"]);
        for text in texts(&case) {
            let off = off(&mut engine, text);
            let len = tokens(&text["tokens"]).len();
            assert!(off < TOLERANCE, "{} after {len} tokens: {off:e}", case["name"]);
        }
    }
}

#[test]
fn greedy_answers_are_those_of_transformers() {
    for case in cases() {
        let mut engine = load(&case, &case["config"]);
        let greedy = Sampling { temperature: 0.0, max_tokens: 32, ignore_eos: true, ..Sampling::default() };
        let mut free = 0..256;
        for (id, text) in (0..).zip(texts(&case)) {
            let prompt = tokens(&text["tokens"]);
            let blocks = free.by_ref().take(blocks_of(prompt.len() + 32)).collect();
            engine.start(sequence(id, prompt, greedy.clone(), blocks)).unwrap();
        }
        let outcomes = play(&mut engine);
        for (id, text) in (0..).zip(texts(&case)) {
            let want = tokens(&text["answer"]);
            assert_eq!(want.len(), 32);
            assert_eq!(outcomes[&id].tokens(), want, "{}, text {id}", case["name"]);
        }
    }
}

#[test]
fn settings_that_are_read_wrongly_would_be_noticed() {
    let changes = [
        ("/rope_parameters/rope_theta", json!(20_000.0)),
        ("/rope_parameters/rope_type", json!("default")),
        ("/rope_parameters/factor", json!(3.0)),
        ("/rope_parameters/low_freq_factor", json!(1.5)),
        ("/rope_parameters/high_freq_factor", json!(3.0)),
        ("/rope_parameters/original_max_position_embeddings", json!(96)),
        ("/rms_norm_eps", json!(1e-2)),
    ];
    let mut tried = 0;
    for case in cases() {
        for (pointer, value) in &changes {
            let mut config = case["config"].clone();
            let Some(place) = config.pointer_mut(pointer).filter(|place| *place != value) else { continue };
            *place = value.clone();
            let mut engine = load(&case, &config);
            let most = texts(&case).iter().fold(0.0, |most: f64, text| most.max(off(&mut engine, text)));
            assert!(most > 100.0 * TOLERANCE, "{} with another {pointer}: {most:e}", case["name"]);
            tried += 1;
        }
    }
    assert_eq!(tried, 2 + 7 + 4);
}

/// Until its version 5 transformers kept the rotary settings in two fields.
#[test]
fn the_older_layout_of_settings_gives_the_same_model() {
    for case in cases() {
        let mut older = case["config"].clone();
        let mut rope = older["rope_parameters"].take();
        older["rope_theta"] = rope["rope_theta"].take();
        older["rope_scaling"] = if rope["rope_type"] == "default" { Value::Null } else { rope };
        let revision = |config: &Value| load(&case, config).model().revision.clone();
        assert_eq!(revision(&older), revision(&case["config"]), "{}", case["name"]);
    }
}
