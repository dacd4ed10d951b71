//! Structured logs on standard error; JSON when it is not a terminal. No prompt text, ever.

use std::fmt::Arguments;
use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

/// Writes a line to standard error. It goes on where the reader has closed the pipe, while `eprintln!` would panic.
macro_rules! note {
    ($($words:tt)*) => { $crate::log::line_of(&mut std::io::stderr().lock(), format_args!($($words)*)) };
}

/// Writes a line to standard output, in the same way.
macro_rules! announce {
    ($($words:tt)*) => { $crate::log::line_of(&mut std::io::stdout().lock(), format_args!($($words)*)) };
}

/// See [`note`].
pub(crate) fn line_of(out: &mut dyn std::io::Write, words: Arguments<'_>) {
    // One write a line, so that processes of one terminal do not mix theirs.
    let _ = out.write_all(format!("{words}\n").as_bytes());
}

/// Why nothing is logged.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The filter cannot be read.
    #[error("log filter '{filter}': {why}; try info")]
    Filter {
        /// The filter.
        filter: String,
        /// What is wrong with it.
        why: String,
    },
    /// This process logs already.
    #[error("log: {0}")]
    Started(String),
}

/// Starts logging with a filter such as `info` or `baton=debug,h2=warn`.
///
/// # Errors
/// Names what is wrong with the filter.
pub fn start(filter: &str) -> Result<(), LogError> {
    let filter = EnvFilter::try_new(filter)
        .map_err(|why| LogError::Filter { filter: filter.to_owned(), why: why.to_string() })?;
    let plain = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // By default the subscriber reports a failed write with `eprintln!`, which panics in turn.
    let plain = plain.log_internal_errors(false);
    let started = if std::io::stderr().is_terminal() {
        plain.with_target(false).try_init()
    } else {
        plain.json().try_init()
    };
    started.map_err(|e| LogError::Started(e.to_string()))
}
