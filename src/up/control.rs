//! The control port: as many connections as it has places for, each of which has to attach a node before long.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use baton_http::{Acceptor, ConnectionSlot, ConnectionSlots};
use baton_wire::v1::control_server::ControlServer;
use futures_util::stream::{Stream, unfold};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Sleep;
use tokio_util::sync::CancellationToken;
use tonic::transport::ServerTlsConfig;
use tonic::transport::server::Connected;

use crate::conductor::{AttachPeer, ControlService};
use crate::metrics::{ControlCloseReason, Metrics};

/// How long a connection may take to have a node attached: TLS, the proof of the cluster's key and its Hello together.
const ATTACH_WITHIN: Duration = Duration::from_secs(10);
/// Bytes that a connection may send before it has a node attached. A Hello with its cost profile is a few KiB.
const UNATTACHED_BYTES: u64 = 1 << 20;
/// Calls of one connection at once. A node has one.
const CALLS_PER_CONNECTION: u32 = 8;

/// Serves nodes until `stop`, on at most `places` connections at once.
pub(super) async fn serve(
    listener: TcpListener,
    (service, tls): (ControlService, Option<ServerTlsConfig>),
    (places, metrics): (usize, Metrics),
    stop: CancellationToken,
) {
    let service = ControlServer::new(service).max_decoding_message_size(64 << 20);
    let mut server = tonic::transport::Server::builder();
    if let Some(tls) = tls {
        // The files were read and tried when the service started.
        server = match server.tls_config(tls) {
            Ok(server) => server,
            Err(error) => return tracing::error!(%error, "the control plane cannot speak TLS"),
        };
    }
    let served = server
        // News of a long prompt's blocks shall not wait for leave every 64 KiB.
        .initial_stream_window_size(4 << 20)
        .initial_connection_window_size(16 << 20)
        .max_concurrent_streams(CALLS_PER_CONNECTION)
        .http2_keepalive_interval(Some(Duration::from_secs(5)))
        // Heartbeats detect a silent node, so a connection is not cut because this process was stopped for a while.
        .http2_keepalive_timeout(Some(Duration::from_secs(30)))
        .add_service(service)
        .serve_with_incoming_shutdown(incoming(listener, places, metrics), stop.cancelled_owned())
        .await;
    if let Err(error) = served {
        tracing::error!(%error, "the control plane stopped");
    }
}

/// Connections that have a place. It has no end, and no errors: those are waited out.
fn incoming(
    listener: TcpListener,
    places: usize,
    metrics: Metrics,
) -> impl Stream<Item = io::Result<NodeLine>> {
    let start = (Acceptor::new("control port", listener), ConnectionSlots::new(places), metrics);
    unfold(start, |(mut acceptor, places, metrics)| async move {
        loop {
            match acceptor.accept(|peer| places.take(peer)).await {
                Ok((stream, peer, place)) => {
                    let line = NodeLine::new(stream, (peer, place), metrics.clone(), ATTACH_WITHIN);
                    return Some((Ok(line), (acceptor, places, metrics)));
                }
                Err(failure) => {
                    if failure.of_system {
                        metrics.control_not_accepted();
                    }
                    (0..failure.closed).for_each(|_| metrics.control_closed(ControlCloseReason::NoPlace));
                }
            }
        }
    })
}

/// A connection of a node, or of somebody who says so. It breaks when nothing was attached in time.
struct NodeLine {
    stream: TcpStream,
    _place: ConnectionSlot,
    attach_peer: AttachPeer,
    overdue: Pin<Box<Sleep>>,
    received_bytes: u64,
    metrics: Metrics,
}

impl NodeLine {
    fn new(
        stream: TcpStream,
        (peer, place): (SocketAddr, ConnectionSlot),
        metrics: Metrics,
        attach_within: Duration,
    ) -> Self {
        let overdue = Box::pin(tokio::time::sleep(attach_within));
        Self {
            stream,
            _place: place,
            attach_peer: AttachPeer::from(peer),
            overdue,
            received_bytes: 0,
            metrics,
        }
    }

    /// Breaks a connection that has attached nothing.
    fn not_attached(&self, why: &str) -> io::Error {
        self.metrics.control_closed(ControlCloseReason::NotAttached);
        tracing::debug!(from = %self.attach_peer.address(), why, "a connection of the control port is closed");
        io::Error::new(io::ErrorKind::TimedOut, why)
    }
}

impl Connected for NodeLine {
    type ConnectInfo = AttachPeer;

    fn connect_info(&self) -> AttachPeer {
        self.attach_peer.clone()
    }
}

impl AsyncRead for NodeLine {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.attach_peer.has_attached() {
            return Pin::new(&mut self.stream).poll_read(cx, buffer);
        }
        if self.overdue.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(self.not_attached("no node was attached in time")));
        }
        if self.received_bytes >= UNATTACHED_BYTES {
            return Poll::Ready(Err(self.not_attached("much was sent and no node attached")));
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        self.received_bytes += (buffer.filled().len() - before) as u64;
        read
    }
}

impl AsyncWrite for NodeLine {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::StreamExt as _;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    async fn line(attach_within: Duration) -> (NodeLine, TcpStream, Metrics) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (near, peer) = listener.accept().await.unwrap();
        let (place, metrics) = (ConnectionSlots::new(1).take(peer.ip()).unwrap(), Metrics::new().unwrap());
        (NodeLine::new(near, (peer, place), metrics.clone(), attach_within), far, metrics)
    }

    fn closed(metrics: &Metrics, why: ControlCloseReason) -> bool {
        let series = format!("baton_connections_closed_total{{port=\"control\",why=\"{}\"}} 1\n", why.name());
        metrics.page().contains(&series)
    }

    #[tokio::test]
    async fn who_attaches_nothing_is_not_waited_for() {
        let (mut near, _far, metrics) = line(Duration::from_millis(30)).await;
        let error = near.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(closed(&metrics, ControlCloseReason::NotAttached), "{}", metrics.page());
    }

    #[tokio::test]
    async fn a_node_that_is_attached_may_be_silent() {
        let (mut near, mut far, metrics) = line(Duration::from_millis(30)).await;
        near.attach_peer.attach();
        tokio::time::sleep(Duration::from_millis(60)).await;
        far.write_all(&[7]).await.unwrap();
        assert_eq!(near.read_u8().await.unwrap(), 7);
        assert!(!closed(&metrics, ControlCloseReason::NotAttached));
    }

    #[tokio::test]
    async fn little_is_taken_from_who_has_attached_nothing() {
        let (mut near, mut far, metrics) = line(Duration::from_secs(60)).await;
        let sending = tokio::spawn(async move { far.write_all(&vec![7; 2 << 20]).await });
        let mut all = Vec::new();
        assert!(near.read_to_end(&mut all).await.is_err());
        // One read more than the bound at most.
        assert!(all.len() < (2 << 20) - (64 << 10), "{}", all.len());
        assert!(closed(&metrics, ControlCloseReason::NotAttached));
        sending.abort();
    }

    #[tokio::test]
    async fn connections_beyond_the_places_are_closed_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, metrics) = (listener.local_addr().unwrap(), Metrics::new().unwrap());
        let mut taken = Box::pin(incoming(listener, 2, metrics.clone()));
        let _first = TcpStream::connect(address).await.unwrap();
        let line = taken.next().await.unwrap().unwrap();
        // One peer has half of the places.
        let mut second = TcpStream::connect(address).await.unwrap();
        let next = tokio::spawn(async move { taken.next().await });
        let mut byte = [0];
        let read = tokio::time::timeout(Duration::from_secs(20), second.read(&mut byte)).await.unwrap();
        assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
        assert!(closed(&metrics, ControlCloseReason::NoPlace), "{}", metrics.page());
        drop(line);
        let _third = TcpStream::connect(address).await.unwrap();
        assert!(next.await.unwrap().unwrap().is_ok(), "its place is free again");
    }
}
