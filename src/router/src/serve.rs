//! Connections: accepted within a bound, served over HTTP/1 and HTTP/2, and drained at the end.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::router::Router;
use crate::stall::StallLimited;
use crate::tls;

/// Headers of a request at most, in number and bytes.
const MAX_HEADERS: usize = 128;
const MAX_HEADER_BYTES: usize = 64 << 10;
/// Streams of one HTTP/2 connection at once.
const MAX_STREAMS: u32 = 1_024;
/// How long to wait when the kernel has no connection to give, such as for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Why the front door cannot open.
#[derive(Debug)]
pub struct ServeError(String);

impl ServeError {
    pub(crate) fn new(message: String) -> Self {
        Self(message)
    }
}

impl std::fmt::Display for ServeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "router: {}", self.0)
    }
}

impl std::error::Error for ServeError {}

/// How a connection is served.
#[derive(Clone)]
struct Connector {
    router: Arc<Router>,
    builder: Builder<TokioExecutor>,
    tls: Option<TlsAcceptor>,
    stall_limit: Duration,
    receive_limit: Duration,
}

impl Router {
    /// Serves `listener` until `shutdown`, then ends what is under way, up to the drain limit. Fails
    /// before the first connection only: when the TLS files cannot be used.
    pub async fn serve(
        self: Arc<Self>,
        listener: TcpListener,
        shutdown: CancellationToken,
    ) -> Result<(), ServeError> {
        let config = &self.config;
        let receive_limit = Duration::from_millis(config.receive_limit_ms.max(1));
        let connector = Connector {
            tls: config.tls.as_ref().map(tls::acceptor).transpose()?,
            builder: builder(receive_limit),
            stall_limit: Duration::from_millis(config.stall_limit_ms.max(1)),
            receive_limit,
            router: Arc::clone(&self),
        };
        let drain_limit = Duration::from_millis(config.drain_limit_ms);
        let limit = Arc::new(Semaphore::new(config.connections_limit.clamp(1, Semaphore::MAX_PERMITS)));
        let graceful = GracefulShutdown::new();
        let drained = CancellationToken::new();
        loop {
            let accepted = tokio::select! {
                biased;
                () = shutdown.cancelled() => break,
                accepted = accept(&listener, &limit) => accepted,
            };
            let Some((stream, permit)) = accepted else { continue };
            let (connector, watcher, drained) = (connector.clone(), graceful.watcher(), drained.clone());
            tokio::spawn(async move {
                tokio::select! {
                    () = connector.connect(stream, watcher) => {}
                    () = drained.cancelled() => {}
                }
                drop(permit);
            });
        }
        drop(listener);
        if tokio::time::timeout(drain_limit, graceful.shutdown()).await.is_err() {
            tracing::warn!("router: calls were still under way at the drain limit; they are broken off");
        }
        drained.cancel();
        Ok(())
    }
}

fn builder(receive_limit: Duration) -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(receive_limit)
        .max_headers(MAX_HEADERS)
        .max_buf_size(4 * MAX_HEADER_BYTES)
        .pipeline_flush(true);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEADER_BYTES as u32)
        .initial_stream_window_size(1 << 20)
        .initial_connection_window_size(4 << 20)
        .keep_alive_interval(Duration::from_secs(20))
        .keep_alive_timeout(Duration::from_secs(20));
    builder
}

/// The next connection, with its place among those that may be open at once.
async fn accept(listener: &TcpListener, limit: &Arc<Semaphore>) -> Option<(TcpStream, OwnedSemaphorePermit)> {
    let permit = Arc::clone(limit).acquire_owned().await.expect("the semaphore is never closed");
    match listener.accept().await {
        Ok((stream, _)) => Some((stream, permit)),
        Err(e) => {
            tracing::warn!("router: accept: {e}; raise the limit of open files if it says too many");
            tokio::time::sleep(ACCEPT_PAUSE).await;
            None
        }
    }
}

impl Connector {
    async fn connect(self, stream: TcpStream, watcher: Watcher) {
        // Tokens are small, and each is wanted at once.
        if let Err(e) = stream.set_nodelay(true) {
            tracing::debug!("router: nodelay: {e}");
        }
        let stream = StallLimited::new(stream, self.stall_limit);
        match self.tls.clone() {
            None => self.serve(stream, watcher).await,
            Some(tls) => match tokio::time::timeout(self.receive_limit, tls.accept(stream)).await {
                Ok(Ok(stream)) => self.serve(stream, watcher).await,
                Ok(Err(e)) => tracing::debug!("router: TLS handshake: {e}"),
                Err(_) => tracing::debug!("router: TLS handshake: the client took too long"),
            },
        }
    }

    async fn serve<T: AsyncRead + AsyncWrite + Unpin + Send + 'static>(self, stream: T, watcher: Watcher) {
        let router = self.router;
        let service = service_fn(move |request| {
            let router = Arc::clone(&router);
            async move { Ok::<_, Infallible>(router.call(request).await) }
        });
        let connection = self.builder.serve_connection(TokioIo::new(stream), service).into_owned();
        if let Err(e) = watcher.watch(connection).await {
            tracing::debug!("router: connection: {e}");
        }
    }
}
