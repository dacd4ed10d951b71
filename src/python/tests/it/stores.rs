//! The store: what goes in comes out or is a miss, whatever becomes of the servers.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use baton_objects::client::{Cluster, ClusterConfig, PutWords};
use baton_python::Failure;
use baton_python::raw::{Buffers, Span};
use baton_python::store::{Answer, GetMode, PutValue, Store};

use crate::scene::{ForeignMemory, ServedStore, offer};

const TIME_LIMIT: Duration = Duration::from_secs(30);

fn store(addresses: &str) -> Store {
    Store::open(addresses, "default").unwrap()
}

fn keys(count: usize) -> Vec<String> {
    (0..count).map(|n| format!("model@tp_rank:0@group:0@{n:064x}")).collect()
}

fn codes(answers: &[Answer]) -> Vec<i64> {
    answers
        .iter()
        .map(|a| a.as_ref().map_or_else(|f| f.code.into(), |n| i64::try_from(*n).unwrap()))
        .collect()
}

/// Memory with two spans for each key, of different lengths.
fn spans(buffers: &Buffers, held: &mut ForeignMemory, count: usize, sizes: [u64; 2]) -> Vec<Vec<Span>> {
    let each = sizes[0] + sizes[1];
    let base = held.address();
    let one = |n: usize| {
        let at = base + n as u64 * each;
        vec![buffers.span(at, sizes[0]).unwrap(), buffers.span(at + sizes[0], sizes[1]).unwrap()]
    };
    (0..count).map(one).collect()
}

#[test]
fn values_of_many_buffers_come_back_whole_in_one_batch() {
    let (one, two) = (ServedStore::start("127.0.0.1:0"), ServedStore::start("127.0.0.1:0"));
    let store = store(&format!("{}, {}", one.address, two.address));
    assert_eq!(store.reachable(), (2, 2));
    // Small ones are sent together, large ones by themselves.
    for (count, sizes) in [(300, [100, 37]), (40, [70_000, 33_000])] {
        let buffers = Buffers::default();
        let bytes = count * usize::try_from(sizes[0] + sizes[1]).unwrap();
        let (mut sent, mut got) = (ForeignMemory::new(bytes, 3), ForeignMemory::new(bytes, 200));
        offer(&buffers, &mut sent);
        offer(&buffers, &mut got);
        let keys: Vec<String> = keys(count).iter().map(|key| format!("{key}{bytes}")).collect();
        assert!(store.exist(&keys).iter().all(|found| *found == 0));
        let puts: Vec<PutValue<'_>> =
            spans(&buffers, &mut sent, count, sizes).into_iter().map(PutValue::Spans).collect();
        assert!(store.put(&keys, &puts).iter().all(Result::is_ok));
        assert!(store.put(&keys, &puts).iter().all(Result::is_ok), "what is there already is well");
        assert!(store.exist(&keys).iter().all(|found| *found == 1));
        let into = spans(&buffers, &mut got, count, sizes);
        let answers = store.get_into(&keys, &into, GetMode::Exact);
        assert!(codes(&answers).iter().all(|bytes| *bytes == i64::try_from(sizes[0] + sizes[1]).unwrap()));
        assert_eq!(sent.bytes(), got.bytes());
        assert!(codes(&store.sizes(&keys)).iter().all(|b| *b == i64::try_from(sizes[0] + sizes[1]).unwrap()));
    }
    assert!(one.store.stats().keys > 0 && two.store.stats().keys > 0, "both have some");
    assert_eq!(store.remove_all(), Ok(340));
    assert_eq!(store.remove_all(), Ok(0));
}

#[test]
fn what_does_not_fit_or_was_changed_is_a_miss() {
    let served = ServedStore::start("127.0.0.1:0");
    let store = store(&served.address);
    let buffers = Buffers::default();
    let mut room = ForeignMemory::new(64, 0);
    let at = room.address();
    offer(&buffers, &mut room);
    let into = |bytes: u64| vec![vec![buffers.span(at, bytes).unwrap()]];
    let key = vec!["k".to_owned()];
    assert_eq!(codes(&store.put(&key, &[PutValue::Bytes(b"twelve bytes")])), [0]);
    assert_eq!(store.get(&key), [Ok(b"twelve bytes".to_vec())]);
    let get = |bytes, takes| codes(&store.get_into(&key, &into(bytes), takes))[0];
    assert_eq!(get(12, GetMode::Exact), 12);
    assert_eq!(get(13, GetMode::Exact), i64::from(Failure::ABSENT));
    assert_eq!(get(13, GetMode::UpTo), 12);
    assert_eq!(get(11, GetMode::UpTo), i64::from(Failure::ARGUMENT));
    let long = vec!["k".repeat(2_000), String::new(), "k".to_owned()];
    let refused = i64::from(Failure::KEY);
    assert_eq!(codes(&store.sizes(&long)), [refused, refused, 12]);
    let puts = [PutValue::Bytes(b"x"), PutValue::Bytes(b"x"), PutValue::Bytes(b"x")];
    assert_eq!(codes(&store.put(&long, &puts)), [refused, refused, 0]);
}

#[test]
fn a_value_that_is_not_what_was_stored_is_refused_and_makes_room() {
    let served = ServedStore::start("127.0.0.1:0");
    let store = store(&served.address);
    let url = format!("redis://{}", served.address).parse().unwrap();
    let mut client = baton_objects::resp::client::Client::connect(&url, TIME_LIMIT).unwrap();
    let key = vec!["k".to_owned()];
    assert_eq!(codes(&store.put(&key, &[PutValue::Bytes(b"whole")])), [0]);
    let baton_objects::resp::client::Reply::Bulk(mut kept) = client.call(&[b"GET", b"k"]).unwrap() else {
        panic!("it was stored")
    };
    *kept.last_mut().unwrap() ^= 1;
    client.call(&[b"SET", b"k", &kept]).unwrap();
    assert_eq!(store.get(&key)[0].as_ref().unwrap_err().code, Failure::DAMAGED);
    assert_eq!(store.exist(&key), [0], "it is removed, so that a put can be");
    kept.truncate(26);
    client.call(&[b"SET", b"k", &kept]).unwrap();
    assert_eq!(store.get(&key)[0].as_ref().unwrap_err().code, Failure::DAMAGED);
    client.call(&[b"SET", b"k", b"of somebody else"]).unwrap();
    assert_eq!(store.get(&key)[0].as_ref().unwrap_err().code, Failure::ABSENT);
    assert_eq!(store.exist(&key), [1], "what is not ours is left alone");
}

#[test]
fn tenants_do_not_see_each_other() {
    let served = ServedStore::start("127.0.0.1:0");
    let (one, two) =
        (Store::open(&served.address, "one").unwrap(), Store::open(&served.address, "two").unwrap());
    let key = vec!["k".to_owned()];
    assert_eq!(codes(&one.put(&key, &[PutValue::Bytes(b"of one")])), [0]);
    assert_eq!(codes(&two.put(&key, &[PutValue::Bytes(b"of two")])), [0]);
    assert_eq!(one.get(&key), [Ok(b"of one".to_vec())]);
    assert_eq!(one.remove_all(), Ok(1));
    assert_eq!((one.exist(&key), two.exist(&key)), (vec![0], vec![1]));
    assert_eq!(codes(&two.remove(&key)), [0]);
    assert_eq!(codes(&two.remove(&key)), [i64::from(Failure::ABSENT)]);
}

#[test]
fn a_tenant_s_keys_are_where_the_other_clients_look_for_them() {
    let served: Vec<_> = (0..6).map(|_| ServedStore::start("127.0.0.1:0")).collect();
    let list =
        served.iter().map(|served| format!("redis://{}", served.address)).collect::<Vec<_>>().join(",");
    let mut cluster = Cluster::new(ClusterConfig::of(&list).unwrap()).unwrap();
    let keys = keys(100);
    for key in &keys {
        cluster.put(format!("one/{key}").as_bytes(), b"drained", &PutWords::default()).unwrap();
    }
    let found = Store::open(&list, "one").unwrap().exist(&keys);
    assert_eq!(found.iter().filter(|found| **found == 1).count(), keys.len());
}

#[test]
fn removing_a_tenant_s_values_leaves_no_part_of_an_object() {
    let served = ServedStore::start_with("127.0.0.1:0", Some("tp_rank=2".parse().unwrap()));
    let store = Store::open(&served.address, "one").unwrap();
    let key = |n: usize| format!("m@tp_rank:{}@pcp0@dcp0@pp_rank:0@group:0@{:x}", n / 2_000, n % 2_000);
    let keys: Vec<String> = (0..4_000).map(key).collect();
    let puts: Vec<PutValue<'_>> = keys.iter().map(|_| PutValue::Bytes(b"part")).collect();
    assert!(store.put(&keys, &puts).iter().all(Result::is_ok));
    assert_eq!(store.remove_all(), Ok(4_000));
    assert_eq!(served.store.stats().keys, 0);
}

/// A server that has three values of this login, one of another, and takes long to remove them.
fn slow_to_flush(takes: Duration) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let left = Arc::new(Mutex::new(4));
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let left = left.clone();
            std::thread::spawn(move || {
                let mut received = [0; 1_024];
                while let Ok(some @ 1..) = stream.read(&mut received) {
                    let asked = |verb: &[u8]| received[..some].windows(verb.len()).any(|word| word == verb);
                    let said = if asked(b"FLUSHDB") {
                        std::thread::sleep(takes);
                        *left.lock().unwrap() = 1;
                        "+OK\r\n".to_owned()
                    } else if asked(b"DBSIZE") {
                        format!(":{}\r\n", left.lock().unwrap())
                    } else {
                        "+PONG\r\n".to_owned()
                    };
                    if stream.write_all(said.as_bytes()).is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

#[test]
fn a_server_has_as_long_to_remove_everything_as_it_takes_itself() {
    assert_eq!(store(&slow_to_flush(Duration::from_secs(6))).remove_all(), Ok(3));
}

#[test]
fn a_peer_that_is_no_store_or_says_nothing_is_a_miss() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let store = store(&address);
    assert_eq!(store.reachable(), (0, 1));
    assert_eq!(store.exist(&keys(3)), [0, 0, 0]);
    assert!(store.remove_all().is_err());
    for (wrong, why) in [("", "host:port"), ("a:1,a:1", "twice")] {
        let failure = Store::open(wrong, "default").err().unwrap();
        assert!(failure.code == Failure::ARGUMENT && failure.text.contains(why), "{failure}");
    }
}

/// A server that answers pings, and of a value sends half at once and the rest when it may.
struct SlowServer {
    address: String,
    half_sent: mpsc::Receiver<()>,
    go: mpsc::Sender<()>,
}

impl SlowServer {
    fn start(value: Vec<u8>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let ((half_sent, is_half), (go, may)) = (mpsc::channel(), mpsc::channel());
        let (value, may) = (Arc::new(value), Arc::new(Mutex::new(may)));
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (value, half_sent, may) = (value.clone(), half_sent.clone(), may.clone());
                std::thread::spawn(move || Self::answer(stream, &value, &half_sent, &may));
            }
        });
        Self { address, half_sent: is_half, go }
    }

    fn answer(
        mut stream: TcpStream,
        value: &[u8],
        half_sent: &mpsc::Sender<()>,
        may: &Mutex<mpsc::Receiver<()>>,
    ) -> Option<()> {
        let mut received = [0; 1_024];
        while let Ok(some @ 1..) = stream.read(&mut received) {
            if !received[..some].windows(3).any(|word| word == b"GET") {
                stream.write_all(b"+PONG\r\n").ok()?;
                continue;
            }
            let (first, rest) = value.split_at(value.len() / 2);
            stream.write_all(format!("${}\r\n", value.len()).as_bytes()).ok()?;
            stream.write_all(first).ok()?;
            half_sent.send(()).ok()?;
            may.lock().unwrap().recv().ok()?;
            stream.write_all(rest).ok()?;
            stream.write_all(b"\r\n").ok()?;
        }
        Some(())
    }
}

/// A value as the package stores it, out of a real server.
fn as_stored(value: &[u8]) -> Vec<u8> {
    let served = ServedStore::start("127.0.0.1:0");
    assert_eq!(codes(&store(&served.address).put(&["k".to_owned()], &[PutValue::Bytes(value)])), [0]);
    let url = format!("redis://{}", served.address).parse().unwrap();
    let mut client = baton_objects::resp::client::Client::connect(&url, TIME_LIMIT).unwrap();
    match client.call(&[b"GET", b"k"]).unwrap() {
        baton_objects::resp::client::Reply::Bulk(stored) => stored,
        other => panic!("it was stored: {other:?}"),
    }
}

#[test]
fn unregistering_waits_for_a_get_and_memory_is_left_alone_after_it() {
    const BYTES: usize = 8 << 20;
    let slow = SlowServer::start(as_stored(&vec![b'A'; BYTES]));
    let store = store(&slow.address);
    let buffers = Buffers::default();
    let mut room = ForeignMemory::new(BYTES, 0);
    offer(&buffers, &mut room);
    let address = room.address();
    std::thread::scope(|scope| {
        let getting = scope.spawn(|| {
            let into = vec![vec![buffers.span(address, BYTES as u64).unwrap()]];
            codes(&store.get_into(&["k".to_owned()], &into, GetMode::Exact))
        });
        slow.half_sent.recv_timeout(TIME_LIMIT).unwrap();
        let code = |limit| buffers.unregister(address, limit).map_err(|failure| failure.code);
        assert_eq!(code(Duration::from_millis(1)), Err(Failure::IN_USE));
        assert_eq!(code(Duration::from_millis(1)), Err(Failure::IN_USE), "and still is");
        let leaving = scope.spawn(|| buffers.unregister(address, TIME_LIMIT));
        slow.go.send(()).unwrap();
        assert_eq!(leaving.join().unwrap(), Ok(()));
        assert_eq!(room.bytes(), vec![b'A'; BYTES], "the get had ended");
        room.fill(0x55);
        assert_eq!(getting.join().unwrap(), [i64::try_from(BYTES).unwrap()]);
        assert_eq!(room.bytes(), vec![0x55; BYTES], "nothing writes there any more");
    });
    assert_eq!(buffers.unregister(address, Duration::ZERO).unwrap_err().code, Failure::ARGUMENT);
}
