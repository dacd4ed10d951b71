//! Serves the ranges of a region to peers: bounded in connections, each request inside the region or refused.

use std::sync::Arc;
use std::time::Duration;

use baton_http::accept_each;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use super::{Action, HEAD_BYTES, PIECE_BYTES, Request, Status};
use crate::region::Region;

/// Bounds of a data listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataSettings {
    /// Connections at once; further ones wait in the kernel's queue.
    pub max_connections: usize,
    /// Time that a connection may stay without a request.
    pub idle_us: u64,
    /// Time that a request may stay without progress.
    pub quiet_us: u64,
}

impl Default for DataSettings {
    fn default() -> Self {
        Self { max_connections: 1024, idle_us: 600_000_000, quiet_us: 30_000_000 }
    }
}

/// Serves `region` on `listener` until `stop`.
pub async fn serve_data(
    region: Arc<Region>,
    listener: TcpListener,
    settings: DataSettings,
    stop: CancellationToken,
) {
    accept_each("mooncake: data", listener, settings.max_connections, &stop, |stream, peer| {
        let (region, stop) = (Arc::clone(&region), stop.clone());
        async move {
            if let Some(Err(e)) = stop.run_until_cancelled(requests(&region, stream, settings)).await {
                tracing::debug!("mooncake: data connection of {peer}: {e}");
            }
        }
    })
    .await;
}

async fn requests(region: &Region, mut stream: TcpStream, settings: DataSettings) -> Result<(), String> {
    let (idle, quiet) = (Duration::from_micros(settings.idle_us), Duration::from_micros(settings.quiet_us));
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let mut head = [0; HEAD_BYTES];
        let came = tokio::time::timeout(idle, stream.read_exact(&mut head)).await;
        match came.map_err(|_| "idle for too long".to_owned())? {
            Ok(_) => {}
            Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(e) => return Err(e.to_string()),
        }
        let request = Request::decode(&head).map_err(|e| {
            tracing::warn!("{e}");
            e.to_string()
        })?;
        if !region.holds(request.address, request.bytes) {
            send_status(&mut stream, request, Status::Rejected, quiet).await?;
            return Err(format!("{} bytes at {:#x} are not of this segment", request.bytes, request.address));
        }
        match request.action {
            Action::Read => give(region, request, &mut stream, (&mut piece, quiet)).await?,
            Action::Write => take(region, request, &mut stream, (&mut piece, quiet)).await?,
        }
    }
}

/// The pieces of a request, front to back.
fn pieces(request: Request) -> impl Iterator<Item = (u64, usize)> {
    (0..request.bytes).step_by(PIECE_BYTES).map(move |offset| {
        let count = (request.bytes - offset).min(PIECE_BYTES as u64) as usize;
        (request.address + offset, count)
    })
}

async fn give(
    region: &Region,
    request: Request,
    stream: &mut TcpStream,
    (piece, quiet): (&mut [u8], Duration),
) -> Result<(), String> {
    send_status(stream, request, Status::Done, quiet).await?;
    for (address, count) in pieces(request) {
        region.read(address, &mut piece[..count]);
        send(stream, &piece[..count], quiet).await?;
    }
    Ok(())
}

async fn take(
    region: &Region,
    request: Request,
    stream: &mut TcpStream,
    (piece, quiet): (&mut [u8], Duration),
) -> Result<(), String> {
    for (address, count) in pieces(request) {
        let came = tokio::time::timeout(quiet, stream.read_exact(&mut piece[..count])).await;
        came.map_err(|_| "a write stood still".to_owned())?.map_err(|e| e.to_string())?;
        region.write(address, &piece[..count]);
    }
    send_status(stream, request, Status::Done, quiet).await
}

/// Sends the result of a request, if the client expects one.
async fn send_status(
    stream: &mut TcpStream,
    request: Request,
    status: Status,
    quiet: Duration,
) -> Result<(), String> {
    if request.wants_status { send(stream, &status.encode(), quiet).await } else { Ok(()) }
}

async fn send(stream: &mut TcpStream, bytes: &[u8], quiet: Duration) -> Result<(), String> {
    let sent = tokio::time::timeout(quiet, stream.write_all(bytes)).await;
    sent.map_err(|_| "a peer does not read what it asked for".to_owned())?.map_err(|e| e.to_string())
}
