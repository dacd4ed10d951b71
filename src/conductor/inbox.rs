//! What reaches the conductor: one bounded queue, in order of arrival.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use baton_router::{Event, Submission};
use baton_types::{Epoch, InstanceId, RequestId};
use baton_wire::v1;
use tokio::sync::{mpsc, oneshot};

use super::status::Status;
use crate::config::Config;

/// Messages that may wait for the conductor; a node that has more to say waits, a client is refused.
const INBOX_MESSAGES: usize = 16_384;

/// A message.
pub enum Message {
    /// A client's request.
    Submit {
        /// Its name inside.
        request: RequestId,
        /// What is wanted.
        submission: Box<Submission>,
        /// Where its events go.
        events: mpsc::Sender<Event>,
    },
    /// A client left, or has all that it wanted.
    Cancel(RequestId),
    /// A node said Hello.
    Joined {
        /// What it said.
        hello: Box<v1::Hello>,
        /// Where its orders go.
        orders: mpsc::Sender<v1::ToNode>,
        /// Its place, or why it has none.
        reply: oneshot::Sender<Result<v1::Welcome, String>>,
    },
    /// A node reports.
    Facts {
        /// Which.
        instance: InstanceId,
        /// Which life of it.
        epoch: Epoch,
        /// What happened.
        facts: Vec<v1::Fact>,
    },
    /// A node lives.
    Beat {
        /// Which.
        instance: InstanceId,
        /// Which life of it.
        epoch: Epoch,
        /// How it is.
        load: Box<v1::NodeLoad>,
    },
    /// A node's stream ended.
    Gone {
        /// Which.
        instance: InstanceId,
        /// Which life of it.
        epoch: Epoch,
        /// How.
        why: String,
    },
    /// A canary came through, or did not.
    Canary(super::canary::CanaryOutcome),
    /// An operator asks for something.
    Ask(Question),
}

/// What an operator asks; answered in words when it cannot be done.
pub enum Question {
    /// How everything stands.
    Status(oneshot::Sender<Box<Status>>),
    /// Why a request went where it went.
    Explain(String, oneshot::Sender<Option<String>>),
    /// The configuration in force.
    Config(oneshot::Sender<Box<Config>>),
    /// The policy before the last change shall be in force again.
    Rollback(oneshot::Sender<Result<Vec<String>, String>>),
    /// A policy to follow from now on; the answer tells what changed.
    Policy(Box<Config>, oneshot::Sender<Result<Vec<String>, String>>),
    /// A node, by name, shall take no new work, or take it again.
    Drain {
        /// Which.
        node: String,
        /// Whether to drain or to resume.
        drain: bool,
        /// The answer.
        reply: oneshot::Sender<Result<(), String>>,
    },
    /// A node, by name, shall play another part.
    Role {
        /// Which.
        node: String,
        /// Its new part.
        role: baton_types::Role,
        /// The answer.
        reply: oneshot::Sender<Result<(), String>>,
    },
    /// Nothing new is let in from now on; answered when nothing is under way.
    Quiesce(oneshot::Sender<()>),
}

/// The sending side.
#[derive(Clone)]
pub struct Inbox {
    sender: mpsc::Sender<Message>,
    next_request: Arc<AtomicU64>,
}

/// The sending side, for who must not keep the conductor running.
pub(super) struct WeakInbox {
    sender: mpsc::WeakSender<Message>,
    next_request: Arc<AtomicU64>,
}

impl WeakInbox {
    /// The sending side while anybody else still has it.
    pub(super) fn upgrade(&self) -> Option<Inbox> {
        Some(Inbox { sender: self.sender.upgrade()?, next_request: Arc::clone(&self.next_request) })
    }
}

/// Where a conductor's names for requests begin: at the time of its start, µs, so that no two conductors, one after the
/// other or side by side, use one name, and KV that was on its way for one never lands in a request of the other.
fn first_request() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(0).max(1)
}

/// An inbox with its receiving side.
#[must_use]
pub fn inbox() -> (Inbox, mpsc::Receiver<Message>) {
    let (sender, receiver) = mpsc::channel(INBOX_MESSAGES);
    (Inbox { sender, next_request: Arc::new(AtomicU64::new(first_request())) }, receiver)
}

impl Inbox {
    /// The same without keeping the conductor running.
    pub(super) fn downgrade(&self) -> WeakInbox {
        WeakInbox { sender: self.sender.downgrade(), next_request: Arc::clone(&self.next_request) }
    }

    /// A name for a new request.
    #[must_use]
    pub fn name_request(&self) -> RequestId {
        RequestId(self.next_request.fetch_add(1, Ordering::Relaxed))
    }

    /// Sends if there is room; the message comes back if not.
    ///
    /// # Errors
    /// The message, when the inbox is full or the conductor is gone.
    pub fn offer(&self, message: Message) -> Result<(), Message> {
        self.sender.try_send(message).map_err(|e| match e {
            mpsc::error::TrySendError::Full(message) | mpsc::error::TrySendError::Closed(message) => message,
        })
    }

    /// Waits for room and sends. False when the conductor is gone.
    pub async fn send(&self, message: Message) -> bool {
        self.sender.send(message).await.is_ok()
    }

    /// Sends a cancellation from where nothing may wait.
    pub fn cancel(&self, request: RequestId) {
        let Err(message) = self.offer(Message::Cancel(request)) else { return };
        let sender = self.sender.clone();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            // One for each live request at most.
            runtime.spawn(async move { sender.send(message).await.is_ok() });
        }
    }

    /// Asks and waits for the answer; `None` when the conductor is gone.
    pub async fn ask<T>(&self, question: impl FnOnce(oneshot::Sender<T>) -> Question) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        if !self.send(Message::Ask(question(reply))).await {
            return None;
        }
        answer.await.ok()
    }
}
