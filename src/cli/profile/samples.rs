//! What a measurement saw of each point, and the medians that are fitted.

use std::collections::BTreeMap;

use baton_sim::fit::measured::{DecodePoint, MixedPoint, PrefillPoint};
use baton_sim::fit::{self, curvature};

use super::caller::median;

/// A prefill that a batch feels less than this share of is computed elsewhere.
const ELSEWHERE_SHARE: f64 = 0.15;

/// What was measured, point by point, with all repeats.
#[derive(Clone, Debug, Default)]
pub struct PointSamples {
    /// By new tokens and prefix: times of the pass, µs.
    pub prefill: BTreeMap<(u32, u64), Vec<f64>>,
    /// By ramp and batch: sums of contexts, tokens, and times of a step, µs.
    pub decode: BTreeMap<(usize, u32), Vec<(u64, f64)>>,
    /// By batch and prefill.
    pub mixed: BTreeMap<(u32, u32), Vec<MixedSample>>,
    /// Time that requests spend outside of passes, µs.
    pub outside_us: Vec<f64>,
    /// Change of the engine's speed from the beginning to the end, share.
    pub drift: f64,
    /// What could not be measured, and why.
    pub notes: Vec<String>,
}

/// A prefill beside a batch, once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MixedSample {
    /// Context of each request of the batch, tokens.
    pub context_tokens: u64,
    /// Steps that the prefill was spread over.
    pub steps: u32,
    /// Mean time of one of them, µs.
    pub step_us: f64,
}

impl PointSamples {
    /// Medians of the prefills. Attention is added where no prefix shows it.
    pub fn prefill_points(&self) -> Vec<PrefillPoint> {
        let point = |((new, prefix), times): (&(u32, u64), &Vec<f64>)| PrefillPoint {
            new_tokens: *new,
            prefix_tokens: *prefix,
            latency_us: median(times),
            attention_us: None,
        };
        let mut points: Vec<PrefillPoint> = self.prefill.iter().map(point).collect();
        if points.iter().all(|p| p.prefix_tokens == 0) {
            curvature::set_attention(&mut points);
        }
        points
    }

    /// Medians of the batches that were timed at two contexts or more, as measured, and without disorder: no batch takes
    /// less time than a smaller one of the same ramp, which had less context, too. Neighbours in disorder share their mean.
    pub fn decode_points(&self) -> (Vec<DecodePoint>, Vec<DecodePoint>) {
        let (mut measured, mut ascending) = (Vec::new(), Vec::new());
        let ramps = self.decode.keys().map(|(ramp, _)| *ramp).max().map_or(0, |last| last + 1);
        let seen = |batch: u32| (0..ramps).filter(|ramp| self.decode.contains_key(&(*ramp, batch))).count();
        for ramp in 0..ramps {
            let of_ramp = self.decode.range((ramp, 0)..(ramp + 1, 0));
            let points: Vec<DecodePoint> = of_ramp
                .filter(|((_, batch), _)| seen(*batch) > 1)
                .map(|((_, batch), times)| point(*batch, times))
                .collect();
            let times = fit::ascending(points.iter().map(|p| p.latency_us).collect());
            ascending.extend(
                points.iter().zip(times).map(|(p, latency_us)| DecodePoint { latency_us, ..p.clone() }),
            );
            measured.extend(points);
        }
        (measured, ascending)
    }

    /// Medians of the mixed steps; of a prefill over several steps the average one. None where prefills are computed
    /// elsewhere, by what `alone_us` says of them.
    pub fn mixed_points(&self, alone_us: impl Fn(u32) -> f64) -> Option<Vec<MixedPoint>> {
        let mut points = Vec::new();
        let plain_us = |batch: u32| {
            let times = self.decode.iter().find(|((ramp, of), _)| *ramp == 0 && *of >= batch);
            times.map_or(0.0, |(_, times)| median(&times.iter().map(|t| t.1).collect::<Vec<_>>()))
        };
        for ((batch, chunk), steps) in &self.mixed {
            let step_us = median(&steps.iter().map(|s| s.step_us).collect::<Vec<_>>());
            let count = median(&steps.iter().map(|s| f64::from(s.steps)).collect::<Vec<_>>()).max(1.0);
            let felt_us = count * (step_us - plain_us(*batch));
            if alone_us(*chunk) > 2.0 * plain_us(*batch) && felt_us < ELSEWHERE_SHARE * alone_us(*chunk) {
                return None;
            }
            let new_tokens = (f64::from(*chunk) / count).round().max(1.0) as u32;
            points.push(MixedPoint {
                batch: *batch,
                context_tokens: steps.iter().map(|s| s.context_tokens).sum::<u64>()
                    / steps.len().max(1) as u64,
                new_tokens,
                prefix_tokens: u64::from(chunk.saturating_sub(new_tokens)) / 2,
                latency_us: step_us,
            });
        }
        Some(points)
    }

    /// Half of what the repeats of a point differ by, in per cent of it: the median over all points.
    pub fn noise_pct(&self) -> f64 {
        let prefill = self.prefill.values().map(|times| spread(times));
        let decode = self.decode.values().map(|times| spread(&times.iter().map(|t| t.1).collect::<Vec<_>>()));
        50.0 * median(&prefill.chain(decode).collect::<Vec<_>>())
    }
}

/// The median of the times of a batch, at the mean of its contexts.
fn point(batch: u32, times: &[(u64, f64)]) -> DecodePoint {
    let context = times.iter().map(|t| t.0).sum::<u64>() / times.len().max(1) as u64;
    DecodePoint {
        batch,
        context_tokens: (context + u64::from(batch) / 2) / u64::from(batch),
        latency_us: median(&times.iter().map(|t| t.1).collect::<Vec<_>>()),
    }
}

/// The distance of the quartiles over the median; of few values that of the outermost.
pub fn spread(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let (middle, quarter) = (median(times), sorted.len() / 4);
    if sorted.is_empty() || middle <= 0.0 {
        return 0.0;
    }
    (sorted[sorted.len() - 1 - quarter] - sorted[quarter]) / middle
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mixed(steps: u32, step_us: f64) -> PointSamples {
        let mut points = PointSamples::default();
        points.decode.insert((0, 8), vec![(800, 10_000.0)]);
        points.mixed.insert((8, 1_024), vec![MixedSample { context_tokens: 100, steps, step_us }; 3]);
        points
    }

    #[test]
    fn a_prefill_over_several_steps_is_filed_as_its_average_step() {
        let [point] = mixed(4, 30_000.0).mixed_points(|_| 80_000.0).unwrap()[..].to_vec().try_into().unwrap();
        assert_eq!((point.new_tokens, point.prefix_tokens, point.latency_us), (256, 384, 30_000.0));
    }

    #[test]
    fn prefills_that_no_batch_feels_are_computed_elsewhere() {
        assert_eq!(mixed(1, 10_500.0).mixed_points(|_| 80_000.0), None);
        assert!(mixed(1, 80_000.0).mixed_points(|_| 80_000.0).is_some());
    }

    #[test]
    fn a_batch_needs_two_contexts_and_costs_no_less_than_a_smaller_one() {
        let mut points = PointSamples::default();
        for (ramp, context) in [(0, 100), (1, 1_000)] {
            for (batch, us) in [(1, 10.0), (2, 14.0), (4, 12.0)] {
                points.decode.insert((ramp, batch), vec![(context * u64::from(batch), us)]);
            }
        }
        points.decode.insert((0, 8), vec![(800, 20.0)]);
        let (measured, ascending) = points.decode_points();
        let of = |points: &[DecodePoint]| points.iter().map(|p| (p.batch, p.latency_us)).collect::<Vec<_>>();
        assert_eq!(of(&measured[..3]), [(1, 10.0), (2, 14.0), (4, 12.0)]);
        assert_eq!(of(&ascending[3..]), [(1, 10.0), (2, 13.0), (4, 13.0)]);
        assert_eq!((measured.len(), measured[5].context_tokens), (6, 1_000));
    }

    #[test]
    fn noise_is_what_repeats_differ_by() {
        assert_eq!(spread(&[]), 0.0);
        assert!((spread(&[90.0, 100.0, 110.0]) - 0.2).abs() < 1e-9);
        // One of eight outside is a hiccup.
        assert!(spread(&[100.0, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0, 900.0]) < 1e-9);
    }
}
