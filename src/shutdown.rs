//! When to stop: the first signal drains, the second one does not wait.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Signals cannot be listened to.
#[derive(Debug, thiserror::Error)]
#[error("signals: {0}")]
pub struct SignalError(std::io::Error);

/// A token that Ctrl-C or SIGTERM cancels. A second signal ends the process at once.
///
/// # Errors
/// When signals cannot be listened to.
pub fn on_signal() -> Result<CancellationToken, SignalError> {
    let listen = |kind| signal(kind).map_err(SignalError);
    let (mut interrupt, mut terminate) = (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
    let stop = CancellationToken::new();
    let told = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        told.cancel();
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        note!("baton: second signal: stopping without waiting");
        std::process::exit(130);
    });
    Ok(stop)
}
