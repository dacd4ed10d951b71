//! The bytes that `CPython`'s pickle, protocol 5, makes of the few shapes that block hashes are made of.

use super::engine::Tagged;

/// Bytes of a frame's payload from which it is closed.
const FRAME_BYTES: usize = 64 * 1024;

/// A pickle being written: opcodes gather in a frame, which is written with its length once it is full.
#[derive(Default)]
struct Pickle {
    done: Vec<u8>,
    frame: Vec<u8>,
}

impl Pickle {
    fn put(&mut self, opcode: &[u8]) {
        self.frame.extend(opcode);
    }

    /// Closes the frame if it is full; called where `CPython` does, before each value.
    fn value(&mut self) {
        if self.frame.len() >= FRAME_BYTES {
            self.close();
        }
    }

    fn close(&mut self) {
        // A frame of less than four bytes would cost more than it saves, and is left away.
        if self.frame.len() >= 4 {
            self.done.push(0x95);
            self.done.extend((self.frame.len() as u64).to_le_bytes());
        }
        self.done.append(&mut self.frame);
    }

    fn finish(mut self) -> Vec<u8> {
        self.put(b".");
        self.close();
        let mut all = vec![0x80, 5];
        all.append(&mut self.done);
        all
    }

    /// Remembers the last value, as every text, byte string and tuple is.
    fn memoize(&mut self) {
        self.put(&[0x94]);
    }

    fn text(&mut self, text: &str) {
        self.value();
        self.counted(text.as_bytes(), 0x8c, b'X');
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.value();
        self.counted(bytes, b'C', b'B');
    }

    fn counted(&mut self, bytes: &[u8], short: u8, long: u8) {
        match u8::try_from(bytes.len()) {
            Ok(length) => self.put(&[short, length]),
            Err(_) => {
                self.put(&[long]);
                let length = u32::try_from(bytes.len()).expect("a salt is below 4 GiB");
                self.put(&length.to_le_bytes());
            }
        }
        self.put(bytes);
        self.memoize();
    }

    fn token(&mut self, token: u32) {
        self.value();
        let bytes = token.to_le_bytes();
        match token {
            0..=0xff => self.put(&[b'K', bytes[0]]),
            0x100..=0xffff => self.put(&[b'M', bytes[0], bytes[1]]),
            0x1_0000..=0x7fff_ffff => {
                self.put(b"J");
                self.put(&bytes);
            }
            // Longer than 31 bits: a long of five bytes, so that its sign is plus.
            _ => {
                self.put(&[0x8a, 5]);
                self.put(&bytes);
                self.put(&[0]);
            }
        }
    }

    /// A tuple of `items`, each written by `item`.
    fn tuple<T>(&mut self, items: &[T], mut item: impl FnMut(&mut Self, &T)) {
        self.value();
        if items.len() > 3 {
            self.put(b"(");
        }
        items.iter().for_each(|one| item(self, one));
        match items.len() {
            0 => return self.put(b")"),
            1 => self.put(&[0x85]),
            2 => self.put(&[0x86]),
            3 => self.put(&[0x87]),
            _ => self.put(b"t"),
        }
        self.memoize();
    }
}

/// A text alone: what a root is made of.
pub(super) fn root(seed: &str) -> Vec<u8> {
    let mut pickle = Pickle::default();
    pickle.text(seed);
    pickle.finish()
}

/// Parent, tokens, extra keys.
pub(super) fn block(parent: &[u8], tokens: &[u32], extra: &[Tagged<'_>]) -> Vec<u8> {
    let mut pickle = Pickle::default();
    pickle.value();
    pickle.bytes(parent);
    pickle.tuple(tokens, |pickle, token| pickle.token(*token));
    if extra.is_empty() {
        pickle.value();
        pickle.put(b"N");
    } else {
        pickle.tuple(extra, |pickle, (tag, value)| {
            pickle.tuple(&[tag, value], |pickle, text| pickle.text(text));
        });
    }
    pickle.put(&[0x87]);
    pickle.memoize();
    pickle.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sha2::{Digest as _, Sha256};

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn the_bytes_are_those_of_cpython() {
        // pickle.dumps(..., protocol=5) of CPython 3.
        assert_eq!(hex(&root("0")), "80059505000000000000008c0130942e");
        assert_eq!(
            hex(&block(&[1, 2], &[1, 300, 70_000, 4_000_000_000], &[])),
            "8005951d000000000000004302010294284b014d2c014a701101008a0500286bee0074944e87942e"
        );
        assert_eq!(
            hex(&block(&[1, 2], &[5], &[("cache_salt", "s")])),
            "800595210000000000000043020102944b0585948c0a63616368655f73616c74948c0173948694859487942e"
        );
    }

    #[test]
    fn long_pickles_are_framed_as_cpython_frames_them() {
        let tokens: Vec<u32> = (0..60_000).map(|n| n * 7).collect();
        let digest = Sha256::digest(block(&[9; 32], &tokens, &[("lora", &"x".repeat(300))]));
        assert_eq!(hex(&digest), "391a7c1e9e89ab4f9e4f2242f3a2fcd5d2349833e2e4f002ed068cd3c0a79458");
    }
}
