//! Prompts in parts, for an engine that knows of no objective.
//!
//! vLLM and SGLang put all prompt tokens that they have into one step, as far as a fixed budget goes, and all
//! answers beside them wait for that step. But they keep the prefixes of what they computed. So the node asks for a
//! long prompt's first part, then for more of it, each time as much as a step can hold beside the decodes, and for the
//! answer at last. How much that is it learns from the gaps between the tokens of the answers that run meanwhile.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_remote::{RemoteEngine, RemoteError, Request};
use baton_types::CostProfile;
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore, SemaphorePermit};

use super::work::Work;
use crate::conductor::GapTally;

/// Prompt tokens of a part at least: a call costs an engine about as much as so many.
const LEAST_TOKENS: u64 = 128;
/// Prompts of several parts at a time: while a part of one is on its way to the engine, it computes one of the other.
const TURNS: usize = 2;
/// Steps whose prompt tokens are sent and not computed, for the same reason.
const SENT_STEPS: usize = 2;
/// First estimate of the round trip of a call to the engine, µs: a vLLM on an H200 took 15 ms.
const FIRST_WAY_US: f64 = 10_000.0;
/// Each call that took longer makes the way longer by this share, and each other one makes it shorter by a ninth of it: nine of
/// ten take no longer.
const WAY_STEP: f64 = 1.0 / 8.0;
/// Answers with fewer gaps say nothing about their slowest tenth.
const LEAST_GAPS: usize = 10;
/// Each answer whose slowest tenth of gaps was longer than the target makes parts shorter by this share, and each other one
/// makes them longer by a nineteenth of it: about a twentieth of the answers is beyond the target, which is a tenth less than
/// the objective.
const CAUTION_STEP: f64 = 1.0 / 128.0;
/// An answer is looked at over so long a time, µs: many steps, and less than a second.
const WINDOW_US: u64 = 250_000;
/// Each window multiplies the weight of the earlier ones by this: those of about sixteen seconds count.
const FADE: f64 = 1.0 - 1.0 / 64.0;
/// Prompt tokens of the pass from whose predicted time the cost of a token is taken at first.
const FIRST_TOKENS: u64 = 2_048;
/// What the profile predicts weighs as much as so many windows, each of so many prompt tokens a step.
const PRIOR: (f64, f64) = (4.0, 512.0);
/// A single observation counts for at most so many times what was expected.
const OUTLIER: f64 = 4.0;

/// What the steps of an engine take: so long without prompt tokens, and so much longer for each of them.
///
/// The cost of a token is what all steps took beyond their least, over all their tokens. A line through single windows would
/// be too flat, for a part of a prompt may count in the window before or after its own.
#[derive(Debug)]
struct StepEstimator {
    /// A step without prompt tokens, µs.
    lone_us: f64,
    /// Prompt tokens a step, and the time beyond a lone step, µs: sums that fade.
    tokens: f64,
    beyond_us: f64,
}

impl StepEstimator {
    /// Begins with what a profile predicts.
    fn new(profile: &CostProfile) -> Self {
        // With what a pass costs at least: parts that begin too short delay one prompt, too long ones every answer.
        Self::of(profile.decode_us(1, 0), profile.prefill_us(FIRST_TOKENS, 0) / as_f64(FIRST_TOKENS))
    }

    /// Begins with steps of that length and prompt tokens of that cost, µs.
    fn of(lone_us: f64, token_us: f64) -> Self {
        let (windows, step) = PRIOR;
        let tokens = windows * step;
        Self { lone_us: lone_us.max(1.0), tokens, beyond_us: tokens * token_us.max(1e-3) }
    }

    /// What a prompt token adds, µs.
    fn token_us(&self) -> f64 {
        (self.beyond_us / self.tokens).max(1e-3)
    }

    /// One of `answers` answers came on by `steps` tokens in that time, while `tokens` prompt tokens were computed.
    fn observe(&mut self, elapsed_us: u64, steps: u64, tokens: u64, answers: usize) {
        if steps == 0 {
            return;
        }
        let weight = 1.0 / as_f64(answers.max(1) as u64);
        let (step_tokens, time_us) = (as_f64(tokens) / as_f64(steps), as_f64(elapsed_us) / as_f64(steps));
        let expected_us = step_tokens.mul_add(self.token_us(), self.lone_us);
        let time_us = time_us.clamp(1.0, OUTLIER * expected_us);
        // No step takes less than one without prompt tokens: the answers of a moment all say so.
        if time_us < self.lone_us {
            self.lone_us += (time_us - self.lone_us) / 4.0;
        } else if tokens == 0 {
            self.lone_us += (time_us - self.lone_us) * weight / 8.0;
        }
        if tokens > 0 {
            let fade = (FADE - 1.0).mul_add(weight, 1.0);
            self.tokens = self.tokens.mul_add(fade, step_tokens * weight);
            let beyond_us = (time_us - self.lone_us).max(0.0);
            self.beyond_us = self.beyond_us.mul_add(fade, beyond_us * weight);
        }
    }

    /// Prompt tokens that a step holds within `target_us`.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a float beyond the range becomes its end"
    )]
    fn tokens_within(&self, target_us: u64) -> u64 {
        ((as_f64(target_us) - self.lone_us) / self.token_us()).max(0.0) as u64
    }
}

/// At most a second: a node that begins with a wrong profile goes on.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and a million")]
const fn clamp_us(us: f64) -> u64 {
    us.clamp(0.0, 1e6) as u64
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a count")]
fn scaled(count: u64, share: f64) -> u64 {
    (as_f64(count) * share) as u64
}

#[expect(clippy::cast_precision_loss, reason = "times and counts are far below 2^52")]
const fn as_f64(count: u64) -> f64 {
    count as f64
}

/// Sends prompts in parts that keep the step target, in the order in which they come.
#[derive(Debug)]
pub(super) struct PromptSplitter {
    block_tokens: u64,
    since: Instant,
    state: Mutex<SplitterState>,
    /// Held by a prompt of several parts to its first token.
    turns: Semaphore,
    /// Held by what is sent next: parts go in the order in which they come.
    order: tokio::sync::Mutex<()>,
    /// Notified when the engine has computed a part.
    ended: Notify,
}

/// Prompt tokens that are sent for one step.
#[derive(Debug)]
struct SentStep {
    number: u64,
    since_us: u64,
    /// Nothing else was sent and not computed then.
    was_first: bool,
    tokens: u64,
    /// Those that are not computed.
    left_tokens: u64,
    /// A call for some of them ended before they were computed, and says nothing of the way.
    cut_short: bool,
}

#[derive(Debug)]
struct SplitterState {
    steps: StepEstimator,
    /// Longest step that the conductor allows, µs.
    target_us: Option<u64>,
    /// Answers that run.
    running: usize,
    /// The share of a step that parts may fill, because some steps take longer than the mean.
    caution: f64,
    /// Time of a call beyond its step, µs: nine of ten take no longer.
    way_us: f64,
    /// Steps whose prompt tokens are sent and not computed, at most `SENT_STEPS`.
    sent: VecDeque<SentStep>,
    sent_steps: u64,
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
    turn: Option<SemaphorePermit<'a>>,
    sent: Option<SentTokens<'a>>,
}

/// Prompt tokens that are at the engine, until this is dropped.
struct SentTokens<'a> {
    splitter: &'a PromptSplitter,
    step: u64,
    tokens: u64,
    /// The engine has answered.
    answered: bool,
}

impl Drop for SentTokens<'_> {
    fn drop(&mut self) {
        let now_us = self.splitter.now_us();
        self.splitter.state.lock().computed(now_us, (self.step, self.tokens), self.answered);
        self.splitter.ended.notify_waiters();
    }
}

impl SplitterState {
    /// Puts prompt tokens into the next step that takes them, which holds `room` of them at most. Returns its number, or how
    /// long to wait, µs; `None`: until something is computed.
    fn send(&mut self, now_us: u64, tokens: u64, room: u64) -> Result<u64, Option<u64>> {
        let alone = self.sent.len() == 1;
        if let Some(step) = self.sent.back_mut() {
            // Nothing is ahead of it: it begins with the engine's next step once it is there. Until then what is sent may
            // come into the same one.
            let begins_us = step.since_us + clamp_us(self.steps.lone_us) + clamp_us(self.way_us);
            let begun = alone && now_us >= begins_us;
            if !begun && step.tokens.saturating_add(tokens) <= room {
                step.tokens += tokens;
                step.left_tokens += tokens;
                return Ok(step.number);
            }
            if !begun {
                return Err(alone.then(|| begins_us - now_us));
            }
        }
        self.sent_steps += 1;
        let number = self.sent_steps;
        let was_first = self.sent.is_empty();
        let step =
            SentStep { number, since_us: now_us, was_first, tokens, left_tokens: tokens, cut_short: false };
        self.sent.push_back(step);
        assert!(self.sent.len() <= SENT_STEPS, "a step is sent beside two that are not computed");
        Ok(number)
    }

    /// Prompt tokens of a step are computed; if the engine has not `answered`, they were given up.
    fn computed(&mut self, now_us: u64, (number, tokens): (u64, u64), answered: bool) {
        let Some(at) = self.sent.iter().position(|step| step.number == number) else { return };
        assert!(self.sent[at].left_tokens >= tokens, "more tokens of a step are computed than were sent");
        self.sent[at].left_tokens -= tokens;
        self.sent[at].cut_short |= !answered;
        if self.sent[at].left_tokens == 0
            && let Some(step) = self.sent.remove(at).filter(|step| step.was_first && !step.cut_short)
        {
            self.learn_way(now_us - step.since_us, step.tokens);
        }
    }

    /// A call for so many prompt tokens took so long, with nothing ahead of it.
    fn learn_way(&mut self, took_us: u64, tokens: u64) {
        let step_us = as_f64(tokens).mul_add(self.steps.token_us(), self.steps.lone_us);
        let was_longer = as_f64(took_us) - step_us > self.way_us;
        // An engine that waits for half a step is idle for less than that.
        let most_us = self.target_us.map_or(FIRST_WAY_US, |target_us| as_f64(target_us) / 2.0).max(1e3);
        self.way_us = moved(self.way_us, was_longer, WAY_STEP, 9.0).clamp(1e3, most_us);
    }
}

impl PromptTurn<'_> {
    /// The first token is there: the engine's own time for this prompt, µs, at least 1. It computes prompts in turn, so what
    /// it did before the one ahead was done was not for this one.
    pub(super) fn first_token(&mut self) -> u64 {
        self.sent.iter_mut().for_each(|sent| sent.answered = true);
        let now_us = self.splitter.now_us();
        let mut state = self.splitter.state.lock();
        state.computed_tokens += self.left_tokens;
        let ahead_us = std::mem::replace(&mut state.latest_us, now_us);
        now_us.saturating_sub(ahead_us.max(self.began_us)).max(1)
    }
}

/// An answer that runs, until it is dropped.
pub(super) struct RunningAnswer {
    splitter: Arc<PromptSplitter>,
    /// When it was looked at, and how many prompt tokens had been computed by then.
    since_us: u64,
    computed_tokens: u64,
    /// Its gaps by then.
    gap_count: usize,
    gaps: GapTally,
}

impl RunningAnswer {
    /// The engine has computed the prompt: its first token is the next that comes.
    pub(super) fn new(splitter: &Arc<PromptSplitter>, max_tokens: u32) -> Self {
        let mut state = splitter.state.lock();
        state.running += 1;
        let (computed_tokens, since_us) = (state.computed_tokens, splitter.now_us());
        drop(state);
        let gaps = GapTally::new(max_tokens);
        Self { splitter: Arc::clone(splitter), since_us, computed_tokens, gap_count: 0, gaps }
    }

    /// Its next tokens are there.
    pub(super) fn on_tokens(&mut self, tokens: usize) {
        let now_us = self.splitter.now_us();
        (0..tokens).for_each(|_| self.gaps.token(now_us));
        let elapsed_us = now_us.saturating_sub(self.since_us);
        if elapsed_us < WINDOW_US {
            return;
        }
        let mut state = self.splitter.state.lock();
        let beside = state.computed_tokens - self.computed_tokens;
        let (answers, steps) = (state.running, self.gaps.count() - self.gap_count);
        state.steps.observe(elapsed_us, steps as u64, beside, answers);
        (self.since_us, self.computed_tokens, self.gap_count) =
            (now_us, state.computed_tokens, self.gaps.count());
    }
}

impl Drop for RunningAnswer {
    fn drop(&mut self) {
        let tbt_us = self.gaps.tbt_us().filter(|_| self.gaps.count() >= LEAST_GAPS);
        let mut state = self.splitter.state.lock();
        state.running -= 1;
        if let Some((tbt_us, target_us)) = tbt_us.zip(state.target_us) {
            state.caution = cautious(state.caution, tbt_us > target_us);
        }
    }
}

/// The share of a step that parts may fill, after one more answer.
fn cautious(caution: f64, was_slow: bool) -> f64 {
    moved(caution, was_slow, -CAUTION_STEP, 19.0).clamp(0.1, 1.0)
}

/// A value after one more observation. It stays where one in `others` and one more is of the rare kind.
fn moved(value: f64, was_rare: bool, step: f64, others: f64) -> f64 {
    value * (1.0 + if was_rare { step } else { -step / others })
}

impl PromptSplitter {
    pub(super) fn new(profile: &CostProfile, block_tokens: u32) -> Self {
        let steps = StepEstimator::new(profile);
        let state = SplitterState {
            steps,
            target_us: None,
            running: 0,
            caution: 1.0,
            way_us: FIRST_WAY_US,
            sent: VecDeque::new(),
            sent_steps: 0,
            latest_us: 0,
            computed_tokens: 0,
            refound_tokens: 0,
        };
        Self {
            block_tokens: block_tokens.max(1).into(),
            since: Instant::now(),
            state: Mutex::new(state),
            turns: Semaphore::new(TURNS),
            order: tokio::sync::Mutex::default(),
            ended: Notify::new(),
        }
    }

    /// The conductor's step target.
    pub(super) fn set_step_target(&self, target_us: Option<u64>) {
        self.state.lock().target_us = target_us;
    }

    /// Tokens of parts that the engine counts as found in its cache, though nobody had asked for them before.
    pub(super) fn refound_tokens(&self) -> u64 {
        self.state.lock().refound_tokens
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Prompt tokens that a step may hold, in whole blocks; `None` where nobody waits for it.
    fn step_room(&self, state: &SplitterState) -> Option<u64> {
        let target_us = state.target_us.filter(|_| state.running > 0)?;
        let step = scaled(state.steps.tokens_within(target_us), state.caution);
        let least = LEAST_TOKENS.next_multiple_of(self.block_tokens);
        Some((step / self.block_tokens * self.block_tokens).max(least))
    }

    /// Prompt tokens of the next part, if a prompt of so many does not fit into one step.
    fn part_of(&self, tokens: u64) -> Option<u64> {
        self.step_room(&self.state.lock()).filter(|room| *room < tokens)
    }

    /// Waits until a step has room for so many prompt tokens beside those that were sent and not begun: of all that an engine
    /// finds at once it makes one step.
    async fn wait_and_send(&self, tokens: u64) -> SentTokens<'_> {
        let _order = self.order.lock().await;
        loop {
            let ended = self.ended.notified();
            tokio::pin!(ended);
            ended.as_mut().enable();
            let sent = {
                let mut state = self.state.lock();
                let room = self.step_room(&state).unwrap_or(u64::MAX).max(tokens);
                state.send(self.now_us(), tokens, room)
            };
            let wait_us = match sent {
                Ok(step) => return SentTokens { splitter: self, step, tokens, answered: false },
                Err(wait_us) => wait_us,
            };
            match wait_us {
                // Dropping what is sent ends this.
                None => ended.await,
                Some(wait_us) => tokio::time::sleep(Duration::from_micros(wait_us)).await,
            }
        }
    }

    /// Waits for the turn of a prompt, and has all of it computed that does not fit into one step. The engine computes the
    /// rest with the answer.
    ///
    /// # Errors
    /// Of an engine that broke over a part: another call would hide what it died of. Other failures show in the call for
    /// the answer.
    pub(super) async fn turn_of(
        &self,
        engine: &RemoteEngine,
        work: &Work,
    ) -> Result<PromptTurn<'_>, RemoteError> {
        let all = work.request.tokens.len() as u64;
        let mut done = work.expected_tokens.unwrap_or(0).min(all) / self.block_tokens * self.block_tokens;
        let first = done;
        let mut turn = PromptTurn {
            splitter: self,
            found_tokens: None,
            began_us: 0,
            left_tokens: all - done,
            turn: None,
            sent: None,
        };
        // The engine computes prompts without their cached prefix when it is to report their logprobs.
        let in_one_call = work.request.sampling.prompt_logprobs.is_some();
        if !in_one_call && self.part_of(turn.left_tokens).is_some() {
            turn.turn = self.turns.acquire().await.ok();
        }
        turn.began_us = self.now_us();
        while let Some(tokens) = self.part_of(turn.left_tokens).filter(|_| !in_one_call) {
            let mut sent = self.wait_and_send(tokens).await;
            let part = usize::try_from(done + tokens).unwrap_or(usize::MAX);
            let found = compute_part(engine, &work.request, part).await;
            sent.answered = found.is_ok();
            drop(sent);
            let found = match found {
                Ok(found) => found,
                Err(error) if error.cut_off || error.status == Some(500) || error.busy_us.is_some() => {
                    return Err(error);
                }
                Err(_) => break,
            };
            self.state.lock().computed_tokens += tokens;
            // What it did not keep it would compute again and again.
            if turn.found_tokens.is_some() && found.is_some_and(|found| found + self.block_tokens < done) {
                break;
            }
            // vLLM reports nothing where it found nothing.
            turn.found_tokens.get_or_insert(found.unwrap_or(0));
            done += tokens;
            turn.left_tokens -= tokens;
            self.state.lock().refound_tokens += done - first;
        }
        turn.sent = Some(self.wait_and_send(turn.left_tokens).await);
        Ok(turn)
    }
}

/// Has the first `tokens` tokens of a prompt computed. Returns how many of them the engine had, if it reports that.
async fn compute_part(
    engine: &RemoteEngine,
    request: &Request,
    tokens: usize,
) -> Result<Option<u64>, RemoteError> {
    let part = Request::of_one_token(Arc::clone(&request.id), request.tokens[..tokens].to_vec().into());
    let part = Request { salt: request.salt.clone(), ..part };
    Ok(engine.generate(part).await?.all().await?.counts.cached_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The answers of an engine whose steps take 10 ms, and 50 µs more for each prompt token. Each fourth window has none.
    fn play(steps: &mut StepEstimator, windows: u64, answers: usize) {
        for at in 0..windows {
            let (count, tokens) = (20, 10 * (at % 4) * 128);
            (0..answers).for_each(|_| steps.observe(count * 10_000 + 50 * tokens, count, tokens, answers));
        }
    }

    #[test]
    fn it_learns_what_a_step_and_a_prompt_token_take() {
        // By a profile of a machine that is slower, quicker, or right.
        for (lone_us, token_us) in [(30_000.0, 400.0), (2_000.0, 1.0), (10_000.0, 50.0)] {
            for answers in [1, 30] {
                let mut steps = StepEstimator::of(lone_us, token_us);
                play(&mut steps, 600, answers);
                assert!((steps.lone_us - 10_000.0).abs() < 100.0, "{steps:?}");
                assert!((steps.token_us() - 50.0).abs() < 1.0, "{steps:?}");
                assert!((780..=820).contains(&steps.tokens_within(50_000)), "{steps:?}");
                assert_eq!(steps.tokens_within(5_000), 0);
            }
        }
    }

    #[test]
    fn parts_that_count_in_the_next_window_do_not_make_tokens_look_cheap() {
        let mut steps = StepEstimator::of(10_000.0, 50.0);
        for at in 0..600 {
            // 20 steps of 512 tokens each; up to four of them are counted too late, and in the next window.
            let late = [0, 4, 1, 3, 2][at % 5] * 512;
            let before = [2, 0, 4, 1, 3][at % 5] * 512;
            steps.observe(20 * (10_000 + 50 * 512), 20, 20 * 512 - late + before, 1);
        }
        assert!((steps.token_us() - 50.0).abs() < 1.0, "{steps:?}");
    }

    #[test]
    fn one_long_silence_does_not_spoil_what_is_known() {
        let mut steps = StepEstimator::of(10_000.0, 50.0);
        play(&mut steps, 600, 10);
        (0..10).for_each(|_| steps.observe(60_000_000, 1, 1_024, 10));
        assert!((400..=820).contains(&steps.tokens_within(50_000)), "{steps:?}");
    }

    #[test]
    fn what_is_not_begun_fits_into_one_step() {
        let splitter = PromptSplitter::new(&baton_engine::TimedSpec::zero_work().profile, 16);
        let mut state = splitter.state.lock();
        state.steps = StepEstimator::of(10_000.0, 50.0);
        assert_eq!(state.send(0, 500, 1_000), Ok(1));
        assert_eq!(state.send(1_000, 400, 1_000), Ok(1), "it has not begun, and has room");
        assert_eq!(
            state.send(1_500, 200, 1_000),
            Err(Some(18_500)),
            "it begins within a step, once it is there"
        );
        assert_eq!(state.send(20_000, 200, 1_000), Ok(2));
        assert_eq!(state.send(21_000, 800, 1_000), Ok(2), "it waits for the one before it, however long");
        assert_eq!(state.send(90_000, 100, 1_000), Err(None), "two steps are sent");
        state.computed(90_500, (1, 500), true);
        assert_eq!(state.send(91_000, 100, 1_000), Err(None), "it is the same step");
        state.computed(91_500, (1, 400), true);
        assert_eq!(state.send(92_000, 100, 1_000), Ok(3), "the second has begun");
        state.computed(92_500, (3, 100), true);
        assert_eq!(state.send(93_000, 1_000, 1_000), Ok(4), "an engine may compute a later one first");
        state.computed(93_500, (2, 1_000), true);
        assert_eq!(
            state.send(94_000, 100, 1_000),
            Err(Some(19_000)),
            "what was sent just now may be on its way"
        );
        state.computed(140_000, (4, 1_000), true);
        assert!(state.sent.is_empty());
    }

    /// On a quick machine beside its engine, and on one whose front end takes 15 ms.
    #[test]
    fn the_way_to_an_engine_is_learnt() {
        for way_us in [1_500, 15_000] {
            let splitter = PromptSplitter::new(&baton_engine::TimedSpec::zero_work().profile, 16);
            let mut state = splitter.state.lock();
            state.steps = StepEstimator::of(10_000.0, 50.0);
            state.target_us = Some(45_000);
            for at in 1..=600 {
                let since_us = at * 1_000_000;
                let step = state.send(since_us, 100, 1_000).expect("nothing is sent");
                state.computed(since_us + 15_000 + way_us + 200 * (at % 5), (step, 100), true);
                // Clients that give up at once say nothing of the way.
                for _ in 0..12 {
                    let step = state.send(since_us + 500_000, 100, 1_000).expect("nothing is sent");
                    state.computed(since_us + 500_100, (step, 100), false);
                }
            }
            let most = as_f64(way_us) + 800.0;
            assert!((most * 0.85..most * 1.2).contains(&state.way_us), "{} for {way_us}", state.way_us);
        }
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
            let mut steps = StepEstimator::of(as_f64(draw(16)), as_f64(draw(8)));
            for _ in 0..100 {
                let bits = 1 + u32::try_from(draw(5)).expect("5 bits");
                let answers = usize::try_from(draw(4)).expect("4 bits");
                steps.observe(draw(bits), draw(8), draw(bits), answers);
                let target_us = draw(40);
                let tokens = steps.tokens_within(target_us);
                assert!(steps.token_us() > 0.0 && steps.lone_us > 0.0, "{steps:?}");
                let step_us = as_f64(tokens).mul_add(steps.token_us(), steps.lone_us);
                assert!(tokens == 0 || step_us <= as_f64(target_us) * 1.000_001 + 1.0, "{steps:?}");
            }
        }
    }
}
