//! Peers that break the protocol. They write the wire format by hand, from its description.

use std::time::{Duration, Instant};

use baton_transports::*;
use baton_types::Rng;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::scene::*;

const HELLO: u8 = 1;
const OFFER: u8 = 4;
const FINISH: u8 = 8;
const MOVED: u8 = 15;

fn preface(version: u32) -> Vec<u8> {
    [&b"BATON-KV"[..], &version.to_le_bytes(), &[0; 4]].concat()
}

/// The first bytes that this version sends.
pub fn preface_now() -> Vec<u8> {
    preface(PROTOCOL_VERSION)
}

pub struct Head {
    pub kind: u8,
    pub body_bytes: u32,
    pub a: u32,
    pub b: u32,
    pub c: u64,
}

/// A header, its checksum over `body`, and the body.
pub fn frame(head: &Head, body: &[u8]) -> Vec<u8> {
    let mut out = vec![head.kind, 0, 0, 0];
    out.extend(head.body_bytes.to_le_bytes());
    out.extend(head.a.to_le_bytes());
    out.extend(head.b.to_le_bytes());
    out.extend(head.c.to_le_bytes());
    let sum = checksum(&[&out[..], body].concat());
    out.extend(sum.to_le_bytes());
    let check = checksum(&out);
    out.extend(&check.to_le_bytes()[..4]);
    out.extend([0; 4]);
    out.extend(body);
    out
}

fn control(kind: u8, c: u64, body: &[u8]) -> Vec<u8> {
    let body_bytes = u32::try_from(body.len()).unwrap();
    frame(&Head { kind, body_bytes, a: 0, b: 0, c }, body)
}

pub fn hello(host: &str) -> Vec<u8> {
    let body =
        [&FINGERPRINT.to_le_bytes()[..], &[u8::try_from(host.len()).unwrap()], host.as_bytes()].concat();
    [preface(PROTOCOL_VERSION), control(HELLO, 0, &body)].concat()
}

fn offer() -> Vec<u8> {
    let mut body = ticket(1).request.to_le_bytes().to_vec();
    for number in [ticket(1).attempt, EPOCH, PLAN.blocks, PLAN.layers, PLAN.layer_bytes] {
        body.extend(number.to_le_bytes());
    }
    control(OFFER, 0, &body)
}

/// Says that the window holds `upto` bytes of the stream, of which those that are new have this checksum, and in
/// which these slices begin.
fn moved(upto: u64, sum: u64, begun: &[SlicePosition]) -> Vec<u8> {
    let mut body = sum.to_le_bytes().to_vec();
    for at in begun {
        body.extend(at.block.to_le_bytes());
        body.extend(at.layer.to_le_bytes());
    }
    control(MOVED, upto, &body)
}

/// The checksum of so many bytes of an unwritten window.
fn zeros(bytes: usize) -> u64 {
    checksum(&vec![0; bytes])
}

/// A flight whose slices are zeros: the windows of these senders stay as they are.
fn whole_flight() -> Vec<Vec<u8>> {
    let all = positions(PLAN, 0);
    vec![
        hello("there"),
        offer(),
        // The third slice begins in the first part and ends in the second.
        moved(7_000, zeros(7_000), &all[..3]),
        moved(60_000, zeros(53_000), &all[3..]),
        control(FINISH, 20, &[]),
    ]
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
    let scene = Scene::new(Way::Tcp).await;
    let answer = say(&scene, &whole_flight()).await;
    assert!(answer.starts_with(&preface(PROTOCOL_VERSION)));
    scene.node.with(|book| {
        assert_eq!(book.completed, vec![ticket(1)]);
        let landed: Vec<SlicePosition> = book.slices.iter().map(|(_, at, _)| *at).collect();
        assert_eq!(landed, positions(PLAN, 0));
        assert!(book.slices.iter().all(|(_, _, bytes)| *bytes == vec![0; 3_000]));
    });
}

#[tokio::test]
async fn each_broken_flight_is_aborted_and_the_reason_told() {
    let at = |block, layer| SlicePosition { block, layer };
    let (first, one) = (at(0, 0), zeros(3_000));
    let mut damaged = moved(3_000, one, &[first]);
    *damaged.last_mut().unwrap() ^= 1;
    let huge_finish = Head { kind: FINISH, body_bytes: u32::MAX, a: 0, b: 0, c: 0 };
    let cases = [
        (moved(3_000, one, &[at(5, 0)]), "not in the plan"),
        (moved(3_000, one, &[at(0, 4)]), "not in the plan"),
        (moved(6_000, zeros(6_000), &[first, first]), "came twice"),
        (moved(3_000, one, &[first, at(1, 0)]), "more slices are announced"),
        (moved(3_000, one, &[]), "more bytes came"),
        (moved(3_001, zeros(3_001), &[first]), "more bytes came"),
        (moved(0, zeros(0), &[]), "no room for"),
        (moved(u64::MAX, one, &[first]), "no room for"),
        (moved(3_000, one ^ 1, &[first]), "checksum over the bytes that landed"),
        (control(MOVED, 3_000, &[0; 9]), "form of its kind"),
        (damaged, "checksum of a Moved frame"),
        (vec![0xff; 40], "checksum of a frame header"),
        (frame(&huge_finish, &[]), "Finish frame of 4294967295 bytes"),
        (control(FINISH, 0, &[]), "0 of 20 slices have landed"),
        (control(FINISH, 20, &[]), "the sender says 20"),
        (control(99, 0, &[]), "unknown kind of frame 99"),
        (offer(), "a Offer frame where none belongs"),
    ];
    for (bad, why) in cases {
        let scene = Scene::new(Way::Tcp).await;
        let answer = say(&scene, &[hello("there"), offer(), bad]).await;
        assert!(contains(&answer, why), "{why}: {}", String::from_utf8_lossy(&answer));
        scene.node.with(|book| {
            assert_eq!((book.aborted.len(), book.completed.len()), (1, 0), "{why}");
            assert!(book.aborted[0].1.contains(why), "{why}: {}", book.aborted[0].1);
        });
    }
}

#[tokio::test]
async fn slices_without_a_flight_are_refused() {
    let scene = Scene::new(Way::Tcp).await;
    let lone = moved(1, zeros(1), &[SlicePosition { block: 0, layer: 0 }]);
    assert!(contains(&say(&scene, &[hello("there"), lone]).await, "where none belongs"));
}

#[tokio::test]
async fn strangers_on_the_port_are_shown_out() {
    let scene = Scene::new(Way::Tcp).await;
    assert!(say(&scene, &[b"GET /metrics HTTP/1.1\r\n\r\n".to_vec()]).await.is_empty());
    assert!(say(&scene, &[vec![0; 5]]).await.is_empty());
    let answer = say(&scene, &[preface(99)]).await;
    assert_eq!(answer, preface(PROTOCOL_VERSION), "it tells its own version");
    let garbage = [preface(PROTOCOL_VERSION), vec![0x5a; 10_000]].concat();
    assert!(say(&scene, &[garbage]).await.is_empty());
    // It still works.
    scene.fly(ticket(1), PLAN, &positions(PLAN, 0)).await.unwrap();
}

#[tokio::test]
async fn another_version_is_named_to_the_dialer() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut scene = Scene::new(Way::Tcp).await;
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
    let scene = Scene::new(Way::Tcp).await;
    for said in [vec![], preface(PROTOCOL_VERSION), [hello("there"), offer(), vec![15, 0]].concat()] {
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
    let scene = Scene::with(Way::Tcp, Limits { connections: 2, offer_timeout_ms: 3_000, ..quick() }).await;
    let flights = [scene.start(ticket(1), PLAN).await.unwrap(), scene.start(ticket(2), PLAN).await.unwrap()];
    assert!(say(&scene, &whole_flight()).await.is_empty());
    let error = scene.start(ticket(3), PLAN).await.unwrap_err();
    assert_eq!((error.kind, error.stage), (Kind::Retry, Stage::Connect), "{error}");
    drop(flights);
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
        let scene = Scene::guarded(Way::Tcp, quick(), [guard(), guard()]).await;
        let mut rng = Rng::new(seed);
        let proves = |kind| frame(&Head { kind, body_bytes: 32, a: 0, b: 0, c: 0 }, &[7; 32]);
        let handshake = [preface_now(), proves(32), proves(34)].concat();
        for turn in 0..STREAMS {
            let stream = if turn % 4 == 0 { handshake.clone() } else { whole_flight().concat() };
            say(&scene, &[damaged(stream, &mut rng)]).await;
        }
        scene.fly(ticket(1), PLAN, &positions(PLAN, 0)).await.unwrap();
        let stats = scene.endpoint.stats();
        assert_eq!(stats.receiving_flights, 0, "{stats:?}");
        if seed == 2 {
            scene.node.with(|book| assert_eq!(book.completed.len(), 1, "nothing else was let in"));
        }
    }
}
