//! `SCAN` and drain over a bucket: both cover keys that are only there, and both report a silent bucket.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::content;
use super::faulty::{BucketFault, FaultyBucket};
use super::resp::{TestServer, bulk, error_of, ok, serve, words};
use super::tiers::{over, over_parts, settle};
use baton_objects::client::{Cluster, ClusterConfig, ConflictRule, DrainProgress};
use baton_objects::resp::client::{Client, Reply};
use baton_objects::resp::{Login, RespConfig};
use baton_objects::{ColdBucket, ColdConfig, LowerConfig, SsdConfig};

fn over_bucket(bucket: &Arc<FaultyBucket>, ssd: Option<&Path>, resp: RespConfig) -> TestServer {
    let cold = ColdConfig {
        time_limit: Duration::from_millis(500),
        ..ColdConfig::new(ColdBucket::Given(Arc::clone(bucket) as _))
    };
    let ssd = ssd.map(|dir| SsdConfig::new(dir.to_owned(), 16 << 20));
    serve(over(LowerConfig { ssd, cold: Some(cold), ..LowerConfig::default() }).0, resp)
}

fn in_memory() -> TestServer {
    serve(over(LowerConfig::default()).0, RespConfig::default())
}

fn put(client: &mut Client, name: &str, seed: u64) {
    client.queue(&[b"SET", name.as_bytes(), &content(seed, 90_000)]);
    client.flush().unwrap();
    assert_eq!(client.receive().unwrap(), ok());
}

/// So many values of 90 kB, each asked for twice; memory has room for some forty.
fn fill(served: &TestServer, client: &mut Client, count: u64) {
    for n in 0..count {
        put(client, &format!("k{n}"), n);
        (0..2).for_each(|_| assert!(matches!(words(client, &format!("GET k{n}")), Reply::Bulk(_))));
        settle(&served.store);
    }
}

/// How often a whole scan lists each key, at most `count` entries a step; or the error that ends it.
fn scan(client: &mut Client, count: u32) -> Result<BTreeMap<String, u32>, String> {
    let (mut found, mut cursor) = (BTreeMap::new(), "0".to_owned());
    for _ in 0..10_000 {
        let parts = match words(client, &format!("SCAN {cursor} COUNT {count}")) {
            Reply::List(parts) => parts,
            other => return Err(error_of(&other).to_owned()),
        };
        let [Reply::Bulk(next), Reply::List(keys)] = &parts[..] else { panic!("{parts:?}") };
        for key in keys {
            let Reply::Bulk(key) = key else { panic!("{key:?}") };
            *found.entry(String::from_utf8(key.clone()).unwrap()).or_insert(0) += 1;
        }
        cursor = String::from_utf8(next.clone()).unwrap();
        if cursor == "0" {
            return Ok(found);
        }
    }
    panic!("a scan ends")
}

fn names(from: u64, to: u64) -> BTreeMap<String, u32> {
    (from..to).map(|n| (format!("k{n}"), 1)).collect()
}

#[test]
fn a_scan_lists_what_is_only_in_the_bucket() {
    let (bucket, folder) = (FaultyBucket::new(), tempfile::tempdir().unwrap());
    for ssd in [None, Some(folder.path())] {
        let served = over_bucket(&bucket, ssd, RespConfig::default());
        let c = &mut served.client();
        if ssd.is_none() {
            fill(&served, c, 120);
            assert!(served.store.stats().keys < 60, "most were evicted");
        } else {
            assert_eq!((served.store.stats().keys, bucket.values().len()), (0, 120), "a new process");
        }
        for count in [10, 50, 1_000] {
            assert_eq!(scan(c, count), Ok(names(0, 120)), "each once, {count} a step");
        }
        // Some come up, and with an SSD go down again to where they are listed from the nearest place.
        (0..100).for_each(|n| assert!(matches!(words(c, &format!("GET k{n}")), Reply::Bulk(_))));
        settle(&served.store);
        assert_eq!(scan(c, 30), Ok(names(0, 120)));
    }
    let served = over_bucket(&bucket, None, RespConfig::default());
    let c = &mut served.client();
    assert_eq!(words(c, "DEL k5 k6"), Reply::Integer(2));
    let Reply::List(parts) = words(c, "SCAN 0 COUNT 1000") else { panic!("a list") };
    assert!(matches!(&parts[1], Reply::List(keys) if keys.is_empty()), "nothing is in memory");
    let found = scan(c, 100).unwrap();
    assert_eq!((found.len(), found.contains_key("k5"), found.contains_key("k7")), (118, false, true));
}

#[test]
fn a_scan_lists_a_tenants_own_keys_alone() {
    let login = |user: &str| Login {
        user: user.into(),
        password: "word".into(),
        tenant: user.into(),
        quota_bytes: u64::MAX,
    };
    let logins = vec![login("one"), login("two")];
    let bucket = FaultyBucket::new();
    let resp = || RespConfig { logins: logins.clone(), ..RespConfig::default() };
    let served = over_bucket(&bucket, None, resp());
    for (user, to) in [("one", 50), ("two", 30)] {
        let c = &mut served.client();
        assert_eq!(words(c, &format!("AUTH {user} word")), ok());
        fill(&served, c, to);
    }
    drop(served);
    let served = over_bucket(&bucket, None, resp());
    for (user, to) in [("one", 50), ("two", 30)] {
        let c = &mut served.client();
        assert_eq!(words(c, &format!("AUTH {user} word")), ok());
        let asked = bucket.asked();
        assert_eq!(scan(c, 1_000), Ok(names(0, to)), "{user}");
        assert!(bucket.asked() - asked < to + 5, "the heads of his own objects are read, and no others");
    }
}

#[test]
fn a_scan_never_ends_early_in_silence_when_the_bucket_is_down() {
    let bucket = FaultyBucket::new();
    let served = over_bucket(&bucket, None, RespConfig::default());
    let c = &mut served.client();
    fill(&served, c, 60);
    for fault in [BucketFault::Fails, BucketFault::Hangs] {
        bucket.be(fault);
        for _ in 0..4 {
            let began = Instant::now();
            let why = scan(c, 100).expect_err("some keys are only in the bucket");
            assert!(why.contains("bucket below does not answer"), "{why}");
            assert!(began.elapsed() < Duration::from_secs(8), "within a bound");
        }
        assert_eq!(words(c, "SET other here"), ok());
        assert_eq!(words(c, "GET other"), bulk("here"), "the rest goes on");
        assert_eq!(words(c, "DEL other"), Reply::Integer(1));
        bucket.be(BucketFault::Good);
        let end = Instant::now() + Duration::from_secs(60);
        while scan(c, 100) != Ok(names(0, 60)) {
            assert!(Instant::now() < end, "it is asked again some time");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn a_flush_leaves_no_part_of_an_object_that_is_not_whole() {
    let (store, _) = over_parts(LowerConfig::default(), Some("tp_rank=2".parse().unwrap()));
    let served = serve(store, RespConfig { allow_flush: true, ..RespConfig::default() });
    let name = |rank: u32| format!("m@tp_rank:{rank}@pcp0@dcp0@pp_rank:0@group:0@aa");
    let c = &mut served.client();
    assert_eq!(words(c, &format!("SET {} OLD1", name(1))), ok());
    assert_eq!(words(c, "FLUSHDB"), ok());
    assert_eq!(words(c, "DBSIZE"), Reply::Integer(0), "a part that was hidden");
    for rank in 0..2 {
        assert_eq!(words(c, &format!("SET {} NEW{rank} NX", name(rank))), ok());
    }
    for rank in 0..2 {
        assert_eq!(words(c, &format!("GET {}", name(rank))), bulk(&format!("NEW{rank}")));
    }
    // More objects than one step of the flush looks at.
    for n in 0..1_500 {
        (0..2).for_each(|rank| assert_eq!(words(c, &format!("SET x@tp_rank:{rank}@{n} v")), ok()));
    }
    assert_eq!(words(c, "FLUSHDB"), ok());
    assert_eq!(words(c, "DBSIZE"), Reply::Integer(0));
}

fn cluster(servers: [&TestServer; 2]) -> (Cluster, String) {
    let [from, to] = servers.map(|served| format!("redis://{}", served.address));
    let cluster = Cluster::new(ClusterConfig::of(&format!("{from},{to}")).unwrap()).unwrap();
    (cluster, servers[0].address.to_string())
}

fn drained(cluster: &mut Cluster, server: &str) -> Result<(DrainProgress, Option<String>), String> {
    drained_by(cluster, server, None)
}

fn drained_by(
    cluster: &mut Cluster,
    server: &str,
    newer: Option<ConflictRule>,
) -> Result<(DrainProgress, Option<String>), String> {
    let mut drain = cluster.drain(server).map_err(|why| why.to_string())?.newer(newer);
    while drain.step().map_err(|why| why.to_string())? {}
    Ok((drain.so_far(), drain.trouble().map(ToString::to_string)))
}

#[test]
fn a_drain_moves_objects_of_several_parts_whole() {
    let [from, to] = [(), ()].map(|()| {
        let (store, _) = over_parts(LowerConfig::default(), Some("tp_rank=2,pp_rank=2".parse().unwrap()));
        serve(store, RespConfig::default())
    });
    let name = |block: u64, part: u64| format!("m@tp_rank:{}@pp_rank:{}@{block}", part % 2, part / 2);
    let c = &mut from.client();
    (0..5).for_each(|block| (0..4).for_each(|part| put(c, &name(block, part), part)));
    put(c, "alone", 9);
    put(c, &name(5, 0), 1);
    assert_eq!(words(c, "CONFIG GET parts"), Reply::List(vec![bulk("parts"), bulk("tp_rank=2,pp_rank=2")]));
    assert_eq!(words(c, &format!("EXISTS {} {}", name(4, 3), name(5, 0))), Reply::Integer(1));
    let (mut cluster, server) = cluster([&from, &to]);
    let (so_far, trouble) = drained(&mut cluster, &server).unwrap();
    assert_eq!((so_far.moved, so_far.left, trouble), (21, 0, None));
    let c = &mut to.client();
    for (block, part) in (0..5).flat_map(|block| (0..4).map(move |part| (block, part))) {
        assert_eq!(words(c, &format!("GET {}", name(block, part))), Reply::Bulk(content(part, 90_000)));
    }
    assert_eq!(scan(c, 10).unwrap().len(), 21);
    assert_eq!(from.store.stats().keys, 1, "the part of an object that never was whole");
}

#[test]
fn a_drain_of_parts_takes_back_what_it_copied_in_vain_and_can_be_finished() {
    let [from, to] = [(), ()].map(|()| {
        let (store, _) = over_parts(LowerConfig::default(), Some("tp_rank=2".parse().unwrap()));
        serve(store, RespConfig::default())
    });
    let name = |rank: u32, block: &str| format!("m@tp_rank:{rank}@{block}");
    let (here, there) = (&mut from.client(), &mut to.client());
    for block in ["ab", "cd"] {
        (0..2).for_each(|rank| assert_eq!(words(here, &format!("SET {} new", name(rank, block))), ok()));
    }
    // One that a drain left in the middle, and one that is another value.
    assert_eq!(words(there, &format!("SET {} new", name(0, "ab"))), ok());
    assert_eq!(words(there, &format!("SET {} old", name(1, "cd"))), ok());
    let (mut cluster, server) = cluster([&from, &to]);
    let (so_far, trouble) = drained(&mut cluster, &server).unwrap();
    assert_eq!((so_far.moved, so_far.had), (1, 1), "{trouble:?}");
    assert!(trouble.unwrap().contains("has another value"));
    assert_eq!(to.store.stats().keys, 3, "the other part was taken back");
    assert_eq!(words(there, &format!("EXISTS {}", name(1, "cd"))), Reply::Integer(0), "neither old nor new");
    let (so_far, trouble) = drained_by(&mut cluster, &server, Some(ConflictRule::Drained)).unwrap();
    assert_eq!((so_far.moved, so_far.left, trouble), (2, 0, None));
    for (rank, block) in [(0, "ab"), (1, "ab"), (0, "cd"), (1, "cd")] {
        assert_eq!(words(there, &format!("GET {}", name(rank, block))), bulk("new"));
    }
    assert_eq!(from.store.stats().keys, 0);
    assert_eq!(words(there, &format!("SET {} x", name(0, "ef"))), ok());
    assert_eq!(words(there, &format!("BATON.STAT {}", name(0, "ef"))), Reply::Nothing);
    assert!(matches!(words(there, &format!("BATON.STAT {} any", name(0, "ef"))), Reply::List(_)));
    assert!(error_of(&words(there, &format!("BATON.STAT {} all", name(0, "ef")))).contains("syntax"));
}

#[test]
fn a_drain_moves_what_is_only_in_the_bucket_and_says_so_when_it_cannot() {
    let bucket = FaultyBucket::new();
    let (from, to) = (over_bucket(&bucket, None, RespConfig::default()), in_memory());
    fill(&from, &mut from.client(), 60);
    // The other has room for half of them.
    let c = &mut from.client();
    (30..60).for_each(|n| assert_eq!(words(c, &format!("DEL k{n}")), Reply::Integer(1)));
    for n in 100..140 {
        put(c, &format!("k{n}"), n);
    }
    (100..140).for_each(|n| assert_eq!(words(c, &format!("DEL k{n}")), Reply::Integer(1)));
    assert_eq!((from.store.stats().keys, bucket.values().len()), (0, 30), "nothing is in memory");
    let (mut cluster, server) = cluster([&from, &to]);
    bucket.be(BucketFault::Fails);
    let why = drained(&mut cluster, &server).expect_err("what there is cannot be told");
    assert!(why.contains("bucket below does not answer"), "{why}");
    bucket.be(BucketFault::Good);
    let end = Instant::now() + Duration::from_secs(60);
    let done = loop {
        match drained(&mut cluster, &server) {
            Ok(done) => break done,
            Err(why) => assert!(Instant::now() < end, "{why}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let (so_far, trouble) = done;
    assert_eq!((so_far.moved, so_far.moved_bytes, so_far.left, trouble), (30, 30 * 90_000, 0, None));
    assert_eq!((from.store.stats().keys, bucket.values().len()), (0, 0));
    let c = &mut to.client();
    for n in 0..30 {
        assert_eq!(words(c, &format!("GET k{n}")), Reply::Bulk(content(n, 90_000)), "{n}");
    }
    assert_eq!(scan(&mut from.client(), 10), Ok(BTreeMap::new()));
}

#[test]
fn a_drain_removes_nothing_where_another_has_another_value_unless_it_is_told_which_counts() {
    for (newer, counts) in
        [(None, "none"), (Some(ConflictRule::Drained), "here"), (Some(ConflictRule::Other), "there")]
    {
        let (from, to) = (in_memory(), in_memory());
        let (here, there) = (&mut from.client(), &mut to.client());
        assert_eq!((words(here, "SET k here"), words(there, "SET k there")), (ok(), ok()));
        assert_eq!((words(here, "SET same x"), words(there, "SET same x")), (ok(), ok()));
        assert_eq!(words(here, "SET timed x PX 100000"), ok());
        let (mut cluster, server) = cluster([&from, &to]);
        let (so_far, trouble) = drained_by(&mut cluster, &server, newer).unwrap();
        if newer.is_none() {
            assert_eq!((so_far.moved, so_far.had, so_far.left), (1, 1, 1));
            assert!(trouble.unwrap().contains("another value under 'k'"));
            assert_eq!((words(here, "GET k"), words(there, "GET k")), (bulk("here"), bulk("there")));
        } else {
            assert_eq!((so_far.moved + so_far.had, so_far.left, trouble), (3, 0, None), "{counts}");
            assert_eq!((words(here, "GET k"), words(there, "GET k")), (Reply::Nothing, bulk(counts)));
        }
        let Reply::Integer(ms) = words(there, "PTTL timed") else { panic!("a time") };
        assert!((1..=100_000).contains(&ms), "{ms}");
    }
}

/// A client goes on writing: the drain never removes the last acknowledged value.
#[test]
fn a_drain_never_removes_what_was_put_while_it_copied() {
    let (from, to) = (in_memory(), in_memory());
    let c = &mut from.client();
    (0..50).for_each(|n| assert_eq!(words(c, &format!("SET k{n} 1")), ok()));
    let (mut cluster, server) = cluster([&from, &to]);
    let over = std::sync::atomic::AtomicBool::new(false);
    let last = std::thread::scope(|threads| {
        let writer = threads.spawn(|| {
            let (c, mut last) = (&mut from.client(), 1);
            while !over.load(std::sync::atomic::Ordering::SeqCst) {
                last += 1;
                (0..50).for_each(|n| assert_eq!(words(c, &format!("SET k{n} {last}")), ok()));
            }
            last
        });
        for _ in 0..5 {
            // It may well find values each time.
            let _ = drained(&mut cluster, &server).unwrap();
        }
        over.store(true, std::sync::atomic::Ordering::SeqCst);
        writer.join().unwrap()
    });
    assert!(last > 1);
    let (_, trouble) = drained(&mut cluster, &server).unwrap();
    let (here, there) = (&mut from.client(), &mut to.client());
    for n in 0..50 {
        let found = [words(here, &format!("GET k{n}")), words(there, &format!("GET k{n}"))];
        let newest = found.iter().any(|found| *found == bulk(&last.to_string()));
        assert!(newest, "k{n}: {found:?}, the last was {last}; {trouble:?}");
    }
    // The error names values that differ: the value there was moved between two writes, and is the older one.
    if trouble.is_some() {
        let (so_far, trouble) = drained_by(&mut cluster, &server, Some(ConflictRule::Drained)).unwrap();
        assert_eq!((so_far.left, trouble), (0, None));
    }
    for n in 0..50 {
        assert_eq!(words(there, &format!("GET k{n}")), bulk(&last.to_string()));
    }
    assert_eq!(from.store.stats().keys, 0);
}

#[test]
fn a_value_is_removed_by_its_generation_alone() {
    let served = in_memory();
    let c = &mut served.client();
    assert_eq!(words(c, "BATON.DEL k 1"), Reply::Integer(0), "there is none");
    assert_eq!(words(c, "SET k one"), ok());
    let generation = |c: &mut Client| {
        let Reply::List(parts) = words(c, "BATON.STAT k") else { panic!("it is there") };
        let at = parts.iter().position(|part| *part == bulk("generation")).unwrap();
        let Reply::Integer(generation) = parts[at + 1] else { panic!("{parts:?}") };
        generation
    };
    let first = generation(c);
    assert_eq!(words(c, "SET k two"), ok());
    assert_eq!(words(c, &format!("BATON.DEL k {first}")), Reply::Integer(0));
    assert_eq!(words(c, "GET k"), bulk("two"));
    let second = generation(c);
    assert_eq!(words(c, &format!("BATON.DEL k {second}")), Reply::Integer(1));
    assert_eq!(words(c, "GET k"), Reply::Nothing);
    assert!(error_of(&words(c, "BATON.DEL k x")).starts_with("ERR value is not an integer"));
}
