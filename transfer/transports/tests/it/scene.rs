//! A receiving node that records every call, and a sender that reaches it by a chosen transport.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_transports::mover::{Location, Memory, Pages, Region};
use baton_transports::*;
use bytes::Bytes;

pub const EPOCH: u32 = 7;
pub const FINGERPRINT: u64 = 0xfeed;

/// The calls that the node received, and its prepared answers.
#[derive(Default)]
pub struct Book {
    pub have_blocks: u32,
    /// Offers to put off before one is taken.
    pub postpone: u32,
    /// Refuse the slice after so many.
    pub refuse_slice_after: Option<usize>,
    pub store: BTreeMap<u128, FetchedBlock>,
    /// Keys whose upper half is zero name the block that ends like them.
    pub short_keys: bool,
    pub newest_attempt: u32,
    pub offers: Vec<(HandoffTicket, Plan)>,
    /// Notes are taken, and here are those that came.
    pub notes: Option<Vec<(HandoffTicket, Bytes)>>,
    pub slices: Vec<(HandoffTicket, SlicePosition, Bytes)>,
    /// Slices of which some bytes have come.
    partial: BTreeMap<(HandoffTicket, SlicePosition), Vec<u8>>,
    pub completed: Vec<HandoffTicket>,
    pub aborted: Vec<(HandoffTicket, String)>,
}

#[derive(Default)]
pub struct Node {
    pub book: Mutex<Book>,
}

impl Node {
    pub fn with<T>(&self, read: impl FnOnce(&mut Book) -> T) -> T {
        read(&mut self.book.lock().unwrap())
    }

    /// Has every slice of the plan landed exactly once, equal to what [`layer`] gives?
    pub fn holds_exactly(&self, ticket: HandoffTicket, plan: Plan, have_blocks: u32) -> bool {
        self.with(|book| {
            let mine = book.slices.iter().filter(|(of, _, _)| *of == ticket);
            let got: BTreeMap<SlicePosition, &Bytes> =
                mine.clone().map(|(_, at, bytes)| (*at, bytes)).collect();
            let count = u64::try_from(mine.count()).unwrap();
            count == plan.slices_after(have_blocks)
                && positions(plan, have_blocks)
                    .iter()
                    .all(|at| got.get(at) == Some(&&layer(ticket, *at, plan)))
        })
    }

    pub async fn until(&self, what: &str, reached: impl Fn(&Book) -> bool) {
        for _ in 0..500 {
            if self.with(|book| reached(book)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("not within 5 s: {what}");
    }
}

impl Receiver for Node {
    fn offer(&self, ticket: HandoffTicket, plan: &Plan) -> Result<AcceptedFlight, FlightRefusal> {
        self.with(|book| {
            if ticket.epoch != EPOCH {
                return Err(FlightRefusal { retry: false, why: format!("epoch {} is over", ticket.epoch) });
            }
            if ticket.attempt < book.newest_attempt {
                return Err(FlightRefusal {
                    retry: false,
                    why: format!("attempt {} is outdated", ticket.attempt),
                });
            }
            if book.postpone > 0 {
                book.postpone -= 1;
                return Err(FlightRefusal { retry: true, why: "no order for it yet".into() });
            }
            book.partial.retain(|(of, _), _| *of != ticket);
            book.offers.push((ticket, *plan));
            Ok(AcceptedFlight { have_blocks: book.have_blocks })
        })
    }

    fn note(&self, ticket: HandoffTicket, bytes: Bytes) -> Result<(), FlightRefusal> {
        self.with(|book| match &mut book.notes {
            Some(notes) => {
                notes.push((ticket, bytes));
                Ok(())
            }
            None => Err(FlightRefusal { retry: false, why: "no note is expected".into() }),
        })
    }

    fn land(&self, ticket: HandoffTicket, arrived: &ArrivedPieces) -> Result<u64, FlightRefusal> {
        self.with(|book| {
            let size = book.offers.iter().rfind(|(of, _)| *of == ticket).unwrap().1.layer_bytes as usize;
            arrived.read(|piece, bytes| {
                if book.refuse_slice_after.is_some_and(|most| book.slices.len() >= most) {
                    return Err(FlightRefusal { retry: false, why: "the client has gone".into() });
                }
                let slice = book.partial.entry((ticket, piece.at)).or_default();
                assert_eq!((slice.len(), bytes.len()), (piece.offset as usize, piece.bytes as usize));
                slice.extend(bytes);
                if slice.len() == size {
                    let slice = book.partial.remove(&(ticket, piece.at)).unwrap();
                    book.slices.push((ticket, piece.at, slice.into()));
                }
                Ok(())
            })
        })
    }

    fn complete(&self, ticket: HandoffTicket) {
        self.with(|book| book.completed.push(ticket));
    }

    fn abort(&self, ticket: HandoffTicket, why: &str) {
        self.with(|book| book.aborted.push((ticket, why.to_owned())));
    }

    fn wanted(&self, want: Want) -> Serving<'_> {
        Box::pin(async move {
            if want.epoch != EPOCH {
                return Vec::new();
            }
            self.with(|book| {
                let found = |key: &u128| match book.short_keys && key >> 64 == 0 {
                    true => book.store.values().find(|block| block.key as u64 == *key as u64).cloned(),
                    false => book.store.get(key).cloned(),
                };
                want.keys.iter().map_while(found).collect()
            })
        })
    }
}

/// By which way KV goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Shm,
    Tcp,
}

pub struct Scene {
    pub node: Arc<Node>,
    pub endpoint: Endpoint,
    pub dialer: Dialer,
    pub peer: PeerAddress,
    /// The node that sends, or asks.
    pub sender: Endpoint,
    /// The memory that it sends from, and how much of that is used.
    source: Arc<Memory>,
    used: Mutex<u64>,
}

/// Over shared memory, or not; room for a few large windows.
pub fn plane(shared_memory: bool) -> DataPlaneConfig {
    let rdma = RdmaDevices::None;
    DataPlaneConfig {
        arena_bytes: 16 << 20,
        shared_memory,
        rdma,
        ..DataPlaneConfig::new([127, 0, 0, 1].into())
    }
}

/// Short enough for tests that wait for a time-out.
pub fn quick() -> Limits {
    Limits {
        connect_timeout_ms: 500,
        offer_timeout_ms: 400,
        progress_timeout_ms: 300,
        idle_timeout_ms: 3_000,
        window_bytes: 64 << 10,
        slice_bytes: 64 << 10,
        ..Limits::default()
    }
}

pub fn memory(bytes: usize) -> Arc<Memory> {
    Memory::shared(bytes, Pages::Ordinary, Location::Anywhere).unwrap()
}

impl Scene {
    pub async fn new(way: Way) -> Self {
        Self::with(way, quick()).await
    }

    pub async fn with(way: Way, limits: Limits) -> Self {
        let planes = [plane(way == Way::Shm), plane(true)];
        Self::equipped(FINGERPRINT, limits, planes, Default::default()).await
    }

    /// A scene in which the sender has the first of the guards, and the receiver the second.
    pub async fn guarded(way: Way, limits: Limits, guards: [Guard; 2]) -> Self {
        Self::equipped(FINGERPRINT, limits, [plane(way == Way::Shm), plane(true)], guards).await
    }

    /// A scene with these data planes: the sender's (or asker's), then the receiver's.
    pub async fn carried(limits: Limits, planes: [DataPlaneConfig; 2]) -> Self {
        Self::equipped(FINGERPRINT, limits, planes, Default::default()).await
    }

    /// With a sender of another fingerprint.
    pub async fn unlike(way: Way, fingerprint: u64) -> Self {
        Self::equipped(fingerprint, quick(), [plane(way == Way::Shm), plane(true)], Default::default()).await
    }

    async fn equipped(
        fingerprint: u64,
        limits: Limits,
        [senders, receivers]: [DataPlaneConfig; 2],
        [theirs, ours]: [Guard; 2],
    ) -> Self {
        let node = Arc::new(Node::default());
        let listen = "127.0.0.1:0".parse().unwrap();
        let source = memory(32 << 20);
        let sender = EndpointConfig {
            listen,
            host: if senders.shared_memory { "here" } else { "there" }.into(),
            fingerprint,
            limits: limits.clone(),
            data: DataPlaneConfig { sources: vec![source.clone()], ..senders },
            guard: theirs,
        };
        let sender = Endpoint::bind(sender, Arc::new(Node::default())).await.unwrap();
        let here = EndpointConfig {
            listen,
            host: "here".into(),
            fingerprint: FINGERPRINT,
            limits,
            data: receivers,
            guard: ours,
        };
        let endpoint = Endpoint::bind(here, node.clone()).await.unwrap();
        let dialer = sender.dialer();
        let peer = PeerAddress { kv_address: endpoint.address().to_string() };
        Self { node, endpoint, dialer, peer, sender, source, used: Mutex::default() }
    }

    /// Puts bytes into the memory that the sender sends from.
    pub fn placed(&self, bytes: &[u8]) -> Region {
        let mut used = self.used.lock().unwrap();
        if !self.source.holds(*used, bytes.len() as u64) {
            *used = 0;
        }
        let at = *used;
        self.source.write(at, bytes);
        *used += bytes.len() as u64;
        Region { memory: self.source.clone(), at }
    }

    /// Sends these bytes as one slice.
    pub async fn send(
        &self,
        flight: &mut Flight,
        at: SlicePosition,
        bytes: Bytes,
    ) -> Result<(), TransportError> {
        flight.send(at, &self.placed(&bytes)).await
    }

    pub async fn start(&self, ticket: HandoffTicket, plan: Plan) -> Result<Flight, TransportError> {
        Flight::start(&self.dialer, &self.peer, ticket, plan).await
    }

    /// Waits until the sender (or asker) has lent and borrowed nothing.
    pub async fn unlent(&self) {
        for _ in 0..500 {
            if self.sender.lent_bytes() == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{} bytes are still lent after 5 s", self.sender.lent_bytes());
    }

    /// A whole flight, slices in the order given.
    pub async fn fly(
        &self,
        ticket: HandoffTicket,
        plan: Plan,
        order: &[SlicePosition],
    ) -> Result<FlightStats, TransportError> {
        let mut flight = self.start(ticket, plan).await?;
        for at in order {
            self.send(&mut flight, *at, layer(ticket, *at, plan)).await?;
        }
        flight.finish().await
    }
}

pub fn ticket(request: u64) -> HandoffTicket {
    HandoffTicket { request, attempt: 1, epoch: EPOCH }
}

pub const PLAN: Plan = Plan { blocks: 5, layers: 4, layer_bytes: 3000 };

pub fn positions(plan: Plan, have_blocks: u32) -> Vec<SlicePosition> {
    let of_layer = |layer| (have_blocks..plan.blocks).map(move |block| SlicePosition { block, layer });
    (0..plan.layers).flat_map(of_layer).collect()
}

/// The bytes of one slice: other ones for each ticket and position.
pub fn layer(ticket: HandoffTicket, at: SlicePosition, plan: Plan) -> Bytes {
    let seed = ticket.request * 31 + u64::from(ticket.attempt) * 17;
    let mut state = seed ^ (u64::from(at.block) << 32) ^ u64::from(at.layer) ^ 0x9e37_79b9;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_be_bytes()[0]
    };
    std::iter::repeat_with(next).take(plan.layer_bytes.try_into().unwrap()).collect()
}

pub fn block(key: u128, size: usize) -> FetchedBlock {
    let bytes = Bytes::from(vec![key.to_le_bytes()[0]; size]);
    FetchedBlock { key, checksum: checksum(&bytes), bytes }
}
