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
use tokio::sync::MutexGuard;

use super::work::Work;

/// Prompt tokens of a part at least: a call costs an engine about as much as so many.
const LEAST_TOKENS: u64 = 128;
/// Tokens of the answers beside a part may come so long after the answer to the part itself, µs.
const ALONGSIDE_US: u64 = 2_000;
/// One observation changes what is known by this part of the difference: for steps with prompt tokens, and without.
const PART_WEIGHT: f64 = 1.0 / 8.0;
const LONE_WEIGHT: f64 = 1.0 / 64.0;
/// A single observation counts for at most so many times what was known.
const OUTLIER: f64 = 4.0;

/// What the steps of an engine cost, learnt from the gaps between tokens.
#[derive(Debug)]
struct StepEstimator {
    /// A step without prompt tokens, µs.
    lone_us: f64,
    /// What a prompt token adds, µs.
    token_us: f64,
    part: Option<Part>,
}

/// The latest part of a prompt.
#[derive(Clone, Copy, Debug)]
struct Part {
    tokens: u64,
    /// When the engine had computed it, µs.
    done_us: Option<u64>,
    /// The longest gap since it was sent, µs.
    longest_us: u64,
}

impl StepEstimator {
    /// Begins with what a profile predicts.
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    fn new(profile: &CostProfile) -> Self {
        let token_us = (profile.prefill_us(1024, 0) - profile.prefill_us(1, 0)) / 1023 as f64;
        Self { lone_us: profile.decode_us(1, 0), token_us: token_us.max(1e-3), part: None }
    }

    /// Prompt tokens that a step holds within `target_us`, in whole blocks.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "times and counts are far below 2^52"
    )]
    fn tokens_within(&self, target_us: u64, block_tokens: u32) -> u64 {
        let tokens = ((target_us as f64 - self.lone_us) / self.token_us).max(0.0) as u64;
        let block = u64::from(block_tokens.max(1));
        (tokens / block * block).max(LEAST_TOKENS.next_multiple_of(block))
    }

    /// A part of `tokens` tokens is sent.
    fn sent(&mut self, tokens: u64) {
        self.learn_part();
        self.part = Some(Part { tokens, done_us: None, longest_us: 0 });
    }

    /// The engine has computed it.
    fn done(&mut self, now_us: u64) {
        if let Some(part) = &mut self.part {
            part.done_us = Some(now_us);
        }
    }

    /// A token came `gap_us` after the one before it of the same answer.
    fn gap(&mut self, now_us: u64, gap_us: u64) {
        let Some(part) = &mut self.part else {
            learn(&mut self.lone_us, us(gap_us), LONE_WEIGHT);
            return;
        };
        part.longest_us = part.longest_us.max(gap_us);
        if part.done_us.is_some_and(|done_us| now_us > done_us + ALONGSIDE_US) {
            self.learn_part();
        }
    }

    fn learn_part(&mut self) {
        // A part that is shorter shows what a call costs, and not what its tokens do.
        let teaches = |part: &Part| part.longest_us > 0 && part.tokens >= LEAST_TOKENS;
        let Some(part) = self.part.take().filter(teaches) else { return };
        let token_us = (us(part.longest_us) - self.lone_us).max(0.0) / us(part.tokens);
        learn(&mut self.token_us, token_us.max(1e-3), PART_WEIGHT);
    }
}

fn learn(known: &mut f64, seen: f64, weight: f64) {
    *known += (seen.min(*known * OUTLIER) - *known) * weight;
}

#[expect(clippy::cast_precision_loss, reason = "times and counts are far below 2^52")]
const fn us(count: u64) -> f64 {
    count as f64
}

/// Sends prompts one after the other, in parts that keep the step target.
#[derive(Debug)]
pub(super) struct PromptSplitter {
    block_tokens: u32,
    since: Instant,
    state: Mutex<SplitterState>,
    /// Held from the first part of a prompt to its first token.
    turn: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct SplitterState {
    steps: StepEstimator,
    /// Longest step that the conductor allows, µs.
    target_us: Option<u64>,
    /// Answers that run.
    running: usize,
}

/// A prompt's turn at the engine, until it is dropped.
pub(super) struct PromptTurn<'a> {
    splitter: &'a PromptSplitter,
    /// Prompt tokens that the engine had before, as it counts them, if it was sent parts.
    pub(super) found_tokens: Option<u64>,
    pub(super) began: Instant,
    _turn: MutexGuard<'a, ()>,
}

impl Drop for PromptTurn<'_> {
    fn drop(&mut self) {
        self.splitter.state.lock().steps.done(self.splitter.now_us());
    }
}

/// An answer that runs, until it is dropped.
pub(super) struct RunningAnswer {
    splitter: Arc<PromptSplitter>,
    latest_us: u64,
}

impl RunningAnswer {
    /// The engine has computed the prompt, and its first token is there.
    pub(super) fn new(splitter: &Arc<PromptSplitter>) -> Self {
        splitter.state.lock().running += 1;
        Self { latest_us: splitter.now_us(), splitter: Arc::clone(splitter) }
    }

    /// Its next token is there.
    pub(super) fn came(&mut self) {
        let now_us = self.splitter.now_us();
        let gap_us = now_us.saturating_sub(std::mem::replace(&mut self.latest_us, now_us));
        self.splitter.state.lock().steps.gap(now_us, gap_us);
    }
}

impl Drop for RunningAnswer {
    fn drop(&mut self) {
        self.splitter.state.lock().running -= 1;
    }
}

impl PromptSplitter {
    pub(super) fn new(profile: &CostProfile, block_tokens: u32) -> Self {
        let state = SplitterState { steps: StepEstimator::new(profile), target_us: None, running: 0 };
        Self {
            block_tokens,
            since: Instant::now(),
            state: Mutex::new(state),
            turn: tokio::sync::Mutex::default(),
        }
    }

    /// The conductor's step target.
    pub(super) fn aim(&self, target_us: Option<u64>) {
        self.state.lock().target_us = target_us;
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Prompt tokens that the next step may hold; `None` where nobody waits for it.
    fn part_tokens(&self) -> Option<u64> {
        let state = self.state.lock();
        let target_us = state.target_us.filter(|_| state.running > 0)?;
        Some(state.steps.tokens_within(target_us, self.block_tokens))
    }

    /// Waits for the turn of a prompt, and has all of it computed that does not fit into one step. The engine computes the
    /// rest with the answer.
    pub(super) async fn turn_of(&self, engine: &RemoteEngine, work: &Work) -> PromptTurn<'_> {
        let turn = self.turn.lock().await;
        let mut turn = PromptTurn { splitter: self, found_tokens: None, began: Instant::now(), _turn: turn };
        let all = work.request.tokens.len() as u64;
        let block = u64::from(self.block_tokens.max(1));
        let mut done = work.expected_tokens.unwrap_or(0).min(all) / block * block;
        // The engine computes prompts without their cached prefix when it is to report their logprobs.
        let whole = work.request.sampling.prompt_logprobs.is_some();
        while let Some(tokens) = self.part_tokens().filter(|_| !whole)
            && done + tokens < all
        {
            self.state.lock().steps.sent(tokens);
            let part = usize::try_from(done + tokens).unwrap_or(usize::MAX);
            let found = computed(engine, &work.request, part).await;
            self.state.lock().steps.done(self.now_us());
            let Some(found) = found else { return turn };
            // What it did not keep it would compute again and again.
            if turn.found_tokens.is_some() && found.is_some_and(|found| found + block < done) {
                break;
            }
            turn.found_tokens = turn.found_tokens.or(found);
            done += tokens;
        }
        self.state.lock().steps.sent(all.saturating_sub(done).max(1));
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

    /// An engine whose steps take 10 ms, and 50 µs more for each prompt token.
    fn play(steps: &mut StepEstimator, rounds: usize, tokens: u64) {
        let mut now_us = 0;
        for _ in 0..rounds {
            for _ in 0..4 {
                now_us += 10_000;
                steps.gap(now_us, 10_000);
            }
            steps.sent(tokens);
            now_us += 10_000 + 50 * tokens;
            steps.gap(now_us, 10_000 + 50 * tokens);
            steps.done(now_us + 500);
            now_us += 10_000;
            steps.gap(now_us, 10_000);
        }
    }

    fn estimator() -> StepEstimator {
        StepEstimator { lone_us: 2_000.0, token_us: 400.0, part: None }
    }

    #[test]
    fn it_learns_what_a_step_and_a_prompt_token_cost() {
        let mut steps = estimator();
        assert_eq!(steps.tokens_within(50_000, 16), 128, "what it was told first allows 120");
        play(&mut steps, 200, 512);
        assert!((steps.lone_us - 10_000.0).abs() < 100.0, "{steps:?}");
        assert!((steps.token_us - 50.0).abs() < 1.0, "{steps:?}");
        assert!((768..=800).contains(&steps.tokens_within(50_000, 16)), "{steps:?}");
        assert_eq!(steps.tokens_within(5_000, 16), 128, "a prompt goes on where no step keeps the target");
    }

    #[test]
    fn what_is_short_teaches_nothing_about_tokens() {
        let mut steps = estimator();
        play(&mut steps, 50, 16);
        assert!((steps.token_us - 400.0).abs() < 1e-9, "{steps:?}");
    }

    #[test]
    fn one_long_gap_does_not_spoil_what_is_known() {
        let mut steps = estimator();
        play(&mut steps, 200, 512);
        steps.sent(512);
        steps.gap(1, 60_000_000);
        steps.done(2);
        steps.gap(60_000_000, 10_000);
        assert!(steps.token_us < 80.0, "{steps:?}");
    }

    /// Whatever comes, a part has tokens, and not more than the target holds by what is known.
    #[test]
    fn parts_are_within_the_target() {
        let mut state = 7u64;
        let mut draw = |bits: u32| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            state >> (64 - bits)
        };
        for _ in 0..200 {
            let mut steps = estimator();
            let block_tokens = u32::try_from(draw(12)).expect("12 bits");
            for _ in 0..100 {
                let bits = 1 + u32::try_from(draw(5)).expect("5 bits");
                let value = draw(bits);
                match draw(8) % 3 {
                    0 => steps.sent(value),
                    1 => steps.done(value),
                    _ => steps.gap(value, value),
                }
                let target_us = draw(40);
                let tokens = steps.tokens_within(target_us, block_tokens);
                let block = u64::from(block_tokens.max(1));
                assert!(tokens >= LEAST_TOKENS && tokens.is_multiple_of(block));
                let step_us = steps.lone_us + us(tokens) * steps.token_us;
                assert!(step_us <= us(target_us) + 1.0 || tokens < LEAST_TOKENS + block, "{steps:?}");
            }
        }
    }
}
