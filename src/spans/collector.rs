//! An OTLP collector for tests, over gRPC or HTTP: keeps what it is sent.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use baton_http::{BodyLimits, Bounds, Incoming, MemoryPool, receive, reply};
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{Method, StatusCode};
use http_body_util::Full;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use parking_lot::Mutex;
use prost::Message as _;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

const PATH: &str = "/v1/traces";
const PROTOBUF: &str = "application/x-protobuf";

#[derive(Clone, Default)]
struct KeptRequests(Arc<Mutex<Vec<ExportTraceServiceRequest>>>);

/// Answers of a collector over HTTP that takes nothing, before it takes all.
type RefusalQueue = Arc<Mutex<VecDeque<StatusCode>>>;

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

impl KeptRequests {
    /// What OTLP over HTTP asks for: a protobuf message, posted to the path of traces.
    async fn post(
        self,
        refusals: RefusalQueue,
        request: http::Request<Incoming>,
    ) -> http::Response<Full<Bytes>> {
        let (head, body) = request.into_parts();
        let answer = |status, body: Vec<u8>| reply(status, PROTOBUF, Full::from(body));
        if let Some(refusal) = refusals.lock().pop_front() {
            return answer(refusal, Vec::new());
        }
        if (head.method, head.uri.path()) != (Method::POST, PATH) {
            return answer(StatusCode::NOT_FOUND, Vec::new());
        }
        if head.headers.get(CONTENT_TYPE).is_none_or(|kind| kind != PROTOBUF) {
            return answer(StatusCode::UNSUPPORTED_MEDIA_TYPE, Vec::new());
        }
        let pool = MemoryPool::new(1 << 24);
        let limits = BodyLimits { bytes: 1 << 24, within: Duration::from_secs(5), pool: &pool };
        let body = receive(&head.headers, body, limits).await.unwrap();
        self.0.lock().push(ExportTraceServiceRequest::decode(body).unwrap());
        answer(StatusCode::OK, ExportTraceServiceResponse::default().encode_to_vec())
    }
}

/// A collector that listens until its runtime ends.
pub(crate) struct Collector {
    kept: KeptRequests,
    endpoint: String,
}

impl Collector {
    /// Starts on a port of its own, over gRPC.
    pub(crate) async fn start() -> Self {
        let (listener, address) = listen().await;
        let kept = KeptRequests::default();
        let service = TraceServiceServer::new(kept.clone());
        let server = tonic::transport::Server::builder().add_service(service);
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        Self { kept, endpoint: address }
    }

    /// Starts on a port of its own, over HTTP.
    pub(crate) async fn start_http() -> Self {
        Self::start_refusing(&[]).await
    }

    /// Starts over HTTP, and answers the first batches with these.
    pub(crate) async fn start_refusing(refusals: &[StatusCode]) -> Self {
        let (listener, address) = listen().await;
        let kept = KeptRequests::default();
        let bounds = Bounds {
            connections: 16,
            head_bytes: 8_192,
            head_timeout: Duration::from_secs(5),
            stall_timeout: Duration::from_secs(5),
            drain: Duration::ZERO,
        };
        let refusals: RefusalQueue = Arc::new(Mutex::new(refusals.iter().copied().collect()));
        let keep = kept.clone();
        let answer = move |request| keep.clone().post(Arc::clone(&refusals), request);
        tokio::spawn(baton_http::serve("collector", listener, bounds, CancellationToken::new(), answer));
        Self { kept, endpoint: format!("{address}{PATH}") }
    }

    /// The value of `service.otlp_endpoint`.
    pub(crate) fn endpoint(&self) -> String {
        self.endpoint.clone()
    }

    /// The attribute of the process that all spans came from.
    pub(crate) fn resource(&self, key: &str) -> Option<Value> {
        let kept = self.kept.0.lock();
        let resource = kept.first()?.resource_spans.first()?.resource.as_ref()?;
        found(&resource.attributes, key)
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

/// What is logged on this thread.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Keeps it as long as the guard lives.
    pub(crate) fn keep() -> (Self, tracing::subscriber::DefaultGuard) {
        let log = Self::default();
        let writer = log.clone();
        let writer = move || writer.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(writer).finish();
        (log, tracing::subscriber::set_default(subscriber))
    }

    /// All of it.
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().clone()).unwrap()
    }
}

impl std::io::Write for Log {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

async fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    (listener, address)
}

fn found(attributes: &[KeyValue], key: &str) -> Option<Value> {
    attributes.iter().find(|attribute| attribute.key == key)?.value.clone()?.value
}

fn value(span: &Span, key: &str) -> Option<Value> {
    found(&span.attributes, key)
}

/// An attribute that is text.
pub(crate) fn text(span: &Span, key: &str) -> Option<String> {
    if let Value::StringValue(text) = value(span, key)? { Some(text) } else { None }
}

/// An attribute that is a number.
pub(crate) fn number(span: &Span, key: &str) -> Option<i64> {
    if let Value::IntValue(number) = value(span, key)? { Some(number) } else { None }
}
