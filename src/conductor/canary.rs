//! The canary: a request of the conductor's own that passes through a pair before `/ready` says yes.

use std::sync::Arc;
use std::time::Duration;

use baton_router::{Event, Submission};
use baton_types::{BlockKey, RequestId, Sampling};
use tokio::sync::mpsc;

use super::driver::Driver;
use super::inbox::Message;

/// How long a canary may take, and how long the next one waits after a failure.
const TIME_LIMIT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(500);

/// The state of the canary requests.
#[derive(Default)]
pub(super) struct Canary {
    passed: bool,
    /// The latest one.
    request: Option<RequestId>,
    flying: bool,
}

impl Canary {
    /// None is sent, for tests that count what there is.
    #[cfg(test)]
    pub(super) const fn call_off(&mut self) {
        self.flying = true;
    }

    /// Whether the request is the conductor's own, which no figure of clients counts.
    pub(super) fn is(&self, request: RequestId) -> bool {
        self.request == Some(request)
    }

    /// Whether one came through since there last was no pair.
    pub(super) const fn passed(&self) -> bool {
        self.passed
    }
}

/// The result of a canary.
pub struct CanaryOutcome {
    /// `None` when it passed.
    pub failure: Option<String>,
}

impl Driver {
    /// Nodes came, left or changed: sends a canary when there is a pair that none has passed through.
    pub(super) fn look_after_canary(&mut self) {
        self.canary.passed &= self.core.can_serve();
        if self.core.has_pair() && !self.canary.passed && !self.canary.flying && !self.closing {
            self.canary.flying = self.send_canary();
        }
        self.publish_readiness();
        self.shown_us = None;
    }

    /// False: the conductor is ending.
    fn send_canary(&mut self) -> bool {
        let Some(inbox) = self.inbox.upgrade() else { return false };
        let (sender, events) = mpsc::channel(16);
        let request = inbox.name_request();
        self.canary.request = Some(request);
        let sampling = Sampling { temperature: 0.0, max_tokens: 2, ignore_eos: true, ..Sampling::default() };
        let submission = Submission {
            request_id: format!("canary-{request}").into(),
            tokens: (0..8u32).map(|at| at + 65).collect(),
            root: BlockKey::default(),
            chain: Arc::new([]),
            sampling: Arc::new(sampling),
            class: None,
            class_param: None,
            objectives: baton_types::RequestObjectives::default(),
            tenant: None,
            session: None,
            body: b"{\"max_tokens\":2}"[..].into(),
            asked_tokens: None,
            explain: false,
            timeout_us: Some(u64::try_from(TIME_LIMIT.as_micros()).unwrap_or(u64::MAX)),
            trace: None,
        };
        tokio::spawn(async move {
            let message = Message::submit(request, submission, sender);
            if !inbox.send(message).await {
                return;
            }
            let failure = watch(events).await;
            if failure.is_some() {
                inbox.cancel(request);
                tokio::time::sleep(PAUSE).await;
            }
            inbox.send(Message::Canary(CanaryOutcome { failure })).await;
        });
        true
    }

    pub(super) fn canary_ended(&mut self, outcome: CanaryOutcome) {
        self.canary.flying = false;
        match outcome.failure {
            None => {
                self.canary.passed = true;
                tracing::info!("a canary passed through a pair: ready");
            }
            Some(why) => tracing::warn!(why, "the canary did not pass"),
        }
        self.look_after_canary();
    }
}

async fn watch(mut events: mpsc::Receiver<Event>) -> Option<String> {
    let time_limit = tokio::time::sleep(TIME_LIMIT);
    tokio::pin!(time_limit);
    let mut tokens = 0;
    loop {
        let event = tokio::select! {
            event = events.recv() => event,
            () = &mut time_limit => return Some("no answer in time".into()),
        };
        match event {
            Some(Event::Token { .. }) => tokens += 1,
            Some(Event::Finished { .. }) if tokens == 2 => return None,
            Some(Event::Finished { .. }) => return Some(format!("{tokens} tokens came, not 2")),
            Some(Event::Refused(refusal)) => return Some(refusal.message.to_string()),
            Some(Event::Failed(fault)) => return Some(fault.message.to_string()),
            Some(_) => {}
            None => return Some("its events ended early".into()),
        }
    }
}
