//! The wire as a test sees it: a proxy that loses messages, and peers that follow a script.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

/// A frame as it is written: flags, length, body.
async fn frame(from: &mut OwnedReadHalf) -> std::io::Result<(u8, Vec<u8>)> {
    let flags = from.read_u8().await?;
    let length = if flags & 2 == 0 { u64::from(from.read_u8().await?) } else { from.read_u64().await? };
    let mut body = vec![0; length as usize];
    from.read_exact(&mut body).await?;
    Ok((flags, body))
}

fn put(into: &mut Vec<u8>, flags: u8, body: &[u8]) {
    into.push(flags | 2);
    into.extend((body.len() as u64).to_be_bytes());
    into.extend(body);
}

async fn message(from: &mut OwnedReadHalf) -> std::io::Result<Vec<Vec<u8>>> {
    let mut frames = Vec::new();
    loop {
        let (flags, body) = frame(from).await?;
        frames.push(body);
        if flags & 1 == 0 {
            return Ok(frames);
        }
    }
}

pub fn written(frames: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (at, body) in frames.iter().enumerate() {
        put(&mut bytes, u8::from(at + 1 < frames.len()), body);
    }
    bytes
}

/// Between a publisher and its subscribers: passes everything on, but for the messages it loses.
pub struct Proxy {
    pub endpoint: String,
    pub lost: Arc<AtomicU64>,
    losing: Arc<AtomicBool>,
    cut: Arc<Notify>,
}

impl Proxy {
    /// Loses one message in `one_in` while losing is switched on; none if that is 0.
    pub async fn before(upstream: &str, one_in: u64) -> Self {
        let upstream = upstream.trim_start_matches("tcp://").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
        let (lost, losing, cut) =
            (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(true)), Arc::new(Notify::new()));
        let shared = (lost.clone(), losing.clone(), cut.clone());
        tokio::spawn(async move {
            let mut seed = 0;
            while let Ok((client, _)) = listener.accept().await {
                seed += 1;
                let (lost, losing, cut) = shared.clone();
                let upstream = upstream.clone();
                tokio::spawn(async move {
                    let Ok(server) = TcpStream::connect(upstream).await else { return };
                    let (client_read, client_write) = client.into_split();
                    let (server_read, server_write) = server.into_split();
                    let mut rng = baton_types::Rng::new(seed);
                    let keep = move || {
                        let gone = one_in > 0 && rng.below(one_in) == 0 && losing.load(Ordering::SeqCst);
                        lost.fetch_add(u64::from(gone), Ordering::SeqCst);
                        !gone
                    };
                    tokio::select! {
                        _ = raw(client_read, server_write) => {}
                        _ = lossy(server_read, client_write, keep) => {}
                        () = cut.notified() => {}
                    }
                });
            }
        });
        Self { endpoint, lost, losing, cut }
    }

    pub fn lose_no_more(&self) {
        self.losing.store(false, Ordering::SeqCst);
    }

    /// Ends every connection.
    pub fn cut(&self) {
        self.cut.notify_waiters();
    }
}

async fn raw(mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> std::io::Result<u64> {
    tokio::io::copy(&mut from, &mut to).await
}

async fn lossy(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut keep: impl FnMut() -> bool,
) -> std::io::Result<()> {
    let mut greeting = [0; 64];
    from.read_exact(&mut greeting).await?;
    to.write_all(&greeting).await?;
    let (flags, ready) = frame(&mut from).await?;
    let mut bytes = Vec::new();
    put(&mut bytes, flags, &ready);
    to.write_all(&bytes).await?;
    loop {
        let frames = message(&mut from).await?;
        if keep() {
            let frames: Vec<&[u8]> = frames.iter().map(Vec::as_slice).collect();
            to.write_all(&written(&frames)).await?;
        }
    }
}

/// Accepts a peer and shakes hands as a socket of `kind`.
pub async fn accept(listener: &TcpListener, kind: &str) -> (OwnedReadHalf, OwnedWriteHalf) {
    let (stream, _) = listener.accept().await.unwrap();
    let (mut read, mut write) = stream.into_split();
    let mut hello = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0];
    hello.extend(b"NULL");
    hello.resize(64, 0);
    let mut ready = b"\x05READY\x0bSocket-Type".to_vec();
    ready.extend((kind.len() as u32).to_be_bytes());
    ready.extend(kind.as_bytes());
    put(&mut hello, 4, &ready);
    write.write_all(&hello).await.unwrap();
    read.read_exact(&mut [0; 64]).await.unwrap();
    frame(&mut read).await.unwrap();
    (read, write)
}

/// A publisher that says `bytes` to each subscriber in turn and then is silent.
pub async fn saying(scripts: Vec<Vec<u8>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let mut open = Vec::new();
        for bytes in scripts {
            let (mut read, mut write) = accept(&listener, "PUB").await;
            let _ = message(&mut read).await;
            write.write_all(&bytes).await.unwrap();
            open.push((read, write));
        }
        std::future::pending::<()>().await;
    });
    endpoint
}

/// A replay socket that answers each request for a number with what `answer` makes of it, bytes as they are.
pub async fn answering(answer: impl Fn(u64) -> Vec<u8> + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            let (mut read, mut write) = accept(&listener, "ROUTER").await;
            let Ok(request) = message(&mut read).await else { continue };
            let number = u64::from_be_bytes(request[1].as_slice().try_into().unwrap());
            let _ = write.write_all(&answer(number)).await;
        }
    });
    endpoint
}
