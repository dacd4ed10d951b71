//! The client against servers that behave and servers that do not, and the server against such clients.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod client;
mod identity;
mod server;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use baton_http::{Bounds, Incoming};
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Bounds that no test meets by chance.
const WIDE: Bounds = Bounds {
    connections: 64,
    head_bytes: 8 << 10,
    head_timeout: Duration::from_secs(30),
    stall_timeout: Duration::from_secs(30),
    drain: Duration::from_secs(30),
};

/// A server that is stopped by its token.
struct TestServer {
    base: String,
    stop: CancellationToken,
    /// Requests that came.
    asked: Arc<AtomicUsize>,
    ended: JoinHandle<()>,
}

impl TestServer {
    /// Answers each request with its path, after as many milliseconds as its query says.
    async fn start(bounds: Bounds) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        let (stop, asked) = (CancellationToken::new(), Arc::new(AtomicUsize::new(0)));
        let counted = Arc::clone(&asked);
        let answer = move |request: Request<Incoming>| {
            counted.fetch_add(1, Ordering::Relaxed);
            async move {
                let wait_ms = request.uri().query().map_or(0, |query| query.parse().unwrap());
                tokio::time::sleep(Duration::from_millis(wait_ms)).await;
                Response::new(Full::new(Bytes::from(request.uri().path().to_owned())))
            }
        };
        let ended = tokio::spawn(baton_http::serve("test", listener, bounds, stop.clone(), answer));
        Self { base, stop, asked, ended }
    }

    fn address(&self) -> &str {
        self.base.strip_prefix("http://").unwrap()
    }
}

fn get(url: &str) -> Request<Full<Bytes>> {
    Request::get(url).body(Full::default()).unwrap()
}
