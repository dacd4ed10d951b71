//! The SSD below the memory: what is touched often enough outlives eviction and the process; what was removed or
//! replaced never comes back; a disk that cannot be used costs nothing but its tier.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};

use super::tiers::{NoticeLog, over, read, settle};
use super::{content, key};
use baton_objects::{AdmissionRule, LowerConfig, ObjectStore, PutOptions, SsdConfig};
use baton_types::Rng;

/// Names the folder, in the process that is to be killed.
const CHILD: &str = "BATON_OBJECTS_KILLED";

fn open(dir: &Path, admit: AdmissionRule, ssd_bytes: u64) -> (ObjectStore, NoticeLog) {
    let ssd = SsdConfig { block_bytes: Some(16 << 10), admit, ..SsdConfig::new(dir.to_owned(), ssd_bytes) };
    over(LowerConfig { ssd: Some(ssd), ..LowerConfig::default() })
}

#[test]
fn what_is_evicted_is_found_again_and_outlives_the_process() {
    let dir = tempfile::tempdir().unwrap();
    let (store, said) = open(dir.path(), AdmissionRule::First, 64 << 20);
    for n in 0..100u64 {
        store.put(key(&n.to_string()), &content(n, 100_000 + n as usize), PutOptions::REPLACE).unwrap();
        if n % 10 == 9 {
            settle(&store);
        }
    }
    settle(&store);
    let stats = store.lower_stats();
    assert_eq!((stats.ssd.values, stats.passed_over), (100, 0), "{stats:?}");
    for n in 0..100 {
        assert_eq!(read(&store, &n.to_string()).unwrap(), content(n, 100_000 + n as usize), "{n}");
    }
    let stats = store.lower_stats();
    assert!(stats.ssd_hits >= 50 && stats.ssd_hit_bytes > 5_000_000, "{stats:?}");
    assert!(stats.ssd.written_bytes >= 10_000_000 && stats.ssd.written_bytes < 14_000_000, "{stats:?}");
    let wear = stats.ssd.written_bytes as f64 / stats.ssd_hit_bytes as f64;
    assert!((stats.written_per_hit_byte() - wear).abs() < 1e-9 && wear > 1.0, "{wear}");
    assert!(store.stat(key("99")).unwrap().lasts);
    store.check();
    drop(store);
    assert!(said.lock().unwrap()[0].contains("a new file"), "{said:?}");
    let (store, said) = open(dir.path(), AdmissionRule::First, 64 << 20);
    assert!(said.lock().unwrap()[0].contains("100 objects"), "{said:?}");
    assert_eq!((store.stats().keys, store.lower_stats().ssd.recovered), (0, 100));
    for n in (0..100).rev() {
        assert_eq!(read(&store, &n.to_string()).unwrap(), content(n, 100_000 + n as usize), "{n}");
    }
    assert_eq!(read(&store, "none"), None);
}

#[test]
fn values_of_common_sizes_take_a_block_for_each_64_kib() {
    let dir = tempfile::tempdir().unwrap();
    let ssd = SsdConfig { admit: AdmissionRule::First, ..SsdConfig::new(dir.path().to_owned(), 64 << 20) };
    let (store, _) = over(LowerConfig { ssd: Some(ssd), ..LowerConfig::default() });
    let mut before = 0;
    for (kib, blocks) in [(1, 1), (64, 1), (128, 2), (256, 4), (512, 8), (1_024, 16)] {
        // Names as inference engines give them are long.
        let name = format!("{kib}-{}", "x".repeat(240));
        store.put(key(&name), &content(kib, (kib as usize) << 10), PutOptions::REPLACE).unwrap();
        settle(&store);
        let stats = store.lower_stats().ssd;
        let taken = stats.used_bytes - before;
        assert_eq!(taken, blocks * SsdConfig::BLOCK_BYTES as u64, "{kib} KiB");
        assert!(kib < 64 || taken <= kib * 1_024 * 107 / 100, "{kib} KiB take {taken}");
        before = stats.used_bytes;
    }
    let stats = store.lower_stats().ssd;
    assert_eq!((stats.values, stats.written_bytes), (6, before));
}

#[test]
fn a_file_of_another_block_size_is_read_as_it_was_unless_a_size_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let open = |block_bytes, capacity_bytes| {
        let ssd = SsdConfig {
            block_bytes,
            admit: AdmissionRule::First,
            ..SsdConfig::new(dir.path().to_owned(), 0)
        };
        let ssd = SsdConfig { capacity_bytes, ..ssd };
        over(LowerConfig { ssd: Some(ssd), ..LowerConfig::default() })
    };
    let (store, _) = open(Some(64 << 10), 16 << 20);
    store.put(key("a"), &content(1, 65_536), PutOptions::REPLACE).unwrap();
    settle(&store);
    assert_eq!(store.lower_stats().ssd.used_bytes, 128 << 10);
    drop(store);
    let (store, said) = open(None, 16 << 20);
    assert!(said.lock().unwrap()[0].contains("2 blocks recovered"), "{said:?}");
    assert_eq!(read(&store, "a"), Some(content(1, 65_536)));
    drop(store);
    // Another size of the file starts empty anyway, and then with blocks that hold more.
    let (store, said) = open(None, 8 << 20);
    assert!(said.lock().unwrap()[0].contains("started empty"), "{said:?}");
    store.put(key("a"), &content(1, 65_536), PutOptions::REPLACE).unwrap();
    settle(&store);
    assert_eq!(store.lower_stats().ssd.used_bytes, SsdConfig::BLOCK_BYTES as u64);
}

#[test]
fn only_the_second_touch_costs_a_write_a_put_after_eviction_included() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path(), AdmissionRule::Second, 64 << 20);
    for n in 0..20u64 {
        store.put(key(&n.to_string()), &content(n, 50_000), PutOptions::REPLACE).unwrap();
    }
    settle(&store);
    assert_eq!(store.lower_stats().ssd.written_bytes, 0, "put once, never read");
    assert!(store.get(key("3")).is_some());
    settle(&store);
    assert_eq!(store.lower_stats().ssd.values, 1);
    for n in 100..300u64 {
        store.put(key(&n.to_string()), &content(n, 50_000), PutOptions::REPLACE).unwrap();
    }
    for n in 4..12u64 {
        let name = n.to_string();
        assert!(!store.exists(key(&name)) && read(&store, &name).is_none(), "{n} was not worth a write");
        store.put(key(&name), &content(n, 50_000), PutOptions::REPLACE).unwrap();
    }
    settle(&store);
    // Keys are remembered in a table without chains, at places that differ from run to run: a mark may be overwritten.
    let values = store.lower_stats().ssd.values;
    assert!((5..=9).contains(&values), "{values}: eight were put again after they were evicted");
    assert_eq!(read(&store, "3").unwrap(), content(3, 50_000));
}

#[test]
fn what_is_replaced_removed_or_ends_some_day_leaves_nothing_below() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path(), AdmissionRule::First, 64 << 20);
    for name in ["replaced", "removed", "ending", "kept"] {
        store.put(key(name), &content(1, 40_000), PutOptions::REPLACE).unwrap();
    }
    let ends = PutOptions { ttl_us: Some(1_000_000_000), ..PutOptions::REPLACE };
    store.put(key("ends"), &content(1, 40_000), ends).unwrap();
    settle(&store);
    assert_eq!(store.lower_stats().ssd.values, 4, "what has an end is not copied");
    store.put(key("replaced"), &content(2, 40_000), ends).unwrap();
    store.remove(key("removed")).unwrap();
    store.set_ttl(key("ending"), Some(1_000_000_000)).unwrap();
    drop(store);
    let (store, _) = open(dir.path(), AdmissionRule::First, 64 << 20);
    assert_eq!(store.lower_stats().ssd.recovered, 1);
    for name in ["replaced", "removed", "ending", "ends"] {
        assert_eq!(read(&store, name), None, "{name}");
    }
    assert_eq!(read(&store, "kept").unwrap(), content(1, 40_000));
    // A value that is only below can be removed, too.
    drop(store);
    let (store, _) = open(dir.path(), AdmissionRule::First, 64 << 20);
    assert!(!store.exists(key("kept")) && store.is_below(key("kept")));
    store.remove(key("kept")).unwrap();
    assert!(store.remove(key("kept")).is_err() && read(&store, "kept").is_none());
}

#[test]
fn a_full_file_gives_up_what_was_not_read_since() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path(), AdmissionRule::First, 6 << 20);
    for n in 0..200u64 {
        store.put(key(&n.to_string()), &content(n, 100_000), PutOptions::REPLACE).unwrap();
        settle(&store);
        if n > 7 {
            assert_eq!(read(&store, "7").unwrap(), content(7, 100_000), "the hot one stays ({n})");
        }
    }
    let stats = store.lower_stats();
    assert!(stats.ssd.evicted > 100 && stats.ssd.used_bytes <= 6 << 20, "{stats:?}");
    assert_eq!(read(&store, "199").unwrap(), content(199, 100_000));
}

#[test]
fn a_file_that_cannot_be_used_is_named_and_the_store_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let (first, _) = open(dir.path(), AdmissionRule::First, 4 << 20);
    let refused = |at: &Path, bytes: u64| {
        let (store, said) = open(at, AdmissionRule::First, bytes);
        store.put(key("a"), b"x", PutOptions::REPLACE).unwrap();
        assert_eq!(read(&store, "a").unwrap(), b"x");
        assert!(!store.lower_stats().ssd_on);
        let words = said.lock().unwrap().join("\n");
        assert!(words.contains("goes on in memory alone"), "{words}");
        words
    };
    assert!(refused(dir.path(), 4 << 20).contains("in use"));
    drop(first);
    let path = dir.path().join("kv.slab");
    let length = std::fs::metadata(&path).unwrap().len();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(length / 2).unwrap();
    assert!(refused(dir.path(), 4 << 20).contains("cut short"));
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[8] = 9;
    bytes[4096 + 8] = 9;
    std::fs::write(&path, &bytes).unwrap();
    assert!(refused(dir.path(), 4 << 20).contains("newer release"));
    std::fs::write(&path, "somebody's thesis").unwrap();
    assert!(refused(dir.path(), 4 << 20).contains("not a slab file"));
    assert_eq!(std::fs::read(&path).unwrap(), b"somebody's thesis");
    let other = tempfile::tempdir().unwrap();
    assert!(refused(other.path(), 3 << 40).contains("no room"), "more than the disk has");
}

#[test]
fn damage_at_rest_is_a_miss() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path(), AdmissionRule::First, 16 << 20);
    for n in 0..20u64 {
        store.put(key(&n.to_string()), &content(n, 50_000), PutOptions::REPLACE).unwrap();
    }
    settle(&store);
    drop(store);
    let path = dir.path().join("kv.slab");
    let mut bytes = std::fs::read(&path).unwrap();
    // 1024 slots and 16 to spare.
    let slots = bytes.len() - 1040 * (16 << 10);
    for at in (slots..bytes.len()).step_by(16 << 10) {
        bytes[at + 5_000] ^= 1;
    }
    std::fs::write(&path, &bytes).unwrap();
    let (store, _) = open(dir.path(), AdmissionRule::First, 16 << 20);
    assert_eq!(store.lower_stats().ssd.recovered, 20);
    let found = (0..20).filter(|n: &u64| read(&store, &n.to_string()).is_some()).count();
    settle(&store);
    assert_eq!((found, store.lower_stats().ssd.corrupt), (0, 20));
    store.put(key("1"), &content(1, 50_000), PutOptions::REPLACE).unwrap();
    settle(&store);
    assert_eq!(store.lower_stats().ssd.values, 1, "put again it is kept again");
}

#[test]
fn many_who_miss_at_once_are_one_read() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path(), AdmissionRule::First, 16 << 20);
    store.put(key("hot"), &content(1, 500_000), PutOptions::REPLACE).unwrap();
    settle(&store);
    drop(store);
    let (store, _) = open(dir.path(), AdmissionRule::First, 16 << 20);
    std::thread::scope(|threads| {
        for _ in 0..8 {
            threads.spawn(|| assert_eq!(read(&store, "hot").unwrap(), content(1, 500_000)));
        }
    });
    assert!(store.lower_stats().ssd_hits < 8, "{:?}", store.lower_stats());
    store.check();
}

/// Beside a naive model over put, get, remove, eviction and restarts at any moment.
#[test]
fn random_histories_agree_with_a_naive_model() {
    let mut restarts = 0;
    for seed in 0..4 {
        let dir = tempfile::tempdir().unwrap();
        let mut rng = Rng::fork(seed, 5);
        let admit = if seed % 2 == 0 { AdmissionRule::First } else { AdmissionRule::Second };
        let (mut store, _) = open(dir.path(), admit, 8 << 20);
        // The content of each key, by seed and length.
        let mut model: BTreeMap<String, (u64, usize)> = BTreeMap::new();
        for step in 0..600u64 {
            let name = format!("key {}", rng.below(60));
            match rng.below(100) {
                0..35 => {
                    let value = (step, usize::try_from(rng.below(200_000)).unwrap());
                    store.put(key(&name), &content(value.0, value.1), PutOptions::REPLACE).unwrap();
                    model.insert(name, value);
                }
                35..85 => match (read(&store, &name), model.get(&name)) {
                    (Some(value), Some((seed, bytes))) => assert_eq!(value, content(*seed, *bytes), "{name}"),
                    (Some(_), None) => panic!("{name} was removed or never there"),
                    (None, _) => {}
                },
                85..95 => {
                    let _ = store.remove(key(&name));
                    assert_eq!(read(&store, &name), None);
                    model.remove(&name);
                }
                95..98 => settle(&store),
                _ => {
                    let lasting = |name: &&String| store.stat(key(name)).is_some_and(|stat| stat.lasts);
                    let lasting: Vec<String> = model.keys().filter(lasting).cloned().collect();
                    drop(store);
                    store = open(dir.path(), admit, 8 << 20).0;
                    for name in lasting {
                        let (seed, bytes) = model[&name];
                        assert_eq!(read(&store, &name), Some(content(seed, bytes)), "{name} was lasting");
                    }
                    restarts += 1;
                }
            }
        }
        settle(&store);
        store.check();
    }
    assert!(restarts > 10, "{restarts}");
}

/// Puts and removes until it is killed; says what lasts, and what it is about to remove, before it does.
fn write_until_killed(dir: &Path) {
    let (store, _) = open(dir, AdmissionRule::First, 32 << 20);
    let mut out = std::io::stdout();
    let mut say = |word: &str, n: u64| writeln!(out, "{word} {n}").and_then(|()| out.flush());
    for n in 1.. {
        store.put(key(&n.to_string()), &content(n, 90_000), PutOptions::REPLACE).unwrap();
        if n % 5 == 0 {
            settle(&store);
            (n - 4..=n).for_each(|n| say("lasts", n).unwrap());
        }
        if n > 40 {
            say("removes", n - 40).unwrap();
            store.remove(key(&(n - 40).to_string())).unwrap();
            say("removed", n - 40).unwrap();
        }
    }
}

#[test]
fn what_a_killed_store_reported_is_there_and_what_it_removed_is_not() {
    if let Some(dir) = std::env::var_os(CHILD) {
        return write_until_killed(Path::new(&dir));
    }
    for upto in [10, 100, 300] {
        let dir = tempfile::tempdir().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "lower::what_a_killed_store_reported_is_there_and_what_it_removed_is_not",
                "--nocapture",
            ])
            .env(CHILD, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (mut lasting, mut removing, mut removed) = (Vec::new(), 0, 0);
        let mut hear =
            |line: &str| match line.split_once(' ').and_then(|(word, n)| Some((word, n.parse().ok()?))) {
                Some(("lasts", n)) => lasting.push(n),
                Some(("removes", n)) => removing = n,
                Some(("removed", n)) => removed = n,
                _ => {}
            };
        for line in lines.by_ref().map_while(Result::ok) {
            hear(&line);
            if line == format!("lasts {upto}") {
                break;
            }
        }
        child.kill().unwrap();
        lines.map_while(Result::ok).for_each(|line| hear(&line));
        child.wait().unwrap();
        let (store, _) = open(dir.path(), AdmissionRule::First, 32 << 20);
        assert!(store.lower_stats().ssd_on);
        for n in lasting.iter().copied().filter(|n: &u64| *n > removing) {
            assert_eq!(read(&store, &n.to_string()), Some(content(n, 90_000)), "{n} was lasting");
        }
        for n in 1..=removed {
            assert_eq!(read(&store, &n.to_string()), None, "{n} was removed");
        }
    }
}
