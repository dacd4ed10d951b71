//! An OTLP collector for tests: keeps what it is sent.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

#[derive(Clone, Default)]
struct KeptRequests(Arc<Mutex<Vec<ExportTraceServiceRequest>>>);

#[tonic::async_trait]
impl TraceService for KeptRequests {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.lock().push(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// A collector that listens until its runtime ends.
pub(crate) struct Collector {
    kept: KeptRequests,
    address: SocketAddr,
}

impl Collector {
    /// Starts on a port of its own.
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let kept = KeptRequests::default();
        let service = TraceServiceServer::new(kept.clone());
        let server = tonic::transport::Server::builder().add_service(service);
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        Self { kept, address }
    }

    /// The value of `service.otlp_endpoint`.
    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// All that came, as text.
    pub(crate) fn received_text(&self) -> String {
        format!("{:?}", self.kept.0.lock())
    }

    /// Every span that came.
    pub(crate) fn spans(&self) -> Vec<Span> {
        let kept = self.kept.0.lock();
        let scopes = kept.iter().flat_map(|r| &r.resource_spans).flat_map(|r| &r.scope_spans);
        scopes.flat_map(|scope| scope.spans.clone()).collect()
    }

    /// Waits for the root span of a request; it and those below it.
    pub(crate) async fn trace_of(&self, request_id: &str) -> (Span, Vec<Span>) {
        for _ in 0..200 {
            let spans = self.spans();
            let named = |span: &&Span| text(span, "baton.request_id").as_deref() == Some(request_id);
            if let Some(root) = spans.iter().find(named) {
                let below = spans.iter().filter(|span| span.parent_span_id == root.span_id);
                return (root.clone(), below.cloned().collect());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("no span of {request_id} after 10 s: {}", self.received_text());
    }
}

fn value(span: &Span, key: &str) -> Option<Value> {
    span.attributes.iter().find(|attribute| attribute.key == key)?.value.clone()?.value
}

/// An attribute that is text.
pub(crate) fn text(span: &Span, key: &str) -> Option<String> {
    if let Value::StringValue(text) = value(span, key)? { Some(text) } else { None }
}

/// An attribute that is a number.
pub(crate) fn number(span: &Span, key: &str) -> Option<i64> {
    if let Value::IntValue(number) = value(span, key)? { Some(number) } else { None }
}
