//! The answers of a call under way: their tickets, and what comes out of them.

use std::sync::Arc;
use std::task::{Context, Poll};

use crate::answer::Answer;
use crate::backend::{Event, Ticket};
use crate::error::ApiError;
use crate::plan::Plan;

/// Events taken from one answer before it is another's turn, where nobody watches each.
const EVENTS_A_TURN: usize = 32;

/// All answers of a call. Dropping it cancels those that are not at their end.
pub(crate) struct Choices {
    pub(crate) plan: Arc<Plan>,
    tickets: Vec<Option<Ticket>>,
    pub(crate) answers: Vec<Answer>,
    open: usize,
}

impl Choices {
    /// `tickets` are in order of the answers: all of the first prompt, then the next one's.
    pub(crate) fn new(plan: Arc<Plan>, tickets: Vec<Ticket>) -> Self {
        let per_prompt = (tickets.len() / plan.prompts.len().max(1)).max(1);
        let answers = (0..tickets.len()).map(|at| Answer::new(&plan, at / per_prompt)).collect();
        let open = tickets.len();
        Self { plan, tickets: tickets.into_iter().map(Some).collect(), answers, open }
    }

    /// Waits until each answer is admitted, and tells what was decided; fails with the first refusal.
    pub(crate) async fn admitted(&mut self) -> Result<Vec<Arc<str>>, ApiError> {
        let mut decisions = Vec::new();
        for ticket in self.tickets.iter_mut().flatten() {
            match ticket.events.recv().await {
                Some(Event::Admitted { decision }) => decisions.extend(decision),
                Some(Event::Refused(refusal)) => return Err(refusal.into()),
                Some(Event::Failed(fault)) => return Err(fault.into()),
                Some(_) => {
                    let message = "the engine answered before the call was admitted; look into its log";
                    return Err(ApiError::new(502, message).code("engine_protocol"));
                }
                None => return Err(vanished()),
            }
        }
        Ok(decisions)
    }

    /// Whether every answer is at its end.
    pub(crate) fn ended(&self) -> bool {
        self.open == 0
    }

    /// Takes in at most `limit` events that are there. `Ready(Ok(true))` after some of the answer at `turn`, `Pending`
    /// when none of its are there, `Ready(Ok(false))` when it was at its end before.
    pub(crate) fn poll_answer(
        &mut self,
        cx: &mut Context<'_>,
        turn: usize,
        limit: usize,
    ) -> Poll<Result<bool, ApiError>> {
        let Some(ticket) = &mut self.tickets[turn] else { return Poll::Ready(Ok(false)) };
        let (plan, answer) = (&self.plan, &mut self.answers[turn]);
        for taken in 0..limit {
            let event = match ticket.events.poll_recv(cx) {
                Poll::Ready(event) => event,
                Poll::Pending if taken > 0 => return Poll::Ready(Ok(true)),
                Poll::Pending => return Poll::Pending,
            };
            take_in(plan, answer, event)?;
            if answer.finish.is_some() {
                // Given back at once: what a stop string ended is computed no further.
                self.tickets[turn] = None;
                self.open -= 1;
                return Poll::Ready(Ok(true));
            }
        }
        Poll::Ready(Ok(true))
    }

    /// Cancels what is not at its end.
    pub(crate) fn give_up(&mut self) {
        self.tickets.clear();
        self.open = 0;
    }

    /// Drives all answers to their end.
    pub(crate) async fn finish(&mut self) -> Result<(), ApiError> {
        std::future::poll_fn(|cx| {
            loop {
                let mut moved = false;
                for turn in 0..self.tickets.len() {
                    match self.poll_answer(cx, turn, EVENTS_A_TURN) {
                        Poll::Ready(Ok(some)) => moved |= some,
                        Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                        Poll::Pending => {}
                    }
                }
                if self.ended() {
                    return Poll::Ready(Ok(()));
                }
                if !moved {
                    return Poll::Pending;
                }
            }
        })
        .await
    }
}

fn take_in(plan: &Plan, answer: &mut Answer, event: Option<Event>) -> Result<(), ApiError> {
    match event {
        Some(Event::Token { token, logprob }) => answer.token(plan, token, logprob),
        Some(Event::Finished { finish, usage }) => answer.finished(plan, finish, usage.cached_tokens),
        Some(Event::PromptLogprobs(logprobs)) => answer.prompt_logprobs(plan, &logprobs),
        Some(Event::Admitted { .. }) => {}
        Some(Event::Refused(refusal)) => return Err(refusal.into()),
        Some(Event::Failed(fault)) => return Err(fault.into()),
        None => return Err(vanished()),
    }
    Ok(())
}

fn vanished() -> ApiError {
    ApiError::new(502, "the engine went away without an answer; try again").code("engine_lost")
}
