//! Bounds of a client's demands on the server: pipelines, buffers, places, time.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::resp::{TestServer, bulk, error_of, ok, serve, served, words};
use super::{content, key, pass};
use baton_http::Identity;
use baton_objects::resp::client::{Client, Reply, Url};
use baton_objects::resp::{Login, RespConfig};
use baton_objects::{AdmissionRule, Clock, LowerConfig, ObjectStore, SsdConfig, StoreConfig};

fn config(mib: u64) -> StoreConfig {
    StoreConfig { capacity_bytes: mib << 20, value_max_bytes: (mib << 20) / 4, ..StoreConfig::default() }
}

/// Waits until something is so.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Writes all of a pipeline before it reads the first answer, as clients of Redis do.
fn pipeline(served: &TestServer, all: &[u8], answer: &[u8]) {
    let mut stream = served.raw();
    stream.set_write_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(all).unwrap();
    let mut got = vec![0; answer.len()];
    stream.read_exact(&mut got).unwrap();
    assert!(got == answer, "answers are those of the commands, in order");
}

fn set(name: &str, value: &[u8]) -> Vec<u8> {
    let head = format!("*3\r\n$3\r\nSET\r\n${}\r\n{name}\r\n${}\r\n", name.len(), value.len());
    [head.as_bytes(), value, b"\r\n"].concat()
}

fn answer_of(value: &[u8]) -> Vec<u8> {
    [format!("${}\r\n", value.len()).as_bytes(), value, b"\r\n"].concat()
}

#[test]
fn a_pipeline_may_be_much_larger_than_the_sockets_hold() {
    let served = served(&config(256), RespConfig::default());
    let (mut all, mut answer) = (Vec::new(), Vec::new());
    for n in 0..64 {
        let value = content(n, 1 << 20);
        all.extend(set(&format!("k{n}"), &value));
        all.extend(format!("GET k{n}\r\n").into_bytes());
        answer.extend_from_slice(b"+OK\r\n");
        answer.extend(answer_of(&value));
    }
    pipeline(&served, &all, &answer);
    let (one, two) = (content(100, 16 << 20), content(101, 16 << 20));
    pipeline(&served, &set("a", &one), b"+OK\r\n");
    let all = [b"GET a\r\n".to_vec(), set("b", &two), b"GET b\r\n".to_vec(), set("a", &two)].concat();
    let answer = [answer_of(&one), b"+OK\r\n".to_vec(), answer_of(&two), b"+OK\r\n".to_vec()].concat();
    pipeline(&served, &all, &answer);
    // Many small ones: their answers are copied.
    pipeline(&served, &b"GET none\r\n".repeat(100_000), &b"$-1\r\n".repeat(100_000));
    let small = content(1, 1_000);
    pipeline(&served, &set("s", &small), b"+OK\r\n");
    pipeline(&served, &b"GET s\r\n".repeat(12_000), &answer_of(&small).repeat(12_000));
    until("nothing is kept after the answers", || served.server.stats().buffered_bytes == 0);
    assert_eq!(served.server.stats().cut_unread, 0);
}

#[test]
fn clients_may_speak_tls_and_those_that_do_not_are_sent_away() {
    let dir = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let (certificate, private) = (dir.path().join("c.pem"), dir.path().join("k.pem"));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&private, made.signing_key.serialize_pem()).unwrap();
    let tls = Some(Identity::of_files(&certificate, &private).unwrap());
    let resp = RespConfig { tls, time_limit_us: 2_000_000, ..RespConfig::default() };
    let served = served(&config(64), resp);
    let mut roots = rustls::RootCertStore::empty();
    roots.add(made.cert.der().clone()).unwrap();
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let client = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = "localhost".try_into().unwrap();
    let session = rustls::ClientConnection::new(std::sync::Arc::new(client), name).unwrap();
    let mut stream = rustls::StreamOwned::new(session, served.raw());
    let value = content(3, 9 << 20);
    let all = [set("k", &value), b"GET k\r\nGET none\r\nQUIT\r\n".to_vec()].concat();
    stream.write_all(&all).unwrap();
    let mut got = Vec::new();
    stream.read_to_end(&mut got).unwrap();
    let expected = [b"+OK\r\n".to_vec(), answer_of(&value), b"$-1\r\n+OK\r\n".to_vec()].concat();
    assert!(got == expected, "the end is proven, too: a stream that is cut gives an error");
    // As the client of this crate does it: large values both ways, more than one in a flush.
    let ca = dir.path().join("ca.pem");
    std::fs::write(&ca, made.cert.pem()).unwrap();
    let port = served.address.port();
    let url = |host: &str, ca: &std::path::Path| {
        format!("rediss://{host}:{port}?ssl_ca_certs={}", ca.display()).parse::<Url>().unwrap()
    };
    let time_limit = Duration::from_secs(20);
    let mut client = Client::connect(&url("localhost", &ca), time_limit).unwrap();
    for _ in 0..3 {
        client.queue(&[b"SET", b"t", &value]);
        client.queue(&[b"GET", b"t"]);
    }
    client.flush().unwrap();
    for _ in 0..3 {
        assert_eq!(client.receive().unwrap(), Reply::Simple("OK".into()));
        assert_eq!(client.receive().unwrap(), Reply::Bulk(value.clone()));
    }
    assert_eq!(served.server.stats().handshakes_failed, 0);
    // A name or an authority that the certificate is not of.
    let other = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let stranger = dir.path().join("other.pem");
    std::fs::write(&stranger, other.cert.pem()).unwrap();
    for (url, words) in [
        (url("127.0.0.1", &ca), "tls to 127.0.0.1"),
        (url("localhost", &stranger), "other.pem"),
        (url("localhost", &dir.path().join("none.pem")), "none.pem"),
    ] {
        let said = Client::connect(&url, time_limit).unwrap_err();
        assert!(said.starts_with("tls") && said.contains(words), "{said}");
    }
    until("both are counted", || served.server.stats().handshakes_failed == 2);
    let mut plain = served.raw();
    plain.write_all(b"*1\r\n$4\r\nPING\r\n").unwrap();
    let mut told = Vec::new();
    let _ = plain.read_to_end(&mut told);
    assert!(!told.starts_with(b"+PONG"));
    until("it is counted", || served.server.stats().handshakes_failed == 3);
}

#[test]
fn who_reads_on_gets_the_whole_value_however_long_it_takes() {
    let (clock, hand) = Clock::manual();
    let config = StoreConfig { shards: 1, room_wait_us: 0, ..config(128) };
    let lease_us = config.read_lease_us;
    let served = serve(ObjectStore::new(&config, clock).unwrap(), RespConfig::default());
    let value = content(7, 32 << 20);
    served.store.put(key("long"), &value, Default::default()).unwrap();
    let mut stream = served.raw();
    stream.write_all(b"GET long\r\n").unwrap();
    let expected = answer_of(&value);
    let mut got = Vec::new();
    // After its removal only the lease keeps it. Leases of time pass, and other puts take any memory that is not
    // held.
    until("it is being read", || served.store.stat(key("long")).is_some_and(|stat| stat.readers == 1));
    served.store.remove(key("long")).unwrap();
    for round in 0..4u64 {
        let mut some = vec![0; 7 << 20];
        stream.read_exact(&mut some).unwrap();
        got.extend(some);
        pass(&hand, lease_us * 3 / 5);
        for n in 0..5 {
            let _ = served.store.put(key(&format!("{round} {n}")), &content(n, 24 << 20), Default::default());
        }
    }
    let mut rest = vec![0; expected.len() - got.len()];
    stream.read_exact(&mut rest).unwrap();
    got.extend(rest);
    assert!(got == expected);
    assert!(served.store.stats().evicted > 4, "others did press");
}

#[test]
fn values_from_the_ssd_that_slow_readers_wait_for_have_a_bound() {
    let place = tempfile::tempdir().unwrap();
    let ssd = SsdConfig { admit: AdmissionRule::First, ..SsdConfig::new(place.path().into(), 256 << 20) };
    let lower = LowerConfig { ssd: Some(ssd), ..LowerConfig::default() };
    let config = StoreConfig { value_max_bytes: 16 << 20, shards: 1, ..config(64) };
    let store = ObjectStore::with_lower(&config, Clock::machine(), &lower).unwrap();
    let served = serve(store, RespConfig { time_limit_us: 60_000_000, ..RespConfig::default() });
    let values: Vec<Vec<u8>> = (0..14).map(|n| content(n, 12 << 20)).collect();
    for (n, value) in values.iter().enumerate() {
        served.store.put(key(&n.to_string()), value, Default::default()).unwrap();
        assert!(served.store.settle(Duration::from_secs(60)));
    }
    // The first are below alone; none of these clients reads.
    let mut readers: Vec<TcpStream> = (0..9)
        .map(|n| {
            let mut stream = served.raw();
            stream.write_all(format!("GET {n}\r\n").as_bytes()).unwrap();
            stream
        })
        .collect();
    let lower = || served.store.lower_stats();
    until("all were looked for", || lower().ssd_hits + lower().let_go == 9);
    let (stats, beside) = (served.store.stats(), lower().beside_bytes);
    assert!(stats.used_bytes <= 64 << 20 && beside <= 16 << 20, "{stats:?}, {beside} beside");
    assert!(lower().let_go > 0 && beside > 0, "five fit memory and one beside it: {:?}", lower());
    let (mut whole, mut missed) = (0, 0);
    for (stream, value) in readers.iter_mut().zip(&values) {
        let mut begin = [0; 5];
        stream.read_exact(&mut begin).unwrap();
        if &begin == b"$-1\r\n" {
            missed += 1;
            continue;
        }
        let expected = answer_of(value);
        let mut rest = vec![0; expected.len() - 5];
        stream.read_exact(&mut rest).unwrap();
        assert!([&begin[..], &rest].concat() == expected);
        whole += 1;
    }
    assert_eq!((whole + missed, missed), (9, lower().let_go));
    until("nothing is beside the memory any more", || lower().beside_bytes == 0);
    assert!(whole >= 4, "{whole}");
}

fn guarded(connections_max: usize, time_limit_us: u64) -> TestServer {
    let login = Login {
        user: "default".into(),
        password: "secret".into(),
        tenant: "one".into(),
        quota_bytes: 8 << 20,
    };
    let resp = RespConfig { logins: vec![login], connections_max, time_limit_us, ..RespConfig::default() };
    served(&config(16), resp)
}

#[test]
fn strangers_cost_little_and_not_for_long() {
    let served = guarded(1_000, 2_000_000);
    let many = [b"*8192\r\n".to_vec(), b"$0\r\n\r\n".repeat(8_191)].concat();
    let strangers: Vec<TcpStream> = (0..100)
        .map(|n| {
            let mut stream = served.raw();
            // Long lists, long arguments, half a command, nothing at all.
            let sent = match n % 4 {
                0 => stream.write_all(&many),
                1 => stream.write_all(b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$90000\r\nxxxxx"),
                2 => stream.write_all(b"*2\r\n$4\r\nAUTH\r\n$4000\r\nxxxxx"),
                _ => Ok(()),
            };
            // One that is refused already may be gone.
            drop(sent);
            stream
        })
        .collect();
    assert_eq!(served.server.stats().buffered_bytes, 0, "nobody of them has more than anybody may");
    until("half of them are ended for their silence, and all are gone", || {
        let stats = served.server.stats();
        stats.cut_silent + stats.cut_half_sent >= 50 && stats.connections == 0
    });
    drop(strangers);
    let c = &mut served.client();
    assert_eq!(words(c, "AUTH secret"), ok());
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(2_500) {
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(words(c, "PING"), Reply::Simple("PONG".into()), "who has logged in may be silent");
}

#[test]
fn places_that_silent_strangers_hold_are_given_to_who_logs_in() {
    let served = guarded(8, 600_000_000);
    let mut held: Vec<TcpStream> = (0..2).map(|_| served.raw()).collect();
    until("both are there", || served.server.stats().connections == 2);
    // A newcomer is refused until one of them has been silent for a second.
    let mut tries = 0;
    until("a place", || {
        tries += 1;
        let mut stream = served.raw();
        stream.write_all(b"*2\r\n$4\r\nAUTH\r\n$6\r\nsecret\r\n").unwrap();
        let mut told = [0; 5];
        let came = stream.read_exact(&mut told).is_ok() && &told == b"+OK\r\n";
        held.push(stream);
        came
    });
    let stats = served.server.stats();
    assert_eq!((stats.displaced, stats.refused), (1, tries - 1), "{stats:?}");
}

#[test]
fn half_a_command_is_not_waited_for_without_end() {
    let resp = RespConfig { time_limit_us: 200_000, ..RespConfig::default() };
    let served = served(&config(16), resp);
    let mut stream = served.raw();
    stream.write_all(b"*2\r\n$3\r\nGET\r\n$1").unwrap();
    assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0, "closed");
    assert_eq!(served.server.stats().cut_half_sent, 1);
}

#[test]
fn commands_may_have_many_arguments_within_what_all_may_have_together() {
    let served = served(&config(64), RespConfig::default());
    let c = &mut served.client();
    let names: Vec<String> = (0..20_000).map(|n| format!("key {n}")).collect();
    let with = |command: &'static [u8]| {
        let mut all: Vec<&[u8]> = vec![command];
        all.extend(names.iter().map(String::as_bytes));
        all
    };
    let mset: Vec<&[u8]> = with(b"MSET")
        .into_iter()
        .flat_map(|word| [word, b"v"])
        .enumerate()
        .filter(|(n, _)| *n != 1)
        .map(|(_, w)| w)
        .collect();
    assert_eq!(c.call(&mset), Ok(ok()));
    assert_eq!(c.call(&with(b"MGET")), Ok(Reply::List(vec![bulk("v"); 20_000])));
    assert_eq!(c.call(&with(b"DEL")), Ok(Reply::Integer(20_000)));
    let more = vec![&b"x"[..]; 200_000];
    let refused = c.call(&[&[&b"MGET"[..]], &more[..]].concat()).unwrap_err();
    assert!(refused.starts_with("OOM the answer is larger"), "{refused}");
    assert_eq!(c.call(&[&[&b"EXISTS"[..]], &more[..]].concat()), Ok(Reply::Integer(0)));
    until("it is given back", || served.server.stats().buffered_bytes == 0);
}

#[test]
fn nothing_of_a_transaction_is_applied() {
    let served = served(&config(16), RespConfig::default());
    let c = &mut served.client();
    assert!(error_of(&words(c, "MULTI")).starts_with("ERR MULTI is not served"));
    assert!(error_of(&words(c, "SET a 1")).contains("not applied"));
    let large = vec![1; 100_000];
    assert!(c.call(&[b"SET", b"b", &large]).unwrap_err().contains("not applied"));
    assert!(error_of(&words(c, "EXEC")).starts_with("EXECABORT"));
    assert_eq!((words(c, "EXISTS a b"), words(c, "SET a 1")), (Reply::Integer(0), ok()));
    assert!(error_of(&words(c, "EXEC")).starts_with("ERR EXEC without MULTI"));
    let _ = words(c, "MULTI");
    assert_eq!((words(c, "DISCARD"), words(c, "GET a")), (ok(), bulk("1")));
    served.store.check();
}
