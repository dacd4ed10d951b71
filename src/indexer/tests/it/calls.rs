//! The contract: what is answered, and what is refused and how.

use std::time::Duration;

use baton_events::{Change, Medium, StoredBlocks};
use baton_indexer::{Indexer, ServerSettings};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;

use crate::engine::{BLOCK, indexer, name, publisher, registration, served, settings, tokens};

fn without(mut body: Value, field: &str) -> Value {
    body.as_object_mut().unwrap().remove(field);
    body
}

#[tokio::test]
async fn a_publisher_comes_and_goes() {
    let served = indexer().await;
    let body = registration("tcp://127.0.0.1:1", "i");
    let answer = served.post("/register", &body).await;
    assert_eq!(answer, (200, json!({"status": "registered successfully", "instance_id": "i"})));
    let answer = served.post("/register", &body).await;
    assert_eq!(answer, (200, json!({"status": "already registered", "instance_id": "i"})));
    let mut other = body.clone();
    other["block_size"] = json!(8);
    let (status, answer) = served.post("/register", &other).await;
    let expected = "i|default|0 is registered with another block_size; unregister it first";
    assert_eq!((status, &answer["error"]), (409, &json!(expected)));
    assert_eq!(served.get("/services").await["services"][0]["key"], "i|default|0");
    let query = json!({"model": "m", "block_size": BLOCK, "token_ids": [1, 2, 3, 4]});
    let nothing = json!({"longest_matched": 0, "GPU": 0, "CPU": 0, "DISK": 0, "DP": {"0": 0}});
    assert_eq!(served.post("/query", &query).await, (200, json!({"default": {"i": nothing}})));
    let removed = json!({"status": "unregistered successfully", "removed_instances": ["i|default|0"]});
    assert_eq!(served.post("/unregister", &without(body.clone(), "endpoint")).await, (200, removed));
    let removed = json!({"status": "not registered", "removed_instances": []});
    assert_eq!(served.post("/unregister", &body).await, (200, removed));
    assert_eq!(served.post("/query", &query).await, (200, json!({"default": {}})));
}

#[tokio::test]
async fn what_is_wrong_is_said_with_the_field() {
    let served = indexer().await;
    let whole = registration("tcp://127.0.0.1:1", "i");
    for field in ["endpoint", "type", "modelname", "instance_id", "block_size", "dp_rank"] {
        let (status, answer) = served.post("/register", &without(whole.clone(), field)).await;
        let expected = format!("field '{field}' is missing; it is required");
        assert_eq!((status, &answer["error"]), (400, &json!(expected)));
    }
    let deep = [vec![b'['; 100_000], vec![b']'; 100_000]].concat();
    let token_ids = [br#"{"model":"m","block_size":4,"token_ids":"#.as_slice(), &deep, b"}"].concat();
    let posts: [(&str, &[u8], u16); 9] = [
        ("/register", b"", 400),
        ("/register", b"[]", 400),
        ("/query", b"{\"model\":\"m\",\"block_size\":4}", 400),
        ("/query", b"{\"model\":\"m\",\"block_size\":4,\"token_ids\":[4294967296]}", 400),
        ("/query", &deep, 400),
        ("/query", &token_ids, 400),
        ("/query_by_hash", b"{\"model\":\"m\",\"block_size\":4,\"seq_hashes\":[1],\"block_hash\":[1]}", 400),
        ("/query_by_hash", b"{\"model\":\"m\",\"block_size\":4,\"seq_hashes\":[1.5]}", 400),
        ("/nothing", b"{}", 404),
    ];
    for (path, body, expected) in posts {
        let (status, _, answer) = served.send("POST", path, body).await;
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        assert_eq!(status, expected, "{path}: {answer}");
        assert!(answer["error"].is_string(), "{answer}");
    }
    assert_eq!(served.send("GET", "/query", b"").await.0, 405);
    assert_eq!(served.send("POST", "/health", b"").await.0, 405);
    assert_eq!(served.send("GET", "/snapshot?after=zz", b"").await.0, 400);
    assert_eq!(served.get("/health").await["status"], "ok");
    let (_, _, page) = served.send("GET", "/metrics", b"").await;
    assert!(String::from_utf8(page).unwrap().contains("baton_indexer_refused_requests_total 18\n"));
}

#[tokio::test]
async fn fields_that_nobody_knows_are_noted_and_bodies_are_bounded() {
    let settings = (settings(), ServerSettings { body_bytes: 1000, ..ServerSettings::default() });
    let served = served(Indexer::new(settings.0), settings.1).await;
    let query = json!({"model": "m", "block_size": 4, "token_ids": [], "color": {}, "age": 1});
    let (status, head, _) = served.send("POST", "/query", query.to_string().as_bytes()).await;
    assert_eq!(status, 200);
    assert!(head.contains("x-baton-ignored-fields: age,color"), "{head}");
    let (status, _, _) = served.send("POST", "/query", &[b' '; 1001]).await;
    assert_eq!(status, 413);
}

#[tokio::test]
async fn bodies_of_all_connections_share_one_bound_and_snapshots_are_few() {
    let bounds = ServerSettings { held_bytes: 1 << 20, snapshots: 0, ..ServerSettings::default() };
    let served = served(Indexer::new(settings()), bounds).await;
    let metric = async |name: &str| {
        let (_, _, page) = served.send("GET", "/metrics", b"").await;
        let page = String::from_utf8(page).unwrap();
        page.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok()).unwrap()
    };
    // Clients that stop in the middle of their bodies hold them.
    let mut slow = Vec::new();
    for _ in 0..3 {
        let mut stream = tokio::net::TcpStream::connect(&served.address).await.unwrap();
        stream.write_all(b"POST /query HTTP/1.1\r\nhost: x\r\ncontent-length: 400000\r\n\r\n").await.unwrap();
        stream.write_all(&[b' '; 300_000]).await.unwrap();
        slow.push(stream);
    }
    while metric("baton_indexer_held_bytes").await < 900_000 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let (status, _, answer) = served.send("POST", "/query", &[b' '; 200_000]).await;
    let answer: Value = serde_json::from_slice(&answer).unwrap();
    assert_eq!(status, 503, "{answer}");
    assert!(answer["error"].as_str().unwrap().contains("try again shortly"), "{answer}");
    assert_eq!(
        (metric("baton_indexer_no_room_total").await, served.get("/health").await),
        (1, json!({"status": "ok"}))
    );
    drop(slow);
    while metric("baton_indexer_held_bytes").await > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(served.send("GET", "/snapshot", b"").await.0, 503);
    let failed = baton_indexer::join(&Indexer::new(settings()), &format!("http://{}", served.address))
        .await
        .unwrap_err();
    assert_eq!(failed.kind, baton_indexer::Kind::Unavailable, "{failed}");
}

#[tokio::test]
async fn an_answer_tells_media_and_ranks() {
    let (served, publisher) = (indexer().await, publisher().await);
    served.register(&publisher, publisher.endpoint(), "i").await;
    let mut second = registration("tcp://127.0.0.1:1", "i");
    second["dp_rank"] = json!(1);
    served.post("/register", &second).await;
    let stored = |from: usize, to: usize, medium| {
        let prefix = [1, 2, 3];
        Change::Stored(StoredBlocks {
            hashes: (from + 1..=to).map(|n| name(&prefix[..n])).collect(),
            parent: (from > 0).then(|| name(&prefix[..from])),
            tokens: tokens(&prefix[from..to]),
            block_tokens: BLOCK as u32,
            medium: Some(medium),
            ..StoredBlocks::default()
        })
    };
    let last = publisher.announce(vec![stored(0, 2, Medium::Gpu), stored(2, 3, Medium::Cpu)]);
    served.reach("i", last, |_| true).await;
    let expected = json!({"default": {"i":
        {"longest_matched": 12, "GPU": 8, "CPU": 12, "DISK": 0, "DP": {"0": 12, "1": 0}}}});
    // Three blocks and a part of one.
    let mut asked = tokens(&[1, 2, 3, 4]);
    asked.pop();
    let query = json!({"model": "m", "block_size": BLOCK, "token_ids": asked, "instance_id": "i"});
    assert_eq!(served.post("/query", &query).await, (200, expected.clone()));
    let hashes: Vec<u64> = (1..=4).map(|n| name(&[1, 2, 3, 4][..n]).low64()).collect();
    let query = json!({"model": "m", "block_size": BLOCK, "seq_hashes": hashes});
    assert_eq!(served.post("/query_by_hash", &query).await, (200, expected));
    let view = served.get("/global_view").await;
    assert_eq!((&view["contexts"][0]["model"], &view["contexts"][0]["blocks"]), (&json!("m"), &json!(3)));
    let (_, _, page) = served.send("GET", "/metrics", b"").await;
    let page = String::from_utf8(page).unwrap();
    for line in ["baton_indexer_instances 2", "baton_indexer_blocks 3", "baton_indexer_query_seconds_count 2"]
    {
        assert!(page.lines().any(|one| one == line), "{line}: {page}");
    }
}
