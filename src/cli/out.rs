//! Writing to the terminal and to files.

use std::io::{ErrorKind, Write as _};
use std::path::Path;

use anyhow::{Result, anyhow, bail};

/// Prints to standard output. A reader that left early is no error: the rest is not wanted.
pub fn print(text: &str) -> Result<()> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            bail!("output: {error}; check where standard output goes")
        }
        _ => Ok(()),
    }
}

/// Writes over the terminal's line on standard error.
pub fn redraw(text: &str) {
    let _ = write!(std::io::stderr(), "\r{text}");
}

/// Checks that a path's folder exists, so that a long run does not fail at the end when it writes its file.
///
/// # Errors
/// The path, when there is no such folder.
pub fn has_folder(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if folder.is_none_or(Path::is_dir) {
        return Ok(());
    }
    bail!("output {}: its folder is not there; make it or give another path", path.display())
}

/// Writes a whole text to `path`; `-` is standard output. A regular file is replaced in one step, so nobody reads half
/// of it, and a link stays: the file behind it is replaced. A pipe or device is written to and stays what it is.
pub fn save(path: &Path, text: &str) -> Result<()> {
    if path == Path::new("-") {
        return print(text);
    }
    write_whole(path, text).map_err(|error| {
        let remedy = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                "free some space or give a path on another disk"
            }
            _ => "give a path in a folder that exists and can be written",
        };
        anyhow!("output {}: {error}; {remedy}", path.display())
    })
}

fn write_whole(path: &Path, text: &str) -> std::io::Result<()> {
    match std::fs::metadata(path) {
        Ok(there) if there.is_file() => replace(&std::fs::canonicalize(path)?, text),
        Ok(there) if there.is_dir() => Err(ErrorKind::IsADirectory.into()),
        // A rename would put a file in the place of the device, for every other program of the machine.
        Ok(_) => std::fs::OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes()),
        // A link to nothing yet: the file is made where it points.
        Err(_) if path.is_symlink() => std::fs::write(path, text),
        Err(_) => replace(path, text),
    }
}

/// Writes a temporary file beside `path` and renames it; leaves none behind when that fails.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".partial");
    let partial = path.with_file_name(name);
    let done = std::fs::write(&partial, text).and_then(|()| std::fs::rename(&partial, path));
    if done.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_is_not_there_is_named_before_the_work() {
        let place = tempfile::tempdir().expect("a temporary folder");
        assert!(has_folder(Path::new("x.json")).is_ok() && has_folder(&place.path().join("x")).is_ok());
        let error = has_folder(&place.path().join("none/x.json")).expect_err("no such folder").to_string();
        assert!(error.contains("none/x.json") && error.contains("make it"), "{error}");
    }

    #[test]
    fn a_file_is_written_whole_or_the_path_is_named() {
        let place = tempfile::tempdir().expect("a temporary folder");
        let path = place.path().join("x.json");
        save(&path, "{}").expect("it can be written");
        assert_eq!(std::fs::read_to_string(&path).expect("written"), "{}");
        let error = save(&place.path().join("none/x.json"), "").expect_err("no such folder").to_string();
        assert!(error.contains("none/x.json") && error.contains("folder"), "{error}");
    }

    #[test]
    fn links_stay_and_the_file_behind_is_written() {
        let place = tempfile::tempdir().expect("a temporary folder");
        let (file, link) = (place.path().join("x.json"), place.path().join("link"));
        std::os::unix::fs::symlink("x.json", &link).expect("a link");
        for text in ["the first makes the file", "the second replaces it"] {
            save(&link, text).expect("it can be written");
            assert!(link.is_symlink(), "{text}");
            assert_eq!(std::fs::read_to_string(&file).expect("written"), text);
        }
    }

    #[test]
    fn pipes_and_devices_are_written_to_and_not_replaced() {
        use std::os::unix::fs::FileTypeExt as _;
        let kind = |path: &Path| std::fs::symlink_metadata(path).expect("it is there").file_type();
        let place = tempfile::tempdir().expect("a temporary folder");
        let pipe = place.path().join("pipe");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).expect("a pipe");
        let from = pipe.clone();
        let reader = std::thread::spawn(move || std::fs::read_to_string(from).expect("a text"));
        save(&pipe, "through the pipe").expect("it can be written");
        assert_eq!(reader.join().expect("read"), "through the pipe");
        assert!(kind(&pipe).is_fifo());
        // Through a link to a device, so that a program that replaces its target harms no machine.
        let link = place.path().join("full");
        std::os::unix::fs::symlink("/dev/full", &link).expect("a link");
        let error = save(&link, "text").expect_err("the device is full").to_string();
        assert!(error.contains("free some space") && link.is_symlink(), "{error}");
        assert!(kind(Path::new("/dev/full")).is_char_device());
    }

    #[test]
    fn a_failure_leaves_no_partial_file() {
        let place = tempfile::tempdir().expect("a temporary folder");
        let folder = place.path().join("x.json.partial");
        std::fs::create_dir(&folder).expect("a folder in the way");
        save(&place.path().join("x.json"), "text").expect_err("the name is taken");
        std::fs::remove_dir(&folder).expect("still a folder");
        let error = save(place.path(), "text").expect_err("a folder is no file").to_string();
        assert!(error.contains("folder"), "{error}");
        assert_eq!(std::fs::read_dir(place.path()).expect("a folder").count(), 0);
    }
}
