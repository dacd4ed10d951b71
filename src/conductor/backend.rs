//! The router's way in: submissions become messages, tickets cancel when they are dropped.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use baton_router::{Backend, Event, Model, Readiness, Refusal, Submission, Ticket};
use baton_types::RequestId;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::inbox::{Inbox, Message};

/// Events that may wait for a client that reads slowly; a client further behind is cut off.
const EVENTS_PER_CLIENT: usize = 4096;

/// What the router sees of the conductor.
pub struct Door {
    inbox: Inbox,
    shared: Arc<Shared>,
}

/// What the driver tells the router without being asked.
#[derive(Default)]
pub(super) struct Shared {
    pub(super) model: ArcSwapOption<Model>,
    pub(super) readiness: Mutex<Option<Readiness>>,
}

impl Door {
    pub(super) const fn new(inbox: Inbox, shared: Arc<Shared>) -> Self {
        Self { inbox, shared }
    }
}

/// Cancels its request when the client is gone. A request that has ended already is not known any more.
struct Guard {
    inbox: Inbox,
    request: RequestId,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.inbox.cancel(self.request);
    }
}

impl Backend for Door {
    fn submit(&self, submission: Submission) -> Ticket {
        let request = self.inbox.name_request();
        let (sender, events) =
            mpsc::channel(EVENTS_PER_CLIENT.min(submission.sampling.max_tokens as usize + 8));
        let message = Message::Submit { request, submission: Box::new(submission), events: sender.clone() };
        if self.inbox.offer(message).is_err() {
            // The channel is new and has room.
            let _ = sender.try_send(Event::Refused(Refusal {
                status: 503,
                reason: "conductor_busy".into(),
                message: "the conductor's inbox is full; try again shortly".into(),
                retry_after_us: Some(1_000_000),
                predicted_ttft_us: None,
            }));
        }
        Ticket { events, guard: Box::new(Guard { inbox: self.inbox.clone(), request }) }
    }

    fn model(&self) -> Option<Arc<Model>> {
        self.shared.model.load_full()
    }

    fn readiness(&self) -> Readiness {
        let known = self.shared.readiness.lock().clone();
        known.unwrap_or_else(|| Readiness { ready: false, detail: "no node has attached yet".into() })
    }
}
