//! Memory published by address: a directory gets an answer, learns of every change, and cannot harm the publisher.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use baton_transports::mover::published::*;
use baton_transports::mover::*;

use crate::rigs::TIME_LIMIT;

fn publisher(config: impl FnOnce(&mut PublisherConfig), epoch: u64, port: u16) -> Publisher {
    let mut settings = PublisherConfig::new(SocketAddr::from(([127, 0, 0, 1], port)));
    config(&mut settings);
    Publisher::start(settings, PeerId { address: "10.0.0.1:7000".into(), epoch }).unwrap()
}

fn segment(window: u64, bytes: u64) -> RemoteSegment {
    RemoteSegment { window: WindowId(window), bytes, access: vec![("tcp".into(), vec![1, 2])] }
}

fn name(publisher: &Publisher) -> String {
    format!("127.0.0.1:{}", publisher.port())
}

/// Asks until the answer is as expected: another thread publishes the changes.
fn until(directory: &Directory, name: &str, good: impl Fn(&DirectoryAnswer) -> bool) -> DirectoryAnswer {
    let limit = Instant::now() + TIME_LIMIT;
    loop {
        let found = directory.look(name).unwrap();
        if good(&found) {
            return found;
        }
        assert!(Instant::now() < limit, "it was never told: {found:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_address_is_found_where_it_is_published_and_nowhere_else() {
    let publisher = publisher(|_| {}, 9, 0);
    publisher.publish(0x1000, segment(1, 0x1000)).unwrap();
    publisher.publish(0x2000, segment(2, 0x800)).unwrap();
    for (at, bytes) in [(0x1fff, 1), (0xfff, 2), (0x27ff, 5), (0, 0x9000), (5, 0), (u64::MAX, 2)] {
        assert!(publisher.publish(at, segment(3, bytes)).is_err(), "{at:#x}, {bytes}");
    }
    assert_eq!(publisher.ranges(), 2);
    let found = Directory::new(DirectoryConfig::default()).look(&name(&publisher)).unwrap();
    assert_eq!(found.published.peer, PeerId { address: "10.0.0.1:7000".into(), epoch: 9 });
    assert_eq!((found.ended, found.published.first()), (None, Some(0x1000)));
    let place = found.published.find(0x2700).unwrap();
    assert_eq!((place.segment.as_ref(), place.at, place.bytes), (&segment(2, 0x800), 0x700, 0x100));
    for outside in [0xfff, 0x2800, u64::MAX] {
        assert!(found.published.find(outside).is_none(), "{outside:#x}");
    }
}

#[test]
fn a_peer_that_had_the_answer_asks_anew_after_a_change_and_only_then() {
    let publisher = publisher(|_| {}, 9, 0);
    let directory = Directory::new(DirectoryConfig::default());
    publisher.publish(0x1000, segment(1, 8)).unwrap();
    let first = directory.look(&name(&publisher)).unwrap().published;
    let again = directory.look(&name(&publisher)).unwrap().published;
    assert!(std::sync::Arc::ptr_eq(&first, &again), "what stands is not asked for twice");
    publisher.publish(0x2000, segment(2, 8)).unwrap();
    until(&directory, &name(&publisher), |found| found.published.find(0x2000).is_some());
    assert_eq!(publisher.withdraw(0x1000), Some(segment(1, 8)));
    assert_eq!(publisher.withdraw(0x1000), None);
    until(&directory, &name(&publisher), |found| found.published.find(0x1000).is_none());
    directory.forget(&name(&publisher));
    assert!(directory.look(&name(&publisher)).unwrap().published.find(0x2000).is_some());
}

#[test]
fn another_life_at_the_same_name_ends_the_one_before() {
    let first = publisher(|_| {}, 1, 0);
    let (port, name) = (first.port(), name(&first));
    first.publish(0x1000, segment(1, 8)).unwrap();
    let directory = Directory::new(DirectoryConfig::default());
    let life = directory.look(&name).unwrap().published.peer.clone();
    drop(first);
    let limit = Instant::now() + TIME_LIMIT;
    while directory.look(&name).is_ok() {
        assert!(Instant::now() < limit, "a publisher that has gone is not believed");
    }
    let second = publisher(|_| {}, 2, port);
    let found = until(&directory, &name, |_| true);
    assert_eq!(found.ended, Some(life));
    assert_eq!(found.published.peer.epoch, 2);
    assert!(found.published.find(0x1000).is_none());
    drop(second);
}

#[test]
fn strangers_are_cut_off_and_one_too_many_is_told_so() {
    let publisher = publisher(
        |config| {
            config.watchers_max = 2;
            config.time_limit = Duration::from_millis(200);
        },
        9,
        0,
    );
    let address = name(&publisher);
    let ends = |said: &[u8]| {
        let mut socket = TcpStream::connect(&address).unwrap();
        socket.set_read_timeout(Some(TIME_LIMIT)).unwrap();
        let _ = socket.write_all(said);
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer);
        answer
    };
    assert_eq!(ends(b"GET / HTTP/1.1\r\n\r\n"), b"");
    assert_eq!(ends(b"BTNM"), b"", "silence ends by itself");
    assert!(String::from_utf8_lossy(&ends(&[b"BTNM".as_slice(), &[9; 316]].concat())).contains("version"));
    let directory = || Directory::new(DirectoryConfig::default());
    let (one, two) = (directory(), directory());
    until(&one, &address, |_| true);
    until(&two, &address, |_| true);
    let refused = format!("{:?}", directory().look(&address).unwrap_err());
    assert!(refused.contains("watchers_max"), "{refused}");
    drop(one);
    let limit = Instant::now() + TIME_LIMIT;
    while directory().look(&address).is_err() {
        assert!(Instant::now() < limit, "a place that is free again is given again");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn what_is_no_publisher_is_named() {
    let directory = Directory::new(DirectoryConfig { time_limit: Duration::from_millis(300), names_max: 1 });
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let name = silent.local_addr().unwrap().to_string();
    assert!(matches!(directory.look(&name), Err(Fault::Silent(_))));
    let talks = std::thread::spawn(move || {
        silent.accept().map(drop).unwrap();
        let (mut socket, _) = silent.accept().unwrap();
        socket.write_all(&[b'x'; 400]).unwrap();
        let _ = socket.read(&mut [0; 400]);
    });
    let told = directory.look(&name);
    talks.join().unwrap();
    assert!(matches!(&told, Err(Fault::Invalid(text)) if text.contains("protocol")), "{told:?}");
    assert!(matches!(directory.look("127.0.0.1:1"), Err(Fault::Path(_))));
    assert!(matches!(directory.look("nonsense"), Err(Fault::Path(_))));
}
