//! A pretended engine, an indexer on a port of its own, and the plainest of HTTP clients.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use baton_events::{
    Change, EngineHash, Medium, Publisher, PublisherConfig, RemovedBlocks, StoredBlocks, SubscriberConfig,
};
use baton_indexer::{Indexer, IndexerSettings, ServerSettings};
use baton_types::Rng;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_util::sync::CancellationToken;

pub const BLOCK: usize = 4;

/// An indexer that serves until it is dropped.
pub struct ServedIndexer {
    pub indexer: Arc<Indexer>,
    pub address: String,
    stop: CancellationToken,
}

impl Drop for ServedIndexer {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Impatient, so that no test waits long for a second try.
pub fn settings() -> IndexerSettings {
    let subscription = SubscriberConfig {
        backoff_min_us: 5_000,
        backoff_max_us: 50_000,
        probe_min_us: 50_000,
        probe_max_us: 200_000,
        ..SubscriberConfig::new("", None)
    };
    IndexerSettings { subscription: Some(subscription), ..IndexerSettings::default() }
}

pub async fn indexer() -> ServedIndexer {
    served(Indexer::new(settings()), ServerSettings::default()).await
}

pub async fn served(indexer: Arc<Indexer>, settings: ServerSettings) -> ServedIndexer {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let stop = CancellationToken::new();
    tokio::spawn(baton_indexer::serve(Arc::clone(&indexer), listener, settings, stop.clone()));
    ServedIndexer { indexer, address, stop }
}

impl ServedIndexer {
    /// Sends a request and gives status, head and body.
    pub async fn send(&self, method: &str, path: &str, body: &[u8]) -> (u16, String, Vec<u8>) {
        let mut stream = tokio::net::TcpStream::connect(&self.address).await.unwrap();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        // A server that refuses a body may close before it has read it.
        let _ = stream.write_all(body).await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap();
        let head = String::from_utf8(answer[..end].to_vec()).unwrap();
        (head[9..12].parse().unwrap(), head, answer[end + 4..].to_vec())
    }

    pub async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, _, body) = self.send("POST", path, body.to_string().as_bytes()).await;
        (status, serde_json::from_slice(&body).unwrap())
    }

    pub async fn get(&self, path: &str) -> Value {
        let (status, _, body) = self.send("GET", path, b"").await;
        assert_eq!(status, 200);
        serde_json::from_slice(&body).unwrap()
    }

    pub async fn register(&self, publisher: &Publisher, endpoint: &str, instance: &str) {
        let mut body = registration(endpoint, instance);
        body["replay_endpoint"] = json!(publisher.replay_endpoint());
        let (status, answer) = self.post("/register", &body).await;
        assert_eq!((status, &answer["instance_id"]), (200, &json!(instance)), "{answer}");
    }

    /// Tokens of a prompt that an instance holds.
    pub async fn longest(&self, instance: &str, prefix: &[u32]) -> u64 {
        let body = json!({ "model": "m", "block_size": BLOCK, "token_ids": tokens(prefix) });
        let (status, answer) = self.post("/query", &body).await;
        assert_eq!(status, 200, "{answer}");
        answer["default"][instance]["longest_matched"].as_u64().unwrap_or(0)
    }

    /// Waits until batch `last` of the instance's publisher is in the index.
    pub async fn reach(&self, instance: &str, last: u64, announced: impl Fn(&Value) -> bool) {
        let going = async {
            loop {
                let all = self.get("/services").await;
                let one =
                    all["services"].as_array().unwrap().iter().find(|one| one["instance_id"] == instance);
                if one.is_some_and(|one| one["position"]["sequence"] == last && announced(one)) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let ended = tokio::time::timeout(Duration::from_secs(30), going).await.is_ok();
        assert!(ended, "batch {last}: {}", self.get("/services").await);
    }
}

pub fn registration(endpoint: &str, instance: &str) -> Value {
    json!({
        "endpoint": endpoint, "type": "vLLM", "modelname": "m", "instance_id": instance, "block_size": BLOCK,
        "dp_rank": 0,
    })
}

pub fn tokens(prefix: &[u32]) -> Vec<u32> {
    prefix.iter().flat_map(|symbol| [*symbol, 1000, *symbol, 2]).collect()
}

pub fn name(prefix: &[u32]) -> EngineHash {
    let mut chain = baton_events::hash::Rolling::new(4711);
    EngineHash::Word(prefix.iter().map(|symbol| chain.push(&[*symbol])).last().unwrap())
}

pub async fn publisher() -> Publisher {
    let any = || "tcp://127.0.0.1:0".to_owned();
    Publisher::bind(PublisherConfig::new(any(), Some(any()))).await.unwrap()
}

/// Prompts come, blocks that end a chain are evicted.
pub struct Engine {
    held: BTreeMap<Vec<u32>, ()>,
    rng: Rng,
}

impl Engine {
    pub fn new(seed: u64) -> Self {
        Self { held: BTreeMap::new(), rng: Rng::new(seed) }
    }

    pub fn step(&mut self) -> Vec<Change> {
        let length = 1 + self.rng.below(6) as usize;
        let prompt: Vec<u32> = (0..length).map(|_| self.rng.below(3) as u32).collect();
        let from = (1..=length).take_while(|n| self.held.contains_key(&prompt[..*n])).count();
        for n in from + 1..=length {
            self.held.insert(prompt[..n].to_vec(), ());
        }
        let mut told = vec![Change::Stored(StoredBlocks {
            hashes: (from + 1..=length).map(|n| name(&prompt[..n])).collect(),
            parent: (from > 0).then(|| name(&prompt[..from])),
            tokens: tokens(&prompt[from..]),
            block_tokens: BLOCK as u32,
            medium: Some(Medium::Gpu),
            ..StoredBlocks::default()
        })];
        while self.held.len() > 40 {
            let inner =
                |prefix: &[u32]| self.held.keys().any(|o| o.len() > prefix.len() && o.starts_with(prefix));
            let leaves: Vec<Vec<u32>> = self.held.keys().filter(|prefix| !inner(prefix)).cloned().collect();
            let gone = &leaves[self.rng.below(leaves.len() as u64) as usize];
            self.held.remove(gone);
            told.push(Change::Removed(RemovedBlocks { hashes: vec![name(gone)], medium: None, group: None }));
        }
        told
    }

    /// Announces some steps and gives the number of the last batch.
    pub async fn announce(&mut self, publisher: &Publisher, steps: usize) -> u64 {
        let mut last = 0;
        for step in 0..steps {
            last = publisher.announce(self.step());
            if step % 16 == 0 {
                tokio::task::yield_now().await;
            }
        }
        last
    }

    /// That an indexer knows of every prompt of up to three blocks, and of all that is held, what the engine holds.
    pub async fn agrees(&self, served: &ServedIndexer, instance: &str) {
        let short = (0..39u32).map(|n| vec![n % 3, n / 3 % 3, n / 9 % 3]);
        for prompt in short.chain(self.held.keys().cloned()) {
            let blocks = (1..=prompt.len()).take_while(|n| self.held.contains_key(&prompt[..*n])).count();
            assert_eq!(served.longest(instance, &prompt).await, (blocks * BLOCK) as u64, "{prompt:?}");
        }
        served.indexer.check().unwrap();
    }
}
