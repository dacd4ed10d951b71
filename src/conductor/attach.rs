//! The gRPC side of attaching: a node's stream becomes messages, its orders become its stream.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use baton_types::{Epoch, InstanceId};
use baton_wire::v1;
use futures_util::TryStreamExt as _;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::server::TlsConnectInfo;
use tonic::{Request, Response, Status, Streaming};

use super::inbox::{Inbox, Loss, Message};
use super::lead::Lead;
use super::node_error::AttachRefusal;
use crate::guard::{ClusterGuard, Opening};
use crate::metrics::Metrics;

/// Messages to a node that may wait; a node that lets more pile up is taken for lost.
pub(crate) const ORDERS_PER_NODE: usize = 1024;
/// How long a node may take to say Hello.
const HELLO_WITHIN: std::time::Duration = std::time::Duration::from_secs(10);

/// The other end of a connection, and whether a node was attached over it.
#[derive(Clone, Debug)]
pub struct AttachPeer {
    address: SocketAddr,
    attached: Arc<AtomicBool>,
}

impl From<SocketAddr> for AttachPeer {
    fn from(address: SocketAddr) -> Self {
        Self { address, attached: Arc::default() }
    }
}

impl AttachPeer {
    /// Where it comes from.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether a node was attached, which has shown what it has to show.
    #[must_use]
    pub fn has_attached(&self) -> bool {
        self.attached.load(Ordering::Acquire)
    }

    /// A node was attached.
    pub(crate) fn attach(&self) {
        self.attached.store(true, Ordering::Release);
    }

    /// The sender of a request, where its connection says so.
    fn of<T>(request: &Request<T>) -> Option<Self> {
        let known = request.extensions();
        let bare = known.get::<Self>();
        bare.or_else(|| known.get::<TlsConnectInfo<Self>>().map(TlsConnectInfo::get_ref)).cloned()
    }
}

/// The control plane's server.
#[derive(Clone)]
pub struct ControlService {
    inbox: Inbox,
    hello_within: std::time::Duration,
    lead: Lead,
    guard: ClusterGuard,
    metrics: Option<Metrics>,
}

impl ControlService {
    /// A server that passes the nodes' messages on to `inbox`. It accepts nodes as long as `lead` permits.
    #[must_use]
    pub fn new(inbox: Inbox, lead: Lead) -> Self {
        Self { inbox, hello_within: HELLO_WITHIN, lead, guard: ClusterGuard::default(), metrics: None }
    }

    /// A server like that of `new` that admits only nodes that `guard` accepts. It counts the rejected ones in
    /// `metrics`.
    #[must_use]
    pub fn guarded(self, guard: ClusterGuard, metrics: Metrics) -> Self {
        Self { guard, metrics: Some(metrics), ..self }
    }

    /// A server like that of `new` with another time limit for the first message.
    #[cfg(test)]
    pub(super) fn hello_within(inbox: Inbox, hello_within: std::time::Duration) -> Self {
        Self { hello_within, ..Self::new(inbox, Lead::alone()) }
    }

    /// Counts and logs a node that was rejected.
    fn refused(&self, status: Status, from: Option<&AttachPeer>) -> Status {
        if let Some(metrics) = &self.metrics {
            metrics.node_refused();
        }
        let from = from.map_or_else(|| "somewhere".to_owned(), |from| from.address.to_string());
        tracing::warn!(from, why = status.message(), "a node was not let in");
        status
    }

    async fn hello(&self, incoming: &mut Streaming<v1::FromNode>) -> Result<v1::Hello, Status> {
        match tokio::time::timeout(self.hello_within, incoming.message()).await {
            Ok(Ok(Some(v1::FromNode { message: Some(v1::from_node::Message::Hello(hello)) }))) => Ok(hello),
            Ok(Err(status)) => Err(status),
            Ok(_) => Err(Status::invalid_argument("the first message of a node must be Hello")),
            Err(_) => {
                let within = self.hello_within;
                Err(Status::deadline_exceeded(format!("the node did not say Hello within {within:?}")))
            }
        }
    }

    /// Takes a node in, from its Hello to its welcome; what goes to it from then on.
    async fn welcome(
        self,
        mut incoming: Streaming<v1::FromNode>,
        (opening, from): (Option<Opening>, Option<AttachPeer>),
    ) -> Result<ToNodeStream, Status> {
        let hello = self.hello(&mut incoming).await?;
        let proof = match opening {
            None => Vec::new(),
            Some(opening) => {
                let proven = self.guard.proven(&opening, &hello.proof);
                proven.map_err(|status| self.refused(status, from.as_ref()))?.to_vec()
            }
        };
        let (orders, receiver) = mpsc::channel(ORDERS_PER_NODE);
        let (reply, answer) = oneshot::channel();
        let joined = Message::Joined { hello: Box::new(hello), orders, reply };
        if !self.inbox.send(joined).await {
            return Err(Status::unavailable("the conductor is shutting down"));
        }
        let welcome = match answer.await {
            Ok(Ok(welcome)) => v1::Welcome { proof: proof.into(), ..welcome },
            Ok(Err(taken @ AttachRefusal::NameTaken { .. })) => {
                return Err(self.refused(Status::already_exists(taken.to_string()), from.as_ref()));
            }
            Ok(Err(refusal)) => return Err(Status::failed_precondition(refusal.to_string())),
            Err(_) => return Err(Status::unavailable("the conductor is shutting down")),
        };
        if let Some(from) = &from {
            from.attach();
        }
        let life = (InstanceId(welcome.instance), Epoch(welcome.epoch));
        // Orders may have been queued already: the welcome goes first in the stream itself.
        let first = v1::ToNode { message: Some(v1::to_node::Message::Welcome(welcome)) };
        tokio::spawn(listen(self.inbox.clone(), incoming, life));
        Ok(Box::pin(tokio_stream::once(first).chain(ReceiverStream::new(receiver)).map(Ok)))
    }
}

type ToNodeStream = Pin<Box<dyn Stream<Item = Result<v1::ToNode, Status>> + Send>>;

#[tonic::async_trait]
impl v1::control_server::Control for ControlService {
    type AttachStream = ToNodeStream;

    async fn attach(
        &self,
        request: Request<Streaming<v1::FromNode>>,
    ) -> Result<Response<ToNodeStream>, Status> {
        self.lead.check()?;
        let from = AttachPeer::of(&request);
        let asked = self.guard.open_call(request.metadata());
        let opening = asked.map_err(|status| self.refused(status, from.as_ref()))?;
        let welcomed = self.clone().welcome(request.into_inner(), (opening, from));
        let Some(opening) = opening else { return Ok(Response::new(welcomed.await?)) };
        // The node waits for our challenge before it says Hello.
        let stream = futures_util::stream::once(welcomed).try_flatten();
        let mut answer = Response::new(Box::pin(stream) as ToNodeStream);
        self.guard.answer(&opening, answer.metadata_mut());
        Ok(answer)
    }
}

async fn listen(inbox: Inbox, mut incoming: Streaming<v1::FromNode>, life: (InstanceId, Epoch)) {
    let (instance, epoch) = life;
    let loss = loop {
        let message = match incoming.message().await {
            Ok(Some(v1::FromNode { message: Some(message) })) => message,
            Ok(Some(_)) => continue,
            Ok(None) => break Loss::Left("it left".to_owned()),
            Err(status) => break Loss::Died(format!("its connection broke: {}", status.message())),
        };
        let message = match message {
            v1::from_node::Message::Facts(facts) => Message::Facts { instance, epoch, facts: facts.facts },
            v1::from_node::Message::Heartbeat(beat) => {
                Message::Beat { instance, epoch, load: Box::new(beat.load.unwrap_or_default()) }
            }
            v1::from_node::Message::Hello(_) => break Loss::Left("it said Hello twice".to_owned()),
        };
        if !inbox.send(message).await {
            return;
        }
    };
    inbox.send(Message::Gone { instance, epoch, loss }).await;
}
