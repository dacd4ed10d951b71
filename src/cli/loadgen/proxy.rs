//! A plain reverse proxy: what any process between client and server costs, done as simply as it
//! can be. It reads nothing, decides nothing and streams bodies both ways.

use baton_http::{Client, Incoming};
use http::header::{CONNECTION, HOST};
use http::uri::{Authority, Scheme};
use http::{Request, Response, StatusCode, Uri};
use http_body_util::BodyExt as _;
use tokio::net::TcpListener;

use super::serve::{AnyBody, in_one_piece, serve};
use super::target::{Target, client_options};

/// Passes every request on to `target`'s host, for as long as it is polled.
pub async fn run(listener: TcpListener, target: &Target) {
    let uri: Uri = target.base().parse().expect("a target's URL was checked");
    let authority = uri.into_parts().authority.expect("a target's URL names a host");
    let client = Client::new(client_options());
    serve("bench: proxy", listener, move |request| pass(client.clone(), authority.clone(), request)).await;
}

async fn pass(
    client: Client<Incoming>,
    authority: Authority,
    mut request: Request<Incoming>,
) -> Response<AnyBody> {
    let mut parts = std::mem::take(request.uri_mut()).into_parts();
    (parts.scheme, parts.authority) = (Some(Scheme::HTTP), Some(authority));
    *request.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
    request.headers_mut().remove(HOST);
    request.headers_mut().remove(CONNECTION);
    match client.send(request).await {
        Ok(response) => response.map(|body| body.boxed()),
        Err(error) => {
            let mut response = Response::new(in_one_piece(error.to_string()));
            *response.status_mut() = StatusCode::BAD_GATEWAY;
            response
        }
    }
}
