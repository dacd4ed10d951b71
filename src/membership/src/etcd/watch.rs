//! Following keys from a revision on.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::client::{ANSWER_BYTES_MAX, Etcd, Line};
use super::fault;
use super::keys::{Entry, Keys};
use crate::error::{Kind, MembershipError, Result, Stage};
use crate::proto::event::EventType;
use crate::proto::watch_client::WatchClient;
use crate::proto::watch_request::RequestUnion;
use crate::proto::{WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse};

/// Questions that may wait for the connection.
const QUESTIONS: usize = 4;

/// A change of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// It was written.
    Put(Entry),
    /// It was deleted, by somebody or with its lease.
    Deleted {
        /// Its name.
        key: String,
        /// The store's revision then.
        revision: u64,
    },
}

/// Events that belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// In the order in which they happened.
    pub events: Vec<Event>,
    /// The last one's revision: a later watch goes on from the next.
    pub revision: u64,
}

/// A watch that is running.
pub struct Watching {
    etcd: Etcd,
    line: Line,
    questions: mpsc::Sender<WatchRequest>,
    answers: Streaming<WatchResponse>,
    /// Time of the latest message.
    heard: Instant,
    asked: bool,
}

impl Etcd {
    /// Follows `keys` from `revision` on, that one included.
    ///
    /// # Errors
    /// When no endpoint answers, or it refuses.
    pub async fn watch(&self, keys: &Keys, revision: u64) -> Result<Watching> {
        let line = self.line(Stage::Watch).await?;
        let (key, range_end) = keys.range();
        let start_revision = revision.cast_signed();
        let create = WatchCreateRequest { key, range_end, start_revision, progress_notify: true };
        let (questions, outgoing) = mpsc::channel(QUESTIONS);
        let first = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
        questions.try_send(first).expect("a new channel has room");
        let mut request = line.request(ReceiverStream::new(outgoing));
        // A member that has lost its quorum shall say so instead of staying silent.
        request.metadata_mut().insert("hasleader", tonic::metadata::MetadataValue::from_static("true"));
        let mut client = WatchClient::new(line.channel.clone()).max_decoding_message_size(ANSWER_BYTES_MAX);
        let opened = async {
            let mut answers = client.watch(request).await?.into_inner();
            // The first answer says that the watch stands; why it may not stand comes in a later one.
            answers.message().await?.ok_or_else(|| Status::unavailable("it ended the watch at once"))?;
            Ok(answers)
        };
        let answers = match tokio::time::timeout(self.config().request_timeout(), opened).await {
            Ok(Ok(answers)) => answers,
            Ok(Err(status)) => {
                self.forget_line(&line);
                return Err(fault::error(Stage::Watch, self.address(&line), &status));
            }
            Err(_) => {
                self.forget_line(&line);
                return Err(self.silent(Stage::Watch, &line));
            }
        };
        Ok(Watching { etcd: self.clone(), line, questions, answers, heard: Instant::now(), asked: false })
    }
}

impl Watching {
    /// The next events. Nothing is lost when the caller stops waiting.
    ///
    /// # Errors
    /// [`Kind::Compacted`]: history is missing, list anew. [`Kind::Unavailable`] or [`Kind::TimedOut`]: watch anew,
    /// from the revision after the last batch.
    pub async fn next(&mut self) -> Result<Batch> {
        let half = Duration::from_micros(self.etcd.config().silence_us / 2);
        loop {
            let time_limit = if self.asked { half * 2 } else { half };
            match tokio::time::timeout_at(self.heard + time_limit, self.answers.message()).await {
                Ok(Ok(Some(answer))) => {
                    self.heard = Instant::now();
                    self.asked = false;
                    if let Some(batch) = self.read(answer)? {
                        return Ok(batch);
                    }
                }
                Ok(Ok(None)) => return Err(self.broken("it ended the watch")),
                Ok(Err(status)) => {
                    self.etcd.forget_line(&self.line);
                    return Err(fault::error(Stage::Watch, self.etcd.address(&self.line), &status));
                }
                Err(_) if self.asked => return Err(self.broken("it has fallen silent")),
                Err(_) => {
                    self.asked = true;
                    let ask = RequestUnion::ProgressRequest(WatchProgressRequest {});
                    // A full channel means that nothing is being sent: the silence will tell.
                    let _ = self.questions.try_send(WatchRequest { request_union: Some(ask) });
                }
            }
        }
    }

    fn broken(&self, why: &str) -> MembershipError {
        self.etcd.forget_line(&self.line);
        let text = format!("etcd at {}: {why}; watch anew", self.etcd.address(&self.line));
        MembershipError::new(Kind::Unavailable, Stage::Watch, text)
    }

    /// The events in an answer, if it has any. Its progress notices are ignored: older servers may send them before the
    /// earlier events.
    fn read(&self, answer: WatchResponse) -> Result<Option<Batch>> {
        if answer.canceled {
            return Err(self.canceled(&answer));
        }
        let events: Vec<Event> = answer
            .events
            .into_iter()
            .filter_map(|event| {
                let deleted = event.r#type() == EventType::Delete;
                let entry = Entry::read(event.kv?);
                let event = match deleted {
                    true => Event::Deleted { key: entry.key, revision: entry.mod_revision },
                    false => Event::Put(entry),
                };
                Some(event)
            })
            .collect();
        let last = events.iter().map(Event::revision).max();
        Ok(last.map(|revision| Batch { events, revision }))
    }

    fn canceled(&self, answer: &WatchResponse) -> MembershipError {
        let address = self.etcd.address(&self.line);
        let (kind, remedy) = if answer.compact_revision != 0 {
            (Kind::Compacted, "list anew")
        } else if answer.cancel_reason.contains("permission") || answer.cancel_reason.contains("auth") {
            // Perhaps the token alone is too old: the next line logs in again.
            self.etcd.forget_line(&self.line);
            (Kind::Denied, "check user, password and the user's roles")
        } else {
            self.etcd.forget_line(&self.line);
            (Kind::Unavailable, "watch anew")
        };
        let why =
            if answer.cancel_reason.is_empty() { "the watch was cancelled" } else { &answer.cancel_reason };
        MembershipError::new(kind, Stage::Watch, format!("etcd at {address}: {why}; {remedy}"))
    }
}

impl Event {
    /// The store's revision at which it happened.
    #[must_use]
    pub const fn revision(&self) -> u64 {
        match self {
            Self::Put(entry) => entry.mod_revision,
            Self::Deleted { revision, .. } => *revision,
        }
    }
}
