//! From logits to a token.
//!
//! In this order: repetition, frequency and presence penalties; biases; the mask of end tokens
//! before `min_tokens`; temperature; then `top_k`, `top_p` and `min_p`, each over what the one
//! before left. The draw at index `i` of an answer depends on the seed and on `i` alone, so that an
//! answer that moves elsewhere goes on as it would have here.

use std::cmp::Ordering;

use baton_types::{Rng, Sampling, TokenLogprob};

/// What a token is drawn for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draw<'a> {
    /// How.
    pub(crate) sampling: &'a Sampling,
    /// Prompt and answer so far.
    pub(crate) tokens: &'a [u32],
    /// How many of them are the prompt's.
    pub(crate) prompt_tokens: usize,
    /// What ends an answer of the model.
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
        let best = likeliest(&self.logits);
        if self.logits[best as usize] == f32::NEG_INFINITY {
            // Everything is masked or broken: the answer goes on with what the model says.
            return likeliest(logits);
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
            keep_likeliest(&mut self.candidates, sampling.top_k as usize);
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
fn likelier(a: &Candidate, b: &Candidate) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Sorts the candidates and keeps the `count` likeliest; 0 keeps all.
fn keep_likeliest(candidates: &mut Vec<Candidate>, count: usize) {
    if count > 0 && count < candidates.len() {
        candidates.select_nth_unstable_by(count - 1, likelier);
        candidates.truncate(count);
    }
    candidates.sort_unstable_by(likelier);
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

fn likeliest(logits: &[f32]) -> u32 {
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
    let most = f64::from(logits[likeliest(logits) as usize]);
    let sum: f64 = logits.iter().map(|logit| libm::exp(f64::from(*logit) - most)).sum();
    let log_sum = most + libm::log(sum);
    #[expect(clippy::cast_possible_truncation, reason = "logprobs are given in 32 bits")]
    let of = |logit: f32| (f64::from(logit) - log_sum) as f32;
    let mut top_tokens = Vec::new();
    if top > 0 {
        top_tokens = (0..).zip(logits.iter().copied()).collect();
        keep_likeliest(&mut top_tokens, top as usize);
        top_tokens.iter_mut().for_each(|(_, logit)| *logit = of(*logit));
    }
    TokenLogprob { logprob: of(logits[token as usize]), top: top_tokens }
}
