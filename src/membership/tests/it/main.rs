//! The crate against the real thing: etcd as Debian ships it, an API server that plays back what Kubernetes says.

mod chaos;
mod client;
mod directory;
mod elections;
mod forwarder;
mod kubernetes;
mod processes;
mod server;
mod sources;

use std::time::Duration;

/// Long enough for anything that happens at all, on a machine that does much else.
pub const SOON: Duration = Duration::from_secs(30);

/// The value that `look` finds, asked again and again until it does.
pub async fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = tokio::time::Instant::now() + SOON;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(tokio::time::Instant::now() < deadline, "in vain: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
