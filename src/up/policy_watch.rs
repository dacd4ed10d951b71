//! The policy follows its file: a change on disk or SIGHUP is read, checked whole, and applied
//! between two decisions, or not at all.

use std::path::{Path, PathBuf};
use std::time::Duration;

use notify::{RecursiveMode, Watcher as _};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::shared_policy::SharedPolicy;
use crate::conductor::{Inbox, Question};

/// Editors write a file in several steps; they are over within this.
const SETTLE: Duration = Duration::from_millis(200);

/// Watches until told to stop. While the cluster has a policy of its own, the file's waits.
pub(super) async fn watch(
    path: PathBuf,
    inbox: Inbox,
    shared: Option<SharedPolicy>,
    stop: CancellationToken,
) {
    let (changed, mut changes) = mpsc::channel(1);
    // The folder, not the file: editors and Kubernetes swap files by renaming.
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned();
    let watcher = notify::recommended_watcher(move |_: notify::Result<notify::Event>| {
        // One waiting word is enough.
        let _ = changed.try_send(());
    })
    .and_then(|mut watcher| watcher.watch(&folder, RecursiveMode::NonRecursive).map(|()| watcher));
    if let Err(error) = &watcher {
        tracing::warn!(%error, folder = %folder.display(), "the policy file cannot be watched; SIGHUP still reads it");
    }
    let Ok(mut hangup) = signal(SignalKind::hangup()) else { return };
    let mut last = std::fs::read(&path).unwrap_or_default();
    loop {
        let forced = tokio::select! {
            _ = hangup.recv() => true,
            Some(()) = changes.recv() => false,
            () = stop.cancelled() => return,
        };
        tokio::time::sleep(SETTLE).await;
        let text = std::fs::read(&path).unwrap_or_default();
        if forced || text != last {
            last = text;
            match shared.as_ref().and_then(SharedPolicy::version) {
                Some(version) => tracing::warn!(
                    version,
                    "policy file NOT applied: the cluster's policy is in force; baton config push makes it this one"
                ),
                None => reload(&path, &inbox).await,
            }
        }
    }
}

async fn reload(path: &Path, inbox: &Inbox) {
    let applied = match crate::config::load(path) {
        Ok(config) => inbox.ask(|reply| Question::Policy(Box::new(config), reply)).await,
        Err(why) => Some(Err(why)),
    };
    match applied {
        Some(Ok(changes)) if changes.is_empty() => tracing::info!("policy file read: nothing changed"),
        Some(Ok(changes)) => tracing::info!(changes = changes.join("; "), "policy file read and applied"),
        Some(Err(why)) => tracing::error!(why, "policy file NOT applied; the policy in force goes on"),
        None => {}
    }
}
