//! Connections to servers, in plain text or over TLS.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use http::uri::Scheme;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tower_service::Service;

use crate::error::{Error, causes};
use crate::trust::Trust;
use crate::url::bare_host;

/// Makes connections.
#[derive(Clone)]
pub(crate) struct Connector {
    tcp: HttpConnector,
    within: Duration,
    trust: Trust,
}

impl Connector {
    /// TCP and TLS together take at most `within`.
    pub(crate) fn new(within: Duration, trust: Trust) -> Self {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        // Requests are small, and each is waited for.
        tcp.set_nodelay(true);
        // Shared among the addresses of a name.
        tcp.set_connect_timeout(Some(within));
        Self { tcp, within, trust }
    }
}

impl Service<Uri> for Connector {
    type Response = Stream;
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<Stream, Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let (within, trust) = (self.within, self.trust.clone());
        let tcp = self.tcp.call(uri.clone());
        Box::pin(async move {
            let connecting = async {
                let stream = tcp.await.map_err(|e| Error::Connect(causes(&e)))?;
                if uri.scheme() == Some(&Scheme::HTTPS) {
                    secured(stream, &uri, &trust).await
                } else {
                    Ok(Stream::Plain(stream))
                }
            };
            let late = |_| Error::Connect(format!("no connection within {} ms", within.as_millis()));
            tokio::time::timeout(within, connecting).await.map_err(late)?
        })
    }
}

/// Speaks TLS with the server of `uri`, whose certificate must be for its host.
async fn secured(stream: TokioIo<TcpStream>, uri: &Uri, trust: &Trust) -> Result<Stream, Error> {
    let host = bare_host(uri);
    let name = ServerName::try_from(host.to_owned())
        .map_err(|_| Error::Tls(format!("{host:?} is no name that a certificate can be for")))?;
    let config = trust.config().map_err(|e| Error::Tls(e.to_string()))?;
    let stream = TlsConnector::from(config).connect(name, stream.into_inner()).await;
    Ok(Stream::Secured(Box::new(TokioIo::new(stream.map_err(|e| Error::Tls(causes(&e)))?))))
}

/// A connection.
pub(crate) enum Stream {
    Plain(TokioIo<TcpStream>),
    Secured(Box<TokioIo<TlsStream<TcpStream>>>),
}

/// Makes a call on either variant of the stream.
macro_rules! either {
    ($stream:expr, $inner:ident => $call:expr) => {
        match $stream.get_mut() {
            Stream::Plain($inner) => $call,
            Stream::Secured($inner) => $call,
        }
    };
}

impl Connection for Stream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl Read for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_read(cx, into))
    }
}

impl Write for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write_vectored(cx, slices))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Secured(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_shutdown(cx))
    }
}
