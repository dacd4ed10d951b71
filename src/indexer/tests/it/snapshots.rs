//! Snapshots: to disk and back, to a peer, and those that are refused.

use std::sync::Arc;

use tokio::io::AsyncReadExt as _;

use baton_events::Publisher;
use baton_indexer::snapshot::{Reader, footer, header};
use baton_indexer::{Indexer, Kind, ServerSettings, join};

use crate::engine::{Engine, ServedIndexer, indexer, publisher, served, settings};

/// An indexer that knows one engine, and what it gives as a snapshot.
async fn known(engine: &mut Engine, publisher: &Publisher) -> (ServedIndexer, Vec<u8>) {
    let served = indexer().await;
    served.register(publisher, publisher.endpoint(), "i").await;
    let last = engine.announce(publisher, 60).await;
    served.reach("i", last, |_| true).await;
    let path = tempfile::tempdir().unwrap().keep().join("index");
    assert_eq!(served.indexer.save(&path).unwrap(), 1);
    let bytes = std::fs::read(&path).unwrap();
    // Somebody else's temporary file: a snapshot's own has its whole name in it.
    std::fs::create_dir(path.with_extension("partial")).unwrap();
    assert_eq!(served.indexer.save(&path.with_extension("other")).unwrap(), 1);
    std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
    (served, bytes)
}

/// A new indexer that reads a file of these bytes.
async fn read(bytes: &[u8]) -> (ServedIndexer, Result<(u64, u64), baton_indexer::IndexerError>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("index");
    std::fs::write(&path, bytes).unwrap();
    let indexer = Indexer::new(settings());
    let outcome = indexer.load(&path);
    (served(indexer, ServerSettings::default()).await, outcome)
}

#[tokio::test]
async fn a_warm_start_knows_at_once_and_follows_on() {
    let (publisher, mut engine) = (publisher().await, Engine::new(11));
    let (before, bytes) = known(&mut engine, &publisher).await;
    drop(before);
    let (warm, outcome) = read(&bytes).await;
    let (streams, blocks) = outcome.unwrap();
    assert_eq!(streams, 1);
    assert!(blocks > 20);
    engine.agrees(&warm, "i").await;
    let last = engine.announce(&publisher, 60).await;
    warm.reach("i", last, |one| one["confirmed"] == true).await;
    engine.agrees(&warm, "i").await;
    assert_eq!(warm.get("/services").await["services"][0]["counts"]["unknown_removed"], 0);
}

#[tokio::test]
async fn a_snapshot_of_another_life_is_void() {
    let (publisher, mut engine) = (publisher().await, Engine::new(12));
    let (before, bytes) = known(&mut engine, &publisher).await;
    let place = (publisher.endpoint().to_owned(), publisher.replay_endpoint().map(str::to_owned));
    drop((before, publisher));
    let mut engine = Engine::new(13);
    let publisher = loop {
        match Publisher::bind(baton_events::PublisherConfig::new(place.0.clone(), place.1.clone())).await {
            Ok(publisher) => break publisher,
            Err(_) => tokio::time::sleep(std::time::Duration::from_millis(5)).await,
        }
    };
    let last = engine.announce(&publisher, 20).await;
    let (warm, outcome) = read(&bytes).await;
    outcome.unwrap();
    warm.reach("i", last, |one| one["confirmed"] == true).await;
    engine.agrees(&warm, "i").await;
}

#[tokio::test]
async fn a_peer_joins_and_follows() {
    let (publisher, mut engine) = (publisher().await, Engine::new(14));
    let (first, _) = known(&mut engine, &publisher).await;
    let second = indexer().await;
    let (streams, blocks) = join(&second.indexer, &format!("http://{}", first.address)).await.unwrap();
    assert!(streams == 1 && blocks > 20);
    engine.agrees(&second, "i").await;
    let last = engine.announce(&publisher, 30).await;
    second.reach("i", last, |_| true).await;
    engine.agrees(&second, "i").await;
    let after: String = b"i|default|0".iter().map(|byte| format!("{byte:02x}")).collect();
    let (status, head, _) = first.send("GET", &format!("/snapshot?after={after}"), b"").await;
    assert!(status == 200 && head.contains("transfer-encoding: chunked"), "{head}");
    assert_eq!(join(&second.indexer, "ftp://x").await.unwrap_err().kind, Kind::Invalid);
}

#[tokio::test]
async fn bytes_that_are_no_whole_snapshot_of_ours_are_refused_by_name() {
    let (publisher, mut engine) = (publisher().await, Engine::new(15));
    let (_served, bytes) = known(&mut engine, &publisher).await;
    let changed = |at: usize, to: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = to;
        bytes
    };
    let more = [bytes.as_slice(), b"x"].concat();
    let miscounted = [&header(0)[..], &footer(3)].concat();
    let middle = bytes.len() / 2;
    for (bytes, word) in [
        (bytes[..middle].to_vec(), "truncated"),
        (bytes[..bytes.len() - 1].to_vec(), "truncated"),
        (Vec::new(), "truncated"),
        (changed(0, b'X'), "foreign"),
        (changed(8, 2), "newer"),
        (changed(8, 0), "older"),
        (changed(12, 9), "foreign"),
        (changed(20, 77), "corrupt"),
        (changed(27, 255), "corrupt"),
        (changed(middle, !bytes[middle]), "corrupt"),
        (more, "corrupt"),
        (miscounted, "corrupt"),
    ] {
        let error = read(&bytes).await.1.unwrap_err();
        assert!(error.message.contains(&format!("snapshot: {word}")), "{word}: {error}");
    }
}

#[tokio::test]
async fn a_snapshot_may_come_in_any_pieces() {
    let (publisher, mut engine) = (publisher().await, Engine::new(16));
    let (_served, bytes) = known(&mut engine, &publisher).await;
    let indexer = Indexer::new(settings());
    let mut reader = Reader::new(0);
    for piece in bytes.chunks(7) {
        reader.push(piece);
        while let Some(section) = reader.next_section().unwrap() {
            assert!(indexer.adopt(section).unwrap());
        }
    }
    reader.finish().unwrap();
    engine.agrees(&served(Arc::clone(&indexer), ServerSettings::default()).await, "i").await;
}

/// In front of a peer: its first answer breaks off after so many bytes.
async fn breaking(upstream: String, after_bytes: usize) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        let mut left = after_bytes;
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = tokio::net::TcpStream::connect(&upstream).await.unwrap();
            let (mut from, mut to) = server.split();
            let (mut asks, mut hears) = client.split();
            let mut limited = (&mut from).take(left as u64);
            tokio::select! {
                _ = tokio::io::copy(&mut limited, &mut hears) => {}
                _ = tokio::io::copy(&mut asks, &mut to) => {}
            }
            left = usize::MAX;
        }
    });
    address
}

#[tokio::test]
async fn a_join_that_breaks_off_goes_on_after_the_last_whole_stream() {
    let (one, two) = (publisher().await, publisher().await);
    let mut engines = [Engine::new(17), Engine::new(18)];
    let first = indexer().await;
    for (at, (publisher, instance)) in [(&one, "a"), (&two, "b")].into_iter().enumerate() {
        first.register(publisher, publisher.endpoint(), instance).await;
        let last = engines[at].announce(publisher, 60).await;
        first.reach(instance, last, |_| true).await;
    }
    let (_, _, whole) = first.send("GET", "/snapshot", b"").await;
    let proxy = breaking(first.address.clone(), whole.len() * 3 / 4).await;
    let second = indexer().await;
    let (streams, _) = join(&second.indexer, &format!("http://{proxy}")).await.unwrap();
    assert_eq!(streams, 2, "each once, the broken one from the second answer");
    engines[0].agrees(&second, "a").await;
    engines[1].agrees(&second, "b").await;
}
