//! A backend that plays scripts, a front door before it, and a client that hides nothing.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use baton_router::{
    Backend, Event, Model, Readiness, Router, RouterConfig, Submission, SubmissionStream, Tokenization, Usage,
};
use baton_types::{Finish, TokenLogprob};
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

/// One step of the script that answers a submission.
#[derive(Clone, Debug)]
pub enum Step {
    /// Says it.
    Say(Event),
    /// Waits, ms.
    Pause(u64),
    /// Waits for a word of the test.
    Await(Arc<Notify>),
    /// Does nothing until the ticket is dropped.
    Hang,
    /// Says it when the guard is dropped.
    LastWord(Event),
}

pub fn admitted() -> Step {
    Step::Say(Event::Admitted { decision: Some("prefill=p1 decode=d2".into()) })
}

pub fn token(token: u32) -> Step {
    Step::Say(Event::Token { token, logprob: None })
}

/// A token as likely as said, with two others beside it.
pub fn likely(token: u32, logprob: f32) -> Step {
    let top = vec![(token, logprob), (u32::from(b'z'), -3.5)];
    Step::Say(Event::Token { token, logprob: Some(TokenLogprob { logprob, top }) })
}

pub fn finished(finish: Finish, cached_tokens: u64) -> Step {
    Step::Say(Event::Finished { finish, usage: Usage { cached_tokens, moves: 0 } })
}

/// Admitted, says `text` byte by byte, and stops.
pub fn text_script(text: &str) -> Vec<Step> {
    let said = text.bytes().map(|byte| token(u32::from(byte)));
    std::iter::once(admitted()).chain(said).chain([finished(Finish::Stop, 16)]).collect()
}

type Script = Box<dyn Fn(&Submission) -> Vec<Step> + Send + Sync>;

/// Plays a script for each submission, and keeps what it was given.
pub struct ScriptedBackend {
    script: Script,
    pub submissions: Mutex<Vec<Submission>>,
    /// Tickets that were dropped before their script had ended.
    pub cancelled: Arc<AtomicUsize>,
    /// Events that the front door has taken from its tickets, but for the few that wait in each.
    pub taken: Arc<AtomicUsize>,
    pub ready: AtomicBool,
    /// Its engine can be held to a grammar.
    pub constrains: AtomicBool,
}

struct Guard {
    ended: Arc<AtomicBool>,
    cancelled: Arc<AtomicUsize>,
    gone: CancellationToken,
}

impl Drop for Guard {
    fn drop(&mut self) {
        if !self.ended.load(Ordering::SeqCst) {
            self.cancelled.fetch_add(1, Ordering::SeqCst);
        }
        self.gone.cancel();
    }
}

impl Backend for ScriptedBackend {
    fn submit(&self, submission: Submission) -> SubmissionStream {
        let steps = (self.script)(&submission);
        self.submissions.lock().push(submission);
        let (sender, events) = mpsc::channel(8);
        let guard = Guard {
            ended: Arc::default(),
            cancelled: Arc::clone(&self.cancelled),
            gone: CancellationToken::new(),
        };
        let (ended, gone) = (Arc::clone(&guard.ended), guard.gone.clone());
        let taken = Arc::clone(&self.taken);
        let last_word = steps.iter().find_map(|step| match step {
            Step::LastWord(event) => Some(event.clone()),
            _ => None,
        });
        tokio::spawn(async move {
            let play = async {
                for step in steps {
                    match step {
                        Step::Say(event) => {
                            let last = matches!(
                                event,
                                Event::Finished { .. } | Event::Refused(_) | Event::Failed(_)
                            );
                            // Before it is said: the ticket may be dropped as soon as it is heard.
                            ended.store(last, Ordering::SeqCst);
                            if sender.send(event).await.is_err() {
                                return;
                            }
                            taken.fetch_add(1, Ordering::SeqCst);
                        }
                        Step::Pause(ms) => tokio::time::sleep(Duration::from_millis(ms)).await,
                        Step::Await(word) => word.notified().await,
                        Step::Hang => std::future::pending().await,
                        Step::LastWord(_) => {}
                    }
                }
            };
            tokio::select! {
                () = play => {}
                () = gone.cancelled() => {
                    if let Some(event) = last_word {
                        let _ = sender.send(event).await;
                    }
                }
            }
        });
        SubmissionStream { events, guard: Box::new(guard) }
    }

    fn model(&self) -> Option<Arc<Model>> {
        self.ready.load(Ordering::SeqCst).then(|| {
            Arc::new(Model {
                name: "tiny".into(),
                aliases: vec!["org/tiny".into()],
                revision: "7".into(),
                vocab_tokens: 512,
                end_tokens: vec![257, 259],
                max_model_tokens: 2_000,
                block_tokens: 16,
                constrains: self.constrains.load(Ordering::SeqCst),
            })
        })
    }

    fn readiness(&self) -> Readiness {
        let ready = self.ready.load(Ordering::SeqCst);
        let detail = if ready { "1 prefill, 1 decode" } else { "no decode instance yet" };
        Readiness { ready, detail: detail.into() }
    }
}

/// A front door that is open as long as this lives.
pub struct Door {
    pub address: SocketAddr,
    pub backend: Arc<ScriptedBackend>,
    pub router: Arc<Router>,
    pub stop: CancellationToken,
    pub served: tokio::task::JoinHandle<()>,
}

impl Drop for Door {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Opens a front door whose backend plays `script`.
pub async fn open(
    config: RouterConfig,
    script: impl Fn(&Submission) -> Vec<Step> + Send + Sync + 'static,
) -> Door {
    open_reading(Tokenization::bytes(), config, script).await
}

/// Opens a front door like that of `open` with another vocabulary.
pub async fn open_reading(
    tokenization: Tokenization,
    config: RouterConfig,
    script: impl Fn(&Submission) -> Vec<Step> + Send + Sync + 'static,
) -> Door {
    let backend = Arc::new(ScriptedBackend {
        script: Box::new(script),
        submissions: Mutex::default(),
        cancelled: Arc::default(),
        taken: Arc::default(),
        ready: AtomicBool::new(true),
        constrains: AtomicBool::new(false),
    });
    let router = Arc::new(Router::new(config, tokenization, Arc::clone(&backend) as Arc<dyn Backend>));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let (serving, until) = (Arc::clone(&router), stop.clone());
    let served = tokio::spawn(async move { serving.serve(listener, until).await });
    Door { address, backend, router, stop, served }
}

/// Opens a front door whose backend answers everything with `text`.
pub async fn open_with_text(text: &'static str) -> Door {
    open(RouterConfig::default(), move |_| text_script(text)).await
}

/// A response with its body read.
#[derive(Debug)]
pub struct WholeResponse {
    pub status: u16,
    pub headers: http::HeaderMap,
    pub body: Bytes,
}

impl WholeResponse {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {:?}", self.body))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// `error.param` and `error.code`, after a look at the object's shape.
    pub fn error(&self) -> (Option<String>, Option<String>) {
        assert_eq!(self.header("content-type"), Some("application/json"));
        let value = self.json();
        let error = value["error"].as_object().unwrap();
        assert!(error["message"].is_string() && error["type"].is_string(), "{value}");
        assert_eq!(error.len(), 4, "{value}");
        let text = |name: &str| error[name].as_str().map(str::to_owned);
        (text("param"), text("code"))
    }

    /// The JSON of a stream's events, and whether it ended well.
    pub fn events(&self) -> (Vec<Value>, bool) {
        let text = std::str::from_utf8(&self.body).unwrap();
        assert!(text.ends_with("\n\n"), "{text:?}");
        let lines = text.split_terminator("\n\n").filter(|line| !line.starts_with(':'));
        let mut data: Vec<&str> = lines.map(|line| line.strip_prefix("data: ").unwrap()).collect();
        let done = data.pop_if(|last| *last == "[DONE]").is_some();
        (data.into_iter().map(|one| serde_json::from_str(one).unwrap()).collect(), done)
    }
}

impl Door {
    pub async fn connect(&self) -> hyper::client::conn::http1::SendRequest<Full<Bytes>> {
        let stream = tokio::net::TcpStream::connect(self.address).await.unwrap();
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        sender
    }

    pub async fn start(&self, request: Request<Full<Bytes>>) -> Response<Incoming> {
        self.connect().await.send_request(request).await.unwrap()
    }

    pub async fn send(&self, request: Request<Full<Bytes>>) -> WholeResponse {
        let (parts, body) = self.start(request).await.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        WholeResponse { status: parts.status.as_u16(), headers: parts.headers, body }
    }

    pub async fn get(&self, path: &str) -> WholeResponse {
        self.send(Request::get(path).body(Full::default()).unwrap()).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> WholeResponse {
        self.post_with(path, body.to_string(), &[]).await
    }

    pub async fn post_with(
        &self,
        path: &str,
        body: impl Into<Bytes>,
        headers: &[(&str, &str)],
    ) -> WholeResponse {
        self.send(request(path, body, headers)).await
    }

    /// Sends bytes on a connection of their own.
    pub async fn raw(&self, bytes: &[u8]) -> tokio::net::TcpStream {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        // The kernel should buffer little for a client that does not read.
        socket.set_recv_buffer_size(8 << 10).unwrap();
        let mut stream = socket.connect(self.address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        stream
    }

    /// Waits until so many submissions were made.
    pub async fn wait_submitted(&self, count: usize) {
        for _ in 0..1_000 {
            if self.backend.submissions.lock().len() == count {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{} of {count} were submitted", self.backend.submissions.lock().len());
    }

    /// Waits until so many events were said.
    pub async fn wait_taken(&self, count: usize) {
        for _ in 0..1_000 {
            if self.backend.taken.load(Ordering::SeqCst) == count {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{} of {count} were said", self.backend.taken.load(Ordering::SeqCst));
    }

    /// Waits until so many tickets were dropped early.
    pub async fn wait_cancelled(&self, count: usize) {
        for _ in 0..1_000 {
            if self.backend.cancelled.load(Ordering::SeqCst) == count {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{} of {count} tickets were dropped", self.backend.cancelled.load(Ordering::SeqCst));
    }
}

/// A call of HTTP/1.1 as bytes.
pub fn http1(path: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

pub fn request(path: &str, body: impl Into<Bytes>, headers: &[(&str, &str)]) -> Request<Full<Bytes>> {
    let mut request = Request::post(path).header("content-type", "application/json").header("host", "door");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Full::new(body.into())).unwrap()
}
