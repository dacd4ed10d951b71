//! Ranges of segments, with owners that are honest and owners that are not.

use std::time::Duration;

use baton_mooncake::data::{Action, Request, Status};
use baton_mooncake::{DataClient, DataSettings, DataTimes, Kind, OpenSegment, Way};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::peers::{Owner, nobody, says};

/// Short enough for a test, long enough for a busy machine to send a few bytes.
const QUICK: DataTimes = DataTimes { connect_us: 2_000_000, quiet_us: 300_000 };

fn data_port(segment: &OpenSegment) -> String {
    format!("127.0.0.1:{}", segment.meta().data_port)
}

#[tokio::test]
async fn bytes_are_written_and_read_back_over_one_connection() {
    let owner = Owner::start(4 << 20).await;
    let mut segment =
        OpenSegment::open(&owner.endpoint, &Way::Handshake, DataTimes::default()).await.unwrap();
    let base = owner.region.base();
    for (offset, count) in [(0, 1), (5, 4096), (100_000, 3 << 20), ((4 << 20) - 1, 1)] {
        let bytes: Vec<u8> = (0..count).map(|i: usize| (i * 7 + offset as usize) as u8).collect();
        segment.write(base + offset, &bytes).await.unwrap();
        let mut back = vec![0; bytes.len()];
        segment.read(base + offset, &mut back).await.unwrap();
        assert!(back == bytes, "{count} bytes at {offset}");
    }
}

#[tokio::test]
async fn ranges_outside_are_refused_by_both_sides() {
    let owner = Owner::start(1000).await;
    let base = owner.region.base();
    let mut segment = OpenSegment::open(&owner.endpoint, &Way::Handshake, QUICK).await.unwrap();
    for (address, count) in [(base - 1, 1), (base + 1000, 1), (base + 999, 2), (base, 1001)] {
        let mut into = vec![0; count];
        assert_eq!(segment.read(address, &mut into).await.unwrap_err().kind, Kind::Invalid);
        assert_eq!(segment.write(address, &into).await.unwrap_err().kind, Kind::Invalid);
        // Without our own look at it, the owner says the same.
        let mut plain = DataClient::connect(&data_port(&segment), QUICK).await.unwrap();
        assert_eq!(plain.read(address, &mut into).await.unwrap_err().kind, Kind::Invalid);
        assert_eq!(
            plain.read(base, &mut into[..1]).await.unwrap_err().kind,
            Kind::Unavailable,
            "it is spent"
        );
        let mut plain = DataClient::connect(&data_port(&segment), QUICK).await.unwrap();
        assert_eq!(plain.write(address, &into).await.unwrap_err().kind, Kind::Invalid);
    }
    segment.write(base, &[1; 1000]).await.unwrap();
}

#[tokio::test]
async fn who_asks_in_the_first_version_is_served_without_statuses() {
    let owner = Owner::start(1000).await;
    let base = owner.region.base();
    let segment = OpenSegment::open(&owner.endpoint, &Way::Handshake, QUICK).await.unwrap();
    let mut stream = TcpStream::connect(data_port(&segment)).await.unwrap();
    for (action, after) in [(Action::Write, &b"four"[..]), (Action::Read, &[])] {
        let head = Request { action, address: base, bytes: 4, wants_status: false }.encode();
        stream.write_all(&[&head[..], after].concat()).await.unwrap();
    }
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes).await.unwrap();
    assert_eq!(&bytes, b"four");
    let outside = Request { action: Action::Read, address: 1, bytes: 4, wants_status: false };
    stream.write_all(&outside.encode()).await.unwrap();
    assert_eq!(stream.read(&mut bytes).await.unwrap(), 0, "it is closed, and no byte is given");
}

#[tokio::test]
async fn a_write_that_stands_still_loses_its_connection() {
    let settings = DataSettings { quiet_us: 100_000, ..Default::default() };
    let owner = Owner::with(1000, |_| {}, settings).await;
    let segment = OpenSegment::open(&owner.endpoint, &Way::Handshake, QUICK).await.unwrap();
    let mut stream = TcpStream::connect(data_port(&segment)).await.unwrap();
    let head = Request { action: Action::Write, address: owner.region.base(), bytes: 4, wants_status: true }
        .encode();
    stream.write_all(&head).await.unwrap();
    stream.write_all(&[1, 2]).await.unwrap();
    let mut answer = Vec::new();
    tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut answer)).await.unwrap().unwrap();
    assert!(answer.is_empty(), "half a write is not acknowledged");
}

#[tokio::test]
async fn more_connections_than_places_wait_and_are_served_later() {
    let settings = DataSettings { max_connections: 1, ..Default::default() };
    let owner = Owner::with(1000, |_| {}, settings).await;
    let mut first = OpenSegment::open(&owner.endpoint, &Way::Handshake, DataTimes::default()).await.unwrap();
    let port = data_port(&first);
    let base = owner.region.base();
    let (connected, is_connected) = tokio::sync::oneshot::channel();
    let waiting = tokio::spawn(async move {
        let mut second = DataClient::connect(&port, DataTimes::default()).await.unwrap();
        connected.send(()).unwrap();
        second.write(base, &[9]).await
    });
    is_connected.await.unwrap();
    // The one that has the place is served many times, which would be time enough to serve the other once.
    for _ in 0..300 {
        first.write(base, &[8]).await.unwrap();
    }
    assert!(!waiting.is_finished());
    drop(first);
    waiting.await.unwrap().unwrap();
}

#[tokio::test]
async fn owners_that_lie_or_are_silent_are_told_apart() {
    let wants_status = |kind: Kind, status: Vec<u8>, close: bool| async move {
        let mut client = DataClient::connect(&says(status, close).await, QUICK).await.unwrap();
        let mut byte = [0; 1];
        assert_eq!(client.read(1, &mut byte).await.unwrap_err().kind, kind);
        assert_eq!(client.read(1, &mut byte).await.unwrap_err().kind, Kind::Unavailable, "it is spent");
    };
    wants_status(Kind::Corrupt, b"payload of version one".to_vec(), false).await;
    wants_status(Kind::Corrupt, Status::Other(77).encode().to_vec(), false).await;
    wants_status(Kind::Unavailable, vec![1, 2, 3], true).await;
    wants_status(Kind::Unavailable, Vec::new(), false).await;
    wants_status(Kind::Unavailable, Status::Done.encode().to_vec(), true).await;
    let mut written = DataClient::connect(&says(Vec::new(), false).await, QUICK).await.unwrap();
    let silent = written.write(1, &[0; 10]).await.unwrap_err();
    assert!(silent.to_string().contains("300 ms"), "{silent}");
    let gone = DataClient::connect(&nobody().await, QUICK).await.map(drop).unwrap_err();
    assert!(gone.to_string().contains("owner running"), "{gone}");
}

#[tokio::test]
async fn segments_that_lie_about_their_place_are_told() {
    let owner = Owner::with(1000, |meta| meta.buffers[0].bytes = 1 << 40, DataSettings::default()).await;
    let mut segment = OpenSegment::open(&owner.endpoint, &Way::Handshake, QUICK).await.unwrap();
    let refused = segment.write(owner.region.base() + 5000, &[1]).await.unwrap_err();
    assert_eq!(refused.kind, Kind::Invalid, "{refused}");
    let port: u16 = nobody().await.rsplit_once(':').unwrap().1.parse().unwrap();
    let owner = Owner::with(1000, |meta| meta.data_port = port, DataSettings::default()).await;
    let refused = OpenSegment::open(&owner.endpoint, &Way::Handshake, QUICK).await.map(drop).unwrap_err();
    assert_eq!(refused.kind, Kind::Unavailable, "{refused}");
}
