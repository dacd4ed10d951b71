//! HTTP/1.1 byte by byte: clients that do not read, send more than one request, or send none that is whole.

use std::sync::atomic::Ordering;
use std::time::Duration;

use baton_router::RouterConfig;
use tokio::io::AsyncReadExt;

use crate::scripted::{Step, admitted, http1, open, text_script, token};

const PATH: &str = "/v1/completions";
const STREAM: &str = r#"{"prompt":"a","stream":true}"#;
const TIME_LIMIT: Duration = Duration::from_secs(20);

/// All that the other side sends until it closes.
async fn response(connection: &mut tokio::net::TcpStream) -> String {
    let mut all = Vec::new();
    let read = tokio::time::timeout(TIME_LIMIT, connection.read_to_end(&mut all)).await;
    // A connection that is reset has still said what it said.
    let _ = read.unwrap_or_else(|_| panic!("open after {TIME_LIMIT:?}, with {} bytes read", all.len()));
    String::from_utf8(all).unwrap()
}

/// The bytes that the other side sends up to `mark`.
async fn read_until(connection: &mut tokio::net::TcpStream, mark: &str) -> String {
    let (mut all, mut some) = (Vec::new(), [0; 4096]);
    let reading = async {
        while !String::from_utf8_lossy(&all).contains(mark) {
            match connection.read(&mut some).await.unwrap() {
                0 => break,
                read => all.extend_from_slice(&some[..read]),
            }
        }
    };
    let read = tokio::time::timeout(TIME_LIMIT, reading).await;
    let all = String::from_utf8(all).unwrap();
    assert!(read.is_ok() && all.contains(mark), "no {mark:?} in {all:?}");
    all
}

#[tokio::test]
async fn a_stream_that_is_not_read_holds_its_engine_up() {
    const TOKENS: usize = 400_000;
    let config = RouterConfig { stall_limit_ms: 500, ..RouterConfig::default() };
    let door =
        open(config, |_| std::iter::once(admitted()).chain(std::iter::repeat_n(token(97), TOKENS)).collect())
            .await;
    let _unread = door.raw(&http1(PATH, STREAM)).await;
    door.wait_cancelled(1).await;
    let taken = door.backend.taken.load(Ordering::SeqCst);
    // The kernel's send buffer grows to 4 MiB, about 20,000 events of this size; the front door has a few hundred KiB.
    assert!(taken < TOKENS / 4, "{taken} tokens were taken for a client that read nothing");
    let stats = door.router.stats();
    assert_eq!((stats.cut_off + stats.disconnected, stats.answered), (1, 1));
}

#[tokio::test]
async fn bytes_after_a_request_do_not_hold_up_its_answer() {
    let door = open(RouterConfig::default(), |_| text_script("abc")).await;
    for body in [STREAM, r#"{"prompt":"a"}"#] {
        for more in ["\r\n", "\r\n\r\n", "GET /hea"] {
            let mut bytes = http1(PATH, body);
            bytes.extend_from_slice(more.as_bytes());
            let mut connection = door.raw(&bytes).await;
            let end = if body == STREAM { "data: [DONE]\n\n" } else { "\"usage\"" };
            let answer = read_until(&mut connection, end).await;
            assert!(answer.starts_with("HTTP/1.1 200 OK"), "{more:?}: {answer}");
        }
    }
    let mut both = http1(PATH, STREAM);
    both.extend_from_slice(b"\r\nGET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    let answers = response(&mut door.raw(&both).await).await;
    assert_eq!(answers.matches("HTTP/1.1 200 OK").count(), 2, "{answers}");
}

#[tokio::test]
async fn a_client_that_leaves_is_noticed_whatever_it_sent_besides() {
    let stages = [vec![Step::Hang], vec![admitted(), Step::Hang], vec![admitted(), token(97), Step::Hang]];
    for steps in stages {
        for (body, more) in [(STREAM, "\r\n"), (r#"{"prompt":"a"}"#, "\r\n"), (STREAM, "GET /hea")] {
            let script = steps.clone();
            let door = open(RouterConfig::default(), move |_| script.clone()).await;
            let mut bytes = http1(PATH, body);
            bytes.extend_from_slice(more.as_bytes());
            let connection = door.raw(&bytes).await;
            door.wait_submitted(1).await;
            drop(connection);
            door.wait_cancelled(1).await;
        }
    }
}

/// A client that closes only its sending side looks like one that is gone, until the router writes to it. The router
/// treats it as gone, as the servers behind it do: engines must not work for clients that have left.
#[tokio::test]
async fn who_closes_its_side_has_left() {
    for (number, body) in [STREAM, r#"{"prompt":"a"}"#].into_iter().enumerate() {
        let door = open(RouterConfig::default(), |_| vec![admitted(), token(97), Step::Hang]).await;
        let mut connection = door.raw(&http1(PATH, body)).await;
        door.wait_submitted(1).await;
        tokio::io::AsyncWriteExt::shutdown(&mut connection).await.unwrap();
        let said = response(&mut connection).await;
        assert!(!said.contains("[DONE]"), "{number}: {said}");
        door.wait_cancelled(1).await;
    }
}

#[tokio::test]
async fn what_is_no_request_is_told_so() {
    let door = open(RouterConfig::default(), |_| text_script("x")).await;
    let many: String = (0..200).map(|at| format!("x-{at}: y\r\n")).collect();
    let long = format!("x-long: {}\r\n", "y".repeat(600_000));
    for (head, status) in [
        ("GET /health HTTP/1.1\r\nhost: x\r\nx-nul: a\0b\r\n\r\n".to_owned(), "400"),
        (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\nabcde"
                .to_owned(),
            "400",
        ),
        ("GET /health HTTP/1.1\r\nhost: x\r\nno colon here\r\n\r\nmore".to_owned(), "400"),
        (format!("GET /health HTTP/1.1\r\nhost: x\r\n{many}\r\n"), "431"),
        (format!("GET /health HTTP/1.1\r\nhost: x\r\n{long}\r\n"), "431"),
    ] {
        let stream = tokio::net::TcpStream::connect(door.address).await.unwrap();
        let (mut reading, mut writing) = stream.into_split();
        let bytes = head.clone();
        // The other side may close before it has all: what it said is what counts.
        let sent = tokio::spawn(async move {
            let _ = tokio::io::AsyncWriteExt::write_all(&mut writing, bytes.as_bytes()).await;
            writing
        });
        let mut first = [0; 12];
        let read = tokio::time::timeout(TIME_LIMIT, reading.read_exact(&mut first)).await;
        let told = read.map(|read| read.is_ok());
        let (start, said) = (&head[..head.len().min(80)], String::from_utf8_lossy(&first));
        assert!(told == Ok(true) && said == format!("HTTP/1.1 {status}"), "{start:?}: {told:?} {said:?}");
        sent.abort();
    }
}

#[tokio::test]
async fn heads_that_cannot_be_read_are_counted() {
    let door = open(RouterConfig::default(), |_| text_script("x")).await;
    let many = format!("GET /health HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(129));
    let long = format!("GET /health HTTP/1.1\r\nx-long: {}\r\n\r\n", "y".repeat(80 << 10));
    for (head, status) in
        [("GET /health\r\nhost\r\n\r\n", 400), ("\u{16}\u{3}\u{1}\r\n\r\n", 400), (&many, 431), (&long, 431)]
    {
        let answer = response(&mut door.raw(head.as_bytes()).await).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
    }
    let begun = std::time::Instant::now();
    let counts =
        || door.router.errors().iter().map(|e| (e.status, e.reason.to_string(), e.count)).collect::<Vec<_>>();
    while counts() != [(400, "bad_head".to_owned(), 2), (431, "bad_head".to_owned(), 2)] {
        assert!(begun.elapsed() < TIME_LIMIT, "{:?}", counts());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!((door.router.stats().requests, door.router.stats().invalid), (4, 4));
}

#[tokio::test]
async fn a_body_that_is_announced_as_too_large_is_not_asked_for() {
    let config = RouterConfig { body_limit_bytes: 4_000, ..RouterConfig::default() };
    let door = open(config, |_| text_script("x")).await;
    let ask = |bytes: usize| {
        format!("POST {PATH} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {bytes}\r\n\r\n")
    };
    let answer = response(&mut door.raw(ask(4_001).as_bytes()).await).await;
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
    read_until(&mut door.raw(ask(4_000).as_bytes()).await, "HTTP/1.1 100 Continue").await;
}
