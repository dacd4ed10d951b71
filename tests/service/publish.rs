//! A node announces its cache's content; each subscriber has the same view, evictions included.

use std::fs::File;
use std::net::SocketAddr;
use std::process::Child;
use std::time::Duration;

use baton_events::{Change, Feed, Subscriber, SubscriberConfig};
use serde_json::{Value, json};

use super::http;
use super::service::{Service, baton, run, until};

const LONG: Duration = Duration::from_secs(60);

/// A process that ends with this.
struct RunningProcess(Child);

impl Drop for RunningProcess {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn start(service: &Service, name: &str, args: &[&str]) -> RunningProcess {
    let mut command = baton(service.folder());
    let out = |end: &str| File::create(service.path(&format!("{name}.{end}"))).unwrap();
    RunningProcess(command.args(args).stdout(out("out")).stderr(out("err")).spawn().unwrap())
}

/// 32 blocks of memory, no tier below; the only one that serves.
fn publishing(service: &Service, live: &str, replay: &str) -> RunningProcess {
    let small = ["--blocks", "32", "--dram-blocks", "0", "--ssd-blocks", "0"];
    let node = ["node", "--name", "b1", "--role", "both", "--conductor", &service.control];
    let publish = ["--publish", live, "--publish-replay", replay];
    let node = start(service, "b1", &[&node[..], &small, &publish].concat());
    until(LONG, "the node attaches", || {
        let status = service.status();
        (status["nodes"].as_array().unwrap().len() < 2).then(|| status.to_string())
    });
    service.post("/admin/nodes/b0/drain", &[], "").ok();
    node
}

fn indexer(service: &Service, model: &str, live: &str, replay: &str) -> (RunningProcess, SocketAddr) {
    let followed = json!({ "kvevent_instance": { "b1": {
        "endpoint": live, "replay_endpoint": replay, "type": "Mooncake", "modelname": model,
        "instance_id": "b1", "block_size": 16, "dp_rank": 0,
    } } });
    std::fs::write(service.path("indexer.json"), followed.to_string()).unwrap();
    let indexer =
        start(service, "indexer", &["indexer", "--listen", "127.0.0.1:0", "--config", "indexer.json"]);
    let mut address = None;
    until(LONG, "the indexer listens", || {
        let said = std::fs::read_to_string(service.path("indexer.out")).unwrap_or_default();
        address =
            said.split_once("indexer on http://").and_then(|(_, rest)| rest.split(';').next()?.parse().ok());
        address.is_none().then_some(said)
    });
    (indexer, address.unwrap())
}

fn tokens(at: u32, count: u32) -> Vec<u32> {
    (0..count).map(|n| 1 + (n * 7 + at * 31) % 200).collect()
}

/// The indexer's answer for a prompt on the node: tokens in all, and those of its GPU tier.
fn held(indexer: SocketAddr, model: &str, tokens: &[u32]) -> (u64, u64) {
    let query = json!({ "model": model, "block_size": 16, "token_ids": tokens });
    let json = [("content-type", "application/json")];
    let answer: Value = http::call(indexer, "POST /query", &json, &query.to_string()).unwrap().ok().json();
    let ours = &answer["default"]["b1"];
    (ours["longest_matched"].as_u64().unwrap_or(0), ours["GPU"].as_u64().unwrap_or(0))
}

#[test]
fn an_indexer_that_follows_a_node_knows_what_it_holds() {
    let service = Service::up(&["--nodes", "1b"]);
    let [live, replay] = [(); 2].map(|()| format!("tcp://127.0.0.1:{}", free_port()));
    let _node = publishing(&service, &live, &replay);
    let model = service.get("/v1/models").ok().json()["data"][0]["id"].as_str().unwrap().to_owned();
    let ask = |at: u32| {
        let body =
            json!({ "prompt": tokens(at, 200), "max_tokens": 4, "temperature": 0, "ignore_eos": true });
        service.ask("/v1/completions", &body).ok();
    };
    ask(0);
    // It comes late: what it missed is repeated to it.
    let (_indexer, at) = indexer(&service, &model, &live, &replay);
    until(LONG, "the first prompt is known", || {
        let held = held(at, &model, &tokens(0, 200));
        (held != (192, 192)).then(|| format!("{held:?}"))
    });
    assert_eq!(held(at, &model, &tokens(9, 200)), (0, 0), "nobody asked that");
    // Memory for two prompts and a half: the first has to go.
    (1..5).for_each(ask);
    until(LONG, "the last prompt is known and the first is gone", || {
        let (first, last) = (held(at, &model, &tokens(0, 200)), held(at, &model, &tokens(4, 200)));
        (last != (192, 192) || first.0 >= 192).then(|| format!("{first:?} {last:?}"))
    });
    watched(&service, &live, &replay);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let seen = runtime.block_on(async { tokio::time::timeout(LONG, subscribed(&live, &replay)).await });
    seen.unwrap();
}

/// `baton events watch` prints the events for people and scripts.
fn watched(service: &Service, live: &str, replay: &str) {
    let watch = ["events", "watch", live, "--replay", replay, "--json", "--batches", "2"];
    let (code, said, wrong) = run(service.folder(), &watch);
    assert_eq!(code, Some(0), "{wrong}");
    let lines: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let stored = lines.iter().flat_map(|line| line["events"].as_array().into_iter().flatten());
    let stored: Vec<&Value> = stored.filter(|event| event["stored"].is_array()).collect();
    let told: Vec<u64> =
        stored[0]["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap()).collect();
    let asked: Vec<u64> = tokens(0, 200).into_iter().map(u64::from).collect();
    assert!(!told.is_empty() && asked.starts_with(&told[..told.len().min(192)]), "{said}");
    assert_eq!((stored[0]["medium"].as_str(), stored[0]["block_tokens"].as_u64()), (Some("GPU"), Some(16)));
}

/// The library's own subscriber sees the rest: what was stored, and that some of it was removed again.
async fn subscribed(live: &str, replay: &str) {
    let mut subscriber = Subscriber::start(SubscriberConfig::new(live, Some(replay.to_owned()))).unwrap();
    let (mut stored, mut removed) = (std::collections::BTreeSet::new(), 0);
    while stored.len() < 12 || removed == 0 {
        let Some(Feed::Batch { batch, .. }) = subscriber.next().await else { continue };
        for event in batch.events {
            match event.change {
                Change::Stored(run) => stored.extend(run.hashes.iter().map(|hash| hash.low64())),
                Change::Removed(gone) => {
                    assert!(gone.hashes.iter().all(|hash| stored.contains(&hash.low64())), "never stored");
                    removed += gone.hashes.len();
                }
                other => panic!("{other:?}"),
            }
        }
    }
}
