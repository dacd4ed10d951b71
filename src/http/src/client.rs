//! The client: connections that are kept for the next request, or one a request.

use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderValue, InvalidHeaderValue};
use http::{Request, Response, StatusCode};
use http_body::Body;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::client::legacy;
use hyper_util::rt::{TokioExecutor, TokioTimer};

use crate::connect::Connector;
use crate::error::Error;
use crate::trust::Trust;
use crate::whole;

/// How a client connects, and what it keeps.
#[derive(Clone, Debug)]
pub struct Options {
    /// Time for a connection, TLS included.
    pub connect_timeout: Duration,
    /// Connections to one server that wait for the next request; none: one a request.
    pub idle_connections: usize,
    /// How long one waits at most. One that the server closes meanwhile may cost a request.
    pub idle_time: Duration,
    /// The authority on the identity of servers.
    pub trust: Trust,
}

impl Options {
    /// One connection a request, which has to be there within `connect_timeout`, and no TLS.
    #[must_use]
    pub fn new(connect_timeout: Duration) -> Self {
        Self {
            connect_timeout,
            idle_connections: 0,
            idle_time: Duration::from_secs(2),
            trust: Trust::nobody(),
        }
    }
}

/// Sends requests over HTTP/1.1, with bodies of one kind. Clones share their connections.
#[derive(Debug)]
pub struct Client<B = Full<Bytes>>(legacy::Client<Connector, B>);

impl<B> Clone for Client<B> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<B> Client<B>
where
    B: Body + Send + Unpin + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    /// A client without a connection.
    #[must_use]
    pub fn new(options: Options) -> Self {
        let connector = Connector::new(options.connect_timeout, options.trust);
        let mut client = legacy::Client::builder(TokioExecutor::new());
        client
            .pool_timer(TokioTimer::new())
            .pool_max_idle_per_host(options.idle_connections)
            .pool_idle_timeout(options.idle_time);
        Self(client.build(connector))
    }

    /// Sends a request to the server that its URL names. The caller reads the answer's body piece by piece; dropping it
    /// early closes the connection.
    ///
    /// # Errors
    /// When nobody answers there, or the connection breaks before the answer's head.
    pub async fn send(&self, request: Request<B>) -> Result<Response<Incoming>, Error> {
        Ok(self.0.request(request).await?)
    }

    /// Sends a request and waits for its whole answer, with a body of at most `most_bytes`.
    ///
    /// # Errors
    /// As [`Self::send`], and when the body is longer or breaks off.
    pub async fn send_and_collect(
        &self,
        request: Request<B>,
        most_bytes: usize,
    ) -> Result<(StatusCode, Bytes), Error> {
        let answer = self.send(request).await?;
        Ok((answer.status(), whole(answer.into_body(), most_bytes).await?))
    }
}

/// The value of the header `Authorization` for `key`. No log prints it.
///
/// # Errors
/// When it holds characters that no header may.
pub fn bearer(key: &str) -> Result<HeaderValue, InvalidHeaderValue> {
    let mut value = HeaderValue::from_str(&format!("Bearer {key}"))?;
    value.set_sensitive(true);
    Ok(value)
}
