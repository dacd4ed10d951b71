//! The tokens of a prompt, packed in runs: each token in as many bytes as the largest of its run needs.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

/// A run of this many tokens is shared between the prompts that have it; shorter ones are copied together.
const SHARED_TOKENS: usize = 1024;

/// Neighbouring tokens in 1 to 4 bytes each, little endian, no wider than the largest needs; copies share them.
#[derive(Clone)]
pub struct Run {
    packed: Arc<Vec<u8>>,
    width: u8,
}

impl Run {
    /// All of `tokens`.
    #[must_use]
    pub fn pack(tokens: &[u32]) -> Self {
        let most = tokens.iter().fold(0, |most, token| most | *token);
        let width = (4 - most.leading_zeros() / 8).max(1);
        let packed = match width {
            1 => pack_as::<1>(tokens),
            2 => pack_as::<2>(tokens),
            3 => pack_as::<3>(tokens),
            _ => pack_as::<4>(tokens),
        };
        Self { packed: Arc::new(packed), width: width as u8 }
    }

    /// As they are packed.
    #[must_use]
    pub fn packed(&self) -> &[u8] {
        &self.packed
    }

    /// Bytes of each, 1 to 4.
    #[must_use]
    pub const fn width(&self) -> u8 {
        self.width
    }

    /// Appends those in `packed`, `width` bytes each. `None`, and nothing appended, for a width that is none, or a torn
    /// last one.
    #[must_use]
    pub fn unpack(packed: &[u8], width: u32, into: &mut Vec<u32>) -> Option<()> {
        match width {
            1 => unpack_as::<1>(packed, into),
            2 => unpack_as::<2>(packed, into),
            3 => unpack_as::<3>(packed, into),
            4 => unpack_as::<4>(packed, into),
            _ => None,
        }
    }

    fn len(&self) -> usize {
        self.packed.len() / usize::from(self.width)
    }

    fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.packed.chunks_exact(usize::from(self.width)).map(|bytes| {
            let mut token = [0; 4];
            token[..bytes.len()].copy_from_slice(bytes);
            u32::from_le_bytes(token)
        })
    }

    fn append_after(&self, skipped: usize, into: &mut Vec<u32>) {
        let from = &self.packed[skipped.min(self.len()) * usize::from(self.width)..];
        Self::unpack(from, self.width.into(), into).expect("whole tokens of 1 to 4 bytes");
    }
}

/// A plain loop: the compiler turns it into a few instructions for many tokens.
fn pack_as<const WIDTH: usize>(tokens: &[u32]) -> Vec<u8> {
    let low = |token: &u32| {
        let mut low = [0; WIDTH];
        low.copy_from_slice(&token.to_le_bytes()[..WIDTH]);
        low
    };
    tokens.iter().map(low).collect::<Vec<[u8; WIDTH]>>().into_flattened()
}

fn unpack_as<const WIDTH: usize>(packed: &[u8], into: &mut Vec<u32>) -> Option<()> {
    let (whole, torn) = packed.as_chunks::<WIDTH>();
    let read = |bytes: &[u8; WIDTH]| {
        let mut token = [0; 4];
        token[..WIDTH].copy_from_slice(bytes);
        u32::from_le_bytes(token)
    };
    torn.is_empty().then(|| into.extend(whole.iter().map(read)))
}

/// The tokens of a prompt, in runs. A long part of it goes from the front door's cache of prefixes to the wire without
/// being copied, and small numbers take a quarter of their size.
#[derive(Clone)]
pub struct Tokens {
    runs: Arc<[Run]>,
    count: usize,
}

impl Tokens {
    /// One after another they are all tokens.
    #[must_use]
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// How many they are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// One after another.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.runs.iter().flat_map(Run::iter)
    }

    /// Bytes that they take.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.runs.iter().map(|run| run.packed.len()).sum()
    }

    /// All but the first `skipped`.
    #[must_use]
    pub fn after(&self, mut skipped: usize) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(self.count.saturating_sub(skipped));
        for run in self.runs.iter() {
            run.append_after(skipped, &mut tokens);
            skipped = skipped.saturating_sub(run.len());
        }
        tokens
    }

    /// All of them.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u32> {
        self.after(0)
    }

    /// With more of them after these.
    #[must_use]
    pub fn and(&self, more: &[u32]) -> Self {
        let mut packer = Packer::default();
        packer.push_part(self);
        packer.push(more);
        packer.finish()
    }
}

impl Default for Tokens {
    fn default() -> Self {
        Self { runs: Arc::new([]), count: 0 }
    }
}

impl PartialEq for Tokens {
    fn eq(&self, other: &Self) -> bool {
        self.count == other.count && self.iter().eq(other.iter())
    }
}

impl Eq for Tokens {}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl From<&[u32]> for Tokens {
    fn from(tokens: &[u32]) -> Self {
        Self { runs: Arc::new([Run::pack(tokens)]), count: tokens.len() }
    }
}

impl From<Vec<u32>> for Tokens {
    fn from(tokens: Vec<u32>) -> Self {
        Self::from(tokens.as_slice())
    }
}

impl FromIterator<u32> for Tokens {
    fn from_iter<I: IntoIterator<Item = u32>>(tokens: I) -> Self {
        Self::from(tokens.into_iter().collect::<Vec<u32>>())
    }
}

/// Puts the parts of a prompt together.
#[derive(Debug, Default)]
pub struct Packer {
    runs: Vec<Run>,
    /// Tokens after the last run.
    open: Vec<u32>,
    count: usize,
}

impl Packer {
    /// Appends tokens.
    pub fn push(&mut self, tokens: &[u32]) {
        self.open.extend_from_slice(tokens);
        self.count += tokens.len();
    }

    /// Appends tokens that are packed already; long runs of them are shared.
    pub fn push_part(&mut self, tokens: &Tokens) {
        for run in tokens.runs.iter() {
            if run.len() >= SHARED_TOKENS {
                self.close();
                self.runs.push(run.clone());
            } else {
                run.append_after(0, &mut self.open);
            }
        }
        self.count += tokens.count;
    }

    /// All tokens that were pushed.
    #[must_use]
    pub fn finish(mut self) -> Tokens {
        self.close();
        Tokens { runs: self.runs.into(), count: self.count }
    }

    fn close(&mut self) {
        if !self.open.is_empty() {
            self.runs.push(Run::pack(&self.open));
            self.open.clear();
        }
    }
}

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use proptest::prelude::*;

    #[test]
    fn a_run_takes_as_few_bytes_as_its_largest_token_needs() {
        for (most, width) in
            [(0, 1), (255, 1), (256, 2), (65_535, 2), (65_536, 3), (1 << 24, 4), (u32::MAX, 4)]
        {
            let run = Run::pack(&[3, most, 0, 7]);
            assert_eq!((run.width(), run.packed().len()), (width, 4 * usize::from(width)));
            let mut read = vec![9];
            assert_eq!(Run::unpack(run.packed(), width.into(), &mut read), Some(()));
            assert_eq!(read, [9, 3, most, 0, 7]);
            let torn = Run::unpack(&run.packed()[1..], width.into(), &mut read);
            assert_eq!(torn.is_none(), width > 1, "a torn one");
        }
        let mut read = vec![];
        assert_eq!((Run::unpack(&[0; 10], 5, &mut read), Run::unpack(&[1], 0, &mut read)), (None, None));
        assert!(read.is_empty() && Run::pack(&[]).packed().is_empty());
    }

    #[test]
    fn long_runs_are_shared_and_short_ones_are_put_together() {
        let long = Tokens::from((0..SHARED_TOKENS as u32).map(|token| token % 200).collect::<Vec<u32>>());
        let mut packer = Packer::default();
        packer.push(&[300]);
        packer.push_part(&Tokens::from(vec![70_000]));
        packer.push_part(&long);
        packer.push(&[1]);
        let prompt = packer.finish().and(&[2]);
        let shapes: Vec<_> = prompt.runs().iter().map(|run| (run.len(), run.width())).collect();
        assert_eq!(shapes, [(2, 3), (SHARED_TOKENS, 1), (2, 1)]);
        assert_eq!(prompt.runs()[1].packed().as_ptr(), long.runs()[0].packed().as_ptr());
        assert_eq!(prompt.bytes(), 6 + SHARED_TOKENS + 2);
    }

    proptest! {
        #[test]
        fn parts_together_are_what_all_of_it_is(
            parts in proptest::collection::vec((0u32..=31, proptest::collection::vec(any::<u32>(), 0..20), any::<bool>()), 0..6),
            skipped in 0usize..80,
        ) {
            let part = |(shift, part, long): (u32, Vec<u32>, bool)| {
                let part = part.into_iter().map(|token| token >> shift).collect::<Vec<u32>>();
                if long { part.repeat(SHARED_TOKENS) } else { part }
            };
            let parts: Vec<Vec<u32>> = parts.into_iter().map(part).collect();
            let whole = parts.concat();
            let mut packer = Packer::default();
            for (at, part) in parts.iter().enumerate() {
                if at % 2 == 0 { packer.push(part) } else { packer.push_part(&part.iter().copied().collect()) }
            }
            let packed = packer.finish();
            prop_assert_eq!(packed.len(), whole.len());
            prop_assert_eq!(&packed, &Tokens::from(whole.as_slice()));
            prop_assert_eq!(&packed.to_vec(), &whole);
            let from = skipped.min(whole.len());
            prop_assert_eq!(packed.after(skipped), &whole[from..]);
            prop_assert_eq!(Tokens::from(&whole[..from]).and(&whole[from..]), packed);
        }
    }
}
