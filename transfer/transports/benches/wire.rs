//! Gigabytes a second of flights over each medium, beside what the machine could do at best: one copy of the
//! same bytes, one checksum of them, and a bare loopback socket. All in one run, so that they compare.

use std::hint::black_box;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_transports::*;
use bytes::Bytes;

/// Bytes of one measurement.
const TOTAL_BYTES: usize = 512 << 20;
/// Bytes that the slices are cut from: more than a cache holds.
const SOURCE_BYTES: usize = 64 << 20;
/// Measurements of each figure; the middle one is shown.
const ROUNDS: usize = 5;

/// Takes all and keeps nothing, but for one block to be fetched.
struct Sink {
    block: Bytes,
}

impl Receiver for Sink {
    fn offer(&self, _: Ticket, _: &Plan) -> Result<Accepted, Refused> {
        Ok(Accepted { have_blocks: 0 })
    }

    fn slice(&self, _: Ticket, _: SliceAt, bytes: Bytes) -> Result<(), Refused> {
        black_box(&bytes);
        Ok(())
    }

    fn complete(&self, _: Ticket) {}

    fn abort(&self, ticket: Ticket, why: &str) {
        panic!("{ticket:?} was aborted: {why}");
    }

    fn wanted(&self, want: Want) -> Serving<'_> {
        let sum = checksum(&self.block);
        let one = move |key| FetchedBlock { key, bytes: self.block.clone(), checksum: sum };
        Box::pin(async move { want.keys.into_iter().map(one).collect() })
    }
}

fn middle(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn rate(bytes: usize, took: Duration) -> f64 {
    bytes as f64 / took.as_secs_f64() / 1e9
}

fn measured(mut once: impl FnMut()) -> f64 {
    middle((0..ROUNDS).map(|_| timed(&mut once)).collect())
}

fn timed(once: &mut impl FnMut()) -> f64 {
    let start = Instant::now();
    once();
    rate(TOTAL_BYTES, start.elapsed())
}

fn slices(source: &Bytes, size: usize) -> impl Iterator<Item = Bytes> + '_ {
    let fit = source.len() / size;
    (0..TOTAL_BYTES / size).map(move |number| source.slice(number % fit * size..(number % fit + 1) * size))
}

fn copy(source: &Bytes, size: usize) -> f64 {
    let mut target = vec![0_u8; SOURCE_BYTES];
    let fit = SOURCE_BYTES / size;
    measured(|| {
        for (number, slice) in slices(source, size).enumerate() {
            let at = number % fit * size;
            target[at..at + size].copy_from_slice(&slice);
            black_box(&target[at]);
        }
    })
}

fn sum(source: &Bytes, size: usize) -> f64 {
    measured(|| {
        slices(source, size).for_each(|slice| {
            black_box(checksum(&slice));
        })
    })
}

fn bare_socket(source: &Bytes, size: usize) -> f64 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
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
            slices(source, size).for_each(|slice| stream.write_all(&slice).expect("the reader reads"));
        });
    })
}

async fn fly(dialer: &Dialer, peer: &PeerAddress, source: &Bytes, size: usize) -> f64 {
    let blocks = u32::try_from(TOTAL_BYTES / size).expect("small");
    let plan = Plan { blocks, layers: 1, layer_bytes: u32::try_from(size).expect("small") };
    let mut figures = Vec::new();
    for round in 0..=ROUNDS {
        let start = Instant::now();
        let ticket = Ticket { request: u64::try_from(round).expect("small"), attempt: 0, epoch: 0 };
        let mut flight = Flight::start(dialer, peer, ticket, plan).await.expect("it takes all");
        for (block, slice) in (0..).zip(slices(source, size)) {
            flight.send(SliceAt { block, layer: 0 }, slice).await.expect("it takes all");
        }
        flight.finish().await.expect("all has landed");
        figures.push(rate(TOTAL_BYTES, start.elapsed()));
    }
    middle(figures.split_off(1))
}

async fn fetched(dialer: &Dialer, peer: &PeerAddress, size: usize) -> f64 {
    let keys: Vec<u128> = (0..64).collect();
    let mut figures = Vec::new();
    for _ in 0..ROUNDS {
        let start = Instant::now();
        let want = Want { keys: keys.clone(), epoch: 0, priority: Priority::Fetch };
        let blocks = fetch(dialer, peer, want, Duration::from_secs(10)).await.expect("it holds all");
        assert_eq!(blocks.len(), keys.len());
        figures.push(rate(size * keys.len(), start.elapsed()));
    }
    middle(figures)
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("threads to run on");
    let pattern = |at: usize| u8::try_from(at * 2_654_435_761 % 251).expect("below 251");
    let source: Bytes = (0..SOURCE_BYTES).map(pattern).collect();
    println!("GB/s, middle of {ROUNDS}; {} MiB each", TOTAL_BYTES >> 20);
    println!(
        "{:>9} {:>8} {:>8} {:>9} {:>8} {:>8} {:>8} {:>8}",
        "slice", "memcpy", "crc64", "bare tcp", "tcp", "shm", "memory", "fetch"
    );
    for size in [16 << 10, 64 << 10, 256 << 10, 1 << 20] {
        let bounds = [copy(&source, size), sum(&source, size), bare_socket(&source, size)];
        let flights = runtime.block_on(async {
            let listen = "127.0.0.1:0".parse().expect("an address");
            let sink = Arc::new(Sink { block: source.slice(..size) });
            let endpoint = Endpoint::bind(EndpointConfig::new(listen, "here", 1), sink).await.expect("bound");
            let peer = PeerAddress { kv_address: endpoint.address().to_string(), host: "here".into() };
            let dialer = |host: &str, shm_dir| {
                let config =
                    DialerConfig { host: host.into(), shm_dir, fingerprint: 1, limits: Limits::default() };
                Dialer::new(config).expect("sound limits")
            };
            let (tcp, shm) = (dialer("there", None), dialer("here", default_shm_dir()));
            let figures = [
                fly(&tcp, &peer, &source, size).await,
                fly(&shm, &peer, &source, size).await,
                fly(&endpoint.loopback(), &peer, &source, size).await,
                fetched(&tcp, &peer, size).await,
            ];
            assert_eq!(shm.stats().fallbacks, 0, "{:?}", shm.stats().last_fallback);
            figures
        });
        let [memcpy, crc, bare] = bounds;
        let [tcp, shm, memory, fetch] = flights;
        let kib = size >> 10;
        println!(
            "{kib:>5} KiB {memcpy:>8.2} {crc:>8.2} {bare:>9.2} {tcp:>8.2} {shm:>8.2} {memory:>8.2} {fetch:>8.2}"
        );
    }
}
