//! A server for the small ports: bounded in connections, heads, and the time that each may take.

use std::convert::Infallible;
use std::error::Error as StdError;
use std::future::Future;
use std::time::Duration;

use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Request, Response, StatusCode};
use http_body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::listen::Acceptor;
use crate::places::ConnectionSlots;
use crate::stall::StallGuard;

/// Headers of a request at most.
const MAX_HEADERS: usize = 64;

/// The limits of a server for its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Connections at once, of which one peer has at most half. Further ones are closed.
    pub connections: usize,
    /// Bytes of a request's head, at least 8,192.
    pub head_bytes: usize,
    /// Time for a request's head, counted from the end of the answer before.
    pub head_timeout: Duration,
    /// How long a client may read nothing of its answer.
    pub stall_timeout: Duration,
    /// Time for the answers under way once the server stops.
    pub drain: Duration,
}

/// Gives what `answer` makes of each request on `listener` until `stop`, then ends what is under way. The bounds of
/// bodies are for `answer` to keep, with [`receive`](crate::receive).
pub async fn serve<F, R, B>(
    name: &'static str,
    listener: TcpListener,
    bounds: Bounds,
    stop: CancellationToken,
    answer: F,
) where
    F: Fn(Request<Incoming>) -> R + Clone + Send + 'static,
    R: Future<Output = Response<B>> + Send + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn StdError + Send + Sync>>,
{
    let (graceful, ended) = (GracefulShutdown::new(), CancellationToken::new());
    let mut builder = Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(bounds.head_timeout)
        .max_headers(MAX_HEADERS)
        .max_buf_size(bounds.head_bytes);
    let (mut acceptor, places) = (Acceptor::new(name, listener), ConnectionSlots::new(bounds.connections));
    // A failure is logged there.
    while let Some(accepted) = stop.run_until_cancelled(acceptor.accept(|peer| places.take(peer))).await {
        let Ok((stream, peer, place)) = accepted else { continue };
        let answer = answer.clone();
        let service = service_fn(move |request| {
            let answer = answer(request);
            async move { Ok::<_, Infallible>(answer.await) }
        });
        let stream = StallGuard::new(stream, bounds.stall_timeout, || ());
        let connection = graceful.watcher().watch(builder.serve_connection(TokioIo::new(stream), service));
        let ended = ended.clone();
        tokio::spawn(async move {
            // A connection that breaks concerns its client, who sees it.
            if let Some(Err(e)) = ended.run_until_cancelled(connection).await {
                tracing::debug!("{name}: connection of {peer}: {e}");
            }
            drop(place);
        });
    }
    drop(acceptor);
    if tokio::time::timeout(bounds.drain, graceful.shutdown()).await.is_err() {
        tracing::warn!(
            "{name}: answers were still under way when the time to drain was over; they are broken off"
        );
    }
    ended.cancel();
}

/// An answer whose body is of the content type `kind`.
pub fn reply<B>(status: StatusCode, kind: &'static str, body: B) -> Response<B> {
    let mut reply = Response::new(body);
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    reply
}
