//! An API server that plays back what Kubernetes says: lists in pages, watches, bookmarks, and 410.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use baton_membership::{Directory, KubernetesSource, MemberRole, Source};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;

use crate::eventually;

type Body = BoxBody<Bytes, Infallible>;

/// The server's scripted responses, and the requests it received.
#[derive(Default)]
struct Script {
    pages: Vec<(StatusCode, Value)>,
    watches: Vec<mpsc::Sender<Bytes>>,
    asked: Vec<String>,
    tokens: Vec<String>,
    /// The status that rejects a watch, once.
    refuse_watch: Option<StatusCode>,
}

struct Api {
    script: Arc<Mutex<Script>>,
    folder: tempfile::TempDir,
    port: u16,
    tls: bool,
}

impl Api {
    async fn start(tls: bool) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("token"), "first\n").expect("written");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let script = Arc::new(Mutex::new(Script::default()));
        let acceptor = tls.then(|| acceptor(&folder.path().join("ca.crt")));
        tokio::spawn(serve(listener, acceptor, script.clone()));
        Self { script, folder, port, tls }
    }

    fn source(&self) -> KubernetesSource {
        let file = |name: &str| -> PathBuf { self.folder.path().join(name) };
        KubernetesSource {
            server: format!("{}://127.0.0.1:{}", if self.tls { "https" } else { "http" }, self.port),
            namespace: "serving".into(),
            service: "nodes".into(),
            port: Some("kv".into()),
            role: MemberRole::Decode,
            token: Some(file("token")),
            ca: self.tls.then(|| file("ca.crt")),
            watch_s: 60,
        }
    }

    fn will_list(&self, pages: &[Value]) {
        let pages = pages.iter().map(|page| (StatusCode::OK, page.clone()));
        self.script.lock().expect("whole").pages.extend(pages);
    }

    /// Says a line on the newest watch; the n-th watch must have begun.
    async fn says(&self, watch: usize, kind: &str, object: &Value) {
        let mut line = json!({"type": kind, "object": object}).to_string();
        line.push('\n');
        // In two pieces, as networks do.
        let (front, back) = line.split_at(line.len() / 2);
        for piece in [front, back] {
            let sender = eventually("a watch", || {
                let mut script = self.script.lock().expect("whole");
                (script.watches.len() == watch).then(|| script.watches.pop()).flatten()
            })
            .await;
            sender.send(Bytes::copy_from_slice(piece.as_bytes())).await.expect("somebody listens");
            self.script.lock().expect("whole").watches.push(sender);
        }
    }

    /// Ends the watch and refuses the one after it.
    fn refuses_the_next_watch(&self, status: StatusCode) {
        let mut script = self.script.lock().expect("whole");
        script.refuse_watch = Some(status);
        script.watches.clear();
    }

    fn asked(&self) -> Vec<String> {
        self.script.lock().expect("whole").asked.clone()
    }
}

fn acceptor(ca: &std::path::Path) -> TlsAcceptor {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).expect("a certificate");
    std::fs::write(ca, made.cert.pem()).expect("written");
    let key = ca.with_extension("key");
    std::fs::write(&key, made.signing_key.serialize_pem()).expect("written");
    baton_http::Identity::of_files(ca, &key).expect("they belong together").acceptor()
}

async fn serve(listener: TcpListener, tls: Option<TlsAcceptor>, script: Arc<Mutex<Script>>) {
    while let Ok((stream, _)) = listener.accept().await {
        let (script, tls) = (script.clone(), tls.clone());
        tokio::spawn(async move {
            let service = service_fn(move |request| {
                let answer = answer(&script, &request);
                async move { Ok::<_, Infallible>(answer) }
            });
            let server = hyper::server::conn::http1::Builder::new();
            // Clients that go away in the middle are what is being tried.
            match tls {
                None => drop(server.serve_connection(TokioIo::new(stream), service).await),
                Some(tls) => {
                    if let Ok(stream) = tls.accept(stream).await {
                        drop(server.serve_connection(TokioIo::new(stream), service).await);
                    }
                }
            }
        });
    }
}

fn answer(script: &Mutex<Script>, request: &Request<Incoming>) -> Response<Body> {
    let mut script = script.lock().expect("whole");
    let query = request.uri().query().unwrap_or_default().to_owned();
    assert_eq!(request.uri().path(), "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices");
    let token = request.headers()["authorization"].to_str().expect("text").to_owned();
    script.tokens.push(token);
    script.asked.push(query.clone());
    let (status, body): (_, Body) = if query.contains("&watch=1") {
        match script.refuse_watch.take() {
            Some(status) => (status, refusal(status)),
            None => {
                let (sender, pieces) = mpsc::channel(8);
                script.watches.push(sender);
                let frames = ReceiverStream::new(pieces).map(|piece| Ok(Frame::data(piece)));
                (StatusCode::OK, StreamBody::new(frames).boxed())
            }
        }
    } else if script.pages.is_empty() {
        (StatusCode::SERVICE_UNAVAILABLE, refusal(StatusCode::SERVICE_UNAVAILABLE))
    } else {
        let (status, page) = script.pages.remove(0);
        (status, Full::new(Bytes::from(page.to_string())).boxed())
    };
    Response::builder().status(status).body(body).expect("a response")
}

fn refusal(status: StatusCode) -> Body {
    let text = json!({"kind": "Status", "code": status.as_u16(), "message": "as scripted"}).to_string();
    Full::new(Bytes::from(text)).boxed()
}

fn slice(name: &str, revision: u32, pods: &[(&str, &str)]) -> Value {
    let endpoints: Vec<Value> = pods
        .iter()
        .map(|(pod, address)| {
            json!({"addresses": [address], "conditions": {"ready": true, "serving": true, "terminating": false},
                "nodeName": "host-1", "zone": "zone-a",
                "targetRef": {"kind": "Pod", "namespace": "serving", "name": pod, "uid": format!("u-{pod}")}})
        })
        .collect();
    json!({"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1",
        "metadata": {"name": name, "namespace": "serving", "resourceVersion": revision.to_string(), "generation": 2,
            "labels": {"kubernetes.io/service-name": "nodes"}},
        "addressType": "IPv4", "endpoints": endpoints,
        "ports": [{"name": "kv", "protocol": "TCP", "port": 7000}]})
}

fn page(revision: u32, further: &str, items: &[Value]) -> Value {
    json!({"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1",
        "metadata": {"resourceVersion": revision.to_string(), "continue": further}, "items": items})
}

async fn shows(directory: &Directory, expected: &[&str]) {
    eventually(&format!("{expected:?} are there"), || {
        let snapshot = directory.snapshot();
        (snapshot.stale.is_none() && snapshot.members.keys().eq(expected.iter())).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_service_is_listed_in_pages_and_watched_over_tls() {
    let api = Api::start(true).await;
    api.will_list(&[
        page(100, "more/1", &[slice("s1", 90, &[("p0", "10.0.0.1")])]),
        page(100, "", &[slice("s2", 91, &[("p1", "10.0.0.2")])]),
    ]);
    let directory = Directory::start(Source::Kubernetes(api.source())).expect("a directory");
    shows(&directory, &["p0", "p1"]).await;
    api.says(1, "MODIFIED", &slice("s2", 101, &[("p1", "10.0.0.2"), ("p2", "10.0.0.3")])).await;
    shows(&directory, &["p0", "p1", "p2"]).await;
    let known = directory.snapshot();
    assert_eq!((&*known.revision, &*known.members["p2"].revision), ("101", "101"));
    assert_eq!(known.members["p2"].member.addresses, ["10.0.0.3:7000"]);
    api.says(1, "DELETED", &slice("s1", 102, &[])).await;
    shows(&directory, &["p1", "p2"]).await;
    let asked = api.asked();
    assert!(asked[0].starts_with("labelSelector=kubernetes.io%2Fservice-name%3Dnodes&limit="), "{asked:?}");
    assert!(asked[1].ends_with("&continue=more%2F1"), "{asked:?}");
    let watch = "&watch=1&allowWatchBookmarks=true&resourceVersion=100&timeoutSeconds=60";
    assert!(asked[2].ends_with(watch), "{asked:?}");
}

#[tokio::test]
async fn a_watch_that_ends_goes_on_from_the_bookmark_with_the_token_of_that_moment() {
    let api = Api::start(false).await;
    api.will_list(&[page(100, "", &[slice("s1", 90, &[("p0", "10.0.0.1")])])]);
    let directory = Directory::start(Source::Kubernetes(api.source())).expect("a directory");
    shows(&directory, &["p0"]).await;
    api.says(1, "BOOKMARK", &json!({"kind": "EndpointSlice", "metadata": {"resourceVersion": "150"}})).await;
    std::fs::write(api.folder.path().join("token"), "second").expect("written");
    // The server's time for this watch is up.
    api.script.lock().expect("whole").watches.clear();
    api.says(1, "ADDED", &slice("s2", 160, &[("p1", "10.0.0.2")])).await;
    shows(&directory, &["p0", "p1"]).await;
    let asked = api.asked();
    assert!(asked.last().is_some_and(|query| query.contains("&resourceVersion=150&")), "{asked:?}");
    assert_eq!(asked.iter().filter(|query| query.contains("limit")).count(), 1, "listed once");
    let tokens = api.script.lock().expect("whole").tokens.clone();
    assert_eq!((tokens[0].as_str(), tokens[2].as_str()), ("Bearer first", "Bearer second"));
}

#[tokio::test]
async fn history_that_is_gone_is_listed_anew_within_a_watch_and_before_one() {
    let api = Api::start(false).await;
    api.will_list(&[page(100, "", &[slice("s1", 90, &[("p0", "10.0.0.1")])])]);
    let directory = Directory::start(Source::Kubernetes(api.source())).expect("a directory");
    shows(&directory, &["p0"]).await;
    api.will_list(&[page(200, "", &[slice("s9", 190, &[("p5", "10.0.0.5")])])]);
    let gone =
        json!({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"});
    api.says(1, "ERROR", &gone).await;
    shows(&directory, &["p5"]).await;
    api.will_list(&[page(300, "", &[slice("s9", 290, &[("p6", "10.0.0.6")])])]);
    api.refuses_the_next_watch(StatusCode::GONE);
    shows(&directory, &["p6"]).await;
}

#[tokio::test]
async fn what_is_known_stays_while_the_server_refuses_or_is_gone() {
    let api = Api::start(false).await;
    let directory = Directory::start(Source::Kubernetes(api.source())).expect("a directory");
    let says = |word: &'static str| {
        let directory = &directory;
        eventually(word, move || directory.snapshot().stale.clone().filter(|stale| stale.why.contains(word)))
    };
    says("503 Service Unavailable: as scripted").await;
    api.will_list(&[page(100, "", &[slice("s1", 90, &[("p0", "10.0.0.1")])])]);
    shows(&directory, &["p0"]).await;
    api.refuses_the_next_watch(StatusCode::FORBIDDEN);
    says("let the account get, list and watch endpointslices").await;
    assert_eq!(directory.snapshot().members.len(), 1, "what is known stays known");
    shows(&directory, &["p0"]).await;
    std::fs::remove_file(api.folder.path().join("token")).expect("removed");
    api.script.lock().expect("whole").watches.clear();
    says("mount the service account's token").await;
    assert_eq!(directory.snapshot().members.len(), 1);
}
