//! Hostile clients and servers: no bytes may break a server, nor cost more than they are, nor mislead a client.

use std::time::Duration;

use baton_fuzz::{Fuzz, Verdict};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::client::{self, Reply};
use super::{Login, RespConfig, Server};
use crate::{Clock, ObjectStore, StoreConfig};

#[global_allocator]
static COUNTING: baton_fuzz::AllocationCounter<std::alloc::System> =
    baton_fuzz::AllocationCounter(std::alloc::System);

const WORDS: &[&[u8]] = &[
    b"*1\r\n$4\r\nPING\r\n",
    b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n",
    b"*1\r\n$5\r\nMULTI\r\n",
    b"*1\r\n$8\r\nFLUSHALL\r\n",
    b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\nb\r\n",
    b"*-1\r\n",
    b"$-1\r\n",
    b"*1048577\r\n",
    b"$536870912\r\n",
    b"\r\n",
    b"SCAN",
    b"MATCH",
    b"[^a-z]*?",
    b"COUNT",
    b"HELLO",
    b"KEEPTTL",
    b"BATON.PIN",
    b"9223372036854775807",
];

fn server(logins: Vec<Login>) -> Server {
    let store = StoreConfig {
        capacity_bytes: 4 << 20,
        value_max_bytes: 1 << 20,
        room_wait_us: 0,
        shards: 1,
        ..StoreConfig::default()
    };
    let store = ObjectStore::new(&store, Clock::machine()).unwrap();
    let config = RespConfig { allow_flush: true, logins, ..RespConfig::default() };
    Server::new(store, config).unwrap()
}

/// The server's answer to bytes that arrive in two pieces.
async fn answer(server: &Server, input: &[u8]) -> Vec<u8> {
    let (ours, theirs) = tokio::io::duplex(8 << 10);
    let (mut read, mut write) = tokio::io::split(ours);
    let (one, other) = input.split_at(input.len() / 2);
    let say = async {
        // The server may have hung up.
        let _ = write.write_all(one).await;
        tokio::task::yield_now().await;
        let _ = write.write_all(other).await;
        let _ = write.shutdown().await;
    };
    let mut heard = Vec::new();
    let hear = async { read.read_to_end(&mut heard).await.map(drop) };
    let ((), told, ()) = tokio::join!(say, hear, server.serve_stream(theirs));
    told.unwrap();
    heard
}

/// The replies in `bytes`, all of them.
fn replies(mut bytes: &[u8]) -> Result<Vec<Reply>, std::io::Error> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        found.push(client::read(&mut bytes, 0)?);
    }
    Ok(found)
}

#[test]
fn fuzz_resp_commands() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let login = Login { user: "u".into(), password: "p".into(), tenant: "t".into(), quota_bytes: 1 << 20 };
    let (open, guarded) = (server(Vec::new()), server(vec![login]));
    let probe = b"*1\r\n$8\r\nFLUSHALL\r\n*3\r\n$3\r\nSET\r\n$5\r\nprobe\r\n$4\r\nhere\r\n*2\r\n$3\r\nGET\r\n$5\r\nprobe\r\n";
    let mut case = 0;
    Fuzz::new("resp_commands")
        .cases(1_500)
        .words(WORDS)
        .slowest(Duration::from_secs(5))
        .max_bytes(40 << 10)
        .memory(6 << 20, 600)
        .run(|input| {
            case += 1;
            let answered = runtime.block_on(answer(&open, input));
            let answered = replies(&answered).expect("what a server says are replies");
            let well = answered.iter().all(|reply| !matches!(reply, Reply::Error(_)));
            // A stranger hears errors and greetings alone.
            let to_stranger = runtime.block_on(answer(&guarded, input));
            let to_stranger = replies(&to_stranger).expect("what a server says are replies");
            if !input.windows(4).any(|at| at.eq_ignore_ascii_case(b"AUTH")) {
                assert!(!to_stranger.iter().any(|reply| matches!(reply, Reply::Bulk(_))), "{to_stranger:?}");
            }
            if case % 16 == 0 {
                let after = replies(&runtime.block_on(answer(&open, probe))).unwrap();
                assert_eq!(after[1..], [Reply::Simple("OK".into()), Reply::Bulk(b"here".to_vec())]);
            }
            if well && !answered.is_empty() { Verdict::Read } else { Verdict::Refused }
        });
}

#[test]
fn fuzz_resp_replies() {
    let words: &[&[u8]] = &[
        b"*4294967296\r\n",
        b"$4294967296\r\n",
        b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n",
        b"\r\n",
        b"%1\r\n",
        b"$-1\r\n",
    ];
    Fuzz::new("resp_replies")
        .cases(3_000)
        .words(words)
        .memory(64 << 10, 100)
        .run(|input| Verdict::of(&replies(input)));
}
