//! Why requests cannot be captured.

use std::io;
use std::path::{Path, PathBuf};

use baton_traces::TraceError;

/// The fault of a capture, with its file or folder.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The folder cannot be made.
    #[error("capture: folder {}: {error}; give one that can be written", .folder.display())]
    Unmade {
        /// The folder.
        folder: PathBuf,
        /// The system's words.
        error: io::Error,
    },
    /// The folder cannot be listed.
    #[error("folder {}: {error}", .folder.display())]
    Unlisted {
        /// The folder.
        folder: PathBuf,
        /// The system's words.
        error: io::Error,
    },
    /// There is no thread to write on.
    #[error("capture: no thread to write on: {0}")]
    Thread(io::Error),
    /// A row has another number of keys than its prompt has full blocks.
    #[error("its prompt has no tokens, or not as many full blocks as keys")]
    Row,
    /// A file cannot be made, written or removed.
    #[error("{}: {error}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's words.
        error: io::Error,
    },
    /// A file has a name that no capture has.
    #[error("its name is not a capture's")]
    Name,
    /// A file cannot be read, or put in order.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The half-done file, which the reader of the error names, cannot be cut or removed.
    #[error("{0}")]
    Cut(io::Error),
}

impl CaptureError {
    pub(super) fn of_file(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |error| Self::File { path, error }
    }
}
