//! Serving HTTP for the small servers that measurements are made against.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full, combinators::BoxBody};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// Connections served at a time; more wait to be accepted.
const MOST_CONNECTIONS: usize = 20_000;

/// A body of any kind.
pub type AnyBody = BoxBody<Bytes, hyper::Error>;

/// A body that is there as a whole.
pub fn whole(bytes: impl Into<Bytes>) -> AnyBody {
    Full::new(bytes.into()).map_err(|never: Infallible| match never {}).boxed()
}

/// Serves connections for as long as it is polled; returns only when accepting fails.
pub async fn serve<F, R>(listener: TcpListener, answer: F) -> std::io::Error
where
    F: Fn(Request<Incoming>) -> R + Clone + Send + 'static,
    R: Future<Output = Response<AnyBody>> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            return std::io::Error::other("no more connections are taken");
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => return error,
        };
        // Small events must not wait for acknowledgements; where the option fails they do.
        let _ = stream.set_nodelay(true);
        let answer = answer.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request| {
                let answer = answer(request);
                async move { Ok::<_, Infallible>(answer.await) }
            });
            // A connection that breaks concerns its client, who sees it.
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
            drop(place);
        });
    }
}
