//! HTTP and HTTPS to a bucket, over the client and the TLS library that the rest of the program uses.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use baton_http::{Client, Options, Trust, whole};
use http_body_util::{BodyExt as _, Full};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService,
};

/// Connections that wait for the next request.
const IDLE_MAX: usize = 16;
/// How long one waits.
const IDLE_TIME: Duration = Duration::from_secs(30);
/// Time for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// Makes the client of a bucket. The client has no time limit of its own: the caller gives up.
#[derive(Debug)]
pub(super) struct Connector {
    /// Longest answer.
    pub(super) answer_max_bytes: usize,
}

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        let options = Options {
            idle_connections: IDLE_MAX,
            idle_time: IDLE_TIME,
            trust: Trust::of_system(),
            ..Options::new(CONNECT_TIMEOUT)
        };
        Ok(HttpClient::new(Service { client: Client::new(options), answer_max_bytes: self.answer_max_bytes }))
    }
}

#[derive(Debug)]
struct Service {
    client: Client,
    answer_max_bytes: usize,
}

type Answer<'a> = Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'a>>;

impl HttpService for Service {
    fn call<'a, 'b>(&'a self, request: HttpRequest) -> Answer<'b>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(self.answer(request))
    }
}

impl Service {
    async fn answer(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (head, body) = request.into_parts();
        let body = Full::new(body.collect().await?.to_bytes());
        let answer = self.client.send(http::Request::from_parts(head, body)).await.map_err(|e| {
            let kind = if e.is_connect() { HttpErrorKind::Connect } else { HttpErrorKind::Request };
            HttpError::new(kind, e)
        })?;
        let (head, body) = answer.into_parts();
        let body = whole(body, self.answer_max_bytes).await;
        let body = body.map_err(|e| HttpError::new(HttpErrorKind::Interrupted, e))?;
        Ok(HttpResponse::from_parts(head, HttpResponseBody::from(body)))
    }
}
