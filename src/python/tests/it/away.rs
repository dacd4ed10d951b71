//! Two stores of which one is killed or frozen: its keys are puts and gets of the other, and callers do not wait.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use baton_python::Failure;
use baton_python::store::{PutValue, Store};

use crate::scene::ServedStore;

const TIME_LIMIT: Duration = Duration::from_secs(60);
const ADDRESS: &str = "BATON_TEST_PYTHON_STORE";
/// A frozen store costs half a second; no call that goes past it takes as long.
const COST: Duration = Duration::from_millis(500);

/// The body of a process of its own: a store, until its input ends.
#[test]
#[ignore = "runs in a process of its own, which the tests below start"]
fn server() {
    let Ok(address) = std::env::var(ADDRESS) else { return };
    let served = ServedStore::start(&address);
    println!("store {}", served.address);
    let _ = std::io::stdin().read(&mut [0]);
}

/// A store in a process of its own.
struct Process {
    child: Child,
    address: String,
}

impl Process {
    fn start(address: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "away::server", "--ignored", "--nocapture"])
            .env(ADDRESS, address)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let said = lines.map_while(Result::ok).find_map(|line| Some(line.split_once("store ")?.1.to_owned()));
        Self { child, address: said.expect("it says where it is") }
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    /// Stops it, and waits until all of its threads are.
    fn freeze(&self) {
        self.signal("-STOP");
        let stopped = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
            stat.rsplit_once(") ").unwrap().1.starts_with('T')
        };
        let tasks = || std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        while !tasks().all(stopped) {
            std::thread::yield_now();
        }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already; a frozen one ends all the same.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn keys(from: usize) -> Vec<String> {
    (from..from + 64).map(|n| format!("key {n}")).collect()
}

/// How many of the keys are stored now.
fn put(store: &Store, keys: &[String]) -> usize {
    let puts: Vec<PutValue<'_>> = keys.iter().map(|key| PutValue::Bytes(key.as_bytes())).collect();
    store.put(keys, &puts).iter().filter(|answer| answer.is_ok()).count()
}

fn found(store: &Store, keys: &[String]) -> usize {
    let there = store.exist(keys).into_iter().map(usize::from).sum();
    let got = store.get(keys);
    let sizes = store.sizes(keys);
    for ((key, got), size) in keys.iter().zip(&got).zip(&sizes) {
        assert_eq!(got.is_ok(), size.is_ok());
        assert!(got.as_ref().map_or_else(|_| true, |value| value == key.as_bytes()));
    }
    assert_eq!(got.iter().filter(|got| got.is_ok()).count(), there);
    there
}

/// Waits until both answer, as a program does that asks for their health.
fn until_both(store: &Store) {
    let limit = Instant::now() + TIME_LIMIT;
    while store.reachable() != (2, 2) {
        assert!(Instant::now() < limit, "a store that is back is used");
    }
}

#[test]
fn the_other_takes_the_puts_of_a_store_that_is_killed_and_has_them_still_when_it_is_back() {
    let (mut dies, lives) = (Process::start("127.0.0.1:0"), Process::start("127.0.0.1:0"));
    let list = format!("{},{}", dies.address, lives.address);
    let store = Store::open(&list, "default").unwrap();
    let (before, during, after) = (keys(0), keys(1_000), keys(2_000));
    assert_eq!((put(&store, &before), found(&store, &before)), (64, 64));
    dies.kill();
    assert_eq!(put(&store, &during), 64, "none fails, the first included");
    assert_eq!(found(&store, &during), 64);
    let left = found(&store, &before);
    assert!((1..64).contains(&left), "those of the other: {left}");
    let lost = store.get(&before).into_iter().filter_map(Result::err);
    assert!(lost.into_iter().all(|failure| failure.code == Failure::SERVER), "they may be there yet");
    assert!(store.remove(&before)[0].as_ref().is_err_and(|failure| failure.code == Failure::SERVER));
    let _back = Process::start(&dies.address);
    until_both(&store);
    assert_eq!(found(&store, &during), 64, "they are at the second choice");
    assert_eq!((put(&store, &after), found(&store, &after)), (64, 64));
    // Another program, which never saw that one was away.
    let other = Store::open(&list, "default").unwrap();
    assert_eq!((found(&other, &during), found(&other, &after)), (64, 64));
    assert!(other.remove(&during).iter().all(Result::is_ok), "wherever they are");
    assert_eq!(found(&store, &during), 0);
}

#[test]
fn a_frozen_store_costs_a_caller_half_a_second_once() {
    let (freezes, lives) = (Process::start("127.0.0.1:0"), Process::start("127.0.0.1:0"));
    let store = Store::open(&format!("{},{}", freezes.address, lives.address), "default").unwrap();
    let before = keys(0);
    assert_eq!(put(&store, &before), 64);
    freezes.freeze();
    let (start, mut costly, mut longest, mut round) = (Instant::now(), 0, Duration::ZERO, 0);
    // Long enough for several looks at it.
    while start.elapsed() < Duration::from_millis(3_200) {
        // Fewer than make the store evict.
        let keys = keys(1_000 * (1 + round % 500));
        for call in [&put as &dyn Fn(&Store, &[String]) -> usize, &found] {
            let began = Instant::now();
            assert_eq!(call(&store, &keys), 64);
            costly += u32::from(began.elapsed() >= COST);
            longest = longest.max(began.elapsed());
        }
        round += 1;
    }
    assert_eq!(costly, 1, "the call that met it; the longest took {longest:?}");
    assert!(longest < 3 * COST, "{longest:?}");
    freezes.signal("-CONT");
    until_both(&store);
    assert_eq!(found(&store, &before), 64);
    assert_eq!(found(&store, &keys(1_000)), 64, "they are at the second choice");
}

#[test]
fn a_server_that_is_back_is_found_without_being_asked_for_its_health() {
    let mut dies = Process::start("127.0.0.1:0");
    let store = Store::open(&dies.address, "default").unwrap();
    assert_eq!(put(&store, &keys(0)), 64);
    dies.kill();
    assert_eq!((put(&store, &keys(0)), found(&store, &keys(0))), (0, 0));
    let _back = Process::start(&dies.address);
    let limit = Instant::now() + TIME_LIMIT;
    while put(&store, &keys(0)) < 64 {
        assert!(Instant::now() < limit, "a look in the background finds it");
        std::thread::sleep(Duration::from_millis(20));
    }
}
