//! Connections: accepted within bounds, served over HTTP/1 and HTTP/2, closed when they are of no use, and drained at the
//! end.

use std::convert::Infallible;
use std::future::poll_fn;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use baton_http::{Acceptor, ConnectionSlot, ConnectionSlots, StallGuard};
use http::{HeaderValue, Request, Version, header};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::activity::{Activity, TimeLimits};
use crate::error::ApiError;
use crate::line::{DisconnectWatch, Line};
use crate::router::{Router, is_operators};
use crate::stats::CloseReason;

/// What TLS offers: HTTP/2 before HTTP/1.1.
const ALPN: [&[u8]; 2] = [b"h2", b"http/1.1"];
/// Headers of a request at most, in number and bytes.
const MAX_HEADERS: usize = 128;
const MAX_HEADER_BYTES: usize = 64 << 10;
/// Streams of one HTTP/2 connection at once.
const MAX_STREAMS: u32 = 1_024;
/// Bytes of one stream's answer that wait to be sent over HTTP/2, beside the frame that is being made.
const MAX_UNSENT_BYTES: usize = 32 << 10;
/// Connections beyond the limit. Operators are served on them, and all other clients get an error.
const SPARE_PLACES: usize = 64;
/// How long such a connection may be silent.
const SPARE_TIME_LIMIT: Duration = Duration::from_secs(2);
/// How long a connection may be open after an answer. Over HTTP/1 the time for the next request's head ends sooner.
const IDLE_TIME_LIMIT: Duration = Duration::from_secs(300);

/// Time for connections to close once the drain time is over.
const LAST_MOMENT: Duration = Duration::from_millis(200);

/// How a connection is served.
#[derive(Clone)]
struct Connector {
    router: Arc<Router>,
    builder: Builder<TokioExecutor>,
    tls: Option<TlsAcceptor>,
    stall_limit: Duration,
    time_limit: TimeLimits,
    /// Ends what is still under way at the end of the drain.
    drained: CancellationToken,
}

/// Where connections are, and where those are that have no place.
struct ListenerSlots {
    places: Arc<ConnectionSlots>,
    spare: Arc<ConnectionSlots>,
}

impl ListenerSlots {
    /// A place, and whether it is a spare one.
    fn take(&self, peer: IpAddr) -> Option<(ConnectionSlot, bool)> {
        let place = self.places.take(peer).map(|place| (place, false));
        place.or_else(|| self.spare.take(peer).map(|place| (place, true)))
    }
}

impl Router {
    /// Serves `listener` until `shutdown`, then ends what is under way, up to the drain limit.
    pub async fn serve(self: Arc<Self>, listener: TcpListener, shutdown: CancellationToken) {
        let config = &self.config;
        let first = Duration::from_millis(config.receive_limit_ms.max(1));
        let connector = Connector {
            tls: config.tls.clone().map(|identity| identity.offering(&ALPN).acceptor()),
            builder: builder(first),
            stall_limit: Duration::from_millis(config.stall_limit_ms.max(1)),
            time_limit: TimeLimits { first, idle: IDLE_TIME_LIMIT },
            drained: CancellationToken::new(),
            router: Arc::clone(&self),
        };
        let rooms = ListenerSlots {
            places: ConnectionSlots::new(config.connections_limit),
            spare: ConnectionSlots::new(SPARE_PLACES),
        };
        let (graceful, tasks) = (GracefulShutdown::new(), TaskTracker::new());
        let mut acceptor = Acceptor::new("front door", listener);
        while let Some(accepted) =
            shutdown.run_until_cancelled(acceptor.accept(|peer| rooms.take(peer))).await
        {
            match accepted {
                Ok((stream, _, place)) => {
                    tasks.spawn(connector.clone().connect(stream, place, graceful.watcher()));
                }
                Err(failure) => {
                    if failure.of_system {
                        self.counters.not_accepted();
                    }
                    (0..failure.closed).for_each(|_| self.counters.closed(CloseReason::NoPlace));
                }
            }
        }
        drop(acceptor);
        self.drain(graceful).await;
        connector.drained.cancel();
        tasks.close();
        tasks.wait().await;
    }

    /// Waits for what is under way, as long as there is time.
    async fn drain(&self, graceful: GracefulShutdown) {
        let limit = Duration::from_millis(self.config.drain_limit_ms);
        let now = Instant::now();
        // Connections without an answer under way close in a moment, and have it even when time is up.
        let deadline = self.closes_at.get().map_or(now + limit, |&at| at.max(now + LAST_MOMENT));
        if tokio::time::timeout_at(deadline, graceful.shutdown()).await.is_err() {
            let connections = self.stats().connections;
            tracing::warn!(
                connections,
                "router: answers were still under way when the time to drain was over; they are broken off"
            );
        }
    }
}

fn builder(receive_limit: Duration) -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    // No `pipeline_flush`: with it hyper writes without bound for a client that does not read, and not at all while there
    // are bytes of a next request.
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(receive_limit)
        .max_headers(MAX_HEADERS)
        .max_buf_size(MAX_HEADER_BYTES);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEADER_BYTES as u32)
        .max_send_buf_size(MAX_UNSENT_BYTES)
        .initial_stream_window_size(1 << 20)
        .initial_connection_window_size(4 << 20)
        .keep_alive_interval(Duration::from_secs(20))
        .keep_alive_timeout(Duration::from_secs(20));
    builder
}

impl Connector {
    async fn connect(mut self, stream: TcpStream, (place, spare): (ConnectionSlot, bool), watcher: Watcher) {
        let counters = Arc::clone(&self.router.counters);
        let _open = counters.opened();
        if spare {
            self.time_limit = TimeLimits { first: SPARE_TIME_LIMIT, idle: SPARE_TIME_LIMIT };
        }
        let (activity, time_limit, drained) = (Activity::new(), self.time_limit, self.drained.clone());
        tokio::select! {
            biased;
            () = self.greet(stream, (Arc::clone(&activity), spare), watcher) => {}
            why = activity.outlasts(time_limit) => counters.closed(why),
            () = drained.cancelled() => counters.closed(CloseReason::Drained),
        }
        drop(place);
    }

    async fn greet(self, stream: TcpStream, with: (Arc<Activity>, bool), watcher: Watcher) {
        let (line, disconnect_watch) = Line::new(stream);
        let counters = Arc::clone(&self.router.counters);
        let stream = StallGuard::new(line, self.stall_limit, move || counters.closed(CloseReason::Unread));
        match self.tls.clone() {
            None => self.serve(stream, with, (disconnect_watch, watcher)).await,
            // The time for the first request's head is running.
            Some(tls) => match tls.accept(stream).await {
                Ok(stream) => self.serve(stream, with, (disconnect_watch, watcher)).await,
                Err(e) => tracing::debug!("router: TLS handshake: {e}"),
            },
        }
    }

    async fn serve<T: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
        self,
        stream: T,
        (activity, spare): (Arc<Activity>, bool),
        (disconnect_watch, watcher): (DisconnectWatch, Watcher),
    ) {
        let (router, seen) = (Arc::clone(&self.router), Arc::clone(&activity));
        let service = service_fn(move |request: Request<Incoming>| {
            let (router, under_way) = (Arc::clone(&router), seen.begin());
            async move {
                let operators = is_operators(request.uri().path());
                let (reply, room) = if spare && !operators {
                    let mut reply = router.refuse_connection();
                    if request.version() < Version::HTTP_2 {
                        reply.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
                    }
                    (reply, None)
                } else {
                    let bodies = if operators { &router.operators_bodies } else { &router.bodies };
                    match bodies.request(request.headers()) {
                        Ok(room) => (router.call(request).await, Some(room)),
                        Err(full) => (router.refuse(&full.into()), None),
                    }
                };
                Ok::<_, Infallible>(reply.map(|body| body.with(under_way, room)))
            }
        });
        let connection = self.builder.serve_connection(TokioIo::new(stream), service).into_owned();
        let mut connection = pin!(watcher.watch(connection));
        let ended = poll_fn(|cx| match connection.as_mut().poll(cx) {
            Poll::Ready(ended) => Poll::Ready(Some(ended)),
            Poll::Pending if activity.is_under_way() => disconnect_watch.poll_left(cx).map(|()| None),
            Poll::Pending => Poll::Pending,
        });
        match ended.await {
            Some(Ok(())) => {}
            Some(Err(e)) => {
                tracing::debug!("router: connection: {e}");
                if let Some(error) = e.downcast_ref::<hyper::Error>().filter(|error| error.is_parse()) {
                    // The HTTP library has answered it by itself.
                    let status = if error.is_parse_too_large() { 431 } else { 400 };
                    drop(self.router.refuse(&ApiError::new(status, "").code("bad_head")));
                }
            }
            None => tracing::debug!("router: connection: the client left before its answer"),
        }
    }
}
