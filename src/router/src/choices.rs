//! The answers of a call under way: their tickets, and what comes out of them.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use baton_http::MemoryShare;
use tokio::sync::mpsc;
use tokio::time::Sleep;

use crate::answer::Answer;
use crate::backend::{Event, SubmissionStream};
use crate::error::ApiError;
use crate::plan::Plan;

/// Events taken from one answer before it is another's turn, where nobody watches each.
const EVENTS_A_TURN: usize = 32;

/// How long an answer that a stop string ended waits to hear what it took.
const LAST_WORD_LIMIT: Duration = Duration::from_millis(250);

/// The source of an answer.
enum Source {
    Open(SubmissionStream),
    /// A stop string has ended the answer and its work; what it took is yet to be heard.
    Leaving {
        events: mpsc::Receiver<Event>,
        alarm: Pin<Box<Sleep>>,
    },
    Over,
}

/// All answers of a call. Dropping it cancels those that are not at their end.
pub(crate) struct Choices {
    pub(crate) plan: Arc<Plan>,
    sources: Vec<Source>,
    pub(crate) answers: Vec<Answer>,
    open: usize,
    /// The event with which the first of them began, and of which answer it is.
    first: Option<(usize, Event)>,
}

impl Choices {
    /// `tickets` are in order of the answers: all of the first prompt, then the next one's.
    pub(crate) fn new(plan: Arc<Plan>, tickets: Vec<SubmissionStream>) -> Self {
        let per_prompt = (tickets.len() / plan.prompts.len().max(1)).max(1);
        let answers = (0..tickets.len()).map(|at| Answer::new(&plan, at / per_prompt)).collect();
        let open = tickets.len();
        Self { plan, sources: tickets.into_iter().map(Source::Open).collect(), answers, open, first: None }
    }

    /// Waits until each answer is admitted, and returns the decisions. It fails with the first refusal.
    pub(crate) async fn admitted(&mut self) -> Result<Vec<Arc<str>>, ApiError> {
        let mut decisions = Vec::new();
        for source in &mut self.sources {
            let Source::Open(ticket) = source else { continue };
            let Event::Admitted { decision } = good(ticket.events.recv().await)? else {
                let message = "the engine answered before the call was admitted; look into its log";
                return Err(ApiError::new(502, message).code("engine_protocol"));
            };
            decisions.extend(decision);
        }
        Ok(decisions)
    }

    /// Waits until an answer begins, or for `limit` at most. What befalls a call before that can be the status of its
    /// response. It fails with it.
    pub(crate) async fn begun(&mut self, limit: Duration) -> Result<(), ApiError> {
        let first = std::future::poll_fn(|cx| {
            for (turn, source) in self.sources.iter_mut().enumerate() {
                let Source::Open(ticket) = source else { continue };
                if let Poll::Ready(event) = ticket.events.poll_recv(cx) {
                    return Poll::Ready(good(event).map(|event| self.first = Some((turn, event))));
                }
            }
            Poll::Pending
        });
        tokio::time::timeout(limit, first).await.unwrap_or(Ok(()))
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
        let ticket = match &mut self.sources[turn] {
            Source::Open(ticket) => ticket,
            Source::Leaving { .. } => return self.poll_leaving(cx, turn).map(Ok),
            Source::Over => return Poll::Ready(Ok(false)),
        };
        let (plan, answer) = (&self.plan, &mut self.answers[turn]);
        for taken in 0..limit {
            let polled = match self.first.take_if(|(of, _)| *of == turn) {
                Some((_, event)) => Poll::Ready(Some(event)),
                None => ticket.events.poll_recv(cx),
            };
            let event = match polled {
                Poll::Ready(event) => event,
                Poll::Pending if taken > 0 => return Poll::Ready(Ok(true)),
                Poll::Pending => return Poll::Pending,
            };
            take_in(plan, answer, event)?;
            if answer.finish.is_some() {
                self.close_ticket(turn);
                return Poll::Ready(Ok(true));
            }
        }
        Poll::Ready(Ok(true))
    }

    /// Gives an ended answer's ticket back at once: what a stop string ended is computed no further.
    fn close_ticket(&mut self, turn: usize) {
        let Source::Open(ticket) = std::mem::replace(&mut self.sources[turn], Source::Over) else { return };
        if self.plan.tells_usage && self.answers[turn].cached_tokens.is_none() {
            let alarm = Box::pin(tokio::time::sleep(LAST_WORD_LIMIT));
            self.sources[turn] = Source::Leaving { events: ticket.events, alarm };
        } else {
            self.open -= 1;
        }
    }

    /// `Ready` once it is known what the answer took, or will not be.
    fn poll_leaving(&mut self, cx: &mut Context<'_>, turn: usize) -> Poll<bool> {
        let Source::Leaving { events, alarm } = &mut self.sources[turn] else { return Poll::Ready(false) };
        loop {
            match events.poll_recv(cx) {
                Poll::Ready(Some(Event::Finished { usage, .. })) => {
                    self.answers[turn].cached_tokens = Some(usage.cached_tokens);
                    break;
                }
                Poll::Ready(None | Some(Event::Refused(_) | Event::Failed(_))) => break,
                // Said before it was known that nobody listens.
                Poll::Ready(Some(_)) => {}
                Poll::Pending if alarm.as_mut().poll(cx).is_ready() => break,
                Poll::Pending => return Poll::Pending,
            }
        }
        self.sources[turn] = Source::Over;
        self.open -= 1;
        Poll::Ready(true)
    }

    /// Cancels what is not at its end.
    pub(crate) fn give_up(&mut self) {
        self.sources.clear();
        self.open = 0;
    }

    /// Drives all answers to their end. They take room as they grow; it fails where there is none.
    pub(crate) async fn finish(&mut self, room: &mut MemoryShare) -> Result<(), ApiError> {
        std::future::poll_fn(|cx| {
            loop {
                let mut moved = false;
                for turn in 0..self.sources.len() {
                    match self.poll_answer(cx, turn, EVENTS_A_TURN) {
                        Poll::Ready(Ok(some)) => moved |= some,
                        Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                        Poll::Pending => {}
                    }
                }
                if let Err(full) = room.grow_to(self.answers.iter().map(|answer| answer.grown_bytes).sum()) {
                    return Poll::Ready(Err(full.into()));
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
    match good(event)? {
        Event::Token { token, logprob } => answer.token(plan, token, logprob),
        Event::Finished { finish, usage } => answer.finished(plan, finish, usage.cached_tokens),
        Event::PromptLogprobs(logprobs) => answer.prompt_logprobs(plan, &logprobs),
        Event::Admitted { .. } | Event::Refused(_) | Event::Failed(_) => {}
    }
    Ok(())
}

/// An event with which an answer goes on; the others end it with an error.
fn good(event: Option<Event>) -> Result<Event, ApiError> {
    match event {
        Some(Event::Refused(refusal)) => Err(refusal.into()),
        Some(Event::Failed(fault)) => Err(fault.into()),
        Some(event) => Ok(event),
        None => {
            Err(ApiError::new(502, "the engine went away without an answer; try again").code("engine_lost"))
        }
    }
}
