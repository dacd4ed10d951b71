//! Redis' protocol, with a client written by hand.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::content;
use baton_objects::resp::client::{Client, Reply, Url};
use baton_objects::resp::{Login, RespConfig, Server};
use baton_objects::{Clock, ObjectStore, StoreConfig};

/// A server of its own for a test; it ends with it.
pub struct TestServer {
    pub store: ObjectStore,
    pub server: Server,
    pub address: SocketAddr,
    _runtime: tokio::runtime::Runtime,
}

pub fn served(config: &StoreConfig, resp: RespConfig) -> TestServer {
    serve(ObjectStore::new(config, Clock::machine()).unwrap(), resp)
}

pub fn serve(store: ObjectStore, resp: RespConfig) -> TestServer {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let server = Server::new(store.clone(), resp).unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    let serving = server.clone();
    runtime.spawn(async move { serving.serve(listener, std::future::pending()).await });
    TestServer { store, server, address, _runtime: runtime }
}

fn plain() -> TestServer {
    let config =
        StoreConfig { capacity_bytes: 64 << 20, value_max_bytes: 16 << 20, ..StoreConfig::default() };
    served(&config, RespConfig { allow_flush: true, ..RespConfig::default() })
}

impl TestServer {
    pub fn client(&self) -> Client {
        let url: Url = format!("redis://{}", self.address).parse().unwrap();
        Client::connect(&url, Duration::from_secs(20)).unwrap()
    }

    pub fn raw(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }
}

/// A command of words.
pub fn words(client: &mut Client, line: &str) -> Reply {
    let words: Vec<&[u8]> = line.split(' ').map(str::as_bytes).collect();
    client.queue(&words);
    client.flush().unwrap();
    client.receive().unwrap()
}

pub fn ok() -> Reply {
    Reply::Simple("OK".into())
}

pub fn bulk(text: &str) -> Reply {
    Reply::Bulk(text.as_bytes().to_vec())
}

pub fn error_of(reply: &Reply) -> &str {
    if let Reply::Error(error) = reply { error } else { panic!("{reply:?} is no error") }
}

#[test]
fn strings_are_as_clients_know_them() {
    let served = plain();
    let c = &mut served.client();
    assert_eq!(words(c, "PING"), Reply::Simple("PONG".into()));
    assert_eq!(words(c, "SET a hello"), ok());
    assert_eq!(words(c, "get a"), bulk("hello"));
    assert_eq!(words(c, "GET b"), Reply::Nothing);
    assert_eq!(words(c, "SET a other NX"), Reply::Nothing);
    assert_eq!(words(c, "SET b other XX"), Reply::Nothing);
    assert_eq!(words(c, "SET a world XX GET"), bulk("hello"));
    assert_eq!(words(c, "SET n new GET"), Reply::Nothing);
    assert_eq!(words(c, "SETNX a x"), Reply::Integer(0));
    assert_eq!(words(c, "SETNX b bee"), Reply::Integer(1));
    assert_eq!(words(c, "MSET x 1 y 2 z 3"), ok());
    assert_eq!(words(c, "MGET x nope z"), Reply::List(vec![bulk("1"), Reply::Nothing, bulk("3")]));
    assert_eq!(words(c, "EXISTS x x nope"), Reply::Integer(2));
    assert_eq!(words(c, "STRLEN a"), Reply::Integer(5));
    assert_eq!(words(c, "DEL x y nope"), Reply::Integer(2));
    assert_eq!(words(c, "UNLINK z"), Reply::Integer(1));
    assert_eq!(
        (words(c, "TYPE a"), words(c, "TYPE q")),
        (Reply::Simple("string".into()), Reply::Simple("none".into()))
    );
    assert_eq!(words(c, "DBSIZE"), Reply::Integer(3));
    let ranges = [
        ("0 -1", "world"),
        ("1 2", "or"),
        ("-3 -2", "rl"),
        ("3 99", "ld"),
        ("4 2", ""),
        ("-99 0", "w"),
        ("9 9", ""),
        ("0 -100", "w"),
        ("-100 -99", "w"),
        ("-99 -100", ""),
    ];
    for (range, expected) in ranges {
        assert_eq!(words(c, &format!("GETRANGE a {range}")), bulk(expected), "{range}");
    }
    assert_eq!(words(c, "FLUSHDB"), ok());
    assert_eq!(served.store.stats().keys, 0);
    assert!(error_of(&words(c, "LPUSH a 1")).starts_with("ERR unknown command 'LPUSH'"));
    assert!(error_of(&words(c, "GET")).starts_with("ERR wrong number of arguments for 'get'"));
    assert!(error_of(&words(c, "MSET a 1 b")).starts_with("ERR wrong number"));
    assert!(error_of(&words(c, "SET a 1 NX XX")).starts_with("ERR syntax error"));
    assert_eq!((words(c, "SELECT 0"), words(c, "QUIT")), (ok(), ok()));
    assert!(c.receive().is_err(), "QUIT closes");
}

#[test]
fn a_large_value_of_a_key_that_is_to_be_left_as_it_is_evicts_nothing() {
    let served = plain();
    let c = &mut served.client();
    let set = |c: &mut Client, key: &str, value: &[u8], word: &str| {
        let words: [&[u8]; 4] = [b"SET", key.as_bytes(), value, word.as_bytes()];
        c.queue(if word.is_empty() { &words[..3] } else { &words });
        c.flush().unwrap();
        c.receive().unwrap()
    };
    let mut last = String::new();
    for n in 0.. {
        last = format!("k{n}");
        assert_eq!(set(c, &last, &content(n, 1 << 20), ""), ok());
        if served.store.stats().evicted > 0 {
            break;
        }
    }
    let stats = served.store.stats();
    std::thread::scope(|threads| {
        for n in 0..8 {
            let (served, last) = (&served, &last);
            threads.spawn(move || {
                let c = &mut served.client();
                assert_eq!(set(c, last, &content(n, 1 << 20), "NX"), Reply::Nothing);
                c.queue(&[b"SETNX", last.as_bytes(), &content(n, 1 << 20)]);
                c.flush().unwrap();
                assert_eq!(c.receive().unwrap(), Reply::Integer(0));
            });
        }
    });
    let after = served.store.stats();
    assert_eq!((after.evicted, after.keys), (stats.evicted, stats.keys), "nothing made way");
    let other = content(9, (1 << 20) + 1);
    assert_eq!(set(c, &last, &other, "XX"), ok(), "another word");
    assert_eq!(words(c, &format!("GET {last}")), Reply::Bulk(other));
    assert_eq!(set(c, "absent", &content(1, 1 << 20), "NX"), ok());
    assert_eq!(words(c, "GET absent"), Reply::Bulk(content(1, 1 << 20)));
}

#[test]
fn a_client_can_look_at_what_is_kept_and_pin_it_for_a_while() {
    let served = plain();
    let c = &mut served.client();
    assert_eq!(words(c, "SET a 123456789 PX 5000000"), ok());
    let Reply::List(parts) = words(c, "BATON.STAT a") else { panic!("a map") };
    let find = |name: &str| parts[parts.iter().position(|part| *part == bulk(name)).unwrap() + 1].clone();
    assert_eq!((find("bytes"), find("hard_pins")), (Reply::Integer(9), Reply::Integer(0)));
    assert_eq!(find("crc32c"), bulk("e3069283"), "the published check value of CRC-32C");
    assert!(matches!(find("ttl_ms"), Reply::Integer(4_900_000..=5_000_000)));
    assert_eq!((words(c, "BATON.VERIFY a"), words(c, "BATON.STAT none")), (ok(), Reply::Nothing));
    assert_eq!(words(c, "BATON.PIN a 600000"), Reply::Integer(1));
    for n in 0..200 {
        c.call(&[b"SET", n.to_string().as_bytes(), &vec![1; 1 << 20]]).unwrap();
    }
    assert_eq!(words(c, "GET a"), bulk("123456789"), "a pinned value stays");
    assert!(error_of(&words(c, "BATON.PIN a 0")).starts_with("ERR give a time"));
    assert!(error_of(&words(c, "BATON.VERIFY none")).starts_with("ERR no such key"));
}

#[test]
fn times_to_live_run_out() {
    let served = plain();
    let c = &mut served.client();
    assert_eq!(words(c, "SET a 1 EX 100"), ok());
    // A test that stands still for a while still passes: a time that runs is at most what was given.
    let seconds = |reply: Reply, top: i64| matches!(reply, Reply::Integer(left) if left > 0 && left <= top);
    assert!(seconds(words(c, "TTL a"), 100));
    assert_eq!((words(c, "PERSIST a"), words(c, "PERSIST a")), (Reply::Integer(1), Reply::Integer(0)));
    assert_eq!((words(c, "TTL a"), words(c, "TTL b")), (Reply::Integer(-1), Reply::Integer(-2)));
    assert_eq!((words(c, "EXPIRE a 50"), words(c, "EXPIRE b 50")), (Reply::Integer(1), Reply::Integer(0)));
    assert!(matches!(words(c, "PTTL a"), Reply::Integer(1..=50_000)));
    assert_eq!(words(c, "SET a 2 KEEPTTL"), ok());
    assert!(seconds(words(c, "TTL a"), 50));
    assert_eq!(words(c, "SETEX e 700 v"), ok());
    assert!(seconds(words(c, "TTL e"), 700));
    assert_eq!((words(c, "EXPIRE a -1"), words(c, "GET a")), (Reply::Integer(1), Reply::Nothing));
    for bad in ["SET a 1 EX 0", "SET a 1 EX x", "SET a 1 EX 1 PX 1", "SETEX a 0 v", "EXPIRE a soon"] {
        assert!(error_of(&words(c, bad)).starts_with("ERR"), "{bad}");
    }
}

#[test]
fn what_had_an_end_is_gone_after_it_and_not_before() {
    let (clock, hand) = Clock::manual();
    let config = StoreConfig { capacity_bytes: 4 << 20, value_max_bytes: 1 << 20, ..StoreConfig::default() };
    let served = serve(ObjectStore::new(&config, clock).unwrap(), RespConfig::default());
    let c = &mut served.client();
    assert_eq!((words(c, "SET a 1 PX 20"), words(c, "SETEX b 2 1")), (ok(), ok()));
    super::pass(&hand, 19_999);
    assert_eq!((words(c, "GET a"), words(c, "PTTL a")), (bulk("1"), Reply::Integer(1)));
    super::pass(&hand, 1);
    assert_eq!((words(c, "GET a"), words(c, "TTL b")), (Reply::Nothing, Reply::Integer(2)));
    super::pass(&hand, 1_980_000);
    assert_eq!(words(c, "EXISTS b"), Reply::Integer(0));
}

#[test]
fn values_of_every_size_come_back_also_in_pipelines() {
    let served = plain();
    let c = &mut served.client();
    let sizes = [0, 1, 1_000, 1_025, 4_096, 16_383, 16_384, 65_536, 100_000, 1 << 20, 5_000_001];
    let values: Vec<Vec<u8>> = sizes.iter().map(|bytes| content(*bytes as u64, *bytes)).collect();
    for (n, value) in values.iter().enumerate() {
        let name = n.to_string();
        c.queue(&[b"SET", name.as_bytes(), value, b"PX", b"9999999"]);
        c.queue(&[b"GET", name.as_bytes()]);
    }
    // Beside it a writer that leaves in the middle of a value.
    std::thread::scope(|threads| {
        let mut sender = c_raw(&served, &values);
        threads.spawn(move || {
            let mut all = Vec::new();
            sender.shutdown(std::net::Shutdown::Write).unwrap();
            sender.read_to_end(&mut all).unwrap();
            assert!(all.is_empty() || all.starts_with(b"+OK"));
        });
    });
    c.flush().unwrap();
    for (n, value) in values.iter().enumerate() {
        assert_eq!(c.receive().unwrap(), ok(), "{n}");
        assert_eq!(c.receive().unwrap(), Reply::Bulk(value.clone()), "{n}");
        assert!(served.store.verify(super::key(&n.to_string())).is_ok());
    }
    let mut mset: Vec<&[u8]> = vec![b"MSET"];
    let names: Vec<String> = (0..values.len()).map(|n| format!("m{n}")).collect();
    for (name, value) in names.iter().zip(&values) {
        mset.extend([name.as_bytes(), &value[..]]);
    }
    assert_eq!(c.call(&mset), Ok(ok()));
    let mut mget: Vec<&[u8]> = vec![b"MGET"];
    mget.extend(names.iter().map(String::as_bytes));
    let expected = values.iter().map(|value| Reply::Bulk(value.clone())).collect();
    assert_eq!(c.call(&mget), Ok(Reply::List(expected)));
    assert_eq!(
        c.call(&[b"GETRANGE", b"m10", b"1048570", b"1048580"]),
        Ok(Reply::Bulk(values[10][1_048_570..=1_048_580].to_vec()))
    );
    drop(mget);
    std::thread::sleep(Duration::from_millis(50));
    served.store.check();
}

/// A connection that has sent a large value's head and some of it, and never will the rest.
fn c_raw(served: &TestServer, values: &[Vec<u8>]) -> TcpStream {
    let mut stream = served.raw();
    stream.write_all(b"*3\r\n$3\r\nSET\r\n$4\r\nhalf\r\n$1000000\r\n").unwrap();
    stream.write_all(&values[7]).unwrap();
    stream
}

/// A client that is in the middle of a value; the store has made room for it.
fn half_way(served: &TestServer) -> TcpStream {
    let stream = c_raw(served, &vec![vec![1; 500]; 8]);
    while served.store.stats().used_bytes == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    stream
}

#[test]
fn bytes_may_come_in_any_pieces() {
    let served = plain();
    let value = content(5, 40_000);
    let mut all = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$40000\r\n".to_vec();
    all.extend_from_slice(&value);
    all.extend_from_slice(b"\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\nPING\r\n*0\r\n\r\n*1\r\n$4\r\nQUIT\r\n");
    let mut expected = b"+OK\r\n$40000\r\n".to_vec();
    expected.extend_from_slice(&value);
    expected.extend_from_slice(b"\r\n+PONG\r\n+OK\r\n");
    let mut rng = baton_types::Rng::new(4);
    for round in 0..8 {
        let mut stream = served.raw();
        stream.set_nodelay(true).unwrap();
        let mut rest = &all[..];
        while !rest.is_empty() {
            let top = if round == 0 { 1 << 20 } else { 1 << rng.below(14) };
            let (now, later) = rest.split_at(rest.len().min(usize::try_from(rng.below(top)).unwrap() + 1));
            stream.write_all(now).unwrap();
            rest = later;
        }
        let mut got = Vec::new();
        stream.read_to_end(&mut got).unwrap();
        assert!(got == expected, "round {round}: {} bytes of {}", got.len(), expected.len());
    }
}

#[test]
fn what_is_broken_is_told_and_closed() {
    let served = plain();
    let broken: [&[u8]; 7] = [
        b"*1\r\n:5\r\n",
        b"*99999999\r\n",
        b"*x\r\n",
        b"*2\r\n$3\r\nGET\r\n$-5\r\n",
        b"*2\r\n$3\r\nGET\r\n$900000\r\n",
        b"*1\r\n$4\r\nPINGxx",
        &[b'a'; 20_000],
    ];
    for bytes in broken {
        let mut stream = served.raw();
        stream.write_all(bytes).unwrap();
        let mut told = String::new();
        // A close with bytes unread may cut the message short, not the close.
        let _ = stream.read_to_string(&mut told);
        assert!(told.starts_with("-ERR Protocol error") || told.is_empty(), "{told}");
    }
    let mut browser = served.raw();
    browser.write_all(b"POST / HTTP/1.1\r\nHost: x\r\n\r\nSET lured yes\r\n").unwrap();
    let mut told = String::new();
    let _ = browser.read_to_string(&mut told);
    assert!(told.matches("ERR").count() <= 1 && served.store.stats().keys == 0, "{told}");
    // Many values of medium size are not gathered: their command may be longer than what is.
    let value = vec![3; 9_000];
    let names: Vec<String> = (0..3_000).map(|n| n.to_string()).collect();
    let mut mset: Vec<&[u8]> = vec![b"MSET"];
    names.iter().for_each(|name| mset.extend([name.as_bytes(), &value[..]]));
    assert_eq!(served.client().call(&mset), Ok(ok()));
    assert_eq!(words(&mut served.client(), "STRLEN 2999"), Reply::Integer(9_000));
    // A refusal in the middle of a value is sent after it, and the connection lives.
    let c = &mut served.client();
    let large = vec![1; 17 << 20];
    assert!(c.call(&[b"SET", b"large", &large]).unwrap_err().starts_with("ERR value of 17825792 bytes"));
    assert_eq!(words(c, "PING"), Reply::Simple("PONG".into()));
    let long = vec![b'k'; 2_000];
    assert!(c.call(&[b"SET", &long, b"v"]).unwrap_err().starts_with("ERR key of 2000 bytes"));
}

#[test]
fn nobody_comes_in_without_a_password_and_tenants_are_apart() {
    let login = |user: &str, tenant: &str| Login {
        user: user.into(),
        password: format!("{user} secret"),
        tenant: tenant.into(),
        quota_bytes: 8 << 20,
    };
    let resp =
        RespConfig { logins: vec![login("default", "one"), login("other", "two")], ..RespConfig::default() };
    assert!(!format!("{resp:?}").contains("secret"));
    let config =
        StoreConfig { capacity_bytes: 64 << 20, value_max_bytes: 16 << 20, ..StoreConfig::default() };
    let served = served(&config, resp);
    let c = &mut served.client();
    assert!(error_of(&words(c, "GET a")).starts_with("NOAUTH"));
    assert!(error_of(&words(c, "HELLO 3")).starts_with("NOAUTH"));
    let value = content(1, 100_000);
    assert!(c.call(&[b"SET", b"a", &value]).unwrap_err().starts_with("NOAUTH"), "not even a large value");
    let c = &mut served.client();
    let long = [&b"EXISTS"[..], &value[..2_000], &value[..2_000], &value[..2_000]];
    assert!(c.call(&long).unwrap_err().starts_with("NOAUTH"));
    let c = &mut served.client();
    assert!(c.call(&vec![&b"EXISTS"[..]; 17]).unwrap_err().contains("so many arguments"));
    let c = &mut served.client();
    assert!(error_of(&words(c, "AUTH wrong")).starts_with("WRONGPASS"));
    assert_eq!(c.call(&[b"AUTH", b"default secret"]), Ok(ok()));
    assert_eq!(words(c, "SET a one"), ok());
    let d = &mut served.client();
    let hello = d.call(&[b"HELLO", b"3", b"AUTH", b"other", b"other secret", b"SETNAME", b"me"]).unwrap();
    assert!(matches!(&hello, Reply::List(pairs) if pairs.len() == 14), "{hello:?}");
    assert_eq!((words(d, "GET a"), words(d, "CLIENT GETNAME")), (Reply::Nothing, bulk("me")));
    assert_eq!(words(d, "SET a two"), ok());
    assert_eq!((words(c, "GET a"), words(d, "GET a")), (bulk("one"), bulk("two")));
    let Reply::List(scanned) = words(d, "SCAN 0 COUNT 10000") else { panic!("a list") };
    assert!(matches!(&scanned[1], Reply::List(keys) if keys.len() <= 1));
    assert!(error_of(&words(c, "FLUSHDB")).starts_with("ERR FLUSHDB is off"));
    assert_eq!(words(d, "RESET"), Reply::Simple("RESET".into()));
    assert!(error_of(&words(d, "GET a")).starts_with("NOAUTH"));
}

#[test]
fn a_scan_finds_every_key() {
    let served = plain();
    let c = &mut served.client();
    (0..700).for_each(|n| assert_eq!(words(c, &format!("SET k{n} v")), ok()));
    let (mut found, mut cursor) = (Vec::new(), "0".to_owned());
    loop {
        let Reply::List(parts) = words(c, &format!("SCAN {cursor} MATCH k*7 COUNT 50")) else {
            panic!("a list")
        };
        let [Reply::Bulk(next), Reply::List(keys)] = &parts[..] else { panic!("{parts:?}") };
        found.extend(keys.iter().cloned());
        cursor = String::from_utf8(next.clone()).unwrap();
        if cursor == "0" {
            break;
        }
    }
    assert_eq!(found.len(), 70);
    assert!(error_of(&words(c, "SCAN x")).starts_with("ERR invalid cursor"));
    let Reply::Bulk(text) = words(c, "INFO") else { panic!("a text") };
    assert!(String::from_utf8(text).unwrap().contains("db0:keys=700"));
    assert_eq!(words(c, "CONFIG GET maxmemor?"), Reply::List(vec![bulk("maxmemory"), bulk("67108864")]));
    assert!(matches!(words(c, "COMMAND COUNT"), Reply::Integer(30..)));
}

#[test]
fn a_writer_that_goes_in_the_middle_leaves_nothing_and_full_is_told() {
    let served = plain();
    let half = half_way(&served);
    let c = &mut served.client();
    assert_eq!(words(c, "GET half"), Reply::Nothing);
    drop(half);
    assert_eq!(words(c, "SET half whole"), ok(), "the writer after it goes on");
    for n in 0..62 {
        let name = n.to_string();
        c.call(&[b"SET", name.as_bytes(), &vec![1; 1 << 20]]).unwrap();
        let _ = served.store.pin(super::key(&name));
    }
    let refused = c.call(&[b"SET", b"more", &vec![1; 4 << 20]]).unwrap_err();
    assert!(refused.starts_with("OOM put: full"), "{refused}");
}

#[test]
fn a_writer_that_falls_silent_is_taken_over_by_who_does_not_replace_and_told_so() {
    let served = plain();
    let mut silent = half_way(&served);
    let c = &mut served.client();
    assert_eq!(words(c, "SET half whole NX"), ok(), "it waits for the end of the lease, and is served");
    assert_eq!(served.store.stats().taken_over, 1);
    assert_eq!(words(c, "GET half"), bulk("whole"));
    // A writer that was taken over never gets a success for a value that was not stored.
    silent.write_all(&[1; 999_500]).unwrap();
    silent.write_all(b"\r\n").unwrap();
    let mut told = [0; 9];
    silent.read_exact(&mut told).unwrap();
    assert_eq!(&told, b"-TRYAGAIN");
    assert_eq!(words(c, "GET half"), bulk("whole"));
}

#[test]
fn writers_of_a_key_do_not_wait_for_each_other_and_the_last_that_ends_wins() {
    let served = plain();
    let mut slow = half_way(&served);
    let c = &mut served.client();
    assert_eq!(words(c, "SET half whole"), ok());
    let large = vec![7; 100_000];
    assert_eq!(c.call(&[b"SET", b"half", &large]).unwrap(), ok());
    assert_eq!(words(c, "GET half"), Reply::Bulk(large));
    slow.write_all(&[1; 999_500]).unwrap();
    slow.write_all(b"\r\n").unwrap();
    let mut told = [0; 5];
    slow.read_exact(&mut told).unwrap();
    assert_eq!(&told, b"+OK\r\n");
    let Reply::Bulk(value) = words(c, "GET half") else { panic!("a value") };
    assert_eq!(value.len(), 1_000_000);
    assert_eq!(served.store.stats().taken_over, 0);
    served.store.check();
}

#[test]
fn a_client_that_does_not_read_is_cut_off_and_others_are_counted() {
    let config =
        StoreConfig { capacity_bytes: 64 << 20, value_max_bytes: 16 << 20, ..StoreConfig::default() };
    let resp = RespConfig { connections_max: 2, time_limit_us: 300_000, ..RespConfig::default() };
    let served = served(&config, resp);
    let mut stream = served.raw();
    stream.write_all(b"PING\r\n").unwrap();
    stream.read_exact(&mut [0; 7]).unwrap();
    let mut c = served.client();
    c.call(&[b"SET", b"big", &vec![7; 8 << 20]]).unwrap();
    let mut third = served.raw();
    let mut told = String::new();
    third.read_to_string(&mut told).unwrap();
    assert_eq!(told, "-ERR max number of clients reached\r\n");
    let _ = (0..200).try_for_each(|_| stream.write_all(b"GET big\r\n"));
    while served.server.stats().cut_unread == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut got = Vec::new();
    let _ = stream.read_to_end(&mut got);
    assert!(got.len() < 64 << 20, "it was cut off after {} bytes", got.len());
    assert_eq!(words(&mut c, "PING"), Reply::Simple("PONG".into()));
    while served.store.stat(super::key("big")).unwrap().readers > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn many_connections_at_once_see_whole_values() {
    let config = StoreConfig { capacity_bytes: 16 << 20, value_max_bytes: 4 << 20, ..StoreConfig::default() };
    let served = served(&config, RespConfig::default());
    std::thread::scope(|threads| {
        for thread in 0..6u64 {
            let served = &served;
            threads.spawn(move || {
                let mut rng = baton_types::Rng::fork(1, thread);
                let c = &mut served.client();
                for _ in 0..150 {
                    let name = rng.below(20);
                    let text = name.to_string();
                    if rng.chance_permille(500) {
                        let seed = rng.below(1_000);
                        let bytes = 1_000 + usize::try_from(name).unwrap() * 40_000;
                        let mut value = seed.to_le_bytes().to_vec();
                        value.extend(content(seed ^ name << 32, bytes));
                        c.call(&[b"SET", text.as_bytes(), &value]).unwrap();
                    } else if let Reply::Bulk(value) = c.call(&[b"GET", text.as_bytes()]).unwrap() {
                        let seed = u64::from_le_bytes(value[..8].try_into().unwrap());
                        assert!(value[8..] == content(seed ^ name << 32, value.len() - 8), "key {name}");
                    }
                }
            });
        }
    });
    let stats = served.store.stats();
    assert!(stats.hits > 100 && stats.puts > 100, "{stats:?}");
}
