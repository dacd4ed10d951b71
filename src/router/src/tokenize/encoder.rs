//! Text to token ids: by a fast encoder where it agrees with the reference, else by the reference.
//!
//! Hugging Face's `tokenizers` is what engines tokenise with, so its ids are right by definition. `fastokens` gives the
//! same ids many times faster for the byte-pair vocabularies that it knows. Whether it does for the vocabulary at hand
//! is tried at every load, on texts that are made from that vocabulary and on those where encoders differ.

use std::path::Path;

use baton_types::Rng;
use tokenizers::Tokenizer;

/// Texts of the self-check that are made from the vocabulary's own tokens.
const DRAWN_TEXTS: u64 = 200;
/// Tokens in each of them.
const DRAWN_TOKENS: u64 = 24;
/// Special tokens that the self-check writes into texts; more are alike.
const SPECIALS_MAX: usize = 64;

/// Where encoders tend to differ: letters in several forms, marks, scripts without spaces, digits, white space, and
/// characters that do not print.
const EDGES: [&str; 24] = [
    "It's we'LL they'Re I'D 'S 's'' don''t",
    "cafe\u{301} café \u{212b}\u{2126} ﬁ ﬃ ① ² ½ İı ß ẞ ǅ ŉ",
    "\u{1e9b}\u{323} \u{1100}\u{1161}\u{11a8} 각 \u{0344}\u{037e}\u{2000}x",
    "日本語のテキストと漢字、かな。 한국어 文字 ไทย ខ្មែរ မြန်မာ",
    "עברית العربية ١٢٣ हिन्दी १२३ বাংলা \u{200f}x\u{200e}",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 👍🏽 ☎︎ ☎️ 😀😀😀",
    "0 12 123 1234 12345 1,234.56 1e-9 0x1F ٣٤٥ ⅷ ௧௨",
    "\t\ttabs\t \tand  two   three    four spaces",
    "line\nline\r\nline\r\r\n\n\n  \n \n\t\nend",
    "   leading and trailing   ",
    "\u{a0}no\u{a0}break\u{2003}em\u{3000}wide\u{85}next\u{2028}line\u{2029}para",
    "\u{200b}zero\u{200d}width\u{feff}mark\u{ad}soft\u{2060}",
    "\u{0}\u{1}\u{7}\u{8}\u{b}\u{c}\u{1b}[0m\u{7f}\u{80}\u{9f}",
    "\u{fffd}\u{fffe}\u{ffff}\u{10ffff}\u{e000}\u{1d11e}\u{1f9d1}",
    "http://a.b/c?d=e&f#g user@host.tld C:\\x\\y /usr/bin/env",
    "fn main() { let x = &mut [0u8; 16]; x[0] += 1; } // done",
    "{\"a\": [1, 2.5, null], \"b\": \"\\u00e9\\n\"}",
    "snake_case camelCase SCREAMING_CASE kebab-case __init__",
    "...!!! ?!?! --- === *** ### $$$ %%% ((())) [[]] <<>> ~~ ``",
    "a.b,c;d:e!f?g'h\"i(j)k",
    "x\u{300}\u{301}\u{302}\u{303}\u{304}\u{305}\u{306}\u{307}y",
    "ŻÓŁĆ żółć ЖЩЪ жщъ ΑΩ αω Ձ ძ",
    "",
    " ",
];

/// Encodes texts as the reference does.
pub(crate) struct Encoder {
    reference: Tokenizer,
    fast: Option<Box<fastokens::Tokenizer>>,
}

impl Encoder {
    /// An encoder for `reference`, which was read from `json`, the text of `file`. The log says which one it is.
    pub(crate) fn new(reference: Tokenizer, json: &[u8], file: &Path) -> Self {
        let fast = fast(json).and_then(|fast| agrees(&reference, &fast).map(|()| fast));
        match &fast {
            Ok(_) => {
                tracing::info!(file = %file.display(), "tokenizer: fastokens, with the ids of tokenizers")
            }
            Err(why) => tracing::warn!(
                file = %file.display(),
                why,
                "tokenizer: tokenizers, ten times slower or more; fastokens does not read this vocabulary as it does"
            ),
        }
        Self { reference, fast: fast.ok().map(Box::new) }
    }

    /// The reference, for all but encoding.
    pub(crate) const fn reference(&self) -> &Tokenizer {
        &self.reference
    }

    /// The ids of a text, special tokens in it included, none added around it.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        match &self.fast {
            Some(fast) => fast.encode(text).map_err(|e| e.to_string()),
            None => reference_ids(&self.reference, text),
        }
    }

    /// Whether texts are encoded by the fast one.
    pub(crate) const fn is_fast(&self) -> bool {
        self.fast.is_some()
    }
}

fn reference_ids(reference: &Tokenizer, text: &str) -> Result<Vec<u32>, String> {
    reference.encode_fast(text, false).map(|e| e.get_ids().to_vec()).map_err(|e| e.to_string())
}

fn fast(json: &[u8]) -> Result<fastokens::Tokenizer, String> {
    let json = serde_json::from_slice(json).map_err(|e| e.to_string())?;
    let mut fast = fastokens::Tokenizer::from_json(json).map_err(|e| e.to_string())?;
    fast.set_truncation(None);
    fast.set_padding(None);
    Ok(fast)
}

/// Whether both give the same ids for every text of the self-check; else the first on which they differ.
fn agrees(reference: &Tokenizer, fast: &fastokens::Tokenizer) -> Result<(), String> {
    for text in texts(reference) {
        let expected = reference_ids(reference, &text)?;
        let found = fast.encode(&text).map_err(|e| e.to_string())?;
        if found != expected {
            let shown: String = text.chars().take(40).collect();
            return Err(format!("ids differ for {shown:?}"));
        }
    }
    Ok(())
}

/// The texts of the self-check.
fn texts(reference: &Tokenizer) -> Vec<String> {
    let mut texts: Vec<String> = EDGES.iter().map(|&text| text.to_owned()).collect();
    texts.push(EDGES.join(" "));
    texts.push(EDGES.join("\n"));
    // Long runs: a piece that no rule cuts, where a naive merge takes quadratic time and a clever one may go wrong.
    texts.extend(
        ["a", "ab", "0", " ", "\n", "\t ", "=", "é", "日", "👍", "aA1 "].map(|run| run.repeat(3_000)),
    );
    let added: Vec<String> = {
        let by_id: std::collections::BTreeMap<_, _> =
            reference.get_added_tokens_decoder().into_iter().collect();
        by_id.into_values().map(|token| token.content).collect()
    };
    for special in added.iter().take(SPECIALS_MAX) {
        texts.push(format!("before{special}after {special} {special}{special}\n{special}"));
    }
    texts.push(added.iter().take(SPECIALS_MAX).cloned().collect());
    // Tokens of the vocabulary in random order: this tests merges across tokens that no other text brings together.
    let ids = reference.get_vocab_size(true) as u64;
    let mut rng = Rng::new(0x746f_6b65);
    for _ in 0..DRAWN_TEXTS {
        let drawn: Vec<u32> = (0..DRAWN_TOKENS)
            .filter_map(|_| u32::try_from(rng.below(ids.max(1))).ok())
            .filter(|&id| reference.id_to_token(id).is_some())
            .collect();
        texts.extend(reference.decode(&drawn, false).ok());
    }
    texts
}

#[cfg(test)]
mod tests;
