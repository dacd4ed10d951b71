//! How an input is damaged.

use baton_types::Rng;

/// Numbers where code is wrong by one, as text.
const NUMBERS: &[&str] = &[
    "0",
    "-0",
    "-1",
    "1",
    "255",
    "256",
    "65535",
    "65536",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "9007199254740993",
    "9223372036854775807",
    "-9223372036854775808",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "-1e308",
    "1e309",
    "1e-320",
    "0.1",
    "NaN",
    "inf",
    "-inf",
    "99999999999999999999999999999999999999",
];

/// Bytes that formats give a meaning.
const BYTES: &[u8] = b"\0\n\r\t \"'\\/{}[]()<>,:;=+-.*$#%|~`0aZ\x7f\x80\xbf\xc0\xf0\xff";

/// Damages inputs, with words of the format at hand.
#[derive(Clone, Copy, Debug)]
pub struct Mutator<'a> {
    /// Words that the format knows.
    pub words: &'a [&'a [u8]],
    /// Inputs do not become longer.
    pub max_bytes: usize,
}

impl Mutator<'_> {
    /// Damages `bytes` a few times; `other` is an input that pieces are taken from.
    pub fn damage(&self, bytes: &mut Vec<u8>, other: &[u8], rng: &mut Rng) {
        // Mostly a little, so that the rest is still understood.
        let times = 1 + rng.below(3) + if rng.below(4) == 0 { rng.below(12) } else { 0 };
        for _ in 0..times {
            self.once(bytes, other, rng);
            bytes.truncate(self.max_bytes);
        }
    }

    fn once(&self, bytes: &mut Vec<u8>, other: &[u8], rng: &mut Rng) {
        let (from, upto) = piece(bytes.len(), rng);
        match rng.below(15) {
            0 => flip(bytes, rng),
            1 => set(bytes, rng),
            2 => bytes.truncate(spot(bytes.len(), rng)),
            3 => drop(bytes.drain(from..upto)),
            4 => {
                let copy = bytes[from..upto].to_vec();
                put(bytes, &copy, rng);
            }
            5 => self.repeat(bytes, rng),
            6 | 7 => number(bytes, rng),
            8 => binary(bytes, rng),
            9 => {
                let (from, upto) = piece(other.len(), rng);
                put(bytes, &other[from..upto], rng);
            }
            10 => {
                // The beginning of one and the end of the other.
                bytes.truncate(spot(bytes.len(), rng));
                bytes.extend_from_slice(&other[spot(other.len(), rng)..]);
            }
            11 | 12 if !self.words.is_empty() => {
                let word = self.words[rng.below(self.words.len() as u64) as usize];
                if rng.below(2) == 0 {
                    drop(bytes.drain(from..upto.min(from + 16)));
                }
                bytes.splice(from..from, word.iter().copied());
            }
            13 => {
                let (first, second) = piece(bytes.len(), rng);
                let moved: Vec<u8> = bytes.drain(first..second).collect();
                put(bytes, &moved, rng);
            }
            _ => {
                let made: Vec<u8> = (0..1 + rng.below(8)).map(|_| odd_byte(rng)).collect();
                put(bytes, &made, rng);
            }
        }
    }

    /// Repeats a short piece often: deep nesting, long runs.
    fn repeat(&self, bytes: &mut Vec<u8>, rng: &mut Rng) {
        let at = spot(bytes.len(), rng);
        let long = 1 + rng.below(12) as usize;
        let piece = bytes[at..bytes.len().min(at + long)].to_vec();
        if piece.is_empty() {
            return;
        }
        let room = self.max_bytes.saturating_sub(bytes.len()) / piece.len();
        let most = if rng.below(8) == 0 { room } else { room.min(300) };
        let times = rng.below(most as u64 + 1) as usize;
        bytes.splice(at..at, piece.repeat(times));
    }
}

/// A place in so many bytes, the end included.
fn spot(bytes: usize, rng: &mut Rng) -> usize {
    rng.below(bytes as u64 + 1) as usize
}

/// A piece of so many bytes: mostly a short one.
fn piece(bytes: usize, rng: &mut Rng) -> (usize, usize) {
    let from = spot(bytes, rng);
    let most = if rng.below(4) == 0 { bytes - from } else { (bytes - from).min(32) };
    (from, from + spot(most, rng))
}

fn put(bytes: &mut Vec<u8>, piece: &[u8], rng: &mut Rng) {
    let at = spot(bytes.len(), rng);
    bytes.splice(at..at, piece.iter().copied());
}

fn odd_byte(rng: &mut Rng) -> u8 {
    if rng.below(3) == 0 { rng.below(256) as u8 } else { BYTES[rng.below(BYTES.len() as u64) as usize] }
}

fn flip(bytes: &mut [u8], rng: &mut Rng) {
    if !bytes.is_empty() {
        let at = rng.below(bytes.len() as u64) as usize;
        bytes[at] ^= 1 << rng.below(8);
    }
}

fn set(bytes: &mut [u8], rng: &mut Rng) {
    if !bytes.is_empty() {
        let at = rng.below(bytes.len() as u64) as usize;
        bytes[at] = odd_byte(rng);
    }
}

/// Another number in place of one that is written in digits.
fn number(bytes: &mut Vec<u8>, rng: &mut Rng) {
    let digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
    let begins: Vec<usize> =
        (0..bytes.len()).filter(|&at| digit(at) && (at == 0 || !digit(at - 1))).collect();
    if begins.is_empty() {
        return binary(bytes, rng);
    }
    let from = begins[rng.below(begins.len() as u64) as usize];
    let upto = (from..).find(|&at| !digit(at)).unwrap_or(bytes.len());
    let other = NUMBERS[rng.below(NUMBERS.len() as u64) as usize];
    bytes.splice(from..upto, other.bytes());
}

/// Another number in place of one of 1, 2, 4 or 8 bytes, in either order of bytes.
fn binary(bytes: &mut [u8], rng: &mut Rng) {
    let width = 1 << rng.below(4);
    if bytes.len() < width {
        return;
    }
    let at = rng.below((bytes.len() - width) as u64 + 1) as usize;
    let top = u64::MAX >> (64 - 8 * width as u32);
    let little = rng.below(2) == 0;
    let mut old = [0; 8];
    old[..width].copy_from_slice(&bytes[at..at + width]);
    if !little {
        old[..width].reverse();
    }
    let old = u64::from_le_bytes(old);
    let new = match rng.below(8) {
        0 => 0,
        1 => top,
        2 => top >> 1,
        3 => (top >> 1) + 1,
        4 => old.wrapping_add(1),
        5 => old.wrapping_sub(1),
        6 => old.wrapping_mul(2),
        _ => 1 << rng.below(8 * width as u64),
    };
    let mut new = new.to_le_bytes();
    if !little {
        new[..width].reverse();
    }
    bytes[at..at + width].copy_from_slice(&new[..width]);
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOME: &[u8] = b"{\"a\": [1, 22, 333], \"b\": \"text\"}";

    fn damaged(seed: u64) -> Vec<u8> {
        let mut bytes = SOME.to_vec();
        let mutator = Mutator { words: &[b"null"], max_bytes: 4_000 };
        mutator.damage(&mut bytes, b"<other>", &mut Rng::new(seed));
        bytes
    }

    #[test]
    fn the_same_seed_damages_the_same() {
        for seed in 0..200 {
            assert_eq!(damaged(seed), damaged(seed));
        }
    }

    #[test]
    fn every_kind_of_damage_comes_about() {
        let all: Vec<Vec<u8>> = (0..5_000).map(damaged).collect();
        let has = |text: &[u8]| all.iter().filter(|one| one.windows(text.len()).any(|at| at == text)).count();
        assert!(all.iter().all(|one| one.len() <= 4_000));
        assert!(all.iter().filter(|one| one.len() < SOME.len() / 2).count() > 100);
        assert!(all.iter().filter(|one| one.len() > 1_000).count() > 50);
        for text in ["null", "1e308", "18446744073709551616", "[[[[[[[[", "ther"] {
            assert!(has(text.as_bytes()) > 1, "{text}: {}", has(text.as_bytes()));
        }
        assert!(all.iter().filter(|one| one.as_slice() == SOME).count() < 500);
    }

    #[test]
    fn nothing_is_too_small_to_be_damaged() {
        let mutator = Mutator { words: &[], max_bytes: 10 };
        for seed in 0..2_000 {
            let mut bytes = Vec::new();
            mutator.damage(&mut bytes, b"", &mut Rng::new(seed));
            assert!(bytes.len() <= 10);
        }
    }
}
