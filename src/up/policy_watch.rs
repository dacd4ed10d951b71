//! The policy follows its file: a change on disk or SIGHUP is read, checked whole, and applied
//! between two decisions, or not at all.
//!
//! A file may be written in steps. It is read when it has stood still for a while, and refused where it is the
//! beginning of what it was, or drops what clients use or show: SIGHUP and `POST /admin/policy` say that it is whole.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use notify::{RecursiveMode, Watcher as _};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::shared_policy::{SharedPolicy, TRY_AGAIN};
use crate::conductor::{Inbox, PolicyChange, PolicyRefusal, Question};
use crate::config::Config;
use crate::policy::PolicyError;

/// A file that did not change for so long is whole.
const STILL: Duration = Duration::from_secs(2);
/// Between two looks at whether it changes.
const LOOK: Duration = Duration::from_millis(100);

/// The state of the file: the version that was last read, and the one in force.
struct FollowedFile {
    path: PathBuf,
    /// As it was when it was last looked into, whatever came of that.
    seen: Vec<u8>,
    /// As it was when it was last applied.
    applied: Option<(String, Config)>,
    /// Whether it was confirmed, where it is refused for what may pass, such as requests under way: it is tried again.
    waits: Option<bool>,
}

/// Watches until `stop` is cancelled. While the cluster has a policy of its own, the file's waits.
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
    let mut followed = FollowedFile::new(path);
    loop {
        let confirmed = tokio::select! {
            _ = hangup.recv() => true,
            Some(()) = changes.recv() => {
                tokio::select! {
                    confirmed = settled(&followed.path, &mut hangup) => confirmed,
                    () = stop.cancelled() => return,
                }
            }
            () = tokio::time::sleep(TRY_AGAIN), if followed.waits.is_some() => {
                // A change that is under way is read when it has settled.
                if bytes_of(&followed.path) != followed.seen {
                    continue;
                }
                false
            }
            () = stop.cancelled() => return,
        };
        let text = bytes_of(&followed.path);
        if confirmed || text != followed.seen {
            followed.waits = None;
        } else if followed.waits.is_none() {
            continue;
        }
        followed.seen = text;
        followed.reload(confirmed, &inbox, shared.as_ref().and_then(SharedPolicy::version)).await;
    }
}

/// Returns when the file has stood still for a while, or at once when an operator says that it is whole: true.
async fn settled(path: &Path, hangup: &mut Signal) -> bool {
    let (mut last, mut since) = (mark(path), Instant::now());
    while since.elapsed() < STILL {
        tokio::select! {
            _ = hangup.recv() => return true,
            () = tokio::time::sleep(LOOK) => {}
        }
        let now = mark(path);
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    false
}

/// The properties that change when a file is written.
fn mark(path: &Path) -> Option<(u64, Option<SystemTime>)> {
    let told = std::fs::metadata(path).ok()?;
    Some((told.len(), told.modified().ok()))
}

/// The bytes that distinguish one state of a file from another; empty where it cannot be read.
fn bytes_of(path: &Path) -> Vec<u8> {
    crate::config::bytes(path).unwrap_or_default()
}

impl FollowedFile {
    /// A file that was just applied, or that cannot be: then nothing of it is in force.
    fn new(path: PathBuf) -> Self {
        let (seen, applied) = (bytes_of(&path), crate::config::read(&path).ok());
        Self { path, seen, applied, waits: None }
    }

    /// Reads the file and puts it into force; `confirmed` by an operator, whatever it drops. Where the cluster has a policy,
    /// of that version, `[scheduler]` of the file waits.
    async fn reload(&mut self, confirmed: bool, inbox: &Inbox, shared: Option<u64>) {
        let (path, again) = (self.path.clone(), self.waits.take());
        let confirmed = again.unwrap_or(confirmed);
        // A large one takes a while: no decision waits for that.
        let read = tokio::task::spawn_blocking(move || crate::config::read(&path));
        let (text, config) = match read.await {
            Ok(Ok(read)) => read,
            Ok(Err(why)) => return refused(&why),
            Err(why) => return refused(&why),
        };
        if let Err(why) = self.fits(&text, &config, confirmed) {
            return refused(&why);
        }
        let mut new = config.clone();
        if let Some(version) = shared {
            let Some(now) = inbox.ask(Question::Config).await else { return };
            crate::policy::keep_what_is_fixed(&now, &mut new);
            if new.scheduler != now.scheduler {
                tracing::warn!(
                    version,
                    "policy file NOT applied: the cluster's policy is in force; baton config push makes it this one"
                );
            }
            new.scheduler = now.scheduler;
        }
        let change = Box::new(PolicyChange { config: new, basis: None, confirmed });
        let applied = inbox.ask(|reply| Question::Policy(change, reply)).await;
        match applied.map(|applied| applied.map(|outcome| outcome.changes)) {
            Some(Ok(changes)) if changes.is_empty() => tracing::info!("policy file read: nothing changed"),
            Some(Ok(changes)) => {
                tracing::info!(changes = changes.join("; "), "policy file read and applied");
                self.warn_of_undone(&config, &changes);
            }
            Some(Err(why)) => {
                let passes = matches!(why, PolicyRefusal::Wrong(PolicyError::Scheduler(_)));
                self.waits = passes.then_some(confirmed);
                if again.is_none() {
                    refused(&why);
                }
                return;
            }
            None => return,
        }
        self.applied = Some((text, config));
    }

    /// The file is the policy: what was set otherwise since it was last read is gone with the next change of it.
    fn warn_of_undone(&self, config: &Config, changes: &[String]) {
        let Some((_, before)) = &self.applied else { return };
        let of_file = crate::policy::changes(before, config);
        let is_of_file =
            |line: &&String| of_file.iter().any(|change| line.starts_with(&format!("{}: ", change.key)));
        let undone: Vec<&str> = changes.iter().filter(|line| !is_of_file(line)).map(String::as_str).collect();
        if !undone.is_empty() {
            tracing::warn!(
                undone = undone.join("; "),
                "the policy file replaced what was set otherwise (baton policy set, the page); write it into the file to keep it"
            );
        }
    }

    /// Whether the file may follow what it was.
    ///
    /// # Errors
    /// In words, with the remedy.
    fn fits(&self, text: &str, config: &Config, confirmed: bool) -> Result<(), PolicyError> {
        let Some((before, old)) = &self.applied else { return Ok(()) };
        let fixed = crate::policy::fixed_at_start(old, config);
        if !fixed.is_empty() {
            return Err(PolicyError::ReadAtStart(fixed.join(", ")));
        }
        let cut = text.trim_end();
        if !confirmed && cut.len() < before.trim_end().len() && before.starts_with(cut) {
            return Err(PolicyError::EndsEarly);
        }
        Ok(())
    }
}

fn refused(why: &dyn std::fmt::Display) {
    tracing::error!(%why, "policy file NOT applied; the policy in force goes on");
}
