//! Prompts in parts, for an engine that knows of no objective.
//!
//! vLLM and SGLang put all prompt tokens that they have into one step, as far as a fixed budget goes, and whoever
//! decodes beside them waits for that step. But they keep the prefixes of what they computed. So the node asks for a
//! long prompt's first part, then for more of it, each time as much as a step can hold beside the decodes, and for the
//! answer at last. How much that is it learns from the gaps between the tokens of the answers that run meanwhile.

use std::sync::Arc;
use std::time::Instant;

use baton_remote::{ClientBody, RemoteEngine, Request};
use baton_types::{CostProfile, Sampling};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::work::Work;

/// Prompt tokens of a part at least: a call costs an engine about as much as so many.
const LEAST_TOKENS: u64 = 128;
/// Prompts at a time. While one call is on its way the engine computes the other, and both may come into one step.
const TURNS: usize = 2;
/// An answer is looked at over so long a time, µs: many steps, and less than a second.
const WINDOW_US: u64 = 250_000;
/// Each observation multiplies the weight of the earlier ones by this: a few hundred of them count.
const FADE: f64 = 1.0 - 1.0 / 256.0;
/// Weight of what the profile predicts, in observations.
const PRIOR_WEIGHT: f64 = 8.0;
/// Prompt tokens by which steps have to differ (standard deviation) to show what one costs.
const LEAST_SPREAD: f64 = 16.0;
/// A single observation counts for at most so many times what was expected.
const OUTLIER: f64 = 4.0;

/// What the steps of an engine take: a straight line over their prompt tokens, fitted by least squares that fade.
#[derive(Debug)]
struct StepEstimator {
    weight: f64,
    /// Means of tokens, times, squared tokens, and tokens times times.
    tokens: f64,
    time_us: f64,
    squares: f64,
    products: f64,
    /// What a prompt token adds, µs.
    token_us: f64,
}

impl StepEstimator {
    /// Begins with what a profile predicts.
    fn new(profile: &CostProfile) -> Self {
        let token_us = (profile.prefill_us(1024, 0) - profile.prefill_us(1, 0)) / 1023.0;
        Self::of(profile.decode_us(1, 0), token_us)
    }

    /// Begins with steps of that length and prompt tokens of that cost, µs.
    fn of(lone_us: f64, token_us: f64) -> Self {
        let token_us = token_us.max(1e-3);
        let mut steps =
            Self { weight: 0.0, tokens: 0.0, time_us: 0.0, squares: 0.0, products: 0.0, token_us };
        steps.add(0.0, lone_us, PRIOR_WEIGHT);
        steps.add(1024.0, 1024.0_f64.mul_add(token_us, lone_us), PRIOR_WEIGHT);
        steps
    }

    fn add(&mut self, tokens: f64, time_us: f64, weight: f64) {
        self.weight += weight;
        let part = weight / self.weight;
        self.tokens += (tokens - self.tokens) * part;
        self.time_us += (time_us - self.time_us) * part;
        self.squares += tokens.mul_add(tokens, -self.squares) * part;
        self.products += tokens.mul_add(time_us, -self.products) * part;
    }

    /// A step without prompt tokens, µs.
    fn lone_us(&self) -> f64 {
        self.tokens.mul_add(-self.token_us, self.time_us).max(0.0)
    }

    /// An answer came on by `steps` tokens in that time, while `tokens` prompt tokens were computed beside it.
    fn observe(&mut self, elapsed_us: u64, steps: u64, tokens: u64) {
        if steps == 0 {
            return;
        }
        let (tokens, time_us) = (number(tokens) / number(steps), number(elapsed_us) / number(steps));
        let expected_us = tokens.mul_add(self.token_us, self.lone_us());
        self.weight *= FADE;
        self.add(tokens, time_us.min(OUTLIER * expected_us.max(1.0)), 1.0);
        let spread = self.tokens.mul_add(-self.tokens, self.squares);
        if spread > LEAST_SPREAD * LEAST_SPREAD {
            self.token_us = (self.tokens.mul_add(-self.time_us, self.products) / spread).max(1e-3);
        }
    }

    /// Prompt tokens that a step holds within `target_us`.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a float beyond the range becomes its end"
    )]
    fn tokens_within(&self, target_us: u64) -> u64 {
        ((number(target_us) - self.lone_us()) / self.token_us).max(0.0) as u64
    }
}

#[expect(clippy::cast_precision_loss, reason = "times and counts are far below 2^52")]
const fn number(count: u64) -> f64 {
    count as f64
}

/// Sends prompts in parts that keep the step target, in the order in which they come.
#[derive(Debug)]
pub(super) struct PromptSplitter {
    block_tokens: u64,
    since: Instant,
    state: Mutex<SplitterState>,
    /// Held from the first part of a prompt to its first token.
    turns: Semaphore,
}

#[derive(Debug)]
struct SplitterState {
    steps: StepEstimator,
    /// Longest step that the conductor allows, µs.
    target_us: Option<u64>,
    /// Answers that run.
    running: usize,
    /// When the latest prompt had its first token.
    latest_us: u64,
    /// Prompt tokens computed since the start.
    computed_tokens: u64,
    /// Tokens of parts that the engine counts as found in its cache by the calls after them, since the start.
    refound_tokens: u64,
}

/// A prompt's turn at the engine, until it is dropped.
pub(super) struct PromptTurn<'a> {
    splitter: &'a PromptSplitter,
    /// Prompt tokens that the engine had before, as it counts them, if it was sent parts.
    pub(super) found_tokens: Option<u64>,
    began_us: u64,
    /// Prompt tokens that it computes with the answer.
    left_tokens: u64,
    _turn: SemaphorePermit<'a>,
}

impl PromptTurn<'_> {
    /// The first token is there: the engine's own time for this prompt, µs. It computes prompts in turn, so what it did
    /// before the one ahead was done was not for this one.
    pub(super) fn compute_us(&self) -> u64 {
        let now_us = self.splitter.now_us();
        let ahead_us = std::mem::replace(&mut self.splitter.state.lock().latest_us, now_us);
        now_us.saturating_sub(ahead_us.max(self.began_us))
    }
}

impl Drop for PromptTurn<'_> {
    fn drop(&mut self) {
        self.splitter.computed(self.left_tokens);
    }
}

/// An answer that runs, until it is dropped.
pub(super) struct RunningAnswer {
    splitter: Arc<PromptSplitter>,
    /// When it was looked at, and how many prompt tokens had been computed by then.
    since_us: u64,
    computed_tokens: u64,
    /// Its tokens since then.
    steps: u64,
}

impl RunningAnswer {
    /// The engine has computed the prompt, and its first token is there.
    pub(super) fn new(splitter: &Arc<PromptSplitter>) -> Self {
        let mut state = splitter.state.lock();
        state.running += 1;
        let computed_tokens = state.computed_tokens;
        drop(state);
        Self { since_us: splitter.now_us(), splitter: Arc::clone(splitter), computed_tokens, steps: 0 }
    }

    /// Its next tokens are there.
    pub(super) fn came(&mut self, tokens: usize) {
        self.steps += tokens as u64;
        let now_us = self.splitter.now_us();
        let elapsed_us = now_us.saturating_sub(self.since_us);
        if elapsed_us < WINDOW_US {
            return;
        }
        let mut state = self.splitter.state.lock();
        let beside = state.computed_tokens - self.computed_tokens;
        state.steps.observe(elapsed_us, self.steps, beside);
        (self.since_us, self.computed_tokens, self.steps) = (now_us, state.computed_tokens, 0);
    }
}

impl Drop for RunningAnswer {
    fn drop(&mut self) {
        self.splitter.state.lock().running -= 1;
    }
}

impl PromptSplitter {
    pub(super) fn new(profile: &CostProfile, block_tokens: u32) -> Self {
        let steps = StepEstimator::new(profile);
        let state = SplitterState { steps, target_us: None, running: 0, latest_us: 0, computed_tokens: 0, refound_tokens: 0 };
        Self {
            block_tokens: block_tokens.max(1).into(),
            since: Instant::now(),
            state: Mutex::new(state),
            turns: Semaphore::new(TURNS),
        }
    }

    /// The conductor's step target.
    pub(super) fn aim(&self, target_us: Option<u64>) {
        self.state.lock().target_us = target_us;
    }

    fn computed(&self, tokens: u64) {
        self.state.lock().computed_tokens += tokens;
    }

    /// Tokens of parts that the engine counts as found in its cache, though nobody had asked for them before.
    pub(super) fn refound_tokens(&self) -> u64 {
        self.state.lock().refound_tokens
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Prompt tokens of the next part, in whole blocks; `None` where nobody waits for its step.
    fn part_tokens(&self) -> Option<u64> {
        let state = self.state.lock();
        let target_us = state.target_us.filter(|_| state.running > 0)?;
        let step = state.steps.tokens_within(target_us);
        // What comes into one step is what all turns have sent.
        let own = if self.turns.available_permits() == 0 { step / TURNS as u64 } else { step };
        Some((own / self.block_tokens * self.block_tokens).max(LEAST_TOKENS.next_multiple_of(self.block_tokens)))
    }

    /// Waits for the turn of a prompt, and has all of it computed that does not fit into one step. The engine computes the
    /// rest with the answer.
    pub(super) async fn turn_of(&self, engine: &RemoteEngine, work: &Work) -> PromptTurn<'_> {
        let permit = self.turns.acquire().await.expect("it is never closed");
        let all = work.request.tokens.len() as u64;
        let mut done = work.expected_tokens.unwrap_or(0).min(all) / self.block_tokens * self.block_tokens;
        let first = done;
        let mut turn = PromptTurn {
            splitter: self,
            found_tokens: None,
            began_us: self.now_us(),
            left_tokens: all - done,
            _turn: permit,
        };
        // The engine computes prompts without their cached prefix when it is to report their logprobs.
        let whole = work.request.sampling.prompt_logprobs.is_some();
        while let Some(tokens) = self.part_tokens().filter(|tokens| !whole && *tokens < turn.left_tokens) {
            let part = usize::try_from(done + tokens).unwrap_or(usize::MAX);
            let Some(found) = computed(engine, &work.request, part).await else { return turn };
            self.computed(tokens);
            // What it did not keep it would compute again and again.
            if turn.found_tokens.is_some() && found.is_some_and(|found| found + self.block_tokens < done) {
                return turn;
            }
            // vLLM reports nothing where it found nothing.
            turn.found_tokens.get_or_insert(found.unwrap_or(0));
            done += tokens;
            turn.left_tokens -= tokens;
            self.state.lock().refound_tokens += done - first;
        }
        turn
    }
}

/// Has the first `tokens` tokens of a prompt computed. Returns how many of them the engine had, if it reports that; `None`
/// where it did not do it: why, the call for the answer will show.
async fn computed(engine: &RemoteEngine, request: &Request, tokens: usize) -> Option<Option<u64>> {
    let sampling = Sampling { temperature: 0.0, max_tokens: 1, ignore_eos: true, ..Sampling::default() };
    let part = Request {
        id: Arc::clone(&request.id),
        tokens: request.tokens[..tokens].to_vec().into(),
        sampling: Arc::new(sampling),
        body: ClientBody::default(),
        salt: request.salt.clone(),
    };
    let answer = engine.generate(part).await.ok()?.all().await.ok()?;
    Some(answer.counts.cached_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An answer of an engine whose steps take 10 ms, and 50 µs more for each prompt token: every second step has some.
    fn play(steps: &mut StepEstimator, windows: u64) {
        for at in 0..windows {
            let (count, tokens) = (20, 10 * (at % 8) * 128);
            steps.observe(count * 10_000 + 50 * tokens, count, tokens);
        }
    }

    #[test]
    fn it_learns_what_a_step_and_a_prompt_token_take() {
        let mut steps = StepEstimator::of(30_000.0, 400.0);
        assert_eq!(steps.tokens_within(50_000), 50, "by what it was told first");
        play(&mut steps, 3_000);
        assert!((steps.lone_us() - 10_000.0).abs() < 50.0, "{steps:?}");
        assert!((steps.token_us - 50.0).abs() < 0.5, "{steps:?}");
        assert!((790..=810).contains(&steps.tokens_within(50_000)), "{steps:?}");
        assert_eq!(steps.tokens_within(5_000), 0);
    }

    #[test]
    fn steps_that_are_all_alike_change_the_time_and_not_the_cost_of_a_token() {
        let mut steps = StepEstimator::of(10_000.0, 50.0);
        (0..3_000).for_each(|_| steps.observe(20 * 45_000, 20, 20 * 512));
        assert!((steps.token_us - 50.0).abs() < 1.0, "{steps:?}");
        let step_us = steps.lone_us() + 512.0 * steps.token_us;
        assert!((step_us - 45_000.0).abs() < 100.0, "{steps:?}");
    }

    #[test]
    fn one_long_silence_does_not_spoil_what_is_known() {
        let mut steps = StepEstimator::of(10_000.0, 50.0);
        play(&mut steps, 1_000);
        steps.observe(60_000_000, 1, 1_024);
        assert!((600..=1_000).contains(&steps.tokens_within(50_000)), "{steps:?}");
    }

    /// Whatever comes, a step holds no more than its target by what is known.
    #[test]
    fn parts_are_within_the_target() {
        let mut state = 7u64;
        let mut draw = |bits: u32| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            state >> (64 - bits)
        };
        for _ in 0..200 {
            let mut steps = StepEstimator::of(number(draw(16)), number(draw(8)));
            for _ in 0..100 {
                let bits = 1 + u32::try_from(draw(5)).expect("5 bits");
                steps.observe(draw(bits), draw(8), draw(bits));
                let target_us = draw(40);
                let tokens = steps.tokens_within(target_us);
                assert!(steps.token_us > 0.0 && steps.lone_us() >= 0.0, "{steps:?}");
                let step_us = number(tokens).mul_add(steps.token_us, steps.lone_us());
                assert!(tokens == 0 || step_us <= number(target_us) * 1.000_001 + 1.0, "{steps:?}");
            }
        }
    }
}
