//! The fast encoder against the reference, over vocabularies of the kinds that models have.

use std::path::Path;

use serde_json::{Value, json};
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, TokenizerBuilder};

use super::*;

/// Texts over all vocabularies together.
const TEXTS: u64 = 100_000;
/// How GPT-4 and Llama 3 cut text into words: published with their vocabularies.
const WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A vocabulary of 4,000 byte-level tokens, learnt from Baton's own documents.
fn learnt() -> Value {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let mut files: Vec<_> = std::fs::read_dir(docs).unwrap().map(|file| file.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|kind| kind == "md"));
    files.sort();
    let texts: Vec<String> = files.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect();
    assert!(texts.len() > 5, "{files:?}");
    let mut trainer = BpeTrainer::builder()
        .vocab_size(4_000)
        .show_progress(false)
        .special_tokens(["<|begin|>", "<|end|>", "<|turn|>"].map(|text| AddedToken::from(text, true)).into())
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    let mut tokenizer = TokenizerBuilder::<
        BPE,
        tokenizers::NormalizerWrapper,
        ByteLevel,
        tokenizers::PostProcessorWrapper,
        ByteLevel,
    >::new()
    .with_model(BPE::default())
    .with_pre_tokenizer(Some(ByteLevel::new(false, true, true)))
    .with_decoder(Some(ByteLevel::default()))
    .build()
    .unwrap();
    tokenizer.train(&mut trainer, texts.iter().map(String::as_str)).unwrap();
    serde_json::from_str(&tokenizer.to_string(false).unwrap()).unwrap()
}

fn byte_level(use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
}

fn split(words: &str) -> Value {
    let split =
        json!({"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": false});
    json!({"type": "Sequence", "pretokenizers": [split, byte_level(false)]})
}

/// One vocabulary in the forms in which models of several families use theirs.
fn kinds() -> Vec<(&'static str, Value)> {
    let learnt = learnt();
    let with = |normalizer: Value, pre: Value, ignore_merges: bool| {
        let mut json = learnt.clone();
        json["normalizer"] = normalizer;
        json["pre_tokenizer"] = pre;
        json["model"]["ignore_merges"] = json!(ignore_merges);
        json
    };
    let mut pieces = with(
        json!({"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u{2581}"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}]}),
        Value::Null,
        false,
    );
    sentence_pieces(&mut pieces);
    vec![
        ("as GPT-2 cuts words", with(Value::Null, byte_level(true), false)),
        ("as Llama 3 does", with(Value::Null, split(WORDS), true)),
        ("as Qwen does", with(json!({"type": "NFC"}), split(&WORDS.replace("{1,3}", "")), false)),
        ("pieces of sentences, bytes for the rest", pieces),
    ]
}

/// Writes the byte-level vocabulary as SentencePiece's would be: `▁` for a space, `<0x41>` for bytes alone.
fn sentence_pieces(json: &mut Value) {
    let plain = |token: &str| {
        let told: Vec<char> = token.chars().map(|c| if c == 'Ġ' { '\u{2581}' } else { c }).collect();
        let ascii = told.iter().all(|&c| c == '\u{2581}' || c.is_ascii_graphic());
        ascii.then(|| told.into_iter().collect::<String>())
    };
    let vocab: Vec<(String, u64)> = {
        let all = json["model"]["vocab"].as_object().unwrap();
        let mut all: Vec<_> = all.iter().map(|(text, id)| (text.clone(), id.as_u64().unwrap())).collect();
        all.sort_by_key(|(_, id)| *id);
        all
    };
    let mut ids = serde_json::Map::new();
    let mut add = |text: String| {
        let id = ids.len();
        ids.entry(text).or_insert_with(|| json!(id));
    };
    json["added_tokens"]
        .as_array()
        .unwrap()
        .iter()
        .for_each(|t| add(t["content"].as_str().unwrap().to_owned()));
    (0..=255).for_each(|byte: u8| add(format!("<0x{byte:02X}>")));
    vocab.iter().filter_map(|(text, _)| plain(text)).for_each(add);
    let known = |text: &Value| plain(text.as_str().unwrap()).filter(|text| ids.contains_key(text));
    let merges: Vec<Value> = json["model"]["merges"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|merge| {
            let (left, right) = (known(&merge[0])?, known(&merge[1])?);
            ids.contains_key(&format!("{left}{right}")).then(|| json!([left, right]))
        })
        .collect();
    json["model"]["vocab"] = Value::Object(ids);
    json["model"]["merges"] = Value::Array(merges);
    json["model"]["byte_fallback"] = json!(true);
    json["model"]["fuse_unk"] = json!(true);
    json["decoder"] = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]});
}

fn encoder(json: &Value) -> Encoder {
    let bytes = json.to_string().into_bytes();
    let reference = Tokenizer::from_bytes(&bytes).unwrap_or_else(|e| panic!("{e}"));
    Encoder::new(reference, &bytes, Path::new("tokenizer.json"))
}

/// A text of a few pieces of every sort.
fn text(rng: &mut Rng) -> String {
    const RUNS: [&str; 12] = [" ", "\n", "\t", "\r\n", "a", "0", "=", "é", "日", "👍", "\u{301}", "'"];
    const WORDS: [&str; 12] = [
        "the",
        " scheduler",
        "KV",
        " cache",
        "Prefill",
        "don't",
        " we'll",
        "12345",
        "<|turn|>",
        "<|end|>",
        "<|",
        "(x)",
    ];
    let mut text = String::new();
    for _ in 0..=rng.below(8) {
        match rng.below(5) {
            0 => text.push_str(&RUNS[rng.below(12) as usize].repeat(1 + rng.below(6) as usize)),
            1 => text.push_str(WORDS[rng.below(12) as usize]),
            2 => text.push_str(EDGES[rng.below(24) as usize].split(' ').next().unwrap_or_default()),
            3 => text.extend(char::from_u32(rng.below(0x3000) as u32)),
            _ => text.extend((0..rng.below(4)).filter_map(|_| char::from_u32(rng.below(0x11_0000) as u32))),
        }
    }
    // Most texts are short, and concentrate on the pieces on which two encoders may differ.
    text
}

#[test]
fn the_fast_encoder_has_the_ids_of_the_reference() {
    let kinds = kinds();
    for (at, (kind, json)) in kinds.iter().enumerate() {
        let encoder = encoder(json);
        assert!(encoder.is_fast(), "{kind}");
        let mut rng = Rng::new(at as u64);
        for _ in 0..TEXTS / kinds.len() as u64 {
            let text = text(&mut rng);
            assert_eq!(encoder.encode(&text), reference_ids(encoder.reference(), &text), "{kind}: {text:?}");
        }
        for run in ["a", " ", "\n", "é", "0", "日", "ab c"] {
            let text = run.repeat(20_000);
            assert_eq!(encoder.encode(&text), reference_ids(encoder.reference(), &text), "{kind}: {run:?}");
        }
    }
}

#[test]
fn a_vocabulary_that_the_fast_encoder_reads_otherwise_is_left_to_the_reference() {
    let (_, json) = kinds().swap_remove(1);
    let bytes = json.to_string().into_bytes();
    let reference = Tokenizer::from_bytes(&bytes).unwrap();
    assert_eq!(agrees(&reference, &fast(&bytes).unwrap()), Ok(()));
    // The vocabulary without its last merges: few texts show the difference.
    let mut other = json;
    let merges = other["model"]["merges"].as_array_mut().unwrap();
    merges.truncate(merges.len() - 50);
    let other = fast(other.to_string().as_bytes()).unwrap();
    assert!(agrees(&reference, &other).is_err_and(|why| why.contains("ids differ")));
    assert!(fast(b"{}").is_err());
}
