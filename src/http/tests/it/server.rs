//! A server's limits for one client, and its shutdown.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use baton_http::{Bounds, Client, Options, whole};
use bytes::Bytes;
use http::Response;
use http_body_util::Full;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::{TestServer, WIDE, get};

const SOON: Duration = Duration::from_secs(20);

async fn connected(served: &TestServer) -> TcpStream {
    TcpStream::connect(served.address()).await.unwrap()
}

/// All that comes until the other side closes.
async fn read_to_end(stream: &mut TcpStream) -> String {
    let mut came = Vec::new();
    // A connection that is cut off rather than closed has ended too.
    let reading = stream.read_to_end(&mut came);
    let _ = tokio::time::timeout(SOON, reading).await.expect("it is closed");
    String::from_utf8_lossy(&came).into_owned()
}

/// The answer of a server that has no place yet.
async fn once_there_is_a_place<T, E>(mut send_and_collect: impl AsyncFnMut() -> Result<T, E>) -> T {
    let asking = async {
        loop {
            match send_and_collect().await {
                Ok(answer) => return answer,
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    };
    tokio::time::timeout(SOON, asking).await.expect("there is a place")
}

#[tokio::test]
async fn connections_beyond_the_bound_are_closed_at_once() {
    let served = TestServer::start(Bounds { connections: 2, ..WIDE }).await;
    let first = connected(&served).await;
    // One peer has half of the places.
    let mut second = connected(&served).await;
    assert_eq!(read_to_end(&mut second).await, "");
    assert_eq!(served.asked.load(Ordering::Relaxed), 0);
    drop(first);
    assert_eq!(once_there_is_a_place(|| send_and_collect(served.base.clone(), "/third")).await, "/third");
}

#[tokio::test]
async fn a_head_that_does_not_come_or_is_too_long_ends_the_connection() {
    let limit = Duration::from_millis(100);
    let served = TestServer::start(Bounds { head_timeout: limit, ..WIDE }).await;
    let began = Instant::now();
    let mut slow = connected(&served).await;
    slow.write_all(b"GET /slow HTTP/1.1\r\nhos").await.unwrap();
    read_to_end(&mut slow).await;
    assert!(began.elapsed() >= limit - Duration::from_millis(10));
    let mut long = connected(&served).await;
    let head = format!("GET /long HTTP/1.1\r\nfield: {}\r\n\r\n", "x".repeat(2 * WIDE.head_bytes));
    long.write_all(head.as_bytes()).await.unwrap();
    let refused = read_to_end(&mut long).await;
    assert!(refused.is_empty() || refused.starts_with("HTTP/1.1 431"), "{refused}");
    assert_eq!(served.asked.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_client_that_reads_nothing_is_cut_off() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let bounds = Bounds { connections: 1, stall_timeout: Duration::from_secs(1), ..WIDE };
    let large = Bytes::from(vec![b'x'; 32 << 20]);
    let answer = move |_| std::future::ready(Response::new(Full::new(large.clone())));
    tokio::spawn(baton_http::serve("test", listener, bounds, CancellationToken::new(), answer));
    let mut idle = TcpStream::connect(address).await.unwrap();
    idle.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    // The only place is free again, though the first client holds its end.
    let client = Client::new(Options::new(SOON));
    let url = format!("http://{address}/");
    let answer = once_there_is_a_place(|| client.send(get(&url))).await;
    assert_eq!(whole(answer.into_body(), 32 << 20).await.unwrap().len(), 32 << 20);
    drop(idle);
}

#[tokio::test]
async fn the_end_waits_for_answers_and_not_for_idle_connections() {
    let served = TestServer::start(WIDE).await;
    let mut idle = connected(&served).await;
    idle.write_all(b"GET /idle HTTP/1.1\r\n\r\n").await.unwrap();
    let mut came = [0; 4096];
    assert!(idle.read(&mut came).await.unwrap() > 0);
    let asking = tokio::spawn(send_and_collect(served.base.clone(), "/late?300"));
    while served.asked.load(Ordering::Relaxed) < 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    served.stop.cancel();
    assert_eq!(asking.await.unwrap().unwrap(), "/late");
    tokio::time::timeout(SOON, served.ended).await.expect("it ends").unwrap();
    assert_eq!(read_to_end(&mut idle).await, "");
}

#[tokio::test]
async fn what_outlasts_the_drain_is_broken_off() {
    let served = TestServer::start(Bounds { drain: Duration::from_millis(100), ..WIDE }).await;
    let asking = tokio::spawn(send_and_collect(served.base.clone(), "/never?60000"));
    while served.asked.load(Ordering::Relaxed) < 1 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    served.stop.cancel();
    tokio::time::timeout(SOON, served.ended).await.expect("it ends").unwrap();
    assert!(tokio::time::timeout(SOON, asking).await.expect("it is broken off").unwrap().is_err());
}

async fn send_and_collect(base: String, path: &'static str) -> Result<Bytes, baton_http::Error> {
    let answer = Client::new(Options::new(SOON)).send(get(&format!("{base}{path}"))).await?;
    whole(answer.into_body(), 1 << 10).await
}
