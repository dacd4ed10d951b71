//! The network's side of a node: flights out, KV in, fetches both ways. Tasks of the runtime; the
//! worker's thread only exchanges messages with them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::Duration;

use baton_engine::KvShape;
use baton_transports::mover::{Memory, Region};
use baton_transports::{
    AcceptedFlight, ArrivedPieces, Dialer, FetchedBlock, Flight, FlightRefusal, HandoffTicket, PeerAddress,
    Plan, Priority, Receiver, Serving, Want,
};
use baton_types::BlockKey;
use baton_wire::v1;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::error::HandoffError;
use super::pool::KvMap;
use super::sink::ReadySlice;

/// How long a fetch may take before its blocks are computed instead.
const FETCH_WITHIN: Duration = Duration::from_secs(5);
/// How long the worker may take to look blocks up for a peer.
const SERVE_WITHIN: Duration = Duration::from_secs(5);

/// Hand-offs under way at a time, below what an endpoint sends at most. Others wait: a refusal would cost them their
/// KV, which stays in the pool meanwhile.
const FLIGHTS_MAX: usize = 64;

/// How a flight ended: bytes, or why not.
pub(super) type Outcome = Result<u64, HandoffError>;
/// Where blocks for a peer go.
pub(super) type Reply = oneshot::Sender<Vec<FetchedBlock>>;

/// A message to the worker.
pub(super) enum ToWorker {
    /// A conductor said Welcome: a new life begins.
    Attached { chain_seed: u64, facts: mpsc::Sender<v1::FromNode> },
    /// The conductor is gone: nothing of this life is valid afterwards.
    Detached,
    /// The conductor's orders.
    Orders(v1::Orders),
    /// A peer offers KV.
    Offered(HandoffTicket),
    /// The tokens of KV that is on its way here.
    Tokens { ticket: HandoffTicket, note: Bytes },
    /// All of a flight's KV is there.
    Landed(HandoffTicket),
    /// A peer wants blocks.
    Wanted { keys: Vec<BlockKey>, reply: Reply },
    /// Blocks that were fetched for a prefill; fewer than asked for, perhaps none.
    Fetched { request: u64, attempt: u32, blocks: Vec<FetchedBlock> },
    /// A chain that is copied here ahead of demand.
    Replica { chain: Vec<BlockKey>, blocks: Vec<FetchedBlock> },
    /// A hand-off from here ended.
    FlightEnded { request: u64, attempt: u32, outcome: Outcome },
    /// The node stops.
    Stop,
}

/// The content of a hand-off: a number of slices, and the tokens that they are for.
pub(super) struct HandoffContent {
    pub plan: Plan,
    pub note: Vec<u8>,
}

/// The slices of `blocks` blocks.
pub(super) fn plan_of(blocks: u32, shape: &KvShape) -> Plan {
    let layer_bytes = u32::try_from(shape.layer_bytes).unwrap_or(u32::MAX);
    Plan { blocks, layers: shape.layers, layer_bytes }
}

/// KV that may arrive.
pub(super) struct ExpectedTransfer {
    attempt: u32,
    have_blocks: u32,
    /// The shape that must arrive. KV of another shape belongs to another request or comes from a foreign sender.
    plan: Plan,
    /// The slots of its blocks, until they are taken away. Locked over each copy into them.
    slots: Mutex<Option<Vec<u32>>>,
    /// Whether an offer was accepted: the sender leaves out the blocks that were here then.
    accepted: AtomicBool,
}

impl ExpectedTransfer {
    /// A request's KV, which belongs into these slots, but for the blocks that are here already.
    pub(super) fn new(attempt: u32, have_blocks: u32, plan: Plan, slots: Vec<u32>) -> Self {
        Self { attempt, have_blocks, plan, slots: Mutex::new(Some(slots)), accepted: AtomicBool::new(false) }
    }
}

/// Shared by the worker and the tasks.
pub(super) struct Links {
    worker: Sender<ToWorker>,
    runtime: Handle,
    expected: Mutex<HashMap<u64, Arc<ExpectedTransfer>>>,
    flights: Mutex<HashMap<u64, tokio::task::AbortHandle>>,
    /// The right of a hand-off to be under way.
    turns: Semaphore,
    kv: KvMap,
    dialer: Mutex<Option<Dialer>>,
    life: Mutex<Life>,
}

/// The life of this node: its number, for tickets that others show, and where its facts go.
#[derive(Default)]
struct Life {
    epoch: u32,
    facts: Option<mpsc::Sender<v1::FromNode>>,
}

impl Links {
    pub(super) fn new(worker: Sender<ToWorker>, runtime: Handle, kv: KvMap) -> Self {
        Self {
            worker,
            runtime,
            expected: Mutex::default(),
            flights: Mutex::default(),
            turns: Semaphore::new(FLIGHTS_MAX),
            kv,
            dialer: Mutex::default(),
            life: Mutex::default(),
        }
    }

    pub(super) fn set_dialer(&self, dialer: Dialer) {
        tracing::info!("KV goes by {}", dialer.transports().join(", "));
        *self.dialer.lock() = Some(dialer);
    }

    /// Audits the transfer engine, once there is one.
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub(super) fn check_mover(&self) -> Result<(), String> {
        self.dialer().map_or(Ok(()), |dialer| dialer.check_mover())
    }

    /// The memory that hand-offs leave from.
    pub(super) fn kv_memory(&self) -> Arc<Memory> {
        Arc::clone(&self.kv.memory)
    }

    /// A new life begins.
    pub(super) fn begin(&self, epoch: u32, facts: mpsc::Sender<v1::FromNode>) {
        *self.life.lock() = Life { epoch, facts: Some(facts) };
    }

    fn epoch(&self) -> u32 {
        self.life.lock().epoch
    }

    fn dialer(&self) -> Option<Dialer> {
        self.dialer.lock().clone()
    }

    /// From now on a request's KV is let in.
    pub(super) fn expect(&self, request: u64, expected: ExpectedTransfer) {
        let before = self.expected.lock().insert(request, Arc::new(expected));
        take_slots(before);
    }

    /// The KV of a request that is expected is not let in for now. False: an offer was accepted. Its KV may be on its
    /// way, or here: what has come completely is expected no longer, and the worker may not have read the messages.
    pub(super) fn withdraw(&self, request: u64) -> bool {
        let mut expected = self.expected.lock();
        let open = expected.get(&request).is_some_and(|e| !e.accepted.load(Ordering::Relaxed));
        if open {
            take_slots(expected.remove(&request));
        }
        open
    }

    /// Nothing more comes in or goes out for a request. Waits for a copy into its slots that is under way.
    pub(super) fn forget(&self, request: u64) {
        let expected = self.expected.lock().remove(&request);
        take_slots(expected);
        if let Some(flight) = self.flights.lock().remove(&request) {
            flight.abort();
        }
    }

    /// Starts a hand-off as soon as it may be under way; slices are sent as they come until the sender is dropped.
    pub(super) fn hand_off(
        self: &Arc<Self>,
        request: u64,
        attempt: u32,
        peer: v1::Peer,
        content: HandoffContent,
    ) -> mpsc::UnboundedSender<ReadySlice> {
        let (slices, outgoing) = mpsc::unbounded_channel();
        let links = Arc::clone(self);
        let task = self.runtime.spawn(async move {
            let ticket = HandoffTicket { request, attempt, epoch: peer.epoch };
            let _turn = links.turns.acquire().await.expect("nobody closes it");
            let outcome = links.fly(&peer, ticket, content, outgoing).await;
            let _ = links.send(ToWorker::FlightEnded { request, attempt, outcome });
        });
        let before = self.flights.lock().insert(request, task.abort_handle());
        if let Some(before) = before {
            before.abort();
        }
        slices
    }

    async fn fly(
        &self,
        peer: &v1::Peer,
        ticket: HandoffTicket,
        content: HandoffContent,
        mut outgoing: mpsc::UnboundedReceiver<ReadySlice>,
    ) -> Outcome {
        let dialer = self.dialer().ok_or(HandoffError::Closed)?;
        let mut flight = Flight::start(&dialer, &address(peer), ticket, content.plan).await?;
        flight.note(&content.note).await?;
        let have_blocks = flight.have_blocks();
        while let Some(first) = outgoing.recv().await {
            let mut next = Some(first);
            while let Some((at, slot)) = next {
                if at.block >= have_blocks {
                    let from = self.kv.layer_at(slot, at.layer);
                    let from = Region { memory: Arc::clone(&self.kv.memory), at: from };
                    flight.send(at, &from).await?;
                }
                next = outgoing.try_recv().ok();
            }
            // The next layer is not ready yet: what there is need not wait for it.
            flight.flush().await?;
        }
        Ok(flight.finish().await?.bytes)
    }

    /// Brings blocks for a prefill.
    pub(super) fn fetch(self: &Arc<Self>, request: u64, attempt: u32, from: v1::Peer, keys: Vec<BlockKey>) {
        let links = Arc::clone(self);
        self.runtime.spawn(async move {
            let blocks = links.bring(&from, &keys, Priority::Fetch).await;
            let _ = links.send(ToWorker::Fetched { request, attempt, blocks });
        });
    }

    /// Brings a chain ahead of demand.
    pub(super) fn replicate(self: &Arc<Self>, from: v1::Peer, chain: Vec<BlockKey>) {
        let links = Arc::clone(self);
        self.runtime.spawn(async move {
            let blocks = links.bring(&from, &chain, Priority::Replicate).await;
            let _ = links.send(ToWorker::Replica { chain, blocks });
        });
    }

    async fn bring(&self, from: &v1::Peer, keys: &[BlockKey], priority: Priority) -> Vec<FetchedBlock> {
        let Some(dialer) = self.dialer() else { return Vec::new() };
        let want = Want { keys: keys.iter().map(|key| key.0).collect(), epoch: from.epoch, priority };
        match baton_transports::fetch(&dialer, &address(from), want, FETCH_WITHIN).await {
            Ok(blocks) => blocks,
            Err(error) => {
                tracing::warn!(from = from.instance, %error, "fetch failed; the blocks are computed instead");
                Vec::new()
            }
        }
    }

    fn still_expected(&self, ticket: HandoffTicket) -> Result<Arc<ExpectedTransfer>, FlightRefusal> {
        let expected = self.expected.lock().get(&ticket.request).cloned();
        expected
            .filter(|e| e.attempt == ticket.attempt && ticket.epoch == self.epoch())
            .ok_or_else(|| FlightRefusal { retry: false, why: "the request is not expected any more".into() })
    }

    /// Reports to the conductor that all KV of a request is here. The worker gets the message first and may be in the
    /// middle of a pass. The conductor's order to decode has usually arrived by the end of that pass, so no pass is
    /// lost between the two.
    fn report_landed(&self, ticket: HandoffTicket) {
        let fact = v1::Fact {
            request: ticket.request,
            attempt: ticket.attempt,
            fact: Some(v1::fact::Fact::Handoff(true)),
        };
        let facts = v1::from_node::Message::Facts(v1::Facts { facts: vec![fact] });
        let Some(conductor) = self.life.lock().facts.clone() else { return };
        match conductor.try_send(v1::FromNode { message: Some(facts) }) {
            // A conductor that does not keep up hears of it when it does: one message for each flight at most.
            Err(mpsc::error::TrySendError::Full(message)) => {
                self.runtime.spawn(async move { conductor.send(message).await });
            }
            // One that is gone has begun, or will begin, another life.
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => {}
        }
    }

    /// Sends the worker a message. Its inbox has no bound of its own, but its content is bounded: orders by the
    /// requests that the conductor admits, fetches by the prefills that wait for them.
    fn send(&self, message: ToWorker) -> Result<(), FlightRefusal> {
        let stopping = |_| FlightRefusal { retry: false, why: "the node is stopping".into() };
        self.worker.send(message).map_err(stopping)
    }
}

fn address(peer: &v1::Peer) -> PeerAddress {
    PeerAddress { kv_address: peer.kv_address.clone() }
}

/// Nothing is copied into the slots from here on.
fn take_slots(expected: Option<Arc<ExpectedTransfer>>) {
    if let Some(expected) = expected {
        expected.slots.lock().take();
    }
}

impl Receiver for Links {
    fn offer(&self, ticket: HandoffTicket, plan: &Plan) -> Result<AcceptedFlight, FlightRefusal> {
        let epoch = self.epoch();
        if ticket.epoch != epoch {
            return Err(FlightRefusal {
                // A peer may hear of this node's new life before the node itself does.
                retry: ticket.epoch > epoch,
                why: format!("the offer is for epoch {}, this is {epoch}", ticket.epoch),
            });
        }
        match self.expected.lock().get(&ticket.request) {
            Some(expected) if expected.attempt == ticket.attempt && expected.plan != *plan => {
                let why = format!("{plan:?} was offered where {:?} is expected", expected.plan);
                Err(FlightRefusal { retry: false, why })
            }
            Some(expected) if expected.attempt == ticket.attempt => {
                // Under the lock, as the question whether it was.
                expected.accepted.store(true, Ordering::Relaxed);
                self.send(ToWorker::Offered(ticket))?;
                Ok(AcceptedFlight { have_blocks: expected.have_blocks })
            }
            Some(expected) if expected.attempt > ticket.attempt => {
                Err(FlightRefusal { retry: false, why: "a later attempt is expected".into() })
            }
            _ => {
                self.send(ToWorker::Offered(ticket))?;
                Err(FlightRefusal { retry: true, why: "not expected here yet".into() })
            }
        }
    }

    fn note(&self, ticket: HandoffTicket, bytes: Bytes) -> Result<(), FlightRefusal> {
        self.still_expected(ticket)?;
        self.send(ToWorker::Tokens { ticket, note: bytes })
    }

    fn land(&self, ticket: HandoffTicket, arrived: &ArrivedPieces) -> Result<u64, FlightRefusal> {
        let refused = |why: &str| FlightRefusal { retry: false, why: why.into() };
        let expected = self.still_expected(ticket)?;
        // Held over the copy: who takes the slots away waits for it.
        let slots = expected.slots.lock();
        let slots = slots.as_ref().ok_or_else(|| refused("the request was released meanwhile"))?;
        arrived.copy_to(&self.kv.memory, |piece| {
            self.kv.piece_at(slots, piece).ok_or_else(|| refused("a slice that has no place"))
        })
    }

    fn complete(&self, ticket: HandoffTicket) {
        if ticket.epoch != self.epoch() {
            return;
        }
        let mut expected = self.expected.lock();
        if expected.get(&ticket.request).is_some_and(|e| e.attempt == ticket.attempt) {
            expected.remove(&ticket.request);
            drop(expected);
            if self.send(ToWorker::Landed(ticket)).is_ok() {
                self.report_landed(ticket);
            }
        }
    }

    fn abort(&self, ticket: HandoffTicket, why: &str) {
        // The sender says so to the conductor, which releases what was opened for it.
        tracing::debug!(
            request = ticket.request,
            attempt = ticket.attempt,
            why,
            "incoming flight ended early"
        );
    }

    fn wanted(&self, want: Want) -> Serving<'_> {
        let current = want.epoch == self.epoch();
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            let keys = want.keys.into_iter().map(BlockKey).collect();
            if !current || self.send(ToWorker::Wanted { keys, reply }).is_err() {
                return Vec::new();
            }
            match tokio::time::timeout(SERVE_WITHIN, answer).await {
                Ok(Ok(blocks)) => blocks,
                _ => Vec::new(),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kv() -> KvMap {
        let choice = crate::node::EngineChoice::Seeded {
            spec: baton_engine::SeededSpec::default(),
            pool: baton_engine::PoolSpec::default(),
        };
        KvMap::place(crate::node::engine::build(&choice).unwrap().as_mut()).unwrap()
    }

    /// A flight of another shape than the request's KV would be whole by its own plan and leave holes in ours.
    #[tokio::test]
    async fn only_the_very_kv_that_is_expected_is_let_in() {
        let (worker, _inbox) = std::sync::mpsc::channel();
        let links = Links::new(worker, Handle::current(), kv());
        links.begin(3, mpsc::channel(1).0);
        let plan = Plan { blocks: 5, layers: 2, layer_bytes: 64 };
        links.expect(7, ExpectedTransfer::new(1, 2, plan, vec![0; 5]));
        let ticket = HandoffTicket { request: 7, attempt: 1, epoch: 3 };
        assert_eq!(links.offer(ticket, &plan), Ok(AcceptedFlight { have_blocks: 2 }));
        for other in
            [Plan { blocks: 4, ..plan }, Plan { layers: 1, ..plan }, Plan { layer_bytes: 32, ..plan }]
        {
            let refused = links.offer(ticket, &other).unwrap_err();
            assert!(!refused.retry && refused.why.contains("expected"), "{refused:?}");
        }
        for (odd, retry) in [
            (HandoffTicket { epoch: 2, ..ticket }, false),
            (HandoffTicket { epoch: 4, ..ticket }, true),
            (HandoffTicket { attempt: 0, ..ticket }, false),
            (HandoffTicket { attempt: 2, ..ticket }, true),
            (HandoffTicket { request: 8, ..ticket }, true),
        ] {
            assert_eq!(links.offer(odd, &plan).unwrap_err().retry, retry, "{odd:?}");
        }
    }

    /// The sender of an accepted offer leaves blocks out that are here, so their room must stay as it is.
    #[tokio::test]
    async fn room_is_taken_back_only_before_an_offer_is_accepted() {
        let (worker, inbox) = std::sync::mpsc::channel();
        let links = Links::new(worker, Handle::current(), kv());
        links.begin(3, mpsc::channel(1).0);
        let plan = Plan { blocks: 5, layers: 2, layer_bytes: 64 };
        let expect = || links.expect(7, ExpectedTransfer::new(1, 2, plan, vec![0; 5]));
        let ticket = HandoffTicket { request: 7, attempt: 1, epoch: 3 };
        let offered = || matches!(inbox.try_recv(), Ok(ToWorker::Offered(told)) if told == ticket);
        expect();
        assert!(links.withdraw(7));
        assert!(links.offer(ticket, &plan).is_err_and(|refused| refused.retry), "it is to be offered again");
        assert!(offered(), "the worker learns that its KV waits");
        expect();
        assert!(links.offer(ticket, &plan).is_ok() && offered());
        assert!(!links.withdraw(7));
        assert!(links.still_expected(ticket).is_ok_and(|expected| expected.slots.lock().is_some()));
        // All of it has come, and the worker has yet to learn even of the offer.
        links.complete(ticket);
        assert!(!links.withdraw(7));
    }

    #[tokio::test]
    async fn so_many_hand_offs_are_under_way_and_the_others_wait() {
        let (worker, inbox) = std::sync::mpsc::channel();
        let links = Arc::new(Links::new(worker, Handle::current(), kv()));
        let content =
            || HandoffContent { plan: Plan { blocks: 5, layers: 2, layer_bytes: 64 }, note: Vec::new() };
        let before = links.turns.acquire_many(u32::try_from(FLIGHTS_MAX).unwrap()).await.unwrap();
        let _slices: Vec<_> =
            (1..=2).map(|request| links.hand_off(request, 3, v1::Peer::default(), content())).collect();
        links.forget(2);
        tokio::task::yield_now().await;
        assert!(inbox.try_recv().is_err());
        drop(before);
        // Without a dialer it ends as soon as it begins.
        let ended = tokio::task::spawn_blocking(move || inbox.recv_timeout(Duration::from_secs(5)).unwrap());
        let ToWorker::FlightEnded { request: 1, attempt: 3, outcome: Err(_) } = ended.await.unwrap() else {
            panic!("the one that was given up says nothing")
        };
    }

    #[tokio::test]
    async fn the_conductor_hears_that_kv_is_here_without_the_worker() {
        let (worker, inbox) = std::sync::mpsc::channel();
        let links = Links::new(worker, Handle::current(), kv());
        let (facts, mut told) = mpsc::channel(1);
        links.begin(3, facts);
        let plan = Plan { blocks: 5, layers: 2, layer_bytes: 64 };
        let ticket = |request, epoch| HandoffTicket { request, attempt: 2, epoch };
        for request in 1..=4 {
            links.expect(request, ExpectedTransfer::new(2, 0, plan, Vec::new()));
        }
        links.forget(4);
        // One of a life that has ended, one of a request that has ended, and one reported twice.
        for (request, epoch) in [(1, 2), (4, 3), (1, 3), (1, 3), (2, 3), (3, 3)] {
            links.complete(ticket(request, epoch));
        }
        let landed: Vec<u64> = inbox
            .try_iter()
            .map(|message| match message {
                ToWorker::Landed(ticket) => ticket.request,
                _ => panic!("nothing else is told"),
            })
            .collect();
        assert_eq!(landed, [1, 2, 3]);
        // There was room for one: the others come when it is taken.
        let mut heard = Vec::new();
        for _ in 0..3 {
            let Some(v1::from_node::Message::Facts(facts)) = told.recv().await.and_then(|m| m.message) else {
                panic!("facts alone are told")
            };
            let [fact] = &facts.facts[..] else { panic!("one at a time: {facts:?}") };
            assert_eq!((fact.attempt, &fact.fact), (2, &Some(v1::fact::Fact::Handoff(true))));
            heard.push(fact.request);
        }
        heard.sort_unstable();
        assert_eq!(heard, [1, 2, 3]);
        assert!(told.try_recv().is_err());
    }
}
