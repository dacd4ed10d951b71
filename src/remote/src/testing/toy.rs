//! A model that anyone can work out: the next token is a hash of all tokens so far.

use baton_types::{Finish, Sampling};

/// Tokens in the vocabulary.
pub const VOCAB_TOKENS: u32 = 2_048;
/// The model's end token.
pub const END_TOKEN: u32 = 0;

/// The token that follows `tokens`.
#[must_use]
pub fn toy_next(tokens: &[u32]) -> u32 {
    drawn(tokens.iter().fold(START, |hash, token| mixed(hash, *token)))
}

const START: u64 = 0xcbf2_9ce4_8422_2325;

const fn mixed(hash: u64, token: u32) -> u64 {
    (hash ^ token as u64).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23)
}

fn drawn(hash: u64) -> u32 {
    u32::try_from((hash >> 20) % u64::from(VOCAB_TOKENS)).unwrap_or(END_TOKEN)
}

/// The logprob that the model gives the token at a place of the answer.
#[must_use]
pub fn toy_logprob(token: u32, at: usize) -> f32 {
    let step = u16::try_from((token as usize + at) % 64).unwrap_or(0);
    -f32::from(step + 1) / 64.0
}

/// The answer to `context` under `sampling`: lengths, ends and stop tokens. The other settings change nothing here.
#[must_use]
pub fn toy_answer(context: &[u32], sampling: &Sampling) -> (Vec<u32>, Finish) {
    answer_in(context, sampling, |token| token)
}

/// Like `toy_answer`, but each drawn token is reported as another one, and the next is drawn after the reported ones.
/// An answer that continues elsewhere therefore goes on as it would have here.
pub(super) fn answer_in(
    context: &[u32],
    sampling: &Sampling,
    told: impl Fn(u32) -> u32,
) -> (Vec<u32>, Finish) {
    let mut hash = context.iter().fold(START, |hash, token| mixed(hash, *token));
    let mut answer = Vec::new();
    while answer.len() < sampling.max_tokens as usize {
        let mut token = drawn(hash);
        let ends = |token: u32| {
            (token == END_TOKEN && !sampling.ignore_eos) || sampling.stop_token_ids.contains(&token)
        };
        let early = answer.len() < sampling.min_tokens as usize;
        while early && ends(token) {
            token = (token + 1) % VOCAB_TOKENS;
        }
        token = told(token);
        answer.push(token);
        hash = mixed(hash, token);
        if ends(token) {
            return (answer, Finish::Stop);
        }
    }
    (answer, Finish::Length)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::text::lettered;

    /// It went on with other letters: what it had said was not what it had drawn.
    #[test]
    fn an_answer_in_letters_goes_on_elsewhere_as_it_would_have_here() {
        let sampling = |max_tokens| Sampling { max_tokens, ignore_eos: true, ..Sampling::default() };
        let (whole, _) = answer_in(&[1, 2, 3], &sampling(40), lettered);
        let (rest, _) = answer_in(&[&[1, 2, 3], &whole[..15]].concat(), &sampling(25), lettered);
        assert_eq!(whole[15..], rest);
    }

    #[test]
    fn answers_depend_on_every_token_and_keep_to_the_sampling() {
        assert_ne!(toy_next(&[1, 2, 3]), toy_next(&[1, 2, 4]));
        assert_ne!(toy_next(&[1, 2, 3]), toy_next(&[2, 1, 3]));
        let sampling = Sampling { max_tokens: 9, ignore_eos: true, ..Sampling::default() };
        let (answer, finish) = toy_answer(&[5, 6], &sampling);
        assert_eq!((answer.len(), finish), (9, Finish::Length));
        assert_eq!(answer[3], toy_next(&[&[5, 6], &answer[..3]].concat()));
        let stop = Sampling { stop_token_ids: vec![answer[3]], ..sampling.clone() };
        assert_eq!(toy_answer(&[5, 6], &stop), (answer[..4].to_vec(), Finish::Stop));
        let later = Sampling { min_tokens: 5, ..stop };
        assert!(toy_answer(&[5, 6], &later).0.len() >= 5);
    }
}
