//! Serving HTTP for the small servers that measurements are made against.

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use baton_http::{Bounds, Incoming};
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full, combinators::BoxBody};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Room for the largest load, all of it from one peer; a connection may rest for longer than its client keeps it.
const BOUNDS: Bounds = Bounds {
    connections: 40_000,
    head_bytes: 64 << 10,
    head_timeout: Duration::from_secs(600),
    stall_timeout: Duration::from_secs(60),
    drain: Duration::ZERO,
};

/// A body of any kind.
pub type AnyBody = BoxBody<Bytes, hyper::Error>;

/// A body that is there as a whole.
pub fn in_one_piece(bytes: impl Into<Bytes>) -> AnyBody {
    Full::new(bytes.into()).map_err(|never: Infallible| match never {}).boxed()
}

/// Serves connections for as long as it is polled.
pub async fn serve<F, R>(name: &'static str, listener: TcpListener, answer: F)
where
    F: Fn(Request<Incoming>) -> R + Clone + Send + 'static,
    R: Future<Output = Response<AnyBody>> + Send + 'static,
{
    baton_http::serve(name, listener, BOUNDS, CancellationToken::new(), answer).await;
}
