//! Five hundred requests in flight at once while processes of every kind are killed and stopped: what is tried.
//!
//! `BATON_SEED` repeats a run's requests and troubles; `BATON_ROUNDS` is how often each process is killed and stopped.

use std::net::SocketAddr;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use baton_objects::client::{Cluster, ClusterConfig, PutOutcome, PutWords};
use baton_remote::testing::{Fabric, FakeConnector, FakeRole, FakeSglang, FakeVllm, SglangSpec, VllmSpec};
use rustix::process::{Signal, set_parent_process_death_signal};
use tempfile::TempDir;

use super::actors::{Actor, ProcessFault, Trouble, kept_up, plan, trouble};
use super::crowd::{CROWD, Crowd, Door, Ends, alone, answers, kinds, serves_again, setting};
use super::service::{Service, baton, until};
use super::several::{addresses, etcd_at, free_port, listens};

/// Objectives that a crowd can be served within on a slow machine; all else is the default.
const CONFIG: &str = "[scheduler]\nblock_tokens = 16\n\
    [[scheduler.classes]]\nname = \"default\"\nttft_us = 60_000_000\ntbt_us = 5_000_000\n";
const KINDS: usize = 12;

fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// Seed and rounds of this run.
fn drawn(what: &str) -> (u64, u64) {
    let (seed, rounds) = (setting("BATON_SEED", 1), setting("BATON_ROUNDS", 1));
    println!("{what}: BATON_SEED={seed} BATON_ROUNDS={rounds}");
    (seed, rounds)
}

/// Keeps the processes up until the service is as it was.
fn settled(actors: &mut [Actor<'_>], settles: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let settles = scope.spawn(settles);
        while !settles.is_finished() {
            kept_up(actors);
            std::thread::sleep(Duration::from_millis(50));
        }
        settles.join().unwrap_or_else(|why| std::panic::resume_unwind(why));
    });
}

/// Two conductors that an etcd elects, each the front door of its own clients, and the nodes of the one that leads.
#[test]
fn a_crowd_is_served_whatever_happens_to_conductors_nodes_and_etcd() {
    let _alone = alone();
    let (seed, rounds) = drawn("conductors");
    let bodies = kinds(seed, KINDS, true);
    let expected = {
        let quiet = Service::configured(CONFIG, &["--nodes", "1b"]);
        answers(quiet.clients, &bodies)
    };
    let folder = TempDir::new().unwrap();
    let place = folder.path();
    std::fs::write(place.join("baton.toml"), CONFIG).unwrap();
    let [etcd, peers] = addresses();
    let doors = [(); 2].map(|()| Door::new(loopback(free_port())));
    let elected = |words: &[&str]| {
        let mut command = baton(place);
        command.args(words).args(["--etcd", &etcd, "--cluster", "crowd", "--log", "warn"]);
        command
    };
    let mut actors = vec![Actor::start(place, "etcd-server", None, || etcd_at(place, &etcd, &peers))];
    listens(&etcd);
    for (door, name) in doors.iter().zip(["first", "second"]) {
        let control = format!("127.0.0.1:{}", free_port());
        let (listen, elected) = (door.at.to_string(), &elected);
        actors.push(Actor::start(place, name, Some(door), move || {
            elected(&[
                "serve",
                "--config",
                "baton.toml",
                "--name",
                name,
                "--listen",
                &listen,
                "--control",
                &control,
            ])
        }));
    }
    // Room for everything, and room for so little that answers outgrow it.
    let blocks = if seed.is_multiple_of(2) { "512" } else { "4096" };
    let room = ["--blocks", blocks, "--dram-blocks", "128", "--ssd-blocks", "128"];
    for (name, role) in
        [("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode"), ("s0", "store")]
    {
        let elected = &elected;
        actors.push(Actor::start(place, name, None, move || {
            let room = if role == "store" { &room[2..] } else { &room[..] };
            elected(&[&["node", "--name", name, "--role", role, "--config", "baton.toml"], room].concat())
        }));
    }
    serves_again(&doors, 5, &bodies, &expected);
    let mut plan = plan(seed, actors.len(), rounds);
    // The first of them led last: the other takes over when its lease has run out.
    plan.push(Trouble {
        who: 1,
        how: ProcessFault::Kill,
        lasts: Duration::from_secs(1),
        then: Duration::from_secs(1),
    });
    if rounds > 1 {
        // One that slept past its lease wakes when another leads.
        let lasts = Duration::from_secs(12);
        plan.extend([1, 2].map(|who| Trouble { who, how: ProcessFault::Stop, lasts, then: lasts }));
    }
    let crowd = Crowd::new(seed, &doors, &bodies, &expected);
    let tally = crowd.while_in(|| {
        trouble(&mut actors, &plan);
        settled(&mut actors, || is_ready(&doors));
    });
    settled(&mut actors, || serves_again(&doors, 5, &bodies, &expected));
    tally.holds("conductors, nodes, etcd");
}

fn is_ready(doors: &[Door]) {
    let ready = || doors.iter().any(|door| super::several::ready(door.at) == Some(200));
    until(Duration::from_secs(120), "one of them serves", || (!ready()).then(String::new));
}

/// A front door and servers of other makers, each a process.
#[test]
fn a_crowd_is_served_whatever_happens_to_the_front_door_and_to_servers() {
    let _alone = alone();
    let (seed, rounds) = drawn("servers");
    let bodies = kinds(seed, KINDS, false);
    let folder = TempDir::new().unwrap();
    let place = folder.path();
    std::fs::write(place.join("baton.toml"), CONFIG).unwrap();
    let door = [Door::new(loopback(free_port()))];
    let listen = door[0].at.to_string();
    let (mut actors, mut list) = (Vec::new(), String::new());
    // Servers of two makers share no clients: which of them it is the seed decides.
    let engine = if seed.is_multiple_of(2) { "sglang" } else { "vllm" };
    for name in ["e0", "e1", "e2"] {
        let port = free_port();
        list += &format!("[[member]]\nname = \"{name}\"\naddresses = [\"http://127.0.0.1:{port}\"]\n");
        list += &format!("labels = {{ engine = \"{engine}\" }}\n");
        actors.push(Actor::start(place, name, None, move || stand_in(engine, port)));
    }
    std::fs::write(place.join("servers.toml"), list).unwrap();
    actors.push(Actor::start(place, "door", Some(&door[0]), || {
        let mut command = baton(place);
        command.args(["serve", "--config", "baton.toml", "--listen", &listen, "--control", "127.0.0.1:0"]);
        command.args(["--servers", "servers.toml", "--model", "bytes", "--each", "--pass-tokens 4096"]);
        command.args(["--log", "warn"]);
        command
    }));
    is_ready(&door);
    let expected = answers(door[0].at, &bodies);
    serves_again(&door, 3, &bodies, &expected);
    let plan = plan(seed, actors.len(), rounds);
    let tally = Crowd::new(seed, &door, &bodies, &expected).while_in(|| {
        trouble(&mut actors, &plan);
        settled(&mut actors, || is_ready(&door));
    });
    settled(&mut actors, || serves_again(&door, 3, &bodies, &expected));
    tally.holds("front door, servers");
}

/// A stand-in for a server, in a process of its own: this test's binary, asked for one test.
fn stand_in(engine: &str, port: u16) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "ordeal::a_stand_in_serves_until_it_is_killed", "--ignored", "--nocapture"]);
    command.env("STAND_IN", format!("{engine} {port}"));
    command
}

/// Tokens of a stand-in take so long: five hundred answers at once are then no work to speak of.
const TOKEN: Duration = Duration::from_millis(60);

#[test]
#[ignore = "it is the process that others start: it serves until it is killed"]
fn a_stand_in_serves_until_it_is_killed() {
    let Ok(words) = std::env::var("STAND_IN") else { return };
    let (engine, port) = words.split_once(' ').unwrap();
    let port = port.parse().unwrap();
    // The child dies with its parent, however the parent ends.
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let on = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    on.block_on(async {
        let fabric = Fabric::new();
        if engine == "vllm" {
            let spec = VllmSpec::new(FakeRole::Whole, FakeConnector::None);
            let spec = VllmSpec { letters: true, token_time: TOKEN, blocks: 8_192, port, ..spec };
            let server = FakeVllm::start(spec, &fabric).await.unwrap();
            std::future::pending::<()>().await;
            drop(server);
        } else {
            let spec = SglangSpec::new(FakeRole::Whole);
            let spec = SglangSpec { letters: true, token_time: TOKEN, pool_tokens: 1 << 18, port, ..spec };
            let server = FakeSglang::start(spec, &fabric).await.unwrap();
            std::future::pending::<()>().await;
            drop(server);
        }
    });
}

/// The value of a key; a key never has another.
fn value(key: usize) -> Vec<u8> {
    let mut rng = baton_types::Rng::new(key as u64);
    (0..128).flat_map(|_| rng.next_u64().to_le_bytes()).collect()
}

/// The outcomes at five hundred clients of object stores.
#[derive(Debug, Default)]
struct ClientCounts {
    stored: AtomicUsize,
    found: AtomicUsize,
    missing: AtomicUsize,
    told: AtomicUsize,
    slowest_ms: AtomicUsize,
}

/// Puts and gets until it is over. A value is the right one or none, and every failure has an error text.
fn keeps(client: usize, config: ClusterConfig, seen: &ClientCounts, over: &AtomicBool) {
    let mut cluster = Cluster::new(config).unwrap();
    let mut rng = baton_types::Rng::fork(setting("BATON_SEED", 1), 5_000 + client as u64);
    let add = |what: &AtomicUsize| what.fetch_add(1, Ordering::Relaxed);
    while !over.load(Ordering::Relaxed) {
        let (key, begun) = (rng.below(200) as usize, Instant::now());
        let name = format!("key {key}").into_bytes();
        if rng.below(3) == 0 {
            match cluster.put(&name, &value(key), &PutWords::default()) {
                Ok(_) => add(&seen.stored),
                Err(why) => {
                    assert!(!why.to_string().is_empty());
                    add(&seen.told)
                }
            };
        } else {
            match cluster.get(&name) {
                Ok(Some(found)) => {
                    assert!(found == value(key), "client {client}: key {key} has what nobody put");
                    add(&seen.found)
                }
                Ok(None) => add(&seen.missing),
                Err(why) => {
                    assert!(!why.to_string().is_empty());
                    add(&seen.told)
                }
            };
        }
        let took = begun.elapsed();
        assert!(took < Duration::from_secs(100), "client {client} hung for {took:?}");
        seen.slowest_ms.fetch_max(took.as_millis() as usize, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(rng.below(200)));
    }
}

/// Object stores as a crowd's clients use them: two copies on three stores.
#[test]
fn a_crowd_gets_what_it_put_whatever_happens_to_stores() {
    let _alone = alone();
    let (seed, rounds) = drawn("stores");
    let folder = TempDir::new().unwrap();
    let place = folder.path();
    let (mut actors, mut urls) = (Vec::new(), Vec::new());
    for name in ["a", "b", "c"] {
        let listen = format!("127.0.0.1:{}", free_port());
        urls.push(format!("redis://{listen}"));
        actors.push(Actor::start(place, name, None, move || {
            let mut command = baton(place);
            command.args(["store", "serve", "--listen", &listen, "--memory", "64MiB", "--ssd"]);
            command.arg(place.join(format!("ssd-{name}"))).args([
                "--ssd-size",
                "64MiB",
                "--ssd-admit",
                "first",
            ]);
            command
        }));
    }
    let config = ClusterConfig { replicas: 2, ..ClusterConfig::of(&urls.join(",")).unwrap() };
    let fill = || {
        let mut cluster = Cluster::new(config.clone()).unwrap();
        for key in 0..200 {
            let name = format!("key {key}").into_bytes();
            until(Duration::from_secs(60), "every key has two copies", || {
                let put = cluster.put(&name, &value(key), &PutWords::default());
                (!matches!(put, Ok(PutOutcome::Stored(2, None)))).then(|| format!("{key}: {put:?}"))
            });
            assert!(cluster.get(&name).unwrap() == Some(value(key)), "{key}");
        }
    };
    fill();
    let (seen, over) = (ClientCounts::default(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CROWD)
            .map(|client| {
                let (config, seen, over) = (config.clone(), &seen, &over);
                let thread = std::thread::Builder::new().stack_size(512 << 10);
                thread.spawn_scoped(scope, move || keeps(client, config, seen, over)).unwrap()
            })
            .collect();
        let ends = Ends(&over);
        trouble(&mut actors, &plan(seed, 3, rounds));
        drop(ends);
        let ends: Vec<_> = clients.into_iter().map(|client| client.join()).collect();
        assert!(ends.iter().all(Result::is_ok), "a client saw what cannot be: {seen:?}");
    });
    println!("stores: {seen:?}");
    let found = seen.found.load(Ordering::Relaxed);
    assert!(found > CROWD, "{seen:?}");
    fill();
}
