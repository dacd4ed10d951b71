//! The memory that a hostile crowd can make the service allocate: at most as much as its settings allow.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::json;

use super::service::{Service, chat, completion, until};

const MIB: u64 = 1 << 20;
/// The largest body, and what all clients may have together.
const BODY_BYTES: u64 = 4 * MIB;
const HELD_BYTES: u64 = 64 * MIB;
/// Bodies that are begun and not ended: twelve times what may be held.
const BODIES: u64 = 200;
/// Connections that stop in the middle of a head.
const HALF_HEADS: u64 = 1_000;
/// Streams that are not read, and the answers in each.
const STREAMS: usize = 40;
const ANSWERS: usize = 8;
const TOKENS: u32 = 4_000;

/// docs/operations.md, "Memory": the process itself, what clients have, connections, and work on large bodies.
fn bound() -> u64 {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u64;
    let connections = BODIES + HALF_HEADS + STREAMS as u64;
    256 * MIB + HELD_BYTES * 3 / 2 + connections * (192 << 10) + (cores / 2).max(1) * 36 * BODY_BYTES
}

/// The most that the process has had in memory.
fn peak_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// A connection on which so much was said as the other side took.
fn said(to: SocketAddr, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(to).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(5))).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // It may be refused in the middle.
    let _ = stream.write_all(bytes);
    stream
}

fn head(length: u64) -> String {
    format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    )
}

/// The first bytes of an answer that is there.
fn answer(stream: &mut TcpStream) -> Option<String> {
    let mut bytes = [0; 12];
    stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    stream.read_exact(&mut bytes).ok().map(|()| String::from_utf8_lossy(&bytes).into_owned())
}

#[test]
fn a_hostile_crowd_takes_no_more_memory_than_the_settings_say() {
    let config = format!("[service]\nmax_body_bytes = {BODY_BYTES}\nmax_held_bytes = {HELD_BYTES}\n");
    let service = Service::configured(&config, &["--engine", "zero", "--nodes", "1b", "--blocks", "8192"]);
    let at = service.clients;

    let mut wanted = completion("Hello", TOKENS);
    (wanted["stream"], wanted["logprobs"], wanted["n"]) = (json!(true), json!(20), json!(ANSWERS));
    let wanted = wanted.to_string();
    let ask = head(wanted.len() as u64) + &wanted;
    let streams: Vec<_> = (0..STREAMS).map(|_| said(at, ask.as_bytes())).collect();

    let half = format!("GET /health HTTP/1.1\r\nhost: x\r\nx-long: {}", "y".repeat(60_000));
    let heads: Vec<_> = (0..HALF_HEADS).map(|_| said(at, half.as_bytes())).collect();

    // Much work for few bytes: unused fields, ids, and the smallest messages.
    let fields = format!("{{\"messages\":[{{\"role\":\"user\"{}}}]}}", ",\"a\":1".repeat(600_000));
    let messages =
        format!("{{\"messages\":[{}{{}}]}}", "{\"role\":\"user\",\"content\":\"\"},".repeat(120_000));
    for (path, body) in
        [("/v1/chat/completions", &fields), ("/v1/chat/completions", &messages), ("/tokenize", &fields)]
    {
        let answered = service.post(path, &[("content-type", "application/json")], body);
        assert!([200, 400, 503].contains(&answered.status), "{path}: {answered:?}");
    }

    let whole = [head(BODY_BYTES - 64).into_bytes(), vec![b' '; BODY_BYTES as usize - 65]].concat();
    let mut bodies: Vec<_> = (0..BODIES).map(|_| said(at, &whole)).collect();

    // The rest of a body without room is read for a while before the answer.
    let mut refused = 0;
    until(Duration::from_secs(20), "bodies without room are refused", || {
        refused +=
            bodies.iter_mut().filter_map(answer).filter(|answer| answer.starts_with("HTTP/1.1 503")).count();
        (refused == 0).then(|| "none is".to_owned())
    });
    let peak = peak_bytes(service.pid());
    assert!(peak <= bound(), "{} MiB of {} MiB", peak / MIB, bound() / MIB);
    println!("{} MiB of {} MiB, {refused} bodies refused", peak / MIB, bound() / MIB);

    drop((streams, heads, bodies));
    until(Duration::from_secs(60), "others are served", || {
        let answered = service.ask("/v1/chat/completions", &chat("Hello", 1));
        (answered.status != 200).then(|| format!("{answered:?}"))
    });
    service.quiet(Duration::from_secs(60));
}
