//! A pipe between sender and receiver that does one thing wrong.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// The fault that occurs after so many bytes have passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// A bit of that byte is turned over.
    Flip(usize),
    /// The pipe closes there.
    Cut(usize),
    /// Nothing passes from there on.
    Stall(usize),
    /// So many bytes are swallowed there.
    Lose(usize, usize),
    /// So many bytes pass twice.
    Double(usize, usize),
}

/// Starts one in front of `to`: `there` is done to what the dialer sends, `back` to the answers.
pub async fn between(to: SocketAddr, there: Fault, back: Fault) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let Ok(far) = TcpStream::connect(to).await else { return };
            tokio::spawn(pass(near, far, there, back));
        }
    });
    address
}

async fn pass(near: TcpStream, far: TcpStream, there: Fault, back: Fault) {
    let ((from_near, to_near), (from_far, to_far)) = (near.into_split(), far.into_split());
    tokio::select! {
        () = pass_one_way(from_near, to_far, there) => {}
        () = pass_one_way(from_far, to_near, back) => {}
    }
}

async fn pass_one_way(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    fault: Fault,
) {
    let mut passed = 0;
    let mut buffer = vec![0; 4096];
    loop {
        let Ok(read @ 1..) = from.read(&mut buffer).await else { return };
        let (bytes, end) = spoil(&buffer[..read], passed, fault);
        passed += read;
        if to.write_all(&bytes).await.is_err() {
            return;
        }
        match end {
            End::Open => {}
            End::Closed => return,
            End::Silent => std::future::pending::<()>().await,
        }
    }
}

enum End {
    Open,
    Closed,
    Silent,
}

fn spoil(bytes: &[u8], from: usize, fault: Fault) -> (Vec<u8>, End) {
    let mut out = Vec::with_capacity(bytes.len());
    for (at, byte) in (from..).zip(bytes) {
        match fault {
            Fault::Flip(spot) if at == spot => out.push(byte ^ 4),
            Fault::Cut(spot) if at == spot => return (out, End::Closed),
            Fault::Stall(spot) if at == spot => return (out, End::Silent),
            Fault::Lose(spot, count) if (spot..spot + count).contains(&at) => {}
            Fault::Double(spot, count) if (spot..spot + count).contains(&at) => out.extend([*byte, *byte]),
            _ => out.push(*byte),
        }
    }
    (out, End::Open)
}
