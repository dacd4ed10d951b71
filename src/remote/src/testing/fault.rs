//! Faults that a test injects.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use serde_json::json;

use super::server::{Reply, never};

/// Something that goes wrong with the next request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The answer begins so much later.
    Delay(Duration),
    /// It answers with this status.
    Status(u16),
    /// It answers with this status and a Retry-After of so many seconds.
    Busy(u16, u32),
    /// It takes the request and never answers.
    NeverAnswer,
    /// The connection closes before an answer.
    Hangup,
    /// The connection breaks after so many tokens.
    DieAfter(usize),
    /// The tokens stop after so many, and the connection stays open.
    FallSilentAfter(usize),
    /// The stream fails with an error object after so many tokens, then `[DONE]`.
    ErrorAfter(usize),
    /// The stream ends with `[DONE]` after so many tokens, and no finish.
    DoneAfter(usize),
    /// Bytes that are no JSON where an answer should be.
    Garbage,
    /// A stream that never ends its first event.
    Endless,
    /// The answer has text and no token ids.
    NoTokenIds,
    /// It answers another prompt.
    OtherPrompt,
    /// The prefill's parameters lack this field.
    Lack(&'static str),
    /// This field of the prefill's parameters has another value, as JSON.
    Instead(&'static str, &'static str),
    /// The whole server is gone.
    Exit,
}

/// The faults that are to come, one a request.
#[derive(Debug, Default)]
pub(super) struct Faults {
    next: Mutex<VecDeque<Fault>>,
    dead: AtomicBool,
}

impl Faults {
    pub(super) fn push(&self, fault: Fault, times: usize) {
        self.next.lock().extend(std::iter::repeat_n(fault, times));
    }

    /// Kills the engine behind the server, as happens to vLLM: this request and later ones get an error.
    pub(super) fn engine_dies(&self) -> Reply {
        self.dead.store(true, Ordering::SeqCst);
        let message = "EngineCore encountered an issue. See stack trace (above) for the root cause.";
        Reply::json(500, &json!({"error": {"message": message, "type": "InternalServerError", "code": 500}}))
    }

    /// The server's response on its engine's health.
    pub(super) fn health(&self) -> Reply {
        let status = if self.is_dead() { 503 } else { 200 };
        Reply::Page(status, "text/plain", Bytes::new())
    }

    /// The next fault, if it is one of those that need no request to be read; `exit` ends the server.
    pub(super) async fn meet(&self, exit: impl FnOnce()) -> FaultOutcome {
        let next = self.next.lock().pop_front();
        if self.is_dead() {
            return FaultOutcome::Ended(self.engine_dies());
        }
        match next {
            Some(Fault::Delay(time)) => {
                tokio::time::sleep(time).await;
                FaultOutcome::GoOn(None)
            }
            Some(Fault::Status(status)) => FaultOutcome::Ended(Reply::json(
                status,
                &json!({"error": {"message": "as ordered", "code": status}}),
            )),
            Some(Fault::Busy(status, after_s)) => FaultOutcome::Ended(Reply::Busy(status, after_s)),
            Some(Fault::NeverAnswer) => FaultOutcome::Ended(never().await),
            Some(Fault::Hangup) => FaultOutcome::Ended(Reply::Hangup),
            Some(Fault::Exit) => {
                exit();
                FaultOutcome::Ended(Reply::Hangup)
            }
            other => FaultOutcome::GoOn(other),
        }
    }

    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::SeqCst)
    }

    pub(super) fn clear(&self) {
        self.next.lock().clear();
        self.dead.store(false, Ordering::SeqCst);
    }
}

/// The effect of a fault on a request.
pub(super) enum FaultOutcome {
    /// That was the answer.
    Ended(Reply),
    /// It is served, with what goes wrong later.
    GoOn(Option<Fault>),
}
