//! What a measurement asks of an engine, decided before the first request of it.

use anyhow::{Result, bail, ensure};

use super::caller::PREFIX_GRAIN;

/// Shortest prompt, tokens.
const SHORTEST_PROMPT: u32 = 32;
/// Tokens that a prompt of the longest context leaves for a chat's template, and for the answer.
const SPARE_TOKENS: u32 = 32;
/// Prompts of short decodes.
pub const SHORT_CONTEXT: u32 = 64;
/// Steps that are timed of a batch.
pub const STEPS: u32 = 24;
/// Steps between two batch sizes that are not timed.
pub const SETTLING_STEPS: u32 = 8;
/// Prompt tokens that an engine computes beside its decodes at least, as far as the length of answers depends on it.
const SMALLEST_PASS: u32 = 256;
/// Requests that run beside a prefill at most.
const MIXED_BATCH: u32 = 8;
/// Requests that are not of a section: trials, warm-up, checks between sections. So many are there twice: once for what was
/// begun when the others have run out.
const OTHER_REQUESTS: u32 = 16;
/// Prefills beside a batch, tokens.
const MIXED_CHUNKS: [u32; 3] = [64, 256, 1024];

/// The bounds of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanBounds {
    /// Longest prompt and answer together, tokens.
    pub max_context: u32,
    /// Largest batch.
    pub max_batch: u32,
    /// Times that each point is measured.
    pub repeats: u32,
    /// Requests at most.
    pub requests: u32,
    /// Tokens that the KV pool holds, if known.
    pub capacity_tokens: Option<u64>,
}

/// A batch that grows: the size of each level, and the prompt of each request that joins there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RampPlan {
    /// Batch size and prompt tokens, ascending by size.
    pub levels: Vec<(u32, u32)>,
}

/// What is measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeasurementPlan {
    /// Lengths of prompts without a prefix.
    pub lengths: Vec<u32>,
    /// New tokens, and tokens of the cached prefix before them.
    pub behind: Vec<(u32, u32)>,
    /// Growing batches: with short contexts, with middling and with long ones. Two of them determine a line; the third shows
    /// how straight it is.
    pub ramps: [RampPlan; 3],
    /// Requests that run beside prefills.
    pub mixed_batch: u32,
    /// Tokens of the prefills beside them.
    pub chunks: Vec<u32>,
    /// Times that each point is measured.
    pub repeats: u32,
}

impl MeasurementPlan {
    /// What fits in the bounds; with many points and few requests, repeats go before batch sizes.
    ///
    /// # Errors
    /// When the context or the number of requests is too small for any profile.
    pub fn new(mut bounds: PlanBounds) -> Result<Self> {
        let capacity =
            bounds.capacity_tokens.map_or(u32::MAX, |most| u32::try_from(most * 4 / 5).unwrap_or(u32::MAX));
        bounds.max_context = bounds.max_context.min(capacity);
        ensure!(
            bounds.max_context >= 512,
            "a context of {} tokens is too short; a profile needs 512 or more (--max-context, the model's length, its KV room)",
            bounds.max_context
        );
        loop {
            let plan = Self::within(bounds, capacity);
            let fits = plan.ramps[0].kv_tokens() <= u64::from(capacity);
            if fits && plan.requests() <= bounds.requests {
                return Ok(plan);
            }
            match bounds {
                PlanBounds { repeats: 2.., .. } if fits => bounds.repeats -= 1,
                PlanBounds { max_batch: 4.., .. } => bounds.max_batch /= 2,
                _ => {
                    bail!(
                        "--requests {} is too few; the smallest plan has {}",
                        bounds.requests,
                        plan.requests()
                    );
                }
            }
        }
    }

    fn within(bounds: PlanBounds, capacity: u32) -> Self {
        let room = bounds.max_context - SPARE_TOKENS;
        let mut lengths: Vec<u32> =
            (0..).map(|doubled| SHORTEST_PROMPT << doubled).take_while(|tokens| *tokens <= room).collect();
        let last = lengths[lengths.len() - 1];
        if room >= last + last / 4 {
            lengths.push(room);
        }
        // Not far enough from the next length to become knots of the fit, these show how well it holds in between.
        let between = [lengths.len() - 2, lengths.len() / 2].map(|at| lengths[at] - lengths[at] / 8);
        lengths.extend(between);
        lengths.sort_unstable();
        lengths.dedup();
        let whole = |tokens: u32| tokens / PREFIX_GRAIN * PREFIX_GRAIN;
        let mut behind = vec![(64, whole(room / 2)), (256, whole(room / 4)), (256, whole(room - 256))];
        if room >= 4096 {
            behind.push((1024, whole(room - 1024)));
        }
        let batches: Vec<u32> = (0..)
            .map(|doubled| 1 << doubled)
            .take_while(|batch| *batch < bounds.max_batch)
            .chain([bounds.max_batch])
            .collect();
        let short = RampPlan { levels: batches.iter().map(|batch| (*batch, SHORT_CONTEXT)).collect() };
        // Each doubling adds the first context again, and a token of the first answer for each of its passes.
        let doublings = u32::try_from(batches.len()).unwrap_or(1);
        let left = u64::from(room.saturating_sub(short.answer_tokens(0)));
        let grain = 2 * u64::from(SMALLEST_PASS);
        let mut first = u32::try_from(left * grain / (grain + 2 * u64::from(doublings))).unwrap_or(room);
        let ramp = |first: u32| {
            let joining = |(at, batch): (usize, &u32)| {
                (*batch, if at == 0 { first } else { (2 * first / batch).max(SHORT_CONTEXT) })
            };
            RampPlan { levels: batches.iter().enumerate().map(joining).collect() }
        };
        first = first.max(2 * SHORT_CONTEXT);
        while first > 2 * SHORT_CONTEXT && ramp(first).kv_tokens() > u64::from(capacity) {
            first = (first * 3 / 4).max(2 * SHORT_CONTEXT);
        }
        let (middle, long) = (ramp((first / 2).max(SHORT_CONTEXT)), ramp(first));
        Self {
            lengths,
            behind,
            ramps: [short, middle, long],
            mixed_batch: bounds.max_batch.min(MIXED_BATCH),
            chunks: MIXED_CHUNKS.into_iter().filter(|chunk| *chunk <= room / 2).collect(),
            repeats: bounds.repeats,
        }
    }

    /// Times that a prefill is measured: short ones cost little, and a hiccup of the machine is a large part of them.
    pub fn prefill_repeats(&self, new: u32) -> u32 {
        self.repeats
            * match new {
                0..=512 => 4,
                513..=2048 => 2,
                _ => 1,
            }
    }

    /// Requests that it sends at most.
    pub fn requests(&self) -> u32 {
        let points = self.lengths.iter().chain(self.behind.iter().map(|(new, _)| new));
        let ramps: u32 = self.ramps.iter().map(RampPlan::batch).sum();
        // Each point has a request ahead of the first that counts, and a prefix one that brings it in.
        let prefill =
            points.map(|new| self.prefill_repeats(*new) + 2).sum::<u32>() + self.behind.len() as u32;
        let mixed = self.mixed_batch * 2 + self.chunks.len() as u32 * self.repeats;
        OTHER_REQUESTS + self.reserve() + prefill + ramps * self.repeats + mixed
    }

    /// Requests that are kept for the end: a point that was begun, the check.
    pub fn reserve(&self) -> u32 {
        OTHER_REQUESTS + 6 * self.repeats
    }

    /// Prompt tokens that it has computed at most.
    pub fn prompt_tokens(&self) -> u64 {
        let of = |new: u32| u64::from(new) * u64::from(self.prefill_repeats(new) + 2);
        let alone: u64 = self.lengths.iter().map(|new| of(*new)).sum();
        let behind: u64 = self.behind.iter().map(|(new, prefix)| of(*new) + u64::from(*prefix)).sum();
        let ramps: u64 = self.ramps.iter().map(|ramp| ramp.prompt_tokens(0) * u64::from(self.repeats)).sum();
        let chunks: u64 = self.chunks.iter().map(|tokens| u64::from(*tokens) * u64::from(self.repeats)).sum();
        alone + behind + ramps + chunks
    }

    /// The plan for a person.
    pub fn text(&self) -> String {
        let list = |values: &[u32]| values.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        let behind: Vec<String> =
            self.behind.iter().map(|(new, prefix)| format!("{new} behind {prefix}")).collect();
        let batches: Vec<u32> = self.ramps[0].levels.iter().map(|level| level.0).collect();
        let (short, long) = (&self.ramps[0].levels, &self.ramps[2].levels);
        let last = long.len() - 1;
        format!(
            "plan: each point {} times, short prefills more often; at most {} requests and {} prompt tokens\n  \
             prefill: prompts of {} tokens; with a cached prefix: {}\n  \
             decode: batches of {}, contexts of {} tokens each, of {} to {}, and of half of that\n  \
             mixed: prefills of {} tokens beside a batch of {}\n",
            self.repeats,
            self.requests(),
            self.prompt_tokens(),
            list(&self.lengths),
            behind.join(", "),
            list(&batches),
            short[0].1,
            long[last].1,
            long[0].1,
            list(&self.chunks),
            self.mixed_batch,
        )
    }
}

impl RampPlan {
    /// The largest batch.
    pub fn batch(&self) -> u32 {
        self.levels.last().map_or(0, |level| level.0)
    }

    /// Tokens of the prompts that join at `from` and later.
    pub fn prompt_tokens(&self, from: usize) -> u64 {
        let before = |at: usize| if at == 0 { 0 } else { self.levels[at - 1].0 };
        let joining =
            |(at, (batch, tokens)): (usize, &(u32, u32))| u64::from(batch - before(at)) * u64::from(*tokens);
        self.levels.iter().enumerate().skip(from).map(joining).sum()
    }

    /// Tokens of all its prompts and answers.
    pub fn kv_tokens(&self) -> u64 {
        let before = |at: usize| if at == 0 { 0 } else { self.levels[at - 1].0 };
        let of_level = |(at, (batch, tokens)): (usize, &(u32, u32))| {
            u64::from(batch - before(at)) * u64::from(tokens + self.answer_tokens(at))
        };
        self.levels.iter().enumerate().map(of_level).sum()
    }

    /// Tokens of an answer that joins at `level` and has to last until the largest batch is timed: its steps, and one for
    /// each pass of the prompts after it.
    pub fn answer_tokens(&self, level: usize) -> u32 {
        let left = (self.levels.len() - level) as u32;
        let passes = self.batch()
            + u32::try_from(self.prompt_tokens(level + 1) / u64::from(SMALLEST_PASS)).unwrap_or(u32::MAX / 4);
        left * (STEPS + SETTLING_STEPS) + passes + 32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: PlanBounds =
        PlanBounds { max_context: 16_384, max_batch: 32, repeats: 3, requests: 1_000, capacity_tokens: None };

    #[test]
    fn a_plan_keeps_to_its_bounds() {
        let plan = MeasurementPlan::new(BOUNDS).unwrap();
        assert_eq!((plan.lengths[0], *plan.lengths.last().unwrap()), (32, 16_352));
        assert!(plan.behind.iter().all(|(new, prefix)| new + prefix <= 16_352 && prefix % 64 == 0));
        assert_eq!(plan.ramps[2].levels.iter().map(|l| l.0).collect::<Vec<_>>(), [1, 2, 4, 8, 16, 32]);
        let longest = plan.ramps[2].levels[0].1 + plan.ramps[2].answer_tokens(0);
        assert!(longest <= 16_384, "{longest}");
        assert!(plan.requests() < 700, "{}", plan.requests());
        for requests in [500, 300, 200] {
            let plan = MeasurementPlan::new(PlanBounds { requests, ..BOUNDS }).unwrap();
            assert!(plan.requests() <= requests);
        }
        assert!(
            MeasurementPlan::new(PlanBounds { requests: 20, ..BOUNDS })
                .unwrap_err()
                .to_string()
                .contains("--requests 20")
        );
        assert!(
            MeasurementPlan::new(PlanBounds { max_context: 300, ..BOUNDS })
                .unwrap_err()
                .to_string()
                .contains("300 tokens")
        );
    }

    #[test]
    fn batches_fit_in_the_pool() {
        for capacity in [2_048_u64, 8_192, 100_000] {
            let plan =
                MeasurementPlan::new(PlanBounds { capacity_tokens: Some(capacity), ..BOUNDS }).unwrap();
            assert!(u64::from(*plan.lengths.last().unwrap()) < capacity);
            for ramp in &plan.ramps {
                assert!(ramp.kv_tokens() <= capacity, "{capacity}: {plan:?}");
            }
        }
    }

    #[test]
    fn an_odd_batch_and_a_small_one_are_measured_too() {
        let batches = |max_batch| {
            let plan = MeasurementPlan::new(PlanBounds { max_batch, ..BOUNDS }).unwrap();
            plan.ramps[0].levels.iter().map(|l| l.0).collect::<Vec<_>>()
        };
        assert_eq!(batches(6), [1, 2, 4, 6]);
        assert_eq!(batches(2), [1, 2]);
    }
}
