//! The steps of an engine: each computes one token of every answer, and prompt tokens as far as its budget goes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot, watch};

use super::server::pass;

/// An engine that takes one step after the other while it has work.
#[derive(Clone, Debug)]
pub(super) struct StepClock(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    queue: Mutex<Queue>,
    work: Notify,
    /// Steps so far.
    count: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Queue {
    /// Prompts: tokens that are left, and who waits for them.
    prompts: VecDeque<(u64, oneshot::Sender<()>)>,
    /// Answers that run.
    answers: usize,
}

/// Waits between the tokens of an answer.
pub(super) enum Pace {
    /// Of a time.
    Timed(Duration),
    /// Of the engine's next step.
    Stepped(SteppedAnswer),
}

impl Pace {
    pub(super) async fn next(&mut self) {
        match self {
            Self::Timed(time) => pass(*time).await,
            Self::Stepped(answer) => {
                // An engine that has ended takes its answers with it.
                if !std::mem::take(&mut answer.has_first) {
                    _ = answer.count.changed().await;
                }
            }
        }
    }
}

/// An answer that takes part in every step, until it is dropped.
pub(super) struct SteppedAnswer {
    steps: StepClock,
    count: watch::Receiver<u64>,
    /// Its first token was computed with the last of its prompt.
    has_first: bool,
}

impl Drop for SteppedAnswer {
    fn drop(&mut self) {
        self.steps.0.queue.lock().answers -= 1;
    }
}

impl StepClock {
    /// Steps of `step_time`, and `token_time` more for each of up to `budget_tokens` prompt tokens. They go on as long as
    /// anyone has these steps.
    pub(super) fn start(step_time: Duration, token_time: Duration, budget_tokens: u64) -> Self {
        let inner =
            Arc::new(Inner { queue: Mutex::default(), work: Notify::new(), count: watch::Sender::new(0) });
        let engine = Arc::downgrade(&inner);
        tokio::spawn(async move {
            while let Some(inner) = engine.upgrade() {
                let took = inner.queue.lock().take(budget_tokens);
                let Some((tokens, done)) = took else {
                    // Now and then it looks whether anyone is left.
                    let _ = tokio::time::timeout(Duration::from_secs(1), inner.work.notified()).await;
                    continue;
                };
                pass(step_time + token_time * tokens).await;
                done.into_iter().for_each(|who| _ = who.send(()));
                inner.count.send_modify(|count| *count += 1);
            }
        });
        Self(inner)
    }

    /// Computes a prompt's tokens.
    pub(super) async fn prompt(&self, tokens: u64) {
        let (done, ended) = oneshot::channel();
        self.0.queue.lock().prompts.push_back((tokens.max(1), done));
        self.0.work.notify_one();
        // See `Pace::next`.
        let _ = ended.await;
    }

    /// An answer; `has_first` where its prompt was computed here, and not where its KV was brought.
    pub(super) fn answer(&self, has_first: bool) -> Pace {
        self.0.queue.lock().answers += 1;
        self.0.work.notify_one();
        Pace::Stepped(SteppedAnswer { steps: self.clone(), count: self.0.count.subscribe(), has_first })
    }
}

impl Queue {
    /// The prompt tokens of the next step, and whose prompt ends with it. `None` without any work.
    fn take(&mut self, budget_tokens: u64) -> Option<(u32, Vec<oneshot::Sender<()>>)> {
        if self.prompts.is_empty() && self.answers == 0 {
            return None;
        }
        let (mut left, mut done) = (budget_tokens, Vec::new());
        while let Some((tokens, _)) = self.prompts.front_mut().filter(|_| left > 0) {
            let taken = left.min(*tokens);
            (left, *tokens) = (left - taken, *tokens - taken);
            if *tokens == 0 {
                done.extend(self.prompts.pop_front().map(|(_, who)| who));
            }
        }
        Some((u32::try_from(budget_tokens - left).unwrap_or(u32::MAX), done))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_takes_prompts_in_their_order_as_far_as_its_budget_goes() {
        let mut queue = Queue::default();
        assert!(queue.take(100).is_none());
        for tokens in [60, 70, 10] {
            queue.prompts.push_back((tokens, oneshot::channel().0));
        }
        let took = |queue: &mut Queue| queue.take(100).map(|(tokens, done)| (tokens, done.len()));
        assert_eq!(took(&mut queue), Some((100, 1)));
        assert_eq!(took(&mut queue), Some((40, 2)));
        assert_eq!(took(&mut queue), None);
        queue.answers = 1;
        assert_eq!(took(&mut queue), Some((0, 0)));
    }

    /// As a real engine draws them: a prompt's step draws the first token, and brought KV takes a step of its own.
    #[tokio::test]
    async fn the_first_token_comes_with_the_step_of_its_prompt() {
        let steps = StepClock::start(Duration::from_millis(200), Duration::ZERO, 100);
        steps.prompt(50).await;
        let (mut computed, mut brought) = (steps.answer(true), steps.answer(false));
        let at_once = Duration::ZERO;
        assert!(tokio::time::timeout(at_once, brought.next()).await.is_err());
        assert!(tokio::time::timeout(at_once, computed.next()).await.is_ok());
        assert!(tokio::time::timeout(at_once, computed.next()).await.is_err(), "the second takes a step");
        brought.next().await;
        assert!(tokio::time::timeout(at_once, computed.next()).await.is_ok(), "one step for both");
    }
}
