//! A completion server that answers each call as a script says.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// What to do with a call.
#[derive(Clone, Copy, Debug)]
pub enum Act {
    /// Answer as many tokens as asked for.
    Answer { first_ms: u64, gap_ms: u64 },
    /// Refuse; `wait_ms` goes into `retry-after-ms`, a rounder value into `retry-after`.
    Refuse { status: u16, wait_ms: Option<u64> },
    /// End the stream in order, but too early.
    Truncate { tokens: u64 },
    /// Break the connection in the middle.
    Hangup { tokens: u64 },
    /// One token, then an error in the stream.
    StreamError,
    /// An error by status.
    Status(u16),
    /// Never answer.
    Silence,
    /// A whole answer where a stream was wanted.
    NoStream,
    /// A stream of no token.
    Nothing,
    /// An event that is not JSON.
    Garbage,
}

impl Act {
    /// An answer with its first token after `first_ms` and `gap_ms` between tokens.
    pub fn answer(first_ms: u64, gap_ms: u64) -> Self {
        Self::Answer { first_ms, gap_ms }
    }
}

/// A call that came.
#[derive(Clone, Debug)]
pub struct Call {
    /// When.
    pub at: Instant,
    /// Number of the row in its request id.
    pub row: u64,
    /// Its path.
    pub path: String,
    /// Its key.
    pub authorization: Option<String>,
    /// Its body.
    pub body: Value,
    /// Its prompt.
    pub prompt: Vec<u64>,
}

type Script = dyn Fn(u64, u64) -> Act + Send + Sync;

#[derive(Default)]
struct Seen {
    calls: Mutex<Vec<Call>>,
    now: AtomicU64,
    most: AtomicU64,
}

/// The server; its threads end with it.
pub struct Server {
    address: SocketAddr,
    seen: Arc<Seen>,
    _runtime: tokio::runtime::Runtime,
}

type Body = BoxBody<Bytes, std::io::Error>;

impl Server {
    /// Serves on a free port; `act` says what to do with a row's first, second, ... attempt.
    pub fn start(act: impl Fn(u64, u64) -> Act + Send + Sync + 'static) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let (seen, script): (Arc<Seen>, Arc<Script>) = (Arc::default(), Arc::new(act));
        let shared = Arc::clone(&seen);
        runtime.spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                stream.set_nodelay(true).unwrap();
                let (seen, script) = (Arc::clone(&shared), Arc::clone(&script));
                let service = service_fn(move |request| {
                    let (seen, script) = (Arc::clone(&seen), Arc::clone(&script));
                    async move { Ok::<_, Infallible>(serve(request, &seen, &*script).await) }
                });
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service),
                );
            }
        });
        Self { address, seen, _runtime: runtime }
    }

    /// Where it listens.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The calls so far, in order of arrival.
    pub fn calls(&self) -> Vec<Call> {
        self.seen.calls.lock().clone()
    }

    /// Most calls that were being answered at a time.
    pub fn most_at_once(&self) -> u64 {
        self.seen.most.load(Ordering::SeqCst)
    }

    /// Waits until `count` calls have come; false when they do not within a minute.
    pub fn wait_for_calls(&self, count: usize) -> bool {
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(60) {
            if self.seen.calls.lock().len() >= count {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }
}

fn whole(status: u16, body: &Value) -> Response<Body> {
    let body = Full::new(Bytes::from(body.to_string())).map_err(|never| match never {}).boxed();
    Response::builder().status(status).header("content-type", "application/json").body(body).unwrap()
}

async fn serve(request: Request<Incoming>, seen: &Arc<Seen>, script: &Script) -> Response<Body> {
    if request.uri().path() == "/v1/models" {
        return whole(200, &json!({"data": [{"id": "tiny", "vocab_size": 300, "max_model_len": 1_000_000}]}));
    }
    let at = Instant::now();
    let header = |name: &str| request.headers().get(name).map(|v| v.to_str().unwrap().to_owned());
    let row = header("x-request-id").unwrap().strip_prefix("replay-").unwrap().parse().unwrap();
    let (path, authorization) = (request.uri().path().to_owned(), header("authorization"));
    let body: Value =
        serde_json::from_slice(&request.into_body().collect().await.unwrap().to_bytes()).unwrap();
    let prompt = body["prompt"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap()).collect();
    let (tokens, prompt_tokens) =
        (body["max_tokens"].as_u64().unwrap(), body["prompt"].as_array().unwrap().len());
    let attempt = {
        let mut calls = seen.calls.lock();
        calls.push(Call { at, row, path, authorization, body, prompt });
        calls.iter().filter(|c| c.row == row).count() as u64
    };
    match script(row, attempt) {
        Act::Answer { first_ms, gap_ms } => {
            stream(seen, Course { first_ms, gap_ms, tokens, end: End::Whole { prompt_tokens } })
        }
        Act::Truncate { tokens } => stream(seen, Course { first_ms: 0, gap_ms: 0, tokens, end: End::Early }),
        Act::Hangup { tokens } => stream(seen, Course { first_ms: 0, gap_ms: 0, tokens, end: End::Break }),
        Act::StreamError => stream(seen, Course { first_ms: 0, gap_ms: 0, tokens: 1, end: End::Error }),
        Act::Garbage => stream(seen, Course { first_ms: 0, gap_ms: 0, tokens: 1, end: End::Garbage }),
        Act::Nothing => stream(seen, Course { first_ms: 0, gap_ms: 0, tokens: 0, end: End::Done }),
        Act::NoStream => whole(200, &json!({"choices": [{"text": "a"}]})),
        Act::Status(status) => {
            whole(status, &json!({"error": {"message": "no", "type": "x", "code": "boom"}}))
        }
        Act::Silence => std::future::pending().await,
        Act::Refuse { status, wait_ms } => refusal(status, wait_ms),
    }
}

fn refusal(status: u16, wait_ms: Option<u64>) -> Response<Body> {
    let mut response =
        whole(status, &json!({"error": {"message": "full", "type": "overloaded", "code": "ttft"}}));
    if let Some(ms) = wait_ms {
        response.headers_mut().insert("retry-after-ms", ms.into());
        response.headers_mut().insert("retry-after", (ms.div_ceil(1000) + 1).into());
    }
    response
}

/// How a stream goes.
struct Course {
    first_ms: u64,
    gap_ms: u64,
    tokens: u64,
    end: End,
}

/// How it ends.
enum End {
    Whole { prompt_tokens: usize },
    Done,
    Early,
    Break,
    Error,
    Garbage,
}

fn stream(seen: &Arc<Seen>, script: Course) -> Response<Body> {
    let (send, receive) = mpsc::channel::<Result<Frame<Bytes>, std::io::Error>>(16);
    let seen = Arc::clone(seen);
    let now = seen.now.fetch_add(1, Ordering::SeqCst) + 1;
    seen.most.fetch_max(now, Ordering::SeqCst);
    tokio::spawn(async move {
        let event = |text: String| Ok(Frame::data(Bytes::from(format!("data: {text}\n\n"))));
        for at in 0..script.tokens {
            let pause_ms = if at == 0 { script.first_ms } else { script.gap_ms };
            tokio::time::sleep(Duration::from_millis(pause_ms)).await;
            let last = at + 1 == script.tokens;
            let finish = if last { json!("length") } else { Value::Null };
            let chunk =
                json!({"choices": [{"index": 0, "text": "a", "finish_reason": finish}], "usage": null});
            if send.send(event(chunk.to_string())).await.is_err() {
                break;
            }
        }
        // Counted out before the client can see the end, so that its next call is never one too many.
        seen.now.fetch_sub(1, Ordering::SeqCst);
        for item in ending(&script) {
            let text = match item {
                Ok(text) => event(text),
                Err(error) => Err(error),
            };
            if send.send(text).await.is_err() {
                return;
            }
        }
    });
    let body = BodyExt::boxed(StreamBody::new(ReceiverStream::new(receive)));
    Response::builder().header("content-type", "text/event-stream").body(body).unwrap()
}

fn ending(script: &Course) -> Vec<Result<String, std::io::Error>> {
    match script.end {
        End::Whole { prompt_tokens } => {
            let details = json!({"cached_tokens": 512});
            let usage = json!({"prompt_tokens": prompt_tokens, "completion_tokens": script.tokens, "prompt_tokens_details": details});
            vec![Ok(json!({"choices": [], "usage": usage}).to_string()), Ok("[DONE]".into())]
        }
        End::Done => vec![Ok("[DONE]".into())],
        End::Early => vec![],
        End::Break => vec![Err(std::io::Error::other("pulled"))],
        End::Error => {
            vec![Ok(json!({"error": {"message": "m", "type": "t", "code": "decode_lost"}}).to_string())]
        }
        End::Garbage => vec![Ok("{not json".into()), Ok("[DONE]".into())],
    }
}
