//! The store: what goes in comes out or is a miss, whatever becomes of the servers.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use baton_python::Failure;
use baton_python::raw::{Buffers, Span};
use baton_python::store::{Answer, Put, Store, Taking};

use crate::scene::{Held, Served};

const PATIENCE: Duration = Duration::from_secs(30);

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
fn spans<'a>(buffers: &'a Buffers, held: &mut Held, count: usize, sizes: [u64; 2]) -> Vec<Vec<Span<'a>>> {
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
    let (one, two) = (Served::start("127.0.0.1:0"), Served::start("127.0.0.1:0"));
    let store = store(&format!("{}, {}", one.address, two.address));
    assert_eq!(store.reachable(), (2, 2));
    // Small ones are sent together, large ones by themselves.
    for (count, sizes) in [(300, [100, 37]), (40, [70_000, 33_000])] {
        let buffers = Buffers::default();
        let bytes = count * usize::try_from(sizes[0] + sizes[1]).unwrap();
        let (mut sent, mut got) = (Held::new(bytes, 3), Held::new(bytes, 200));
        buffers.register(sent.address(), sent.len()).unwrap();
        buffers.register(got.address(), got.len()).unwrap();
        let keys: Vec<String> = keys(count).iter().map(|key| format!("{key}{bytes}")).collect();
        assert!(store.exist(&keys).iter().all(|found| *found == 0));
        let puts: Vec<Put<'_>> =
            spans(&buffers, &mut sent, count, sizes).into_iter().map(Put::Spans).collect();
        assert!(store.put(&keys, &puts).iter().all(Result::is_ok));
        assert!(store.put(&keys, &puts).iter().all(Result::is_ok), "what is there already is well");
        assert!(store.exist(&keys).iter().all(|found| *found == 1));
        let into = spans(&buffers, &mut got, count, sizes);
        let answers = store.get_into(&keys, &into, Taking::Exact);
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
    let served = Served::start("127.0.0.1:0");
    let store = store(&served.address);
    let buffers = Buffers::default();
    let mut room = Held::new(64, 0);
    let at = room.address();
    buffers.register(at, room.len()).unwrap();
    let into = |bytes: u64| vec![vec![buffers.span(at, bytes).unwrap()]];
    let key = vec!["k".to_owned()];
    assert_eq!(codes(&store.put(&key, &[Put::Bytes(b"twelve bytes")])), [0]);
    assert_eq!(store.get(&key), [Ok(b"twelve bytes".to_vec())]);
    let get = |bytes, takes| codes(&store.get_into(&key, &into(bytes), takes))[0];
    assert_eq!(get(12, Taking::Exact), 12);
    assert_eq!(get(13, Taking::Exact), i64::from(Failure::ABSENT));
    assert_eq!(get(13, Taking::UpTo), 12);
    assert_eq!(get(11, Taking::UpTo), i64::from(Failure::ARGUMENT));
    let long = vec!["k".repeat(2_000), String::new(), "k".to_owned()];
    let refused = i64::from(Failure::KEY);
    assert_eq!(codes(&store.sizes(&long)), [refused, refused, 12]);
    let puts = [Put::Bytes(b"x"), Put::Bytes(b"x"), Put::Bytes(b"x")];
    assert_eq!(codes(&store.put(&long, &puts)), [refused, refused, 0]);
}

#[test]
fn a_value_that_is_not_what_was_stored_is_refused_and_makes_room() {
    let served = Served::start("127.0.0.1:0");
    let store = store(&served.address);
    let url = format!("redis://{}", served.address).parse().unwrap();
    let mut client = baton_objects::resp::client::Client::connect(&url, PATIENCE).unwrap();
    let key = vec!["k".to_owned()];
    assert_eq!(codes(&store.put(&key, &[Put::Bytes(b"whole")])), [0]);
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
    let served = Served::start("127.0.0.1:0");
    let (one, two) =
        (Store::open(&served.address, "one").unwrap(), Store::open(&served.address, "two").unwrap());
    let key = vec!["k".to_owned()];
    assert_eq!(codes(&one.put(&key, &[Put::Bytes(b"of one")])), [0]);
    assert_eq!(codes(&two.put(&key, &[Put::Bytes(b"of two")])), [0]);
    assert_eq!(one.get(&key), [Ok(b"of one".to_vec())]);
    assert_eq!(one.remove_all(), Ok(1));
    assert_eq!((one.exist(&key), two.exist(&key)), (vec![0], vec![1]));
    assert_eq!(codes(&two.remove(&key)), [0]);
    assert_eq!(codes(&two.remove(&key)), [i64::from(Failure::ABSENT)]);
}

#[test]
fn a_store_that_is_killed_is_misses_and_is_found_again_when_it_is_back() {
    let (mut dies, lives) = (Served::start("127.0.0.1:0"), Served::start("127.0.0.1:0"));
    let store = store(&format!("{},{}", dies.address, lives.address));
    let keys = keys(64);
    let put = || {
        let value = [7_u8; 1_000];
        codes(&store.put(&keys, &vec![Put::Bytes(&value); keys.len()]))
    };
    assert!(put().iter().all(|code| *code == 0));
    let theirs = usize::try_from(lives.store.stats().keys).unwrap();
    assert!((1..64).contains(&theirs));
    dies.kill();
    let there = || store.exist(&keys).iter().filter(|found| **found == 1).count();
    assert_eq!(there(), theirs, "those of the other are misses");
    let got = store.get(&keys);
    assert_eq!(got.iter().filter(|got| got.is_ok()).count(), theirs);
    assert!(got.iter().flat_map(|got| got.as_ref().err()).all(|failure| failure.code == Failure::SERVER));
    assert_eq!(put().iter().filter(|code| **code == 0).count(), theirs);
    assert_eq!(store.reachable(), (1, 2));
    let back = Served::start(&dies.address);
    let limit = Instant::now() + PATIENCE;
    while put().iter().any(|code| *code != 0) {
        assert!(Instant::now() < limit, "a store that is back is used");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(there(), 64);
    drop(back);
}

#[test]
fn whoever_is_no_store_or_says_nothing_is_a_miss() {
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
