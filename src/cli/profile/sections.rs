//! The measurement itself: prefills one after the other, batches that grow, prefills beside a batch.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::caller::{AnswerFailure, AnswerStream, Caller, PATIENCE, PromptSpec, median};
use super::plan::{MeasurementPlan, RampPlan, SHORT_CONTEXT, STEPS};
use super::samples::{MixedSample, PointSamples, spread};

/// Steps of which one mean is taken: events may come in bursts, and the median of means passes over hiccups.
const STEPS_IN_A_MEAN: usize = 8;
/// Repeats of a point that differ more than this are joined by as many again.
const UNSTEADY_SHARE: f64 = 0.2;
/// A prefill behind a prefix that takes more than this share of the whole prompt's time has found nothing in a cache.
const UNCACHED_SHARE: f64 = 0.6;
/// Two prompts that end in less than this share of the time of one are computed by two engines.
const PARALLEL_SHARE: f64 = 0.65;

/// Measures by a plan.
pub struct MeasurementRun<'a> {
    caller: &'a Caller,
    plan: &'a MeasurementPlan,
    /// Tokens for each event that carries some.
    per_event: f64,
    points: PointSamples,
    prefixes: u64,
}

impl<'a> MeasurementRun<'a> {
    /// One that has not measured anything.
    pub fn new(caller: &'a Caller, plan: &'a MeasurementPlan, per_event: f64) -> Self {
        Self { caller, plan, per_event, points: PointSamples::default(), prefixes: 0 }
    }

    /// Measures all of the plan that fits in the caller's bounds.
    ///
    /// # Errors
    /// When the endpoint fails, or refuses even the shortest requests.
    pub async fn run(mut self) -> Result<PointSamples> {
        self.warm_up().await?;
        self.prefills().await?;
        for round in 0..self.plan.repeats {
            for at in 0..self.plan.ramps.len() {
                if round > 0 && self.caller.is_spent() {
                    continue;
                }
                self.ramp(at).await.context("decode")?;
            }
        }
        self.beside().await.context("mixed")?;
        self.check_drift().await?;
        if self.caller.is_spent() {
            self.note("the bounds (--requests, --budget) ended the measurement before its plan did");
        }
        Ok(self.points)
    }

    fn note(&mut self, text: impl Into<String>) {
        let text = text.into();
        if !self.points.notes.contains(&text) {
            self.points.notes.push(text);
        }
    }

    /// Requests of every kind that compile kernels, fill pages and open connections.
    async fn warm_up(&self) -> Result<()> {
        let longest = *self.plan.lengths.last().unwrap_or(&SHORT_CONTEXT);
        let mut first: Vec<AnswerStream> =
            (0..4).map(|_| self.caller.send(PromptSpec::unique(SHORT_CONTEXT), 16)).collect();
        first.push(self.caller.send(PromptSpec::unique(longest), 1));
        for answer in &mut first {
            answer.end(Instant::now() + PATIENCE).await.context("warm-up")?;
        }
        Ok(())
    }

    async fn prefills(&mut self) -> Result<()> {
        let half = Instant::now() + (self.caller.deadline - Instant::now()) / 2;
        let pass = |new: u32, prefix: u32| move || format!("prefill of {new} tokens behind {prefix}");
        for new in self.plan.lengths.iter().copied() {
            if self.points.prefill.len() >= 4 && (Instant::now() > half || self.caller.is_spent()) {
                self.note(format!("prompts of {new} tokens and more were left out for want of time"));
                break;
            }
            self.chain(new, 0).await.with_context(pass(new, 0))?;
        }
        self.check_one_engine()?;
        let longest = self.points.prefill.keys().map(|(new, _)| *new).max().unwrap_or(0);
        for (new, prefix) in self.plan.behind.iter().copied().filter(|(new, prefix)| new + prefix <= longest)
        {
            if self.caller.is_spent() {
                break;
            }
            self.chain(new, prefix).await.with_context(pass(new, prefix))?;
        }
        Ok(())
    }

    /// Prefills of one kind back to back: the next request waits when one's pass ends, so that the time between two first
    /// tokens is a pass, without the way there, the tokenizer or the queue.
    async fn chain(&mut self, new: u32, prefix: u32) -> Result<(), AnswerFailure> {
        self.prefixes += 1;
        let spec =
            PromptSpec { tokens: new + prefix, prefix: (prefix > 0).then_some((self.prefixes, prefix)) };
        if prefix > 0 {
            self.first(PromptSpec { tokens: prefix + 1, ..spec }).await?;
        }
        let alone_us = self.first(spec).await?;
        let repeats = self.plan.prefill_repeats(new);
        let mut times = Vec::new();
        let mut found = (u64::from(new + prefix), None);
        for round in 0..2 {
            let enough =
                spread(&times) < UNSTEADY_SHARE || self.caller.left() < repeats + self.caller.reserve;
            if round == 1 && enough {
                break;
            }
            let mut ahead = self.caller.send(spec, 1);
            tokio::time::sleep(Duration::from_micros((alone_us / 3.0) as u64)).await;
            let mut next = Some(self.caller.send(spec, 1));
            for at in 1..=repeats {
                let Some(mut current) = next.take() else { break };
                ahead.reach(1, Instant::now() + PATIENCE).await?;
                next = (at < repeats).then(|| self.caller.send(spec, 1));
                current.reach(1, Instant::now() + PATIENCE).await?;
                times.push((current.tokens[0].0.saturating_sub(ahead.tokens[0].0) as f64).min(alone_us));
                ahead = current;
            }
            if let Some(usage) = ahead.end(Instant::now() + PATIENCE).await? {
                found = (
                    usage.prompt_tokens,
                    usage.prompt_tokens_details.and_then(|details| details.cached_tokens),
                );
            }
        }
        self.keep_prefill((new, prefix), alone_us, times, found);
        Ok(())
    }

    /// The time to the first token of a request that is alone, µs.
    async fn first(&self, spec: PromptSpec) -> Result<f64, AnswerFailure> {
        let mut answer = self.caller.send(spec, 1);
        answer.reach(1, Instant::now() + PATIENCE).await?;
        let first_us = answer.tokens[0].0.saturating_sub(answer.sent_us) as f64;
        answer.end(Instant::now() + PATIENCE).await?;
        Ok(first_us)
    }

    /// Files the times of a chain under what the engine computed: its counts, where it says what was cached.
    fn keep_prefill(
        &mut self,
        (new, prefix): (u32, u32),
        alone_us: f64,
        times: Vec<f64>,
        (prompt_tokens, cached): (u64, Option<u64>),
    ) {
        let time_us = median(&times);
        let prompt = if prompt_tokens > 0 { prompt_tokens } else { u64::from(new + prefix) };
        let cached = match cached {
            Some(cached) if cached > 0 || prefix > 0 => cached,
            // It says nothing: the time shows it.
            _ if prefix > 0 && time_us < UNCACHED_SHARE * self.uncached_us(prompt) => u64::from(prefix),
            _ => 0,
        };
        if prefix > 0 && cached < u64::from(prefix) / 2 {
            return self.note(
                "the engine found no prefix in its cache: attention follows from the lengths of prompts alone; \
                 switch prefix caching on for a better fit",
            );
        }
        let computed = u32::try_from(prompt.saturating_sub(cached)).unwrap_or(u32::MAX).max(1);
        if prefix == 0 {
            self.points.outside_us.push((alone_us - time_us).max(0.0));
        }
        self.points.prefill.entry((computed, cached)).or_default().extend(times);
    }

    /// The time of a whole prompt by what was measured so far, µs.
    fn uncached_us(&self, tokens: u64) -> f64 {
        let mut shorter = self.points.prefill.iter().filter(|((_, prefix), _)| *prefix == 0);
        let last = shorter.rfind(|((new, _), _)| u64::from(*new) <= tokens);
        last.map_or(0.0, |((new, _), times)| median(times) * tokens as f64 / f64::from(*new))
    }

    /// Two prompts at once take twice the time of one where one engine computes them.
    fn check_one_engine(&self) -> Result<()> {
        let longest = self.points.prefill.iter().zip(&self.points.outside_us).next_back();
        let Some(((_, times), outside_us)) = longest else { return Ok(()) };
        let (pass_us, alone_us) = (median(times), median(times) + outside_us);
        if pass_us < PARALLEL_SHARE * alone_us && alone_us > 50_000.0 {
            bail!(
                "two long prompts at once end {:.0} ms apart, and one alone takes {:.0} ms: more than one engine is behind \
                 the URL; give the URL of one (of Baton: `baton up --nodes 1b`)",
                pass_us / 1e3,
                alone_us / 1e3
            );
        }
        Ok(())
    }

    /// Times a batch at each size while it grows.
    async fn ramp(&mut self, at: usize) -> Result<(), AnswerFailure> {
        let plan = self.plan;
        let ramp: &RampPlan = &plan.ramps[at];
        let mut streams: Vec<AnswerStream> = Vec::new();
        for (level, (batch, tokens)) in ramp.levels.iter().copied().enumerate() {
            let missing = batch as usize - streams.len();
            if missing > self.caller.left() as usize || (level > 1 && self.caller.is_spent()) {
                break;
            }
            let answer = ramp.answer_tokens(level);
            streams.extend((0..missing).map(|_| self.caller.send(PromptSpec::unique(tokens), answer)));
            match self.steps(&mut streams, missing as u64 * u64::from(tokens)).await {
                Ok((context, times)) => {
                    let point = self.points.decode.entry((at, batch)).or_default();
                    point.extend(times.into_iter().map(|us| (context, us)));
                }
                Err(AnswerFailure::Failed(why)) => return Err(AnswerFailure::Failed(why)),
                Err(halt) if level == 0 => return Err(halt),
                Err(halt) => {
                    let context = ["short", "middling", "long"][at];
                    self.note(format!(
                        "batches of {batch} and more with {context} contexts were left out: {halt}"
                    ));
                    break;
                }
            }
        }
        drop(streams);
        self.settle().await
    }

    /// Times the steps of a batch: the context of all its requests in the middle of that time, and means of a few steps, µs.
    async fn steps(
        &self,
        streams: &mut [AnswerStream],
        joining_tokens: u64,
    ) -> Result<(u64, Vec<f64>), AnswerFailure> {
        let until = Instant::now() + self.patience(joining_tokens);
        for stream in streams.iter_mut() {
            stream.reach(2, until).await?;
        }
        let begun: Vec<usize> = streams
            .iter_mut()
            .map(|stream| {
                stream.take_in();
                stream.tokens.len()
            })
            .collect();
        let (steps, mut context, mut times) = (STEPS as usize, 0.0, Vec::new());
        for (stream, begun) in streams.iter_mut().zip(begun) {
            stream.reach(begun + 1 + steps, Instant::now() + PATIENCE).await?;
            let window = &stream.tokens[begun..=begun + steps];
            let before: u64 = stream.tokens[..begun].iter().map(|t| t.1).sum();
            context +=
                f64::from(stream.prompt_tokens) + self.per_event * (before as f64 + f64::from(STEPS) / 2.0);
            times.extend(
                window.windows(STEPS_IN_A_MEAN + 1).step_by(STEPS_IN_A_MEAN).map(|part| self.step_us(part)),
            );
        }
        // All of a batch step together: their means are one measurement, once in each part of the time.
        let parts = steps / STEPS_IN_A_MEAN;
        let of_part = |part: usize| -> Vec<f64> { times.iter().skip(part).step_by(parts).copied().collect() };
        Ok((context as u64, (0..parts).map(|part| median(&of_part(part))).collect()))
    }

    /// The time of a step from the first token here to the last, µs.
    fn step_us(&self, tokens: &[(u64, u64)]) -> f64 {
        let count: u64 = tokens[1..].iter().map(|t| t.1).sum();
        (tokens[tokens.len() - 1].0 - tokens[0].0) as f64 / (count as f64 * self.per_event)
    }

    /// How long requests that join may take to their first tokens.
    fn patience(&self, joining_tokens: u64) -> Duration {
        let slowest = self.points.prefill.iter().map(|((new, _), times)| median(times) / f64::from(*new));
        let us = 20.0 * slowest.fold(0.0, f64::max) * joining_tokens as f64;
        PATIENCE.min(Duration::from_secs(10) + Duration::from_micros(us as u64))
    }

    /// Waits until the engine has dropped the requests whose clients left: a short one is as quick as before.
    async fn settle(&mut self) -> Result<(), AnswerFailure> {
        let usual = self.points.prefill.first_key_value().map_or(0.0, |(_, times)| median(times));
        let usual_us = usual + median(&self.points.outside_us);
        for _ in 0..5 {
            tokio::time::sleep(Duration::from_millis(50)).await;
            let shortest = *self.plan.lengths.first().unwrap_or(&SHORT_CONTEXT);
            if self.first(PromptSpec::unique(shortest)).await? < 1.5 * usual_us + 2_000.0 {
                return Ok(());
            }
        }
        self.note("short requests take longer after a batch than before it: the engine goes on with answers whose clients left, or does other work");
        Ok(())
    }

    /// Prefills beside a batch: how much longer its steps are.
    async fn beside(&mut self) -> Result<(), AnswerFailure> {
        let (plan, batch) = (self.plan, self.plan.mixed_batch);
        let prefills = plan.chunks.len() as u32 * plan.repeats;
        let tokens: u32 = plan.chunks.iter().sum();
        let answer = 64 + 20 * prefills + tokens * plan.repeats / 64;
        if plan.chunks.is_empty() || self.caller.left() < batch + prefills || self.caller.is_spent() {
            return Ok(());
        }
        let mut streams: Vec<AnswerStream> =
            (0..batch).map(|_| self.caller.send(PromptSpec::unique(SHORT_CONTEXT), answer)).collect();
        let until = Instant::now() + self.patience(u64::from(batch * SHORT_CONTEXT));
        for stream in &mut streams {
            if let Err(halt) = stream.reach(2, until).await {
                self.note(format!("mixed steps were left out: {halt}"));
                return Ok(());
            }
        }
        for _ in 0..plan.repeats {
            for chunk in plan.chunks.iter().copied() {
                match self.one_beside(&mut streams, chunk).await {
                    Ok(step) => self.points.mixed.entry((batch, chunk)).or_default().push(step),
                    Err(AnswerFailure::Failed(why)) => return Err(AnswerFailure::Failed(why)),
                    Err(halt) => self.note(format!("mixed steps of {chunk} tokens were left out: {halt}")),
                }
            }
        }
        drop(streams);
        self.settle().await
    }

    /// One prefill beside a batch.
    async fn one_beside(
        &self,
        streams: &mut [AnswerStream],
        chunk: u32,
    ) -> Result<MixedSample, AnswerFailure> {
        let stream = &mut streams[0];
        stream.take_in();
        let begun = stream.tokens.len();
        stream.reach(begun + STEPS_IN_A_MEAN, Instant::now() + PATIENCE).await?;
        let mut prefill = self.caller.send(PromptSpec::unique(chunk), 1);
        prefill.reach(1, Instant::now() + PATIENCE).await?;
        stream.take_in();
        let after = stream.tokens.len() + 3;
        stream.reach(after, Instant::now() + PATIENCE).await?;
        let (sent_us, first_us) = (prefill.sent_us, prefill.tokens[0].0);
        let tokens = &stream.tokens[begun..after];
        let plain: Vec<f64> =
            tokens.windows(2).filter(|pair| pair[1].0 < sent_us).map(|pair| self.step_us(pair)).collect();
        let plain_us = median(&plain);
        // From the last token before the request to the second one after its first token.
        let from = tokens.iter().rposition(|token| token.0 <= sent_us).unwrap_or(0);
        let to = tokens
            .iter()
            .position(|token| token.0 > first_us)
            .map_or(tokens.len() - 1, |at| (at + 1).min(tokens.len() - 1));
        let window = &tokens[from..=to];
        let count: u64 = window[1..].iter().map(|t| t.1).sum();
        let extra_us =
            (window[window.len() - 1].0 - window[0].0) as f64 - count as f64 * self.per_event * plain_us;
        let longer = window.windows(2).filter(|pair| self.step_us(pair) > 1.25 * plain_us).count().max(1);
        let context_tokens = u64::from(stream.prompt_tokens) + stream.token_count();
        let steps = longer as u32;
        Ok(MixedSample { context_tokens, steps, step_us: plain_us + extra_us.max(0.0) / f64::from(steps) })
    }

    /// The first kind of prefill again: an engine that has become faster or slower did something else, then or now.
    async fn check_drift(&mut self) -> Result<()> {
        let Some(((new, _), before)) =
            self.points.prefill.range((256, 0)..).find(|((_, prefix), _)| *prefix == 0)
        else {
            return Ok(());
        };
        let (new, before_us) = (*new, median(before));
        let count = before.len();
        if self.caller.left() < self.plan.prefill_repeats(new) + 4 {
            return Ok(());
        }
        self.chain(new, 0).await.with_context(|| format!("prefill of {new} tokens"))?;
        if let Some(times) = self.points.prefill.get(&(new, 0)).filter(|times| times.len() > count) {
            self.points.drift = (median(&times[count..]) / before_us - 1.0).abs();
        }
        Ok(())
    }
}
