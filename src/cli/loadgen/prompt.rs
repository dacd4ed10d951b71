//! Prompts of token ids that share prefixes exactly as a trace's block ids do.
//!
//! A block's tokens are a function of its id alone, so equal ids give equal blocks wherever they
//! stand. The first tokens spell the mixed id in the vocabulary's base: as the mixing is one to one,
//! blocks of different ids differ within [`Vocabulary::marked_tokens`] tokens.

use std::sync::Arc;

use anyhow::{Error, Result, ensure};
use baton_router::{Lineage, Tokenization};
use baton_sim::workload::Arrival;
use baton_types::BlockKey;

/// Tokens to build prompts from: ids below a bound, or pieces of text.
#[derive(Clone, Debug)]
pub struct Vocabulary {
    tokens: u32,
    /// One piece for each token if prompts are texts. No piece needs an escape in JSON.
    texts: Option<Arc<[String]>>,
}

/// Pieces of text for a tokenizer with one token a byte.
const LETTERS: &str = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .";
/// Letters in a word. With the space before it a word has about four bytes, like a token of ordinary text.
const WORD_LETTERS: std::ops::RangeInclusive<usize> = 2..=4;

impl Vocabulary {
    /// The ids below `tokens`; an error for fewer than two.
    pub fn new(tokens: u32) -> Result<Self> {
        ensure!(
            tokens >= 2,
            "live: a vocabulary of {tokens} tokens cannot tell blocks apart; give --vocab 2 or more"
        );
        Ok(Self { tokens, texts: None })
    }

    /// Letters: prompts are texts of a byte a token, for servers that take no token ids.
    pub fn letters() -> Self {
        Self::of(LETTERS.chars().map(String::from).collect())
    }

    /// Short words that are one token each for this tokenizer: a prompt is a text with one word for each token.
    ///
    /// # Errors
    /// If the tokenizer has fewer than two such words, or reads a row of them as other tokens.
    pub fn words(tokenization: &Tokenization) -> Result<Self> {
        let lineage = Lineage { seed: 0, root: BlockKey(0), block_tokens: 16 };
        let tokens =
            |text: &str| tokenization.prompt_now(text, false, &lineage).map(|prompt| prompt.tokens.to_vec());
        let word = |id: &u32| {
            let text = tokenization.decode(&[*id], true);
            let letters = text.strip_prefix(' ')?;
            let plain = letters.bytes().all(|byte| byte.is_ascii_lowercase());
            let fits = plain && WORD_LETTERS.contains(&letters.len());
            (fits && tokens(&text).is_ok_and(|made| made == [*id])).then_some((*id, text))
        };
        let ids = 0..tokenization.vocab_tokens();
        let (ids, texts): (Vec<u32>, Vec<String>) = ids.filter_map(|id| word(&id)).unzip();
        ensure!(
            ids.len() >= 2,
            "live: --tokenizer: no short English words are single tokens of it; give a byte-level BPE, or leave --tokenizer out"
        );
        ensure!(
            tokens(&texts.concat()).map_err(Error::msg)? == ids,
            "live: --tokenizer: it joins neighbouring words into other tokens; give a byte-level BPE, or leave --tokenizer out"
        );
        Ok(Self::of(texts))
    }

    fn of(texts: Vec<String>) -> Self {
        let tokens = u32::try_from(texts.len()).expect("no more than there are ids");
        Self { tokens, texts: Some(texts.into()) }
    }

    /// How many ids there are.
    pub const fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Leading tokens of a block within which different ids differ.
    pub fn marked_tokens(&self) -> u32 {
        let (mut count, mut left) = (0, u64::MAX);
        while left > 0 {
            left /= u64::from(self.tokens);
            count += 1;
        }
        count
    }

    /// The tokens of the block named `id`, without end.
    pub fn block(&self, id: u64) -> impl Iterator<Item = u32> + use<> {
        let base = u64::from(self.tokens);
        let marked = u64::from(self.marked_tokens());
        let mixed = mix(id);
        let mut left = mixed;
        (0u64..).map(move |at| {
            let digit = if at < marked {
                let digit = left % base;
                left /= base;
                digit
            } else {
                mix(mixed.wrapping_add(at)) % base
            };
            u32::try_from(digit).expect("a remainder below a 32-bit base")
        })
    }

    /// Appends a request's prompt as a JSON list, or as a string. The last id stands for what is left of the prompt;
    /// tokens beyond the ids (a trace read leniently) go on as blocks of the request's own, named by
    /// `row`.
    pub fn write_prompt(&self, arrival: &Arrival, row: u64, block_tokens: u32, body: &mut Vec<u8>) {
        body.push(if self.texts.is_some() { b'"' } else { b'[' });
        let block_tokens = u64::from(block_tokens.max(1));
        let mut left = arrival.prompt_tokens;
        let own = (0u64..).map(|n| mix(row ^ OWN).wrapping_add(n));
        for id in arrival.ids.iter().copied().chain(own) {
            if left == 0 {
                break;
            }
            let taken = left.min(block_tokens);
            for token in self.block(id).take(usize::try_from(taken).unwrap_or(usize::MAX)) {
                self.write(token, body);
            }
            left -= taken;
        }
        if body.last() == Some(&b',') {
            body.pop();
        }
        body.push(if self.texts.is_some() { b'"' } else { b']' });
    }

    fn write(&self, token: u32, body: &mut Vec<u8>) {
        if let Some(texts) = &self.texts {
            body.extend_from_slice(texts[token as usize].as_bytes());
        } else {
            write_number(token, body);
            body.push(b',');
        }
    }
}

/// Separates a row's own blocks from those that the trace names.
const OWN: u64 = 0x5EED_0F0B_10C5_0000;

/// Spreads a number over 64 bits, one to one: each step can be undone.
const fn mix(value: u64) -> u64 {
    let mut x = value.wrapping_add(0xD1B5_4A32_D192_ED03);
    x = (x ^ (x >> 29)).wrapping_mul(0x8CB9_2BA7_2F3D_8DD7);
    x = (x ^ (x >> 32)).wrapping_mul(0x9FB2_1C65_1E98_DF25);
    x ^ (x >> 30)
}

fn write_number(number: u32, out: &mut Vec<u8>) {
    let mut digits = [0u8; 10];
    let (mut at, mut left) = (digits.len(), number);
    loop {
        at -= 1;
        digits[at] = b'0' + u8::try_from(left % 10).expect("a decimal digit");
        left /= 10;
        if left == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::RequestObjectives;
    use std::collections::HashSet;

    fn arrival(prompt_tokens: u64, ids: &[u64]) -> Arrival {
        Arrival {
            at_us: 0,
            prompt_tokens,
            output_tokens: 1,
            ids: ids.to_vec(),
            class: 0,
            objectives: RequestObjectives::default(),
            tenant: 0,
            cancel_after_us: None,
        }
    }

    fn prompt(vocabulary: &Vocabulary, prompt_tokens: u64, ids: &[u64]) -> Vec<u32> {
        let mut body = Vec::new();
        vocabulary.write_prompt(&arrival(prompt_tokens, ids), 9, 16, &mut body);
        serde_json::from_slice(&body).unwrap()
    }

    #[test]
    fn blocks_of_different_ids_differ_within_the_marked_tokens() {
        for (tokens, marked) in [(256, 8), (128_256, 4), (2, 64)] {
            let vocabulary = Vocabulary::new(tokens).unwrap();
            assert_eq!(vocabulary.marked_tokens(), marked);
            let ids = (0..20_000u64).chain((0..64).map(|bit| 1 << bit)).collect::<HashSet<_>>();
            let heads: HashSet<Vec<u32>> =
                ids.iter().map(|&id| vocabulary.block(id).take(marked as usize).collect()).collect();
            assert_eq!(heads.len(), ids.len());
        }
    }

    #[test]
    fn the_marked_tokens_spell_the_id() {
        // Going backwards from the tokens gives the mixed id, which only one id has.
        let vocabulary = Vocabulary::new(256).unwrap();
        for id in [0, 1, 7, u64::MAX, 1 << 52] {
            let head: Vec<u32> = vocabulary.block(id).take(8).collect();
            let spelt = head.iter().rev().fold(0u64, |sum, &t| (sum << 8) | u64::from(t));
            assert_eq!(spelt, mix(id));
        }
    }

    #[test]
    fn a_prompt_is_its_blocks_and_the_last_one_is_cut() {
        let vocabulary = Vocabulary::new(256).unwrap();
        let (long, short) = (prompt(&vocabulary, 48, &[5, 6, 7]), prompt(&vocabulary, 39, &[5, 6, 7]));
        assert_eq!((long.len(), short.len()), (48, 39));
        assert_eq!(long[..39], short[..]);
        assert!(long.iter().all(|t| *t < 256));
        assert_eq!(prompt(&vocabulary, 20, &[6, 5])[..16], long[16..32], "a block does not know its place");
        assert_eq!(prompt(&vocabulary, 40, &[5]).len(), 40, "missing ids are made up");
    }

    #[test]
    fn a_text_is_the_same_blocks_a_letter_a_token() {
        let mut bodies = [(48, [5, 6, 7]), (39, [5, 6, 7]), (48, [5, 7, 6])].map(|(tokens, ids)| {
            let mut body = Vec::new();
            Vocabulary::letters().write_prompt(&arrival(tokens, &ids), 9, 16, &mut body);
            serde_json::from_slice::<String>(&body).unwrap()
        });
        let [long, short, other] = &mut bodies;
        assert_eq!((long.len(), &long[..39], &long[..16]), (48, short.as_str(), &other[..16]));
        assert_eq!((&long[16..32], &long[32..]), (&other[32..], &other[16..32]));
        let distinct: HashSet<char> = LETTERS.chars().collect();
        assert_eq!((distinct.len(), LETTERS.len()), (64, 64));
    }

    /// A byte-level BPE of two letters.
    fn bpe(words: &[&str], merges: &[&str]) -> Tokenization {
        let names = ["Ġ", "a", "b", "Ġa", "Ġb", "ba"].iter().chain(words);
        let vocabulary: serde_json::Map<String, serde_json::Value> =
            names.zip(0..).map(|(name, id)| ((*name).to_owned(), id.into())).collect();
        let level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let tokenizer = serde_json::json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": level, "post_processor": null, "decoder": level,
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary, "merges": merges}});
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        Tokenization::folder(folder.path()).unwrap()
    }

    /// " aa" is in the vocabulary, but no merge leads to it, so it must not be used.
    #[test]
    fn a_text_of_words_has_as_many_tokens_as_the_trace_says() {
        let merges = ["Ġ a", "Ġ b", "Ġa b", "Ġb a", "b a", "Ġab ba"];
        let tokenization = bpe(&["Ġab", "Ġba", "Ġabba", "Ġaa"], &merges);
        let words = Vocabulary::words(&tokenization).unwrap();
        assert_eq!(words.texts.as_deref().unwrap(), [" ab", " ba", " abba"]);
        let lineage = Lineage { seed: 0, root: BlockKey(0), block_tokens: 16 };
        for (prompt_tokens, ids) in [(48, vec![5, 6, 7]), (39, vec![5, 6, 7]), (40, vec![5])] {
            let mut body = Vec::new();
            words.write_prompt(&arrival(prompt_tokens, &ids), 9, 16, &mut body);
            let text: String = serde_json::from_slice(&body).unwrap();
            let tokens = tokenization.prompt_now(&text, false, &lineage).unwrap().tokens;
            assert_eq!(tokens.len() as u64, prompt_tokens, "{text}");
        }
        let lacks = bpe(&["Ġab", "Ġaa"], &["Ġ a", "Ġa b"]);
        assert!(
            Vocabulary::words(&lacks).is_err_and(|why| why.to_string().contains("no short English words"))
        );
    }

    #[test]
    fn numbers_are_written_as_they_are_read() {
        for number in [0, 7, 10, 255, 128_255, u32::MAX] {
            let mut out = Vec::new();
            write_number(number, &mut out);
            assert_eq!(String::from_utf8(out).unwrap(), number.to_string());
        }
    }

    #[test]
    fn one_token_is_no_vocabulary() {
        assert!(Vocabulary::new(1).is_err_and(|e| e.to_string().contains("--vocab")));
    }
}
