//! The line to the conductor: attach, say Hello, report, take orders; again in a new epoch when it breaks.

use std::sync::Arc;
use std::time::Duration;

use baton_wire::v1;
use baton_wire::v1::control_client::ControlClient;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;

use super::whom::Whom;

/// Messages to the conductor that may wait; the engine waits when they are full.
const FACTS_WAITING: usize = 1024;
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

/// See the module.
pub(super) struct Line<S> {
    pub(super) whom: Arc<Whom>,
    pub(super) hello: v1::Hello,
    pub(super) station: S,
}

impl<S: Station> Line<S> {
    /// Keeps the line up until told to stop.
    ///
    /// # Errors
    /// When the conductor will not have this node; trying again would not help.
    pub(super) async fn keep(&self, stop: &CancellationToken) -> Result<(), String> {
        let mut pause = RETRY_FIRST;
        loop {
            let ended = tokio::select! {
                ended = self.once() => ended,
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

    /// One life: from Hello to the end of the stream.
    async fn once(&self) -> Result<(), tonic::Status> {
        let chosen = self.whom.choose().await;
        let unavailable =
            |e: tonic::transport::Error| tonic::Status::unavailable(format!("{}: {e}", chosen.address));
        let channel = tonic::transport::Endpoint::from_shared(chosen.address.clone())
            .map_err(unavailable)?
            .connect_timeout(Duration::from_secs(2))
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
        let mut client = ControlClient::new(channel).max_decoding_message_size(usize::MAX);
        let (facts, outgoing) = mpsc::channel(FACTS_WAITING);
        let hello = v1::from_node::Message::Hello(self.hello.clone());
        let first = v1::FromNode { message: Some(hello) };
        facts.send(first).await.map_err(|_| tonic::Status::cancelled("the line closed at once"))?;
        let mut orders = client.attach(ReceiverStream::new(outgoing)).await?.into_inner();
        let welcome = match orders.message().await?.and_then(|m| m.message) {
            Some(v1::to_node::Message::Welcome(welcome)) => welcome,
            _ => return Err(tonic::Status::internal("the conductor did not say Welcome first")),
        };
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
                self.station.ordered(orders)?;
            }
        }
        Ok(())
    }

    async fn beat(&self, facts: &mpsc::Sender<v1::FromNode>, every: Duration) -> Result<(), tonic::Status> {
        let mut sequence = 0;
        loop {
            tokio::time::sleep(every).await;
            sequence += 1;
            let load = Some(self.station.load());
            let beat = v1::from_node::Message::Heartbeat(v1::Heartbeat { sequence, load });
            if facts.send(v1::FromNode { message: Some(beat) }).await.is_err() {
                return Ok(());
            }
        }
    }
}
