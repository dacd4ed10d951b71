//! The conductor's input: one bounded queue, in order of arrival.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use baton_router::{Event, Submission};
use baton_types::{Epoch, InstanceId, RequestId};
use baton_wire::v1;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use super::node_error::{AttachRefusal, NodeChangeError};
use super::policy::{PolicyChange, PolicyOutcome, PolicyRefusal};
use super::status::Status;
use crate::config::Config;
use crate::policy::PolicyError;

/// Messages that may wait for the conductor; a node that has more to say waits, a client is refused.
const INBOX_MESSAGES: usize = 16_384;

/// How the life of a node ended; in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Loss {
    /// It ended its line itself, or was made to: its engine is not to blame.
    Left(String),
    /// It was cut off in the middle of its work: what it computed may be what it died of.
    Died(String),
}

impl Loss {
    /// Why, in words.
    #[must_use]
    pub fn why(&self) -> &str {
        let (Self::Left(why) | Self::Died(why)) = self;
        why
    }
}

/// A message.
pub enum Message {
    /// A client's request.
    Submit {
        /// Its name inside.
        request: RequestId,
        /// The request's content.
        submission: Box<Submission>,
        /// The channel for the request's events.
        events: mpsc::Sender<Event>,
    },
    /// A client left, or has all that it wanted.
    Cancel(RequestId),
    /// A node said Hello.
    Joined {
        /// The node's Hello message.
        hello: Box<v1::Hello>,
        /// The channel for the node's orders.
        orders: mpsc::Sender<v1::ToNode>,
        /// Its place, or why it has none.
        reply: oneshot::Sender<Result<v1::Welcome, AttachRefusal>>,
    },
    /// A node reports.
    Facts {
        /// The node's instance.
        instance: InstanceId,
        /// The node's life.
        epoch: Epoch,
        /// The reported facts.
        facts: Vec<v1::Fact>,
    },
    /// A node lives.
    Beat {
        /// The node's instance.
        instance: InstanceId,
        /// The node's life.
        epoch: Epoch,
        /// The node's load.
        load: Box<v1::NodeLoad>,
    },
    /// A node's stream ended.
    Gone {
        /// The node's instance.
        instance: InstanceId,
        /// The node's life.
        epoch: Epoch,
        /// The reason of the loss.
        loss: Loss,
    },
    /// A canary came through, or did not.
    Canary(super::canary::CanaryOutcome),
    /// An operator asks for something.
    Ask(Question),
}

impl Message {
    /// A client's request.
    pub fn submit(request: RequestId, submission: Submission, events: mpsc::Sender<Event>) -> Self {
        Self::Submit { request, submission: Box::new(submission), events }
    }
}

/// An operator's request. Where the conductor cannot fulfil it, the reply is an error text.
pub enum Question {
    /// The conductor's status.
    Status(oneshot::Sender<Box<Status>>),
    /// The reasons for a request's placement.
    Explain(String, oneshot::Sender<Option<String>>),
    /// The configuration in force.
    Config(oneshot::Sender<Box<Config>>),
    /// The configuration in force, with the number of its policy.
    PolicyInForce(oneshot::Sender<Box<(u64, Config)>>),
    /// The policy before the last change shall be in force again, if the one with this tag is in force.
    Rollback(Option<String>, oneshot::Sender<Result<PolicyOutcome, PolicyRefusal>>),
    /// Sets the policy from now on.
    Policy(Box<PolicyChange>, oneshot::Sender<Result<PolicyOutcome, PolicyRefusal>>),
    /// What such a policy would change, without a change.
    CheckPolicy(Box<Config>, oneshot::Sender<Result<Vec<String>, PolicyError>>),
    /// A node, by name, shall take no new work, or take it again.
    Drain {
        /// The node's name.
        node: String,
        /// Whether to drain or to resume.
        drain: bool,
        /// The answer.
        reply: oneshot::Sender<Result<(), NodeChangeError>>,
    },
    /// A node, by name, shall play another part.
    Role {
        /// The node's name.
        node: String,
        /// Its new part.
        role: baton_types::Role,
        /// The answer.
        reply: oneshot::Sender<Result<(), NodeChangeError>>,
    },
    /// Nothing new is let in from now on; answered when nothing is under way.
    Quiesce(oneshot::Sender<()>),
}

/// The sending side.
#[derive(Clone)]
pub struct Inbox {
    sender: mpsc::Sender<Message>,
    next_request: Arc<AtomicU64>,
    outside: DetachedServers,
}

/// Why servers that this process drives are not attached, by name; and why their list is not known.
type DetachedServers = Arc<Mutex<BTreeMap<String, String>>>;

/// The sending side, for who must not keep the conductor running.
pub(super) struct WeakInbox {
    sender: mpsc::WeakSender<Message>,
    next_request: Arc<AtomicU64>,
    outside: DetachedServers,
}

impl WeakInbox {
    /// The sending side while anybody else still has it.
    pub(super) fn upgrade(&self) -> Option<Inbox> {
        let (next_request, outside) = (Arc::clone(&self.next_request), Arc::clone(&self.outside));
        Some(Inbox { sender: self.sender.upgrade()?, next_request, outside })
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
    let next_request = Arc::new(AtomicU64::new(first_request()));
    (Inbox { sender, next_request, outside: DetachedServers::default() }, receiver)
}

impl Inbox {
    /// A handle like this one that does not keep the conductor running.
    pub(super) fn downgrade(&self) -> WeakInbox {
        let (next_request, outside) = (Arc::clone(&self.next_request), Arc::clone(&self.outside));
        WeakInbox { sender: self.sender.downgrade(), next_request, outside }
    }

    /// Records why a server that this process drives is not attached. `None` clears the reason.
    pub fn kept_out(&self, name: &str, why: Option<String>) {
        let mut outside = self.outside.lock();
        match why {
            Some(why) => drop(outside.insert(name.to_owned(), why)),
            None => drop(outside.remove(name)),
        }
    }

    /// The servers that this process drives and that are not attached, with the reasons.
    #[must_use]
    pub fn outside(&self) -> BTreeMap<String, String> {
        self.outside.lock().clone()
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
