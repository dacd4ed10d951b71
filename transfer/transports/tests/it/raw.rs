//! Peers that break the protocol. They write the wire format by hand, from its description.

use std::time::{Duration, Instant};

use baton_transports::*;
use baton_types::Rng;
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::scene::*;

const HELLO: u8 = 1;
const OFFER: u8 = 4;
const SLICE: u8 = 6;
const FINISH: u8 = 8;

fn preface(version: u32) -> Vec<u8> {
    [&b"BATON-KV"[..], &version.to_le_bytes(), &[0; 4]].concat()
}

/// What this version says first.
pub fn preface_now() -> Vec<u8> {
    preface(PROTOCOL_VERSION)
}

pub struct Head {
    pub kind: u8,
    pub by_ring: bool,
    pub body_bytes: u32,
    pub a: u32,
    pub b: u32,
    pub c: u64,
}

/// A header, its checksum over `body`, and, unless it is in a ring, the body.
pub fn frame(head: &Head, body: &[u8]) -> Vec<u8> {
    let mut out = vec![head.kind, u8::from(head.by_ring), 0, 0];
    out.extend(head.body_bytes.to_le_bytes());
    out.extend(head.a.to_le_bytes());
    out.extend(head.b.to_le_bytes());
    out.extend(head.c.to_le_bytes());
    let sum = checksum(&[&out[..], body].concat());
    out.extend(sum.to_le_bytes());
    let check = checksum(&out);
    out.extend(&check.to_le_bytes()[..4]);
    out.extend([0; 4]);
    if !head.by_ring {
        out.extend(body);
    }
    out
}

fn control(kind: u8, c: u64, body: &[u8]) -> Vec<u8> {
    let body_bytes = u32::try_from(body.len()).unwrap();
    frame(&Head { kind, by_ring: false, body_bytes, a: 0, b: 0, c }, body)
}

pub fn hello(host: &str) -> Vec<u8> {
    let body =
        [&FINGERPRINT.to_le_bytes()[..], &[u8::try_from(host.len()).unwrap()], host.as_bytes()].concat();
    [preface(PROTOCOL_VERSION), control(HELLO, 0, &body)].concat()
}

fn offer() -> Vec<u8> {
    let mut body = ticket(1).request.to_le_bytes().to_vec();
    for number in [ticket(1).attempt, EPOCH, PLAN.blocks, PLAN.layers, PLAN.layer_bytes, 8] {
        body.extend(number.to_le_bytes());
    }
    control(OFFER, 0, &body)
}

fn slice(number: u64, at: SliceAt, bytes: &Bytes) -> Vec<u8> {
    let body_bytes = u32::try_from(bytes.len()).unwrap();
    let head = Head { kind: SLICE, by_ring: false, body_bytes, a: at.block, b: at.layer, c: number };
    frame(&head, bytes)
}

fn whole_flight() -> Vec<Vec<u8>> {
    let mut frames = vec![hello("there"), offer()];
    for (number, at) in (0..).zip(positions(PLAN, 0)) {
        frames.push(slice(number, at, &layer(ticket(1), at, PLAN)));
    }
    frames.push(control(FINISH, 20, &[]));
    frames
}

/// Sends all, then reads to the end, which must come soon.
async fn say(scene: &Scene, frames: &[Vec<u8>]) -> Vec<u8> {
    let mut stream = TcpStream::connect(scene.endpoint.address()).await.unwrap();
    for frame in frames {
        if stream.write_all(frame).await.is_err() {
            break;
        }
    }
    let _ = stream.shutdown().await;
    let mut answer = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(3), stream.read_to_end(&mut answer)).await;
    assert!(read.is_ok(), "the endpoint keeps a connection that is of no use");
    answer
}

fn contains(answer: &[u8], text: &str) -> bool {
    answer.windows(text.len()).any(|window| window == text.as_bytes())
}

#[tokio::test]
async fn the_format_is_as_described() {
    let scene = Scene::new(Medium::Tcp).await;
    let answer = say(&scene, &whole_flight()).await;
    assert!(answer.starts_with(&preface(PROTOCOL_VERSION)));
    assert!(scene.node.holds_exactly(ticket(1), PLAN, 0));
    scene.node.with(|book| assert_eq!(book.completed, vec![ticket(1)]));
}

#[tokio::test]
async fn each_broken_flight_is_aborted_and_the_reason_told() {
    let first = SliceAt { block: 0, layer: 0 };
    let good = layer(ticket(1), first, PLAN);
    let at = |block, layer| SliceAt { block, layer };
    let mut damaged = slice(0, first, &good);
    *damaged.last_mut().unwrap() ^= 1;
    let ring = Head { kind: SLICE, by_ring: true, body_bytes: PLAN.layer_bytes, a: 0, b: 0, c: 0 };
    let huge = Head { kind: SLICE, by_ring: false, body_bytes: u32::MAX, a: 0, b: 0, c: 0 };
    let huge_finish = Head { kind: FINISH, by_ring: false, body_bytes: u32::MAX, a: 0, b: 0, c: 0 };
    let cases = [
        (slice(0, at(5, 0), &good), "not in the plan"),
        (slice(0, at(0, 4), &good), "not in the plan"),
        (slice(0, first, &good.slice(1..)), "2999 bytes instead of 3000"),
        (slice(1, first, &good), "sent as number 1, came as 0"),
        (damaged, "checksum of a Slice frame"),
        (vec![0xff; 40], "checksum of a frame header"),
        (frame(&ring, &good), "there is none"),
        (frame(&huge, &[]), "4294967295 bytes instead of 3000"),
        (frame(&huge_finish, &[]), "Finish frame of 4294967295 bytes"),
        (control(FINISH, 0, &[]), "0 of 20 slices have landed"),
        (control(FINISH, 20, &[]), "the sender says 20"),
        (control(99, 0, &[]), "unknown kind of frame 99"),
        (offer(), "a Offer frame where none belongs"),
    ];
    for (bad, why) in cases {
        let scene = Scene::new(Medium::Tcp).await;
        let answer = say(&scene, &[hello("there"), offer(), bad]).await;
        assert!(contains(&answer, why), "{why}: {}", String::from_utf8_lossy(&answer));
        scene.node.with(|book| {
            assert_eq!((book.aborted.len(), book.completed.len(), book.slices.len()), (1, 0, 0), "{why}");
            assert!(book.aborted[0].1.contains(why), "{why}: {}", book.aborted[0].1);
        });
        assert_eq!(scene.endpoint.stats().aborted_flights, 1);
    }
}

#[tokio::test]
async fn a_slice_without_a_flight_is_refused() {
    let scene = Scene::new(Medium::Tcp).await;
    let lone = slice(0, SliceAt { block: 0, layer: 0 }, &Bytes::from_static(b"x"));
    assert!(contains(&say(&scene, &[hello("there"), lone]).await, "where none belongs"));
    assert_eq!(scene.endpoint.stats().failures.bug, 1);
}

#[tokio::test]
async fn strangers_on_the_port_are_shown_out() {
    let scene = Scene::new(Medium::Tcp).await;
    assert!(say(&scene, &[b"GET /metrics HTTP/1.1\r\n\r\n".to_vec()]).await.is_empty());
    assert!(say(&scene, &[vec![0; 5]]).await.is_empty());
    let answer = say(&scene, &[preface(99)]).await;
    assert_eq!(answer, preface(PROTOCOL_VERSION), "it tells its own version");
    let garbage = [preface(PROTOCOL_VERSION), vec![0x5a; 10_000]].concat();
    assert!(say(&scene, &[garbage]).await.is_empty());
    let stats = scene.endpoint.stats();
    assert_eq!((stats.failures.invalid, stats.failures.closed, stats.failures.corrupt), (2, 1, 1));
    // It still works.
    scene.fly(ticket(1), PLAN, &positions(PLAN, 0)).await.unwrap();
}

#[tokio::test]
async fn another_version_is_named_to_the_dialer() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut scene = Scene::new(Medium::Tcp).await;
    scene.peer.kv_address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(&preface(PROTOCOL_VERSION - 1)).await.unwrap();
        let _ = stream.read_to_end(&mut Vec::new()).await;
    });
    let error = scene.start(ticket(1), PLAN).await.unwrap_err();
    assert_eq!((error.kind, error.stage), (Kind::Invalid, Stage::Handshake));
    let names = |version: u32| error.text.contains(&format!("version {version}"));
    assert!(names(PROTOCOL_VERSION) && names(PROTOCOL_VERSION - 1), "{error}");
}

#[tokio::test]
async fn silence_is_not_waited_for_without_end() {
    let scene = Scene::new(Medium::Tcp).await;
    for said in [vec![], preface(PROTOCOL_VERSION), [hello("there"), offer(), vec![6, 0]].concat()] {
        let mut stream = TcpStream::connect(scene.endpoint.address()).await.unwrap();
        stream.write_all(&said).await.unwrap();
        let start = Instant::now();
        let mut answer = Vec::new();
        let read = stream.read_to_end(&mut answer);
        tokio::time::timeout(Duration::from_secs(3), read).await.expect("it closes").unwrap();
        assert!(start.elapsed() > Duration::from_millis(100));
    }
    scene.node.with(|book| assert_eq!((book.aborted.len(), book.completed.len()), (1, 0)));
}

#[tokio::test]
async fn connections_are_bounded() {
    let scene = Scene::with(Medium::Tcp, Limits { connections: 2, offer_timeout_ms: 3_000, ..quick() }).await;
    let flights = [scene.start(ticket(1), PLAN).await.unwrap(), scene.start(ticket(2), PLAN).await.unwrap()];
    assert!(say(&scene, &whole_flight()).await.is_empty());
    assert_eq!(scene.endpoint.stats().turned_away_connections, 1);
    let error = scene.start(ticket(3), PLAN).await.unwrap_err();
    assert_eq!((error.kind, error.stage), (Kind::Retry, Stage::Connect), "{error}");
    drop(flights);
}

/// A peer of the same host that writes other bytes into its ring than it vouches for.
#[tokio::test]
async fn wrong_bytes_in_the_ring_are_corrupt() {
    use std::os::unix::fs::FileExt;
    let scene = Scene::new(Medium::SharedMemory).await;
    let (ring_bytes, nonce, name) = (9000_u32, 42_u64, "baton-kv-0-test");
    let path = scene.shm.path().join(name);
    let file = std::fs::File::create(&path).unwrap();
    file.write_all_at(&nonce.to_le_bytes(), u64::from(ring_bytes)).unwrap();
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    let mut body = FINGERPRINT.to_le_bytes().to_vec();
    body.extend(text("here"));
    body.extend(text(name));
    body.extend(ring_bytes.to_le_bytes());
    body.extend(nonce.to_le_bytes());
    let hello = [preface(PROTOCOL_VERSION), control(HELLO, 0, &body)].concat();
    let mut frames = vec![hello, offer()];
    for (number, at) in (0..).zip(positions(PLAN, 0)).take(2) {
        let bytes = layer(ticket(1), at, PLAN);
        let mut written = bytes.to_vec();
        written[1500] ^= u8::from(number == 1);
        file.write_all_at(&written, number * 3000).unwrap();
        let head = Head { kind: SLICE, by_ring: true, body_bytes: 3000, a: at.block, b: at.layer, c: number };
        frames.push(frame(&head, &bytes));
    }
    let answer = say(&scene, &frames).await;
    assert!(contains(&answer, "checksum of a Slice frame"));
    scene.node.with(|book| assert_eq!((book.slices.len(), book.aborted.len()), (1, 1)));
    assert_eq!(scene.endpoint.stats().shared_memory.received_slices, 1);
}

/// Changes a few bytes, cuts, or repeats a part.
fn damaged(mut stream: Vec<u8>, rng: &mut Rng) -> Vec<u8> {
    let any = |rng: &mut Rng, below: usize| usize::try_from(rng.next_u64() % below as u64).unwrap();
    for _ in 0..=any(rng, 3) {
        let at = any(rng, stream.len());
        match rng.next_u64() % 4 {
            0 => stream[at] ^= 1 << (rng.next_u64() % 8),
            1 => stream[at] = rng.next_u64().to_le_bytes()[0],
            2 => stream.truncate(at.max(1)),
            _ => {
                let part = stream[at..stream.len().min(at + 64)].to_vec();
                stream.splice(at..at, part);
            }
        }
    }
    stream
}

/// Streams of a whole flight, each damaged in another way: the endpoint ends each in time, keeps nothing of it, and
/// serves the next peer. Seeded, so that a failure comes again.
#[tokio::test(flavor = "multi_thread")]
async fn no_damaged_flight_or_handshake_harms_the_endpoint() {
    const STREAMS: usize = 400;
    const KEY: &str = "the key of this cluster, of 32 bytes";
    let keyed: fn() -> Guard = || Guard { key: Some(ClusterKey::parse(KEY).unwrap()), tls: None };
    for (seed, guard) in [(1, Guard::default as fn() -> Guard), (2, keyed)] {
        let scene = Scene::guarded(Medium::Tcp, quick(), [guard(), guard()]).await;
        let mut rng = Rng::new(seed);
        let proves = |kind| frame(&Head { kind, by_ring: false, body_bytes: 32, a: 0, b: 0, c: 0 }, &[7; 32]);
        let handshake = [preface_now(), proves(32), proves(34)].concat();
        for turn in 0..STREAMS {
            let stream = if turn % 4 == 0 { handshake.clone() } else { whole_flight().concat() };
            say(&scene, &[damaged(stream, &mut rng)]).await;
        }
        scene.fly(ticket(1), PLAN, &positions(PLAN, 0)).await.unwrap();
        let stats = scene.endpoint.stats();
        assert_eq!(stats.receiving_flights, 0, "{stats:?}");
        if seed == 2 {
            assert_eq!(stats.received_flights, 1, "nothing else was let in");
        }
    }
}
