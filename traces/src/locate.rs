//! Finding the published traces on this machine.

use std::path::{Path, PathBuf};

/// Where the published trace `name` (say `conversation_trace.jsonl`) lies: in the directory that
/// `BATON_TRACES` names, else in `../shared/traces` or `shared/traces` seen from the current
/// directory or any directory above it. `None` where it is nowhere.
#[must_use]
pub fn locate(name: &str) -> Option<PathBuf> {
    if let Some(directory) = std::env::var_os("BATON_TRACES") {
        return existing(Path::new(&directory).join(name));
    }
    let current = std::env::current_dir().ok()?;
    current.ancestors().find_map(|directory| {
        existing(directory.join("../shared/traces").join(name))
            .or_else(|| existing(directory.join("shared/traces").join(name)))
    })
}

fn existing(path: PathBuf) -> Option<PathBuf> {
    path.is_file().then_some(path)
}
