//! OTLP over HTTP, by the client that all of Baton has.

use std::sync::Arc;

use baton_http::{Client, Error, Options, Trust, whole};
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use opentelemetry_http::{HttpClient, HttpError, ResponseBodyTooLarge};
use parking_lot::Mutex;

use super::exporter::CONNECT_LIMIT;

/// Bytes of an answer at most: as much as the exporter's words about a longer one say.
const MAX_ANSWER_BYTES: usize = 4 << 20;

/// Posts batches over one kept connection. The caller sets the time limit.
#[derive(Clone, Debug)]
pub(super) struct CollectorClient {
    client: Client,
    /// Why the last batch got no answer. The exporter's own error says only that the network failed.
    cause: Arc<Mutex<Option<String>>>,
}

impl CollectorClient {
    /// A client that speaks TLS to collectors whose certificate comes from `trust`.
    pub(super) fn new(trust: Trust) -> Self {
        let options = Options { idle_connections: 1, trust, ..Options::new(CONNECT_LIMIT) };
        Self { client: Client::new(options), cause: Arc::default() }
    }

    /// Why the last batch got no answer, once.
    pub(super) fn take_cause(&self) -> Option<String> {
        self.cause.lock().take()
    }

    async fn post(&self, request: Request<Bytes>) -> Result<Response<Bytes>, Error> {
        let (head, body) = self.client.send(request.map(Full::new)).await?.into_parts();
        Ok(Response::from_parts(head, whole(body, MAX_ANSWER_BYTES).await?))
    }
}

#[tonic::async_trait]
impl HttpClient for CollectorClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        match self.post(request).await {
            Ok(answer) => {
                self.take_cause();
                Ok(answer)
            }
            // It answered, so that the batch must not be sent again: the exporter knows this error.
            Err(Error::TooLong(_)) => Err(ResponseBodyTooLarge::new().into()),
            Err(error) => {
                *self.cause.lock() = Some(error.to_string());
                Err(error.into())
            }
        }
    }
}
