//! The gRPC side of attaching: a node's stream becomes messages, its orders become its stream.

use std::pin::Pin;

use baton_types::{Epoch, InstanceId};
use baton_wire::v1;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, Streaming};

use super::inbox::{Inbox, Message};
use super::lead::Lead;

/// Messages to a node that may wait; a node that lets more pile up is taken for lost.
const ORDERS_PER_NODE: usize = 1024;
/// How long a node may take to say Hello.
const HELLO_WITHIN: std::time::Duration = std::time::Duration::from_secs(10);

/// The control plane's server.
pub struct ControlService {
    inbox: Inbox,
    hello_within: std::time::Duration,
    lead: Lead,
}

impl ControlService {
    /// A server that tells `inbox` what nodes say, and takes them as long as `lead` lets it.
    #[must_use]
    pub const fn new(inbox: Inbox, lead: Lead) -> Self {
        Self { inbox, hello_within: HELLO_WITHIN, lead }
    }

    /// The same with another patience for the first message.
    #[cfg(test)]
    pub(super) fn hello_within(inbox: Inbox, hello_within: std::time::Duration) -> Self {
        Self { inbox, hello_within, lead: Lead::alone() }
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
        let mut incoming = request.into_inner();
        let hello = match tokio::time::timeout(self.hello_within, incoming.message()).await {
            Ok(Ok(Some(v1::FromNode { message: Some(v1::from_node::Message::Hello(hello)) }))) => hello,
            Ok(Err(status)) => return Err(status),
            Ok(_) => return Err(Status::invalid_argument("the first message of a node must be Hello")),
            Err(_) => {
                let within = self.hello_within;
                return Err(Status::deadline_exceeded(format!(
                    "the node did not say Hello within {within:?}"
                )));
            }
        };
        let (orders, receiver) = mpsc::channel(ORDERS_PER_NODE);
        let (reply, answer) = oneshot::channel();
        let joined = Message::Joined { hello: Box::new(hello), orders: orders.clone(), reply };
        if !self.inbox.send(joined).await {
            return Err(Status::unavailable("the conductor is shutting down"));
        }
        let welcome = match answer.await {
            Ok(Ok(welcome)) => welcome,
            Ok(Err(why)) => return Err(Status::failed_precondition(why)),
            Err(_) => return Err(Status::unavailable("the conductor is shutting down")),
        };
        let life = (InstanceId(welcome.instance), Epoch(welcome.epoch));
        // Orders may have been queued already: the welcome goes first in the stream itself.
        let first = v1::ToNode { message: Some(v1::to_node::Message::Welcome(welcome)) };
        let stream = tokio_stream::once(first).chain(ReceiverStream::new(receiver)).map(Ok);
        tokio::spawn(listen(self.inbox.clone(), incoming, life));
        Ok(Response::new(Box::pin(stream)))
    }
}

async fn listen(inbox: Inbox, mut incoming: Streaming<v1::FromNode>, life: (InstanceId, Epoch)) {
    let (instance, epoch) = life;
    let why = loop {
        let message = match incoming.message().await {
            Ok(Some(v1::FromNode { message: Some(message) })) => message,
            Ok(Some(_)) => continue,
            Ok(None) => break "it left".to_owned(),
            Err(status) => break format!("its connection broke: {}", status.message()),
        };
        let message = match message {
            v1::from_node::Message::Facts(facts) => Message::Facts { instance, epoch, facts: facts.facts },
            v1::from_node::Message::Heartbeat(beat) => {
                Message::Beat { instance, epoch, load: Box::new(beat.load.unwrap_or_default()) }
            }
            v1::from_node::Message::Hello(_) => break "it said Hello twice".to_owned(),
        };
        if !inbox.send(message).await {
            return;
        }
    };
    inbox.send(Message::Gone { instance, epoch, why }).await;
}
