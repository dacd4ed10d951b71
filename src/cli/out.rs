//! Writing to the terminal and to files.

use std::io::{ErrorKind, Write as _};
use std::path::Path;

/// Prints to standard output. A reader that left early is no error: the rest is not wanted.
pub fn say(text: &str) -> Result<(), String> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(format!("output: {error}; check where standard output goes"))
        }
        _ => Ok(()),
    }
}

/// Writes over the terminal's line on standard error.
pub fn redraw(text: &str) {
    let _ = write!(std::io::stderr(), "\r{text}");
}

/// Whether a file can be made at a path, as far as its folder tells: asked before long work, not after it.
///
/// # Errors
/// The path, when there is no such folder.
pub fn has_folder(path: &Path) -> Result<(), String> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if folder.is_none_or(Path::is_dir) {
        return Ok(());
    }
    Err(format!("output {}: its folder is not there; make it or give another path", path.display()))
}

/// Writes a whole file, by a temporary one beside it, so that nobody reads half of it.
pub fn save(path: &Path, text: &str) -> Result<(), String> {
    let failed = |error: std::io::Error| {
        format!("output {}: {error}; give a path in a folder that exists and can be written", path.display())
    };
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".partial");
    let partial = path.with_file_name(name);
    std::fs::write(&partial, text).and_then(|()| std::fs::rename(&partial, path)).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_is_not_there_is_named_before_the_work() {
        let place = tempfile::tempdir().expect("a temporary folder");
        assert_eq!((has_folder(Path::new("x.json")), has_folder(&place.path().join("x"))), (Ok(()), Ok(())));
        let error = has_folder(&place.path().join("none/x.json")).expect_err("no such folder");
        assert!(error.contains("none/x.json") && error.contains("make it"), "{error}");
    }

    #[test]
    fn a_file_is_written_whole_or_the_path_is_named() {
        let place = tempfile::tempdir().expect("a temporary folder");
        let path = place.path().join("x.json");
        assert_eq!(save(&path, "{}"), Ok(()));
        assert_eq!(std::fs::read_to_string(&path).expect("written"), "{}");
        let error = save(&place.path().join("none/x.json"), "").expect_err("no such folder");
        assert!(error.contains("none/x.json") && error.contains("folder"), "{error}");
    }
}
