//! TLS, HTTP/2 and connections that take their time.

use std::time::Duration;

use baton_router::{RouterConfig, TlsFiles};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::scripted::{open, open_saying, request, saying};

#[tokio::test]
async fn tls_serves_both_versions() {
    let dir = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let files = TlsFiles { certificate: dir.path().join("c.pem"), key: dir.path().join("k.pem") };
    std::fs::write(&files.certificate, made.cert.pem()).unwrap();
    std::fs::write(&files.key, made.signing_key.serialize_pem()).unwrap();
    let door = open(RouterConfig { tls: Some(files), ..RouterConfig::default() }, |_| saying("x")).await;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(made.cert.der().clone()).unwrap();
    for version in ["h2", "http/1.1"] {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots.clone())
            .with_no_client_auth();
        config.alpn_protocols = vec![version.as_bytes().to_vec()];
        let stream = tokio::net::TcpStream::connect(door.address).await.unwrap();
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let stream = connector.connect("localhost".try_into().unwrap(), stream).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(version.as_bytes()));
        let ask = request("https://localhost/v1/completions", r#"{"prompt":"a","stream":true}"#, &[]);
        let response = if version == "h2" {
            let (mut sender, connection) = hyper::client::conn::http2::handshake::<_, _, Full<Bytes>>(
                TokioExecutor::new(),
                TokioIo::new(stream),
            )
            .await
            .unwrap();
            tokio::spawn(connection);
            sender.send_request(ask).await.unwrap()
        } else {
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake::<_, Full<Bytes>>(TokioIo::new(stream)).await.unwrap();
            tokio::spawn(connection);
            sender.send_request(ask).await.unwrap()
        };
        assert_eq!(response.status(), 200);
        assert!(response.into_body().collect().await.unwrap().to_bytes().ends_with(b"data: [DONE]\n\n"));
    }
}

#[tokio::test]
async fn tls_files_that_cannot_be_used_are_named() {
    let files = TlsFiles { certificate: "/nowhere/c.pem".into(), key: "/nowhere/k.pem".into() };
    let backend = open_saying("x").await.backend.clone();
    let config = RouterConfig { tls: Some(files), ..RouterConfig::default() };
    let router = Arc::new(baton_router::Router::new(config, baton_router::Tokenization::bytes(), backend));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let error =
        router.serve(listener, tokio_util::sync::CancellationToken::new()).await.unwrap_err().to_string();
    assert!(error.contains("/nowhere/c.pem") && error.contains("give PEM files"), "{error}");
}

#[tokio::test]
async fn who_never_finishes_asking_is_not_waited_for() {
    let config = RouterConfig { receive_limit_ms: 200, connections_limit: 1, ..RouterConfig::default() };
    let door = open(config, |_| saying("x")).await;
    let mut idle = tokio::net::TcpStream::connect(door.address).await.unwrap();
    idle.write_all(b"POST /v1/completions HTTP/1.1\r\nhost:").await.unwrap();
    let mut rest = Vec::new();
    let ended = tokio::time::timeout(Duration::from_secs(3), idle.read_to_end(&mut rest)).await;
    assert!(ended.is_ok(), "headers that never end");

    let mut slow = tokio::net::TcpStream::connect(door.address).await.unwrap();
    slow.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        .await
        .unwrap();
    let mut start = [0; 12];
    slow.read_exact(&mut start).await.unwrap();
    assert_eq!(&start, b"HTTP/1.1 408");
    drop(slow);
    // The one place is free again.
    assert_eq!(door.get("/health").await.status, 200);
}

#[tokio::test]
async fn calls_follow_each_other_on_one_connection() {
    let door = open_saying("x").await;
    let mut sender = door.connect().await;
    for stream in [false, true, false] {
        sender.ready().await.unwrap();
        let body = format!("{{\"prompt\":\"a\",\"stream\":{stream}}}");
        let response = sender.send_request(request("/v1/completions", body, &[])).await.unwrap();
        assert_eq!(response.status(), 200);
        response.into_body().collect().await.unwrap();
    }
}
