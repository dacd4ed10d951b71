//! A plain reverse proxy: what any process between client and server costs, done as simply as it
//! can be. It reads nothing, decides nothing and streams bodies both ways.

use http::header::{CONNECTION, HOST};
use http::uri::{Authority, Scheme};
use http::{Request, Response, StatusCode, Uri};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::net::TcpListener;

use super::serve::{AnyBody, serve, whole};
use super::target::{Target, chain};

/// Passes every request on to `target`'s host; returns only when accepting fails.
pub async fn run(listener: TcpListener, target: &Target) -> Result<(), String> {
    let uri: Uri = target.base().parse().map_err(|e| format!("bench: {}: {e}", target.base()))?;
    let authority = uri.authority().cloned().ok_or("bench: the URL to pass requests on to names no host")?;
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let client: Client<HttpConnector, Incoming> =
        Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build(connector);
    let answer = move |request| pass(client.clone(), authority.clone(), request);
    Err(format!("bench: proxy: {}", serve(listener, answer).await))
}

async fn pass(
    client: Client<HttpConnector, Incoming>,
    authority: Authority,
    mut request: Request<Incoming>,
) -> Response<AnyBody> {
    let mut parts = std::mem::take(request.uri_mut()).into_parts();
    (parts.scheme, parts.authority) = (Some(Scheme::HTTP), Some(authority));
    *request.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
    request.headers_mut().remove(HOST);
    request.headers_mut().remove(CONNECTION);
    match client.request(request).await {
        Ok(response) => response.map(|body| body.boxed()),
        Err(error) => {
            let mut response = Response::new(whole(chain(&error)));
            *response.status_mut() = StatusCode::BAD_GATEWAY;
            response
        }
    }
}
