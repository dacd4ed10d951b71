//! Connections to the mover's endpoints from programs that are not peers, or from peers that misbehave: the
//! connection ends, and no other peer is harmed.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::time::Duration;

use baton_transports::mover::*;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::rigs::*;

const GREETING_BYTES: usize = 320;

/// A greeting as the protocol has it; `change` happens before the checksum.
fn greeting(epoch: u64, change: impl Fn(&mut [u8])) -> Vec<u8> {
    let mut record = vec![0; GREETING_BYTES];
    record[..4].copy_from_slice(b"BTNM");
    record[4] = 1;
    record[6] = 1;
    record[8..16].copy_from_slice(&epoch.to_le_bytes());
    change(&mut record);
    let sum = baton_transports::checksum(&record[..312]);
    record[312..].copy_from_slice(&sum.to_le_bytes());
    record
}

/// The head of a frame.
fn head(kind: u8, bytes: u32, window: u64) -> Vec<u8> {
    let mut head = vec![0; 32];
    head[0] = kind;
    head[4..8].copy_from_slice(&bytes.to_le_bytes());
    head[8..16].copy_from_slice(&window.to_le_bytes());
    let sum = baton_transports::checksum(&head[..28]);
    head[28..].copy_from_slice(&sum.to_le_bytes()[..4]);
    head
}

/// Says it and returns all that is answered until the connection ends.
fn say(address: &str, said: &[u8]) -> Vec<u8> {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(TIME_LIMIT)).unwrap();
    // The endpoint may close the connection before all is written.
    let _ = socket.write_all(said);
    let mut answer = Vec::new();
    match socket.read_to_end(&mut answer) {
        Ok(_) => answer,
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => answer,
        Err(error) => panic!("it was not closed: {error}"),
    }
}

#[test]
fn what_is_no_greeting_is_cut_off_and_named_where_it_can_be() {
    let node = Tcp::start(22, None);
    let address = node.peer.address.as_str();
    assert_eq!(say(address, b"GET / HTTP/1.1\r\n\r\n"), b"");
    assert_eq!(say(address, &[0; 5_000]), b"");
    let named = |said: &[u8], word: &str| {
        let answer = say(address, said);
        assert_eq!(answer.len(), GREETING_BYTES);
        assert!(String::from_utf8_lossy(&answer).contains(word), "{:?}", String::from_utf8_lossy(&answer));
    };
    named(&greeting(22, |record| record[4] = 9), "version 9");
    named(&greeting(22, |record| record[6] = 77), "purpose 77");
    named(&greeting(21, |_| {}), "epoch");
    let mut damaged = greeting(22, |_| {});
    damaged[100] ^= 1;
    named(&damaged, "damaged");
    node.transport.shutdown();
}

#[test]
fn a_peer_out_of_its_mind_harms_nobody() {
    let (here, there) = (Tcp::start(11, None), Tcp::start(22, None));
    let (local, theirs) = (Tcp::memory(1 << 16), Tcp::memory(1 << 16));
    local.write(0, &[1; 1 << 16]);
    let window = there.expose(&theirs, Grant::ReadWrite);
    here.transport.register(&local).unwrap();
    let mut way = here.open(1, &there.peer);
    let hello = greeting(22, |_| {});
    let id = window.window.0;
    let mad: [(&str, Vec<u8>); 8] = [
        ("no frame", vec![0xFF; 32]),
        ("an unknown kind", head(99, 0, 0)),
        ("what only a server sends", head(18, 8, 0)),
        ("an absurd write", head(1, u32::MAX, id)),
        ("an absurd read", head(2, u32::MAX, id)),
        ("an empty write", head(1, 0, id)),
        ("an absurd notice", head(3, 1 << 30, 0)),
        ("half a frame", head(1, 100, id)[..20].to_vec()),
    ];
    for (number, (what, frame)) in (0..).zip(mad) {
        let said = [hello.clone(), frame].concat();
        let mut socket = TcpStream::connect(&there.peer.address).unwrap();
        socket.set_read_timeout(Some(TIME_LIMIT)).unwrap();
        socket.write_all(&said).unwrap();
        if what == "half a frame" {
            drop(socket);
        } else {
            let mut answer = Vec::new();
            let ended = socket.read_to_end(&mut answer);
            let reset = |error: &std::io::Error| error.kind() == std::io::ErrorKind::ConnectionReset;
            assert!(ended.is_ok() || ended.as_ref().is_err_and(reset), "{what}: {ended:?}");
        }
        let good = slice(number, Direction::Write, &local, &window, 1 << 16);
        assert_eq!(way.one(Slice { verify: true, ..good }), Ok(()), "after {what}");
    }
    assert!(bytes_of(&theirs).iter().all(|byte| *byte == 1));
    assert_eq!(way.close().closed, Some(PathEnd::Fenced));
    here.transport.shutdown();
    there.transport.shutdown();
}

#[test]
fn a_fence_cuts_its_session_and_no_other() {
    let node = Tcp::start(22, None);
    let greet = |purpose: u8, session: u8| {
        let mut socket = TcpStream::connect(&node.peer.address).unwrap();
        socket.set_read_timeout(Some(TIME_LIMIT)).unwrap();
        let record = greeting(22, |record| {
            record[6] = purpose;
            record[24] = session;
        });
        socket.write_all(&record).unwrap();
        let mut answer = [0; GREETING_BYTES];
        socket.read_exact(&mut answer).unwrap();
        assert_eq!(answer[6], 3, "welcome");
        socket
    };
    let (lane, fence) = (1, 2);
    let (mut one, mut two, mut other) = (greet(lane, 7), greet(lane, 7), greet(lane, 8));
    greet(fence, 7);
    // They were cut before the answer came.
    for cut in [&mut one, &mut two] {
        cut.set_nonblocking(true).unwrap();
        assert_eq!(cut.read(&mut [0; 8]).unwrap(), 0);
    }
    other.write_all(&head(4, 0, 0)).unwrap();
    let mut answer = [0; 32];
    other.read_exact(&mut answer).unwrap();
    assert_eq!(answer[0], 16, "the probe is acknowledged");
    node.transport.shutdown();
}

#[test]
fn one_that_says_nothing_is_cut_off_in_time() {
    let node = Tcp::start(22, None);
    let mut silent = TcpStream::connect(&node.peer.address).unwrap();
    silent.set_read_timeout(Some(TIME_LIMIT)).unwrap();
    silent.write_all(&greeting(22, |_| {})[..100]).unwrap();
    assert_eq!(silent.read(&mut [0; 10]).unwrap(), 0);
    node.transport.shutdown();
}

#[test]
fn more_connections_than_allowed_are_refused_and_those_there_go_on() {
    let mut config = TcpConfig::new("127.0.0.1:0".parse().unwrap(), 22);
    config.connections_max = 1;
    let (exposure, inbox) = (Exposure::new(), std::sync::Arc::new(Inbox::default()));
    let there = TcpTransport::start(config, exposure, inbox).unwrap();
    let mut alone = TcpConfig::new("127.0.0.1:0".parse().unwrap(), 11);
    alone.fence_timeout_ms = 200;
    let here = TcpTransport::start(alone, Exposure::new(), std::sync::Arc::new(Inbox::default())).unwrap();
    let open = |id| {
        let queue = std::sync::Arc::new(CompletionQueue::default());
        here.open(PathId(id), &there.peer_id(), "net", queue.clone()).map(|path| (path, queue))
    };
    let (path, queue) = open(1).unwrap();
    assert!(matches!(open(2).err(), Some(Fault::Path(text)) if text.contains("connections_max")));
    path.probe(9);
    let mut came = Vec::new();
    queue.wait(&mut came, TIME_LIMIT);
    assert_eq!(came, [Completion::Notified { path: PathId(1), ticket: 9 }]);
}

fn local_socket(address: &str) -> OwnedFd {
    // The name that the machine has by default is empty.
    let sum = baton_transports::checksum(format!("\0{address}").as_bytes());
    let name = format!("baton-mover/{address}/{sum:016x}");
    let name = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    rustix::net::connect(&socket, &name).unwrap();
    rustix::net::sockopt::set_socket_timeout(
        &socket,
        rustix::net::sockopt::Timeout::Recv,
        Some(Duration::from_secs(20)),
    )
    .unwrap();
    socket
}

#[test]
fn who_calls_the_machine_something_else_is_not_found() {
    let started = |address: &str, machine: &str, epoch| {
        let config = ShmConfig { machine: machine.into(), ..ShmConfig::new(address, epoch) };
        ShmTransport::start(config, Exposure::new(), std::sync::Arc::new(Inbox::default())).unwrap()
    };
    let address = format!("127.0.0.1:{}", std::process::id());
    let peer = PeerId { address: address.clone(), epoch: 2 };
    let there = started(&address, "rack-7", 2);
    for (machine, found) in [("rack-7", true), ("rack-8", false), ("", false)] {
        let here = started(&format!("{address}/{machine}"), machine, 1);
        let queue = std::sync::Arc::new(CompletionQueue::default());
        let opened = here.open(PathId(1), &peer, "memory", queue);
        assert_eq!(opened.is_ok(), found, "{machine}: {:?}", opened.err());
        drop(opened);
        here.shutdown();
    }
    there.shutdown();
}

#[test]
fn strangers_on_the_local_socket_are_refused_by_name() {
    let (here, there) = (Shm::start(11, None), Shm::start(22, None));
    let (local, theirs) = (Shm::memory(1 << 16), Shm::memory(1 << 16));
    let window = there.expose(&theirs, Grant::ReadWrite);
    here.transport.register(&local).unwrap();
    let mut way = here.open(1, &there.peer);
    let packets = [
        (b"hello".to_vec(), "protocol"),
        (greeting(22, |record| record[4] = 9), "version 9"),
        (greeting(21, |_| {}), "epoch"),
        // It comes without the files of a path.
        (greeting(22, |_| {}), "path"),
    ];
    for (number, (packet, word)) in (0..).zip(packets) {
        let socket = local_socket(&there.peer.address);
        rustix::net::send(&socket, &packet, SendFlags::empty()).unwrap();
        let mut answer = [0; GREETING_BYTES];
        let (came, _) = rustix::net::recv(&socket, &mut answer, RecvFlags::empty()).unwrap();
        let answer = String::from_utf8_lossy(&answer[..came]).into_owned();
        assert!(answer.contains(word), "{answer:?}");
        let (end, _) = rustix::net::recv(&socket, &mut [0; 8], RecvFlags::empty()).unwrap();
        assert_eq!(end, 0, "it is closed");
        let good = slice(number, Direction::Write, &local, &window, 1 << 16);
        assert_eq!(way.one(good), Ok(()));
    }
    let silent = local_socket(&there.peer.address);
    let (end, _) = rustix::net::recv(&silent, &mut [0; 8], RecvFlags::empty()).unwrap();
    assert_eq!(end, 0, "one that says nothing is cut off in time");
    assert_eq!(way.close().closed, Some(PathEnd::Fenced));
    here.transport.shutdown();
    there.transport.shutdown();
}

#[test]
fn private_memory_is_refused_with_the_remedy() {
    let node = Shm::start(22, None);
    let private = Memory::private(4_096, Location::Anywhere).unwrap();
    let refused = node.transport.register(&private);
    assert!(matches!(refused, Err(Fault::Invalid(text)) if text.contains("Memory::shared")));
    node.transport.shutdown();
}

#[test]
fn tls_and_the_clear_do_not_mix() {
    let (clear, secret) = (Tcp::start(11, None), Tls::start(22, None));
    for (from, to) in [(&clear, &secret), (&secret, &clear)] {
        let queue = std::sync::Arc::new(CompletionQueue::default());
        let refused = from.transport.open(PathId(1), &to.peer, "net", queue);
        assert!(matches!(refused.err(), Some(Fault::Path(_) | Fault::Invalid(_) | Fault::Silent(_))));
    }
    let (more, queue) = (Tls::start(33, None), std::sync::Arc::new(CompletionQueue::default()));
    assert!(more.transport.open(PathId(1), &secret.peer, "net", queue).is_ok(), "it serves its own");
    for node in [clear, secret, more] {
        node.transport.shutdown();
    }
}
