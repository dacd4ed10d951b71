//! The line to the conductor: attach, say Hello, report, take orders; again in a new epoch when it breaks.

use std::sync::Arc;
use std::time::Duration;

use baton_wire::v1;
use baton_wire::v1::control_client::ControlClient;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;
use tonic::transport::Channel;

use super::whom::{Chosen, Whom};
use crate::guard::ClusterGuard;

/// Messages to the conductor that may wait; the engine waits when they are full.
pub(super) const FACTS_WAITING: usize = 1024;
/// What the conductor may send ahead, and at once.
const WINDOW_BYTES: u32 = 16 << 20;
const FRAME_BYTES: u32 = 1 << 20;
/// Between two tries to attach.
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MOST: Duration = Duration::from_secs(2);

/// What does the node's work, as the line sees it.
pub(super) trait Station: Send + Sync {
    /// A new life begins; facts of it go to `facts`.
    ///
    /// # Errors
    /// [`Gone`]: nobody does the work any more; so for the others.
    fn attached(&self, welcome: &v1::Welcome, facts: mpsc::Sender<v1::FromNode>) -> Result<(), Gone>;
    /// The conductor is gone: nothing of this life counts any more.
    fn detached(&self) -> Result<(), Gone>;
    /// What the conductor wants.
    fn ordered(&self, orders: v1::Orders) -> Result<(), Gone>;
    /// How it fares.
    fn load(&self) -> v1::NodeLoad;
}

/// Nobody does the node's work any more.
#[derive(Debug)]
pub(super) struct Gone;

impl From<Gone> for tonic::Status {
    fn from(_: Gone) -> Self {
        Self::aborted("the node's thread has ended")
    }
}

/// Orders of a life, and where its facts go.
type Open = (Streaming<v1::ToNode>, mpsc::Sender<v1::FromNode>);

/// See the module.
pub(super) struct Line<S> {
    pub(super) whom: Arc<Whom>,
    pub(super) guard: ClusterGuard,
    pub(super) hello: v1::Hello,
    pub(super) station: S,
}

impl<S: Station> Line<S> {
    /// Keeps the line up until told to stop.
    ///
    /// # Errors
    /// When the conductor will not have this node; trying again would not help.
    pub(super) async fn keep(&self, stop: &CancellationToken) -> Result<(), String> {
        let (mut pause, mut known) = (RETRY_FIRST, false);
        loop {
            let ended = tokio::select! {
                ended = self.once(&mut known) => ended,
                () = stop.cancelled() => return Ok(()),
            };
            if self.station.detached().is_err() {
                return Err(format!("node {}: its thread ended; please report this", self.hello.name));
            }
            match ended {
                Ok(()) => pause = RETRY_FIRST,
                Err(status) if status.code() == tonic::Code::FailedPrecondition => {
                    return Err(format!("the conductor refused: {}", status.message()));
                }
                // One that had taken this node will have its key mended; the first is told where to look.
                Err(status) if status.code() == tonic::Code::Unauthenticated && !known => {
                    return Err(format!("not let in: {}", status.message()));
                }
                Err(status) => {
                    self.whom.refused(&status);
                    tracing::warn!(
                        node = self.hello.name,
                        why = status.message(),
                        "not attached; trying again"
                    );
                }
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = stop.cancelled() => return Ok(()),
            }
            pause = (pause * 2).min(RETRY_MOST);
        }
    }

    async fn connect(&self, chosen: &Chosen) -> Result<ControlClient<Channel>, tonic::Status> {
        let unavailable = |e: tonic::transport::Error| {
            let why = std::error::Error::source(&e).map_or_else(String::new, |why| format!(": {why}"));
            tonic::Status::unavailable(format!("{}: {e}{why}", chosen.address))
        };
        let channel = self
            .guard
            .line(&chosen.address)?
            .http2_keep_alive_interval(Duration::from_secs(5))
            .keep_alive_timeout(Duration::from_secs(5))
            .tcp_nodelay(true)
            // An order may carry the tokens of a long prompt: it shall not wait for leave every 64 KiB.
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .max_frame_size(FRAME_BYTES)
            .connect()
            .await
            .map_err(unavailable)?;
        Ok(ControlClient::new(channel).max_decoding_message_size(usize::MAX))
    }

    /// Says Hello; the orders, and where facts go. Where there is a key both sides prove that they have it.
    async fn greet(&self, chosen: &Chosen) -> Result<Open, tonic::Status> {
        let mut client = self.connect(chosen).await?;
        let (facts, outgoing) = mpsc::channel(FACTS_WAITING);
        let mut call = tonic::Request::new(ReceiverStream::new(outgoing));
        let challenge = self.guard.challenge(call.metadata_mut());
        let say = async |proof: Vec<u8>| {
            let hello = v1::Hello { proof: proof.into(), ..self.hello.clone() };
            let first = v1::FromNode { message: Some(v1::from_node::Message::Hello(hello)) };
            facts.send(first).await.map_err(|_| tonic::Status::cancelled("the line closed at once"))
        };
        if challenge.is_none() {
            say(Vec::new()).await?;
        }
        let answer = client.attach(call).await?;
        if let Some(challenge) = challenge {
            say(self.guard.answered(&challenge, answer.metadata())?.to_vec()).await?;
        }
        Ok((answer.into_inner(), facts))
    }

    /// One life: from Hello to the end of the stream.
    async fn once(&self, known: &mut bool) -> Result<(), tonic::Status> {
        let chosen = self.whom.choose().await;
        let (mut orders, facts) = self.greet(&chosen).await?;
        let welcome = match orders.message().await?.and_then(|m| m.message) {
            Some(v1::to_node::Message::Welcome(welcome)) => welcome,
            _ => return Err(tonic::Status::internal("the conductor did not say Welcome first")),
        };
        self.heed(welcome.leader)?;
        *known = true;
        self.station.attached(&welcome, facts.clone())?;
        tracing::info!(
            node = self.hello.name,
            instance = welcome.instance,
            epoch = welcome.epoch,
            "attached"
        );
        let beat = Duration::from_micros(welcome.heartbeat_us.max(10_000));
        tokio::select! {
            ended = self.obey(&mut orders) => ended,
            ended = self.beat(&facts, beat) => ended,
            () = self.whom.replaced(&chosen) => Err(tonic::Status::unavailable("another conductor leads")),
        }
    }

    async fn obey(&self, orders: &mut Streaming<v1::ToNode>) -> Result<(), tonic::Status> {
        while let Some(message) = orders.message().await? {
            if let Some(v1::to_node::Message::Orders(orders)) = message.message {
                self.heed(orders.leader)?;
                self.station.ordered(orders)?;
            }
        }
        Ok(())
    }

    /// Takes nothing from a conductor that leads no more.
    fn heed(&self, leader: u64) -> Result<(), tonic::Status> {
        self.whom.heed(leader).map_err(|newer| {
            let node = &self.hello.name;
            tracing::warn!(node, leader, newer, "an order of a conductor that leads no more is refused");
            tonic::Status::aborted(format!("it led as {leader}, and {newer} leads by now"))
        })
    }

    async fn beat(&self, facts: &mpsc::Sender<v1::FromNode>, every: Duration) -> Result<(), tonic::Status> {
        let mut sequence = 0;
        loop {
            tokio::time::sleep(every).await;
            sequence += 1;
            let load =
                Some(v1::NodeLoad { refused_orders: self.whom.refused_orders(), ..self.station.load() });
            let beat = v1::from_node::Message::Heartbeat(v1::Heartbeat { sequence, load });
            if facts.send(v1::FromNode { message: Some(beat) }).await.is_err() {
                return Ok(());
            }
        }
    }
}
