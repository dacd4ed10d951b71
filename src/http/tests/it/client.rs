//! Connections kept and not kept, TLS, and each way in which there is no answer.

use std::time::{Duration, Instant};

use baton_http::{Client, Error, Identity, Options, Trust, by, next_piece, whole};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::{TestServer, WIDE, get};

const SOON: Duration = Duration::from_secs(20);

/// A server that answers every connection with `words` once it was asked, and closes it. Gives its address.
async fn saying(words: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.read(&mut [0; 4096]).await;
            let _ = stream.write_all(words).await;
        }
    });
    address.to_string()
}

#[tokio::test]
async fn a_kept_connection_is_used_again_and_others_are_not() {
    for (idle_connections, expected) in [(1, 1), (0, 3)] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let client = Client::new(Options { idle_connections, ..Options::new(SOON) });
        let asking = tokio::spawn(async move {
            for _ in 0..3 {
                let answer = client.send(get(&url)).await.unwrap();
                assert_eq!(whole(answer.into_body(), 2).await.unwrap(), "ok");
                // The connection is given back by a task of its own.
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        let mut connections = 0;
        let accepting = async {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                connections += 1;
                tokio::spawn(async move {
                    while stream.read(&mut [0; 4096]).await.is_ok_and(|count| count > 0) {
                        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
                    }
                });
            }
        };
        tokio::select! {
            asked = asking => asked.unwrap(),
            () = accepting => {}
        }
        assert_eq!(connections, expected, "{idle_connections} kept");
    }
}

#[tokio::test]
async fn each_way_to_have_no_answer_is_told_apart() {
    let client = Client::new(Options::new(SOON));
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let error = client.send(get(&format!("http://{nobody}/"))).await.unwrap_err();
    assert!(matches!(&error, Error::Connect(why) if why.contains("refused")), "{error:?}");

    let silent = saying(b"").await;
    let error = client.send(get(&format!("http://{silent}/"))).await.unwrap_err();
    assert!(matches!(&error, Error::Broken(why) if why.contains("closed")), "{error:?}");

    let short = saying(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort").await;
    let answer = client.send(get(&format!("http://{short}/"))).await.unwrap();
    let error = whole(answer.into_body(), 100).await.unwrap_err();
    assert!(matches!(error, Error::Broken(_)), "{error:?}");
    let mut body = client.send(get(&format!("http://{short}/"))).await.unwrap().into_body();
    assert_eq!(next_piece(&mut body).await.unwrap().unwrap(), "short");
    assert!(matches!(next_piece(&mut body).await, Err(Error::Broken(_))));

    let served = TestServer::start(WIDE).await;
    let mut body = client.send(get(&format!("{}/long", served.base))).await.unwrap().into_body();
    assert_eq!(next_piece(&mut body).await.unwrap().unwrap(), "/long");
    assert_eq!(next_piece(&mut body).await, Ok(None));
    let answer = client.send(get(&format!("{}/long", served.base))).await.unwrap();
    assert_eq!(whole(answer.into_body(), 4).await, Err(Error::TooLong(4)));
    let slow = get(&format!("{}/?60000", served.base));
    let until = tokio::time::Instant::now() + Duration::from_millis(50);
    assert_eq!(by(until, client.send(slow)).await.err(), Some(Error::Late));
}

/// A server of TLS that says yes to one request a connection, and the file with its certificate.
async fn secured(folder: &tempfile::TempDir) -> (String, std::path::PathBuf) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let file = folder.path().join("ca.pem");
    std::fs::write(&file, made.cert.pem()).unwrap();
    let key = folder.path().join("key.pem");
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let acceptor = Identity::of_files(&file, &key).unwrap().acceptor();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let Ok(mut stream) = acceptor.accept(stream).await else { continue };
            let _ = stream.read(&mut [0; 4096]).await;
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
            let _ = stream.shutdown().await;
        }
    });
    (format!("https://localhost:{port}/"), file)
}

#[tokio::test]
async fn only_a_server_that_is_trusted_is_asked() {
    let folder = tempfile::tempdir().unwrap();
    let (url, file) = secured(&folder).await;
    let send_and_collect = async |trust: Trust, url: &str| {
        let client = Client::new(Options { trust, ..Options::new(SOON) });
        let answer = client.send(get(url)).await?;
        whole(answer.into_body(), 2).await
    };
    let trust = Trust::of_file(&file).unwrap();
    assert_eq!(send_and_collect(trust.clone(), &url).await.unwrap(), "ok");
    let other = url.replace("localhost", "127.0.0.1");
    let error = send_and_collect(trust.clone(), &other).await.unwrap_err();
    assert!(matches!(&error, Error::Tls(why) if why.contains("certificate")), "for another name: {error:?}");
    let error = send_and_collect(Trust::nobody(), &url).await.unwrap_err();
    assert!(matches!(&error, Error::Tls(why) if why.contains("no certificates")), "{error:?}");
    let another = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(&file, another.cert.pem()).unwrap();
    let error = send_and_collect(Trust::of_file(&file).unwrap(), &url).await.unwrap_err();
    assert!(matches!(error, Error::Tls(_)), "of another authority: {error:?}");
    let plain = saying(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
    let error = send_and_collect(trust, &format!("https://{plain}/")).await.unwrap_err();
    assert!(error.is_connect() && error.to_string().starts_with("TLS: "), "{error:?}");
}

#[tokio::test]
async fn files_without_a_certificate_are_explained() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("empty.pem");
    std::fs::write(&file, "").unwrap();
    assert_eq!(Trust::of_file(&file).unwrap_err().to_string(), "no certificate in it");
    let missing = Trust::of_file(&folder.path().join("none.pem")).unwrap_err();
    assert!(missing.to_string().contains("No such file"), "{missing}");
}

#[tokio::test]
async fn a_server_that_never_comes_to_speak_tls_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}/", listener.local_addr().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let (_, file) = secured(&folder).await;
    let options =
        Options { trust: Trust::of_file(&file).unwrap(), ..Options::new(Duration::from_millis(100)) };
    let began = Instant::now();
    let error = Client::new(options).send(get(&url)).await.unwrap_err();
    assert_eq!(error, Error::Connect("no connection within 100 ms".to_owned()));
    assert!(began.elapsed() < SOON);
}

#[tokio::test]
async fn an_answer_that_is_dropped_closes_its_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let far = tokio::spawn(async move {
        let (mut stream, _): (TcpStream, _) = listener.accept().await.unwrap();
        let _ = stream.read(&mut [0; 4096]).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n").await.unwrap();
        let mut rest = [0; 16];
        tokio::time::timeout(SOON, stream.read(&mut rest)).await.expect("it closes")
    });
    let client = Client::new(Options { idle_connections: 1, ..Options::new(SOON) });
    let mut body = client.send(get(&url)).await.unwrap().into_body();
    assert_eq!(next_piece(&mut body).await.unwrap().unwrap(), "a");
    drop(body);
    assert!(matches!(far.await.unwrap(), Ok(0) | Err(_)));
}
