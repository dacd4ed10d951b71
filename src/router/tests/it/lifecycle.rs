//! Clients that go away, do not read, or do not wait; and a door that closes.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use baton_router::{Event, RouterConfig};
use http_body_util::BodyExt;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::scripted::{Door, Step, admitted, open, request, saying, token};

const PATH: &str = "/v1/completions";

/// Sends a request as bytes and gives the connection back.
async fn raw(door: &Door, body: &str) -> tokio::net::TcpStream {
    let mut stream = tokio::net::TcpStream::connect(door.address).await.unwrap();
    let head = format!(
        "POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body.as_bytes()).await.unwrap();
    stream
}

async fn wait_submitted(door: &Door, count: usize) {
    for _ in 0..200 {
        if door.backend.submissions.lock().len() == count {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not submitted");
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_answers_at_every_stage() {
    let queued = vec![Step::Hang];
    let prefilling = vec![admitted(), Step::Hang];
    let streaming = vec![admitted(), token(97), Step::Hang];
    for steps in [queued, prefilling, streaming] {
        for stream in [false, true] {
            let script = steps.clone();
            let door = open(RouterConfig::default(), move |_| script.clone()).await;
            let body = json!({"prompt": "a", "n": 3, "stream": stream}).to_string();
            let connection = raw(&door, &body).await;
            wait_submitted(&door, 3).await;
            tokio::time::sleep(Duration::from_millis(30)).await;
            assert_eq!(door.backend.cancelled.load(Ordering::SeqCst), 0);
            let left = Instant::now();
            drop(connection);
            door.wait_cancelled(3).await;
            assert!(left.elapsed() < Duration::from_millis(500), "{:?}", left.elapsed());
        }
    }
}

#[tokio::test]
async fn headers_wait_for_admission() {
    let steps = || vec![Step::Pause(200), admitted(), token(97), Step::Hang];
    let door = open(RouterConfig { keep_alive_ms: 20, ..RouterConfig::default() }, move |_| steps()).await;
    let mut connection = raw(&door, r#"{"prompt":"a","stream":true}"#).await;
    let mut bytes = [0; 64];
    let early = tokio::time::timeout(Duration::from_millis(120), connection.read(&mut bytes)).await;
    assert!(early.is_err(), "nothing is said before it is admitted");
    assert!(connection.read(&mut bytes).await.unwrap() > 0);
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cut_off() {
    let config = RouterConfig { stall_limit_ms: 300, ..RouterConfig::default() };
    let door = open(config, |_| {
        std::iter::once(admitted()).chain(std::iter::repeat_n(token(97), 400_000)).collect()
    })
    .await;
    let _connection = raw(&door, r#"{"prompt":"a","stream":true,"max_tokens":1900,"ignore_eos":true}"#).await;
    door.wait_cancelled(1).await;
}

#[tokio::test]
async fn a_stream_of_http2_that_is_not_read_is_cut_off_alone() {
    let config = RouterConfig { stall_limit_ms: 300, ..RouterConfig::default() };
    let door = open(config, |submission| match submission.tokens.len() {
        // The one is without end, the other is short.
        1 => std::iter::once(admitted()).chain(std::iter::repeat_n(token(97), 400_000)).collect(),
        _ => saying("short"),
    })
    .await;
    let stream = tokio::net::TcpStream::connect(door.address).await.unwrap();
    let executor = hyper_util::rt::TokioExecutor::new();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(executor, hyper_util::rt::TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let endless = request("http://door/v1/completions", r#"{"prompt":[1],"stream":true}"#, &[]);
    let unread = sender.send_request(endless).await.unwrap();
    let short = request("http://door/v1/completions", r#"{"prompt":[1,2]}"#, &[]);
    let heard = sender.send_request(short).await.unwrap();
    assert_eq!(heard.status(), 200);
    door.wait_cancelled(1).await;
    assert_eq!(door.router.stats().cut_off, 1);
    let broken = unread.into_body().collect().await;
    assert!(broken.is_err(), "the stream is reset, not ended");
}

#[tokio::test]
async fn clients_wait_as_long_as_they_say() {
    let door = open(RouterConfig::default(), |_| vec![admitted(), token(97), Step::Hang]).await;
    let begun = Instant::now();
    let heard = door.post_with(PATH, r#"{"prompt":"a"}"#, &[("x-request-timeout-ms", "150")]).await;
    assert_eq!((heard.status, heard.error().1.as_deref()), (504, Some("client_timeout")));
    let heard =
        door.post_with(PATH, r#"{"prompt":"a","stream":true}"#, &[("x-request-timeout-ms", "150")]).await;
    let (events, done) = heard.events();
    assert!(!done && events.last().unwrap()["error"]["code"] == "client_timeout");
    assert!(begun.elapsed() < Duration::from_secs(2));
    door.wait_cancelled(2).await;
}

#[tokio::test]
async fn a_closing_door_lets_answers_end() {
    let mut door = open(RouterConfig::default(), |_| {
        let mut steps = saying("abc");
        steps.insert(2, Step::Pause(200));
        steps
    })
    .await;
    let response = door.start(request(PATH, r#"{"prompt":"a","stream":true}"#, &[])).await;
    door.stop.cancel();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(tokio::net::TcpStream::connect(door.address).await.is_err(), "nobody is let in any more");
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert!(body.ends_with(b"data: [DONE]\n\n"));
    tokio::time::timeout(Duration::from_secs(2), &mut door.served).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_closing_door_does_not_wait_for_ever() {
    let config = RouterConfig { drain_limit_ms: 100, ..RouterConfig::default() };
    let mut door = open(config, |_| vec![admitted(), Step::Hang]).await;
    let _response = door.start(request(PATH, r#"{"prompt":"a","stream":true}"#, &[])).await;
    door.stop.cancel();
    tokio::time::timeout(Duration::from_secs(2), &mut door.served).await.unwrap().unwrap();
    door.wait_cancelled(1).await;
}

#[tokio::test]
async fn an_engine_that_says_more_than_it_may_is_an_error() {
    let door =
        open(RouterConfig::default(), |_| vec![Step::Say(Event::Token { token: 1, logprob: None })]).await;
    let heard = door.post(PATH, &json!({"prompt": "a"})).await;
    assert_eq!((heard.status, heard.error().1.as_deref()), (502, Some("engine_protocol")));
}
