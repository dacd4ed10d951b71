//! The bucket below: an object read repeatedly outlives eviction and the process; a removed or replaced one never
//! comes back; a damaged one is never served; and a bucket in trouble does not affect clients.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::faulty::{BucketFault, FaultyBucket};
use super::tiers::{NoticeLog, over, read, settle};
use super::{content, key};
use baton_objects::{
    Clock, ColdBucket, ColdConfig, ColdStats, LowerConfig, ObjectStore, PutOptions, Refusal, SsdConfig,
    StoreConfig,
};
use baton_types::Rng;

/// Longer than anything takes here, but for those who wait in vain.
const TIME_LIMIT: Duration = Duration::from_secs(10);
const SHORT: Duration = Duration::from_millis(200);

fn started(cold: ColdConfig, ssd: Option<SsdConfig>) -> (ObjectStore, NoticeLog) {
    over(LowerConfig { ssd, cold: Some(cold), ..LowerConfig::default() })
}

fn with_folder(folder: &Path) -> ObjectStore {
    let url = ColdBucket::Url(format!("file://{}", folder.display()));
    started(ColdConfig { time_limit: TIME_LIMIT, ..ColdConfig::new(url) }, None).0
}

fn with_bucket(bucket: &Arc<FaultyBucket>, time_limit: Duration) -> (ObjectStore, NoticeLog) {
    started(ColdConfig { time_limit, ..ColdConfig::new(ColdBucket::Given(Arc::clone(bucket) as _)) }, None)
}

fn cold(store: &ObjectStore) -> ColdStats {
    store.lower_stats().cold
}

#[track_caller]
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Puts a value and asks for it twice: then it is worth a place in the bucket.
fn ask_twice(store: &ObjectStore, name: &str, value: &[u8]) {
    store.put(key(name), value, PutOptions::REPLACE).unwrap();
    assert!(store.get(key(name)).is_some() && store.get(key(name)).is_some());
}

fn fill(store: &ObjectStore, count: u64) {
    for n in 0..count {
        ask_twice(store, &n.to_string(), &content(n, 90_000));
        settle(store);
    }
    assert_eq!((cold(store).written, cold(store).passed_over), (count, 0), "{:?}", cold(store));
}

/// Makes memory evict a key, by values that no test reads.
#[track_caller]
fn crowd_out(store: &ObjectStore, name: &str) {
    let mut crowd = 0..2_000u64;
    while store.exists(key(name)) {
        let n = crowd.next().expect("it is evicted some time");
        let bytes = if n % 2 == 0 { 40_000 } else { 90_000 };
        store.put(key(&format!("crowd for {name} {n}")), &content(n, bytes), PutOptions::REPLACE).unwrap();
    }
}

#[test]
fn what_was_asked_for_twice_outlives_eviction_and_the_process() {
    let bucket = FaultyBucket::new();
    let (store, said) = with_bucket(&bucket, TIME_LIMIT);
    store.put(key("once"), &content(7, 50_000), PutOptions::REPLACE).unwrap();
    assert!(store.get(key("once")).is_some());
    let ends = PutOptions { ttl_us: Some(1_000_000_000), ..PutOptions::REPLACE };
    store.put(key("ends"), &content(7, 50_000), ends).unwrap();
    (0..3).for_each(|_| assert!(store.get(key("ends")).is_some()));
    settle(&store);
    assert_eq!(cold(&store).written, 0, "asked for once, or with an end");
    fill(&store, 60);
    assert!(said.lock().unwrap()[0].contains("0 objects, 0 bytes; 1 MiB there at"), "{said:?}");
    assert!(store.stat(key("59")).unwrap().cold && !store.stat(key("59")).unwrap().lasts);
    for n in 0..60 {
        assert_eq!(read(&store, &n.to_string()), Some(content(n, 90_000)), "{n}");
    }
    let stats = cold(&store);
    assert!(stats.hits >= 20 && stats.hit_bytes == stats.hits * 90_000 && stats.objects == 60, "{stats:?}");
    let listed = bucket.values();
    assert_eq!(listed.iter().map(|(_, bytes)| bytes).sum::<u64>(), stats.bytes);
    store.check();
    drop(store);
    let (store, said) = with_bucket(&bucket, TIME_LIMIT);
    assert!(said.lock().unwrap()[0].contains("60 objects"), "{said:?}");
    let asked = bucket.asked();
    assert!(!store.is_below(key("once")) && read(&store, "once").is_none() && read(&store, "none").is_none());
    assert!(bucket.asked() - asked < 5, "what it has not is not asked for: only its owner was looked at");
    for n in (0..60).rev() {
        assert_eq!(read(&store, &n.to_string()), Some(content(n, 90_000)), "{n}");
    }
    let stats = cold(&store);
    assert_eq!((stats.hits, stats.refused, stats.failures, stats.written), (60, 0, 0, 0));
}

#[test]
fn what_the_ssd_gives_back_is_worth_a_place_in_the_bucket_and_is_found_there_when_the_ssd_is_lost() {
    let (folder, bucket) = (tempfile::tempdir().unwrap(), FaultyBucket::new());
    let open = |dir: &Path| {
        let cold = ColdConfig::new(ColdBucket::Given(Arc::clone(&bucket) as _));
        let ssd = SsdConfig { block_bytes: Some(16 << 10), ..SsdConfig::new(dir.to_owned(), 64 << 20) };
        started(cold, Some(ssd)).0
    };
    let store = open(folder.path());
    store.put(key("hot"), &content(1, 90_000), PutOptions::REPLACE).unwrap();
    assert!(store.get(key("hot")).is_some());
    settle(&store);
    assert_eq!((store.lower_stats().ssd.values, cold(&store).written), (1, 0));
    crowd_out(&store, "hot");
    assert!(store.bring(key("hot")).is_some());
    assert_eq!(read(&store, "hot"), Some(content(1, 90_000)));
    settle(&store);
    assert_eq!((store.lower_stats().ssd_hits, cold(&store).written), (1, 1));
    drop(store);
    let other = tempfile::tempdir().unwrap();
    let store = open(other.path());
    assert_eq!(read(&store, "hot"), Some(content(1, 90_000)));
    assert_eq!((store.lower_stats().ssd_hits, cold(&store).hits), (0, 1));
    assert!(store.get(key("hot")).is_some());
    settle(&store);
    assert_eq!(store.lower_stats().ssd.values, 1, "and rests on the SSD again");
    store.remove(key("hot")).unwrap();
    drop(store);
    let store = open(other.path());
    assert_eq!(read(&store, "hot"), None);
    assert!(bucket.values().is_empty());
}

/// Files of values.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for place in std::fs::read_dir(folder).unwrap().flatten().filter(|place| place.path().is_dir()) {
        let inside = std::fs::read_dir(place.path()).unwrap().flatten().map(|file| file.path());
        found.extend(inside.filter(|path| path.extension().is_some_and(|ending| ending == "kv")));
    }
    found.sort();
    found
}

#[test]
fn what_is_not_as_it_was_written_is_never_served_and_goes() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_folder(folder.path());
    fill(&store, 8);
    drop(store);
    let paths = files(folder.path());
    assert_eq!(paths.len(), 8);
    let old: Vec<Vec<u8>> = paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
    let change = |at: usize, change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = old[at].clone();
        change(&mut bytes);
        std::fs::write(&paths[at], bytes).unwrap();
    };
    change(0, &|bytes| bytes[50_000] ^= 1);
    change(1, &|bytes| bytes.truncate(60_000));
    change(2, &|bytes| bytes.clone_from(&old[7]));
    change(3, &|bytes| bytes.fill(b'x'));
    change(4, &|bytes| bytes[14] ^= 1);
    change(5, &|bytes| bytes.clear());
    change(6, &|bytes| bytes.push(0));
    let thesis = paths[0].parent().unwrap().join("thesis.kv");
    std::fs::write(&thesis, "somebody's").unwrap();
    let store = with_folder(folder.path());
    assert_eq!(cold(&store).objects, 8);
    let found: Vec<u64> = (0..8).filter(|n: &u64| read(&store, &n.to_string()).is_some()).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(read(&store, &found[0].to_string()), Some(content(found[0], 90_000)));
    settle(&store);
    let stats = cold(&store);
    assert_eq!((stats.refused, stats.objects, stats.failures, stats.hits), (7, 1, 0, 1), "{stats:?}");
    let mut left = [paths[7].clone(), thesis];
    left.sort();
    assert_eq!(files(folder.path()), left, "what is not ours is left alone");
    // An object deleted behind the store's back is a miss, too.
    std::fs::remove_file(&paths[7]).unwrap();
    let name = found[0].to_string();
    crowd_out(&store, &name);
    assert!(store.is_below(key(&name)) && read(&store, &name).is_none());
    settle(&store);
    assert_eq!(cold(&store).objects, 0);
    // A refused value can be written again.
    ask_twice(&store, "0", &content(0, 90_000));
    settle(&store);
    drop(store);
    assert_eq!(read(&with_folder(folder.path()), "0"), Some(content(0, 90_000)));
}

#[test]
fn what_is_removed_replaced_or_ends_some_day_never_comes_back() {
    let bucket = FaultyBucket::new();
    let (store, _) = with_bucket(&bucket, TIME_LIMIT);
    for name in ["removed", "replaced", "ending", "same", "kept"] {
        ask_twice(&store, name, &content(1, 40_000));
    }
    settle(&store);
    assert_eq!(bucket.values().len(), 5);
    store.remove(key("removed")).unwrap();
    store.put(key("replaced"), &content(2, 40_000), PutOptions::REPLACE).unwrap();
    store.set_ttl(key("ending"), Some(1_000_000_000)).unwrap();
    assert_eq!(bucket.values().len(), 2, "confirmed when it is answered");
    // Equal bytes that are put again after eviction keep their copy.
    crowd_out(&store, "same");
    store.put(key("same"), &content(1, 40_000), PutOptions::REPLACE).unwrap();
    assert_eq!((bucket.values().len(), cold(&store).unconfirmed_removals), (2, 0));
    drop(store);
    let (store, _) = with_bucket(&bucket, TIME_LIMIT);
    for name in ["removed", "replaced", "ending"] {
        assert_eq!(read(&store, name), None, "{name}");
    }
    for name in ["same", "kept"] {
        assert_eq!(read(&store, name), Some(content(1, 40_000)), "{name}");
    }
    // A value that is only below can be removed, too.
    drop(store);
    let (store, _) = with_bucket(&bucket, TIME_LIMIT);
    assert!(!store.exists(key("kept")) && store.is_below(key("kept")));
    store.remove(key("kept")).unwrap();
    assert_eq!(store.remove(key("kept")), Err(Refusal::Absent));
    assert!(read(&store, "kept").is_none() && bucket.values().len() == 1);
    assert_eq!(store.lower_stats().cold_unconfirmed, 0);
}

#[test]
fn a_bucket_that_fails_is_left_alone_and_what_was_removed_meanwhile_goes_when_it_answers_again() {
    let bucket = FaultyBucket::new();
    let (store, said) = with_bucket(&bucket, SHORT);
    fill(&store, 60);
    bucket.be(BucketFault::Fails);
    let away: Vec<String> = (0..60).map(|n| n.to_string()).filter(|n| !store.exists(key(n))).collect();
    assert!(away.len() > 5, "memory has room for some forty");
    let asked = bucket.asked();
    for name in &away {
        assert_eq!(read(&store, name), None);
        let other = format!("other {name}");
        store.put(key(&other), &content(5, 5_000), PutOptions::REPLACE).unwrap();
        assert_eq!(read(&store, &other), Some(content(5, 5_000)), "memory goes on");
    }
    until("it is found to fail", || !cold(&store).on);
    assert!(!store.is_below(key(&away[0])));
    assert_eq!(store.remove(key(&away[0])), Err(Refusal::Unconfirmed), "nobody may believe that it is gone");
    store.put(key(&away[1]), &content(999, 70_000), PutOptions::REPLACE).unwrap();
    assert!(bucket.asked() - asked < 30, "{}", bucket.asked() - asked);
    assert_eq!((store.lower_stats().cold_unconfirmed, cold(&store).unconfirmed_removals), (2, 2));
    let failures = cold(&store).failures;
    assert!(said.lock().unwrap().iter().any(|words| words.contains("left alone")), "{said:?}");
    bucket.be(BucketFault::Good);
    until("it answers a look", || cold(&store).on);
    settle(&store);
    assert_eq!(store.remove(key(&away[0])), Err(Refusal::Absent), "it was tried again");
    assert_eq!(read(&store, &away[2]), Some(content(away[2].parse().unwrap(), 90_000)));
    assert!(said.lock().unwrap().iter().any(|words| words.contains("answers again")), "{said:?}");
    drop(store);
    let (store, _) = with_bucket(&bucket, TIME_LIMIT);
    assert!(read(&store, &away[0]).is_none() && read(&store, &away[1]).is_none());
    assert_eq!(cold(&store).objects, 58);
    assert!(failures >= 3);
}

#[test]
fn a_bucket_that_hangs_costs_a_bounded_time_and_memory_goes_on() {
    let bucket = FaultyBucket::new();
    let (store, _) = with_bucket(&bucket, SHORT);
    fill(&store, 60);
    let away: Vec<String> = (0..60).map(|n| n.to_string()).filter(|n| !store.exists(key(n))).collect();
    bucket.be(BucketFault::Hangs);
    let before = cold(&store);
    // Far more than may be in hand: the rest is passed over, and every put and every read of memory succeeds.
    for n in 100..140u64 {
        ask_twice(&store, &n.to_string(), &content(n, 90_000));
    }
    let stats = cold(&store);
    assert!(stats.passed_over >= 30 && stats.written == before.written, "{stats:?}");
    assert_eq!(read(&store, &away[0]), None);
    assert_eq!(store.remove(key(&away[0])), Err(Refusal::Unconfirmed));
    store.put(key(&away[1]), &content(1, 1_000), PutOptions::REPLACE).unwrap();
    assert_eq!(read(&store, &away[1]), Some(content(1, 1_000)));
    until("it is left alone", || {
        let _ = read(&store, &away[3]);
        !cold(&store).on
    });
    let asked = bucket.asked();
    assert!((0..100).all(|_| store.bring(key(&away[2])).is_none()));
    assert!(bucket.asked() - asked < 10, "it is looked at now and then, for nobody");
    bucket.be(BucketFault::Good);
    until("it answers a look", || cold(&store).on);
    settle(&store);
    assert_eq!(read(&store, &away[2]), Some(content(away[2].parse().unwrap(), 90_000)));
    drop(store);
    let (store, _) = with_bucket(&bucket, TIME_LIMIT);
    assert!(read(&store, &away[0]).is_none() && read(&store, &away[1]).is_none());
}

#[test]
fn a_write_that_arrives_after_its_removal_is_not_believed() {
    let bucket = FaultyBucket::new();
    let (store, _) = with_bucket(&bucket, SHORT);
    bucket.be(BucketFault::Late);
    ask_twice(&store, "late", &content(1, 50_000));
    settle(&store);
    assert_eq!((cold(&store).failures, cold(&store).objects, cold(&store).written), (1, 0, 0));
    bucket.be(BucketFault::Good);
    store.put(key("late"), &content(2, 50_000), PutOptions::REPLACE).unwrap();
    store.remove(key("late")).unwrap();
    assert_eq!((bucket.arrive(), bucket.values().len()), (1, 1), "now it is there");
    assert_eq!(read(&store, "late"), None);
    drop(store);
    let (store, _) = with_bucket(&bucket, TIME_LIMIT);
    assert!(read(&store, "late").is_none() && bucket.values().is_empty(), "{:?}", bucket.values());
}

#[test]
fn what_a_killed_store_had_on_its_way_is_not_believed_after_another_start() {
    let bucket = FaultyBucket::new();
    let (store, _) = with_bucket(&bucket, TIME_LIMIT);
    bucket.be(BucketFault::Late);
    ask_twice(&store, "k", &content(1, 50_000));
    until("it is on its way", || bucket.late() == 1);
    drop(store);
    bucket.be(BucketFault::Good);
    let (store, _) = with_bucket(&bucket, TIME_LIMIT);
    assert_eq!(bucket.arrive(), 1);
    assert_eq!(read(&store, "k"), None, "the listing was over");
    store.put(key("k"), &content(2, 50_000), PutOptions::REPLACE).unwrap();
    store.remove(key("k")).unwrap();
    drop(store);
    let (store, _) = with_bucket(&bucket, TIME_LIMIT);
    assert!(read(&store, "k").is_none() && bucket.values().is_empty());
}

#[test]
fn what_was_written_in_the_second_of_a_start_is_there_after_the_next() {
    let bucket = FaultyBucket::new();
    bucket.tell_seconds();
    let time_limit = Duration::from_secs(2);
    let (store, _) = with_bucket(&bucket, time_limit);
    fill(&store, 20);
    drop(store);
    // Each start is in the second in which the one before wrote, and the last one looks at what the first had written.
    for _ in 0..2 {
        let (store, _) = with_bucket(&bucket, time_limit);
        assert_eq!(cold(&store).objects, 20);
    }
}

#[test]
fn what_the_bucket_keeps_has_a_bound() {
    let bucket = FaultyBucket::new();
    let open = |capacity_bytes: u64, objects_max: u64| {
        let config = ColdConfig::new(ColdBucket::Given(Arc::clone(&bucket) as _));
        started(ColdConfig { capacity_bytes, objects_max, ..config }, None).0
    };
    let store = open(1 << 20, 1_000);
    for n in 0..40u64 {
        ask_twice(&store, &n.to_string(), &content(n, 90_000));
        settle(&store);
        let kept: u64 = bucket.values().iter().map(|(_, bytes)| bytes).sum();
        assert!(kept <= 1 << 20 && kept == cold(&store).bytes, "{kept}");
    }
    let stats = cold(&store);
    assert_eq!((stats.objects, stats.evicted, stats.written, stats.unconfirmed_removals), (11, 29, 40, 0));
    drop(store);
    // Less may be allowed at the next start; what was there longest gives way.
    let store = open(1 << 20, 6);
    until("it fits", || cold(&store).objects == 6);
    settle(&store);
    assert_eq!(bucket.values().len(), 6);
    assert_eq!(read(&store, "39"), Some(content(39, 90_000)));
    drop(store);
    let config = ColdConfig::new(ColdBucket::Given(Arc::clone(&bucket) as _));
    let (store, said) = started(ColdConfig { objects_max: 2, ..config }, None);
    assert!(!cold(&store).on && said.lock().unwrap()[0].contains("more than 4 objects"), "{said:?}");
    assert_eq!(bucket.values().len(), 6, "what it will not take over it leaves alone");
}

#[test]
fn a_bucket_that_does_not_prove_itself_is_switched_off_loudly() {
    for fault in [BucketFault::Fails, BucketFault::Hangs] {
        let bucket = FaultyBucket::new();
        bucket.be(fault);
        let (store, said) = with_bucket(&bucket, SHORT);
        store.put(key("a"), b"x", PutOptions::REPLACE).unwrap();
        assert_eq!(read(&store, "a").unwrap(), b"x");
        (0..5).for_each(|_| assert!(store.get(key("a")).is_some()));
        settle(&store);
        assert_eq!((cold(&store).on, cold(&store).written), (false, 0));
        let said = said.lock().unwrap();
        assert!(said[0].contains("write: ") && said[0].contains("goes on without it"), "{said:?}");
    }
}

#[test]
fn settings_that_cannot_be_are_refused_at_the_start() {
    let refused = |config: ColdConfig| {
        let lower = LowerConfig { cold: Some(config), ..LowerConfig::default() };
        ObjectStore::with_lower(&StoreConfig::default(), Clock::machine(), &lower).unwrap_err()
    };
    let memory = || ColdConfig::new(ColdBucket::Url("memory:".into()));
    assert!(refused(ColdConfig::new(ColdBucket::Url("ftp://bucket".into()))).contains("s3://bucket/prefix"));
    assert!(refused(ColdConfig { capacity_bytes: 1, ..memory() }).contains("capacity_bytes"));
    assert!(refused(ColdConfig { objects_max: 0, ..memory() }).contains("objects_max"));
    assert!(refused(ColdConfig { time_limit: Duration::ZERO, ..memory() }).contains("time_limit"));
}

#[test]
fn a_prefix_belongs_to_the_store_that_began_to_use_it_last() {
    let bucket = FaultyBucket::new();
    let (first, said) = with_bucket(&bucket, SHORT);
    fill(&first, 3);
    let (second, _) = with_bucket(&bucket, SHORT);
    assert_eq!(read(&second, "1"), Some(content(1, 90_000)));
    until("the first leaves it", || !cold(&first).on);
    until("and says so", || said.lock().unwrap().iter().any(|words| words.contains("another store")));
    ask_twice(&first, "mine", &content(9, 90_000));
    first.remove(key("2")).unwrap();
    settle(&first);
    assert_eq!((cold(&first).written, bucket.values().len()), (3, 3), "it touches nothing any more");
    assert_eq!(read(&second, "2"), Some(content(2, 90_000)));
    assert!(cold(&second).on);
}

#[test]
fn many_who_miss_at_once_are_one_read() {
    let bucket = FaultyBucket::new();
    let (store, _) = with_bucket(&bucket, TIME_LIMIT);
    ask_twice(&store, "hot", &content(1, 500_000));
    settle(&store);
    drop(store);
    let (store, _) = with_bucket(&bucket, TIME_LIMIT);
    std::thread::scope(|threads| {
        for _ in 0..8 {
            threads.spawn(|| assert_eq!(read(&store, "hot"), Some(content(1, 500_000))));
        }
    });
    assert!(cold(&store).hits < 8, "{:?}", cold(&store));
    store.check();
}

/// Beside a naive model over put, get, remove, eviction, and restarts in the middle of everything.
#[test]
fn random_histories_agree_with_a_naive_model() {
    let (mut restarts, mut hits) = (0, 0);
    for seed in 0..6 {
        let (bucket, mut rng) = (FaultyBucket::new(), Rng::fork(seed, 9));
        let config = || ColdConfig {
            capacity_bytes: 4 << 20,
            time_limit: TIME_LIMIT,
            ..ColdConfig::new(ColdBucket::Given(Arc::clone(&bucket) as _))
        };
        let mut store = started(config(), None).0;
        // The content of each key, by seed and length.
        let mut model: BTreeMap<String, (u64, usize)> = BTreeMap::new();
        for step in 0..1_500u64 {
            let name = format!("key {}", rng.below(25));
            match rng.below(100) {
                0..25 => {
                    // Equal bytes repeatedly, and others.
                    let value = (rng.below(3), 1 + usize::try_from(rng.below(4)).unwrap() * 120_000);
                    store.put(key(&name), &content(value.0, value.1), PutOptions::REPLACE).unwrap();
                    model.insert(name, value);
                }
                25..85 => match (read(&store, &name), model.get(&name)) {
                    (Some(value), Some((seed, bytes))) => {
                        assert!(value == content(*seed, *bytes), "{name} at {step}");
                    }
                    (Some(_), None) => panic!("{name} was removed or never there, at {step}"),
                    (None, _) => {}
                },
                85..93 => {
                    let removed = store.remove(key(&name));
                    assert!(matches!(removed, Ok(()) | Err(Refusal::Absent)), "{removed:?}");
                    assert_eq!(read(&store, &name), None);
                    model.remove(&name);
                }
                93..98 => settle(&store),
                _ => {
                    hits += cold(&store).hits;
                    drop(store);
                    store = started(config(), None).0;
                    restarts += 1;
                }
            }
        }
        settle(&store);
        hits += cold(&store).hits;
        store.check();
        let kept: u64 = bucket.values().iter().map(|(_, bytes)| bytes).sum();
        assert!(kept <= 4 << 20, "{kept}");
    }
    assert!(restarts > 100 && hits > 200, "{restarts} {hits}");
}

/// The state of a key after a history.
#[derive(Clone, Debug, Default)]
struct ExpectedValue {
    /// Its value, by seed and length of its content.
    value: Option<(u64, usize)>,
    /// Something about it was not confirmed: after a restart it may have an older value.
    doubtful: bool,
}

/// A bucket in changing moods under a store that restarts repeatedly, with the expected state of its keys.
struct Trial {
    bucket: Arc<FaultyBucket>,
    store: ObjectStore,
    keys: BTreeMap<String, ExpectedValue>,
    restarts: u64,
    hits: u64,
    confirmed: u64,
}

impl Trial {
    fn new() -> Self {
        let bucket = FaultyBucket::new();
        let store = Self::start(&bucket);
        Self { bucket, store, keys: BTreeMap::new(), restarts: 0, hits: 0, confirmed: 0 }
    }

    /// A start whose proof held; on a busy machine it may take several.
    fn start(bucket: &Arc<FaultyBucket>) -> ObjectStore {
        loop {
            let store = with_bucket(bucket, Duration::from_millis(100)).0;
            if cold(&store).on {
                return store;
            }
        }
    }

    fn put(&mut self, name: &str, value: (u64, usize)) {
        let before = self.store.lower_stats().cold_unconfirmed;
        self.store.put(key(name), &content(value.0, value.1), PutOptions::REPLACE).unwrap();
        let known = self.keys.entry(name.to_owned()).or_default();
        known.value = Some(value);
        known.doubtful |= self.store.lower_stats().cold_unconfirmed != before;
    }

    fn remove(&mut self, name: &str) {
        let removed = self.store.remove(key(name));
        let known = self.keys.entry(name.to_owned()).or_default();
        known.value = None;
        match removed {
            Ok(()) => {
                self.confirmed += 1;
                known.doubtful = false;
            }
            Err(Refusal::Unconfirmed) => known.doubtful = true,
            other => assert_eq!(other, Err(Refusal::Absent), "{name}"),
        }
        assert_eq!(read(&self.store, name), None, "{name}");
    }

    fn read(&self, name: &str) {
        let Some(value) = read(&self.store, name) else { return };
        let known = self.keys.get(name).cloned().unwrap_or_default();
        let (seed, bytes) = known.value.unwrap_or_else(|| panic!("{name} was removed or never there"));
        assert!(value == content(seed, bytes), "{name} is not {known:?}");
    }

    /// Kills the store in the middle of everything. The value found then is the value of a doubtful key.
    fn restart(&mut self) {
        self.hits += cold(&self.store).hits;
        self.restarts += 1;
        self.bucket.be(BucketFault::Good);
        self.store = Self::start(&self.bucket);
        for (name, known) in self.keys.iter_mut().filter(|(_, known)| known.doubtful) {
            let found = read(&self.store, name);
            known.value = found.map(|found| {
                let same = |seed: &u64| content(*seed, found.len()) == found;
                ((0..3).find(same).expect("some value that it once had"), found.len())
            });
            known.doubtful = false;
        }
    }
}

/// With any behaviour of the bucket: a key only has the value that it was given last. A confirmed removal holds over
/// restarts, late writes included.
#[test]
fn in_whatever_mood_the_bucket_is_no_key_has_a_value_that_is_not_its_own() {
    let (mut restarts, mut hits, mut confirmed) = (0, 0, 0);
    for seed in 0..6 {
        let (mut trial, mut rng) = (Trial::new(), Rng::fork(seed, 11));
        for _ in 0..1_200 {
            let name = format!("key {}", rng.below(12));
            match rng.below(100) {
                0..15 => {
                    trial.put(&name, (rng.below(3), 10_000 * usize::try_from(1 + rng.below(3)).unwrap()))
                }
                15..75 => trial.read(&name),
                75..85 => trial.remove(&name),
                85..87 => _ = trial.bucket.arrive(),
                87..89 => trial.bucket.be(BucketFault::Late),
                89 => trial.bucket.be(BucketFault::Fails),
                90 => trial.bucket.be(BucketFault::Hangs),
                91..97 => trial.bucket.be(BucketFault::Good),
                97 => _ = trial.store.settle(Duration::from_millis(200)),
                _ => trial.restart(),
            }
        }
        // Nothing may be under way when invariants are checked.
        trial.bucket.be(BucketFault::Good);
        until("everything is done", || trial.store.settle(Duration::from_millis(100)));
        trial.store.check();
        (restarts, hits) = (restarts + trial.restarts, hits + trial.hits);
        confirmed += trial.confirmed;
    }
    println!("{restarts} restarts, {hits} hits, {confirmed} removals confirmed");
    assert!(restarts > 50 && hits > 50 && confirmed > 100, "{restarts} {hits} {confirmed}");
}
