//! HTTP/1.1 on loopback: enough of a server to misbehave with.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body::{Body, Frame};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};

/// Longest request that is taken.
const MAX_BODY_BYTES: usize = 64 << 20;

/// A request in one piece.
pub(super) struct WholeRequest {
    pub(super) path: String,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

/// An answer.
pub(super) enum Reply {
    /// In one piece.
    Page(u16, &'static str, Bytes),
    /// Events as they come. When the client leaves, the receiver is dropped.
    Stream(mpsc::Receiver<io::Result<Bytes>>),
    /// Not now, and not before so many seconds have passed.
    Busy(u16, u32),
    /// The connection closes.
    Hangup,
}

impl Reply {
    pub(super) fn json(status: u16, value: &Value) -> Self {
        Self::Page(status, "application/json", value.to_string().into())
    }
}

/// The handler of requests.
pub(super) trait Site: Send + Sync + 'static {
    fn answer(self: Arc<Self>, asked: WholeRequest) -> impl Future<Output = Reply> + Send;
}

/// Ends a server, from within and from without.
#[derive(Clone, Debug)]
pub(super) struct Life {
    over: Arc<watch::Sender<bool>>,
    exited: Arc<AtomicBool>,
}

impl Life {
    pub(super) fn new() -> Self {
        Self { over: Arc::new(watch::Sender::new(false)), exited: Arc::default() }
    }

    /// The server is gone, with all its connections.
    pub(super) fn exit(&self) {
        self.exited.store(true, Ordering::SeqCst);
        self.over.send_replace(true);
    }

    pub(super) fn exited(&self) -> bool {
        self.exited.load(Ordering::SeqCst)
    }

    /// Returns when the server is gone.
    pub(super) async fn ended(&self) {
        let mut over = self.over.subscribe();
        // The sender is ours, so the wait ends only when it is over.
        let _ = over.wait_for(|over| *over).await;
    }
}

/// Serves `site` on `port` of loopback, or on a free one for 0, until its life ends. Without the bounds of
/// `baton_http::serve`: a stand-in can hang up in mid-answer and leave no connection open.
pub(super) async fn serve<S: Site>(site: Arc<S>, life: Life, port: u16) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        loop {
            let stream = tokio::select! {
                () = life.ended() => return,
                accepted = listener.accept() => accepted,
            };
            let Ok((stream, _)) = stream else { return };
            // As the real servers have it: an event is not kept back until the one before is acknowledged.
            if stream.set_nodelay(true).is_err() {
                continue;
            }
            let (site, life) = (Arc::clone(&site), life.clone());
            tokio::spawn(async move {
                let service = service_fn(move |request| respond(Arc::clone(&site), request));
                let connection = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service);
                tokio::select! {
                    () = life.ended() => {}
                    // A client that leaves, and an answer that breaks off on purpose, end up here.
                    _ = connection => {}
                }
            });
        }
    });
    Ok(address)
}

async fn respond<S: Site>(site: Arc<S>, request: Request<Incoming>) -> Result<Response<Stream>, io::Error> {
    let (head, body) = request.into_parts();
    let body = Limited::new(body, MAX_BODY_BYTES).collect().await.map_err(io::Error::other)?.to_bytes();
    let asked = WholeRequest { path: head.uri.path().to_owned(), headers: head.headers, body };
    let answer = Response::builder();
    let (status, kind, body) = match site.answer(asked).await {
        Reply::Page(status, kind, page) => (status, kind, Stream::Page(Some(page))),
        Reply::Stream(events) => (200, "text/event-stream; charset=utf-8", Stream::Events(events)),
        Reply::Busy(status, after_s) => {
            let answer = answer.status(status).header("retry-after", after_s);
            return answer.body(Stream::Page(None)).map_err(io::Error::other);
        }
        Reply::Hangup => return Err(io::Error::other("hung up on purpose")),
    };
    answer.status(status).header("content-type", kind).body(body).map_err(io::Error::other)
}

/// A body in one piece or many.
enum Stream {
    Page(Option<Bytes>),
    Events(mpsc::Receiver<io::Result<Bytes>>),
}

impl Body for Stream {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match &mut *self {
            Self::Page(page) => Poll::Ready(page.take().map(|page| Ok(Frame::data(page)))),
            Self::Events(events) => {
                events.poll_recv(context).map(|event| event.map(|event| event.map(Frame::data)))
            }
        }
    }
}

/// An event's bytes.
pub(super) fn event(value: &Value) -> Bytes {
    format!("data: {value}\n\n").into()
}

/// Sleeps, and does not for no time: the timer's steps are a thousand times longer than an event takes.
pub(super) async fn pass(time: Duration) {
    if !time.is_zero() {
        tokio::time::sleep(time).await;
    }
}

/// Never comes.
pub(super) async fn never() -> Reply {
    std::future::pending::<Infallible>().await;
    Reply::Hangup
}
