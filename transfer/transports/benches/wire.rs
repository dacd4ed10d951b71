//! Hand-offs and fetches between two endpoints of this process, from a pool to a pool: processor time of both sides
//! together and gigabytes a second, beside what the machine could do at best: one copy of the same bytes, one checksum
//! of them, and a bare loopback socket. All in one run, so that they compare.

use std::hint::black_box;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_transports::mover::{Location, Memory, Pages, Region};
use baton_transports::*;
use bytes::Bytes;

/// Bytes of one flight, and of a pool.
const POOL_BYTES: usize = 32 << 20;
/// Flights of one measurement.
const FLIGHTS: u64 = 32;
/// Of those, the ones that are not measured: they pay for fresh pages.
const WARMING: u64 = 4;

/// Takes slices into a pool, and lends one block as often as it is wanted.
struct Pool {
    memory: Arc<Memory>,
    slice_bytes: u64,
    block: Bytes,
}

impl Receiver for Pool {
    fn offer(&self, _: HandoffTicket, _: &Plan) -> Result<AcceptedFlight, FlightRefusal> {
        Ok(AcceptedFlight { have_blocks: 0 })
    }

    fn land(&self, _: HandoffTicket, arrived: &ArrivedPieces) -> Result<u64, FlightRefusal> {
        let place =
            |piece: &Piece| Ok(u64::from(piece.at.block) * self.slice_bytes + u64::from(piece.offset));
        arrived.copy_to(&self.memory, place)
    }

    fn complete(&self, _: HandoffTicket) {}

    fn abort(&self, ticket: HandoffTicket, why: &str) {
        panic!("{ticket:?} was aborted: {why}");
    }

    fn wanted(&self, want: Want) -> Serving<'_> {
        let sum = checksum(&self.block);
        let one = move |key| FetchedBlock { key, bytes: self.block.clone(), checksum: sum };
        Box::pin(async move { want.keys.into_iter().map(one).collect() })
    }
}

fn memory() -> Arc<Memory> {
    Memory::shared(POOL_BYTES, Pages::Ordinary, Location::Anywhere).expect("memory")
}

/// Processor time of this process so far, in seconds.
fn cpu_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux");
    let fields: Vec<&str> = stat.rsplit(')').next().expect("never empty").split_whitespace().collect();
    // User and system, in hundredths of a second.
    [fields[11], fields[12]].iter().map(|ticks| ticks.parse::<f64>().expect("a number") / 100.0).sum()
}

/// The cost of moving bytes: processor time and wall time.
struct Cost {
    cpu_s_per_gb: f64,
    gb_per_s: f64,
}

fn cost(bytes: u64, (cpu, began): (f64, Instant)) -> Cost {
    let gigabytes = bytes as f64 / 1e9;
    Cost { cpu_s_per_gb: (cpu_s() - cpu) / gigabytes, gb_per_s: gigabytes / began.elapsed().as_secs_f64() }
}

fn measured(mut once: impl FnMut()) -> Cost {
    once();
    let start = (cpu_s(), Instant::now());
    (0..FLIGHTS).for_each(|_| once());
    cost(FLIGHTS * POOL_BYTES as u64, start)
}

fn copy(size: usize) -> Cost {
    let (from, to) = (vec![1_u8; POOL_BYTES], std::cell::RefCell::new(vec![0_u8; POOL_BYTES]));
    measured(|| {
        let mut to = to.borrow_mut();
        for (from, to) in from.chunks(size).zip(to.chunks_mut(size)) {
            to.copy_from_slice(black_box(from));
        }
        black_box(&to[0]);
    })
}

fn sum(size: usize) -> Cost {
    let bytes = vec![1_u8; POOL_BYTES];
    measured(|| bytes.chunks(size).for_each(|slice| _ = black_box(checksum(slice))))
}

fn bare_socket(size: usize) -> Cost {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    let bytes = vec![1_u8; POOL_BYTES];
    measured(|| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().expect("the writer connects");
                let mut buffer = vec![0; size];
                while stream.read_exact(&mut buffer).is_ok() {
                    black_box(&buffer[0]);
                }
            });
            let mut stream = TcpStream::connect(address).expect("it listens");
            bytes.chunks(size).for_each(|slice| stream.write_all(slice).expect("the reader reads"));
        });
    })
}

/// Two endpoints, the first of which sends.
struct Pair {
    from: Endpoint,
    to: Endpoint,
    source: Arc<Memory>,
    size: usize,
}

impl Pair {
    async fn new(shared_memory: bool, size: usize) -> Self {
        let (source, target) = (memory(), memory());
        source.write(0, &(0..POOL_BYTES).map(|at| (at % 251) as u8).collect::<Vec<u8>>());
        let endpoint = |memory: &Arc<Memory>| {
            let listen = "127.0.0.1:0".parse().expect("an address");
            let plain = EndpointConfig::new(listen, "here", 1);
            let data = DataPlaneConfig {
                sources: vec![memory.clone()],
                shared_memory,
                rdma: RdmaDevices::None,
                ..plain.data.clone()
            };
            let (memory, block) = (memory.clone(), vec![1; size].into());
            let pool = Pool { memory, slice_bytes: size as u64, block };
            Endpoint::bind(EndpointConfig { data, ..plain }, Arc::new(pool))
        };
        let from = endpoint(&source).await.expect("bound");
        Self { from, to: endpoint(&target).await.expect("bound"), source, size }
    }

    fn peer(&self) -> PeerAddress {
        PeerAddress { kv_address: self.to.address().to_string() }
    }

    async fn flights(&self) -> Cost {
        let (blocks, layer_bytes) = ((POOL_BYTES / self.size) as u32, self.size as u32);
        let plan = Plan { blocks, layers: 1, layer_bytes };
        let mut start = (0.0, Instant::now());
        for request in 0..WARMING + FLIGHTS {
            if request == WARMING {
                start = (cpu_s(), Instant::now());
            }
            let ticket = HandoffTicket { request, attempt: 0, epoch: 0 };
            let flight = Flight::start(&self.from.dialer(), &self.peer(), ticket, plan).await;
            let mut flight = flight.expect("it takes all");
            for block in 0..blocks {
                let at = u64::from(block) * u64::from(layer_bytes);
                let from = Region { memory: self.source.clone(), at };
                flight.send(SlicePosition { block, layer: 0 }, &from).await.expect("it takes all");
            }
            flight.finish().await.expect("all has landed");
        }
        cost(FLIGHTS * POOL_BYTES as u64, start)
    }

    async fn fetches(&self) -> Cost {
        let keys: Vec<u128> = (0..64).collect();
        let mut start = (0.0, Instant::now());
        for round in 0..WARMING + FLIGHTS {
            if round == WARMING {
                start = (cpu_s(), Instant::now());
            }
            let want = Want { keys: keys.clone(), epoch: 0, priority: Priority::Fetch };
            let blocks = fetch(&self.from.dialer(), &self.peer(), want, Duration::from_secs(10)).await;
            assert_eq!(blocks.expect("it holds all").len(), keys.len());
        }
        cost(FLIGHTS * (self.size * keys.len()) as u64, start)
    }
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("threads to run on");
    println!("processor time of both sides in s/GB, and GB/s in brackets");
    println!(
        "{:>9} {:>14} {:>14} {:>14} {:>14} {:>14} {:>14} {:>14}",
        "slice", "memcpy", "crc64", "bare tcp", "hand-off shm", "hand-off tcp", "fetch shm", "fetch tcp"
    );
    for size in [16 << 10, 64 << 10, 256 << 10, 1 << 20] {
        let mut costs = vec![copy(size), sum(size), bare_socket(size)];
        let (flights, fetches): (Vec<Cost>, Vec<Cost>) = runtime.block_on(async {
            let mut both = Vec::new();
            for shared_memory in [true, false] {
                let pair = Pair::new(shared_memory, size).await;
                both.push((pair.flights().await, pair.fetches().await));
            }
            both.into_iter().unzip()
        });
        costs.extend(flights.into_iter().chain(fetches));
        print!("{:>5} KiB", size >> 10);
        for Cost { cpu_s_per_gb, gb_per_s } in costs {
            print!(" {:>14}", format!("{cpu_s_per_gb:.3} ({gb_per_s:.2})"));
        }
        println!();
    }
}
