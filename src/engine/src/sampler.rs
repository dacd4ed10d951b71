//! From logits to a token.
//!
//! In this order: repetition, frequency and presence penalties; biases; the mask of end tokens
//! before `min_tokens`; temperature; then `top_k`, `top_p` and `min_p`, each over what the one
//! before left. The draw at index `i` of an answer depends on the seed and on `i` alone, so that an
//! answer that moves elsewhere goes on as it would have here.

use std::cmp::Ordering;

use baton_types::{Rng, Sampling, TokenLogprob};

/// The inputs of one draw.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draw<'a> {
    /// The sampling settings.
    pub(crate) sampling: &'a Sampling,
    /// Prompt and answer so far.
    pub(crate) tokens: &'a [u32],
    /// Number of prompt tokens among them.
    pub(crate) prompt_tokens: usize,
    /// The tokens that end an answer of the model.
    pub(crate) end_tokens: &'a [u32],
}

/// A token and its logit, later its share.
type Candidate = (u32, f32);

/// Draws tokens; keeps room for the candidates.
#[derive(Debug, Default)]
pub(crate) struct Sampler {
    logits: Vec<f32>,
    candidates: Vec<Candidate>,
    counts: Vec<u32>,
}

impl Sampler {
    /// The next token. Logits that are no numbers count as impossible.
    pub(crate) fn draw(&mut self, logits: &[f32], draw: &Draw<'_>) -> u32 {
        self.logits.clear();
        self.logits.extend(logits.iter().map(|x| if x.is_nan() { f32::NEG_INFINITY } else { *x }));
        self.penalize(draw);
        for (token, bias) in &draw.sampling.logit_bias {
            self.logits[*token as usize] += bias;
        }
        self.mask_ends(draw);
        let best = most_likely(&self.logits);
        if self.logits[best as usize] == f32::NEG_INFINITY {
            // Everything is masked or broken: the answer goes on with what the model says.
            return most_likely(logits);
        }
        if draw.sampling.temperature == 0.0 {
            return best;
        }
        let index = draw.tokens.len() - draw.prompt_tokens;
        self.pick(best, draw.sampling, chance(draw.sampling.seed, index))
    }

    fn penalize(&mut self, draw: &Draw<'_>) {
        let sampling = draw.sampling;
        let (answer_only, both) = (
            sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0,
            sampling.repetition_penalty != 1.0,
        );
        if both {
            self.count(draw.tokens);
            for (logit, _) in self.logits.iter_mut().zip(&self.counts).filter(|(_, count)| **count > 0) {
                let factor = sampling.repetition_penalty;
                *logit = if *logit > 0.0 { *logit / factor } else { *logit * factor };
            }
        }
        if answer_only {
            self.count(&draw.tokens[draw.prompt_tokens..]);
            for (logit, count) in self.logits.iter_mut().zip(&self.counts).filter(|(_, count)| **count > 0) {
                #[expect(clippy::cast_precision_loss, reason = "answers are far below 2^24 tokens")]
                let times = *count as f32;
                *logit -= sampling.frequency_penalty * times + sampling.presence_penalty;
            }
        }
    }

    fn count(&mut self, tokens: &[u32]) {
        self.counts.clear();
        self.counts.resize(self.logits.len(), 0);
        tokens.iter().for_each(|token| self.counts[*token as usize] += 1);
    }

    fn mask_ends(&mut self, draw: &Draw<'_>) {
        if draw.tokens.len() - draw.prompt_tokens >= draw.sampling.min_tokens as usize {
            return;
        }
        let own = if draw.sampling.ignore_eos { &[] } else { draw.end_tokens };
        for token in own.iter().chain(&draw.sampling.stop_token_ids) {
            if let Some(logit) = self.logits.get_mut(*token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }

    /// The candidate at `chance` (0 to 1) of the probability that the candidates make up.
    fn pick(&mut self, best: u32, sampling: &Sampling, chance: f64) -> u32 {
        let most = self.logits[best as usize];
        let scaled = |logit: f32| (logit - most) / sampling.temperature;
        let possible = self.logits.iter().zip(0..).filter(|(logit, _)| **logit > f32::NEG_INFINITY);
        self.candidates.clear();
        self.candidates.extend(possible.map(|(logit, token)| (token, scaled(*logit))));
        if sampling.top_k > 0 || sampling.top_p < 1.0 {
            keep_most_likely(&mut self.candidates, sampling.top_k as usize);
        }
        if sampling.top_p < 1.0 {
            keep_share(&mut self.candidates, sampling.top_p);
        }
        if sampling.min_p > 0.0 {
            let least = f64::from(sampling.min_p);
            self.candidates.retain(|(_, scaled)| weight(*scaled) >= least);
        }
        let total: f64 = self.candidates.iter().map(|(_, scaled)| weight(*scaled)).sum();
        let mut left = chance * total;
        for (token, scaled) in &self.candidates {
            left -= weight(*scaled);
            if left < 0.0 {
                return *token;
            }
        }
        best
    }
}

/// Probability relative to the likeliest token's.
fn weight(scaled: f32) -> f64 {
    libm::exp(f64::from(scaled))
}

/// Likeliest first, ties by lower id.
fn by_likelihood(a: &Candidate, b: &Candidate) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Sorts the candidates and keeps the `count` likeliest; 0 keeps all.
fn keep_most_likely(candidates: &mut Vec<Candidate>, count: usize) {
    if count > 0 && count < candidates.len() {
        candidates.select_nth_unstable_by(count - 1, by_likelihood);
        candidates.truncate(count);
    }
    candidates.sort_unstable_by(by_likelihood);
}

/// Keeps the shortest run of sorted candidates that makes up `share` of them all; at least one.
fn keep_share(candidates: &mut Vec<Candidate>, share: f32) {
    let total: f64 = candidates.iter().map(|(_, scaled)| weight(*scaled)).sum();
    let mut left = f64::from(share) * total;
    let enough = candidates.iter().position(|(_, scaled)| {
        left -= weight(*scaled);
        left <= 0.0
    });
    candidates.truncate(enough.map_or(candidates.len(), |last| last + 1));
}

/// A number in `[0, 1)` that follows from the seed and the index.
fn chance(seed: u64, index: usize) -> f64 {
    Rng::fork(seed, index as u64 + 1).unit()
}

fn most_likely(logits: &[f32]) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (token, logit) in (0..).zip(logits) {
        if *logit > best.1 {
            best = (token, *logit);
        }
    }
    best.0
}

/// The logprob of `token` under `logits` as the model gave them, with the `top` likeliest.
pub(crate) fn logprob(logits: &[f32], token: u32, top: u8) -> TokenLogprob {
    let most = f64::from(logits[most_likely(logits) as usize]);
    let sum: f64 = logits.iter().map(|logit| libm::exp(f64::from(*logit) - most)).sum();
    let log_sum = most + libm::log(sum);
    #[expect(clippy::cast_possible_truncation, reason = "logprobs are given in 32 bits")]
    let of = |logit: f32| (f64::from(logit) - log_sum) as f32;
    let mut top_tokens = Vec::new();
    if top > 0 {
        top_tokens = (0..).zip(logits.iter().copied()).collect();
        keep_most_likely(&mut top_tokens, top as usize);
        top_tokens.iter_mut().for_each(|(_, logit)| *logit = of(*logit));
    }
    TokenLogprob { logprob: of(logits[token as usize]), top: top_tokens }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A naive version of the rules, over a table of all tokens in double precision.
    fn naive(logits: &[f32], draw: &Draw<'_>) -> u32 {
        let s = draw.sampling;
        let answer = &draw.tokens[draw.prompt_tokens..];
        let mut table: Vec<(u32, f64)> = Vec::new();
        for (token, logit) in (0u32..).zip(logits) {
            let mut x = *logit;
            if draw.tokens.contains(&token) {
                x = if x > 0.0 { x / s.repetition_penalty } else { x * s.repetition_penalty };
            }
            let times = answer.iter().filter(|t| **t == token).count();
            if times > 0 {
                x -= s.frequency_penalty * times as f32 + s.presence_penalty;
            }
            x += s.logit_bias.iter().filter(|(t, _)| *t == token).map(|(_, b)| b).sum::<f32>();
            let end =
                (!s.ignore_eos && draw.end_tokens.contains(&token)) || s.stop_token_ids.contains(&token);
            if !(end && answer.len() < s.min_tokens as usize) {
                table.push((token, f64::from(x)));
            }
        }
        let by_likelihood =
            |a: &(u32, f64), b: &(u32, f64)| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0));
        let mut sorted = table.clone();
        sorted.sort_by(by_likelihood);
        if s.temperature == 0.0 {
            return sorted[0].0;
        }
        let share = |x: f64| ((x - sorted[0].1) / f64::from(s.temperature)).exp();
        let mut kept: Vec<(u32, f64)> = sorted.iter().map(|(t, x)| (*t, share(*x))).collect();
        if s.top_k > 0 {
            kept.truncate(s.top_k as usize);
        }
        let total: f64 = kept.iter().map(|(_, p)| p).sum();
        let mut so_far = 0.0;
        let mut cut = kept.len();
        for (n, (_, p)) in kept.iter().enumerate() {
            so_far += p / total;
            if so_far >= f64::from(s.top_p) {
                cut = n + 1;
                break;
            }
        }
        kept.truncate(cut);
        kept.retain(|(_, p)| *p >= f64::from(s.min_p));
        if s.top_k == 0 && s.top_p >= 1.0 {
            kept.sort_by_key(|(token, _)| *token);
        }
        let total: f64 = kept.iter().map(|(_, p)| p).sum();
        let mut chance = chance(s.seed, answer.len()) * total;
        for (token, p) in &kept {
            chance -= p;
            if chance < 0.0 {
                return *token;
            }
        }
        kept[0].0
    }

    #[test]
    fn draws_are_those_of_the_rules_word_by_word() {
        let mut sampler = Sampler::default();
        for seed in 0..3000 {
            let mut rng = Rng::new(seed);
            let vocab = 2 + rng.below(60);
            let logits: Vec<f32> = (0..vocab).map(|_| (rng.unit() * 8.0 - 4.0) as f32).collect();
            let some = |rng: &mut Rng, most: f64, none: f32| {
                if rng.chance_permille(500) { (rng.unit() * most) as f32 + 0.01 } else { none }
            };
            let token = |rng: &mut Rng| u32::try_from(rng.below(vocab)).unwrap();
            let sampling = Sampling {
                temperature: if rng.chance_permille(100) { 0.0 } else { some(&mut rng, 2.0, 1.0) },
                top_p: some(&mut rng, 0.95, 1.0),
                top_k: u32::try_from(rng.below(3) * rng.below(20)).unwrap(),
                min_p: some(&mut rng, 0.3, 0.0),
                presence_penalty: some(&mut rng, 2.0, 0.0),
                frequency_penalty: some(&mut rng, 2.0, 0.0),
                repetition_penalty: some(&mut rng, 2.0, 1.0),
                logit_bias: vec![(token(&mut rng), 2.5)],
                seed: rng.next_u64(),
                min_tokens: u32::try_from(rng.below(6)).unwrap(),
                stop_token_ids: vec![token(&mut rng), 10_000],
                ignore_eos: vocab < 4 || rng.chance_permille(500),
                ..Sampling::default()
            };
            let count = 1 + rng.below(12);
            let tokens: Vec<u32> = (0..count).map(|_| token(&mut rng)).collect();
            let prompt_tokens = usize::try_from(1 + rng.below(count)).unwrap();
            let draw = Draw { sampling: &sampling, tokens: &tokens, prompt_tokens, end_tokens: &[1] };
            assert_eq!(sampler.draw(&logits, &draw), naive(&logits, &draw), "seed {seed}: {sampling:?}");
        }
    }

    #[test]
    fn tokens_come_as_often_as_they_are_likely() {
        let sampling = Sampling::default();
        let logits = [0.0f32, 1.0, 2.0, -1.0];
        let mut counts = [0u32; 4];
        let mut tokens = vec![0];
        let mut sampler = Sampler::default();
        for _ in 0..4000 {
            let draw = Draw { sampling: &sampling, tokens: &tokens, prompt_tokens: 1, end_tokens: &[] };
            let token = sampler.draw(&logits, &draw);
            counts[token as usize] += 1;
            tokens.push(token);
        }
        let sum: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
        for (count, logit) in counts.iter().zip(logits) {
            let p = f64::from(logit).exp() / sum;
            let off = (f64::from(*count) - 4000.0 * p).abs();
            assert!(off < 4.5 * (4000.0 * p * (1.0 - p)).sqrt(), "{counts:?}");
        }
    }

    #[test]
    fn broken_or_fully_masked_logits_still_give_a_token() {
        let all = Sampling { stop_token_ids: vec![0, 1, 2], min_tokens: 9, ..Sampling::default() };
        let draw = Draw { sampling: &all, tokens: &[0], prompt_tokens: 1, end_tokens: &[] };
        assert_eq!(Sampler::default().draw(&[0.0, 3.0, 1.0], &draw), 1);
        let plain = Sampling::default();
        let draw = Draw { sampling: &plain, ..draw };
        assert_eq!(Sampler::default().draw(&[f32::NAN, f32::NAN, 1.0], &draw), 2);
        assert_eq!(Sampler::default().draw(&[f32::NAN; 3], &draw), 0);
        let cold = Sampling { temperature: 1e-30, ..Sampling::default() };
        let draw = Draw { sampling: &cold, ..draw };
        assert_eq!(Sampler::default().draw(&[0.0, 3.0, 1.0], &draw), 1);
    }

    #[test]
    fn logprobs_add_up_and_rank() {
        let got = logprob(&[1.0, 3.0, 2.0, 3.0], 2, 3);
        assert_eq!(got.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 3, 2]);
        assert_eq!(got.top[2].1, got.logprob);
        let all = logprob(&[1.0, 3.0, 2.0, 3.0], 0, 255);
        let sum: f64 = all.top.iter().map(|(_, x)| f64::from(*x).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6);
        assert!(logprob(&[1.0, 3.0], 0, 0).top.is_empty());
    }
}
