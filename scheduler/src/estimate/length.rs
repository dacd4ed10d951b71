//! Predicted output length: a survival estimate by class and prompt length, learnt from finished answers. It never uses
//! a trace's future.

use alloc::string::String;
use alloc::vec::Vec;
use baton_types::ClassId;
use serde::{Deserialize, Serialize};

use crate::conductor::LATEST_US;

/// Output lengths fall into buckets of about a third of an octave.
const BUCKETS: usize = 64;
/// Prompt lengths fall into octaves.
const PROMPT_OCTAVES: usize = 24;
/// Weight of the prior, in observations.
const PRIOR_WEIGHT: f64 = 8.0;
/// Old observations fade once a histogram holds this many.
const FADE_AT: f64 = 4096.0;

/// Finished answers of one class and prompt octave.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Histogram {
    #[serde(with = "counts")]
    counts: [f32; BUCKETS],
    total: f64,
    sum_tokens: f64,
}

/// Serde has no implementation for arrays of this length.
mod counts {
    use super::{BUCKETS, Deserialize, Serialize, Vec};

    pub(super) fn serialize<S: serde::Serializer>(counts: &[f32; BUCKETS], to: S) -> Result<S::Ok, S::Error> {
        counts.as_slice().serialize(to)
    }

    pub(super) fn deserialize<'de, D: serde::Deserializer<'de>>(from: D) -> Result<[f32; BUCKETS], D::Error> {
        let counts = Vec::<f32>::deserialize(from)?;
        let wrong = |c: Vec<f32>| serde::de::Error::invalid_length(c.len(), &"one count for each bucket");
        counts.try_into().map_err(wrong)
    }
}

impl Histogram {
    const fn new() -> Self {
        Self { counts: [0.0; BUCKETS], total: 0.0, sum_tokens: 0.0 }
    }

    fn observe(&mut self, tokens: u32) {
        if self.total >= FADE_AT {
            self.counts.iter_mut().for_each(|c| *c *= 0.5);
            self.total *= 0.5;
            self.sum_tokens *= 0.5;
        }
        self.counts[bucket(tokens)] += 1.0;
        self.total += 1.0;
        self.sum_tokens += f64::from(tokens);
    }
}

/// The bucket of a length: 0, 1, 2, 3, then four per octave.
fn bucket(tokens: u32) -> usize {
    if tokens < 4 {
        return tokens as usize;
    }
    let octave = tokens.ilog2();
    let quarter = (tokens >> (octave - 2)) & 3;
    ((octave as usize - 1) * 4 + quarter as usize).min(BUCKETS - 1)
}

/// The largest length in a bucket.
fn bucket_end(bucket: usize) -> u32 {
    if bucket < 4 {
        return u32::try_from(bucket).expect("below 4");
    }
    let (octave, quarter) = (bucket / 4 + 1, bucket % 4);
    let step = 1u32 << (octave - 2);
    (1u32 << octave) + step * (u32::try_from(quarter).expect("below 4") + 1) - 1
}

/// Learns output lengths per class and prompt octave.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LengthEstimator {
    prior_tokens: u32,
    classes: Vec<[Option<alloc::boxed::Box<Histogram>>; PROMPT_OCTAVES]>,
    overall: Histogram,
    /// Mean observed decode duration, µs, and the number of observations.
    duration_us: f64,
    durations: u64,
}

impl LengthEstimator {
    pub(crate) fn new(classes: usize, prior_tokens: u32) -> Self {
        Self {
            prior_tokens,
            classes: (0..classes.max(1)).map(|_| [const { None }; PROMPT_OCTAVES]).collect(),
            overall: Histogram::new(),
            duration_us: 0.0,
            durations: 0,
        }
    }

    /// Follows a change of the classes by their names: what was learnt of a class stays with its
    /// name, or with its place where it was only renamed; a new class starts afresh.
    pub(crate) fn reclass(&mut self, old: &[String], new: &[String], prior_tokens: u32) {
        let mut known: Vec<_> = self.classes.drain(..).map(Some).collect();
        let from = |(at, name): (usize, &String)| {
            let kept = old.iter().position(|o| o == name);
            kept.or_else(|| old.get(at).filter(|o| !new.contains(o)).map(|_| at))
        };
        self.classes = new
            .iter()
            .enumerate()
            .map(|class| from(class).and_then(|at| known.get_mut(at)?.take()))
            .map(|learnt| learnt.unwrap_or([const { None }; PROMPT_OCTAVES]))
            .collect();
        self.prior_tokens = prior_tokens;
        assert!(self.classes.len() == new.len(), "each class has its own estimates");
    }

    /// Whether the estimator has an entry for each of `classes` classes and can go on counting: what was read may be
    /// anything.
    pub(crate) const fn is_sound(&self, classes: usize) -> bool {
        self.classes.len() == classes && self.durations <= LATEST_US
    }

    fn octave(prompt_tokens: u64) -> usize {
        (prompt_tokens.max(1).ilog2() as usize).min(PROMPT_OCTAVES - 1)
    }

    /// An unknown class counts as the first, as at admission.
    const fn slot(&self, class: ClassId) -> usize {
        if class.index() < self.classes.len() { class.index() } else { 0 }
    }

    /// Records a finished answer and the duration of its decode.
    pub(crate) fn observe(
        &mut self,
        class: ClassId,
        prompt_tokens: u64,
        output_tokens: u32,
        duration_us: u64,
    ) {
        self.overall.observe(output_tokens);
        let at = self.slot(class);
        self.classes[at][Self::octave(prompt_tokens)]
            .get_or_insert_with(|| alloc::boxed::Box::new(Histogram::new()))
            .observe(output_tokens);
        self.durations += 1;
        #[expect(clippy::cast_precision_loss, reason = "durations are far below 2^53 µs")]
        let (sample, count) = (duration_us as f64, self.durations.min(1000) as f64);
        self.duration_us += (sample - self.duration_us) / count;
    }

    fn best(&self, class: ClassId, prompt_tokens: u64) -> Option<&Histogram> {
        self.classes[self.slot(class)][Self::octave(prompt_tokens)]
            .as_deref()
            .filter(|h| h.total >= PRIOR_WEIGHT)
            .or((self.overall.total > 0.0).then_some(&self.overall))
    }

    /// Expected output length, tokens. The prior counts as a few observations.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "means of u32 values")]
    pub(crate) fn mean_tokens(&self, class: ClassId, prompt_tokens: u64) -> u32 {
        let prior = f64::from(self.prior_tokens);
        let Some(h) = self.best(class, prompt_tokens) else {
            return self.prior_tokens;
        };
        let mean = (h.sum_tokens + prior * PRIOR_WEIGHT) / (h.total + PRIOR_WEIGHT);
        (mean as u32).max(1)
    }

    /// The length that `permille` of answers do not exceed, given that this one is already longer
    /// than `emitted`.
    pub(crate) fn quantile_tokens(&self, key: (ClassId, u64), emitted: u32, permille: u32) -> u32 {
        let floor = emitted.saturating_add(1);
        let Some(h) = self.best(key.0, key.1) else {
            return self.prior_tokens.max(floor).saturating_mul(2);
        };
        let from = bucket(floor);
        let alive: f32 = h.counts[from..].iter().sum();
        if alive <= 0.0 {
            return floor.saturating_add(floor / 2);
        }
        #[expect(clippy::cast_precision_loss, reason = "a share of a small count")]
        let wanted = alive * permille.min(1000) as f32 / 1000.0;
        let mut seen = 0.0;
        for (at, count) in h.counts.iter().enumerate().skip(from) {
            seen += count;
            if seen >= wanted {
                return bucket_end(at).max(floor);
            }
        }
        bucket_end(BUCKETS - 1)
    }

    /// Mean decode duration seen, µs; `fallback_us` before the first.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a mean of u64 values")]
    pub(crate) const fn mean_duration_us(&self, fallback_us: u64) -> u64 {
        if self.durations == 0 { fallback_us } else { self.duration_us as u64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn before_anything_was_seen_the_prior_speaks() {
        let lengths = LengthEstimator::new(1, 256);
        assert_eq!(lengths.mean_tokens(ClassId(0), 1000), 256);
        assert_eq!(lengths.mean_duration_us(7), 7);
    }

    #[test]
    fn classes_and_prompt_octaves_are_learnt_apart() {
        let mut lengths = LengthEstimator::new(2, 100);
        for _ in 0..200 {
            lengths.observe(ClassId(0), 1000, 10, 500);
            lengths.observe(ClassId(1), 1000, 1000, 1500);
        }
        assert!(lengths.mean_tokens(ClassId(0), 1000) < 20);
        assert!(lengths.mean_tokens(ClassId(1), 1000) > 900);
        assert_eq!(lengths.mean_duration_us(0), 1000);
        assert!(lengths.quantile_tokens((ClassId(1), 1000), 0, 500) >= 1000);
    }

    #[test]
    fn what_was_emitted_already_raises_the_estimate() {
        let mut lengths = LengthEstimator::new(1, 100);
        for _ in 0..50 {
            lengths.observe(ClassId(0), 100, 10, 1);
            lengths.observe(ClassId(0), 100, 500, 1);
        }
        let fresh = lengths.quantile_tokens((ClassId(0), 100), 0, 400);
        let later = lengths.quantile_tokens((ClassId(0), 100), 50, 400);
        assert!(fresh < 20 && later >= 500, "{fresh} {later}");
    }

    proptest! {
        #[test]
        fn every_length_lies_in_its_bucket(tokens in 0u32..1_000_000) {
            let b = bucket(tokens);
            if b < BUCKETS - 1 {
                prop_assert!(tokens <= bucket_end(b));
                prop_assert!(b == 0 || tokens > bucket_end(b - 1));
            }
        }

        #[test]
        fn quantiles_rise_with_the_share_asked_for(seen in proptest::collection::vec(1u32..5000, 1..80)) {
            let mut lengths = LengthEstimator::new(1, 100);
            for s in &seen {
                lengths.observe(ClassId(0), 10, *s, 1);
            }
            let q: Vec<u32> = [100, 500, 900, 1000].iter().map(|&p| lengths.quantile_tokens((ClassId(0), 10), 0, p)).collect();
            prop_assert!(q.is_sorted());
            prop_assert!(q[3] >= *seen.iter().max().expect("not empty"));
        }
    }
}
