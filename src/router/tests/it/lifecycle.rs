//! Clients that go away, do not read, or do not wait; and a door that closes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use baton_router::{Event, RouterConfig};
use http_body_util::BodyExt;
use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::sync::Notify;

use crate::scripted::{Step, admitted, http1, open, request, text_script, token};

const PATH: &str = "/v1/completions";

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
            let connection = door.raw(&http1(PATH, &body)).await;
            door.wait_submitted(3).await;
            let said = steps.iter().filter(|step| matches!(step, Step::Say(_))).count();
            door.wait_taken(3 * said).await;
            assert_eq!(
                door.backend.cancelled.load(Ordering::SeqCst),
                0,
                "nothing is dropped before it leaves"
            );
            drop(connection);
            door.wait_cancelled(3).await;
        }
    }
}

#[tokio::test]
async fn headers_wait_for_admission() {
    let go = Arc::new(Notify::new());
    let gate = Arc::clone(&go);
    let steps = move |_: &_| vec![Step::Await(Arc::clone(&gate)), admitted(), token(97), Step::Hang];
    let door = open(RouterConfig { keep_alive_ms: 1, ..RouterConfig::default() }, steps).await;
    let mut connection = door.raw(&http1(PATH, r#"{"prompt":"a","stream":true}"#)).await;
    door.wait_submitted(1).await;
    let mut bytes = [0; 64];
    let early = tokio::time::timeout(Duration::from_millis(50), connection.read(&mut bytes)).await;
    assert!(early.is_err(), "nothing is said before it is admitted, not even that it waits");
    go.notify_one();
    assert!(connection.read(&mut bytes).await.unwrap() > 0);
}

#[tokio::test]
async fn a_stream_of_http2_that_is_not_read_is_cut_off_alone() {
    let config = RouterConfig { stall_limit_ms: 300, ..RouterConfig::default() };
    let door = open(config, |submission| match submission.tokens.len() {
        // The one is without end, the other is short.
        1 => std::iter::once(admitted()).chain(std::iter::repeat_n(token(97), 400_000)).collect(),
        _ => text_script("short"),
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
    let response = sender.send_request(short).await.unwrap();
    assert_eq!(response.status(), 200);
    door.wait_cancelled(1).await;
    assert_eq!(door.router.stats().cut_off, 1);
    let broken = unread.into_body().collect().await;
    assert!(broken.is_err(), "the stream is reset, not ended");
}

#[tokio::test]
async fn clients_wait_as_long_as_they_say() {
    let door = open(RouterConfig::default(), |_| vec![admitted(), token(97), Step::Hang]).await;
    let begun = Instant::now();
    let response = door.post_with(PATH, r#"{"prompt":"a"}"#, &[("x-request-timeout-ms", "150")]).await;
    assert_eq!((response.status, response.error().1.as_deref()), (504, Some("client_timeout")));
    let response =
        door.post_with(PATH, r#"{"prompt":"a","stream":true}"#, &[("x-request-timeout-ms", "150")]).await;
    let (events, done) = response.events();
    assert!(!done && events.last().unwrap()["error"]["code"] == "client_timeout");
    assert!(begun.elapsed() < Duration::from_secs(2));
    door.wait_cancelled(2).await;
}

#[tokio::test]
async fn a_closing_door_lets_answers_end() {
    let mut door = open(RouterConfig::default(), |_| {
        let mut steps = text_script("abc");
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
    let response = door.post(PATH, &json!({"prompt": "a"})).await;
    assert_eq!((response.status, response.error().1.as_deref()), (502, Some("engine_protocol")));
}
