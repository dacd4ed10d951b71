//! Accepts connections, so many at once and no more.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// Pause when the kernel has no connection to give.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Gives each connection of `listener` to `serve`, at most `max_connections` at once, until `stop`; then those under way
/// are broken off.
pub(crate) async fn accept_each<F, W>(
    what: &'static str,
    listener: TcpListener,
    max_connections: usize,
    stop: CancellationToken,
    serve: F,
) where
    F: Fn(TcpStream, SocketAddr) -> W,
    W: Future<Output = ()> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(max_connections.clamp(1, Semaphore::MAX_PERMITS)));
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
                let (work, stop) = (serve(stream, peer), stop.clone());
                tokio::spawn(async move {
                    tokio::select! {
                        () = work => {}
                        () = stop.cancelled() => {}
                    }
                    drop(place);
                });
            }
            (Err(e), _) => {
                tracing::debug!("mooncake: {what}: accept: {e}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}
