//! TLS, HTTP/2 and connections that take their time.

use std::time::{Duration, Instant};

use baton_http::Identity;
use baton_router::{CloseReason, RouterConfig};
use baton_types::Finish;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::sync::Arc;
use tokio::io::AsyncReadExt;

use crate::scripted::{Step, admitted, finished, likely, open, open_with_text, request, text_script};

const TIME_LIMIT: Duration = Duration::from_secs(20);

#[tokio::test]
async fn tls_serves_both_versions() {
    let dir = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let (certificate, key) = (dir.path().join("c.pem"), dir.path().join("k.pem"));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let tls = Some(Identity::of_files(&certificate, &key).unwrap());
    let door = open(RouterConfig { tls, ..RouterConfig::default() }, |_| text_script("x")).await;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(made.cert.der().clone()).unwrap();
    for version in ["h2", "http/1.1"] {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots.clone())
            .with_no_client_auth();
        config.alpn_protocols = vec![version.as_bytes().to_vec()];
        let stream = tokio::net::TcpStream::connect(door.address).await.unwrap();
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let stream = connector.connect("localhost".try_into().unwrap(), stream).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(version.as_bytes()));
        let ask = request("https://localhost/v1/completions", r#"{"prompt":"a","stream":true}"#, &[]);
        let response = if version == "h2" {
            let (mut sender, connection) = hyper::client::conn::http2::handshake::<_, _, Full<Bytes>>(
                TokioExecutor::new(),
                TokioIo::new(stream),
            )
            .await
            .unwrap();
            tokio::spawn(connection);
            sender.send_request(ask).await.unwrap()
        } else {
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake::<_, Full<Bytes>>(TokioIo::new(stream)).await.unwrap();
            tokio::spawn(connection);
            sender.send_request(ask).await.unwrap()
        };
        assert_eq!(response.status(), 200);
        assert!(response.into_body().collect().await.unwrap().to_bytes().ends_with(b"data: [DONE]\n\n"));
    }
}

/// Waits for the other side to close, and gives what it said before.
async fn closed(connection: &mut tokio::net::TcpStream) -> Vec<u8> {
    let mut rest = Vec::new();
    let ended = tokio::time::timeout(TIME_LIMIT, connection.read_to_end(&mut rest)).await;
    assert!(ended.is_ok(), "open after {TIME_LIMIT:?}");
    rest
}

#[tokio::test]
async fn who_never_finishes_asking_is_not_waited_for() {
    let config = RouterConfig { receive_limit_ms: 200, connections_limit: 1, ..RouterConfig::default() };
    let door = open(config, |_| text_script("x")).await;
    let mut others = 0;
    for start in ["", "P", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "POST /v1/completions HTTP/1.1\r\nhost:"] {
        let mut idle = door.raw(start.as_bytes()).await;
        let said = closed(&mut idle).await;
        assert!(!said.starts_with(b"HTTP/1.1 2"), "{start:?}");
        others += u64::from(start.starts_with("POST"));
    }
    let slow = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{";
    let said = closed(&mut door.raw(slow).await).await;
    assert!(said.starts_with(b"HTTP/1.1 408"), "{:?}", String::from_utf8_lossy(&said));
    // The one place is free again.
    assert_eq!(door.get("/v1/models").await.status, 200);
    let stats = door.router.stats();
    let unasked = stats.closed[CloseReason::NoRequest as usize];
    assert!((3..=3 + others).contains(&unasked), "{stats:?}");
}

#[tokio::test]
async fn operators_get_in_when_all_places_are_taken() {
    let config = RouterConfig { connections_limit: 4, ..RouterConfig::default() };
    let door = open(config, |_| text_script("x")).await;
    // All are one peer here, which has half of the places.
    let silent = [door.raw(b"").await, door.raw(b"").await];
    for path in ["/health", "/ready"] {
        assert_eq!(door.get(path).await.status, 200, "{path}");
    }
    let response = door.get("/v1/models").await;
    assert_eq!((response.status, response.error().1.as_deref()), (503, Some("too_many_connections")));
    assert_eq!((response.header("retry-after"), response.header("connection")), (Some("2"), Some("close")));
    // Those without a place are few, and are not waited for.
    let mut beyond: Vec<_> = Vec::new();
    for _ in 0..40 {
        beyond.push(door.raw(b"").await);
    }
    let begun = Instant::now();
    for connection in &mut beyond {
        assert!(closed(connection).await.is_empty());
    }
    assert!(begun.elapsed() < TIME_LIMIT / 2, "{:?}", begun.elapsed());
    assert!(door.router.stats().closed[CloseReason::NoPlace as usize] >= 8, "{:?}", door.router.stats());
    assert_eq!(door.get("/health").await.status, 200);
    drop(silent);
    while door.router.stats().connections > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(door.get("/v1/models").await.status, 200);
}

#[tokio::test]
async fn bodies_under_way_share_one_bound() {
    let config = RouterConfig { bodies_limit_bytes: 4 << 20, ..RouterConfig::default() };
    let door = open(config, |_| text_script("x")).await;
    let begun = |bytes: usize| {
        let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {bytes}\r\n\r\n");
        [head.into_bytes(), vec![b' '; bytes - 1]].concat()
    };
    let first = door.raw(&begun(3 << 20)).await;
    while door.router.stats().body_bytes < (3 << 20) - 1 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let response = door.post_with("/v1/completions", vec![b' '; 1 << 20], &[]).await;
    assert_eq!((response.status, response.error().1.as_deref()), (503, Some("bodies_full")));
    assert_eq!(
        (response.header("retry-after"), response.header("x-should-retry")),
        (Some("1"), Some("true"))
    );
    assert_eq!(door.post_with("/v1/completions", r#"{"prompt":"a"}"#, &[]).await.status, 200, "a small one");
    drop(first);
    // The submission still holds its body.
    door.backend.submissions.lock().clear();
    while door.router.stats().body_bytes > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(door.post_with("/v1/completions", vec![b' '; 1 << 20], &[]).await.status, 400);
}

/// A connection of HTTP/2 whose client leaves no room for answers.
async fn closed_window(
    door: &crate::scripted::Door,
) -> (hyper::client::conn::http2::SendRequest<Full<Bytes>>, tokio::task::JoinHandle<()>) {
    let stream = tokio::net::TcpStream::connect(door.address).await.unwrap();
    let (sender, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(0)
        .handshake(TokioIo::new(stream))
        .await
        .unwrap();
    let ended = tokio::spawn(async move {
        let _ = connection.await;
    });
    (sender, ended)
}

/// The memory that unknown clients can occupy has one bound, whatever they send and whether they read or not.
#[tokio::test]
async fn requests_and_unread_answers_share_the_bound_of_bodies() {
    const LIMIT: usize = 4 << 20;
    let config = RouterConfig { bodies_limit_bytes: LIMIT, ..RouterConfig::default() };
    let door = open(config, |_| text_script("x")).await;
    let (sender, _ended) = closed_window(&door).await;
    let long = "y".repeat(8 << 10);
    let mut asked = Vec::new();
    for path in std::iter::repeat_n("/v1/models", 300).chain(["/health"]) {
        let ask = http::Request::get(format!("http://door{path}")).header("x-long", &long);
        let response = sender.clone().send_request(ask.body(Full::default()).unwrap()).await.unwrap();
        asked.push(response);
    }
    let count = |status: u16| asked.iter().filter(|response| response.status() == status).count();
    let (served, refused) = (count(200), count(503));
    assert!((100..200).contains(&served) && served + refused == 301, "{served} {refused}");
    assert_eq!(asked.last().unwrap().status(), 200, "operators have room of their own");
    let held = door.router.stats().body_bytes;
    // The operator's request is beside it, and small answers are there already when they are counted.
    assert!((LIMIT as u64 * 9 / 10..=(LIMIT + (64 << 10)) as u64).contains(&held), "{held}");
    assert_eq!(door.get("/v1/models").await.status, 503);
    drop((asked, sender, _ended));
    let begun = Instant::now();
    while door.router.stats().body_bytes > 0 {
        assert!(begun.elapsed() < TIME_LIMIT, "{:?}", door.router.stats());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(door.get("/v1/models").await.status, 200);
}

/// Operators have an allowance of their own, and no whole answer takes more than there is.
#[tokio::test]
async fn unread_whole_answers_leave_operators_their_room() {
    const LIMIT: usize = 1 << 20;
    let config = RouterConfig { bodies_limit_bytes: LIMIT, ..RouterConfig::default() };
    let script = |_: &_| {
        let tokens = std::iter::repeat_n(likely(97, -0.5), 1_500);
        let begin = [admitted(), Step::Pause(300)];
        begin.into_iter().chain(tokens).chain([finished(Finish::Stop, 0)]).collect()
    };
    let door = open(config, script).await;
    let (sender, _ended) = closed_window(&door).await;
    let asking: Vec<_> = std::iter::repeat_with(|| {
        let ask = request("http://door/v1/completions", r#"{"prompt":"a","logprobs":2}"#, &[]);
        tokio::spawn(sender.clone().send_request(ask))
    })
    .take(30)
    .collect();
    let mut asked = Vec::new();
    for one in asking {
        asked.push(one.await.unwrap().unwrap());
        let held = door.router.stats().body_bytes;
        assert!(held <= LIMIT as u64, "{held}");
    }
    let count = |status: u16| asked.iter().filter(|response| response.status() == status).count();
    assert!(count(200) > 0 && count(503) > 4 && count(200) + count(503) == 30, "{}", count(200));
    while door.get("/v1/models").await.status == 200 {
        let ask = http::Request::get("http://door/v1/models").body(Full::default()).unwrap();
        asked.push(sender.clone().send_request(ask).await.unwrap());
    }
    for path in ["/health", "/ready"] {
        assert_eq!(door.get(path).await.status, 200, "{path}");
    }
    assert_eq!(door.get("/metrics").await.status, 404, "there is none here");
}

#[tokio::test]
async fn a_whole_answer_counts_as_it_grows_and_is_cancelled_where_it_does_not_fit() {
    let config = RouterConfig { bodies_limit_bytes: 1 << 20, ..RouterConfig::default() };
    let script = |_: &_| {
        let tokens = std::iter::repeat_n(likely(97, -0.5), 20_000);
        std::iter::once(admitted()).chain(tokens).chain([Step::Hang]).collect()
    };
    let door = open(config, script).await;
    let body = r#"{"prompt":"a","max_tokens":1000,"logprobs":2}"#;
    let asking = door.post_with("/v1/completions", body, &[]);
    let response =
        tokio::time::timeout(TIME_LIMIT, asking).await.expect("refused as soon as it does not fit");
    assert_eq!((response.status, response.error().1.as_deref()), (503, Some("bodies_full")));
    let text = String::from_utf8_lossy(&response.body);
    assert!(text.contains("service.max_held_bytes"), "{text}");
    door.wait_cancelled(1).await;
    door.backend.submissions.lock().clear();
    let begun = Instant::now();
    while door.router.stats().body_bytes > 0 {
        assert!(begun.elapsed() < TIME_LIMIT, "{:?}", door.router.stats());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// One thread serves all here: it answers others while a large body is worked on.
#[tokio::test]
async fn large_bodies_do_not_hold_up_others() {
    let door = Arc::new(open(RouterConfig::default(), |_| text_script("x")).await);
    let chat = |count: usize| {
        let one = r#"{"role":"user","content":""}"#;
        format!(r#"{{"messages":[{}]}}"#, vec![one; count].join(","))
    };
    let ids = |count: usize| format!(r#"{{"tokens":[{}]}}"#, vec!["97"; count].join(","));
    for (path, body) in [
        ("/v1/chat/completions", chat(200_000)),
        ("/tokenize", chat(200_000)),
        ("/detokenize", ids(2_000_000)),
    ] {
        let (asking, length) = (Arc::clone(&door), body.len() as u64);
        let large = tokio::spawn(async move { asking.post_with(path, body, &[]).await.status });
        let mut others = 0;
        while !large.is_finished() && others < 3 {
            if door.router.stats().body_bytes < length {
                tokio::time::sleep(Duration::from_millis(1)).await;
                continue;
            }
            assert_eq!(door.get("/health").await.status, 200);
            others += 1;
        }
        assert_eq!(others, 3, "{path}");
        let status = large.await.unwrap();
        assert!(status == 200 || status == 400, "{path}: {status}");
    }
}

#[tokio::test]
async fn calls_follow_each_other_on_one_connection() {
    let door = open_with_text("x").await;
    let mut sender = door.connect().await;
    for stream in [false, true, false] {
        sender.ready().await.unwrap();
        let body = format!("{{\"prompt\":\"a\",\"stream\":{stream}}}");
        let response = sender.send_request(request("/v1/completions", body, &[])).await.unwrap();
        assert_eq!(response.status(), 200);
        response.into_body().collect().await.unwrap();
    }
}
