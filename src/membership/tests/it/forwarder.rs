//! A wire that can be cut: forwards TCP connections, swallows what they say, or breaks them.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// How the wire is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// It forwards in both directions.
    Whole,
    /// No byte arrives, and neither side gets an error.
    Silent,
    /// Connections break, new ones too.
    Broken,
}

/// The wire to one address.
pub struct Forwarder {
    pub address: SocketAddr,
    wire: watch::Sender<Wire>,
    task: tokio::task::JoinHandle<()>,
}

impl Forwarder {
    pub async fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let (wire, state) = watch::channel(Wire::Whole);
        let task = tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                tokio::spawn(carry(near, port, state.clone()));
            }
        });
        Self { address, wire, task }
    }

    pub fn set(&self, wire: Wire) {
        self.wire.send_replace(wire);
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(near: TcpStream, port: u16, mut state: watch::Receiver<Wire>) {
    let mut broken = state.clone();
    let both = async {
        if state.wait_for(|wire| *wire == Wire::Whole).await.is_err() {
            return;
        }
        let Ok(far) = TcpStream::connect(("127.0.0.1", port)).await else { return };
        let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
        tokio::select! {
            () = pump(near_in, far_out, state.clone()) => {}
            () = pump(far_in, near_out, state.clone()) => {}
        }
    };
    tokio::select! {
        () = both => {}
        _ = broken.wait_for(|wire| *wire == Wire::Broken) => {}
    }
}

async fn pump(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut state: watch::Receiver<Wire>) {
    let mut bytes = vec![0; 64 << 10];
    loop {
        let count = match from.read(&mut bytes).await {
            Ok(count) if count > 0 => count,
            _ => return,
        };
        if state.wait_for(|wire| *wire == Wire::Whole).await.is_err()
            || to.write_all(&bytes[..count]).await.is_err()
        {
            return;
        }
    }
}
