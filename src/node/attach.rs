//! The line to the conductor: attach, say Hello, report, take orders; again in a new epoch when it breaks.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use baton_wire::v1;
use baton_wire::v1::control_client::ControlClient;
use futures_util::StreamExt as _;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;
use tonic::transport::Channel;

use super::error::NodeError;
use super::leader_locator::{ChosenConductor, LeaderLocator};
use super::pulse::Pulse;
use crate::guard::{ClusterGuard, Opening};

/// Messages to the conductor that may wait; the engine waits when they are full.
pub(super) const FACTS_WAITING: usize = 1024;
/// Bytes that the conductor may send ahead, and the size of one frame.
const WINDOW_BYTES: u32 = 16 << 20;
const FRAME_BYTES: u32 = 1 << 20;
/// Between two tries to attach.
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MOST: Duration = Duration::from_secs(2);
/// See [`GrpcSession::welcome_within`].
pub(super) const WELCOME_WITHIN: Duration = Duration::from_secs(10);
/// How long a conductor may be silent on a line that it does not close: its process may have been stopped for a while.
const SILENCE_MOST: Duration = Duration::from_secs(30);
/// How long the conductor may take to end a line that this node has ended because it stops.
const LEAVE_WITHIN: Duration = Duration::from_secs(1);
/// The smallest delay of a heartbeat that counts as a pause of this node itself.
const PAUSE_LEAST: Duration = Duration::from_secs(1);

/// A number that this process drew at random. It distinguishes two processes of one name.
pub(super) fn process_mark() -> u64 {
    static MARK: OnceLock<u64> = OnceLock::new();
    // Keys of the standard library's hashers are random.
    *MARK.get_or_init(|| RandomState::new().hash_one(std::process::id()).max(1))
}

/// The part of a node that does its work, as the session uses it.
pub(super) trait NodeRuntime: Send + Sync {
    /// A new life begins; facts of it go to `facts`.
    ///
    /// # Errors
    /// [`WorkerGoneError`]: the worker has ended. The other functions return it as well.
    fn attached(
        &self,
        welcome: &v1::Welcome,
        facts: mpsc::Sender<v1::FromNode>,
    ) -> Result<(), WorkerGoneError>;
    /// Handles the loss of the conductor: nothing of this life is valid afterwards.
    fn detached(&self) -> Result<(), WorkerGoneError>;
    /// Handles the conductor's orders.
    fn ordered(&self, orders: v1::Orders) -> Result<(), WorkerGoneError>;
    /// How it fares.
    fn load(&self) -> v1::NodeLoad;
    /// How often the thread that does the work has turned; `None` where no thread of its own does it.
    fn turns(&self) -> Option<u64> {
        None
    }
}

/// The node's worker has ended.
#[derive(Debug)]
pub(super) struct WorkerGoneError;

impl From<WorkerGoneError> for tonic::Status {
    fn from(_: WorkerGoneError) -> Self {
        Self::aborted("the node's thread has ended")
    }
}

/// Orders of a life, where its facts go, and what its conductor has still to prove.
type OpenAttachment = (Streaming<v1::ToNode>, mpsc::Sender<v1::FromNode>, Option<Opening>);

/// A node's gRPC connection to the conductor.
pub(super) struct GrpcSession<S> {
    pub(super) leader: Arc<LeaderLocator>,
    pub(super) guard: ClusterGuard,
    pub(super) hello: v1::Hello,
    pub(super) runtime: S,
    /// How long the other end may take from the connection to its welcome.
    pub(super) welcome_within: Duration,
    /// Of the thread that does the work.
    pub(super) pulse: Pulse,
}

impl<S: NodeRuntime> GrpcSession<S> {
    /// Keeps the session with the conductor up until `stop` is cancelled.
    ///
    /// # Errors
    /// When the conductor will not have this node; trying again would not help.
    pub(super) async fn keep(&self, stop: &CancellationToken) -> Result<(), NodeError> {
        let (mut pause, mut known) = (RETRY_FIRST, false);
        loop {
            tokio::select! {
                () = self.turning() => {}
                () = stop.cancelled() => return Ok(()),
            }
            let begun = Instant::now();
            let ended = tokio::select! {
                ended = self.once(&mut known, stop) => ended,
                () = leave_time_over(stop) => return Ok(()),
            };
            if self.runtime.detached().is_err() {
                return Err(NodeError::Gone { name: self.hello.name.clone(), what: "thread ended" });
            }
            match ended {
                // A life that ends at once is no reason to hurry.
                Ok(()) if begun.elapsed() > RETRY_MOST => pause = RETRY_FIRST,
                Ok(()) => {}
                Err(status) if status.code() == tonic::Code::FailedPrecondition => {
                    return Err(NodeError::Refused(status.message().to_owned()));
                }
                // A conductor that had accepted this node is expected to get the right key, so the node retries. One
                // that never did ends the node with an error.
                Err(status) if status.code() == tonic::Code::Unauthenticated && !known => {
                    return Err(NodeError::NotLetIn(status.message().to_owned()));
                }
                Err(status) => {
                    self.leader.refused(&status);
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

    /// Waits until the thread that does the work turns; at once unless it was found standing still.
    async fn turning(&self) {
        while !self.pulse.turns(self.runtime.turns(), Duration::ZERO) {
            tokio::time::sleep(RETRY_MOST).await;
        }
    }

    async fn connect(&self, chosen: &ChosenConductor) -> Result<ControlClient<Channel>, tonic::Status> {
        let unavailable = |e: tonic::transport::Error| {
            tonic::Status::unavailable(format!(
                "{}: {}; see that a conductor is there: nodes attach to its control port (service.control, --control)",
                chosen.address,
                baton_http::causes(&e)
            ))
        };
        let channel = self
            .guard
            .line(&chosen.address)?
            .http2_keep_alive_interval(Duration::from_secs(5))
            .keep_alive_timeout(SILENCE_MOST)
            .connect_timeout(self.welcome_within)
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

    /// Says Hello. Where there is a key the node proves that it has it, and is owed as much.
    async fn greet(
        &self,
        chosen: &ChosenConductor,
        stop: &CancellationToken,
    ) -> Result<OpenAttachment, tonic::Status> {
        let mut client = self.connect(chosen).await?;
        let (facts, outgoing) = mpsc::channel(FACTS_WAITING);
        // A stream that is dropped looks like a crash to the conductor. A stop ends it while others still have senders.
        let outgoing = ReceiverStream::new(outgoing).take_until(stop.clone().cancelled_owned());
        let mut call = tonic::Request::new(outgoing);
        let challenge = self.guard.challenge(call.metadata_mut());
        let send_hello = async |proof: Vec<u8>| {
            let hello = v1::Hello { proof: proof.into(), ..self.hello.clone() };
            let first = v1::FromNode { message: Some(v1::from_node::Message::Hello(hello)) };
            facts.send(first).await.map_err(|_| tonic::Status::cancelled("the line closed at once"))
        };
        if challenge.is_none() {
            send_hello(Vec::new()).await?;
        }
        let answer = client.attach(call).await?;
        let mut opening = None;
        if let Some(challenge) = challenge {
            let (owed, proof) = self.guard.answered(&challenge, answer.metadata())?;
            opening = Some(owed);
            send_hello(proof.to_vec()).await?;
        }
        Ok((answer.into_inner(), facts, opening))
    }

    /// One life: from Hello to the end of the stream. After `stop` the node says nothing and waits for that end.
    pub(super) async fn once(&self, known: &mut bool, stop: &CancellationToken) -> Result<(), tonic::Status> {
        let chosen = self.leader.choose().await;
        let welcomed = tokio::time::timeout(self.welcome_within, self.welcomed(&chosen, stop)).await;
        let welcomed = welcomed.unwrap_or_else(|_| {
            Err(tonic::Status::deadline_exceeded(format!("no answer within {:?}", self.welcome_within)))
        });
        let (welcome, mut orders, facts) = welcomed.map_err(|status| with_place(status, &chosen))?;
        self.check_fencing_token(welcome.leader)?;
        *known = true;
        self.runtime.attached(&welcome, facts.clone())?;
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
            () = self.leader.replaced(&chosen) => Err(tonic::Status::unavailable("another conductor leads")),
            () = stop.cancelled() => {
                while let Ok(Some(_)) = orders.message().await {}
                Ok(())
            }
        }
    }

    async fn welcomed(
        &self,
        chosen: &ChosenConductor,
        stop: &CancellationToken,
    ) -> Result<(v1::Welcome, Streaming<v1::ToNode>, mpsc::Sender<v1::FromNode>), tonic::Status> {
        let (mut orders, facts, opening) = self.greet(chosen, stop).await?;
        match orders.message().await?.and_then(|m| m.message) {
            Some(v1::to_node::Message::Welcome(welcome)) => {
                opening.map_or(Ok(()), |opening| self.guard.welcomed(&opening, &welcome.proof))?;
                Ok((welcome, orders, facts))
            }
            _ => Err(tonic::Status::internal("the conductor did not say Welcome first")),
        }
    }

    async fn obey(&self, orders: &mut Streaming<v1::ToNode>) -> Result<(), tonic::Status> {
        while let Some(message) = orders.message().await? {
            if let Some(v1::to_node::Message::Orders(orders)) = message.message {
                self.check_fencing_token(orders.leader)?;
                self.runtime.ordered(orders)?;
            }
        }
        Ok(())
    }

    /// Rejects orders of a conductor that is no longer the leader.
    fn check_fencing_token(&self, leader: u64) -> Result<(), tonic::Status> {
        self.leader.check_fencing_token(leader).map_err(|newer| {
            let node = &self.hello.name;
            tracing::warn!(node, leader, newer, "an order of a conductor that no longer leads is refused");
            tonic::Status::aborted(format!("it led as {leader}, and {newer} leads by now"))
        })
    }

    pub(super) async fn beat(
        &self,
        facts: &mpsc::Sender<v1::FromNode>,
        every: Duration,
    ) -> Result<(), tonic::Status> {
        loop {
            let rested = Instant::now();
            tokio::time::sleep(every).await;
            let pause = rested.elapsed().saturating_sub(every);
            if pause > PAUSE_LEAST {
                let (node, pause_ms) = (&self.hello.name, pause.as_millis());
                tracing::warn!(
                    node,
                    pause_ms,
                    "this node was itself away: its conductor may have taken it for lost"
                );
            }
            if !self.pulse.turns(self.runtime.turns(), every) {
                let node = &self.hello.name;
                tracing::error!(node, "this node's thread stands still: the node leaves until it goes on");
                return Err(tonic::Status::aborted("its thread stands still"));
            }
            let load =
                Some(v1::NodeLoad { refused_orders: self.leader.refused_orders(), ..self.runtime.load() });
            let beat = v1::from_node::Message::Heartbeat(v1::Heartbeat { load });
            if facts.send(v1::FromNode { message: Some(beat) }).await.is_err() {
                return Ok(());
            }
        }
    }
}

/// Waits until the conductor has had its time to end a line after `stop`.
async fn leave_time_over(stop: &CancellationToken) {
    stop.cancelled().await;
    tokio::time::sleep(LEAVE_WITHIN).await;
}

/// Says where nodes attach, if what answers may be something else: a front door has no such call, or is silent.
fn with_place(status: tonic::Status, chosen: &ChosenConductor) -> tonic::Status {
    use tonic::Code;
    if !matches!(status.code(), Code::DeadlineExceeded | Code::Unimplemented | Code::Unknown | Code::Internal)
    {
        return status;
    }
    let told = format!(
        "{}: {}; nodes attach to the control port (service.control, --control), not to the front door",
        chosen.address,
        status.message()
    );
    tonic::Status::new(status.code(), told)
}
