//! vLLM's own names for blocks, computed anew: SHA-256 over parent, tokens and extra keys, as CBOR or as a pickle.
//!
//! They fit the announced ones only where all that was read of an event is what vLLM hashed. Only the shapes of such
//! keys are written here, and only in the sizes that the captures have.

use baton_events::EngineHash;
use sha2::{Digest as _, Sha256};

/// An extra key and what it is, such as `("cache_salt", "s")`.
pub type TaggedKey<'a> = (&'a str, &'a str);

/// vLLM's `--prefix-caching-hash-algo`.
#[derive(Clone, Copy)]
pub enum Algorithm {
    /// `sha256_cbor`: over canonical CBOR.
    Cbor,
    /// `sha256`, its default: over a pickle, protocol 5.
    Pickle,
}

impl Algorithm {
    /// The root hash of a chain, by the engine's `PYTHONHASHSEED`.
    pub fn root(self, python_hash_seed: &str) -> EngineHash {
        digest(match self {
            Self::Cbor => {
                let mut bytes = Vec::new();
                cbor_text(&mut bytes, python_hash_seed);
                bytes
            }
            Self::Pickle => {
                let mut pickle = Pickle(Vec::new());
                pickle.text(python_hash_seed);
                pickle.finish()
            }
        })
    }

    /// The name of the block with `tokens` after `parent`.
    pub fn block(self, parent: EngineHash, tokens: &[u32], extra: &[TaggedKey<'_>]) -> EngineHash {
        let EngineHash::Full(parent) = parent else { panic!("a SHA-256 has 32 bytes") };
        digest(match self {
            Self::Cbor => cbor_block(&parent, tokens, extra),
            Self::Pickle => pickle_block(&parent, tokens, extra),
        })
    }
}

fn digest(bytes: Vec<u8>) -> EngineHash {
    EngineHash::Full(Sha256::digest(bytes).into())
}

fn cbor_head(into: &mut Vec<u8>, major: u8, count: usize) {
    let mark = major << 5;
    let [.., b, c, d] = count.to_be_bytes();
    match count {
        0..=23 => into.push(mark | d),
        24..=0xff => into.extend([mark | 24, d]),
        0x100..=0xffff => into.extend([mark | 25, c, d]),
        _ => into.extend([mark | 26, 0, b, c, d]),
    }
}

fn cbor_text(into: &mut Vec<u8>, text: &str) {
    cbor_head(into, 3, text.len());
    into.extend(text.as_bytes());
}

fn cbor_block(parent: &[u8], tokens: &[u32], extra: &[TaggedKey<'_>]) -> Vec<u8> {
    let mut into = Vec::new();
    cbor_head(&mut into, 4, 3);
    cbor_head(&mut into, 2, parent.len());
    into.extend(parent);
    cbor_head(&mut into, 4, tokens.len());
    tokens.iter().for_each(|token| cbor_head(&mut into, 0, *token as usize));
    if extra.is_empty() {
        into.push(0xf6);
        return into;
    }
    cbor_head(&mut into, 4, extra.len());
    for (tag, value) in extra {
        cbor_head(&mut into, 4, 2);
        cbor_text(&mut into, tag);
        cbor_text(&mut into, value);
    }
    into
}

fn pickle_block(parent: &[u8], tokens: &[u32], extra: &[TaggedKey<'_>]) -> Vec<u8> {
    let mut pickle = Pickle(Vec::new());
    pickle.short(b'C', parent);
    pickle.tuple(tokens, |pickle, token| pickle.token(*token));
    if extra.is_empty() {
        pickle.0.push(b'N');
    } else {
        pickle.tuple(extra, |pickle, (tag, value)| {
            pickle.tuple(&[tag, value], |pickle, text| pickle.text(text));
        });
    }
    pickle.0.push(0x87);
    pickle.memoize();
    pickle.finish()
}

/// The one frame of a pickle, as `CPython` writes it.
struct Pickle(Vec<u8>);

impl Pickle {
    fn finish(mut self) -> Vec<u8> {
        self.0.push(b'.');
        let head = [&[0x80, 5, 0x95][..], &(self.0.len() as u64).to_le_bytes()].concat();
        [head, self.0].concat()
    }

    /// Remembers the last value, as every text, byte string and tuple is.
    fn memoize(&mut self) {
        self.0.push(0x94);
    }

    fn short(&mut self, opcode: u8, bytes: &[u8]) {
        self.0.extend([opcode, u8::try_from(bytes.len()).expect("a short one")]);
        self.0.extend(bytes);
        self.memoize();
    }

    fn text(&mut self, text: &str) {
        self.short(0x8c, text.as_bytes());
    }

    fn token(&mut self, token: u32) {
        let [a, b, ..] = token.to_le_bytes();
        match token {
            0..=0xff => self.0.extend([b'K', a]),
            0x100..=0xffff => self.0.extend([b'M', a, b]),
            _ => {
                self.0.push(b'J');
                self.0.extend(token.to_le_bytes());
            }
        }
    }

    /// A tuple of `items`, each written by `item`.
    fn tuple<T>(&mut self, items: &[T], mut item: impl FnMut(&mut Self, &T)) {
        if items.len() > 3 {
            self.0.push(b'(');
        }
        items.iter().for_each(|one| item(self, one));
        self.0.push([b')', 0x85, 0x86, 0x87, b't'][items.len().min(4)]);
        self.memoize();
    }
}
