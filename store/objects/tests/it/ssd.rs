//! A failing disk below the memory: the store undoes no answered operation, drops nothing in silence, and keeps no
//! client waiting.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::tiers::{NoticeLog, over, read, settle};
use super::{content, key};
use baton_objects::{AdmissionRule, LowerConfig, ObjectStore, PutOptions, Refusal, SsdConfig};
use baton_tiers::faults::{FaultMode, FaultPlan, Faults, plan};

fn open(dir: &Path) -> (ObjectStore, NoticeLog) {
    let ssd = SsdConfig {
        block_bytes: Some(16 << 10),
        admit: AdmissionRule::First,
        ..SsdConfig::new(dir.to_owned(), 16 << 20)
    };
    over(LowerConfig { ssd: Some(ssd), ..LowerConfig::default() })
}

/// A store over a disk whose moods can be chosen.
fn faulty(dir: &Path) -> (Arc<Faults>, ObjectStore, NoticeLog) {
    let faults = plan(dir);
    let (store, said) = open(dir);
    (faults, store, said)
}

fn put(store: &ObjectStore, name: &str, seed: u64) -> Result<(), Refusal> {
    store.put(key(name), &content(seed, 20_000), PutOptions::REPLACE).map(|_| ())
}

const NAMES: [&str; 3] = ["gone", "replaced", "timed"];

fn fill(store: &ObjectStore) {
    NAMES.iter().for_each(|name| put(store, name, 1).unwrap());
    settle(store);
    assert!(NAMES.iter().all(|name| store.stat(key(name)).unwrap().lasts));
}

/// Removes, replaces and gives an end: how each is answered.
fn change(store: &ObjectStore) -> [Result<(), Refusal>; 3] {
    let ended = store.set_ttl(key("timed"), Some(1_000_000_000));
    [store.remove(key("gone")), put(store, "replaced", 2), ended]
}

/// The keys whose value is still that of an earlier life, though it was changed since.
fn older(store: &ObjectStore) -> Vec<&'static str> {
    let is_old = |name: &&str| read(store, name).is_some_and(|value| value == content(1, 20_000));
    NAMES.iter().copied().filter(is_old).collect()
}

/// Fails flushes until the disk is left alone.
fn switch_off(faults: &Faults, store: &ObjectStore) {
    faults.be(FaultPlan { flushes: FaultMode::Fails, ..FaultPlan::default() });
    let end = Instant::now() + Duration::from_secs(60);
    for n in 0.. {
        if !store.lower_stats().ssd_on {
            return;
        }
        assert!(Instant::now() < end, "it is left alone some time: {:?}", store.lower_stats());
        put(store, &format!("more {n}"), n).unwrap();
        let _ = store.settle(Duration::from_millis(20));
    }
}

#[test]
fn the_file_of_a_disk_that_was_left_alone_is_not_found_again() {
    let dir = tempfile::tempdir().unwrap();
    let (faults, store, said) = faulty(dir.path());
    fill(&store);
    switch_off(&faults, &store);
    assert_eq!(change(&store), [Ok(()); 3], "what cannot come back is done");
    assert_eq!(read(&store, "replaced"), Some(content(2, 20_000)));
    drop(store);
    let words = said.lock().unwrap().join("\n");
    assert!(words.contains("the file was removed"), "{words}");
    faults.be(FaultPlan::default());
    let (store, said) = open(dir.path());
    assert!(said.lock().unwrap()[0].contains("a new file"), "{said:?}");
    assert_eq!(older(&store), [""; 0]);
}

#[test]
fn a_removal_that_the_disk_did_not_confirm_is_refused_until_it_does() {
    let dir = tempfile::tempdir().unwrap();
    let (faults, store, said) = faulty(dir.path());
    fill(&store);
    faults.be(FaultPlan { flushes: FaultMode::Hangs, ..FaultPlan::default() });
    assert_eq!(change(&store), [Err(Refusal::Unconfirmed); 3]);
    assert_eq!(store.lower_stats().unconfirmed, 3);
    assert!(said.lock().unwrap().join("\n").contains("TRYAGAIN"), "{said:?}");
    assert!(!store.exists(key("gone")), "it is done here all the same");
    assert_eq!(read(&store, "replaced"), Some(content(2, 20_000)));
    assert_eq!(change(&store), [Err(Refusal::Unconfirmed); 3], "asked for again nothing else is known");
    faults.be(FaultPlan::default());
    settle(&store);
    assert_eq!(change(&store)[1..], [Ok(()), Ok(())]);
    assert_eq!(store.remove(key("gone")), Err(Refusal::Absent), "gone for good");
    drop(store);
    assert_eq!(older(&open(dir.path()).0), [""; 0]);
}

#[test]
fn a_file_that_one_start_passed_by_is_emptied_by_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    fill(&store);
    let (beside, said) = open(dir.path());
    assert!(said.lock().unwrap()[0].contains("the file is marked"), "{said:?}");
    put(&beside, "replaced", 2).unwrap();
    assert_eq!(beside.remove(key("gone")), Err(Refusal::Absent));
    drop((store, beside));
    let (store, said) = open(dir.path());
    assert!(said.lock().unwrap()[0].contains("went on without"), "{said:?}");
    assert_eq!(older(&store), [""; 0]);
    fill(&store);
    drop(store);
    let (store, said) = open(dir.path());
    assert!(said.lock().unwrap()[0].contains("3 objects"), "the mark is gone: {said:?}");
    assert_eq!(older(&store), NAMES);
    let other = tempfile::tempdir().unwrap();
    let ssd = SsdConfig::new(other.path().to_owned(), 3 << 40);
    let (_, said) = over(LowerConfig { ssd: Some(ssd), ..LowerConfig::default() });
    let words = said.lock().unwrap().join("\n");
    assert!(words.contains("no room"), "{words}");
}

#[cfg(feature = "resp")]
mod served {
    use super::*;
    use crate::resp::{TestServer, bulk, error_of, ok, serve, words};
    use baton_objects::client::{Cluster, ClusterConfig};
    use baton_objects::resp::RespConfig;
    use baton_objects::resp::client::{Client, Reply};

    /// Values of 20 kB, more of them than memory has room for.
    const VALUES: u64 = 300;

    fn filled(dir: &Path) -> (Arc<Faults>, TestServer) {
        let (faults, store, _) = faulty(dir);
        for n in 0..VALUES {
            put(&store, &format!("k{n}"), n).unwrap();
            settle(&store);
        }
        (faults, serve(store, RespConfig { allow_flush: true, ..RespConfig::default() }))
    }

    fn there(served: &TestServer) -> u64 {
        let c = &mut served.client();
        (0..VALUES).filter(|n| words(c, &format!("EXISTS k{n}")) == Reply::Integer(1)).count() as u64
    }

    fn scan(c: &mut Client) -> Result<usize, String> {
        let (mut found, mut cursor) = (0, "0".to_owned());
        loop {
            let parts = match words(c, &format!("SCAN {cursor} COUNT 1000")) {
                Reply::List(parts) => parts,
                other => return Err(error_of(&other).to_owned()),
            };
            let [Reply::Bulk(next), Reply::List(keys)] = &parts[..] else { panic!("{parts:?}") };
            found += keys.len();
            cursor = String::from_utf8(next.clone()).unwrap();
            if cursor == "0" {
                return Ok(found);
            }
        }
    }

    #[test]
    fn nothing_on_a_disk_that_cannot_be_read_is_left_out_in_silence() {
        let dir = tempfile::tempdir().unwrap();
        let (faults, from) = filled(dir.path());
        let to = serve(over(LowerConfig::default()).0, RespConfig::default());
        let addresses = [&from, &to].map(|served| format!("redis://{}", served.address));
        let mut cluster = Cluster::new(ClusterConfig::of(&addresses.join(",")).unwrap()).unwrap();
        let c = &mut from.client();
        assert_eq!(scan(c), Ok(VALUES as usize));
        faults.be(FaultPlan { reads: FaultMode::Fails, ..FaultPlan::default() });
        let why = scan(c).expect_err("some are only on the disk");
        assert!(why.contains("SSD below does not answer"), "{why}");
        let why = words(c, "FLUSHDB");
        assert!(error_of(&why).contains("SSD below does not answer"), "{why:?}");
        assert!(there(&from) > 0, "those that it could not list are there still");
        let server = from.address.to_string();
        let mut drain = cluster.drain(&server).unwrap();
        let ended = loop {
            match drain.step() {
                Ok(true) => {}
                Ok(false) => break drain.trouble().map(ToString::to_string),
                Err(why) => break Some(why.to_string()),
            }
        };
        assert!(ended.is_some(), "it is not empty");
        faults.be(FaultPlan::default());
        assert_eq!(scan(c), Ok(there(&from) as usize));
        let mut drain = cluster.drain(&server).unwrap();
        while drain.step().unwrap() {}
        assert_eq!((drain.so_far().left, drain.trouble()), (0, None));
        assert_eq!(there(&from), 0);
        assert_eq!(words(c, "SET k1 back"), ok());
        assert_eq!(words(c, "GET k1"), bulk("back"));
    }

    #[test]
    fn a_value_that_is_listed_and_cannot_be_read_is_left_and_said_to_be() {
        let dir = tempfile::tempdir().unwrap();
        let (faults, from) = filled(dir.path());
        let to = serve(over(LowerConfig::default()).0, RespConfig::default());
        let addresses = [&from, &to].map(|served| format!("redis://{}", served.address));
        let mut cluster = Cluster::new(ClusterConfig::of(&addresses.join(",")).unwrap()).unwrap();
        let server = from.address.to_string();
        faults.be(FaultPlan { reads: FaultMode::FailsLong, ..FaultPlan::default() });
        let mut drain = cluster.drain(&server).unwrap();
        while drain.step().unwrap() {}
        let (left, trouble) = (drain.so_far().left, drain.trouble().map(ToString::to_string));
        assert!(left > 100, "{left}");
        assert!(trouble.unwrap().contains("cannot be read"));
        assert_eq!(there(&from), left);
        faults.be(FaultPlan::default());
        let mut drain = cluster.drain(&server).unwrap();
        while drain.step().unwrap() {}
        assert_eq!((drain.so_far().left, drain.trouble(), there(&from)), (0, None, 0));
    }

    /// Puts values that memory evicts before their copies are written, asks for something that walks the keys while
    /// the disk hangs, and lets it go on.
    fn while_copies_are_in_hand<T: Send>(
        served: &TestServer,
        faults: &Faults,
        walk: impl FnOnce(&mut Client) -> T + Send,
    ) -> T {
        faults.be(FaultPlan { writes: FaultMode::Hangs, ..FaultPlan::default() });
        (0..VALUES).for_each(|n| put(&served.store, &format!("k{n}"), n).unwrap());
        assert!(served.store.stats().evicted > 0);
        std::thread::scope(|threads| {
            let walking = threads.spawn(|| walk(&mut served.client()));
            std::thread::sleep(Duration::from_millis(300));
            faults.be(FaultPlan::default());
            let done = walking.join().unwrap();
            settle(&served.store);
            done
        })
    }

    #[test]
    fn a_walk_of_the_keys_meets_those_whose_copies_were_in_hand() {
        let dir = tempfile::tempdir().unwrap();
        let (faults, store, _) = faulty(dir.path());
        let served = serve(store, RespConfig { allow_flush: true, ..RespConfig::default() });
        assert_eq!(while_copies_are_in_hand(&served, &faults, |c| words(c, "FLUSHDB")), ok());
        assert_eq!(there(&served), 0, "none comes back");
        let found = while_copies_are_in_hand(&served, &faults, scan).unwrap();
        assert_eq!(found as u64, there(&served));
        let below = (0..VALUES).filter(|n| !served.store.exists(key(&format!("k{n}")))).count();
        assert!(found > VALUES as usize - below, "some of those that memory has not");
    }

    #[test]
    fn a_list_of_keys_costs_a_page_a_key() {
        let dir = tempfile::tempdir().unwrap();
        let (faults, served) = filled(dir.path());
        let before = faults.read_bytes();
        assert_eq!(scan(&mut served.client()), Ok(VALUES as usize));
        let read = faults.read_bytes() - before;
        assert!(read <= VALUES * 4096, "{read} bytes for {VALUES} keys");
    }

    #[test]
    fn a_disk_that_hangs_is_waited_for_once() {
        let dir = tempfile::tempdir().unwrap();
        let (faults, served) = filled(dir.path());
        let below: Vec<String> =
            (0..VALUES).map(|n| format!("k{n}")).filter(|name| !served.store.exists(key(name))).collect();
        assert!(below.len() > 50);
        faults.be(FaultPlan { reads: FaultMode::Hangs, ..FaultPlan::default() });
        let c = &mut served.client();
        let timed = |c: &mut Client, line: &str| {
            let began = Instant::now();
            (words(c, line), began.elapsed())
        };
        let (found, took) = timed(c, &format!("MGET {}", below[..5].join(" ")));
        assert_eq!(found, Reply::List(vec![Reply::Nothing; 5]));
        assert!(took < Duration::from_secs(18), "one deadline for all keys: {took:?}");
        for name in &below[..20] {
            let (found, took) = timed(c, &format!("GET {name}"));
            assert_eq!(found, Reply::Nothing);
            assert!(took < Duration::from_secs(1), "it is known by now: {took:?}");
        }
        let (found, took) = timed(c, &format!("EXISTS {}", below.join(" ")));
        assert_eq!(found, Reply::Integer(below.len() as i64), "it is there, though it cannot be read");
        assert!(took < Duration::from_secs(1), "{took:?}");
        let began = Instant::now();
        assert!(scan(c).expect_err("a list is whole or none").contains("SSD below does not answer"));
        assert!(began.elapsed() < Duration::from_secs(1));
        assert!(served.store.lower_stats().unasked >= 20);
        assert_eq!((words(c, "SET other here"), words(c, "GET other")), (ok(), bulk("here")));
        faults.be(FaultPlan::default());
        let end = Instant::now() + Duration::from_secs(30);
        while words(c, &format!("GET {}", below[30])) == Reply::Nothing {
            assert!(Instant::now() < end, "it is asked again once it answers");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(scan(c), Ok(VALUES as usize + 1));
    }
}
