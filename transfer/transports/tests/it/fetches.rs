//! Fetches through windows smaller than the blocks, and fetches with a lying holder or asker.

use std::time::Duration;

use baton_transports::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::raw::{Head, frame, hello, preface_now};
use crate::scene::*;

const WELCOME: u8 = 2;
const WANT: u8 = 11;
const END: u8 = 13;
const MOVED: u8 = 15;
const HELD: u8 = 16;
const LENT: u8 = 17;

fn wanted(keys: impl IntoIterator<Item = u128>) -> Want {
    Want { keys: keys.into_iter().collect(), epoch: EPOCH, priority: Priority::Replicate }
}

/// Blocks of other sizes and bytes each.
fn various(count: u128, size: usize) -> Vec<FetchedBlock> {
    let one = |key: u128| {
        let extra = usize::try_from(key % 7).unwrap() * 1_000;
        let bytes: Vec<u8> = (0..size + extra).map(|at| (at as u128 * 31 + key * 7) as u8).collect();
        FetchedBlock { key: key << 64 | key, checksum: checksum(&bytes), bytes: bytes.into() }
    };
    (1..=count).map(one).collect()
}

async fn holding(scene: Scene, held: &[FetchedBlock]) -> Scene {
    scene.node.with(|book| book.store = held.iter().map(|one| (one.key, one.clone())).collect());
    scene
}

async fn ask(scene: &Scene, want: Want) -> Result<Vec<FetchedBlock>, TransportError> {
    fetch(&scene.dialer, &scene.peer, want, Duration::from_secs(10)).await
}

fn small(arena_bytes: usize) -> DataPlaneConfig {
    DataPlaneConfig { arena_bytes, ..plane(true) }
}

#[tokio::test]
async fn more_than_a_window_comes_through_one() {
    let held = various(40, 300_000);
    for shared_memory in [true, false] {
        let arenas = [small(4 << 20), small(4 << 20)].map(|one| DataPlaneConfig { shared_memory, ..one });
        let scene = holding(Scene::carried(quick(), arenas).await, &held).await;
        assert_eq!(ask(&scene, wanted(held.iter().map(|one| one.key))).await.unwrap(), held);
        let (asker, holder) = (scene.dialer.stats(), scene.endpoint.stats());
        let bytes: u64 = held.iter().map(|one| one.bytes.len() as u64).sum();
        assert_eq!(asker.kv.received_bytes, bytes);
        assert_eq!(if shared_memory { holder.sent.shared_memory } else { holder.sent.tcp }, bytes);
    }
}

#[tokio::test]
async fn many_fetches_at_a_time_share_the_memory() {
    let held = various(16, 200_000);
    let arenas = [small(8 << 20), small(8 << 20)];
    let scene = holding(Scene::carried(quick(), arenas).await, &held).await;
    let asking = (0..4).map(|_| ask(&scene, wanted(held.iter().map(|one| one.key))));
    for got in futures_of(asking).await {
        assert_eq!(got.unwrap(), held);
    }
    assert_eq!(scene.endpoint.stats().serving_fetches, 0);
}

/// Polls all of them by turns.
async fn futures_of<T>(all: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut all: Vec<_> = all.map(|one| (Box::pin(one), None)).collect();
    std::future::poll_fn(|context| {
        let mut ready = true;
        for (future, out) in &mut all {
            if out.is_none() {
                match future.as_mut().poll(context) {
                    std::task::Poll::Ready(got) => *out = Some(got),
                    std::task::Poll::Pending => ready = false,
                }
            }
        }
        if ready { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    all.into_iter().map(|(_, out)| out.unwrap()).collect()
}

#[tokio::test]
async fn a_short_key_brings_the_block_that_ends_like_it() {
    let held = various(3, 1_000);
    for way in [Way::Shm, Way::Tcp] {
        let scene = holding(Scene::new(way).await, &held).await;
        scene.node.with(|book| book.short_keys = true);
        assert_eq!(ask(&scene, wanted(1..=3)).await.unwrap(), held);
        assert_eq!(ask(&scene, wanted([held[0].key, 2])).await.unwrap(), held[..2]);
        // Another whole key that ends alike is another block.
        assert_eq!(ask(&scene, wanted([1 | 5 << 64])).await.unwrap(), []);
    }
}

#[tokio::test]
async fn a_block_may_be_larger_than_all_the_memory_of_a_side() {
    let held = various(3, 300_000);
    let roomy = || small(4 << 20);
    for arenas in [[small(64 << 10), roomy()], [roomy(), small(64 << 10)]] {
        let scene = holding(Scene::carried(quick(), arenas).await, &held).await;
        assert_eq!(ask(&scene, wanted(held.iter().map(|one| one.key))).await.unwrap(), held);
    }
}

#[tokio::test]
async fn without_memory_for_a_window_a_fetch_is_to_be_tried_again() {
    let held = various(2, 100_000);
    let arenas = [small(64 << 10), small(4 << 20)];
    let scene = holding(Scene::carried(quick(), arenas).await, &held).await;
    let asking = || ask(&scene, wanted(held.iter().map(|one| one.key)));
    let all = futures_of((0..3).map(|_| asking())).await;
    let refused = all.iter().filter(|got| got.as_ref().is_err_and(|error| error.kind == Kind::Retry)).count();
    let served = all.iter().filter(|got| got.as_ref().is_ok_and(|blocks| *blocks == held)).count();
    assert!(refused > 0 && served > 0 && refused + served == 3, "{all:?}");
    scene.unlent().await;
    assert_eq!(asking().await.unwrap(), held);
}

#[tokio::test]
async fn blocks_without_bytes_are_blocks() {
    let empty = [block(1, 0), block(2, 0), block(3, 10), block(4, 0), block(5, 0)];
    let scene = holding(Scene::new(Way::Shm).await, &empty).await;
    assert_eq!(ask(&scene, wanted(1..=2)).await.unwrap(), empty[..2]);
    assert_eq!(ask(&scene, wanted(1..=3)).await.unwrap(), empty[..3]);
    assert_eq!(ask(&scene, wanted(1..=5)).await.unwrap(), empty);
}

/// A holder that sends the given frames for any request.
async fn scripted_peer(said: Vec<Vec<u8>>) -> Scene {
    let mut scene = Scene::new(Way::Shm).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    scene.peer.kv_address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let welcome = Head { kind: WELCOME, body_bytes: 0, a: 0, b: 0, c: 0 };
        stream.write_all(&[preface_now(), frame(&welcome, &[])].concat()).await.unwrap();
        for one in said {
            stream.write_all(&one).await.unwrap();
        }
        let _ = stream.read_to_end(&mut Vec::new()).await;
    });
    scene
}

fn told(kind: u8, a: u32, c: u64, body: &[u8]) -> Vec<u8> {
    let body_bytes = u32::try_from(body.len()).unwrap();
    frame(&Head { kind, body_bytes, a, b: 0, c }, body)
}

fn held(blocks: &[(u128, u32)]) -> Vec<u8> {
    let one = |&(key, bytes): &(u128, u32)| {
        [&key.to_le_bytes()[..], &bytes.to_le_bytes(), &77_u64.to_le_bytes()].concat()
    };
    told(HELD, 0, 0, &blocks.iter().flat_map(one).collect::<Vec<u8>>())
}

#[tokio::test]
async fn what_a_holder_cannot_mean_ends_the_fetch() {
    let moved = |upto| told(MOVED, 0, upto, &[]);
    let cases = [
        (vec![held(&[])], Kind::Bug, "not wanted like this"),
        (vec![held(&[(2, 10)])], Kind::Bug, "not wanted like this"),
        (vec![held(&[(1, 10), (2, 10), (3, 10)])], Kind::Bug, "not wanted like this"),
        (vec![held(&[(1, u32::MAX)])], Kind::Bug, "over block_bytes"),
        (vec![held(&[(1, 10)]), held(&[(1, 10)])], Kind::Bug, "not wanted like this"),
        (vec![moved(1)], Kind::Bug, "not lent"),
        (vec![held(&[(1, 10)]), moved(0)], Kind::Bug, "no room for"),
        (vec![held(&[(1, 10)]), moved(1 << 40)], Kind::Bug, "no room for"),
        (vec![held(&[(1, 10)]), moved(11)], Kind::Corrupt, "does not match its checksum"),
        (vec![held(&[(1, 0), (2, 0)]), moved(1)], Kind::Corrupt, "does not match its checksum"),
        // The holder wrote nothing, so the window's bytes do not match the checksum that it reported.
        (vec![held(&[(1, 10)]), moved(10)], Kind::Corrupt, "does not match its checksum"),
        (vec![held(&[(1, 10)]), moved(9), told(END, 0, 1, &[])], Kind::Bug, "0 of 1 blocks came"),
        (vec![held(&[(1, 10)]), told(END, 0, 0, &[])], Kind::Bug, "0 of 1 blocks came"),
        (vec![told(HELD, 0, 0, &[1; 29])], Kind::Bug, "form of its kind"),
    ];
    for (said, kind, why) in cases {
        let scene = scripted_peer(said).await;
        let error = ask(&scene, wanted(1..=2)).await.unwrap_err();
        assert!(error.kind == kind && error.text.contains(why), "{why}: {error}");
        scene.unlent().await;
    }
}

/// An asker that wants a block, and sends the given bytes when the holder lists it.
async fn asker(scene: &Scene, answer: Option<Vec<u8>>) -> Vec<u8> {
    let mut stream = TcpStream::connect(scene.endpoint.address()).await.unwrap();
    let key = 1_u128.to_le_bytes();
    let want = Head { kind: WANT, body_bytes: 16, a: EPOCH, b: 2, c: 2_000 };
    stream.write_all(&[hello("there"), frame(&want, &key)].concat()).await.unwrap();
    let mut heard = vec![0; 16 + 40 + 40 + 28];
    stream.read_exact(&mut heard).await.unwrap();
    assert_eq!(heard[56], HELD);
    if let Some(answer) = answer {
        stream.write_all(&answer).await.unwrap();
    }
    stream.shutdown().await.unwrap();
    heard.clear();
    let read = tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut heard)).await;
    read.expect("the holder lets go of an asker that is of no use").unwrap();
    heard
}

#[tokio::test]
async fn an_asker_that_lends_nothing_sound_gets_the_reason() {
    let scene = holding(Scene::new(Way::Shm).await, &[block(1, 5_000)]).await;
    // A window at an address without a listener, and one of no bytes.
    let window = |bytes: u64| {
        let address = b"127.0.0.1:1";
        let mut body = vec![u8::try_from(address.len()).unwrap()];
        body.extend(address);
        for number in [1, 2, bytes] {
            body.extend(number.to_le_bytes());
        }
        body.extend([3, b't', b'c', b'p', 0, 0]);
        body
    };
    for (answer, why) in [
        (told(LENT, 0, 0, &window(5_000)), "transfer to 127.0.0.1:1"),
        (told(LENT, 0, 0, &window(0)), "a window of no bytes"),
        (told(LENT, 0, 0, &[]), "Lent frame"),
        (told(LENT, 0, 0, &[7; 3]), "form of its kind"),
        (told(END, 0, 0, &[]), "End frame"),
    ] {
        let heard = String::from_utf8_lossy(&asker(&scene, Some(answer)).await).into_owned();
        assert!(heard.contains(why), "{why}: {heard}");
    }
    asker(&scene, None).await;
    let stats = scene.endpoint.stats();
    assert_eq!((stats.serving_fetches, scene.endpoint.lent_bytes()), (0, 0));
}

#[tokio::test]
async fn an_asker_that_stops_waiting_leaves_nothing_lent() {
    let held = various(8, 500_000);
    let scene = holding(Scene::new(Way::Shm).await, &held).await;
    for wait_us in [50, 200, 500, 1_000, 2_000, 4_000, 8_000, 16_000] {
        let want = wanted(held.iter().map(|one| one.key));
        let fetching = ask(&scene, want);
        let _ = tokio::time::timeout(Duration::from_micros(wait_us), fetching).await;
        scene.unlent().await;
    }
    assert_eq!(ask(&scene, wanted(held.iter().map(|one| one.key))).await.unwrap(), held);
}
