//! A receiving node that writes down all it is told, and a sender that reaches it over a chosen medium.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_transports::*;
use bytes::Bytes;

pub const EPOCH: u32 = 7;
pub const FINGERPRINT: u64 = 0xfeed;

/// What the node was told, and how it shall answer.
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
    pub offers: Vec<(Ticket, Plan)>,
    /// Notes are taken, and here are those that came.
    pub notes: Option<Vec<(Ticket, Bytes)>>,
    pub slices: Vec<(Ticket, SliceAt, Bytes)>,
    pub completed: Vec<Ticket>,
    pub aborted: Vec<(Ticket, String)>,
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
    pub fn holds_exactly(&self, ticket: Ticket, plan: Plan, have_blocks: u32) -> bool {
        self.with(|book| {
            let mine = book.slices.iter().filter(|(of, _, _)| *of == ticket);
            let got: BTreeMap<SliceAt, &Bytes> = mine.clone().map(|(_, at, bytes)| (*at, bytes)).collect();
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
    fn offer(&self, ticket: Ticket, plan: &Plan) -> Result<Accepted, Refused> {
        self.with(|book| {
            if ticket.epoch != EPOCH {
                return Err(Refused { retry: false, why: format!("epoch {} is over", ticket.epoch) });
            }
            if ticket.attempt < book.newest_attempt {
                return Err(Refused { retry: false, why: format!("attempt {} is outdated", ticket.attempt) });
            }
            if book.postpone > 0 {
                book.postpone -= 1;
                return Err(Refused { retry: true, why: "no order for it yet".into() });
            }
            book.offers.push((ticket, *plan));
            Ok(Accepted { have_blocks: book.have_blocks })
        })
    }

    fn note(&self, ticket: Ticket, bytes: Bytes) -> Result<(), Refused> {
        self.with(|book| match &mut book.notes {
            Some(notes) => {
                notes.push((ticket, bytes));
                Ok(())
            }
            None => Err(Refused { retry: false, why: "no note is expected".into() }),
        })
    }

    fn slice(&self, ticket: Ticket, at: SliceAt, bytes: Bytes) -> Result<(), Refused> {
        self.with(|book| {
            if book.refuse_slice_after.is_some_and(|most| book.slices.len() >= most) {
                return Err(Refused { retry: false, why: "the client has gone".into() });
            }
            book.slices.push((ticket, at, bytes));
            Ok(())
        })
    }

    fn complete(&self, ticket: Ticket) {
        self.with(|book| book.completed.push(ticket));
    }

    fn abort(&self, ticket: Ticket, why: &str) {
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

pub struct Scene {
    pub node: Arc<Node>,
    pub endpoint: Endpoint,
    pub dialer: Dialer,
    pub peer: PeerAddress,
    pub shm: tempfile::TempDir,
    /// The node that sends by the transfer engine.
    sender: Option<Endpoint>,
}

/// A part in the transfer engine: room for a few of the largest flights here, through shared memory or not.
pub fn carrier(shared_memory: bool) -> CarrierConfig {
    let (listen, rdma) = ([127, 0, 0, 1].into(), RdmaDevices::None);
    CarrierConfig { listen, arena_bytes: 16 << 20, shared_memory, rdma }
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

impl Scene {
    pub async fn new(medium: Medium) -> Self {
        Self::with(medium, quick()).await
    }

    pub async fn with(medium: Medium, limits: Limits) -> Self {
        Self::equipped(medium, limits, [carrier(true), carrier(true)], Default::default()).await
    }

    /// The same where the sender has the first of the guards, and the receiver the second.
    pub async fn guarded(medium: Medium, limits: Limits, guards: [Guard; 2]) -> Self {
        Self::equipped(medium, limits, [carrier(true), carrier(true)], guards).await
    }

    /// The same with parts in the transfer engine of their own: the sender's (or asker's), then the receiver's.
    pub async fn carried(medium: Medium, limits: Limits, carriers: [CarrierConfig; 2]) -> Self {
        Self::equipped(medium, limits, carriers, Default::default()).await
    }

    async fn equipped(
        medium: Medium,
        limits: Limits,
        [senders, receivers]: [CarrierConfig; 2],
        [theirs, ours]: [Guard; 2],
    ) -> Self {
        let shm = tempfile::tempdir().unwrap();
        let node = Arc::new(Node::default());
        let shm_dir = Some(shm.path().to_owned());
        let config = EndpointConfig {
            listen: "127.0.0.1:0".parse().unwrap(),
            host: "here".into(),
            shm_dir: shm_dir.clone(),
            fingerprint: FINGERPRINT,
            limits: limits.clone(),
            carrier: (medium == Medium::Engine).then_some(receivers),
            guard: ours,
        };
        let mut sender = None;
        if medium == Medium::Engine {
            let config = EndpointConfig {
                host: if senders.shared_memory { "here" } else { "there" }.into(),
                carrier: Some(senders),
                guard: theirs.clone(),
                ..config.clone()
            };
            sender = Some(Endpoint::bind(config, Arc::new(Node::default())).await.unwrap());
        }
        let endpoint = Endpoint::bind(config, node.clone()).await.unwrap();
        let host = if medium == Medium::SharedMemory { "here" } else { "there" };
        let dialer = match (medium, &sender) {
            (Medium::Memory, _) => endpoint.loopback(),
            (_, Some(sender)) => sender.dialer(),
            _ => {
                let config = DialerConfig { host: host.into(), shm_dir, fingerprint: FINGERPRINT, limits };
                Dialer::guarded(config, theirs).unwrap()
            }
        };
        let peer = PeerAddress { kv_address: endpoint.address().to_string(), host: "here".into() };
        Self { node, endpoint, dialer, peer, shm, sender }
    }

    pub async fn start(&self, ticket: Ticket, plan: Plan) -> Result<Flight, TransportError> {
        Flight::start(&self.dialer, &self.peer, ticket, plan).await
    }

    /// Waits until the sender (or asker) has lent and borrowed nothing.
    pub async fn unlent(&self) {
        let sender = self.sender.as_ref().expect("it has a part in the transfer engine");
        for _ in 0..500 {
            if sender.lent_bytes() == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{} bytes are still lent after 5 s", sender.lent_bytes());
    }

    /// A whole flight, slices in the order given.
    pub async fn fly(
        &self,
        ticket: Ticket,
        plan: Plan,
        order: &[SliceAt],
    ) -> Result<FlightStats, TransportError> {
        let mut flight = self.start(ticket, plan).await?;
        for at in order {
            flight.send(*at, layer(ticket, *at, plan)).await?;
        }
        flight.finish().await
    }
}

pub fn ticket(request: u64) -> Ticket {
    Ticket { request, attempt: 1, epoch: EPOCH }
}

pub const PLAN: Plan = Plan { blocks: 5, layers: 4, layer_bytes: 3000 };

pub fn positions(plan: Plan, have_blocks: u32) -> Vec<SliceAt> {
    let of_layer = |layer| (have_blocks..plan.blocks).map(move |block| SliceAt { block, layer });
    (0..plan.layers).flat_map(of_layer).collect()
}

/// The bytes of one slice: other ones for each ticket and position.
pub fn layer(ticket: Ticket, at: SliceAt, plan: Plan) -> Bytes {
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
