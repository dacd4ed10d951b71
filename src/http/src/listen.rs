//! Accepts connections up to a maximum number.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// Pause when the kernel has no connection to give.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Spawns `serve` for each connection of `listener`, at most `most` at once, until `stop`. Further connections wait in
/// the kernel's queue. Those that are open when it returns go on.
pub async fn accept_each<F, W>(
    name: &'static str,
    listener: TcpListener,
    most: usize,
    stop: &CancellationToken,
    mut serve: F,
) where
    F: FnMut(TcpStream, SocketAddr) -> W,
    W: Future<Output = ()> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(most.clamp(1, Semaphore::MAX_PERMITS)));
    loop {
        let accepted = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            accepted = async {
                let place = Arc::clone(&places).acquire_owned().await.expect("it is never closed");
                (listener.accept().await, place)
            } => accepted,
        };
        match accepted {
            (Ok((stream, peer)), place) => {
                // Messages are small, and the other side waits for each.
                if let Err(e) = stream.set_nodelay(true) {
                    tracing::debug!("{name}: nodelay: {e}");
                }
                let work = serve(stream, peer);
                tokio::spawn(async move {
                    work.await;
                    drop(place);
                });
            }
            (Err(e), _) => {
                tracing::debug!("{name}: accept: {e}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}
