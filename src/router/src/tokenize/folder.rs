//! A model folder as Hugging Face lays it out: `tokenizer.json`, `tokenizer_config.json` and the
//! chat template.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use serde::Deserialize;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::{AddedToken, Tokenizer};

use super::LoadError;
use super::encoder::Encoder;
use super::least::longest_token_bytes;
use super::splitter::{Mark, Splitter};
use super::table::TokenTable;
use super::template::{SpecialTexts, Template};

/// Highest token id that a folder may have: bounds the tables.
const MAX_TOKEN: u32 = 4_000_000;

pub(crate) struct Folder {
    pub(crate) encoder: Encoder,
    pub(crate) template: Option<Template>,
    /// Tokens that the tokenizer puts around a text that is not a chat.
    pub(crate) affixes: (Vec<u32>, Vec<u32>),
    pub(crate) vocab_tokens: u32,
    pub(crate) end_token: Option<u32>,
}

/// A folder with what is worked out from it.
pub(crate) struct LoadedFolder {
    pub(crate) folder: Folder,
    pub(crate) table: TokenTable,
    /// Whether text is the table's bytes in a row, so that no decoder is needed.
    pub(crate) table_decodes: bool,
    /// Bytes of text that a token stands for at most, where that is known.
    pub(crate) longest_token_bytes: Option<usize>,
    pub(crate) splitter: Splitter,
}

#[derive(Deserialize, Default)]
struct TokenizerConfig {
    chat_template: Option<ChatTemplates>,
    bos_token: Option<TokenName>,
    eos_token: Option<TokenName>,
    unk_token: Option<TokenName>,
    pad_token: Option<TokenName>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ChatTemplates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TokenName {
    Text(String),
    Token { content: String },
}

impl TokenName {
    fn text(self) -> String {
        match self {
            Self::Text(text) | Self::Token { content: text } => text,
        }
    }
}

pub(crate) fn load(path: &Path) -> Result<LoadedFolder, LoadError> {
    let file = path.join("tokenizer.json");
    let bytes = read(&file)?;
    let mut tokenizer = Tokenizer::from_bytes(&bytes)
        .map_err(|e| LoadError::new(&file, format!("not a tokenizer that can be read: {e}")))?;
    // Neither may cut a prompt short or pad it behind the client's back.
    tokenizer.with_truncation(None).map_err(|e| LoadError::new(&file, e.to_string()))?;
    tokenizer.with_padding(None);
    let config = read_config(&path.join("tokenizer_config.json"))?;
    let end_text = config.eos_token.map(TokenName::text);
    let end_token = end_text.as_deref().and_then(|text| tokenizer.token_to_id(text));
    let texts = SpecialTexts {
        bos: config.bos_token.map(TokenName::text),
        eos: end_text,
        unk: config.unk_token.map(TokenName::text),
        pad: config.pad_token.map(TokenName::text),
    };
    let template = chat_template(path, config.chat_template, texts)?;
    let affixes = affixes(&tokenizer).map_err(|e| LoadError::new(&file, e))?;
    let (table, table_decodes) = table(&tokenizer).map_err(|e| LoadError::new(&file, e))?;
    let longest_token_bytes =
        table_decodes.then(|| longest_token_bytes(&tokenizer, &table, &byte_letters())).flatten();
    let splitter = splitter(&tokenizer);
    let vocab_tokens = u32::try_from(table.len()).expect("bounded by MAX_TOKEN");
    Ok(LoadedFolder {
        folder: Folder {
            encoder: Encoder::new(tokenizer, &bytes, &file),
            template,
            affixes,
            vocab_tokens,
            end_token,
        },
        table,
        table_decodes,
        longest_token_bytes,
        splitter,
    })
}

fn read(file: &Path) -> Result<Vec<u8>, LoadError> {
    std::fs::read(file).map_err(|e| LoadError::new(file, format!("cannot be read: {e}")))
}

fn read_config(file: &Path) -> Result<TokenizerConfig, LoadError> {
    match std::fs::read(file) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|e| LoadError::new(file, e.to_string())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(TokenizerConfig::default()),
        Err(e) => Err(LoadError::new(file, format!("cannot be read: {e}"))),
    }
}

/// A template in its own file goes before the one in the configuration.
fn chat_template(
    path: &Path,
    configured: Option<ChatTemplates>,
    texts: SpecialTexts,
) -> Result<Option<Template>, LoadError> {
    let file = path.join("chat_template.jinja");
    if let Ok(source) = std::fs::read_to_string(&file) {
        return Template::new(source, None, texts).map(Some).map_err(|e| LoadError::new(&file, e));
    }
    let (source, with_tools) = match configured {
        None => return Ok(None),
        Some(ChatTemplates::One(source)) => (source, None),
        Some(ChatTemplates::Named(mut named)) => {
            let mut take = |name: &str| {
                let at = named.iter().position(|one| one.name == name)?;
                Some(named.swap_remove(at).template)
            };
            let with_tools = take("tool_use");
            match (take("default"), with_tools) {
                (Some(source), with_tools) => (source, with_tools),
                (None, Some(source)) => (source, None),
                (None, None) => return Ok(None),
            }
        }
    };
    let file = path.join("tokenizer_config.json");
    Template::new(source, with_tools, texts).map(Some).map_err(|e| LoadError::new(&file, e))
}

fn affixes(tokenizer: &Tokenizer) -> Result<(Vec<u32>, Vec<u32>), String> {
    let ids = |special| {
        tokenizer.encode_fast("a", special).map(|e| e.get_ids().to_vec()).map_err(|e| e.to_string())
    };
    let (bare, add_special_tokens) = (ids(false)?, ids(true)?);
    let at = add_special_tokens.windows(bare.len().max(1)).position(|window| window == bare);
    // A tokenizer that does more than put tokens around the text is taken without them.
    Ok(at
        .map(|at| (add_special_tokens[..at].to_vec(), add_special_tokens[at + bare.len()..].to_vec()))
        .unwrap_or_default())
}

/// Every token's bytes, and whether they in a row are the text.
fn table(tokenizer: &Tokenizer) -> Result<(TokenTable, bool), String> {
    let byte_level = matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_)));
    let alphabet = byte_alphabet();
    let vocabulary = tokenizer.get_vocab(true);
    let highest = vocabulary.values().copied().max().unwrap_or(0);
    if highest > MAX_TOKEN {
        return Err(format!("token id {highest} is above the limit of {MAX_TOKEN}"));
    }
    let mut texts: Vec<Option<&str>> = vec![None; highest as usize + 1];
    for (text, &id) in &vocabulary.iter().collect::<std::collections::BTreeMap<_, _>>() {
        texts[*id as usize] = Some(text);
    }
    let added = tokenizer.get_added_tokens_decoder();
    let entry = |(id, text): (usize, &Option<&str>)| {
        let extra: Option<&AddedToken> = added.get(&(id as u32));
        let text = extra.map_or(text.unwrap_or_default(), |token| token.content.as_str());
        let special = extra.is_some_and(|token| token.special);
        let bytes = if byte_level { byte_level_bytes(text, &alphabet) } else { piece_bytes(text) };
        (Cow::Owned(bytes), special)
    };
    Ok((TokenTable::new(texts.iter().enumerate().map(entry)), byte_level))
}

/// The bytes of a token whose characters stand for bytes, or its own when one of them does not.
fn byte_level_bytes(text: &str, alphabet: &HashMap<char, u8>) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = text.chars().map(|c| alphabet.get(&c).copied()).collect();
    bytes.unwrap_or_else(|| text.as_bytes().to_vec())
}

/// The bytes of a SentencePiece token: `<0x41>` is a byte, and `▁` a space.
fn piece_bytes(text: &str) -> Vec<u8> {
    let byte = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    match byte.filter(|hex| hex.len() == 2).and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => vec![byte],
        None => text.replace('\u{2581}', " ").into_bytes(),
    }
}

/// The printable character that stands for each byte in a byte-level vocabulary: bytes that print
/// stand for themselves, the others follow from U+0100 on.
fn byte_alphabet() -> HashMap<char, u8> {
    let prints = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0x100;
    let mut stands = |byte: u8| {
        if prints(byte) {
            return char::from(byte);
        }
        next += 1;
        char::from_u32(next - 1).expect("68 code points after U+0100 are characters")
    };
    (0..=255).map(|byte| (stands(byte), byte)).collect()
}

fn byte_letters() -> Vec<char> {
    byte_alphabet().into_keys().collect()
}

/// Cuts at special tokens, if parts then tokenise as the whole does.
fn splitter(tokenizer: &Tokenizer) -> Splitter {
    let added: std::collections::BTreeMap<u32, AddedToken> =
        tokenizer.get_added_tokens_decoder().into_iter().collect();
    let mark = |(id, token): (u32, AddedToken)| {
        let cuts = token.special && !token.lstrip && !token.rstrip && !token.single_word;
        Mark { text: token.content, token: id, cuts }
    };
    let marks = added.into_iter().filter(|(_, token)| !token.normalized).map(mark).collect();
    let splitter = Splitter::new(marks);
    if splits_safely(tokenizer, &splitter) { splitter } else { Splitter::default() }
}

fn splits_safely(tokenizer: &Tokenizer, splitter: &Splitter) -> bool {
    let filler =
        "It's  a test,\n\n of what comes before and after: 1234 é. And some more of it, to be long enough. ";
    let mut text = filler.to_owned();
    for mark in splitter.cutting_texts() {
        text.push_str(mark);
        text.push_str(filler);
        text.push_str(mark);
        text.push('\n');
        text.push_str(filler.trim_end());
    }
    let ids = |text: &str| tokenizer.encode_fast(text, false).map(|e| e.get_ids().to_vec()).ok();
    let parts: Option<Vec<Vec<u32>>> =
        splitter.parts(&text).into_iter().map(|part| ids(&text[part])).collect();
    parts.map(|parts| parts.concat()) == ids(&text)
}
